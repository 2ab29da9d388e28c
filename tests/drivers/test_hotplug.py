"""Cards and functions that come and go while the driver's process lives, on a simulated bus with real uevents."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import kernel


def run(module: str, *words: str) -> list[str]:
    """What a script says that runs on a simulated /sys of its own."""
    if reason := kernel.why_not():
        pytest.skip(reason)
    command = ["umockdev-wrapper", sys.executable, "-m", f"tests.drivers.{module}", *words]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_driver_sees_a_card_come_and_go() -> None:
    assert run("hotplug") == [
        "['0000:3b:00.0']",
        "['0000:3b:00.0', '10000:e1:00.0']",
        "['10000:e1:00.0']",
    ]


@pytest.mark.parametrize("driver", ["pci_driver", "generic_driver"])
def test_virtual_functions_that_a_plan_made_are_seen_by_their_uevents(driver: str) -> None:
    card = "0000:01:00.0"
    assert run("virtual", driver) == [
        f"0 [] bind no drivers to new virtual functions of {card}; make 2 virtual functions of {card}",
        "2 ['1', '2'] as wanted",
        f"0 [] make 2 virtual functions of {card}",
    ]
