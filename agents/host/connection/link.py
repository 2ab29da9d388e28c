"""Keep one WebSocket connection to the gateway: handshake, back-off and reconnection.

`session` exchanges the messages on a connection once it is open.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.typing import Subprotocol

from agents import credentials, wire
from agents.host.backoff import Backoff, Pace, worth_saying
from agents.host.connection import http
from agents.host.connection.authority import Authority
from agents.host.connection.identity import Keyring
from agents.host.connection.session import (
    ConnectionLostError,
    Desk,
    Session,
    SessionRefusedError,
    next_message,
    statuses,
)
from agents.host.discovery.sampler import Meter
from agents.host.journal.journal import Journal
from drivers.configuration import ConfigurationError
from drivers.inventory import Health

log = logging.getLogger("cyborg.link")

RECEIVE_LIMIT = 1024 * 1024
"""Largest message to accept from the gateway, in bytes."""


@dataclass
class Link:
    """Keeps this host connected to the gateway. All state that must outlive the process is in `journal`."""

    journal: Journal
    keys: Keyring
    gateway: http.Gateway
    hello: wire.Hello
    on_limit: Callable[[int], None]
    """Called with the gateway's message limit in bytes; the reporter then shrinks a larger report and journals it."""
    pace: Pace = field(default_factory=Pace)
    desk: Desk | None = None
    """The receiver of commands; without one, commands are dropped."""
    authority: Authority = field(default_factory=Authority)
    """Tracks whether this host may write to Placement: it gets each new or lost connection and each writer epoch."""
    meter: Meter | None = None
    """The source of samples; it gets each new or lost connection too. None: no samples are sent."""

    def __post_init__(self) -> None:
        self._backoff = Backoff(self.pace)
        self.wake = asyncio.Event()
        """Wakes the sending loop: set by `offer_report`, the Ack of a report, and new results, progress and samples."""
        self.looked = False
        """Whether this process has made or confirmed the journal's report; False while it is an earlier process's."""
        report = self.journal.report if self.journal.acknowledged else None
        self.known: dict[tuple[str, str], Health] = statuses(report) if report else {}
        """The health of each device in the last acknowledged report, by (driver, device key)."""
        self._said: tuple[str, int] = ("", 0)
        self._with_following = False
        """Whether the next attempt authenticates with the next key instead of the current one."""
        self._with_token = bool(self.gateway.secret) and not self.journal.has_joined_with(self.gateway.secret)
        self._tls = http.tls(self.gateway)
        self.unknown = 0
        """How many messages were dropped because this release does not know or use their type."""

    def offer(self) -> None:
        """Allow the journal's report to be sent: this process has asked the drivers, so the report is current."""
        self.looked = True
        self.wake.set()

    async def run(self) -> None:
        """Connect, exchange messages, and reconnect after each end. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(await self._attempt())

    async def _attempt(self) -> float:
        """Make one connection and serve it until it ends. Return the delay before the next attempt, in seconds."""
        began = asyncio.get_running_loop().time()
        try:
            await self._connect()
            reason = "the connection ended"
        except http.HttpStatusError as error:
            return self._refused(error)
        except SessionRefusedError as error:
            return self._retry(f"the gateway closed the connection: {error}")
        except (ConnectionLostError, wire.MalformedMessageError) as error:
            reason = str(error)
        except TimeoutError:
            reason = f"no answer in {self.pace.open:.0f} s"
        except (OSError, WebSocketException) as error:
            reason = str(error) or type(error).__name__
        if asyncio.get_running_loop().time() - began >= self.pace.settled:
            self._backoff.reset()
        return self._retry(reason)

    def _refused(self, error: http.HttpStatusError) -> float:
        """Handle a refused handshake: choose key and token for the next attempt; return its delay in seconds."""
        # Behind a load balancer, the gateway that issued the challenge may have stopped before it was answered.
        if error.status not in (200, 401, 403) or error.code == "challenge":
            return self._retry(str(error), error.retry_after)
        if error.code == wire.KEY_BARRED and not self._with_following and self._prepared():
            self._with_following = True
            return self._retry(str(error))
        # During a key rotation the gateway may know the current key or the next one: try them in turn.
        if self.keys.following is not None and error.status in (401, 403):
            self._with_following = not self._with_following
            if self._with_following:
                return self._retry(str(error))
        # An expired token may come with a key that is bound already, and a gateway that has lost the key may still
        # accept the token: so attempts with and without the token alternate.
        if self.gateway.secret and error.status in (401, 403):
            self._with_token = not self._with_token
        delay = max(error.retry_after, self.pace.slow * (0.75 + 0.5 * self.pace.draw()))
        self._say(str(error), delay)
        return delay

    def _prepared(self) -> bool:
        try:
            self.keys.prepare()
        except ConfigurationError as error:
            log.error("%s", error)
            return False
        return True

    def _retry(self, reason: str, at_least: float = 0.0) -> float:
        delay = at_least + self._backoff.next()
        self._say(reason, delay)
        return delay

    def _say(self, reason: str, delay: float) -> None:
        """Log why the connection failed, the same reason only at its 1st, 2nd, 4th, 8th … time."""
        times = self._said[1] + 1 if reason == self._said[0] else 1
        self._said = (reason, times)
        if worth_saying(times):
            again = f" ({times} times so far)" if times > 1 else ""
            log.warning("%s: %s%s; next attempt in %.1f s", self.gateway.address, reason, again, delay)

    async def _connect(self) -> None:
        """Authenticate, open the WebSocket and serve it until it ends.

        Raises http.HttpStatusError, SessionRefusedError, ConnectionLostError, wire.MalformedMessageError, OSError or
        WebSocketException.
        """
        challenge, gateway = await http.challenge(self.gateway, self._tls, self.pace.open)
        secret = self.gateway.secret if self._with_token else ""
        following = self.keys.following if self._with_following else None
        identity = following or self.keys.current
        credential = identity.credential(challenge, self.journal.epoch, self.gateway.fingerprint, secret)
        try:
            async with connect(
                gateway.socket_address,
                host=gateway.at,
                subprotocols=[Subprotocol(version) for version in wire.VERSIONS],
                additional_headers={"Authorization": credentials.authorization(credential)},
                compression=None,
                proxy=None,
                ssl=self._tls,
                open_timeout=self.pace.open,
                ping_interval=self.pace.ping,
                ping_timeout=self.pace.ping,
                close_timeout=0.5,
                max_size=RECEIVE_LIMIT,
            ) as socket:
                if socket.subprotocol not in wire.VERSIONS:
                    raise ConnectionLostError(f"the gateway chose the wire version {socket.subprotocol!r}")
                await self._talk(socket, secret, identity is following)
        except InvalidStatus as error:
            response = error.response
            raise http.refusal(response.status_code, response.headers, bytes(response.body or b"")) from None

    async def _talk(self, socket: ClientConnection, secret: str, with_following: bool) -> None:
        """Exchange Welcome and Hello, then run a Session until it fails.

        If the gateway has seen a later epoch of this host than the journal's, raise the journal's epoch above that one,
        then raise ConnectionLostError, so that the agent reconnects with the new epoch.
        """
        async with asyncio.timeout(self.pace.open):
            welcome = await self._welcome(socket)
        if with_following:
            self.adopt()
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
        self._remember(secret)
        self.on_limit(welcome.max_bytes)
        self._said = ("", 0)
        log.info("connected to %s as %s", self.gateway.address, self.keys.current.host)
        await socket.send(wire.encode(self.hello))
        session = Session(self, socket, welcome)
        if self.meter:
            self.meter.connected()
        try:
            await _until_one_fails(session.receive(), session.send())
        finally:
            self.authority.lost()
            if self.meter:
                self.meter.lost()

    async def _welcome(self, socket: ClientConnection) -> wire.Welcome:
        while True:
            message = await next_message(socket)
            if isinstance(message, wire.Welcome):
                return message
            if isinstance(message, wire.Refuse):
                raise SessionRefusedError(f"{message.reason} [{message.code}]")
            self.dropped(message)

    def dropped(self, message: wire.Message | wire.Unknown) -> None:
        """Count and drop a message whose type this release does not know or use (promise C2)."""
        self.unknown += 1
        log.debug("dropped a message from the gateway: %r", message)

    def adopt(self) -> None:
        """Make the next key the current one, because the gateway has accepted it."""
        self.keys.adopt()
        self._with_following = False
        log.info("%s has a new key: %s", self.keys.current.host, self.keys.current.public_key)

    def _remember(self, secret: str) -> None:
        """Journal the gateway's address and that the token was used, so that a restart needs no token."""
        self._with_token = False
        try:
            self.journal.joined(self.gateway.address, self.gateway.fingerprint, secret)
        except sqlite3.OperationalError as error:
            log.error("the journal cannot store the gateway's address (%s): keep the join token until it can", error)


async def _until_one_fails(*works: Coroutine[Any, Any, None]) -> None:
    """Run the coroutines until one raises or all have ended; cancel the others, wait for them, and raise its error."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
