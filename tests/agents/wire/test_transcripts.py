"""Tests of promise C2: messages of another release are understood, and it is sent nothing that it cannot read.

`transcripts/before_commands.jsonl` was recorded between that release's own agent and gateway.
`transcripts/invented_future_release.jsonl` was not recorded: there is no such release yet. It has today's messages with
additional fields, and unknown types of messages, as a future release may send them. Each line is a message of either
end; the first line says which types the release can read. One test plays the agent to our gateway, the other plays the
gateway to our agent. `test_transcripts_played.py` plays the recordings of this release.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from websockets.asyncio.server import ServerConnection
from websockets.sync.client import ClientConnection, connect

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandOrder
from accelerators.models import Command, Device
from accelerators.workflows import command_endings
from agents import credentials, jobs, key_revocation, wire
from agents.authentication import IssuedNonce
from agents.gateway import metrics
from agents.gateway.asgi_app import AgentGateway
from agents.models import Agent
from cyborgweb.settings.keys import Keys
from tests.agents.conftest import GatewaySlot
from tests.agents.host.connection.test_link import ONE_DEVICE, TWO_DEVICES, run_agent_link
from tests.agents.host.fake_gateway import FakeGateway, wait_until
from tests.support import webserver
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.wireagent import WireAgent

TRANSCRIPTS = sorted((Path(__file__).parent / "transcripts").glob("*.jsonl"))
RECORDED = [path for path in TRANSCRIPTS if not path.stem.startswith("invented")]
Line = dict[str, Any]
every_release = pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)


def read_transcript(path: Path) -> tuple[dict[str, Any], list[Line]]:
    """Return the first line of a transcript, which describes the release, and the lines of messages."""
    head, *lines = [json.loads(text) for text in path.read_text().splitlines()]
    return head, lines


def can_read(recorded: Line, message: Line) -> bool:
    """Return whether a peer that knows `recorded` can read `message`: no field is missing or has another type."""
    return all(
        name in message and type(message[name]) is type(value) for name, value in recorded.items() if value is not None
    )


@pytest.fixture
def gateway(gateway_slot: GatewaySlot, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentGateway]:
    monkeypatch.setattr("agents.gateway.writer.CHANGES_POLL_S", 0.05)
    gateway_slot.gateway = AgentGateway(Keys(lease_flush_s=0.05))
    yield gateway_slot.gateway
    gateway_slot.gateway.stop()


def connect_as_release(head: dict[str, Any], gateway: AgentGateway, port: int) -> ClientConnection:
    """Connect as that release's agent does, with the credential that it signed, if one was recorded."""
    if not head["authorization"]:
        caller = WireAgent(port, epoch=1_795_260_445)
        Agent.objects.create(host=get_or_create_host(), public_key=caller.public_key)
        header = caller.credential(caller.challenge())
    else:
        header = head["authorization"]
        credential = credentials.parse_authorization(header)
        # The gateway accepts the challenge that was answered when this credential was recorded.
        gateway.challenges.open_nonce = lambda nonce: IssuedNonce(nonce, time.time())  # type: ignore[method-assign]
        Agent.objects.create(host=get_or_create_host(), public_key=credential.public_key)
    where = f"ws://127.0.0.1:{port}{wire.AGENT_PATH}"
    return connect(where, additional_headers={"Authorization": header}, subprotocols=head["speaks"], compression=None)


def wait_for_message_like(socket: ClientConnection, head: dict[str, Any], wanted: Line, inbox: list[Line]) -> None:
    """Wait for a message like `wanted` and drop it. Keep others in `inbox`; fail if the release cannot read them."""
    known = {name: value for name, value in wanted.items() if name in wire_fields(wanted["type"])}
    exact = {"type", "seq", "of", "code"} & known.keys()
    while not (found := [said for said in inbox if all(said.get(name) == known[name] for name in exact)]):
        said = json.loads(socket.recv(timeout=10))
        assert said["type"] in head["agent_reads"], "it cannot read this"
        inbox.append(said)
    assert can_read(known, found[0])
    inbox.remove(found[0])


def wire_fields(name: str) -> set[str]:
    """Return the names of the fields that this release knows of a message."""
    return {"type", *getattr(wire, name).__struct_fields__}


