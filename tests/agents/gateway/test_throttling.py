"""Tests of throttling at the gateway: limits on handshakes and connections, retry times, jitter, urgent reports."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from msgspec import structs
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection

from accelerators.models import Deployable, Device, Event, Host
from agents import jobs, wire
from agents.gateway import metrics, urgency
from agents.gateway.asgi_app import AgentGateway
from agents.gateway.row_locks import limiting_lock_waits
from agents.gateway.throttling import MAX_JITTER_S, MAX_RETRY_AFTER_S, HandshakeThrottle, ReportJitter, TokenBuckets
from agents.gateway.urgency import MAX_CHECKED_DEVICES, DeviceHealth, list_health_to_check
from agents.gateway.writer import LARGE_REPORT_BYTES, SpoolJob, SpoolUse, _error_for_unserved, _process_isolating_errors
from agents.models import Spooled
from cyborgweb.settings.keys import Keys
from drivers.inventory import Device as Card
from drivers.inventory import DriverReport
from tests.agents.conftest import GatewaySlot
from tests.agents.gateway.test_gateway import make_report
from tests.support.reports import get_or_create_host, make_card, make_driver_report, name_providers_of_device
from tests.support.requests import bind_new_requests, create_profiles, offer_devices
from tests.support.webserver import until
from tests.support.wireagent import WireAgent, ask, make_join_secret

FAULTY = (("key", "failed"),)


class FakeClock:
    """A clock that shows the same time until a test changes `now`."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def make_admission(limit: int = 4, connections: int = 100) -> tuple[HandshakeThrottle, FakeClock]:
    clock = FakeClock()
    return HandshakeThrottle(limit, connections, clock, lambda: 0.0), clock


def test_refused_agents_get_increasing_waiting_times_up_to_the_maximum() -> None:
    admission, clock = make_admission(limit=2)
    assert [admission.admit_challenge("a"), admission.admit_challenge("b")] == [0, 0], "these have a challenge"
    places = [admission.admit_challenge("a") for _ in range(4000)]
    assert places[0] == 1 and places == sorted(places[:3000]) + places[3000:] and max(places) <= MAX_RETRY_AFTER_S + 1
    assert len(set(places)) > 4, "they do not come back together"
    clock.now += 1.5
    assert admission.admit_challenge("a") == 0, "who took a challenge and did not come keeps no place"


def test_agents_above_the_maximum_waiting_time_are_refused_and_spread_over_it() -> None:
    admission = HandshakeThrottle(1, 100, FakeClock(), random.Random(1).random)
    waits = [admission.schedule_return() for _ in range(30_000)]
    assert set(waits[-4000:]) == set(range(1, MAX_RETRY_AFTER_S + 1))


def test_a_challenge_reserves_a_place_until_the_agent_connects() -> None:
    admission, _ = make_admission(limit=2)
    assert not admission.admit_challenge("a") and not admission.admit_challenge("b")
    assert not admission.admit_upgrade(0, "a")
    with admission.count_handshake():
        assert admission.admit_challenge("a"), "one inside, one on the way"
        assert not admission.admit_upgrade(0, "b")
        with admission.count_handshake():
            assert admission.admit_upgrade(0, "a"), "without a place, and both are taken"
    assert not admission.admit_challenge("a")


def test_one_address_gets_at_most_half_of_the_places_by_challenges_alone() -> None:
    admission, _ = make_admission(limit=64)
    taken = [admission.admit_challenge("mallory") for _ in range(1000)].count(0)
    assert taken == 33, "half of the places are for whoever comes, also for many hosts behind one address"
    assert [admission.admit_challenge(f"host {n}") for n in range(31)] == [0] * 31
    assert admission.admit_challenge("one more")
    for n in range(31):
        assert not admission.admit_upgrade(0, f"host {n}")
    assert [admission.admit_challenge("host") for _ in range(9)].count(0) == 8, "its share, while the door is pressed"


def test_the_admission_rate_follows_the_number_of_completed_handshakes() -> None:
    admission, clock = make_admission(limit=1)
    before = admission.rate
    # The database has stopped: no handshake completes, so the rate falls and the waiting times grow.
    for _ in range(12):
        assert not admission.in_progress
        admission.schedule_return()
        clock.now += 1.1
    assert admission.schedule_return() and admission.rate <= before / 5
    for _ in range(10):
        for _ in range(1000):
            with admission.count_handshake():
                pass
        clock.now += 1.1
    assert admission.rate > before


