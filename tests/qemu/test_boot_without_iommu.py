"""Tests on a real kernel without an IOMMU: no device is offered, and the reason says what the operator has to do."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Literal

import pytest

from tests.qemu import boot, prepare
from tests.qemu.conftest import CARD, DISK, GPU, PLAIN_DISKS
from tests.system.product import ROOT

pytestmark = pytest.mark.qemu

LOOK = """
from drivers.machine import Machine
from drivers.pci.functions import PciDriver
driver, rules = PciDriver(), [{"vendor": "1b36", "product": "0010"}, {"class": "0200"}, {"class": "0380"}]
found = driver.discover(Machine("guest"), {"rules": rules})
print(driver.probe(Machine("guest"), {"rules": rules}), found.devices)
for fault in found.faults:
    print(fault.subject, fault.reason)
"""


@pytest.mark.parametrize(
    ("iommu", "remedy"),
    [
        ("off", "remove intel_iommu=off from the kernel's command line"),
        ("absent", "add intel_iommu=on to the kernel's command line, and switch VT-d on in the firmware"),
    ],
)
def test_S3_without_an_iommu_each_device_is_a_fault_that_names_the_kernel_parameter(
    iommu: Literal["off", "absent"], remedy: str, tmp_path: Path
) -> None:
    if why := prepare.explain_missing():
        pytest.skip(f"SKIPPED LEVEL 3: {why}")
    with boot.running("alone", tmp_path, iommu) as guest:
        guest.wait_until_up()
        assert guest.run("ls /sys/kernel/iommu_groups") == "", "the kernel has an IOMMU"
        limits, *lines = guest.run(f"cd {ROOT} && {sys.executable} -c {shlex.quote(LOOK)}").splitlines()
    assert remedy in limits and limits.endswith(" ()"), "something is offered"
    faults = dict(line.split(" ", 1) for line in lines)
    assert {DISK, CARD, GPU, *PLAIN_DISKS} <= faults.keys()
    assert all(f"no guest can get it: no IOMMU: {remedy}" in faults[one] for one in (DISK, CARD, GPU, *PLAIN_DISKS))
