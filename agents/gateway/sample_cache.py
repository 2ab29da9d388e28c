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

from accelerators.runtime import database_clock
from agents import wire
from agents.errors import AgentsError
from agents.gateway import metrics
from agents.gateway.rejections import RefusalCounter
from agents.gateway.sessions import AgentSession, SessionClosedError

log = logging.getLogger(__name__)

SAMPLES_PREFIX = '{"type":"Samples",'
"""The beginning of every Samples message. It makes it possible to drop such a message without decoding it."""
MAX_TOTAL_BYTES = 256 * 1024 * 1024
"""Maximum size of all samples that one gateway keeps."""
MESSAGES_PER_S, MAX_BURST = 4.0, 8.0
"""Rate limit per host: messages per second, and messages at once after a pause."""
TICK_INTERVAL_S = 0.5
"""Seconds between two timer ticks, which measure the event loop's delay and renew expired requests to agents."""
MAX_TICK_DELAY_S = 0.2
"""Delay of a timer tick in seconds. If it is exceeded, the event loop is overloaded, and samples are dropped."""
MIN_INTERVAL_S, MAX_DURATION_S = 0.5, 300.0
"""Shortest interval and longest duration of a request for samples; agents have the same limits."""
MAX_INTERVALS = 8
"""Maximum number of different intervals that are asked for per host at the same time."""
MAX_CENSUSES = 16
"""Maximum number of censuses at the same time."""
AGENTS_PER_GROUP = 16
SPREAD_S = 1.0
"""Agents are asked in groups of AGENTS_PER_GROUP, spread over SPREAD_S. Otherwise all would answer in the same moment,
every time."""

local_caches: WeakValueDictionary[str, SampleCache] = WeakValueDictionary()
"""The caches of this process by their names."""


@dataclass(slots=True)
class _SampleState:
    """One connection and its last samples.

    `received_at` is unix time of the database's clock, all other times are monotonic. `tokens`, `refilled_at`: the
    tokens of the rate limit, and when they were last refilled. `is_accepted`: `accept_message` has accepted the message
    that is handled now. `wanted_intervals`: until when samples are wanted, by interval in seconds.
    `requested_interval_s`, `requested_until`: what the agent was last asked for. `is_sending`: a Watch message is being
    sent.
    """

    session: AgentSession
    samples_json: bytes = b""
    received_at: float = 0.0
    received_monotonic: float = 0.0
    tokens: float = MAX_BURST
    refilled_at: float = 0.0
    is_accepted: bool = False
    wanted_intervals: dict[float, float] = field(default_factory=dict)
    requested_interval_s: float = 0.0
    requested_until: float = 0.0
    is_sending: bool = False


class TooManyCensusesError(AgentsError):
    """Raised when MAX_CENSUSES run at this gateway already; no agent was asked."""


class _SampleCensus:
    """The hosts that have not answered yet in one census: one request for samples to many hosts (`run_census`).

    `complete` is set when all have answered.
    """

    def __init__(self, hosts: Collection[int]) -> None:
        self._missing = set(hosts)
        self.complete = asyncio.Event()

    def note_answer(self, host_id: int) -> None:
        """Note that a host has answered, or can no longer do so; after the last one set `complete`. Other hosts are
        ignored."""
        self._missing.discard(host_id)
        if not self._missing:
            self.complete.set()


