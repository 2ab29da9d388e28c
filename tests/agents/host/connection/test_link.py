"""Test the agent's side of the WebSocket, against a fake gateway."""

from __future__ import annotations

import asyncio
import hashlib
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from agents import wire
from agents.host.backoff import ConnectionTiming
from agents.host.connection.http import GatewayEndpoint
from agents.host.connection.identity import load_or_create_keys
from agents.host.connection.link import GatewayLink
from agents.host.execution.images import ImageCache
from agents.host.journal.journal import Journal, open_journal
from drivers.errors import DriverError
from tests.agents.host.fake_gateway import QUICK, FakeGateway, driver_report, wait_until

ONE_DEVICE = (driver_report(keys=["a"]),)
TWO_DEVICES = (driver_report(keys=["a", "b"]),)
THREE_DEVICES = (driver_report(keys=["a", "b", "c"]),)


@dataclass
class LinkedAgent:
    """A link with a journal, connected as `main` does it, without drivers."""

    journal: Journal
    link: GatewayLink

    def record_report(self, *drivers: object) -> None:
        self.journal.record_report(drivers)  # type: ignore[arg-type]
        self.link.offer_report()


@asynccontextmanager
async def run_agent_link(
    directory: Path,
    gateway: GatewayEndpoint,
    *,
    pace: ConnectionTiming = QUICK,
    limit: Callable[[int], None] = lambda _: None,
) -> AsyncIterator[LinkedAgent]:
    journal = open_journal(directory, "cmp1.example")
    keys = load_or_create_keys(directory, "cmp1.example", "cmp1")
    hello = wire.Hello(agent_version="1", boot_id="b", drivers=("fake_driver",))
    link = GatewayLink(journal, keys, gateway, hello, limit, pace)
    task = asyncio.ensure_future(link.run())
    try:
        yield LinkedAgent(journal, link)
        assert not task.done(), task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        journal.close()


def test_an_agent_joins_and_sends_its_hello_its_reports_and_heartbeats(tmp_path: Path) -> None:
    async def story() -> None:
        async with FakeGateway().open() as server, run_agent_link(tmp_path, server.gateway("s3cret")) as host:
            host.record_report(*ONE_DEVICE)
            await wait_until(lambda: host.journal.acknowledged and len(server.beats) >= 3)
            assert server.hellos == [wire.Hello(agent_version="1", boot_id="b", drivers=("fake_driver",))]
            assert server.credentials[0].token == "s3cret"
            assert [beat.seq for beat in server.beats][:3] == [1, 2, 3]
            assert [report.drivers for report in server.reports] == [ONE_DEVICE]
            assert server.reports[0].epoch == server.credentials[0].epoch == host.journal.epoch
            host.record_report(*TWO_DEVICES)
            await wait_until(lambda: len(server.reports) == 2)
            assert server.reports[1].seq == server.reports[0].seq + 1
            assert len(server.sockets) == 1

    asyncio.run(story())


def test_the_join_token_is_sent_only_until_the_agent_has_joined(tmp_path: Path) -> None:
    async def story() -> None:
        async with FakeGateway().open() as server:
            for _ in range(2):
                async with run_agent_link(tmp_path, server.gateway("s3cret")):
                    count = len(server.hellos)
                    await wait_until(lambda count=count: len(server.hellos) > count)
            async with run_agent_link(tmp_path, GatewayEndpoint(server.address, "")) as host:
                await wait_until(lambda: len(server.hellos) == 3)
                assert host.journal.gateway.address == server.address
            assert [credential.token for credential in server.credentials] == ["s3cret", "", ""]
            assert len({credential.public_key for credential in server.credentials}) == 1

    asyncio.run(story())


def test_an_unacknowledged_report_is_resent_under_its_number_after_a_lost_connection(tmp_path: Path) -> None:
    async def story() -> None:
        server = FakeGateway(acknowledge=False)
        async with server.open(), run_agent_link(tmp_path, server.gateway()) as host:
            host.record_report(*ONE_DEVICE)
            await wait_until(lambda: server.reports)
            server.acknowledge = True
            await server.sockets[-1].close()
            await wait_until(lambda: host.journal.acknowledged)
            first, second = server.reports
            assert first == second, "same content, same number"

    asyncio.run(story())


