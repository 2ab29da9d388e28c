"""Test the guard that ends slow clients' connections for a server without such deadlines, with real connections."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import pytest

from accelerators import slow_neighbours
from cyborgweb.http import connection_guard
from cyborgweb.http.connection_guard import MIN_WRITE_BYTES, ConnectionGuard, Peer
from cyborgweb.http.deadlines import make_client_limits
from cyborgweb.settings.keys import Keys
from tests.support.webserver import until

WRITE_S = 10.0
LARGE = b"x" * 2_000_000


@dataclass
class Listener:
    """A listening socket of this process, with a guard whose clock the tests set."""

    stack: ExitStack
    limit: int = 100
    served: set[Peer] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.socket = self.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        keys = Keys(write_timeout_s=WRITE_S, http_connections=self.limit)
        self.guard = ConnectionGuard(make_client_limits(keys), lambda: self.served)

    def connect(self, receive_buffer: int = 4_096, address: str = "127.0.0.1") -> tuple[socket.socket, socket.socket]:
        """Return the client's and the server's end of a new connection."""
        client = self.stack.enter_context(socket.socket())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        client.bind((address, 0))
        client.connect(self.socket.getsockname())
        server, _ = self.socket.accept()
        self.stack.enter_context(server)
        server.setblocking(False)
        client.settimeout(20)
        return client, server


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def is_ended(server: socket.socket) -> bool:
    """Return whether the server's end of a connection was ended."""
    try:
        server.send(b"x")
    except BlockingIOError:
        return False
    except OSError:
        return True
    return False


def fill(server: socket.socket) -> None:
    """Write until the kernel takes no more."""
    try:
        while True:
            server.send(LARGE)
    except BlockingIOError:
        pass


def test_a_client_that_reads_nothing_is_disconnected_after_the_deadline(stack: ExitStack) -> None:
    listener = Listener(stack)
    (_, stalled), (_, idle) = listener.connect(), listener.connect()
    fill(stalled)
    for now in (0.0, WRITE_S - 1):
        listener.guard.sweep(now)
        assert not is_ended(stalled)
    listener.guard.sweep(WRITE_S)
    assert is_ended(stalled) and not is_ended(idle)


def test_a_client_that_reads_too_slowly_is_disconnected_although_it_reads_all_the_time(stack: ExitStack) -> None:
    listener = Listener(stack)
    (slow_client, slow), (quick_client, quick) = (listener.connect(receive_buffer=65_536) for _ in range(2))
    fill(slow)
    fill(quick)
    read = 0
    for now in range(3 * int(WRITE_S)):
        listener.guard.sweep(float(now))
        if not is_ended(slow):
            slow_client.recv(4_096)
        for _ in range(8):
            read += len(quick_client.recv(65_536))
        fill(quick)
        time.sleep(0.01)
    assert read > 3 * MIN_WRITE_BYTES
    assert is_ended(slow) and not is_ended(quick)


def test_a_short_answer_that_a_client_reads_slowly_but_completely_is_delivered(stack: ExitStack) -> None:
    listener = Listener(stack)
    client, server = listener.connect()
    server.send(b"x" * 20_000)
    received = 0
    for now in range(0, int(WRITE_S), 2):
        listener.guard.sweep(float(now))
        received += len(client.recv(5_000))
    while received < 20_000:
        received += len(client.recv(5_000))

    def is_accepted() -> bool:
        listener.guard.sweep(WRITE_S - 1)
        return not listener.guard._waits

    until(is_accepted)
    listener.guard.sweep(2 * WRITE_S)
    assert not is_ended(server)


def test_beyond_the_limit_the_address_with_the_most_connections_loses_its_oldest_idle_ones(stack: ExitStack) -> None:
    listener = Listener(stack, limit=6)
    _, quiet = listener.connect(address="127.0.0.2")
    flood = []
    for number in range(8):
        flood.append(listener.connect(address="127.0.0.3")[1])
        listener.guard.sweep(float(number) / 10)
        if number == 0:
            listener.served.add(flood[0].getpeername())
    assert [is_ended(server) for server in flood] == [False, True, True, True, False, False, False, False]
    assert not is_ended(quiet)


def test_connections_of_this_process_to_others_are_left_alone(stack: ExitStack) -> None:
    listener = Listener(stack)
    client, server = listener.connect()
    client.setblocking(False)
    fill(client)
    for now in (0.0, 2 * WRITE_S):
        listener.guard.sweep(now)
    assert not is_ended(client) and not is_ended(server)


def test_one_free_descriptor_is_enough_to_end_connections(stack: ExitStack) -> None:
    import resource

    listener = Listener(stack)
    servers = [listener.connect()[1] for _ in range(4)]
    for server in servers:
        fill(server)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = os.dup(0)  # all lower descriptors are in use
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            listener.guard.sweep(0.0)
        os.close(highest)
        listener.guard.sweep(0.0)
        listener.guard.sweep(WRITE_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert all(map(is_ended, servers))


def test_a_number_that_is_used_for_a_file_meanwhile_leaks_no_descriptor(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = Listener(stack)
    listener.connect()
    file = os.open(os.devnull, os.O_RDONLY)
    stack.callback(os.close, file)
    duplicate, before = os.dup, len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "dup", lambda number: duplicate(file))
    listener.guard.sweep(0.0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_connection_that_was_replaced_by_another_one_is_not_ended(stack: ExitStack) -> None:
    listener = Listener(stack)
    _, stalled = listener.connect()
    fill(stalled)
    (connection,) = connection_guard._list_connections()
    _, other = listener.connect()
    os.dup2(other.fileno(), stalled.fileno())
    connection_guard._end_connection(connection)
    assert not is_ended(other)


def test_a_client_that_is_disconnected_is_noted_as_slow(stack: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    monkeypatch.setattr(slow_neighbours, "note", lambda name, *_, **options: noted.append(name))
    listener = Listener(stack)
    _, stalled = listener.connect(address="127.0.0.5")
    fill(stalled)
    listener.guard.sweep(0.0)
    listener.guard.sweep(WRITE_S)
    assert noted == ["The client 127.0.0.5"]
