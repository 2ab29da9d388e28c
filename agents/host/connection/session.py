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
from agents.host.backoff import Owed, set_or_passed
from drivers.configuration import ConfigurationError
from drivers.inventory import Health

if TYPE_CHECKING:
    from agents.host.connection.link import Link

log = logging.getLogger("cyborg.link")

TAKEN = 256
"""Largest number of commands in one Taken message."""
SICK: dict[Health, int] = {"ok": 0, "unknown": 1, "degraded": 2, "failed": 3}
"""Severity of each health; a higher number is worse."""


class Desk(Protocol):
    """The receiver of commands, with the newest progress of each one by number: `executor.Executor`."""

    progress: dict[int, wire.Progress]

    def take(self, command: wire.Command) -> None:
        """Accept a command. When this returns, it is in the journal or its refusal waits to be sent."""


class ConnectionLostError(Exception):
    """The connection ended or must be closed, and the agent has to reconnect. The text is the reason."""


class SessionRefusedError(Exception):
    """The gateway sent Refuse, which ends the connection. The text is the gateway's reason and code."""


class Session:
    """One connection after Welcome: a receiving and a sending loop on the same socket."""

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
        self._heard: list[int] = []
        self._answered: set[int] = set()
        self._told = 0
        """The highest seq of a report that was acknowledged on this connection."""
        self._clock = asyncio.get_running_loop().time
        self._owed.answered = self._clock()
        link.authority.connected(lambda: self._owed.answers(self._clock()))

    async def receive(self) -> None:
        """Receive and handle messages until the connection ends.

        Raises SessionRefusedError when the gateway sends Refuse, ConnectionLostError when the connection is closed,
        and wire.MalformedMessageError.
        """
        while True:
            message = await next_message(self._socket)
            if isinstance(message, wire.Ack):
                self._acknowledged(message)
            elif isinstance(message, wire.Command) and self._link.desk is not None:
                if message.writer:
                    self._link.authority.told(message.writer)
                self._answered.discard(message.number)
                self._heard.append(message.number)
                self._link.desk.take(message)
            elif isinstance(message, wire.Writer):
                self._link.authority.told(message.epoch)
            elif isinstance(message, wire.Watch) and self._link.meter is not None:
                self._link.meter.watch(message)
            elif isinstance(message, wire.Probe):
                await self._socket.send(wire.encode(wire.Alive(message.nonce)))
            elif isinstance(message, wire.Rotate):
                await self._rotate()
            elif isinstance(message, wire.Refuse):
                raise SessionRefusedError(f"{message.reason} [{message.code}]")
            else:
                self._link.dropped(message)

    async def _rotate(self) -> None:
        """Create the next key and send NewKey; if the key cannot be written, log that and keep the current key.

        Both keys are on disk from before NewKey is sent until the gateway has acknowledged it.
        """
        keys = self._link.keys
        try:
            following = keys.prepare()
        except ConfigurationError as error:
            log.error("the gateway asked for a new key, but the present key stays in use: %s", error)
            return
        await self._socket.send(wire.encode(keys.current.successor(following, self._link.gateway.fingerprint)))

    def _acknowledged(self, ack: wire.Ack) -> None:
        self._owed.acknowledged(ack.of, ack.seq, self._clock())
        if ack.of == "Report":
            self._acknowledge(ack.seq)
        elif ack.of == "Result":
            self._settle(ack.seq)
        elif ack.of == "NewKey" and self._link.keys.following is not None:
            self._link.adopt()

    def _acknowledge(self, seq: int) -> None:
        """Note that the gateway has stored report `seq` for good, and wake the sending loop."""
        try:
            self._journal.acknowledge(seq)
        except sqlite3.OperationalError as error:
            log.error("the journal cannot store an acknowledgement (%s): the report may be sent once more", error)
        report = self._journal.report
        if report is not None and report.seq == seq:
            self._applied = report.hash
            self._link.known = statuses(report)
        self._told = max(self._told, seq)
        self._link.wake.set()

    def _settle(self, number: int) -> None:
        """Note that the gateway has stored the result of command `number` for good."""
        try:
            self._journal.ledger.acknowledge(number)
        except sqlite3.OperationalError as error:
            log.error("the journal cannot store an acknowledgement (%s): a result may be sent once more", error)

    async def send(self) -> None:
        """Send heartbeats, reports, results, progress and samples until the connection ends.

        Raises ConnectionLostError when the gateway owes an Ack for too long. Returns without an error when the
        connection is closed: `receive_messages` may still have to read a Refuse, which is the better reason.
        """
        try:
            await self._send()
        except ConnectionClosed:
            return

    async def _send(self) -> None:
        """Run the sending loop: one pass each time it is woken, or a heartbeat, report or deadline is due.

        The first heartbeat and the first report are delayed at random, so that many hosts do not send them at once.
        Raises ConnectionLostError when an Ack is overdue.
        """
        draw = self._link.pace.draw
        now = self._clock()
        beat_at, seq = now + draw() * self._beat_s, 0
        report_from = now + draw() * self._jitter_s
        while True:
            self._link.wake.clear()
            now = self._clock()
            if sentence := self._owed.overdue(now):
                raise ConnectionLostError(sentence)
            if now >= beat_at:
                seq, beat_at = seq + 1, now + self._beat_s
                self._owed.sent("Beat", seq, now)
                await self._socket.send(wire.encode(wire.Beat(seq=seq)))
            if self._worse():
                await self._report()
            await self._commands()
            if now >= report_from or self._journal.ledger.owed:  # no jitter for a report that a result waits for
                await self._report()
            await self._samples()
            waits = [beat_at, self._owed.due()] + ([report_from] if now < report_from else [])
            await set_or_passed(self._link.wake, min(waits) - self._clock())

    async def _commands(self) -> None:
        """Send Taken for new commands, then progress, then each result whose report the gateway has.

        A result that is larger than the gateway's message limit is sent without its `detail`.
        """
        if self._heard:
            heard, self._heard = self._heard, []
            for start in range(0, len(heard), TAKEN):
                await self._socket.send(wire.encode(wire.Taken(tuple(heard[start : start + TAKEN]))))
        progress = self._link.desk.progress if self._link.desk is not None else {}
        while progress:
            await self._socket.send(wire.encode(progress.pop(next(iter(progress)))))
        for number, result in sorted(self._journal.ledger.owed.items()):
            if number not in self._answered and self._shows(result):
                self._answered.add(number)
                text = wire.encode(result)
                if len(text.encode()) > self._max_bytes:
                    text = wire.encode(msgspec.structs.replace(result, detail={}))
                await self._socket.send(text)

    def _shows(self, result: wire.Result) -> bool:
        """Return whether the gateway has the report that shows this command's effect, a later one, or an equal one."""
        told = (self._journal.epoch, self._journal.seq if self._journal.acknowledged else self._told)
        return (result.epoch, result.seq) <= told or result.hash == self._applied

    def _worse(self) -> bool:
        """Return whether the waiting report shows a device in worse health than the last acknowledged one did.

        Such a report is sent without jitter. Return False while another report waits for its Ack.
        """
        report = self._journal.report
        if report is None or self._journal.acknowledged or self._owed.report is not None:
            return False
        known = self._link.known
        return any(SICK[status] > SICK[known.get(key, "ok")] for key, status in statuses(report).items())

    async def _samples(self) -> None:
        """Send the newest round of samples; drop it while a report or result is unacknowledged or the socket is full.

        The socket counts as full when bytes of earlier messages are still in its write buffer.
        """
        meter = self._link.meter
        if meter is None or (newest := meter.take()) is None:
            return
        owing = self._owed.report is not None or not self._journal.acknowledged or self._journal.ledger.owed
        if not owing and not self._socket.transport.get_write_buffer_size():
            await self._socket.send(meter.frame(newest, self._max_bytes))

    async def _report(self) -> None:
        """Send the journal's report if the gateway needs it and no other report waits for its Ack.

        A report that was acknowledged earlier is sent again, under the next seq, when the gateway has applied another
        content and this process has asked the drivers. A report over the gateway's message limit is logged, not sent.
        """
        report = self._journal.report
        if report is None or self._owed.report is not None:
            return
        if self._journal.acknowledged:
            if report.hash == self._applied or not self._link.looked:
                return
            try:
                report = self._journal.offer_again(report)
            except sqlite3.OperationalError as error:
                log.error(
                    "the journal cannot give a report a new number (%s): trying again at the next heartbeat", error
                )
                return
        text = wire.encode(report)
        size = len(text.encode())
        if size > self._max_bytes:
            if report.hash != self._too_large:
                self._too_large = report.hash
                log.error(
                    "report %d is not sent: it has %d bytes, and the gateway accepts at most %d",
                    report.seq,
                    size,
                    self._max_bytes,
                )
            return
        self._owed.sent("Report", report.seq, self._clock())
        await self._socket.send(text)


def statuses(report: wire.Report) -> dict[tuple[str, str], Health]:
    """Return the health of each device in a report, by (driver, device key)."""
    return {(driver.driver, device.key): device.status for driver in report.drivers for device in driver.devices}


async def next_message(socket: ClientConnection) -> wire.FromGateway | wire.Unknown:
    """Wait for the next message of the gateway.

    Raises ConnectionLostError when the connection is closed, and wire.MalformedMessageError.
    """
    try:
        return wire.decode_from_gateway(await socket.recv())
    except ConnectionClosed as error:
        frame = error.rcvd
        said = f" ({frame.code} {frame.reason})".replace(" )", ")") if frame else ""
        raise ConnectionLostError(f"the connection was closed{said}") from None
