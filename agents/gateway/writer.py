"""The gateway's writer thread: it does all database work for the event loop, in batches, on its own connection.

The work is: reports (COPY into the spool, acknowledged after the commit), messages about commands, looking up or
enrolling agents that connect, changes of trust, leases and refusals. The thread collects jobs for a few milliseconds
and then serves them together. Order of service: reports that show a fault, then connecting agents, changes of trust and
messages about commands, then the other reports.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, TypeVar

import psycopg
from django.db import DatabaseError, InterfaceError, OperationalError, close_old_connections, connection

from accelerators.domain import errors
from accelerators.runtime import database_outage, pubsub
from accelerators.runtime import jobs as ticks
from agents import credentials, enrolment, key_revocation
from agents.enrolment import ConnectionRejectedError
from agents.gateway import command_dispatch, metrics
from agents.gateway.leases import Leases
from agents.gateway.rejections import Refusals
from agents.gateway.sessions import SessionClosedError
from agents.gateway.throttling import Spread

log = logging.getLogger(__name__)

APPLIED = """
SELECT h.id, h.applied_hash FROM accelerators_host h
WHERE h.id = ANY(%s) AND NOT EXISTS (SELECT 1 FROM spool s WHERE s.host_id = h.id)
"""
"""The hash of the last applied report per host, without hosts that have reports in the spool."""
COPY = "COPY spool (host_id, epoch, seq, received_at, payload, urgent) FROM STDIN (FORMAT BINARY)"
COPY_TYPES = ("int8", "int8", "int8", "timestamptz", "text", "bool")
"""The binary format costs a third of the text format on our side (measured), because nothing has to be escaped."""
DEPTH = """
SELECT (SELECT id FROM spool ORDER BY id LIMIT 1), (SELECT id FROM spool ORDER BY id DESC LIMIT 1)
"""
"""The ids of the oldest and the newest spooled report."""
PAUSE_S = 1.0
"""Seconds to wait after an unexpected error."""
FORGOTTEN_S = 10.0
"""Seconds between two checks for rows left in the spool; if there are any, a merge job is enqueued."""
DEPTH_S = 1.0
"""Seconds between two measurements of the spool's depth while it is not empty."""
PLAIN_SHARE = 4
"""One place in NORMAL_REPORT_SHARE of each batch of reports is kept for reports without a fault."""
LOOK_S = 2.5
"""Seconds between two polls for changed agent rows, which also find a decision whose notification was lost."""
OVERLAP_S = 15.0
"""Seconds by which each poll for changed agent rows goes back before the last poll. A row that changed before that
poll may have been committed, or its agent admitted, only after it."""


@dataclass(slots=True)
class SpoolJob:
    """Store a report in the spool. The future gives True if it was spooled, False if its content is applied already."""

    future: asyncio.Future[Any]
    host_id: int
    order: tuple[int, int]
    hash: str
    payload: str
    urgent: bool = False


@dataclass(slots=True)
class AdmitJob:
    """Look up or enrol the agent of a verified credential. The future gives an EnrolledAgent or raises
    ConnectionRejectedError."""

    future: asyncio.Future[Any]
    credential: credentials.Credential


@dataclass(slots=True)
class TrustJob:
    """Change which keys are trusted. The future is done after the commit, or raises what `work` raises."""

    future: asyncio.Future[Any]
    work: Callable[[], None]


@dataclass(slots=True)
class CommandJob:
    """Store what an agent sent about a command of its host. The future gives True if the command is settled."""

    future: asyncio.Future[Any]
    said: command_dispatch.Said


Job = SpoolJob | AdmitJob | TrustJob | CommandJob
T = TypeVar("T", SpoolJob, CommandJob)
Results = list[tuple[asyncio.Future[Any], Any]]


