"""Sessions of connected agents, and the rule that decides which connection holds a host: takeovers, clones, bars.

Everything here runs on the event loop. A key belongs to one running process. If an agent connects while another
connection with its key is still open, the gateway compares the two:

* The same epoch and boot id: it is the same process, which lost its older socket. The new connection takes over.
* Otherwise it is a restart, a reboot, or a copy of the key on another machine. These cases differ in whether a process
  still holds the older connection. After the first message on the new connection, the gateway therefore sends a Probe
  with a fresh nonce on the older one. An answer proves that two processes use the key at once: both connections are
  ended, and the key is barred until a person decides. No answer within `PROBE_TIMEOUT_S` (a dead host's half-open
  connection), or the end of the older connection, proves nothing against the new one, which takes over. A message that
  was already on its way is not an answer, because it does not contain the nonce.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import Callable, Coroutine
from typing import Any

from agents import credentials, key_revocation, wire
from agents.authentication import EnrolledAgent, highest_allowed_epoch
from agents.errors import AgentsError
from agents.key_revocation import AgentChange, ConnectionIdentity

log = logging.getLogger(__name__)

PROBE_TIMEOUT_S = 3.0
MAX_WAITING_CONNECTIONS = 4
"""Maximum number of connections of one host that wait for their first message. One more ends the oldest of them."""

BarCloneCallback = Callable[[int, str, ConnectionIdentity, ConnectionIdentity], None]


class SessionClosedError(AgentsError):
    """Raised to end a connection; the peer is sent a Refuse with `code` and `reason`."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code, self.reason = code, reason


class AgentSession:
    """The state of one connected agent.

    `applied_hash` is the hash of the report known to be applied for its host, '' if unknown. `last_acknowledged` is the
    newest (epoch, seq) of the reports acknowledged on this connection; that report is stored durably, or its content
    was applied already. `report_requested_at` is when the agent was last told that no report of its host is applied, in
    seconds of the event loop's clock; infinity before its Welcome. `unanswered_report_requests` is how often it was
    asked for its report since its last one. `faulty_keys` are the keys of the devices that were faulty in its last
    report (`urgency.list_faulty_keys`). `agent_version` and `boot_id` are those of its Hello, '' before.
    """

    __slots__ = (
        "address",
        "agent_version",
        "applied_hash",
        "awaits_new_key",
        "boot_id",
        "certificates",
        "close_error",
        "epoch",
        "faulty_keys",
        "fingerprint",
        "has_sent_hello",
        "has_sent_unknown",
        "highest_epoch",
        "identity",
        "is_contested",
        "last_acknowledged",
        "next_public_key",
        "offers_newer_version",
        "outbox",
        "pending_progress",
        "probes",
        "progress_flushed_at",
        "progress_writes",
        "public_key",
        "report_requested_at",
        "send",
        "task",
        "unanswered_report_requests",
        "version",
    )

    def __init__(
        self,
        identity: EnrolledAgent,
        credential: credentials.Credential,
        fingerprint: str,
        version: str,
        scope: Any,
        send: Any,
    ) -> None:
        self.identity, self.public_key = identity, identity.public_key
        self.epoch, self.fingerprint = credential.epoch, fingerprint
        self.version, self.send = version, send
        self.offers_newer_version = any(name not in wire.VERSIONS for name in scope["subprotocols"])
        self.address = str((scope.get("client") or ("unknown",))[0])[:64]
        self.applied_hash = identity.applied_hash
        self.last_acknowledged = (0, 0)
        self.report_requested_at = math.inf
        self.unanswered_report_requests = 0
        self.faulty_keys: frozenset[str] = frozenset()
        self.highest_epoch = highest_allowed_epoch(identity.epoch)
        self.agent_version = self.boot_id = self.next_public_key = ""
        self.awaits_new_key = self.is_contested = self.has_sent_hello = self.has_sent_unknown = False
        self.certificates: wire.Certificates | None = None
        """The announcements of certificates that were sent on this connection."""
        self.outbox: list[str] = []
        self.pending_progress: dict[int, wire.Progress] = {}
        self.progress_flushed_at = 0.0
        self.progress_writes: list[asyncio.Future[bool]] = []
        """Futures of the last progress batch; all are done when the database has it."""
        self.probes: dict[str, asyncio.Future[bool]] = {}
        self.close_error: SessionClosedError | None = None
        self.task = asyncio.current_task()

    def request_close(self, code: str, reason: str) -> None:
        """Cancel the session's task, so that the connection ends whatever it waits for. For calls from another task.

        The task then sends the reason to the agent. Only the first call has an effect.
        """
        if self.close_error is None and self.task is not None:
            self.close_error = SessionClosedError(code, reason)
            self.task.cancel()

    def to_connection_identity(self) -> ConnectionIdentity:
        """Return address, boot id and epoch, as events show a connection."""
        return ConnectionIdentity(self.address, self.boot_id, self.epoch)


