"""Declare background jobs, wake them from any process, and run them. Repeated wake-ups share one django-q2 task.

`kick` inserts the job's row into `tick`; only the process that inserted the row enqueues a task (measured: never
a task per message). The task deletes the row before it works, so no wake-up is lost. The supervisor watches the rows:
one that is not taken up means that the cluster is stuck.
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
"""Seconds after which a job with more to do wakes itself again and returns. Well below the cluster's time-out."""
LOCK_CLASS = 0x7161
"""First key of every job's PostgreSQL advisory lock; the second is `lock_id(name)`."""


@dataclass(frozen=True)
class Job:
    """A background job: the dotted name of a function that does all pending work, and the cluster that runs it.

    A `timely` job is also woken every few seconds, because its work depends on the time (deadlines). A job with
    `intent` is woken whenever an intent of that kind is raised.
    """

    name: str
    function: str
    cluster: str
    timely: bool = False
    intent: str = ""


_jobs: dict[str, Job] = {}


def register(name: str, function: str, *, cluster: str, timely: bool = False, intent: str = "") -> None:
    """Declare a job. Call it from `AppConfig.ready()`."""
    _jobs[name] = Job(name, function, cluster, timely, intent)


def has_taker(intent: str) -> bool:
    """Return True if a job is registered for intents of this kind."""
    return any(job.intent == intent for job in jobs())


def wake_for(intent: str) -> None:
    """Wake the job for intents of this kind, if there is one, after the current transaction has committed."""
    for job in jobs():
        if job.intent == intent:
            transaction.on_commit(partial(kick, job.name), robust=True)


def jobs() -> list[Job]:
    """Return all declared jobs."""
    return list(_jobs.values())


def lock_id(name: str) -> int:
    """Return the second key of the job's advisory lock, a number of 31 bits that is not negative."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def kick(name: str) -> None:
    """Wake the job `name`. Call it after the commit of the changes that the job must see.

    Costs one statement if the job is awake already. In that case its `tick` row will be deleted later than that commit,
    so the task that deletes it sees the changes.
    """
    _wake([name])


def _wake(names: Iterable[str]) -> None:
    """Wake jobs in one transaction. Costs one statement if all of them are awake already.

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
    """Wake every job, or every job of `cluster`, with a new task even if it is awake already.

    Needed after a start, or after tasks were lost with the cluster that held them.
    """
    for job in jobs():
        if cluster in (None, job.cluster):
            take_up(job.name)
            kick(job.name)


def kick_timely() -> None:
    """Wake all timely jobs. Every gateway calls this every few seconds.

    One transaction wakes all of them, because reports wait for the gateway's writer meanwhile, and many statements
    would take long when the database is slow.
    """
    _wake(job.name for job in jobs() if job.timely)


def backstop() -> None:
    """Wake all jobs. django-q2's scheduler calls this once a minute.

    Therefore a job that some code forgot to wake is late by at most a minute.
    """
    _wake(job.name for job in jobs())


def take_up(name: str) -> None:
    """Delete the job's `tick` row, so that the next wake-up enqueues a task. Call it before looking for work."""
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM tick WHERE name = %s", [name])


def run(name: str, step: Callable[[], bool]) -> None:
    """Take up the job's tick, then call `step` under the job's lock until it returns False (no more work).

    Each `step` runs in its own transaction, and the lock ends with that transaction, so a killed worker blocks nobody.
    If another worker has the lock, try again until it is free, because that worker may have looked for work before ours
    was committed. After `SLICE_S` seconds wake the job again and return.
    """
    _run(name, step, _locked)


def run_outside_transaction(name: str, step: Callable[[], bool]) -> None:
    """Do the same as `run`, but without a transaction around `step`; for steps that call other services.

    `step` opens its own transactions, and must not call a service inside one: a slow service would keep the written
    rows locked, and reports and binds would wait for them. The job's lock belongs to the database connection and ends
    with it.
    """
    _run(name, step, alone)


def _run(name: str, step: Callable[[], bool], lock: Callable[[str], AbstractContextManager[bool]]) -> None:
    """Call `step` under `lock` until no work is left. After `SLICE_S` seconds wake the job and return."""
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
    """Try to take the lock of the job `name` for this database connection; yield True if it was free.

    It needs no open transaction, and ends with the connection if the worker is killed. A caller that gets False must
    leave the work to the holder of the lock, or wake the job.
    """
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
    """Open a transaction and try to take the job's lock in it; yield True if it was free."""
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s, %s)", [LOCK_CLASS, lock_id(name)])
        yield cursor.fetchone()[0]