class Writer(threading.Thread):
    """Takes jobs from the event loop by `put`, and resolves their futures there after the commit.

    `on_agent_changes` is called on the event loop with agent rows that have changed.
    """

    def __init__(
        self,
        *,
        interval_s: float,
        max_rows: int,
        leases: Leases,
        refusals: Refusals,
        spread: Spread,
        hear: Callable[[list[key_revocation.News]], None],
    ) -> None:
        super().__init__(daemon=True, name="spool-writer")
        self._interval_s, self._max_rows = interval_s, max_rows
        self._leases, self._refusals, self._spread = leases, refusals, spread
        self._hear = hear
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._others: deque[Job] = deque()
        self._urgent: deque[SpoolJob] = deque()
        self._reports: deque[SpoolJob] = deque()
        self._held: Counter[int] = Counter()
        """Reports per host that are queued or in the current batch. While there is one, the applied hash may change."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looked = self._heard = self._measured = time.monotonic()
        self._filled = False
        self._rung = False
        self._stopping = False

    def put(self, job: Job) -> None:
        """Queue a job. For the event loop only; the first call starts the thread."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self.start()
            pubsub.subscribe(key_revocation.TOPIC, self._ring)
            pubsub.listen()
        self._jobs.put(job)

    def _ring(self, _detail: str | None) -> None:
        """Handle a notification that agent rows have changed: wake the thread to read them."""
        if not self._stopping:
            self._rung = True
            self._jobs.put(None)

    def stop(self) -> None:
        """End the thread after its current batch, and close its database connection. Waits up to 15 s."""
        self._stopping = True
        if self.is_alive():
            self.join(15)

    def run(self) -> None:
        """Process batches and periodic work until `stop`. An unexpected error is logged, and the thread goes on."""
        while not self._stopping:
            try:
                self._turn()
                self._until_done(self._housekeeping)
            except Exception:  # all agents depend on this thread, so it must not end
                log.exception("unexpected error in the thread that stores agents' messages; it goes on")
                time.sleep(PAUSE_S)
        connection.close()

    def _turn(self) -> None:
        """Take a batch of queued jobs, serve it, and resolve the futures after the commit.

        After an unexpected error each future gets an exception that refuses the agent, and the error is raised.
        """
        if batch := self._collect():
            try:
                self._until_done(lambda: self._serve(batch))
            except Exception:
                assert self._loop
                self._loop.call_soon_threadsafe(_resolve, [(job.future, _unserved(job)) for job in batch])
                raise
            finally:
                self._let_go(batch)

    def _collect(self) -> list[Job]:
        """Return the next batch: wait for a job, sleep for the flush interval, then take what has arrived.

        Reports with a fault come before others, and no more reports are taken than go into one commit. [] if no job
        came within a second, or within the interval of lease flushes if that is shorter. The interval is slept through,
        because being woken by every job costs more than serving it (measured).
        """
        waiting = bool(self._others or self._urgent or self._reports)
        try:
            self._sort(self._jobs.get(timeout=0 if waiting else min(1.0, self._leases.flush_s)))
        except queue.Empty:
            if not waiting:
                return []
        time.sleep(self._interval_s)
        with suppress(queue.Empty):
            while True:
                self._sort(self._jobs.get_nowait())
        plain = max(self._max_rows - len(self._urgent), self._max_rows // PLAIN_SHARE)
        plain = min(plain, len(self._reports))
        urgent = _first(self._urgent, max(1, self._max_rows - plain))
        return [*_first(self._others, self._max_rows), *urgent, *_first(self._reports, plain)]

    def _sort(self, job: Job | None) -> None:
        """Put a job into its lane: reports with a fault, other reports, or everything else. None only woke us."""
        if isinstance(job, SpoolJob):
            (self._urgent if job.urgent else self._reports).append(job)
            self._held[job.host_id] += 1
        elif job is not None:
            self._others.append(job)

    def _let_go(self, batch: list[Job]) -> None:
        """Stop counting these jobs in `_reports_by_host`: they are stored, or nobody waits for them any more."""
        for job in batch:
            if isinstance(job, SpoolJob):
                self._held[job.host_id] -= 1
                if not self._held[job.host_id]:
                    del self._held[job.host_id]

    def _until_done(self, work: Callable[[], None]) -> None:
        """Do `work`, and retry it with a back-off (0.1 to 2 s) while the database is down, until `stop`.

        Nothing is acknowledged meanwhile, and nothing is lost. Other errors are raised.
        """
        pause = 0.1
        while not self._stopping:
            try:
                return work()
            except (OperationalError, InterfaceError, psycopg.OperationalError) as error:
                database_outage.log_outage(error)
                connection.close()
                time.sleep(pause)
                pause = min(pause * 2, 2.0)
                self._forget_gone()

    def _forget_gone(self) -> None:
        """Drop queued jobs whose future is done, so that jobs of closed connections do not pile up in an outage."""
        with suppress(queue.Empty):
            while True:
                self._sort(self._jobs.get_nowait())
        for lane in (self._others, self._urgent, self._reports):
            jobs = _first(lane, len(lane))
            self._let_go([job for job in jobs if job.future.done()])
            lane.extend(job for job in jobs if not job.future.done())

    def _serve(self, batch: list[Job]) -> None:
        """Serve a batch: reports with a fault, connecting agents, changes of trust, command messages, other reports.

        Each group has its own commits, and its futures are resolved at once, so that no group waits for a later one. A
        report whose connection has ended is dropped: it was never acknowledged, and its agent sends its current
        inventory again.
        """
        assert self._loop
        reports = [job for job in batch if isinstance(job, SpoolJob) and not job.future.done()]
        if urgent := [job for job in reports if job.urgent]:
            self._loop.call_soon_threadsafe(_resolve, _apart(self._spool, urgent, _unserved))
        if admits := [job for job in batch if isinstance(job, AdmitJob) and not job.future.done()]:
            self._loop.call_soon_threadsafe(_resolve, self._admit(admits))
        for decision in batch:
            if isinstance(decision, TrustJob):
                self._loop.call_soon_threadsafe(_resolve, [(decision.future, _outcome(decision))])
        if told := [job for job in batch if isinstance(job, CommandJob)]:
            self._loop.call_soon_threadsafe(_resolve, _apart(_told, told, lambda _: False))
        if plain := [job for job in reports if not job.urgent]:
            self._loop.call_soon_threadsafe(_resolve, _apart(self._spool, plain, _unserved))

    def _admit(self, jobs: list[AdmitJob]) -> Results:
        """Look up all connecting agents in one statement, enrol those with a token; return an EnrolledAgent or
        ConnectionRejectedError each.

        The applied hash is given as '' while a report of the host is queued here.
        """
        known = enrolment.known({job.credential.public_key for job in jobs})
        results: Results = []
        for job in jobs:
            try:
                outcome: Any = enrolment.admit(job.credential, known.get(job.credential.public_key))
                if self._held[outcome.host_id]:
                    outcome = replace(outcome, applied_hash="")
            except ConnectionRejectedError as refused:
                outcome = refused
            except (OperationalError, InterfaceError):
                raise
            except DatabaseError as error:
                log.exception("enrolling %s failed", job.credential.host)
                outcome = ConnectionRejectedError(503, "database", f"enrolment failed: {type(error).__name__}")
            results.append((job.future, outcome))
        return results

    def _spool(self, jobs: list[SpoolJob]) -> Results:
        """Store reports in the spool, leaving out those already applied; return for each whether it was stored.

        One COPY is one commit. There is no transaction around it: every round trip here takes time from the event loop.
        """
        now, began = datetime.now(UTC), time.monotonic()
        with connection.cursor() as cursor:
            cursor.execute(APPLIED, [[job.host_id for job in jobs]])
            applied = dict(cursor.fetchall())
            fresh = [job for job in jobs if applied.get(job.host_id) != job.hash or self._held[job.host_id] > 1]
            if fresh:
                with cursor.copy(COPY) as copy:
                    copy.set_types(COPY_TYPES)
                    for job in fresh:
                        copy.write_row((job.host_id, *job.order, now, job.payload, job.urgent))
        if fresh:
            self._filled = True
            self._spread.stored(len(fresh), time.monotonic() - began)
            ticks.kick("merge")
        spooled = {id(job) for job in fresh}
        return [(job.future, id(job) in spooled) for job in jobs]

    def _housekeeping(self) -> None:
        """Do what is due: flush leases, metrics and refusals, read changed agent rows, measure the spool.

        Every SPOOL_CHECK_INTERVAL_S enqueue a merge job if the spool has rows, in case an earlier job was lost.
        """
        if self._leases.flush():
            metrics.push()
            ticks.kick_timely()
        self._refusals.flush()
        if self._rung or time.monotonic() - self._heard >= LOOK_S:
            self._look()
        if self._filled and time.monotonic() - self._measured >= DEPTH_S:
            self._measure()
        if time.monotonic() - self._looked < FORGOTTEN_S:
            return
        self._looked = time.monotonic()
        close_old_connections()
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1 FROM spool LIMIT 1")
            waiting = cursor.fetchone() is not None
        if waiting:
            ticks.kick("merge")

    def _measure(self) -> None:
        """Measure how many reports wait to be merged. It repeats every DEPTH_INTERVAL_S until the spool is empty."""
        self._measured = time.monotonic()
        with connection.cursor() as cursor:
            cursor.execute(DEPTH)
            first, last = cursor.fetchone()
        self._filled = first is not None
        self._spread.looked(first, last)

    def _look(self) -> None:
        """Read agent rows that changed since the last poll, and hand them to the sessions on the event loop.

        It goes CHANGES_OVERLAP_S further back than the last poll, because a row becomes visible only with its commit.
        """
        began, self._rung = time.monotonic(), False
        news = key_revocation.news(began - self._heard + OVERLAP_S)
        database_outage.log_recovery()
        self._heard = began
        if news and self._loop:
            with suppress(RuntimeError):  # the loop is closed, and with it every connection
                self._loop.call_soon_threadsafe(self._hear, news)


def _first(lane: deque[Any], count: int) -> list[Any]:
    """Remove and return up to `count` jobs from the front of a lane."""
    return [lane.popleft() for _ in range(min(count, len(lane)))]


def _outcome(decision: TrustJob) -> Exception | None:
    """Do a change of trust; return None, or the error for its future. Raise only if the database is down (retried)."""
    try:
        decision.work()
    except (OperationalError, InterfaceError, psycopg.OperationalError):
        raise
    except errors.RefusedError as refused:
        return refused
    except DatabaseError as error:
        log.exception("a change of trust failed")
        return error
    return None


def _told(jobs: list[CommandJob]) -> Results:
    """Store messages about commands; return for each whether its command is settled."""
    settled = command_dispatch.keep([job.said for job in jobs])
    return [(job.future, job.said[:2] in settled) for job in jobs]


def _apart(serve: Callable[[list[T]], Results], jobs: list[T], refused: Callable[[T], Any]) -> Results:
    """Serve all jobs together. If the database rejects that, serve them one by one.

    So bad data costs only the agent that sent it: its result is `refused(job)`. Raise only if the database is down.
    """
    try:
        return serve(jobs)
    except (OperationalError, InterfaceError, psycopg.OperationalError):
        raise
    except (DatabaseError, psycopg.Error) as error:
        if len(jobs) > 1:
            return [result for job in jobs for result in _apart(serve, [job], refused)]
        log.warning("an agent's message cannot be stored: %s", str(error).splitlines()[0])
        return [(jobs[0].future, refused(jobs[0]))]


def _unserved(job: Job) -> Exception:
    """Return the exception for the future of a job that could not be served."""
    if isinstance(job, AdmitJob):
        return ConnectionRejectedError(503, "database", "the database rejected this connection: see the gateway's log")
    return SessionClosedError("database", "the database cannot store this message: see the gateway's log")


def _resolve(results: Results) -> None:
    """Set results or exceptions of futures. On the event loop only."""
    for future, outcome in results:
        if future.done():
            continue  # its connection has ended meanwhile
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
