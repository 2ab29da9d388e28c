"""Test the replacement of the gateway's certificate: which announcements an agent follows, and which it refuses."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agents import credentials, wire
from agents.certificates import sign_announcement
from agents.host.checking.gathering import gather_conductor
from agents.host.connection.http import GatewayEndpoint
from agents.host.connection.identity import load_or_create_keys
from agents.host.execution.images import ImageCache
from agents.host.journal.journal import KnownGateway, read_known_gateway
from agents.host.main import _choose_gateway
from tests.agents.host.conftest import make_server_certificate
from tests.agents.host.connection.test_link import ONE_DEVICE, run_agent_link
from tests.agents.host.fake_gateway import FakeGateway, wait_until

KEY = Ed25519PrivateKey.generate()
PUBLIC_KEY = credentials.encode_public_key(KEY.public_key())
FAR_FUTURE = 2**37
Certificate = tuple[ssl.SSLContext, str]


@pytest.fixture(scope="module")
def successor(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    """A second certificate."""
    return make_server_certificate(tmp_path_factory.mktemp("successor") / "server.pem")


@contextmanager
def replaced(server: FakeGateway, fingerprint: str) -> Iterator[FakeGateway]:
    """Let the gateway have another certificate from its next start on."""
    server.fingerprint = fingerprint
    yield server


def announce(old: Certificate, new: Certificate, both_until: int = FAR_FUTURE) -> wire.CertificateAnnouncement:
    return sign_announcement(KEY, 1, old[1], new[1], both_until)


def certificates_message(*announcements: wire.CertificateAnnouncement, key: str = PUBLIC_KEY) -> str:
    return wire.encode_message(wire.Certificates(key, announcements))


def test_a_connected_agent_learns_of_the_next_certificate_and_follows_it(
    tmp_path: Path, certificate: Certificate, successor: Certificate
) -> None:
    async def story() -> None:
        server = FakeGateway(fingerprint=certificate[1])
        announcement = announce(certificate, successor)
        server.after_welcome = [certificates_message(), certificates_message(announcement)]
        async with server.open(certificate[0]):
            gateway = server.gateway("s")
            async with run_agent_link(tmp_path, gateway):
                await wait_until(
                    lambda: [one.newest_certificate for one in server.hellos] == ["", certificate[1], successor[1]]
                )
        known = read_known_gateway(tmp_path)
        assert known == KnownGateway(gateway.address, certificate[1], PUBLIC_KEY, (announcement,))

        server.after_welcome = []
        with replaced(server, successor[1]):
            async with server.open(successor[0]):
                restarted = _choose_gateway(None, known)
                assert restarted is not None
                async with run_agent_link(tmp_path, restarted) as host:
                    host.record_report(*ONE_DEVICE)
                    await wait_until(lambda: host.journal.acknowledged)
                    assert [path for path in server.requests[-2:]] == [wire.CHALLENGE_PATH, wire.AGENT_PATH]

    asyncio.run(story())


def test_an_agent_that_was_away_learns_of_the_replacement_from_the_new_gateway(
    tmp_path: Path, certificate: Certificate, successor: Certificate
) -> None:
    """The old certificate is not accepted any more at that time."""

    async def story() -> None:
        announcement = announce(certificate, successor, both_until=1)
        server = FakeGateway(fingerprint=successor[1], announcements=(announcement,))
        async with server.open(successor[0]):
            gateway = GatewayEndpoint(server.address, certificate[1], "s", announcement_key=PUBLIC_KEY)
            async with run_agent_link(tmp_path, gateway) as host:
                await wait_until(lambda: server.hellos)
                assert server.hellos[0].newest_certificate == successor[1]
                assert host.link.gateway.fingerprint == certificate[1], "the pin itself stays"
        with replaced(server, certificate[1]):
            requests = len(server.requests)
            async with server.open(certificate[0]):
                agent = _choose_gateway(None, read_known_gateway(tmp_path))
                assert agent is not None
                async with run_agent_link(tmp_path, agent) as host:
                    await wait_until(lambda: len(server.requests) > requests)
                    assert set(server.requests[requests:]) == {wire.CHALLENGE_PATH}, "it only asks for announcements"
                    assert len(server.hellos) == 1, "a certificate that was replaced is refused"

    asyncio.run(story())


@pytest.mark.parametrize("knows_key", [True, False])
def test_a_gateway_with_an_unannounced_certificate_gets_neither_credential_nor_token(
    tmp_path: Path,
    certificate: Certificate,
    successor: Certificate,
    caplog: pytest.LogCaptureFixture,
    knows_key: bool,
) -> None:
    async def story() -> None:
        forged = sign_announcement(Ed25519PrivateKey.generate(), 1, certificate[1], successor[1], FAR_FUTURE)
        server = FakeGateway(fingerprint=successor[1], announcements=(forged,))
        async with server.open(successor[0]):
            gateway = GatewayEndpoint(server.address, certificate[1], "s")
            if knows_key:
                gateway = replace(gateway, announcement_key=PUBLIC_KEY)
            async with run_agent_link(tmp_path, gateway):
                await wait_until(lambda: f"the join token pins sha256:{certificate[1]}" in caplog.text)
                assert set(server.requests) == ({wire.CHALLENGE_PATH} if knows_key else set())
                assert server.credentials == []

    asyncio.run(story())


def test_a_gateway_cannot_replace_the_announcement_key_that_an_agent_knows(
    tmp_path: Path, certificate: Certificate, successor: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody who steals the gateway's certificate cannot name a successor of it."""

    async def story() -> None:
        thief = Ed25519PrivateKey.generate()
        other_key = credentials.encode_public_key(thief.public_key())
        forged = sign_announcement(thief, 1, certificate[1], successor[1], FAR_FUTURE)
        server = FakeGateway(fingerprint=certificate[1])
        server.after_welcome = [certificates_message(), certificates_message(forged, key=other_key)]
        async with server.open(certificate[0]), run_agent_link(tmp_path, server.gateway("s")) as host:
            await wait_until(lambda: "names another announcement key" in caplog.text)
            assert host.link.gateway.pins.list_accepted(0) == {certificate[1]}
        assert read_known_gateway(tmp_path).announcement_key == PUBLIC_KEY

    asyncio.run(story())


