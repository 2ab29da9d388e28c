"""What is counted and timed, for `/metrics`: the registry of every room, and what this room counts.

Rooms to the right add meters of their own to the same registry. No agent and no command at a shell imports this. With
`slots.VARIABLE` set, what all processes of the machine counted is told together, else what this one did.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from django.db import transaction
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, values
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector

from accelerators.domain.errors import Refused
from accelerators.runtime import metric_files

log = logging.getLogger(__name__)

REGISTRY = CollectorRegistry()
disable_created_metrics()


class _Filed:
    """A value in this process's files, as prometheus_client asks for one. When they cannot be opened, which after a
    fork is at its first count (the disk is full, no descriptor is left), this process counts nowhere from then on: what
    is counted never fails for it."""

    _multiprocess = True
    make: Callable[..., Any]
    lost = False

    def __init__(self, *what: Any, **named: Any) -> None:
        self._kept = self._spared(lambda: _Filed.make(*what, **named))

    def inc(self, amount: float) -> None:
        """So much more."""
        self._spared(lambda: self._kept.inc(amount))

    def set(self, value: float, timestamp: float | None = None) -> None:
        """From now on this."""
        self._spared(lambda: self._kept.set(value, timestamp))

    def get(self) -> float:
        """What it is."""
        return self._spared(lambda: float(self._kept.get())) or 0.0

    def set_exemplar(self, exemplar: object) -> None:
        """Files have none."""

    def get_exemplar(self) -> None:
        """None."""

    def _spared(self, do: Callable[[], Any]) -> Any:
        if _Filed.lost:
            return None
        try:
            return do()
        except OSError as error:
            _Filed.lost = True
            log.warning(
                "process %d counts nowhere: its files in %s are not usable (%s)",
                os.getpid(),
                metric_files.folder(),
                error,
            )
            return None


def _choose_values() -> None:
    """In files where a folder is named, in memory else. Before the first meter is made."""
    if metric_files.folder() is None:
        return
    try:
        metric_files.mine()
    except OSError as error:
        log.warning(
            "what this process counts is not told by others: %s is not usable (%s)", metric_files.VARIABLE, error
        )
        values.ValueClass = values.MutexValue
    else:
        _Filed.make = values.MultiProcessValue(metric_files.mine)
        values.ValueClass = _Filed


_choose_values()


def counter(name: str, text: str, *labels: str) -> Counter:
    """Something that happens, counted; its name ends with `_total`."""
    return Counter(name, text, labels, registry=REGISTRY)


def histogram(name: str, text: str, buckets: Iterable[float], *labels: str) -> Histogram:
    """How long something took (`_seconds`), or how much it was."""
    return Histogram(name, text, labels, registry=REGISTRY, buckets=tuple(buckets))


def gauge(name: str, text: str) -> Gauge:
    """What each living process has now, added up."""
    return Gauge(name, text, registry=REGISTRY, multiprocess_mode="livesum")


def counted() -> Iterable[Metric]:
    """All that was counted, in this process or in all that share its folder."""
    where = metric_files.folder()
    if where is None or values.ValueClass is values.MutexValue:
        return REGISTRY.collect()
    metric_files.bury(where)
    collector: Any = MultiProcessCollector(None, str(where))
    found: Iterable[Metric] = collector.collect()
    return found


_merge = histogram(
    "cyborg_merge_seconds",
    "How long one merge of reports took, all its statements.",
    (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0),
)
_merged_hosts = histogram("cyborg_merge_hosts", "Hosts that one merge changed.", (0, 1, 10, 50, 100, 200, 500))
_merged_devices = histogram("cyborg_merge_devices", "Devices that one merge wrote.", (0, 1, 10, 100, 1000, 5000))
_binds = counter("cyborg_binds_total", "Accelerator requests by what a bind made of them.", "outcome")
_answers = histogram(
    "cyborg_bind_answer_seconds",
    "How long a bind took until it was answered.",
    (0.01, 0.03, 0.1, 0.3, 1.0, 3.0),
    "outcome",
)
_hosts_part = histogram(
    "cyborg_bind_host_seconds",
    "How long a request that needed its host was BindStarted.",
    (0.3, 1.0, 3.0, 10.0, 30.0, 60.0, 120.0, 240.0),
    "outcome",
)
_commands = counter("cyborg_commands_ended_total", "Commands that ended, by what was ordered and how.", "op", "outcome")
OUTCOMES = {"BindStarted": "started", "Bound": "bound", "BindFailed": "failed"}
"""What a bind makes of a request, in the words of the label."""


for _outcome in OUTCOMES.values():
    _binds.labels(_outcome)  # at 0 from the start: who asks for the increase sees the first one, too


def merged(seconds: float, hosts: int, devices: int) -> None:
    """One merge is done."""
    _merge.observe(seconds)
    _merged_hosts.observe(hosts)
    _merged_devices.observe(devices)


@contextmanager
def answering() -> Iterator[None]:
    """Around a bind: how long it took, and whether it was refused, by the kind of refusal."""
    began, outcome = time.monotonic(), "error"
    try:
        yield
        outcome = "reserved"
    except Refused as refused:
        outcome = refused.reason.value
        raise
    finally:
        _answers.labels(outcome).observe(time.monotonic() - began)


def moved(moves: Iterable[Mapping[str, Any]]) -> None:
    """Requests that were moved, `waited` seconds for their host where that is said; counted once it is committed."""
    states = Tally(move["state"] for move in moves)
    waits = [(OUTCOMES[move["state"]], move["waited"]) for move in moves if "waited" in move]

    def told() -> None:
        for state, number in states.items():
            if state in OUTCOMES:
                _binds.labels(OUTCOMES[state]).inc(number)
        for outcome, seconds in waits:
            _hosts_part.labels(outcome).observe(seconds)

    transaction.on_commit(told, robust=True)


def ended(commands: Iterable[tuple[str, str]]) -> None:
    """Commands that ended, each its op and how; counted once that is committed."""
    ends = Tally(commands)

    def told() -> None:
        for (op, how), number in ends.items():
            _commands.labels(op, how).inc(number)

    transaction.on_commit(told, robust=True)
