"""Finds clusters that no longer take up jobs: django-q2 dead-locks for ever when its idle workers are killed.

It runs as a thread of the supervisor, so that a database that hangs does not block the supervisor. A cluster is stuck
when a tick row of one of its jobs is old while no job of the cluster holds its advisory lock.
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
    """Checks every cluster once a second, and writes a byte to the file descriptor `wake` when one is stuck.

    `jobs` maps each job to (cluster, lock class, lock id). A tick row is old after `stall_s` seconds.
    `seen` returns the results.
    """

    def __init__(self, jobs: dict[str, tuple[str, int, int]], dsn: str, stall_s: float, wake: int) -> None:
        super().__init__(daemon=True, name="tickwatch")
        self._jobs, self._dsn, self._stall_s, self._wake = jobs, dsn, stall_s, wake
        self._found: dict[str, str | None] = {}
        self._lock = threading.Lock()

    def seen(self) -> list[tuple[str, str | None]]:
        """Return and clear the results since the last call: (cluster, a job that it does not take up).

        The job is None if the cluster takes up all of them. Clusters that were not checked since then are left out.
        """
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
                time.sleep(1)  # the database is away: others restart it, and this thread connects again

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
