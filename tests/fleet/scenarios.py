"""The scenarios of a fleet. Each leaves fleet and product without faults and returns the lines of its own verdict."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.fleet import neighbours, verdict
from tests.fleet import soak as soaking
from tests.fleet.installation import FleetSnapshot, Installation
from tests.fleet.verdict import PromiseLine
from tests.support.long import scaled

SLOW_S = scaled(10.0, 600.0)
LOCKED_S = 10.0
"""How long the locks are held, at least: longer than a handshake may wait for the database."""
MAX_WAIT_S = 30.0
"""How long hosts without a fault may wait for their acknowledgement while other hosts have faults."""
DELAY_S = 0.2
"""Delay of each statement that admits an agent, stores a report or merges one, while the database is slow."""
DELAYED_TABLES = ("spool", "agents_lease", "agents_agent", "accelerators_device", "accelerators_event")
ADD_DELAY = f"""
CREATE FUNCTION slow_down() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_sleep({DELAY_S}); RETURN NULL; END';
""" + "".join(
    f"CREATE TRIGGER slow_down BEFORE INSERT OR UPDATE OR DELETE ON {table} EXECUTE FUNCTION slow_down();"
    for table in DELAYED_TABLES
)
REMOVE_DELAY = "DROP FUNCTION slow_down CASCADE"
LOCK = "LOCK TABLE spool, agents_lease IN ACCESS EXCLUSIVE MODE"
"""Locks the tables that every admission of an agent and every report needs."""


@dataclass
class ScenarioRun:
    """A run of a scenario: the installation, the view, and how long it may take until everything is settled."""

    installation: Installation
    show: Callable[[FleetSnapshot], None]
    patience_s: float
    hold_s: float
    """How long unrest or an outage lasts."""
    soak_s: float = 180.0
    """How long the soak lasts."""
    seed: int = 0
    """Determines when and in which order the soak kills parts of the product, and the choices of hostile neighbours."""
    neighbours_s: float = 600.0
    """How long each of the three runs beside hostile and slow neighbours lasts."""
    factor: float = 2.0
    """How many times as long as in the control run the well-behaved may wait; 0 only reports it."""
    database_delay_s: float = neighbours.DATABASE_DELAY_S
    """The latency of the slow database."""

    def watch(self, seconds: float, database: bool = True) -> None:
        """Take and show a snapshot twice a second for `seconds`."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.show(self.installation.take_snapshot(database))
            time.sleep(0.5)

    def wait_until_settled(self) -> bool:
        """Wait until everything is settled; return False after `patience_s`."""
        return verdict.wait_until_settled(self.installation, self.patience_s, self.show)[0]

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Run a command of the fleet."""
        return self.installation.fleet.ask(do, **arguments)


def cold_start(run: ScenarioRun) -> list[PromiseLine]:
    """A new cloud: no host has ever connected, then all connect at once and report."""
    run.installation.power_on()
    return []


def power_return(run: ScenarioRun) -> list[PromiseLine]:
    """The power fails on all hosts at once and returns on all at once; half of the hosts have changed meanwhile."""
    run.installation.power_on()
    run.wait_until_settled()
    gone = run.ask("power_off")["gone"]
    run.watch(1.0)
    run.ask("change", share=0.5)
    began = time.monotonic()
    run.ask("power_on")
    done = run.wait_until_settled()
    took = f"{gone} agents gone and back, settled {time.monotonic() - began:.1f} s after the power"
    return [PromiseLine("power is back", took, done and gone == run.installation.count)]


def web_restart(run: ScenarioRun) -> list[PromiseLine]:
    """The web process is killed with kill -9 while reports arrive."""
    run.installation.power_on()
    run.wait_until_settled()
    before = run.installation.product.child("cyborgweb.server.web_server")
    run.ask("set_unrest", changes_per_s=run.installation.count / 5)
    run.watch(run.hold_s / 4)
    run.installation.kill("cyborgweb.server.web_server")
    run.watch(run.hold_s)
    run.ask("set_unrest")
    done = run.wait_until_settled()
    after = run.installation.product.child("cyborgweb.server.web_server")
    return [PromiseLine("another web", f"process {before}, then {after}", done and before != after)]


def postgres_restart(run: ScenarioRun) -> list[PromiseLine]:
    """PostgreSQL is killed with kill -9 while reports arrive and are merged; it recovers from its log."""
    run.installation.power_on()
    run.wait_until_settled()
    run.ask("set_unrest", changes_per_s=run.installation.count / 5)
    run.watch(run.hold_s / 4)
    before = run.installation.kill_database()
    run.watch(run.hold_s)
    run.ask("set_unrest")
    done = run.wait_until_settled()
    after = run.installation.get_postmaster_pid()
    return [PromiseLine("another database", f"process {before}, then {after}", done and before != after)]


def slow_database(run: ScenarioRun) -> list[PromiseLine]:
    """All agents come back while every write to the database takes 0.2 s longer; the database is never locked."""
    run.installation.power_on()
    run.wait_until_settled()
    run.ask("power_off")
    run.ask("change")
    acknowledged = run.installation.take_snapshot().counts.get("acknowledged", 0)
    with run.installation.connect(autocommit=True) as database:
        database.execute(ADD_DELAY)
        try:
            run.ask("power_on")
            run.watch(max(SLOW_S, run.hold_s))
            slowed = run.installation.take_snapshot()
        finally:
            database.execute(REMOVE_DELAY)
    more = slowed.counts.get("acknowledged", 0) - acknowledged
    done = run.wait_until_settled()
    found = f"{slowed.connected} connected and {more} reports acknowledged while every write was slow"
    return [PromiseLine("slow, but it goes on", found, done and slowed.connected > 0 and more > 0)]


def locked_database(run: ScenarioRun) -> list[PromiseLine]:
    """All agents come back while locks prevent that an agent is admitted or a report is stored."""
    run.installation.power_on()
    run.wait_until_settled()
    run.ask("power_off")
    run.ask("change")
    with run.installation.connect() as blocker:
        blocker.execute(LOCK)
        run.ask("power_on")
        run.watch(max(LOCKED_S, run.hold_s), database=False)
        blocked = run.installation.take_snapshot(database=False)
    done = run.wait_until_settled()
    found = f"{blocked.connected} connected, {blocked.sent_away} attempts told to come back while nothing was answered"
    return [PromiseLine("nobody waits in vain", found, done and blocked.connected == 0 and blocked.sent_away > 0)]


def half_bad(run: ScenarioRun) -> list[PromiseLine]:
    """Half of the hosts have a bad driver: it fails, flaps, and causes reports that are too large."""
    run.installation.power_on(bad=0.5)
    run.wait_until_settled()
    run.ask("set_unrest", bad_per_s=run.installation.count / 10)
    run.watch(run.hold_s / 2)
    began, good = time.monotonic(), run.ask("change", good=True)["changed"]
    while run.ask("get_totals")["good_owing"] and time.monotonic() - began < run.patience_s:
        run.show(run.installation.take_snapshot())
        time.sleep(0.2)
    took = time.monotonic() - began
    run.watch(run.hold_s / 2)
    bad = run.installation.take_snapshot().counts.get("oversized", 0)
    run.ask("set_unrest")
    done = run.wait_until_settled()
    found = f"{good} of them acknowledged within {took:.1f} s, while {bad} oversized reports were refused"
    return [PromiseLine("the good are not held up", found, done and bad > 0 and took < MAX_WAIT_S)]


def soak(run: ScenarioRun) -> list[PromiseLine]:
    """Agents and every part of the product are killed at random for --soak seconds; memory of web stays flat."""
    return soaking.soak(run)


SCENARIOS: dict[str, Callable[[ScenarioRun], list[PromiseLine]]] = {
    function.__name__.replace("_", "-"): function
    for function in (cold_start, power_return, web_restart, postgres_restart, slow_database, locked_database, half_bad)
}


def hostile_neighbours(run: ScenarioRun) -> list[PromiseLine]:
    """A hostile agent and tenant beside slow services for --hostile seconds, and two control runs without them."""
    return neighbours.hostile_neighbours(run)


LONG_SCENARIOS: dict[str, Callable[[ScenarioRun], list[PromiseLine]]] = {
    "soak": soak,
    "hostile-neighbours": hostile_neighbours,
}
"""Scenarios that take minutes; they run only by name, not as part of `all`."""
NEIGHBOURS = "hostile-neighbours"
"""The scenario that needs an installation of its own (`neighbours.running_beside_neighbours`)."""


def run_and_judge(name: str, run: ScenarioRun) -> list[PromiseLine]:
    """Run a scenario to its end and return its verdict. Another one can follow on the same installation."""
    run.ask("reset_counters")
    run.installation.snapshots.clear()
    before, began = run.installation.take_snapshot(), time.monotonic()
    more = (SCENARIOS | LONG_SCENARIOS)[name](run)
    done = run.wait_until_settled()
    return verdict.judge(run.installation, done, began, before, more)
