"""ASGI application that serves agents' WebSocket connections: authenticate, decode messages, acknowledge them.

It runs on the event loop and never blocks it; work that needs the database is queued for the thread
`agents.gateway.writer.DatabaseWriter`. It has its own receive loop, because channels' consumers cost six times as much
per message (measured).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from accelerators.commands.placing import Answer, Progress
from accelerators.domain import errors
from accelerators.runtime import database_outage
from agents import credentials, enrolment, key_revocation, wire
from agents.enrolment import ConnectionRejectedError, Identity
from agents.gateway import metrics
from agents.gateway.command_dispatch import Courier, Said
from agents.gateway.handshake import choose_version, client_address, deny_upgrade
from agents.gateway.leases import Leases
from agents.gateway.rejections import Refusals
from agents.gateway.sample_cache import BEGINNING, Board
from agents.gateway.sessions import Holders, Session, SessionClosedError, send_text, tell
from agents.gateway.throttling import Admission, Spread
from agents.gateway.writer import AdmitJob, CommandJob, SpoolJob, TrustJob, Writer

log = logging.getLogger(__name__)

ADMIT_S = 8.0
"""Seconds a handshake may wait for the database. Then it is refused with a 503, so that connections do not pile up
during an outage."""
FIRST_S = 30.0
"""Seconds in which an agent must send its first message. Otherwise its connection is closed, because it takes a place
that another agent could use."""
FAREWELL_S = 1.0
"""Seconds to wait until an agent has received the Refuse message and the close frame."""
PROGRESS_S = 0.2
"""Minimum seconds between two writes of one agent's command progress. The newest progress is always written."""
MANY = "(many)"
"""Host name under which refusals of many hosts are counted together. An outage or a connection storm then makes one
event a minute instead of one per host."""
MAX_PROGRESS = 256
"""Maximum number of commands of one agent whose progress waits to be written. Progress of further ones is dropped."""
TOO_LARGE = 1009
"""WebSocket close code for a message that is larger than the web server accepts."""


class Limits(Protocol):
    """The configuration keys that the gateway reads."""

    @property
    def beat_s(self) -> float: ...
    @property
    def max_message_bytes(self) -> int: ...
    @property
    def handshakes(self) -> int: ...
    @property
    def agent_connections(self) -> int: ...
    @property
    def pending_report_bytes(self) -> int: ...
    @property
    def flush_interval_ms(self) -> float: ...
    @property
    def flush_max_rows(self) -> int: ...
    @property
    def lease_flush_s(self) -> float: ...


