"""Test that clients that send headers and no body stop nobody else, in both ways to serve HTTP."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from cyborgweb.settings.keys import Keys
from tests.support.webserver import until
from tests.system.deployment import read_unit
from tests.system.product import ROOT, START_S, Product, environment

pytestmark = pytest.mark.system
SILENT = 8 * Keys().request_threads
BODYLESS = (
    b"PATCH /v2/accelerator_requests HTTP/1.1\r\nHost: localhost\r\n"
    b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"
)


@pytest.fixture
def rest_port(product: Product) -> Iterator[int]:
    """The port of a REST process that runs as the shipped unit says, with the product's database."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    unit = read_unit("accelerators-rest", product.state, {"GRANIAN_HOST": "127.0.0.1", "GRANIAN_PORT": str(port)})
    settings = {name: value for name, value in unit.environment.items() if not name.startswith("CYBORG_PUBLIC")}
    del settings["CYBORG_DATABASE_URL"]
    process = subprocess.Popen(
        ["setpriv", "--pdeathsig", "TERM", sys.executable, *unit.words[1:]],
        cwd=ROOT,
        env=environment() | settings | {"CYBORG_STATE_DIR": str(product.state), "GRANIAN_WORKERS": "1"},
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


def ask(port: int, method: str, path: str, token: str = "", body: object = None) -> tuple[int, bytes]:
    """Send a request, whose body comes in chunks; return the status and body of the answer."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        headers = {"X-Auth-Token": token, "Content-Type": "application/json", "Host": "localhost"}
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
