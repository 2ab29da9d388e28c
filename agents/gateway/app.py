"""The conductor's end of an agent's socket: authenticate, decode, acknowledge. Runs on the event loop, never blocks it.

Mounted by `cyborgweb.asgi`. It is an ASGI application with a receive loop of its own: channels' consumers cost six
times as much per message (measured). Everything that needs the database goes through `agents.gateway.writer.Writer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from accelerators import database_outage
from accelerators.commands.placing import Answer, Progress
from accelerators.domain import errors
from agents import credentials, enrolment, key_revocation, wire
from agents.enrolment import Identity, Refused
from agents.gateway import metrics
from agents.gateway.command_dispatch import Courier, Said
from agents.gateway.leases import Leases
from agents.gateway.rejections import Refusals
from agents.gateway.sample_cache import BEGINNING, Board
from agents.gateway.sessions import Expelled, Holders, Session, send_text, tell
from agents.gateway.throttling import Admission, Spread
from agents.gateway.writer import AdmitJob, CommandJob, SpoolJob, TrustJob, Writer
from agents.handshake import choose_version, client_address, deny_upgrade

log = logging.getLogger(__name__)

ADMIT_S = 8.0
"""How long a connection may wait for the database; then it is sent away, so that an outage piles up nothing."""
FIRST_S = 30.0
"""A connection that has said nothing by then is ended: it holds a place that others want."""
FAREWELL_S = 1.0
"""How long a peer may take to take in why it is sent away."""
PROGRESS_S = 0.2
"""What one agent says of progress is written so often at most; the last word always is."""
MANY = "(many)"
"""Whose refusals are counted together: of an outage or a storm there is one event a minute, not one a host."""
MAX_PROGRESS = 256
"""Commands of one agent that get on at the same time; of more nothing is shown."""
MESSAGE_ERROR = "cyborg_message_error"
"""Key of `scope["state"]` where the web server stores the close code and the reason when it could not take a message.
The message itself never gets here, and the peer can no longer be sent a Refuse."""
TOO_LARGE = 1009
"""The close code of a message that is larger than the server takes."""


class Limits(Protocol):
    """The keys this room needs of the configuration."""

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
    """The ASGI application at `/ws/agent`, and the challenge before it."""

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
        """End the threads (tests; a real process just ends)."""
        self.board.stop()
        self._courier.stop()
        self._writer.stop()

    def reached_at(self, url: str) -> None:
        """Where other processes ask for samples, from the next renewal of leases on."""
        self.leases.gateway = self.board.name, url

    def _pressed(self) -> bool:
        """Whether samples are to be shed: reports wait for their commit, or agents to be let in."""
        waiting = self._pending_bytes > self.limits.pending_report_bytes // 8
        return waiting or self.admission.inside > self.admission.limit // 2

    async def challenge(self, scope: Any, receive: Any, send: Any) -> None:
        """GET /ws/agent/challenge: a nonce, before anything is known of who asks; here a storm is sent away first."""
        try:
            if scope["method"] != "GET":
                raise Refused(405, "method", "GET only")
            self._let_in(self.admission.ask(client_address(scope)))
        except Refused as refused:
            status, (headers, body) = refused.status, enrolment.denial(refused)
        else:
            status, body = 200, msgspec.json.encode(self.challenges.make())
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _let_in(self, wait: int) -> None:
        """Raise Refused, with the seconds to come back in, when too many are at the door."""
        if wait:
            full = self.connected >= self.limits.agent_connections
            reason = "no more agents than CYBORG_AGENT_CONNECTIONS are taken" if full else "many agents connect at once"
            refused = Refused(503, "busy", f"{reason}: come back when Retry-After says", wait)
            self.refusals.add(MANY, refused.code, "too many agents at once: each is told when to come back")
            raise refused

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """A connection without TLS of ours: what the agent signs names no certificate."""
        await self.connect(scope, receive, send, ("",))

    async def connect(self, scope: Any, receive: Any, send: Any, fingerprints: Iterable[str]) -> None:
        """One connection from the upgrade request to its end; `fingerprints` are those its agent may have pinned."""
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
                raise Refused(403, "epoch", f"epoch {credential.epoch} is out of range: is the journal damaged?")
        except Refused as refused:
            if refused.code != "busy":
                self.refusals.add(MANY if refused.status == 503 else host, refused.code, refused.reason)
            await deny_upgrade(scope, send, refused)
            return
        session = Session(identity, credential, fingerprint, version, scope, send)
        if identity.host_id in self.holders.by_host:
            session.applied = ""  # what the older connection has said may be stored after we looked
        self.connected += 1
        metrics.tally["opened"] += 1
        try:
            await send({"type": "websocket.accept", "subprotocol": version})
            self.holders.enter(session)
            if await self._welcome(session):
                await self._receive(session, receive)
                self._count_message_error(host, scope)
        except Expelled as expelled:
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
        """Count and record it when the web server closed this connection over a message that it could not take."""
        code, reason = scope.get("state", {}).get(MESSAGE_ERROR, (0, ""))
        if code == TOO_LARGE:
            sentence = (
                f"the message is larger than {self.limits.max_message_bytes} bytes ({reason}): agents of this product"
                " keep to the limit, so look at what runs on this host, or raise CYBORG_MAX_MESSAGE_BYTES"
            )
            self.refusals.add(host, "too-large", sentence)
        elif code:
            self.refusals.add(host, "malformed", f"no WebSocket message (close code {code}): {reason}")

    async def _admit(self, credential: credentials.Credential) -> Identity:
        future: asyncio.Future[Identity] = asyncio.get_running_loop().create_future()
        self._writer.put(AdmitJob(future, credential))
        try:
            async with asyncio.timeout(ADMIT_S):
                return await future
        except TimeoutError:
            reason = "the database does not answer: come back later"
            database_outage.log_outage(f"an agent that connects waited {ADMIT_S:g} s in vain")
            raise Refused(503, "database", reason, self.admission.place()) from None

    async def _welcome(self, session: Session) -> bool:
        """False: it is gone already."""
        identity = session.identity
        self.leases.seen(identity.host_id, session.epoch)
        known = identity.epoch, identity.applied_hash, self.limits.max_message_bytes
        welcome = wire.Welcome(self.limits.beat_s, *known, round(self.spread.welcome(), 1))
        if (there := await tell(session, welcome)) and identity.rotate:
            self.holders.ask_rotation(session)
        return there

    async def _receive(self, session: Session, receive: Any) -> None:
        newer, settled = session.offers_newer, False
        while (event := await (receive() if settled else _in_time(receive)))["type"] == "websocket.receive":
            data = event.get("text") or event.get("bytes") or b""
            try:
                samples = isinstance(data, str) and data.startswith(BEGINNING)
                # Never while another connection may still speak for this host.
                if samples and not (settled and self.board.takes(session, len(data))):
                    del event, data
                    continue
                data = _text(data)
                message = wire.decode_from_agent(data)
                if newer:
                    self.counters["unknown_fields"] += wire.unknown_fields(data, message)
            except wire.Malformed as error:
                raise Expelled("malformed", str(error)) from None
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
                del message  # decoded it is five times its text: nobody holds that while the commit is awaited
                await self._report(session, order, content, data, urgent=urgent)
            else:
                await self._rarely(session, message)
            del event, data  # an idle connection holds no report

    async def _rarely(self, session: Session, message: wire.FromAgent | wire.Unknown) -> None:
        """What comes once a connection, or when it was asked for."""
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
        """Now, or, when the agent says much, with the next of it."""
        loop = asyncio.get_running_loop()
        if not session.progress:
            loop.call_at(max(loop.time(), session.progress_at + PROGRESS_S), self._tell_progress, session)
        if message.number in session.progress or len(session.progress) < MAX_PROGRESS:
            session.progress[message.number] = message

    def _tell_progress(self, session: Session) -> None:
        """What was told before is to be stored first: while the database is away nothing piles up."""
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
        """Acknowledged when the report that goes with it is applied: now, or by the courier."""
        if "\0" in "".join((told.text, told.hash, *told.detail, *told.detail.values())):
            raise Expelled("malformed", "a text with a NUL character cannot be stored")
        host = session.identity.host_id
        # What this connection knows to be applied need not be looked for: another writer may have cleared it since.
        known = told.hash and told.hash == session.applied
        report = (0, 0, "") if known else (told.epoch, told.seq, told.hash)
        if await self._tell(Answer(host, told.number, told.outcome, told.text, told.detail, *report)):
            await tell(session, wire.Ack(told.number, "Result"))
        else:
            self._courier.unsettled(session, told.number)

    def _tell(self, said: Said) -> asyncio.Future[bool]:
        """Have the writer thread store it; the future gives, after the commit, whether the command is settled."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._writer.put(CommandJob(future, said))
        return future

    async def _rotate(self, session: Session, told: wire.NewKey) -> None:
        """The agent's next key, from the commit on; the Ack comes after it."""
        old, new, host = session.key, told.public_key, session.identity
        data = credentials.rotation_bytes(host.host, old, new, session.fingerprint)
        if not session.rotating:
            raise Expelled("rotation", "no new key was asked for")
        if not (credentials.is_signed(old, told.signature, data) and credentials.is_signed(new, told.proof, data)):
            raise Expelled("rotation", "the new key is not signed by the present one and by itself")
        session.next_key = new
        try:
            await self._ask(lambda: key_revocation.rotate(host.host_id, old, new))
        except errors.Refused as refused:
            raise Expelled("rotation", refused.text) from None
        session.key, session.next_key, session.rotating = new, "", False
        await tell(session, wire.Ack(0, "NewKey"))

    def _bar(self, host_id: int, key: str, first: key_revocation.Connection, second: key_revocation.Connection) -> None:
        self._ask(lambda: key_revocation.bar_clone(host_id, key, first, second))

    def _ask(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Have the writer thread do it; the future is done after the commit."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer.put(TrustJob(future, work))
        return future

    async def _report(self, session: Session, order: tuple[int, int], content: str, data: str, *, urgent: bool) -> None:
        """Acknowledge it when it is durable, applied already, or old. One at a time: the socket is not read meanwhile,
        so that a host has no more than one message in memory."""
        self.spread.reported()
        host_id = session.identity.host_id
        metrics.tally["reports"] += 1
        if order[0] > session.highest_epoch:
            raise Expelled("epoch", f"epoch {order[0]} is out of range: is the journal damaged?")
        self.leases.seen(host_id, order[0])
        if order > session.last and session.applied != content:
            if "\\u0000" in data:
                raise Expelled("malformed", "a text with a NUL character cannot be stored")
            if self._pending_bytes > self.limits.pending_report_bytes:
                raise Expelled("busy", "too many reports wait to be stored: come back")
            job = SpoolJob(asyncio.get_running_loop().create_future(), host_id, order, content, data, urgent)
            session.applied = "" if await self._durable(job) else content
        session.last = max(session.last, order)
        await send_text(session, f'{{"type":"Ack","seq":{order[1]},"of":"Report"}}')

    async def _durable(self, job: SpoolJob) -> bool:
        """Whether it was stored: it was not when it is applied already."""
        self._pending_bytes += len(job.payload)
        try:
            self._writer.put(job)
            return bool(await job.future)
        finally:
            self._pending_bytes -= len(job.payload)

    async def _refuse(self, session: Session, expelled: Expelled) -> None:
        """Say why, then close. A peer that is gone already, or takes nothing any more, is not waited for."""
        self.refusals.add(session.identity.host, expelled.code, expelled.reason)
        text = wire.encode(wire.Refuse(expelled.code, expelled.reason[:4096]))
        try:
            async with asyncio.timeout(FAREWELL_S):
                await session.send({"type": "websocket.send", "text": text})
                await session.send({"type": "websocket.close", "code": 1008, "reason": expelled.code})
        except (TimeoutError, RuntimeError, OSError) as error:
            log.debug("%s was gone before it was refused: %s", session.identity.host, error)


async def _in_time(receive: Any) -> Any:
    """The first that is said, or raises Expelled."""
    try:
        async with asyncio.timeout(FIRST_S):
            return await receive()
    except TimeoutError:
        raise Expelled("silent", f"nothing was said within {FIRST_S:.0f} s") from None


def _text(data: str | bytes) -> str:
    """Of a frame of either kind; raises Malformed."""
    try:
        return data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError:
        raise wire.Malformed("it is not UTF-8") from None
