"""The largest message that a gateway takes, with the product's own limit and web server, and what a larger one leaves.

The web server closes the connection before the message reaches the gateway, so the agent is sent no `Refuse`. The
gateway counts and records the refusal all the same.
"""

from __future__ import annotations

import threading

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import CloseCode
from websockets.sync.client import ClientConnection

from accelerators.models import Event
from agents import wire
from agents.gateway import metrics
from agents.gateway.app import AgentGateway
from cyborgweb.settings.keys import Keys
from tests.agents.conftest import House
from tests.agents.test_gateway import a_report, token
from tests.support.reports import card
from tests.support.webserver import until
from tests.support.wireagent import WireAgent, ask

pytestmark = pytest.mark.django_db(transaction=True)
LIMIT = Keys().max_message_bytes


@pytest.fixture
def agent(gateway: AgentGateway, house: House) -> WireAgent:
    house.gateway = gateway
    return WireAgent(house.port, token=token())


def a_beat(seq: int, size: int, filler: str = "x") -> str:
    """Return a Beat of this many bytes: the rest is in a field that nobody knows."""
    beat = '{"type":"Beat","seq":%d,"more":"%s"}'
    room = size - len(beat % (seq, ""))
    assert room % len(filler.encode()) == 0
    return beat % (seq, filler * (room // len(filler.encode())))


def close_code(socket: ClientConnection) -> int:
    """Read until the gateway closes the connection; return its close code."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            socket.recv(timeout=10)
    assert closed.value.rcvd
    return closed.value.rcvd.code


def refusal(code: str) -> Event:
    """Wait for the event about a refusal with this code, and return it."""
    refused = Event.objects.filter(action="agent.refused", host="cmp1", changes__code=[None, code])
    until(refused.exists)
    return refused.get()


def test_a_message_as_large_as_the_limit_is_taken_and_a_larger_one_is_counted_and_recorded(
    agent: WireAgent, gateway: AgentGateway
) -> None:
    assert LIMIT == wire.MAX_MESSAGE_BYTES
    before = metrics.refusals_by_code["too-large"]
    with agent.connect() as socket:
        assert agent.welcome and agent.welcome.max_bytes == LIMIT
        assert ask(socket, a_beat(11, LIMIT)) == wire.Ack(11, "Beat")
    assert metrics.refusals_by_code["too-large"] == before
    # Bytes count, not characters: the second has about half as many characters as bytes.
    for large in (a_beat(12, LIMIT + 1), a_beat(12, LIMIT + 2, "ä")):
        with agent.connect() as socket:
            socket.send(large)
            assert close_code(socket) == CloseCode.MESSAGE_TOO_BIG
        event = refusal("too-large")  # before the next message: of those within a moment the last one is recorded
    assert "larger than 1048576 bytes" in event.reason
    assert f"frame with {LIMIT + 1} bytes" in event.reason and "CYBORG_MAX_MESSAGE_BYTES" in event.reason
    until(lambda: metrics.refusals_by_code["too-large"] == before + 2)
    with agent.connect() as socket:
        assert ask(socket, wire.Beat(13)) == wire.Ack(13, "Beat")
    until(lambda: gateway.open_connections == 0)


def test_a_message_that_is_too_large_is_recorded_although_an_acknowledgement_could_not_be_sent(
    agent: WireAgent, gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It comes while the report before it is being stored: the connection is closed when that is acknowledged."""
    closed, serve = threading.Event(), gateway._writer._process_batch

    def serve_when_closed(batch: list[object]) -> None:
        assert closed.wait(20)
        serve(batch)  # type: ignore[arg-type]

    with agent.connect() as socket:
        monkeypatch.setattr(gateway._writer, "_process_batch", serve_when_closed)
        socket.send(wire.encode_message(a_report(card(1))))
        until(lambda: gateway._pending_bytes)
        socket.send(a_beat(1, LIMIT + 1))
        assert close_code(socket) == CloseCode.MESSAGE_TOO_BIG
        closed.set()
        assert refusal("too-large")
    assert "Exception in ASGI" not in caplog.text


def test_frames_that_are_no_websocket_are_recorded_as_malformed(agent: WireAgent) -> None:
    with agent.connect() as socket:
        socket.socket.sendall(b"\xf1\x80\x00\x00\x00\x00")  # a frame with reserved bits
        assert close_code(socket) == CloseCode.PROTOCOL_ERROR
    assert "reserved bits" in refusal("malformed").reason


def test_an_agent_that_closes_because_of_a_large_message_is_not_taken_for_one_that_sent_it(
    agent: WireAgent, gateway: AgentGateway
) -> None:
    before = metrics.refusals_by_code["too-large"]
    with agent.connect() as socket:
        socket.close(CloseCode.MESSAGE_TOO_BIG, "frame with 1048577 bytes exceeds limit of 1048576 bytes")
    until(lambda: gateway.open_connections == 0)
    assert metrics.refusals_by_code["too-large"] == before