def test_an_agent_that_pins_nothing_keeps_no_announcements(tmp_path: Path) -> None:
    async def story() -> None:
        server = FakeGateway()
        server.after_welcome = [certificates_message(sign_announcement(KEY, 1, "a" * 64, "b" * 64, FAR_FUTURE))]
        async with server.open(), run_agent_link(tmp_path, server.gateway()) as host:
            host.record_report(*ONE_DEVICE)
            await wait_until(lambda: host.journal.acknowledged)
            assert [one.newest_certificate for one in server.hellos] == [""]
        assert read_known_gateway(tmp_path).announcement_key == ""

    asyncio.run(story())


def test_a_new_key_is_signed_for_the_certificate_of_the_present_connection(
    tmp_path: Path, certificate: Certificate, successor: Certificate
) -> None:
    async def story() -> None:
        server = FakeGateway(fingerprint=successor[1], announcements=(announce(certificate, successor),))
        server.after_welcome = [wire.encode_message(wire.Rotate())]
        async with server.open(successor[0]):
            gateway = GatewayEndpoint(server.address, certificate[1], "s", announcement_key=PUBLIC_KEY)
            async with run_agent_link(tmp_path, gateway):
                await wait_until(lambda: server.new_keys)

    asyncio.run(story())


def test_an_image_is_downloaded_from_a_gateway_with_an_announced_certificate(
    tmp_path: Path, certificate: Certificate, successor: Certificate
) -> None:
    async def story() -> None:
        server = FakeGateway(fingerprint=successor[1], images={"i": b"bits"})
        async with server.open(successor[0]):
            gateway = GatewayEndpoint(server.address, certificate[1], announcement_key=PUBLIC_KEY)
            known = gateway.add_announcements([announce(certificate, successor)])
            images = ImageCache(tmp_path / "images", lambda: known, load_or_create_keys(tmp_path, "h", "h"), lambda: 1)
            ref = wire.ImageRef("i", 4, hashlib.sha256(b"bits").hexdigest())
            async with images.provide_image(ref, lambda _: None, float("inf")) as image:
                assert Path(image.path).read_bytes() == b"bits"

    asyncio.run(story())


def test_a_join_token_that_is_older_than_the_announcements_still_finds_its_gateway(
    certificate: Certificate, successor: Certificate
) -> None:
    """The token may stay in the agent's environment for years."""
    known = KnownGateway("https://gw:1", certificate[1], PUBLIC_KEY, (announce(certificate, successor, 1),))
    for key in ("", PUBLIC_KEY):
        join = credentials.parse_join_string(
            credentials.encode_join_string("https://gw:1", certificate[1], "cmp1", "s", key)
        )
        gateway = _choose_gateway(join, known)
        assert gateway is not None and gateway.pins.list_accepted(2) == {successor[1]}
    other = credentials.encode_join_string("https://gw:1", successor[1], "cmp1", "s", "k" * 43 + "=")
    gateway = _choose_gateway(credentials.parse_join_string(other), known)
    assert gateway is not None and gateway.pins.list_accepted(2) == {successor[1]}, "a new token begins anew"
    assert gateway.announcements == (), "announcements of the former key do not count"


def test_the_announcement_key_of_a_new_join_token_replaces_the_former_one_also_after_a_restart(
    tmp_path: Path, certificate: Certificate
) -> None:
    """The former key was stolen, and nothing was announced with the new one yet."""

    async def story() -> None:
        server = FakeGateway(fingerprint=certificate[1])
        stolen = credentials.encode_public_key(Ed25519PrivateKey.generate().public_key())
        for key in (stolen, PUBLIC_KEY):
            server.after_welcome = [certificates_message(key=key)]
            async with server.open(certificate[0]):
                gateway = replace(server.gateway("s"), announcement_key=key)
                hellos = len(server.hellos)
                async with run_agent_link(tmp_path, gateway):
                    await wait_until(lambda hellos=hellos: len(server.hellos) > hellos)
        assert read_known_gateway(tmp_path).announcement_key == PUBLIC_KEY

    asyncio.run(story())


def test_the_check_command_finds_a_gateway_with_an_announced_certificate(
    certificate: Certificate, successor: Certificate
) -> None:
    async def story() -> None:
        server = FakeGateway(fingerprint=successor[1], announcements=(announce(certificate, successor),))
        async with server.open(successor[0]):
            gateway = GatewayEndpoint(server.address, certificate[1], announcement_key=PUBLIC_KEY)
            facts = await gather_conductor(gateway)
            assert (facts.problem, facts.fingerprint) == ("", successor[1])
            assert (await gather_conductor(replace(gateway, announcement_key=""))).problem == "certificate"

    asyncio.run(story())
