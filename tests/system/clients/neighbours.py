"""A stub of Nova and Glance that knows every server and every image.

`openstack accelerator arq bind` and `deployable program` check with it that the server or the image exists.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

VERSIONS: dict[str, dict[str, Any]] = {
    "/compute/v2.1": {"version": {"id": "v2.1", "status": "CURRENT", "version": "2.96", "min_version": "2.1"}},
    "/image": {"versions": [{"id": "v2.9", "status": "CURRENT"}]},
}
SERVER_ELSEWHERE = {"status": "ACTIVE", "tenant_id": "p1", "OS-EXT-SRV-ATTR:host": "elsewhere.example"}
"""Each server is on another host than the card that the tests bind, so it no longer uses that card."""


class NeighbourHandler(BaseHTTPRequestHandler):
    """Answer GET requests for versions, servers and images."""

    def do_GET(self) -> None:
        """Answer with a version document, or with the server or image whose id is the last segment of the path."""
        path = self.path.partition("?")[0].rstrip("/")
        name = path.rpartition("/")[2]
        here = f"http://{self.headers['Host']}"
        if path in VERSIONS:
            self._answer(self._linked(VERSIONS[path], f"{here}{path.removesuffix('/v2.1')}"))
        elif "/servers/" in path:
            self._answer({"server": {"id": name, "name": "a server"} | SERVER_ELSEWHERE})
        elif "/images/" in path:
            self._answer({"id": name, "name": "an image", "status": "active"})
        else:
            self.send_error(404)

    def _linked(self, document: dict[str, Any], base: str) -> dict[str, Any]:
        made = json.loads(json.dumps(document))
        for version in made.get("versions", [made.get("version")]):
            version["links"] = [{"rel": "self", "href": f"{base}/{'v2' if 'versions' in made else 'v2.1'}/"}]
        return dict(made)

    def _answer(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Log nothing."""


@contextmanager
def neighbours() -> Iterator[str]:
    """Run the stub for the block and yield its URL; compute is below /compute/v2.1, image below /image."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), NeighbourHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
