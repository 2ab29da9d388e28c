"""Read instances from Nova through a keystoneauth1 session. It does not use Django.

`InstanceStateCache` answers for many instances with one listing per project, within 2 s, and caches the states for ten
seconds; `placement_sync.apps` registers it as the source of `accelerators.api.own.instances`. After a failed listing it
makes no call for ten seconds; meanwhile, and while Nova is off or not configured, states that are not cached are
unknown.

`get_servers` asks for single instances, for holder checks, discrepancies and the job `instances`, which also reads the
listing of deleted instances (`list_deleted_instances`). `send_get` sends any GET request.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

from accelerators.api.own.instances import InstanceKey, InstanceState
from drivers.configuration import ConfigurationError
from drivers.errors import Failed
from drivers.isolation.threads import call_in_parallel, is_ended, start_in_thread
from placement_sync.errors import PlacementSyncError

DEADLINE_S = 2.0
CACHE_S = 10.0
MAX_CACHED = 10_000
"""Largest number of cached states. The oldest answer is dropped first."""
PAGE_SIZE = 1000
MAX_PARALLEL_CALLS = 8
GONE = InstanceState("gone")
OFF_HOST_STATES = frozenset({"DELETED", "SHELVED_OFFLOADED"})
"""States in which an instance is on no host."""
log = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")
FetchServers = Callable[[Mapping[str, str]], Mapping[str, Any]]
"""Returns the body of `GET /servers/detail` with these parameters; raises an error if there is none."""


def group_by_project(instances: Iterable[InstanceKey]) -> dict[str, set[str]]:
    """Group the uuids of the instances by project."""
    uuids_by_project: dict[str, set[str]] = {}
    for instance in instances:
        uuids_by_project.setdefault(instance.project_id, set()).add(instance.uuid)
    return uuids_by_project


def iterate_server_pages(
    fetch: FetchServers, project: str, page_size: int = PAGE_SIZE
) -> Iterator[list[Mapping[str, Any]]]:
    """Yield a project's servers page by page, until Nova's answer has no link to a next page, or no servers.

    Raises whatever `fetch` raises, and KeyError if an answer is not a list of servers.
    """
    params = {"all_tenants": "1", "project_id": project, "limit": str(page_size)}
    while True:
        body = fetch(params)
        servers = list(body["servers"])
        yield servers
        if not servers or not any(link.get("rel") == "next" for link in body.get("servers_links", ())):
            return
        params = params | {"marker": str(servers[-1]["id"])}


def look_up_instances(fetch: FetchServers, project: str, uuids: Collection[str]) -> dict[str, InstanceState]:
    """Return state and name of these instances of a project, by uuid; an instance that Nova does not list is GONE.

    Reads no further page once all of them are found. Raises whatever `fetch` raises, and KeyError if an answer does not
    describe servers.
    """
    missing, states = set(uuids), {}
    for servers in iterate_server_pages(fetch, project):
        for server in servers:
            if server["id"] in missing:
                missing.discard(server["id"])
                states[server["id"]] = InstanceState(str(server["status"])[:64], str(server["name"])[:255])
        if not missing:
            break
    return states | dict.fromkeys(missing, GONE)


def make_fetcher(session: Any, endpoint: str = "", timeout_s: float = DEADLINE_S) -> FetchServers:
    """Return a FetchServers that uses the session. `endpoint` overrides the address of Nova in Keystone's catalogue."""
    endpoint_options = {"endpoint_override": endpoint} if endpoint else {}

    def fetch(params: Mapping[str, str]) -> Mapping[str, Any]:
        """Return the decoded body of `GET /servers/detail`; raise keystoneauth1's errors, or ValueError if not JSON."""
        answer = session.get(
            "/servers/detail",
            params=params,
            endpoint_filter={"service_type": "compute"},
            headers={"Accept": "application/json"},
            timeout=timeout_s,
            connect_retries=0,
            log=False,
            **endpoint_options,
        )
        body: Mapping[str, Any] = answer.json()
        return body

    return fetch


class NovaUnavailableError(PlacementSyncError):
    """Nova gave no answer, or not a complete one, so nothing can be concluded from it."""


class NovaSilentError(NovaUnavailableError):
    """Nova, or Keystone before it, gave no answer at all to a call."""


NOT_ASKED = NovaUnavailableError("Nova was not asked")


@dataclass(frozen=True)
class NovaServer:
    """An instance as Nova shows it. `host_names` are the names of its host, empty if Nova does not show them."""

    status: str
    host_names: frozenset[str] = frozenset()

    def is_on_host(self, *names: str) -> bool:
        """Return True if the instance is, or may be, on a host with one of these names.

        False if the instance is deleted or shelved-offloaded; otherwise True if Nova does not show the host.
        """
        return self.status not in OFF_HOST_STATES and (not self.host_names or not self.host_names.isdisjoint(names))


