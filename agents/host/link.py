"""The one connection to the gateway: handshake, resumption, beats, acknowledgements, back-off. Run by `main`.

What is sent is always the journal's last report; this file never makes one. `report` offers it.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus, WebSocketException
from websockets.typing import Subprotocol

from agents import wire
from agents.host import door
from agents.host.identity import Keyring
from agents.host.journal import Journal
from agents.host.pace import Backoff, Owed, Pace, worth_saying
from drivers.configuration import ConfigurationError

log = logging.getLogger("cyborg.link")

RECEIVE_LIMIT = 1024 * 1024
"""Bytes of one message from the gateway."""


class Lost(Exception):
    """The connection has to be made anew; the text says why."""


class Dismissed(Exception):
    """The gateway sent Refuse."""


@dataclass
class Link:
    """Keeps a host connected. All state that must outlive the process is in `journal`."""

    journal: Journal
    keys: Keyring
    gateway: door.Gateway
    hello: wire.Hello
    on_limit: Callable[[int], None]
    """Told the largest message this gateway takes; a larger report is made smaller and journaled anew."""
    pace: Pace = field(default_factory=Pace)

    def __post_init__(self) -> None:
        self._backoff = Backoff(self.pace)
        self.wake = asyncio.Event()
        """Set by `offer`, and by an Ack that lets the next report go."""
        self.looked = False
        """Whether the journal's report is what this process has seen, not what an earlier one had."""
        self._said: tuple[str, int] = ("", 0)
        self._with_following = False
        """Whether the next attempt tries the key to come instead of the one in use."""
        self._with_token = bool(self.gateway.secret) and not self.journal.has_joined_with(self.gateway.secret)
        self._tls = door.tls(self.gateway)
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
        except door.Refused as error:
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

    def _refused(self, error: door.Refused) -> float:
        if error.status not in (200, 401, 403):
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
        challenge = await door.challenge(self.gateway, self._tls, self.pace.open)
        secret = self.gateway.secret if self._with_token else ""
        following = self.keys.following if self._with_following else None
        identity = following or self.keys.current
        credential = identity.credential(challenge, self.journal.epoch, self.gateway.fingerprint, secret)
        try:
            async with connect(
                self.gateway.socket_address,
                subprotocols=[Subprotocol(version) for version in wire.VERSIONS],
                additional_headers={"Authorization": wire.authorization(credential)},
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
            raise door.refusal(response.status_code, response.headers, bytes(response.body or b"")) from None

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
        session = _Session(self, socket, welcome)
        await _until_one_fails(session.receive(), session.send())

    async def _welcome(self, socket: ClientConnection) -> wire.Welcome:
        while True:
            message = await _next(socket)
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


class _Session:
    """One connection between Welcome and its end: two loops over one socket."""

    def __init__(self, link: Link, socket: ClientConnection, welcome: wire.Welcome) -> None:
        self._link = link
        self._journal = link.journal
        self._socket = socket
        self._beat_s = min(max(welcome.beat_s, 0.05), 3600.0)
        self._applied = welcome.applied_hash
        self._max_bytes = welcome.max_bytes
        self._jitter_s = min(max(welcome.jitter_s, 0.0), 300.0)
        self._owed = Owed(self._beat_s, link.pace)
        self._too_large = ""
        self._clock = asyncio.get_running_loop().time

    async def receive(self) -> None:
        """Take Acks until the gateway closes or refuses."""
        while True:
            message = await _next(self._socket)
            if isinstance(message, wire.Ack):
                self._owed.acknowledged(message.of, message.seq, self._clock())
                if message.of == "Report":
                    self._acknowledge(message.seq)
                elif message.of == "NewKey" and self._link.keys.following is not None:
                    self._link.adopt()
            elif isinstance(message, wire.Probe):
                await self._socket.send(wire.encode(wire.Alive(message.nonce)))
            elif isinstance(message, wire.Rotate):
                await self._rotate()
            elif isinstance(message, wire.Refuse):
                raise Dismissed(f"{message.reason} [{message.code}]")
            else:
                self._link.dropped(message)

    async def _rotate(self) -> None:
        """Both keys are on disk before the gateway hears of the new one, until it has acknowledged it."""
        keys = self._link.keys
        try:
            following = keys.prepare()
        except ConfigurationError as error:
            log.error("a new key was asked for, and the present one stays: %s", error)
            return
        await self._socket.send(wire.encode(keys.current.successor(following, self._link.gateway.fingerprint)))

    def _acknowledge(self, seq: int) -> None:
        try:
            self._journal.acknowledge(seq)
        except sqlite3.OperationalError as error:
            log.error("the journal cannot note an acknowledgement (%s): the report may be sent once more", error)
        report = self._journal.report
        if report is not None and report.seq == seq:
            self._applied = report.hash
        self._link.wake.set()

    async def send(self) -> None:
        """Beats when due, the journal's report when it is not the gateway's; raises Lost on silence.

        Returns when the connection is closed: `receive` may still have a Refuse to read, and then says why.
        """
        try:
            await self._send()
        except ConnectionClosed:
            return

    async def _send(self) -> None:
        draw = self._link.pace.draw
        now = self._clock()
        beat_at, seq = now + draw() * self._beat_s, 0
        report_from = now + draw() * self._jitter_s
        while True:
            self._link.wake.clear()
            now = self._clock()
            if sentence := self._owed.overdue(now):
                raise Lost(sentence)
            if now >= beat_at:
                seq, beat_at = seq + 1, now + self._beat_s
                self._owed.sent("Beat", seq, now)
                await self._socket.send(wire.encode(wire.Beat(seq=seq)))
            if now >= report_from:
                await self._report()
            waits = [beat_at, self._owed.due()] + ([report_from] if now < report_from else [])
            await _set_or_passed(self._link.wake, min(waits) - self._clock())

    async def _report(self) -> None:
        report = self._journal.report
        if report is None or self._owed.report is not None:
            return
        if self._journal.acknowledged:
            if report.hash == self._applied or not self._link.looked:
                return
            try:
                report = self._journal.offer_again(report)
            except sqlite3.OperationalError as error:
                log.error("the journal cannot number a report (%s): trying again with the next beat", error)
                return
        text = wire.encode(report)
        size = len(text.encode())
        if size > self._max_bytes:
            if report.hash != self._too_large:
                self._too_large = report.hash
                log.error(
                    "report %d has %d bytes, the gateway takes %d: not sent",
                    report.seq,
                    size,
                    self._max_bytes,
                )
            return
        self._owed.sent("Report", report.seq, self._clock())
        await self._socket.send(text)


async def _next(socket: ClientConnection) -> wire.FromGateway | wire.Unknown:
    try:
        return wire.decode_from_gateway(await socket.recv())
    except ConnectionClosed as error:
        frame = error.rcvd
        said = f" ({frame.code} {frame.reason})".replace(" )", ")") if frame else ""
        raise Lost(f"the connection was closed{said}") from None


async def _set_or_passed(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(max(seconds, 0)):
            await event.wait()
    except TimeoutError:
        return  # the caller looks at the clock


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
