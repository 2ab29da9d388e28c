"""Prometheus metrics for `/metrics`: the common registry, and the metrics of `accelerators`.

Other apps add their metrics to the same registry. The host agent, the command-line client and the supervisor must not
import this module. If the environment variable `metric_files.FOLDER_VARIABLE` is set, `/metrics` shows the sums over
all processes of the machine, otherwise only the metrics of the process that answers.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter as Tally
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, values
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from accelerators.domain.bind_failures import BindFailure
from accelerators.domain.errors import RefusedError
from accelerators.runtime import metric_files
from accelerators.runtime.after_commit import call_after_commit

log = logging.getLogger(__name__)

REGISTRY = CollectorRegistry()
disable_created_metrics()  # type: ignore[no-untyped-call]  # it has no types


class _FileValue:
    """A metric value in this process's files, with the interface that prometheus_client expects.

    If the files cannot be opened (disk full, no descriptor left), one warning is logged and this process records no
    metrics from then on, so that the code that is measured never fails. After a fork, files are opened at the first
    recorded value.
    """

    _multiprocess = True
    make_value: Callable[..., Any]
    files_unusable = False

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self._stored = self._call_guarded(lambda: _FileValue.make_value(*arguments, **keywords))

    def inc(self, amount: float) -> None:
        """Add `amount` to the value; do nothing if the files are not usable."""
        self._call_guarded(lambda: self._stored.inc(amount))

    def set(self, value: float, timestamp: float | None = None) -> None:
        """Set the value; do nothing if the files are not usable."""
        self._call_guarded(lambda: self._stored.set(value, timestamp))

    def get(self) -> float:
        """Return the value; 0 if the files are not usable."""
        return self._call_guarded(lambda: float(self._stored.get())) or 0.0

    def set_exemplar(self, exemplar: object) -> None:
        """Ignore the exemplar: files cannot store exemplars."""

    def get_exemplar(self) -> None:
        """Return None: files cannot store exemplars."""

    def _call_guarded(self, operation: Callable[[], Any]) -> Any:
        """Call `operation` and return its result.

        The first OSError in this process is logged; from then on nothing is called any more, and None is returned.
        """
        if _FileValue.files_unusable:
            return None
        try:
            return operation()
        except OSError as error:
            _FileValue.files_unusable = True
            log.warning(
                "Process %d records no metrics from now on, because its files in %s are not usable: %s",
                os.getpid(),
                metric_files.metrics_folder(),
                error,
            )
            return None


def _select_value_class() -> None:
    """Keep metrics in files if a folder is configured and usable, otherwise in memory.

    A folder that is configured but not usable is logged as a warning. This must run before the first metric is created.
    """
    if metric_files.metrics_folder() is None:
        return
    try:
        metric_files.acquire_process_number()
    except OSError as error:
        log.warning(
            "The metrics of this process appear only in its own /metrics, because the folder %s is not usable: %s",
            metric_files.FOLDER_VARIABLE,
            error,
        )
        values.ValueClass = values.MutexValue
    else:
        make_value_class: Any = values.MultiProcessValue  # it has no types
        _FileValue.make_value = make_value_class(metric_files.acquire_process_number)
        values.ValueClass = _FileValue


_select_value_class()


def create_counter(name: str, description: str, *labels: str) -> Counter:
    """Create and register a counter of events. By convention its name ends with `_total`.

    `labels` are the names of its labels. Raises ValueError if the name is registered already.
    """
    return Counter(name, description, labels, registry=REGISTRY)


def create_histogram(name: str, description: str, buckets: Iterable[float], *labels: str) -> Histogram:
    """Create and register a histogram of durations (its name ends with `_seconds`) or of amounts.

    `buckets` are the upper bounds of the buckets, `labels` the names of its labels. Raises ValueError if the name is
    registered already.
    """
    return Histogram(name, description, labels, registry=REGISTRY, buckets=tuple(buckets))


def create_gauge(name: str, description: str) -> Gauge:
    """Create and register a gauge of a current value; `/metrics` shows the sum over all living processes.

    Raises ValueError if the name is registered already.
    """
    return Gauge(name, description, registry=REGISTRY, multiprocess_mode="livesum")


def collect_metrics() -> Iterable[Metric]:
    """Collect all metrics: of all processes that share the folder, or of this process if there is no usable folder.

    Deletes the gauges of dead processes first.
    """
    directory = metric_files.metrics_folder()
    if directory is None or values.ValueClass is values.MutexValue:
        return REGISTRY.collect()
    metric_files.delete_gauges_of_dead_processes(directory)
    collector: Any = MultiProcessCollector(None, str(directory))  # type: ignore[no-untyped-call]  # it has no types
    collected: Iterable[Metric] = collector.collect()
    return collected


_merge_seconds = create_histogram(
    "cyborg_merge_seconds",
    "How long one merge of reports took, with all its statements.",
    (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
)
_merged_hosts = create_histogram("cyborg_merge_hosts", "Hosts that one merge changed.", (0, 1, 10, 50, 100, 200, 500))
_merged_devices = create_histogram("cyborg_merge_devices", "Devices that one merge wrote.", (0, 1, 10, 100, 1000, 5000))
_binds_total = create_counter("cyborg_binds_total", "Accelerator requests, by the outcome of their bind.", "outcome")
_bind_failures_total = create_counter(
    "cyborg_bind_failures_total", "Accelerator requests whose bind failed, by reason.", "reason"
)
_bind_answer_seconds = create_histogram(
    "cyborg_bind_answer_seconds",
    "How long a bind took until the API answered.",
    (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    "outcome",
)
_bind_host_seconds = create_histogram(
    "cyborg_bind_host_seconds",
    "How long a request that needed work on its host stayed BindStarted.",
    (0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 240.0),
    "outcome",
)
_commands_ended_total = create_counter(
    "cyborg_commands_ended_total", "Commands that ended, by operation and outcome.", "op", "outcome"
)
OUTCOME_LABELS = {"BindStarted": "started", "Bound": "bound", "BindFailed": "failed"}
"""State of a request after a bind → value of the label `outcome`."""


for _outcome in OUTCOME_LABELS.values():
    _binds_total.labels(_outcome)  # starts at 0, so that the first bind is visible as an increase, too
for _failure in BindFailure:
    _bind_failures_total.labels(_failure.value)


def record_merge(seconds: float, hosts: int, devices: int) -> None:
    """Record a finished merge: its duration, and how many hosts and devices it wrote."""
    _merge_seconds.observe(seconds)
    _merged_hosts.observe(hosts)
    _merged_devices.observe(devices)


@contextmanager
def measure_bind() -> Iterator[None]:
    """Measure the duration of a bind, as a context manager or decorator.

    The label `outcome` is 'reserved', the reason of the refusal, or 'error' for any other exception.
    """
    began, outcome = time.monotonic(), "error"
    try:
        yield
        outcome = "reserved"
    except RefusedError as refused:
        outcome = refused.reason.value
        raise
    finally:
        _bind_answer_seconds.labels(outcome).observe(time.monotonic() - began)


def count_bind_outcomes(moves: Collection[Mapping[str, Any]]) -> None:
    """Count the requests that became BindStarted, Bound or BindFailed, after the current transaction has committed.

    Each move has a `state`; moves to other states are not counted. A move to Bound or BindFailed may have `waited`: the
    seconds for which the request waited for its host.
    """
    states = Tally(move["state"] for move in moves)
    durations = [(OUTCOME_LABELS[move["state"]], move["waited"]) for move in moves if "waited" in move]

    def record_counts() -> None:
        """Add the counted requests, and the times for which they waited, to the metrics."""
        for state, number in states.items():
            if state in OUTCOME_LABELS:
                _binds_total.labels(OUTCOME_LABELS[state]).inc(number)
        for outcome, seconds in durations:
            _bind_host_seconds.labels(outcome).observe(seconds)

    call_after_commit(record_counts)


def count_bind_failures(failures: Collection[BindFailure]) -> None:
    """Count failed binds, given by their reasons, after the current transaction has committed."""
    counts = Tally(failures)

    def record_counts() -> None:
        """Add the counted failures to the metric."""
        for failure, number in counts.items():
            _bind_failures_total.labels(failure.value).inc(number)

    call_after_commit(record_counts)


def count_ended_commands(commands: Iterable[tuple[str, str]]) -> None:
    """Count ended commands, given as (op, outcome), after the current transaction has committed."""
    counts = Tally(commands)

    def record_counts() -> None:
        """Add the counted commands to the metrics."""
        for (op, outcome), number in counts.items():
            _commands_ended_total.labels(op, outcome).inc(number)

    call_after_commit(record_counts)
