"""Background jobs: merge the spool into the tables, and look for expired leases."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from django.db import DataError, IntegrityError, OperationalError, connection, transaction
from psycopg.errors import LockNotAvailable, QueryCanceled
from psycopg.pq import TransactionStatus

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.domain.diff import HostReport
from accelerators.domain.states import EventSource
from accelerators.inventory.merge import find_locked_hosts, merge_reports
from accelerators.models import Command, Host
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.runtime import jobs
from accelerators.runtime.after_commit import call_after_commit
from agents import spool
from agents.gateway import leases
from agents.gateway.throttling import TokenBuckets

log = logging.getLogger(__name__)

BATCH_BYTES = 8 * 1024 * 1024
"""A batch takes no further report once their payloads have reached this size."""
BATCH_HOSTS = 500
"""Maximum number of hosts in a batch."""
OLDEST_FIRST_EVERY = 4
"""Every OLDEST_FIRST_EVERY-th batch takes the hosts that have waited longest without regard to faults, so that hosts
with faults cannot block the others for ever."""

STATEMENT_TIMEOUT_S = 15.0
"""A batch is rolled back, and the next one is smaller, if one of its statements takes longer. A killed task would begin
with the same reports again; the cluster kills it after a minute."""
BATCH_TIMEOUT_S = 20.0
"""The same if all statements of a batch together take longer. A job may begin a batch up to `jobs.TIME_SLICE_S` after
its start, so twice this time has passed at most when a batch ends."""
SLOW_BATCH_S, QUICK_BATCH_S = 4.0, 1.0
"""After a batch that took longer than SLOW_BATCH_S the next one is half as large, and after one that took less than
QUICK_BATCH_S twice as large."""
FIRST_SHARE = 1 / 16
"""The share of BATCH_HOSTS and BATCH_BYTES with which a process begins: the one before it may have been killed because
its batches took too long."""
FIRST_DELAY_S, MAX_DELAY_S = 60.0, 3600.0
"""Seconds for which the reports of a host are put aside if one of them alone takes too long; doubled each time."""
HOST_SHARE, HOST_BURST_S, FREE_BATCH_S = 0.01, 2.0, 0.25
"""The share of the merge's time that one host may use lastingly, and the seconds that it may use at once. Above it, its
reports wait, also while no other host reports: a report that arrives during a long batch waits until its end. A host
with open commands does not wait. The first FREE_BATCH_S of a batch are not counted, because they are mostly round trips
to the database, whatever is merged."""
MIN_REST_S, MAX_REST_S, REST_EVENT_INTERVAL_S = 1.0, 300.0, 600.0
"""The shortest and the longest time for which a host above its share waits, and the time after which another event
tells of it."""
LOCK_TIMEOUT_OF_TURN_MS = 50
"""Milliseconds that a statement waits for a lock while hosts are merged one by one to find those with locked rows."""
FIRST_LOCK_DELAY_S, MAX_LOCK_DELAY_S = 5.0, 60.0
"""Seconds for which a host is left out because another transaction has locked its row; doubled each time."""

_batches = itertools.count(1)
_unfinished_hosts: set[int] = set()
"""Hosts of the last batch of which later reports wait. The next batch takes others first."""
ReportBatch = dict[int, Sequence[HostReport]]


class MergePace:
    """The size of this process's batches, and the hosts whose reports it has put aside."""

    def __init__(self) -> None:
        self.share = FIRST_SHARE
        """The part of BATCH_HOSTS and BATCH_BYTES that the next batch takes, at most 1."""
        self._delays: dict[int, tuple[float, float]] = {}
        """Host id → until when its reports are put aside (monotonic clock), and for how many seconds."""
        self._rests: dict[int, float] = {}
        """Host id → until when its reports wait, because it has used up its share of the merge's time."""
        self._told_at: dict[int, float] = {}
        """Host id → when an event has told that it uses more than its share."""
        self._time_budgets = TokenBuckets(HOST_SHARE, HOST_BURST_S)

    @property
    def max_hosts(self) -> int:
        """The maximum number of hosts in the next batch."""
        return max(1, int(BATCH_HOSTS * self.share))

    @property
    def max_bytes(self) -> int:
        """The number of bytes above which the next batch takes no further report."""
        return max(1, int(BATCH_BYTES * self.share))

    def list_delayed_hosts(self) -> set[int]:
        """Return the hosts whose reports are put aside now."""
        now = time.monotonic()
        return {host_id for host_id, (until, _) in self._delays.items() if until > now}

    def list_resting_hosts(self) -> set[int]:
        """Return the hosts whose reports wait now, because they have used up their share of the merge's time."""
        now = time.monotonic()
        self._rests = {host_id: until for host_id, until in self._rests.items() if until > now}
        return set(self._rests)

    def note_merged(self, turns: Sequence[spool.Turn], seconds: float) -> None:
        """Note that a batch was merged within this time: adapt the share, and forget the delays of its hosts."""
        if seconds > SLOW_BATCH_S:
            self.share = max(self.share / 2, 1 / BATCH_HOSTS)
        elif seconds < QUICK_BATCH_S:
            self.share = min(self.share * 2, 1.0)
        for turn in turns:
            self._delays.pop(turn.host_id, None)
        self._charge_hosts(turns, seconds)

    def _charge_hosts(self, turns: Sequence[spool.Turn], seconds: float) -> None:
        """Charge the time of a batch to its hosts, by the number of devices that they have reported. Those that have
        used more than their share wait."""
        sizes = {turn.host_id: _count_devices(turn) for turn in turns}
        for host_id, size in sizes.items():
            cost_s = max(0.0, seconds - FREE_BATCH_S) * size / max(sum(sizes.values()), 1)
            if cost_s and (rest_s := self._time_budgets.take(host_id, cost_s)) >= MIN_REST_S:
                self._rests[host_id] = time.monotonic() + min(rest_s, MAX_REST_S)

    def take_hosts_to_tell_of(self) -> dict[int, float]:
        """Return the hosts above their share of which an event is due, each with the seconds for which it waits."""
        now = time.monotonic()
        due = {
            host_id: until - now
            for host_id, until in self._rests.items()
            if now - self._told_at.get(host_id, float("-inf")) >= REST_EVENT_INTERVAL_S
        }
        self._told_at |= dict.fromkeys(due, now)
        return due

    def note_timeout(self, turns: Sequence[spool.Turn]) -> float:
        """Note that a batch took too long: make the next one much smaller, and return 0.

        If it was a single report, or reports of one host in the smallest batch, put the reports of the host aside, and
        return for how many seconds.
        """
        is_smallest = self.share <= 1 / BATCH_HOSTS
        self.share = max(self.share / 8, 1 / BATCH_HOSTS)
        if len(turns) > 1 or (len(turns[0].reports) > 1 and not is_smallest):
            return 0.0
        return self._delay_host(turns[0].host_id, FIRST_DELAY_S, MAX_DELAY_S)

    def note_locked(self, host_ids: Iterable[int]) -> None:
        """Note that other transactions have locked the rows of these hosts: leave them out for some seconds."""
        for host_id in host_ids:
            self._delay_host(host_id, FIRST_LOCK_DELAY_S, MAX_LOCK_DELAY_S)

    def _delay_host(self, host_id: int, first_s: float, max_s: float) -> float:
        """Leave a host out for twice as long as the last time, within these limits; return for how many seconds."""
        _, last_s = self._delays.get(host_id, (0.0, 0.0))
        delay_s = min(max(2 * last_s, first_s), max_s)
        self._delays[host_id] = time.monotonic() + delay_s, delay_s
        return delay_s


