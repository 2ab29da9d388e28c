"""What Nova knows of instances, through a keystoneauth1 session. Free of Django.

`Nova` (one listing per project asked for, within 2 s, remembered for 10 s) is registered by `placement_sync.apps` as
the source of `accelerators.api.own.instances`. While Nova is away, off, or not configured, everything is unknown at
once, and Nova is asked again after 10 s. `servers` asks for single ones, for `witness` and `faults`; `get` is
`watcher`'s.
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
"""So many instances are remembered; the longest unasked goes first."""
PAGE = 1000
AT_ONCE = 8
GONE = Known("gone")
LEFT = frozenset({"DELETED", "SHELVED_OFFLOADED"})
"""In these states an instance is on no host."""
log = logging.getLogger(__name__)

Fetch = Callable[[Mapping[str, str]], Mapping[str, Any]]
"""The body of `GET /servers/detail` with these parameters; raises when there is none."""


def by_project(instances: Iterable[Instance]) -> dict[str, set[str]]:
    """Project → the uuids asked for."""
    asked: dict[str, set[str]] = {}
    for instance in instances:
        asked.setdefault(instance.project_id, set()).add(instance.uuid)
    return asked


def pages(fetch: Fetch, project: str, page: int = PAGE) -> Iterator[list[Mapping[str, Any]]]:
    """A project's servers, page after page, until Nova names no next one."""
    params = {"all_tenants": "1", "project_id": project, "limit": str(page)}
    while True:
        body = fetch(params)
        servers = list(body["servers"])
        yield servers
        if not servers or not any(link.get("rel") == "next" for link in body.get("servers_links", ())):
            return
        params = params | {"marker": str(servers[-1]["id"])}


def look_up(fetch: Fetch, project: str, uuids: Collection[str]) -> dict[str, Known]:
    """What Nova knows of these instances of a project; those it does not have are gone."""
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
    """Ask through a keystoneauth1 session; `endpoint` is Nova's own address when the catalogue's shall not be used."""
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


class Unusable(Exception):
    """Nova did not answer, or not completely: nothing is concluded from it."""


UNASKED = Unusable("Nova was not asked")


@dataclass(frozen=True)
class Server:
    """An instance as Nova shows it; `places` are the names of its host, none where Nova does not tell them."""

    status: str
    places: frozenset[str] = frozenset()

    def on(self, *names: str) -> bool:
        """Whether it is on the host of one of these names, as far as Nova tells; not when it is on none any more."""
        return self.status not in LEFT and (not self.places or not self.places.isdisjoint(names))


def get(session: Any, endpoint: str, path: str, params: Mapping[str, str], timeout_s: float) -> Any:
    """Nova's answer, whatever its status. Raises Unusable when there is none."""
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
        raise Unusable(" ".join(str(error).split())[:300]) from None


def server(session: Any, endpoint: str, uuid: str, timeout_s: float = DEADLINE_S) -> Server | None:
    """One instance; None when Nova has none of that id. Raises Unusable."""
    answer = get(session, endpoint, f"/servers/{uuid}", {}, timeout_s)
    if answer.status_code == 404:
        return None
    if answer.status_code != 200:
        raise Unusable(f"GET /servers/{uuid}: Nova answered {answer.status_code}")
    try:
        found = answer.json()["server"]
        places = (found.get(f"OS-EXT-SRV-ATTR:{name}") for name in ("host", "hypervisor_hostname"))
        return Server(str(found["status"])[:64], frozenset(str(place) for place in places if place))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise Unusable(f"GET /servers/{uuid}: not a server") from None


def servers(
    session: Any, endpoint: str, uuids: Collection[str], deadline_s: float = DEADLINE_S
) -> dict[str, Server | Unusable | None]:
    """Several at once; after `deadline_s` in all, who was not answered for is Unusable."""
    threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="servers")
    asked = {uuid: threads.submit(partial(server, session, endpoint, uuid, deadline_s)) for uuid in uuids}
    wait(asked.values(), deadline_s)
    threads.shutdown(wait=False, cancel_futures=True)
    return {uuid: _answer(future) for uuid, future in asked.items()}


def _answer(future: Future[Server | None]) -> Server | Unusable | None:
    if not future.done() or future.cancelled():
        return Unusable("Nova did not answer in time")
    try:
        return future.result()
    except Unusable as unusable:
        return unusable


class Nova:
    """A source of instances' states; one per process. `session` is made at the first question, on another thread."""

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
        """What is known within the deadline, by uuid."""
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
        now = self._steady()
        with self._lock:
            held = ((instance.uuid, self._known.get(instance.uuid)) for instance in instances)
            return {uuid: entry[1] for uuid, entry in held if entry and now < entry[0]}

    def _ask(self, project: str, uuids: Collection[str]) -> dict[str, Known]:
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
        if not future.done():
            future.cancel()
            return False
        if future.exception():
            return False
        known.update(future.result())
        return True

    def _judge(self, failed: list[Future[dict[str, Known]]]) -> None:
        """One line when Nova goes away, and not a word more until it was back. To have no cloud is no trouble."""
        if failed:
            self._away_until = self._steady() + REMEMBERED_S
            errors = [future.exception() for future in failed if future.done() and not future.cancelled()]
            why = errors[0] if errors else TimeoutError("Nova did not answer in time")
            if not self._away and not isinstance(why, ConfigurationError):
                log.warning("instances' states are unknown: %s", _line(why))
        self._away = bool(failed)


def _line(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
