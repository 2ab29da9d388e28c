"""Gauges of the current state, read from the database and from the gateways' last samples when they are asked for.

Costs five statements, whatever the number of rows; seven if the loads of devices are exported.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version

import msgspec
from django.conf import settings
from django.db import Error, connection, transaction
from django.db.models import Count, Q
from prometheus_client.core import GaugeMetricFamily, Metric

from accelerators.models import Device, Host
from accelerators.runtime import jobs
from agents import liveness, telemetry
from cyborgweb.monitoring import backlog

log = logging.getLogger(__name__)

PATIENCE_MS = 3000
"""Timeout of one statement, in milliseconds."""
MOST_SERIES = 50_000
"""Time series of devices that are exported at most."""
OLD_S = 180.0
"""Seconds after which a host's sample is no longer exported: a host sends one a minute."""
MOST_OF_HOST = 1_000
"""Time series of one host at most, so that it does not take the place of others."""
NAME = re.compile(
    r"utilization_percent|memory_(?:used|total)_bytes|temperature_celsius(?:_[1-9]\d?)?|power_watts|energy_joules_total"
    r"|busy_seconds_total|errors_(?:correctable|nonfatal|fatal)_total",
    re.ASCII,
)
"""Metric names that our drivers use (`drivers.inventory.Sample`, `drivers.pci.pci_health`). Names that a host makes up
are not exported.
"""

COUNTED = """
SELECT json_build_object(
  'requests', (SELECT json_object_agg(state, n) FROM
    (SELECT state, count(*) AS n FROM accelerators_acceleratorrequest GROUP BY state) x),
  'commands', (SELECT json_object_agg(state, n) FROM
    (SELECT state, count(*) AS n FROM accelerators_command WHERE ended_at IS NULL GROUP BY state) x),
  'attachments', (SELECT json_object_agg(state, n) FROM
    (SELECT state, count(*) AS n FROM accelerators_attachment WHERE ended_at IS NULL GROUP BY state) x),
  'discrepancies', (SELECT json_object_agg(kind, n) FROM
    (SELECT kind, count(*) AS n FROM placement_sync_discrepancy GROUP BY kind) x),
  'drivers', (SELECT json_object_agg(state, n) FROM
    (SELECT state, count(*) AS n FROM accelerators_hostdriver GROUP BY state) x),
  'rollouts', (SELECT count(*) FROM accelerators_rollout WHERE ended_at IS NULL))::text
"""
NAMED = """
SELECT d.host_id, d.key, d.uuid::text, d.type, h.name FROM accelerators_device d
JOIN accelerators_host h ON h.id = d.host_id WHERE d.host_id = ANY(%s)
"""


class _Counted(msgspec.Struct):
    """The answer of SELECT_COUNTS; null where there are no rows."""

    rollouts: int
    requests: dict[str, int] | None
    commands: dict[str, int] | None
    attachments: dict[str, int] | None
    discrepancies: dict[str, int] | None
    drivers: dict[str, int] | None


@dataclass
class Families:
    """A list of gauges that is being built."""

    made: list[Metric] = field(default_factory=list)

    def add(self, name: str, text: str, value: float) -> None:
        """Add a gauge with one value."""
        self.made.append(GaugeMetricFamily(name, text, value=value))

    def by(self, name: str, text: str, labels: Iterable[str], values: Iterable[tuple[Iterable[str], float]]) -> None:
        """Add a gauge with one value for each combination of label values."""
        family = GaugeMetricFamily(name, text, labels=list(labels))
        for said, value in values:
            family.add_metric(list(said), value)
        self.made.append(family)


def collect() -> Iterator[Metric]:
    """Yield all gauges. If the database fails, yield only the build information and `cyborg_database_up` 0."""
    into = Families()
    into.by("cyborg_build_info", "Always 1; its label is the release.", ["release"], [([version("cyborgweb")], 1)])
    try:
        # Before the transaction, because it may wait for other gateways.
        loads = telemetry.last() if settings.KEYS.metrics_devices else None
        with transaction.atomic():
            with connection.cursor() as cursor:
                cursor.execute("SELECT set_config('statement_timeout', %s, true)", [str(PATIENCE_MS)])
            found = Families()
            _fleet(found)
            _work(found)
            if loads is not None:
                _loads(loads, found)
    except Error as error:
        log.warning("The database failed, so most metrics are missing: %s", type(error).__name__)
        into.add("cyborg_database_up", "1 when the database answered all that was asked, else 0.", 0)
    else:
        into.made += found.made
        into.add("cyborg_database_up", "1 when the database answered all that was asked, else 0.", 1)
    yield from into.made