def test_an_unacknowledged_report_is_resent_under_a_higher_epoch_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        server = FakeGateway(acknowledge=False)
        async with server.open():
            async with run_agent_link(tmp_path, server.gateway()) as host:
                host.record_report(*ONE_DEVICE)
                await wait_until(lambda: server.reports)
            server.acknowledge = True
            async with run_agent_link(tmp_path, server.gateway()) as host:
                await wait_until(lambda: host.journal.acknowledged)
                assert server.reports[1].hash == server.reports[0].hash
                assert server.reports[1].epoch > server.reports[0].epoch

    asyncio.run(story())


def test_a_report_that_the_gateway_has_applied_is_not_resent_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        async with FakeGateway().open() as server:
            async with run_agent_link(tmp_path, server.gateway()) as host:
                host.record_report(*ONE_DEVICE)
                await wait_until(lambda: host.journal.acknowledged)
            async with run_agent_link(tmp_path, server.gateway()) as host:
                host.record_report(*ONE_DEVICE)
                server.beats.clear()
                await wait_until(lambda: len(server.beats) >= 3)
            assert len(server.reports) == 1

    asyncio.run(story())


def test_a_report_that_the_gateway_lost_is_resent_with_a_new_number_after_the_next_rescan(tmp_path: Path) -> None:
    async def story() -> None:
        async with FakeGateway().open() as server:
            async with run_agent_link(tmp_path, server.gateway()) as host:
                host.record_report(*ONE_DEVICE)
                await wait_until(lambda: host.journal.acknowledged)
            server.applied_hash = ""
            async with run_agent_link(tmp_path, server.gateway()) as host:
                server.beats.clear()
                await wait_until(lambda: len(server.beats) >= 3)
                assert len(server.reports) == 1, "an old look is no news"
                host.record_report(*ONE_DEVICE)
                await wait_until(lambda: len(server.reports) == 2)
                assert server.reports[1].drivers == ONE_DEVICE
                assert (server.reports[1].epoch, server.reports[1].seq) > (
                    server.reports[0].epoch,
                    server.reports[0].seq,
                )

    asyncio.run(story())


def test_a_report_that_the_gateway_asks_for_again_is_resent_on_the_same_connection(tmp_path: Path) -> None:
    async def story() -> None:
        async with FakeGateway().open() as server, run_agent_link(tmp_path, server.gateway()) as host:
            host.record_report(*ONE_DEVICE)
            await wait_until(lambda: host.journal.acknowledged)
            await server.sockets[-1].send(wire.encode_message(wire.Welcome(0.05, 0, "", wire.MAX_MESSAGE_BYTES)))
            await wait_until(lambda: len(server.reports) == 2)
            assert len(server.sockets) == 1
            assert server.reports[1].drivers == ONE_DEVICE and server.reports[1].seq > server.reports[0].seq
            await wait_until(lambda: host.journal.acknowledged)
            server.beats.clear()
            await wait_until(lambda: len(server.beats) >= 3)
            assert len(server.reports) == 2, "once is enough"

    asyncio.run(story())


def test_only_the_newest_report_is_sent_after_the_pending_one_is_acknowledged(tmp_path: Path) -> None:
    async def story() -> None:
        server = FakeGateway(acknowledge=False)
        async with server.open(), run_agent_link(tmp_path, server.gateway()) as host:
            host.record_report(*ONE_DEVICE)
            await wait_until(lambda: server.reports)
            host.record_report(*TWO_DEVICES)
            host.record_report(*THREE_DEVICES)
            beats = len(server.beats)
            await wait_until(lambda: len(server.beats) > beats + 2)
            assert len(server.reports) == 1, "one at a time"
            server.acknowledge = True
            await server.sockets[-1].send(wire.encode_message(wire.Ack(seq=server.reports[0].seq)))
            await wait_until(lambda: host.journal.acknowledged)
            assert [report.drivers for report in server.reports] == [ONE_DEVICE, THREE_DEVICES]

    asyncio.run(story())


