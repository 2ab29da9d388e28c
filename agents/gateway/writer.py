"""The gateway's two writer threads do all database work for the event loop, in batches, each on its own connection.

The work is: reports (COPY into the spool, acknowledged after the commit), messages about commands, looking up or
enrolling agents that connect, changes of trust, leases and refusals. `ReportWriter` stores the reports of ordinary
size. `DatabaseWriter` does everything else and stores the large reports, so that neither a large report nor a handshake
delays the acknowledgement of an ordinary report. A thread collects jobs for a few milliseconds and then serves them
together. Order of service: reports that show a fault, then connecting agents, changes of trust and messages about
commands, then the other reports.

A thread never waits for a row that another transaction has locked (`agents.gateway.row_locks`). A job that needs such
a row is held: it is tried again every HELD_RETRY_S, after the other jobs. Reports need no row, because the spool refers
to none and its ids are from a sequence; but they are held, too, while the table itself is locked.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import psycopg
from django.db import DatabaseError, DataError, InterfaceError, OperationalError, close_old_connections, connection

from accelerators import conductor, slow_neighbours
from accelerators.domain import errors
from accelerators.runtime import database_clock, database_outage, pubsub
from accelerators.runtime import jobs as ticks
from agents import authentication, credentials, key_revocation
from agents.authentication import ConnectionRejectedError, EnrolledAgent
from agents.gateway import command_dispatch, metrics, urgency
from agents.gateway.leases import LeaseBuffer
from agents.gateway.rejections import RefusalCounter
from agents.gateway.row_locks import (
    MAX_LOCK_TIMEOUTS,
    UnwrittenItems,
    is_lock_timeout,
    limiting_lock_waits,
    suppressing_lock_timeouts,
    write_unless_locked,
)
from agents.gateway.sessions import SessionClosedError
from agents.gateway.throttling import MAX_URGENT, URGENT_PER_S, ReportJitter, TokenBuckets
from agents.gateway.urgency import DeviceHealth

log = logging.getLogger(__name__)

SELECT_APPLIED_HASHES = """
SELECT h.id, h.applied_hash FROM accelerators_host h
WHERE h.id = ANY(%s) AND NOT EXISTS (SELECT 1 FROM spool s WHERE s.host_id = h.id)
"""
"""The hash of the last applied report per host, without hosts that have reports in the spool."""
MEASURE_SPOOL_OF_HOSTS = """
SELECT host_id, count(*), sum(octet_length(payload)) FROM spool WHERE host_id = ANY(%s) GROUP BY host_id
"""
SELECT_HOSTS_WITHOUT_APPLIED_REPORT = """
SELECT h.id FROM accelerators_host h
WHERE h.applied_hash = '' AND h.reported_at IS NOT NULL AND NOT EXISTS (SELECT 1 FROM spool s WHERE s.host_id = h.id)
"""
"""The hosts whose last applied report does not count any more (`conductor.forget_applied_report`), and of which no
report waits in the spool."""
COPY_TO_SPOOL = "COPY spool (host_id, epoch, seq, payload, urgent) FROM STDIN (FORMAT BINARY)"
COPY_TYPES = ("int8", "int8", "int8", "text", "bool")
"""The binary format costs a third of the text format on our side (measured), because nothing has to be escaped."""
SELECT_SPOOL_RANGE = """
SELECT (SELECT id FROM spool WHERE id >= %s AND received_at > now() - interval '5 minutes' ORDER BY id LIMIT 1),
  (SELECT id FROM spool ORDER BY id DESC LIMIT 1)
"""
"""The ids of the oldest and the newest spooled report. Reports received more than five minutes ago do not count: the
merge may have put them aside. The search begins at the id that was found last, so that it does not read them."""
LARGE_REPORT_BYTES = 65_536
"""A report above this size is stored by `DatabaseWriter`, because it would delay the others in its batch."""
ERROR_PAUSE_S = 1.0
"""Seconds to wait after an unexpected error."""
SPOOL_CHECK_INTERVAL_S = 10.0
"""Seconds between two checks for rows left in the spool; if there are any, a merge job is enqueued."""
DEPTH_INTERVAL_S = 1.0
"""Seconds between two measurements of the spool's depth while it is not empty."""
HELD_RETRY_S = 0.1
"""Seconds until a job is tried again that needs a row which another transaction has locked."""
NORMAL_REPORT_SHARE = 4
"""One place in NORMAL_REPORT_SHARE of each batch of reports is kept for reports without a fault."""
CHANGES_POLL_S = 2.5
"""Seconds between two polls for changed agent rows and for hosts whose report is needed again. They also find a change
whose notification was lost."""
SLOW_STATEMENT_S, STATEMENT_TIMES = 0.003, 4
"""The database is slow if even the fastest of the last STATEMENT_TIMES short statements took SLOW_STATEMENT_S. The
fastest one shows how far away the database is: the others may have waited for this process's turn on a processor."""
SLOW_DATABASE = (
    "answers slowly: the fastest of several short statements took {worst_s:.3f} s. Every request and report needs tens"
    " of them. Look at the network between this node and the database, and at its load."
)
CHANGES_OVERLAP_S = 15.0
"""Seconds by which each poll for changed agent rows goes back before the last poll. A row that changed before that
poll may have been committed, or its agent admitted, only after it."""