def _fleet(into: Families) -> None:
    """Add the gauges of hosts, agents and devices."""
    enrolled = Q(agent__isnull=False)
    barred = [word for word in liveness.WORDS if word not in liveness.LIVENESS]
    counts = {word: Count("pk", filter=enrolled & Q(agent__barred=word)) for word in barred}
    for word in liveness.LIVENESS:
        counts[word] = Count("pk", filter=enrolled & Q(agent__barred="") & liveness.where(word, "lease__seen_at"))
    hosts = Host.objects.aggregate(all=Count("pk"), stale=Count("pk", filter=Q(stale_since__isnull=False)), **counts)
    live = hosts["all"] - hosts["stale"]
    into.by("cyborg_hosts", "Hosts.", ["state"], [(["live"], live), (["stale"], hosts["stale"])])
    into.by("cyborg_agents", "Agents by their liveness.", ["state"], [([word], hosts[word]) for word in liveness.WORDS])
    counted = Device.objects.order_by().values_list("state", "type", "status").annotate(n=Count("*"))
    into.by(
        "cyborg_devices",
        "Devices by state, type and the health that the hardware reports.",
        ["state", "type", "health"],
        [((state, kind, health), number) for state, kind, health, number in counted],
    )


def _work(into: Families) -> None:
    """Add the gauges of unfinished work: queues, intents, binds, commands, attachments, rollouts and discrepancies."""
    now, doing = datetime.now(UTC), backlog.now()
    with connection.cursor() as cursor:
        cursor.execute(COUNTED)
        open_ = msgspec.json.decode(cursor.fetchone()[0], type=_Counted)

    def age(moment: datetime | None) -> float:
        return max(0.0, (now - moment).total_seconds()) if moment else 0.0

    into.add("cyborg_spool_reports", "Reports that are acknowledged but not merged yet.", doing.spool)
    into.add(
        "cyborg_spool_oldest_seconds",
        "How long the oldest unmerged report has waited; 0: there is none.",
        age(doing.spool_oldest),
    )
    into.add("cyborg_tasks_queued", "Tasks that wait for a worker of the clusters.", doing.tasks)
    into.add(
        "cyborg_wakeup_oldest_seconds",
        "How long the oldest wake-up of a job has waited; 0: there is none.",
        age(doing.tick_oldest),
    )
    intents = [(kind, one) for kind, one in sorted(doing.intents.items()) if jobs.has_taker(kind)]
    for name, text, value in (
        (
            "cyborg_intents",
            "Intents: work that is still to be done outside the database, by kind.",
            lambda one: one.number,
        ),
        ("cyborg_intents_stuck", "Intents that have failed ten times or more, by kind.", lambda one: one.stuck),
        (
            "cyborg_intents_oldest_seconds",
            "How long the oldest intent of a kind has waited.",
            lambda one: age(one.oldest),
        ),
    ):
        into.by(name, text, ["kind"], [([kind], value(one)) for kind, one in intents])
    into.add("cyborg_binds_overdue", "Binds that are past their deadline.", doing.overdue)
    into.add("cyborg_devices_draining", "Devices that drain.", doing.draining)
    into.add("cyborg_devices_missing_held", "Devices that are missing while somebody holds them.", doing.missing_held)
    into.add("cyborg_bulks_open", "Bulk actions under way.", doing.bulks)
    into.add("cyborg_rollouts_open", "Rollouts of drivers under way.", open_.rollouts)
    for name, text, label, counts in (
        ("cyborg_requests", "Accelerator requests by state.", "state", open_.requests),
        ("cyborg_commands_open", "Commands that have not ended, by state.", "state", open_.commands),
        ("cyborg_attachments_open", "Attachments that have not ended, by state.", "state", open_.attachments),
        (
            "cyborg_discrepancies",
            "Discrepancies with Placement, Nova or the hardware, by kind.",
            "kind",
            open_.discrepancies,
        ),
        ("cyborg_host_drivers", "Drivers on hosts, by state.", "state", open_.drivers),
    ):
        into.by(name, text, [label], [([word], number) for word, number in (counts or {}).items()])


def _loads(loads: telemetry.Loads, into: Families) -> None:
    """Add the loads of devices from their hosts' last samples, which are not stored. Values that are too many, unknown
    by name or of an unknown device are counted and left out.
    """
    since = time.time() - OLD_S
    fresh = {host: said.devices for host, said in sorted(loads.hosts.items()) if said.at >= since}
    with connection.cursor() as cursor:
        cursor.execute(NAMED, [list(fresh)])
        names = {(host, key): (name, uuid, kind) for host, key, uuid, kind, name in cursor.fetchall()}
    series, left_out = [], 0
    for host, devices in fresh.items():
        most = min(MOST_SERIES, len(series) + MOST_OF_HOST)
        for key, said in devices.items():
            known = names.get((host, key))
            for metric, value in said.items():
                if known is None or len(series) >= most or not NAME.fullmatch(metric):
                    left_out += 1
                else:
                    series.append(((*known, metric), value))
    labels = ["host", "device", "type", "metric"]
    into.by(
        "cyborg_device_load", "Load of a device; the label `metric` names the quantity with its unit.", labels, series
    )
    into.add(
        "cyborg_device_load_left_out",
        "Values that are not exported: too many, of an unknown device, or with an unknown name.",
        left_out,
    )
    into.add(
        "cyborg_gateways_silent", "Gateways that did not answer when they were asked for loads.", len(loads.silent)
    )
