"""Read instances from Nova through a keystoneauth1 session. Free of Django.

`InstanceStateCache` answers for many instances with one listing per project, within 2 s, and caches the states for ten
seconds; `placement_sync.apps` registers it as the source of `accelerators.api.own.instances`. After a failed listing it
makes no call for ten seconds; meanwhile, and while Nova is off or not configured, states that are not cached are
unknown.

`get_servers` asks for single instances, for holder checks and discrepancies. `send_get` sends any GET request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from accelerators.api.own.instances import Instance, Known
from drivers.configuration import ConfigurationError

DEADLINE_S = 2.0
REMEMBERED_S = 10.0
REMEMBERED = 10_000
"""Largest number of cached states. The oldest answer is dropped first."""
PAGE = 1000
AT_ONCE = 8
GONE = Known("gone")
LEFT = frozenset({"DELETED", "SHELVED_OFFLOADED"})
"""States in which an instance is on no host."""
log = logging.getLogger(__name__)

Fetch = Callable[[Mapping[str, str]], Mapping[str, Any]]
"""Returns the body of `GET /servers/detail` with these parameters; raises an error if there is none."""


def by_project(instances: Iterable[Instance]) -> dict[str, set[str]]:
    """Group the uuids of the instances by project."""
    asked: dict[str, set[str]] = {}
    for instance in instances:
        asked.setdefault(instance.project_id, set()).add(instance.uuid)
    return asked


def pages(fetch: Fetch, project: str, page: int = PAGE) -> Iterator[list[Mapping[str, Any]]]:
    """Yield a project's servers page by page, until Nova's answer has no link to a next page."""
    params = {"all_tenants": "1", "project_id": project, "limit": str(page)}
    while True:
        body = fetch(params)
        servers = list(body["servers"])
        yield servers
        if not servers or not any(link.get("rel") == "next" for link in body.get("servers_links", ())):
            return
        params = params | {"marker": str(servers[-1]["id"])}


def look_up(fetch: Fetch, project: str, uuids: Collection[str]) -> dict[str, Known]:
    """Return state and name of these instances of a project; an instance that Nova does not list is GONE."""
    missing, found = set(uuids), {}
    for servers in pages(fetch, project):
        for server in servers:
            if server["id"] in missing:
                missing.discard(server["id"])
                found[server["id"]] = Known(str(server["status"])[:64], str(server["name"])[:255])
        if not missing:
            break
    return found | dict.fromkeys(missing, GONE)


def fetcher(session: Any, endpoint: str = "", timeout_s: float = DEADLINE_S) -> Fetch:
    """Return a FetchServers that uses the session. `endpoint` overrides the address of Nova in Keystone's catalogue."""
    where = {"endpoint_override": endpoint} if endpoint else {}

    def fetch(params: Mapping[str, str]) -> Mapping[str, Any]:
        answer = session.get(
            "/servers/detail",
            params=params,
            endpoint_filter={"service_type": "compute"},
            headers={"Accept": "application/json"},
            timeout=timeout_s,
            connect_retries=0,
            log=False,
            **where,
        )
        body: Mapping[str, Any] = answer.json()
        return body

    return fetch


class NovaUnavailableError(Exception):
    """Nova gave no answer, or not a complete one, so nothing can be concluded from it."""


UNASKED = NovaUnavailableError("Nova was not asked")


@dataclass(frozen=True)
class Server:
    """An instance as Nova shows it. `host_names` are the names of its host, empty if Nova does not show them."""

    status: str
    places: frozenset[str] = frozenset()

    def on(self, *names: str) -> bool:
        """Whether the instance is on a host with one of these names.

        False if the instance is deleted or shelved-offloaded; otherwise True if Nova does not show the host.
        """
        return self.status not in LEFT and (not self.places or not self.places.isdisjoint(names))


def get(session: Any, endpoint: str, path: str, params: Mapping[str, str], timeout_s: float) -> Any:
    """Send a GET request and return Nova's answer, whatever its status.

    Raises NovaUnavailableError if there is no answer.
    """
    from keystoneauth1.exceptions import ClientException

    try:
        return session.request(
            path,
            "GET",
            params=dict(params),
            endpoint_filter={"service_type": "compute"},
            headers={"Accept": "application/json"},
            timeout=timeout_s,
            connect_retries=0,
            raise_exc=False,
            log=False,
            **({"endpoint_override": endpoint} if endpoint else {}),
        )
    except ClientException as error:
        raise NovaUnavailableError(" ".join(str(error).split())[:300]) from None


