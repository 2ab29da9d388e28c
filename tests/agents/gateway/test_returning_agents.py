"""Test that agents which connect again after a long outage are up at once, and that many of them cost few writes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import pairwise
from time import monotonic

import pytest
from django.db import OperationalError, connection
from django.db.models.functions import Now
from websockets.sync.client import ClientConnection

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import AgentState, EventSource, RolloutOp
from accelerators.models import DriverWish, Host, Tick
from accelerators.workflows import driver_rollouts
from accelerators.workflows.driver_config import DriverChange
from agents import liveness, wire
from agents.gateway.asgi_app import AgentGateway
from agents.gateway.leases import RETURN_FLUSH_S, LeaseBuffer
from agents.models import Agent, Lease
from cyborgweb.settings.keys import Keys
from drivers.inventory import DriverReport
from tests.agents.conftest import GatewaySlot
from tests.support.reports import apply_report
from tests.support.statements import count_call_statements
from tests.support.webserver import until
from tests.support.wireagent import WireAgent, ask

pytestmark = pytest.mark.django_db(transaction=True)
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")
INSTALL = DriverChange(RolloutOp.INSTALL, "test_driver")
DEADLINE_S = 3.0
OPS = ("configure",)


@pytest.fixture
def gateway(gateway_slot: GatewaySlot) -> Iterator[AgentGateway]:
    """Return a gateway whose periodic write of leases comes after ten minutes."""
    made = gateway_slot.gateway = AgentGateway(Keys(lease_flush_s=600.0))
    yield made
    made.stop()


def count_flushes(gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list to which the time of each write of leases is appended from now on."""
    flush, times = gateway.leases.flush, list[float]()

    def flush_and_count() -> bool:
        if is_written := flush():
            times.append(monotonic())
        return is_written

    monkeypatch.setattr(gateway.leases, "flush", flush_and_count)
    return times


def enrol(gateway_slot: GatewaySlot, *names: str) -> list[WireAgent]:
    """Enrol an agent for each of these hosts, silent for an hour, and return them."""
    with conductor.writing():
        hosts = Host.objects.bulk_create(Host(name=name, node=name) for name in names)
    agents = [WireAgent(gateway_slot.port, name) for name in names]
    Agent.objects.bulk_create(
        Agent(host=host, public_key=agent.public_key) for host, agent in zip(hosts, agents, strict=True)
    )
    Lease.objects.bulk_create(Lease(host=host, seen_at=Now() - timedelta(hours=1), epoch=1) for host in hosts)
    return agents


def list_states() -> set[AgentState]:
    """Return the states of all agents."""
    return {liveness.get_agent_state(agent) for agent in Agent.objects.select_related("host__lease")}


@contextmanager
def connecting(agents: list[WireAgent]) -> Iterator[list[ClientConnection]]:
    """Connect all agents at the same time, say Hello, and wait until the gateway has read it."""

    def connect(agent: WireAgent) -> ClientConnection:
        socket = agent.connect_and_say_hello(OPS)
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
        return socket

    with ExitStack() as closing, ThreadPoolExecutor(len(agents)) as threads:
        yield [closing.enter_context(socket) for socket in threads.map(connect, agents)]


def test_an_agent_that_returns_after_an_outage_is_up_and_takes_orders_before_the_next_periodic_write(
    gateway: AgentGateway, gateway_slot: GatewaySlot
) -> None:
    agents = enrol(gateway_slot, "cmp1")
    host = Host.objects.get()
    apply_report(host, DriverReport("test_driver", state="absent"))
    assert list_states() == {AgentState.DOWN}
    with pytest.raises(RefusedError, match="is down"):
        driver_rollouts.start_rollout(INSTALL, [host], OLGA, source=EventSource.PERSON)
    with connecting(agents):
        until(lambda: list_states() == {AgentState.UP}, DEADLINE_S)
        until(lambda: Agent.objects.get().ops == "configure", DEADLINE_S)
        until(lambda: Tick.objects.filter(name="leases").exists(), DEADLINE_S)  # The host is not stale any more.
        driver_rollouts.start_rollout(INSTALL, [host], OLGA, source=EventSource.PERSON)
    assert DriverWish.objects.get().host == host


