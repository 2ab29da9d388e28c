"""Test that slow and silent clients stop nobody else, not even a bind, in both ways to serve HTTP."""

from __future__ import annotations

import select
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from cyborgweb.settings.keys import Keys
from tests.support.webserver import until
from tests.system.product import Product
from tests.system.rest import Binder, ask, serve_rest

pytestmark = pytest.mark.system
SILENT = 8 * Keys().request_threads
BODYLESS = (
    b"PATCH /v2/accelerator_requests HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"
)
BODYLESS_LOGIN = (
    b"POST /admin/login/ HTTP/1.1\r\nHost: localhost\r\nCookie: csrftoken=%b\r\n"
    b"Content-Type: application/x-www-form-urlencoded\r\nContent-Length: 100\r\n\r\n" % (b"a" * 32)
)
BODYLESS_CLIENTS, TRICKLING_CLIENTS, DEAF_CLIENTS = 64, 32, 32
TRICKLE_S = 0.5
"""Seconds between two bytes of a trickling client."""
LARGE_FILE = "/static/unfold/css/styles.css"
"""A file larger than what the server and its kernel take for a client that does not read."""
ROUNDS = 3
BIND_S = 15.0
"""Seconds in which a bind must be Bound beside slow clients, on a busy machine, too. A body that does not arrive is
refused after 30 s, and an answer that is not read after 60 s: a bind that waited for these clients would be later."""
WRITE_TIMEOUT_S = 2.0


@pytest.fixture
def rest_port(product: Product) -> Iterator[int]:
    """The port of a REST process that runs as the shipped unit says, with the product's database."""
    with serve_rest(product) as port:
        yield port


@pytest.mark.parametrize("way", ["the one command", "granian"])
def test_clients_that_send_no_body_delay_neither_reads_nor_writes_nor_the_console(
    product: Product, request: pytest.FixtureRequest, way: str
) -> None:
    port = product.port if way == "the one command" else request.getfixturevalue("rest_port")
    token = product.manage("api_token", f"slow-{way.rsplit(maxsplit=1)[-1]}")[-1]
    profile = [{"name": f"slow-{way.rsplit(maxsplit=1)[-1]}", "groups": [{"resources:FPGA": "1"}]}]
    with ExitStack() as silent:
        for _ in range(SILENT):
            connection = silent.enter_context(socket.create_connection(("127.0.0.1", port), 20))
            connection.sendall(BODYLESS)
        assert ask(port, "GET", "/v2/devices", token).status == 200
        assert ask(port, "GET", "/admin/login/").status == 200
        made = ask(port, "POST", "/v2/device_profiles", token, profile)
        assert made.status == 201, made
        unknown = {"11111111-1111-4111-8111-111111111111": [{"path": "/hostname", "op": "add", "value": "a"}]}
        assert ask(port, "PATCH", "/v2/accelerator_requests", token, unknown).status in (400, 403, 404)
    assert ask(port, "DELETE", f"/v2/device_profiles?value={profile[0]['name']}", token).status == 204


@contextmanager
def slow_clients(port: int, token: str) -> Iterator[list[socket.socket]]:
    """Keep slow clients connected for the block: some send no body, some a byte of it now and then, some read nothing.

    The views that they ask for need the body. Most of them send this valid token, so they share their threads with all
    others who have a token of that project; the others send a form to the console's login. Yields the sockets of the
    clients that read nothing.
    """
    assert len(ask(port, "GET", LARGE_FILE).body) > 300_000
    with_token = BODYLESS.replace(b"\r\n", f"\r\nX-Auth-Token: {token}\r\n".encode(), 1)
    ended = threading.Event()
    with ExitStack() as stack:

        def connect(sent: bytes, receive_buffer: int = 0) -> socket.socket:
            made = stack.enter_context(socket.socket())
            if receive_buffer:
                made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
                # As on a real network: with the large segments of loopback, the server's kernel would take 3 MB.
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
            made.settimeout(20)
            made.connect(("127.0.0.1", port))
            made.sendall(sent)
            return made

        get = f"GET {LARGE_FILE} HTTP/1.1\r\nHost: localhost\r\nX-Auth-Token: {token}\r\n\r\n".encode()
        deaf = [connect(get, receive_buffer=4_096) for _ in range(DEAF_CLIENTS)]
        for number in range(BODYLESS_CLIENTS):
            connect((with_token, BODYLESS_LOGIN)[number % 2])
        trickling = [connect((with_token, BODYLESS_LOGIN)[number % 2]) for number in range(TRICKLING_CLIENTS)]

        def trickle() -> None:
            while not ended.wait(TRICKLE_S):
                for client in trickling:
                    try:
                        client.send(b" ")
                    except OSError:
                        continue  # its deadline has passed

        thread = threading.Thread(target=trickle)
        thread.start()
        try:
            yield deaf
        finally:
            ended.set()
            thread.join()


@pytest.mark.parametrize("way", ["the one command", "granian"])
def test_X5_slow_clients_do_not_delay_binds(product: Product, request: pytest.FixtureRequest, way: str) -> None:
    port = product.port if way == "the one command" else request.getfixturevalue("rest_port")
    binder = Binder(product, port, f"beside-slow-{way.rsplit(maxsplit=1)[-1]}")
    with binder.profile():
        alone = [binder.bind_and_release() for _ in range(ROUNDS)]
        with slow_clients(port, binder.token):
            beside = [binder.bind_and_release() for _ in range(ROUNDS)]
    print(f"{way}: {max(alone):.2f} s alone, {max(beside):.2f} s beside slow clients, at most {BIND_S} s")
    assert max(beside) < BIND_S


def test_X5_granian_disconnects_clients_that_do_not_read(product: Product) -> None:
    """These clients read a byte now and then, so their connections are not idle."""
    token = product.manage("api_token", "not-reading")[-1]
    with serve_rest(product, CYBORG_WRITE_TIMEOUT_S=str(WRITE_TIMEOUT_S)) as port, slow_clients(port, token) as deaf:

        def is_reset_after_a_byte(client: socket.socket) -> bool:
            """Read a byte; return whether the server has ended the connection."""
            try:
                client.recv(1)
            except ConnectionError:
                return True
            poller = select.poll()
            poller.register(client, 0)
            return bool(poller.poll(0))

        remaining = set(deaf)

        def all_are_disconnected() -> bool:
            remaining.difference_update([client for client in remaining if is_reset_after_a_byte(client)])
            return not remaining

        until(all_are_disconnected)
        assert ask(port, "GET", "/healthz").status == 200
