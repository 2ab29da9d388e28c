"""Waking a job: any process kicks, one django-q2 task runs it, however often it was kicked meanwhile.

A kick inserts the job's row into `tick`; only who inserted it enqueues a task (measured: never a task per message).
The task deletes the row first and works afterwards, so no wake-up is lost. The supervisor watches the rows: one that
is not taken up means that the cluster is stuck.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial

from django.db import connection, transaction

SLICE_S = 20.0
"""A job that has more to do after this long kicks itself and returns, well below the cluster's time-out."""
LOCK_CLASS = 0x7161
"""First key of every job's advisory lock; the second is `lock_id(name)`."""


@dataclass(frozen=True)
class Job:
    """A function that does all there is to do when called, and the cluster it belongs to.

    A `timely` one looks every few seconds for what no wake-up announces: time that has passed. One that takes the
    intents of a kind (`intent`) is woken when one is raised.
    """

    name: str
    function: str
    cluster: str
    timely: bool = False
    intent: str = ""


_jobs: dict[str, Job] = {}


def register(name: str, function: str, *, cluster: str, timely: bool = False, intent: str = "") -> None:
    """Declare a job; called from `AppConfig.ready()`."""
    _jobs[name] = Job(name, function, cluster, timely, intent)


def has_taker(intent: str) -> bool:
    """Whether a job takes intents of this kind."""
    return any(job.intent == intent for job in jobs())


def wake_for(intent: str) -> None:
    """Wake the job that takes intents of this kind, if there is one, after the commit of the transaction under way."""
    for job in jobs():
        if job.intent == intent:
            transaction.on_commit(partial(kick, job.name), robust=True)


def jobs() -> list[Job]:
    """Every declared job."""
    return list(_jobs.values())


def lock_id(name: str) -> int:
    """Second key of the job's advisory lock, a positive 31-bit number."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def kick(name: str) -> None:
    """Wake job `name`. Call it after the commit of what the job shall see: one statement while it is awake already.

    A row that is still there then is deleted after that commit, so whoever deletes it sees what was committed.
    """
    _wake([name])


def _wake(names: Iterable[str]) -> None:
    """Wake jobs in one transaction; one statement when all of them are awake already.

    Rows are inserted in the order of their names, so that two processes which wake the same jobs cannot deadlock.
    """
    from django_q.tasks import async_task

    wanted = sorted(names)
    with connection.cursor() as cursor:
        cursor.execute("SELECT name FROM tick WHERE name = ANY(%s)", [wanted])
        awake = {name for (name,) in cursor.fetchall()}
    asleep = [name for name in wanted if name not in awake]
    if not asleep:
        return
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL synchronous_commit TO off")
        cursor.execute(
            "INSERT INTO tick (name) SELECT unnest(%s::text[]) ON CONFLICT DO NOTHING RETURNING name", [asleep]
        )
        for (name,) in cursor.fetchall():
            job = _jobs[name]
            async_task(job.function, cluster=job.cluster, task_name=name)


def kick_all(cluster: str | None = None) -> None:
    """Wake every job (of `cluster`) afresh: after a start, or after tasks were lost with the cluster that held them."""
    for job in jobs():
        if cluster in (None, job.cluster):
            take_up(job.name)
            kick(job.name)


def kick_timely() -> None:
    """Wake the jobs that watch the clock; called every few seconds by every gateway.

    All at once: reports wait meanwhile for the gateway's writer, which takes long over many statements when the
    database is slow.
    """
    _wake(job.name for job in jobs() if job.timely)


def backstop() -> None:
    """Once a minute, from django-q2's scheduler: whatever forgot to wake a job, it is late by a minute at most."""
    _wake(job.name for job in jobs())


def take_up(name: str) -> None:
    """From now on a kick wakes the job again: called before it looks at what there is to do."""
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM tick WHERE name = %s", [name])


def run(name: str, step: Callable[[], bool]) -> None:
    """Take up the tick of `name`, then call `step` under the job's lock until it says there is nothing left.

    `step` runs in a transaction of its own; the lock goes with it, so a killed worker blocks nobody. Who finds the
    lock taken looks again until it is free: the holder may have looked before our wake-up's work was there.
    """
    _run(name, step, _locked)


def run_outside_transaction(name: str, step: Callable[[], bool]) -> None:
    """Do the same for a step that calls other services: `step` opens its own transactions, and none around a call.

    A slow service would otherwise keep the rows locked that the step has written, and reports and binds would wait
    for them. The lock belongs to the connection and ends with it.
    """
    _run(name, step, alone)


def _run(name: str, step: Callable[[], bool], lock: Callable[[str], AbstractContextManager[bool]]) -> None:
    take_up(name)
    end = time.monotonic() + SLICE_S
    while time.monotonic() < end:
        with lock(name) as mine:
            more = step() if mine else True
        if not more:
            return
        if not mine:
            time.sleep(0.02)
    kick(name)


@contextmanager
def alone(name: str) -> Iterator[bool]:
    """Whether nobody else does the work of `name`, for a job that must hold no transaction meanwhile: a lock of this
    connection, which ends with a worker that is killed. Who finds it taken leaves the rest to its holder, or kicks."""
    key = [LOCK_CLASS, lock_id(name)]
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s, %s)", key)
        mine: bool = cursor.fetchone()[0]
    try:
        yield mine
    finally:
        if mine:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s, %s)", key)


@contextmanager
def _locked(name: str) -> Iterator[bool]:
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s, %s)", [LOCK_CLASS, lock_id(name)])
        yield cursor.fetchone()[0]
