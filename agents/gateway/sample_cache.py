"""What the hosts connected here have to do: the last samples of each, who is to send more, and what is not taken.

`gateway` fills a `Board` on its event loop and `peers` asks it there; `agents.telemetry` asks it from request
threads, where
the gateway is in their process. Samples are never stored: a host's are kept as their text, until its connection ends.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable, Collection, Coroutine, Iterator
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary

import msgspec

from agents import wire
from agents.gateway import metrics
from agents.gateway.rejections import Refusals
from agents.gateway.sessions import Expelled, Session

log = logging.getLogger(__name__)

BEGINNING = '{"type":"Samples",'
"""How agents begin such a message: it need not be decoded to be dropped."""
MAX_TOTAL_BYTES = 256 * 1024 * 1024
PER_S, BURST = 4.0, 8.0
"""So many messages a second are taken of one host, and so many at once after a pause."""
LOOK_S = 0.5
LATE_S = 0.2
"""An event loop that comes so late to its own appointments has no time for samples."""
LEAST_EVERY_S, MOST_FOR_S = 0.5, 300.0
"""As agents have it."""
MAX_WISHES = 8
MAX_CENSUSES = 16
AT_ONCE = 16
SPREAD_S = 1.0
"""Agents are asked AT_ONCE at a time, over this time in all: they would all answer in the same moment, every time."""

here: WeakValueDictionary[str, Board] = WeakValueDictionary()
"""The boards of this process by the names of their gateways."""


@dataclass(slots=True)
class _Line:
    """One connection. `wishes` are who wants samples how often until when; `every` and `until` what the agent knows."""

    session: Session
    said: bytes = b""
    at: float = 0.0
    heard: float = 0.0
    credit: float = BURST
    counted: float = 0.0
    looked_at: bool = False
    wishes: dict[float, float] = field(default_factory=dict)
    every: float = 0.0
    until: float = 0.0
    sending: bool = False


class Busy(Exception):
    """MAX_CENSUSES are under way at this gateway: nobody was asked."""


class _Census:
    """Who has not answered yet."""

    def __init__(self, hosts: Collection[int]) -> None:
        self._missing = set(hosts)
        self.complete = asyncio.Event()

    def heard(self, host_id: int) -> None:
        """One has."""
        self._missing.discard(host_id)
        if not self._missing:
            self.complete.set()


class Board:
    """The samples of one gateway. Everything but `said` belongs to its event loop.

    `pressed` says whether something more important waits.
    """

    def __init__(self, refusals: Refusals, pressed: Callable[[], bool]) -> None:
        self.name = f"{socket.gethostname()[:80]}-{secrets.token_hex(3)}"
        self.loop: asyncio.AbstractEventLoop | None = None
        self._refusals, self._pressed = refusals, pressed
        self._lines: dict[int, _Line] = {}
        self._bytes = 0
        self._censuses: set[_Census] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._late = self._ticking = False

    def enter(self, session: Session) -> None:
        """An agent has said Hello: it can be asked."""
        self._line(session)

    def takes(self, session: Session, size: int) -> bool:
        """Whether samples of `size` are to be looked at; else they are shed, and who sends too much is named."""
        line = self._line(session)
        now = time.monotonic()
        line.credit = min(BURST, line.credit + (now - line.counted) * PER_S) - 1
        line.counted = now
        if line.credit < 0:
            line.credit += 1
            self._refuse(session, f"more than {PER_S:.0f} samples a second: those beyond it are dropped")
        elif size > wire.MAX_SAMPLES:
            self._refuse(session, f"samples of {size} bytes: at most {wire.MAX_SAMPLES} are taken, these were dropped")
        elif not (self._late or self._pressed() or self._bytes + size > MAX_TOTAL_BYTES):
            line.looked_at = True
            return True
        metrics.tally["shed"] += 1
        return False

    def keep(self, session: Session, samples: wire.Samples) -> None:
        """The last samples of a host, which `takes` let through. Written anew they hold nothing that we do not know,
        and can be handed on."""
        line = self._line(session)
        if not line.looked_at:
            raise Expelled("malformed", f"samples begin with {BEGINNING} in a text frame, so that they can be dropped")
        line.looked_at, said = False, msgspec.json.encode(samples)
        self._bytes += len(said) - len(line.said)
        line.said, line.at, line.heard = said, time.time(), time.monotonic()
        metrics.tally["taken"] += 1
        for census in self._censuses:
            census.heard(session.identity.host_id)

    def leave(self, session: Session) -> None:
        """A connection has ended: what it said is not known any more."""
        host = session.identity.host_id
        if (line := self._lines.get(host)) and line.session is session:
            self._bytes -= len(line.said)
            del self._lines[host]
            for census in self._censuses:
                census.heard(host)

    def said(self, hosts: Collection[int] | None, since: float = 0.0) -> Iterator[tuple[int, float, bytes]]:
        """Host, unix time and text of each that said something after `since` (monotonic). Asked from any thread."""
        lines = self._lines.copy()
        for host in lines if hosts is None else hosts:
            if (line := lines.get(host)) and line.said and line.heard >= since:
                yield host, line.at, line.said

    def watch(self, hosts: Collection[int], every_s: float, for_s: float) -> None:
        """Have those of these hosts that are connected here send samples so often; they are told only when needed."""
        every, until = max(LEAST_EVERY_S, every_s), time.monotonic() + min(for_s, MOST_FOR_S)
        lines = self._reached(hosts)
        for line in lines:
            if every in line.wishes or len(line.wishes) < MAX_WISHES:
                line.wishes[every] = max(until, line.wishes.get(every, 0.0))
        if due := [line for line in lines if self._is_due(line)]:
            self._start(self._each(due, self._renew, min(SPREAD_S, every)))

    async def census(self, hosts: Collection[int], within_s: float) -> float:
        """Ask those connected here; returns when all have answered or the time is over: since when to look (monotonic).

        Beyond MAX_CENSUSES at once nobody is asked: raises Busy.
        """
        began = time.monotonic()
        if not (lines := self._reached(hosts)):
            return began
        if len(self._censuses) >= MAX_CENSUSES:
            raise Busy(f"{MAX_CENSUSES} censuses are under way: ask again when one of them has ended")
        census = _Census([line.session.identity.host_id for line in lines])
        self._censuses.add(census)
        try:
            async with asyncio.timeout(within_s):
                await self._each(lines, self._ask, min(SPREAD_S, within_s / 4))
                await census.complete.wait()
        except TimeoutError:
            log.debug("not every agent answered a census within %s s", within_s)
        finally:
            self._censuses.discard(census)
        return began

    def stop(self) -> None:
        """Nobody asks it any more (tests; a real process just ends)."""
        here.pop(self.name, None)

    def _reached(self, hosts: Collection[int]) -> list[_Line]:
        """Of these hosts those whose agent has said Hello here: it takes messages."""
        return [line for host in hosts if (line := self._lines.get(host)) and line.session.greeted]

    def _refuse(self, session: Session, why: str) -> None:
        self._refusals.add(session.identity.host, "samples", why, away=False)

    def _line(self, session: Session) -> _Line:
        host = session.identity.host_id
        line = self._lines.get(host)
        if line is None or line.session is not session:
            if line is not None:
                self.leave(line.session)
            line = self._lines[host] = _Line(session, counted=time.monotonic())
            self._begin()
        return line

    def _begin(self) -> None:
        """Look at the clock and at wishes from now on, as long as anybody is here."""
        if not self._ticking:
            self.loop = asyncio.get_running_loop()
            here[self.name] = self
            self._tick(time.monotonic())

    def _tick(self, due: float) -> None:
        now = time.monotonic()
        self._late = now - due > LATE_S
        for line in self._lines.values():
            if line.wishes and line.until <= now:
                self._renew(line)
        self._ticking = bool(self._lines)
        if self._ticking:
            asyncio.get_running_loop().call_later(LOOK_S, self._tick, now + LOOK_S)

    def _is_due(self, line: _Line) -> bool:
        """Whether the agent does not know the most frequent wish, or half of what it knows of it is over."""
        now = time.monotonic()
        line.wishes = {every: until for every, until in line.wishes.items() if until > now}
        if not line.wishes or line.sending:
            return False
        every, until = min(line.wishes.items())
        return every != line.every or line.until - now < (until - now) / 2

    def _renew(self, line: _Line) -> None:
        if self._is_due(line):
            line.every, line.until = min(line.wishes.items())
            self._tell(line, line.every, line.until - time.monotonic())

    def _ask(self, line: _Line) -> None:
        """One look, without an end to what the agent was asked for before."""
        if not line.sending:
            self._tell(line, line.every or LEAST_EVERY_S, max(0.0, line.until - time.monotonic()))

    def _tell(self, line: _Line, every_s: float, for_s: float) -> None:
        line.sending = True
        self._start(self._send(line, wire.encode(wire.Watch(round(every_s, 3), round(for_s, 3)))))

    async def _send(self, line: _Line, text: str) -> None:
        """A socket that takes nothing is not asked again meanwhile."""
        try:
            await line.session.send({"type": "websocket.send", "text": text})
        except (RuntimeError, OSError) as error:
            log.debug("%s was gone before it was asked: %s", line.session.identity.host, error)
        finally:
            line.sending = False

    async def _each(self, lines: list[_Line], act: Callable[[_Line], None], within_s: float) -> None:
        for number, line in enumerate(lines, 1):
            act(line)
            if number % AT_ONCE == 0:
                await asyncio.sleep(within_s * AT_ONCE / len(lines))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
