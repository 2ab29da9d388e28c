"""A command's way to its agent and back, over the real socket: told, told again, settled, acknowledged."""

from __future__ import annotations

import random

import pytest

from accelerators import conductor
from accelerators.commands import placing
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusedError
from accelerators.models import Command, Device, Event, Host
from accelerators.runtime import pubsub
from accelerators.workflows import command_results
from agents import credentials, enrolment, tasks, wire
from agents.gateway import command_dispatch
from agents.gateway.app import AgentGateway
from agents.models import Agent
from tests.agents.conftest import House
from tests.support.reports import answer, card
from tests.support.webserver import until
from tests.support.wireagent import OPS, WireAgent, acknowledged, ask, end, is_closed, take, told

pytestmark = pytest.mark.django_db(transaction=True)
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_dispatch, "POLL_S", 0.1)
    monkeypatch.setattr(command_dispatch, "RESEND_S", 0.3)


@pytest.fixture
def agent(gateway: AgentGateway, house: House) -> WireAgent:
    house.gateway = gateway
    join = credentials.parse_join_string(
        enrolment.create_join_token("cmp1", address="http://x", hours=1, created_by="t")
    )
    return WireAgent(house.port, token=join.secret)


def a_report(*devices: object, seq: int = 1) -> wire.Report:
    drivers = (answer(*devices),)  # type: ignore[arg-type]
    return wire.Report(1, seq, wire.hash_report_content(drivers), drivers)


def logs() -> Command:
    return placing.order_host_command("logs", Host.objects.get().uuid, OLGA)


def state(command: Command) -> str:
    command.refresh_from_db()
    return command.state


def test_a_command_is_told_taken_begun_answered_and_settled(agent: WireAgent) -> None:
    with agent.speaking(OPS) as socket:
        ask(socket, a_report(card(1, acts="reset")))
        tasks.merge()
        device = Device.objects.get()
        command = placing.order_device_command("reset", device.uuid, OLGA, reason="it hangs")
        heard = take(socket)
        assert (heard.number, heard.id, heard.op) == (command.id, str(command.uuid), "reset")
        assert (heard.driver, heard.key) == ("test_driver", device.key)
        assert 50 < heard.start_s <= 60 and heard.start_s < heard.end_s <= 300
        until(lambda: state(command) == "taken")
        for percent in range(0, 100, 10):
            socket.send(wire.encode_message(wire.Progress(heard.number, percent, f"step {percent}")))
        until(lambda: state(command) == "started" and command.percent == 90)
        report = a_report(card(1, acts="reset", status="degraded"), seq=2)
        ask(socket, report)
        end(socket, heard, epoch=1, seq=2, hash=report.hash)
        until(lambda: state(command) == "started" and command.answered_at)
        command_results.run()
        assert state(command) == "started", "its report is not applied"
        tasks.merge()
        command_results.run()
        assert acknowledged(socket) == command.id
        assert state(command) == "succeeded"
        end(socket, heard, "failed", "again")
        assert acknowledged(socket) == command.id, "heard again, it is settled already"
        assert state(command) == "succeeded"


def test_a_result_whose_report_is_applied_already_waits_for_nothing(agent: WireAgent) -> None:
    with agent.speaking(OPS) as socket:
        report = a_report(card(1))
        ask(socket, report)
        tasks.merge()
        ask(socket, a_report(card(1), seq=2))
        command = logs()
        end(socket, take(socket), epoch=1, seq=2, hash=report.hash, detail={"log": "well"})
        until(lambda: Command.objects.filter(answered_at__isnull=False).exists())
        with conductor.writing():
            Host.objects.update(applied_hash="")
        command_results.run()
        assert acknowledged(socket) == command.id
        command.refresh_from_db()
        assert command.detail == {"log": "well"}


