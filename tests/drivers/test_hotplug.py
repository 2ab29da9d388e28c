"""A card that is plugged in and pulled out while the driver's process lives, on a simulated bus with real uevents."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


def test_the_driver_sees_a_card_come_and_go() -> None:
    wrapper = shutil.which("umockdev-wrapper")
    try:
        ctypes.CDLL("libumockdev.so.0")
    except OSError:
        wrapper = None
    if wrapper is None:
        pytest.skip("hot-plug is not tried here: the package umockdev is not installed")
    command = [wrapper, sys.executable, "-m", "tests.drivers.hotplug"]
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "['0000:3b:00.0']",
        "['0000:3b:00.0', '10000:e1:00.0']",
        "['10000:e1:00.0']",
    ]