class SessionRegistry:
    """The sessions of one gateway: per host the one that holds it, and those that wait for their first message.

    `bar_clone` is called when two processes turn out to use one key; it must have the key barred, and must not block.
    """

    def __init__(self, bar_clone: BarCloneCallback) -> None:
        self.by_host: dict[int, AgentSession] = {}
        self._waiting: dict[int, list[AgentSession]] = {}
        self._bar_clone = bar_clone
        self._tasks: set[asyncio.Task[Any]] = set()

    def register(self, session: AgentSession) -> None:
        """Add a new connection. If its host has one already, the new one must wait for its first message and
        `claim_host`.

        If more than MAX_WAITING_CONNECTIONS of this host wait then, the oldest of them is closed.
        """
        host = session.identity.host_id
        if self.by_host.setdefault(host, session) is not session:
            waiting = self._waiting.setdefault(host, [])
            waiting.append(session)
            if len(waiting) > MAX_WAITING_CONNECTIONS:
                waiting.pop(0).request_close("superseded", "a newer connection of this host has replaced this one")

    def unregister(self, session: AgentSession) -> None:
        """Remove a connection that has ended; its open probes count as not answered. Its host is free if this
        connection held it."""
        host = session.identity.host_id
        if self.by_host.get(host) is session:
            del self.by_host[host]
        self._remove_from_waiting(session)
        for reply in session.probes.values():
            if not reply.done():
                reply.set_result(False)

    async def claim_host(self, session: AgentSession) -> None:
        """Make this session, which has sent its first message, the holder of its host.

        The rule is in the module's docstring. If another connection holds the host, this may wait PROBE_TIMEOUT_S for
        the answer to a probe. Raise SessionClosedError: `superseded` if a newer connection holds the host, `clone` if
        another process still answers on the older connection; then the older connection is closed as well, and the key
        is barred.
        """
        host = session.identity.host_id
        while (older := self.by_host.get(host)) is not session:
            if older is None:
                self.by_host[host] = session
            elif older.identity.connection_number > session.identity.connection_number:
                raise SessionClosedError("superseded", "a newer connection of this host has replaced this one")
            elif _is_same_process(older.to_connection_identity(), session.to_connection_identity()):
                self._supersede_session(older)
            elif await self.probe(older):
                raise self._reject_clone(older, session.to_connection_identity())
            elif self.by_host.get(host) is older:
                self._supersede_session(older)
        self._remove_from_waiting(session)

    async def probe(self, session: AgentSession) -> bool:
        """Send a Probe with a fresh nonce; return True if it is answered within PROBE_TIMEOUT_S, False if not or if the
        connection is gone."""
        nonce = secrets.token_urlsafe(12)
        reply: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        session.probes[nonce] = reply
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                await session.send({"type": "websocket.send", "text": wire.encode_message(wire.Probe(nonce))})
                return await reply
        except (TimeoutError, RuntimeError, OSError):
            return False
        finally:
            session.probes.pop(nonce, None)

    def handle_probe_reply(self, session: AgentSession, nonce: str) -> None:
        """Handle an Alive message: mark the probe with this nonce as answered. A nonce that is not awaited is
        ignored."""
        if (reply := session.probes.get(nonce)) and not reply.done():
            reply.set_result(True)

    def apply_agent_changes(self, changes: list[AgentChange]) -> None:
        """Apply changed agent rows to the open sessions of their hosts.

        Close a session if its agent is barred or has another key. If another gateway has a newer connection of the
        host, probe the session, and then close it too. Otherwise ask the agent for a new key if one was requested.
        """
        for change in changes:
            if holder := self.by_host.get(change.host_id):
                self._apply_agent_change(holder, change)
            for session in tuple(self._waiting.get(change.host_id, ())):
                self._apply_agent_change(session, change)

    def request_new_key(self, session: AgentSession) -> None:
        """Ask the agent for a new key; do nothing if this connection was asked already and has not answered."""
        if not session.awaits_new_key:
            session.awaits_new_key = True
            self._start_task(send_message(session, wire.Rotate()))

    def request_report(self, session: AgentSession, welcome: wire.Welcome) -> None:
        """Ask the agent for its report again, by a further Welcome that names no applied report. It returns at once.

        An agent of a release that does not know this drops the message; it sends its report with its next connection.
        """
        self._start_task(send_message(session, welcome))

    def _apply_agent_change(self, session: AgentSession, change: AgentChange) -> None:
        """Apply the agent's changed row to one session: close it, probe it, ask for a new key, or do nothing.

        It returns at once; a probe and its consequences follow in a task.
        """
        if change.barred:
            session.request_close(
                change.barred, key_revocation.explain_bar(change.barred, change.reason, session.identity.host)
            )
        elif change.public_key not in (session.public_key, session.next_public_key):
            session.request_close("replaced", "this host has a different key now")
        elif change.connection_number > session.identity.connection_number:
            if not session.is_contested:
                session.is_contested = True
                self._start_task(self._resolve_contest(session, change))
        elif change.rotation_requested:
            self.request_new_key(session)

    async def _resolve_contest(self, session: AgentSession, change: AgentChange) -> None:
        """Close a session because another gateway has a newer connection of its host.

        The session is probed first, unless both connections come from the same process. If it answers, two processes
        use the key: the key is barred, and the session is closed as `clone`. Otherwise it is closed as `superseded`.
        """
        newer = ConnectionIdentity(change.address, change.boot_id, change.epoch)
        if not _is_same_process(session.to_connection_identity(), newer) and await self.probe(session):
            self._reject_clone(session, newer)
        else:
            self._supersede_session(session)

    def _supersede_session(self, session: AgentSession) -> None:
        """Close a session because a newer connection takes over its host, and free the host at once."""
        session.request_close("superseded", "a newer connection of this host has replaced this one")
        if self.by_host.get(session.identity.host_id) is session:
            del self.by_host[session.identity.host_id]

    def _reject_clone(self, older: AgentSession, newer: ConnectionIdentity) -> SessionClosedError:
        """Have the key barred and close the older session as `clone`; return the error to raise in the newer one.

        It does not wait until the bar is stored.
        """
        first = older.to_connection_identity()
        self._bar_clone(older.identity.host_id, older.public_key, first, newer)
        reason = key_revocation.explain_bar("clone", key_revocation.describe_both(first, newer), older.identity.host)
        older.request_close("clone", reason)
        return SessionClosedError("clone", reason)

    def _remove_from_waiting(self, session: AgentSession) -> None:
        """Remove a session from those that wait for their first message; do nothing if it is not among them."""
        host = session.identity.host_id
        waiting = self._waiting.get(host, [])
        if session in waiting:
            waiting.remove(session)
        if not waiting:
            self._waiting.pop(host, None)

    def _start_task(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine as a task, and keep a reference to it until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _is_same_process(first: ConnectionIdentity, second: ConnectionIdentity) -> bool:
    """Return whether two connections come from the same agent process: epoch and boot id are equal."""
    return (first.epoch, first.boot_id) == (second.epoch, second.boot_id)


async def send_message(session: AgentSession, message: wire.Message) -> bool:
    """Send a message to an agent; return False if its connection is gone."""
    return await send_text(session, wire.encode_message(message))


async def send_text(session: AgentSession, text: str) -> bool:
    """Send a text frame to an agent; return False if its connection is gone.

    The web server raises an error then, which is only logged: the receive loop gets the disconnect as its next event.
    """
    try:
        await session.send({"type": "websocket.send", "text": text})
    except (RuntimeError, OSError) as error:
        log.debug("%s disconnected before a message could be sent: %s", session.identity.host, error)
        return False
    return True
