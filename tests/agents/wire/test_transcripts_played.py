"""Tests of promise C2: recordings of this release and of earlier ones are played back to both ends of today's product.

One test plays the recorded agent to our gateway, with a real PostgreSQL and the same operator's day as was recorded.
The other plays the recorded gateway to our agent, which has real drivers. Answers must have the recorded meaning
(`playback`). The player replaces values that are new in each run: numbers and ids of commands, hashes, keys, nonces.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from accelerators.models import Command
from agents import authentication, credentials, wire
from agents.gateway import metrics
from agents.gateway.asgi_app import AgentGateway
from agents.host import main as agent_main
from agents.host.connection.identity import load_or_create_keys
from agents.host.journal.journal import open_journal
from agents.host.settings import extract_allowed_acts, read_driver_settings, read_settings
from cyborgweb.settings.keys import Keys
from tests.agents.conftest import GatewaySlot
from tests.agents.host.fake_gateway import FakeGateway, wait_until
from tests.agents.wire.playback import encode, every_recording, read_recording, take_answer
from tests.agents.wire.record_transcripts import PLACEHOLDERS, STORIES, Line, Recorder, write_announcement
from tests.support.wireagent import WireAgent

IMAGE = b"bits"
REPEATED = {"Beat", "Progress", "Samples"}
"""An agent may send these more often than was recorded."""


class RecordedAgent:
    """Plays the agent's part of a recording, and checks each answer of the gateway."""

    def __init__(self, lines: list[Line], caller: WireAgent) -> None:
        self.lines, self.caller = lines, caller
        self.inbox: list[Line] = []
        self.numbers: dict[int, int] = {}
        """Maps the recorded number of a command to its number in this run."""
        self.hashes: dict[int, str] = {}
        """Maps the number of a report to the hash of its content."""
        self.nonce = ""

    def play(self) -> None:
        """Play all lines, from the connection to the refusal at the end."""
        with self.caller.connect() as socket:
            welcome = msgspec.to_builtins(self.caller.welcome)
            self.inbox.append(welcome)
            for line in self.lines:
                if line["from"] == "agent":
                    socket.send(encode(self._with_present_values(line["message"])))
                else:
                    self._expect(line["message"], socket)
        assert {one["type"] for one in self.inbox} <= {"Watch"}, f"nobody has recorded this: {self.inbox}"

    def _with_present_values(self, recorded: Line) -> Line:
        """Return the recorded message with the values of this run."""
        message, kind = dict(recorded), recorded["type"]
        if kind == "Report":
            drivers = [*message["drivers"], *message.get("others", ())]
            message["hash"] = self.hashes[message["seq"]] = hashlib.sha256(encode(drivers).encode()).hexdigest()[:40]
        elif kind == "NewKey":
            new = Ed25519PrivateKey.generate()
            public_key = credentials.encode_public_key(new.public_key())
            signed = credentials.build_rotation_bytes(self.caller.host, self.caller.public_key, public_key, "")
            message["public_key"] = public_key
            message["signature"] = credentials.sign_data(self.caller.key, signed)
            message["proof"] = credentials.sign_data(new, signed)
        elif kind == "Alive":
            message["nonce"] = self.nonce
        elif kind == "Result" and "hash" in message:
            message["hash"] = self.hashes[message["seq"]]
        if "number" in message:
            message["number"] = self.numbers[message["number"]]
        if "numbers" in message:
            message["numbers"] = [self.numbers[number] for number in message["numbers"]]
        return message

    def _expect(self, recorded: Line, socket: ClientConnection) -> None:
        """Receive messages until the one that answers `recorded` has arrived."""
        wanted, kind = dict(recorded), recorded["type"]
        if kind == "Command":
            del wanted["number"]
        elif wanted.get("of") == "Result":
            wanted["seq"] = self.numbers[wanted["seq"]]
        while (answer := take_answer(wanted, self.inbox)) is None:
            self.inbox.append(json.loads(socket.recv(timeout=60)))
        if kind == "Command":
            assert answer["number"] not in self.numbers.values()
            self.numbers[recorded["number"]] = answer["number"]
        elif kind == "Probe":
            self.nonce = answer["nonce"]


