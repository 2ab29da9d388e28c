"""Tests of samples at the gateway and in other processes: caching, watching, dropping, expiry. They are not stored."""

from __future__ import annotations

import http.client
import json
import socket as sockets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from django.core.signing import TimestampSigner
from django.db import connection
from django.test.utils import CaptureQueriesContext
from msgspec import Raw
from websockets.sync.client import ClientConnection

from accelerators.models import Event, Host
from agents import telemetry, wire
from agents.gateway import metrics, sample_cache, sample_rpc
from agents.gateway.asgi_app import AgentGateway
from agents.gateway.sample_rpc import HostSamples, SampleEndpoint, SampleRequest
from agents.models import Gateway, Lease
from agents.telemetry import HostLoad, LoadSnapshot
from agents.wire import DeviceLoad, Samples, Watch
from cyborgweb.settings.keys import Keys
from tests.agents.conftest import GatewaySlot
from tests.support.webserver import until
from tests.support.wireagent import WireAgent, ask, make_join_secret

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def gateway(gateway_slot: GatewaySlot) -> Iterator[AgentGateway]:
    made = AgentGateway(Keys(lease_flush_s=0.05))
    endpoint = SampleEndpoint(made.sample_cache)

    async def served(scope: Any, receive: Any, send: Any) -> None:
        await made(scope, receive, send)

    async def challenge(scope: Any, receive: Any, send: Any) -> None:
        await (endpoint if scope["path"] == sample_rpc.PATH else made.serve_challenge)(scope, receive, send)

    gateway_slot.gateway = served
    served.serve_challenge = challenge  # type: ignore[attr-defined]
    telemetry.forget_gateways()
    yield made
    made.stop()
    telemetry.forget_gateways()


def make_agent(port: int, host: str = "cmp1") -> WireAgent:
    return WireAgent(port, host=host, token=make_join_secret(host))


@pytest.fixture
def agent(gateway: AgentGateway, gateway_slot: GatewaySlot) -> WireAgent:
    return make_agent(gateway_slot.port)


def encode_samples(busy: float, key: str = "pci:0") -> str:
    return wire.encode_message(Samples((DeviceLoad(key, {"utilization_percent": busy, "power_watts": 40.0}),)))


def load_by_host(loads: LoadSnapshot) -> dict[int, float]:
    """Return the utilization of the device `pci:0` of each host, by host id."""
    return {host: one.devices["pci:0"]["utilization_percent"] for host, one in loads.hosts.items()}


def send_until_known(socket: ClientConnection, host: int, busy: float) -> HostLoad:
    """Send the sample until the gateway knows it, because a busy event loop drops samples; return the host's load."""

    def said() -> HostLoad | None:
        socket.send(encode_samples(busy))
        loads = telemetry.get_last_loads({host})
        return loads.hosts[host] if load_by_host(loads) == {host: busy} else None

    return until(said)  # type: ignore[no-any-return]


def receive_watch(socket: ClientConnection) -> Watch:
    """Skip other messages until the gateway sends a Watch; return it."""
    while not isinstance(message := wire.decode_from_gateway(socket.recv(timeout=10)), Watch):
        pass
    return message


def wait_for_hello(gateway: AgentGateway) -> int:
    """Wait until the gateway has received the agent's Hello and registered its sample cache; return the host's id."""
    until(
        lambda: (
            any(one.has_sent_hello for one in gateway.sessions.by_host.values())
            and gateway.sample_cache.name in sample_cache.local_caches
        )
    )
    return Host.objects.get().id


@contextmanager
def answer_watches(socket: ClientConnection, busy: float) -> Iterator[None]:
    """Play an agent that answers each Watch with a sample of this utilization."""

    def work() -> None:
        while not over.wait(0.01):
            with suppress(TimeoutError):
                if isinstance(wire.decode_from_gateway(socket.recv(timeout=0.1)), Watch):
                    socket.send(encode_samples(busy))

    over = threading.Event()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    yield
    over.set()
    thread.join(10)


