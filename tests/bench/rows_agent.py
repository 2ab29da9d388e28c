"""Rows of a compute host: memory and CPU of the real, connected agent and its drivers while nothing happens."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic, sleep

from tests.bench.figures import Row, cpu_s, rss_kb
from tests.bench.product import RunningProduct, get_command_line, list_children


def rows(product: RunningProduct, seconds: float, progress: Callable[[str], None]) -> list[Row]:
    """Return three rows: memory of the agent, memory of its largest driver, and CPU of all of them together."""
    progress(f"the agent and its drivers at rest, for {seconds:.0f} s")
    agent = product.child("agents.host.main")
    drivers = [pid for pid in list_children(agent) if "drivers.isolation.driver_main" in get_command_line(pid)]
    everyone = [agent, *drivers]
    before, began = [cpu_s(pid) for pid in everyone], monotonic()
    sleep(seconds)
    spent = [cpu_s(pid) - was for pid, was in zip(everyone, before, strict=True)]
    percent = 100 / (monotonic() - began)
    memory = [rss_kb(pid) / 1000 for pid in drivers]
    names = ", ".join(f"{get_command_line(pid).split()[-1]} {mb:.1f}" for pid, mb in zip(drivers, memory, strict=True))
    cpu_note = (
        f"agent {spent[0] * percent:.2f} %, drivers {sum(spent[1:]) * percent:.2f} %; beats and looks as they come"
    )
    has_drivers = bool(drivers)
    return [
        Row("agent process", rss_kb(agent) / 1000, "MB", "RSS", 50.0, holds=has_drivers),
        Row(
            "each driver process",
            max(memory, default=0.0),
            "MB",
            "RSS of the largest",
            26.0,
            note=names,
            holds=has_drivers,
        ),
        Row(
            "agent and drivers at rest", sum(spent) * percent, "%", "of one core", 0.5, note=cpu_note, holds=has_drivers
        ),
    ]
