"""Test requests to a gateway that answers slowly, without end, in pieces, or with another address."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest

from agents import credentials, wire
from agents.host.connection import http
from agents.host.connection.http import GatewayEndpoint, HttpStatusError
from agents.host.connection.identity import load_or_create_keys
from agents.host.execution.images import ImageCache
from drivers.errors import Failed, Invalid
from tests.support.webserver import PATIENCE

OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def run_server(
    answer: Callable[[bytes, asyncio.StreamWriter], Awaitable[None]],
) -> AsyncIterator[GatewayEndpoint]:
    """Pass the head of each request, with a writer for the answer, to `answer`."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            await answer(await reader.readuntil(b"\r\n\r\n"), writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield GatewayEndpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base", "")


async def trickle(writer: asyncio.StreamWriter) -> None:
    """Send one byte now and then, until the client is gone."""
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.01)


def challenge_answer() -> bytes:
    return OK + b"\r\n" + msgspec.json.encode(credentials.Challenge("nonce", 30, wire.VERSIONS))


@pytest.mark.parametrize("head", [b"", OK + b"X-Long: ", OK + b"\r\n"])
def test_a_challenge_that_trickles_ends_at_its_time_out(head: bytes) -> None:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(head)
        await trickle(writer)

    async def story() -> None:
        async with asyncio.timeout(5 * PATIENCE), run_server(answer) as gateway:
            with pytest.raises(TimeoutError):
                await http.fetch_challenge(gateway, None, 0.2)

    asyncio.run(story())


@pytest.mark.parametrize("head", [OK + b"\r\n", b"", OK + b"Content-Length: 10000000\r\n\r\n"])
def test_an_answer_without_end_is_read_up_to_the_limit(head: bytes) -> None:
    sent = 0

    def refuse_piece(_: bytes) -> None:
        raise Invalid("too long")

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(head)
        while True:
            writer.write(b"x" * 4096)
            sent += 4096
            await writer.drain()

    async def story() -> None:
        async with run_server(answer) as gateway:
            with pytest.raises(wire.MalformedMessageError):
                await http.fetch_challenge(gateway, None, 10 * PATIENCE)
            with pytest.raises((wire.MalformedMessageError, Invalid)):
                await http.download_file(gateway, None, "/x", "a", refuse_piece)

    asyncio.run(story())
    assert sent < 50_000_000


def test_a_redirect_is_an_error_and_a_reason_that_comes_in_pieces_is_shown_whole() -> None:
    requests: list[bytes] = []

    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        requests.append(head.partition(b"\r\n")[0])
        if b"/redirect" in head:
            writer.write(b"HTTP/1.1 302 Found\r\nLocation: /elsewhere\r\n\r\n")
            return
        for piece in (b"HTTP/1.1 409 Conflict\r\n\r\n", b'{"error": "the image ', b'is gone", "code": "gone"}'):
            writer.write(piece)
            await asyncio.sleep(0.02)

    async def story() -> None:
        async with run_server(answer) as gateway:
            for path, words in (("/redirect", r"\(302\): Found"), ("/image", r"\(409\): the image is gone$")):
                with pytest.raises(HttpStatusError, match=words):
                    await http.download_file(gateway, None, path, "a", lambda _: None)

    asyncio.run(story())
    assert requests == [b"GET /base/redirect HTTP/1.0", b"GET /base/image HTTP/1.0"]


def test_a_refusal_is_read_by_its_length_when_the_connection_stays_open() -> None:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        body = b'{"error": "too many downloads", "code": "busy"}'
        writer.write(
            b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 7\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        await asyncio.sleep(20 * PATIENCE)

    async def story() -> None:
        async with asyncio.timeout(5 * PATIENCE), run_server(answer) as gateway:
            with pytest.raises(HttpStatusError, match="too many downloads") as refused:
                await http.download_file(gateway, None, "/image", "a", lambda _: None)
            assert refused.value.retry_after == 7

    asyncio.run(story())


@pytest.mark.parametrize("length", ["", "-1", "x", "9" * 5000])
def test_a_refusal_with_a_senseless_length_is_read_to_the_end_of_the_connection(length: str) -> None:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        head = f"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 7\r\nContent-Length: {length}\r\n\r\n"
        writer.write(head.encode() + b'{"error": "too many downloads"}')

    async def story() -> None:
        async with run_server(answer) as gateway:
            with pytest.raises(HttpStatusError, match="too many downloads") as refused:
                await http.download_file(gateway, None, "/image", "a", lambda _: None)
            assert refused.value.retry_after == 7

    asyncio.run(story())


def test_a_download_that_trickles_ends_at_the_time_limit_of_its_command(tmp_path: Path) -> None:
    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        if wire.CHALLENGE_PATH.encode() in head:
            writer.write(challenge_answer())
        else:
            writer.write(OK + b"\r\n")
            await trickle(writer)

    async def story() -> None:
        async with asyncio.timeout(10 * PATIENCE), run_server(answer) as gateway:
            keys = load_or_create_keys(tmp_path, "cmp1.example", "cmp1")
            images = ImageCache(tmp_path / "images", lambda: gateway, keys, lambda: 7)
            ref = wire.ImageRef("i", 1_000_000, hashlib.sha256(b"").hexdigest(), "bits")
            end_by = asyncio.get_running_loop().time() + 0.3
            with pytest.raises(Failed, match="bits was not downloaded within the time limit of the command"):
                async with images.provide_image(ref, lambda _: None, end_by):
                    raise AssertionError("never")
            assert list((tmp_path / "images").iterdir()) == []

    asyncio.run(story())
