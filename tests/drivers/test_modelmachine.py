"""Tests of the ModelMachine itself: each refusal that the kernel is known to make, and what it silently ignores."""

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

CARD, OTHER_CARD = "0000:01:00.0", "0000:02:00.0"
CARD_PATH, VIRTUAL_PATH = f"/sys/bus/pci/devices/{CARD}", "/sys/bus/pci/devices/0000:01:00.1"
DRIVERS = "/sys/bus/pci/drivers"
MDEV_TYPES_PATH, UUID = f"{CARD_PATH}/mdev_supported_types", "83b8f4f2-509f-382f-3c1e-e6bfe0fa1001"

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
    host.pci(OTHER_CARD, "0x8086", "0x4940", "0x0b4000", vfs=2)
    modelkinds.mdev_types(host, card, {"nvidia-222": 2, "nvidia-223": 1}, exclusive=True)
    modelkinds.qat(host, (host.sys / "bus/pci/devices" / OTHER_CARD).resolve())
    modelkinds.uploader(host, "secure-update0")
    return host


def errno_of_write(host: ModelMachine, path: str, value: str) -> str:
    with pytest.raises(OSError) as caught:
        host.write(path, value)
    return errno.errorcode[caught.value.errno or 0]


@pytest.mark.parametrize(
    ("path", "value", "answer"),
    [
        (f"{CARD_PATH}/sriov_numvfs", "5", "ERANGE"),
        (f"{CARD_PATH}/sriov_numvfs", "-1", "EINVAL"),
        (f"{CARD_PATH}/sriov_numvfs", "x", "EINVAL"),
        (f"/sys/bus/pci/devices/{OTHER_CARD}/sriov_numvfs", "1", "ENOENT"),
        (f"{CARD_PATH}/sriov_drivers_autoprobe", "x", "EINVAL"),
        (f"{CARD_PATH}/sriov_totalvfs", "9", "EACCES"),
        (f"{CARD_PATH}/no_such", "1", "ENOENT"),
        (f"{CARD_PATH}/reset", "2", "EINVAL"),
        (f"{DRIVERS}/vfio-pci/bind", CARD, "ENODEV"),
        (f"{DRIVERS}/nvme/bind", CARD, "EBUSY"),
        (f"{DRIVERS}/nvme/bind", "0000:09:00.0", "ENODEV"),
        (f"{DRIVERS}/vfio-pci/unbind", CARD, "ENODEV"),
        ("/sys/bus/pci/drivers_probe", "0000:09:00.0", "ENODEV"),
        (f"{MDEV_TYPES_PATH}/nvidia-222/create", "no uuid", "EINVAL"),
        ("/sys/class/firmware/secure-update0/data", "x", "ENODEV"),
        ("/sys/class/firmware/secure-update0/cancel", "1", "ENODEV"),
        (f"/sys/bus/pci/devices/{OTHER_CARD}/qat/cfg_services", "dc", "EINVAL"),
        (f"/sys/bus/pci/devices/{OTHER_CARD}/qat/state", "sideways", "EINVAL"),
    ],
)
def test_a_wrong_write_is_refused_with_the_kernels_errno(
    host: ModelMachine, path: str, value: str, answer: str
) -> None:
    assert errno_of_write(host, path, value) == answer


def test_virtual_functions_are_made_and_removed_with_links_and_uevents(host: ModelMachine, events: Events) -> None:
    events.clear()
    host.write(f"{CARD_PATH}/sriov_numvfs", "2")
    assert host.machine.link(f"{CARD_PATH}/virtfn1") == "0000:01:00.2"
    assert host.machine.link(f"{VIRTUAL_PATH}/physfn") == CARD
    assert events[0] == ("add", "0000:01:00.1")
    assert events[-1] == ("change", CARD)
    host.write(f"{CARD_PATH}/sriov_numvfs", "2")
    assert errno_of_write(host, f"{CARD_PATH}/sriov_numvfs", "3") == "EBUSY"
    events.clear()
    host.write(f"{CARD_PATH}/sriov_numvfs", "0")
    assert [event for event in events if event[0] != "unbind"] == [
        ("remove", "0000:01:00.1"),
        ("remove", "0000:01:00.2"),
    ]
    assert host.machine.pci_functions() == [CARD, OTHER_CARD]


def test_virtual_functions_remain_after_the_driver_of_the_card_is_unbound(host: ModelMachine) -> None:
    host.write(f"{CARD_PATH}/sriov_numvfs", "2")
    host.write(f"{DRIVERS}/nvme/unbind", CARD)
    host.write(f"{CARD_PATH}/sriov_numvfs", "2")
    assert errno_of_write(host, f"{CARD_PATH}/sriov_numvfs", "0") == "ENOENT"


def test_without_autoprobe_a_virtual_function_is_bound_only_by_driver_override(host: ModelMachine) -> None:
    host.write(f"{CARD_PATH}/sriov_drivers_autoprobe", "0")
    host.write(f"{CARD_PATH}/sriov_numvfs", "1")
    host.write("/sys/bus/pci/drivers_probe", "0000:01:00.1")
    assert host.driver_of("0000:01:00.1") == ""
    host.write(f"{VIRTUAL_PATH}/driver_override", "vfio-pci\n")
    host.write("/sys/bus/pci/drivers_probe", "0000:01:00.1")
    assert host.driver_of("0000:01:00.1") == "vfio-pci"


