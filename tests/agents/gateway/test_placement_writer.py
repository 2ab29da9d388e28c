"""Test that agents that can write to Placement are sent each new writer epoch at once, over a real WebSocket."""

from __future__ import annotations

import pytest
from websockets.sync.client import ClientConnection

from accelerators import conductor
from accelerators.commands import command_queue, placement_delegation
from accelerators.commands.command_queue import CommandOrder
from accelerators.models import Command, Host
from agents import wire
from agents.gateway import command_dispatch
from agents.models import Agent
from placement_sync.jobs import writer_election
from tests.support.webserver import until
from tests.support.wireagent import OPS, WireAgent, ask, take_command

pytestmark = pytest.mark.django_db(transaction=True)


def connect_with_writes(agent: WireAgent, writes: str | None = "") -> ClientConnection:
    socket = agent.connect()
    socket.send(wire.encode_message(wire.Hello("9.9", "b", (), OPS, writes)))
    return socket


def receive_message(socket: ClientConnection) -> wire.Message | wire.UnknownMessage:
    return wire.decode_from_gateway(socket.recv(timeout=10))


def test_an_agent_that_can_write_is_sent_the_writer_epoch_at_hello_and_at_every_switch(agent: WireAgent) -> None:
    with connect_with_writes(agent) as socket:
        assert receive_message(socket) == wire.Writer(0)
        writer_election.switch_writer("agents", "olga")
        assert receive_message(socket) == wire.Writer(1)
        host = Host.objects.get()
        until(lambda: not placement_delegation.get_writer_statuses([host.id])[host.id].reason)
        with conductor.writing():
            command_queue.place_commands(
                [CommandOrder("placement", host=host.id, arguments={"writer": 1, "payload": "{}"})]
            )
        command = take_command(socket)
        assert (command.op, command.writer, command.payload, command.driver) == ("placement", 1, "{}", "")
        until(lambda: Command.objects.get().state == "taken")


def test_a_writer_switch_reaches_the_agent_although_the_notification_is_lost(
    agent: WireAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command_dispatch, "POLL_S", 0.1)
    monkeypatch.setattr("accelerators.runtime.pubsub.publish", lambda *_: None)
    with connect_with_writes(agent) as socket:
        assert receive_message(socket) == wire.Writer(0)
        writer_election.switch_writer("agents", "olga")
        assert receive_message(socket) == wire.Writer(1)


def test_C2_an_agent_without_placement_support_is_sent_no_writer_epoch(agent: WireAgent) -> None:
    with connect_with_writes(agent, None) as socket:
        until(lambda: Agent.objects.get().ops)
        writer_election.switch_writer("agents", "olga")
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
        host = Host.objects.get()
        assert (
            placement_delegation.get_writer_statuses([host.id])[host.id].reason
            == "its agent (release 9.9) does not support Placement writes: update it"
        )
    assert placement_delegation.get_writer_statuses([0])[0].reason == "no agent of this host has ever connected"