class Gateway:
    """The ASGI application at `/ws/agent`, and the view of `/ws/agent/challenge` that agents ask for a nonce first."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.counters = {"unknown_types": 0, "unknown_fields": 0}
        self.leases = Leases(limits.lease_flush_s)
        self.refusals = Refusals()
        self.challenges = enrolment.Challenges()
        self.admission = Admission(limits.handshakes, limits.agent_connections)
        self.spread = Spread()
        self.connected = 0
        self._pending_bytes = 0
        self.holders = Holders(self._bar)
        self.board = Board(self.refusals, self._pressed)
        self._courier = Courier()
        self._writer = Writer(
            interval_s=limits.flush_interval_ms / 1000,
            max_rows=limits.flush_max_rows,
            leases=self.leases,
            refusals=self.refusals,
            spread=self.spread,
            hear=self.holders.hear,
        )

    def stop(self) -> None:
        """Stop the sample cache and the threads. Only tests need this: a real process just ends."""
        self.board.stop()
        self._courier.stop()
        self._writer.stop()

    def reached_at(self, url: str) -> None:
        """Set the address where other processes ask this gateway for samples; the next lease flush stores it."""
        self.leases.gateway = self.board.name, url

    def _pressed(self) -> bool:
        """Return True if samples should be dropped, because more important work waits.

        That is: reports of more than an eighth of the allowed bytes wait for their commit, or more than half of the
        handshake places are taken.
        """
        waiting = self._pending_bytes > self.limits.pending_report_bytes // 8
        return waiting or self.admission.inside > self.admission.limit // 2

    async def challenge(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer GET /ws/agent/challenge with a nonce, or with a 503 and Retry-After while too many agents connect.

        Nothing is known about the client yet. In a connection storm most agents are refused here, which is the
        cheapest place.
        """
        try:
            if scope["method"] != "GET":
                raise ConnectionRejectedError(405, "method", "only GET is allowed")
            self._let_in(self.admission.ask(client_address(scope)))
        except ConnectionRejectedError as refused:
            status, (headers, body) = refused.status, enrolment.denial(refused)
        else:
            status, body = 200, msgspec.json.encode(self.challenges.make())
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _let_in(self, wait: int) -> None:
        """Count and raise a 503 with Retry-After `retry_after_s`; do nothing for 0 (see `HandshakeThrottle`)."""
        if wait:
            full = self.connected >= self.limits.agent_connections
            limit = "as many agents are connected as CYBORG_AGENT_CONNECTIONS allows"
            reason = limit if full else "too many agents connect at once"
            refused = ConnectionRejectedError(503, "busy", f"{reason}: try again after Retry-After seconds", wait)
            self.refusals.add(MANY, refused.code, "too many agents connected at once: each was told when to try again")
            raise refused

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a connection that has no TLS from us: the agent then signs an empty certificate fingerprint."""
        await self.connect(scope, receive, send, ("",))

    async def connect(self, scope: Any, receive: Any, send: Any, fingerprints: Iterable[str]) -> None:
        """Serve one connection from the upgrade request to its end.

        `fingerprints` are those of the certificates that the agent may have pinned.
        """
        await receive()  # websocket.connect
        host = ""
        try:
            self._let_in(self.admission.come(self.connected, client_address(scope)))
            version = choose_version(scope)
            credential = enrolment.credential_of(scope)
            host = credential.host
            fingerprint = enrolment.verify(credential, self.challenges, fingerprints)
            with self.admission.handshake():
                identity = await self._admit(credential)
            if credential.epoch > enrolment.highest_epoch(identity.epoch):
                raise ConnectionRejectedError(
                    403, "epoch", f"epoch {credential.epoch} is out of range: the agent's journal may be damaged"
                )
        except ConnectionRejectedError as refused:
            if refused.code != "busy":
                self.refusals.add(MANY if refused.status == 503 else host, refused.code, refused.reason)
            await deny_upgrade(scope, send, refused)
            return
        session = Session(identity, credential, fingerprint, version, scope, send)
        if identity.host_id in self.holders.by_host:
            session.applied = ""  # a report of the older connection may be stored after we read the applied hash
        self.connected += 1
        metrics.tally["opened"] += 1
        try:
            await send({"type": "websocket.accept", "subprotocol": version})
            self.holders.enter(session)
            if await self._welcome(session):
                await self._receive(session, receive)
                self._count_message_error(host, scope)
        except SessionClosedError as expelled:
            session.expelled = expelled
        except asyncio.CancelledError:
            if session.expelled is None or session.task is None:
                raise
            session.task.uncancel()
        finally:
            self.connected -= 1
            metrics.tally["closed"] += 1
            self.holders.leave(session)
            self.board.leave(session)
            if session.greeted:
                self._courier.gone(session)
        if session.expelled:
            await self._refuse(session, session.expelled)

    def _count_message_error(self, host: str, scope: Any) -> None:
        """Add a refusal if the web server closed this connection over a message (see wire.MESSAGE_ERROR_KEY)."""
        code, reason = scope.get("state", {}).get(wire.MESSAGE_ERROR, (0, ""))
        if code == TOO_LARGE:
            sentence = (
                f"the message is larger than {self.limits.max_message_bytes} bytes ({reason}): agents of this product"
                " keep to the limit, so look at what runs on this host, or raise CYBORG_MAX_MESSAGE_BYTES"
            )
            self.refusals.add(host, "too-large", sentence)
        elif code:
            self.refusals.add(host, "malformed", f"the WebSocket data is invalid (close code {code}): {reason}")

    async def _admit(self, credential: credentials.Credential) -> Identity:
        """Have the writer thread look up or enrol the agent. Raise ConnectionRejectedError, a 503 if that takes
        longer than ADMISSION_TIMEOUT_S."""
        future: asyncio.Future[Identity] = asyncio.get_running_loop().create_future()
        self._writer.put(AdmitJob(future, credential))
        try:
            async with asyncio.timeout(ADMIT_S):
                return await future
        except TimeoutError:
            reason = "the database does not answer: try again later"
            database_outage.log_outage(f"a connecting agent got no answer within {ADMIT_S:g} s")
            raise ConnectionRejectedError(503, "database", reason, self.admission.place()) from None

    async def _welcome(self, session: Session) -> bool:
        """Send Welcome, and Rotate if a new key was asked for. Return False if the agent is already gone."""
        identity = session.identity
        self.leases.seen(identity.host_id, session.epoch)
        known = identity.epoch, identity.applied_hash, self.limits.max_message_bytes
        welcome = wire.Welcome(self.limits.beat_s, *known, round(self.spread.welcome(), 1))
        if (there := await tell(session, welcome)) and identity.rotate:
            self.holders.ask_rotation(session)
        return there

    async def _receive(self, session: Session, receive: Any) -> None:
        """Receive and handle messages until the peer closes. The first one decides which connection holds the host.

        Raise SessionClosedError for a message that is malformed or not allowed.
        """
        newer, settled = session.offers_newer, False
        while (event := await (receive() if settled else _in_time(receive)))["type"] == "websocket.receive":
            data = event.get("text") or event.get("bytes") or b""
            try:
                samples = isinstance(data, str) and data.startswith(BEGINNING)
                # No sample is decoded before `claim_host`: until then another connection may still hold this host.
                if samples and not (settled and self.board.takes(session, len(data))):
                    del event, data
                    continue
                data = _text(data)
                message = wire.decode_from_agent(data)
                if newer:
                    self.counters["unknown_fields"] += wire.unknown_fields(data, message)
            except wire.MalformedMessageError as error:
                raise SessionClosedError("malformed", str(error)) from None
            if not settled:
                session.boot_id = message.boot_id if type(message) is wire.Hello else ""
                await self.holders.settle(session)
                settled = True
            if type(message) is wire.Beat:
                metrics.tally["beats"] += 1
                self.leases.seen(session.identity.host_id, session.epoch)
                await send_text(session, f'{{"type":"Ack","seq":{message.seq},"of":"Beat"}}')
            elif type(message) is wire.Report:
                order, content, urgent = (message.epoch, message.seq), message.hash, message.urgent
                # Decoded it takes five times the memory of its text: do not keep it while waiting for the commit.
                del message
                await self._report(session, order, content, data, urgent=urgent)
            else:
                await self._rarely(session, message)
            del event, data  # otherwise an idle connection would keep its last report in memory

    async def _rarely(self, session: Session, message: wire.FromAgent | wire.Unknown) -> None:
        """Handle infrequent messages: those sent once per connection, and answers to the gateway's own requests."""
        if type(message) is wire.Hello:
            session.boot_id = message.boot_id
            self.leases.hello(session, message)
            if not session.greeted:
                session.greeted = True
                self._courier.hello(session, message)
                self.board.enter(session)
        elif type(message) is wire.Alive:
            self.holders.alive(session, message.nonce)
        elif type(message) is wire.NewKey:
            await self._rotate(session, message)
        elif type(message) is wire.Taken:
            stored = [self._tell((session.identity.host_id, number)) for number in dict.fromkeys(message.numbers)]
            await asyncio.gather(*stored)
        elif type(message) is wire.Progress:
            self._progress(session, message)
        elif type(message) is wire.Result:
            await self._result(session, message)
        elif type(message) is wire.Samples:
            self.board.keep(session, message)
        elif type(message) is wire.Unknown:
            self.counters["unknown_types"] += 1

    def _progress(self, session: Session, message: wire.Progress) -> None:
        """Keep the newest progress of each command and schedule its write, PROGRESS_INTERVAL_S after the last one."""
        loop = asyncio.get_running_loop()
        if not session.progress:
            loop.call_at(max(loop.time(), session.progress_at + PROGRESS_S), self._tell_progress, session)
        if message.number in session.progress or len(session.progress) < MAX_PROGRESS:
            session.progress[message.number] = message

    def _tell_progress(self, session: Session) -> None:
        """Queue the collected progress for the writer thread.

        If the previous batch is not stored yet, try again after PROGRESS_INTERVAL_S: progress must not pile up while
        the database is down.
        """
        loop = asyncio.get_running_loop()
        if not all(told.done() for told in session.telling):
            loop.call_later(PROGRESS_S, self._tell_progress, session)
            return
        said, session.progress = session.progress, {}
        session.progress_at = loop.time()
        host = session.identity.host_id
        session.telling = [
            self._tell(Progress(host, number, one.percent, one.text.replace("\0", ""))) for number, one in said.items()
        ]

    async def _result(self, session: Session, told: wire.Result) -> None:
        """Store the result of a command and acknowledge it once the report that belongs to it is applied.

        If the command is settled by this write, the Ack is sent here; otherwise `CommandDispatcher` sends it later.
        Raise SessionClosedError for a text with a NUL character.
        """
        if "\0" in "".join((told.text, told.hash, *told.detail, *told.detail.values())):
            raise SessionClosedError("malformed", "a text with a NUL character cannot be stored")
        host = session.identity.host_id
        # Do not look up a report that this connection knows to be applied: another writer may have cleared the hash.
        known = told.hash and told.hash == session.applied
        report = (0, 0, "") if known else (told.epoch, told.seq, told.hash)
        if await self._tell(Answer(host, told.number, told.outcome, told.text, told.detail, *report)):
            await tell(session, wire.Ack(told.number, "Result"))
        else:
            self._courier.unsettled(session, told.number)

    def _tell(self, said: Said) -> asyncio.Future[bool]:
        """Queue a message about a command for the writer thread.

        After the commit the returned future gives True if the command is settled, so that a Result can be acknowledged.
        """
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._writer.put(CommandJob(future, said))
        return future

    async def _rotate(self, session: Session, told: wire.NewKey) -> None:
        """Replace the agent's key by the one in NewKey, and send the Ack after the commit.

        Raise SessionClosedError if no new key was asked for, if a signature is wrong, or if the database refuses the
        key.
        """
        old, new, host = session.key, told.public_key, session.identity
        data = credentials.rotation_bytes(host.host, old, new, session.fingerprint)
        if not session.rotating:
            raise SessionClosedError("rotation", "no new key was asked for")
        if not (credentials.is_signed(old, told.signature, data) and credentials.is_signed(new, told.proof, data)):
            raise SessionClosedError("rotation", "the new key must be signed by the present key and by itself")
        session.next_key = new
        try:
            await self._ask(lambda: key_revocation.rotate(host.host_id, old, new))
        except errors.RefusedError as refused:
            raise SessionClosedError("rotation", refused.text) from None
        session.key, session.next_key, session.rotating = new, "", False
        await tell(session, wire.Ack(0, "NewKey"))

    def _bar(self, host_id: int, key: str, first: key_revocation.Connection, second: key_revocation.Connection) -> None:
        """Have the writer thread bar a key that two connections hold; do not wait for it."""
        self._ask(lambda: key_revocation.bar_clone(host_id, key, first, second))

    def _ask(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Queue a change of trust for the writer thread; the returned future is done after its commit."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer.put(TrustJob(future, work))
        return future

    async def _report(self, session: Session, order: tuple[int, int], content: str, data: str, *, urgent: bool) -> None:
        """Acknowledge a report when it is durable, when its content is applied already, or when it is old.

        The socket is not read while this waits, so that a host never has more than one message in memory. Raise
        SessionClosedError if the epoch is out of range, the report has a NUL character, or too many reports wait for
        a commit.
        """
        self.spread.reported()
        host_id = session.identity.host_id
        metrics.tally["reports"] += 1
        if order[0] > session.highest_epoch:
            raise SessionClosedError("epoch", f"epoch {order[0]} is out of range: the agent's journal may be damaged")
        self.leases.seen(host_id, order[0])
        if order > session.last and session.applied != content:
            if "\\u0000" in data:
                raise SessionClosedError("malformed", "a text with a NUL character cannot be stored")
            if self._pending_bytes > self.limits.pending_report_bytes:
                raise SessionClosedError("busy", "too many reports wait to be stored: connect again later")
            job = SpoolJob(asyncio.get_running_loop().create_future(), host_id, order, content, data, urgent)
            session.applied = "" if await self._durable(job) else content
        session.last = max(session.last, order)
        await send_text(session, f'{{"type":"Ack","seq":{order[1]},"of":"Report"}}')

    async def _durable(self, job: SpoolJob) -> bool:
        """Wait until the report is committed to the spool. Return False if it was not stored, since it is applied."""
        self._pending_bytes += len(job.payload)
        try:
            self._writer.put(job)
            return bool(await job.future)
        finally:
            self._pending_bytes -= len(job.payload)

    async def _refuse(self, session: Session, expelled: SessionClosedError) -> None:
        """Record the refusal, send Refuse and close. Wait at most CLOSE_TIMEOUT_S for a peer that reads nothing."""
        self.refusals.add(session.identity.host, expelled.code, expelled.reason)
        text = wire.encode(wire.Refuse(expelled.code, expelled.reason[:4096]))
        try:
            async with asyncio.timeout(FAREWELL_S):
                await session.send({"type": "websocket.send", "text": text})
                await session.send({"type": "websocket.close", "code": 1008, "reason": expelled.code})
        except (TimeoutError, RuntimeError, OSError) as error:
            log.debug("%s disconnected before the refusal could be sent: %s", session.identity.host, error)


async def _in_time(receive: Any) -> Any:
    """Receive the first event of a connection, or raise SessionClosedError after FIRST_MESSAGE_TIMEOUT_S."""
    try:
        async with asyncio.timeout(FIRST_S):
            return await receive()
    except TimeoutError:
        raise SessionClosedError("silent", f"the agent sent no message within {FIRST_S:.0f} s") from None


def _text(data: str | bytes) -> str:
    """Return the text of a text or binary frame; raise MalformedMessageError if it is not UTF-8."""
    try:
        return data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError:
        raise wire.MalformedMessageError("the message is not UTF-8") from None
