"""The way to the gateway beside the socket: TLS with a pinned certificate, the challenge, images.

Used by `link` and `images`: one request per attempt, on a connection of its own. Nothing is sent to a server that is
not the pinned one.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import io
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from agents import credentials, wire

ANSWER_LIMIT = 64 * 1024
"""Bytes of an HTTP answer that are read; a challenge has some 200."""
RETRY_LIMIT_S = 600.0
NEXT_ADDRESS_S = 2.0
"""After so long without an answer the next address of the gateway's name is tried as well."""
SILENCE_S = 30.0
"""Between two pieces of a download."""


@dataclass(frozen=True)
class Gateway:
    """Where to connect: from a join token, or from the journal once the host has joined."""

    address: str
    fingerprint: str
    secret: str = ""
    at: str = ""
    """Which of the name's addresses; '' any."""

    @property
    def socket_address(self) -> str:
        """The WebSocket's URL."""
        return "ws" + self.address.removeprefix("http").rstrip("/") + wire.PATH


class Refused(Exception):
    """The gateway answered with a status: `sentence` is its reason, `retry_after` the seconds it asks for."""

    def __init__(self, status: int, sentence: str, retry_after: float = 0.0, code: str = "") -> None:
        super().__init__(f"the gateway refused ({status}): {sentence}")
        self.status, self.code = status, code
        self.retry_after = retry_after


class _PinnedObject(ssl.SSLObject):
    def do_handshake(self) -> None:
        super().do_handshake()
        wanted = cast(_PinnedContext, self.context).fingerprint
        found = hashlib.sha256(self.getpeercert(binary_form=True) or b"").hexdigest()
        if found != wanted:
            raise ssl.SSLCertVerificationError(
                f"the gateway's certificate is sha256:{found}, the join token pins sha256:{wanted}"
            )


class _PinnedContext(ssl.SSLContext):
    fingerprint: str
    sslobject_class = _PinnedObject


def tls(gateway: Gateway) -> ssl.SSLContext | None:
    """None for http; for https the pinned certificate only, or without a pin the system's authorities.

    The pin is checked inside the handshake, so neither challenge nor credential reaches another server.
    """
    if not gateway.address.startswith("https:"):
        return None
    if not gateway.fingerprint:
        return ssl.create_default_context()
    context = _PinnedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.fingerprint = gateway.fingerprint.lower().removeprefix("sha256:").replace(":", "")
    return context


async def challenge(
    gateway: Gateway, context: ssl.SSLContext | None, timeout: float
) -> tuple[credentials.Challenge, Gateway]:
    """Ask for a nonce; it is good where it was made: at this one of the name's addresses.

    Raises Refused, OSError (unreachable, TLS, time-out) or wire.Malformed.
    """
    async with asyncio.timeout(timeout):
        (status, headers, body), at = await _get(gateway, wire.CHALLENGE_PATH, context)
    if status != 200:
        raise refusal(status, headers, body)
    try:
        found = msgspec.json.decode(body, type=credentials.Challenge)
    except msgspec.DecodeError as error:
        raise wire.Malformed(f"{gateway.address} answers, but not as a gateway does: {error}") from None
    if not set(found.versions) & set(wire.VERSIONS):
        raise Refused(
            status,
            f"it speaks {', '.join(found.versions)}, this agent {', '.join(wire.VERSIONS)}: upgrade one",
        )
    return found, replace(gateway, at=at)


def refusal(status: int, headers: Any, body: bytes) -> Refused:
    """What an HTTP answer says: the JSON document's `error` and `code`, else the status' own words."""
    code = ""
    try:
        said = msgspec.json.decode(body, type=dict[str, Any])
        sentence, code = str(said["error"])[:500], str(said.get("code", ""))[:64]
    except (msgspec.DecodeError, KeyError, RecursionError):
        sentence = http.client.responses.get(status, "no reason given")
    return Refused(status, " ".join(sentence.split()), _seconds(headers.get("Retry-After")), code)


def _seconds(value: str | None) -> float:
    try:
        return min(max(float(value or 0), 0.0), RETRY_LIMIT_S)
    except ValueError:  # the header's other form is a date; our gateway never sends one
        return 0.0


async def download(
    gateway: Gateway, context: ssl.SSLContext | None, path: str, authorization: str, take: Callable[[bytes], None]
) -> None:
    """Give the content at `path` to `take`, piece by piece. Raises Refused, OSError, wire.Malformed, as `take`."""
    header = f"Authorization: {authorization}\r\n"
    # HTTP/1.0: its answers come in one piece, up to the end of the connection.
    async with _request(gateway, f"GET {{}}{path} HTTP/1.0", header, context) as (reader, _):
        async with asyncio.timeout(SILENCE_S):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                raise wire.Malformed(f"{gateway.address} answers, but not with HTTP") from None
        response = _begun(head, gateway.address)
        if response.status != 200:
            async with asyncio.timeout(SILENCE_S):
                raise refusal(response.status, response.headers, await reader.read(ANSWER_LIMIT))
        while True:
            async with asyncio.timeout(SILENCE_S):
                piece = await reader.read(ANSWER_LIMIT)
            if not piece:
                return
            take(piece)


async def _get(gateway: Gateway, path: str, context: ssl.SSLContext | None) -> tuple[tuple[int, Any, bytes], str]:
    """The answer, and the address that gave it."""
    async with _request(gateway, f"GET {{}}{path} HTTP/1.1", "Connection: close\r\n", context) as (reader, at):
        data = bytearray()
        while len(data) < ANSWER_LIMIT and (chunk := await reader.read(ANSWER_LIMIT - len(data))):
            data += chunk
    return _parsed(bytes(data), gateway.address), at


@asynccontextmanager
async def _request(
    gateway: Gateway, line: str, headers: str, context: ssl.SSLContext | None
) -> AsyncIterator[tuple[asyncio.StreamReader, str]]:
    """The stream that a request is answered on, and by which address; `line` has `{}` where the gateway's own path
    stands."""
    parts = urlsplit(gateway.address)
    port = parts.port or (443 if context else 80)
    async with asyncio.timeout(SILENCE_S):
        reader, writer = await asyncio.open_connection(
            gateway.at or parts.hostname,
            port,
            limit=ANSWER_LIMIT,
            ssl=context,
            server_hostname=parts.hostname if context else None,
            happy_eyeballs_delay=NEXT_ADDRESS_S,
        )
    try:
        first = line.format(parts.path.rstrip("/"))
        writer.write(f"{first}\r\nHost: {parts.netloc}\r\n{headers}\r\n".encode())
        yield reader, str(writer.get_extra_info("peername")[0])
    finally:
        writer.transport.abort()


def _parsed(data: bytes, address: str) -> tuple[int, Any, bytes]:
    response = _begun(data, address)
    try:
        return response.status, response.headers, response.read()
    except http.client.HTTPException as error:
        raise _no_http(address, error) from None


def _begun(data: bytes, address: str) -> http.client.HTTPResponse:
    class Bytes:
        def makefile(self, _mode: str) -> io.BytesIO:
            return io.BytesIO(data)

    response = http.client.HTTPResponse(cast(Any, Bytes()), method="GET")
    try:
        response.begin()
    except http.client.HTTPException as error:
        raise _no_http(address, error) from None
    return response


def _no_http(address: str, error: http.client.HTTPException) -> wire.Malformed:
    return wire.Malformed(f"{address} answers, but not with HTTP: {type(error).__name__}")
