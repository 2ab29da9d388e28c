"""The agent's end of the socket, against a gateway of the test."""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import ipaddress
import json
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from agents import wire
from agents.host.backoff import ConnectionTiming
from agents.host.connection.http import GatewayEndpoint
from agents.host.connection.identity import load_or_create_keys
from agents.host.connection.link import GatewayLink
from agents.host.execution.images import ImageCache
from agents.host.journal.journal import Journal, open_journal
from drivers.errors import DriverError
from tests.agents.host.standin import QUICK, StandIn, found, until

ONE = (found(keys=["a"]),)
TWO = (found(keys=["a", "b"]),)
THREE = (found(keys=["a", "b", "c"]),)


@dataclass
class Agent:
    """A link over a journal, as `main` wires them, without drivers."""

    journal: Journal
    link: GatewayLink

    def sees(self, *drivers: object) -> None:
        self.journal.record_report(drivers)  # type: ignore[arg-type]
        self.link.offer_report()


@asynccontextmanager
async def agent(
    directory: Path,
    gateway: GatewayEndpoint,
    *,
    pace: ConnectionTiming = QUICK,
    limit: Callable[[int], None] = lambda _: None,
) -> AsyncIterator[Agent]:
    journal = open_journal(directory, "cmp1.example")
    keys = load_or_create_keys(directory, "cmp1.example", "cmp1")
    hello = wire.Hello(agent_version="1", boot_id="b", drivers=("fake_driver",))
    link = GatewayLink(journal, keys, gateway, hello, limit, pace)
    task = asyncio.ensure_future(link.run())
    try:
        yield Agent(journal, link)
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        journal.close()


def test_it_joins_says_what_it_is_reports_and_beats(tmp_path: Path) -> None:
    async def story() -> None:
        async with StandIn().open() as server, agent(tmp_path, server.gateway("s3cret")) as host:
            host.sees(*ONE)
            await until(lambda: host.journal.acknowledged and len(server.beats) >= 3)
            assert server.hellos == [wire.Hello(agent_version="1", boot_id="b", drivers=("fake_driver",))]
            assert server.credentials[0].token == "s3cret"
            assert [beat.seq for beat in server.beats][:3] == [1, 2, 3]
            assert [report.drivers for report in server.reports] == [ONE]
            assert server.reports[0].epoch == server.credentials[0].epoch == host.journal.epoch
            host.sees(*TWO)
            await until(lambda: len(server.reports) == 2)
            assert server.reports[1].seq == server.reports[0].seq + 1
            assert len(server.sockets) == 1

    asyncio.run(story())


def test_the_token_is_sent_until_it_has_done_its_work(tmp_path: Path) -> None:
    async def story() -> None:
        async with StandIn().open() as server:
            for _ in range(2):
                async with agent(tmp_path, server.gateway("s3cret")):
                    count = len(server.hellos)
                    await until(lambda count=count: len(server.hellos) > count)
            async with agent(tmp_path, GatewayEndpoint(server.address, "")) as host:
                await until(lambda: len(server.hellos) == 3)
                assert host.journal.address == server.address
            assert [credential.token for credential in server.credentials] == ["s3cret", "", ""]
            assert len({credential.public_key for credential in server.credentials}) == 1

    asyncio.run(story())


def test_what_was_not_acknowledged_is_sent_again_after_a_lost_connection(tmp_path: Path) -> None:
    async def story() -> None:
        server = StandIn(acknowledge=False)
        async with server.open(), agent(tmp_path, server.gateway()) as host:
            host.sees(*ONE)
            await until(lambda: server.reports)
            server.acknowledge = True
            await server.sockets[-1].close()
            await until(lambda: host.journal.acknowledged)
            first, second = server.reports
            assert first == second, "same content, same number"

    asyncio.run(story())


def test_what_was_not_acknowledged_is_sent_again_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        server = StandIn(acknowledge=False)
        async with server.open():
            async with agent(tmp_path, server.gateway()) as host:
                host.sees(*ONE)
                await until(lambda: server.reports)
            server.acknowledge = True
            async with agent(tmp_path, server.gateway()) as host:
                await until(lambda: host.journal.acknowledged)
                assert server.reports[1].hash == server.reports[0].hash
                assert server.reports[1].epoch > server.reports[0].epoch

    asyncio.run(story())


def test_a_gateway_that_has_it_applied_is_not_told_again(tmp_path: Path) -> None:
    async def story() -> None:
        async with StandIn().open() as server:
            async with agent(tmp_path, server.gateway()) as host:
                host.sees(*ONE)
                await until(lambda: host.journal.acknowledged)
            async with agent(tmp_path, server.gateway()) as host:
                host.sees(*ONE)
                server.beats.clear()
                await until(lambda: len(server.beats) >= 3)
            assert len(server.reports) == 1

    asyncio.run(story())


