"""Exchange messages on one open connection to the gateway, from Welcome to the end of the connection.

Reports and results are sent from the journal: its last report, and the results of commands that the gateway has not
acknowledged. A result is sent only when the gateway has acknowledged the report that shows the command's effect.

The order of sending is: a report in which a device got worse; messages about commands; other reports; and samples when
nothing else waits.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from typing import TYPE_CHECKING, Protocol

import msgspec
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from agents import wire
from agents.errors import AgentsError
from agents.host.backoff import PendingAcks, wait_for_event
from drivers.configuration import ConfigurationError
from drivers.inventory import Health

if TYPE_CHECKING:
    from agents.host.connection.link import GatewayLink

log = logging.getLogger("cyborg.link")

MAX_TAKEN_NUMBERS = 256
"""Largest number of commands in one Taken message."""
HEALTH_SEVERITY: dict[Health, int] = {"ok": 0, "unknown": 1, "degraded": 2, "failed": 3}
"""Severity of each health; a higher number is worse."""


class CommandSink(Protocol):
    """Receives commands; `executor.Executor` implements it.

    `progress` maps a command's number to its newest progress, until that is taken out and sent.
    """

    progress: dict[int, wire.Progress]

    def accept_command(self, command: wire.Command) -> None:
        """Accept a command. When this returns, it is in the journal or its refusal waits to be sent."""


class ConnectionLostError(AgentsError):
    """The connection ended or must be closed, and the agent has to reconnect. The text is the reason."""


class SessionRefusedError(AgentsError):
    """The gateway sent Refuse, which ends the connection. The text is the gateway's reason and code."""