_pace = MergePace()


def merge() -> None:
    """Run the job `merge`: merge spooled reports into the tables batch by batch, with one commit per batch."""
    jobs.run_steps("merge", merge_batch)


def watch_leases() -> None:
    """Run the job `leases`: mark hosts with silent agents as stale, and unmark hosts whose agents were heard again."""
    leases.run_lease_job()


def merge_batch() -> bool:
    """Merge one batch of spooled reports; return False if there was none, True if there may be more.

    Each host has one turn in a batch (`spool.take_turns`). Hosts with faults come first, except in every
    OLDEST_FIRST_EVERY-th batch. It must run inside a transaction of the caller, under the lock of the job. If the
    database rejects the batch, it is applied host by host. The reports of a host that the database rejects even then
    are dropped, and so is a report that this release cannot decode; each time an event is recorded.

    If a statement takes longer than STATEMENT_TIMEOUT_S, or the batch longer than BATCH_TIMEOUT_S, the reports stay in
    the spool, and the next batch is smaller. If a single report takes longer than that, its host is left out for some
    time, the host's reports that cannot matter any more are deleted, and an event is recorded. If another transaction
    has locked rows of some hosts of the batch for too long, these hosts are left out for some seconds, and the others
    go on.
    A host that uses more than HOST_SHARE of the time waits, and an event is recorded.
    """
    began = time.monotonic()
    turns = _take_turns(ignore_urgency=next(_batches) % OLDEST_FIRST_EVERY == 0)
    if not turns:
        return False
    try:
        with transaction.atomic(), limiting_duration(began + BATCH_TIMEOUT_S, STATEMENT_TIMEOUT_S):
            _merge_turns(turns)
    except OperationalError as error:
        if isinstance(error.__cause__, LockNotAvailable):
            locked = find_locked_hosts([turn.host_id for turn in turns])
            if not locked:
                locked = _merge_unlocked_turns(turns, began + BATCH_TIMEOUT_S)
                if len(locked) == len(turns) > 1:
                    raise  # what all hosts need is locked, such as a table
            log.warning("the rows of some hosts are locked by another transaction; their reports wait: %s", locked)
            _pace.note_locked(locked)
        elif not isinstance(error.__cause__, QueryCanceled):
            raise
        elif delay_s := _pace.note_timeout(turns):
            spool.fold_reports(turns[0].host_id)
            _record_delay(turns[0].host_id, delay_s)
    else:
        _pace.note_merged(turns, time.monotonic() - began)
        for host_id, rest_s in _pace.take_hosts_to_tell_of().items():
            _record_rest(host_id, rest_s)
    call_after_commit(command_queue.wake_job_for_answers)
    return True


