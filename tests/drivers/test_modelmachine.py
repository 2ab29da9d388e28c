"""The model machine itself: every refusal that the kernel is known to make, and what it does without a word."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from drivers.errors import Busy, Denied, DriverError, Failed, Gone, Invalid, Timeout, Unsupported
from drivers.plan import Image
from tests.support import modelkinds
from tests.support.modelmachine import ModelMachine

CARD, OTHER = "0000:01:00.0", "0000:02:00.0"
PATH, VIRTUAL = f"/sys/bus/pci/devices/{CARD}", "/sys/bus/pci/devices/0000:01:00.1"
DRIVERS = "/sys/bus/pci/drivers"
MDEV, UUID = f"{PATH}/mdev_supported_types", "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"

Events = list[tuple[str, str]]


@pytest.fixture
def events() -> Events:
    return []


@pytest.fixture
def host(tmp_path: Path, events: Events) -> ModelMachine:
    host = ModelMachine(tmp_path, lambda action, path: events.append((action, path.rpartition("/")[2])))
    host.load("nvme", "1b36:0010")
    host.load("plain", "8086:*", sriov=False)
    card = host.pci(CARD, "0x1b36", "0x0010", "0x010802", group=7, vfs=4)
    host.pci(OTHER, "0x8086", "0x4940", "0x0b4000", vfs=2)
    modelkinds.mdev_types(host, card, {"nvidia-222": 2, "nvidia-223": 1}, exclusive=True)
    modelkinds.qat(host, (host.sys / "bus/pci/devices" / OTHER).resolve())
    modelkinds.uploader(host, "secure-update0")
    return host


def refused(host: ModelMachine, path: str, value: str) -> str:
    with pytest.raises(OSError) as caught:
        host.write(path, value)
    return errno.errorcode[caught.value.errno or 0]


@pytest.mark.parametrize(
    ("path", "value", "answer"),
    [
        (f"{PATH}/sriov_numvfs", "5", "ERANGE"),
        (f"{PATH}/sriov_numvfs", "-1", "EINVAL"),
        (f"{PATH}/sriov_numvfs", "x", "EINVAL"),
        (f"/sys/bus/pci/devices/{OTHER}/sriov_numvfs", "1", "ENOENT"),
        (f"{PATH}/sriov_drivers_autoprobe", "x", "EINVAL"),
        (f"{PATH}/sriov_totalvfs", "9", "EACCES"),
        (f"{PATH}/no_such", "1", "ENOENT"),
        (f"{PATH}/reset", "2", "EINVAL"),
        (f"{DRIVERS}/vfio-pci/bind", CARD, "ENODEV"),
        (f"{DRIVERS}/nvme/bind", CARD, "EBUSY"),
        (f"{DRIVERS}/nvme/bind", "0000:09:00.0", "ENODEV"),
        (f"{DRIVERS}/vfio-pci/unbind", CARD, "ENODEV"),
        ("/sys/bus/pci/drivers_probe", "0000:09:00.0", "ENODEV"),
        (f"{MDEV}/nvidia-222/create", "no uuid", "EINVAL"),
        ("/sys/class/firmware/secure-update0/data", "x", "ENODEV"),
        ("/sys/class/firmware/secure-update0/cancel", "1", "ENODEV"),
        (f"/sys/bus/pci/devices/{OTHER}/qat/cfg_services", "dc", "EINVAL"),
        (f"/sys/bus/pci/devices/{OTHER}/qat/state", "sideways", "EINVAL"),
    ],
)
def test_the_kernel_says_no(host: ModelMachine, path: str, value: str, answer: str) -> None:
    assert refused(host, path, value) == answer


def test_virtual_functions_come_with_links_and_events_and_go(host: ModelMachine, events: Events) -> None:
    events.clear()
    host.write(f"{PATH}/sriov_numvfs", "2")
    assert host.machine.link(f"{PATH}/virtfn1") == "0000:01:00.2"
    assert host.machine.link(f"{VIRTUAL}/physfn") == CARD
    assert events[0] == ("add", "0000:01:00.1")
    assert events[-1] == ("change", CARD)
    host.write(f"{PATH}/sriov_numvfs", "2")
    assert refused(host, f"{PATH}/sriov_numvfs", "3") == "EBUSY"
    events.clear()
    host.write(f"{PATH}/sriov_numvfs", "0")
    assert [event for event in events if event[0] != "unbind"] == [
        ("remove", "0000:01:00.1"),
        ("remove", "0000:01:00.2"),
    ]
    assert host.machine.pci_functions() == [CARD, OTHER]


def test_virtual_functions_outlive_their_card_s_driver(host: ModelMachine) -> None:
    host.write(f"{PATH}/sriov_numvfs", "2")
    host.write(f"{DRIVERS}/nvme/unbind", CARD)
    host.write(f"{PATH}/sriov_numvfs", "2")
    assert refused(host, f"{PATH}/sriov_numvfs", "0") == "ENOENT"


def test_without_autoprobe_only_an_override_binds(host: ModelMachine) -> None:
    host.write(f"{PATH}/sriov_drivers_autoprobe", "0")
    host.write(f"{PATH}/sriov_numvfs", "1")
    host.write("/sys/bus/pci/drivers_probe", "0000:01:00.1")
    assert host.driver_of("0000:01:00.1") == ""
    host.write(f"{VIRTUAL}/driver_override", "vfio-pci\n")
    host.write("/sys/bus/pci/drivers_probe", "0000:01:00.1")
    assert host.driver_of("0000:01:00.1") == "vfio-pci"


def test_a_wrong_override_and_a_failing_probe_are_told_nobody(host: ModelMachine) -> None:
    for address, driver in ((CARD, "vfoi-pci"), (OTHER, "vfio-pci")):
        host.write(f"/sys/bus/pci/devices/{address}/driver_override", driver)
        host.write(f"{DRIVERS}/{host.driver_of(address)}/unbind", address)
        host.write("/sys/bus/pci/drivers_probe", address)
        assert host.driver_of(address) == ""
    assert refused(host, f"{DRIVERS}/vfio-pci/bind", OTHER) == "EINVAL"
    host.write(f"/sys/bus/pci/devices/{CARD}/driver_override", "\n")
    assert host.machine.read(f"{PATH}/driver_override") == "(null)"


def test_a_removed_function_comes_back_by_a_rescan_and_a_pulled_one_does_not(host: ModelMachine) -> None:
    host.write(f"{PATH}/remove", "1")
    assert host.machine.pci_functions() == [OTHER]
    host.write("/sys/bus/pci/rescan", "1")
    assert host.driver_of(CARD) == "nvme"
    host.unplug(CARD)
    host.write("/sys/bus/pci/rescan", "1")
    assert host.machine.pci_functions() == [OTHER]


def test_mediated_devices_are_made_while_there_is_room(host: ModelMachine) -> None:
    host.write(f"{MDEV}/nvidia-222/create", UUID)
    assert refused(host, f"{MDEV}/nvidia-222/create", UUID) == "EEXIST"
    assert refused(host, f"{MDEV}/nvidia-223/create", UUID.replace("1001", "1002")) == "ENOSPC"
    assert host.machine.link(f"/sys/bus/mdev/devices/{UUID}/mdev_type") == "nvidia-222"
    remove = f"/sys/bus/mdev/devices/{UUID}/remove"
    with host.holding(UUID):
        assert refused(host, remove, "1") == "EBUSY"
    host.write(remove, "1")
    assert refused(host, remove, "1") == "ENOENT"
    assert host.machine.read(f"{MDEV}/nvidia-223/available_instances") == "1"


def test_qat_changes_its_services_only_when_down_and_undivided(host: ModelMachine) -> None:
    path = f"/sys/bus/pci/devices/{OTHER}"
    host.drivers["plain"].sriov = True
    host.write(f"{path}/sriov_numvfs", "1")
    assert refused(host, f"{path}/qat/state", "down") == "EBUSY"
    host.write(f"{path}/sriov_numvfs", "0")
    host.write(f"{path}/qat/state", "down")
    assert refused(host, f"{path}/qat/cfg_services", "tea") == "EINVAL"
    host.write(f"{path}/qat/cfg_services", "dc")
    host.write(f"{path}/qat/state", "up")
    assert host.machine.read(f"{path}/qat/cfg_services") == "dc"


@pytest.mark.parametrize("fails", ["", "preparing:invalid-file-size", "programming:hw-error"])
def test_firmware_goes_through_its_stages(host: ModelMachine, tmp_path: Path, fails: str) -> None:
    path = modelkinds.uploader(host, "card", fails)
    (tmp_path / "image").write_bytes(b"\xff\x00firmware\n")
    image = Image(str(tmp_path / "image"), 11, "0" * 64)
    told: list[int] = []

    async def upload() -> None:
        await host.hand().upload(path, "firmware", image, 5, told.append)

    if fails:
        with pytest.raises(Failed, match=fails):
            asyncio.run(upload())
    else:
        asyncio.run(upload())
        assert told == [100]
    assert (host.real(path) / "data").read_bytes() == b"\xff\x00firmware\n"
    assert host.machine.read(f"{path}/status") == "idle"


def unprivileged(host: ModelMachine) -> None:
    host.privileged = False


def read_only(host: ModelMachine) -> None:
    host.read_only = True


def divided(host: ModelMachine) -> None:
    host.write(f"{PATH}/sriov_numvfs", "1")


@pytest.mark.parametrize(
    ("before", "path", "value", "kind"),
    [
        (unprivileged, f"{PATH}/reset", "1", Denied),
        (read_only, f"{PATH}/reset", "1", Failed),
        (divided, f"{PATH}/sriov_numvfs", "2", Busy),
        (divided, f"{PATH}/sriov_numvfs", "99", Invalid),
        (divided, f"{PATH}/sriov_mumvfs", "2", Gone),
        (divided, f"/sys/bus/pci/devices/{OTHER}/sriov_numvfs", "2", Unsupported),
    ],
)
def test_the_hand_speaks_our_words(
    host: ModelMachine, before: Callable[[ModelMachine], None], path: str, value: str, kind: type[DriverError]
) -> None:
    before(host)
    with pytest.raises(DriverError) as caught:
        asyncio.run(host.hand().write(path, value, 5))
    assert type(caught.value) is kind


def test_the_hand_keeps_the_driver_s_own_files(host: ModelMachine) -> None:
    async def write(value: str) -> None:
        await host.hand().write("/state/a/b", value, 5)

    asyncio.run(write("on"))
    assert host.machine.read("/state/a/b") == "on"
    asyncio.run(write(""))
    assert not host.machine.exists("/state/a/b")


def test_what_a_guest_holds_hangs_until_it_is_let_go(host: ModelMachine) -> None:
    host.write(f"{PATH}/driver_override", "vfio-pci")
    host.write(f"{DRIVERS}/nvme/unbind", CARD)
    host.write(f"{DRIVERS}/vfio-pci/bind", CARD)
    hand = host.hand()

    async def unbind() -> None:
        with host.holding("/dev/vfio/7"):
            assert host.machine.is_open("/dev/vfio/7")
            with pytest.raises(Timeout, match="the outcome is unknown"):
                await hand.write(f"{DRIVERS}/vfio-pci/unbind", CARD, 0.05)
            assert hand.stuck
            assert host.driver_of(CARD) == "vfio-pci"
        async with asyncio.timeout(10):
            while hand.stuck:
                await asyncio.sleep(0.001)

    asyncio.run(unbind())
    assert host.driver_of(CARD) == ""
    assert not host.machine.is_open("/dev/vfio/7")
