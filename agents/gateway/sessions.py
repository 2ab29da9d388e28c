"""Which connection speaks for a host, and when it must stop: takeovers, clones, decisions of people.

Called by `gateway` on the event loop. A key belongs to one living process. Who connects with the key of a connection
that is still open is compared with it: the same epoch and boot are the same process, which has lost its older socket.
Another process is a restart, a reboot, or a copy of the key elsewhere; what tells them apart is whether somebody still
holds the older connection. So that one is sent a fresh nonce *after* the newcomer has spoken. An answer proves that two
live at once: both are sent away, and the key is barred until a person decides. Silence for `PROBE_S` (a dead host's
half-open connection) or its end proves nothing against the newcomer, who takes over. What was on its way already is no
answer.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from agents import credentials, key_revocation, wire
from agents.enrolment import Identity, highest_epoch
from agents.key_revocation import Connection, News

log = logging.getLogger(__name__)

PROBE_S = 3.0
MAX_COMING = 4
"""So many connections of one host may be open that have said nothing yet; the oldest makes room."""

Bar = Callable[[int, str, Connection, Connection], None]


class Expelled(Exception):
    """This connection is to end; the peer is told why."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Session:
    """One connected agent. `last` is the newest (epoch, seq) this process has made durable or found applied."""

    __slots__ = (
        "address",
        "applied",
        "boot_id",
        "contested",
        "epoch",
        "expelled",
        "fingerprint",
        "greeted",
        "highest_epoch",
        "identity",
        "key",
        "last",
        "next_key",
        "offers_newer",
        "outbox",
        "probes",
        "progress",
        "progress_at",
        "rotating",
        "send",
        "task",
        "telling",
        "version",
    )

    def __init__(
        self,
        identity: Identity,
        credential: credentials.Credential,
        fingerprint: str,
        version: str,
        scope: Any,
        send: Any,
    ) -> None:
        self.identity, self.key = identity, identity.public_key
        self.epoch, self.fingerprint = credential.epoch, fingerprint
        self.version, self.send = version, send
        self.offers_newer = any(name not in wire.VERSIONS for name in scope["subprotocols"])
        self.address = str((scope.get("client") or ("unknown",))[0])[:64]
        self.applied = identity.applied_hash
        self.last = (0, 0)
        self.highest_epoch = highest_epoch(identity.epoch)
        self.boot_id = self.next_key = ""
        self.rotating = self.contested = self.greeted = False
        self.outbox: list[str] = []
        self.progress: dict[int, wire.Progress] = {}
        self.progress_at = 0.0
        self.telling: list[asyncio.Future[bool]] = []
        """What was said of progress last, on its way to the database."""
        self.probes: dict[str, asyncio.Future[bool]] = {}
        self.expelled: Expelled | None = None
        self.task = asyncio.current_task()

    def expel(self, code: str, reason: str) -> None:
        """End it, whatever it waits for; its own task says why. Called from another task."""
        if self.expelled is None and self.task is not None:
            self.expelled = Expelled(code, reason)
            self.task.cancel()

    def connection(self) -> Connection:
        """As an event names it."""
        return Connection(self.address, self.boot_id, self.epoch)


