"""Rows of Placement: many new providers against the same calls by a bare client, and a reconcile without changes.

The job `placement` runs in this process on the bench's database, against a real Placement. Its calls are recorded. Then
the providers are deleted, and the same number of threads sends the calls again through the same library, with bodies
that were encoded before.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from time import perf_counter
from typing import Any
from uuid import uuid4

import psycopg
from django.db import connection
from keystoneauth1.identity import V3Password
from keystoneauth1.session import Session

from accelerators import conductor
from accelerators.domain.diff import HostReport
from accelerators.inventory import merge
from accelerators.models import Host
from drivers.inventory import DriverReport
from placement_sync.cloud import SERVICE_SESSION
from placement_sync.jobs import providers as tasks
from placement_sync.models import Tree, WrittenProvider
from tests.bench import fixtures, messages
from tests.bench.figures import Row
from tests.bench.remote_calls import MeasurementError
from tests.system.placement import Placement

DEVICES = 8
BATCH_SIZE = 50
"""Number of hosts that are merged in one batch."""
MAX_CALLS = 4.0
MAKE_READY = """
UPDATE accelerators_device SET state = 'ready';
UPDATE accelerators_deployable SET rp_uuid = gen_random_uuid();
"""
CHILDREN = "(SELECT id FROM resource_providers WHERE parent_provider_id IS NOT NULL)"
DELETE_CHILDREN = (
    f"DELETE FROM inventories WHERE resource_provider_id IN {CHILDREN}",
    f"DELETE FROM resource_provider_traits WHERE resource_provider_id IN {CHILDREN}",
    "DELETE FROM resource_providers WHERE parent_provider_id IS NOT NULL",
)
Call = tuple[tuple[Any, ...], dict[str, Any]]


class Recorder:
    """The keystoneauth1 session of the job: counts its calls by method; keeps the calls of each thread in `kept`."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.methods: Counter[str] = Counter()
        self.kept: dict[int, list[Call]] = {}
        self._lock = threading.Lock()

    def request(self, url: str, method: str, **more: Any) -> Any:
        """Record one call and make it."""
        with self._lock:
            self.methods[method] += 1
            self.kept.setdefault(threading.get_ident(), []).append(((url, method), more))
        return self.session.request(url, method, **more)


def rows(placement: Placement, hosts: int, turns: int, progress: Callable[[str], None]) -> list[Row]:
    """Return two rows: the job's call rate against the bare client's, and calls per host if nothing has changed."""
    progress(f"{hosts} hosts of {DEVICES} new devices each become providers, and again by a bare client, {turns} times")
    recorder = Recorder(_session(placement))
    try:
        with SERVICE_SESSION.replaced("keystone", lambda: recorder):
            _create_ready_devices(hosts)
            _create_compute_providers(recorder.session, hosts)
            ours, bare = list[float](), list[float]()
            for turn in range(turns):
                ours.append(_time_job(recorder, hosts))
                if turn == 0:
                    calls = recorder.methods.total()
                    unchanged = _measure_unchanged(recorder, hosts)
                _delete_children(placement)
                bare.append(_time_bare_client(_session(placement), list(recorder.kept.values())))
                _delete_children(placement)
                delete_written_records()
    finally:
        fixtures.empty_inventory()
    return [_make_rate_row(ours, bare, hosts * DEVICES, calls), unchanged]


def _session(placement: Placement) -> Session:
    return Session(V3Password(**placement.keystone.credentials("service")))


def _create_compute_providers(session: Session, hosts: int) -> None:
    """Create a compute provider for each host, as Nova does."""
    where = {"endpoint_filter": {"service_type": "placement"}, "headers": {"OpenStack-API-Version": "placement 1.39"}}
    for number in range(hosts):
        body = {"uuid": str(uuid4()), "name": messages.host_name(number)}
        session.post("/resource_providers", json=body, **where)


