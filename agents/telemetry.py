"""Read the current load of devices, from any process.

Load is never stored in the database: each gateway keeps the last samples of the hosts connected to it, and this module
asks all gateways. Its functions block, so call them in threads, never on an event loop. `drivers.inventory.Sample`
defines the names and units of the values; values with other names are numbers for display only.
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
from agents.gateway.sample_cache import Board, TooManyCensusesError
from agents.gateway.sample_rpc import Answer, Ask, GatewayUnreachableError, Held

log = logging.getLogger(__name__)

DEADLINE_S = 1.0
"""Seconds to wait for a gateway's answer (plus a census's own time). A slower gateway counts as silent."""
QUIET_S = 5.0
"""Seconds in which a gateway that did not answer is not asked again, so that not every page waits for it."""
REGISTRY_S = 5.0
"""Minimum seconds between two reads of the gateways' rows, per process."""
PATIENCE_MS = 3000
"""Statement timeout in milliseconds for reading the gateways' rows, since the caller occupies a thread meanwhile."""
AT_ONCE = 32
"""Maximum number of threads that ask gateways. Censuses have another pool of this size, because each occupies one
thread per gateway until it ends."""

REGISTERED = """
SET LOCAL statement_timeout TO %s; SELECT name, url FROM agents_gateway WHERE seen_at >= %s;
SET LOCAL statement_timeout TO DEFAULT
"""
"""Three statements that are sent together. Outside a transaction they form one of their own; inside one, the last
statement sets the timeout back."""


@dataclass(frozen=True, slots=True)
class HostLoad:
    """The last samples of one host. `at`: unix time when its gateway received them. `devices`: values by device key."""

    host_id: int
    at: float
    devices: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class Loads:
    """The load of hosts, by host id. A host without samples is missing.

    `silent`: the names of gateways that gave no answer; the samples they have are missing too.
    """

    hosts: dict[int, HostLoad]
    silent: tuple[str, ...] = ()


def last(hosts: Collection[int] | None = None) -> Loads:
    """Return the last known load of these hosts, or of all. It takes up to a second. No agent is asked.

    Raise DatabaseError if the gateways' rows cannot be read.
    """
    return _everybody.ask(Ask(None if hosts is None else tuple(hosts)))


def watch(hosts: Collection[int], every_s: float, for_s: float) -> Loads:
    """Ask these hosts to send samples every `every_s` seconds for `for_s` seconds; return the last known load at once.

    To continue, call it again before `for_s` seconds have passed. Agents get a message only if they need one.
    """
    return _everybody.ask(Ask(tuple(hosts), every_s, for_s))


def census(hosts: Collection[int], within_s: float) -> Loads:
    """Ask the agents of these hosts for samples now, and return those that arrived within `within_s` seconds.

    It returns as soon as all have answered. Agents that are older than samples never answer; with them it takes all of
    the time.
    """
    return _everybody.ask(Ask(tuple(hosts), within_s=within_s))


def of_device(loads: Loads, host_id: int, key: str) -> dict[str, Any]:
    """Return one device's load as the usage resource shows it. `at` is None if nothing is known."""
    told = loads.hosts.get(host_id)
    values = told.devices.get(key) if told else None
    at = datetime.fromtimestamp(told.at, UTC) if told and values is not None else None
    age = round(max(0.0, time.time() - told.at), 1) if told and at else None
    return {"at": at, "age_s": age, "values": values or {}, "silent": list(loads.silent)}


def forget() -> None:
    """Forget the known gateways and which of them were silent. For tests."""
    _everybody.forget()


class Everybody:
    """Asks all gateways: the caches of this process directly, the registered gateways of others by HTTP."""

    def __init__(self) -> None:
        self._quick, self._slow = ThreadPoolExecutor(AT_ONCE, "load"), ThreadPoolExecutor(AT_ONCE, "census")
        self.forget()

    def forget(self) -> None:
        """Forget the known gateways and which of them were silent."""
        self._others: dict[str, str] = {}
        self._read_at = float("-inf")
        self._quiet: dict[str, float] = {}

    def ask(self, asked: Ask) -> Loads:
        """Ask all gateways in parallel and merge their answers; if two have samples of a host, the newer ones count.

        A gateway that does not answer in time, or is busy, is named in `silent`.
        """
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
            except TooManyCensusesError:
                silent.add(name)
        wait(asking.values(), timeout=max(0.0, deadline - time.monotonic()))
        for name, answer in asking.items():
            try:
                held += _answered(answer, boards)
            except TooManyCensusesError:  # no free thread here, or too many censuses there: the gateway itself is well
                silent.add(name)
            except GatewayUnreachableError as error:
                log.warning("gateway %s at %s cannot be asked for samples: %s", name, others[name], error)
                self._quiet[name] = time.monotonic() + QUIET_S
                silent.add(name)
        return Loads(_newest(held), tuple(sorted(silent)))

    def _registered(self) -> dict[str, str]:
        """Return the addresses of the live gateways, by name. Raise DatabaseError, at the latest after
        STATEMENT_TIMEOUT_MS.

        The rows are read at most every REGISTRY_INTERVAL_S.
        """
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
    """Return the samples in a gateway's answer. Raise TooManyCensusesError if no thread was free to ask it, or
    GatewayUnreachableError."""
    if answer.cancel():
        raise TooManyCensusesError("no thread was free to ask it")
    if not answer.done():
        raise GatewayUnreachableError(f"no answer within {DEADLINE_S:.0f} s")
    said = answer.result()
    if said.gateway in boards:
        raise GatewayUnreachableError(
            "the address leads to the process that asks: set CYBORG_GATEWAY_URL if gateways run on several machines"
        )
    return said.hosts


def _here(board: Board, asked: Ask, deadline: float) -> list[Held]:
    """Return the samples of a cache of this process, after asking agents if the request says so.

    Raise TooManyCensusesError.
    """
    since = time.monotonic() if asked.within_s else 0.0
    if board.loop and not board.loop.is_closed() and (asked.within_s or asked.for_s):
        with suppress(RuntimeError, TimeoutError):  # its event loop has ended, or is too slow
            if asked.within_s:
                work = board.census(asked.hosts or (), asked.within_s)
                asyncio.run_coroutine_threadsafe(work, board.loop).result(deadline - time.monotonic())
            else:
                board.loop.call_soon_threadsafe(board.watch, asked.hosts or (), asked.every_s, asked.for_s)
    return [Held(host, at, Raw(said)) for host, at, said in board.said(asked.hosts, since)]


def _newest(held: Iterable[Held]) -> dict[int, HostLoad]:
    """Decode the newest samples of each host; log and leave out those that cannot be decoded."""
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
    """Log unreadable samples once per host and reason.

    A gateway of another release may send them, and every page that shows load would log it again.
    """
    log.warning("the samples of host %d cannot be read and are left out: %s", host, why)


_everybody = Everybody()
