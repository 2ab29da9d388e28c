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
from typing import TYPE_CHECKING, Any

import psycopg

from tests.bench.figures import cpu_s, rss_kb
from tests.bench.lab import Lab
from tests.bench.product import RunningProduct, get_command_line, list_children, run_product, wait_for
from tests.bench.remote_calls import ChildProcess, MeasurementError

if TYPE_CHECKING:
    from tests.fleet.neighbours import Neighbours

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


class Fleet(ChildProcess):
    """The process `tests.fleet.hosts`: `fleet.ask("change", share=0.1)` runs its command `change`."""

    def __init__(self, lab: Lab) -> None:
        with lab.open_log("fleet") as log:
            super().__init__("tests.fleet.hosts", log)


@dataclass
class Installation:
    """One product and `count` enrolled hosts, whose agents do not run yet."""

    lab: Lab
    product: RunningProduct
    fleet: Fleet
    count: int
    devices: int
    snapshots: list[FleetSnapshot] = field(default_factory=list)
    neighbours: Neighbours | None = None
    """Its hostile and slow neighbours, if it was made with them."""
    extra_memory_kb: int = 0
    """What hostile clients may occupy in the memory of the web process, above what its agents need."""

    def power_on(self, bad: float = 0.0) -> None:
        """Start all agents that are off; `bad` is the share of hosts with a bad driver."""
        self.fleet.ask("start", ports=[self.product.port], count=self.count, devices=self.devices, bad=bad)

    def query(self, statement: str, *values: object) -> list[tuple[Any, ...]] | None:
        """Run a query on the product's database; return None if it does not answer within seconds."""
        try:
            with self.connect() as database:
                database.execute("SET statement_timeout = '5s'")
                return database.execute(statement, values or None).fetchall()
        except (psycopg.OperationalError, psycopg.errors.QueryCanceled):
            return None

    def connect(self, **more: Any) -> psycopg.Connection[Any]:
        """Open a connection to the product's database."""
        return psycopg.connect(
            host=str(self.lab.postgres.socket), user="postgres", dbname="cyborg", connect_timeout=2, **more
        )

    def take_snapshot(self, database: bool = True) -> FleetSnapshot:
        """Take a snapshot of fleet, database and processes; append it to `snapshots` and return it."""
        totals = self.fleet.ask("get_totals")
        snapshot = FleetSnapshot(
            time.monotonic(), totals["connected"], totals["owing"], totals["counts"], totals["refused"]
        )
        if database and (rows := self.query(SPOOL_AND_DEVICES)):
            snapshot.spool, age, snapshot.devices, snapshot.up = rows[0]
            snapshot.spool_s = float(age)
        for name, word in (
            ("web", "cyborgweb.server.web_server"),
            ("ingest", "cluster ingest"),
            ("work", "cluster work"),
        ):
            for pid in (pid for pid in list_children(self.product.supervisor) if word in get_command_line(pid)):
                try:
                    snapshot.cpu[name] = _sum_tree_cpu(pid)
                    if name == "web":
                        snapshot.web_kb = rss_kb(pid)
                except OSError:
                    continue  # it has just been killed
        self.snapshots.append(snapshot)
        return snapshot

    def kill(self, word: str) -> None:
        """Kill the child of the supervisor whose command line contains `word`, with SIGKILL."""
        os.kill(self.product.child(word), signal.SIGKILL)

    def get_postmaster_pid(self) -> int:
        """Return the process id of PostgreSQL's first process."""
        return self.product.child(str(self.lab.postgres.data))

    def kill_database(self) -> int:
        """Kill PostgreSQL with SIGKILL and return its process id; the supervisor starts it again, and it recovers."""
        pid = self.get_postmaster_pid()
        os.kill(pid, signal.SIGKILL)
        return pid


def _sum_tree_cpu(pid: int) -> float:
    """Return the CPU seconds of a process and all its descendants."""
    return cpu_s(pid) + sum(_sum_tree_cpu(child) for child in list_children(pid))


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
            defaults = {"CYBORG_ENABLED_DRIVERS": "fake_driver", "CYBORG_PLACEMENT_ENDPOINT": "off"}
            with run_product(lab, **defaults | settings) as product:
                installation = Installation(lab, product, fleet, count, devices)
                wait_for(lambda: installation.query("SELECT FROM accelerators_device LIMIT 1"), "the first merge")
                yield installation
        finally:
            fleet.stop()


__all__ = ["Fleet", "FleetSnapshot", "Installation", "MeasurementError", "running_installation", "wait_for"]
