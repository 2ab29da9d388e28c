"""What a device has to do, as JSON and as a stream of events: over HTTP, with an agent's socket at the other end."""

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
from agents import credentials, enrolment, telemetry, wire
from agents.gateway.app import Gateway
from agents.wire import DeviceLoad, Samples, Watch
from cyborgweb.asgi import BoundedThreads, Http
from cyborgweb.live import usage
from cyborgweb.live.usage import Pace, Usage
from cyborgweb.models import ApiToken
from cyborgweb.settings.keys import Keys
from cyborgweb.wsgi import application as wsgi
from tests.own.conftest import Ask, message
from tests.support.reports import a_heard_host
from tests.support.webserver import serving, until
from tests.support.wireagent import WireAgent

pytestmark = pytest.mark.django_db(transaction=True)
KEY, OTHER = "pci:0000:00:00.0", "pci:0000:01:00.0"
NOWHERE = "00000000-0000-4000-8000-000000000000"
STREAM = {"Accept": "text/event-stream"}


class House:
    """The product's own application around whichever gateway is in it."""

    port = 0
    threads: BoundedThreads
    gateway: Gateway
    http: Http

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await (self.http if scope["type"] == "http" else self.gateway)(scope, receive, send)


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    made = House()
    made.threads = BoundedThreads(wsgi, 2, 20)
    with serving(made) as made.port:
        yield made


@pytest.fixture
def device(house: House) -> Iterator[Device]:
    house.gateway = Gateway(Keys(lease_flush_s=0.05))
    house.http = Http(house.gateway, house.threads, house.threads)
    house.http.usage = Usage(house.threads, Pace(event=0.05, judge=0.1))
    telemetry.forget()
    yield a_heard_host("cmp1", 2).devices.get(key=KEY)
    house.http.usage.stop()
    house.gateway.stop()
    telemetry.forget()


@pytest.fixture
def token(db: None) -> str:
    return ApiToken.make("m", User.objects.create_user("mona"), ["manager", "member", "reader"], "p1")


class Stream:
    """A listener: its answer's head, and the events one by one."""

    def __init__(self, port: int, path: str, **headers: str) -> None:
        self.link = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
        self.link.request("GET", path, headers=STREAM | headers)
        self.head = self.link.getresponse()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for line in self.head:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])

    def until(self, busy: float, say: Callable[[float], None]) -> dict[str, Any]:
        """The first event that shows this. It is said again now and then: a loop that is late sheds samples."""
        for number, event in zip(range(1000), self, strict=False):
            if event["values"].get("utilization_percent") == busy:
                return event
            if number % 10 == 9:
                say(busy)
        raise AssertionError(f"{busy} % was never shown")


@contextmanager
def an_agent(port: int) -> Iterator[Any]:
    secret = credentials.parse_join_string(enrolment.make_token("cmp1", address="http://x", hours=1, created_by="t"))
    with WireAgent(port, token=secret.secret).speaking() as socket:
        yield socket


def saying(socket: Any) -> Callable[[float], None]:
    """How the agent says how busy its devices are; begins when it was asked, as an agent does."""
    while not isinstance(wire.decode_from_gateway(socket.recv(timeout=20)), Watch):
        pass

    def say(busy: float) -> None:
        loads = (DeviceLoad(OTHER, {"utilization_percent": 1.0}), DeviceLoad(KEY, {"utilization_percent": busy}))
        socket.send(wire.encode(Samples(loads)))

    return say


def wishes(socket: Any) -> int:
    """How many have come by now."""
    found = 0
    with suppress(TimeoutError):
        while message := wire.decode_from_gateway(socket.recv(timeout=0.05)):
            found += isinstance(message, Watch)
    return found


def test_a_stream_begins_moves_and_ends_when_its_reader_logs_out(house: House, device: Device) -> None:
    person = Client()
    person.force_login(User.objects.create_superuser("olga"))
    cookie = f"sessionid={person.cookies['sessionid'].value}"
    address = f"/api/devices/{device.uuid}/usage"
    with an_agent(house.port) as socket:
        stream = Stream(house.port, f"{address}/", Cookie=cookie)
        assert (stream.head.status, stream.head.headers["Content-Type"]) == (200, "text/event-stream")
        assert stream.head.headers["Cache-Control"] == "no-store" and stream.head.headers["x-openstack-request-id"]
        first = next(iter(stream))
        assert first["device"]["uuid"] == str(device.uuid)
        assert (first["at"], first["age_s"], first["values"], first["silent"]) == (None, None, {}, [])
        say = saying(socket)
        shown = stream.until(40.0, say)
        assert list(shown) == list(first) and shown["device"] == first["device"] and shown["age_s"] >= 0
        plain = json.loads(person.get(address).content)
        assert [plain[name] for name in ("values", "silent")] == [shown[name] for name in ("values", "silent")]
        assert plain["at"][:10] == shown["at"][:10] and plain["at"][-1] == shown["at"][-1] == "Z"
        stream.until(55.0, say)
        person.logout()
        list(stream)
        assert stream.head.isclosed(), "it ends"
    assert Stream(house.port, address, Cookie=cookie).head.status == 401


def test_many_who_listen_are_asked_for_once_and_each_hears_its_own(house: House, device: Device, token: str) -> None:
    other = Device.objects.get(key=OTHER)
    with an_agent(house.port) as socket:
        streams = [
            Stream(house.port, f"/api/devices/{one.uuid}/usage?fields=values", **{"X-Auth-Token": token})
            for one in (device, other, device)
        ]
        say = saying(socket)
        seen = [streams[n].until(busy, say) for n, busy in ((0, 40.0), (2, 40.0))]
        assert seen[0] == {"values": {"utilization_percent": 40.0}} == seen[1]
        streams[1].until(1.0, lambda _: say(40.0))
        for stream in streams:
            assert len(list(zip(range(20), stream, strict=False))) == 20
        assert wishes(socket) < 10, "one wish serves them all, and holds"
        for stream in streams:
            stream.link.close()
        until(lambda: not house.http.usage._listeners)


def test_a_stream_ends_with_its_process(house: House, device: Device, token: str) -> None:
    stream = Stream(house.port, f"/api/devices/{device.uuid}/usage/", **{"X-Auth-Token": token})
    next(iter(stream))
    house.http.usage.stop()
    list(stream)
    assert stream.head.isclosed()


def test_who_may_not_listen_is_told_why_as_elsewhere(
    house: House, device: Device, token: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"/api/devices/{device.uuid}/usage/"
    member = ApiToken.make("x", User.objects.get(username="mona"), ["member", "reader"], "p1")
    for path, sent, status, says in (
        (address, {}, 401, "requires authentication"),
        (address, {"X-Auth-Token": member}, 403, "cyborg:device:get_usage"),
        (f"/api/devices/{NOWHERE}/usage/", {"X-Auth-Token": token}, 404, "nothing here that you may see"),
        (f"{address}?colour=red", {"X-Auth-Token": token}, 400, "unknown parameter"),
    ):
        head = Stream(house.port, path, **sent).head
        assert head.status == status and says in json.loads(head.read())["error"]["message"]
    assert "application/json" in message(ask(address, **STREAM), 406)
    monkeypatch.setattr(usage, "MAX_LISTENERS", 0)
    full = Stream(house.port, address, **{"X-Auth-Token": token}).head
    assert (full.status, full.headers["Retry-After"]) == (503, "30") and b"Too many listeners" in full.read()
