"""Tests of cards and functions that come and go while the driver's process runs, on a simulated bus with uevents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import kernel

pytestmark = pytest.mark.slow


def run_on_simulated_bus(module: str, *words: str) -> list[str]:
    """Run a module on a simulated /sys of its own; return the lines that it prints."""
    if reason := kernel.why_level_1_is_missing():
        pytest.skip(reason)
    command = ["umockdev-wrapper", sys.executable, "-m", f"tests.drivers.pci.{module}", *words]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_pci_driver_discovers_plugged_and_unplugged_cards() -> None:
    assert run_on_simulated_bus("hotplug") == [
        "['0000:3b:00.0']",
        "['0000:3b:00.0', '10000:e1:00.0']",
        "['10000:e1:00.0']",
    ]


@pytest.mark.parametrize("driver", ["pci_driver", "generic_driver"])
def test_virtual_functions_made_by_a_plan_are_discovered_after_their_uevents(driver: str) -> None:
    card = "0000:01:00.0"
    assert run_on_simulated_bus("virtual", driver) == [
        f"0 [] bind no drivers to new virtual functions of {card}; make 2 virtual functions of {card}",
        "2 ['1', '2'] as wanted",
        f"0 [] make 2 virtual functions of {card}",
    ]
