"""Test that connections to the agents' TLS listener have a deadline, and are counted, before their handshake ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import select
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cyborgweb.http.protocol import HttpProtocol
from cyborgweb.server import tls
from cyborgweb.server.web_server import TwoListenerServer, make_config, make_connection_settings
from cyborgweb.settings.keys import Keys
from tests.support.webserver import until

DEADLINE_S = 0.6
PATIENT_S = 30.0
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
HELLO_BEGIN = b"\x16\x03\x01\x02\x00\x01\x00\x01"
"""The beginning of a ClientHello that announces more bytes."""


async def answer(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@dataclass
class Servers:
    """Starts a server with a plain and a TLS listener. `protocol` is the class of its connections."""

    folder: Path
    stack: ExitStack
    port: int = 0
    protocol: type[HttpProtocol] = field(init=False)
    server: TwoListenerServer = field(init=False)

    def start(self, **values: Any) -> None:
        keys = Keys(state_dir=str(self.folder), **values)
        settings = make_connection_settings(keys)
        self.protocol = settings["http"]
        plain, encrypted = (socket.create_server(("127.0.0.1", 0)) for _ in range(2))
        self.port = encrypted.getsockname()[1]
        self.server = TwoListenerServer(make_config(answer, settings), lambda: None)
        self.server.add_tls_listener(encrypted, make_config(answer, settings), tls.make_ssl_context(keys))
        runner = self.server.config.get_loop_factory()
        thread = threading.Thread(
            target=lambda: asyncio.Runner(loop_factory=runner).run(self.server.serve(sockets=[plain])), daemon=True
        )
        thread.start()
        until(lambda: self.server.started)

        def stop() -> None:
            self.server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()

        self.stack.callback(stop)

    def connect(self, sent: bytes = b"", address: str = "127.0.0.1") -> socket.socket:
        """Return a TCP connection to the TLS listener that has sent some bytes."""
        made = socket.create_connection(("127.0.0.1", self.port), 20, source_address=(address, 0))
        self.stack.callback(made.close)
        made.sendall(sent)
        return made

    def shake_hands(self, connection: socket.socket) -> ssl.SSLSocket:
        """Do the TLS handshake on a connection."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        made = context.wrap_socket(connection)
        self.stack.callback(made.close)
        return made

    def ask(self) -> bytes:
        """Send a request and return the beginning of its answer."""
        connection = self.shake_hands(self.connect())
        connection.sendall(GET)
        return connection.recv(65_536)


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(tmp_path, stack)


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server has closed the connection; drop what it has sent."""
    if not select.select([connection], [], [], 0)[0]:
        return False
    try:
        return connection.recv(65_536) == b""
    except ConnectionError:
        return True


def measure_until(condition: Callable[[], bool]) -> float:
    begin = time.monotonic()
    until(condition)
    return time.monotonic() - begin


@pytest.mark.parametrize("sent", [b"", HELLO_BEGIN])
@pytest.mark.slow
def test_a_handshake_that_is_not_finished_is_ended_after_the_deadline_for_headers(
    servers: Servers, sent: bytes
) -> None:
    servers.start(header_timeout_s=DEADLINE_S)
    connection = servers.connect(sent)
    until(lambda: len(servers.protocol.open_connections) == 1)
    assert DEADLINE_S * 0.8 < measure_until(lambda: is_closed(connection)) < 8 * DEADLINE_S
    until(lambda: not servers.protocol.open_connections)
    assert not servers.protocol.connections_by_address
    assert servers.ask().startswith(b"HTTP/1.1 200")


@pytest.mark.slow
def test_the_handshake_and_the_headers_have_one_deadline_together(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second connection begins before the handshake of the first one is made. It must end after the first one: with
    a deadline of their own, which began with the handshake, the headers of the first one would end later.
    """
    servers.start(header_timeout_s=2 * DEADLINE_S)
    ended: list[HttpProtocol] = []

    def note_end(one: HttpProtocol) -> None:
        ended.append(one)

    monkeypatch.setattr(servers.protocol, "_end_reading", note_end)
    monkeypatch.setattr(servers.protocol, "handshake_failed", note_end)
    connection = servers.connect()
    until(lambda: len(servers.protocol.open_connections) == 1)
    servers.connect()
    until(lambda: len(servers.protocol.open_connections) == 2)
    begun = list(servers.protocol.open_connections)
    servers.shake_hands(connection)
    until(lambda: len(ended) == 2)
    assert ended == begun