def test_no_connection_is_admitted_above_the_connection_limit() -> None:
    admission, _ = make_admission(connections=3)
    assert admission.admit_upgrade(3, "a") and not admission.admit_upgrade(2, "a")
    assert not admission.admit_challenge("a"), "agents that are connected ask as well, for images"


def test_reports_get_jitter_only_while_disk_or_merge_fall_behind() -> None:
    clock = FakeClock()
    spread = ReportJitter(clock)
    assert {spread.choose_jitter() for _ in range(500)} == {0.0}
    for _ in range(4000):
        late = spread.choose_jitter()
    assert 2.0 < late < MAX_JITTER_S
    spread.count_report()
    assert spread.choose_jitter() == late, "one has reported, and one has come"
    for _ in range(4500):
        spread.count_report()
    assert spread.choose_jitter() == 0.0, "they have reported"
    many = 10**9  # Ids of reports only grow, so they can be large.
    spread.update_merge_time(many + 1, many + 50_000)
    clock.now += 1.0
    spread.update_merge_time(many + 101, many + 50_000)
    assert spread.choose_jitter() == MAX_JITTER_S, "a hundred a second, and 50 000 wait"
    clock.now += 1.0
    spread.update_merge_time(many + 20_101, many + 50_000)
    swift = spread.choose_jitter()
    for _ in range(20):  # Urgent reports are merged first, so the oldest waiting report stays the same.
        clock.now += 1.0
        spread.update_merge_time(many + 20_101, many + 50_000)
    assert spread.choose_jitter() == swift < MAX_JITTER_S
    spread.update_merge_time(None, None)
    assert spread.choose_jitter() == 0.0


def test_a_slow_disk_is_detected_only_by_batches_of_at_least_ten_reports() -> None:
    spread = ReportJitter(FakeClock())
    assert {spread.choose_jitter() for _ in range(900)} == {0.0}
    spread.update_stored_rate(9, 60.0)
    assert spread.choose_jitter() == 0.0, "of few the commit itself is measured"
    spread.update_stored_rate(10, 60.0)
    assert 0.0 < spread.choose_jitter() < MAX_JITTER_S


def test_a_host_may_send_a_burst_and_then_waits_until_its_debt_is_paid() -> None:
    clock = FakeClock()
    buckets = TokenBuckets(rate=10.0, capacity=100.0, clock=clock)
    assert [buckets.take(1, 60) for _ in range(2)] == [0.0, 0.0], "the second one makes a debt of 20"
    assert buckets.take(1, 60) == 2.0, "it waits for the debt of the one before"
    assert buckets.take(2, 60) == 0.0, "another host has a bucket of its own"
    assert [buckets.take(1, 60) for _ in range(50)][-1] == 12.0, "however often it connects again"
    clock.now += 60.0
    assert buckets.take(1, 60) == 0.0
    clock.now += 3600.0
    assert [buckets.take(1, 50) for _ in range(4)] == [0.0, 0.0, 0.0, 5.0], "never more than the capacity"


def test_a_host_with_the_most_devices_may_boot_and_have_its_devices_plugged_in_and_out_without_waiting() -> None:
    keys, clock = Keys(), FakeClock()
    made = AgentGateway(keys)
    for buckets in (made._report_buckets, made._byte_buckets):
        buckets._clock = clock
    for _ in range(50):  # The agent collects changes for two seconds before it makes a report.
        assert made._report_buckets.take(1, 1) == made._byte_buckets.take(1, keys.max_message_bytes) == 0.0
        clock.now += 2.0


@pytest.fixture
def gateway(gateway_slot: GatewaySlot) -> Iterator[AgentGateway]:
    made = gateway_slot.gateway = AgentGateway(Keys(lease_flush_s=0.05, handshakes=1, agent_connections=2))
    yield made
    made.stop()


