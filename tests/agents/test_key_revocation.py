"""Tests of revocation, clones and key rotation over real WebSockets, as an attacker would try to evade them (X1)."""

from __future__ import annotations

import asyncio
import contextlib
import socket as sockets
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.db import DataError
from websockets.sync.client import ClientConnection

from accelerators.models import Device, Event
from agents import authentication, credentials, jobs, key_revocation, wire
from agents.gateway.asgi_app import AgentGateway
from agents.host.connection.http import GatewayEndpoint
from agents.host.connection.identity import load_or_create_keys
from agents.host.connection.link import GatewayLink
from agents.host.journal.journal import open_journal
from agents.models import Agent
from cyborgweb.asgi import AgentApplication
from cyborgweb.server import tls
from cyborgweb.settings.keys import Keys
from tests.agents.conftest import GatewaySlot
from tests.agents.gateway.test_gateway import make_report
from tests.agents.host.fake_gateway import QUICK
from tests.support.background import running_beside
from tests.support.reports import make_card
from tests.support.webserver import serving, until
from tests.support.wireagent import ANSWER_S, WireAgent, ask, is_closed, make_join_secret

pytestmark = pytest.mark.django_db(transaction=True)


@contextlib.contextmanager
def run_another_gateway(around: Callable[[AgentGateway], Any] | None = None, **options: Any) -> Iterator[int]:
    """Run a gateway in a web server of its own; yield its port."""
    own = GatewaySlot()
    own.gateway = AgentGateway(Keys(lease_flush_s=0.05))
    with serving(around(own.gateway) if around else own, **options) as port:
        yield port
    own.gateway.stop()


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agents.gateway.writer.CHANGES_POLL_S", 0.05)
    monkeypatch.setattr("agents.gateway.sessions.PROBE_TIMEOUT_S", 0.2)


@pytest.fixture
def gateway(gateway_slot: GatewaySlot) -> Iterator[AgentGateway]:
    gateway_slot.gateway = AgentGateway(Keys(lease_flush_s=0.05))
    yield gateway_slot.gateway
    gateway_slot.gateway.stop()


@pytest.fixture
def agent(gateway: AgentGateway, gateway_slot: GatewaySlot) -> WireAgent:
    return WireAgent(gateway_slot.port, token=make_join_secret())


def receive_message(socket: ClientConnection, kind: type) -> Any:
    """Skip other messages until one of this kind arrives; return it."""
    while not isinstance(message := wire.decode_from_gateway(socket.recv(timeout=ANSWER_S)), kind):
        pass
    return message


def receive_refusal_code(socket: ClientConnection) -> str:
    """Return the code of the gateway's refusal, and check that the connection is closed."""
    code: str = receive_message(socket, wire.Refuse).code
    assert is_closed(socket)
    return code


def answer_probe(socket: ClientConnection) -> None:
    socket.send(wire.encode_message(wire.Alive(receive_message(socket, wire.Probe).nonce)))


def sign_new_key(agent: WireAgent, key: Ed25519PrivateKey) -> wire.NewKey:
    new = credentials.encode_public_key(key.public_key())
    data = credentials.build_rotation_bytes(agent.host, agent.public_key, new, agent.fingerprint)
    return wire.NewKey(new, credentials.sign_data(agent.key, data), credentials.sign_data(key, data))


