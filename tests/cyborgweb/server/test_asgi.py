"""Test the web process: the address of a gateway, and requests beyond the threads and their queue."""

from __future__ import annotations

import http.client
import json
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cyborgweb.http.request_threads import RequestThreads
from cyborgweb.server.web_server import find_own_url, make_config, make_connection_settings
from cyborgweb.settings.keys import Keys
from tests.support.webserver import serving, until


@pytest.mark.parametrize(
    ("listen", "database", "reached"),
    [
        ("127.0.0.2", "postgresql://db.example.invalid/x", "127.0.0.2"),
        ("0.0.0.0", "", "127.0.0.1"),
        ("0.0.0.0", "postgresql:///x?host=/run/postgresql", "127.0.0.1"),
        ("0.0.0.0", "postgresql://user:word@[::1]:5433/x", "[::1]"),
        ("0.0.0.0", "postgresql://db.example.invalid/x", "127.0.0.1"),
    ],
)
def test_the_address_of_a_gateway_is_its_listen_address_or_the_one_facing_the_database(
    listen: str, database: str, reached: str
) -> None:
    with socket.create_server((listen, 0)) as listener:
        assert find_own_url(listener, database) == f"http://{reached}:{listener.getsockname()[1]}"


class SlowApplication:
    """A WSGI application whose requests wait until `released` is set, at most 20 s."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.running_requests = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        self.running_requests += 1
        self.released.wait(20)
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"done"]


@pytest.fixture
def slow() -> Iterator[SlowApplication]:
    made = SlowApplication()
    yield made
    made.released.set()


def get_answer(port: int, path: str) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", path)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer, body


def get_status_and_retry_after(port: int) -> tuple[int, str | None]:
    answer, _ = get_answer(port, "/")
    return answer.status, answer.headers["Retry-After"]


def test_requests_beyond_threads_and_queue_are_answered_503_and_accepted_ones_complete(slow: SlowApplication) -> None:
    statuses: list[int] = []
    bounded = RequestThreads(slow, threads=2, queue=1)
    with serving(bounded) as port:
        clients = [
            threading.Thread(target=lambda: statuses.append(get_status_and_retry_after(port)[0])) for _ in range(3)
        ]
        for client in clients:
            client.start()
        until(lambda: slow.running_requests == 2 and bounded.active_requests == 3)
        assert get_status_and_retry_after(port) == (503, "1")
        v2_error, own_error = (json.loads(get_answer(port, path)[1]) for path in ("/v2/devices", "/api/devices/"))
        assert [*v2_error] == ["error_message"] and own_error["error"]["reason"] == "unavailable"
        slow.released.set()
        for client in clients:
            client.join(20)
        assert statuses == [200, 200, 200] and get_status_and_retry_after(port) == (200, None)


def test_the_server_itself_takes_no_address_and_no_scheme_from_a_header() -> None:
    config = make_config(lambda *_: None, make_connection_settings(Keys()))
    seen: list[Any] = []

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        seen.extend([scope["client"][0], scope["scheme"]])
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    with serving(answer, proxy_headers=config.proxy_headers) as port:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        headers = {"X-Forwarded-For": "198.51.100.7", "X-Forwarded-Proto": "https"}
        connection.request("GET", "/", headers=headers)
        assert connection.getresponse().status == 200
        connection.close()
    assert seen == ["127.0.0.1", "http"]
