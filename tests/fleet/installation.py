"""The whole product on free ports with its own state directory, its fleet, and snapshots of both.

All processes die with the process that started them.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psycopg

from tests.bench.figures import cpu_s, rss_kb
from tests.bench.lab import Lab
from tests.bench.orders import CannotMeasure, Ordered
from tests.bench.whole import Whole, children, command, running, wait_for

SPOOL_AND_DEVICES = """
SELECT (SELECT count(*) FROM spool), (SELECT coalesce(extract(epoch FROM now() - min(received_at)), 0) FROM spool),
       (SELECT count(*) FROM accelerators_device d JOIN accelerators_host h ON h.id = d.host_id
        WHERE h.name LIKE 'bench-%' AND d.state <> 'missing'),
       (SELECT count(*) FROM accelerators_host WHERE name LIKE 'bench-%' AND stale_since IS NULL)
"""


@dataclass
class FleetSnapshot:
    """One snapshot of fleet and product. Values from the database are None while it does not answer."""

    at: float
    connected: int = 0
    owing: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    refused: dict[str, int] = field(default_factory=dict)
    spool: int | None = None
    spool_s: float = 0.0
    devices: int | None = None
    up: int = 0
    cpu: dict[str, float] = field(default_factory=dict)
    """CPU seconds so far of each part of the product."""
    web_kb: int = 0

    @property
    def sent_away(self) -> int:
        """Return the number of attempts that the gateway answered with 503, which means to retry later."""
        return self.refused.get("503", 0)


class Fleet(Ordered):
    """The process `tests.fleet.hosts`: `fleet.ask("change", share=0.1)` runs its command `change`."""

    def __init__(self, lab: Lab) -> None:
        with lab.log("fleet") as log:
            super().__init__("tests.fleet.hosts", log)


@dataclass
class Installation:
    """One product and `count` enrolled hosts, whose agents do not run yet."""

    lab: Lab
    whole: Whole
    fleet: Fleet
    count: int
    devices: int
    seen: list[FleetSnapshot] = field(default_factory=list)

    def power_on(self, bad: float = 0.0) -> None:
        """Start all agents that are off; `bad` is the share of hosts with a bad driver."""
        self.fleet.ask("start", ports=[self.whole.port], count=self.count, devices=self.devices, bad=bad)

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]] | None:
        """Run a query on the product's database; return None if it does not answer within seconds."""
        try:
            with self.connection() as database:
                database.execute("SET statement_timeout = '5s'")
                return database.execute(statement, values or None).fetchall()
        except (psycopg.OperationalError, psycopg.errors.QueryCanceled):
            return None

    def connection(self, **more: Any) -> psycopg.Connection[Any]:
        """Open a connection to the product's database."""
        return psycopg.connect(
            host=str(self.lab.postgres.socket), user="postgres", dbname="cyborg", connect_timeout=2, **more
        )

    def look(self, database: bool = True) -> FleetSnapshot:
        """Take a snapshot of fleet, database and processes; append it to `seen` and return it."""
        told = self.fleet.ask("look")
        sight = FleetSnapshot(time.monotonic(), told["connected"], told["owing"], told["counts"], told["refused"])
        if database and (rows := self.rows(SPOOL_AND_DEVICES)):
            sight.spool, age, sight.devices, sight.up = rows[0]
            sight.spool_s = float(age)
        for name, word in (("web", "cyborgweb.server.web"), ("ingest", "cluster ingest"), ("work", "cluster work")):
            for pid in (pid for pid in children(self.whole.supervisor) if word in command(pid)):
                try:
                    sight.cpu[name] = _tree_cpu(pid)
                    if name == "web":
                        sight.web_kb = rss_kb(pid)
                except OSError:
                    continue  # it has just been killed
        self.seen.append(sight)
        return sight

    def kill(self, word: str) -> None:
        """Kill the child of the supervisor whose command line contains `word`, with SIGKILL."""
        os.kill(self.whole.child(word), signal.SIGKILL)

    def postmaster(self) -> int:
        """Return the process id of PostgreSQL's first process."""
        return self.whole.child(str(self.lab.postgres.data))

    def kill_database(self) -> int:
        """Kill PostgreSQL with SIGKILL and return its process id; the supervisor starts it again, and it recovers."""
        pid = self.postmaster()
        os.kill(pid, signal.SIGKILL)
        return pid


def _tree_cpu(pid: int) -> float:
    """Return the CPU seconds of a process and all its descendants."""
    return cpu_s(pid) + sum(_tree_cpu(child) for child in children(pid))


@contextmanager
def running_installation(state: Path, count: int, devices: int, **settings: str) -> Iterator[Installation]:
    """Run a new product that serves and has `count` enrolled hosts inside the context; remove all of it afterwards."""
    with Lab(state) as lab:
        lab.start_database()
        from tests.bench import fixtures

        fixtures.enrol(count)
        lab.stop_database()
        fleet = Fleet(lab)
        try:
            # The agent of this machine stays idle, because the fleet is measured.
            quiet = {"CYBORG_ENABLED_DRIVERS": "fake_driver", "CYBORG_PLACEMENT_ENDPOINT": "off"}
            with running(lab, **quiet | settings) as whole:
                there = Installation(lab, whole, fleet, count, devices)
                wait_for(lambda: there.rows("SELECT FROM accelerators_device LIMIT 1"), "the first merge")
                yield there
        finally:
            fleet.stop()


__all__ = ["CannotMeasure", "Fleet", "FleetSnapshot", "Installation", "running_installation", "wait_for"]
