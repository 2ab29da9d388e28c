"""Test that rows of django-q2's tables, which the database's role can write, run no code in a cluster."""

from __future__ import annotations

from multiprocessing import Value
from pathlib import Path
from queue import Queue
from typing import Any

import pytest
from django.db import connection
from django.utils import timezone

from cyborgweb.management.commands import cluster

pytestmark = pytest.mark.django_db(transaction=True)


class Payload:
    """A pickled value that creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def fail() -> None:
    """Fail, as a job does whose table somebody has altered."""
    raise RuntimeError("no such table")


def test_a_forged_row_beside_a_failed_task_is_not_unpickled(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from django_q import monitor, worker
    from django_q.signals import post_execute_in_worker
    from picklefield.fields import dbsafe_encode

    forged = dbsafe_encode(Payload(tmp_path / "ran"), copy=False)
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO django_q_task (id, name, func, args, result, started, stopped, success, attempt_count)"
            " VALUES ('known', 'known', 'f', %s, %s, now(), now(), false, 0)",
            [str(forged), str(forged)],
        )
    tasks, results = Queue(), Queue()  # type: ignore[var-annotated]
    task = {"id": "known", "name": "known", "func": f"{__name__}.fail", "args": (), "kwargs": {}}
    tasks.put(task | {"started": timezone.now()})
    tasks.put("STOP")
    monkeypatch.setattr(monitor, "get_broker", lambda: None)
    post_execute_in_worker.connect(cluster.log_failed_task)
    try:
        worker.worker(tasks, results, Value("f", -1))  # type: ignore[arg-type]
        results.put("STOP")
        monitor.monitor(results, object())  # type: ignore[arg-type]
    finally:
        post_execute_in_worker.disconnect(cluster.log_failed_task)
    assert not (tmp_path / "ran").exists()
    assert "fail failed: no such table" in caplog.text


def test_django_q_calls_no_function_that_a_row_of_its_schedule_names() -> None:
    from django_q.conf import Conf

    assert Conf.SCHEDULER is False
