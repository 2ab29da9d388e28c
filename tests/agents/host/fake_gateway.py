"""A fake gateway for the tests of the agent: real WebSockets and real messages, but no database."""

from __future__ import annotations

import asyncio
import base64
import http
import secrets
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from agents import credentials, wire
from agents.host.backoff import ConnectionTiming
from agents.host.connection.http import GatewayEndpoint
from drivers.inventory import Device, DriverReport
from tests.support.webserver import PATIENCE

QUICK = ConnectionTiming(
    first_backoff_s=0.02,
    max_backoff_s=0.05,
    refused_delay_s=0.05,
    stable_after_s=0.5,
    open_timeout_s=5.0,
    ping_interval_s=20.0,
    ack_timeout_s=15.0,
    report_ack_timeout_s=60.0,
)


async def wait_until(condition: Callable[[], object], seconds: float = 15.0) -> None:
    """Wait until the condition is true. Raise TimeoutError after `seconds` times PATIENCE."""
    async with asyncio.timeout(PATIENCE * seconds):
        while not condition():
            await asyncio.sleep(0.005)


def driver_report(driver: str = "fake_driver", keys: Iterable[str] = ("a",), **more: str) -> DriverReport:
    """Return a driver's answer with one device for each key."""
    devices = tuple(Device(key=key, type="FPGA", vendor="0xABCD", model=more.get("model", "m")) for key in keys)
    return DriverReport(driver=driver, devices=devices, error=more.get("error", ""))