class SpoolUse(NamedTuple):
    """A number of reports of one host in the spool, and of their bytes."""

    reports: int = 0
    bytes: int = 0

    def reaches(self, share: SpoolUse) -> bool:
        """Return whether one of the two numbers is as large as in `share`."""
        return self.reports >= share.reports or self.bytes >= share.bytes


@dataclass(slots=True)
class SpoolJob:
    """Store a report in the spool. The future gives True if it was spooled, False if its content is applied already.

    `payload` is the text of the Report message. A report with `health_to_check` is stored before others; whether it is
    merged before others, too (`is_urgent`), is decided at the first attempt to store it, None before.
    """

    future: asyncio.Future[Any]
    host_id: int
    epoch_seq: tuple[int, int]
    content_hash: str
    payload: str
    health_to_check: Sequence[DeviceHealth] = ()
    is_urgent: bool | None = None


@dataclass(slots=True)
class AdmitJob:
    """Look up or enrol the agent of a verified credential. The future gives an EnrolledAgent or raises
    ConnectionRejectedError.

    `nonce` is that of the credential; None as soon as the database has accepted it.
    """

    future: asyncio.Future[Any]
    credential: credentials.Credential
    nonce: authentication.IssuedNonce | None


@dataclass(slots=True)
class TrustJob:
    """Change which keys are trusted. The future is done after the commit, or raises RefusedError or DatabaseError from
    `apply_change`.

    A change is applied although its connection has ended meanwhile. `is_applied` is True after that: when its batch is
    repeated because of an outage, the change must not be applied again, because a person may have undone it, or a later
    change may be based on it.
    """

    future: asyncio.Future[Any]
    apply_change: Callable[[], None]
    is_applied: bool = False


@dataclass(slots=True)
class CommandJob:
    """Store what an agent sent about a command of its host. The future gives True if the command is settled."""

    future: asyncio.Future[Any]
    message: command_dispatch.CommandMessage


WriterJob = SpoolJob | AdmitJob | TrustJob | CommandJob
BatchJobT = TypeVar("BatchJobT", SpoolJob, AdmitJob, TrustJob, CommandJob)
FutureResults = list[tuple[asyncio.Future[Any], Any]]


class SpoolAccount:
    """The shared knowledge of a gateway's writer threads about reports and the spool. `share` is a host's share of it.

    A caller that compares what it reads from the database with `reports_by_host` copies the latter first: a report is
    counted there until it is committed, so it is then seen in one of the two.
    """

    def __init__(self, share: SpoolUse) -> None:
        self.share = share
        self.has_reports = False
        """Whether the spool may have reports."""
        self._lock = threading.Lock()
        self._reports_by_host: Counter[int] = Counter()
        self._use: dict[int, SpoolUse] = {}
        """The reports and bytes that this gateway has stored per host since the spool last had no report of it."""
        self._urgency_buckets = TokenBuckets(URGENT_PER_S, MAX_URGENT)

    @property
    def reports_by_host(self) -> Counter[int]:
        """A copy of the numbers of reports per host that are queued, held or in a current batch. While there is one,
        the applied hash may change."""
        with self._lock:
            return self._reports_by_host.copy()

    def has_reports_of(self, host_id: int) -> bool:
        """Return whether a report of this host is queued, held or in a current batch."""
        with self._lock:
            return self._reports_by_host[host_id] > 0

    def count_report(self, host_id: int) -> None:
        """Count a report that is queued."""
        with self._lock:
            self._reports_by_host[host_id] += 1

    def forget_reports(self, host_ids: Iterable[int]) -> None:
        """Stop counting reports, one for each of these ids: they are stored, or nobody waits for them any more."""
        with self._lock:
            self._reports_by_host.subtract(host_ids)
            self._reports_by_host = +self._reports_by_host

    def note_stored(self, jobs: Iterable[SpoolJob]) -> None:
        """Add these reports to what their hosts use of the spool."""
        with self._lock:
            for job in jobs:
                used = self._use.get(job.host_id, SpoolUse())
                self._use[job.host_id] = SpoolUse(used.reports + 1, used.bytes + len(job.payload))

    def note_measured(self, used: dict[int, SpoolUse]) -> None:
        """Set what hosts use of the spool, from a measurement."""
        with self._lock:
            self._use.update(used)

    def forget_use(self, host_ids: Iterable[int], queued_before: Counter[int]) -> None:
        """Forget what these hosts use of the spool: it had no report of them when it was read. A host of which several
        reports were queued before that is left out, because the other thread may have stored one since."""
        with self._lock:
            for host_id in host_ids:
                if queued_before[host_id] <= 1:
                    self._use.pop(host_id, None)

    def find_above_share(self, host_ids: Iterable[int]) -> set[int]:
        """Return those of these hosts that use up their share, as far as is known here."""
        with self._lock:
            return {one for one in host_ids if self._use.get(one, SpoolUse()).reaches(self.share)}

    def take_urgency(self, host_ids: Iterable[int]) -> set[int]:
        """Return those of these hosts that may have an urgent report now, and count it for each of them."""
        with self._lock:
            return {host_id for host_id in host_ids if self._urgency_buckets.try_take(host_id)}


