"""An HTTP proxy on loopback that fails a random share of the calls to a service.

A failed call may or may not have reached the service. Used by `test_storms` and `test_writers`.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import requests

TROUBLE_KINDS = ("503", "cut", "slow", "rubbish", "list")
RUBBISH = {"503": (503, b"busy"), "rubbish": (200, b'{"resource_providers": <'), "list": (200, b"[1, 2]")}
SLOW_S = 1.0
PASSED_HEADERS = ("X-Auth-Token", "OpenStack-API-Version", "Accept", "Content-Type")


@dataclass
class TroubleProxy:
    """Controls and counters of the proxy: `share` of the calls fail at random, half of them after the service ran them.

    `made` counts the failed calls by kind (TROUBLE_KINDS).
    """

    target: str
    share: float = 0.0
    chance: random.Random = field(default_factory=lambda: random.Random(7))
    made: dict[str, int] = field(default_factory=dict)
    url: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def next(self) -> tuple[str, bool]:
        """Choose how the next call fails ('': it does not), and whether the service receives it; return both."""
        with self._lock:
            if self.chance.random() >= self.share:
                return "", True
            kind = self.chance.choice(TROUBLE_KINDS)
            self.made[kind] = self.made.get(kind, 0) + 1
            return kind, self.chance.random() < 0.5


@contextmanager
def trouble_proxy(target: str) -> Iterator[TroubleProxy]:
    """Run a proxy on a free port in front of the service at the URL `target` until the end of the block."""
    trouble = TroubleProxy(target)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            kind, after = trouble.next()
            status, answer = 503, b""
            if after:
                headers = {name: self.headers[name] for name in PASSED_HEADERS if name in self.headers}
                told = requests.request(
                    self.command, trouble.target + self.path, data=body, headers=headers, timeout=30
                )
                status, answer = told.status_code, told.content
            if kind == "slow":
                time.sleep(SLOW_S)
            if kind in ("cut", "slow"):
                self.close_connection = True
                return
            status, answer = RUBBISH.get(kind, (status, answer))
            with suppress(ConnectionError):  # the client may have closed the connection
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        do_GET = do_PUT = do_POST = do_DELETE = forward

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    trouble.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield trouble
    finally:
        server.shutdown()
        server.server_close()
