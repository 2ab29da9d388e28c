"""Test the load of a device over HTTP, as JSON and as a stream of events, with an agent on a real socket."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client

from accelerators.models import Device
from agents import authentication, credentials, telemetry, wire
from agents.gateway.asgi_app import AgentGateway
from agents.wire import DeviceLoad, Samples, Watch
from cyborgweb.asgi import HttpApplication
from cyborgweb.http.django_threads import DjangoThreads
from cyborgweb.live import usage
from cyborgweb.live.usage import StreamIntervals, UsageStream
from cyborgweb.models import ApiToken
from cyborgweb.settings.keys import Keys
from cyborgweb.wsgi import application as wsgi
from tests.accelerators.api.own.conftest import Ask, get_error_message
from tests.support.reports import create_heard_host
from tests.support.webserver import serving, until
from tests.support.wireagent import WireAgent

pytestmark = pytest.mark.django_db(transaction=True)
KEY, OTHER = "pci:0000:00:00.0", "pci:0000:01:00.0"
UNKNOWN_UUID = "00000000-0000-4000-8000-000000000000"
STREAM_HEADERS = {"Accept": "text/event-stream"}


class SwitchableApplication:
    """Passes requests to its present HTTP application and its present gateway, which each test replaces."""

    port = 0
    threads: DjangoThreads
    gateway: AgentGateway
    http: HttpApplication

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await (self.http if scope["type"] == "http" else self.gateway)(scope, receive, send)


@pytest.fixture(scope="module")
def server() -> Iterator[SwitchableApplication]:
    made = SwitchableApplication()
    made.threads = DjangoThreads(wsgi, Keys(request_threads=2, request_queue=20))
    with serving(made) as made.port:
        yield made


@pytest.fixture
def device(server: SwitchableApplication) -> Iterator[Device]:
    server.gateway = AgentGateway(Keys(lease_flush_s=0.05))
    server.http = HttpApplication(server.gateway, server.threads)
    server.http.usage = UsageStream(server.threads, StreamIntervals(event_s=0.05, permission_check_s=0.1))
    telemetry.forget_gateways()
    yield create_heard_host("cmp1", 2).devices.get(key=KEY)
    server.http.usage.end_all_streams()
    server.gateway.stop()
    telemetry.forget_gateways()


@pytest.fixture
def token(db: None) -> str:
    return ApiToken.create_with_secret("m", User.objects.create_user("mona"), ["manager", "member", "reader"], "p1")


class EventStreamClient:
    """A reader of an event stream. `response` is the head of the answer; iterating yields the events."""

    def __init__(self, port: int, path: str, **headers: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        self.connection.request("GET", path, headers=STREAM_HEADERS | headers)
        self.response = self.connection.getresponse()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self.response:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])

    def read_until(self, busy: float, say: Callable[[float], None]) -> dict[str, Any]:
        """Return the first event with this utilization; `say` it again now and then, as a busy loop drops samples."""
        for number, event in zip(range(1000), self, strict=False):
            if event["values"].get("utilization_percent") == busy:
                return event
            if number % 10 == 9:
                say(busy)
        raise AssertionError(f"{busy} % was never shown")


@contextmanager
def connect_agent(port: int) -> Iterator[Any]:
    secret = credentials.parse_join_string(
        authentication.create_join_token("cmp1", address="http://x", hours=1, created_by="t")
    )
    with WireAgent(port, token=secret.secret).connect_and_say_hello() as socket:
        yield socket


def wait_for_watch(socket: Any) -> Callable[[float], None]:
    """Wait until the agent is asked for samples, and return a function that sends one with a given utilization."""
    while not isinstance(wire.decode_from_gateway(socket.recv(timeout=20)), Watch):
        pass

    def say(busy: float) -> None:
        loads = (DeviceLoad(OTHER, {"utilization_percent": 1.0}), DeviceLoad(KEY, {"utilization_percent": busy}))
        socket.send(wire.encode_message(Samples(loads)))

    return say


def count_watches(socket: Any) -> int:
    """Return how many Watch messages have arrived."""
    found = 0
    with suppress(TimeoutError):
        while message := wire.decode_from_gateway(socket.recv(timeout=0.05)):
            found += isinstance(message, Watch)
    return found


@pytest.mark.slow
def test_a_usage_stream_sends_new_values_and_ends_when_its_reader_logs_out(
    server: SwitchableApplication, device: Device
) -> None:
    person = Client()
    person.force_login(User.objects.create_superuser("olga"))
    cookie = f"sessionid={person.cookies['sessionid'].value}"
    address = f"/api/devices/{device.uuid}/usage"
    with connect_agent(server.port) as socket:
        stream = EventStreamClient(server.port, f"{address}/", Cookie=cookie)
        assert (stream.response.status, stream.response.headers["Content-Type"]) == (200, "text/event-stream")
        assert (
            stream.response.headers["Cache-Control"] == "no-store" and stream.response.headers["x-openstack-request-id"]
        )
        first = next(iter(stream))
        assert first["device"]["uuid"] == str(device.uuid)
        assert (first["at"], first["age_s"], first["values"], first["silent"]) == (None, None, {}, [])
        say = wait_for_watch(socket)
        shown = stream.read_until(40.0, say)
        assert list(shown) == list(first) and shown["device"] == first["device"] and shown["age_s"] >= 0
        plain = json.loads(person.get(address).content)
        assert [plain[name] for name in ("values", "silent")] == [shown[name] for name in ("values", "silent")]
        assert plain["at"][:10] == shown["at"][:10] and plain["at"][-1] == shown["at"][-1] == "Z"
        stream.read_until(55.0, say)
        person.logout()
        list(stream)
        assert stream.response.isclosed(), "it ends"
    assert EventStreamClient(server.port, address, Cookie=cookie).response.status == 401


@pytest.mark.slow
def test_many_listeners_share_one_watch_and_each_gets_its_own_device(
    server: SwitchableApplication, device: Device, token: str
) -> None:
    other = Device.objects.get(key=OTHER)
    with connect_agent(server.port) as socket:
        streams = [
            EventStreamClient(server.port, f"/api/devices/{one.uuid}/usage?fields=values", **{"X-Auth-Token": token})
            for one in (device, other, device)
        ]
        say = wait_for_watch(socket)
        seen = [streams[n].read_until(busy, say) for n, busy in ((0, 40.0), (2, 40.0))]
        assert seen[0] == {"values": {"utilization_percent": 40.0}} == seen[1]
        streams[1].read_until(1.0, lambda _: say(40.0))
        for stream in streams:
            assert len(list(zip(range(20), stream, strict=False))) == 20
        assert count_watches(socket) < 10, "one wish serves them all, and holds"
        for stream in streams:
            stream.connection.close()
        until(lambda: not server.http.usage._listeners)


def test_a_usage_stream_ends_when_its_process_stops(server: SwitchableApplication, device: Device, token: str) -> None:
    stream = EventStreamClient(server.port, f"/api/devices/{device.uuid}/usage/", **{"X-Auth-Token": token})
    next(iter(stream))
    server.http.usage.end_all_streams()
    list(stream)
    assert stream.response.isclosed()


def test_refused_usage_streams_get_the_usual_error_answers(
    server: SwitchableApplication, device: Device, token: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"/api/devices/{device.uuid}/usage/"
    member = ApiToken.create_with_secret("x", User.objects.get(username="mona"), ["member", "reader"], "p1")
    for path, sent, status, says in (
        (address, {}, 401, "requires authentication"),
        (address, {"X-Auth-Token": member}, 403, "cyborg:device:get_usage"),
        (f"/api/devices/{UNKNOWN_UUID}/usage/", {"X-Auth-Token": token}, 404, "nothing here that you may see"),
        (f"{address}?colour=red", {"X-Auth-Token": token}, 400, "unknown parameter"),
    ):
        head = EventStreamClient(server.port, path, **sent).response
        assert head.status == status and says in json.loads(head.read())["error"]["message"]
    assert "application/json" in get_error_message(ask(address, **STREAM_HEADERS), 406)
    monkeypatch.setattr(usage, "MAX_LISTENERS", 0)
    full = EventStreamClient(server.port, address, **{"X-Auth-Token": token}).response
    assert (full.status, full.headers["Retry-After"]) == (503, "30") and b"Too many listeners" in full.read()
