"""Progress of a scenario: on a terminal one block that is overwritten, otherwise one line every few seconds."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from tests.fleet.installation import FleetSnapshot

EVERY_S = 5.0


class FleetView:
    """Shows snapshots: `view(snapshot)` prints one."""

    def __init__(self, title: str, count: int, devices: int, out: TextIO = sys.stdout) -> None:
        self._title, self._count, self._devices, self._out = title, count, devices, out
        self._began = time.monotonic()
        self._before: FleetSnapshot | None = None
        self._last_line_at = 0.0
        self._lines = 0

    def __call__(self, snapshot: FleetSnapshot) -> None:
        """Print one snapshot; on a terminal it replaces the last one."""
        rate = self._rates(snapshot)
        if self._out.isatty():
            lines = self._block(snapshot, rate)
            self._out.write(f"\x1b[{self._lines}F\x1b[J" if self._lines else "")
            self._out.write("\n".join(lines) + "\n")
            self._lines = len(lines)
        elif snapshot.at - self._last_line_at >= EVERY_S:
            self._last_line_at = snapshot.at
            self._out.write("  ".join(line.strip() for line in self._block(snapshot, rate)) + "\n")
        self._out.flush()

    def _rates(self, snapshot: FleetSnapshot) -> Callable[[str], str]:
        before, self._before = self._before or snapshot, snapshot
        took = max(snapshot.at - before.at, 1e-9)

        def rate(name: str) -> str:
            if name in snapshot.cpu:
                busy = (snapshot.cpu[name] - before.cpu.get(name, snapshot.cpu[name])) / took
                return f"{max(busy, 0.0):.0%}"
            return f"{(snapshot.counts.get(name, 0) - before.counts.get(name, 0)) / took:.0f}/s"

        return rate

    def _block(self, snapshot: FleetSnapshot, rate: Callable[[str], str]) -> list[str]:
        full = self._count * self._devices
        database = (
            f"spool {snapshot.spool} ({snapshot.spool_s:.1f} s old)  devices {snapshot.devices} of {full}"
            f"  hosts up {snapshot.up}"
            if snapshot.spool is not None
            else "the database does not answer"
        )
        cpu = "  ".join(f"{name} {rate(name)}" for name in snapshot.cpu)
        acknowledged = snapshot.counts.get("acknowledged", 0)
        return [
            f"{self._title}  {snapshot.at - self._began:6.1f} s",
            f"  agents   {snapshot.connected} of {self._count}  told to come back {snapshot.sent_away}"
            f"  otherwise failed {sum(snapshot.refused.values()) - snapshot.sent_away}  owe a report {snapshot.owing}",
            f"  traffic  beats {rate('beats')}  reports {rate('reports')}  acknowledged {acknowledged}"
            f"  samples {rate('samples')}",
            f"  tables   {database}",
            f"  CPU      {cpu}  web {snapshot.web_kb / 1024:.0f} MB",
        ]
