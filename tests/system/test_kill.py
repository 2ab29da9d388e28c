"""Test that a process killed under load is restarted, and that no acknowledged report is lost (promise L2)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator

import pytest

from tests.system.conftest import fresh_folder
from tests.system.load import Load
from tests.system.machine import FAKE_CARD, HOST, device_states, run_fake_command, wait_for_fake_state
from tests.system.processes import ObservedProcess
from tests.system.product import Product, running

pytestmark = pytest.mark.system
SETTINGS = {"CYBORG_HOST_NAME": HOST, "CYBORG_HOST_NODE": "here", "CYBORG_RESCAN_S": "2"}


@pytest.fixture(scope="module")
def load() -> Iterator[Load]:
    """A load of hosts that have joined one product, which all tests of this file share."""
    with fresh_folder() as folder, running(Product(folder / "state", SETTINGS)) as product:
        product.until(lambda: product.drivers(), 30, "the agent's drivers run")
        yield Load(product)


def find_child(name: str) -> Callable[[Product], list[ObservedProcess]]:
    """Return a function that finds the supervisor's child `name` without its descendants."""
    return lambda product: [one for one in [product.child(name)] if one]


def find_group(name: str) -> Callable[[Product], list[ObservedProcess]]:
    """Return a function that finds the cluster `name` with all its processes."""

    def members(product: Product) -> list[ObservedProcess]:
        top = product.child(name)
        return [top, *list_cluster_members(product, name)] if top else []

    return members


def list_cluster_members(product: Product, name: str) -> list[ObservedProcess]:
    """Return all processes of a cluster except its first; [] until all of its workers run."""
    top, count = product.child(name), {"ingest": 1, "work": 2}[name]
    workers = product.workers(name, count)
    return [one for one in product.descendants(top) if workers] if top else []


def find_driver(name: str) -> Callable[[Product], list[ObservedProcess]]:
    """Return a function that finds the process of driver `name`. The agent restarts it when it next asks the driver."""
    return lambda product: [one for one in product.drivers() if one.command.endswith(f" {name}")]


def find_postmaster(product: Product) -> list[ObservedProcess]:
    """Find PostgreSQL's main process. Its other processes end when it is gone."""
    return [one for one in [product.postmaster()] if one]


VICTIMS = {
    "web": (find_child("web"), r"web +\| ended with -9; starting it again"),
    "agent": (find_child("agent"), r"agent +\| ended with -9; starting it again"),
    "a driver": (find_driver("fake_driver"), ""),
    "ingest's workers": (lambda product: product.workers("ingest", 1), ""),
    "ingest's group": (find_group("ingest"), r"ingest +\| ended with -9; starting it again"),
    "work's workers": (lambda product: product.workers("work", 2), ""),
    "work's group": (find_group("work"), r"work +\| ended with -9; starting it again"),
    "postgres": (find_postmaster, r"postgres +\| ended with -9: starting it again"),
}


@pytest.mark.parametrize("at_rest", [False, True], ids=["amid reports", "when all is acknowledged"])
@pytest.mark.parametrize("victim", VICTIMS)
def test_L2_no_acknowledged_report_is_lost_when_a_part_is_killed_and_it_is_restarted(
    load: Load, victim: str, at_rest: bool
) -> None:
    """The hosts stop reporting at the kill, because a later report would hide the loss of the last acknowledged one."""
    product = load.product
    find, said = VICTIMS[victim]
    product.until(lambda: find(product), 30, f"{victim} is there")
    product.remember_processes()
    with load.reporting():
        load.until_acknowledged(20)
        if at_rest:
            load.hold()
            if victim.startswith("ingest"):
                load.until_taken()
        # Look again: the supervisor may just have replaced a cluster whose workers the previous test killed.
        place = product.log_position()
        victims = product.until(lambda: find(product), 30, f"{victim} is there")
        kill_processes(victims)
    if said:
        product.wait_for_log(said, after=place)
    load.until_stored()
    with load.reporting():
        load.until_acknowledged(20)
        successors = product.until(lambda: find(product), 60, f"{victim} is there again")
    load.until_stored()
    assert not set(victims) & set(successors)
    product.until(lambda: not [one for one in victims if one.alive()], 10, f"{victim} is gone")


def kill_processes(victims: list[ObservedProcess]) -> None:
    """Kill these processes with SIGKILL; ignore those that have already ended because another one was killed."""
    for one in victims:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one.pid, signal.SIGKILL)


def test_a_cluster_whose_idle_workers_were_killed_is_replaced(load: Load) -> None:
    """A killed worker of django-q2 may hold the lock of the task queue; its cluster is then dead-locked for ever."""
    product = load.product
    load.until_stored()
    tries = 0
    for name, count in (("ingest", 1), ("work", 2)):
        first = product.until(lambda name=name: product.child(name), 30, f"{name} runs")
        place = product.log_position()
        # If the killed worker did not hold the lock at that moment, its cluster goes on; then kill again.
        while not is_reported_stuck(product, name, place):
            kill_processes(product.until(lambda n=name, c=count: product.workers(n, c), 30, f"{name} is complete"))
            if name == "ingest":
                with load.reporting():
                    load.until_acknowledged(1)
            with contextlib.suppress(AssertionError):
                product.until(lambda n=name, p=place: is_reported_stuck(product, n, p), 8, "")
            tries += 1
            assert tries < 8, product.log()[place:][-4000:]
        product.until(lambda f=first, n=name: product.child(n) not in (None, f), 30, f"{name} is another one")
    load.until_stored()


def is_reported_stuck(product: Product, cluster: str, place: int) -> bool:
    """Tell whether the log after `place` says that this cluster is stuck."""
    return f"cluster {cluster} does not take up job" in product.log()[place:]


def test_changes_made_while_the_gateway_was_away_are_reported_when_it_is_back(load: Load) -> None:
    product = load.product
    wait_for_fake_state(product, "ready")
    web, agent = product.child("web"), product.child("agent")
    assert web and agent
    os.kill(web.pid, signal.SIGSTOP)
    try:
        run_fake_command(product, "unplug", "0")
        run_fake_command(product, "count", "3")
    finally:
        os.kill(web.pid, signal.SIGKILL)
    wait_for_fake_state(product, "missing")
    product.until(lambda: len([v for v, _ in device_states(product) if v == FAKE_CARD[0]]) == 3, 30, "three fake FPGAs")
    run_fake_command(product, "reset")
    wait_for_fake_state(product, "ready")
    assert product.child("agent") == agent


@pytest.mark.parametrize("at_rest", [False, True], ids=["amid reports", "when all is acknowledged"])
def test_all_processes_end_with_a_killed_supervisor_and_a_new_start_loses_nothing(load: Load, at_rest: bool) -> None:
    product = load.product
    product.until(lambda: len(product.drivers()) == 2, 30, "the agent's drivers run")
    product.remember_processes()
    with load.reporting():
        load.until_acknowledged(20)
        if at_rest:
            load.hold()
        product.kill()
    product.wait_until_nothing_is_left()
    product.start()
    load.until_stored()
    with load.reporting():
        load.until_acknowledged(20)
    load.until_stored()
