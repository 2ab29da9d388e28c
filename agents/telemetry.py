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

from accelerators.runtime import database_clock
from agents.gateway import sample_cache, sample_rpc
from agents.gateway.sample_cache import SampleCache, TooManyCensusesError
from agents.gateway.sample_rpc import GatewayUnreachableError, HostSamples, SampleRequest, SampleResponse

log = logging.getLogger(__name__)

RESPONSE_TIMEOUT_S = 1.0
"""Seconds to wait for a gateway's answer (plus a census's own time). A slower gateway counts as silent."""
GATEWAY_BACKOFF_S = 5.0
"""Seconds in which a gateway that did not answer is not asked again, so that not every page waits for it."""
REGISTRY_INTERVAL_S = 5.0
"""Minimum seconds between two reads of the gateways' rows, per process."""
STATEMENT_TIMEOUT_MS = 3000
"""Statement timeout in milliseconds for reading the gateways' rows, since the caller occupies a thread meanwhile."""
MAX_THREADS = 32
"""Maximum number of threads that ask gateways. Censuses have another pool of this size, because each occupies one
thread per gateway until it ends."""

SELECT_LIVE_GATEWAYS = """
SET LOCAL statement_timeout TO %s; SELECT name, url FROM agents_gateway WHERE seen_at >= %s;
SET LOCAL statement_timeout TO DEFAULT
"""
"""Three statements that are sent together. Outside a transaction they form one of their own; inside one, the last
statement sets the timeout back. Plain SQL, because the ORM cannot set a timeout."""


@dataclass(frozen=True, slots=True)
class HostLoad:
    """The last samples of one host. `at`: unix time when its gateway received them. `devices`: values by device key."""

    host_id: int
    at: float
    devices: dict[str, dict[str, float]]


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """The load of hosts, by host id. A host without samples is missing.

    `silent`: the names of gateways that gave no answer; the samples they have are missing too.
    """

    hosts: dict[int, HostLoad]
    silent: tuple[str, ...] = ()


def get_last_loads(hosts: Collection[int] | None = None) -> LoadSnapshot:
    """Return the last known load of these hosts; None means all hosts. No agent is asked.

    It takes up to about a second, longer only while the gateways' rows are read slowly. A gateway that does not answer
    is named in `silent`. Raise DatabaseError if the gateways' rows cannot be read.
    """
    return _gateway_pool.ask_all(SampleRequest(None if hosts is None else tuple(hosts)))


def request_periodic_loads(hosts: Collection[int], every_s: float, for_s: float) -> LoadSnapshot:
    """Ask these hosts to send samples every `every_s` seconds for `for_s` seconds; return the last known load.

    It does not wait for the agents, only for the gateways, as `get_last_loads` does. The interval is at least 0.5 s and
    the duration at most 300 s, whatever is asked for. To continue, call it again before `for_s` seconds have passed.
    Agents get a message only if they need one. Raise DatabaseError if the gateways' rows cannot be read.
    """
    return _gateway_pool.ask_all(SampleRequest(tuple(hosts), every_s, for_s))


def run_load_census(hosts: Collection[int], within_s: float) -> LoadSnapshot:
    """Ask the agents of these hosts for samples now, and return those that arrived within `within_s` seconds.

    It returns as soon as all have answered. Agents of a release that has no Samples message never answer; if `hosts`
    contains one, the call takes the full `within_s` seconds. A gateway that runs too many censuses already is named in
    `silent`. Raise DatabaseError if the gateways' rows cannot be read.
    """
    return _gateway_pool.ask_all(SampleRequest(tuple(hosts), within_s=within_s))


def describe_device_load(loads: LoadSnapshot, host_id: int, key: str) -> dict[str, Any]:
    """Return one device's load as the usage resource shows it: `at`, `age_s` (seconds), `values`, and the `silent`
    gateways.

    `key` is the device's key. `at` and `age_s` are None, and `values` is empty, if no load of the device is known.
    """
    host_load = loads.hosts.get(host_id)
    values = host_load.devices.get(key) if host_load else None
    at = datetime.fromtimestamp(host_load.at, UTC) if host_load and values is not None else None
    age = round(max(0.0, database_clock.timestamp() - host_load.at), 1) if host_load and at else None
    return {"at": at, "age_s": age, "values": values or {}, "silent": list(loads.silent)}


def forget_gateways() -> None:
    """Forget the known gateways and which of them were silent. For tests."""
    _gateway_pool.forget_gateways()


