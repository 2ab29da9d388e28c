"""Keep one WebSocket connection to the gateway: handshake, back-off and reconnection.

`session` exchanges the messages on a connection once it is open.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import ssl
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.typing import Subprotocol

from agents import credentials, wire
from agents.host.backoff import Backoff, ConnectionTiming, should_log_repetition
from agents.host.connection import http
from agents.host.connection.authority import PlacementAuthority
from agents.host.connection.identity import Keyring
from agents.host.connection.session import (
    CommandSink,
    ConnectionLostError,
    GatewaySession,
    SessionRefusedError,
    health_by_device,
    receive_message,
)
from agents.host.discovery.sampler import HostLoadSampler
from agents.host.journal.journal import Journal
from drivers.configuration import ConfigurationError
from drivers.inventory import Health

log = logging.getLogger("cyborg.link")

MAX_RECEIVED_BYTES = 1024 * 1024
"""Largest message to accept from the gateway, in bytes."""


@dataclass
class GatewayLink:
    """Keeps this host connected to the gateway. All state that must outlive the process is in `journal`."""

    journal: Journal
    keys: Keyring
    gateway: http.GatewayEndpoint
    hello: wire.Hello
    on_message_limit: Callable[[int], None]
    """Called with the gateway's message limit in bytes; the reporter then shrinks a larger report and journals it."""
    timing: ConnectionTiming = field(default_factory=ConnectionTiming)
    command_sink: CommandSink | None = None
    """The receiver of commands; without one, commands are dropped."""
    authority: PlacementAuthority = field(default_factory=PlacementAuthority)
    """Tracks whether this host may write to Placement: it gets each new or lost connection and each writer epoch."""
    sampler: HostLoadSampler | None = None
    """The source of samples; it gets each new or lost connection too. None: no samples are sent."""

    def __post_init__(self) -> None:
        self._backoff = Backoff(self.timing)
        self.wake = asyncio.Event()
        """Wakes the sending loop: set by `offer_report`, the Ack of a report, and new results, progress and samples."""
        self.is_report_current = False
        """Whether this process has made or confirmed the journal's report; False while it is an earlier process's."""
        report = self.journal.report if self.journal.acknowledged else None
        self.acknowledged_health: dict[tuple[str, str], Health] = health_by_device(report) if report else {}
        """The health of each device in the last acknowledged report, by (driver, device key)."""
        self._last_failure: tuple[str, int] = ("", 0)
        self._use_next_key = False
        """Whether the next attempt authenticates with the next key instead of the current one."""
        self._use_token = bool(self.gateway.secret) and not self.journal.has_joined_with(self.gateway.secret)
        self._tls_context = http.create_tls_context(self.gateway)
        """The context for the next challenge; it accepts the certificates that were announced so far."""
        self.session_fingerprint = self.gateway.fingerprint
        """Fingerprint of the certificate that the gateway has on the present connection; '' if none is pinned."""
        self.dropped_count = 0
        """How many messages were dropped because this release does not know or use their type."""

    def offer_report(self) -> None:
        """Allow the journal's report to be sent: this process has asked the drivers, so the report is current."""
        self.is_report_current = True
        self.wake.set()

    async def run(self) -> None:
        """Connect, exchange messages, and reconnect after each end. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(await self._connect_once())

    async def _connect_once(self) -> float:
        """Make one connection and serve it until it ends. Return the delay before the next attempt, in seconds."""
        started_at = asyncio.get_running_loop().time()
        try:
            await self._serve_connection()
            reason = "the connection ended"
        except http.HttpStatusError as error:
            return self._handle_refusal(error)
        except SessionRefusedError as error:
            return self._back_off(f"the gateway closed the connection: {error}")
        except (ConnectionLostError, wire.MalformedMessageError) as error:
            reason = str(error)
        except ssl.SSLCertVerificationError as error:
            if await self._learn_announcements():
                return 0.0
            reason = str(error)
        except TimeoutError:
            reason = f"no answer in {self.timing.open_timeout_s:.0f} s"
        except (OSError, WebSocketException) as error:
            reason = str(error) or type(error).__name__
        if asyncio.get_running_loop().time() - started_at >= self.timing.stable_after_s:
            self._backoff.reset()
        return self._back_off(reason)

    def _handle_refusal(self, error: http.HttpStatusError) -> float:
        """Handle a refused handshake: choose key and token for the next attempt; return its delay in seconds."""
        # Behind a load balancer, the gateway that issued the challenge may have stopped before it was answered.
        if error.status not in (200, 401, 403) or error.code == "challenge":
            return self._back_off(str(error), error.retry_after)
        if error.code == wire.CODE_KEY_BARRED and not self._use_next_key and self._prepare_next_key():
            self._use_next_key = True
            return self._back_off(str(error))
        # During a key rotation the gateway may know the current key or the next one: try them in turn.
        if self.keys.next_identity is not None and error.status in (401, 403):
            self._use_next_key = not self._use_next_key
            if self._use_next_key:
                return self._back_off(str(error))
        # An expired token may come with a key that is bound already, and a gateway that has lost the key may still
        # accept the token: so attempts with and without the token alternate.
        if self.gateway.secret and error.status in (401, 403):
            self._use_token = not self._use_token
        delay = max(error.retry_after, self.timing.refused_delay_s * (0.75 + 0.5 * self.timing.draw_fraction()))
        self._log_failure(str(error), delay)
        return delay

    def _prepare_next_key(self) -> bool:
        """Create the next key if there is none; return False, and log the error, when it cannot be written."""
        try:
            self.keys.prepare_next_key()
        except ConfigurationError as error:
            log.error("%s", error)
            return False
        return True

    def _back_off(self, reason: str, at_least: float = 0.0) -> float:
        """Count and log a failure; return the delay before the next attempt: `at_least` plus the back-off, in
        seconds."""
        delay = at_least + self._backoff.next_delay()
        self._log_failure(reason, delay)
        return delay

    def _log_failure(self, reason: str, delay: float) -> None:
        """Log why the connection failed, the same reason only at its 1st, 2nd, 4th, 8th … time."""
        count = self._last_failure[1] + 1 if reason == self._last_failure[0] else 1
        self._last_failure = (reason, count)
        if should_log_repetition(count):
            count_note = f" ({count} times so far)" if count > 1 else ""
            log.warning("%s: %s%s; next attempt in %.1f s", self.gateway.address, reason, count_note, delay)

    async def _serve_connection(self) -> None:
        """Authenticate, open the WebSocket and serve it until it ends.

        Raises http.HttpStatusError, SessionRefusedError, ConnectionLostError, wire.MalformedMessageError, OSError or
        WebSocketException.
        """
        challenge, gateway = await http.fetch_challenge(self.gateway, self._tls_context, self.timing.open_timeout_s)
        secret = self.gateway.secret if self._use_token else ""
        next_identity = self.keys.next_identity if self._use_next_key else None
        identity = next_identity or self.keys.current_identity
        self.session_fingerprint = gateway.fingerprint
        credential = identity.create_credential(challenge, self.journal.epoch, gateway.fingerprint, secret)
        try:
            async with connect(
                gateway.websocket_url,
                host=gateway.ip_address,
                subprotocols=[Subprotocol(version) for version in wire.VERSIONS],
                additional_headers={"Authorization": credentials.encode_authorization(credential)},
                compression=None,
                proxy=None,
                ssl=http.create_tls_context(gateway) if gateway.fingerprint else self._tls_context,
                open_timeout=self.timing.open_timeout_s,
                ping_interval=self.timing.ping_interval_s,
                ping_timeout=self.timing.ping_interval_s,
                close_timeout=0.5,
                max_size=MAX_RECEIVED_BYTES,
            ) as socket:
                if socket.subprotocol not in wire.VERSIONS:
                    raise ConnectionLostError(f"the gateway chose the wire version {socket.subprotocol!r}")
                await self._run_session(socket, secret, identity is next_identity)
        except InvalidStatus as error:
            response = error.response
            raise http.parse_refusal(response.status_code, response.headers, bytes(response.body or b"")) from None

    async def _run_session(self, socket: ClientConnection, secret: str, used_next_key: bool) -> None:
        """Wait for Welcome, send Hello, and run a GatewaySession until the connection ends. `secret` is that of the
        token that was sent, else ''.

        If `used_next_key` is True, the next key becomes the current one. If the gateway has seen a later epoch of this
        host than the journal's, raise the journal's epoch above that one, then raise ConnectionLostError, so that the
        agent reconnects with the new epoch. Also raises the errors of GatewaySession, and TimeoutError without a
        Welcome.
        """
        async with asyncio.timeout(self.timing.open_timeout_s):
            welcome = await self._receive_welcome(socket)
        if used_next_key:
            self.adopt_next_key()
        if welcome.epoch > self.journal.epoch:
            try:
                self.journal.raise_epoch(welcome.epoch)
            except (ValueError, sqlite3.OperationalError) as error:
                raise ConnectionLostError(
                    f"the journal cannot raise its epoch above {welcome.epoch}: {error}"
                ) from None
            raise ConnectionLostError(
                f"the gateway has seen a later epoch of this host; the epoch is now {self.journal.epoch}"
            )
        self._journal_gateway(secret)
        self.on_message_limit(welcome.max_bytes)
        self._last_failure = ("", 0)
        log.info("connected to %s as %s", self.gateway.address, self.keys.current_identity.host)
        await socket.send(wire.encode_message(self.build_hello()))
        session = GatewaySession(self, socket, welcome)
        if self.sampler:
            self.sampler.on_connect()
        try:
            await _run_until_one_fails(session.receive_messages(), session.send_messages())
        finally:
            self.authority.on_disconnect()
            if self.sampler:
                self.sampler.on_disconnect()

    async def _receive_welcome(self, socket: ClientConnection) -> wire.Welcome:
        """Wait for Welcome and return it; messages that come before it are dropped.

        Raises SessionRefusedError for a Refuse, ConnectionLostError and wire.MalformedMessageError. It has no time
        limit.
        """
        while True:
            message = await receive_message(socket)
            if isinstance(message, wire.Welcome):
                return message
            if isinstance(message, wire.Refuse):
                raise SessionRefusedError(f"{message.reason} [{message.code}]")
            self.drop_message(message)

    def build_hello(self) -> wire.Hello:
        """Return the Hello message, with the newest certificate that this host accepts."""
        return msgspec.structs.replace(self.hello, newest_certificate=self.gateway.pins.newest)

    def accept_certificates(self, message: wire.Certificates) -> bool:
        """Keep the announcements that the gateway sent; return whether this host knows more than before.

        A host that has no announcement key yet keeps the gateway's, because its certificate is pinned on this
        connection. Another key than the known one is logged and ignored. Nothing is kept if no certificate is pinned.
        """
        if not self.gateway.fingerprint:
            return False
        known_key = self.gateway.announcement_key
        if known_key not in ("", message.announcement_key):
            log.error(
                "%s names another announcement key than the one that this host knows: its announcements of certificates"
                " are ignored. If the key was replaced on purpose, this host needs a new join token",
                self.gateway.address,
            )
            return False
        gateway = replace(self.gateway, announcement_key=message.announcement_key)
        return self._store_announcements(gateway.add_announcements(message.announcements))

    async def _learn_announcements(self) -> bool:
        """Ask a gateway whose certificate is not accepted for announcements; return whether there are new ones.

        A host that was away while its gateway's certificate was replaced learns of the new one here.
        """
        if not self.gateway.announcement_key:
            return False
        try:
            gateway = await http.fetch_announcements(self.gateway, self.timing.open_timeout_s)
        except (http.HttpStatusError, wire.MalformedMessageError, OSError) as error:
            log.debug("%s sent no announcements of certificates: %r", self.gateway.address, error)
            return False
        return self._store_announcements(gateway)

    def _store_announcements(self, gateway: http.GatewayEndpoint) -> bool:
        """Use this endpoint, and store its announcements in the journal; return False if there is nothing new.

        If the disk takes no write, they count until the process ends, and the gateway sends them again afterwards.
        """
        if gateway == self.gateway:
            return False
        self.gateway, self._tls_context = gateway, http.create_tls_context(gateway)
        log.info("%s: certificates that this host accepts: %s", gateway.address, gateway.pins.describe(time.time()))
        try:
            self.journal.store_announcements(gateway.announcement_key, gateway.announcements)
        except sqlite3.OperationalError as error:
            log.error("the journal cannot store announcements of certificates: %s", error)
        return True

    def drop_message(self, message: wire.Message | wire.UnknownMessage) -> None:
        """Count and drop a message whose type this release does not know or use (promise C2)."""
        self.dropped_count += 1
        log.debug("dropped a message from the gateway: %r", message)

    def adopt_next_key(self) -> None:
        """Make the next key the current one, in memory and on disk, because the gateway has accepted it.

        If the disk refuses, this is logged, and both keys stay on disk.
        """
        self.keys.adopt_next_key()
        self._use_next_key = False
        log.info("%s has a new key: %s", self.keys.current_identity.host, self.keys.current_identity.public_key)

    def _journal_gateway(self, secret: str) -> None:
        """Journal the gateway's address, its certificates and that the token was used, so that a restart needs no
        token."""
        self._use_token = False
        try:
            self.journal.store_gateway(self.gateway.address, self.gateway.fingerprint, secret)
            self.journal.store_announcements(self.gateway.announcement_key, self.gateway.announcements)
        except sqlite3.OperationalError as error:
            log.error("the journal cannot store the gateway's address (%s): keep the join token until it can", error)


async def _run_until_one_fails(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run the coroutines until one raises or all have ended; cancel the others, wait for them, and raise its error."""
    tasks = [asyncio.ensure_future(work) for work in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
