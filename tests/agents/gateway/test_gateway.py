"""Tests of the gateway's agent socket: admission, acknowledgement of reports, refusals and their events."""

from __future__ import annotations

import http.client
import json
from datetime import UTC, datetime, timedelta

import pytest
from django.db.models import F, Value
from django.db.models.functions import Replace

from accelerators.models import Device, Event, Host
from agents import jobs, wire
from agents.gateway import metrics
from agents.gateway.asgi_app import AgentGateway
from agents.gateway.leases import mark_stale_hosts
from agents.models import Agent, JoinToken, Lease, Spooled
from tests.agents.conftest import GatewaySlot
from tests.support.reports import make_card, make_driver_report
from tests.support.webserver import until
from tests.support.wireagent import WireAgent, ask, is_closed, make_join_secret

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def port(gateway: AgentGateway, gateway_slot: GatewaySlot) -> int:
    gateway_slot.gateway = gateway
    return gateway_slot.port


@pytest.fixture
def agent(port: int) -> WireAgent:
    return WireAgent(port, token=make_join_secret())


def make_report(*devices: object, seq: int = 1, epoch: int = 1) -> wire.Report:
    drivers = (make_driver_report(*devices),)  # type: ignore[arg-type]
    return wire.Report(epoch, seq, wire.hash_report_content(drivers), drivers)


def test_a_report_is_acknowledged_after_it_is_spooled_and_merged_into_devices(agent: WireAgent) -> None:
    with agent.connect() as socket:
        assert ask(socket, make_report(make_card(1), make_card(2))) == wire.Ack(1, "Report")
    assert Spooled.objects.count() == 1
    jobs.merge()
    assert Device.objects.count() == 2 and Spooled.objects.count() == 0
    assert Event.objects.filter(action="agent.enrolled", host="cmp1").count() == 1


