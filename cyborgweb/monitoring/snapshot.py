"""Gauges of the current state, read from the database and from the gateways' last samples when they are asked for.

Costs five statements, whatever the number of rows; seven if the loads of devices are exported.
"""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from importlib.metadata import version
from typing import Any

from django.conf import settings
from django.db import Error, connection, transaction
from django.db.models import Count, Q, QuerySet, Value
from prometheus_client.core import GaugeMetricFamily, Metric

from accelerators.domain.states import AgentState, RolloutState
from accelerators.models import AcceleratorRequest, Attachment, Command, Device, Host, HostDriver, Rollout
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.models.drivers import ROLLOUT_IS_OPEN
from accelerators.runtime import database_clock, jobs
from agents import liveness, telemetry
from cyborgweb.monitoring import backlog
from placement_sync.models import Discrepancy

log = logging.getLogger(__name__)

STATEMENT_TIMEOUT_MS = 3000
"""Timeout of one statement, in milliseconds."""
MAX_SERIES = 50_000
"""The largest number of time series of devices that are exported."""
MAX_SAMPLE_AGE_S = 180.0
"""Seconds after which a host's sample is no longer exported: a host sends one a minute."""
MAX_SERIES_PER_HOST = 1_000
"""The largest number of time series of one host, so that it does not take the place of others."""
METRIC_NAME = re.compile(
    r"utilization_percent|memory_(?:used|total)_bytes|temperature_celsius(?:_[1-9]\d?)?|power_watts|energy_joules_total"
    r"|busy_seconds_total|errors_(?:correctable|nonfatal|fatal)_total",
    re.ASCII,
)
"""Metric names that our drivers use (`drivers.inventory.Sample`, `drivers.pci.pci_health`). Names that a host makes up
are not exported.
"""


@dataclass
class GaugeList:
    """A list of gauges that is being built."""

    gauges: list[Metric] = field(default_factory=list)

    def add_gauge(self, name: str, text: str, value: float) -> None:
        """Add a gauge with one value. `text` is its help text."""
        self.gauges.append(GaugeMetricFamily(name, text, value=value))

    def add_labelled_gauge(
        self, name: str, text: str, labels: Iterable[str], values: Iterable[tuple[Iterable[str], float]]
    ) -> None:
        """Add a gauge with the label names `labels`. `values` are pairs: the values of these labels, and the gauge's
        value.

        `text` is the gauge's help text.
        """
        family = GaugeMetricFamily(name, text, labels=list(labels))
        for label_values, value in values:
            family.add_metric(list(label_values), value)
        self.gauges.append(family)


def collect_gauges() -> Iterator[Metric]:
    """Yield all gauges. If the database fails, log it and yield only `cyborg_build_info` and
    `cyborg_database_up` (0).
    """
    gauges = GaugeList()
    gauges.add_labelled_gauge(
        "cyborg_build_info",
        "Always 1; the label `release` is the installed release.",
        ["release"],
        [([version("cyborgweb")], 1)],
    )
    try:
        # Before the transaction, because it may wait for other gateways.
        loads = telemetry.get_last_loads() if settings.KEYS.metrics_devices else None
        with transaction.atomic():
            with connection.cursor() as cursor:  # the ORM cannot set a timeout
                cursor.execute("SELECT set_config('statement_timeout', %s, true)", [str(STATEMENT_TIMEOUT_MS)])
            database_gauges = GaugeList()
            _add_fleet(database_gauges)
            _add_work(database_gauges)
            if loads is not None:
                _add_loads(loads, database_gauges)
    except Error as error:
        log.warning("The database failed, so most metrics are missing: %s", type(error).__name__)
        gauges.add_gauge("cyborg_database_up", "1 when the database answered all that was asked, else 0.", 0)
    else:
        gauges.gauges += database_gauges.gauges
        gauges.add_gauge("cyborg_database_up", "1 when the database answered all that was asked, else 0.", 1)
    yield from gauges.gauges


