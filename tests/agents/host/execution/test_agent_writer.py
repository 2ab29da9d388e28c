"""Tests that an agent that writes to Placement stops before its next call when it loses the authority to write."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agents import wire
from agents.host.backoff import ConnectionTiming, PendingAcks
from agents.host.connection.authority import PlacementAuthority
from agents.host.execution.placement_writer import DirectPlacementWriter
from placement_sync import agent_writer
from placement_sync.agent_writer import ProviderWork
from placement_sync.mapping import DesiredProvider
from placement_sync.reconcile import ObservedProvider
from tests.agents.host.execution.executor_host import HOST, ScriptedDriver, make_command, run_host
from tests.agents.host.fake_gateway import FakeGateway, wait_until
from tests.support.placement import ServedPlacement, serving_placement

ROOT = "11111111-1111-1111-1111-111111111111"
CARDS = {f"22222222-2222-2222-2222-22222222222{n}": f"cmp1_card{n}" for n in range(3)}


@pytest.fixture
def placement() -> Iterator[ServedPlacement]:
    with serving_placement() as served:
        served.session.model.providers[ROOT] = ObservedProvider(ROOT, HOST, "", 0)
        yield served


def provider_payload() -> str:
    cards = {uuid: DesiredProvider(uuid, name, "FPGA", 4, 0, frozenset({"CUSTOM_A"})) for uuid, name in CARDS.items()}
    return msgspec.json.encode(ProviderWork(cards)).decode()


def placement_command(number: int, epoch: int, **more: Any) -> wire.Command:
    return make_command(number, "placement", driver="", key="", writer=epoch, payload=provider_payload(), **more)


def run_story(
    tmp_path: Path, placement: ServedPlacement, story: Callable[[FakeGateway, DirectPlacementWriter], Awaitable[None]]
) -> None:
    """Run a story between a fake gateway and an agent whose host has credentials for Placement."""

    async def whole() -> None:
        server, hand = FakeGateway(beat_s=1.0), DirectPlacementWriter(HOST, placement.environ, PlacementAuthority())
        async with (
            server.open(),
            run_host(tmp_path, ScriptedDriver(), gateway=server.gateway(), connect=True, direct=hand),
        ):
            await wait_until(lambda: server.hellos)
            await story(server, hand)

    asyncio.run(whole())


@pytest.mark.slow
def test_an_agent_writes_providers_to_placement_and_a_second_command_writes_nothing(
    tmp_path: Path, placement: ServedPlacement
) -> None:
    async def story(server: FakeGateway, hand: DirectPlacementWriter) -> None:
        assert server.hellos[0].writes == ""
        await server.send_to_agent(placement_command(1, 3), placement_command(2, 3))
        await wait_until(lambda: len(server.results) == 2)
        assert [(one.outcome, one.text) for one in server.results] == [
            ("succeeded", "writes: 10, reads: 2"),
            ("succeeded", "writes: 0, reads: 8"),
        ]
        assert {one.name for one in placement.session.model.providers.values()} == {HOST, *CARDS.values()}

    run_story(tmp_path, placement, story)


@pytest.mark.slow
def test_placement_writes_stop_when_a_newer_writer_epoch_arrives(tmp_path: Path, placement: ServedPlacement) -> None:
    async def story(server: FakeGateway, hand: DirectPlacementWriter) -> None:
        placement.gate.clear()
        await server.send_to_agent(placement_command(1, 3))
        await wait_until(lambda: placement.calls == 1)
        await server.sockets[-1].send(wire.encode_message(wire.Writer(4)))
        await wait_until(lambda: hand.authority.epoch == 4)
        placement.gate.set()
        await wait_until(lambda: server.results)
        assert server.results[0].outcome == "refused"
        assert server.results[0].text.startswith(
            "the command was made for writer epoch 3, and the present writer epoch is 4"
        )
        await server.send_to_agent(placement_command(2, 3), placement_command(3, 4))
        await wait_until(lambda: len(server.results) == 3)
        assert {one.number: one.outcome for one in server.results} == {1: "refused", 2: "refused", 3: "succeeded"}
        assert placement.session.model.writes == 9

    run_story(tmp_path, placement, story)


@pytest.mark.slow
def test_placement_writes_stop_when_the_agent_loses_its_connection(tmp_path: Path, placement: ServedPlacement) -> None:
    async def story(server: FakeGateway, hand: DirectPlacementWriter) -> None:
        def shut() -> None:
            placement.gate.clear()
            placement.session.model.before_write = lambda: None

        placement.session.model.before_write = shut
        await server.send_to_agent(placement_command(1, 3))
        await wait_until(lambda: not placement.gate.is_set())
        calls = placement.calls
        await server.sockets[-1].close()
        await wait_until(lambda: len(server.sockets) == 2)
        placement.gate.set()
        await wait_until(lambda: server.results)
        assert (server.results[0].outcome, placement.calls) == ("failed", calls)
        assert server.results[0].text.endswith("after 1 write")
        await server.send_to_agent(placement_command(2, 3))
        await wait_until(lambda: len(server.results) == 2)
        assert server.results[1].outcome == "succeeded"

    run_story(tmp_path, placement, story)


@pytest.mark.slow
def test_placement_writes_stop_when_heartbeats_are_not_acknowledged(tmp_path: Path, placement: ServedPlacement) -> None:
    async def story(server: FakeGateway, hand: DirectPlacementWriter) -> None:
        placement.gate.clear()
        await server.send_to_agent(placement_command(1, 3))
        await wait_until(lambda: placement.calls == 1)
        server.acknowledge_beats = False
        await wait_until(lambda: not hand.authority.is_gateway_answering())
        placement.gate.set()
        await wait_until(lambda: server.results)
        assert (server.results[0].outcome, placement.calls) == ("refused", 1)
        assert len(server.sockets) == 1, "its connection is still there"

    run_story(tmp_path, placement, story)


def test_write_authority_needs_an_open_connection_and_the_highest_epoch() -> None:
    one = PlacementAuthority()
    assert one.find_refusal(1)
    one.on_connect(lambda: True)
    assert one.find_refusal(1), "nothing was told on this connection"
    one.on_writer_epoch(2)
    one.on_writer_epoch(1)
    assert not one.find_refusal(2)
    assert one.find_refusal(1)
    one.on_disconnect()
    assert one.find_refusal(2)
    owed = PendingAcks(beat_s=2.0, timing=ConnectionTiming(), last_ack_at=10.0)
    assert owed.is_gateway_answering(13.9) and not owed.is_gateway_answering(14.0)


def test_missing_or_unusable_credentials_are_explained_without_the_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, placement: ServedPlacement
) -> None:
    monkeypatch.setattr(agent_writer, "CLOUD_DIRECTORIES", (tmp_path,))
    assert agent_writer.lacks({}).startswith("the host has no credentials: give its agent OS_CLOUD")
    (tmp_path / "clouds.yaml").write_text("clouds: {}")
    assert agent_writer.lacks({}) == "the host has a clouds.yaml: set OS_CLOUD to the cloud that the agent is to use"
    assert agent_writer.lacks({"OS_CLOUD": "one"}) == agent_writer.lacks({"OS_AUTH_URL": "http://k"}) == ""
    outcome, text = agent_writer.write(HOST, provider_payload(), {"OS_CLOUD": "nowhere"}, lambda: "")
    assert outcome == "refused" and text.startswith("the host's credentials cannot be used: ")
    wrong = {"OS_AUTH_URL": "http://127.0.0.1:1", "OS_PASSWORD": "s3cret"}
    assert "s3cret" not in agent_writer.write(HOST, provider_payload(), wrong, lambda: "")[1]
    placement.session.model.providers.clear()
    outcome, text = agent_writer.write(HOST, provider_payload(), placement.environ, lambda: "")
    assert (outcome, text) == ("refused", f"waiting for compute provider {HOST}; nothing was written")


def test_an_agent_without_placement_support_refuses_placement_commands(tmp_path: Path) -> None:
    async def story() -> None:
        async with run_host(tmp_path, ScriptedDriver()) as host:
            result = await host.run_commands(placement_command(1, 1))
            assert (result.outcome, result.text) == ("refused", "nothing on this host writes to Placement")

    asyncio.run(story())