@dataclass
class FakeGateway:
    """Accepts every agent that proves its key. `refusals` has (status, JSON text, headers) for the next upgrades."""

    applied_hash: str = ""
    epoch: int = 0
    beat_s: float = 0.05
    max_bytes: int = wire.MAX_MESSAGE_BYTES
    acknowledge: bool = True
    acknowledge_beats: bool = True
    fingerprint: str = ""
    announcements: tuple[wire.CertificateAnnouncement, ...] = ()
    """The announcements of certificates in its challenges."""
    refusals: list[tuple[int, str, Mapping[str, str]]] = field(default_factory=list)
    after_welcome: list[str] = field(default_factory=list)
    credentials: list[credentials.Credential] = field(default_factory=list)
    hellos: list[wire.Hello] = field(default_factory=list)
    alive: list[wire.Alive] = field(default_factory=list)
    new_keys: list[wire.NewKey] = field(default_factory=list)
    acknowledge_keys: bool = True
    taken: list[int] = field(default_factory=list)
    progress: list[wire.Progress] = field(default_factory=list)
    results: list[wire.Result] = field(default_factory=list)
    acknowledge_results: bool = True
    jitter_s: float = 0.0
    samples: list[wire.Samples] = field(default_factory=list)
    images: dict[str, bytes] = field(default_factory=dict)
    busy_answers: int = 0
    """The number of challenges that will be refused with 503."""
    reports: list[wire.Report] = field(default_factory=list)
    beats: list[wire.Beat] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    sockets: list[ServerConnection] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)
    """Errors of requests and sessions. `open` raises the first one at its end, because websockets only logs them."""
    address: str = ""
    listen_address: str = "127.0.0.1"
    port: int = 0
    _nonces: set[str] = field(default_factory=set)

    @asynccontextmanager
    async def open(self, tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeGateway]:
        """Listen on a free port (the same one after a restart). At its end, raise the first of `errors`."""
        server: Server
        async with serve(
            self._run_session,
            self.listen_address,
            self.port,
            subprotocols=list(wire.VERSIONS),  # type: ignore[arg-type]
            process_request=self._answer_request,
            compression=None,
            ssl=tls,
        ) as server:
            self.port = next(iter(server.sockets)).getsockname()[1]
            self.address = f"{'https' if tls else 'http'}://{self.listen_address}:{self.port}"
            try:
                yield self
            except Exception as failed:
                if self.errors:  # what the test waited for did not come because a session ended with an error
                    raise self.errors[0] from failed
                raise
        if self.errors:
            raise self.errors[0]

    def gateway(self, secret: str = "") -> GatewayEndpoint:
        """Return the gateway's endpoint, as an agent reads it from its join token."""
        return GatewayEndpoint(self.address, self.fingerprint, secret)

    def _answer_request(self, connection: ServerConnection, request: Request) -> Response | None:
        """Answer a request, and keep its error: websockets would only answer 500, and the agent would try again."""
        try:
            return self._request(connection, request)
        except Exception as error:
            self.errors.append(error)
            raise

    def _request(self, connection: ServerConnection, request: Request) -> Response | None:
        self.requests.append(request.path)
        if request.path == wire.CHALLENGE_PATH:
            if self.busy_answers:
                self.busy_answers -= 1
                return connection.respond(http.HTTPStatus.SERVICE_UNAVAILABLE, "{}")
            nonce = secrets.token_urlsafe(18)
            self._nonces.add(nonce)
            challenge = credentials.Challenge(nonce, 30, wire.VERSIONS, self.announcements)
            return connection.respond(http.HTTPStatus.OK, msgspec.json.encode(challenge).decode())
        if request.path.startswith(wire.IMAGE_PATH):
            self._verify_credential(request)
            image = self.images.get(request.path.removeprefix(wire.IMAGE_PATH))
            if image is None:
                return connection.respond(http.HTTPStatus.NOT_FOUND, "")
            response = connection.respond(http.HTTPStatus.OK, "")
            response.body = image
            del response.headers["Content-Length"]
            response.headers["Content-Length"] = str(len(response.body))
            return response
        if self.refusals:
            status, text, headers = self.refusals.pop(0)
            response = connection.respond(http.HTTPStatus(status), text)
            response.headers.update(headers)
            self._verify_credential(request)
            return response
        self._verify_credential(request)
        return None

    def _verify_credential(self, request: Request) -> None:
        credential = credentials.parse_authorization(request.headers["Authorization"])
        self._nonces.remove(credential.nonce)
        signed = credentials.build_connect_bytes(
            credential.host, credential.node, credential.epoch, credential.nonce, self.fingerprint
        )
        key = Ed25519PublicKey.from_public_bytes(base64.urlsafe_b64decode(credential.public_key))
        key.verify(base64.urlsafe_b64decode(credential.signature), signed)
        self.credentials.append(credential)

    async def send_to_agent(self, *commands: wire.Command | wire.Watch) -> None:
        """Send commands or watches to the agent that connected last."""
        for command in commands:
            await self.sockets[-1].send(wire.encode_message(command))

    def _verify_new_key(self, new_key: wire.NewKey) -> None:
        credential = self.credentials[-1]
        data = credentials.build_rotation_bytes(
            credential.host, credential.public_key, new_key.public_key, self.fingerprint
        )
        assert credentials.is_valid_signature(credential.public_key, new_key.signature, data)
        assert credentials.is_valid_signature(new_key.public_key, new_key.proof, data)

    async def _run_session(self, socket: ServerConnection) -> None:
        """Run one session and keep its error, also that of a failed assertion."""
        try:
            await self._session(socket)
        except ConnectionClosed:
            return
        except Exception as error:
            self.errors.append(error)
            raise

    async def _session(self, socket: ServerConnection) -> None:
        self.sockets.append(socket)
        welcome = wire.Welcome(
            beat_s=self.beat_s,
            epoch=self.epoch,
            applied_hash=self.applied_hash,
            max_bytes=self.max_bytes,
            jitter_s=self.jitter_s,
        )
        await socket.send(wire.encode_message(welcome))
        for text in self.after_welcome:
            await socket.send(text)
        async for data in socket:
            await self._handle_message(socket, data)

    async def _handle_message(self, socket: ServerConnection, data: str | bytes) -> None:
        message = wire.decode_from_agent(data)
        if isinstance(message, wire.Report):
            assert message.hash == wire.hash_report_content(message.all_drivers, message.boot_id)
            assert len(data) <= self.max_bytes
            self.reports.append(message)
            if self.acknowledge:
                self.applied_hash = message.hash
                await socket.send(wire.encode_message(wire.Ack(seq=message.seq)))
        elif isinstance(message, wire.Beat):
            self.beats.append(message)
            if self.acknowledge_beats:
                await socket.send(wire.encode_message(wire.Ack(seq=message.seq, of="Beat")))
        elif isinstance(message, wire.NewKey):
            self._verify_new_key(message)
            self.new_keys.append(message)
            if self.acknowledge_keys:
                await socket.send(wire.encode_message(wire.Ack(seq=0, of="NewKey")))
        elif isinstance(message, wire.Taken):
            self.taken += message.numbers
        elif isinstance(message, wire.Result):
            shown = max(((report.epoch, report.seq) for report in self.reports), default=(0, 0))
            assert message.hash == self.applied_hash or (message.epoch, message.seq) <= shown, "the report goes first"
            self.results.append(message)
            if self.acknowledge_results:
                await socket.send(wire.encode_message(wire.Ack(seq=message.number, of="Result")))
        else:
            self._store_message(message)

    def _store_message(self, message: wire.Message | wire.UnknownMessage) -> None:
        """Store a message that needs no answer."""
        if isinstance(message, wire.Hello):
            self.hellos.append(message)
        elif isinstance(message, wire.Alive):
            self.alive.append(message)
        elif isinstance(message, wire.Progress):
            self.progress.append(message)
        elif isinstance(message, wire.Samples):
            self.samples.append(message)