class Holders:
    """The sessions of one gateway by host. `bar` writes that two hold a key."""

    def __init__(self, bar: Bar) -> None:
        self.by_host: dict[int, Session] = {}
        self._coming: dict[int, list[Session]] = {}
        self._bar = bar
        self._tasks: set[asyncio.Task[Any]] = set()

    def enter(self, session: Session) -> None:
        """A new connection. Where its host has one already, it waits for its own first message: `settle`."""
        host = session.identity.host_id
        if self.by_host.setdefault(host, session) is not session:
            waiting = self._coming.setdefault(host, [])
            waiting.append(session)
            if len(waiting) > MAX_COMING:
                waiting.pop(0).expel("superseded", "this host has connected again")

    def leave(self, session: Session) -> None:
        """It has ended."""
        host = session.identity.host_id
        if self.by_host.get(host) is session:
            del self.by_host[host]
        self._arrived(session)
        for asked in session.probes.values():
            if not asked.done():
                asked.set_result(False)

    async def settle(self, session: Session) -> None:
        """The session has spoken: it becomes its host's, or raises Expelled. See the rule above."""
        host = session.identity.host_id
        while (older := self.by_host.get(host)) is not session:
            if older is None:
                self.by_host[host] = session
            elif older.identity.number > session.identity.number:
                raise Expelled("superseded", "this host has connected again")
            elif _same_process(older.connection(), session.connection()):
                self._supersede(older)
            elif await self.answers(older):
                raise self._clone(older, session.connection())
            elif self.by_host.get(host) is older:
                self._supersede(older)
        self._arrived(session)

    async def answers(self, session: Session) -> bool:
        """Whether somebody still holds this connection: it gives back a nonce made now."""
        nonce = secrets.token_urlsafe(12)
        asked = session.probes[nonce] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(PROBE_S):
                await session.send({"type": "websocket.send", "text": wire.encode(wire.Probe(nonce))})
                return await asked
        except (TimeoutError, RuntimeError, OSError):
            return False
        finally:
            session.probes.pop(nonce, None)

    def alive(self, session: Session, nonce: str) -> None:
        """The session has answered a probe."""
        if (asked := session.probes.get(nonce)) and not asked.done():
            asked.set_result(True)

    def hear(self, news: list[News]) -> None:
        """What changed in the database: end what must not go on, ask for new keys."""
        for one in news:
            if holder := self.by_host.get(one.host_id):
                self._judge(holder, one)
            for session in tuple(self._coming.get(one.host_id, ())):
                self._judge(session, one)

    def ask_rotation(self, session: Session) -> None:
        """Ask the agent for a new key, once a connection."""
        if not session.rotating:
            session.rotating = True
            self._start(tell(session, wire.Rotate()))

    def _judge(self, session: Session, now: News) -> None:
        if now.barred:
            session.expel(now.barred, key_revocation.why(now.barred, now.reason, session.identity.host))
        elif now.public_key not in (session.key, session.next_key):
            session.expel("replaced", "another key speaks for this host now")
        elif now.number > session.identity.number:
            if not session.contested:
                session.contested = True
                self._start(self._contested(session, now))
        elif now.rotate:
            self.ask_rotation(session)

    async def _contested(self, session: Session, now: News) -> None:
        """Another gateway has a newer connection of this host; who holds the older one asks."""
        newer = Connection(now.address, now.boot_id, now.epoch)
        if not _same_process(session.connection(), newer) and await self.answers(session):
            self._clone(session, newer)
        else:
            self._supersede(session)

    def _supersede(self, session: Session) -> None:
        session.expel("superseded", "this host has connected again")
        if self.by_host.get(session.identity.host_id) is session:
            del self.by_host[session.identity.host_id]

    def _clone(self, older: Session, newer: Connection) -> Expelled:
        """Bar the key and end the older connection; what to raise in the newer one."""
        first = older.connection()
        self._bar(older.identity.host_id, older.key, first, newer)
        reason = key_revocation.why("clone", key_revocation.both(first, newer), older.identity.host)
        older.expel("clone", reason)
        return Expelled("clone", reason)

    def _arrived(self, session: Session) -> None:
        host = session.identity.host_id
        waiting = self._coming.get(host, [])
        if session in waiting:
            waiting.remove(session)
        if not waiting:
            self._coming.pop(host, None)

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _same_process(one: Connection, other: Connection) -> bool:
    return (one.epoch, one.boot_id) == (other.epoch, other.boot_id)


async def tell(session: Session, message: wire.Message) -> bool:
    """Send a message; see `send_text`."""
    return await send_text(session, wire.encode(message))


async def send_text(session: Session, text: str) -> bool:
    """Send a text frame; return whether the peer was still there.

    The web server raises an error when it is not: what ended the connection is the next event that is received.
    """
    try:
        await session.send({"type": "websocket.send", "text": text})
    except (RuntimeError, OSError) as error:
        log.debug("%s was gone before it was told: %s", session.identity.host, error)
        return False
    return True
