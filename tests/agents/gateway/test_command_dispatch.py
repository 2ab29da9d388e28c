"""Tests of commands between gateway and agent over a real WebSocket: sending, resending, settling and acknowledging."""

from __future__ import annotations

import random

import pytest

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusedError
from accelerators.models import Command, Device, Event, Host
from accelerators.runtime import pubsub
from accelerators.workflows import command_endings
from agents import jobs, wire
from agents.gateway import command_dispatch
from agents.models import Agent
from tests.agents.conftest import GatewaySlot
from tests.support.reports import make_card, make_driver_report
from tests.support.webserver import until
from tests.support.wireagent import (
    OPS,
    WireAgent,
    ask,
    is_closed,
    make_join_secret,
    receive_command,
    receive_result_ack,
    send_result,
    take_command,
)

pytestmark = pytest.mark.django_db(transaction=True)
ADMIN_CALLER = Caller("olga", "u", frozenset({"admin"}), "p1")


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_dispatch, "POLL_S", 0.1)
    monkeypatch.setattr(command_dispatch, "RESEND_S", 0.3)


def make_report(*devices: object, seq: int = 1) -> wire.Report:
    drivers = (make_driver_report(*devices),)  # type: ignore[arg-type]
    return wire.Report(1, seq, wire.hash_report_content(drivers), drivers)


def place_logs_command() -> Command:
    return command_queue.order_host_command("logs", Host.objects.get().uuid, ADMIN_CALLER)


def current_state(command: Command) -> str:
    command.refresh_from_db()
    return command.state


@pytest.mark.slow
def test_a_command_goes_from_taken_to_started_to_succeeded_after_its_report_is_applied(agent: WireAgent) -> None:
    with agent.connect_and_say_hello(OPS) as socket:
        ask(socket, make_report(make_card(1, acts="reset")))
        jobs.merge()
        device = Device.objects.get()
        command = command_queue.order_device_command("reset", device.uuid, ADMIN_CALLER, reason="it hangs")
        heard = take_command(socket)
        assert (heard.number, heard.id, heard.op) == (command.id, str(command.uuid), "reset")
        assert (heard.driver, heard.key) == ("test_driver", device.key)
        assert 50 < heard.start_s <= 60 and heard.start_s < heard.end_s <= 300
        until(lambda: current_state(command) == "taken")
        for percent in range(0, 100, 10):
            socket.send(wire.encode_message(wire.Progress(heard.number, percent, f"step {percent}")))
        until(lambda: current_state(command) == "started" and command.percent == 90)
        report = make_report(make_card(1, acts="reset", status="degraded"), seq=2)
        ask(socket, report)
        send_result(socket, heard, epoch=1, seq=2, hash=report.hash)
        until(lambda: current_state(command) == "started" and command.answered_at)
        command_endings.run()
        assert current_state(command) == "started", "its report is not applied"
        jobs.merge()
        command_endings.run()
        assert receive_result_ack(socket) == command.id
        assert current_state(command) == "succeeded"
        send_result(socket, heard, "failed", "again")
        assert receive_result_ack(socket) == command.id, "heard again, it is settled already"
        assert current_state(command) == "succeeded"


def test_a_result_whose_report_is_already_applied_is_settled_at_once(agent: WireAgent) -> None:
    with agent.connect_and_say_hello(OPS) as socket:
        report = make_report(make_card(1))
        ask(socket, report)
        jobs.merge()
        ask(socket, make_report(make_card(1), seq=2))
        command = place_logs_command()
        send_result(socket, take_command(socket), epoch=1, seq=2, hash=report.hash, detail={"log": "well"})
        until(lambda: Command.objects.filter(answered_at__isnull=False).exists())
        with conductor.writing():
            Host.objects.update(applied_hash="")
        command_endings.run()
        assert receive_result_ack(socket) == command.id
        command.refresh_from_db()
        assert command.detail == {"log": "well"}


@pytest.mark.slow
def test_a_command_is_resent_until_it_is_taken(agent: WireAgent) -> None:
    with agent.connect_and_say_hello(OPS) as socket:
        until(lambda: Agent.objects.get().ops == " ".join(OPS))
        first = place_logs_command()
        assert receive_command(socket).number == receive_command(socket).number == first.id
        take_command(socket)
        until(lambda: current_state(first) == "taken")
        second = place_logs_command()
        assert take_command(socket).number == second.id
        until(lambda: current_state(second) == "taken")


