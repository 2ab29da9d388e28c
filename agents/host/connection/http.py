"""HTTP requests to the gateway: fetch the challenge, download images, and check the pinned TLS certificate.

Each request has its own connection. When a certificate is pinned, no request is sent to a server with another one.
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
"""Largest HTTP answer to read, in bytes, downloads excepted; a challenge has some 200."""
RETRY_LIMIT_S = 600.0
"""Upper bound for the seconds of a Retry-After header."""
NEXT_ADDRESS_S = 2.0
"""Seconds to wait for one address of the gateway's name before the next address is tried in parallel."""
SILENCE_S = 30.0
"""Time-out in seconds to connect, and between two pieces of a download."""


@dataclass(frozen=True)
class Gateway:
    """Where to connect. The values come from a join token, or from the journal once the host has joined."""

    address: str
    fingerprint: str
    secret: str = ""
    at: str = ""
    """The IP address to use, of those that the gateway's name has; '' for any of them."""

    @property
    def socket_address(self) -> str:
        """Return the URL of the WebSocket."""
        return "ws" + self.address.removeprefix("http").rstrip("/") + wire.PATH


class HttpStatusError(Exception):
    """The gateway refused a request. The text holds the reason, `status` the HTTP status, `code` the error code.

    `retry_after` is the number of seconds that the gateway asks to wait, 0 when it names none.
    """

    def __init__(self, status: int, sentence: str, retry_after: float = 0.0, code: str = "") -> None:
        super().__init__(f"the gateway refused ({status}): {sentence}")
        self.status, self.code = status, code
        self.retry_after = retry_after


class _PinnedObject(ssl.SSLObject):
    """A TLS connection whose handshake fails unless the server's certificate has the pinned fingerprint."""

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
    """Return the TLS context for the gateway, None when its address is http.

    With a fingerprint, only the pinned certificate is accepted; without one, the system's certificate authorities
    decide. The pin is checked inside the handshake, so neither the request nor the credential reaches another server.
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
    """Fetch a challenge (a nonce to sign); return it with the gateway narrowed to the address that issued it.

    A nonce is valid only at the server that issued it, so the connection must go to the same address. Raises
    HttpStatusError, also when the two sides have no wire version in common, OSError (unreachable, TLS, time-out) or
    wire.MalformedMessageError.
    """
    async with asyncio.timeout(timeout):
        (status, headers, body), at = await _get(gateway, wire.CHALLENGE_PATH, context)
    if status != 200:
        raise refusal(status, headers, body)
    try:
        found = msgspec.json.decode(body, type=credentials.Challenge)
    except msgspec.DecodeError as error:
        raise wire.MalformedMessageError(f"{gateway.address} answers, but not as a gateway does: {error}") from None
    if not set(found.versions) & set(wire.VERSIONS):
        raise HttpStatusError(
            status,
            f"it supports the wire versions {', '.join(found.versions)}, and this agent {', '.join(wire.VERSIONS)}: "
            "upgrade one of them",
        )
    return found, replace(gateway, at=at)


def refusal(status: int, headers: Any, body: bytes) -> HttpStatusError:
    """Build an HttpStatusError from an HTTP answer: `error` and `code` of its JSON, else the status's standard text."""
    code = ""
    try:
        said = msgspec.json.decode(body, type=dict[str, Any])
        sentence, code = str(said["error"])[:500], str(said.get("code", ""))[:64]
    except (msgspec.DecodeError, KeyError, RecursionError):
        sentence = http.client.responses.get(status, "no reason given")
    return HttpStatusError(status, " ".join(sentence.split()), _seconds(headers.get("Retry-After")), code)


def _seconds(value: str | None) -> float:
    try:
        return min(max(float(value or 0), 0.0), RETRY_LIMIT_S)
    except ValueError:  # the header may also hold a date, but our gateway never sends one
        return 0.0


async def download(
    gateway: Gateway, context: ssl.SSLContext | None, path: str, authorization: str, take: Callable[[bytes], None]
) -> None:
    """Download `path` and pass each piece to `write_piece`, up to the end of the connection.

    The length is not checked: the caller must do that. Raises HttpStatusError when the status is not 200, OSError
    (also when nothing comes for IO_TIMEOUT_S seconds), wire.MalformedMessageError, and whatever `write_piece` raises.
    """
    header = f"Authorization: {authorization}\r\n"
    # An HTTP/1.0 answer is never chunked: its body ends where the connection ends.
    async with _request(gateway, f"GET {{}}{path} HTTP/1.0", header, context) as (reader, _):
        async with asyncio.timeout(SILENCE_S):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                raise wire.MalformedMessageError(f"{gateway.address} answers, but not with HTTP") from None
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
    """Send a GET request; return (status, headers, body) and the IP address that answered."""
    async with _request(gateway, f"GET {{}}{path} HTTP/1.1", "Connection: close\r\n", context) as (reader, at):
        data = bytearray()
        while len(data) < ANSWER_LIMIT and (chunk := await reader.read(ANSWER_LIMIT - len(data))):
            data += chunk
    return _parsed(bytes(data), gateway.address), at


@asynccontextmanager
async def _request(
    gateway: Gateway, line: str, headers: str, context: ssl.SSLContext | None
) -> AsyncIterator[tuple[asyncio.StreamReader, str]]:
    """Send a request on a new connection; yield the stream of the answer and the IP address of the server.

    `line_template` is the request line; its `{}` is replaced by the path of the gateway's address. The connection is
    aborted at the end.
    """
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
    """Parse the status line and the headers of an answer. Raises wire.MalformedMessageError when it is not HTTP."""

    class Bytes:
        def makefile(self, _mode: str) -> io.BytesIO:
            return io.BytesIO(data)

    response = http.client.HTTPResponse(cast(Any, Bytes()), method="GET")
    try:
        response.begin()
    except http.client.HTTPException as error:
        raise _no_http(address, error) from None
    return response


def _no_http(address: str, error: http.client.HTTPException) -> wire.MalformedMessageError:
    return wire.MalformedMessageError(f"{address} answers, but not with HTTP: {type(error).__name__}")
