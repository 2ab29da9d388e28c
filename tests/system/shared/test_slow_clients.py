"""Test that slow and silent clients stop nobody else, not even a bind, in both ways to serve HTTP."""

from __future__ import annotations

import http.client
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest

from cyborgweb.settings.keys import Keys
from tests.support.webserver import until
from tests.system.deployment import read_unit
from tests.system.machine import FAKE_CARD, HOST
from tests.system.product import ROOT, START_S, Product, environment

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


@contextmanager
def serve_rest(product: Product, **settings: str) -> Iterator[int]:
    """Run a REST process as the shipped unit says, with the product's database and these variables; yield its port."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    unit = read_unit("accelerators-rest", product.state, {"GRANIAN_HOST": "127.0.0.1", "GRANIAN_PORT": str(port)})
    units = {name: value for name, value in unit.environment.items() if not name.startswith("CYBORG_PUBLIC")}
    del units["CYBORG_DATABASE_URL"]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", sys.executable, *unit.words[1:]],
        cwd=ROOT,
        env=environment() | units | settings | {"CYBORG_STATE_DIR": str(product.state), "GRANIAN_WORKERS": "1"},
        process_group=0,
    )
    try:
        until(lambda: is_serving(port), START_S)
        yield port
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(20)


def is_serving(port: int) -> bool:
    try:
        return ask(port, "GET", "/healthz")[0] == 200
    except OSError:
        return False


def ask(
    port: int, method: str, path: str, token: str = "", body: object = None, service: str = ""
) -> tuple[int, bytes]:
    """Send a request, whose body comes in chunks; return the status and body of the answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        headers = {"X-Auth-Token": token, "Content-Type": "application/json", "Host": "localhost"}
        headers |= {"X-Service-Token": service} if service else {}
        connection.request(method, path, iter([json.dumps(body).encode()]) if body else None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read()


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
        assert ask(port, "GET", "/v2/devices", token)[0] == 200
        assert ask(port, "GET", "/admin/login/")[0] == 200
        status, said = ask(port, "POST", "/v2/device_profiles", token, profile)
        assert status == 201, said
        unknown = {"11111111-1111-4111-8111-111111111111": [{"path": "/hostname", "op": "add", "value": "a"}]}
        assert ask(port, "PATCH", "/v2/accelerator_requests", token, unknown)[0] in (400, 403, 404)
    assert ask(port, "DELETE", f"/v2/device_profiles?value={profile[0]['name']}", token)[0] == 204


@contextmanager
def slow_clients(port: int, token: str) -> Iterator[list[socket.socket]]:
    """Keep slow clients connected for the block: some send no body, some a byte of it now and then, some read nothing.

    The views that they ask for need the body. Most of them send this valid token, so they share their threads with all
    others who have a token of that project; the others send a form to the console's login. Yields the sockets of the
    clients that read nothing.
    """
    assert len(ask(port, "GET", LARGE_FILE)[1]) > 300_000
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


class Binding:
    """Binds requests to the fake card as Nova does, over HTTP at `port`."""

    def __init__(self, product: Product, port: int, name: str) -> None:
        self.port, self.name = port, name
        self.token, self.service = (
            product.manage("api_token", f"{name}-{r}", "--role", r)[-1] for r in ("admin", "service")
        )
        ((self.provider,),) = product.rows(
            "SELECT p.rp_uuid::text FROM accelerators_deployable p JOIN accelerators_device d ON d.id = p.device_id"
            " WHERE d.vendor = %s",
            FAKE_CARD[0],
        )

    def call(self, wanted: int, method: str, path: str, body: object = None) -> bytes:
        status, answer = ask(self.port, method, path, self.token, body, self.service)
        assert status == wanted, (method, path, status, answer)
        return answer

    @contextmanager
    def profile(self) -> Iterator[None]:
        """Keep a device profile for the block."""
        self.call(201, "POST", "/v2/device_profiles", [{"name": self.name, "groups": [{"resources:FPGA": "1"}]}])
        yield
        self.call(204, "DELETE", f"/v2/device_profiles?value={self.name}")

    def bind_and_release(self) -> float:
        """Bind a request, wait until it is Bound, delete it; return the seconds from the bind until it was Bound."""
        made = self.call(201, "POST", "/v2/accelerator_requests", {"device_profile_name": self.name})
        request = json.loads(made)["arqs"][0]["uuid"]
        values = {"hostname": HOST, "device_rp_uuid": self.provider, "instance_uuid": str(uuid.uuid4())}
        patch = {request: [{"op": "add", "path": f"/{key}", "value": value} for key, value in values.items()]}
        begin = time.monotonic()
        self.call(202, "PATCH", "/v2/accelerator_requests", patch)
        while (state := json.loads(self.call(200, "GET", f"/v2/accelerator_requests/{request}"))["state"]) != "Bound":
            assert state == "BindStarted" and time.monotonic() - begin < 60, state
            time.sleep(0.02)
        seconds = time.monotonic() - begin
        self.call(204, "DELETE", f"/v2/accelerator_requests?arqs={request}")
        return seconds


@pytest.mark.parametrize("way", ["the one command", "granian"])
def test_X5_slow_clients_do_not_delay_binds(product: Product, request: pytest.FixtureRequest, way: str) -> None:
    port = product.port if way == "the one command" else request.getfixturevalue("rest_port")
    binding = Binding(product, port, f"beside-slow-{way.rsplit(maxsplit=1)[-1]}")
    with binding.profile():
        alone = [binding.bind_and_release() for _ in range(ROUNDS)]
        with slow_clients(port, binding.token):
            beside = [binding.bind_and_release() for _ in range(ROUNDS)]
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
        assert ask(port, "GET", "/healthz")[0] == 200
