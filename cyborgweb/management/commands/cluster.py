"""`manage.py cluster NAME`: run one django-q2 cluster, after waking the jobs that wait in it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from typing import Any

from django.core.management.base import BaseCommand
from django.db import Error, connection

from accelerators.runtime import jobs

log = logging.getLogger(__name__)

BACKSTOP_INTERVAL_S = 60.0
"""Seconds between two times at which all jobs are woken."""


class Command(BaseCommand):
    """Run one django-q2 cluster in this process."""

    help = "Run the background jobs of one cluster: `ingest` merges reports, `work` does everything else."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the cluster's name."""
        parser.add_argument("name", choices=["ingest", "work"])

    def handle(self, *args: Any, **options: Any) -> None:
        """Wake all jobs of the cluster, then run the cluster; the process goes on until the cluster is stopped.

        For `work`, also wake all jobs once a minute. If Q_CLUSTER_NAME is not the cluster's name, the process first
        replaces itself, because django-q2 reads the variable when it is imported.
        """
        name = options["name"]
        if os.environ.get("Q_CLUSTER_NAME") != name:  # django_q has read it already, when it was imported
            os.environ["Q_CLUSTER_NAME"] = name
            os.execv(sys.executable, [sys.executable, *sys.argv])
        from django_q.cluster import Cluster
        from django_q.signals import post_execute_in_worker

        post_execute_in_worker.connect(log_failed_task)
        jobs.requeue_all_jobs(name)
        connection.close()  # the worker processes that are forked must not share the connection
        cluster = Cluster()
        cluster.start()
        while cluster.sentinel.is_alive():
            cluster.sentinel.join(BACKSTOP_INTERVAL_S)
            if name == "work" and cluster.sentinel.is_alive():
                _wake_all_jobs()


def log_failed_task(task: dict[str, Any], **_signal: Any) -> None:
    """Log a task that failed, and let django-q2 treat it as done; called in the worker.

    django-q2 would store a failed task, and for that read a row with pickled values, which can run any code. With this
    and without django-q2's scheduler, which calls any function that a row names, somebody who can only write to the
    database cannot run code in the process that has the key of the seals.
    """
    if not task["success"]:
        log.error("the task %s failed: %s", task["func"], task["result"])
        task["success"] = True


def _wake_all_jobs() -> None:
    """Wake all jobs (`jobs.backstop`). If the database does not answer, log it; the next minute tries again."""
    try:
        jobs.backstop()
    except Error as error:
        log.warning("the jobs cannot be woken now, the next minute tries again: %s", error)
    finally:
        connection.close()