def test_handshakes_are_counted_and_the_address_with_the_most_gives_way(servers: Servers) -> None:
    servers.start(header_timeout_s=PATIENT_S, http_connections=5)
    quiet = [servers.connect(address="127.0.0.2") for _ in range(2)]
    until(lambda: len(servers.protocol.open_connections) == 2)
    flood = [servers.connect(HELLO_BEGIN, address="127.0.0.3") for _ in range(20)]
    until(lambda: sum(map(is_closed, flood)) == 17)
    assert servers.ask().startswith(b"HTTP/1.1 200")
    for connection in quiet:
        encrypted = servers.shake_hands(connection)
        encrypted.sendall(GET)
        assert encrypted.recv(65_536).startswith(b"HTTP/1.1 200")


def test_what_is_not_tls_is_refused_and_no_longer_counted(servers: Servers, caplog: pytest.LogCaptureFixture) -> None:
    servers.start(header_timeout_s=PATIENT_S)
    plain = servers.connect(GET)
    until(lambda: is_closed(plain))
    aborted = servers.connect(HELLO_BEGIN)
    aborted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    aborted.close()
    until(lambda: not servers.protocol.open_connections)
    assert servers.ask().startswith(b"HTTP/1.1 200")
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


def test_a_shutdown_does_not_wait_for_handshakes(servers: Servers) -> None:
    servers.start(header_timeout_s=PATIENT_S)
    connection = servers.connect(HELLO_BEGIN)
    until(lambda: len(servers.protocol.open_connections) == 1)
    servers.server.should_exit = True
    assert measure_until(lambda: is_closed(connection)) < 10


@pytest.mark.slow
def test_the_listener_accepts_again_after_the_system_has_refused_a_connection(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    servers.start(header_timeout_s=PATIENT_S)
    assert servers.ask().startswith(b"HTTP/1.1 200")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    waiting = socket.socket()
    servers.stack.callback(waiting.close)
    highest = socket.socket()
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest.fileno(), hard))
    highest.close()
    # The lowest free descriptors are used up, so that the listener gets none.
    taken = []
    try:
        while True:
            taken.append(socket.socket())
    except OSError:
        pass
    try:
        waiting.settimeout(20)
        waiting.connect(("127.0.0.1", servers.port))
        time.sleep(0.2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in taken:
            each.close()
    encrypted = servers.shake_hands(waiting)
    encrypted.sendall(GET)
    assert encrypted.recv(65_536).startswith(b"HTTP/1.1 200")


def test_a_connection_whose_handshake_cannot_begin_is_closed_and_no_longer_counted(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    servers.start(header_timeout_s=PATIENT_S)
    begin = servers.protocol.handshake_begun

    def fail(self: HttpProtocol, *arguments: Any) -> None:
        begin(self, *arguments)
        raise RuntimeError("another connection could not be ended")

    with monkeypatch.context() as patch:
        patch.setattr(servers.protocol, "handshake_begun", fail)
        connection = servers.connect(HELLO_BEGIN)
        until(lambda: is_closed(connection))
    until(lambda: not servers.protocol.open_connections)
    assert not servers.protocol.connections_by_address
    assert servers.ask().startswith(b"HTTP/1.1 200")


def test_a_connection_beyond_the_limit_whose_socket_is_closed_already_does_not_harm_others(servers: Servers) -> None:
    """The transport has dropped its socket, and its protocol has not been told yet."""
    servers.start(header_timeout_s=PATIENT_S, http_connections=1)
    victim = servers.shake_hands(servers.connect())
    until(lambda: len(servers.protocol.open_connections) == 1)
    (protocol,) = servers.protocol.open_connections
    outcome: concurrent.futures.Future[bool] = concurrent.futures.Future()

    def reset() -> None:
        try:
            protocol._reset_connection()
        except Exception as error:  # noqa: BLE001 - raised again by the test's thread
            outcome.set_exception(error)
        else:
            outcome.set_result(protocol in servers.protocol.open_connections)

    def abort() -> None:
        protocol.transport.abort()
        protocol.loop.call_soon(reset)

    protocol.loop.call_soon_threadsafe(abort)
    assert outcome.result(20), "the protocol was told before"
    until(lambda: is_closed(victim))
    assert servers.ask().startswith(b"HTTP/1.1 200")