class JobWriter(threading.Thread):
    """A thread that serves the jobs that the event loop passes to `put`, in batches of several commits, and resolves
    each job's future on the event loop after the commit. While the database is down it retries.

    A subclass says in `_work_after_batch` what it does besides.
    """

    def __init__(
        self, name: str, *, interval_s: float, max_rows: int, account: SpoolAccount, report_jitter: ReportJitter
    ) -> None:
        super().__init__(daemon=True, name=name)
        self._interval_s, self._max_rows, self._account = interval_s, max_rows, account
        self._report_jitter = report_jitter
        self._idle_s = 1.0
        """Seconds after which `_work_after_batch` is called although no job has come."""
        self._jobs: queue.SimpleQueue[WriterJob | None] = queue.SimpleQueue()
        self._other_jobs: deque[WriterJob] = deque()
        self._urgent_reports: deque[SpoolJob] = deque()
        self._normal_reports: deque[SpoolJob] = deque()
        self._held_jobs: deque[tuple[float, WriterJob]] = deque()
        """Jobs that need locked rows, and reports while the spool is locked, each with the time (monotonic) when it is
        tried again."""
        self._jobs_to_wake: set[str] = set()
        """Names of background jobs that are to be woken."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = False

    def put(self, job: WriterJob) -> None:
        """Queue a job. For the event loop only; the first call starts the thread."""
        if isinstance(job, SpoolJob):
            self._account.count_report(job.host_id)
        self.start_once()
        self._jobs.put(job)

    def start_once(self) -> None:
        """Start the thread if it does not run yet. For the event loop only."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self.start()

    def stop(self) -> None:
        """End the thread after its current batch, and close its database connection. Waits up to 15 s."""
        self._stopping = True
        self._jobs.put(None)
        if self.is_alive():
            self.join(15)

    def run(self) -> None:
        """Process batches and what is to be done after them until `stop`. An unexpected error is logged, and the thread
        goes on."""
        with limiting_lock_waits(), ticks.collecting_wake_ups(self._jobs_to_wake):
            while not self._stopping:
                try:
                    self._process_next_batch()
                    self._retry_during_outage(self._work_after_batch)
                except Exception:  # all agents depend on this thread, so it must not end
                    log.exception("unexpected error in the thread that stores agents' messages; it goes on")
                    time.sleep(ERROR_PAUSE_S)
            with suppress(DatabaseError, InterfaceError, psycopg.Error):
                self._wake_jobs()
        connection.close()

    def _work_after_batch(self) -> None:
        """Do what this thread does besides its jobs. Raise database errors."""
        self._wake_jobs()

    def _wake_jobs(self) -> None:
        """Wake the background jobs in `_jobs_to_wake`, or let another thread wake them."""
        raise NotImplementedError

    def _process_next_batch(self) -> None:
        """Take a batch of queued jobs and serve it, then the held jobs that are due.

        Held reports go back into their lanes, so that no commit has more reports than it may have.
        """
        self._serve_jobs(self._collect_batch())
        due = self._pop_due_held_jobs()
        for job in due:
            if isinstance(job, SpoolJob):
                (self._urgent_reports if job.health_to_check else self._normal_reports).append(job)
        self._serve_jobs([job for job in due if not isinstance(job, SpoolJob)])

    def _serve_jobs(self, batch: list[WriterJob]) -> None:
        """Serve a batch of jobs, and resolve their futures after the commit.

        After an unexpected error each future gets an exception that refuses the agent, and the error is raised.
        """
        if batch:
            try:
                self._retry_during_outage(lambda: self._process_batch(batch))
            except Exception:
                assert self._loop
                self._loop.call_soon_threadsafe(
                    _resolve_futures, [(job.future, _error_for_unserved(job)) for job in batch]
                )
                raise
            finally:
                self._forget_reports_of(batch)

    def _hold_jobs(self, unserved: UnwrittenItems[Any]) -> None:
        """Keep jobs that need locked rows, to try them again after HELD_RETRY_S, first those that were not tried."""
        retry_at = time.monotonic() + HELD_RETRY_S
        self._held_jobs.extend((retry_at, job) for job in [*unserved.untried, *unserved.locked])

    def _pop_due_held_jobs(self) -> list[WriterJob]:
        """Remove the held jobs that are to be tried again now, and return them in order."""
        now, due = time.monotonic(), []
        while self._held_jobs and self._held_jobs[0][0] <= now:
            due.append(self._held_jobs.popleft()[1])
        return due

    def _collect_batch(self) -> list[WriterJob]:
        """Return the next batch: wait for a job, sleep for the flush interval, then take what has arrived.

        Reports with a fault come before others, and no more reports are taken than go into one commit. [] if no job
        came within `_idle_s`, or within the interval of held work if that is shorter. The interval
        is slept through, because being woken by every job costs more than serving it (measured).
        """
        has_waiting_jobs = bool(self._other_jobs or self._urgent_reports or self._normal_reports)
        idle_s = min(HELD_RETRY_S, self._idle_s) if self._held_jobs or self._has_held_work() else self._idle_s
        try:
            self._add_to_lane(self._jobs.get(timeout=0 if has_waiting_jobs else idle_s))
        except queue.Empty:
            if not has_waiting_jobs:
                return []
        time.sleep(self._interval_s)
        with suppress(queue.Empty):
            while True:
                self._add_to_lane(self._jobs.get_nowait())
        normal_count = max(self._max_rows - len(self._urgent_reports), self._max_rows // NORMAL_REPORT_SHARE)
        normal_count = min(normal_count, len(self._normal_reports))
        urgent = _pop_jobs(self._urgent_reports, max(1, self._max_rows - normal_count))
        return [*_pop_jobs(self._other_jobs, self._max_rows), *urgent, *_pop_jobs(self._normal_reports, normal_count)]

    def _has_held_work(self) -> bool:
        """Return whether work besides the held jobs waits for a locked row."""
        return bool(self._jobs_to_wake)

    def _add_to_lane(self, job: WriterJob | None) -> None:
        """Put a job into its lane: reports with a fault, other reports, or everything else. None is no job: it only
        wakes this thread."""
        if isinstance(job, SpoolJob):
            (self._urgent_reports if job.health_to_check else self._normal_reports).append(job)
        elif job is not None:
            self._other_jobs.append(job)

    def _forget_reports_of(self, batch: list[WriterJob]) -> None:
        """Stop counting the reports among these jobs: they are stored, or nobody waits for them any more."""
        self._account.forget_reports([job.host_id for job in batch if isinstance(job, SpoolJob)])

    def _retry_during_outage(self, work: Callable[[], None]) -> None:
        """Do `work`, and retry it with a back-off (0.1 to 2 s) while the database is down or one of its tables is
        locked, until `stop`.

        Until `work` succeeds, the writer acknowledges no message, so agents keep their messages and none is lost.
        Queued jobs whose connection has ended are dropped. Other errors are raised. After `stop` it returns even if
        `work` was not done.
        """
        pause = 0.1
        while not self._stopping:
            try:
                return work()
            except (OperationalError, InterfaceError, psycopg.OperationalError) as error:
                if not is_lock_timeout(error):
                    database_outage.log_outage(error)
                    connection.close()
                time.sleep(pause)
                pause = min(pause * 2, 2.0)
                self._drop_abandoned_jobs()

    def _drop_abandoned_jobs(self) -> None:
        """Drop queued jobs whose future is done, so that jobs of closed connections do not pile up in an outage."""
        with suppress(queue.Empty):
            while True:
                self._add_to_lane(self._jobs.get_nowait())
        for lane in (self._other_jobs, self._urgent_reports, self._normal_reports):
            jobs = _pop_jobs(lane, len(lane))
            self._forget_reports_of([job for job in jobs if job.future.done()])
            lane.extend(job for job in jobs if not job.future.done())

    def _process_batch(self, batch: list[WriterJob]) -> None:
        """Serve a batch: reports with a fault, connecting agents, changes of trust, command messages, other reports.

        Each group has its own commits, and its futures are resolved at once, so that no group waits for a later one. A
        report whose connection has ended is dropped: it was never acknowledged, and its agent sends its current
        inventory again. Jobs that need locked rows are held, and so are reports while the spool is locked. Raise if the
        database is down; groups that are committed already are then resolved already.
        """
        reports = [job for job in batch if isinstance(job, SpoolJob) and not job.future.done()]
        locked_reports = self._store_unless_locked([job for job in reports if job.health_to_check])
        if admissions := [job for job in batch if isinstance(job, AdmitJob) and not job.future.done()]:
            self._hold_jobs(write_unless_locked(admissions, self._identify_agents))
        trust_jobs = [job for job in batch if isinstance(job, TrustJob) and not job.is_applied]
        self._serve_one_by_one(trust_jobs, _apply_trust_change)
        if command_jobs := [job for job in batch if isinstance(job, CommandJob)]:
            self._hold_jobs(write_unless_locked(command_jobs, self._store_command_messages))
        locked_reports += self._store_unless_locked([job for job in reports if not job.health_to_check])
        for job in locked_reports:
            self._account.count_report(job.host_id)
        self._hold_jobs(UnwrittenItems([], locked_reports))

    def _store_unless_locked(self, reports: list[SpoolJob]) -> list[SpoolJob]:
        """Store reports and resolve their futures; return the reports that cannot be stored now, because a table is
        locked. Raise if the database is down."""
        assert self._loop
        if not reports:
            return []
        with suppressing_lock_timeouts():
            results = _process_isolating_errors(self._store_reports, reports, _error_for_unserved)
            self._loop.call_soon_threadsafe(_resolve_futures, results)
            return []
        return reports

    def _identify_agents(self, jobs: list[AdmitJob]) -> None:
        """Look up all connecting agents in one statement; enrol those with a token, and store changed node names.

        An agent whose nonce is not accepted is refused. Agents for which nothing has to be written get their answers
        first. Raise only if the database is down, or if a gateway is recording one of the nonces at this moment.
        """
        assert self._loop
        reporting_hosts = set(self._account.reports_by_host)
        found = authentication.find_enrolled(
            [(job.credential.public_key, bool(job.credential.token), job.nonce) for job in jobs]
        )
        answered: FutureResults = []
        others: list[tuple[AdmitJob, EnrolledAgent | None]] = []
        for job, lookup in zip(jobs, found, strict=True):
            database_clock.note_timestamp(lookup.database_time)
            if not lookup.is_accepted:
                answered.append((job.future, authentication.reject_nonce()))
                continue
            job.nonce = None
            if authentication.needs_enrolment(job.credential, lookup.agent):
                others.append((job, lookup.agent))
            else:
                answered.append((job.future, self._identify_agent(job, lookup.agent, reporting_hosts)))
        self._loop.call_soon_threadsafe(_resolve_futures, answered)
        enrolled = {id(job): agent for job, agent in others}
        self._serve_one_by_one(
            [job for job, _ in others], lambda job: self._identify_agent(job, enrolled[id(job)], reporting_hosts)
        )

    def _identify_agent(self, job: AdmitJob, known: EnrolledAgent | None, reporting_hosts: set[int]) -> object:
        """Identify or enrol one agent; return an EnrolledAgent or a ConnectionRejectedError. `known` is the agent to
        which the key belongs, `reporting_hosts` the hosts that had queued reports before it was looked up.

        The applied hash is given as '' if a report of the host was queued then or is now. Raise only if the database is
        down, or if a row is locked.
        """
        try:
            found = authentication.identify_or_enrol(job.credential, known)
        except ConnectionRejectedError as refused:
            return refused
        except (OperationalError, InterfaceError):
            raise
        except DatabaseError as error:
            log.exception("enrolling %s failed", job.credential.host)
            return ConnectionRejectedError(
                503, "database", f"the agent could not be admitted now: {type(error).__name__}"
            )
        is_reporting = found.host_id in reporting_hosts or self._account.has_reports_of(found.host_id)
        return replace(found, applied_hash="") if is_reporting else found

    def _serve_one_by_one(self, jobs: Iterable[BatchJobT], serve: Callable[[BatchJobT], object]) -> None:
        """Serve each job in a transaction of its own, and resolve its future with what `serve` returns.

        A job that needs a locked row is held. After MAX_LOCK_TIMEOUTS of them, the rest is held without having been
        tried. Raise only if the database is down.
        """
        assert self._loop
        unserved = UnwrittenItems[BatchJobT]([], [])
        for job in jobs:
            if len(unserved.locked) == MAX_LOCK_TIMEOUTS:
                unserved.untried.append(job)
                continue
            with suppressing_lock_timeouts():
                self._loop.call_soon_threadsafe(_resolve_futures, [(job.future, serve(job))])
                continue
            unserved.locked.append(job)
        self._hold_jobs(unserved)

    def _store_command_messages(self, jobs: list[CommandJob]) -> None:
        """Store messages about commands together, and resolve each future with whether its command is settled, so that
        a Result can be acknowledged. Raise only if the database is down, or if a row is locked."""
        assert self._loop

        def store_messages(jobs: list[CommandJob]) -> FutureResults:
            """Store the messages in one transaction; return for each whether its command is settled."""
            settled = command_dispatch.store_messages([job.message for job in jobs])
            return [(job.future, job.message[:2] in settled) for job in jobs]

        results = _process_isolating_errors(store_messages, jobs, lambda _: False)
        self._loop.call_soon_threadsafe(_resolve_futures, results)

    def _store_reports(self, jobs: list[SpoolJob]) -> FutureResults:
        """Store reports in the spool, leaving out those already applied; return for each whether it was stored.

        A report that shows a changed health of a held device is stored as urgent, unless its host has sent too many
        such reports (URGENT_PER_S). The reports of a host that uses up its share of the spool are refused: the merge
        may have put the host aside.
        One COPY is one commit. There is no transaction around it: every round trip here takes time from the event loop.
        If anything was stored, the job `merge` is woken. Raise database errors.
        """
        began = time.monotonic()
        queued_before = self._account.reports_by_host
        with connection.cursor() as cursor:
            cursor.execute(SELECT_APPLIED_HASHES, [[job.host_id for job in jobs]])
            applied_hashes = dict(cursor.fetchall())
            self._account.forget_use(applied_hashes, queued_before)
            new = [
                job
                for job in jobs
                if applied_hashes.get(job.host_id) != job.content_hash or queued_before[job.host_id] > 1
            ]
            full_hosts = self._find_hosts_above_share({job.host_id for job in new})
            fresh = [job for job in new if job.host_id not in full_hosts]
            if fresh:
                self._decide_urgency([job for job in fresh if job.is_urgent is None])
                urgent_hosts = {job.host_id for job in fresh if job.is_urgent}
                with cursor.copy(COPY_TO_SPOOL) as copy:
                    copy.set_types(COPY_TYPES)
                    for job in fresh:
                        copy.write_row((job.host_id, *job.epoch_seq, job.payload, job.host_id in urgent_hosts))
        if fresh:
            self._account.has_reports = True
            self._report_jitter.update_stored_rate(len(fresh), time.monotonic() - began)
            ticks.enqueue_job("merge")
        self._account.note_stored(fresh)
        outcomes: dict[int, object] = {id(job): _error_for_full_spool() for job in new} | {
            id(job): True for job in fresh
        }
        return [(job.future, outcomes.get(id(job), False)) for job in jobs]

    def _decide_urgency(self, jobs: list[SpoolJob]) -> None:
        """Set `is_urgent` of these jobs, once, so that a repeated attempt to store them uses up no further urgency.

        If a table that this needs is locked, they are not urgent: no acknowledgement waits for it. A job whose keys the
        database cannot compare is not urgent either; with several jobs, DataError is raised, and they are stored one by
        one.
        """
        try:
            found = urgency.find_hosts_with_changed_health((job.host_id, job.health_to_check) for job in jobs)
        except (DataError, OperationalError) as error:
            if len(jobs) > 1 if isinstance(error, DataError) else not is_lock_timeout(error):
                raise
            log.warning("reports are stored as not urgent, because their urgency cannot be found out now: %s", error)
            found = set()
        urgent_hosts = self._account.take_urgency(found)
        for job in jobs:
            job.is_urgent = job.host_id in urgent_hosts

    def _find_hosts_above_share(self, host_ids: Iterable[int]) -> set[int]:
        """Return those of these hosts that use up their share of the spool.

        Costs one statement if a host has used its share according to `_account`, which does not see what the merge
        deletes while the host has other reports in the spool; otherwise none.
        """
        suspects = list(self._account.find_above_share(host_ids))
        if not suspects:
            return set()
        with connection.cursor() as cursor:
            cursor.execute(MEASURE_SPOOL_OF_HOSTS, [suspects])
            measured = {host_id: SpoolUse(*columns) for host_id, *columns in cursor.fetchall()}
        self._account.note_measured({host_id: measured.get(host_id, SpoolUse()) for host_id in suspects})
        return self._account.find_above_share(suspects)


class ReportWriter(JobWriter):
    """The thread that stores the reports of ordinary size, and nothing else. `request_wake_ups` is called with the
    names of jobs that are to be woken, because waking them takes several statements."""

    def __init__(
        self,
        *,
        interval_s: float,
        max_rows: int,
        account: SpoolAccount,
        report_jitter: ReportJitter,
        request_wake_ups: Callable[[set[str]], None],
    ) -> None:
        super().__init__(
            "report-writer", interval_s=interval_s, max_rows=max_rows, account=account, report_jitter=report_jitter
        )
        self._request_wake_ups = request_wake_ups

    def _wake_jobs(self) -> None:
        """Let the other thread wake the jobs in `_jobs_to_wake`."""
        if self._jobs_to_wake:
            self._request_wake_ups(set(self._jobs_to_wake))
            self._jobs_to_wake.clear()


class DatabaseWriter(JobWriter):
    """The thread that does everything but to store ordinary reports. It also flushes leases and refusals and enqueues
    periodic jobs.

    `on_agent_changes` is called on the event loop with agent rows that any process has changed, and `on_reports_needed`
    with the ids of hosts whose report is needed again.
    """

    def __init__(
        self,
        *,
        interval_s: float,
        max_rows: int,
        account: SpoolAccount,
        leases: LeaseBuffer,
        refusals: RefusalCounter,
        report_jitter: ReportJitter,
        on_agent_changes: Callable[[list[key_revocation.AgentChange]], None],
        on_reports_needed: Callable[[list[int]], None],
    ) -> None:
        super().__init__(
            "database-writer", interval_s=interval_s, max_rows=max_rows, account=account, report_jitter=report_jitter
        )
        self._leases, self._refusals = leases, refusals
        self._on_agent_changes, self._on_reports_needed = on_agent_changes, on_reports_needed
        self._idle_s = min(1.0, leases.flush_s)
        self._spool_checked_at = self._changes_read_at = self._depth_measured_at = time.monotonic()
        self._jobs_woken_at = float("-inf")
        """When the periodic jobs were last woken; the first write of leases wakes them."""
        self._oldest_spooled_id = 0
        """The id that `_measure_spool` has found last; older reports in the spool are put aside."""
        self._has_notification = False
        self._statement_times: deque[float] = deque(maxlen=STATEMENT_TIMES)
        """How long the last short statements took, in seconds."""

    def start_once(self) -> None:
        """Start the thread, and listen to the notifications of other processes, if it does not run yet."""
        if self._loop is None:
            super().start_once()
            pubsub.subscribe(key_revocation.TOPIC, self._on_notification)
            pubsub.subscribe(conductor.REPORTS_TOPIC, self._on_notification)
            pubsub.start_listener()

    def request_wake_ups(self, names: set[str]) -> None:
        """Let this thread wake these background jobs soon. Any thread may call it."""
        self._jobs_to_wake.update(names)
        self._jobs.put(None)

    def note_return(self, host_id: int) -> None:
        """Write what is noted about this host's agent, which was late or down, as soon as `LeaseBuffer.note_return`
        says. For the event loop only."""
        self._leases.note_return(host_id)
        self._jobs.put(None)

    def _on_notification(self, _detail: str | None) -> None:
        """Handle a notification that agent rows have changed or a report is needed: wake the thread to read them."""
        if not self._stopping:
            self._has_notification = True
            self._jobs.put(None)

    def _has_held_work(self) -> bool:
        """Return whether names of jobs, or leases of hosts, wait for a locked row, or leases of returned agents for
        their flush."""
        return bool(self._jobs_to_wake or self._leases.has_untried_hosts or self._leases.has_returned_agents)

    def _work_after_batch(self) -> None:
        """Do what is due: flush leases, metrics and refusals, wake background jobs, read changed agent rows and the
        hosts whose report is needed again, measure the spool.

        A part that needs a lock of another transaction is done at the next call. Raise other database errors.
        """
        for do_part in (
            self._flush_leases,
            self._refusals.flush,
            self._read_changes,
            self._measure_spool,
            self._look_for_spooled_reports,
            self._wake_jobs,
        ):
            with suppressing_lock_timeouts():
                do_part()

    def _flush_leases(self) -> None:
        """Write leases and what agents said in Hello, if it is time, and wake the job `leases` after that.

        Once in each interval between two regular writes, also push the metrics and wake all periodic jobs. The writes
        for returned agents, of which a storm causes two in each second, do not do this.
        """
        is_written = self._leases.flush()
        if time.monotonic() - self._jobs_woken_at >= self._leases.flush_s:
            metrics.push_metrics()
            ticks.enqueue_periodic_jobs()
            self._jobs_woken_at = time.monotonic()
        elif is_written:
            ticks.enqueue_job("leases")

    def _read_changes(self) -> None:
        """Read changed agent rows and the hosts whose report is needed again, every CHANGES_POLL_S or when notified."""
        if self._has_notification or time.monotonic() - self._changes_read_at >= CHANGES_POLL_S:
            self._read_agent_changes()
            self._read_needed_reports()

    def _look_for_spooled_reports(self) -> None:
        """Every SPOOL_CHECK_INTERVAL_S wake the job `merge` if the spool has rows, in case an earlier task was lost."""
        if time.monotonic() - self._spool_checked_at < SPOOL_CHECK_INTERVAL_S:
            return
        self._spool_checked_at = time.monotonic()
        close_old_connections()
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM spool LIMIT 1")
            has_rows = cursor.fetchone() is not None
        if has_rows:
            ticks.enqueue_job("merge")

    def _wake_jobs(self) -> None:
        """Wake the background jobs in `_jobs_to_wake`.

        A name is kept until the next call while another process that wakes the same job has not committed: the name
        conflicts with the row that it has inserted. The names are taken out first, because the other thread may ask for
        one of them again as soon as its job has begun.
        """
        if names := sorted(self._jobs_to_wake):
            self._jobs_to_wake.difference_update(names)
            left = UnwrittenItems(names, [])
            try:
                left = write_unless_locked(names, ticks.wake_jobs)
            finally:
                self._jobs_to_wake.update(left.untried, left.locked)

    def _measure_spool(self) -> None:
        """Read the oldest and the newest id in the spool, and pass them on to `ReportJitter`, which computes how long
        the merge needs.

        This is repeated every DEPTH_INTERVAL_S until the spool is empty.
        """
        if not self._account.has_reports or time.monotonic() - self._depth_measured_at < DEPTH_INTERVAL_S:
            return
        self._depth_measured_at = time.monotonic()
        self._account.has_reports = False  # before the statement, because the other thread may set it meanwhile
        with connection.cursor() as cursor:
            cursor.execute(SELECT_SPOOL_RANGE, [self._oldest_spooled_id])
            oldest_id, newest_id = cursor.fetchone()
        self._oldest_spooled_id = oldest_id or newest_id or self._oldest_spooled_id
        if oldest_id is not None:
            self._account.has_reports = True
        self._report_jitter.update_merge_time(oldest_id, newest_id)

    def _read_agent_changes(self) -> None:
        """Read agent rows that changed since the last poll, and hand them to the sessions on the event loop.

        It goes CHANGES_OVERLAP_S further back than the last poll, because a row becomes visible only with its commit.
        """
        began, self._has_notification = time.monotonic(), False
        changes = key_revocation.read_agent_changes(began - self._changes_read_at + CHANGES_OVERLAP_S)
        database_outage.log_recovery()
        self._changes_read_at = began
        if changes and self._loop:
            with suppress(RuntimeError):  # the loop is closed, and with it every connection
                self._loop.call_soon_threadsafe(self._on_agent_changes, changes)

    def _read_needed_reports(self) -> None:
        """Find the hosts whose report is needed again, and hand their ids to the event loop.

        A host whose report is queued here is left out: that report is compared in full.
        """
        queued_before = self._account.reports_by_host
        with connection.cursor() as cursor:
            began = time.monotonic()
            cursor.execute(SELECT_HOSTS_WITHOUT_APPLIED_REPORT)
            self._note_statement_time(time.monotonic() - began)
            host_ids = [host_id for (host_id,) in cursor.fetchall() if host_id not in queued_before]
        if host_ids and self._loop:
            with suppress(RuntimeError):  # the loop is closed, and with it every connection
                self._loop.call_soon_threadsafe(self._on_reports_needed, host_ids)

    def _note_statement_time(self, seconds: float) -> None:
        """Note how long a short statement took, and whether the database is slow by now."""
        self._statement_times.append(seconds)
        fastest_s = min(self._statement_times)
        if len(self._statement_times) == STATEMENT_TIMES and fastest_s >= SLOW_STATEMENT_S:
            slow_neighbours.note("The database", SLOW_DATABASE, fastest_s)


def _pop_jobs(lane: deque[Any], count: int) -> list[Any]:
    """Remove up to `count` jobs from the front of a lane, and return them in order."""
    return [lane.popleft() for _ in range(min(count, len(lane)))]


def _apply_trust_change(job: TrustJob) -> Exception | None:
    """Do a change of trust; return None, or the error for its future.

    Raise only if the database is down, or if a row is locked: then it is tried again.
    """
    outcome: Exception | None = None
    try:
        job.apply_change()
    except (OperationalError, InterfaceError, psycopg.OperationalError):
        raise
    except errors.RefusedError as refused:
        outcome = refused
    except DatabaseError as error:
        log.exception("a change of trust failed")
        outcome = error
    job.is_applied = True
    return outcome


def _process_isolating_errors(
    process: Callable[[list[BatchJobT]], FutureResults], jobs: list[BatchJobT], make_refusal: Callable[[BatchJobT], Any]
) -> FutureResults:
    """Serve all jobs together. If the database rejects that, serve them one by one.

    So bad data costs only the agent that sent it: the result of its job is `make_refusal(job)`. Raise only if the
    database is down.
    """
    try:
        return process(jobs)
    except (OperationalError, InterfaceError, psycopg.OperationalError):
        raise
    except (DatabaseError, psycopg.Error) as error:
        if len(jobs) > 1:
            return [result for job in jobs for result in _process_isolating_errors(process, [job], make_refusal)]
        log.warning("an agent's message cannot be stored: %s", str(error).splitlines()[0])
        return [(jobs[0].future, make_refusal(jobs[0]))]


def _error_for_unserved(job: WriterJob) -> Exception:
    """Return the exception for the future of a job that could not be served.

    It is ConnectionRejectedError (503) for a connecting agent; otherwise SessionClosedError, which ends the connection.
    """
    if isinstance(job, AdmitJob):
        return ConnectionRejectedError(503, "database", "the database rejected this connection: see the gateway's log")
    return SessionClosedError("database", "the database cannot store this message: see the gateway's log")


def _error_for_full_spool() -> SessionClosedError:
    """Return the exception for the future of a report that its host has no share of the spool left for."""
    return SessionClosedError(
        "busy",
        "too many reports of this host wait to be merged: they take too long, or they were put aside (see the events of"
        " the host). The agent keeps this report, and sends it with its next connection",
    )


def _resolve_futures(results: FutureResults) -> None:
    """Set the result of each future, or raise its exception there; futures that are done are skipped. On the event loop
    only."""
    for future, outcome in results:
        if future.done():
            continue  # its connection has ended meanwhile
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
