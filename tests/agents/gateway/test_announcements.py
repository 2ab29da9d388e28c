"""The gateway tells agents of announced certificates, and stores which of them each agent has."""

from __future__ import annotations

import http.client
import json
import os
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.core.management import call_command
from websockets.sync.client import ClientConnection

from accelerators import conductor
from accelerators.models import Host
from agents import authentication, credentials, wire
from agents.certificates import encode_announcement, sign_announcement
from agents.gateway.asgi_app import AgentGateway
from agents.models import Agent
from cyborgweb.management.commands import agent_certificate
from cyborgweb.server import tls
from cyborgweb.settings.keys import Keys
from tests.support.webserver import until
from tests.support.wireagent import WireAgent, ask

KEY = Ed25519PrivateKey.generate()
PUBLIC_KEY = credentials.encode_public_key(KEY.public_key())
FIRST = sign_announcement(KEY, 1, "a" * 64, "b" * 64, 2**37)
SECOND = sign_announcement(KEY, 2, "b" * 64, "c" * 64, 2**37)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "agent-announcements"


@pytest.fixture
def gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AgentGateway]:
    monkeypatch.setattr("agents.gateway.announcements.CHECK_INTERVAL_S", 0.0)
    made = AgentGateway(Keys(state_dir=str(tmp_path), lease_flush_s=0.05, agent_announcement_key=PUBLIC_KEY))
    yield made
    made.stop()


def write(file: Path, *announcements: wire.CertificateAnnouncement) -> None:
    """Replace the file, as a deployment tool does."""
    new = file.with_suffix(".new")
    new.write_text("\n".join(map(encode_announcement, announcements)))
    os.replace(new, file)


def read_challenge(port: int) -> dict[str, object]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", wire.CHALLENGE_PATH)
    answer: dict[str, object] = json.loads(connection.getresponse().read())
    connection.close()
    return answer


def receive(socket: ClientConnection) -> wire.FromGateway | wire.UnknownMessage:
    return wire.decode_from_gateway(socket.recv(timeout=10))


def hello(newest: str) -> str:
    return wire.encode_message(wire.Hello("1", "boot-1", (), newest_certificate=newest))


@pytest.mark.django_db(transaction=True)
def test_agents_are_told_of_announcements_when_they_connect_and_when_the_file_changes(
    agent: WireAgent, file: Path
) -> None:
    with agent.connect() as socket:
        assert receive(socket) == wire.Certificates(PUBLIC_KEY, ()), "the key is known before there is an announcement"
        socket.send(hello(FIRST.replaces))
        write(file, FIRST)
        assert ask(socket, wire.Beat(1)) == wire.Ack(1, "Beat")
        assert receive(socket) == wire.Certificates(PUBLIC_KEY, (FIRST,))
        socket.send(hello(FIRST.fingerprint))
        until(lambda: Agent.objects.get().newest_certificate == FIRST.fingerprint)
        connected_at = Agent.objects.get().connected_at
        write(file, FIRST, SECOND)
        assert ask(socket, wire.Beat(2)) == wire.Ack(2, "Beat")
        assert receive(socket) == wire.Certificates(PUBLIC_KEY, (FIRST, SECOND))
        socket.send(hello(SECOND.fingerprint))
        until(lambda: Agent.objects.get().newest_certificate == SECOND.fingerprint)
        assert Agent.objects.get().connected_at == connected_at, "it is still the same connection"
        assert ask(socket, wire.Beat(3)) == wire.Ack(3, "Beat")
        assert ask(socket, wire.Beat(4)) == wire.Ack(4, "Beat"), "they are not sent again"


@pytest.mark.django_db(transaction=True)
def test_whoever_asks_for_a_challenge_gets_the_announcements(agent: WireAgent, file: Path) -> None:
    assert "announcements" not in read_challenge(agent.port)
    write(file, FIRST, SECOND)
    announcements = read_challenge(agent.port)["announcements"]
    assert announcements == [json.loads(encode_announcement(one)) for one in (FIRST, SECOND)]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("content", [b"no announcement", b"\xff", b"x" * 65_537])
def test_an_unusable_file_leaves_the_former_announcements(
    agent: WireAgent, file: Path, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    write(file, FIRST)
    before = read_challenge(agent.port)["announcements"]
    file.write_bytes(content)
    assert [read_challenge(agent.port)["announcements"] for _ in range(3)] == [before] * 3
    assert caplog.text.count("announcements of certificates cannot be used") == 1


@pytest.mark.django_db(transaction=True)
def test_a_file_by_which_agents_would_refuse_the_present_certificate_is_not_sent(
    agent: WireAgent, gateway: AgentGateway, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The clock of the machine where it was signed may be wrong."""
    gateway.announcements.own_fingerprint = FIRST.replaces
    write(file, sign_announcement(KEY, 1, FIRST.replaces, FIRST.fingerprint, both_until=1))
    assert "announcements" not in read_challenge(agent.port)
    assert "agents would refuse the present certificate" in caplog.text
    write(file, FIRST)
    assert "announcements" in read_challenge(agent.port)


@pytest.mark.django_db
def test_the_command_names_the_hosts_that_do_not_know_the_newest_announcement(
    tmp_path: Path, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = Keys(state_dir=str(tmp_path), agent_listen="127.0.0.1:9443", agent_announcement_key=PUBLIC_KEY)
    monkeypatch.setattr(agent_certificate, "get_keys", lambda: keys)
    present = tls.read_fingerprint(keys)
    announcement = sign_announcement(KEY, 1, present, "b" * 64, 2**37)
    for name, newest, barred, pin in (
        ("a", "b" * 64, "", "f"),
        ("b", present, "", "f"),
        ("c", "", "", "f"),
        ("d", "", "revoked", "f"),
        ("e", "", "", ""),
    ):
        with conductor.writing():
            host = Host.objects.create(name=name, node=name)
        Agent.objects.create(host=host, public_key=name, newest_certificate=newest, barred=barred, fingerprint=pin)

    def shown(*words: str) -> str:
        out = StringIO()
        call_command("agent_certificate", *words, stdout=out)
        return out.getvalue()

    assert "2 of 3 agents that pin a certificate know the key.\n  not c\n" in shown()
    write(file, announcement)
    told = shown()
    assert "1 of 3 agents that pin a certificate accept the certificate of announcement 1.\n  not b\n  not c\n" in told
    assert "Attention" not in told
    document = json.loads(shown("--json"))
    assert (document["agents"], document["without_newest"], document["problem"]) == (3, ["b", "c"], "")
    write(file, FIRST)
    assert "Attention: the announcements do not lead from the present certificate" in shown()
    write(file, sign_announcement(KEY, 1, present, "b" * 64, 1))
    assert "Attention: the time of the present certificate is over" in shown()
    made = shown("--new", str(tmp_path / "new.pem"))
    assert made.startswith("sha256:") and made.strip() != f"sha256:{document['fingerprint']}"


@pytest.mark.django_db
def test_a_join_token_that_pins_a_certificate_names_the_announcement_key(settings: object) -> None:
    settings.KEYS = Keys(agent_announcement_key=PUBLIC_KEY)  # type: ignore[attr-defined]
    joins = [
        credentials.parse_join_string(
            authentication.create_join_token("h", address="https://x", hours=1, created_by="t", fingerprint=pin)
        )
        for pin in ("ab" * 32, "")
    ]
    assert [join.announcement_key for join in joins] == [PUBLIC_KEY, ""]
