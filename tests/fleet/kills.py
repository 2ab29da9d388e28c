"""Kill parts of a running product in turn, in an order that follows from a recorded seed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tests.bench.product import get_command_line, list_children
from tests.fleet.installation import Installation

BACKENDS = """
SELECT pid FROM pg_stat_activity
WHERE datname = 'cyborg' AND backend_type = 'client backend' AND pid <> pg_backend_pid() ORDER BY pid
"""


def _find_children_by_command(installation: Installation, word: str) -> list[int]:
    return [pid for pid in list_children(installation.product.supervisor) if word in get_command_line(pid)]


def _find_workers(installation: Installation) -> list[int]:
    """Return all processes that the sentinels of the two django-q2 clusters have forked."""
    clusters = _find_children_by_command(installation, "manage.py cluster")
    sentinels = [pid for cluster in clusters for pid in list_children(cluster)]
    return [pid for sentinel in sentinels for pid in list_children(sentinel)]


def _find_backends(installation: Installation) -> list[int]:
    return [pid for (pid,) in installation.query(BACKENDS) or []]


FIND: dict[str, Callable[[Installation], list[int]]] = {
    "web": lambda installation: _find_children_by_command(installation, "cyborgweb.server.web_server"),
    "ingest cluster": lambda installation: _find_children_by_command(installation, "cluster ingest"),
    "work cluster": lambda installation: _find_children_by_command(installation, "cluster work"),
    "agent": lambda installation: _find_children_by_command(installation, "agents.host.main"),
    "PostgreSQL": lambda installation: _find_children_by_command(installation, str(installation.lab.postgres.data)),
    "worker": _find_workers,
    "PostgreSQL backend": _find_backends,
}
"""Functions that find the processes of each part: five children of the supervisor, django-q2 workers, backends."""
PARTS = tuple(FIND)


def draw_order(parts: Sequence[str], chance: random.Random) -> Iterator[str]:
    """Yield the parts for ever; each round has every part once, in a new order."""
    while True:
        yield from chance.sample(parts, len(parts))


@dataclass
class Killer:
    """Kills parts with SIGKILL and counts them in `killed`; `missing` lists parts that did not come back in time."""

    installation: Installation
    seed: int
    patience_s: float
    """How long a part may be absent before it is added to `missing`."""
    killed: Counter[str] = field(default_factory=Counter)
    missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def kill(self, part: str, meanwhile: Callable[[], None]) -> None:
        """Wait until `part` has a process, calling `meanwhile` repeatedly, and kill one.

        A process that ends after it was found and before the kill is not counted; then the next one is killed.
        """
        while pids := self.wait_for(part, meanwhile):
            with suppress(ProcessLookupError):
                os.kill(self.chance.choice(pids), signal.SIGKILL)
                self.killed[part] += 1
                return

    def wait_for(self, part: str, meanwhile: Callable[[], None]) -> list[int]:
        """Wait until `part` runs and return its processes; after `patience_s` add it to `missing` and return []."""
        end = time.monotonic() + self.patience_s
        while time.monotonic() < end:
            try:
                if pids := FIND[part](self.installation):
                    return pids
            except OSError:
                pass  # a process ended while its children were listed
            meanwhile()
        self.missing.append(part)
        return []

    def kill_in_turn(self, parts: Sequence[str], seconds: float, pause_s: float, watch: Callable[[], None]) -> None:
        """Kill one part after another for at least `seconds`, and until each was killed once or is in `missing`.

        Between the kills `watch` is called repeatedly; `pause_s` is the mean pause.
        """
        killed_before, end = self.killed.copy(), time.monotonic() + seconds
        for part in draw_order(parts, self.chance):
            until = time.monotonic() + pause_s * self.chance.uniform(0.3, 1.7)
            while time.monotonic() < until:
                watch()
            done = (self.killed[one] > killed_before[one] or one in self.missing for one in parts)
            if time.monotonic() >= end and all(done):
                return
            self.kill(part, watch)