def test_an_agent_raises_its_epoch_above_the_one_that_the_gateway_knows(tmp_path: Path) -> None:
    async def story() -> None:
        epoch = 2**40
        async with FakeGateway(epoch=epoch).open() as server, run_agent_link(tmp_path, server.gateway()) as host:
            host.record_report(*ONE_DEVICE)
            await wait_until(lambda: host.journal.acknowledged)
            assert [credential.epoch > epoch for credential in server.credentials] == [False, True]
            assert [report.epoch for report in server.reports] == [epoch + 1]

    asyncio.run(story())


@pytest.mark.parametrize("status", [401, 403])
def test_a_refusal_is_logged_with_the_servers_message_and_the_agent_tries_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int
) -> None:
    async def story() -> None:
        answer = (status, json.dumps({"error": "this key is not enrolled"}), {})
        server = FakeGateway(refusals=[answer] * 3)
        async with server.open(), run_agent_link(tmp_path, server.gateway("tok")) as host:
            host.record_report(*ONE_DEVICE)
            await wait_until(lambda: host.journal.acknowledged)
            assert [credential.token for credential in server.credentials] == ["tok", "", "tok", ""]

    asyncio.run(story())
    said = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert f": the gateway refused ({status}): this key is not enrolled; next attempt in" in said[0]
    assert len(said) == 2, "the 1st and the 2nd time"