def test_an_agent_that_was_up_a_moment_ago_returns_without_a_write_of_leases(
    gateway: AgentGateway, gateway_slot: GatewaySlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = enrol(gateway_slot, "cmp1")
    with connecting(agents):
        until(lambda: list_states() == {AgentState.UP}, DEADLINE_S)
        until(lambda: not gateway.leases.has_returned_agents, DEADLINE_S)  # The first flush may come before the Hello.
    Lease.objects.update(seen_at=Now() + timedelta(hours=1))  # However long the next connection takes, it was up.
    flushes = count_flushes(gateway, monkeypatch)
    with connecting(agents):
        assert not gateway.leases.has_returned_agents
    assert flushes == []


@pytest.mark.slow
def test_agents_that_return_together_share_a_write_of_leases(
    gateway: AgentGateway, gateway_slot: GatewaySlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = enrol(gateway_slot, *(f"cmp{number:02}" for number in range(40)))
    flushes = count_flushes(gateway, monkeypatch)
    with connecting(agents):
        until(lambda: list_states() == {AgentState.UP}, DEADLINE_S)
    pauses = [later - earlier for earlier, later in pairwise(flushes)]
    assert pauses and min(pauses) >= RETURN_FLUSH_S
    assert len(flushes) < len(agents) / 2


def test_a_write_of_the_leases_of_many_returned_agents_costs_as_many_statements_as_that_of_one(
    gateway_slot: GatewaySlot,
) -> None:
    leases = LeaseBuffer(600.0)

    def count_statements_of_return(hosts: list[Host]) -> int:
        for host in hosts:
            leases.note_heartbeat(host.pk, 1)
            leases.note_return(host.pk)
        leases._flushed_at = monotonic() - RETURN_FLUSH_S
        return count_call_statements(leases.flush)

    enrol(gateway_slot, *(f"cmp{number:03}" for number in range(200)))
    first, *others = Host.objects.all()
    leases.flush()
    assert count_statements_of_return([first]) == count_statements_of_return(others) == 1
    assert list_states() == {AgentState.UP}


def test_a_returned_agent_whose_row_is_locked_is_tried_again_after_the_short_pause(
    gateway_slot: GatewaySlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    enrol(gateway_slot, "cmp1", "cmp2")
    leases = LeaseBuffer(600.0)
    leases.flush()
    for host in Host.objects.all():
        leases.note_heartbeat(host.pk, 1)
    returned, other = Host.objects.order_by("name")
    leases.note_return(returned.pk)

    def leave_locked(host: Host) -> None:
        """Write leases half a second later while the row of this host is locked."""
        leases._flushed_at = monotonic() - RETURN_FLUSH_S
        write = leases._write_unlocked

        def write_others(rows: dict[int, object], how: object, locked: set[int]) -> dict[int, object]:
            kept = {pk: row for pk, row in rows.items() if pk == host.pk}
            locked.update(kept)
            return kept | write({pk: row for pk, row in rows.items() if pk != host.pk}, how, locked)

        with monkeypatch.context() as during_lock:
            during_lock.setattr(leases, "_write_unlocked", write_others)
            assert leases.flush()

    leave_locked(returned)
    assert leases.has_returned_agents and not leases.flush()
    leases.note_heartbeat(other.pk, 1)
    leave_locked(other)
    assert not leases.has_returned_agents, "the other agent has not returned"
    assert list_states() == {AgentState.UP}


def test_a_write_for_returned_agents_wakes_only_the_job_that_needs_it(
    gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[str] = []
    monkeypatch.setattr("accelerators.runtime.jobs.enqueue_periodic_jobs", lambda: woken.append("all"))
    monkeypatch.setattr("accelerators.runtime.jobs.enqueue_job", woken.append)
    for _ in range(3):
        gateway.leases.note_return(1)
        gateway.leases._flushed_at = monotonic() - RETURN_FLUSH_S
        gateway._writer._flush_leases()
    gateway._writer._flush_leases()
    assert woken == ["all", "leases", "leases"]


def test_a_write_of_the_leases_of_returned_agents_that_fails_is_repeated_at_once(
    gateway_slot: GatewaySlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    enrol(gateway_slot, "cmp1")
    leases = LeaseBuffer(600.0)
    leases.flush()
    leases.note_heartbeat(Host.objects.get().pk, 1)
    leases.note_return(Host.objects.get().pk)
    leases._flushed_at = monotonic() - RETURN_FLUSH_S

    def fail(*_: object) -> None:
        raise OperationalError("the connection is lost")

    with monkeypatch.context() as during_outage:
        during_outage.setattr(leases, "_write_leases", fail)
        with pytest.raises(OperationalError):
            leases.flush()
    assert leases.flush() and list_states() == {AgentState.UP}
    connection.close()
