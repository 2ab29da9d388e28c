"""ASGI application that serves agents' WebSocket connections: authenticate, decode messages, acknowledge them.

It runs on the event loop and never blocks it; work that needs the database is queued for the thread
`agents.gateway.writer.DatabaseWriter`. It has its own receive loop, because channels' consumers cost six times as much
per message (measured).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
from django.db import DatabaseError

from accelerators.commands.command_queue import CommandAnswer, CommandProgress
from accelerators.domain import errors
from accelerators.runtime import database_clock, database_outage
from agents import authentication, credentials, key_revocation, liveness, wire
from agents.authentication import ConnectionRejectedError, EnrolledAgent
from agents.gateway import metrics
from agents.gateway.announcements import AnnouncementFile
from agents.gateway.command_dispatch import CommandDispatcher, CommandMessage
from agents.gateway.leases import LeaseBuffer
from agents.gateway.rejections import RefusalCounter
from agents.gateway.sample_cache import SAMPLES_PREFIX, SampleCache
from agents.gateway.sessions import AgentSession, SessionClosedError, SessionRegistry, send_message, send_text
from agents.gateway.throttling import BURST_S, HandshakeThrottle, ReportJitter, TokenBuckets
from agents.gateway.upgrade_request import choose_version, client_address, deny_upgrade
from agents.gateway.urgency import DeviceHealth, list_faulty_keys, list_health_to_check
from agents.gateway.writer import (
    LARGE_REPORT_BYTES,
    AdmitJob,
    CommandJob,
    DatabaseWriter,
    ReportWriter,
    SpoolAccount,
    SpoolJob,
    SpoolUse,
    TrustJob,
)

log = logging.getLogger(__name__)

ADMISSION_TIMEOUT_S = 8.0
"""Seconds a handshake may wait for the database. Then it is refused with a 503, so that connections do not pile up
during an outage."""
FIRST_MESSAGE_TIMEOUT_S = 30.0
"""Seconds in which an agent must send its first message. Otherwise its connection is closed, because it takes a place
that another agent could use."""
CLOSE_TIMEOUT_S = 1.0
"""Seconds to wait until an agent has received the Refuse message and the close frame."""
PROGRESS_INTERVAL_S = 0.2
"""Minimum seconds between two writes of one agent's command progress. The newest progress is always written."""
REPORT_REQUEST_INTERVAL_S = 10.0
"""Minimum seconds until a connection is asked for its report for the second time. Every further time it is twice as
long as before, because an agent of an older release ignores the request until it connects again."""
MAX_REPORT_REQUEST_INTERVAL_S = 600.0
"""The longest of these times, in seconds."""
MANY_HOSTS = "(many)"
"""Host name under which refusals of many hosts are counted together. An outage or a connection storm then makes one
event a minute instead of one per host."""
MAX_PENDING_PROGRESS = 256
"""Maximum number of commands of one agent whose progress waits to be written. Progress of further ones is dropped."""
CLOSE_MESSAGE_TOO_LARGE = 1009
"""WebSocket close code for a message that is larger than the web server accepts."""


UnknownKind = Literal["unknown_fields", "unknown_types"]


class GatewaySettings(Protocol):
    """The configuration keys that the gateway reads."""

    @property
    def beat_s(self) -> float:
        """Return the seconds between two heartbeats of an agent."""
        ...

    @property
    def max_message_bytes(self) -> int:
        """Return the size in bytes of the largest message that is accepted."""
        ...

    @property
    def handshakes(self) -> int:
        """Return the maximum number of handshakes in progress at the same time."""
        ...

    @property
    def agent_connections(self) -> int:
        """Return the maximum number of open connections."""
        ...

    @property
    def pending_report_bytes(self) -> int:
        """Return the size of the reports that may wait for their commit, above which further ones are refused."""
        ...

    @property
    def host_reports_per_s(self) -> float:
        """Return how many reports of one host are stored a second if it sends without end."""
        ...

    @property
    def host_report_bytes_per_s(self) -> int:
        """Return how many bytes of reports of one host are stored a second if it sends without end."""
        ...

    @property
    def flush_interval_ms(self) -> float:
        """Return the milliseconds that the writer thread waits before each batch, so that jobs collect."""
        ...

    @property
    def flush_max_rows(self) -> int:
        """Return the maximum number of reports in one commit."""
        ...

    @property
    def lease_flush_s(self) -> float:
        """Return the seconds between two writes of leases."""
        ...

    @property
    def agent_announcement_key(self) -> str:
        """Return the public key that signs announcements of certificates, '' for none."""
        ...

    @property
    def announcements_path(self) -> Path:
        """Return the path of the file of announcements."""
        ...