def test_an_agent_that_connects_is_sent_all_open_commands(agent: WireAgent) -> None:
    with agent.connect_and_say_hello(OPS) as socket:
        commands_ = [place_logs_command() for _ in range(3)]
        heard = [take_command(socket) for _ in range(3)]
        socket.send(wire.encode_message(wire.Progress(heard[2].number)))
        send_result(socket, heard[0])
        until(lambda: [current_state(one) for one in commands_] == ["taken", "taken", "started"])
        until(lambda: Command.objects.filter(answered_at__isnull=False).exists())
    with agent.connect_and_say_hello(OPS) as socket:
        assert [receive_command(socket).number for _ in range(2)] == [one.id for one in commands_[1:]]


def test_a_resent_result_of_a_settled_command_is_acknowledged(agent: WireAgent) -> None:
    with agent.connect_and_say_hello(OPS) as socket:
        command = place_logs_command()
        heard = take_command(socket)
    with agent.connect_and_say_hello(OPS) as socket:
        send_result(socket, heard)
        until(lambda: current_state(command) and command.answered_at)
    command_endings.run()
    with agent.connect_and_say_hello(OPS) as socket:
        send_result(socket, heard)
        assert receive_result_ack(socket) == command.id


def test_C2_an_agent_without_command_support_is_sent_none_and_commands_are_refused(agent: WireAgent) -> None:
    with agent.connect() as socket:
        socket.send('{"type":"Hello","agent_version":"0.1","boot_id":"b"}')
        command = place_logs_command()
        until(lambda: current_state(command) and command.answered_at)
        command_endings.run()
        assert current_state(command) == "refused"
        assert command.text == "the agent of cmp1 (release 0.1) accepts no commands: update it"
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat"), "nothing else was sent to it"
        until(lambda: Agent.objects.get().ops == "")
        with pytest.raises(RefusedError, match="accepts no commands: update it"):
            place_logs_command()


@pytest.mark.slow
def test_no_command_is_lost_when_notifications_are_lost(agent: WireAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_dispatch, "RESEND_S", 5.0)
    dice = random.Random(1)
    ring = pubsub.publish
    monkeypatch.setattr(pubsub, "publish", lambda *said: ring(*said) if dice.random() < 0.5 else None)
    with agent.connect_and_say_hello(OPS) as socket:
        with conductor.writing():
            host = Host.objects.get()
            first = command_queue.place_commands(
                [command_queue.CommandOrder("logs", host=host.id) for _ in range(1200)]
            )
        rest = [place_logs_command() for _ in range(20)]
        numbers = {one.id for one in (*first, *rest)}
        heard: set[int] = set()
        while heard != numbers:
            heard.add(receive_command(socket).number)
        socket.send(wire.encode_message(wire.Taken(tuple(numbers)[:256])))
        until(lambda: Command.objects.filter(state="taken").count() == 256)


def test_X1_a_host_can_neither_receive_nor_answer_commands_of_another_host(
    agent: WireAgent, gateway_slot: GatewaySlot
) -> None:
    other = WireAgent(gateway_slot.port, host="cmp2", node="cmp2", token=make_join_secret("cmp2"))
    with agent.connect_and_say_hello(OPS) as socket, other.connect_and_say_hello(OPS) as stranger:
        command = command_queue.order_host_command("logs", Host.objects.get(name="cmp1").uuid, ADMIN_CALLER)
        heard = take_command(socket)
        until(lambda: current_state(command) == "taken")
        stranger.send(wire.encode_message(wire.Progress(heard.number, 99)))
        send_result(stranger, heard, "failed", "mine")
        assert receive_result_ack(stranger) == heard.number, "it is to forget what is not its own"
        command.refresh_from_db()
        assert (command.state, command.outcome) == ("taken", "")
        send_result(socket, heard, text="a\0b")
        refusal = wire.decode_from_gateway(socket.recv(timeout=10))
        assert isinstance(refusal, wire.Refuse) and refusal.code == "malformed" and is_closed(socket)
    until(lambda: Event.objects.filter(action="agent.refused", host="cmp1").exists())
