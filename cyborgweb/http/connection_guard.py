"""Ends connections of slow clients, for a server that has no deadline for clients that do not read their answers.

Granian has none. Its connections are sockets of this process, so the kernel says how much of an answer each client has
accepted. Our own protocol class (`cyborgweb.http.protocol`) needs none of this.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
import stat
import struct
import termios
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cyborgweb.auth.clients import get_network
from cyborgweb.http.deadlines import ClientLimits
from cyborgweb.http.slow_clients import note_slow_client

log = logging.getLogger(__name__)

SWEEP_S = 1.0
MIN_WRITE_BYTES = 262_144
"""What a client must accept in `write_s` seconds of an answer that waits for it, or all of it if less waits."""
ACKED_OFFSET, TCP_INFO_BYTES = 120, 128
"""The place of `tcpi_bytes_acked` in Linux's `struct tcp_info`, and the size of the struct up to its end."""
Peer = tuple[str, int]


@dataclass
class _Connection:
    """An open connection: `inode` identifies it, also when its file descriptor `number` is used again."""

    inode: int
    number: int
    local_port: int
    peer: Peer
    waiting_bytes: int
    acked_bytes: int


@dataclass
class _Wait:
    """An answer that waits since `since`, when the client had accepted `acked_bytes`; it must accept `wanted_bytes`."""

    since: float
    acked_bytes: int
    wanted_bytes: int


class ConnectionGuard:
    """Ends connections to this process's listening sockets. `list_served_peers` returns the peers whose requests are
    being processed: these connections do not wait for their clients.
    """

    def __init__(self, limits: ClientLimits, list_served_peers: Callable[[], Collection[Peer]]) -> None:
        self._limits, self._list_served_peers = limits, list_served_peers
        self._waits: dict[int, _Wait] = {}
        self._first_seen: dict[int, float] = {}

    def start(self) -> None:
        """Sweep every SWEEP_S seconds, in a thread that ends with the process."""
        threading.Thread(target=self._run, name="connection-guard", daemon=True).start()

    def _run(self) -> None:
        """Sweep for ever. An error is logged; the next sweep tries again."""
        while True:
            time.sleep(SWEEP_S)
            try:
                self.sweep(time.monotonic())
            except Exception:
                log.exception("the connections of slow clients cannot be checked")

    def sweep(self, now: float) -> None:
        """End the connections whose clients have accepted too little, and the excess of too many connections."""
        connections = _list_connections()
        inodes = {each.inode for each in connections}
        self._waits = {inode: wait for inode, wait in self._waits.items() if inode in inodes}
        self._first_seen = {each.inode: self._first_seen.get(each.inode, now) for each in connections}
        stalled = [each for each in connections if self._is_stalled(each, now)]
        ended = {each.inode for each in stalled}
        remaining = [each for each in connections if each.inode not in ended]
        for each in stalled:
            note_slow_client(each.peer)
        for each in [*stalled, *self._choose_excess(remaining)]:
            _end_connection(each)

    def _is_stalled(self, connection: _Connection, now: float) -> bool:
        """Return whether the client has accepted too little of its answer for `write_s` seconds."""
        if not connection.waiting_bytes:
            self._waits.pop(connection.inode, None)
            return False
        wait = self._waits.get(connection.inode)
        if wait is None or connection.acked_bytes - wait.acked_bytes >= wait.wanted_bytes:
            wanted = min(MIN_WRITE_BYTES, connection.waiting_bytes)
            self._waits[connection.inode] = _Wait(now, connection.acked_bytes, wanted)
            return False
        return now - wait.since >= self._limits.write_s

    def _choose_excess(self, connections: list[_Connection]) -> list[_Connection]:
        """Return the connections beyond the limit: each time the oldest that waits for its client, of the address with
        the most connections.
        """
        excess = len(connections) - self._limits.connections
        if excess <= 0:
            return []
        served = set(self._list_served_peers())
        idle = [each for each in connections if each.peer not in served]
        idle.sort(key=lambda each: self._first_seen[each.inode], reverse=True)
        by_address: dict[str, list[_Connection]] = {}
        for each in idle:
            by_address.setdefault(get_network(each.peer[0]), []).append(each)
        counts = Counter(get_network(each.peer[0]) for each in connections)
        chosen: list[_Connection] = []
        while by_address and len(chosen) < excess:
            largest = max(by_address, key=lambda address: counts[address])
            chosen.append(by_address[largest].pop())
            counts[largest] -= 1
            if not by_address[largest]:
                del by_address[largest]
        return chosen


def _list_connections() -> list[_Connection]:
    """Return the accepted TCP connections of this process."""
    found: list[_Connection] = []
    ports: set[int] = set()
    for name in os.listdir("/proc/self/fd"):
        with _ignoring_closed(), _open_copy(int(name)) as copy:
            if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.type != socket.SOCK_STREAM:
                continue
            if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                ports.add(copy.getsockname()[1])
                continue
            (waiting,) = struct.unpack("i", fcntl.ioctl(copy.fileno(), termios.TIOCOUTQ, bytes(4)))
            info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
            (acked,) = struct.unpack_from("Q", info, ACKED_OFFSET)
            inode, local_port, peer = os.fstat(copy.fileno()).st_ino, copy.getsockname()[1], copy.getpeername()[:2]
            found.append(_Connection(inode, int(name), local_port, peer, waiting, acked))
    return [each for each in found if each.local_port in ports]


@contextmanager
def _open_copy(number: int) -> Iterator[socket.socket]:
    """Yield the socket with this file descriptor, as one with a descriptor of its own, which is closed afterwards.

    The server may close its descriptor meanwhile and use the number for another file. Raises OSError ENOTSOCK if it is
    no socket. Only one copy is open at a time: a process near its limit of open files has no room for more.
    """
    # A descriptor of a regular file is not copied: closing the copy would end the process's locks of the file.
    if not stat.S_ISSOCK(os.stat(number).st_mode):
        raise OSError(errno.ENOTSOCK, "not a socket")
    descriptor = os.dup(number)
    try:
        copy = socket.socket(fileno=descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    with copy:
        yield copy


@contextmanager
def _ignoring_closed() -> Iterator[None]:
    """Ignore that a descriptor was closed meanwhile, or is no socket with a peer. Raise other errors, such as EMFILE:
    then the connections cannot be checked.
    """
    try:
        yield
    except OSError as error:
        if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise


def _end_connection(connection: _Connection) -> None:
    """End a connection at once: the server sees that it is closed, and the kernel drops what was not accepted yet.

    Does nothing if the server has closed the connection meanwhile.
    """
    with _ignoring_closed(), _open_copy(connection.number) as copy:
        if os.fstat(copy.fileno()).st_ino == connection.inode:
            copy.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            copy.shutdown(socket.SHUT_RDWR)