def test_P1_an_unchanged_report_costs_no_statement(
    agent: WireAgent, gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    with agent.connect() as socket:
        ask(socket, make_report(make_card(1)))
    jobs.merge()
    with agent.connect() as socket:
        assert agent.welcome and agent.welcome.applied_hash == make_report(make_card(1)).hash
        monkeypatch.setattr(gateway._writer, "put", None)  # The gateway reaches the database only through this queue.
        assert ask(socket, make_report(make_card(1), seq=2)) == wire.Ack(2, "Report")
    assert Spooled.objects.count() == 0


def test_an_agent_that_connects_with_another_node_name_is_told_that_no_report_is_applied(agent: WireAgent) -> None:
    with agent.connect() as socket:
        ask(socket, make_report(make_card(1)))
    jobs.merge()
    agent.node = "renamed"
    with agent.connect() as socket:
        assert agent.welcome and agent.welcome.applied_hash == ""
        assert ask(socket, make_report(make_card(1), seq=2)) == wire.Ack(2, "Report")
    assert Spooled.objects.count() == 1


def test_a_report_equal_to_an_earlier_one_is_stored_when_another_came_between(agent: WireAgent) -> None:
    with agent.connect() as socket:
        ask(socket, make_report(make_card(1)))
        jobs.merge()
        ask(socket, make_report(make_card(2), seq=2))
        ask(socket, make_report(make_card(1), seq=3))
    assert Spooled.objects.count() == 2
    jobs.merge()
    assert list(Device.objects.values_list("address", "state")) == [("0000:01:00.0", "inactive")]


def test_a_report_over_an_older_connection_does_not_count_as_applied_for_the_newer_one(agent: WireAgent) -> None:
    with agent.connect() as first:
        ask(first, make_report(make_card(1)))
        jobs.merge()
        with agent.connect() as second:
            ask(first, make_report(make_card(2), seq=2))
            ask(second, make_report(make_card(1), seq=3))
    jobs.merge()
    assert list(Device.objects.filter(state="inactive").values_list("address", flat=True)) == ["0000:01:00.0"]


def test_a_report_older_than_the_last_one_is_acknowledged_and_dropped(agent: WireAgent) -> None:
    with agent.connect() as socket:
        ask(socket, make_report(make_card(1), seq=5))
        assert ask(socket, make_report(seq=4)) == wire.Ack(4, "Report")
    assert Spooled.objects.count() == 1


def test_beats_are_acknowledged_and_renew_the_lease(agent: WireAgent) -> None:
    with agent.connect() as socket:
        assert ask(socket, wire.Beat(7)) == wire.Ack(7, "Beat")
        until(lambda: Lease.objects.filter(host__name="cmp1").exists())


def test_version_and_boot_id_of_the_hello_are_stored(agent: WireAgent) -> None:
    with agent.connect() as socket:
        socket.send(wire.encode_message(wire.Hello("9.9", "boot-1")))
        until(lambda: Agent.objects.filter(version="9.9", boot_id="boot-1", wire=wire.VERSIONS[0]).exists())


def test_L1_a_silent_host_becomes_stale_and_live_again_at_its_next_heartbeat(agent: WireAgent) -> None:
    with agent.connect() as socket:
        ask(socket, make_report(make_card(1)))
        until(lambda: Lease.objects.exists())
        jobs.merge()
        mark_stale_hosts()
        assert Host.objects.get().stale_since is None
        long_ago = datetime.now(UTC) - timedelta(seconds=31)

        def silent() -> bool:
            # Repeated, because the lease renewal by the Report may be written later.
            Lease.objects.update(seen_at=long_ago)
            mark_stale_hosts()
            return Host.objects.get().stale_since is not None

        until(silent)
        assert Device.objects.get().state == "inactive"
        ask(socket, wire.Beat(1))
        until(lambda: Lease.objects.get().seen_at > long_ago)
        mark_stale_hosts()
    assert Host.objects.get().stale_since is None
    told = Event.objects.filter(subject_type="host", action__in=["host.stale", "host.live"]).order_by("id")
    # The lease renewal by the Report may have made the host live once more in between, so there may be several pairs.
    assert [event.action for event in told] == ["host.stale", "host.live"] * (len(told) // 2)
    (was_live, stale), back = (event.changes["stale_since"] for event in list(told)[-2:])
    assert was_live is None and stale
    assert back == [stale, None]
    assert {(event.source, event.actor) for event in told} == {("system", "leases")}


@pytest.mark.parametrize(
    "data",
    [
        "{",
        "[]",
        '{"type":"Report"}',
        '{"type":"Report","epoch":-1,"seq":1,"hash":"x","drivers":[]}',
        "[" * 100_000,
    ],
    ids=["cut", "list", "fields", "negative", "deep"],
)
def test_a_malformed_message_is_refused_closes_the_connection_and_is_recorded_once(agent: WireAgent, data: str) -> None:
    for _ in range(2):
        with agent.connect() as socket:
            refusal = ask(socket, data)
            assert isinstance(refusal, wire.Refuse) and refusal.code == "malformed" and refusal.reason
            assert is_closed(socket)
    until(lambda: Event.objects.filter(action="agent.refused", host="cmp1").exists())
    assert Event.objects.filter(action="agent.refused").count() == 1


def test_a_report_with_a_nul_character_is_refused_and_other_hosts_are_served(agent: WireAgent, port: int) -> None:
    other = WireAgent(port, host="cmp2", token=make_join_secret("cmp2"))
    with agent.connect() as bad, other.connect() as good:
        message = wire.encode_message(make_report(make_card(1, model="nul"))).replace("nul", "n\\u0000l")
        assert isinstance(ask(bad, message), wire.Refuse)
        assert ask(good, make_report(make_card(1))) == wire.Ack(1, "Report")


def test_unknown_types_and_fields_are_ignored_counted_and_recorded_once_per_connection(agent: WireAgent) -> None:
    agent.versions = ("cyborg.agent.2", *wire.VERSIONS)
    before = dict(metrics.event_counts)
    with agent.connect() as socket:
        socket.send('{"type":"Hello","agent_version":"9.1","boot_id":"b"}')
        socket.send('{"type":"Prophecy","when":"soon"}')
        assert ask(socket, '{"type":"Beat","seq":3,"mood":"fine"}') == wire.Ack(3, "Beat")
        assert ask(socket, '{"type":"Beat","seq":4,"mood":"fine","sky":"blue"}') == wire.Ack(4, "Beat")
        until(Event.objects.filter(action="agent.refused").exists)
    assert metrics.event_counts["unknown_types"] - before["unknown_types"] == 1
    assert metrics.event_counts["unknown_fields"] - before["unknown_fields"] == 3
    event = Event.objects.get(action="agent.refused")
    assert event.changes == {"code": [None, "unknown"], "count": [None, 1]}
    assert event.reason == (
        "not refused: the agent stays connected, but a part of its messages was ignored (unknown types). If its release"
        " (9.1) is newer than the conductor's, upgrade the conductor."
    )


def test_a_second_connection_of_a_host_supersedes_the_first(agent: WireAgent) -> None:
    with agent.connect() as first, agent.connect() as second:
        second.send(wire.encode_message(wire.Hello("1", "")))
        refusal = wire.decode_from_gateway(first.recv(timeout=10))
        assert isinstance(refusal, wire.Refuse) and refusal.code == "superseded"
        assert ask(second, wire.Beat(1)) == wire.Ack(1, "Beat")


def test_X1_an_agent_without_valid_key_token_and_fresh_challenge_is_refused(
    agent: WireAgent, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.connect().close()
    used = agent.challenge()
    header = agent.credential(used)
    agent.connect(header).close()
    assert agent.connect_refused(header) == (401, "challenge")
    assert agent.connect_refused("") == (401, "credential")
    assert agent.connect_refused(agent.credential(agent.challenge(), host="cmp2")) == (401, "signature")
    assert WireAgent(port).connect_refused() == (403, "not-enrolled")
    assert WireAgent(port, token="guess").connect_refused() == (403, "token-unknown")
    assert WireAgent(port, host="cmp9", token=make_join_secret("cmp2")).connect_refused() == (403, "token-host")
    assert WireAgent(port, token=agent.token).connect_refused() == (403, "token-used")
    assert WireAgent(port, token=agent.token, versions=("cyborg.agent.0",)).connect_refused() == (403, "version")
    late = make_join_secret("cmp3")
    JoinToken.objects.filter(host_name="cmp3").update(expires_at=datetime.now(UTC))
    assert WireAgent(port, host="cmp3", token=late).connect_refused() == (403, "token-expired")
    moved = WireAgent(port, host="cmp7", key=agent.key)
    assert moved.connect_refused() == (403, "not-enrolled")
    # A base64 decoder accepts several texts for the same bytes: a barred key must not be accepted in another spelling.
    renamed = agent.credential(agent.challenge(), public_key=agent.public_key[:-1] + "\n=")
    assert agent.connect_refused(renamed) == (401, "signature")
    monkeypatch.setattr("agents.authentication.CHALLENGE_LIFETIME_S", -1.0)
    assert agent.connect_refused() == (401, "challenge"), "a challenge does not last"
    assert Host.objects.count() == 1


def test_a_challenge_is_answered_to_get_only(gateway: AgentGateway, port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", wire.CHALLENGE_PATH)
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["code"]) == (405, "method")
    connection.close()


def test_a_token_can_be_reused_by_its_key_and_a_new_token_enrols_a_new_key(agent: WireAgent, port: int) -> None:
    agent.connect().close()
    agent.connect().close()
    WireAgent(port, token=make_join_secret()).connect().close()
    assert agent.connect_refused() == (403, "token-expired")
    assert Agent.objects.count() == 1 and Host.objects.count() == 1


def test_the_welcome_names_the_highest_epoch_of_the_host(agent: WireAgent) -> None:
    agent.epoch = 90
    with agent.connect() as socket:
        ask(socket, make_report(make_card(1), epoch=90))
        until(lambda: Lease.objects.filter(epoch=90).exists())
    agent.epoch = 3
    agent.connect().close()
    assert agent.welcome and agent.welcome.epoch == 90


def test_X5_a_report_that_the_database_refuses_affects_only_its_own_host(agent: WireAgent, port: int) -> None:
    other = WireAgent(port, host="cmp2", token=make_join_secret("cmp2"))
    with agent.connect() as bad, other.connect() as good:
        ask(bad, make_report(make_card(1)))
        ask(good, make_report(make_card(2)))  # another card, because a provider belongs to one host
    Spooled.objects.filter(host__name="cmp1").update(payload=Replace(F("payload"), Value("1044"), Value("\\u0000")))
    jobs.merge()
    assert list(Device.objects.values_list("host__name", flat=True)) == ["cmp2"]
    assert "cannot be stored" in Event.objects.get(action="report.refused", host="cmp1").reason
    assert Spooled.objects.count() == 0


def test_agents_get_503_while_the_database_is_away(
    agent: WireAgent, gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.gateway.asgi_app.ADMISSION_TIMEOUT_S", 0.05)
    # Jobs for the writer are never answered, as when PostgreSQL does not respond.
    monkeypatch.setattr(gateway._writer, "put", lambda job: None)
    assert agent.connect_refused() == (503, "database")
