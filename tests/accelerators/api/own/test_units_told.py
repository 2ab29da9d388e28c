"""Test that a reader who sees a command as succeeded also sees its new units, with an agent on a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from accelerators.models import Command
from accelerators.workflows import command_endings
from agents import authentication, credentials, jobs, wire
from agents.gateway import command_dispatch
from agents.gateway.asgi_app import AgentGateway
from cyborgweb.settings.keys import Keys
from drivers.inventory import Device as Card
from tests.accelerators.api.own.conftest import Ask, get_results
from tests.accelerators.api.own.test_units import build_divisible_card, post_units
from tests.agents.conftest import GatewaySlot
from tests.support.reports import make_driver_report
from tests.support.webserver import serving, until
from tests.support.wireagent import OPS, WireAgent, receive_result_ack, send_result, take_command
from tests.support.wireagent import ask as send

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Iterator[WireAgent]:
    """Run a gateway, and return an agent with a join token for it."""
    monkeypatch.setattr(command_dispatch, "POLL_S", 0.1)
    slot = GatewaySlot()
    slot.gateway = AgentGateway(Keys(lease_flush_s=0.05))
    join = credentials.parse_join_string(
        authentication.create_join_token("cmp1", address="http://x", hours=1, created_by="t")
    )
    with serving(slot) as port:
        yield WireAgent(port, token=join.secret)
        slot.gateway.stop()


def build_report(*cards: Card, seq: int) -> wire.Report:
    drivers = (make_driver_report(*cards, driver="generic_driver"),)
    return wire.Report(1, seq, wire.hash_report_content(drivers), drivers)


def read_commands_and_units(ask: Ask) -> tuple[dict[str, str], dict[str, int]]:
    """Return the state of each command by its `vfs`, and, read after that, the number of units of each backend."""
    states = {row["layout"]["vfs"]: row["state"] for row in get_results(ask("/api/commands/?op=partition"))}
    numbers: dict[str, int] = {}
    for row in get_results(ask("/api/accelerators/?attached=false")):
        numbers[row["backend"]] = numbers.get(row["backend"], 0) + 1
    return states, numbers


@pytest.mark.slow
def test_a_command_is_shown_succeeded_only_together_with_its_new_units(ask: Ask, agent: WireAgent) -> None:
    with agent.connect_and_say_hello(OPS) as socket:
        send(socket, build_report(build_divisible_card(1, 2, "a"), build_divisible_card(2, 1, "b"), seq=1))
        jobs.merge()
        made = post_units(ask, targets=[{"host": "cmp1", "backend": name} for name in ("a", "b")], count=2)
        assert [row["refused"] for row in made] == ["", ""]
        commands_by_size = {command.layout["vfs"]: command for command in (take_command(socket), take_command(socket))}
        report = build_report(build_divisible_card(1, 4, "a"), build_divisible_card(2, 1, "b"), seq=2)
        send(socket, report)
        send_result(socket, commands_by_size["4"], epoch=1, seq=2, hash=report.hash)
        send_result(
            socket,
            commands_by_size["3"],
            "failed",
            "0000:02:00.0 can have at most 1 virtual functions, not 3: change vfs",
        )
        until(lambda: Command.objects.filter(answered_at__isnull=False).count() == 2)
        command_endings.run()
        states, numbers = read_commands_and_units(ask)
        assert (states["4"], numbers) == ("taken", {"a": 2, "b": 1}), "its report is not applied"
        jobs.merge()
        command_endings.run()
        assert {receive_result_ack(socket), receive_result_ack(socket)} == {
            one.number for one in commands_by_size.values()
        }
        assert read_commands_and_units(ask) == ({"4": "succeeded", "3": "failed"}, {"a": 4, "b": 1})
    failed_command = json.loads(ask(f"/api/commands/{made[1]['command']}/").content)
    assert (
        failed_command["text"].endswith("not 3: change vfs") and failed_command["device"]["address"] == "0000:02:00.0"
    )