class SampleCache:
    """The samples of one gateway. All methods but `iterate_samples` and `stop` must be called on its event loop.

    `is_under_pressure` returns whether more important work waits, so that samples should be dropped.
    """

    def __init__(self, refusals: RefusalCounter, is_under_pressure: Callable[[], bool]) -> None:
        self.name = f"{socket.gethostname()[:80]}-{secrets.token_hex(3)}"
        self.loop: asyncio.AbstractEventLoop | None = None
        self._refusals, self._is_under_pressure = refusals, is_under_pressure
        self._states: dict[int, _SampleState] = {}
        self._total_bytes = 0
        self._censuses: set[_SampleCensus] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_loop_late = self._is_ticking = False

    def register(self, session: AgentSession) -> None:
        """Add a session whose agent has sent Hello, so that it can be asked for samples.

        It replaces an older session of its host, whose samples are dropped.
        """
        self._get_state(session)

    def accept_message(self, session: AgentSession, size: int) -> bool:
        """Return whether a Samples message of `size` bytes should be decoded; count it as shed if not.

        It is dropped if the host exceeds its rate or the size limit (then a refusal is recorded as well), if the event
        loop is late, if more important work waits, or if the cache is full.
        """
        state = self._get_state(session)
        now = time.monotonic()
        state.tokens = min(MAX_BURST, state.tokens + (now - state.refilled_at) * MESSAGES_PER_S) - 1
        state.refilled_at = now
        if state.tokens < 0:
            state.tokens += 1
            self._record_refusal(
                session, f"more than {MESSAGES_PER_S:.0f} Samples messages a second: the excess was dropped"
            )
        elif size > wire.MAX_SAMPLES_BYTES:
            self._record_refusal(
                session, f"a Samples message of {size} bytes was dropped: at most {wire.MAX_SAMPLES_BYTES} are allowed"
            )
        elif not (self._is_loop_late or self._is_under_pressure() or self._total_bytes + size > MAX_TOTAL_BYTES):
            state.is_accepted = True
            return True
        metrics.event_counts["shed"] += 1
        return False

    def store_samples(self, session: AgentSession, samples: wire.Samples) -> None:
        """Keep the samples of a host that `accept_message` has accepted, instead of its last ones.

        They are encoded again, so that they hold only fields this release knows, and can be passed on as text. Raise
        SessionClosedError if `accept_message` was not asked, because the message did not begin with SAMPLES_PREFIX.
        """
        state = self._get_state(session)
        if not state.is_accepted:
            raise SessionClosedError(
                "malformed", f"a Samples message must be a text frame that begins with {SAMPLES_PREFIX}"
            )
        state.is_accepted, samples_json = False, msgspec.json.encode(samples)
        self._total_bytes += len(samples_json) - len(state.samples_json)
        received_at = database_clock.estimate_timestamp()
        state.samples_json, state.received_at, state.received_monotonic = samples_json, received_at, time.monotonic()
        metrics.event_counts["taken"] += 1
        for census in self._censuses:
            census.note_answer(session.identity.host_id)

    def unregister(self, session: AgentSession) -> None:
        """Remove a session that has ended, and its samples. Censuses no longer wait for its host.

        Do nothing if a newer session of the host has replaced this one here.
        """
        host = session.identity.host_id
        if (state := self._states.get(host)) and state.session is session:
            self._total_bytes -= len(state.samples_json)
            del self._states[host]
            for census in self._censuses:
                census.note_answer(host)

    def iterate_samples(self, hosts: Collection[int] | None, since: float = 0.0) -> Iterator[tuple[int, float, bytes]]:
        """Yield (host id, unix time of receipt, JSON text) of the last samples of these hosts; None means all hosts.

        Samples that were received before `since` (monotonic), and hosts without samples, are left out. May be called
        from any thread.
        """
        states = self._states.copy()
        for host in states if hosts is None else hosts:
            if (state := states.get(host)) and state.samples_json and state.received_monotonic >= since:
                yield host, state.received_at, state.samples_json

    def request_periodic_samples(self, hosts: Collection[int], every_s: float, for_s: float) -> None:
        """Make those of these hosts that are connected here send samples every `every_s` seconds for `for_s` seconds.

        Both are limited by MIN_INTERVAL_S and MAX_DURATION_S. For a host that has MAX_INTERVALS different intervals
        already, another interval is ignored. A Watch message is sent only to agents that need one. Returns at once.
        """
        interval_s, until = max(MIN_INTERVAL_S, every_s), time.monotonic() + min(for_s, MAX_DURATION_S)
        states = self._find_connected(hosts)
        for state in states:
            if interval_s in state.wanted_intervals or len(state.wanted_intervals) < MAX_INTERVALS:
                state.wanted_intervals[interval_s] = max(until, state.wanted_intervals.get(interval_s, 0.0))
        if due := [line for line in states if self._needs_watch(line)]:
            self._start_task(self._call_in_groups(due, self._renew_watch, min(SPREAD_S, interval_s)))

    async def run_census(self, hosts: Collection[int], within_s: float) -> float:
        """Ask those of these hosts that are connected here for samples now.

        Wait until all have answered, but at most `within_s` seconds; the answers are in the cache then. Return when the
        census began (monotonic), to be given to `iterate_samples` as `since`. Raise TooManyCensusesError if
        MAX_CENSUSES run already; no agent is asked then.
        """
        began = time.monotonic()
        if not (states := self._find_connected(hosts)):
            return began
        if len(self._censuses) >= MAX_CENSUSES:
            raise TooManyCensusesError(f"{MAX_CENSUSES} censuses are under way: ask again when one of them has ended")
        census = _SampleCensus([state.session.identity.host_id for state in states])
        self._censuses.add(census)
        try:
            async with asyncio.timeout(within_s):
                await self._call_in_groups(states, self._request_one_sample, min(SPREAD_S, within_s / 4))
                await census.complete.wait()
        except TimeoutError:
            log.debug("not every agent answered a census within %s s", within_s)
        finally:
            self._censuses.discard(census)
        return began

    def stop(self) -> None:
        """Remove this cache from `local_caches`. Only tests need this: a real process just ends."""
        local_caches.pop(self.name, None)

    def _find_connected(self, hosts: Collection[int]) -> list[_SampleState]:
        """Return the states of those of these hosts whose agent has sent Hello on this gateway."""
        return [state for host in hosts if (state := self._states.get(host)) and state.session.has_sent_hello]

    def _record_refusal(self, session: AgentSession, reason: str) -> None:
        """Count dropped samples as a refusal with the code `samples`; the agent stays connected."""
        self._refusals.add(session.identity.host, "samples", reason, is_disconnected=False)

    def _get_state(self, session: AgentSession) -> _SampleState:
        """Return the session's state; make a new one if its host has none, or has one of another session.

        The state of another session is removed with its samples. Starts the timer if it does not run.
        """
        host = session.identity.host_id
        state = self._states.get(host)
        if state is None or state.session is not session:
            if state is not None:
                self.unregister(state.session)
            state = self._states[host] = _SampleState(session, refilled_at=time.monotonic())
            self._start_timer()
        return state

    def _start_timer(self) -> None:
        """Start the timer if it does not run, and add this cache to `local_caches`."""
        if not self._is_ticking:
            self.loop = asyncio.get_running_loop()
            local_caches[self.name] = self
            self._run_tick(time.monotonic())

    def _run_tick(self, due_at: float) -> None:
        """Note whether this tick is late, renew expired requests, and schedule the next tick if agents are connected.

        `due_at` is when this tick should have run (monotonic). If it runs more than MAX_TICK_DELAY_S later, samples are
        dropped until the next tick.
        """
        now = time.monotonic()
        self._is_loop_late = now - due_at > MAX_TICK_DELAY_S
        for state in self._states.values():
            if state.wanted_intervals and state.requested_until <= now:
                self._renew_watch(state)
        self._is_ticking = bool(self._states)
        if self._is_ticking:
            asyncio.get_running_loop().call_later(TICK_INTERVAL_S, self._run_tick, now + TICK_INTERVAL_S)

    def _needs_watch(self, state: _SampleState) -> bool:
        """Return whether the agent needs a new Watch message; remove wanted intervals that have expired.

        An agent needs a new Watch if the shortest wanted interval differs from the one in its last Watch, or if the
        time left of its last Watch is less than half of the time that is wanted now. It needs none while a Watch is
        being sent, or while nobody wants samples.
        """
        now = time.monotonic()
        state.wanted_intervals = {every: until for every, until in state.wanted_intervals.items() if until > now}
        if not state.wanted_intervals or state.is_sending:
            return False
        interval_s, until = min(state.wanted_intervals.items())
        return interval_s != state.requested_interval_s or state.requested_until - now < (until - now) / 2

    def _renew_watch(self, state: _SampleState) -> None:
        """Send the agent a Watch message with the shortest wanted interval, if it needs one (`_needs_watch`)."""
        if self._needs_watch(state):
            state.requested_interval_s, state.requested_until = min(state.wanted_intervals.items())
            self._start_sending_watch(state, state.requested_interval_s, state.requested_until - time.monotonic())

    def _request_one_sample(self, state: _SampleState) -> None:
        """Ask the agent for samples now, without changing the interval and the duration that it was asked for before.

        Do nothing while another Watch message is being sent to it.
        """
        if not state.is_sending:
            self._start_sending_watch(
                state, state.requested_interval_s or MIN_INTERVAL_S, max(0.0, state.requested_until - time.monotonic())
            )

    def _start_sending_watch(self, state: _SampleState, every_s: float, for_s: float) -> None:
        """Set `is_sending`, and start a task that sends the agent a Watch message with this interval and duration."""
        state.is_sending = True
        self._start_task(self._send_text(state, wire.encode_message(wire.Watch(round(every_s, 3), round(for_s, 3)))))

    async def _send_text(self, state: _SampleState, text: str) -> None:
        """Send a text to the agent, then clear `is_sending`. If the connection is gone, this is only logged.

        While `is_sending` is set, no other Watch message is sent, so that none pile up at a slow socket.
        """
        try:
            await state.session.send({"type": "websocket.send", "text": text})
        except (RuntimeError, OSError) as error:
            log.debug("%s disconnected before it could be asked for samples: %s", state.session.identity.host, error)
        finally:
            state.is_sending = False

    async def _call_in_groups(
        self, states: list[_SampleState], call: Callable[[_SampleState], None], within_s: float
    ) -> None:
        """Call `call` for each connection, in groups of AGENTS_PER_GROUP, spread over `within_s` seconds."""
        for number, state in enumerate(states, 1):
            call(state)
            if number % AGENTS_PER_GROUP == 0:
                await asyncio.sleep(within_s * AGENTS_PER_GROUP / len(states))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task, and keep a reference to it until it is done."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
