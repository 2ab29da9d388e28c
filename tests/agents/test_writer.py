"""Agents that can write to Placement are told who the writer is, over the real socket, at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from websockets.sync.client import ClientConnection

from accelerators import conductor
from accelerators.commands import placement_delegation, placing
from accelerators.commands.placing import Order
from accelerators.models import Command, Host
from agents import credentials, enrolment, wire
from agents.gateway import command_dispatch
from agents.gateway.app import Gateway
from agents.models import Agent
from cyborgweb.settings.keys import Keys
from placement_sync.jobs import writer_election
from tests.agents.conftest import House
from tests.support.webserver import until
from tests.support.wireagent import OPS, WireAgent, ask, take

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def agent(house: House) -> Iterator[WireAgent]:
    house.gateway = Gateway(Keys(lease_flush_s=0.05))
    join = credentials.parse_join_string(enrolment.make_token("cmp1", address="http://x", hours=1, created_by="t"))
    yield WireAgent(house.port, token=join.secret)
    house.gateway.stop()


def writing(agent: WireAgent, writes: str | None = "") -> ClientConnection:
    socket = agent.connect()
    socket.send(wire.encode(wire.Hello("9.9", "b", (), OPS, writes)))
    return socket


def heard(socket: ClientConnection) -> wire.Message | wire.Unknown:
    return wire.decode_from_gateway(socket.recv(timeout=10))


def test_who_can_write_is_told_the_epoch_at_its_hello_and_at_every_change(agent: WireAgent) -> None:
    with writing(agent) as socket:
        assert heard(socket) == wire.Writer(0)
        writer_election.switch("agents", "olga")
        assert heard(socket) == wire.Writer(1)
        host = Host.objects.get()
        until(lambda: not placement_delegation.hands([host.id])[host.id].lacks)
        with conductor.writing():
            placing.place([Order("placement", host=host.id, arguments={"writer": 1, "payload": "{}"})])
        command = take(socket)
        assert (command.op, command.writer, command.payload, command.driver) == ("placement", 1, "{}", "")
        until(lambda: Command.objects.get().state == "taken")


def test_a_lost_ring_is_made_good_by_the_next_look(agent: WireAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_dispatch, "POLL_S", 0.1)
    monkeypatch.setattr("accelerators.runtime.pubsub.ring", lambda *_: None)
    with writing(agent) as socket:
        assert heard(socket) == wire.Writer(0)
        writer_election.switch("agents", "olga")
        assert heard(socket) == wire.Writer(1)


def test_C2_who_knows_nothing_of_it_is_told_nothing(agent: WireAgent) -> None:
    with writing(agent, None) as socket:
        until(lambda: Agent.objects.get().ops)
        writer_election.switch("agents", "olga")
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
        host = Host.objects.get()
        assert (
            placement_delegation.hands([host.id])[host.id].lacks
            == "its agent (release 9.9) does not support Placement writes: update it"
        )
    assert placement_delegation.hands([0])[0].lacks == "no agent of this host has ever connected"
