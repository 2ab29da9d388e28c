"""What devices have to do at this moment, asked from any process. Never stored: gateways hold the last samples.

Called in request threads: by the usage resource (`agents.api`), the console's pages, metrics; never on an event loop.
Names and units of the values stand at `drivers.inventory.Sample`; values with other names are numbers to show.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from django.conf import settings
from django.db import connection
from msgspec import DecodeError, Raw

from agents.gateway import sample_cache, sample_rpc
from agents.gateway.sample_cache import Board, Busy
from agents.gateway.sample_rpc import Answer, Ask, Held, Unanswered

log = logging.getLogger(__name__)

DEADLINE_S = 1.0
"""A gateway that takes longer is silent."""
QUIET_S = 5.0
"""So long it is not asked again: not every page is to wait for it."""
REGISTRY_S = 5.0
"""The rows of gateways are read so often at most, by each process."""
PATIENCE_MS = 3000
"""What reading them may take: who asks holds a thread."""
AT_ONCE = 32
"""A census holds a thread for each gateway as long as it takes: those have threads of their own."""

REGISTERED = """
SET LOCAL statement_timeout TO %s; SELECT name, url FROM agents_gateway WHERE seen_at >= %s;
SET LOCAL statement_timeout TO DEFAULT
"""
"""Sent as one: without a transaction around it, it is one by itself; one that is around it waits as before again."""


@dataclass(frozen=True, slots=True)
class HostLoad:
    """What one host said last. `at` is the unix time when its gateway took it; `devices` are by their keys."""

    host_id: int
    at: float
    devices: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Loads:
    """What is known of the hosts that were asked about; a host without samples is not among them.

    `silent` are the gateways that did not answer in time, by name: what they hold is not here.
    """

    hosts: dict[int, HostLoad]
    silent: tuple[str, ...] = ()


def last(hosts: Collection[int] | None = None) -> Loads:
    """What is known now of these hosts, or of all; within a second. No agent is asked for anything."""
    return _everybody.ask(Ask(None if hosts is None else tuple(hosts)))


def watch(hosts: Collection[int], every_s: float, for_s: float) -> Loads:
    """Have these hosts send samples every `every_s` seconds for the next `for_s`; answers at once, as `last` does.

    To be called again before `for_s` have passed, as long as somebody looks; agents are told only when they must be.
    """
    return _everybody.ask(Ask(tuple(hosts), every_s, for_s))


def census(hosts: Collection[int], within_s: float) -> Loads:
    """Ask these agents now: returns what came since, when all have answered or `within_s` seconds have passed.

    Agents that are older than samples never answer: then it takes all of the time.
    """
    return _everybody.ask(Ask(tuple(hosts), within_s=within_s))


def of_device(loads: Loads, host_id: int, key: str) -> dict[str, Any]:
    """What is known of one device, as the usage resource shows it; `at` None: nothing."""
    told = loads.hosts.get(host_id)
    values = told.devices.get(key) if told else None
    at = datetime.fromtimestamp(told.at, UTC) if told and values is not None else None
    age = round(max(0.0, time.time() - told.at), 1) if told and at else None
    return {"at": at, "age_s": age, "values": values or {}, "silent": list(loads.silent)}


def forget() -> None:
    """Which gateways there are, and which were silent (tests)."""
    _everybody.forget()


class Everybody:
    """The gateways as this process knows them: boards of its own, and rows of others."""

    def __init__(self) -> None:
        self._quick, self._slow = ThreadPoolExecutor(AT_ONCE, "load"), ThreadPoolExecutor(AT_ONCE, "census")
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self._others: dict[str, str] = {}
        self._read_at = float("-inf")
        self._quiet: dict[str, float] = {}

    def ask(self, asked: Ask) -> Loads:
        """All at once, each within its deadline; of a host that two know the newer word counts."""
        if asked.hosts == ():
            return Loads({})
        deadline = time.monotonic() + asked.within_s + DEADLINE_S
        boards, now = dict(sample_cache.here), time.monotonic()
        others = {name: url for name, url in self._registered().items() if name not in boards}
        silent = {name for name in others if self._quiet.get(name, 0.0) > now}
        threads = self._slow if asked.within_s else self._quick
        asking = {
            name: threads.submit(sample_rpc.ask, url, asked, asked.within_s + DEADLINE_S)
            for name, url in others.items()
            if name not in silent
        }
        held: list[Held] = []
        for name, board in boards.items():
            try:
                held += _here(board, asked, deadline)
            except Busy:
                silent.add(name)
        wait(asking.values(), timeout=max(0.0, deadline - time.monotonic()))
        for name, answer in asking.items():
            try:
                held += _answered(answer, boards)
            except Busy:  # our threads, or the gateway with censuses: nothing is wrong with it
                silent.add(name)
            except Unanswered as error:
                log.warning("gateway %s at %s does not answer: %s", name, others[name], error)
                self._quiet[name] = time.monotonic() + QUIET_S
                silent.add(name)
        return Loads(_newest(held), tuple(sorted(silent)))

    def _registered(self) -> dict[str, str]:
        """The address of each gateway that was heard of just now, by name. DatabaseError after PATIENCE_MS."""
        if time.monotonic() - self._read_at >= REGISTRY_S:
            live = datetime.now(UTC) - timedelta(seconds=2 * (settings.KEYS.beat_s + settings.KEYS.lease_flush_s) + 10)
            with connection.cursor() as cursor:
                cursor.execute(REGISTERED, [PATIENCE_MS, live])
                cursor.nextset()
                self._others = dict(cursor.fetchall())
            self._read_at = time.monotonic()
            self._quiet = {name: until for name, until in list(self._quiet.items()) if name in self._others}
        return self._others


def _answered(answer: Future[Answer], boards: Collection[str]) -> list[Held]:
    if answer.cancel():
        raise Busy("it was never asked")
    if not answer.done():
        raise Unanswered(f"not within {DEADLINE_S:.0f} s")
    said = answer.result()
    if said.gateway in boards:
        raise Unanswered("this address is our own: set CYBORG_GATEWAY_URL where gateways run on several machines")
    return said.hosts


def _here(board: Board, asked: Ask, deadline: float) -> list[Held]:
    """What a board of this process says. Raises Busy."""
    since = time.monotonic() if asked.within_s else 0.0
    if board.loop and not board.loop.is_closed() and (asked.within_s or asked.for_s):
        with suppress(RuntimeError, TimeoutError):  # its loop has ended, or is late
            if asked.within_s:
                work = board.census(asked.hosts or (), asked.within_s)
                asyncio.run_coroutine_threadsafe(work, board.loop).result(deadline - time.monotonic())
            else:
                board.loop.call_soon_threadsafe(board.watch, asked.hosts or (), asked.every_s, asked.for_s)
    return [Held(host, at, Raw(said)) for host, at, said in board.said(asked.hosts, since)]


def _newest(held: Iterable[Held]) -> dict[int, HostLoad]:
    found: dict[int, Held] = {}
    for one in held:
        if one.host not in found or found[one.host].at < one.at:
            found[one.host] = one
    loads = {}
    for host, one in found.items():
        try:
            loads[host] = HostLoad(host, one.at, {load.key: load.values for load in one.loads()})
        except DecodeError as error:
            _say_once(host, str(error))
    return loads


@lru_cache(maxsize=1024)
def _say_once(host: int, why: str) -> None:
    """A gateway of another release: all pages that show load would say it again and again."""
    log.warning("the samples of host %d cannot be read, it is left out: %s", host, why)


_everybody = Everybody()
