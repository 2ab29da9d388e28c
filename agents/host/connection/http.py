"""HTTP requests to the gateway: fetch the challenge, download images, and check the pinned TLS certificate.

Each request has its own connection. When a certificate is pinned, no request is sent to a server with another one. ADR
1 (Libraries) says why no HTTP library is used.
"""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import io
import re
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from email.message import Message
from typing import Any, cast
from urllib.parse import urlsplit

import msgspec

from agents import credentials, wire
from agents.certificates import PinnedCertificates
from agents.errors import AgentsError

MAX_RESPONSE_BYTES = 64 * 1024
"""Largest HTTP answer to read, in bytes, downloads excepted; a challenge has some 200."""
MAX_RETRY_AFTER_S = 600.0
"""Upper bound for the seconds of a Retry-After header."""
HAPPY_EYEBALLS_DELAY_S = 2.0
"""Seconds to wait for one address of the gateway's name before the next address is tried in parallel."""
IO_TIMEOUT_S = 30.0
"""Time-out in seconds to connect, and between two pieces of a download."""


@dataclass(frozen=True)
class GatewayEndpoint:
    """Where to connect. The values come from a join token, or from the journal once the host has joined.

    `address` is an http or https address. `fingerprint` is that of the certificate that was pinned first, '' if none is
    pinned.
    """

    address: str
    fingerprint: str
    secret: str = ""
    ip_address: str = ""
    """The IP address to use, of those that the gateway's name has; '' for any of them."""
    announcement_key: str = ""
    """The public key that signs announcements of certificates; '' if it is not known."""
    announcements: tuple[wire.CertificateAnnouncement, ...] = ()
    """Announcements of certificates that replace the pinned one."""

    @property
    def pins(self) -> PinnedCertificates:
        """The certificates to accept: the pinned one, and those that were announced since."""
        first = self.fingerprint.lower().removeprefix("sha256:").replace(":", "")
        return PinnedCertificates(first, self.announcement_key, self.announcements)

    def add_announcements(self, announcements: Iterable[wire.CertificateAnnouncement]) -> GatewayEndpoint:
        """Return this endpoint with those further announcements that the announcement key has signed."""
        return replace(self, announcements=self.pins.add_announcements(announcements).announcements)

    @property
    def websocket_url(self) -> str:
        """Return the URL of the WebSocket: the address as ws:// or wss://, followed by wire.AGENT_PATH."""
        return "ws" + self.address.removeprefix("http").rstrip("/") + wire.AGENT_PATH


class HttpStatusError(AgentsError):
    """The gateway refused a request. The text holds the reason, `status` the HTTP status, `code` the error code.

    `retry_after` is the number of seconds that the gateway asks to wait, 0 when it names none.
    """

    def __init__(self, status: int, reason: str, retry_after: float = 0.0, code: str = "") -> None:
        super().__init__(f"the gateway refused ({status}): {reason}")
        self.status, self.code = status, code
        self.retry_after = retry_after


class _PinnedSSLObject(ssl.SSLObject):
    """A TLS connection whose handshake fails unless the server's certificate is one of the accepted ones.

    Its context, which must be a _PinnedSSLContext, contains the accepted certificates. The error is
    ssl.SSLCertVerificationError; no request has been sent to the server then. `create_tls_context` sets the context so
    that certificate authorities and the host name are not checked.
    """

    def do_handshake(self) -> None:
        """Do the handshake, and look for the certificate's SHA-256 among the accepted ones. Raises
        ssl.SSLCertVerificationError if it is not one of them."""
        super().do_handshake()
        pins, now, actual = cast(_PinnedSSLContext, self.context).pins, time.time(), read_peer_fingerprint(self)
        if actual not in pins.list_accepted(now):
            rule = "this host accepts only" if pins.announcements else "the join token pins"
            raise ssl.SSLCertVerificationError(
                f"the gateway's certificate is sha256:{actual}, {rule} {pins.describe(now)}"
            )


class _PinnedSSLContext(ssl.SSLContext):
    """A TLS context whose connections accept only these certificates."""

    pins: PinnedCertificates
    sslobject_class = _PinnedSSLObject


def read_peer_fingerprint(connection: ssl.SSLObject) -> str:
    """Return the SHA-256 of the server's certificate, in lower-case hexadecimal."""
    return hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()


