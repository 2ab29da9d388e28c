"""Rows of the commands: from a row's commit until its agent has it, and whether any is lost where rings are.

The rows are made here as everybody makes them, by `accelerators.commands.command_queue`; the product's web process
delivers them. A ring that is to be lost goes to a channel on which nobody listens.
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
from tests.bench.orders import CannotMeasure
from tests.bench.promises import COMMAND
from tests.bench.whole import Whole

AGENTS = 200
LONGEST_S = 30.0
NOWHERE = "bench_nowhere"


@dataclass
class Arrivals:
    """When each command came to its agent first."""

    generator: Generator
    first: dict[int, float] = field(default_factory=dict)
    again: int = 0
    """Came although they had come."""

    def until(self, placed: Collection[int]) -> float:
        """Until each of these has come, or for LONGEST_S; the seconds it took."""
        began = monotonic()
        while not self.first.keys() >= set(placed) and monotonic() < began + LONGEST_S:
            sleep(0.02)
            for number, at in self.generator.ask("came")["came"]:
                self.again += number in self.first
                self.first.setdefault(number, at)
        return monotonic() - began


def rows(whole: Whole, generator: Generator, samples: int, many: int, progress: Callable[[str], None]) -> list[Row]:
    """Three figures: the middle, the worst but one in a hundred, and how many were lost."""
    progress(f"{samples} commands to {AGENTS} agents one by one, then {many} of which every second ring is lost")
    hosts = fixtures.enrol(AGENTS)
    if refused := generator.ask("obey", group="commands", port=whole.port, count=AGENTS)["refused"]:
        raise CannotMeasure(f"agents were refused: {refused}")
    chance, arrivals = random.Random(1), Arrivals(generator)
    arrivals.until(dict(_place(chance.choice(hosts)) for _ in range(20)))  # warms up
    placed = dict[int, float]()
    for _ in range(samples):
        placed |= [_place(chance.choice(hosts))]
        sleep(chance.uniform(0.005, 0.025))
    arrivals.until(placed)
    found = [_latency(arrivals, placed, name, bound) for name, bound in (("p50", 5.0), ("p99", 25.0))]
    found.append(_lost(arrivals, hosts, many, chance))
    generator.ask("close", group="commands")
    with connection.cursor() as cursor:
        cursor.execute("TRUNCATE accelerators_command")
    return found


def _place(host: int) -> tuple[int, float]:
    """A command for this host: its number, and the monotonic clock right after its commit, before the ring."""
    committed: list[float] = []
    with conductor.writing():
        transaction.on_commit(lambda: committed.append(monotonic()))
        (made,) = command_queue.place_commands([CommandOrder("rescan", host=host, actor="bench")])
    return made.id, committed[0]


def _latency(arrivals: Arrivals, placed: dict[int, float], which: str, bound: float) -> Row:
    times = sorted((arrivals.first[number] - at) * 1000 for number, at in placed.items() if number in arrivals.first)
    if len(times) < len(placed):
        raise CannotMeasure(f"{len(placed) - len(times)} of {len(placed)} commands did not arrive in {LONGEST_S:.0f} s")
    value = median(times) if which == "p50" else times[len(times) * 99 // 100]
    note = f"of {len(times)} to {AGENTS} agents at random; from {times[0]:.1f} to {times[-1]:.1f} ms"
    return Row(f"{COMMAND}, {which}", value, "ms", "idle, from its commit", bound, note=note)


def _lost(arrivals: Arrivals, hosts: list[int], many: int, chance: random.Random) -> Row:
    channel, again, unheard, began = pubsub.CHANNEL, arrivals.again, 0, monotonic()
    placed: dict[int, float] = {}
    try:
        for _ in range(many):
            heard = chance.random() < 0.5
            pubsub.CHANNEL = channel if heard else NOWHERE
            placed |= [_place(chance.choice(hosts))]
            unheard += not heard
    finally:
        pubsub.CHANNEL = channel
    rate = many / (monotonic() - began)
    last = arrivals.until(placed)
    lost = len(placed.keys() - arrivals.first.keys())
    times = [(arrivals.first[number] - at) * 1000 for number, at in placed.items() if number in arrivals.first]
    note = (
        f"{rate:.0f} placed a second, {unheard} rings lost; p50 {median(times):.0f} ms, the last {last:.1f} s after the"
        f" last was placed; {arrivals.again - again} came twice"
    )
    return Row(f"commands lost of {many}", lost, "", "every second ring lost", 0, note=note)
