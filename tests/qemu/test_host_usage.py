"""Tests on a real kernel of what counts as used by the host: a disk that is claimed, and one that a program has open.

Debian's kernel has no ZFS and no VFIO device nodes, and the guest has no tools for RAID, device mapper and btrfs. These
are modelled in `tests/drivers/pci/test_host_usage.py` and `tests/drivers/pci/test_guest_usage.py`.
"""

from __future__ import annotations

import shlex
import sys

import pytest

from tests.qemu.conftest import DISK, GuestLab
from tests.system.product import ROOT

pytestmark = pytest.mark.qemu

HOLD = "import os, time; os.open('{node}', {flags}); open('/run/held', 'w').close(); time.sleep(600)"
LOOK = (
    "from drivers.machine import Machine; from drivers.pci.host_usage import find_functions_used_by_host as find; "
    f"print(find(Machine('guest'), ['{DISK}']).get('{DISK}', 'free'))"
)


def run_python(lab: GuestLab, code: str) -> str:
    """Run code of this checkout inside the guest, and return its output."""
    return lab.guest.run(f"cd {ROOT} && {sys.executable} -c {shlex.quote(code)}")


def look_while_held(lab: GuestLab, name: str, flags: str) -> tuple[str, str]:
    """Return why the host uses the disk, and whether it is claimed, while a process has its node open."""
    code = shlex.quote(HOLD.format(node=f"/dev/{name}", flags=flags))
    holder = lab.guest.run(f"rm -f /run/held; {sys.executable} -c {code} >/dev/null 2>&1 & echo $!")
    lab.guest.run("for _ in $(seq 300); do [ -e /run/held ] && exit; sleep 0.1; done; exit 1")
    number = lab.guest.run(f"cat /sys/class/block/{name}/dev")
    claimed = f"; print(Machine('guest').is_claimed('/dev/{name}', '{number}'))"
    try:
        use, is_claimed = run_python(lab, LOOK + claimed).splitlines()
    finally:
        lab.guest.run(f"kill {holder}")
    return use, is_claimed


def test_S3_a_disk_that_is_claimed_or_open_on_a_real_kernel_is_used_by_the_host(lab: GuestLab) -> None:
    lab.wait_for_device(DISK)
    name = lab.guest.run("cd /sys/class/block; for one in nvme*n1; do [ -e /dev/$one ] && echo $one; done; true")
    assert run_python(lab, LOOK) == "free"
    use, is_claimed = look_while_held(lab, name, "os.O_RDONLY | os.O_EXCL")
    assert f"has {name} open" in use and is_claimed == "True"
    use, is_claimed = look_while_held(lab, name, "os.O_RDWR")
    assert f"has {name} open" in use and is_claimed == "False", "only the open descriptor shows it"
    assert run_python(lab, LOOK) == "free"