def create_tls_context(gateway: GatewayEndpoint) -> ssl.SSLContext | None:
    """Return the TLS context for the gateway, None when its address is http.

    With a fingerprint, only the pinned certificate is accepted, and those that were announced since; without one, the
    system's certificate authorities decide. The pin is checked inside the handshake, so neither the request nor the
    credential reaches another server.
    """
    if not gateway.address.startswith("https:"):
        return None
    if not gateway.fingerprint:
        return ssl.create_default_context()
    context = _PinnedSSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _skip_authorities(context)
    context.pins = gateway.pins
    return context


def _skip_authorities(context: ssl.SSLContext) -> None:
    """Let the context accept certificates of any authority and name, with TLS 1.2 or later."""
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2


async def fetch_announcements(gateway: GatewayEndpoint, timeout: float) -> GatewayEndpoint:
    """Return the endpoint with the announcements that a server with an unknown certificate has, as far as the
    announcement key has signed them.

    Nothing secret is sent: the request is the one for a challenge, which any client may make. Raises the errors of
    `request_challenge`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _skip_authorities(context)
    challenge, _, _ = await request_challenge(gateway, context, timeout)
    return gateway.add_announcements(challenge.announcements)


async def fetch_challenge(
    gateway: GatewayEndpoint, context: ssl.SSLContext | None, timeout: float
) -> tuple[credentials.Challenge, GatewayEndpoint]:
    """Fetch a challenge (a nonce to sign); return it with the gateway narrowed to the server that issued it.

    If a certificate is pinned, the narrowed endpoint pins the certificate that this server has, and no other, because
    the agent signs its fingerprint. So the connection must go to the same address, although every gateway accepts the
    nonce. Raises the errors of `request_challenge`.
    """
    received, gateway, _ = await request_challenge(gateway, context, timeout)
    return received, gateway


async def request_challenge(
    gateway: GatewayEndpoint, context: ssl.SSLContext | None, timeout: float
) -> tuple[credentials.Challenge, GatewayEndpoint, Message]:
    """Fetch a challenge as `fetch_challenge` does, and return the headers of the answer as the third value.

    `timeout` is in seconds. Raises HttpStatusError, also when the two sides have no wire version in common, OSError
    (unreachable, TLS, time-out) or wire.MalformedMessageError.
    """
    async with (
        asyncio.timeout(timeout),
        _open_request(gateway, context, wire.CHALLENGE_PATH, "1.1", "Connection: close\r\n") as (reader, server),
    ):
        data = await _read_rest(reader)
    status, headers, body = _parse_response(data, gateway.address)
    if status != 200:
        raise parse_refusal(status, headers, body)
    try:
        received = msgspec.json.decode(body, type=credentials.Challenge)
    except msgspec.DecodeError as error:
        raise wire.MalformedMessageError(f"{gateway.address} answers, but not as a gateway does: {error}") from None
    if not set(received.versions) & set(wire.VERSIONS):
        raise HttpStatusError(
            status,
            f"it supports the wire versions {', '.join(received.versions)}, and this agent {', '.join(wire.VERSIONS)}: "
            "upgrade one of them",
        )
    return received, server, headers


def parse_refusal(status: int, headers: Any, body: bytes) -> HttpStatusError:
    """Build an HttpStatusError from an HTTP answer: `error` and `code` of its JSON, else the status's standard text."""
    code = ""
    try:
        document = msgspec.json.decode(body, type=dict[str, Any])
        reason, code = str(document["error"])[:500], str(document.get("code", ""))[:64]
    except (msgspec.DecodeError, KeyError, RecursionError):
        reason = http.client.responses.get(status, "no reason given")
    return HttpStatusError(status, " ".join(reason.split()), _parse_retry_after(headers.get("Retry-After")), code)


def _parse_retry_after(value: str | None) -> float:
    """Return the seconds of a Retry-After header, at most MAX_RETRY_AFTER_S; 0 when it is absent or not a number."""
    try:
        return min(max(float(value or 0), 0.0), MAX_RETRY_AFTER_S)
    except ValueError:  # the header may also hold a date, but our gateway never sends one
        return 0.0


