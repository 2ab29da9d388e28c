"""Gauges of the current state, read from the database and from the gateways' last samples when they are asked for.

Costs six statements, whatever the number of rows; eight if the loads of devices are exported.
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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from accelerators.domain.states import AgentState, RolloutState
from accelerators.models import AcceleratorRequest, Attachment, Command, Device, Host, HostDriver, Rollout
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.models.drivers import ROLLOUT_IS_OPEN
from accelerators.requests.capacity import CapacityQuery, query_groups
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


@dataclass(frozen=True)
class DeviceMetric:
    """A metric of devices: its kind, its help text, the name of its own label ('' if it has none), and the factor from
    the unit of samples to the metric's unit.
    """

    family: type[GaugeMetricFamily | CounterMetricFamily]
    text: str
    label: str = ""
    factor: float = 1.0


DEVICE_METRICS = {
    "cyborg_device_utilization_ratio": DeviceMetric(GaugeMetricFamily, "Utilization of a device, 0 to 1.", factor=0.01),
    "cyborg_device_memory_used_bytes": DeviceMetric(GaugeMetricFamily, "Used memory of a device."),
    "cyborg_device_memory_size_bytes": DeviceMetric(GaugeMetricFamily, "Memory of a device."),
    "cyborg_device_temperature_celsius": DeviceMetric(GaugeMetricFamily, "Temperature of a device.", "sensor"),
    "cyborg_device_power_watts": DeviceMetric(GaugeMetricFamily, "Power that a device draws."),
    "cyborg_device_energy_joules_total": DeviceMetric(CounterMetricFamily, "Energy that a device has used."),
    "cyborg_device_busy_seconds_total": DeviceMetric(CounterMetricFamily, "How long a device has been busy."),
    "cyborg_device_errors_total": DeviceMetric(CounterMetricFamily, "Errors that a device has reported.", "severity"),
}
METRIC_BY_SAMPLE = (
    (re.compile(r"utilization_percent()"), "cyborg_device_utilization_ratio"),
    (re.compile(r"memory_used_bytes()"), "cyborg_device_memory_used_bytes"),
    (re.compile(r"memory_total_bytes()"), "cyborg_device_memory_size_bytes"),
    (re.compile(r"temperature_celsius(?:_([1-9]\d?))?", re.ASCII), "cyborg_device_temperature_celsius"),
    (re.compile(r"power_watts()"), "cyborg_device_power_watts"),
    (re.compile(r"energy_joules_total()"), "cyborg_device_energy_joules_total"),
    (re.compile(r"busy_seconds_total()"), "cyborg_device_busy_seconds_total"),
    (re.compile(r"errors_(correctable|nonfatal|fatal)_total"), "cyborg_device_errors_total"),
)
"""The names of samples that our drivers use (`drivers.inventory.Sample`, `drivers.pci.pci_health`), and the metric of
each; the group is the value of the metric's own label. Names that a host makes up are not exported.
"""
UNITS_QUERIES = {
    "class": CapacityQuery(["resource_class", "type"], order="largest", limit=500),
    "host": CapacityQuery(["host", "resource_class"], order="largest", limit=5_000),
    "project": CapacityQuery(["project", "resource_class"], order="largest", limit=2_000),
}
"""The values of CYBORG_METRICS_UNITS, and the query for each: its limit bounds the number of time series, of which a
group has three, or one if it is a project's.
"""


DEVICE_LABELS = ("host", "device", "type")


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
            _add_units(database_gauges)
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


def _add_units(gauges: GaugeList) -> None:
    """Add the numbers of units for the groupings of CYBORG_METRICS_UNITS. Costs one statement, or none without any.

    `cyborg_units_truncated` tells for which groupings there are more groups than are exported.
    """
    chosen = [name for name in UNITS_QUERIES if name in settings.KEYS.metrics_units]
    found = dict(zip(chosen, query_groups([UNITS_QUERIES[name] for name in chosen]), strict=True)) if chosen else {}
    for name, metric, labels in (
        ("class", "cyborg_units", ("resource_class", "type")),
        ("host", "cyborg_host_units", ("host", "resource_class")),
    ):
        values = [
            ((*group.names, state), number or 0)
            for group in found.get(name, ())
            for state, number in (("held", group.held), ("free", group.free), ("reserved", group.reserved))
        ]
        text = f"Units by {labels[0].replace('_', ' ')} and {labels[1].replace('_', ' ')}: held, free or reserved."
        gauges.add_labelled_gauge(metric, text, [*labels, "state"], values)
    gauges.add_labelled_gauge(
        "cyborg_project_units_held",
        "Units that a project holds, by resource class.",
        ["project", "resource_class"],
        [(group.names, group.held) for group in found.get("project", ())],
    )
    gauges.add_labelled_gauge(
        "cyborg_units_truncated",
        "1 if a grouping of units has more groups than are exported, else 0.",
        ["by"],
        [([name], int(len(groups) == UNITS_QUERIES[name].limit)) for name, groups in found.items()],
    )


def _find_device_metric(sample: str) -> tuple[str, str] | None:
    """Return the metric for a sample of this name, and the value of the metric's own label; None without a metric."""
    for pattern, name in METRIC_BY_SAMPLE:
        if found := pattern.fullmatch(sample):
            return name, found[1] or "0"
    return None


def _add_loads(loads: telemetry.LoadSnapshot, gauges: GaugeList) -> None:
    """Add the loads of devices from their hosts' last samples, and the number of silent gateways. Costs one statement.

    Samples older than MAX_SAMPLE_AGE_S are ignored. A value is left out, and only counted, if a limit on the number of
    series is reached, if METRIC_BY_SAMPLE does not have its name, or if its device is unknown. `cyborg_device_load` has
    the same values under one name, for one release.
    """
    since = database_clock.timestamp() - MAX_SAMPLE_AGE_S
    fresh_loads = {host: said.devices for host, said in sorted(loads.hosts.items()) if said.at >= since}
    known_devices = Device.objects.filter(host__in=fresh_loads).order_by()
    names = {
        (host, key): (name, str(uuid), kind)
        for host, key, uuid, kind, name in known_devices.values_list("host", "key", "uuid", "type", "host__name")
    }
    series: list[tuple[tuple[str, ...], float]] = []
    families = {
        name: one.family(name, one.text, labels=[*DEVICE_LABELS, *([one.label] if one.label else [])])
        for name, one in DEVICE_METRICS.items()
    }
    left_out = 0
    for host, devices in fresh_loads.items():
        series_limit = min(MAX_SERIES, len(series) + MAX_SERIES_PER_HOST)
        for key, values in devices.items():
            device_labels = names.get((host, key))
            for metric, value in values.items():
                name_and_label = _find_device_metric(metric)
                if device_labels is None or len(series) >= series_limit or name_and_label is None:
                    left_out += 1
                else:
                    series.append(((*device_labels, metric), value))
                    name, own_label = name_and_label
                    described = DEVICE_METRICS[name]
                    own_labels = [own_label] if described.label else []
                    families[name].add_metric([*device_labels, *own_labels], value * described.factor)
    gauges.gauges += families.values()
    labels = ["host", "device", "type", "metric"]
    gauges.add_labelled_gauge(
        "cyborg_device_load",
        "Deprecated: use the metrics of each quantity, such as `cyborg_device_power_watts`.",
        labels,
        series,
    )
    gauges.add_gauge(
        "cyborg_device_load_left_out",
        "Values that are not exported: too many, of an unknown device, or with an unknown name.",
        left_out,
    )
    gauges.add_gauge(
        "cyborg_gateways_silent", "Gateways that did not answer when they were asked for loads.", len(loads.silent)
    )
