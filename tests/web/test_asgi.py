"""The one web process: what happens beyond its threads, and that the event loop goes on meanwhile."""

from __future__ import annotations

import http.client
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cyborgweb.asgi import BoundedThreads
from cyborgweb.server.web import find_own_url
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
def test_a_gateway_is_reached_where_it_listens_or_where_it_faces_the_database(
    listen: str, database: str, reached: str
) -> None:
    with socket.create_server((listen, 0)) as listener:
        assert find_own_url(listener, database) == f"http://{reached}:{listener.getsockname()[1]}"


class Slow:
    """A WSGI application that answers when it is told to."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.inside = 0

    def __call__(self, environ: dict[str, Any], start_response: Any) -> list[bytes]:
        self.inside += 1
        self.go.wait(20)
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"done"]


@pytest.fixture
def slow() -> Iterator[Slow]:
    made = Slow()
    yield made
    made.go.set()


def get(port: int) -> tuple[int, str | None]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("GET", "/")
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer.status, answer.headers["Retry-After"]


def test_beyond_threads_and_queue_the_answer_is_503_at_once_and_nobody_inside_is_lost(slow: Slow) -> None:
    statuses: list[int] = []
    bounded = BoundedThreads(slow, threads=2, queue=1)
    with serving(bounded) as port:
        clients = [threading.Thread(target=lambda: statuses.append(get(port)[0])) for _ in range(3)]
        for client in clients:
            client.start()
        until(lambda: slow.inside == 2 and bounded.active_requests == 3)
        assert get(port) == (503, "1")
        slow.go.set()
        for client in clients:
            client.join(20)
        assert statuses == [200, 200, 200] and get(port) == (200, None)