def simulate_another_process(gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this process ask the gateway over HTTP, as a process does that knows it only from its database row."""
    monkeypatch.delitem(sample_cache.local_caches, gateway.sample_cache.name)
    telemetry.forget_gateways()


def test_the_last_samples_of_a_host_are_known_in_every_process_and_not_stored(
    agent: WireAgent, gateway: AgentGateway, gateway_slot: GatewaySlot, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.set_public_url(f"http://127.0.0.1:{gateway_slot.port}")
    with agent.connect_and_say_hello() as socket:
        ask(socket, wire.Beat(1))
        until(lambda: Gateway.objects.filter(name=gateway.sample_cache.name).exists())
        host, lease = Host.objects.get().id, Lease.objects.get().seen_at
        monkeypatch.setattr(gateway._writer, "put", None)  # The gateway reaches the database only through this queue.
        near = send_until_known(socket, host, 40.0)
        assert near.devices == {"pci:0": {"utilization_percent": 40.0, "power_watts": 40.0}}
        with CaptureQueriesContext(connection) as statements:
            assert load_by_host(telemetry.get_last_loads()) == {host: 40.0} and telemetry.get_last_loads(
                {host + 1}
            ) == LoadSnapshot({})
        assert len(statements) == 0, "the registry is remembered"
        simulate_another_process(gateway, monkeypatch)
        far = telemetry.get_last_loads({host})
        assert (load_by_host(far), far.silent, far.hosts[host].devices) == ({host: 40.0}, (), near.devices)
        assert load_by_host(telemetry.get_last_loads()) == {host: 40.0} and telemetry.get_last_loads(
            {host + 1}
        ) == LoadSnapshot({})
        assert Lease.objects.get().seen_at == lease
    until(lambda: telemetry.get_last_loads() == LoadSnapshot({}))


@pytest.mark.slow
def test_an_agent_is_sent_the_fastest_watch_once_and_a_slower_one_when_it_ends(
    agent: WireAgent, gateway: AgentGateway
) -> None:
    with agent.connect_and_say_hello() as socket:
        host = wait_for_hello(gateway)
        telemetry.request_periodic_loads({host}, 10, 100)
        first = receive_watch(socket)
        assert (first.every_s, first.for_s) == (10, pytest.approx(100, abs=5))
        telemetry.request_periodic_loads({host}, 1, 1.5)
        assert receive_watch(socket).every_s == 1
        for _ in range(5):
            # The agent is sent nothing: its faster watch serves this one as well.
            telemetry.request_periodic_loads({host}, 10, 100)
        again = receive_watch(socket)
        assert again.every_s == 10 and 50 < again.for_s <= 100


@pytest.mark.parametrize("far", [False, True])
def test_a_census_returns_new_answers_only_and_ends_at_its_time_limit(
    agent: WireAgent, gateway: AgentGateway, gateway_slot: GatewaySlot, monkeypatch: pytest.MonkeyPatch, far: bool
) -> None:
    gateway.set_public_url(f"http://127.0.0.1:{gateway_slot.port}")
    with agent.connect_and_say_hello() as socket:
        host = wait_for_hello(gateway)
        send_until_known(socket, host, 10.0)
        ask(socket, wire.Beat(1))
        until(lambda: Gateway.objects.exists())
        if far:
            simulate_another_process(gateway, monkeypatch)
        silent = telemetry.run_load_census({host}, 0.3)
        assert silent.hosts == {} and silent.silent == (), "what was said before does not count"
        assert receive_watch(socket) == Watch(sample_cache.MIN_INTERVAL_S, 0.0)
        found: list[LoadSnapshot] = []
        with answer_watches(socket, 70.0):
            until(lambda: found.append(telemetry.run_load_census({host}, 20)) or load_by_host(found[-1]))
        assert load_by_host(found[-1]) == {host: 70.0}
        monkeypatch.setattr(sample_cache, "MAX_CENSUSES", 0)
        assert telemetry.run_load_census({host}, 0.3).silent == (gateway.sample_cache.name,), (
            "nobody was asked: no host is to blame"
        )
        assert telemetry.get_last_loads({host}).silent == ()


@pytest.mark.slow
def test_X5_excessive_samples_are_dropped_and_recorded_and_heartbeats_go_on(
    agent: WireAgent, gateway: AgentGateway
) -> None:
    before = dict(metrics.event_counts)
    with agent.connect_and_say_hello() as socket:
        for _ in range(100):
            socket.send(encode_samples(1.0))
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
        assert (
            metrics.event_counts["shed"] - before["shed"] > 80 and metrics.event_counts["taken"] - before["taken"] < 20
        )
    with agent.connect_and_say_hello() as socket:
        many = tuple(DeviceLoad(f"pci:{n}", {"power_watts": 1.0}) for n in range(4000))
        socket.send(wire.encode_message(Samples(many)))
        assert ask(socket, wire.Beat(2)) == wire.Ack(2, "Beat")
        assert telemetry.get_last_loads() == LoadSnapshot({})
    until(lambda: Event.objects.filter(action="agent.refused", host="cmp1", reason__contains="Samples").exists())
    unheard = (" " + encode_samples(1.0), encode_samples(1.0).encode())
    assert encode_samples(1.0).startswith(sample_cache.SAMPLES_PREFIX) and wire.encode_message(Samples(())).startswith(
        sample_cache.SAMPLES_PREFIX
    )
    nonsense = ('{"type":"Samples","loads":[{"key":"a","values":{"x":NaN}}]}', '{"type":"Samples","loads":[[]]}')
    for text in (*unheard, *nonsense):
        with agent.connect_and_say_hello() as socket:
            socket.send(text)
            refusal = wire.decode_from_gateway(socket.recv(timeout=10))
            assert isinstance(refusal, wire.Refuse) and refusal.code == "malformed"
    until(lambda: Event.objects.filter(host="cmp1", changes__code=[None, "malformed"]).exists())


def test_samples_are_dropped_and_reports_accepted_while_much_is_pending(
    agent: WireAgent, gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(metrics.event_counts)
    monkeypatch.setattr(gateway, "_pending_bytes", gateway.settings.pending_report_bytes // 8 + 1)
    with agent.connect_and_say_hello() as socket:
        socket.send(encode_samples(1.0))
        report = wire.Report(1, 1, wire.hash_report_content(()), ())
        assert ask(socket, report) == wire.Ack(1, "Report")
        assert (metrics.event_counts["taken"] - before["taken"], metrics.event_counts["shed"] - before["shed"]) == (
            0,
            1,
        )


def test_a_gateway_answers_only_requests_signed_with_the_secret_key(
    gateway: AgentGateway, gateway_slot: GatewaySlot, agent: WireAgent
) -> None:
    def post(body: bytes, signed: str = "", method: str = "POST") -> int:
        link = http.client.HTTPConnection("127.0.0.1", gateway_slot.port, timeout=10)
        link.request(method, sample_rpc.PATH, body, {sample_rpc.SIGNATURE_HEADER: signed} if signed else {})
        status, said = (answer := link.getresponse()).status, json.loads(answer.read())
        link.close()
        assert status == 200 or said["error"]
        return status

    def sign(body: bytes, salt: str = "agents.gateway.sample_rpc", now: float = 0.0) -> str:
        signer = TimestampSigner(salt=salt)
        if now:
            signer.timestamp = lambda: "1"  # type: ignore[method-assign]
        return signer.sign(sample_rpc._hash_body(body))

    assert [post(b"{}"), post(b"{}", "x:1:y"), post(b"{}", sign(b"{}", "another"))] == [403] * 3
    assert post(b"{}", sign(b"{}", now=1.0)) == 403, "signed long ago"
    assert post(b"{}", sign(b"[]")) == 400
    assert post(b"[]", sign(b"[]")) == 400
    assert post(b" " * (sample_rpc.MAX_REQUEST_BYTES + 1), sign(b" ")) == 413
    assert post(b"{}", sign(b"{}"), "GET") == 403
    assert post(b"{}", sign(b"{}")) == 200
    assert (
        sample_rpc.fetch_samples(f"http://127.0.0.1:{gateway_slot.port}", SampleRequest(), 5).gateway
        == gateway.sample_cache.name
    )


@pytest.mark.slow
def test_a_silent_gateway_is_named_and_not_asked_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "RESPONSE_TIMEOUT_S", 0.2)
    with sockets.create_server(("127.0.0.1", 0)) as stuck:
        stuck.settimeout(5)
        Gateway.objects.create(name="far", url=f"http://127.0.0.1:{stuck.getsockname()[1]}")
        telemetry.forget_gateways()
        assert telemetry.get_last_loads() == LoadSnapshot({}, ("far",))
        stuck.accept()[0].close()
        assert telemetry.get_last_loads() == LoadSnapshot({}, ("far",))
        stuck.settimeout(0.3)
        with pytest.raises(TimeoutError):
            stuck.accept()
    telemetry.forget_gateways()


def test_a_gateway_that_no_thread_could_ask_is_not_marked_as_silent(db: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MAX_THREADS", 1)
    monkeypatch.setattr(telemetry, "RESPONSE_TIMEOUT_S", 0.2)
    Gateway.objects.create(name="far", url="http://127.0.0.1:99999")
    everybody, over = telemetry.GatewayPool(), threading.Event()
    everybody._census_threads.submit(over.wait, 30)
    try:
        assert everybody.ask_all(SampleRequest((1,), within_s=0.01)) == LoadSnapshot({}, ("far",))
        assert everybody._backoff_until == {}
        assert everybody.ask_all(SampleRequest((1,))) == LoadSnapshot({}, ("far",))
        assert list(everybody._backoff_until) == ["far"], "it was asked, at what is no address"
    finally:
        over.set()


def test_unreadable_samples_affect_only_their_own_host() -> None:
    held = [HostSamples(1, 2.0, Raw(b"{}")), HostSamples(2, 2.0, Raw(encode_samples(5.0).encode()))]
    assert load_by_host(LoadSnapshot(telemetry._decode_newest(held))) == {2: 5.0}


def test_without_gateways_every_question_returns_no_loads_at_once(db: None) -> None:
    telemetry.forget_gateways()
    assert (
        telemetry.get_last_loads()
        == telemetry.request_periodic_loads({1}, 1, 10)
        == telemetry.run_load_census({1}, 60)
        == LoadSnapshot({})
    )