@pytest.fixture
def gateway(gateway_slot: GatewaySlot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[AgentGateway]:
    monkeypatch.setattr("agents.gateway.writer.CHANGES_POLL_S", 0.05)
    announcements = tmp_path / "announcements"
    certificates = {
        "agent_announcement_key": write_announcement(announcements),
        "agent_announcements": str(announcements),
    }
    made = AgentGateway(Keys(lease_flush_s=0.05, beat_s=0.2, **certificates))
    yield made
    made.stop()


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
@every_recording
def test_C2_the_agent_of_a_recorded_release_works_with_our_gateway(
    path: Path, gateway: AgentGateway, gateway_slot: GatewaySlot
) -> None:
    gateway_slot.gateway = recorder = Recorder(gateway)
    token = credentials.parse_join_string(
        authentication.create_join_token("cmp1", address="http://x", hours=1, created_by="t")
    )
    before = {kind: metrics.event_counts[kind] for kind in ("unknown_types", "unknown_fields")}
    agent = RecordedAgent(
        read_recording(path), WireAgent(gateway_slot.port, token=token.secret, epoch=PLACEHOLDERS["epoch"])
    )
    with ThreadPoolExecutor(1) as thread:
        played = thread.submit(agent.play)
        try:
            STORIES[path.stem](recorder)
        finally:
            played.result(60)
    assert [metrics.event_counts[kind] - before[kind] for kind in before] == [0, 0]
    assert {*Command.objects.values_list("id", flat=True)} == {*agent.numbers.values()}
    assert {*Command.objects.values_list("outcome", flat=True)} == {"succeeded"}


@dataclass
class RecordedGateway(FakeGateway):
    """Plays the gateway's part of a recording to the first agent that comes, and checks what the agent sends."""

    lines: list[Line] = field(default_factory=list)
    inbox: list[Line] = field(default_factory=list)
    played: bool = False
    problem: BaseException | None = None
    last_report: int = 0

    async def _session(self, socket: ServerConnection) -> None:
        self.sockets.append(socket)
        try:
            for line in [] if self.played or self.problem else self.lines:
                if line["from"] == "gateway":
                    await self._send(line["message"], socket)
                else:
                    await self._expect(line["message"], socket)
            self.played = True
            await socket.wait_closed()
        except (AssertionError, ConnectionClosed, TimeoutError) as error:
            self.problem = self.problem or error

    async def _send(self, recorded: Line, socket: ServerConnection) -> None:
        """Send the recorded message with the values of this run."""
        message = dict(recorded)
        if message["type"] == "Ack" and message["of"] == "Beat":
            return  # `_expect` acknowledges each heartbeat when it arrives.
        if message["type"] == "Ack" and message["of"] == "Report":
            message["seq"] = self.last_report
        if message["type"] == "Command":
            message["id"] = str(uuid4())
            if "image" in message:
                self.images[message["image"]["id"]] = IMAGE
                message["image"] = message["image"] | {"sha256": hashlib.sha256(IMAGE).hexdigest()}
        await socket.send(encode(message))

    async def _expect(self, recorded: Line, socket: ServerConnection) -> None:
        """Receive messages until the one that matches `recorded` has arrived."""
        async with asyncio.timeout(30):
            while take_answer(recorded, self.inbox) is None:
                message = json.loads(await socket.recv())
                self.inbox.append(message)
                if message["type"] == "Beat":
                    await socket.send(encode({"type": "Ack", "seq": message["seq"], "of": "Beat"}))
                elif message["type"] == "Report":
                    self.last_report = message["seq"]
                    decoded = msgspec.convert(message, wire.Report)
                    assert message["hash"] == wire.hash_report_content(decoded.all_drivers, decoded.boot_id)
                elif message["type"] == "NewKey":
                    self._verify_new_key(msgspec.convert(message, wire.NewKey))


@asynccontextmanager
async def real_agent(directory: Path, server: FakeGateway) -> AsyncIterator[None]:
    """Run the agent as `agents.host.main` does, with the fake driver as it was when the recording was made."""
    control, tables = directory / "control.json", directory / "agent.toml"
    control.write_text('{"count": 2, "handles": 2, "install": ["power"], "handle_type": "MDEV"}')
    tables.write_text(f'[fake_driver]\ncontrol_file = "{control}"\n')
    settings = read_settings(
        {
            "CYBORG_AGENT_STATE_DIR": str(directory),
            "CYBORG_DRIVER_SETTINGS": str(tables),
            "CYBORG_UEVENT_DEBOUNCE_MS": "20",
        }
    )
    drivers = read_driver_settings(settings)
    keys, journal = load_or_create_keys(directory, "cmp1", "cmp1"), open_journal(directory, "cmp1")
    agent = agent_main._LoadedAgent(
        settings, drivers, extract_allowed_acts(drivers), keys, journal, server.gateway("secret")
    )
    handlers, stop = [*logging.getLogger().handlers], asyncio.Event()
    running = asyncio.ensure_future(agent_main._run_agent(agent, stop))
    try:
        yield
        assert not running.done(), running
    finally:
        stop.set()
        await running
        journal.close()
        logging.getLogger().handlers = handlers


@pytest.mark.slow
@every_recording
def test_C2_our_agent_works_with_the_gateway_of_a_recorded_release(path: Path, tmp_path: Path) -> None:
    lines = read_recording(path)
    server = RecordedGateway(lines=lines)

    async def story() -> None:
        async with server.open(), real_agent(tmp_path, server):
            await wait_until(lambda: server.problem or (server.played and len(server.credentials) > 2), 90)

    asyncio.run(story())
    if server.problem:
        raise server.problem
    assert {one["type"] for one in server.inbox} <= REPEATED, "nobody has recorded this"
    first, *_, last = server.credentials
    new_key = first.public_key != last.public_key
    assert new_key == any(line["message"]["type"] == "Rotate" for line in lines)