class AgentGateway:
    """The ASGI application at `/ws/agent`, and the view of `/ws/agent/challenge` that agents ask for a nonce first."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.leases = LeaseBuffer(settings.lease_flush_s)
        self.refusals = RefusalCounter()
        self.announcements = AnnouncementFile(settings.agent_announcement_key, settings.announcements_path)
        self.challenges = authentication.Challenges()
        self.throttle = HandshakeThrottle(settings.handshakes, settings.agent_connections)
        self.report_jitter = ReportJitter()
        self._report_buckets = TokenBuckets(settings.host_reports_per_s, settings.host_reports_per_s * BURST_S)
        self._byte_buckets = TokenBuckets(settings.host_report_bytes_per_s, settings.host_report_bytes_per_s * BURST_S)
        self.open_connections = 0
        self._pending_bytes = self._throttled_bytes = 0
        """The bytes of reports that wait for their commit, and of those that wait because their hosts send too much."""
        self.sessions = SessionRegistry(self._bar_clone)
        self.sample_cache = SampleCache(self.refusals, self._is_under_pressure)
        self._dispatcher = CommandDispatcher()
        self._spool_account = SpoolAccount(
            SpoolUse(int(settings.host_reports_per_s * BURST_S), int(settings.host_report_bytes_per_s * BURST_S))
        )
        self._writer = DatabaseWriter(
            interval_s=settings.flush_interval_ms / 1000,
            max_rows=settings.flush_max_rows,
            account=self._spool_account,
            leases=self.leases,
            refusals=self.refusals,
            report_jitter=self.report_jitter,
            on_agent_changes=self.sessions.apply_agent_changes,
            on_reports_needed=self._request_reports,
        )
        self._report_writer = ReportWriter(
            interval_s=settings.flush_interval_ms / 1000,
            max_rows=settings.flush_max_rows,
            account=self._spool_account,
            report_jitter=self.report_jitter,
            request_wake_ups=self._writer.request_wake_ups,
        )

    def stop(self) -> None:
        """Stop the sample cache and the threads. Only tests need this: a real process just ends."""
        self.sample_cache.stop()
        self._dispatcher.stop()
        self._report_writer.stop()
        self._writer.stop()

    def set_public_url(self, url: str) -> None:
        """Set the address where other processes ask this gateway for samples; the next lease flush stores it."""
        self.leases.gateway_name_and_url = self.sample_cache.name, url

    def _is_under_pressure(self) -> bool:
        """Return True if samples should be dropped, because more important work waits.

        That is: reports of more than an eighth of the allowed bytes wait for their commit, or more than half of the
        handshake places are taken.
        """
        has_report_backlog = self._pending_bytes > self.settings.pending_report_bytes // 8
        return has_report_backlog or self.throttle.in_progress > self.throttle.max_handshakes // 2

    async def serve_challenge(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer GET /ws/agent/challenge with a nonce, or with a 503 and Retry-After while too many agents connect.

        Nothing is known about the client yet. In a connection storm most agents are refused here, which is the
        cheapest place.
        """
        try:
            if scope["method"] != "GET":
                raise ConnectionRejectedError(405, "method", "only GET is allowed")
            self._reject_if_throttled(self.throttle.admit_challenge(client_address(scope)))
        except ConnectionRejectedError as refused:
            status, (headers, body) = refused.status, authentication.build_denial(refused)
        else:
            challenge = self.challenges.create()
            if certificates := self.announcements.read():
                challenge = msgspec.structs.replace(challenge, announcements=certificates.announcements)
            status, body = 200, msgspec.json.encode(challenge)
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    def _reject_if_throttled(self, retry_after_s: int) -> None:
        """Raise ConnectionRejectedError 503 with this Retry-After, and count it as a refusal; do nothing for 0.

        `retry_after_s` is what `HandshakeThrottle` has answered.
        """
        if retry_after_s:
            is_full = self.open_connections >= self.settings.agent_connections
            limit = "as many agents are connected as CYBORG_AGENT_CONNECTIONS allows"
            reason = limit if is_full else "too many agents connect at once"
            refused = ConnectionRejectedError(
                503, "busy", f"{reason}: try again after Retry-After seconds", retry_after_s
            )
            self.refusals.add(
                MANY_HOSTS, refused.code, "too many agents connected at once: each was told when to try again"
            )
            raise refused

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a connection on a listener where this product does no TLS: the agent then signs an empty certificate
        fingerprint."""
        await self.serve_connection(scope, receive, send, ("",))

    async def serve_connection(self, scope: Any, receive: Any, send: Any, fingerprints: Iterable[str]) -> None:
        """Serve one connection from the upgrade request to its end.

        `fingerprints` are those of the certificates that the agent may have pinned. A refused upgrade gets an HTTP
        error, and a connection that the gateway ends gets a Refuse; both are recorded as refusals.
        """
        await receive()  # websocket.connect
        host = ""
        try:
            self._reject_if_throttled(self.throttle.admit_upgrade(self.open_connections, client_address(scope)))
            version = choose_version(scope)
            credential = authentication.read_credential(scope)
            host = credential.host
            fingerprint, nonce = authentication.verify_credential(credential, self.challenges, fingerprints)
            with self.throttle.count_handshake():
                identity = await self._identify_agent(credential, nonce)
            if credential.epoch > authentication.highest_allowed_epoch(identity.epoch):
                reason = f"epoch {credential.epoch} is out of range: the agent's journal may be damaged"
                raise ConnectionRejectedError(403, "epoch", reason, proven_host=identity.host)
        except ConnectionRejectedError as refused:
            if refused.code != "busy":
                proven_host = MANY_HOSTS if refused.status == 503 else refused.proven_host
                self.refusals.add(
                    proven_host, refused.code, refused.reason, claimed=host, address=client_address(scope)
                )
            await deny_upgrade(scope, send, refused)
            return
        session = AgentSession(identity, credential, fingerprint, version, scope, send)
        if identity.host_id in self.sessions.by_host:
            session.applied_hash = ""  # a report of the older connection may be stored after we read the applied hash
        self.open_connections += 1
        metrics.event_counts["opened"] += 1
        try:
            await send({"type": "websocket.accept", "subprotocol": version})
            self.sessions.register(session)
            if await self._send_welcome(session):
                await self._receive_messages(session, receive)
                self._record_message_error(host, scope)
        except SessionClosedError as close_error:
            session.close_error = close_error
        except asyncio.CancelledError:
            if session.close_error is None or session.task is None:
                raise
            session.task.uncancel()
        finally:
            self.open_connections -= 1
            metrics.event_counts["closed"] += 1
            self.sessions.unregister(session)
            self.sample_cache.unregister(session)
            if session.has_sent_hello:
                self._dispatcher.remove_agent(session)
        if session.close_error:
            await self._send_refusal(session, session.close_error)

    def _record_message_error(self, host: str, scope: Any) -> None:
        """Add a refusal if the web server closed this connection over a message (see wire.MESSAGE_ERROR_KEY)."""
        code, reason = scope.get("state", {}).get(wire.MESSAGE_ERROR_KEY, (0, ""))
        if code == CLOSE_MESSAGE_TOO_LARGE:
            self.refusals.add(host, "too-large", self._describe_too_large(reason))
        elif code:
            self.refusals.add(host, "malformed", f"the WebSocket data is invalid (close code {code}): {reason}")

    def _reject_too_large(self, data: str | bytes) -> None:
        """Raise SessionClosedError if a message has more bytes than the limit; a text is measured in UTF-8."""
        limit = self.settings.max_message_bytes
        if len(data) * 4 <= limit:  # a character has at most 4 bytes, so that most messages need not be encoded
            return
        size = len(data.encode() if isinstance(data, str) else data)
        if size > limit:
            raise SessionClosedError("too-large", self._describe_too_large(f"it has {size} bytes"))

    def _describe_too_large(self, size: str) -> str:
        """Return the reason for the refusal of a message that is too large; `size` says how large it is."""
        return (
            f"the message is larger than {self.settings.max_message_bytes} bytes ({size}): agents of this product"
            " keep to the limit, so look at what runs on this host, or raise CYBORG_MAX_MESSAGE_BYTES"
        )

    async def _identify_agent(
        self, credential: credentials.Credential, nonce: authentication.IssuedNonce
    ) -> EnrolledAgent:
        """Have the writer thread look up or enrol the agent of a verified credential, and return it.

        Raise ConnectionRejectedError: 401 if the nonce is not accepted, 403 if this key may not connect, 503 if the
        database cannot do it or takes longer than ADMISSION_TIMEOUT_S.
        """
        future: asyncio.Future[EnrolledAgent] = asyncio.get_running_loop().create_future()
        self._writer.put(AdmitJob(future, credential, nonce))
        try:
            async with asyncio.timeout(ADMISSION_TIMEOUT_S):
                return await future
        except TimeoutError:
            reason = "the database does not answer: try again later"
            database_outage.log_outage(f"a connecting agent got no answer within {ADMISSION_TIMEOUT_S:g} s")
            raise ConnectionRejectedError(503, "database", reason, self.throttle.schedule_return()) from None

    async def _send_welcome(self, session: AgentSession) -> bool:
        """Note a heartbeat for the host's lease, send Welcome, and ask the agent for a new key if one was requested.

        Return False if the agent is already gone.
        """
        identity = session.identity
        self.leases.note_heartbeat(identity.host_id, session.epoch)
        welcome = self._build_welcome(session, identity.applied_hash)
        session.report_requested_at = -math.inf if identity.applied_hash else asyncio.get_running_loop().time()
        if (is_delivered := await send_message(session, welcome)) and identity.rotation_requested:
            self.sessions.request_new_key(session)
        await self._send_new_announcements(session)
        return is_delivered

    async def _send_new_announcements(self, session: AgentSession) -> None:
        """Send Certificates if there are announcements that were not sent on this connection.

        Agents that pin no certificate ignore the message.
        """
        certificates = self.announcements.read()
        if certificates and certificates is not session.certificates:
            session.certificates = certificates
            await send_message(session, certificates)

    def _build_welcome(self, session: AgentSession, applied_hash: str) -> wire.Welcome:
        """Return a Welcome that names `applied_hash` as the hash of the last applied report."""
        known_state = session.identity.epoch, applied_hash, self.settings.max_message_bytes
        return wire.Welcome(self.settings.beat_s, *known_state, round(self.report_jitter.choose_jitter(), 1))

    def _request_reports(self, host_ids: list[int]) -> None:
        """Forget which report is applied for these hosts, and ask those that are connected here for their reports.

        The first time that a connection is asked again is after REPORT_REQUEST_INTERVAL_S, because its report may be on
        its way. Until it sends a report, the interval doubles after each request, up to MAX_REPORT_REQUEST_INTERVAL_S.
        """
        now = asyncio.get_running_loop().time()
        for session in filter(None, map(self.sessions.by_host.get, host_ids)):
            session.applied_hash = ""
            interval = REPORT_REQUEST_INTERVAL_S * 2 ** min(session.unanswered_report_requests, 16)
            if now - session.report_requested_at >= min(interval, MAX_REPORT_REQUEST_INTERVAL_S):
                session.report_requested_at = now
                session.unanswered_report_requests += 1
                self.sessions.request_report(session, self._build_welcome(session, ""))

    async def _receive_messages(self, session: AgentSession, receive: Any) -> None:
        """Receive and handle messages until the peer closes. The first one decides which connection holds the host.

        Raise SessionClosedError for a message that is malformed, not allowed or cannot be stored, if the first message
        does not come within FIRST_MESSAGE_TIMEOUT_S, and if another connection keeps the host.
        """
        peer_offers_newer, has_settled = session.offers_newer_version, False
        while (event := await (receive() if has_settled else _receive_first_event(receive)))[
            "type"
        ] == "websocket.receive":
            data = event.get("text") or event.get("bytes") or b""
            self._reject_too_large(data)
            try:
                is_samples = isinstance(data, str) and data.startswith(SAMPLES_PREFIX)
                # No sample is decoded before `claim_host`: until then another connection may still hold this host.
                if is_samples and not (has_settled and self.sample_cache.accept_message(session, len(data))):
                    del event, data
                    continue
                data = _decode_frame(data)
                message = wire.decode_from_agent(data)
                if type(message) is wire.Hello:
                    session.agent_version = message.agent_version
                if peer_offers_newer and (unknown_fields := wire.count_unknown_fields(data, message)):
                    self._note_unknown(session, "unknown_fields", unknown_fields)
            except wire.MalformedMessageError as error:
                raise SessionClosedError("malformed", str(error)) from None
            if not has_settled:
                session.boot_id = message.boot_id if type(message) is wire.Hello else ""
                await self.sessions.claim_host(session)
                has_settled = True
            if type(message) is wire.Beat:
                metrics.event_counts["beats"] += 1
                self.leases.note_heartbeat(session.identity.host_id, session.epoch)
                await send_text(session, f'{{"type":"Ack","seq":{message.seq},"of":"Beat"}}')
                if self.announcements.public_key:
                    await self._send_new_announcements(session)
            elif type(message) is wire.Report:
                epoch_seq, content_hash = (message.epoch, message.seq), message.hash
                health_to_check = list_health_to_check(message.drivers, session.faulty_keys)
                session.faulty_keys = list_faulty_keys(health_to_check)
                # Decoded it takes five times the memory of its text: do not keep it while waiting for the commit.
                del message
                await self._handle_report(session, epoch_seq, content_hash, data, health_to_check)
            else:
                await self._handle_control_message(session, message)
            del event, data  # otherwise an idle connection would keep its last report in memory

    async def _handle_control_message(
        self, session: AgentSession, message: wire.FromAgent | wire.UnknownMessage
    ) -> None:
        """Handle any message other than Beat and Report.

        NewKey, Taken and Result are stored before this returns; progress is stored later. A message of an unknown type
        is counted and dropped. Raise SessionClosedError for a message that is not allowed or cannot be stored.
        """
        if type(message) is wire.Hello:
            session.boot_id = message.boot_id
            self.leases.note_hello(session, message)
            if not session.has_sent_hello:
                session.has_sent_hello = True
                self._dispatcher.add_agent(session, message)
                self.sample_cache.register(session)
                now = datetime.fromtimestamp(database_clock.estimate_timestamp(), UTC)
                if not liveness.is_up(session.identity.last_heard, now):
                    self._writer.note_return(session.identity.host_id)
        elif type(message) is wire.Alive:
            self.sessions.handle_probe_reply(session, message.nonce)
        elif type(message) is wire.NewKey:
            await self._handle_new_key(session, message)
        elif type(message) is wire.Taken:
            confirmations = [
                self._store_command_message((session.identity.host_id, number))
                for number in dict.fromkeys(message.numbers)
            ]
            await asyncio.gather(*confirmations)
        elif type(message) is wire.Progress:
            self._collect_progress(session, message)
        elif type(message) is wire.Result:
            await self._handle_result(session, message)
        elif type(message) is wire.Samples:
            self.sample_cache.store_samples(session, message)
        elif type(message) is wire.UnknownMessage:
            self._note_unknown(session, "unknown_types", 1)

    def _note_unknown(self, session: AgentSession, kind: UnknownKind, count: int) -> None:
        """Count fields or messages that were ignored because this release does not know them.

        The first ones of a connection are also recorded as an event, which names the agent's release.
        """
        metrics.event_counts[kind] += count
        if not session.has_sent_unknown:
            session.has_sent_unknown = True
            release = session.agent_version or "not known yet"
            sentence = (
                "not refused: the agent stays connected, but a part of its messages was ignored"
                f" ({kind.replace('_', ' ')}). If its release ({release}) is newer than the conductor's, upgrade the"
                " conductor."
            )
            self.refusals.add(session.identity.host, "unknown", sentence, is_disconnected=False)

    def _collect_progress(self, session: AgentSession, message: wire.Progress) -> None:
        """Keep the newest progress of each command, and schedule a write, at least PROGRESS_INTERVAL_S after the last.

        While MAX_PENDING_PROGRESS commands wait, progress of further commands is dropped.
        """
        loop = asyncio.get_running_loop()
        if not session.pending_progress:
            loop.call_at(
                max(loop.time(), session.progress_flushed_at + PROGRESS_INTERVAL_S), self._flush_progress, session
            )
        if message.number in session.pending_progress or len(session.pending_progress) < MAX_PENDING_PROGRESS:
            session.pending_progress[message.number] = message

    def _flush_progress(self, session: AgentSession) -> None:
        """Queue the collected progress for the writer thread.

        If the previous batch is not stored yet, try again after PROGRESS_INTERVAL_S: progress must not pile up while
        the database is down.
        """
        loop = asyncio.get_running_loop()
        if not all(write.done() for write in session.progress_writes):
            loop.call_later(PROGRESS_INTERVAL_S, self._flush_progress, session)
            return
        collected, session.pending_progress = session.pending_progress, {}
        session.progress_flushed_at = loop.time()
        host = session.identity.host_id
        session.progress_writes = [
            self._store_command_message(
                CommandProgress(host, number, progress.percent, progress.text.replace("\0", ""))
            )
            for number, progress in collected.items()
        ]

    async def _handle_result(self, session: AgentSession, result: wire.Result) -> None:
        """Store the result of a command and acknowledge it once the report that belongs to it is applied.

        If the command is settled by this write, the Ack is sent here; otherwise `CommandDispatcher` sends it later.
        Raise SessionClosedError for a text with a NUL character.
        """
        if "\0" in "".join((result.text, result.hash, *result.detail, *result.detail.values())):
            raise SessionClosedError("malformed", "a text with a NUL character cannot be stored")
        host = session.identity.host_id
        # Do not look up a report that this connection knows to be applied: another writer may have cleared the hash.
        is_applied = result.hash and result.hash == session.applied_hash
        report = (0, 0, "") if is_applied else (result.epoch, result.seq, result.hash)
        if await self._store_command_message(
            CommandAnswer(host, result.number, result.outcome, result.text, result.detail, *report)
        ):
            await send_message(session, wire.Ack(result.number, "Result"))
        else:
            self._dispatcher.watch_result(session, result.number)

    def _store_command_message(self, message: CommandMessage) -> asyncio.Future[bool]:
        """Queue a message about a command for the writer thread.

        After the commit the returned future gives True if the command is settled, so that a Result can be acknowledged;
        False also if the database rejects the message.
        """
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._writer.put(CommandJob(future, message))
        return future

    async def _handle_new_key(self, session: AgentSession, new_key: wire.NewKey) -> None:
        """Replace the agent's key by the one in NewKey, and send the Ack after the commit.

        Raise SessionClosedError if no new key was asked for, if a signature is wrong, if the key is refused, or if the
        database cannot store it.
        """
        old, new, identity = session.public_key, new_key.public_key, session.identity
        signed_data = credentials.build_rotation_bytes(identity.host, old, new, session.fingerprint)
        if not session.awaits_new_key:
            raise SessionClosedError("rotation", "no new key was asked for")
        if not (
            credentials.is_valid_signature(old, new_key.signature, signed_data)
            and credentials.is_valid_signature(new, new_key.proof, signed_data)
        ):
            raise SessionClosedError("rotation", "the new key must be signed by the present key and by itself")
        session.next_public_key = new
        try:
            await self._change_trust(lambda: key_revocation.replace_key(identity.host_id, old, new))
        except errors.RefusedError as refused:
            raise SessionClosedError("rotation", refused.text) from None
        except DatabaseError:
            reason = "the database cannot store the new key: see the gateway's log"
            raise SessionClosedError("database", reason) from None
        session.public_key, session.next_public_key, session.awaits_new_key = new, "", False
        await send_message(session, wire.Ack(0, "NewKey"))

    def _bar_clone(
        self,
        host_id: int,
        key: str,
        first: key_revocation.ConnectionIdentity,
        second: key_revocation.ConnectionIdentity,
    ) -> None:
        """Order the writer thread to lock out a key that two connections use at the same time.

        This method does not wait for the result, and ignores it.
        """
        self._change_trust(lambda: key_revocation.bar_cloned_key(host_id, key, first, second))

    def _change_trust(self, work: Callable[[], None]) -> asyncio.Future[None]:
        """Queue a change of trust for the writer thread; the returned future is done after its commit.

        If the change is refused or fails, the future raises RefusedError or DatabaseError.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._writer.put(TrustJob(future, work))
        return future

    async def _handle_report(
        self,
        session: AgentSession,
        epoch_seq: tuple[int, int],
        content_hash: str,
        text: str,
        health_to_check: Sequence[DeviceHealth],
    ) -> None:
        """Acknowledge a report when it is durable, when its content is applied already, or when it is old.

        A report is old if this connection has acknowledged the same or a later (epoch, seq). The socket is not read
        while this waits, so that a host never has more than one message in memory. A host that sends more than its
        share waits before its report is stored. The field `urgent` of the report is ignored (`agents.gateway.urgency`).
        Raise SessionClosedError if the epoch is out of range, the report has a NUL character, too many reports wait for
        a commit or of this host in the spool, or the database cannot store it.
        """
        self.report_jitter.count_report()
        host_id = session.identity.host_id
        metrics.event_counts["reports"] += 1
        if epoch_seq[0] > session.highest_epoch:
            raise SessionClosedError(
                "epoch", f"epoch {epoch_seq[0]} is out of range: the agent's journal may be damaged"
            )
        self.leases.note_heartbeat(host_id, epoch_seq[0])
        session.unanswered_report_requests = 0
        if epoch_seq > session.last_acknowledged and session.applied_hash != content_hash:
            if "\\u0000" in text:
                raise SessionClosedError("malformed", "a text with a NUL character cannot be stored")
            await self._wait_for_share(session, len(text))
            if self._pending_bytes > self.settings.pending_report_bytes:
                raise SessionClosedError("busy", "too many reports wait to be stored: connect again later")
            future = asyncio.get_running_loop().create_future()
            job = SpoolJob(future, host_id, epoch_seq, content_hash, text, health_to_check)
            session.applied_hash = "" if await self._wait_until_spooled(job) else content_hash
        session.last_acknowledged = max(session.last_acknowledged, epoch_seq)
        await send_text(session, f'{{"type":"Ack","seq":{epoch_seq[1]},"of":"Report"}}')

    async def _wait_for_share(self, session: AgentSession, size: int) -> None:
        """Wait until the host may store a report of this size; count and record it if this takes time.

        One wait is at most as long as the interval of heartbeats, because the socket is not read meanwhile, and an
        agent that gets no answer for three intervals disconnects. The rest of the debt stays. The bytes of all reports
        that wait here have a limit of their own, so that throttled hosts refuse reports only to each other. Raise
        SessionClosedError above it.
        """
        host_id = session.identity.host_id
        wait_s = max(self._report_buckets.take(host_id, 1), self._byte_buckets.take(host_id, size))
        if not wait_s:
            return
        metrics.event_counts["postponed"] += 1
        sentence = (
            "not refused: the agent stays connected, but it sends more reports than CYBORG_HOST_REPORTS_PER_S or"
            " CYBORG_HOST_REPORT_BYTES_PER_S allows, so they are stored later. Look at what runs on this host, and"
            " which of its drivers reports something new each time"
        )
        self.refusals.add(session.identity.host, "throttled", sentence, is_disconnected=False)
        if self._throttled_bytes + size > self.settings.pending_report_bytes:
            raise SessionClosedError("busy", "too many reports wait to be stored: connect again later")
        self._throttled_bytes += size
        try:
            await asyncio.sleep(min(wait_s, self.settings.beat_s))
        finally:
            self._throttled_bytes -= size

    async def _wait_until_spooled(self, job: SpoolJob) -> bool:
        """Wait until the report is committed to the spool, and return True.

        Return False if it was not stored, because its content is applied already. Raise SessionClosedError if the
        database rejects it. While the database is down, it waits.
        """
        self._pending_bytes += len(job.payload)
        try:
            writer = self._writer if len(job.payload) > LARGE_REPORT_BYTES else self._report_writer
            writer.put(job)
            return bool(await job.future)
        finally:
            self._pending_bytes -= len(job.payload)

    async def _send_refusal(self, session: AgentSession, close_error: SessionClosedError) -> None:
        """Count the refusal, send Refuse and close the connection with 1008. Wait at most CLOSE_TIMEOUT_S for a peer
        that reads nothing. If the connection is gone, this is only logged."""
        self.refusals.add(session.identity.host, close_error.code, close_error.reason)
        text = wire.encode_message(wire.Refuse(close_error.code, close_error.reason[:4096]))
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await session.send({"type": "websocket.send", "text": text})
                await session.send({"type": "websocket.close", "code": 1008, "reason": close_error.code})
        except (TimeoutError, RuntimeError, OSError) as error:
            log.debug("%s disconnected before the refusal could be sent: %s", session.identity.host, error)


async def _receive_first_event(receive: Any) -> Any:
    """Receive the first event of a connection, or raise SessionClosedError after FIRST_MESSAGE_TIMEOUT_S."""
    try:
        async with asyncio.timeout(FIRST_MESSAGE_TIMEOUT_S):
            return await receive()
    except TimeoutError:
        raise SessionClosedError(
            "silent", f"the agent sent no message within {FIRST_MESSAGE_TIMEOUT_S:.0f} s"
        ) from None


def _decode_frame(data: str | bytes) -> str:
    """Return the text of a text or binary frame; raise MalformedMessageError if it is not UTF-8."""
    try:
        return data if isinstance(data, str) else data.decode()
    except UnicodeDecodeError:
        raise wire.MalformedMessageError("the message is not UTF-8") from None
