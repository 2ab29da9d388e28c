"""Tests of the size limit for agent messages, with the product's own limit and web server.

The gateway refuses a larger message with its reason. A message that is also above the limit of the web server's library
never reaches it: the library closes the connection. The gateway counts and records both.
"""

from __future__ import annotations

import threading

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.frames import Close, CloseCode
from websockets.sync.client import ClientConnection

from accelerators.models import Event
from agents import wire
from agents.gateway import metrics
from agents.gateway.asgi_app import AgentGateway
from cyborgweb.settings.keys import Keys
from tests.agents.gateway.test_gateway import make_report
from tests.support.reports import make_card
from tests.support.webserver import until
from tests.support.wireagent import WireAgent, ask

pytestmark = pytest.mark.django_db(transaction=True)
MAX_MESSAGE_BYTES = Keys().max_message_bytes
LIBRARY_BYTES = MAX_MESSAGE_BYTES + wire.MESSAGE_MARGIN_BYTES


def make_beat(seq: int, size: int, filler: str = "x") -> str:
    """Return a Beat message of `size` bytes, padded with a field that the gateway does not know."""
    beat = '{"type":"Beat","seq":%d,"more":"%s"}'
    room = size - len(beat % (seq, ""))
    assert room % len(filler.encode()) == 0
    return beat % (seq, filler * (room // len(filler.encode())))


def read_close(socket: ClientConnection) -> Close:
    """Read until the gateway closes the connection; return the code and the reason of its close frame."""
    with pytest.raises(ConnectionClosed) as closed:
        while True:
            socket.recv(timeout=10)
    assert closed.value.rcvd
    return closed.value.rcvd


def wait_for_refusal(code: str) -> Event:
    """Wait for the event about a refusal with this code, and return it."""
    refused = Event.objects.filter(action="agent.refused", host="cmp1", changes__code=[None, code])
    until(refused.exists)
    return refused.get()


def test_a_message_of_the_maximum_size_is_accepted_and_a_larger_one_counted_and_recorded(
    agent: WireAgent, gateway: AgentGateway
) -> None:
    assert MAX_MESSAGE_BYTES == wire.MAX_MESSAGE_BYTES
    before = metrics.refusals_by_code["too-large"]
    with agent.connect() as socket:
        assert agent.welcome and agent.welcome.max_bytes == MAX_MESSAGE_BYTES
        assert ask(socket, make_beat(11, MAX_MESSAGE_BYTES)) == wire.Ack(11, "Beat")
    assert metrics.refusals_by_code["too-large"] == before
    # Bytes count, not characters: the second has about half as many characters as bytes.
    for large in (make_beat(12, MAX_MESSAGE_BYTES + 1), make_beat(12, MAX_MESSAGE_BYTES + 2, "ä")):
        with agent.connect() as socket:
            refusal = ask(socket, large)
            assert isinstance(refusal, wire.Refuse) and refusal.code == "too-large"
            assert "larger than 1048576 bytes" in refusal.reason and "CYBORG_MAX_MESSAGE_BYTES" in refusal.reason
            assert read_close(socket) == Close(CloseCode.POLICY_VIOLATION, "too-large")
        # Wait before the next message: of several refusals within a short time only the last one is recorded.
        event = wait_for_refusal("too-large")
    assert f"it has {MAX_MESSAGE_BYTES + 1} bytes" in event.reason
    until(lambda: metrics.refusals_by_code["too-large"] == before + 2)
    with agent.connect() as socket:
        assert ask(socket, wire.Beat(13)) == wire.Ack(13, "Beat")
    until(lambda: gateway.open_connections == 0)


def test_a_message_above_the_limit_of_the_web_servers_library_is_recorded_with_its_size(agent: WireAgent) -> None:
    with agent.connect() as socket:
        socket.send(make_beat(12, LIBRARY_BYTES + 1))
        assert read_close(socket).code == CloseCode.MESSAGE_TOO_BIG
    assert f"frame with {LIBRARY_BYTES + 1} bytes" in wait_for_refusal("too-large").reason


def test_a_too_large_message_is_recorded_although_an_acknowledgement_could_not_be_sent(
    agent: WireAgent, gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The large message arrives while a report is being stored: its acknowledgement finds a closed connection."""
    closed, serve = threading.Event(), gateway._report_writer._process_batch

    def serve_when_closed(batch: list[object]) -> None:
        assert closed.wait(20)
        serve(batch)  # type: ignore[arg-type]

    with agent.connect() as socket:
        monkeypatch.setattr(gateway._report_writer, "_process_batch", serve_when_closed)
        socket.send(wire.encode_message(make_report(make_card(1))))
        until(lambda: gateway._pending_bytes)
        socket.send(make_beat(1, LIBRARY_BYTES + 1))
        assert read_close(socket).code == CloseCode.MESSAGE_TOO_BIG
        closed.set()
        assert wait_for_refusal("too-large")
    assert "Exception in ASGI" not in caplog.text


def test_invalid_websocket_frames_are_recorded_as_malformed(agent: WireAgent) -> None:
    with agent.connect() as socket:
        socket.socket.sendall(b"\xf1\x80\x00\x00\x00\x00")  # a frame with reserved bits
        assert read_close(socket).code == CloseCode.PROTOCOL_ERROR
    assert "reserved bits" in wait_for_refusal("malformed").reason


def test_an_agent_that_closes_with_message_too_big_is_not_counted_as_a_refusal(
    agent: WireAgent, gateway: AgentGateway
) -> None:
    before = metrics.refusals_by_code.copy()
    with agent.connect() as socket:
        socket.close(CloseCode.MESSAGE_TOO_BIG, "frame with 1048577 bytes exceeds limit of 1048576 bytes")
    until(lambda: gateway.open_connections == 0)
    assert metrics.refusals_by_code == before
