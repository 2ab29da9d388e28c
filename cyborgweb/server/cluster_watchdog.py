"""Finds clusters that no longer take up jobs: django-q2 dead-locks for ever when its idle workers are killed.

It runs as a thread of the supervisor, so that a database that hangs does not block the supervisor. A cluster is stuck
when a tick row of one of its jobs is old while no job of the cluster holds its advisory lock.
"""

from __future__ import annotations

import os
import threading
import time

import psycopg

FIND_STALLED_JOBS = """
SELECT t.name FROM tick t
WHERE t.at < clock_timestamp() - make_interval(secs => %s)
  AND NOT EXISTS (
    SELECT 1 FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.classid = %s AND l.objid = ANY(%s::oid[])
      AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database()))
"""


class ClusterWatchdog(threading.Thread):
    """Checks every cluster once a second, and writes a byte to the file descriptor `wake_fd` when one is stuck.

    `jobs` maps each job to (cluster, lock class, lock id), `dsn` is the database's connection string, and a tick row is
    old after `stall_s` seconds. The supervisor collects what was found with `take_results`.
    """

    def __init__(self, jobs: dict[str, tuple[str, int, int]], dsn: str, stall_s: float, wake_fd: int) -> None:
        super().__init__(daemon=True, name="tickwatch")
        self._jobs, self._dsn, self._stall_s, self._wake_fd = jobs, dsn, stall_s, wake_fd
        self._results: dict[str, str | None] = {}
        self._lock = threading.Lock()

    def take_results(self) -> list[tuple[str, str | None]]:
        """Return the newest result of each cluster since the last call, and forget these results. Thread-safe.

        A result is (cluster, job): the name of a job that the cluster does not take up, None if it takes up all its
        jobs. Clusters that were not checked since the last call are left out.
        """
        with self._lock:
            results, self._results = list(self._results.items()), {}
        return results

    def run(self) -> None:
        """Check every second, for ever, whether a cluster is stuck. Connect again if the database fails."""
        while True:
            try:
                with psycopg.connect(self._dsn, autocommit=True, connect_timeout=3) as connection:
                    while True:
                        self._check_clusters(connection)
                        time.sleep(1)
            except psycopg.Error:
                time.sleep(1)  # the database is away: others restart it, and this thread connects again

    def _check_clusters(self, connection: psycopg.Connection[tuple[str]]) -> None:
        """Store for each cluster the name of a job that it does not take up, or None; for each stuck cluster, wake the
        supervisor. Raises psycopg.Error if the database fails.
        """
        for cluster in {job[0] for job in self._jobs.values()}:
            cluster_jobs = {name: job for name, job in self._jobs.items() if job[0] == cluster}
            lock_class = next(iter(cluster_jobs.values()))[1]
            ids = [job[2] for job in cluster_jobs.values()]
            rows = connection.execute(FIND_STALLED_JOBS, (self._stall_s, lock_class, ids)).fetchall()
            stuck = next((name for (name,) in rows if name in cluster_jobs), None)
            with self._lock:
                self._results[cluster] = stuck
            if stuck:
                os.write(self._wake_fd, b"t")