def _add_fleet(gauges: GaugeList) -> None:
    """Add the gauges of hosts, agents and devices. Two statements."""
    enrolled = Q(agent__isnull=False)
    barred = [word for word in AgentState if word not in liveness.LIVENESS_STATES]
    counts = {word: Count("pk", filter=enrolled & Q(agent__barred=word)) for word in barred}
    for word in liveness.LIVENESS_STATES:
        counts[word] = Count(
            "pk", filter=enrolled & Q(agent__barred="") & liveness.build_liveness_condition(word, "lease__seen_at")
        )
    hosts = Host.objects.aggregate(all=Count("pk"), stale=Count("pk", filter=Q(stale_since__isnull=False)), **counts)
    live = hosts["all"] - hosts["stale"]
    gauges.add_labelled_gauge("cyborg_hosts", "Hosts.", ["state"], [(["live"], live), (["stale"], hosts["stale"])])
    gauges.add_labelled_gauge(
        "cyborg_agents",
        "Agents by their liveness.",
        ["state"],
        [([word], hosts[word]) for word in AgentState],
    )
    counted = Device.objects.order_by().values_list("state", "type", "status").annotate(n=Count("*"))
    gauges.add_labelled_gauge(
        "cyborg_devices",
        "Devices by state, type and the health that the hardware reports.",
        ["state", "type", "health"],
        [((state, kind, health), number) for state, kind, health, number in counted],
    )


def _add_work(gauges: GaugeList) -> None:
    """Add the gauges of unfinished work: queues, intents, binds, commands, attachments, rollouts and discrepancies.

    Two statements. Intents are added only for kinds that have a handler in this process.
    """
    now, work = database_clock.now(), backlog.read_backlog()

    def age(moment: datetime | None) -> float:
        """Return the seconds since `moment`, 0 for None."""
        return max(0.0, (now - moment).total_seconds()) if moment else 0.0

    gauges.add_gauge("cyborg_spool_reports", "Reports that are acknowledged but not merged yet.", work.spool)
    gauges.add_gauge(
        "cyborg_spool_oldest_seconds",
        "How long the oldest unmerged report has waited; 0: there is none.",
        age(work.spool_oldest),
    )
    gauges.add_gauge(
        "cyborg_events_unsealed_seconds",
        "How long the oldest event that is not sealed yet has waited; 0: there is none.",
        age(work.unsealed_oldest),
    )
    audit = work.audit or backlog.AuditState()
    gauges.add_gauge(
        "cyborg_events_sealing_refused",
        "1 if the job that seals events refuses to seal: the log and the overview say why.",
        int(bool(audit.refusal)),
    )
    gauges.add_gauge(
        "cyborg_events_verified_seconds",
        "How long ago the newest seal was verified; 0: the verification has not begun.",
        age(audit.verified_at),
    )
    gauges.add_gauge(
        "cyborg_events_findings",
        "Differences between events and their seals, by the last verification.",
        audit.findings,
    )
    gauges.add_gauge("cyborg_tasks_queued", "Tasks that wait for a worker of the clusters.", work.tasks)
    gauges.add_gauge(
        "cyborg_wakeup_oldest_seconds",
        "How long the oldest wake-up of a job has waited; 0: there is none.",
        age(work.tick_oldest),
    )
    intents = [(kind, one) for kind, one in sorted(work.intents.items()) if jobs.has_handler(kind)]
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
        gauges.add_labelled_gauge(name, text, ["kind"], [([kind], value(one)) for kind, one in intents])
    gauges.add_gauge("cyborg_binds_overdue", "Binds that are past their deadline.", work.overdue)
    gauges.add_gauge("cyborg_devices_draining", "Devices that drain.", work.draining)
    gauges.add_gauge(
        "cyborg_devices_missing_held", "Devices that are missing while somebody holds them.", work.missing_held
    )
    gauges.add_gauge(
        "cyborg_handles_released",
        "Released handles that wait until their hosts confirm that no guest uses them.",
        work.released,
    )
    gauges.add_gauge(
        "cyborg_handles_unconfirmed",
        "Released handles that were not confirmed in time: their devices were quarantined.",
        work.unconfirmed,
    )
    gauges.add_gauge(
        "cyborg_nova_unknown_instances",
        "Instances that hold requests and that a Nova which is not trusted answered 404 for, so far.",
        work.unknown_to_nova,
    )
    gauges.add_gauge("cyborg_bulks_open", "Bulk actions under way.", work.bulks)
    _add_counts_by_state(gauges)


