"""Rows of samples: the CPU that watched hosts cost the web process, and the effect on the latency of heartbeats.

This process is the watcher: it reads the samples of all hosts once a second, as a page of the console does. The agents
send as the gateway asks them to. Each round has a turn with a watcher and one without. Their order alternates, because
after a turn with a watcher the agents go on for FOR_S.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

from tests.bench import fixtures
from tests.bench.figures import Row, cpu_s, median
from tests.bench.lab import Generator, Lab, Server, run_server
from tests.bench.remote_calls import MeasurementError

DEVICES, METRICS = 8, 6
EVERY_S, FOR_S = 1.0, 10.0
"""The interval and duration that the page of a host asks for."""
PAUSE_S = 2.0
PATIENCE_S = 30.0


@dataclass(frozen=True)
class Size:
    """Number of hosts, of rounds, and seconds of each round."""

    hosts: int
    rounds: int
    seconds: float


@dataclass(frozen=True)
class Turn:
    """One round: cores used by the web process, samples per second, hosts with known samples, heartbeat p99 in ms."""

    cores: float
    rate: float
    known: int
    p99_ms: float


def rows(lab: Lab, generator: Generator, size: Size, progress: Callable[[str], None]) -> list[Row]:
    """Return two rows: the CPU of the web process, and the latency of heartbeats while samples arrive."""
    progress(f"samples of {size.hosts} watched hosts")
    hosts = fixtures.enrol(size.hosts)
    quiet: list[Turn] = []
    watched: list[Turn] = []
    with run_server(lab, "product", CYBORG_LEASE_FLUSH_S="1") as server:
        generator.connect("watched", server.port, size.hosts)
        generator.ask("start_sampling", group="watched", devices=DEVICES, pause=PAUSE_S)
        for number in range(size.rounds):
            for is_watched in (False, True) if number % 2 == 0 else (True, False):
                if is_watched:
                    _wait_until(lambda: len(_request_loads(hosts)) == size.hosts, "every host's samples")
                    sleep(EVERY_S)
                    watched.append(_run_turn(generator, server, hosts, size.seconds))
                else:
                    _wait_until(lambda: _count_samples(generator) == 0, "the end of samples")
                    quiet.append(_run_turn(generator, server, [], size.seconds))
        generator.ask("close", group="watched")
    return _make_rows(size, quiet, watched)


def _count_samples(generator: Generator) -> int:
    """Return how many samples arrive in half a second."""
    return int(generator.ask("measure_sampling", group="watched", seconds=0.5)["samples"])


def _make_rows(size: Size, quiet: list[Turn], watched: list[Turn]) -> list[Row]:
    cores, rate = median([turn.cores for turn in watched]), median([turn.rate for turn in watched])
    idle = median([turn.cores for turn in quiet])
    known = min(turn.known for turn in watched)
    p99, before = median([turn.p99_ms for turn in watched]), median([turn.p99_ms for turn in quiet])
    ratio = median([one.p99_ms / max(other.p99_ms, 1e-3) for one, other in zip(quiet, watched, strict=True)])
    per_sample = (cores - idle) / max(rate, 1.0) * 1e6
    what = f"{size.hosts} hosts, {DEVICES} devices of {METRICS} values each"
    note = f"{what}; {rate:.0f} messages/s, {idle:.1%} of a core without; a watcher reads {known} hosts a second"
    beats = f"{what}, a Beat in {PAUSE_S:.0f} s each; p99"
    return [
        Row(
            "samples: web process",
            cores * 100,
            "% of a core",
            "",
            30.0,
            cpu_us=per_sample,
            note=note,
            holds=rate > 0.8 * size.hosts / EVERY_S and known > 0.95 * size.hosts,
        ),
        Row("Beats beside samples", p99, "ms", "without samples", 0.5, before, ratio, note=beats),
    ]


def _run_turn(generator: Generator, server: Server, hosts: list[int], seconds: float) -> Turn:
    """Measure one round in which `hosts` are watched."""
    known: list[int] = []
    over = Event()

    def watch() -> None:
        while hosts and not over.is_set():
            known.append(len(_request_loads(hosts)))
            over.wait(EVERY_S)

    reader = Thread(target=watch)
    before = cpu_s(server.pid)
    reader.start()
    found = generator.ask("measure_sampling", group="watched", seconds=seconds)
    spent = cpu_s(server.pid) - before
    over.set()
    reader.join()
    return Turn(spent / seconds, found["samples"] / seconds, min(known, default=0), found["p99_ms"])


def _request_loads(hosts: list[int]) -> dict[int, Any]:
    from agents import telemetry

    return telemetry.request_periodic_loads(hosts, EVERY_S, FOR_S).hosts


def _wait_until(condition: Callable[[], bool], what: str) -> None:
    end = monotonic() + PATIENCE_S
    while not condition():
        if monotonic() > end:
            raise MeasurementError(f"{what}: not within {PATIENCE_S:.0f} s")
        sleep(0.3)
