"""A driver that evaluates an expression for each call. `drivers.isolation.driver_main` runs it like any other driver.

Discovery evaluates `settings["see"]`, a plan `ask.layout["do"]`, and samples the device's own key.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

from drivers import catalogue
from drivers.base import Driver, Findings, Settings
from drivers.inventory import Sample
from drivers.isolation import driver_main
from drivers.isolation.runner import DriverProcess
from drivers.machine import Machine
from drivers.plan import Act, Ask, Plan, Vitals

WORDS = """
import os, socket, subprocess, threading, time
from drivers.errors import *
from drivers.inventory import *
from drivers.plan import *
from drivers.base import Findings
def throw(error): raise error
def to(path, **more): return Plan((Step("a step", Write(path, "1"), **more),))
"""
WRITES = ("/sys/bus/pci/devices/*/sriov_numvfs", "/state/*")


class Actor(Driver):
    """Does whatever the expressions say, like a hostile or broken driver."""

    name: ClassVar[str] = "actor"
    writes: ClassVar[tuple[str, ...]] = WRITES
    acts: ClassVar[tuple[Act, ...]] = ("install",)
    releases = 0

    def discover(self, machine: Machine, settings: Settings) -> Findings:
        """Evaluate `settings["see"]`, which can use `machine`, and `releases`, the number of calls of `release`."""
        return evaluate(str(settings["see"]), machine=machine, releases=self.releases)  # type: ignore[return-value]

    def release(self) -> None:
        """Count this call."""
        self.releases += 1

    def health(self, machine: Machine, settings: Settings, ask: Ask) -> Vitals:
        """Return `ok` if `ask.layout` has a value; otherwise raise Unsupported, as a driver without `health` does."""
        return Vitals("ok") if ask.layout else super().health(machine, settings, ask)

    def stats(self, machine: Machine, settings: Settings, ask: Ask) -> tuple[Sample, ...]:
        """Evaluate the device's key."""
        return evaluate(ask.key, key=ask.key)  # type: ignore[return-value]

    def install(self, machine: Machine, settings: Settings, ask: Ask) -> Plan:
        """Evaluate `ask.layout["do"]`."""
        return evaluate(ask.layout["do"])  # type: ignore[return-value]


def evaluate(expression: str, **names: object) -> object:
    """Return the value of an expression, which can use the names of WORDS."""
    exec(WORDS, names)
    return eval(expression, names)


def start_actor(
    discover_expression: str = "Findings()", deadline_s: float = 10.0, machine: Machine | None = None
) -> DriverProcess:
    """Return an Actor in a process of its own, as the agent runs drivers."""
    command = [sys.executable, str(Path(__file__)), "actor"]
    settings = {"see": discover_expression}
    return DriverProcess("actor", "n", settings, deadline_s=deadline_s, command=command, machine=machine)


if __name__ == "__main__":
    catalogue.load_driver = lambda name: Actor()
    sys.exit(driver_main.main())
