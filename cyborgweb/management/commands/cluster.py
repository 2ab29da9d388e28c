"""`manage.py cluster NAME`: one django-q2 cluster, with its waiting jobs woken afresh."""

from __future__ import annotations

import argparse
import os
from typing import Any

from django.core.management.base import BaseCommand
from django.db import connection


class Command(BaseCommand):
    help = "Run the background jobs of one cluster: `ingest` merges reports, `work` does everything else."
    requires_system_checks: list[str] = []

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("name", choices=["ingest", "work"])

    def handle(self, *args: Any, **options: Any) -> None:
        name = options["name"]
        os.environ["Q_CLUSTER_NAME"] = name  # read by django_q.conf at its first import
        from django_q.cluster import Cluster
        from django_q.conf import Conf

        from accelerators import ticks

        assert name in (Conf.CLUSTER_NAME, Conf.PREFIX), "django_q was configured before its cluster was named"
        ticks.kick_all(name)
        connection.close()  # a fork must not share it
        Cluster().start()
