"""Test clients that are slow, silent or send too much, over raw sockets: none of them stops the others, none lasts."""

from __future__ import annotations

import json
import logging
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from accelerators import slow_neighbours
from cyborgweb.http import request_threads
from cyborgweb.http.bodies import FREE_BYTES, BodyReader
from cyborgweb.http.deadlines import make_client_limits
from cyborgweb.http.request_threads import ClientMemory, RequestThreads, make_client_memory
from cyborgweb.settings.keys import MAX_BODY_BYTES, Keys
from tests.support.webserver import serving, until

THREADS = 2
DEADLINE_S = 0.4
PATIENT_S = 30.0
SLOW_BODY = b"POST /v2/x HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n"
GET = b"GET /v2/x HTTP/1.1\r\nHost: a\r\n\r\n"


def echo(environ: dict[str, Any], start_response: Any) -> Any:
    """A WSGI application that answers with the length of the body, or with as many bytes as the query says."""
    body = environ["wsgi.input"].read()
    start_response("200 OK", [("Content-Type", "text/plain"), ("X-Trailer", environ.get("HTTP_X_AUTH_TOKEN", ""))])
    query = environ["QUERY_STRING"]
    if query.startswith("file="):
        start_response("200 OK", [("Content-Length", query.partition("=")[2])])
        return (b"x" * 8_192 for _ in range(int(query.partition("=")[2]) // 8_192))
    if query.startswith("stream="):
        return (b"x" * 65_536 for _ in range(int(query.partition("=")[2]) // 65_536))
    return [b"x" * int(query)] if query else [str(len(body)).encode()]


@dataclass
class Server:
    """A server with the product's protocol and `echo`. `deadlines` are for the next server that `start` starts."""

    stack: ExitStack
    port: int = 0
    threads: RequestThreads = field(init=False)
    bodies: BodyReader = field(init=False)
    memory: ClientMemory = field(init=False)
    sockets: list[socket.socket] = field(default_factory=list)

    def start(self, queue: int = 1, **keys: Any) -> None:
        """Serve with these keys; deadlines that are not named do not pass during a test. `queue` requests may wait."""
        patient = dict.fromkeys(("header_timeout_s", "body_timeout_s", "write_timeout_s", "keep_alive_s"), PATIENT_S)
        settings = Keys(**(patient | keys))
        limits = make_client_limits(settings)
        self.memory = make_client_memory(limits, settings)
        self.bodies = self.memory.bodies
        self.threads = RequestThreads(echo, THREADS, queue, limits, self.memory)

        async def serve(scope: Any, receive: Any, send: Any) -> None:
            await self.threads(scope, receive, send, streams_body=scope["path"] == "/upload")

        self.port = self.stack.enter_context(serving(serve, settings, timeout_graceful_shutdown=1))

    def connect(self, sent: bytes = b"", receive_buffer: int = 0, address: str = "127.0.0.1") -> socket.socket:
        """Return a socket of this address that is connected and has sent some bytes."""
        made = socket.socket()
        made.bind((address, 0))
        if receive_buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
            # As on a real network: with the large segments of loopback, the server's kernel would take 3 MB.
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        made.settimeout(20)
        made.connect(("127.0.0.1", self.port))
        made.sendall(sent)
        self.stack.callback(made.close)
        return made

    def ask(self, sent: bytes) -> tuple[int, bytes]:
        """Send a request on a new connection; return the status and body of its answer."""
        return split_answer(self.connect(sent.replace(b"Host: a\r\n", b"Host: a\r\nConnection: close\r\n", 1)))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(request_threads, "REFUSAL_DRAIN_S", DEADLINE_S)
    with ExitStack() as stack:
        yield Server(stack)


def read_all(connection: socket.socket) -> bytes:
    """Read until the server closes the connection; fail if it does not."""
    received = b""
    try:
        while part := connection.recv(65_536):
            received += part
    except ConnectionResetError:
        pass
    return received


def is_reset(connection: socket.socket) -> bool:
    """Return whether the server has aborted the connection, without reading what was received."""
    poller = select.poll()
    poller.register(connection, 0)
    return bool(poller.poll(0))


def split_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Return the status and the body of the only answer on a connection that the server closes."""
    head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower(), head
    if b"transfer-encoding: chunked" in head.lower():
        body = join_chunks(body)
    return int(head.split()[1]), body


def join_chunks(body: bytes) -> bytes:
    """Return a body without its division in chunks."""
    joined = b""
    while body:
        size, _, body = body.partition(b"\r\n")
        joined, body = joined + body[: int(size, 16)], body[int(size, 16) + 2 :]
    return joined


def drip(connection: socket.socket, data: bytes, until_closed: Callable[[], bool]) -> None:
    """Send a byte at a time, often enough that no deadline between two bytes would pass."""
    for number in range(len(data)):
        if until_closed():
            return
        try:
            connection.sendall(data[number : number + 1])
        except OSError:
            return
        time.sleep(DEADLINE_S / 8)


def test_clients_that_send_headers_and_no_body_do_not_occupy_threads(server: Server) -> None:
    server.start()
    for _ in range(4 * THREADS):
        server.connect(SLOW_BODY)
    assert server.ask(GET) == (200, b"0")
    assert server.threads.active_requests == 0


@pytest.mark.slow
def test_a_body_that_does_not_arrive_in_time_is_answered_408_and_the_connection_is_closed(server: Server) -> None:
    server.start(body_timeout_s=DEADLINE_S)
    for path, parts in (("/v2/x", ["faultstring"]), ("/api/x", ["request_timeout"]), ("/admin/x", ["send it again"])):
        status, body = split_answer(server.connect(SLOW_BODY.replace(b"/v2/x", path.encode())))
        assert status == 408 and all(part in body.decode() for part in parts), body


@pytest.mark.slow
def test_a_body_that_drips_is_answered_408_although_bytes_arrive_all_the_time(server: Server) -> None:
    server.start(body_timeout_s=DEADLINE_S)
    connection = server.connect(SLOW_BODY)
    answered = threading.Event()
    dripping = threading.Thread(target=drip, args=(connection, b"x" * 90, answered.is_set))
    dripping.start()
    status, _ = split_answer(connection)
    answered.set()
    dripping.join(20)
    assert status == 408


@pytest.mark.parametrize(
    "sent", [b"", b"\r\n\r\n", GET, b"GET /v2/x HTTP/1.1\r\nHost: a\r\nX-A: b", GET + b"\r\n", GET + b"GET /v2"]
)
@pytest.mark.slow
def test_idle_connections_and_unfinished_headers_are_closed(server: Server, sent: bytes) -> None:
    server.start(header_timeout_s=DEADLINE_S, keep_alive_s=DEADLINE_S)
    answers = read_all(server.connect(sent))
    assert answers.count(b"HTTP/1.1 200") == sent.count(GET)
    if sent.startswith(b"GET") and not sent.startswith(GET):
        assert b"408" in answers and b"error_message" in answers


@pytest.mark.slow
def test_headers_that_drip_are_refused_although_bytes_arrive_all_the_time(server: Server) -> None:
    server.start(header_timeout_s=DEADLINE_S)
    connection = server.connect(GET)
    assert b"200" in connection.recv(65_536)
    closed = threading.Event()
    dripping = threading.Thread(target=drip, args=(connection, GET[:-2] + b"X-A: " + b"b" * 200, closed.is_set))
    dripping.start()
    assert b"408" in read_all(connection)
    closed.set()
    dripping.join(20)


def test_headers_without_end_are_refused_before_they_fill_the_memory(server: Server) -> None:
    server.start()
    connection = server.connect(b"GET /v2/x HTTP/1.1\r\nHost: a\r\n")
    try:
        for number in range(2_000):
            connection.sendall(b"X-%d: %s\r\n" % (number, b"b" * 1_000))
    except OSError:
        assert number < 1_999
    else:
        assert b"431" in read_all(connection)


def test_too_many_headers_are_refused_also_when_they_arrive_together(server: Server) -> None:
    server.start()
    for headers in (b"a:b\r\n" * 1_000, b"X-A: %b\r\n" % (b"b" * 70_000), b"X-A: %b\r\n" % (b"b" * 1_000) * 100):
        assert split_answer(server.connect(GET[:-2] + headers + b"\r\n"))[0] == 431
    assert server.ask(GET[:-2] + b"X-A: b\r\n" * 100 + b"\r\n") == (200, b"0")
    assert server.threads.active_requests == 0


def test_trailers_without_end_are_refused_before_they_fill_the_memory(server: Server) -> None:
    server.start()
    head = b"POST /v2/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\nX-A: "
    connection, sent = server.connect(head), 0
    try:
        while sent < 100_000_000:
            sent += connection.send(b"b" * 65_536)
    except OSError:
        pass
    assert sent < 100_000_000


@pytest.mark.parametrize("size", [200_000, 900_000])
def test_a_connection_is_kept_after_a_large_body(server: Server, size: int) -> None:
    server.start()
    connection = server.connect()
    for body in (b"x" * size, b"", b"x" * size, b"y"):
        connection.sendall(b"POST /v2/x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        answer = b""
        while b"%d" % len(body) not in answer.partition(b"\r\n\r\n")[2] or not answer.endswith(b"0\r\n\r\n"):
            part = connection.recv(65_536)
            assert part and b"431" not in answer, answer
            answer += part


def test_a_body_in_chunks_of_one_byte_is_read(server: Server) -> None:
    server.start()
    head = b"POST /v2/x HTTP/1.1\r\nHost: a\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    status, body = split_answer(server.connect(head + b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n"))
    assert (status, body) == (200, b"50000")


@pytest.mark.parametrize("announced", [True, False])
def test_a_body_of_10_mib_is_answered_413_and_the_client_can_read_the_answer(server: Server, announced: bool) -> None:
    server.start()
    total, block = 10 * MAX_BODY_BYTES, b"x" * 65_536
    kind = b"Content-Length: %d" % total if announced else b"Transfer-Encoding: chunked"
    connection = server.connect(b"POST /api/x HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n" % kind)
    for _ in range(total // len(block)):
        connection.sendall(block if announced else b"10000\r\n%b\r\n" % block)
    if not announced:
        connection.sendall(b"0\r\n\r\n")
    status, body = split_answer(connection)
    assert (status, json.loads(body)["error"]["reason"]) == (413, "too_large")
    assert server.threads.active_requests == 0 and server.bodies.buffered_bytes == 0


@pytest.mark.slow
def test_a_refused_body_without_end_is_read_for_a_short_time_only(server: Server) -> None:
    server.start()
    connection = server.connect(b"POST /v2/x HTTP/1.1\r\nHost: a\r\nContent-Length: 999999999999\r\n\r\n")
    assert split_answer(connection)[0] == 413


def test_chunks_are_joined_and_trailers_are_not_taken_for_headers(server: Server) -> None:
    server.start()
    head = b"POST /v2/x HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTrailer: X-Auth-Token\r\n\r\n"
    connection = server.connect(head + b"3;name=value\r\nabc\r\n4\r\ndefg\r\n0\r\nX-Auth-Token: forged\r\n\r\n" + GET)
    until(lambda: connection.recv(65_536, socket.MSG_PEEK).count(b"HTTP/1.1 200") == 2)
    answers = connection.recv(65_536)
    assert b"\r\n\r\n7" in answers.replace(b"1\r\n7", b"7") and b"forged" not in answers


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
        b"Content-Length: 3\r\nContent-Length: 4\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Content-Length: -3\r\n",
    ],
)
def test_contradictory_lengths_are_refused_and_nothing_behind_them_is_a_request(server: Server, headers: bytes) -> None:
    server.start()
    sent = b"POST /v2/x HTTP/1.1\r\nHost: a\r\n" + headers + b"\r\n3\r\nabc\r\n0\r\n\r\n" + GET
    answers = read_all(server.connect(sent))
    assert answers.startswith(b"HTTP/1.1 400") and answers.count(b"HTTP/1.1") == 1


def test_an_aborted_upload_leaves_no_message_in_the_log(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    server.start()
    with caplog.at_level(logging.WARNING):
        for path in (b"/v2/x", b"/upload"):
            connection = server.connect(SLOW_BODY.replace(b"/v2/x", path) + b"abc")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            connection.close()
        assert server.ask(GET) == (200, b"0")
        until(lambda: server.threads.active_requests == 0)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.slow
def test_many_slow_bodies_use_bounded_memory_and_short_requests_go_on(server: Server) -> None:
    """Bodies beyond the limit of bytes get 503; a body of a few KiB, such as a bind's, does not count."""
    server.start(body_buffer_bytes=MAX_BODY_BYTES)
    large = MAX_BODY_BYTES - 1_000
    head = b"POST /v2/x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % MAX_BODY_BYTES
    server.connect(head + b"x" * large)
    until(lambda: server.bodies.buffered_bytes == large - FREE_BYTES)
    for _ in range(3):
        status, body = split_answer(server.connect(head + b"x" * large))
        assert status == 503 and b"busy" in body
    assert server.bodies.buffered_bytes <= MAX_BODY_BYTES
    short = b"POST /v2/x HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % FREE_BYTES
    assert server.ask(short + b"x" * FREE_BYTES) == (200, b"%d" % FREE_BYTES)


@pytest.mark.parametrize("query", [b"12000000", b"stream=12000000"])
@pytest.mark.slow
def test_a_client_that_does_not_read_its_answer_is_disconnected(server: Server, query: bytes) -> None:
    server.start(write_timeout_s=DEADLINE_S)
    lazy = [server.connect(GET.replace(b"/x", b"/x?" + query), receive_buffer=4_096) for _ in range(THREADS)]
    until(lambda: server.ask(GET) == (200, b"0"))
    until(lambda: server.threads.active_requests == 0)
    for connection in lazy:
        until(lambda connection=connection: is_reset(connection))
        assert len(read_all(connection)) < 12_000_000


@pytest.mark.slow
def test_a_slow_client_that_goes_on_reading_gets_its_whole_answer(server: Server) -> None:
    """It needs longer than the deadline in all; a busy machine may stop it for nearly as long as the deadline."""
    deadline_s = 2.0
    server.start(write_timeout_s=deadline_s)
    connection, received = server.connect(GET.replace(b"/x", b"/x?8000000"), receive_buffer=65_536), 0
    begin = time.monotonic()
    while received < 8_000_000:
        part = connection.recv(262_144)
        assert part, f"disconnected after {received} bytes"
        received += len(part)
        time.sleep(max(0.0, begin + 1.2 * deadline_s * received / 8_000_000 - time.monotonic()))


@pytest.mark.slow
def test_an_upload_may_take_longer_than_other_bodies_but_not_for_ever(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upload that is faster than the smallest rate goes on after the deadline for other bodies."""
    monkeypatch.setattr(request_threads, "MIN_UPLOAD_RATE", 50_000)
    deadline_s = 1.0
    server.start(body_timeout_s=deadline_s)
    head = b"POST /upload HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 200000\r\n\r\n"
    connection = server.connect(head)
    for _ in range(20):
        connection.sendall(b"x" * 10_000)
        time.sleep(1.2 * deadline_s / 20)
    assert split_answer(connection) == (200, b"200000")
    assert split_answer(server.connect(head + b"x")) == (200, b"1"), "the application sees that the body is too short"


def test_too_many_connections_end_those_that_wait_for_their_clients(server: Server) -> None:
    server.start(http_connections=5)
    silent = [server.connect(SLOW_BODY if number % 2 else b"") for number in range(20)]
    assert server.ask(GET) == (200, b"0")
    assert [read_all(connection) for connection in silent[:14]] == [b""] * 14


@pytest.mark.parametrize("sent", [SLOW_BODY, b"GET /v2/x HTTP/1.1\r\nHost: a\r\nX-A: b"])
@pytest.mark.slow
def test_the_address_of_a_client_that_misses_deadlines_is_noted(
    server: Server, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    noted: list[str] = []
    monkeypatch.setattr(slow_neighbours, "note", lambda name, *_, **options: noted.append(name))
    server.start(body_timeout_s=DEADLINE_S, header_timeout_s=DEADLINE_S)
    assert server.ask(GET) == (200, b"0")
    assert not noted
    assert split_answer(server.connect(sent))[0] == 408
    assert noted == ["The client 127.0.0.1"]


@pytest.mark.slow
def test_the_address_of_a_client_that_does_not_read_its_answer_is_noted(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[str] = []
    monkeypatch.setattr(slow_neighbours, "note", lambda name, *_, **options: noted.append(name))
    server.start(write_timeout_s=DEADLINE_S)
    server.connect(GET.replace(b"/x", b"/x?12000000"), receive_buffer=4_096)
    until(lambda: noted == ["The client 127.0.0.1"])


def test_the_address_with_the_most_connections_gives_way_to_others(server: Server) -> None:
    server.start(http_connections=6)
    quiet = [server.connect(address="127.0.0.2") for _ in range(2)]
    flood = [server.connect(SLOW_BODY if number % 2 else b"", address="127.0.0.3") for number in range(20)]
    assert server.ask(GET) == (200, b"0")
    until(lambda: sum(map(is_reset, flood)) >= 16)
    assert not any(map(is_reset, quiet))
    for connection in quiet:
        connection.sendall(GET)
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200")


def test_a_file_that_is_not_read_occupies_no_thread(server: Server) -> None:
    server.start(queue=4 * THREADS)
    for _ in range(4 * THREADS):
        server.connect(GET.replace(b"/x", b"/x?file=1048576"), receive_buffer=4_096)
    until(lambda: server.memory.answers.waiting_bytes == 4 * THREADS * 1_048_576)
    assert server.ask(GET) == (200, b"0")
    assert server.threads.active_requests == 0


@pytest.mark.django_db(transaction=True)
def test_answers_that_are_not_read_use_bounded_memory_and_others_get_theirs(server: Server) -> None:
    """The client with the most waiting bytes is refused further answers, and loses one if another client needs it."""
    server.start(answer_buffer_bytes=10_000_000)
    large = GET.replace(b"/x", b"/x?4000000")
    deaf = [server.connect(large, receive_buffer=4_096, address="127.0.0.2") for _ in range(2)]
    until(lambda: server.memory.answers.waiting_bytes == 8_000_000)
    for _ in range(3):
        greedy = server.connect(large.replace(b"Host: a\r\n", b"Host: a\r\nConnection: close\r\n"), address="127.0.0.2")
        status, body = split_answer(greedy)
        assert status == 503 and b"more requests under way than others" in body
    assert server.ask(large) == (200, b"x" * 4_000_000)
    until(lambda: sum(map(is_reset, deaf)) == 1)
    until(lambda: server.memory.answers.waiting_bytes == 4_000_000)
    assert server.ask(large) == (200, b"x" * 4_000_000), "it fits beside the other one"


def test_an_answer_larger_than_the_limit_is_sent_if_no_other_waits(server: Server) -> None:
    server.start(answer_buffer_bytes=MAX_BODY_BYTES)
    assert server.ask(GET.replace(b"/x", b"/x?4000000")) == (200, b"x" * 4_000_000)
    assert server.memory.answers.waiting_bytes == 0
