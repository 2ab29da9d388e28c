"""Tests of cards on a real kernel: companion functions, the boot display, equal serial numbers, cards that are pulled.

The tests run in this order, because the network card of one is that of the next.
"""

from __future__ import annotations

import pytest

from tests.qemu.boot import TWIN
from tests.qemu.conftest import AUDIO, BOOT_DISPLAY, CARD, GPU, SECOND_CARD, SERIAL_PORT, START_S, GuestLab

pytestmark = pytest.mark.qemu

SERIAL_KEY = "serial:8086:525400ffff000007:0"
"""The key of a card with the serial number that QEMU makes of the address of `TWIN`."""
OPEN_FUNCTION = """
import fcntl, os, sys, time
address, kind = sys.argv[1], ord(";") << 8
group = os.path.basename(os.readlink(f"/sys/bus/pci/devices/{address}/iommu_group"))
container, node = os.open("/dev/vfio/vfio", os.O_RDWR), os.open(f"/dev/vfio/{group}", os.O_RDWR)
status = fcntl.ioctl(node, kind | 103, bytes([8, 0, 0, 0, 0, 0, 0, 0]))
assert status[4] & 1, "the group is not viable: a driver of the host has one of its functions"
fcntl.ioctl(node, kind | 104, container.to_bytes(4, "little"))
fcntl.ioctl(container, kind | 102, 1)
fcntl.ioctl(node, kind | 106, address.encode() + bytes(1))
open("/run/held", "w").close()
time.sleep(600)
"""
"""Opens a function as the program of a guest does, until it is killed: group status, set container, set IOMMU, get
device (include/uapi/linux/vfio.h)."""


def enable(lab: GuestLab, address: str) -> str:
    """Enable the device at an address, wait until it is ready, and return its uuid."""
    device: str = lab.wait_for_device(address, state="inactive")["uuid"]
    lab.ask(f"devices/{device}/enable/", reason="for guests")
    lab.wait_for_device(address, state="ready")
    return device


def plug_twin(lab: GuestLab, name: str, slot: str) -> None:
    """Plug a network card with the serial number of `SERIAL_KEY` into a slot."""
    driver, _, address = TWIN.partition(",mac=")
    lab.guest.qmp("device_add", driver=driver, mac=address, id=name, bus=slot)


def is_refused_for_its_guest(lab: GuestLab, card: str) -> bool:
    """Return whether the host has said that a guest still uses the released card (uuid). Fails if the card is free."""
    waiting = lab.describe_releases(card)
    assert waiting, "the card is free although its guest has it open"
    return f"a guest still uses {CARD}" in "".join(waiting)


def wait_until_gone(lab: GuestLab, address: str) -> None:
    """Wait until the guest's kernel has removed a function."""
    lab.guest.run(f"for _ in $(seq 300); do [ -e /sys/bus/pci/devices/{address} ] || exit 0; sleep 0.1; done; exit 1")


def test_S3_the_boot_display_is_refused_and_a_gpu_is_given_with_its_companion_functions(lab: GuestLab) -> None:
    gpu = lab.wait_for_device(GPU, state="inactive")["uuid"]
    assert lab.read_kernel_driver(SERIAL_PORT) == "serial", "the host's own driver has a function of the card"
    assert not {AUDIO, SERIAL_PORT, BOOT_DISPLAY} & lab.devices().keys()
    assert lab.read_faults()[BOOT_DISPLAY] == "the host uses it: it is the display that the machine started with"
    enable(lab, GPU)
    assert [lab.read_kernel_driver(one) for one in (GPU, AUDIO, SERIAL_PORT)] == ["vfio-pci"] * 3
    lab.guest.run(f"kill {lab.start_python(OPEN_FUNCTION, GPU)}")  # a guest can open the group
    lab.ask(f"devices/{gpu}/disable/", reason="moving house")
    done = lab.run_command("uninstall", device=gpu)
    assert done["state"] == "succeeded", done
    assert [lab.read_kernel_driver(one) for one in (GPU, AUDIO, SERIAL_PORT)] == ["", "", "serial"]
    assert not {AUDIO, SERIAL_PORT, BOOT_DISPLAY} & lab.devices().keys()


def test_S1_of_two_cards_with_one_serial_number_the_first_keeps_its_identity(lab: GuestLab) -> None:
    first = enable(lab, CARD)
    ready_since = lab.wait_for_device(CARD, key=SERIAL_KEY)["state_since"]
    plug_twin(lab, "twin2", "second")
    second = enable(lab, SECOND_CARD)
    assert lab.wait_for_device(SECOND_CARD)["key"] == f"pci:{SECOND_CARD}"
    lab.kill_agent()
    lab.start_agent()  # it remembers which was first: the address of the second is lower
    lab.rescan()
    after = lab.wait_for_device(CARD)
    assert (after["uuid"], after["key"], after["state_since"]) == (first, SERIAL_KEY, ready_since)
    assert lab.wait_for_device(SECOND_CARD)["uuid"] == second != first
    requests = [lab.bind_function(device) for device in (first, second)]
    assert [request["attach_handle_info"]["bus"] for request in requests] == ["08", "07"]
    for request in requests:
        lab.release(request)
    for device in (first, second):
        lab.product.until(lambda device=device: not lab.describe_releases(device), START_S, "it is not confirmed")


def test_S1_a_card_that_is_pulled_while_a_guest_has_it_is_never_given_to_another(lab: GuestLab) -> None:
    card = lab.wait_for_device(CARD, state="ready")["uuid"]
    request, holder = lab.bind_function(card), lab.start_python(OPEN_FUNCTION, CARD)
    lab.guest.qmp("device_del", id="twin1")
    lab.guest.run("for _ in $(seq 300); do dmesg | grep -q 'blocked until released' && exit; sleep 0.1; done; exit 1")
    lab.rescan()
    lab.check_not_given(card)
    lab.release(request)  # Nova could not reach the host, and its guest is still there
    lab.product.until(lambda: is_refused_for_its_guest(lab, card), START_S, "the host has not answered")
    lab.check_not_given(card)
    lab.guest.run(f"kill {holder}")
    wait_until_gone(lab, CARD)
    lab.wait_for_device(CARD, state="missing")
    lab.product.until(lambda: not lab.describe_releases(card), START_S, "the host has not confirmed that it is unused")
    lab.check_not_given(card)
    assert lab.devices()[SECOND_CARD]["key"] == f"pci:{SECOND_CARD}", "it is still not the first"


def test_S1_a_held_card_that_is_pulled_and_plugged_in_again_is_the_same_and_still_held(lab: GuestLab) -> None:
    card = lab.wait_for_device(CARD, state="missing")["uuid"]
    plug_twin(lab, "twin1", "card")
    back = lab.wait_for_device(CARD, state="ready")
    assert (back["uuid"], back["key"], back["held"]) == (card, SERIAL_KEY, 0)
    lab.product.until(lambda: not lab.describe_releases(card), START_S, "the host has not confirmed that it is unused")
    request = lab.bind_function(card)
    lab.guest.qmp("device_del", id="twin1")
    wait_until_gone(lab, CARD)
    lab.wait_for_device(CARD, state="missing")
    lab.check_not_given(card)
    plug_twin(lab, "twin1", "card")
    back = lab.wait_for_device(CARD, state="ready")
    assert (back["uuid"], back["key"], back["held"]) == (card, SERIAL_KEY, 1)
    lab.check_not_given(card)
    lab.release(request)
    lab.product.until(lambda: not lab.describe_releases(card), START_S, "the host has not confirmed that it is unused")
    lab.release(lab.bind_function(card))
