"""Declare background jobs, wake them from any process, and run them. Repeated wake-ups share one django-q2 task.

`enqueue_job` inserts the job's row into `tick`; only the process that inserted the row enqueues a task. The task
deletes the row before it works, so no wake-up is lost. The supervisor watches the rows: a row that nobody deletes means
that the cluster is stuck.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

from django.db import OperationalError, connection, transaction
from psycopg.errors import DeadlockDetected, LockNotAvailable

from accelerators.runtime.after_commit import call_after_commit
from accelerators.runtime.registry import Registry

log = logging.getLogger(__name__)

TIME_SLICE_S = 20.0
"""Seconds after which a job with more to do wakes itself again and returns. Well below the cluster's time-out."""
JOB_LOCK_PAUSE_S = 0.02
"""Seconds until a job tries again if another worker runs it."""
ROW_LOCK_PAUSE_S, MAX_ROW_LOCK_PAUSE_S = 0.1, 5.0
"""Seconds until a job repeats a step because another transaction had its rows locked: the first pause, which doubles
until a step succeeds, and the longest."""
LOCK_CLASS = 0x7161
"""First key of every job's PostgreSQL advisory lock; the second is `lock_id(name)`."""


@dataclass(frozen=True)
class Job:
    """A background job: the dotted name of a function that does all pending work, and the cluster that runs it.

    A `periodic` job is also woken every few seconds, because its work depends on the time (deadlines). A job with
    `intent_kind` is woken whenever an intent of that kind is raised.
    """

    function: str
    cluster: str = "work"
    periodic: bool = False
    intent_kind: str = ""


JOBS: Registry[Job] = Registry("job")
"""All background jobs. This module wakes them, and the jobs with an `intent_kind` are the handlers of intents."""


def has_handler(intent_kind: str) -> bool:
    """Return True if a job is registered for intents of this kind."""
    return any(job.intent_kind == intent_kind for job in JOBS.values())


def enqueue_handler_after_commit(intent_kind: str) -> None:
    """Wake the job for intents of this kind, if there is one, after the current transaction has committed.

    If waking fails then, the error is only logged; `backstop` wakes the job later.
    """
    for name, job in JOBS.items():
        if job.intent_kind == intent_kind:
            call_after_commit(enqueue_job, name)


def lock_id(name: str) -> int:
    """Return the second key of the job's advisory lock, a number of 31 bits that is not negative."""
    return zlib.crc32(name.encode()) & 0x7FFFFFFF


def enqueue_job(name: str) -> None:
    """Wake the job `name`. Call it after the commit of the changes that the job must see.

    A job is awake while its row is in `tick`; then this costs only the statement that finds the row. The task deletes
    the row before it looks for work. So if the row is still there after the caller's commit, the task will see the
    caller's changes. Raises KeyError if no such job is registered.
    """
    _enqueue_jobs([name])


def _enqueue_jobs(names: Iterable[str]) -> None:
    """Wake jobs in one transaction. Costs one statement if all of them are awake already.

    Rows are inserted in the order of their names, so that two processes which wake the same jobs cannot deadlock.
    Raises KeyError, and wakes none, if a job that is not awake is not registered.
    """
    from django_q.tasks import async_task

    sorted_names = sorted(names)
    with connection.cursor() as cursor:
        cursor.execute("SELECT name FROM tick WHERE name = ANY(%s)", [sorted_names])
        awake = {name for (name,) in cursor.fetchall()}
    asleep = [name for name in sorted_names if name not in awake]
    if not asleep:
        return
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SET LOCAL synchronous_commit TO off")
        cursor.execute(
            "INSERT INTO tick (name) SELECT unnest(%s::text[]) ON CONFLICT DO NOTHING RETURNING name", [asleep]
        )
        for (name,) in cursor.fetchall():
            job = JOBS[name]
            async_task(job.function, cluster=job.cluster, task_name=name)


def requeue_all_jobs(cluster: str | None = None) -> None:
    """Wake every job, or every job of `cluster`, with a new task even if it is awake already.

    Needed after a start, or after tasks were lost with the cluster that held them.
    """
    for name, job in JOBS.items():
        if cluster in (None, job.cluster):
            clear_tick(name)
            enqueue_job(name)