def server(session: Any, endpoint: str, uuid: str, timeout_s: float = DEADLINE_S) -> Server | None:
    """Return one instance, or None if Nova answers 404. Raises NovaUnavailableError."""
    answer = get(session, endpoint, f"/servers/{uuid}", {}, timeout_s)
    if answer.status_code == 404:
        return None
    if answer.status_code != 200:
        raise NovaUnavailableError(f"GET /servers/{uuid}: Nova answered {answer.status_code}")
    try:
        found = answer.json()["server"]
        places = (found.get(f"OS-EXT-SRV-ATTR:{name}") for name in ("host", "hypervisor_hostname"))
        return Server(str(found["status"])[:64], frozenset(str(place) for place in places if place))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NovaUnavailableError(f"GET /servers/{uuid}: the answer does not describe a server") from None


def servers(
    session: Any, endpoint: str, uuids: Collection[str], deadline_s: float = DEADLINE_S
) -> dict[str, Server | NovaUnavailableError | None]:
    """Return several instances, read in parallel (MAX_PARALLEL_CALLS threads).

    An instance maps to NovaUnavailableError if Nova has not answered for it within `deadline_s`, which is for all
    together.
    """
    threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="servers")
    asked = {uuid: threads.submit(partial(server, session, endpoint, uuid, deadline_s)) for uuid in uuids}
    wait(asked.values(), deadline_s)
    threads.shutdown(wait=False, cancel_futures=True)
    return {uuid: _answer(future) for uuid, future in asked.items()}


def _answer(future: Future[Server | None]) -> Server | NovaUnavailableError | None:
    """Return the result of a call, or NovaUnavailableError if it is not finished or has failed."""
    if not future.done() or future.cancelled():
        return NovaUnavailableError("Nova did not answer in time")
    try:
        return future.result()
    except NovaUnavailableError as unusable:
        return unusable


class Nova:
    """Return the states of instances, from a cache or from Nova. Thread-safe; one per process.

    `session` returns the keystoneauth1 session; it is called for each listing, on another thread.
    """

    def __init__(
        self,
        session: Callable[[], Any],
        endpoint: str = "",
        deadline_s: float = DEADLINE_S,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session, self._endpoint, self._deadline_s, self._steady = session, endpoint, deadline_s, steady
        self._known: OrderedDict[str, tuple[float, Known]] = OrderedDict()
        self._away_until = float("-inf")
        self._away = False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="nova")

    def __call__(self, instances: Collection[Instance]) -> Mapping[str, Known]:
        """Return what is known within the deadline, by uuid; an instance that is left out is unknown."""
        known, now = self._remembered(instances), self._steady()
        missing = by_project(instance for instance in instances if instance.uuid not in known)
        if not missing or now < self._away_until:
            return known
        asked = [self._threads.submit(self._ask, project, uuids) for project, uuids in missing.items()]
        wait(asked, self._deadline_s)
        failed = [future for future in asked if not self._answered(future, known)]
        self._judge(failed)
        return known

    def _remembered(self, instances: Collection[Instance]) -> dict[str, Known]:
        """Return the cached states of these instances that have not expired."""
        now = self._steady()
        with self._lock:
            held = ((instance.uuid, self._known.get(instance.uuid)) for instance in instances)
            return {uuid: entry[1] for uuid, entry in held if entry and now < entry[0]}

    def _ask(self, project: str, uuids: Collection[str]) -> dict[str, Known]:
        """List the project's servers, cache the states of these uuids, and return them."""
        found = look_up(fetcher(self._session(), self._endpoint, self._deadline_s), project, uuids)
        until = self._steady() + REMEMBERED_S
        with self._lock:
            for uuid, known in found.items():
                self._known[uuid] = until, known
                self._known.move_to_end(uuid)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return found

    def _answered(self, future: Future[dict[str, Known]], known: dict[str, Known]) -> bool:
        """Add a finished listing to `known`; return False if it failed or is not finished."""
        if not future.done():
            future.cancel()
            return False
        if future.exception():
            return False
        known.update(future.result())
        return True

    def _judge(self, failed: list[Future[dict[str, Known]]]) -> None:
        """Start the back-off if a listing failed; log one warning when Nova goes away, and no other until it was back.

        A missing cloud configuration is not logged.
        """
        if failed:
            self._away_until = self._steady() + REMEMBERED_S
            errors = [future.exception() for future in failed if future.done() and not future.cancelled()]
            why = errors[0] if errors else TimeoutError("Nova did not answer in time")
            if not self._away and not isinstance(why, ConfigurationError):
                log.warning("The states of instances are unknown, because Nova cannot be asked: %s", _line(why))
        self._away = bool(failed)


def _line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
