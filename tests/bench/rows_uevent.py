"""Rows of hot-plug: the time from a card's uevent until the API shows it. Only the bus is simulated.

The clock starts before the uevent is sent, so the debounce (CYBORG_UEVENT_DEBOUNCE_MS) is included.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic, sleep

from agents import authentication
from agents.host.settings import AgentSettings
from tests.bench.figures import Row, median
from tests.bench.lab import Lab
from tests.bench.product import RunningProduct, api_token
from tests.bench.promises import UEVENT
from tests.bench.remote_calls import ROOT, MeasurementError
from tests.bench.visibility import DeviceListClient

HOST = "uevent.bench"
RULES = '[pci_driver]\nrules = [{ vendor = "10de" }]\n'
AGAINST = "idle, debounce included"
Plug = Callable[[int], float]


def rows(lab: Lab, product: RunningProduct, samples: int, progress: Callable[[str], None]) -> list[Row]:
    """Return two rows, p50 and p99; print a warning and return [] if umockdev is not installed."""
    if not _has_umockdev():
        progress("NOT MEASURED: uevent to API (the package umockdev is not installed)")
        return []
    progress(f"from a card's uevent to GET /v2/devices, {samples} times")
    api, times = DeviceListClient(product.port, api_token(), HOST), list[float]()
    with _run_host(lab, product.port) as plug:
        plug(0)
        api.wait_for(_quote_product(0))  # the agent has joined and reported
        for number in range(1, samples + 1):
            sleep(0.05 + 0.037 * (number % 3))
            began = plug(number)
            api.wait_for(_quote_product(number))
            times.append((monotonic() - began) * 1000)
    times.sort()
    last = times[min(len(times) - 1, len(times) * 99 // 100)]
    note = f"of which CYBORG_UEVENT_DEBOUNCE_MS {AgentSettings.uevent_debounce_ms} ms; the shortest {times[0]:.0f} ms"
    return [
        Row(f"{UEVENT}, p50", median(times), "ms", AGAINST, 300.0, note=note),
        Row(f"{UEVENT}, p99", last, "ms", AGAINST, 1000.0, note=f"of {samples}; the longest {times[-1]:.0f} ms"),
    ]


def _has_umockdev() -> bool:
    try:
        ctypes.CDLL("libumockdev.so.0")
    except OSError:
        return False
    return shutil.which("umockdev-wrapper") is not None


def _quote_product(number: int) -> bytes:
    return f'"{0x1000 + number:04x}"'.encode()


@contextmanager
def _run_host(lab: Lab, port: int) -> Iterator[Plug]:
    """Run a simulated host, whose agent starts with the first card; yield a function that plugs in card `number`.

    The function returns the monotonic time just before the uevent.
    """
    home = lab.home / "uevent"
    home.mkdir()
    (home / "drivers.toml").write_text(RULES)
    token = authentication.create_join_token(HOST, address=f"http://127.0.0.1:{port}", hours=1, created_by="bench")
    environment = os.environ | {
        "CYBORG_JOIN_TOKEN": token,
        "CYBORG_HOST_NODE": "uevent",
        "CYBORG_AGENT_STATE_DIR": str(home),
        "CYBORG_ENABLED_DRIVERS": "pci_driver",
        "CYBORG_DRIVER_SETTINGS": str(home / "drivers.toml"),
        "CYBORG_PARENT": str(os.getpid()),
    }
    command = ["umockdev-wrapper", sys.executable, "-m", "tests.bench.simulated_host"]
    with lab.open_log("uevent") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, cwd=ROOT, env=environment
        )
    assert process.stdin and process.stdout
    ask, answers = process.stdin, process.stdout

    def plug(number: int) -> float:
        bus, slot = divmod(number, 32)
        ask.write(f"0000:{bus + 1:02x}:{slot:02x}.0 {0x1000 + number:04x}\n")
        ask.flush()
        if not (line := answers.readline()):
            raise MeasurementError(f"the simulated host ended: {(lab.home / 'uevent.log').read_text()[-500:]}")
        return float(line)

    try:
        yield plug
    finally:
        ask.close()
        process.wait()
