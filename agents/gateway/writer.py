"""The gateway's one writer: a thread with its own database connection, that commits for everybody at once.

What the event loop needs of the database goes through here: reports (COPY into the spool, acknowledged after the
commit), what agents say of commands, the identity of who connects, leases, refusals. It collects for a few
milliseconds, then one commit serves all. Lanes say what goes first: reports that show a fault, then who connects and
what is said of commands, then the other reports.
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

from accelerators import database_outage
from accelerators.domain import errors
from accelerators.runtime import jobs as ticks
from accelerators.runtime import pubsub
from agents import credentials, enrolment, key_revocation
from agents.enrolment import Refused
from agents.gateway import command_dispatch, metrics
from agents.gateway.leases import Leases
from agents.gateway.rejections import Refusals
from agents.gateway.sessions import Expelled
from agents.gateway.throttling import Spread

log = logging.getLogger(__name__)

APPLIED = """
SELECT h.id, h.applied_hash FROM accelerators_host h
WHERE h.id = ANY(%s) AND NOT EXISTS (SELECT 1 FROM spool s WHERE s.host_id = h.id)
"""
COPY = "COPY spool (host_id, epoch, seq, received_at, payload, urgent) FROM STDIN (FORMAT BINARY)"
COPY_TYPES = ("int8", "int8", "int8", "timestamptz", "text", "bool")
"""Binary costs a third of text on our side (measured): nothing has to be escaped."""
DEPTH = """
SELECT (SELECT id FROM spool ORDER BY id LIMIT 1), (SELECT id FROM spool ORDER BY id DESC LIMIT 1)
"""
PAUSE_S = 1.0
FORGOTTEN_S = 10.0
DEPTH_S = 1.0
"""How often the spool's depth is looked at while it fills."""
PLAIN_SHARE = 4
"""Of the places in a batch of reports every so many-th is kept for those without a fault."""
LOOK_S = 2.5
"""A decision whose ring was lost is seen so soon."""
OVERLAP_S = 15.0
"""A row changed so long before the last look may have been committed, or its agent let in, only after it."""


@dataclass(slots=True)
class SpoolJob:
    """A report to be made durable. The future gives True when it was spooled, False when it is applied already."""

    future: asyncio.Future[Any]
    host_id: int
    order: tuple[int, int]
    hash: str
    payload: str
    urgent: bool = False


@dataclass(slots=True)
class AdmitJob:
    """A verified credential to be looked up or enrolled. The future gives an Identity or raises Refused."""

    future: asyncio.Future[Any]
    credential: credentials.Credential


@dataclass(slots=True)
class TrustJob:
    """A change of who is trusted. The future is done after its commit, or raises what `work` raises."""

    future: asyncio.Future[Any]
    work: Callable[[], None]


@dataclass(slots=True)
class CommandJob:
    """What an agent says of a command of its host. The future gives whether nothing is left to be done about it."""

    future: asyncio.Future[Any]
    said: command_dispatch.Said


Job = SpoolJob | AdmitJob | TrustJob | CommandJob
T = TypeVar("T", SpoolJob, CommandJob)
Results = list[tuple[asyncio.Future[Any], Any]]


