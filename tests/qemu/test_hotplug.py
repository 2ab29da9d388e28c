"""Tests of hot-plug on a real kernel: what the API shows if a disk is plugged in or removed, or the agent is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.qemu import prepare
from tests.qemu.conftest import DISK, HOST, GuestLab
from tests.support.webserver import until
from tests.system import processes
from tests.system.product import ROOT

pytestmark = pytest.mark.qemu

PLUGGED_ADDRESS = "0000:02:00.0"
"""The PCI address of a device in the slot `free1`."""


def test_the_disk_of_the_guest_is_reported_as_a_device(lab: GuestLab) -> None:
    disk = lab.wait_for_device(DISK, status="ok")
    assert (disk["host"]["name"], disk["type"], disk["vendor"], disk["state"]) == (HOST, "SSD", "1b36", "inactive")
    assert disk["kernel_driver"] == "nvme"


def test_a_plugged_disk_appears_and_a_pulled_one_is_missing(lab: GuestLab) -> None:
    lab.wait_for_device(DISK)
    lab.guest.qmp("device_add", driver="nvme", id="hot", bus="free1", serial="HOT1")
    appeared = lab.wait_for_device(PLUGGED_ADDRESS, state="inactive")
    assert appeared["type"] == "SSD"
    lab.guest.qmp("device_del", id="hot")
    lab.wait_for_device(PLUGGED_ADDRESS, state="missing")
    assert lab.wait_for_device(DISK)["state"] == "inactive"


def test_a_killed_agent_keeps_known_devices_and_reports_new_ones_after_a_restart(lab: GuestLab) -> None:
    before = lab.wait_for_device(DISK)
    lab.kill_agent()
    lab.guest.qmp("device_add", driver="nvme", id="meanwhile", bus="free2", serial="HOT2")
    lab.start_agent()
    lab.wait_for_device("0000:03:00.0", state="inactive")
    after = lab.wait_for_device(DISK)
    assert (after["uuid"], after["state_since"]) == (before["uuid"], before["state_since"])
    # The gateway stores heartbeats every five seconds; a report may be visible earlier.
    until(lambda: [one["state"] for one in lab.ask("agents/")["results"] if one["host"]["name"] == HOST] == ["up"])


def test_a_guest_ends_when_its_parent_process_is_killed(tmp_path: Path) -> None:
    if why := prepare.explain_missing():
        pytest.skip(f"SKIPPED LEVEL 3: {why}")
    code = (
        "import sys, time; from pathlib import Path; from tests.qemu.boot import Guest\n"
        "guest = Guest('g', Path(sys.argv[1])); guest.start(); guest.wait_until_up(); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT)
    until(lambda: [one for one in processes.list_descendants(parent.pid) if one.command.startswith("qemu")])
    guests = processes.list_descendants(parent.pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    until(lambda: not processes.still_running(guests))