def _create_ready_devices(hosts: int) -> None:
    """Create devices on that many hosts, all ready and none in Placement yet."""
    fixtures.empty_inventory()
    ids = fixtures.enrol(hosts)
    for first in range(0, hosts, BATCH_SIZE):
        batch = enumerate(ids[first : first + BATCH_SIZE], first)
        merge.merge_reports({host: [_report(number)] for number, host in batch})
    with conductor.writing(), connection.cursor() as cursor:
        cursor.execute(MAKE_READY)


def _report(number: int) -> HostReport:
    found = messages.devices(DEVICES, messages.host_name(number))
    return HostReport(1, number + 1, format(number, "040x"), (DriverReport("bench_driver", "", found),))


def _run_job(hosts: int) -> float:
    """Run the job until nothing is left to do; return the seconds. Raise MeasurementError if a host has problems."""
    names = [messages.host_name(n) for n in range(hosts)]
    conductor.raise_provider_intents(Host.objects.filter(name__in=names))
    began = perf_counter()
    while tasks.step():
        pass
    took = perf_counter() - began
    if (left := Tree.objects.exclude(problems=[]).count()) or Tree.objects.filter(root=None).exists():
        raise MeasurementError(f"{left} hosts have problems in Placement")
    return took


def _time_job(recorder: Recorder, hosts: int) -> float:
    recorder.kept.clear()
    recorder.methods.clear()
    return _run_job(hosts)


def _measure_unchanged(recorder: Recorder, hosts: int) -> Row:
    kept, before = recorder.kept, recorder.methods
    recorder.kept, recorder.methods = {}, Counter()
    took = _run_job(hosts)
    made, recorder.kept, recorder.methods = recorder.methods, kept, before
    writes = made.total() - made["GET"]
    note = f"{writes} writes; {hosts / took:.0f} hosts a second"
    return Row(f"{hosts} hosts looked at, nothing changed", made.total() / hosts, "calls/host", "one read, no write",
               1.0, note=note, holds=writes == 0)  # fmt: skip


def _time_bare_client(session: Session, recorded: list[list[Call]]) -> float:
    """Make the recorded calls, one thread for each list; return the seconds, or raise MeasurementError."""
    ready = [[(words, more | _encode_body(more)) for words, more in calls] for calls in recorded]

    def one(calls: list[Call]) -> None:
        for words, more in calls:
            answer = session.request(*words, **more)
            if answer.status_code >= 300:
                raise MeasurementError(f"the bare client's {words}: {answer.status_code} {answer.text[:200]}")

    session.get_token()
    began = perf_counter()
    with ThreadPoolExecutor(len(ready)) as threads:
        list(threads.map(one, ready))
    return perf_counter() - began


def _encode_body(more: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with its JSON body encoded as bytes; {} if it has no body."""
    if "json" not in more:
        return {}
    headers = more["headers"] | {"Content-Type": "application/json"}
    return {"data": json.dumps(more["json"]).encode(), "json": None, "headers": headers}


def _delete_children(placement: Placement) -> None:
    """Delete every child provider in Placement's database. This is not measured, and through the API it takes long."""
    with psycopg.connect(host=str(placement.postgres.socket), user="postgres", dbname="placement") as database:
        for statement in DELETE_CHILDREN:
            database.execute(statement)


def delete_written_records() -> None:
    """Delete the product's records of what it has written to Placement."""
    Tree.objects.all().delete()
    WrittenProvider.objects.all().delete()


def _make_rate_row(ours: list[float], bare: list[float], providers: int, calls: int) -> Row:
    mine, theirs = (calls * len(times) / sum(times) for times in (ours, bare))
    each = calls / providers
    note = (
        f"{each:.2f} calls a provider, at most {MAX_CALLS:g}; {providers / min(ours):.0f} providers a second;"
        f" ours {', '.join(f'{one:.2f}' for one in ours)} s, bare {', '.join(f'{one:.2f}' for one in bare)} s"
    )
    return Row(
        f"{providers} new providers",
        mine,
        "calls/s",
        f"the same calls bare, {tasks.MAX_PARALLEL_HOSTS} at a time",
        0.80,
        theirs,
        mine / theirs,
        note=note,
        holds=each <= MAX_CALLS,
    )
