"""Finds clusters that no longer take up work: django-q2 dead-locks for good when its idle workers are killed.

A thread of the supervisor, so that a database that hangs does not hang it. A tick row that is old while no job of its
cluster holds its advisory lock means that the cluster is stuck.
"""

from __future__ import annotations

import os
import threading
import time

import psycopg

STALLED = """
SELECT t.name FROM tick t
WHERE t.at < clock_timestamp() - make_interval(secs => %s)
  AND NOT EXISTS (
    SELECT 1 FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.classid = %s AND l.objid = ANY(%s::oid[])
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()))
"""


class TickWatch(threading.Thread):
    """`jobs` maps a job to (cluster, lock class, lock id); `seen()` hands out what was found since."""

    def __init__(self, jobs: dict[str, tuple[str, int, int]], dsn: str, stall_s: float, wake: int) -> None:
        super().__init__(daemon=True, name="tickwatch")
        self._jobs, self._dsn, self._stall_s, self._wake = jobs, dsn, stall_s, wake
        self._found: dict[str, str | None] = {}
        self._lock = threading.Lock()

    def seen(self) -> list[tuple[str, str | None]]:
        """(cluster, the job it does not take up; None where it takes up all); clusters not looked at are left out."""
        with self._lock:
            found, self._found = list(self._found.items()), {}
        return found

    def run(self) -> None:
        while True:
            try:
                with psycopg.connect(self._dsn, autocommit=True, connect_timeout=3) as connection:
                    while True:
                        self._look(connection)
                        time.sleep(1)
            except psycopg.Error:
                time.sleep(1)  # the database is away: its restart is not our business, ours goes on after it

    def _look(self, connection: psycopg.Connection[tuple[str]]) -> None:
        for cluster in {job[0] for job in self._jobs.values()}:
            mine = {name: job for name, job in self._jobs.items() if job[0] == cluster}
            lock_class = next(iter(mine.values()))[1]
            ids = [job[2] for job in mine.values()]
            rows = connection.execute(STALLED, (self._stall_s, lock_class, ids)).fetchall()
            stuck = next((name for (name,) in rows if name in mine), None)
            with self._lock:
                self._found[cluster] = stuck
            if stuck:
                os.write(self._wake, b"t")