def test_a_wrong_override_and_a_failing_probe_raise_no_error_and_bind_nothing(host: ModelMachine) -> None:
    for address, driver in ((CARD, "vfoi-pci"), (OTHER_CARD, "vfio-pci")):
        host.write(f"/sys/bus/pci/devices/{address}/driver_override", driver)
        host.write(f"{DRIVERS}/{host.driver_of(address)}/unbind", address)
        host.write("/sys/bus/pci/drivers_probe", address)
        assert host.driver_of(address) == ""
    assert errno_of_write(host, f"{DRIVERS}/vfio-pci/bind", OTHER_CARD) == "EINVAL"
    host.write(f"/sys/bus/pci/devices/{CARD}/driver_override", "\n")
    assert host.machine.read(f"{CARD_PATH}/driver_override") == "(null)"


def test_a_rescan_finds_a_removed_function_but_not_an_unplugged_one(host: ModelMachine) -> None:
    host.write(f"{CARD_PATH}/remove", "1")
    assert host.machine.pci_functions() == [OTHER_CARD]
    host.write("/sys/bus/pci/rescan", "1")
    assert host.driver_of(CARD) == "nvme"
    host.unplug(CARD)
    host.write("/sys/bus/pci/rescan", "1")
    assert host.machine.pci_functions() == [OTHER_CARD]


def test_a_mediated_device_is_created_and_removed_with_the_kernels_refusals(host: ModelMachine) -> None:
    host.write(f"{MDEV_TYPES_PATH}/nvidia-222/create", UUID)
    assert errno_of_write(host, f"{MDEV_TYPES_PATH}/nvidia-222/create", UUID) == "EEXIST"
    assert errno_of_write(host, f"{MDEV_TYPES_PATH}/nvidia-223/create", UUID.replace("1001", "1002")) == "ENOSPC"
    assert host.machine.link(f"/sys/bus/mdev/devices/{UUID}/mdev_type") == "nvidia-222"
    remove = f"/sys/bus/mdev/devices/{UUID}/remove"
    with host.holding(UUID):
        assert errno_of_write(host, remove, "1") == "EBUSY"
    host.write(remove, "1")
    assert errno_of_write(host, remove, "1") == "ENOENT"
    assert host.machine.read(f"{MDEV_TYPES_PATH}/nvidia-223/available_instances") == "1"


def test_qat_services_change_only_when_the_device_is_down_without_virtual_functions(host: ModelMachine) -> None:
    path = f"/sys/bus/pci/devices/{OTHER_CARD}"
    host.drivers["plain"].sriov = True
    host.write(f"{path}/sriov_numvfs", "1")
    assert errno_of_write(host, f"{path}/qat/state", "down") == "EBUSY"
    host.write(f"{path}/sriov_numvfs", "0")
    host.write(f"{path}/qat/state", "down")
    assert errno_of_write(host, f"{path}/qat/cfg_services", "tea") == "EINVAL"
    host.write(f"{path}/qat/cfg_services", "dc")
    host.write(f"{path}/qat/state", "up")
    assert host.machine.read(f"{path}/qat/cfg_services") == "dc"


@pytest.mark.parametrize("fails", ["", "preparing:invalid-file-size", "programming:hw-error"])
def test_a_firmware_upload_ends_with_its_data_stored_or_with_the_simulated_error(
    host: ModelMachine, tmp_path: Path, fails: str
) -> None:
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


def with_virtual_function(host: ModelMachine) -> None:
    host.write(f"{CARD_PATH}/sriov_numvfs", "1")


@pytest.mark.parametrize(
    ("before", "path", "value", "kind"),
    [
        (unprivileged, f"{CARD_PATH}/reset", "1", Denied),
        (read_only, f"{CARD_PATH}/reset", "1", Failed),
        (with_virtual_function, f"{CARD_PATH}/sriov_numvfs", "2", Busy),
        (with_virtual_function, f"{CARD_PATH}/sriov_numvfs", "99", Invalid),
        (with_virtual_function, f"{CARD_PATH}/sriov_mumvfs", "2", Gone),
        (with_virtual_function, f"/sys/bus/pci/devices/{OTHER_CARD}/sriov_numvfs", "2", Unsupported),
    ],
)
def test_the_model_writer_raises_the_driver_error_of_the_kernels_errno(
    host: ModelMachine, before: Callable[[ModelMachine], None], path: str, value: str, kind: type[DriverError]
) -> None:
    before(host)
    with pytest.raises(DriverError) as caught:
        asyncio.run(host.hand().write(path, value, 5))
    assert type(caught.value) is kind


def test_the_model_writer_creates_and_removes_state_files(host: ModelMachine) -> None:
    async def write(value: str) -> None:
        await host.hand().write("/state/a/b", value, 5)

    asyncio.run(write("on"))
    assert host.machine.read("/state/a/b") == "on"
    asyncio.run(write(""))
    assert not host.machine.exists("/state/a/b")


def test_an_unbind_hangs_while_a_guest_holds_the_device(host: ModelMachine) -> None:
    host.write(f"{CARD_PATH}/driver_override", "vfio-pci")
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