class GatewayPool:
    """Asks all gateways: the caches of this process directly, the registered gateways of others by HTTP."""

    def __init__(self) -> None:
        self._load_threads, self._census_threads = (
            ThreadPoolExecutor(MAX_THREADS, "load"),
            ThreadPoolExecutor(MAX_THREADS, "census"),
        )
        self.forget_gateways()

    def forget_gateways(self) -> None:
        """Forget the known gateways and which of them were silent, so that the next request reads the gateways' rows
        again."""
        self._addresses: dict[str, str] = {}
        self._addresses_read_at = float("-inf")
        self._backoff_until: dict[str, float] = {}

    def ask_all(self, request: SampleRequest) -> LoadSnapshot:
        """Ask all gateways in parallel and merge their answers; if two have samples of a host, the newer ones count.

        A gateway that does not answer in time, or runs too many censuses, is named in `silent`. A gateway that failed
        to answer is not asked again for GATEWAY_BACKOFF_S, and is named there too. If `hosts` is an empty tuple, nobody
        is asked. Raise DatabaseError if the gateways' rows cannot be read.
        """
        if request.hosts == ():
            return LoadSnapshot({})
        deadline = time.monotonic() + request.within_s + RESPONSE_TIMEOUT_S
        caches, now = dict(sample_cache.local_caches), time.monotonic()
        remote_urls = {name: url for name, url in self._read_live_gateways().items() if name not in caches}
        silent = {name for name in remote_urls if self._backoff_until.get(name, 0.0) > now}
        threads = self._census_threads if request.within_s else self._load_threads
        pending = {
            name: threads.submit(sample_rpc.fetch_samples, url, request, request.within_s + RESPONSE_TIMEOUT_S)
            for name, url in remote_urls.items()
            if name not in silent
        }
        samples: list[HostSamples] = []
        for name, cache in caches.items():
            try:
                samples += _read_local_cache(cache, request, deadline)
            except TooManyCensusesError:
                silent.add(name)
        wait(pending.values(), timeout=max(0.0, deadline - time.monotonic()))
        for name, answer in pending.items():
            try:
                samples += _read_response(answer, caches)
            except TooManyCensusesError:  # no free thread here, or too many censuses there: the gateway itself is well
                silent.add(name)
            except GatewayUnreachableError as error:
                log.warning("gateway %s at %s cannot be asked for samples: %s", name, remote_urls[name], error)
                self._backoff_until[name] = time.monotonic() + GATEWAY_BACKOFF_S
                silent.add(name)
        return LoadSnapshot(_decode_newest(samples), tuple(sorted(silent)))

    def _read_live_gateways(self) -> dict[str, str]:
        """Return the addresses of the live gateways, by name: those that have renewed their row lately.

        The rows are read at most every REGISTRY_INTERVAL_S; in between, the last result is returned. Raise
        DatabaseError, at the latest after STATEMENT_TIMEOUT_MS.
        """
        if time.monotonic() - self._addresses_read_at >= REGISTRY_INTERVAL_S:
            oldest_allowed = database_clock.now() - timedelta(
                seconds=2 * (settings.KEYS.beat_s + settings.KEYS.lease_flush_s) + 10
            )
            with connection.cursor() as cursor:
                cursor.execute(SELECT_LIVE_GATEWAYS, [STATEMENT_TIMEOUT_MS, oldest_allowed])
                cursor.nextset()
                self._addresses = dict(cursor.fetchall())
            self._addresses_read_at = time.monotonic()
            self._backoff_until = {
                name: until for name, until in list(self._backoff_until.items()) if name in self._addresses
            }
        return self._addresses


def _read_response(future: Future[SampleResponse], local_names: Collection[str]) -> list[HostSamples]:
    """Return the samples in a gateway's answer; it does not wait.

    Raise TooManyCensusesError if no thread was free to ask the gateway or too many censuses run there. Raise
    GatewayUnreachableError if it has not answered, if its answer is not usable, or if it is one of `local_names`.
    """
    if future.cancel():
        raise TooManyCensusesError("no thread was free to ask it")
    if not future.done():
        raise GatewayUnreachableError(f"no answer within {RESPONSE_TIMEOUT_S:.0f} s")
    response = future.result()
    if response.gateway in local_names:
        raise GatewayUnreachableError(
            "the address leads to the process that asks: set CYBORG_GATEWAY_URL if gateways run on several machines"
        )
    return response.hosts


def _read_local_cache(cache: SampleCache, request: SampleRequest, deadline: float) -> list[HostSamples]:
    """Return the samples in a cache of this process. If the request says so, the agents are asked first.

    For a census this blocks until the agents have answered, at most until `deadline` (monotonic). Raise
    TooManyCensusesError if too many censuses run.
    """
    since = time.monotonic() if request.within_s else 0.0
    if cache.loop and not cache.loop.is_closed() and (request.within_s or request.for_s):
        with suppress(RuntimeError, TimeoutError):  # its event loop has ended, or is too slow
            if request.within_s:
                work = cache.run_census(request.hosts or (), request.within_s)
                asyncio.run_coroutine_threadsafe(work, cache.loop).result(deadline - time.monotonic())
            else:
                cache.loop.call_soon_threadsafe(
                    cache.request_periodic_samples, request.hosts or (), request.every_s, request.for_s
                )
    return [
        HostSamples(host, at, Raw(samples_json))
        for host, at, samples_json in cache.iterate_samples(request.hosts, since)
    ]


def _decode_newest(samples: Iterable[HostSamples]) -> dict[int, HostLoad]:
    """Decode the newest samples of each host; log and leave out those that cannot be decoded."""
    newest: dict[int, HostSamples] = {}
    for host_samples in samples:
        if host_samples.host not in newest or newest[host_samples.host].at < host_samples.at:
            newest[host_samples.host] = host_samples
    loads = {}
    for host, host_samples in newest.items():
        try:
            loads[host] = HostLoad(
                host, host_samples.at, {load.key: load.values for load in host_samples.decode_loads()}
            )
        except DecodeError as error:
            _log_unreadable_once(host, str(error))
    return loads


@lru_cache(maxsize=1024)
def _log_unreadable_once(host: int, reason: str) -> None:
    """Log unreadable samples once per host and reason.

    A gateway of another release may send them, and every page that shows load would log it again.
    """
    log.warning("the samples of host %d cannot be read and are left out: %s", host, reason)


_gateway_pool = GatewayPool()