@pytest.mark.django_db(transaction=True)
@every_release
def test_C2_our_gateway_works_with_the_agent_of_another_release(
    path: Path, gateway: AgentGateway, gateway_slot: GatewaySlot
) -> None:
    head, lines = read_transcript(path)
    apply_report(get_or_create_host(), make_driver_report(make_card(1, acts="reset"), driver="pci_driver"))
    with conductor.writing():
        (command,) = command_queue.place_commands([CommandOrder("reset", Device.objects.get().uuid)])
    unknown_before = metrics.event_counts["unknown_types"]
    takes_commands, inbox = "Command" in head["agent_reads"], list[Line]()
    with connect_as_release(head, gateway, gateway_slot.port) as socket:
        for line in lines:
            message = line["message"]
            if line["from"] == "agent":
                socket.send(json.dumps(message))
            elif message["type"] in ("Welcome", "Ack"):
                if message.get("of") in (None, "Beat", "Report", "NewKey", "Result"):
                    wait_for_message_like(socket, head, message, inbox)
            elif message["type"] == "Rotate":
                key_revocation.request_key_rotation(key_revocation.find_agent("cmp1"), "olga")
                wait_for_message_like(socket, head, message, inbox)
            elif message["type"] == "Command":
                wait_for_message_like(socket, head, message, inbox)
            elif message["type"] == "Refuse":
                jobs.merge()
                if not takes_commands:
                    webserver.until(lambda: command_endings.end_answered_commands() or Command.objects.get().ended_at)
                key_revocation.revoke_agent(key_revocation.find_agent("cmp1"), "olga", "")
                wait_for_message_like(socket, head, message, inbox)
    command.refresh_from_db()
    refusal = "the agent of cmp1 (release 0.1.0) accepts no commands: update it"
    assert (command.state, command.text) == (("queued", "") if takes_commands else ("refused", refusal))
    known = {name for line in lines if line["from"] == "agent" for name in [line["message"]["type"]]}
    assert metrics.event_counts["unknown_types"] - unknown_before == len(
        [name for name in known if not hasattr(wire, name)]
    )
    last_report = [line["message"] for line in lines if line["message"]["type"] == "Report"][-1]
    keys = {device["key"] for driver in last_report["drivers"] for device in driver.get("devices", ())}
    assert {*Device.objects.exclude(state="missing").values_list("key", flat=True)} == keys
    reported = last_report["drivers"][0]["devices"][0]
    assert Device.objects.get(key=reported["key"]).status == reported.get("status", "ok")
    assert (get_or_create_host().applied_hash, Agent.objects.get().barred) == (last_report["hash"], "revoked")


@dataclass
class ReplayedGateway(FakeGateway):
    """A gateway that sends the recorded messages, line by line, to the first agent that connects."""

    head: dict[str, Any] = field(default_factory=dict)
    lines: list[Line] = field(default_factory=list)
    played: bool = False
    heard: dict[str, list[Line]] = field(default_factory=dict)

    async def _session(self, socket: ServerConnection) -> None:
        self.sockets.append(socket)
        last: dict[str, Line] = {}
        for line in [] if self.played else self.lines:
            message = line["message"]
            if line["from"] == "gateway":
                number = last.get(message.get("of", ""), message).get("seq")
                seq = {"seq": number} if number is not None else {}
                await socket.send(json.dumps(message | seq))
            elif message["type"] in self.expected:
                last[message["type"]] = await self._hear(socket, message)
        self.played = True
        await socket.wait_closed()

    @property
    def expected(self) -> set[str]:
        """Types of recorded messages that our agent sends as well: it has no drivers and carries out no commands."""
        return {"Hello", "Report", "Beat", "Alive", "NewKey"}

    async def _hear(self, socket: ServerConnection, wanted: Line) -> Line:
        waiting = self.heard.setdefault(wanted["type"], [])
        while not waiting:
            said = json.loads(await socket.recv())
            assert said["type"] in self.head["gateway_reads"], "it cannot read this"
            self.heard.setdefault(said["type"], []).append(said)
        said = waiting.pop(0)
        assert can_read({name: value for name, value in wanted.items() if name in wire_fields(wanted["type"])}, said)
        return said


@dataclass
class CommandRecorder:
    """Stores the commands that the link hands over."""

    taken: list[wire.Command] = field(default_factory=list)
    progress: dict[int, wire.Progress] = field(default_factory=dict)

    def accept_command(self, command: wire.Command) -> None:
        self.taken.append(command)


@every_release
@pytest.mark.slow
def test_C2_our_agent_works_with_the_gateway_of_another_release(path: Path, tmp_path: Path) -> None:
    head, lines = read_transcript(path)
    reports = sum(line["message"]["type"] == "Report" for line in lines)
    ours = {line["message"]["type"] for line in lines if line["from"] == "gateway"}

    async def story() -> None:
        async with (
            ReplayedGateway(head=head, lines=lines).open() as server,
            run_agent_link(tmp_path, server.gateway("s")) as host,
        ):
            host.link.command_sink = desk = CommandRecorder()
            before = host.link.keys.current_identity.public_key
            for seen in (ONE_DEVICE, TWO_DEVICES)[:reports]:
                host.record_report(*seen)
                await wait_until(lambda: host.journal.acknowledged)
            await wait_until(lambda: server.played and len(server.sockets) > 1)
            assert (host.link.keys.current_identity.public_key != before) == ("Rotate" in ours)
            assert [command.op for command in desk.taken] == (["defragment"] if "Command" in ours else [])
            assert host.link.dropped_count == len([name for name in ours if not hasattr(wire, name)])

    asyncio.run(story())


@pytest.mark.parametrize("path", RECORDED, ids=lambda path: path.stem)
def test_signatures_of_a_recorded_release_are_verified(path: Path) -> None:
    head, lines = read_transcript(path)
    credential = credentials.parse_authorization(head["authorization"])
    signed = credentials.build_connect_bytes(credential.host, credential.node, credential.epoch, credential.nonce, "")
    assert credentials.is_valid_signature(credential.public_key, credential.signature, signed)
    new_key = next(line["message"] for line in lines if line["message"]["type"] == "NewKey")
    data = credentials.build_rotation_bytes(credential.host, credential.public_key, new_key["public_key"], "")
    assert credentials.is_valid_signature(credential.public_key, new_key["signature"], data)
