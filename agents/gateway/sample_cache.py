"""Cache of the last samples (device load) of each host connected to this gateway.

A `SampleCache` also asks agents for samples and drops samples under pressure. The gateway fills it on its event loop,
and `sample_rpc` reads it there; `agents.telemetry` reads it from request threads of the same process. Samples are never
stored in the database: the newest of each host is kept as JSON text until its connection ends.
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
from agents.gateway.sessions import Session, SessionClosedError

log = logging.getLogger(__name__)

BEGINNING = '{"type":"Samples",'
"""The beginning of every Samples message. By it a message can be dropped without being decoded."""
MAX_TOTAL_BYTES = 256 * 1024 * 1024
"""Maximum size of all samples that one gateway keeps."""
PER_S, BURST = 4.0, 8.0
"""Rate limit per host: messages per second, and messages at once after a pause."""
LOOK_S = 0.5
"""Seconds between two timer ticks, which measure the event loop's delay and renew expired requests to agents."""
LATE_S = 0.2
"""Delay of a timer tick in seconds. If it is exceeded, the event loop is overloaded, and samples are dropped."""
LEAST_EVERY_S, MOST_FOR_S = 0.5, 300.0
"""Shortest interval and longest duration of a request for samples; agents have the same limits."""
MAX_WISHES = 8
"""Maximum number of different intervals that are asked for per host at the same time."""
MAX_CENSUSES = 16
"""Maximum number of censuses at the same time."""
AT_ONCE = 16
SPREAD_S = 1.0
"""Agents are asked in groups of AGENTS_PER_GROUP, spread over SPREAD_S. Otherwise all would answer in the same moment,
every time."""

here: WeakValueDictionary[str, Board] = WeakValueDictionary()
"""The caches of this process by their names."""


@dataclass(slots=True)
class _Line:
    """One connection and its last samples.

    `received_at` is unix time, all other times are monotonic. `tokens`, `refilled_at`: the tokens of the rate limit,
    and when they were last refilled. `is_accepted`: `accept_message` has accepted the message that is handled now.
    `wanted_intervals`: until when samples are wanted, by interval in seconds. `requested_interval_s`,
    `requested_until`: what the agent was last asked for. `is_sending`: a Watch message is being sent.
    """

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


class TooManyCensusesError(Exception):
    """Raised when MAX_CENSUSES run at this gateway already; no agent was asked."""


class _Census:
    """The hosts of one census that have not answered yet; `complete` is set when there are none."""

    def __init__(self, hosts: Collection[int]) -> None:
        self._missing = set(hosts)
        self.complete = asyncio.Event()

    def heard(self, host_id: int) -> None:
        """Note that a host has answered, or can no longer do so."""
        self._missing.discard(host_id)
        if not self._missing:
            self.complete.set()