@contextmanager
def limiting_duration(end: float, statement_timeout_s: float) -> Iterator[None]:
    """Let a statement of the `with` block fail (QueryCanceled) if it is not done at `end` (monotonic clock).

    Each statement of the transaction has the timeout `statement_timeout_s` already. It is changed, which costs one more
    statement, only if less time is left. Statements that end a failed transaction are not limited.
    """

    def execute_in_time(execute: Any, sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        """Execute a statement with a timeout that ends at `end`."""
        left_s = end - time.monotonic()
        raw_connection: Any = connection.connection
        if left_s < statement_timeout_s and raw_connection.info.transaction_status == TransactionStatus.INTRANS:
            raw_connection.execute(f"SET LOCAL statement_timeout = {max(1, int(left_s * 1000))}")
        return execute(sql, params, many, context)

    with connection.execute_wrapper(execute_in_time):
        yield


def _take_turns(*, ignore_urgency: bool) -> list[spool.Turn]:
    """Return the turns of the next batch: of hosts with an urgent report, if there are any, otherwise of all.

    A host with reports that the last batch has left is taken only if no other host waits. Hosts whose reports are put
    aside are left out.
    """
    delayed = _pace.list_delayed_hosts() | _list_hosts_that_can_rest()
    excluded = delayed | _unfinished_hosts
    _unfinished_hosts.clear()
    attempts = [(False, excluded)] if ignore_urgency else [(True, excluded), (False, excluded)]
    if excluded != delayed:
        attempts.append((False, delayed))
    for urgent_only, left_out in attempts:
        turns = spool.take_turns(
            max_hosts=_pace.max_hosts,
            max_bytes=_pace.max_bytes,
            urgent_only=urgent_only,
            excluded=left_out,
            statement_timeout_s=STATEMENT_TIMEOUT_S,
        )
        if turns:
            _unfinished_hosts.update(turn.host_id for turn in turns if not turn.is_complete)
            return turns
    return []


def _list_hosts_that_can_rest() -> set[int]:
    """Return the hosts above their share of the merge's time, without those that have open commands.

    A command ends only after the report about its effect was merged, and a bind may wait for it.
    """
    resting = _pace.list_resting_hosts()
    if not resting:
        return resting
    return resting - set(Command.objects.filter(COMMAND_IS_OPEN, host_id__in=resting).values_list("host_id", flat=True))


def _merge_turns(turns: Sequence[spool.Turn]) -> None:
    """Delete the reports of these turns from the spool, and merge those that matter, in the caller's transaction."""
    spool.delete_reports(turns)
    for turn in turns:
        if turn.error:
            _record_dropped_report(turn.host_id, turn.error)
    batch: ReportBatch = {turn.host_id: turn.reports for turn in turns if turn.reports}
    try:
        with transaction.atomic():
            merge_reports(batch)
    except (DataError, IntegrityError) as error:
        log.warning(
            "the database rejected a batch of reports (hosts: %d); applying it host by host: %s", len(batch), error
        )
        _apply_host_by_host(batch)


def _merge_unlocked_turns(turns: Sequence[spool.Turn], end: float) -> list[int]:
    """Merge turns one by one, each in its own savepoint; return the hosts of those for which a row is locked.

    A row of a host's deployables, attributes or handles may be locked, or one that the host's merge inserts. The turns
    that are not merged before `end` (monotonic clock) wait for the next batch.
    """
    locked: list[int] = []
    with connection.cursor() as cursor:
        cursor.execute(f"SET LOCAL lock_timeout = {LOCK_TIMEOUT_OF_TURN_MS}")
    for turn in turns:
        if time.monotonic() >= end:
            break
        try:
            with transaction.atomic(), limiting_duration(end, STATEMENT_TIMEOUT_S):
                _merge_turns([turn])
        except OperationalError as error:
            if isinstance(error.__cause__, QueryCanceled):
                _pace.note_timeout(turns)
                break
            if not isinstance(error.__cause__, LockNotAvailable):
                raise
            locked.append(turn.host_id)
    return locked


def _apply_host_by_host(batch: ReportBatch) -> None:
    """Apply a batch host by host, each in its own savepoint; drop the reports of hosts that the database rejects."""
    for host_id, reports in batch.items():
        try:
            with transaction.atomic():
                merge_reports({host_id: reports})
        except (DataError, IntegrityError) as error:
            _record_dropped_report(host_id, str(error))


def _record_dropped_report(host_id: int, error: str) -> None:
    """Record the event `report.refused` for reports of a host that cannot be stored, with the first line of the
    error."""
    host = Host.objects.filter(id=host_id).first()
    reason = f"the host's report cannot be stored: {error.splitlines()[0]}"
    conductor.record_event("report.refused", EventSource.SYSTEM, "merge", host=host, reason=reason)


def _count_devices(turn: spool.Turn) -> int:
    """Return the number of devices in the reports of a turn."""
    return sum(len(driver.devices) for report in turn.reports for driver in report.drivers)


def _record_rest(host_id: int, rest_s: float) -> None:
    """Record the event `report.delayed` for a host that uses more than its share of the merge's time."""
    reason = (
        f"merging the host's reports takes more than {HOST_SHARE:.0%} of the time of the merge: each waits for a while,"
        f" this one for {rest_s:.0f} s, and only the newest is merged. Those of other hosts go on. Look at which driver"
        " of this host reports something new each time"
    )
    host = Host.objects.filter(id=host_id).first()
    conductor.record_event("report.delayed", EventSource.SYSTEM, "merge", host=host, reason=reason)


def _record_delay(host_id: int, delay_s: float) -> None:
    """Record the event `report.delayed` for a host whose reports are put aside."""
    reason = (
        f"merging one report of the host takes longer than {STATEMENT_TIMEOUT_S:g} s in one statement, or than"
        f" {BATCH_TIMEOUT_S:g} s in all: its reports are tried again in"
        f" {delay_s:g} s, and those of other hosts go on. Look at what this host reports, and at the database's load"
    )
    host = Host.objects.filter(id=host_id).first()
    conductor.record_event("report.delayed", EventSource.SYSTEM, "merge", host=host, reason=reason)
