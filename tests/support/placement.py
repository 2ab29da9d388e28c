"""Serve the model of Placement over HTTP to clients that do not authenticate. A test may delay its answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.placement_sync.session import PlacementModelSession


@dataclass
class ServedPlacement:
    """A running model of Placement. `environ` has the variables with which a host can reach it.

    While `gate` is not set, every call is counted and processed, but its answer waits for the gate, at most 30 s.
    """

    session: PlacementModelSession = field(default_factory=PlacementModelSession)
    gate: threading.Event = field(default_factory=threading.Event)
    environ: dict[str, str] = field(default_factory=dict)

    @property
    def calls(self) -> int:
        """The number of calls received."""
        return len(self.session.seen_calls)


@contextmanager
def serving_placement() -> Iterator[ServedPlacement]:
    """Run the model on a free port of 127.0.0.1 for the block, with its gate open."""
    served, turn = ServedPlacement(), threading.Lock()
    served.gate.set()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # otherwise the body waits 40 ms for the acknowledgement of the headers

        def answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(size)) if size else None
            with turn:
                answer: Any = served.session.request(self.path, self.command, json=body, headers=dict(self.headers))
            served.gate.wait(30)
            self.send_response(answer.status_code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer.content)))
            self.end_headers()
            self.wfile.write(answer.content)

        do_GET = do_POST = do_PUT = do_DELETE = answer

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    url = f"http://127.0.0.1:{server.server_address[1]}"
    served.environ = {"OS_AUTH_URL": url, "OS_AUTH_TYPE": "none", "OS_ENDPOINT": url}
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield served
    finally:
        served.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
