"""Accepts TLS connections so that a connection is counted, and its deadline runs, from the moment it is accepted.

`loop.create_server` tells a protocol about a connection only after the TLS handshake: connections whose clients do not
finish it would be counted by nobody.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from cyborgweb.http.protocol import HttpProtocol

ACCEPTED_AT_ONCE = 100
"""How many connections are accepted before the event loop does other work."""
PAUSE_S = 1.0
"""How long no connection is accepted after the system has refused one, for example because of too many open files."""

log = logging.getLogger(__name__)


class TlsListener:
    """Accepts connections on the listening socket `listener`, and gives each its protocol from `make_protocol`.

    Like an `asyncio.Server` it has `close` and `wait_closed`. A handshake may take as long as the protocol allows for
    the headers of a request.
    """

    def __init__(
        self, listener: socket.socket, make_protocol: Callable[[], HttpProtocol], context: ssl.SSLContext
    ) -> None:
        self._listener, self._make_protocol, self._context = listener, make_protocol, context
        self._loop = asyncio.get_running_loop()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept)

    def close(self) -> None:
        """Accept no more connections, and end all handshakes."""
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listener)
        self._listener.close()
        for handshake in self._handshakes:
            handshake.cancel()

    async def wait_closed(self) -> None:
        """Wait until all handshakes have ended."""
        if self._handshakes:
            await asyncio.wait(self._handshakes)

    def _accept(self) -> None:
        """Accept the connections that wait, and begin their handshakes."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no TLS connection can be accepted for %g s: %s", PAUSE_S, error)
                self._loop.remove_reader(self._listener)
                self._pause = self._loop.call_later(PAUSE_S, self._loop.add_reader, self._listener, self._accept)
                return
            accepted.setblocking(False)
            handshake = self._loop.create_task(self._shake_hands(accepted, str(address[0])))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _shake_hands(self, accepted: socket.socket, address: str) -> None:
        """Do the handshake of one connection, which then belongs to its protocol. Close it if the handshake fails."""
        protocol = self._make_protocol()
        try:
            protocol.handshake_begun(address, lambda: _shut_down(accepted))
            await self._loop.connect_accepted_socket(
                lambda: protocol, accepted, ssl=self._context, ssl_handshake_timeout=protocol.limits.header_s
            )
        except BaseException as error:
            with suppress(OSError):
                accepted.close()
            protocol.handshake_failed()
            if not isinstance(error, OSError):  # ssl.SSLError and TimeoutError are OSErrors
                raise


def _shut_down(connection: socket.socket) -> None:
    """Make the handshake on this connection fail, unless it has just ended by itself."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