class GatewaySession:
    """One connection after Welcome: a receiving and a sending loop on the same socket."""

    def __init__(self, link: GatewayLink, socket: ClientConnection, welcome: wire.Welcome) -> None:
        self._link = link
        self._journal = link.journal
        self._socket = socket
        self._beat_s = min(max(welcome.beat_s, 0.05), 3600.0)
        self._max_bytes = welcome.max_bytes
        self._pending_acks = PendingAcks(self._beat_s, link.timing)
        self._too_large_hash = ""
        self._received_numbers: list[int] = []
        self._sent_results: set[int] = set()
        self._acknowledged_seq = 0
        """The highest seq of a report that was acknowledged on this connection."""
        self._clock = asyncio.get_running_loop().time
        self._pending_acks.last_ack_at = self._clock()
        self._note_applied_report(welcome)
        link.authority.on_connect(lambda: self._pending_acks.is_gateway_answering(self._clock()))

    async def receive_messages(self) -> None:
        """Receive and handle messages until the connection ends.

        Raises SessionRefusedError when the gateway sends Refuse, ConnectionLostError when the connection is closed,
        and wire.MalformedMessageError.
        """
        while True:
            message = await receive_message(self._socket)
            if isinstance(message, wire.Ack):
                self._handle_ack(message)
            elif isinstance(message, wire.Command) and self._link.command_sink is not None:
                if message.writer:
                    self._link.authority.on_writer_epoch(message.writer)
                self._sent_results.discard(message.number)
                self._received_numbers.append(message.number)
                self._link.command_sink.accept_command(message)
            elif isinstance(message, wire.Refuse):
                raise SessionRefusedError(f"{message.reason} [{message.code}]")
            else:
                await self._handle_control_message(message)

    async def _handle_control_message(self, message: wire.FromGateway | wire.UnknownMessage) -> None:
        """Handle any message other than Ack, Command and Refuse; messages that this release does not use are
        dropped."""
        if isinstance(message, wire.Welcome):
            self._note_applied_report(message)
            self._link.wake.set()
        elif isinstance(message, wire.Writer):
            self._link.authority.on_writer_epoch(message.epoch)
        elif isinstance(message, wire.Watch) and self._link.sampler is not None:
            self._link.sampler.on_watch(message)
        elif isinstance(message, wire.Probe):
            await self._socket.send(wire.encode_message(wire.Alive(message.nonce)))
        elif isinstance(message, wire.Rotate):
            await self._send_next_key()
        elif isinstance(message, wire.Certificates):
            if self._link.accept_certificates(message):
                await self._socket.send(wire.encode_message(self._link.build_hello()))
        else:
            self._link.drop_message(message)

    def _note_applied_report(self, welcome: wire.Welcome) -> None:
        """Note which report the conductor has applied, and choose a time before which no report is sent.

        If the journal's report is another one, it is sent then. The time is random within the jitter of the Welcome (at
        most 300 s), in seconds of the event loop's clock.
        """
        self._applied_hash = welcome.applied_hash
        jitter_s = min(max(welcome.jitter_s, 0.0), 300.0)
        self._report_from = self._clock() + self._link.timing.draw_fraction() * jitter_s

    async def _send_next_key(self) -> None:
        """Create the next key and send NewKey; if the key cannot be written, log that and keep the current key.

        Both keys are on disk from before NewKey is sent until the gateway has acknowledged it.
        """
        keys = self._link.keys
        try:
            next_identity = keys.prepare_next_key()
        except ConfigurationError as error:
            log.error("the gateway asked for a new key, but the present key stays in use: %s", error)
            return
        await self._socket.send(
            wire.encode_message(
                keys.current_identity.build_new_key_message(next_identity, self._link.session_fingerprint)
            )
        )

    def _handle_ack(self, ack: wire.Ack) -> None:
        """Note an Ack: of a heartbeat, or of a report, a result or a new key, which then need not be sent again."""
        self._pending_acks.record_ack(ack.of, ack.seq, self._clock())
        if ack.of == "Report":
            self._acknowledge_report(ack.seq)
        elif ack.of == "Result":
            self._acknowledge_result(ack.seq)
        elif ack.of == "NewKey" and self._link.keys.next_identity is not None:
            self._link.adopt_next_key()

    def _acknowledge_report(self, seq: int) -> None:
        """Note that the gateway has stored report `seq` for good, and wake the sending loop. If the journal cannot note
        it, this is logged."""
        try:
            self._journal.acknowledge_report(seq)
        except sqlite3.OperationalError as error:
            log.error("the journal cannot store an acknowledgement (%s): the report may be sent once more", error)
        report = self._journal.report
        if report is not None and report.seq == seq:
            self._applied_hash = report.hash
            self._link.acknowledged_health = health_by_device(report)
        self._acknowledged_seq = max(self._acknowledged_seq, seq)
        self._link.wake.set()

    def _acknowledge_result(self, number: int) -> None:
        """Note that the gateway has stored the result of command `number` for good. If the journal cannot note it, this
        is logged."""
        try:
            self._journal.command_log.acknowledge_result(number)
        except sqlite3.OperationalError as error:
            log.error("the journal cannot store an acknowledgement (%s): a result may be sent once more", error)

    async def send_messages(self) -> None:
        """Send heartbeats, reports, results, progress and samples until the connection ends.

        Raises ConnectionLostError when the gateway owes an Ack for too long. Returns without an error when the
        connection is closed: `receive_messages` may still have to read a Refuse, which is the better reason.
        """
        try:
            await self._run_send_loop()
        except ConnectionClosed:
            return

    async def _run_send_loop(self) -> None:
        """Run the sending loop: one pass each time it is woken, or a heartbeat, report or deadline is due.

        The first heartbeat and the first report are delayed at random, so that many hosts do not send them at once.
        Raises ConnectionLostError when an Ack is overdue.
        """
        draw_fraction = self._link.timing.draw_fraction
        now = self._clock()
        next_beat_at, seq = now + draw_fraction() * self._beat_s, 0
        while True:
            self._link.wake.clear()
            now = self._clock()
            if reason := self._pending_acks.describe_overdue(now):
                raise ConnectionLostError(reason)
            if now >= next_beat_at:
                seq, next_beat_at = seq + 1, now + self._beat_s
                self._pending_acks.record_sent("Beat", seq, now)
                await self._socket.send(wire.encode_message(wire.Beat(seq=seq)))
            if self._has_worse_health():
                await self._send_report()
            await self._send_command_messages()
            if (
                now >= self._report_from or self._journal.command_log.unacknowledged
            ):  # no jitter for a report that a result waits for
                await self._send_report()
            await self._send_samples()
            deadlines = [next_beat_at, self._pending_acks.next_deadline()] + (
                [self._report_from] if now < self._report_from else []
            )
            await wait_for_event(self._link.wake, min(deadlines) - self._clock())

    async def _send_command_messages(self) -> None:
        """Send Taken for new commands, then progress, then each result whose effect the gateway has in a report.

        Each result is sent once per connection, and again if its command comes again. A result that is larger than the
        gateway's message limit is sent without its `detail`.
        """
        if self._received_numbers:
            numbers, self._received_numbers = self._received_numbers, []
            for start in range(0, len(numbers), MAX_TAKEN_NUMBERS):
                await self._socket.send(
                    wire.encode_message(wire.Taken(tuple(numbers[start : start + MAX_TAKEN_NUMBERS])))
                )
        progress = self._link.command_sink.progress if self._link.command_sink is not None else {}
        while progress:
            await self._socket.send(wire.encode_message(progress.pop(next(iter(progress)))))
        for number, result in sorted(self._journal.command_log.unacknowledged.items()):
            if number not in self._sent_results and self._is_effect_reported(result):
                self._sent_results.add(number)
                text = wire.encode_message(result)
                if len(text.encode()) > self._max_bytes:
                    text = wire.encode_message(msgspec.structs.replace(result, detail={}))
                await self._socket.send(text)

    def _is_effect_reported(self, result: wire.Result) -> bool:
        """Return whether the gateway has the report that shows this command's effect, a later one, or an equal one."""
        acknowledged = (
            self._journal.epoch,
            self._journal.seq if self._journal.acknowledged else self._acknowledged_seq,
        )
        return (result.epoch, result.seq) <= acknowledged or result.hash == self._applied_hash

    def _has_worse_health(self) -> bool:
        """Return whether the waiting report shows a device in worse health than the last acknowledged one did.

        Such a report is sent without jitter. Return False while another report waits for its Ack.
        """
        report = self._journal.report
        if report is None or self._journal.acknowledged or self._pending_acks.pending_report_seq is not None:
            return False
        acknowledged_health = self._link.acknowledged_health
        return any(
            HEALTH_SEVERITY[status] > HEALTH_SEVERITY[acknowledged_health.get(key, "ok")]
            for key, status in health_by_device(report).items()
        )

    async def _send_samples(self) -> None:
        """Send the newest round of samples; drop it while a report or result is unacknowledged or the socket is full.

        The socket counts as full when bytes of earlier messages are still in its write buffer.
        """
        sampler = self._link.sampler
        if sampler is None or (newest := sampler.take_samples()) is None:
            return
        has_unacknowledged = (
            self._pending_acks.pending_report_seq is not None
            or not self._journal.acknowledged
            or self._journal.command_log.unacknowledged
        )
        if not has_unacknowledged and not self._socket.transport.get_write_buffer_size():
            await self._socket.send(sampler.encode_samples(newest, self._max_bytes))

    async def _send_report(self) -> None:
        """Send the journal's report if the gateway needs it and no other report waits for its Ack.

        A report that was acknowledged earlier is sent again, under the next seq, when the gateway has applied another
        content and this process has asked the drivers. A report over the gateway's message limit is logged, not sent.
        """
        report = self._journal.report
        if report is None or self._pending_acks.pending_report_seq is not None:
            return
        if self._journal.acknowledged:
            if report.hash == self._applied_hash or not self._link.is_report_current:
                return
            try:
                report = self._journal.renumber_report(report)
            except sqlite3.OperationalError as error:
                log.error(
                    "the journal cannot give a report a new number (%s): trying again at the next heartbeat", error
                )
                return
        text = wire.encode_message(report)
        size = len(text.encode())
        if size > self._max_bytes:
            if report.hash != self._too_large_hash:
                self._too_large_hash = report.hash
                log.error(
                    "report %d is not sent: it has %d bytes, and the gateway accepts at most %d",
                    report.seq,
                    size,
                    self._max_bytes,
                )
            return
        self._pending_acks.record_sent("Report", report.seq, self._clock())
        await self._socket.send(text)


def health_by_device(report: wire.Report) -> dict[tuple[str, str], Health]:
    """Return the health of each device in a report, by (driver, device key)."""
    return {(driver.driver, device.key): device.status for driver in report.drivers for device in driver.devices}


async def receive_message(socket: ClientConnection) -> wire.FromGateway | wire.UnknownMessage:
    """Wait for the next message of the gateway.

    Raises ConnectionLostError when the connection is closed, and wire.MalformedMessageError.
    """
    try:
        return wire.decode_from_gateway(await socket.recv())
    except ConnectionClosed as error:
        frame = error.rcvd or error.sent  # the latter if this end closed it, because a ping was not answered
        close_reason = f" ({frame.code} {frame.reason})".replace(" )", ")") if frame else ""
        raise ConnectionLostError(f"the connection was closed{close_reason}") from None