def enqueue_periodic_jobs() -> None:
    """Wake all jobs that are `periodic`. Every gateway calls this every few seconds.

    One transaction wakes all of them, because reports wait for the gateway's writer meanwhile, and many statements
    would take long when the database is slow.
    """
    _enqueue_jobs(name for name, job in JOBS.items() if job.periodic)


def backstop() -> None:
    """Wake all jobs. The process of the cluster `work` calls this once a minute.

    Therefore a job that some code forgot to wake is late by at most a minute.
    """
    _enqueue_jobs(JOBS)


def clear_tick(name: str) -> None:
    """Delete the job's `tick` row, so that the next wake-up enqueues a task. Call it before looking for work."""
    with connection.cursor() as cursor:
        cursor.execute("DELETE FROM tick WHERE name = %s", [name])


def run_steps(name: str, step: Callable[[], bool]) -> None:
    """Delete the job's `tick` row, then call `step` under the job's lock until it returns False (no more work).

    Each `step` runs in its own transaction, and the lock ends with that transaction, so a killed worker blocks nobody.
    If another worker has the lock, try again every 20 ms, because that worker may have looked for work before the
    changes of the latest wake-up were committed. A step that ends in a deadlock, or cannot get a lock in time, is
    rolled back and repeated after a pause, which grows until a step succeeds. After `TIME_SLICE_S` seconds wake the job
    again and return. Any other exception of `step` ends the run and is raised.
    """
    _run_steps_under_lock(name, step, _try_transaction_lock)


def run_steps_outside_transaction(name: str, step: Callable[[], bool]) -> None:
    """Do the same as `run_steps`, but without a transaction around `step`; for steps that call other services.

    `step` opens its own transactions, and must not call a service inside one: a slow service would keep the written
    rows locked, and reports and binds would wait for them. The job's lock belongs to the database connection and ends
    with it.
    """
    _run_steps_under_lock(name, step, try_connection_lock)


def _run_steps_under_lock(
    name: str, step: Callable[[], bool], try_lock: Callable[[str], AbstractContextManager[bool]]
) -> None:
    """Delete the job's `tick` row, then call `step` under `try_lock` until no work is left.

    A step outside a transaction may have called services before it lost its locks. Therefore the pause before it is
    repeated grows. After `TIME_SLICE_S` seconds wake the job again and return.
    """
    clear_tick(name)
    end, row_lock_pause_s = time.monotonic() + TIME_SLICE_S, ROW_LOCK_PAUSE_S
    while time.monotonic() < end:
        try:
            with try_lock(name) as acquired:
                if acquired and not step():
                    return
                pause_s = 0.0 if acquired else JOB_LOCK_PAUSE_S
            if acquired:
                row_lock_pause_s = ROW_LOCK_PAUSE_S
        except OperationalError as error:
            if not isinstance(error.__cause__, DeadlockDetected | LockNotAvailable):
                raise
            log.info("the job %s repeats a step, because another transaction had its rows locked: %s", name, error)
            pause_s, row_lock_pause_s = row_lock_pause_s, min(2 * row_lock_pause_s, MAX_ROW_LOCK_PAUSE_S)
        time.sleep(pause_s)
    enqueue_job(name)


@contextmanager
def try_connection_lock(name: str) -> Iterator[bool]:
    """Try, without waiting, to take the lock of the job `name` for this database connection; yield True if it was free.

    The lock ends with the block, or with the connection if the worker is killed; it needs no transaction. A caller that
    gets False must leave the work to the holder of the lock, or wake the job.
    """
    key = [LOCK_CLASS, lock_id(name)]
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_lock(%s, %s)", key)
        acquired: bool = cursor.fetchone()[0]
    try:
        yield acquired
    finally:
        if acquired:
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_advisory_unlock(%s, %s)", key)


@contextmanager
def _try_transaction_lock(name: str) -> Iterator[bool]:
    """Open a transaction and try to take the job's lock in it, without waiting; yield True if it was free.

    The transaction ends with the block, and the lock with the transaction.
    """
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute("SELECT pg_try_advisory_xact_lock(%s, %s)", [LOCK_CLASS, lock_id(name)])
        yield cursor.fetchone()[0]
