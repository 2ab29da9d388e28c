"""The queue of django-q2 in the database, with the times of the database's clock.

With the times of the machines' own clocks, a task that one machine enqueues would wait on another one until the slower
clock has reached its time, and a running task would be started again by a machine whose clock is ahead.
"""

from __future__ import annotations

from datetime import timedelta
from time import sleep
from typing import Any

from django.db.models.functions import Now
from django_q.brokers.orm import ORM
from django_q.conf import Conf


class DatabaseClockBroker(ORM):  # type: ignore[misc]
    """django-q2's broker in the database. A task is free while its `lock` is not later than the database's clock."""

    def enqueue(self, task: str) -> Any:
        """Insert a task that is free at once; return its primary key."""
        return self.get_connection().create(key=self.list_key or Conf.CLUSTER_NAME, payload=task, lock=Now()).pk

    def dequeue(self) -> list[tuple[int, str]] | None:
        """Take up to Conf.BULK free tasks and return (primary key, payload) of each; after an empty look, wait for
        Conf.POLL seconds and return None."""
        free = list(self.get_connection().filter(key=self.list_key, lock__lte=Now())[: Conf.BULK])
        if not free:
            sleep(Conf.POLL)
            return None
        locked_until = Now() + timedelta(seconds=Conf.RETRY)
        rows = self.get_connection()
        # Another cluster may have been faster: then `lock` has changed.
        return [
            (task.pk, task.payload)
            for task in free
            if rows.filter(id=task.id, lock=task.lock).update(lock=locked_until)
        ]

    def queue_size(self) -> int:
        """Return the number of free tasks."""
        return int(self.get_connection().filter(key=self.list_key, lock__lte=Now()).count())

    def lock_size(self) -> int:
        """Return the number of tasks that a cluster has taken."""
        return int(self.get_connection().filter(key=self.list_key, lock__gt=Now()).count())
