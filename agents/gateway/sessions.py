"""Sessions of connected agents, and the rule that decides which connection holds a host: takeovers, clones, bars.

Everything here runs on the event loop. A key belongs to one running process. If an agent connects while another
connection with its key is still open, the gateway compares the two:

* The same epoch and boot id: it is the same process, which lost its older socket. The new connection takes over.
* Otherwise it is a restart, a reboot, or a copy of the key on another machine. What distinguishes them is whether a
  process still holds the older connection. After the first message on the new connection, the gateway therefore sends a
  Probe with a fresh nonce on the older one. An answer proves that two processes use the key at once: both connections
  are ended, and the key is barred until a person decides. No answer within `PROBE_TIMEOUT_S` (a dead host's half-open
  connection), or the end of the older connection, proves nothing against the new one, which takes over. A message that
  was already on its way is not an answer, because it does not contain the nonce.
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
"""Maximum number of connections of one host that wait for their first message. One more ends the oldest of them."""

Bar = Callable[[int, str, Connection, Connection], None]


class SessionClosedError(Exception):
    """Raised to end a connection; the peer is sent a Refuse with `code` and `reason`."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class Session:
    """The state of one connected agent.

    `applied_hash` is the hash of the report known to be applied for its host, '' if unknown; `last_acknowledged` the
    newest (epoch, seq) that this connection has acknowledged: durable, or found applied.
    """

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
        """Futures of the last progress batch; all are done when the database has it."""
        self.probes: dict[str, asyncio.Future[bool]] = {}
        self.expelled: SessionClosedError | None = None
        self.task = asyncio.current_task()

    def expel(self, code: str, reason: str) -> None:
        """Cancel the session's task, so that the connection ends whatever it waits for. For calls from another task.

        The task then sends the reason to the agent. Only the first call has an effect.
        """
        if self.expelled is None and self.task is not None:
            self.expelled = SessionClosedError(code, reason)
            self.task.cancel()

    def connection(self) -> Connection:
        """Return address, boot id and epoch, as events show a connection."""
        return Connection(self.address, self.boot_id, self.epoch)


class Holders:
    """The sessions of one gateway: per host the one that holds it, and those that wait for their first message.

    `bar_clone` is called to store that two connections hold one key.
    """

    def __init__(self, bar: Bar) -> None:
        self.by_host: dict[int, Session] = {}
        self._coming: dict[int, list[Session]] = {}
        self._bar = bar
        self._tasks: set[asyncio.Task[Any]] = set()

    def enter(self, session: Session) -> None:
        """Add a new connection. If its host has one already, the new one must wait for its first message and
        `claim_host`.

        The oldest waiting connection is expelled if there are more than MAX_WAITING_CONNECTIONS.
        """
        host = session.identity.host_id
        if self.by_host.setdefault(host, session) is not session:
            waiting = self._coming.setdefault(host, [])
            waiting.append(session)
            if len(waiting) > MAX_COMING:
                waiting.pop(0).expel("superseded", "a newer connection of this host has replaced this one")

    def leave(self, session: Session) -> None:
        """Remove a connection that has ended; its open probes count as not answered."""
        host = session.identity.host_id
        if self.by_host.get(host) is session:
            del self.by_host[host]
        self._arrived(session)
        for asked in session.probes.values():
            if not asked.done():
                asked.set_result(False)

    async def settle(self, session: Session) -> None:
        """Make this session, which has sent its first message, the holder of its host, or raise SessionClosedError.

        See the rule in the module's docstring. It may take PROBE_TIMEOUT_S.
        """
        host = session.identity.host_id
        while (older := self.by_host.get(host)) is not session:
            if older is None:
                self.by_host[host] = session
            elif older.identity.number > session.identity.number:
                raise SessionClosedError("superseded", "a newer connection of this host has replaced this one")
            elif _same_process(older.connection(), session.connection()):
                self._supersede(older)
            elif await self.answers(older):
                raise self._clone(older, session.connection())
            elif self.by_host.get(host) is older:
                self._supersede(older)
        self._arrived(session)

    async def answers(self, session: Session) -> bool:
        """Send a Probe with a fresh nonce; return True if a process answers it within PROBE_TIMEOUT_S."""
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
        """Handle an Alive message: mark the probe with this nonce as answered."""
        if (asked := session.probes.get(nonce)) and not asked.done():
            asked.set_result(True)

    def hear(self, news: list[News]) -> None:
        """Apply changed agent rows to open sessions: expel those that may not go on, ask for new keys."""
        for one in news:
            if holder := self.by_host.get(one.host_id):
                self._judge(holder, one)
            for session in tuple(self._coming.get(one.host_id, ())):
                self._judge(session, one)

    def ask_rotation(self, session: Session) -> None:
        """Ask the agent for a new key; do nothing if this connection was asked already and has not answered."""
        if not session.rotating:
            session.rotating = True
            self._start(tell(session, wire.Rotate()))

    def _judge(self, session: Session, now: News) -> None:
        """Expel, probe or ask one session for a new key, as the agent's row `change` requires."""
        if now.barred:
            session.expel(now.barred, key_revocation.why(now.barred, now.reason, session.identity.host))
        elif now.public_key not in (session.key, session.next_key):
            session.expel("replaced", "this host has a different key now")
        elif now.number > session.identity.number:
            if not session.contested:
                session.contested = True
                self._start(self._contested(session, now))
        elif now.rotate:
            self.ask_rotation(session)

    async def _contested(self, session: Session, now: News) -> None:
        """Probe this connection, because another gateway has a newer one of its host; then bar the key or expel it."""
        newer = Connection(now.address, now.boot_id, now.epoch)
        if not _same_process(session.connection(), newer) and await self.answers(session):
            self._clone(session, newer)
        else:
            self._supersede(session)

    def _supersede(self, session: Session) -> None:
        """Expel a session because a newer connection takes over its host."""
        session.expel("superseded", "a newer connection of this host has replaced this one")
        if self.by_host.get(session.identity.host_id) is session:
            del self.by_host[session.identity.host_id]

    def _clone(self, older: Session, newer: Connection) -> SessionClosedError:
        """Bar the key and expel the older session; return the error to raise in the newer one."""
        first = older.connection()
        self._bar(older.identity.host_id, older.key, first, newer)
        reason = key_revocation.why("clone", key_revocation.both(first, newer), older.identity.host)
        older.expel("clone", reason)
        return SessionClosedError("clone", reason)

    def _arrived(self, session: Session) -> None:
        """Remove a session from those that wait for their first message."""
        host = session.identity.host_id
        waiting = self._coming.get(host, [])
        if session in waiting:
            waiting.remove(session)
        if not waiting:
            self._coming.pop(host, None)

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine as a task, and keep a reference to it until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _same_process(one: Connection, other: Connection) -> bool:
    """Return whether two connections come from the same agent process: epoch and boot id are equal."""
    return (one.epoch, one.boot_id) == (other.epoch, other.boot_id)


async def tell(session: Session, message: wire.Message) -> bool:
    """Send a message to an agent; return False if its connection is gone."""
    return await send_text(session, wire.encode(message))


async def send_text(session: Session, text: str) -> bool:
    """Send a text frame to an agent; return False if its connection is gone.

    The web server raises an error then, which is only logged: the receive loop gets the disconnect as its next event.
    """
    try:
        await session.send({"type": "websocket.send", "text": text})
    except (RuntimeError, OSError) as error:
        log.debug("%s disconnected before a message could be sent: %s", session.identity.host, error)
        return False
    return True