class Writer(threading.Thread):
    """`put` jobs from the event loop; their futures resolve there after the commit."""

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
        """How many reports of each host are in the lanes and in the batch: what is applied now will not stay so."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._looked = self._heard = self._measured = time.monotonic()
        self._filled = False
        self._rung = False
        self._stopping = False

    def put(self, job: Job) -> None:
        """Called on the event loop; starts the thread at the first job."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self.start()
            pubsub.subscribe(key_revocation.TOPIC, self._ring)
            pubsub.listen()
        self._jobs.put(job)

    def _ring(self, _detail: str | None) -> None:
        """The hub's listener says that somebody decided something."""
        if not self._stopping:
            self._rung = True
            self._jobs.put(None)

    def stop(self) -> None:
        """End the thread after what it has in its hands, and close its connection."""
        self._stopping = True
        if self.is_alive():
            self.join(15)

    def run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
                self._until_done(self._housekeeping)
            except Exception:  # every agent waits for this thread: it says what it met, and goes on
                log.exception("the writer of what agents say met what nobody expected")
                time.sleep(PAUSE_S)
        connection.close()

    def _turn(self) -> None:
        """One batch."""
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
        """The first job, and what has arrived when the interval after it is over: the most urgent, and no more reports
        than go into one commit.

        It sleeps the interval out: to be woken by every job costs more than to serve it (measured).
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
        if isinstance(job, SpoolJob):
            (self._urgent if job.urgent else self._reports).append(job)
            self._held[job.host_id] += 1
        elif job is not None:
            self._others.append(job)

    def _let_go(self, batch: list[Job]) -> None:
        """They are stored, or nobody waits for them any more."""
        for job in batch:
            if isinstance(job, SpoolJob):
                self._held[job.host_id] -= 1
                if not self._held[job.host_id]:
                    del self._held[job.host_id]

    def _until_done(self, work: Callable[[], None]) -> None:
        """The database may be away for long: nothing is acknowledged meanwhile, and nothing is lost."""
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
        """Jobs that nobody waits for any more: an outage piles up nothing."""
        with suppress(queue.Empty):
            while True:
                self._sort(self._jobs.get_nowait())
        for lane in (self._others, self._urgent, self._reports):
            jobs = _first(lane, len(lane))
            self._let_go([job for job in jobs if job.future.done()])
            lane.extend(job for job in jobs if not job.future.done())

    def _serve(self, batch: list[Job]) -> None:
        """Faults first, in a commit of their own; who connects need not wait for the others' reports either.

        A report whose connection has ended was never acknowledged: its agent says it again, as it is then.
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
        known = enrolment.known({job.credential.public_key for job in jobs})
        results: Results = []
        for job in jobs:
            try:
                outcome: Any = enrolment.admit(job.credential, known.get(job.credential.public_key))
                if self._held[outcome.host_id]:
                    outcome = replace(outcome, applied_hash="")
            except Refused as refused:
                outcome = refused
            except (OperationalError, InterfaceError):
                raise
            except DatabaseError as error:
                log.exception("enrolling %s failed", job.credential.host)
                outcome = Refused(503, "database", f"enrolment failed: {type(error).__name__}")
            results.append((job.future, outcome))
        return results

    def _spool(self, jobs: list[SpoolJob]) -> Results:
        """One COPY is one commit: no transaction around it, every round trip here is taken from the event loop."""
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
        """Leases and refusals when they are due; every 10 s a look whether the spool was forgotten."""
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
        """How much waits to be merged; asked until nothing does."""
        self._measured = time.monotonic()
        with connection.cursor() as cursor:
            cursor.execute(DEPTH)
            first, last = cursor.fetchone()
        self._filled = first is not None
        self._spread.looked(first, last)

    def _look(self) -> None:
        """Who may not go on, who is to have a new key. Looks further back than the last time: a commit takes time."""
        began, self._rung = time.monotonic(), False
        news = key_revocation.news(began - self._heard + OVERLAP_S)
        database_outage.log_recovery()
        self._heard = began
        if news and self._loop:
            with suppress(RuntimeError):  # the loop has ended, and every connection with it
                self._loop.call_soon_threadsafe(self._hear, news)


def _first(lane: deque[Any], count: int) -> list[Any]:
    """Take up to `count` out of it."""
    return [lane.popleft() for _ in range(min(count, len(lane)))]


def _outcome(decision: TrustJob) -> Exception | None:
    """What its future gets; only a database that is away is tried again."""
    try:
        decision.work()
    except (OperationalError, InterfaceError, psycopg.OperationalError):
        raise
    except errors.Refused as refused:
        return refused
    except DatabaseError as error:
        log.exception("a change of trust failed")
        return error
    return None


def _told(jobs: list[CommandJob]) -> Results:
    settled = command_dispatch.keep([job.said for job in jobs])
    return [(job.future, job.said[:2] in settled) for job in jobs]


def _apart(serve: Callable[[list[T]], Results], jobs: list[T], refused: Callable[[T], Any]) -> Results:
    """All at once; when the database refuses that, one by one, so that what is wrong costs only who said it."""
    try:
        return serve(jobs)
    except (OperationalError, InterfaceError, psycopg.OperationalError):
        raise
    except (DatabaseError, psycopg.Error) as error:
        if len(jobs) > 1:
            return [result for job in jobs for result in _apart(serve, [job], refused)]
        log.warning("what an agent said cannot be stored: %s", str(error).splitlines()[0])
        return [(jobs[0].future, refused(jobs[0]))]


def _unserved(job: Job) -> Exception:
    """What whoever waits for it gets."""
    if isinstance(job, AdmitJob):
        return Refused(503, "database", "the database refuses this: see the gateway's log")
    return Expelled("database", "the database cannot store this: see the gateway's log")


def _resolve(results: Results) -> None:
    for future, outcome in results:
        if future.done():
            continue  # its connection went away meanwhile
        if isinstance(outcome, Exception):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
