"""`manage.py cluster NAME`: run one django-q2 cluster, after waking the jobs that wait in it."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from django.core.management.base import BaseCommand
from django.db import connection


class Command(BaseCommand):
    """Run one django-q2 cluster in this process."""

    help = "Run the background jobs of one cluster: `ingest` merges reports, `work` does everything else."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the cluster's name."""
        parser.add_argument("name", choices=["ingest", "work"])

    def handle(self, *args: Any, **options: Any) -> None:
        """Wake all jobs of the cluster, then run the cluster; the process goes on until the cluster is stopped.

        For `work`, also schedule the job `backstop`, once a minute. If Q_CLUSTER_NAME is not the cluster's name, the
        process first replaces itself, because django-q2 reads the variable when it is imported.
        """
        name = options["name"]
        if os.environ.get("Q_CLUSTER_NAME") != name:  # django_q has read it already, when it was imported
            os.environ["Q_CLUSTER_NAME"] = name
            os.execv(sys.executable, [sys.executable, *sys.argv])
        from django_q.cluster import Cluster
        from django_q.models import Schedule

        from accelerators.runtime import jobs

        if name == "work":
            minutely = {"func": "accelerators.runtime.jobs.backstop", "schedule_type": Schedule.MINUTES, "minutes": 1}
            Schedule.objects.update_or_create(name="backstop", defaults=minutely | {"cluster": name})
        jobs.requeue_all_jobs(name)
        connection.close()  # the worker processes that are forked must not share the connection
        Cluster().start()