def test_X1_revoking_closes_the_connection_and_refuses_the_agent_from_then_on(
    agent: WireAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The writer never polls here, so the notification must be enough.
    monkeypatch.setattr("agents.gateway.writer.CHANGES_POLL_S", 1000.0)
    with agent.connect_and_say_hello() as socket:
        ask(socket, make_report(make_card(1)))
        assert key_revocation.revoke_agent(key_revocation.find_agent("cmp1"), "olga", "stolen from the rack")
        told = receive_message(socket, wire.Refuse)
        assert (told.code, is_closed(socket)) == ("revoked", True)
        assert "stolen from the rack" in told.reason
    assert agent.connect_refused() == (403, "token-expired")
    agent.token = ""
    assert agent.connect_refused() == (403, "revoked")
    jobs.merge()
    assert Device.objects.count() == 1, "what was acknowledged is not lost"
    assert not key_revocation.revoke_agent(key_revocation.find_agent("cmp1"), "olga", "again")
    event = Event.objects.get(action="agent.revoked")
    assert (event.host, event.actor, event.changes) == ("cmp1", "olga", {"barred": [None, "revoked"]})


def test_X1_revoking_closes_the_connection_although_the_notification_is_lost(
    agent: WireAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerators.runtime.pubsub.publish", lambda *_: None)
    with agent.connect() as socket:
        key_revocation.revoke_agent(key_revocation.find_agent("cmp1"), "t", "")
        assert receive_refusal_code(socket) == "revoked"


def test_a_revoked_host_can_join_again_only_with_a_new_token_and_a_new_key(agent: WireAgent) -> None:
    agent.connect().close()
    key_revocation.revoke_agent(key_revocation.find_agent("cmp1"), "t", "")
    made_by_a_start = authentication.create_join_token(
        "cmp1", address="http://x", hours=1, created_by=authentication.AUTOMATIC_CREATOR
    )
    fresh = replace(agent, key=Ed25519PrivateKey.generate())
    fresh.token = credentials.parse_join_string(made_by_a_start).secret
    assert fresh.connect_refused() == (403, "revoked"), "no person has decided this"
    agent.token = fresh.token = make_join_secret()
    assert agent.connect_refused() == (403, wire.CODE_KEY_BARRED)
    assert WireAgent(agent.port, "cmp2", key=agent.key, token=make_join_secret("cmp2")).connect_refused() == (
        403,
        wire.CODE_KEY_BARRED,
    )
    fresh.connect().close()
    agent.token = ""
    assert agent.connect_refused() == (403, "not-enrolled")
    assert Agent.objects.get().barred == ""


def test_enrolling_a_new_key_closes_the_connection_of_the_former_key(agent: WireAgent) -> None:
    with run_another_gateway() as other, agent.connect_and_say_hello() as socket:
        WireAgent(other, token=make_join_secret()).connect().close()
        assert receive_refusal_code(socket) == "replaced"


def test_two_live_agents_with_one_key_are_both_refused_until_a_person_admits_the_host(agent: WireAgent) -> None:
    copy = replace(agent, epoch=2, boot_id="boot-2")
    with agent.connect_and_say_hello() as first, copy.connect_and_say_hello() as second:
        answer_probe(first)
        for socket in (first, second):
            told = receive_message(socket, wire.Refuse)
            assert (told.code, is_closed(socket)) == ("clone", True)
            assert "two machines use the key of cmp1" in told.reason
    agent.token = ""
    until(lambda: Agent.objects.get().barred)
    assert agent.connect_refused() == (403, "clone")
    event = Event.objects.get(action="agent.clone")
    assert event.changes["boot_id"] == ["boot-1", "boot-2"]
    assert event.changes["address"] == ["127.0.0.1", "127.0.0.1"]
    assert key_revocation.lift_clone_bar(key_revocation.find_agent("cmp1"), "olga")
    with agent.connect_and_say_hello() as socket:
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")


@pytest.mark.slow
def test_an_agent_that_reconnects_after_a_restart_or_reboot_is_not_taken_for_a_clone(
    agent: WireAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old connection still looks open after a sudden end of the agent, and its last messages arrive late."""
    changes: tuple[dict[str, Any], ...] = ({"epoch": 2}, {"epoch": 3, "boot_id": "boot-2"})
    dead = agent.connect_and_say_hello()
    for change in changes:
        agent = replace(agent, **change)
        again = agent.connect_and_say_hello()
        receive_message(dead, wire.Probe)
        dead.send(wire.encode_message(wire.Beat(1)))
        dead.send(wire.encode_message(wire.Alive("guessed")))
        assert ask(again, wire.Beat(2)) == wire.Ack(2, "Beat")
        assert receive_refusal_code(dead) == "superseded"
        dead = again
    monkeypatch.setattr("agents.gateway.sessions.PROBE_TIMEOUT_S", 1000.0)
    with replace(agent, epoch=4).connect_and_say_hello() as last:
        receive_message(dead, wire.Probe)
        dead.close()  # Closing the connection answers the probe as well.
        assert ask(last, wire.Beat(2)) == wire.Ack(2, "Beat")
    assert Agent.objects.get().barred == ""


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.slow
def test_a_clone_at_another_gateway_is_refused_if_the_first_agent_is_alive(agent: WireAgent, alive: bool) -> None:
    with run_another_gateway() as other, agent.connect_and_say_hello() as first:
        until(lambda: Agent.objects.filter(boot_id="boot-1").exists())
        with replace(agent, port=other, epoch=2, boot_id="boot-2").connect_and_say_hello() as second:
            if alive:
                answer_probe(first)
                assert (receive_refusal_code(first), receive_refusal_code(second)) == ("clone", "clone")
            else:
                assert receive_refusal_code(first) == "superseded"
                assert ask(second, wire.Beat(1)) == wire.Ack(1, "Beat")


def test_a_requested_key_rotation_replaces_the_key_and_the_connection_goes_on(
    agent: WireAgent, caplog: pytest.LogCaptureFixture
) -> None:
    key = Ed25519PrivateKey.generate()
    agent.connect().close()
    key_revocation.request_key_rotation(key_revocation.find_agent("cmp1"), "olga")  # The agent is not connected now.
    with agent.connect_and_say_hello() as socket:
        receive_message(socket, wire.Rotate)
        assert ask(socket, sign_new_key(agent, key)) == wire.Ack(0, "NewKey")
        assert ask(socket, make_report(make_card(1))) == wire.Ack(1, "Report"), "the connection goes on"
        again = Ed25519PrivateKey.generate()
        key_revocation.request_key_rotation(key_revocation.find_agent("cmp1"), "olga")
        receive_message(socket, wire.Rotate)
        assert ask(socket, sign_new_key(replace(agent, key=key), again)) == wire.Ack(0, "NewKey")
    assert agent.connect_refused() == (403, "token-expired"), "the former key's token went with it"
    replace(agent, key=again, token="").connect().close()
    assert Event.objects.filter(action="agent.rotated").count() == 2
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == [], "no task has failed"


@pytest.mark.slow
def test_an_unrequested_or_forged_new_key_is_refused(agent: WireAgent) -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    own, strange = sign_new_key(agent, key), sign_new_key(replace(agent, key=other), other)
    with agent.connect_and_say_hello() as socket:
        socket.send(wire.encode_message(own))
        assert receive_refusal_code(socket) == "rotation", "nobody asked for it"
    key_revocation.request_key_rotation(key_revocation.find_agent("cmp1"), "olga")
    for forged in ("signature", "proof", "public_key"):
        with agent.connect_and_say_hello() as socket:
            receive_message(socket, wire.Rotate)
            values = {name: getattr(strange if name == forged else own, name) for name in own.__struct_fields__}
            socket.send(wire.encode_message(wire.NewKey(**values)))
            assert receive_refusal_code(socket) == "rotation", forged
    neighbour = WireAgent(agent.port, host="cmp2", node="cmp2", token=make_join_secret("cmp2"))
    neighbour.connect().close()
    with agent.connect_and_say_hello() as socket:
        receive_message(socket, wire.Rotate)
        socket.send(wire.encode_message(sign_new_key(agent, neighbour.key)))
        assert receive_refusal_code(socket) == "rotation", "another host has this key"
    assert Agent.objects.get(host__name="cmp1").public_key == agent.public_key


def test_a_new_key_that_the_database_cannot_store_is_refused_with_the_reason(
    agent: WireAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise DataError("no such row")

    monkeypatch.setattr(key_revocation, "replace_key", fail)
    agent.connect().close()
    key_revocation.request_key_rotation(key_revocation.find_agent("cmp1"), "olga")
    with agent.connect_and_say_hello() as socket:
        receive_message(socket, wire.Rotate)
        socket.send(wire.encode_message(sign_new_key(agent, Ed25519PrivateKey.generate())))
        assert receive_refusal_code(socket) == "database"


def test_truncated_frames_close_only_their_own_connection(agent: WireAgent, gateway: tuple[AgentGateway, int]) -> None:
    upgrade = (
        f"GET {wire.AGENT_PATH} HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
        f"Sec-WebSocket-Protocol: {wire.VERSIONS[0]}\r\nAuthorization: {{}}\r\n\r\n"
    )
    for frame in (b"\x81", b"\x81\xfe\x7f", b"\x81\x85\0\0\0\0{", b"\x01\x81\0\0\0\0{", b"\xff\xff\xff"):
        with sockets.create_connection(("127.0.0.1", agent.port), ANSWER_S) as raw:
            raw.sendall(upgrade.format(agent.credential(agent.challenge())).encode())
            assert b" 101 " in raw.recv(4096)
            until(lambda: gateway.sessions.by_host)
            raw.sendall(frame)
        until(lambda: not gateway.sessions.by_host)
    with agent.connect_and_say_hello() as socket:
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")


@pytest.mark.slow
def test_an_agent_over_tls_is_admitted_only_with_a_signature_of_the_pinned_certificate(tmp_path: Path) -> None:
    keys = Keys(state_dir=str(tmp_path))
    pin, pem = tls.read_fingerprint(keys), tmp_path / tls.CERTIFICATE_FILE
    assert pem.stat().st_mode & 0o777 == 0o600
    blind = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    with run_another_gateway(lambda made: AgentApplication(made, pin), ssl_certfile=pem, ssl_keyfile=pem) as port:
        agent = WireAgent(port, token=make_join_secret(), tls=blind, fingerprint=pin)
        with agent.connect_and_say_hello() as socket:
            assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
        assert replace(agent, fingerprint="ab" * 32).connect_refused() == (401, "signature"), (
            "relayed from another server"
        )
    with run_another_gateway() as port:
        assert replace(agent, port=port, tls=None).connect_refused() == (401, "signature"), "it meant a TLS listener"


@pytest.mark.slow
def test_the_real_agent_rotates_its_key_and_rejoins_after_revocation_over_tls(tmp_path: Path) -> None:
    """The real link joins with a pinned certificate, rotates its key, is revoked, and joins again with a new token."""
    keys = Keys(state_dir=str(tmp_path / "conductor"))
    pin, pem = tls.read_fingerprint(keys), tmp_path / "conductor" / tls.CERTIFICATE_FILE
    (tmp_path / "host").mkdir()
    with run_another_gateway(lambda made: AgentApplication(made, pin), ssl_certfile=pem, ssl_keyfile=pem) as port:
        with run_link(tmp_path / "host", GatewayEndpoint(f"https://127.0.0.1:{port}", pin, make_join_secret())):
            before = until(lambda: Agent.objects.exclude(boot_id="").first()).public_key
            key_revocation.request_key_rotation(key_revocation.find_agent("cmp1"), "olga")
            after = until(lambda: Agent.objects.exclude(public_key=before).first()).public_key
            until(lambda: stored_keys(tmp_path / "host") == [after])
            key_revocation.revoke_agent(key_revocation.find_agent("cmp1"), "olga", "")
            until(lambda: Event.objects.filter(action="agent.refused", reason__contains="revoked").exists())
        with run_link(tmp_path / "host", GatewayEndpoint(f"https://127.0.0.1:{port}", pin, make_join_secret())):
            until(lambda: Agent.objects.filter(barred="").exclude(public_key=after).exists())
            until(lambda: stored_keys(tmp_path / "host") == [Agent.objects.get().public_key])


def stored_keys(directory: Path) -> list[str]:
    """Return the public keys on the host's disk: the current one and, during a rotation, the next one."""
    ring = load_or_create_keys(directory, "cmp1", "cmp1")
    return [key.public_key for key in (ring.current_identity, ring.next_identity) if key]


@contextlib.contextmanager
def run_link(directory: Path, endpoint: GatewayEndpoint) -> Iterator[None]:
    """Run the agent's link in a thread with an event loop of its own; stop it at the end."""

    async def run(over: threading.Event) -> None:
        journal = open_journal(directory, "cmp1")
        link = GatewayLink(
            journal,
            load_or_create_keys(directory, "cmp1", "cmp1"),
            endpoint,
            wire.Hello("1", "b"),
            lambda _: None,
            QUICK,
        )
        work = asyncio.ensure_future(link.run())
        await asyncio.to_thread(over.wait)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        journal.close()

    with running_beside(lambda over: asyncio.run(run(over))):
        yield
