"""Tests that the gateway limits what one hostile or broken agent can cost: other hosts are served meanwhile (X5)."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from django.db import OperationalError, connection
from django.test.utils import CaptureQueriesContext
from websockets.exceptions import ConnectionClosed, InvalidStatus

from accelerators.models import Event, Host
from agents import authentication, wire
from agents.gateway.asgi_app import AgentGateway
from agents.gateway.rejections import MAX_CLAIMS, MAX_TALLIES, RefusalCounter
from agents.gateway.writer import CommandJob, JobWriter
from agents.models import Agent, Lease, Spooled
from cyborgweb.settings.keys import Keys
from tests.agents.conftest import GatewaySlot
from tests.agents.gateway.test_gateway import make_report
from tests.support.reports import make_card
from tests.support.webserver import until
from tests.support.wireagent import WireAgent, ask, is_closed, make_join_secret

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def gateway() -> Iterator[AgentGateway]:
    made = AgentGateway(Keys(lease_flush_s=0.05, agent_connections=8))
    yield made
    made.stop()


@pytest.fixture
def port(gateway: AgentGateway, gateway_slot: GatewaySlot) -> int:
    gateway_slot.gateway = gateway
    return gateway_slot.port


@pytest.fixture
def agent(port: int) -> WireAgent:
    return WireAgent(port, token=make_join_secret())


def check_another_host_is_served(agent: WireAgent) -> None:
    """Check that another host can connect and that its report is acknowledged."""
    other = WireAgent(agent.port, host="cmp2", node="cmp2", token=make_join_secret("cmp2"))
    with other.connect_and_say_hello() as socket:
        assert ask(socket, make_report(make_card(1))) == wire.Ack(1, "Report")


def test_a_host_name_with_a_nul_character_is_refused_as_credential(agent: WireAgent) -> None:
    with agent.connect():
        for forged in ("x\0y", "\0"):
            assert WireAgent(agent.port, host=forged).connect_refused() == (401, "credential")
        until(lambda: Event.objects.filter(action="agent.refused").exists())
        check_another_host_is_served(agent)


def test_an_agent_with_the_node_name_of_another_host_is_refused(agent: WireAgent) -> None:
    with agent.connect():
        newcomer = WireAgent(agent.port, host="cmp2", node="cmp1", token=make_join_secret("cmp2"))
        assert newcomer.connect_refused() == (403, "foreign-node")
        assert list(Host.objects.values_list("name", "node")) == [("cmp1", "cmp1")]
        until(lambda: Event.objects.filter(action="agent.refused").exists())
        assert "belongs to host cmp1" in Event.objects.get(action="agent.refused").reason
        newcomer.node = "cmp2"
        newcomer.connect().close()
        newcomer.node, newcomer.epoch = "cmp1", 2
        assert newcomer.connect_refused() == (403, "foreign-node"), "an enrolled host cannot take the name either"
        assert Host.objects.get(name="cmp2").node == "cmp2"


def test_an_unterminated_deeply_nested_credential_is_refused(agent: WireAgent) -> None:
    header = "Cyborg-Agent " + base64.urlsafe_b64encode(b'{"x":' + b"[" * 5000).decode()
    with pytest.raises(InvalidStatus) as refused:
        agent.connect(header)
    assert refused.value.response.status_code == 401


def test_an_unstorable_hello_is_refused_and_leases_of_other_hosts_are_renewed(agent: WireAgent) -> None:
    agent.boot_id = "a\0b"
    with agent.connect_and_say_hello() as socket:
        refusal = wire.decode_from_gateway(socket.recv(timeout=10))
        assert isinstance(refusal, wire.Refuse) and refusal.code == "malformed"
    check_another_host_is_served(agent)
    until(lambda: Lease.objects.filter(host__name="cmp2").exists())


def test_a_message_that_is_not_utf8_is_refused_and_closes_the_connection(agent: WireAgent) -> None:
    said = wire.encode_message(make_report(make_card(1))).encode()
    with agent.connect() as socket:
        socket.send(said[:-1] + b',"more":"\xff"}')
        refusal = wire.decode_from_gateway(socket.recv(timeout=10))
        assert isinstance(refusal, wire.Refuse) and refusal.code == "malformed" and is_closed(socket)


def test_silent_connections_are_closed_and_make_room_for_other_hosts(
    agent: WireAgent, gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    sockets = [agent.connect() for _ in range(7)]
    until(lambda: gateway.open_connections <= 5)
    oldest = wire.decode_from_gateway(sockets[1].recv(timeout=10))
    assert isinstance(oldest, wire.Refuse) and oldest.code == "superseded" and is_closed(sockets[1])
    check_another_host_is_served(agent)
    monkeypatch.setattr("agents.gateway.asgi_app.FIRST_MESSAGE_TIMEOUT_S", 0.1)
    with agent.connect() as silent:
        refusal = wire.decode_from_gateway(silent.recv(timeout=10))
        assert isinstance(refusal, wire.Refuse) and refusal.code == "silent" and is_closed(silent)
    for socket in sockets:
        socket.close()


def test_an_epoch_far_in_the_future_is_refused(agent: WireAgent, gateway: AgentGateway) -> None:
    with agent.connect() as socket:
        refusal = ask(socket, make_report(make_card(1), epoch=2**53))
        assert isinstance(refusal, wire.Refuse) and refusal.code == "epoch"
    agent.epoch = 2**53
    assert agent.connect_refused() == (403, "epoch")
    # The host's clock is wrong, but by less than the leap that is allowed.
    agent.epoch = int(time.time()) + authentication.MAX_EPOCH_LEAP // 2
    agent.connect().close()
    until(lambda: Lease.objects.filter(epoch=agent.epoch).exists())  # The first flush stores it.
    assert not Spooled.objects.exists()


@pytest.mark.slow
def test_samples_of_a_second_connection_do_not_replace_those_of_the_active_one(
    agent: WireAgent, gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = wire.encode_message(wire.Samples((wire.DeviceLoad("pci:0", {"power_watts": 1.0}),)))
    with agent.connect_and_say_hello() as first, agent.connect() as second:
        host = Host.objects.get().id

        def known() -> Any:
            first.send(said)
            return list(gateway.sample_cache.iterate_samples([host]))

        until(known)
        assert ask(first, wire.Beat(1)) == wire.Ack(1, "Beat")  # All its samples have been handled.
        (before,) = gateway.sample_cache.iterate_samples([host])
        accepted = list[str]()
        accept = gateway.sample_cache.accept_message
        monkeypatch.setattr(
            gateway.sample_cache, "accept_message", lambda *args: accepted.append("samples") or accept(*args)
        )
        second.send(said.replace("1.0", "2.0"))
        # Unlike samples, a Beat lets this connection of the same agent process replace the first one.
        second.send(wire.encode_message(wire.Beat(1)))
        assert wire.decode_from_gateway(second.recv(timeout=10)) == wire.Ack(1, "Beat")
        assert not accepted, "the samples that came before the Beat"
        assert [one[2] for one in gateway.sample_cache.iterate_samples([host])] in ([], [before[2]])


def list_refusals() -> list[Event]:
    return list(Event.objects.filter(action="agent.refused").order_by("id"))


def test_refusals_of_many_hosts_are_recorded_by_one_statement() -> None:
    refusals = RefusalCounter()
    for number in range(2 * MAX_TALLIES):
        refusals.add(f"host-{number}", "foreign-node", "unknown\0")
    with CaptureQueriesContext(connection) as captured:
        refusals.flush()
        refusals.flush()
    assert len([one for one in captured if "INSERT" in one["sql"]]) == 1
    events = Event.objects.filter(action="agent.refused")
    assert events.count() == MAX_TALLIES + 1
    assert events.get(host="(many)").changes["count"] == [None, MAX_TALLIES]


def test_forged_handshakes_write_no_event_under_a_hosts_name(agent: WireAgent, gateway: AgentGateway) -> None:
    agent.connect().close()
    forged = WireAgent(agent.port, host="cmp1")
    for number in range(12):
        stranger = WireAgent(agent.port, host=f"forged-{number}\n", node=f"forged-{number}")
        assert stranger.connect_refused() == (403, "not-enrolled")
    assert forged.connect_refused() == (403, "not-enrolled"), "the host exists, but the key is not its own"
    assert WireAgent(agent.port, host="cmp1", token="of-nobody").connect_refused() == (403, "token-unknown")
    until(lambda: {one.changes["code"][1] for one in list_refusals()} == {"not-enrolled", "token-unknown"})
    assert {one.host for one in list_refusals()} == {"(unknown)"}
    assert list_refusals()[0].changes["addresses"] == [None, "127.0.0.1"]
    assert list_refusals()[0].changes["claimed"][1].startswith("forged-0")


def test_a_refused_host_that_proved_its_name_is_recorded_under_it(agent: WireAgent) -> None:
    agent.connect().close()
    agent.host = "cmp2"
    assert agent.connect_refused() == (403, "token-host"), "the key and the token are those of cmp1"
    joiner = WireAgent(agent.port, host="cmp3", token=make_join_secret("cmp4"))
    assert joiner.connect_refused() == (403, "token-host")
    until(lambda: len(list_refusals()) == 2)
    assert {(one.host, one.changes["code"][1]) for one in list_refusals()} == {
        ("cmp1", "token-host"),
        ("cmp4", "token-host"),
    }
    assert not any("claimed" in one.changes for one in list_refusals())


@pytest.mark.parametrize(
    ("pause_s", "most"), [(10.0, 30), (61.0, 30), (3601.0, 24)], ids=["flood", "each minute", "each hour"]
)
def test_a_client_causes_at_most_30_events_a_day_and_code(
    monkeypatch: pytest.MonkeyPatch, pause_s: float, most: int
) -> None:
    now, written = [1000.0], []
    # Not `time.monotonic` itself: the event loop of the file's web server would wait until the time set here.
    monkeypatch.setattr("agents.gateway.rejections.time", SimpleNamespace(monotonic=lambda: now[0]))
    refusals = RefusalCounter()
    monkeypatch.setattr(refusals, "_record_events", lambda due: written.append(dict(due)))
    added = 0
    while now[0] < 1000 + 86_400:
        for number in range(20):
            refusals.add("", "challenge", "unknown", claimed=f"forged-{now[0]}-{number}")
        added += 20
        refusals.flush()
        now[0] += pause_s
        refusals.flush()
    assert 20 <= len(written) <= most
    now[0] += 3600
    refusals.flush()
    assert sum(sum(due.values()) for due in written) == added, "every refusal is counted in an event at last"
    now[0] += 7 * 3600
    refusals.flush()
    assert not refusals._tallies


def test_an_event_about_unproven_clients_names_only_the_first_ten(monkeypatch: pytest.MonkeyPatch) -> None:
    refusals = RefusalCounter()
    for number in range(1000):
        refusals.add("", "challenge", "unknown", claimed=f"forged-{number}\0" * 100, address=f"10.0.0.{number}")
    refusals.flush()
    (event,) = list_refusals()
    assert event.changes["count"] == [None, 1000]
    assert len(event.changes["addresses"][1].split(", ")) == MAX_CLAIMS
    assert len(event.changes["claimed"][1].split(", ")) == MAX_CLAIMS and len(event.changes["claimed"][1]) < 2600


def test_the_writer_goes_on_after_an_unexpected_exception(
    agent: WireAgent, gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail_once(writer: JobWriter) -> None:
        """Let the next batch of this thread fail."""
        served = writer._process_batch

        def fail(batch: Any) -> None:
            writer._process_batch = served  # type: ignore[method-assign]
            raise RuntimeError("a defect")

        writer._process_batch = fail  # type: ignore[method-assign]

    monkeypatch.setattr("agents.gateway.writer.ERROR_PAUSE_S", 0.01)
    with agent.connect_and_say_hello() as socket:
        assert ask(socket, make_report(make_card(1))) == wire.Ack(1, "Report")
        fail_once(gateway._report_writer)
        refusal = ask(socket, make_report(make_card(2), seq=2))
        assert isinstance(refusal, wire.Refuse) and refusal.code == "database"
        fail_once(gateway._writer)
        assert WireAgent(agent.port, host="cmp3", node="cmp3", token=make_join_secret("cmp3")).connect_refused() == (
            503,
            "database",
        )
    until(lambda: "a defect" in caplog.text)  # The error is logged after the waiting jobs were answered.
    check_another_host_is_served(agent)


@pytest.mark.slow
def test_the_writer_queue_stays_short_during_a_database_outage(
    agent: WireAgent, gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agents.gateway.asgi_app.PROGRESS_INTERVAL_S", 0.01)
    other = WireAgent(agent.port, host="cmp2", node="cmp2", token=make_join_secret("cmp2"))
    with agent.connect_and_say_hello() as socket:
        assert ask(socket, make_report(make_card(1))) == wire.Ack(1, "Report")
        monkeypatch.setattr(
            "agents.gateway.asgi_app.ADMISSION_TIMEOUT_S", 0.1
        )  # From here on every admission times out.
        writer, served = gateway._writer, gateway._writer._process_batch

        def away(_: Any) -> None:
            raise OperationalError("the database is away")

        writer._process_batch = away  # type: ignore[assignment,method-assign]
        for number in range(5):
            assert other.connect_refused() == (503, "database")
            for percent in range(20):
                socket.send(wire.encode_message(wire.Progress(number, percent)))
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
        until(lambda: writer._jobs.empty())

        def held() -> list[Any]:
            return [*writer._other_jobs, *writer._urgent_reports, *writer._normal_reports]

        # The writer drops the admission of a refused agent before its next try, which comes after at most 2 s.
        until(lambda: (jobs := held()) and len(jobs) <= 6 and all(isinstance(job, CommandJob) for job in jobs))
        writer._process_batch = served  # type: ignore[method-assign]
        until(lambda: not writer._other_jobs)
    assert Agent.objects.filter(host__name="cmp2").count() == 0


def test_an_agent_that_disconnects_before_the_welcome_leaves_no_session_and_no_error(
    agent: WireAgent, gateway: AgentGateway, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def gone(*_: Any) -> None:
        raise RuntimeError("Expected ASGI message 'websocket.accept'")

    connect = gateway.serve_connection

    async def cut(scope: Any, receive: Any, send: Any, fingerprints: Any) -> None:
        async def lost(message: Any) -> None:
            await (gone if message["type"] == "websocket.send" else send)(message)

        await connect(scope, receive, lost, fingerprints)

    monkeypatch.setattr(gateway, "serve_connection", cut)
    with pytest.raises(ConnectionClosed):
        agent.connect()
    until(lambda: gateway.open_connections == 0)
    assert "Traceback" not in caplog.text and "Exception in ASGI" not in caplog.text
    monkeypatch.setattr(gateway, "serve_connection", connect)
    check_another_host_is_served(agent)


def test_a_command_with_a_payload_over_512_kib_is_malformed() -> None:
    longest = wire.Command(1, "id", "placement", 1.0, 1.0, payload="x" * 512 * 1024)
    assert wire.decode_from_gateway(wire.encode_message(longest)) == longest
    with pytest.raises(wire.MalformedMessageError, match=r"\$\.payload"):
        wire.decode_from_gateway(wire.encode_message(msgspec.structs.replace(longest, payload=longest.payload + "x")))


@pytest.mark.parametrize("decode", [wire.decode_from_agent, wire.decode_from_gateway])
def test_a_message_of_an_unknown_type_is_decoded_with_its_type_cut_to_64_characters(decode: Any) -> None:
    assert decode(json.dumps({"type": "Later" + "r" * 100, "seq": "x"})) == wire.UnknownMessage("Later" + "r" * 59)
    for name in (None, 7, ["Later"]):
        with pytest.raises(wire.MalformedMessageError):
            decode(json.dumps({"type": name}))
