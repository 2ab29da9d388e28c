"""A minimal agent: one asyncio protocol from challenge to the last Ack. The generator must cost less than the server.

Frames are masked with a key of zeros. This is allowed, does not change the text, and costs the server the same as any
other key.
"""

from __future__ import annotations

import asyncio
import base64
import re
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agents import credentials, wire
from agents.host.connection import http
from tests.bench import messages

UPGRADE = (
    "GET {path} HTTP/1.1\r\nHost: bench\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Protocol: {version}\r\nAuthorization: {authorization}\r\n\r\n"
)
CHALLENGE_REQUEST = f"GET {wire.CHALLENGE_PATH} HTTP/1.1\r\nHost: bench\r\nConnection: close\r\n\r\n".encode()


class RefusedError(ConnectionError):
    """The server refused an agent; the text is its response. `status` is 0 if it closed without a response."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        head = reason.lower().partition("\r\n\r\n")[0]
        status, after = re.search(r"http/1\.1 (\d{3})", head), re.search(r"retry-after: *(\d+)", head)
        self.status = int(status[1]) if status else 0
        self.retry_after = float(after[1]) if after else 0.0


@dataclass(frozen=True)
class Key:
    """The key pair of one bench host, created before the measurement starts."""

    private: Ed25519PrivateKey
    public: str


@dataclass(frozen=True)
class Address:
    """The gateway's address. With a certificate's fingerprint agents use TLS and sign the fingerprint."""

    port: int
    fingerprint: str = ""
    tls: ssl.SSLContext | None = None


def local_address(port: int, fingerprint: str = "") -> Address:
    """Return the address of a local gateway; its certificate is checked as the real agent checks it."""
    scheme = "https" if fingerprint else "http"
    return Address(
        port, fingerprint, http.create_tls_context(http.GatewayEndpoint(f"{scheme}://127.0.0.1:{port}", fingerprint))
    )


def create_key(number: int) -> Key:
    """Return the key pair of bench host `number`."""
    return Key(messages.private_key(number), messages.public_key(number))


class _ChallengeRequest(asyncio.Protocol):
    """GET a challenge on a separate connection, as the real agent does, and set the nonce as the future's result."""

    def __init__(self, answered: asyncio.Future[str]) -> None:
        self._answered, self._unread = answered, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast(asyncio.Transport, transport).write(CHALLENGE_REQUEST)

    def data_received(self, data: bytes) -> None:
        self._unread += data

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answered.done():
            return
        status, _, body = self._unread.partition(b"\r\n\r\n")
        if b" 200 " in status[:16] and body:
            self._answered.set_result(msgspec.json.decode(body, type=credentials.Challenge).nonce)
        else:
            self._answered.set_exception(
                RefusedError(f"challenge: {self._unread[:400].decode(errors='replace')} {exc}")
            )


class Peer(asyncio.Protocol):
    """One agent's WebSocket. `on_message(peer, payload)` is called for each text frame after the Welcome, and
    `on_lost(peer)` when the connection ends."""

    def __init__(self, number: int, key: Key, welcomed: asyncio.Future[Peer], epoch: int = 1, host: str = "") -> None:
        self.number, self.epoch, self._key, self._welcomed = number, epoch, key, welcomed
        self.host = host or messages.host_name(number)
        self.welcome = b""
        self.on_lost: Callable[[Peer], None] = lambda peer: None
        self.on_message: Callable[[Peer, bytes], None] = lambda peer, payload: None
        self.transport: asyncio.Transport | None = None
        self.seq = 0
        self.sent_at = 0.0
        self.lost = False
        self._request = b""
        self._unread = b""
        self._upgraded = False

    @property
    def welcomed(self) -> bool:
        """Return whether the Welcome was received or the connection failed before it."""
        return self._welcomed.done()

    def prepare(self, nonce: str, fingerprint: str) -> None:
        """Sign the challenge and build the request for the upgrade."""
        host = self.host
        signature = self._key.private.sign(credentials.build_connect_bytes(host, host, self.epoch, nonce, fingerprint))
        sealed = base64.urlsafe_b64encode(signature).decode()
        credential = credentials.Credential(host, host, self.epoch, nonce, self._key.public, sealed)
        header = credentials.encode_authorization(credential)
        self._request = UPGRADE.format(path=wire.AGENT_PATH, version=wire.VERSIONS[0], authorization=header).encode()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        data = self._unread + data if self._unread else data
        if not self._upgraded:
            head, found, rest = data.partition(b"\r\n\r\n")
            if not found:
                self._unread = data
                return
            if b" 101 " not in head[:16]:
                self._fail(data[:400].decode(errors="replace"))
                return
            self._upgraded, data = True, rest
        self._unread = self._handle_frames(data)

    def _handle_frames(self, data: bytes) -> bytes:
        """Handle all complete frames; return the bytes that are left."""
        at, end = 0, len(data)
        while end - at >= 2:
            kind, size, start = data[at] & 0x0F, data[at + 1], at + 2
            if size == 126:
                if end - start < 2:
                    break
                size, start = int.from_bytes(data[start : start + 2], "big"), start + 2
            if end - start < size:
                break
            at = start + size
            self._handle_frame(kind, data[start:at])
        return data[at:]

    def _handle_frame(self, kind: int, payload: bytes) -> None:
        if kind == 9 and self.transport:
            self.transport.write(bytes((0x8A, 0x80 | len(payload))) + b"\0\0\0\0" + payload)
        elif kind == 1 and not self._welcomed.done():
            self.welcome = payload
            self._welcomed.set_result(self)
        elif kind == 1:
            self.on_message(self, payload)

    def send(self, text: str) -> None:
        """Send one masked text frame."""
        data = text.encode()
        size = len(data)
        if size < 126:
            head = bytes((0x81, 0x80 | size))
        elif size < 65536:
            head = b"\x81\xfe" + size.to_bytes(2, "big")
        else:
            head = b"\x81\xff" + size.to_bytes(8, "big")
        if self.transport:
            self.transport.write(head + b"\0\0\0\0" + data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self.on_lost(self)
        self._fail(f"closed: {exc}")

    def _fail(self, reason: str) -> None:
        if not self._welcomed.done():
            self._welcomed.set_exception(RefusedError(reason))


async def connect(gateway: Address, number: int, key: Key, epoch: int = 1, host: str = "") -> Peer:
    """Connect the agent of `host` (by default bench host `number`): challenge, signature, upgrade, Welcome.

    Raise RefusedError or OSError if one of them fails.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[str] = loop.create_future()
    own_address = (messages.host_address(number), 0)
    request, _ = await loop.create_connection(
        lambda: _ChallengeRequest(answered), "127.0.0.1", gateway.port, ssl=gateway.tls, local_addr=own_address
    )
    try:
        nonce = await answered
    finally:
        request.abort()
    welcomed: asyncio.Future[Peer] = loop.create_future()
    peer = Peer(number, key, welcomed, epoch, host)
    peer.prepare(nonce, gateway.fingerprint)
    socket, _ = await loop.create_connection(
        lambda: peer, "127.0.0.1", gateway.port, ssl=gateway.tls, local_addr=own_address
    )
    try:
        return await welcomed
    except BaseException:
        socket.abort()
        raise
