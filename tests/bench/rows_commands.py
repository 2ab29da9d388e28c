"""Rows of commands: the time from a command's commit until its agent has it, and whether any is lost with its NOTIFY.

The commands are placed here by `accelerators.commands.command_queue`, as the product does; the product's web process
delivers them. A NOTIFY is lost by sending it to a channel on which no process listens.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from time import monotonic, sleep

from django.db import connection, transaction

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandOrder
from accelerators.runtime import pubsub
from tests.bench import fixtures
from tests.bench.figures import Row, median
from tests.bench.lab import Generator
from tests.bench.product import RunningProduct
from tests.bench.promises import COMMAND
from tests.bench.remote_calls import MeasurementError

AGENTS = 200
LONGEST_S = 30.0
NOWHERE = "bench_nowhere"


@dataclass
class Arrivals:
    """When each command first arrived at its agent."""

    generator: Generator
    first: dict[int, float] = field(default_factory=dict)
    repeated: int = 0
    """Number of commands that arrived more than once."""

    def wait_for(self, placed: Collection[int]) -> float:
        """Wait until all `placed` commands have arrived, or for LONGEST_S; return the seconds this took."""
        began = monotonic()
        while not self.first.keys() >= set(placed) and monotonic() < began + LONGEST_S:
            sleep(0.02)
            for number, at in self.generator.ask("take_arrivals")["arrivals"]:
                self.repeated += number in self.first
                self.first.setdefault(number, at)
        return monotonic() - began


def rows(
    product: RunningProduct, generator: Generator, samples: int, many: int, progress: Callable[[str], None]
) -> list[Row]:
    """Return three rows: p50 and p99 of the time to the agent, and the number of lost commands."""
    progress(f"{samples} commands to {AGENTS} agents one by one, then {many} of which every second ring is lost")
    hosts = fixtures.enrol(AGENTS)
    connected = generator.ask("connect_command_receivers", group="commands", port=product.port, count=AGENTS)
    if refused := connected["refused"]:
        raise MeasurementError(f"agents were refused: {refused}")
    chance, arrivals = random.Random(1), Arrivals(generator)
    arrivals.wait_for(dict(_place_command(chance.choice(hosts)) for _ in range(20)))  # warm-up
    placed = dict[int, float]()
    for _ in range(samples):
        placed |= [_place_command(chance.choice(hosts))]
        sleep(chance.uniform(0.005, 0.025))
    arrivals.wait_for(placed)
    found = [_make_latency_row(arrivals, placed, name, bound) for name, bound in (("p50", 5.0), ("p99", 25.0))]
    found.append(_measure_lost(arrivals, hosts, many, chance))
    generator.ask("close", group="commands")
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE accelerators_command")
    return found


def _place_command(host: int) -> tuple[int, float]:
    """Place a command; return its number and the monotonic time right after its commit, before the NOTIFY."""
    committed: list[float] = []
    with conductor.writing():
        transaction.on_commit(lambda: committed.append(monotonic()))
        (made,) = command_queue.place_commands([CommandOrder("rescan", host=host, actor="bench")])
    return made.id, committed[0]


def _make_latency_row(arrivals: Arrivals, placed: dict[int, float], which: str, bound: float) -> Row:
    times = sorted((arrivals.first[number] - at) * 1000 for number, at in placed.items() if number in arrivals.first)
    if len(times) < len(placed):
        raise MeasurementError(
            f"{len(placed) - len(times)} of {len(placed)} commands did not arrive in {LONGEST_S:.0f} s"
        )
    value = median(times) if which == "p50" else times[len(times) * 99 // 100]
    note = f"of {len(times)} to {AGENTS} agents at random; from {times[0]:.1f} to {times[-1]:.1f} ms"
    return Row(f"{COMMAND}, {which}", value, "ms", "idle, from its commit", bound, note=note)


def _measure_lost(arrivals: Arrivals, hosts: list[int], many: int, chance: random.Random) -> Row:
    channel, repeated, lost_notifies, began = pubsub.CHANNEL, arrivals.repeated, 0, monotonic()
    placed: dict[int, float] = {}
    try:
        for _ in range(many):
            delivered = chance.random() < 0.5
            pubsub.CHANNEL = channel if delivered else NOWHERE
            placed |= [_place_command(chance.choice(hosts))]
            lost_notifies += not delivered
    finally:
        pubsub.CHANNEL = channel
    rate = many / (monotonic() - began)
    last = arrivals.wait_for(placed)
    lost = len(placed.keys() - arrivals.first.keys())
    times = [(arrivals.first[number] - at) * 1000 for number, at in placed.items() if number in arrivals.first]
    note = (
        f"{rate:.0f} placed a second, {lost_notifies} rings lost; p50 {median(times):.0f} ms, the last {last:.1f} s"
        f" after the last was placed; {arrivals.repeated - repeated} came twice"
    )
    return Row(f"commands lost of {many}", lost, "", "every second ring lost", 0, note=note)