def test_what_is_not_taken_is_told_again_and_what_is_taken_is_not(agent: WireAgent) -> None:
    with agent.speaking(OPS) as socket:
        until(lambda: Agent.objects.get().ops == " ".join(OPS))
        first = logs()
        assert told(socket).number == told(socket).number == first.id
        take(socket)
        until(lambda: state(first) == "taken")
        second = logs()
        assert take(socket).number == second.id
        until(lambda: state(second) == "taken")


def test_who_has_just_connected_is_told_all_that_is_open(agent: WireAgent) -> None:
    with agent.speaking(OPS) as socket:
        commands_ = [logs() for _ in range(3)]
        heard = [take(socket) for _ in range(3)]
        socket.send(wire.encode_message(wire.Progress(heard[2].number)))
        end(socket, heard[0])
        until(lambda: [state(one) for one in commands_] == ["taken", "taken", "started"])
        until(lambda: Command.objects.filter(answered_at__isnull=False).exists())
    with agent.speaking(OPS) as socket:
        assert [told(socket).number for _ in range(2)] == [one.id for one in commands_[1:]]


def test_a_result_that_was_lost_on_the_way_is_acknowledged_when_it_comes_again(agent: WireAgent) -> None:
    with agent.speaking(OPS) as socket:
        command = logs()
        heard = take(socket)
    with agent.speaking(OPS) as socket:
        end(socket, heard)
        until(lambda: state(command) and command.answered_at)
    command_results.run()
    with agent.speaking(OPS) as socket:
        end(socket, heard)
        assert acknowledged(socket) == command.id


def test_C2_an_agent_that_is_older_than_commands_is_sent_none(agent: WireAgent) -> None:
    with agent.connect() as socket:
        socket.send('{"type":"Hello","agent_version":"0.1","boot_id":"b"}')
        command = logs()
        until(lambda: state(command) and command.answered_at)
        command_results.run()
        assert state(command) == "refused"
        assert command.text == "the agent of cmp1 (release 0.1) accepts no commands: update it"
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat"), "nothing else was sent to it"
        until(lambda: Agent.objects.get().ops == "")
        with pytest.raises(RefusedError, match="accepts no commands: update it"):
            logs()


def test_none_is_lost_when_rings_are(agent: WireAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_dispatch, "RESEND_S", 5.0)
    dice = random.Random(1)
    ring = pubsub.publish
    monkeypatch.setattr(pubsub, "publish", lambda *said: ring(*said) if dice.random() < 0.5 else None)
    with agent.speaking(OPS) as socket:
        with conductor.writing():
            host = Host.objects.get()
            first = placing.place_commands([placing.CommandOrder("logs", host=host.id) for _ in range(1200)])
        rest = [logs() for _ in range(20)]
        numbers = {one.id for one in (*first, *rest)}
        heard: set[int] = set()
        while heard != numbers:
            heard.add(told(socket).number)
        socket.send(wire.encode_message(wire.Taken(tuple(numbers)[:256])))
        until(lambda: Command.objects.filter(state="taken").count() == 256)


def test_X1_a_host_hears_and_says_nothing_of_anothers_commands(agent: WireAgent, house: House) -> None:
    join = credentials.parse_join_string(
        enrolment.create_join_token("cmp2", address="http://x", hours=1, created_by="t")
    )
    other = WireAgent(house.port, host="cmp2", node="cmp2", token=join.secret)
    with agent.speaking(OPS) as socket, other.speaking(OPS) as stranger:
        command = placing.order_host_command("logs", Host.objects.get(name="cmp1").uuid, OLGA)
        heard = take(socket)
        until(lambda: state(command) == "taken")
        stranger.send(wire.encode_message(wire.Progress(heard.number, 99)))
        end(stranger, heard, "failed", "mine")
        assert acknowledged(stranger) == heard.number, "it is to forget what is not its own"
        command.refresh_from_db()
        assert (command.state, command.outcome) == ("taken", "")
        end(socket, heard, text="a\0b")
        assert is_closed(socket) or is_closed(socket)
    until(lambda: Event.objects.filter(action="agent.refused", host="cmp1").exists())
