"""A fake Nova: an HTTP server in a thread that records external events and answers as contract section 4.3 says."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import SplitResult, parse_qs, urlsplit


@dataclass
class FakeNova:
    """Contents and switches of the fake Nova.

    `known` maps an instance to the code of its event entries (200 or 422); an instance not in it gets 404. If `status`
    is set, every call is answered with it; `listing_status` is only for listings. With `rubbish` the answers do not
    have the documented form. `servers` are the ids listed, in pages of `page`. `shown` maps an id to its (status,
    hypervisor); a listed server that is not in it is ACTIVE and has no hypervisor. A server in `broken` is answered
    with 500. `deleted` maps an id to the time (UNIX) of its deletion; removing it there purges it, so that the listing
    of deleted servers lacks it. Every GET is answered after `read_slow_s` seconds. All servers belong to `project`.
    `tasks` maps an id to its task_state. `asked` records the ids of single servers that were read, `listings` the
    queries of listings, `calls` the bodies of event calls, `versions` their microversions.
    """

    known: dict[str, int] = field(default_factory=dict)
    status: int = 0
    listing_status: int = 0
    rubbish: bool = False
    slow_s: float = 0.0
    servers: list[str] = field(default_factory=list)
    shown: dict[str, tuple[str, str]] = field(default_factory=dict)
    project: str = "p1"
    tasks: dict[str, str] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    read_slow_s: float = 0.0
    deleted: dict[str, float] = field(default_factory=dict)
    listings: list[dict[str, str]] = field(default_factory=list)
    page: int = 2
    calls: list[dict[str, Any]] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    url: str = ""

    def received_statuses(self) -> dict[str, list[str]]:
        """Return the event statuses received for each request, in order, without the calls refused by `status`."""
        found: dict[str, list[str]] = {}
        for call in self.calls:
            for event in call["events"]:
                found.setdefault(event["tag"], []).append(event["status"])
        return found

    def read(self, url: SplitResult) -> tuple[int, Any]:
        """Answer a GET: the listing of servers, in pages, or one server."""
        time.sleep(self.read_slow_s)
        if self.status:
            return self.status, {}
        if url.path != "/servers":
            return self._one(url.path.rpartition("/")[2])
        if self.listing_status:
            return self.listing_status, {}
        if self.rubbish:
            return 200, {"what": "?"}
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        self.listings.append(query)
        servers = self.servers
        if query.get("deleted") == "true":
            since = datetime.fromisoformat(query["changes-since"]).timestamp()
            servers = [uuid for uuid, at in self.deleted.items() if at >= since]
        marker = query.get("marker", "")
        if marker and marker not in servers:
            return 400, {"badRequest": {"message": f"marker [{marker}] not found"}}
        rest = servers[servers.index(marker) + 1 :] if marker else servers
        links = [{"rel": "next"}] if len(rest) > self.page else []
        return 200, {"servers": [{"id": uuid} for uuid in rest[: self.page]], "servers_links": links}

    def delete(self, *uuids: str) -> None:
        """Delete these servers now; the listing of deleted servers has them."""
        for uuid in uuids:
            self.servers.remove(uuid)
            self.deleted[uuid] = time.time()

    def _one(self, uuid: str) -> tuple[int, Any]:
        self.asked.append(uuid)
        if uuid in self.broken:
            return 500, {"computeFault": {}}
        if uuid not in self.servers and uuid not in self.shown:
            return 404, {"itemNotFound": {}}
        if self.rubbish:
            return 200, {"what": "?"}
        status, place = self.shown.get(uuid, ("ACTIVE", ""))
        where = {"OS-EXT-SRV-ATTR:hypervisor_hostname": place} if place else {}
        where |= {"tenant_id": self.project, "OS-EXT-STS:task_state": self.tasks.get(uuid)}
        return 200, {"server": {"id": uuid, "status": status} | where}

    def answer(self, body: dict[str, Any]) -> tuple[int, Any]:
        """Answer one POST of events, after `slow_s` seconds, and record it unless `status` is set."""
        time.sleep(self.slow_s)
        if self.status:
            return self.status, {"badRequest": {"message": "told to"}}
        self.calls.append(body)
        if self.rubbish:
            return 200, ["what?"]
        codes = [self.known.get(event["server_uuid"], 404) for event in body["events"]]
        if set(codes) == {404}:
            return 404, {"itemNotFound": {"message": "No instances found for any event"}}
        events = [event | {"code": code} for event, code in zip(body["events"], codes, strict=True)]
        return 200 if set(codes) == {200} else 207, {"events": events}


@contextmanager
def running_nova() -> Iterator[FakeNova]:
    """Run a fake Nova on a free port of 127.0.0.1 for the block."""
    nova = FakeNova()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            nova.versions.append(self.headers["OpenStack-API-Version"])
            self.say(*nova.answer(body))

        def do_GET(self) -> None:
            self.say(*nova.read(urlsplit(self.path)))

        def say(self, status: int, answer: Any) -> None:
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    nova.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield nova
    finally:
        server.shutdown()
        server.server_close()
