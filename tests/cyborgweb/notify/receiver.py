"""A receiver of webhooks on a free port of the loopback interface. Tests choose how it misbehaves."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Receiver:
    """A receiver that takes the next word of `behaviours` for each call, and answers 200 when none is left. `calls` are
    the headers and bodies of all calls, `accepted` of those that it answered 200.
    """

    behaviours: list[str] = field(default_factory=list)
    calls: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    accepted: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    release_hanging: threading.Event = field(default_factory=threading.Event)
    concurrent_calls: int = 0
    max_concurrent_calls: int = 0
    url: str = ""

    def accepted_ids(self) -> list[str]:
        """Return the ids of the accepted messages, in the order of their calls."""
        return [headers["webhook-id"] for headers, _ in self.accepted]

    def accepted_bodies(self) -> list[dict[str, Any]]:
        """Return the decoded JSON bodies of the accepted messages."""
        return [json.loads(body) for _, body in self.accepted]


@contextmanager
def run_receiver(tls: ssl.SSLContext | None = None) -> Iterator[Receiver]:
    """Run a receiver during the block; with `tls` it accepts only TLS connections."""
    receiver, lock = Receiver(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            call = ({name.lower(): value for name, value in self.headers.items()}, body)
            with lock:
                receiver.calls.append(call)
                receiver.concurrent_calls += 1
                receiver.max_concurrent_calls = max(receiver.max_concurrent_calls, receiver.concurrent_calls)
                mood = receiver.behaviours.pop(0) if receiver.behaviours else "200"
                if mood == "200":
                    receiver.accepted.append(call)
            try:
                self.answer(mood)
            finally:
                with lock:
                    receiver.concurrent_calls -= 1

        def answer(self, mood: str) -> None:
            if mood == "hangs":
                receiver.release_hanging.wait(30)
            elif mood == "trickles":
                while not receiver.release_hanging.wait(0.02):
                    self.wfile.write(b"H")
            elif mood == "closes":
                self.connection.shutdown(socket.SHUT_RDWR)
            elif mood == "rubbish":
                self.wfile.write(b"\x00what? " * 10_000)
            else:
                self.send_response(int(mood))
                self.send_header("Location", receiver.url)
                self.end_headers()
                self.wfile.write(b"x" * 100_000)

        def log_message(self, *_: Any) -> None:
            """Do not log requests."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """Ignore the error: the client has closed the connection without reading the answer."""

    server = Server(("127.0.0.1", 0), Handler)
    if tls:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    receiver.url = f"{'https' if tls else 'http'}://127.0.0.1:{server.server_port}/hook?token=in-the-url"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield receiver
    finally:
        receiver.release_hanging.set()
        server.shutdown()
        server.server_close()