async def download_file(
    gateway: GatewayEndpoint,
    context: ssl.SSLContext | None,
    path: str,
    authorization: str,
    write_piece: Callable[[bytes], None],
) -> None:
    """Download `path` and pass each piece to `write_piece`, up to the end of the connection.

    The length is not checked: the caller must do that. Raises HttpStatusError when the status is not 200, OSError
    (also when nothing comes for IO_TIMEOUT_S seconds), wire.MalformedMessageError, and whatever `write_piece` raises.
    """
    header = f"Authorization: {authorization}\r\n"
    # The answer to an HTTP/1.0 request is never chunked: its body ends where the connection ends.
    async with _open_request(gateway, context, path, "1.0", header) as (reader, _):
        async with asyncio.timeout(IO_TIMEOUT_S):
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, asyncio.LimitOverrunError):
                raise wire.MalformedMessageError(f"{gateway.address} answers, but not with HTTP") from None
            status, headers, _ = _parse_response(head, gateway.address, method="HEAD")
            if status != 200:
                raise parse_refusal(status, headers, await _read_rest(reader, headers.get("Content-Length", "")))
        while True:
            async with asyncio.timeout(IO_TIMEOUT_S):
                piece = await reader.read(MAX_RESPONSE_BYTES)
            if not piece:
                return
            write_piece(piece)


@asynccontextmanager
async def _open_request(
    gateway: GatewayEndpoint, context: ssl.SSLContext | None, path: str, http_version: str, headers: str
) -> AsyncIterator[tuple[asyncio.StreamReader, GatewayEndpoint]]:
    """Send a GET request on a new connection; yield the stream of the answer, and the endpoint narrowed to the server
    that was reached: to its IP address and, if a certificate is pinned, to its certificate.

    `path` is appended to the path of the gateway's address. The connection is aborted at the end.
    """
    parts = urlsplit(gateway.address)
    port = parts.port or (443 if context else 80)
    async with asyncio.timeout(IO_TIMEOUT_S):
        reader, writer = await asyncio.open_connection(
            gateway.ip_address or parts.hostname,
            port,
            limit=MAX_RESPONSE_BYTES,
            ssl=context,
            server_hostname=parts.hostname if context else None,
            happy_eyeballs_delay=HAPPY_EYEBALLS_DELAY_S,
        )
    try:
        request_line = f"GET {parts.path.rstrip('/')}{path} HTTP/{http_version}"
        writer.write(f"{request_line}\r\nHost: {parts.netloc}\r\n{headers}\r\n".encode())
        server = replace(gateway, ip_address=str(writer.get_extra_info("peername")[0]))
        if gateway.fingerprint and (connection := writer.get_extra_info("ssl_object")):
            server = replace(server, fingerprint=read_peer_fingerprint(connection), announcements=())
        yield reader, server
    finally:
        writer.transport.abort()


async def _read_rest(reader: asyncio.StreamReader, content_length: str = "") -> bytes:
    """Read to the end of the connection, but at most `content_length` bytes if the header gave it, and at most
    MAX_RESPONSE_BYTES.

    A proxy may keep the connection open after the body.
    """
    # A number with more digits is above the limit, and `int` refuses thousands of digits.
    length = int(content_length) if re.fullmatch("[0-9]{1,9}", content_length) else MAX_RESPONSE_BYTES
    try:
        return await reader.readexactly(min(length, MAX_RESPONSE_BYTES))
    except asyncio.IncompleteReadError as error:
        return error.partial


def _parse_response(data: bytes, address: str, method: str = "GET") -> tuple[int, Message, bytes]:
    """Parse the answer to a request; return (status, headers, body). The body is empty when the method is HEAD.

    Raises wire.MalformedMessageError when it is not HTTP.
    """

    class BytesSocket:
        """Stands in for the socket from which http.client reads; it holds the bytes that were received already."""

        def makefile(self, _mode: str) -> io.BytesIO:
            """Return the received bytes as a file."""
            return io.BytesIO(data)

    response = http.client.HTTPResponse(cast(Any, BytesSocket()), method=method)
    try:
        response.begin()
        return response.status, response.headers, response.read()
    except http.client.HTTPException as error:
        raise wire.MalformedMessageError(f"{address} answers, but not with HTTP: {type(error).__name__}") from None
