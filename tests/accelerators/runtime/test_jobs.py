"""Test how jobs are queued and run: many wake-ups make one task, none is lost, and a lock prevents parallel runs."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext
from django_q.models import OrmQ
from psycopg.errors import AdminShutdown, DeadlockDetected, LockNotAvailable

from accelerators.models import Tick
from accelerators.runtime import jobs
from tests.support.clocks import replace_sleep

pytestmark = pytest.mark.django_db(transaction=True)


def test_enqueuing_a_job_many_times_queues_one_task() -> None:
    for _ in range(50):
        jobs.enqueue_job("merge")
    assert Tick.objects.count() == OrmQ.objects.count() == 1
    assert OrmQ.objects.get().key == "ingest"


def test_enqueuing_a_running_job_queues_another_run() -> None:
    jobs.enqueue_job("sweep")

    def step() -> bool:
        jobs.enqueue_job("sweep")
        return False

    jobs.run_steps("sweep", step)
    assert Tick.objects.count() == 1 and OrmQ.objects.count() == 2


def test_runs_of_one_job_never_overlap_and_finish_all_work() -> None:
    remaining_work = [30]
    inside: list[int] = []
    overlaps: list[int] = []

    def step() -> bool:
        inside.append(1)
        overlaps.append(len(inside))
        if remaining_work[0]:
            remaining_work[0] -= 1
        inside.pop()
        return remaining_work[0] > 0

    def worker() -> None:
        jobs.run_steps("sweep", step)
        connection.close()

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert remaining_work == [0] and set(overlaps) == {1}


@pytest.mark.parametrize("cause", [DeadlockDetected, LockNotAvailable])
@pytest.mark.parametrize("run", [jobs.run_steps, jobs.run_steps_outside_transaction])
def test_a_step_that_loses_its_locks_to_another_transaction_is_repeated(
    cause: type[Exception], run: Callable[..., None]
) -> None:
    calls: list[int] = []

    def step() -> bool:
        calls.append(1)
        Tick.objects.create(name=f"step {len(calls)}")
        if len(calls) < 3:
            raise OperationalError("deadlock") from cause()
        return False

    run("sweep", step)
    assert len(calls) == 3
    if run is jobs.run_steps:
        assert [tick.name for tick in Tick.objects.all()] == ["step 3"], "a failed step is rolled back"


@pytest.mark.parametrize("run", [jobs.run_steps, jobs.run_steps_outside_transaction])
def test_the_pause_before_a_step_is_repeated_grows_until_a_step_succeeds(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step outside a transaction repeats its calls of Placement and Nova, too."""
    fails = [*[True] * 8, False, True, True, False]
    pauses: list[float] = []
    replace_sleep(monkeypatch, pauses.append)

    def step() -> bool:
        if fails.pop(0):
            raise OperationalError("locked") from LockNotAvailable()
        return bool(fails)

    run("sweep", step)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0, 0.0, 0.1, 0.2]


def test_any_other_error_of_the_database_ends_the_run_of_a_job() -> None:
    def step() -> bool:
        raise OperationalError("the database is gone") from AdminShutdown()

    with pytest.raises(OperationalError, match="is gone"):
        jobs.run_steps("sweep", step)


def test_periodic_jobs_are_each_queued_once_with_few_statements() -> None:
    """The gateway's writer queues these jobs while reports wait for it, so few statements matter on a slow database."""
    periodic_names = {name for name, job in jobs.JOBS.items() if job.periodic}
    former = min(periodic_names)
    jobs.enqueue_job(former)
    with CaptureQueriesContext(connection) as statements:
        jobs.enqueue_periodic_jobs()
    assert {tick.name for tick in Tick.objects.all()} == periodic_names
    assert OrmQ.objects.count() == len(periodic_names)
    assert len(statements) <= len(periodic_names) + 4
    with CaptureQueriesContext(connection) as statements:
        jobs.enqueue_periodic_jobs()
    assert len(statements) == 1 and OrmQ.objects.count() == len(periodic_names)


def test_requeuing_all_jobs_queues_every_job_of_one_cluster_again() -> None:
    jobs.enqueue_job("merge")
    jobs.requeue_all_jobs("ingest")
    assert {t.name for t in Tick.objects.all()} == {name for name, job in jobs.JOBS.items() if job.cluster == "ingest"}
    assert OrmQ.objects.count() == 2
