"""The conductor's end of an agent's socket: authenticate, decode, acknowledge. Runs on the event loop, never blocks it.

Mounted by `cyborgweb.asgi`. It is an ASGI application with a receive loop of its own: channels' consumers cost six
times as much per message (measured). Everything that needs the database goes through `agents.spool.Writer`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec

from accelerators import refusals
from accelerators.commands import Answer, Progress
from agents import credentials, enrolment, trust, wire
from agents.courier import Courier, Said
from agents.enrolment import Identity, Refused
from agents.holders import Expelled, Holders, Session
from agents.leases import Leases
from agents.refusals import Refusals
from agents.spool import AdmitJob, CommandJob, SpoolJob, TrustJob, Writer

log = logging.getLogger(__name__)

ADMIT_S = 8.0
"""How long a connection may wait for the database; then it is sent away, so that an outage piles up nothing."""
FAREWELL_S = 1.0
"""How long a peer may take to take in why it is sent away."""
PROGRESS_S = 0.2
"""What one agent says of progress is written so often at most; the last word always is."""
MAX_PROGRESS = 256
"""Commands of one agent that get on at the same time; of more nothing is shown."""
MAX_PENDING_BYTES = 256 * 1024 * 1024
"""Reports in memory that wait for their commit; beyond it agents are told to come back."""


class Limits(Protocol):
    """The keys this room needs of the configuration."""

    @property
    def beat_s(self) -> float: ...
    @property
    def max_message_bytes(self) -> int: ...
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
        self._pending_bytes = 0
        self.holders = Holders(self._bar)
        self._courier = Courier()
        self._writer = Writer(
            interval_s=limits.flush_interval_ms / 1000,
            max_rows=limits.flush_max_rows,
            leases=self.leases,
            refusals=self.refusals,
            hear=self.holders.hear,
        )

    def stop(self) -> None:
        """End the threads (tests; a real process just ends)."""
        self._courier.stop()
        self._writer.stop()

    async def challenge(self, scope: Any, receive: Any, send: Any) -> None:
        """GET /ws/agent/challenge: a nonce, before anything is known of who asks."""
        get = scope["method"] == "GET"
        body = msgspec.json.encode(self.challenges.make()) if get else b'{"error": "GET only"}'
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200 if get else 405, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """A connection without TLS of ours: what the agent signs names no certificate."""
        await self.connect(scope, receive, send, ("",))

    async def connect(self, scope: Any, receive: Any, send: Any, fingerprints: Iterable[str]) -> None:
        """One connection from the upgrade request to its end; `fingerprints` are those its agent may have pinned."""
        await receive()  # websocket.connect
        host = ""
        try:
            version = _version(scope)
            credential = enrolment.credential_of(scope)
            host = credential.host
            fingerprint = enrolment.verify(credential, self.challenges, fingerprints)
            identity = await self._admit(credential)
        except Refused as refused:
            self.refusals.add(host, refused.code, refused.reason)
            await _deny(scope, send, refused)
            return
        session = Session(identity, credential, fingerprint, version, scope, send)
        try:
            await send({"type": "websocket.accept", "subprotocol": version})
            self.holders.enter(session)
            await self._welcome(session)
            await self._receive(session, receive)
        except Expelled as expelled:
            session.expelled = expelled
        except asyncio.CancelledError:
            if session.expelled is None or session.task is None:
                raise
            session.task.uncancel()
        finally:
            self.holders.leave(session)
            if session.greeted:
                self._courier.gone(session)
        if session.expelled:
            await self._refuse(session, session.expelled)

    async def _admit(self, credential: credentials.Credential) -> Identity:
        future: asyncio.Future[Identity] = asyncio.get_running_loop().create_future()
        self._writer.put(AdmitJob(future, credential))
        try:
            async with asyncio.timeout(ADMIT_S):
                return await future
        except TimeoutError:
            raise Refused(503, "database", "the database does not answer: come back later") from None

    async def _welcome(self, session: Session) -> None:
        identity = session.identity
        self.leases.seen(identity.host_id, session.epoch)
        welcome = wire.Welcome(self.limits.beat_s, identity.epoch, identity.applied_hash, self.limits.max_message_bytes)
        await session.send({"type": "websocket.send", "text": wire.encode(welcome)})
        if identity.rotate:
            self.holders.ask_rotation(session)

    async def _receive(self, session: Session, receive: Any) -> None:
        newer, settled = session.offers_newer, False
        while (event := await receive())["type"] == "websocket.receive":
            data = event.get("text") or event.get("bytes") or b""
            try:
                if len(data) > self.limits.max_message_bytes:
                    raise wire.Malformed(f"{len(data)} bytes; at most {self.limits.max_message_bytes} are taken")
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
                self.leases.seen(session.identity.host_id, session.epoch)
                await session.send(
                    {"type": "websocket.send", "text": f'{{"type":"Ack","seq":{message.seq},"of":"Beat"}}'}
                )
            elif type(message) is wire.Report:
                order, content = (message.epoch, message.seq), message.hash
                del message  # decoded it is five times its text: nobody holds that while the commit is awaited
                await self._report(session, order, content, data)
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
        said, session.progress = session.progress, {}
        session.progress_at = asyncio.get_running_loop().time()
        for number, one in said.items():
            self._tell(Progress(session.identity.host_id, number, one.percent, one.text.replace("\0", "")))

    async def _result(self, session: Session, told: wire.Result) -> None:
        """Acknowledged when the report that goes with it is applied: now, or by the courier."""
        if "\0" in "".join((told.text, told.hash, *told.detail, *told.detail.values())):
            raise Expelled("malformed", "a text with a NUL character cannot be stored")
        host = session.identity.host_id
        # What this connection knows to be applied need not be looked for: another writer may have cleared it since.
        known = told.hash and told.hash == session.applied
        report = (0, 0, "") if known else (told.epoch, told.seq, told.hash)
        if await self._tell(Answer(host, told.number, told.outcome, told.text, told.detail, *report)):
            await session.send({"type": "websocket.send", "text": wire.encode(wire.Ack(told.number, "Result"))})
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
            await self._ask(lambda: trust.rotate(host.host_id, old, new))
        except refusals.Refused as refused:
            raise Expelled("rotation", refused.text) from None
        session.key, session.next_key, session.rotating = new, "", False
        await session.send({"type": "websocket.send", "text": wire.encode(wire.Ack(0, "NewKey"))})

    def _bar(self, host_id: int, key: str, first: trust.Connection, second: trust.Connection) -> None:
        self._ask(lambda: trust.bar_clone(host_id, key, first, second))

    def _ask(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Have the writer thread do it; the future is done after the commit."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer.put(TrustJob(future, work))
        return future

    async def _report(self, session: Session, order: tuple[int, int], content: str, data: str | bytes) -> None:
        """Acknowledge it when it is durable, applied already, or old."""
        host_id = session.identity.host_id
        self.leases.seen(host_id, order[0])
        if order > session.last and session.applied != content:
            payload = data if isinstance(data, str) else data.decode()
            if "\\u0000" in payload:
                raise Expelled("malformed", "a text with a NUL character cannot be stored")
            if self._pending_bytes > MAX_PENDING_BYTES:
                raise Expelled("busy", "too many reports wait to be stored: come back")
            session.applied = "" if await self._durable(host_id, order, content, payload) else content
        session.last = max(session.last, order)
        await session.send({"type": "websocket.send", "text": f'{{"type":"Ack","seq":{order[1]},"of":"Report"}}'})

    async def _durable(self, host_id: int, order: tuple[int, int], content: str, payload: str) -> bool:
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._pending_bytes += len(payload)
        try:
            self._writer.put(SpoolJob(future, host_id, order, content, payload))
            return await future
        finally:
            self._pending_bytes -= len(payload)

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


def _version(scope: Any) -> str:
    for version in wire.VERSIONS:
        if version in scope["subprotocols"]:
            return version
    offered = ", ".join(scope["subprotocols"])[:200] or "none"
    raise Refused(403, "version", f"no common wire version: we speak {', '.join(wire.VERSIONS)}, offered was {offered}")


async def _deny(scope: Any, send: Any, refused: Refused) -> None:
    """An HTTP answer with one JSON sentence, and no socket."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": refused.code})
        return
    headers, body = enrolment.denial(refused)
    await send({"type": "websocket.http.response.start", "status": refused.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
