"""Rows of the life cycle of requests: eight clients create, bind, read, unbind and delete, at three levels.

The levels are the one-command server, granian with two workers, and `accelerators.requests.binding` without HTTP.
The last is also measured with many requests of other projects in the tables.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter, process_time
from uuid import uuid4

from django.db import connection

from accelerators.api.v2 import arguments
from accelerators.api.v2.requests import REQUESTS
from accelerators.api.v2.versions import MIN_VERSION
from accelerators.domain.caller import Caller
from accelerators.requests import binding
from tests.bench import inventory
from tests.bench.api_clients import PROFILE
from tests.bench.figures import Row, cpu_s
from tests.bench.granian_server import run_granian
from tests.bench.lab import Generator, Lab
from tests.bench.product import RunningProduct, list_children
from tests.bench.remote_calls import MeasurementError

CLIENTS = 8
CYCLE = "request created, bound, read, unbound, deleted"
CALLER = Caller("bench-admin", "1", frozenset({"admin"}), "bench", service=True)
Offers = list[tuple[str, str]]


def measure_one_command_server(
    product: RunningProduct, generator: Generator, seconds: float, progress: Callable[[str], None]
) -> list[Row]:
    """Return the row measured through the product as its one command starts it."""
    progress(f"{CYCLE}, through the one-command server")
    offers, tokens = inventory.create_ready_devices(10), inventory.create_tokens()
    web = [product.child("cyborgweb.server.web_server")]
    return [_measure_through(generator, product.port, web, tokens, offers, seconds, 25.0, "the one-command server")]


def measure_granian(
    lab: Lab,
    generator: Generator,
    tokens: dict[str, str],
    offers: Offers,
    seconds: float,
    progress: Callable[[str], None],
) -> Row:
    """Return the row measured through granian."""
    progress(f"{CYCLE}, through granian")
    with run_granian(lab, 2) as server:
        everyone = [server.pid, *list_children(server.pid)]
        return _measure_through(generator, server.port, everyone, tokens, offers, seconds, 60.0, "granian, 2 workers")


def _measure_through(
    generator: Generator,
    port: int,
    servers: list[int],
    tokens: dict[str, str],
    offers: Offers,
    seconds: float,
    least: float,
    what: str,
) -> Row:
    generator.ask("run_request_cycles", port=port, tokens=tokens, offers=offers, clients=CLIENTS, seconds=1.0)
    before = [cpu_s(pid) for pid in servers]
    done = generator.ask(
        "run_request_cycles", port=port, tokens=tokens, offers=offers, clients=CLIENTS, seconds=seconds
    )
    spent = sum(cpu_s(pid) - was for pid, was in zip(servers, before, strict=True)) / done["count"] * 1e6
    rate = done["count"] / done["seconds"]
    note = f"{CLIENTS} clients, five requests each time; one takes {done['p50_ms']:.0f} ms, p99 {done['p99_ms']:.0f} ms"
    return Row(CYCLE, rate, "/s", f"{what}: {least:.0f}/s", 1.0, least, rate / least, spent, note)


def measure_in_process(offers: Offers, others: int, seconds: float, progress: Callable[[str], None]) -> list[Row]:
    """Return two rows: `accelerators.requests.binding` without and with `others` requests of other projects."""
    progress(f"{CYCLE}, in process, with no others and with {others}")
    inventory.delete_requests()
    _run_turn(offers, 1.0)
    alone = [_run_turn(offers, seconds / 2)]
    inventory.create_other_requests(others)
    among = [_run_turn(offers, seconds / 2) for _ in range(2)]
    inventory.delete_requests()
    alone.append(_run_turn(offers, seconds / 2))
    (rate, cpu), (filled, spent) = (
        [sum(values) / 2 for values in zip(*turns, strict=True)] for turns in (alone, among)
    )
    note = f"{CLIENTS} threads of one process; its own CPU, PostgreSQL's apart"
    return [
        Row(CYCLE, rate, "/s", "accelerators.requests.binding: 200/s", 1.0, 200.0, rate / 200.0, cpu, note),
        Row(
            f"the same among {others} other requests", filled, "/s", "among none", 0.8, rate, filled / rate, spent, note
        ),
    ]


def _run_turn(offers: Offers, seconds: float) -> tuple[float, float]:
    """Run cycles in all threads for `seconds`; return cycles per second and this process's CPU time per cycle in µs."""
    start, counts, faults = threading.Barrier(CLIENTS + 1), list[int](), list[Exception]()

    def one(host: str, provider: str) -> None:
        count = 0
        try:
            _run_cycle(host, provider)
            start.wait(30)
            end = perf_counter() + seconds
            while perf_counter() < end:
                _run_cycle(host, provider)
                count += 1
        except Exception as error:  # noqa: BLE001  (any error ends the bench, and its text is the reason)
            faults.append(error)
            start.abort()
        finally:
            counts.append(count)
            connection.close()

    threads = [threading.Thread(target=one, args=offers[n % len(offers)]) for n in range(CLIENTS)]
    for thread in threads:
        thread.start()
    with suppress(threading.BrokenBarrierError):
        start.wait(30)
    began, cpu = perf_counter(), process_time()
    for thread in threads:
        thread.join()
    if faults:
        raise MeasurementError(f"{CYCLE}: {type(faults[0]).__name__}: {faults[0]}")
    return sum(counts) / (perf_counter() - began), (process_time() - cpu) / sum(counts) * 1e6


def _run_cycle(host: str, provider: str) -> None:
    instance = str(uuid4())
    (uuid,) = binding.create_requests(PROFILE, CALLER)
    binding.bind_requests([binding.BindSpec(uuid, host, provider, instance)], CALLER)
    mine = "q.instance_uuid = %(instance)s::uuid"
    seen = REQUESTS.fetch_list(arguments.ListQuery(), MIN_VERSION, "", mine, instance=instance, project=None)
    if b'"state":"Bound"' not in seen:
        raise MeasurementError(f"{uuid} is bound, but reads {seen[:200]!r}")
    binding.unbind_requests([uuid], CALLER)
    binding.delete_requests([uuid], CALLER)