@pytest.mark.django_db(transaction=True)
def test_a_challenge_above_the_limit_gets_503_with_retry_after_and_no_database_work(
    gateway_slot: GatewaySlot, gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = WireAgent(gateway_slot.port, token=make_join_secret())
    spare = agent.credential(agent.challenge())
    with monkeypatch.context() as nothing, gateway.throttle.count_handshake():
        nothing.setattr(gateway._writer, "put", None)  # The gateway reaches the database only through this queue.
        nothing.setattr("agents.authentication.verify_credential", None)
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(f"http://127.0.0.1:{gateway_slot.port}{wire.CHALLENGE_PATH}")
        body = json.loads(refused.value.read())
        assert (refused.value.code, body["code"]) == (503, "busy") and "try again after" in body["error"]
        assert 1 <= int(refused.value.headers["Retry-After"]) <= MAX_RETRY_AFTER_S + 1
        with pytest.raises(InvalidStatus) as closed:
            agent.connect(spare)
        assert closed.value.response.status_code == 503 and "retry-after" in closed.value.response.headers
    agent.connect(spare).close()  # The refusal did not use up the challenge.
    until(lambda: Event.objects.filter(action="agent.refused", host="(many)").exists())


@pytest.mark.django_db(transaction=True)
def test_a_connection_above_the_limit_is_refused_with_the_name_of_the_setting(
    gateway_slot: GatewaySlot, gateway: AgentGateway
) -> None:
    first, second = (
        WireAgent(gateway_slot.port, token=make_join_secret()),
        WireAgent(gateway_slot.port, host="cmp2", token=make_join_secret("cmp2")),
    )
    with first.connect():
        with second.connect():
            with pytest.raises(InvalidStatus) as refused:
                first.connect()
            assert "CYBORG_AGENT_CONNECTIONS" in json.loads(refused.value.response.body or b"")["error"]
        until(lambda: gateway.open_connections == 1)
        second.connect().close()


@pytest.mark.django_db(transaction=True)
def test_a_report_is_refused_while_too_many_bytes_of_reports_wait_to_be_stored(
    gateway_slot: GatewaySlot, gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.settings = Keys(pending_report_bytes=10)
    refused, serve = threading.Event(), gateway._report_writer._process_batch

    def serve_when_refused(batch: Any) -> None:
        assert refused.wait(20)
        serve(batch)

    first = WireAgent(gateway_slot.port, token=make_join_secret())
    second = WireAgent(gateway_slot.port, host="cmp2", token=make_join_secret("cmp2"))
    with first.connect() as one:
        with second.connect() as two:
            monkeypatch.setattr(gateway._report_writer, "_process_batch", serve_when_refused)
            one.send(wire.encode_message(make_report(make_card(1))))
            until(lambda: gateway._pending_bytes)
            refusal = ask(two, make_report(make_card(1)))
            assert isinstance(refusal, wire.Refuse) and refusal.code == "busy"
        refused.set()
        assert wire.decode_from_gateway(one.recv(timeout=10)) == wire.Ack(1, "Report")
        assert ask(one, make_report(make_card(2), seq=2)) == wire.Ack(2, "Report"), "none waits any more"


@pytest.mark.django_db(transaction=True)
def test_X5_an_ordinary_report_waits_neither_for_large_reports_nor_for_handshakes(
    gateway_slot: GatewaySlot, gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    released, serve = threading.Event(), gateway._writer._process_batch

    def serve_when_released(batch: Any) -> None:
        assert released.wait(20)
        serve(batch)

    large = make_report(*(make_card(n) for n in range(250)))
    assert len(wire.encode_message(large)) > LARGE_REPORT_BYTES
    first = WireAgent(gateway_slot.port, token=make_join_secret())
    second = WireAgent(gateway_slot.port, host="cmp2", token=make_join_secret("cmp2"))
    with first.connect() as one, second.connect() as two:
        monkeypatch.setattr(gateway._writer, "_process_batch", serve_when_released)
        one.send(wire.encode_message(large))
        until(lambda: gateway._pending_bytes)
        assert ask(two, make_report(make_card(1))) == wire.Ack(1, "Report")
        assert gateway._pending_bytes, "the large report still waits"
        released.set()
        assert wire.decode_from_gateway(one.recv(timeout=10)) == wire.Ack(1, "Report")


@pytest.mark.django_db(transaction=True)
def test_X5_reports_above_a_hosts_share_are_stored_later_and_none_is_lost(
    gateway_slot: GatewaySlot, gateway: AgentGateway
) -> None:
    gateway._byte_buckets = TokenBuckets(rate=5_000.0, capacity=1.0)
    postponed, agent = metrics.event_counts["postponed"], WireAgent(gateway_slot.port, token=make_join_secret())
    with agent.connect() as socket:
        began = time.monotonic()
        for seq in range(1, 5):
            report = make_report(make_card(seq), seq=seq)
            assert ask(socket, report) == wire.Ack(seq, "Report")
        least = 3 * len(wire.encode_message(report)) / 5_000.0
        assert time.monotonic() - began >= least * 0.9, "the time that three reports take at this rate"
    assert Spooled.objects.count() == 4
    assert metrics.event_counts["postponed"] > postponed
    until(lambda: Event.objects.filter(action="agent.refused", host="cmp1", changes__code=[None, "throttled"]).exists())


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_X5_a_throttled_host_waits_for_one_heartbeat_at_most_and_takes_no_place_from_others(
    gateway_slot: GatewaySlot, gateway: AgentGateway
) -> None:
    size = len(wire.encode_message(make_report(make_card(1))))
    gateway.settings = Keys(pending_report_bytes=size * 3 // 2, beat_s=1.0)
    gateway._byte_buckets = TokenBuckets(rate=1.0, capacity=1.0)
    gateway.throttle.max_connections = 3
    hosts = [WireAgent(gateway_slot.port, host=f"cmp{n}", token=make_join_secret(f"cmp{n}")) for n in (1, 2, 3)]
    with hosts[0].connect() as first, hosts[1].connect() as second, hosts[2].connect() as third:
        for socket in (first, second):
            assert ask(socket, make_report(make_card(1))) == wire.Ack(1, "Report")
        first.send(wire.encode_message(make_report(make_card(2), seq=2)))
        until(lambda: gateway._throttled_bytes)
        refusal = ask(second, make_report(make_card(2), seq=2))
        assert isinstance(refusal, wire.Refuse) and refusal.code == "busy"
        assert gateway._throttled_bytes, "the first host still waits"
        assert ask(third, make_report(make_card(1))) == wire.Ack(1, "Report")
        assert wire.decode_from_gateway(first.recv(timeout=10)) == wire.Ack(2, "Report")
        assert not gateway._throttled_bytes


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("share", [SpoolUse(2, 10**9), SpoolUse(10**9, 1000)])
def test_X5_reports_of_a_host_that_uses_up_its_share_of_the_spool_are_refused_until_they_are_merged(
    gateway_slot: GatewaySlot, gateway: AgentGateway, share: SpoolUse
) -> None:
    gateway._spool_account.share = share
    gateway.throttle.max_handshakes = gateway.throttle.max_connections = 10
    flood = WireAgent(gateway_slot.port, token=make_join_secret())
    other = WireAgent(gateway_slot.port, host="cmp2", token=make_join_secret("cmp2"))
    with flood.connect() as one, other.connect() as two:
        for seq in (1, 2):
            assert ask(one, make_report(make_card(seq), seq=seq)) == wire.Ack(seq, "Report")
        refusal = ask(one, make_report(make_card(3), seq=3))
        assert isinstance(refusal, wire.Refuse) and refusal.code == "busy"
        assert "too many reports of this host wait to be merged" in refusal.reason
        assert ask(two, make_report(make_card(1))) == wire.Ack(1, "Report")
    with flood.connect() as one:
        assert isinstance(ask(one, make_report(make_card(3), seq=3)), wire.Refuse), "it gains nothing by reconnecting"
    assert Spooled.objects.filter(host__name="cmp1").count() == 2
    jobs.merge()
    with flood.connect() as one:
        assert ask(one, make_report(make_card(3), seq=3)) == wire.Ack(3, "Report")
    assert Spooled.objects.get().seq == 3


def hold_card(socket: ClientConnection, host: str = "cmp1") -> None:
    """Let a host without reports report two cards, and bind a request to the first one."""
    assert isinstance(ask(socket, make_report(*name_cards(host, make_card(1), make_card(2)))), wire.Ack)
    jobs.merge()
    create_profiles(p={})
    offer_devices()
    part = Deployable.objects.get(device__host__name=host, device__address="0000:01:00.0")
    bind_new_requests("p", str(part.rp_uuid), host=host)


def name_cards(host: str, *cards: Card) -> list[Card]:
    return [name_providers_of_device(host, card) for card in cards]


def list_urgency() -> list[tuple[int, bool]]:
    return list(Spooled.objects.order_by("seq").values_list("seq", "urgent"))


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("later_health", ["failed", "ok"])
def test_X5_a_report_is_urgent_if_it_changes_the_health_of_a_held_device_whatever_the_agent_claims(
    gateway_slot: GatewaySlot, gateway: AgentGateway, later_health: str
) -> None:
    agent = WireAgent(gateway_slot.port, token=make_join_secret())
    held, free = make_card(1), make_card(2)
    ill, later = (structs.replace(held, status=status) for status in ("degraded", later_health))
    with agent.connect() as socket:
        hold_card(socket)
        contents = (
            (held, structs.replace(free, model="new")),
            (held, structs.replace(free, status="failed")),
            (structs.replace(held, status="unknown"), free),
            (ill, free),
        )
        for seq, (cards, is_claimed) in enumerate(itertools.product(contents, (True, False)), 2):
            report = make_report(*cards, make_card(10 + seq), seq=seq)  # none is equal to another one
            assert ask(socket, structs.replace(report, urgent=is_claimed)) == wire.Ack(seq)
        assert [seq for seq, is_urgent in list_urgency() if is_urgent] == [8, 9]
        jobs.merge()
        ask(socket, make_report(ill, free, make_card(3), seq=20))
        ask(socket, make_report(later, free, seq=21))
    assert list_urgency() == [(20, False), (21, True)], "the first health is recorded already, the second one is not"


@pytest.mark.django_db(transaction=True)
def test_X5_a_host_whose_held_device_fails_again_and_again_is_served_first_only_a_few_times(
    gateway_slot: GatewaySlot, gateway: AgentGateway
) -> None:
    agent, card = WireAgent(gateway_slot.port, token=make_join_secret()), make_card(1, status="failed")
    with agent.connect() as socket:
        hold_card(socket)
    for start in (2, 4, 6):  # It gains nothing by connecting again.
        with agent.connect() as socket:
            for seq in (start, start + 1):
                assert ask(socket, make_report(card, make_card(10 + seq), seq=seq)) == wire.Ack(seq)
    assert [is_urgent for _, is_urgent in list_urgency()] == [True] * 3 + [False] * 3


@pytest.mark.django_db(transaction=True)
def test_a_report_with_a_faulty_device_costs_one_statement_more_and_waits_for_no_lock(
    gateway_slot: GatewaySlot, gateway: AgentGateway
) -> None:
    agent = WireAgent(gateway_slot.port, token=make_join_secret())
    with agent.connect() as socket:
        hold_card(socket)
    host = Host.objects.get()
    made, loop = AgentGateway(Keys()), asyncio.new_event_loop()

    def store(*faulty: DeviceHealth) -> int:
        job = SpoolJob(loop.create_future(), host.id, (2, 1), "h" * 32, "{}", faulty)
        with CaptureQueriesContext(connection) as statements:
            assert [stored for _, stored in made._writer._store_reports([job])] == [True]
        return len([one for one in statements if "accelerators_" in str(one["sql"])])

    with psycopg.connect(**connection.get_connection_params()) as outside:
        outside.execute("SELECT FROM accelerators_host, accelerators_device FOR UPDATE")
        assert store(("pci:0000:01:00.0", "failed")) == store() + 1
    loop.close()
    assert list(Spooled.objects.order_by("id").values_list("urgent", flat=True)) == [True, False]


@pytest.mark.django_db(transaction=True)
def test_a_repeated_attempt_to_store_a_report_uses_up_its_hosts_urgency_once(
    gateway_slot: GatewaySlot, gateway: AgentGateway
) -> None:
    agent = WireAgent(gateway_slot.port, token=make_join_secret())
    with agent.connect() as socket:
        hold_card(socket)
    host = Host.objects.get()
    made, loop = AgentGateway(Keys()), asyncio.new_event_loop()
    for seq, attempts in ((2, 5), (3, 1)):
        job = SpoolJob(loop.create_future(), host.id, (1, seq), f"{seq}" * 32, "{}", (("pci:0000:01:00.0", "failed"),))
        for _ in range(attempts):
            made._writer._store_reports([job])
    loop.close()
    assert list_urgency() == [(2, True)] * 5 + [(3, True)]


@pytest.mark.django_db(transaction=True)
def test_a_report_is_stored_as_not_urgent_if_its_urgency_cannot_be_found_out(
    gateway_slot: GatewaySlot, gateway: AgentGateway
) -> None:
    agent = WireAgent(gateway_slot.port, token=make_join_secret())
    with agent.connect() as socket:
        hold_card(socket)
    host, other = Host.objects.get(), get_or_create_host("cmp2")
    made, loop = AgentGateway(Keys()), asyncio.new_event_loop()

    def store(*keys: tuple[Host, int, str]) -> None:
        jobs_to_store = [
            SpoolJob(loop.create_future(), one.id, (1, seq), f"{seq}" * 32, "{}", ((key, "failed"),))
            for one, seq, key in keys
        ]
        stored = _process_isolating_errors(made._writer._store_reports, jobs_to_store, _error_for_unserved)
        assert [outcome for _, outcome in stored] == [True] * len(keys)

    with psycopg.connect(**connection.get_connection_params()) as outside, limiting_lock_waits():
        connection.close()
        outside.execute("LOCK TABLE accelerators_attachhandle")
        store((host, 2, "pci:0000:01:00.0"))
    connection.close()
    store((host, 3, "pci:0000:01:00.0"), (other, 4, "a\0b"))
    loop.close()
    assert list_urgency() == [(2, False), (3, True), (4, False)], "only one's own bad key counts"


@pytest.mark.django_db(transaction=True)
def test_of_a_batch_with_many_faulty_devices_each_report_has_its_part_looked_up(
    gateway_slot: GatewaySlot, gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urgency, "MAX_CHECKED_OF_BATCH", 4)
    agent = WireAgent(gateway_slot.port, token=make_join_secret())
    with agent.connect() as socket:
        hold_card(socket)
    host_id, invented = Host.objects.get().id, [(f"k{n}", "failed") for n in range(200)]
    held = ("pci:0000:01:00.0", "failed")
    assert urgency.find_hosts_with_changed_health([(host_id + 1, invented), (0, []), (host_id, [invented[0], held])])
    assert not urgency.find_hosts_with_changed_health([(host_id + 1, invented), (host_id, [*invented[:2], held])])


def test_of_many_health_to_check_the_failed_ones_are_looked_up_first() -> None:
    cards = [make_card(n % 250, key=f"k{n}", status="degraded" if n else "failed") for n in range(400, -1, -1)]
    found = list_health_to_check([make_driver_report(*cards, make_card(1), make_card(2, status="unknown"))])
    assert len(found) == MAX_CHECKED_DEVICES and found[0] == ("k0", "failed")


@pytest.mark.django_db(transaction=True)
def test_all_waiting_reports_of_a_host_with_a_new_fault_are_merged_first(
    gateway_slot: GatewaySlot, gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway.throttle.max_handshakes = gateway.throttle.max_connections = 10
    calm = WireAgent(gateway_slot.port, host="calm", token=make_join_secret("calm"))
    ill = WireAgent(gateway_slot.port, host="ill", token=make_join_secret("ill"))
    with calm.connect() as one, ill.connect() as two:
        hold_card(two, "ill")
        ask(one, make_report(make_card(3)))
        ask(two, make_report(*name_cards("ill", make_card(1), make_card(4)), seq=2))
        ask(two, make_report(*name_cards("ill", make_card(1, status="failed"), make_card(5)), seq=3))
    assert list(Spooled.objects.order_by("id").values_list("urgent", flat=True)) == [False, False, True]
    monkeypatch.setattr(jobs, "_batches", iter([1, 2, 3]))
    jobs.merge_batch()
    assert Host.objects.get(name="ill").applied_seq == 3
    assert Device.objects.get(host__name="ill", address="0000:01:00.0").status == "failed"
    assert not Device.objects.filter(host__name="calm").exists()
    jobs.merge_batch()
    assert Device.objects.filter(host__name="calm").exists()


def test_a_report_with_a_failed_device_or_driver_is_called_urgent_for_conductors_of_older_releases() -> None:
    well, ill = make_driver_report(make_card(1)), make_driver_report(make_card(1), make_card(2, status="failed"))
    assert not wire.Report.from_driver_reports(1, 1, "x" * 40, (well,)).urgent
    assert wire.Report.from_driver_reports(1, 1, "x" * 40, (well, ill)).urgent
    assert wire.Report.from_driver_reports(1, 1, "x" * 40, (well, DriverReport("other", "it hangs"))).urgent
    assert not wire.Report.from_driver_reports(
        1, 1, "x" * 40, (DriverReport("other", "turned off", state="disabled"),)
    ).urgent


def test_a_batch_takes_reports_with_a_faulty_device_first_and_keeps_places_for_others() -> None:
    made = AgentGateway(Keys(flush_max_rows=8, flush_interval_ms=0.0))
    loop = asyncio.new_event_loop()
    for n in range(40):
        made._writer._jobs.put(SpoolJob(loop.create_future(), n, (1, 1), "", "", FAULTY if n >= 20 else ()))
    batches = [[job.host_id for job in made._writer._collect_batch() if isinstance(job, SpoolJob)] for _ in range(5)]
    loop.close()
    taken = [host for batch in batches for host in batch]
    assert batches[0] == [20, 21, 22, 23, 24, 25, 0, 1]
    assert sorted(taken) == list(range(40)) and {len(batch) for batch in batches} == {8}
    assert [host for host in taken if host < 20] == list(range(20)), "each lane keeps its order"
