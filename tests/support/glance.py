"""A fake Glance on a real socket: images by id and by property, and ranged downloads. It can fail, stall and lie.

It implements as much of the image API v2 as openstacksdk needs. The system tests use another fake.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit
from uuid import uuid4


@dataclass
class FakeGlance:
    """Contents and switches of the fake Glance.

    If `fails_with` is set, every request is answered with that status. `cut` ends a transfer after that many bytes.
    Without `ranges` every transfer begins at byte 0. With `ignores_filters` a list shows all images. `held` delays
    downloads until the event is set, at most 20 s. If `drips` is "list", "show" or "file", such an answer comes byte by
    byte, ten bytes a second, until `drips` is set to "".
    """

    port: int = 0
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    contents: dict[str, bytes] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    fails_with: int = 0
    cut: int | None = None
    ranges: bool = True
    ignores_filters: bool = False
    held: threading.Event | None = None
    drips: str = ""

    @property
    def url(self) -> str:
        """The endpoint of the image API."""
        return f"http://127.0.0.1:{self.port}/v2"

    def add_image(self, content: bytes, **more: Any) -> str:
        """Add an active, public image of the project `images` and return its id; `more` replaces or adds fields of its
        document."""
        uuid = str(uuid4())
        digest = hashlib.sha512(content).hexdigest()
        said = {"id": uuid, "name": "an image", "status": "active", "size": len(content), "visibility": "public"}
        said["owner"] = "images"
        self.documents[uuid] = said | {"os_hash_algo": "sha512", "os_hash_value": digest} | more
        self.contents[uuid] = content
        return uuid


@contextmanager
def glance() -> Iterator[FakeGlance]:
    """Run a fake Glance on a free port of 127.0.0.1 for the block."""
    known = FakeGlance()

    class Handler(_Handler):
        glance = known

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    known.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield known
    finally:
        if known.held:
            known.held.set()
        known.drips = ""
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    wbufsize = -1
    glance: FakeGlance

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        parts = url.path.strip("/").split("/")
        if self.glance.fails_with:
            self._answer(self.glance.fails_with, b"no")
        elif parts in (["v2"], [""]):
            here = {"id": "v2.16", "status": "CURRENT", "links": [{"rel": "self", "href": f"{self.glance.url}/"}]}
            self._answer(200, json.dumps({"versions": [here]}).encode())
        elif parts == ["v2", "images"]:
            wanted = dict(parse_qsl(url.query))
            limit = int(wanted.pop("limit", 25))
            filters = {} if self.glance.ignores_filters else wanted
            found = [one for one in self.glance.documents.values() if filters.items() <= one.items()]
            self._answer(200, json.dumps({"images": found[:limit]}).encode(), "list")
        elif (document := self.glance.documents.get(parts[2])) is None:
            self._answer(404, b"no such image", "show")
        elif parts[3:] == ["file"]:
            self._file(self.glance.contents[parts[2]])
        else:
            self._answer(200, json.dumps(document).encode(), "show")

    def _file(self, content: bytes) -> None:
        begin = int(match[1]) if (match := re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))) else 0
        begin = begin if self.glance.ranges else 0
        if self.glance.held:
            self.glance.held.wait(20)
        self._answer(206 if begin else 200, content[begin:], f"file from {begin}", self.glance.cut)

    def _answer(self, status: int, body: bytes, what: str = "version", cut: int | None = None) -> None:
        self.glance.calls[what] += 1
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        sent_bytes = 0
        while self.glance.drips == what.split(maxsplit=1)[0] and sent_bytes < len(body):
            self.wfile.write(body[sent_bytes : sent_bytes + 1])
            self.wfile.flush()
            sent_bytes += 1
            time.sleep(0.1)
        self.wfile.write(body[sent_bytes:cut])

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
