"""Kill parts of a running product in turn, in an order that a recorded seed decides."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from tests.bench.whole import children, command
from tests.fleet.installation import Installation

BACKENDS = """
SELECT pid FROM pg_stat_activity
WHERE datname = 'cyborg' AND backend_type = 'client backend' AND pid <> pg_backend_pid() ORDER BY pid
"""


def _find_child(there: Installation, word: str) -> list[int]:
    return [pid for pid in children(there.whole.supervisor) if word in command(pid)]


def _find_workers(there: Installation) -> list[int]:
    """All processes that django-q2's two sentinels have forked."""
    clusters = _find_child(there, "manage.py cluster")
    sentinels = [pid for cluster in clusters for pid in children(cluster)]
    return [pid for sentinel in sentinels for pid in children(sentinel)]


def _find_backends(there: Installation) -> list[int]:
    return [pid for (pid,) in there.rows(BACKENDS) or []]


FIND: dict[str, Callable[[Installation], list[int]]] = {
    "web": lambda there: _find_child(there, "cyborgweb.server.web_server"),
    "ingest cluster": lambda there: _find_child(there, "cluster ingest"),
    "work cluster": lambda there: _find_child(there, "cluster work"),
    "agent": lambda there: _find_child(there, "agents.host.main"),
    "PostgreSQL": lambda there: _find_child(there, str(there.lab.postgres.data)),
    "worker": _find_workers,
    "PostgreSQL backend": _find_backends,
}
"""How the processes of each part are found: the supervisor's five children, then what runs below two of them."""
PARTS = tuple(FIND)


def draw_order(parts: Sequence[str], chance: random.Random) -> Iterator[str]:
    """Yield the parts for ever: each once in every round, each round in a new order."""
    while True:
        yield from chance.sample(parts, len(parts))


@dataclass
class Killer:
    """Kills parts with SIGKILL, and counts them in `killed`; `missing` are those that did not come back in time."""

    there: Installation
    seed: int
    patience_s: float
    """How long a part may be away before it counts as not having come back."""
    killed: Counter[str] = field(default_factory=Counter)
    missing: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)

    def kill(self, part: str, meanwhile: Callable[[], None]) -> None:
        """Kill one process of `part` once there is one; `meanwhile` is called again and again until then.

        A process that ends between the look and the kill is not counted: the next one is looked for.
        """
        while pids := self.wait_for(part, meanwhile):
            with suppress(ProcessLookupError):
                os.kill(self.chance.choice(pids), signal.SIGKILL)
                self.killed[part] += 1
                return

    def wait_for(self, part: str, meanwhile: Callable[[], None]) -> list[int]:
        """Wait until `part` runs, and return its processes; [] and a note in `missing` after `patience_s`."""
        end = time.monotonic() + self.patience_s
        while time.monotonic() < end:
            try:
                if pids := FIND[part](self.there):
                    return pids
            except OSError:
                pass  # a process ended while its children were listed
            meanwhile()
        self.missing.append(part)
        return []

    def kill_in_turn(self, parts: Sequence[str], seconds: float, pause_s: float, look: Callable[[], None]) -> None:
        """Kill one part after another for `seconds`, and until each was killed once or is in `missing`.

        `look` is called between the kills.
        """
        killed_before, end = self.killed.copy(), time.monotonic() + seconds
        for part in draw_order(parts, self.chance):
            until = time.monotonic() + pause_s * self.chance.uniform(0.3, 1.7)
            while time.monotonic() < until:
                look()
            done = (self.killed[one] > killed_before[one] or one in self.missing for one in parts)
            if time.monotonic() >= end and all(done):
                return
            self.kill(part, look)