def test_an_agent_waits_as_long_as_a_busy_gateways_retry_after_says(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        server = FakeGateway(refusals=[(503, "", {"Retry-After": "0.3"})])
        async with server.open(), run_agent_link(tmp_path, server.gateway()):
            began = asyncio.get_running_loop().time()
            await wait_until(lambda: server.hellos)
            assert asyncio.get_running_loop().time() - began >= 0.3

    asyncio.run(story())
    assert "the gateway refused (503): Service Unavailable" in caplog.text


def test_a_refuse_message_is_logged_with_its_reason_and_the_agent_reconnects(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async with FakeGateway().open() as server, run_agent_link(tmp_path, server.gateway()):
            await wait_until(lambda: server.hellos)
            await server.sockets[0].send(
                wire.encode_message(wire.Refuse(code="revoked", reason="somebody revoked this agent"))
            )
            await server.sockets[0].close()
            await wait_until(lambda: len(server.hellos) == 2)

    asyncio.run(story())
    assert "the gateway closed the connection: somebody revoked this agent [revoked]" in caplog.text


def test_an_agent_reconnects_when_its_heartbeats_are_not_acknowledged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        server = FakeGateway(acknowledge_beats=False)
        async with server.open(), run_agent_link(tmp_path, server.gateway(), pace=replace(QUICK, ack_timeout_s=0.3)):
            await wait_until(lambda: len(server.sockets) >= 2)

    asyncio.run(story())
    assert "the gateway has acknowledged nothing for" in caplog.text


def test_an_agent_reconnects_and_reports_each_time_the_gateway_is_back(tmp_path: Path) -> None:
    async def story() -> None:
        server = FakeGateway()
        async with server.open():
            pass
        async with run_agent_link(tmp_path, server.gateway()) as host:
            host.record_report(*ONE_DEVICE)
            async with server.open():
                await wait_until(lambda: host.journal.acknowledged)
            host.record_report(*TWO_DEVICES)
            async with server.open():
                await wait_until(lambda: host.journal.acknowledged)

    asyncio.run(story())


def test_unknown_messages_are_counted_and_unknown_fields_are_ignored(tmp_path: Path) -> None:
    async def story() -> None:
        server = FakeGateway(
            after_welcome=['{"type":"Weather","sky":"blue"}', '{"type":"Ack","seq":99,"of":"Moon","x":1}']
        )
        async with server.open(), run_agent_link(tmp_path, server.gateway()) as host:
            host.record_report(*ONE_DEVICE)
            await wait_until(lambda: host.journal.acknowledged)
            assert host.link.dropped_count == 1
            assert len(server.sockets) == 1

    asyncio.run(story())


def test_a_report_over_the_size_limit_is_not_sent_and_heartbeats_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        server = FakeGateway(max_bytes=1000)
        limits: list[int] = []
        async with server.open(), run_agent_link(tmp_path, server.gateway(), limit=limits.append) as host:
            host.record_report(driver_report(keys=map(str, range(100))))
            await wait_until(lambda: len(server.beats) > 3)
            assert limits == [1000]
            assert server.reports == []
            host.record_report(*ONE_DEVICE)
            await wait_until(lambda: host.journal.acknowledged)

    asyncio.run(story())
    assert caplog.text.count("the gateway accepts at most 1000") == 1


def test_a_server_that_does_not_speak_http_is_named_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story() -> None:
        async def ssh(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"SSH-2.0-OpenSSH\r\n")
            writer.close()

        server = await asyncio.start_server(ssh, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with server, run_agent_link(tmp_path, GatewayEndpoint(f"http://127.0.0.1:{port}", "")):
            await wait_until(lambda: "answers, but not with HTTP" in caplog.text)

    asyncio.run(story())


def test_an_agent_reports_to_the_server_whose_certificate_is_pinned(
    tmp_path: Path, certificate: tuple[ssl.SSLContext, str]
) -> None:
    async def story() -> None:
        context, fingerprint = certificate
        server = FakeGateway(fingerprint=fingerprint)
        async with server.open(context), run_agent_link(tmp_path, server.gateway("s")) as host:
            host.record_report(*ONE_DEVICE)
            await wait_until(lambda: host.journal.acknowledged)

    asyncio.run(story())


def test_an_image_is_downloaded_once_from_the_pinned_server_and_deleted_after_use(
    tmp_path: Path, certificate: tuple[ssl.SSLContext, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        context, fingerprint = certificate
        server = FakeGateway(fingerprint=fingerprint, images={"i": b"bits"})
        async with server.open(context):
            keys = load_or_create_keys(tmp_path, "cmp1.example", "cmp1")
            ref = wire.ImageRef("i", 4, hashlib.sha256(b"bits").hexdigest())
            images = ImageCache(tmp_path / "images", server.gateway, keys, lambda: 7)
            async with images.provide_image(ref, lambda _: None, float("inf")) as image:
                assert (Path(image.path).read_bytes(), Path(image.path).stat().st_mode & 0o777) == (b"bits", 0o600)
                async with images.provide_image(ref, lambda _: None, float("inf")):
                    assert len(server.credentials) == 1, "it is here already"
                assert Path(image.path).exists()
            assert not Path(image.path).exists()
            assert [one.epoch for one in server.credentials] == [7]
            monkeypatch.setattr("agents.host.execution.images.MIN_RETRY_PAUSE_S", 0.01)
            server.busy_answers = 3
            async with images.provide_image(ref, lambda _: None, float("inf")) as image:
                assert server.busy_answers == 0 and Path(image.path).exists(), "it is asked again until it has time"
            monkeypatch.setattr("agents.host.execution.images.BUSY_RETRY_S", 0.0)
            server.busy_answers = 1
            with pytest.raises(DriverError, match="503"):
                async with images.provide_image(ref, lambda _: None, float("inf")):
                    raise AssertionError("never")
            other = replace(server.gateway(), fingerprint="ab" * 32)
            with pytest.raises(DriverError, match="the join token pins"):
                async with ImageCache(tmp_path / "other", lambda: other, keys, lambda: 7).provide_image(
                    ref, lambda _: None, float("inf")
                ):
                    raise AssertionError("never")

    asyncio.run(story())


@pytest.mark.parametrize(("pin", "words"), [("ab" * 32, "the join token pins sha256:abab"), ("", "self-signed")])
def test_a_server_with_another_certificate_gets_no_request(
    tmp_path: Path,
    certificate: tuple[ssl.SSLContext, str],
    caplog: pytest.LogCaptureFixture,
    pin: str,
    words: str,
) -> None:
    async def story() -> None:
        server = FakeGateway(fingerprint=pin)
        async with server.open(certificate[0]), run_agent_link(tmp_path, server.gateway("s")):
            await wait_until(lambda: words in caplog.text)
            assert server.requests == []

    asyncio.run(story())