class Board:
    """The samples of one gateway. All methods but `iterate_samples` and `stop` must be called on its event loop.

    `is_under_pressure` returns whether more important work waits, so that samples should be dropped.
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
        """Add a session whose agent has sent Hello, so that it can be asked for samples."""
        self._line(session)

    def takes(self, session: Session, size: int) -> bool:
        """Return whether a Samples message of `size` bytes should be decoded; count it as shed if not.

        It is dropped if the host exceeds its rate or the size limit (then a refusal is recorded as well), if the event
        loop is late, if more important work waits, or if the cache is full.
        """
        line = self._line(session)
        now = time.monotonic()
        line.credit = min(BURST, line.credit + (now - line.counted) * PER_S) - 1
        line.counted = now
        if line.credit < 0:
            line.credit += 1
            self._refuse(session, f"more than {PER_S:.0f} Samples messages a second: the excess was dropped")
        elif size > wire.MAX_SAMPLES:
            self._refuse(
                session, f"a Samples message of {size} bytes was dropped: at most {wire.MAX_SAMPLES} are allowed"
            )
        elif not (self._late or self._pressed() or self._bytes + size > MAX_TOTAL_BYTES):
            line.looked_at = True
            return True
        metrics.tally["shed"] += 1
        return False

    def keep(self, session: Session, samples: wire.Samples) -> None:
        """Keep the samples of a host that `accept_message` has accepted, instead of its last ones.

        They are encoded again, so that they hold only fields this release knows, and can be passed on as text. Raise
        SessionClosedError if `accept_message` was not asked, because the message did not begin with SAMPLES_PREFIX.
        """
        line = self._line(session)
        if not line.looked_at:
            raise SessionClosedError(
                "malformed", f"a Samples message must be a text frame that begins with {BEGINNING}"
            )
        line.looked_at, said = False, msgspec.json.encode(samples)
        self._bytes += len(said) - len(line.said)
        line.said, line.at, line.heard = said, time.time(), time.monotonic()
        metrics.tally["taken"] += 1
        for census in self._censuses:
            census.heard(session.identity.host_id)

    def leave(self, session: Session) -> None:
        """Remove a session that has ended, and its samples. Censuses no longer wait for its host."""
        host = session.identity.host_id
        if (line := self._lines.get(host)) and line.session is session:
            self._bytes -= len(line.said)
            del self._lines[host]
            for census in self._censuses:
                census.heard(host)

    def said(self, hosts: Collection[int] | None, since: float = 0.0) -> Iterator[tuple[int, float, bytes]]:
        """Yield (host id, unix time, JSON text) of the samples of these hosts, or of all, since `since` (monotonic).

        May be called from any thread.
        """
        lines = self._lines.copy()
        for host in lines if hosts is None else hosts:
            if (line := lines.get(host)) and line.said and line.heard >= since:
                yield host, line.at, line.said

    def watch(self, hosts: Collection[int], every_s: float, for_s: float) -> None:
        """Make those of these hosts that are connected here send samples every `every_s` seconds for `for_s` seconds.

        Both are limited by MIN_INTERVAL_S and MAX_DURATION_S. A Watch message is sent only to agents that need one.
        Returns at once.
        """
        every, until = max(LEAST_EVERY_S, every_s), time.monotonic() + min(for_s, MOST_FOR_S)
        lines = self._reached(hosts)
        for line in lines:
            if every in line.wishes or len(line.wishes) < MAX_WISHES:
                line.wishes[every] = max(until, line.wishes.get(every, 0.0))
        if due := [line for line in lines if self._is_due(line)]:
            self._start(self._each(due, self._renew, min(SPREAD_S, every)))

    async def census(self, hosts: Collection[int], within_s: float) -> float:
        """Ask those of these hosts that are connected here for samples now.

        Wait until all have answered, or `within_s` seconds. Return when the census began (monotonic), to be given to
        `iterate_samples` as `since`. Raise TooManyCensusesError if MAX_CENSUSES run already; no agent is asked then.
        """
        began = time.monotonic()
        if not (lines := self._reached(hosts)):
            return began
        if len(self._censuses) >= MAX_CENSUSES:
            raise TooManyCensusesError(f"{MAX_CENSUSES} censuses are under way: ask again when one of them has ended")
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
        """Remove this cache from `local_caches`. Only tests need this: a real process just ends."""
        here.pop(self.name, None)

    def _reached(self, hosts: Collection[int]) -> list[_Line]:
        """Return the states of those of these hosts whose agent has sent Hello on this gateway."""
        return [line for host in hosts if (line := self._lines.get(host)) and line.session.greeted]

    def _refuse(self, session: Session, why: str) -> None:
        """Record dropped samples as a refusal; the agent stays connected."""
        self._refusals.add(session.identity.host, "samples", why, away=False)

    def _line(self, session: Session) -> _Line:
        """Return the session's state; make a new one if its host has none, or has one of another session."""
        host = session.identity.host_id
        line = self._lines.get(host)
        if line is None or line.session is not session:
            if line is not None:
                self.leave(line.session)
            line = self._lines[host] = _Line(session, counted=time.monotonic())
            self._begin()
        return line

    def _begin(self) -> None:
        """Start the timer if it does not run, and add this cache to `local_caches`."""
        if not self._ticking:
            self.loop = asyncio.get_running_loop()
            here[self.name] = self
            self._tick(time.monotonic())

    def _tick(self, due: float) -> None:
        """Measure how late this tick is and renew expired requests; schedule the next tick while agents are connected.

        `due_at` is when this tick should have run (monotonic).
        """
        now = time.monotonic()
        self._late = now - due > LATE_S
        for line in self._lines.values():
            if line.wishes and line.until <= now:
                self._renew(line)
        self._ticking = bool(self._lines)
        if self._ticking:
            asyncio.get_running_loop().call_later(LOOK_S, self._tick, now + LOOK_S)

    def _is_due(self, line: _Line) -> bool:
        """Return whether the agent needs a new Watch message; remove wanted intervals that have expired.

        It needs one if the shortest wanted interval is not the one it was asked for, or if its time left is less than
        half of the time that is wanted now. It needs none while a Watch is being sent.
        """
        now = time.monotonic()
        line.wishes = {every: until for every, until in line.wishes.items() if until > now}
        if not line.wishes or line.sending:
            return False
        every, until = min(line.wishes.items())
        return every != line.every or line.until - now < (until - now) / 2

    def _renew(self, line: _Line) -> None:
        """Send the agent the shortest wanted interval, if it needs a new Watch message."""
        if self._is_due(line):
            line.every, line.until = min(line.wishes.items())
            self._tell(line, line.every, line.until - time.monotonic())

    def _ask(self, line: _Line) -> None:
        """Ask the agent for samples now, and keep what it was asked for before."""
        if not line.sending:
            self._tell(line, line.every or LEAST_EVERY_S, max(0.0, line.until - time.monotonic()))

    def _tell(self, line: _Line, every_s: float, for_s: float) -> None:
        """Start to send a Watch message."""
        line.sending = True
        self._start(self._send(line, wire.encode(wire.Watch(round(every_s, 3), round(for_s, 3)))))

    async def _send(self, line: _Line, text: str) -> None:
        """Send a text. Until it is sent, `is_sending` keeps a slow socket from being given another one."""
        try:
            await line.session.send({"type": "websocket.send", "text": text})
        except (RuntimeError, OSError) as error:
            log.debug("%s disconnected before it could be asked for samples: %s", line.session.identity.host, error)
        finally:
            line.sending = False

    async def _each(self, lines: list[_Line], act: Callable[[_Line], None], within_s: float) -> None:
        """Call `call` for each connection, in groups of AGENTS_PER_GROUP, spread over `within_s` seconds."""
        for number, line in enumerate(lines, 1):
            act(line)
            if number % AT_ONCE == 0:
                await asyncio.sleep(within_s * AT_ONCE / len(lines))

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task, and keep a reference to it until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