def test_a_gateway_that_lost_it_is_told_again_under_a_new_number_once_the_host_was_looked_at(tmp_path: Path) -> None:
    async def story() -> None:
        async with StandIn().open() as server:
            async with agent(tmp_path, server.gateway()) as host:
                host.sees(*ONE)
                await until(lambda: host.journal.acknowledged)
            server.applied_hash = ""
            async with agent(tmp_path, server.gateway()) as host:
                server.beats.clear()
                await until(lambda: len(server.beats) >= 3)
                assert len(server.reports) == 1, "an old look is no news"
                host.sees(*ONE)
                await until(lambda: len(server.reports) == 2)
                assert server.reports[1].drivers == ONE
                assert (server.reports[1].epoch, server.reports[1].seq) > (
                    server.reports[0].epoch,
                    server.reports[0].seq,
                )

    asyncio.run(story())


def test_a_newer_report_supersedes_what_was_not_sent(tmp_path: Path) -> None:
    async def story() -> None:
        server = StandIn(acknowledge=False)
        async with server.open(), agent(tmp_path, server.gateway()) as host:
            host.sees(*ONE)
            await until(lambda: server.reports)
            host.sees(*TWO)
            host.sees(*THREE)
            beats = len(server.beats)
            await until(lambda: len(server.beats) > beats + 2)
            assert len(server.reports) == 1, "one at a time"
            server.acknowledge = True
            await server.sockets[-1].send(wire.encode_message(wire.Ack(seq=server.reports[0].seq)))
            await until(lambda: host.journal.acknowledged)
            assert [report.drivers for report in server.reports] == [ONE, THREE]

    asyncio.run(story())


def test_it_moves_above_an_epoch_the_gateway_knows(tmp_path: Path) -> None:
    async def story() -> None:
        epoch = 2**40
        async with StandIn(epoch=epoch).open() as server, agent(tmp_path, server.gateway()) as host:
            host.sees(*ONE)
            await until(lambda: host.journal.acknowledged)
            assert [credential.epoch > epoch for credential in server.credentials] == [False, True]
            assert [report.epoch for report in server.reports] == [epoch + 1]

    asyncio.run(story())


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_logged_in_the_servers_words_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    async def story() -> None:
        answer = (status, json.dumps({"error": "this key is not enrolled"}), {})
        server = StandIn(refuse=[answer] * 3)
        async with server.open(), agent(tmp_path, server.gateway("tok")) as host:
            host.sees(*ONE)
            await until(lambda: host.journal.acknowledged)
            assert [credential.token for credential in server.credentials] == ["tok", "", "tok", ""]

    caplog.set_level(logging.INFO, "cyborg.link")
    asyncio.run(story())
    said = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert f": the gateway refused ({status}): this key is not enrolled; next attempt in" in said[0]
    assert len(said) == 2, "the 1st and the 2nd time"