def send_get(session: Any, endpoint: str, path: str, params: Mapping[str, str], timeout_s: float) -> Any:
    """Send a GET request and return Nova's answer, whatever its status.

    Raises NovaSilentError if there is no answer.
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
        raise NovaSilentError(" ".join(str(error).split())[:300]) from None


def get_server(session: Any, endpoint: str, uuid: str, timeout_s: float = DEADLINE_S) -> NovaServer | None:
    """Return one instance, or None if Nova answers 404.

    No microversion is asked for: before 2.69 the answer for an instance in a cell that is down is 500, never 404
    (`nova.compute.api.API._get_instance_from_cell`). Raises NovaSilentError if there is no answer, and
    NovaUnavailableError for any other answer than a description of the instance.
    """
    answer = send_get(session, endpoint, f"/servers/{uuid}", {}, timeout_s)
    if answer.status_code == 404:
        return None
    if answer.status_code != 200:
        raise NovaUnavailableError(f"GET /servers/{uuid}: Nova answered {answer.status_code}")
    try:
        document = answer.json()["server"]
        host_names = (document.get(f"OS-EXT-SRV-ATTR:{name}") for name in ("host", "hypervisor_hostname"))
        return NovaServer(str(document["status"])[:64], frozenset(str(place) for place in host_names if place))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NovaUnavailableError(f"GET /servers/{uuid}: the answer does not describe a server") from None


def get_servers(
    session: Any, endpoint: str, uuids: Collection[str], deadline_s: float = DEADLINE_S
) -> dict[str, NovaServer | NovaUnavailableError | None]:
    """Return several instances by uuid, read in parallel (MAX_PARALLEL_CALLS threads); None if Nova answers 404.

    An instance maps to NovaUnavailableError if Nova has given no usable answer for it within `deadline_s`, which is for
    all together. Nothing is raised.
    """
    return collect_servers(lambda uuid: get_server(session, endpoint, uuid, deadline_s), uuids, deadline_s)


def collect_servers(
    read: Callable[[str], NovaServer | None], uuids: Collection[str], deadline_s: float
) -> dict[str, NovaServer | NovaUnavailableError | None]:
    """Do the same as `get_servers`, where `read` reads one instance as `get_server` does."""
    futures = call_in_parallel(read, uuids, deadline_s, MAX_PARALLEL_CALLS)
    return {uuid: _collect_server(future) for uuid, future in futures.items()}


def _collect_server(future: Future[NovaServer | None]) -> NovaServer | NovaUnavailableError | None:
    """Return the result of a call, or NovaUnavailableError if it is not finished or has failed."""
    try:
        return _get_result(future)
    except NovaUnavailableError as unusable:
        return unusable


def call_with_deadline(call: Callable[[], ResultT], deadline_s: float) -> ResultT:
    """Make the call in a daemon thread, which does not delay the end of the process, and return its result.

    The time-out of a request limits the time between two parts of the answer, this deadline the time of the whole call.
    Raises NovaUnavailableError if the call has not ended within `deadline_s`, and the thread then goes on alone; or
    if no thread can be started. Raises what the call raises.
    """
    try:
        future = start_in_thread(call)
    except Failed as error:
        raise NovaUnavailableError(str(error)) from None
    wait([future], deadline_s)
    return _get_result(future)


def _get_result(future: Future[ResultT]) -> ResultT:
    """Return the result of a call; raise what it raised, or NovaUnavailableError if it has not ended."""
    if not is_ended(future):
        raise NovaUnavailableError("Nova did not answer in time")
    return future.result()


class InvalidMarkerError(NovaUnavailableError):
    """Nova does not know the instance after which the next page of a listing should begin."""


@dataclass(frozen=True)
class DeletedPage:
    """A page of Nova's listing of deleted instances, and when it was answered, by Nova's clock (None: not said)."""

    uuids: tuple[str, ...]
    has_more: bool
    answered_at: datetime | None


def list_deleted_instances(session: Any, endpoint: str, since: datetime, marker: str, timeout_s: float) -> DeletedPage:
    """Return a page of the instances of all projects that were deleted since then, by Nova's clock.

    `marker` is the last instance of the page before, '' for the first page. Nova shows a deleted instance until it is
    purged from its tables (Nova's API reference, "List Servers", `changes-since` and `deleted`); a user who may not
    filter by `deleted` gets all instances that were changed. Raises NovaUnavailableError unless the answer is such a
    page, and its subclass InvalidMarkerError if Nova rejects the marker.
    """
    params = {
        "all_tenants": "1",
        "deleted": "true",
        "changes-since": f"{since.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}",
        "limit": str(PAGE_SIZE),
    } | ({"marker": marker} if marker else {})
    answer = send_get(session, endpoint, "/servers", params, timeout_s)
    if answer.status_code == 400 and marker:
        raise InvalidMarkerError(f"GET /servers: 400 for the marker {marker}")
    if answer.status_code != 200:
        raise NovaUnavailableError(f"GET /servers: {answer.status_code}")
    try:
        uuids = tuple(str(server["id"]) for server in answer.json()["servers"])
        has_more = any(link.get("rel") == "next" for link in answer.json().get("servers_links", ()))
    except (ValueError, KeyError, TypeError, AttributeError):
        raise NovaUnavailableError("GET /servers: the answer is not a list of servers") from None
    return DeletedPage(uuids, has_more and bool(uuids), _parse_date(answer.headers.get("Date", "")))


def _parse_date(text: str) -> datetime | None:
    """Return the time of an HTTP header `Date`, None if it is not a date."""
    try:
        return parsedate_to_datetime(text).astimezone(UTC)
    except ValueError:
        return None


class InstanceStateCache:
    """Return the states of instances, from a cache or from Nova. Thread-safe; one per process.

    `session` returns the keystoneauth1 session; it is called for each listing, on another thread.
    """

    def __init__(
        self,
        session: Callable[[], Any],
        endpoint: str = "",
        deadline_s: float = DEADLINE_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._session, self._endpoint, self._deadline_s, self._monotonic = session, endpoint, deadline_s, monotonic
        self._cache: OrderedDict[str, tuple[float, InstanceState]] = OrderedDict()
        self._back_off_until = float("-inf")
        self._is_unavailable = False
        self._lock = threading.Lock()
        self._executor = ThreadPoolExecutor(4, thread_name_prefix="nova")

    def __call__(self, instances: Collection[InstanceKey]) -> Mapping[str, InstanceState]:
        """Return what is known within the deadline, by uuid; an instance that is left out is unknown.

        Errors are not raised. A failed listing starts the back-off, and the first one after a success is logged.
        """
        known, now = self._read_cache(instances), self._monotonic()
        missing = group_by_project(instance for instance in instances if instance.uuid not in known)
        if not missing or now < self._back_off_until:
            return known
        futures = [self._executor.submit(self._list_project, project, uuids) for project, uuids in missing.items()]
        wait(futures, self._deadline_s)
        failed = [future for future in futures if not self._add_answer(future, known)]
        self._update_back_off(failed)
        return known

    def _read_cache(self, instances: Collection[InstanceKey]) -> dict[str, InstanceState]:
        """Return the cached states of these instances that have not expired."""
        now = self._monotonic()
        with self._lock:
            cached = ((instance.uuid, self._cache.get(instance.uuid)) for instance in instances)
            return {uuid: entry[1] for uuid, entry in cached if entry and now < entry[0]}

    def _list_project(self, project: str, uuids: Collection[str]) -> dict[str, InstanceState]:
        """List the project's servers, cache the states of these uuids, and return them.

        Raises what the session, the call or an unusable answer raises.
        """
        states = look_up_instances(make_fetcher(self._session(), self._endpoint, self._deadline_s), project, uuids)
        until = self._monotonic() + CACHE_S
        with self._lock:
            for uuid, known in states.items():
                self._cache[uuid] = until, known
                self._cache.move_to_end(uuid)
            while len(self._cache) > MAX_CACHED:
                self._cache.popitem(last=False)
        return states

    def _add_answer(self, future: Future[dict[str, InstanceState]], known: dict[str, InstanceState]) -> bool:
        """Add a finished listing to `known`; return False if it failed or is not finished.

        A listing that has not begun is cancelled; one that is running goes on and still fills the cache.
        """
        if not future.done():
            future.cancel()
            return False
        if future.exception():
            return False
        known.update(future.result())
        return True

    def _update_back_off(self, failed: list[Future[dict[str, InstanceState]]]) -> None:
        """Start the back-off if `failed` is not empty; otherwise note that Nova answers.

        `failed` are the listings that failed or did not end in time. The first failure after a success is logged as a
        warning, unless it is a missing cloud configuration.
        """
        if failed:
            self._back_off_until = self._monotonic() + CACHE_S
            finished = [future for future in failed if future.done() and not future.cancelled()]
            # A listing that was still running at the deadline may have succeeded since then: it has no exception.
            errors = [error for future in finished if (error := future.exception())]
            why = errors[0] if errors else TimeoutError("it did not answer in time")
            if not self._is_unavailable and not isinstance(why, ConfigurationError):
                log.warning(
                    "The states of instances are unknown, because Nova cannot be asked: %s", _describe_error(why)
                )
        self._is_unavailable = bool(failed)


def _describe_error(error: BaseException) -> str:
    """Return the error's class and message on one line, the message cut to 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