def _add_counts_by_state(gauges: GaugeList) -> None:
    """Add the gauges that count rows by state or kind. Costs one statement."""
    tables: tuple[tuple[str, str, str, QuerySet[Any]], ...] = (
        ("cyborg_requests", "Accelerator requests by state.", "state", AcceleratorRequest.objects.all()),
        (
            "cyborg_commands_open",
            "Commands that have not ended, by state.",
            "state",
            Command.objects.filter(COMMAND_IS_OPEN),
        ),
        (
            "cyborg_attachments_open",
            "Attachments that have not ended, by state.",
            "state",
            Attachment.objects.filter(ended_at=None),
        ),
        (
            "cyborg_discrepancies",
            "Discrepancies with Placement, Nova or the hardware, by kind.",
            "kind",
            Discrepancy.objects.all(),
        ),
        ("cyborg_host_drivers", "Drivers on hosts, by state.", "state", HostDriver.objects.all()),
    )
    open_rollouts = Rollout.objects.filter(ROLLOUT_IS_OPEN).exclude(state=RolloutState.DRAFT)
    counted = [(name, label, rows) for name, _, label, rows in tables] + [("rollouts", "state", open_rollouts)]
    first, *others = (
        rows.order_by().values_list(Value(name), label).annotate(number=Count("*")) for name, label, rows in counted
    )
    counts = defaultdict[str, list[tuple[list[str], int]]](list)
    for name, word, number in first.union(*others, all=True):
        counts[name].append(([word], number))
    gauges.add_gauge("cyborg_rollouts_open", "Rollouts of drivers under way.", sum(n for _, n in counts["rollouts"]))
    for name, text, label, _ in tables:
        gauges.add_labelled_gauge(name, text, [label], counts[name])


def _add_loads(loads: telemetry.LoadSnapshot, gauges: GaugeList) -> None:
    """Add the loads of devices from their hosts' last samples, and the number of silent gateways. Costs one statement.

    Samples older than MAX_SAMPLE_AGE_S are ignored. A value is left out, and only counted, if a limit on the number of
    series is reached, if METRIC_NAME does not allow its name, or if its device is unknown.
    """
    since = database_clock.timestamp() - MAX_SAMPLE_AGE_S
    fresh_loads = {host: said.devices for host, said in sorted(loads.hosts.items()) if said.at >= since}
    known_devices = Device.objects.filter(host__in=fresh_loads).order_by()
    names = {
        (host, key): (name, str(uuid), kind)
        for host, key, uuid, kind, name in known_devices.values_list("host", "key", "uuid", "type", "host__name")
    }
    series: list[tuple[tuple[str, ...], float]] = []
    left_out = 0
    for host, devices in fresh_loads.items():
        series_limit = min(MAX_SERIES, len(series) + MAX_SERIES_PER_HOST)
        for key, values in devices.items():
            device_labels = names.get((host, key))
            for metric, value in values.items():
                if device_labels is None or len(series) >= series_limit or not METRIC_NAME.fullmatch(metric):
                    left_out += 1
                else:
                    series.append(((*device_labels, metric), value))
    labels = ["host", "device", "type", "metric"]
    gauges.add_labelled_gauge(
        "cyborg_device_load", "Load of a device; the label `metric` names the quantity with its unit.", labels, series
    )
    gauges.add_gauge(
        "cyborg_device_load_left_out",
        "Values that are not exported: too many, of an unknown device, or with an unknown name.",
        left_out,
    )
    gauges.add_gauge(
        "cyborg_gateways_silent", "Gateways that did not answer when they were asked for loads.", len(loads.silent)
    )
