"""Test how states of instances are read from Nova: with few calls, cached, and `unknown` while Nova is away."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, urlsplit

import pytest
from keystoneauth1.noauth import NoAuth
from keystoneauth1.session import Session

from accelerators.api.own.instances import InstanceKey, InstanceState
from drivers.configuration import ConfigurationError
from placement_sync.nova.client import (
    CACHE_S,
    GONE,
    MAX_PARALLEL_CALLS,
    InstanceStateCache,
    NovaUnavailableError,
    get_servers,
)
from tests.support.webserver import until


@dataclass
class FakeNova:
    """A Nova with these servers in each project. It answers with `status`; with status 0 it does not answer.

    `queries` and `accept_headers` record the requests. `release_hanging` ends the requests that were not answered.
    """

    servers: dict[str, list[dict[str, str]]]
    queries: list[dict[str, str]] = field(default_factory=list)
    status: int = 200
    address: str = ""
    accept_headers: set[str | None] = field(default_factory=set)
    release_hanging: threading.Event = field(default_factory=threading.Event)

    def answer(self, query: dict[str, str]) -> bytes:
        """Return one page of at most two servers."""
        self.queries.append(query)
        servers = self.servers.get(query["project_id"], [])
        start = next((n + 1 for n, s in enumerate(servers) if s["id"] == query.get("marker")), 0)
        body: dict[str, object] = {"servers": servers[start : start + 2]}
        if len(servers) > start + 2:
            body["servers_links"] = [{"rel": "next", "href": "elsewhere"}]
        return json.dumps(body).encode()


@contextmanager
def serve_nova(compute: FakeNova) -> Iterator[None]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            compute.accept_headers.add(self.headers["Accept"])
            if compute.status == 0:
                compute.queries.append({"path": url.path})
                compute.release_hanging.wait(20)
                return
            self.send_response(compute.status)
            self.end_headers()
            assert url.path == "/servers/detail"
            self.wfile.write(compute.answer(dict(parse_qsl(url.query))))

        def log_message(self, *args: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    compute.address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield
    finally:
        compute.release_hanging.set()
        server.shutdown()
        server.server_close()


@pytest.fixture
def compute() -> Iterator[FakeNova]:
    """Run a fake Nova with three servers in p1 and one in p2."""
    names = {"p1": ("a", "b", "c"), "p2": ("d",)}
    made = FakeNova({p: [{"id": n, "name": f"vm-{n}", "status": "ACTIVE"} for n in ns] for p, ns in names.items()})
    with serve_nova(made):
        yield made


def make_nova_source(compute: FakeNova, deadline_s: float = 10.0) -> tuple[InstanceStateCache, list[float]]:
    """Return a cache that asks this Nova, and its clock, which the test may advance."""
    clock = [0.0]
    session = Session(auth=NoAuth(endpoint=compute.address))
    return InstanceStateCache(lambda: session, compute.address, deadline_s, lambda: clock[0]), clock


def test_instances_are_listed_once_for_each_project_and_cached_for_a_while(compute: FakeNova) -> None:
    ask, clock = make_nova_source(compute)
    wanted = [InstanceKey("a", "p1"), InstanceKey("c", "p1"), InstanceKey("d", "p2"), InstanceKey("z", "p1")]
    expected = {n: InstanceState("ACTIVE", f"vm-{n}") for n in ("a", "c", "d")} | {"z": GONE}
    assert ask(wanted) == expected
    assert sorted(query["project_id"] for query in compute.queries) == ["p1", "p1", "p2"]
    assert all(query["all_tenants"] == "1" for query in compute.queries)
    assert compute.accept_headers == {"application/json"}
    assert ask(wanted) == expected
    assert len(compute.queries) == 3
    compute.servers["p2"][0]["status"] = "SHUTOFF"
    clock[0] += CACHE_S
    assert ask([InstanceKey("d", "p2")]) == {"d": InstanceState("SHUTOFF", "vm-d")}


def test_while_nova_is_away_cached_states_are_returned_and_nova_is_not_asked_again(compute: FakeNova) -> None:
    ask, clock = make_nova_source(compute)
    known = ask([InstanceKey("a", "p1")])
    compute.status = 503
    assert ask([InstanceKey("a", "p1"), InstanceKey("d", "p2")]) == known
    calls = len(compute.queries)
    assert ask([InstanceKey("d", "p2")]) == {}
    assert len(compute.queries) == calls
    compute.status = 200
    clock[0] += CACHE_S
    assert ask([InstanceKey("d", "p2")])["d"].state == "ACTIVE"


def test_an_outage_of_nova_is_logged_once_until_nova_was_back(
    compute: FakeNova, caplog: pytest.LogCaptureFixture
) -> None:
    ask, clock = make_nova_source(compute)

    def lines_after_asking_with(status: int) -> list[str]:
        compute.status = status
        clock[0] += CACHE_S
        ask([InstanceKey("d", "p2")])
        return [line.getMessage() for line in caplog.records if line.name == "placement_sync.nova.client"]

    (line,) = lines_after_asking_with(503)
    assert line.startswith("The states of instances are unknown, because Nova cannot be asked: ServiceUnavailable: ")
    assert lines_after_asking_with(503) == [line], "the same outage"
    assert lines_after_asking_with(200) == [line]
    assert lines_after_asking_with(503) == [line, line], "another outage"


def test_a_nova_that_hangs_is_abandoned_at_the_deadline(compute: FakeNova) -> None:
    compute.status = 0
    ask, _ = make_nova_source(compute, deadline_s=0.1)
    assert ask([InstanceKey("a", "p1")]) == {}


def test_a_listing_that_succeeds_just_after_the_deadline_is_logged_as_too_late(
    compute: FakeNova, caplog: pytest.LogCaptureFixture
) -> None:
    source, _ = make_nova_source(compute)
    late: Future[dict[str, InstanceState]] = Future()
    late.set_result({})
    source._update_back_off([late])
    assert "Nova cannot be asked: TimeoutError: it did not answer in time" in caplog.text


def test_after_the_deadline_nova_is_asked_about_no_further_instance(compute: FakeNova) -> None:
    compute.status = 0
    session = Session(auth=NoAuth(endpoint=compute.address))
    found = get_servers(session, compute.address, [str(n) for n in range(10 * MAX_PARALLEL_CALLS)], deadline_s=0.1)
    assert {str(answer) for answer in found.values()} >= {"Nova did not answer in time"}
    assert all(isinstance(answer, NovaUnavailableError) for answer in found.values())
    until(lambda: not any(thread.name.startswith("servers") for thread in threading.enumerate()))
    assert len(compute.queries) < len(found)
    until(lambda: compute.accept_headers)
    assert compute.accept_headers == {"application/json"}


def test_at_the_deadline_an_instance_is_unknown_while_the_call_for_it_still_runs() -> None:
    release, ended = threading.Event(), threading.Event()

    class SlowSession:
        def request(self, *_: object, **__: object) -> None:
            release.wait(20)
            ended.set()

    try:
        found = get_servers(SlowSession(), "", ["a"], deadline_s=0.05)
        assert isinstance(found["a"], NovaUnavailableError) and not ended.is_set()
    finally:
        release.set()


def test_without_a_configured_cloud_no_instance_states_are_returned() -> None:
    def session() -> None:
        raise ConfigurationError("No cloud is configured")

    assert InstanceStateCache(session)([InstanceKey("a", "p1")]) == {}
