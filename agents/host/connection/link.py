"""Keeps one connection to the gateway: handshake, back-off, resumption. Run by `main`; `session` is the talk itself."""

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
from agents.host.connection.identity import Keyring
from agents.host.connection.session import Desk, Dismissed, Lost, Session, next_message, statuses
from agents.host.discovery.sampler import Meter
from agents.host.execution.placement_writer import Authority
from agents.host.journal.journal import Journal
from drivers.configuration import ConfigurationError
from drivers.inventory import Health

log = logging.getLogger("cyborg.link")

RECEIVE_LIMIT = 1024 * 1024
"""Bytes of one message from the gateway."""


@dataclass
class Link:
    """Keeps a host connected. All state that must outlive the process is in `journal`."""

    journal: Journal
    keys: Keyring
    gateway: http.Gateway
    hello: wire.Hello
    on_limit: Callable[[int], None]
    """Told the largest message this gateway takes; a larger report is made smaller and journaled anew."""
    pace: Pace = field(default_factory=Pace)
    desk: Desk | None = None
    """Who takes commands."""
    authority: Authority = field(default_factory=Authority)
    """Told of every connection, and of who writes to Placement."""
    meter: Meter | None = None
    """Who reads the load of devices, told of every connection as well."""

    def __post_init__(self) -> None:
        self._backoff = Backoff(self.pace)
        self.wake = asyncio.Event()
        """Set by `offer`, and by an Ack that lets the next report go."""
        self.looked = False
        """Whether the journal's report is what this process has seen, not what an earlier one had."""
        report = self.journal.report if self.journal.acknowledged else None
        self.known: dict[tuple[str, str], Health] = statuses(report) if report else {}
        """How each device was in the last report that was acknowledged."""
        self._said: tuple[str, int] = ("", 0)
        self._with_following = False
        """Whether the next attempt tries the key to come instead of the one in use."""
        self._with_token = bool(self.gateway.secret) and not self.journal.has_joined_with(self.gateway.secret)
        self._tls = http.tls(self.gateway)
        self.unknown = 0
        """Messages of types this release does not know, dropped."""

    def offer(self) -> None:
        """The host has been looked at; what the journal holds is the present."""
        self.looked = True
        self.wake.set()

    async def run(self) -> None:
        """Connect, talk, connect again; ends only by being cancelled."""
        while True:
            await asyncio.sleep(await self._attempt())

    async def _attempt(self) -> float:
        """One connection from challenge to end. Returns the delay before the next, in seconds."""
        began = asyncio.get_running_loop().time()
        try:
            await self._connect()
            reason = "the connection ended"
        except http.Refused as error:
            return self._refused(error)
        except Dismissed as error:
            return self._retry(f"the gateway closed the connection: {error}")
        except (Lost, wire.Malformed) as error:
            reason = str(error)
        except TimeoutError:
            reason = f"no answer in {self.pace.open:.0f} s"
        except (OSError, WebSocketException) as error:
            reason = str(error) or type(error).__name__
        if asyncio.get_running_loop().time() - began >= self.pace.settled:
            self._backoff.reset()
        return self._retry(reason)

    def _refused(self, error: http.Refused) -> float:
        # Behind a balancer the one that made the challenge may have ended before it was answered.
        if error.status not in (200, 401, 403) or error.code == "challenge":
            return self._retry(str(error), error.retry_after)
        if error.code == wire.KEY_BARRED and not self._with_following and self._prepared():
            self._with_following = True
            return self._retry(str(error))
        # While a key is being changed, either may be the one that the gateway knows.
        if self.keys.following is not None and error.status in (401, 403):
            self._with_following = not self._with_following
            if self._with_following:
                return self._retry(str(error))
        # A token that has expired may belong to a key that is bound, and a gateway that forgot the key may
        # still take the token: the next attempt tries the other way.
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
        times = self._said[1] + 1 if reason == self._said[0] else 1
        self._said = (reason, times)
        if worth_saying(times):
            again = f" ({times} times so far)" if times > 1 else ""
            log.warning("%s: %s%s; next attempt in %.1f s", self.gateway.address, reason, again, delay)

    async def _connect(self) -> None:
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
                    raise Lost(f"the gateway chose the wire version {socket.subprotocol!r}")
                await self._talk(socket, secret, identity is following)
        except InvalidStatus as error:
            response = error.response
            raise http.refusal(response.status_code, response.headers, bytes(response.body or b"")) from None

    async def _talk(self, socket: ClientConnection, secret: str, with_following: bool) -> None:
        async with asyncio.timeout(self.pace.open):
            welcome = await self._welcome(socket)
        if with_following:
            self.adopt()
        if welcome.epoch > self.journal.epoch:
            try:
                self.journal.raise_epoch(welcome.epoch)
            except (ValueError, sqlite3.OperationalError) as error:
                raise Lost(f"the journal cannot move above epoch {welcome.epoch}: {error}") from None
            raise Lost(f"the gateway knows this host by a later epoch; moved to {self.journal.epoch}")
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
                raise Dismissed(f"{message.reason} [{message.code}]")
            self.dropped(message)

    def dropped(self, message: wire.Message | wire.Unknown) -> None:
        """Count a message this release has no use for (promise C2)."""
        self.unknown += 1
        log.debug("dropped a message from the gateway: %r", message)

    def adopt(self) -> None:
        """The gateway has taken the key to come."""
        self.keys.adopt()
        self._with_following = False
        log.info("%s has a new key: %s", self.keys.current.host, self.keys.current.public_key)

    def _remember(self, secret: str) -> None:
        self._with_token = False
        try:
            self.journal.joined(self.gateway.address, self.gateway.fingerprint, secret)
        except sqlite3.OperationalError as error:
            log.error("the journal cannot remember the gateway (%s): keep the join token until it can", error)


async def _until_one_fails(*works: Coroutine[Any, Any, None]) -> None:
    """Run all until one raises, and raise that; the others are cancelled and waited for."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