def test_a_busy_gateway_names_the_time(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        server = StandIn(refuse=[(503, "", {"Retry-After": "0.3"})])
        async with server.open(), agent(tmp_path, server.gateway()):
            began = asyncio.get_running_loop().time()
            await until(lambda: server.hellos)
            assert asyncio.get_running_loop().time() - began >= 0.3

    asyncio.run(story())
    assert "the gateway refused (503): Service Unavailable" in caplog.text


def test_a_refuse_on_the_socket_is_logged_with_its_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with StandIn().open() as server, agent(tmp_path, server.gateway()):
            await until(lambda: server.hellos)
            await server.sockets[0].send(
                wire.encode_message(wire.Refuse(code="revoked", reason="somebody revoked this agent"))
            )
            await server.sockets[0].close()
            await until(lambda: len(server.hellos) == 2)

    asyncio.run(story())
    assert "the gateway closed the connection: somebody revoked this agent [revoked]" in caplog.text


def test_silence_ends_the_connection(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        server = StandIn(acknowledge_beats=False)
        async with server.open(), agent(tmp_path, server.gateway(), pace=replace(QUICK, ack_timeout_s=0.3)):
            await until(lambda: len(server.sockets) >= 2)

    asyncio.run(story())
    assert "the gateway has acknowledged nothing for" in caplog.text


def test_it_comes_back_when_the_gateway_does(tmp_path: Path) -> None:
    async def story() -> None:
        server = StandIn()
        async with server.open():
            pass
        async with agent(tmp_path, server.gateway()) as host:
            host.sees(*ONE)
            async with server.open():
                await until(lambda: host.journal.acknowledged)
            host.sees(*TWO)
            async with server.open():
                await until(lambda: host.journal.acknowledged)

    asyncio.run(story())


def test_unknown_messages_are_counted_and_a_newer_gateways_fields_ignored(tmp_path: Path) -> None:
    async def story() -> None:
        server = StandIn(after_welcome=['{"type":"Weather","sky":"blue"}', '{"type":"Ack","seq":99,"of":"Moon","x":1}'])
        async with server.open(), agent(tmp_path, server.gateway()) as host:
            host.sees(*ONE)
            await until(lambda: host.journal.acknowledged)
            assert host.link.dropped_count == 1
            assert len(server.sockets) == 1

    asyncio.run(story())


def test_a_report_over_the_limit_is_not_sent_and_the_host_stays_live(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        server = StandIn(max_bytes=1000)
        limits: list[int] = []
        async with server.open(), agent(tmp_path, server.gateway(), limit=limits.append) as host:
            host.sees(found(keys=map(str, range(100))))
            await until(lambda: len(server.beats) > 3)
            assert limits == [1000]
            assert server.reports == []
            host.sees(*ONE)
            await until(lambda: host.journal.acknowledged)

    asyncio.run(story())
    assert caplog.text.count("the gateway accepts at most 1000") == 1


def test_something_else_at_the_address_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async def ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"SSH-2.0-OpenSSH\r\n")
            writer.close()

        server = await asyncio.start_server(ssh, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, agent(tmp_path, GatewayEndpoint(f"http://127.0.0.1:{port}", "")):
            await until(lambda: "answers, but not with HTTP" in caplog.text)

    asyncio.run(story())


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[ssl.SSLContext, str]:
    """A self-signed server certificate and its SHA-256 fingerprint."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "gateway")])
    now = datetime.datetime.now(datetime.UTC)
    built = (
        x509.CertificateBuilder(issuer_name=name, subject_name=name, public_key=key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "server.pem"
    file.write_bytes(
        built.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context, hashlib.sha256(built.public_bytes(serialization.Encoding.DER)).hexdigest()


def test_the_pinned_server_is_spoken_to(tmp_path: Path, certificate: tuple[ssl.SSLContext, str]) -> None:
    async def story() -> None:
        context, fingerprint = certificate
        server = StandIn(fingerprint=fingerprint)
        async with server.open(context), agent(tmp_path, server.gateway("s")) as host:
            host.sees(*ONE)
            await until(lambda: host.journal.acknowledged)

    asyncio.run(story())


def test_the_pinned_server_hands_out_images(
    tmp_path: Path, certificate: tuple[ssl.SSLContext, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        context, fingerprint = certificate
        server = StandIn(fingerprint=fingerprint, images={"i": b"bits"})
        async with server.open(context):
            keys = load_or_create_keys(tmp_path, "cmp1.example", "cmp1")
            ref = wire.ImageRef("i", 4, hashlib.sha256(b"bits").hexdigest())
            images = ImageCache(tmp_path / "images", server.gateway(), keys, lambda: 7)
            async with images.provide_image(ref, lambda _: None) as image:
                assert (Path(image.path).read_bytes(), Path(image.path).stat().st_mode & 0o777) == (b"bits", 0o600)
                async with images.provide_image(ref, lambda _: None):
                    assert len(server.credentials) == 1, "it is here already"
                assert Path(image.path).exists()
            assert not Path(image.path).exists()
            assert [one.epoch for one in server.credentials] == [7]
            monkeypatch.setattr("agents.host.execution.images.MIN_RETRY_PAUSE_S", 0.01)
            server.busy = 3
            async with images.provide_image(ref, lambda _: None) as image:
                assert server.busy == 0 and Path(image.path).exists(), "it is asked again until it has time"
            monkeypatch.setattr("agents.host.execution.images.BUSY_RETRY_S", 0.0)
            server.busy = 1
            with pytest.raises(DriverError, match="503"):
                async with images.provide_image(ref, lambda _: None):
                    raise AssertionError("never")
            other = replace(server.gateway(), fingerprint="ab" * 32)
            with pytest.raises(DriverError, match="the join token pins"):
                async with ImageCache(tmp_path / "other", other, keys, lambda: 7).provide_image(ref, lambda _: None):
                    raise AssertionError("never")

    asyncio.run(story())


@pytest.mark.parametrize(("pin", "words"), [("ab" * 32, "the join token pins sha256:abab"), ("", "self-signed")])
def test_another_server_is_told_nothing(
    tmp_path: Path,
    certificate: tuple[ssl.SSLContext, str],
    caplog: pytest.LogCaptureFixture,
    pin: str,
    words: str,
) -> None:
    async def story() -> None:
        server = StandIn(fingerprint=pin)
        async with server.open(certificate[0]), agent(tmp_path, server.gateway("s")):
            await until(lambda: words in caplog.text)
            assert server.requests == []

    asyncio.run(story())
