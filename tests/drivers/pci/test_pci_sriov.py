"""Tests of plans for virtual functions and kernel drivers, on a simulated /sys that answers like the kernel."""

from __future__ import annotations

import errno
import re
import shutil
from pathlib import Path

import pytest

from drivers.errors import Busy, Denied, DriverError, Failed, Gone, Invalid, Unsupported
from drivers.inventory import AttachHandle, Device
from drivers.pci import functions, sriov
from drivers.pci.functions import PciDriver, confirm_no_guest_uses
from drivers.pci.host_usage import UNKNOWN, USED
from drivers.plan import Act, Ask
from tests.drivers.plan_execution import PlanRunner
from tests.support.modelmachine import ModelMachine

CARD, DISK_IDS = "0000:01:00.0", ("0x1b36", "0x0010", "0x010802")
FIRST_VF, SECOND_VF = "0000:01:00.1", "0000:01:00.2"
CARD_PATH = f"/sys/bus/pci/devices/{CARD}"
ASK = Ask(key=f"pci:{CARD}")


@pytest.fixture
def host(tmp_path: Path) -> ModelMachine:
    """Return a host with an IOMMU and a disk controller that can have four virtual functions."""
    machine = ModelMachine(tmp_path)
    machine.load("nvme", "1b36:0010")
    machine.pci(CARD, *DISK_IDS, group=7, vfs=4)
    return machine


def make_runner(host: ModelMachine, **rule: object) -> PlanRunner:
    return PlanRunner(host, PciDriver(), rules=[{"vendor": "1b36", **rule}])


def discover_devices(doer: PlanRunner) -> list[Device]:
    return list(PciDriver().discover(doer.host.machine, doer.settings).devices)


def discover_card(doer: PlanRunner) -> Device:
    (device,) = discover_devices(doer)
    assert (device.key, device.address, device.deployables[0].name) == (f"pci:{CARD}", CARD, f"node-1_{CARD}")
    assert device.deployables[0].num_accelerators == len(device.deployables[0].handles)
    return device


def handle_addresses(doer: PlanRunner) -> list[str]:
    found = [re.findall(r'"([0-9a-f]+)"', handle.info) for handle in discover_card(doer).deployables[0].handles]
    return [f"{bus}:{device}.{function}" for bus, device, _, function in found]


def read_numvfs(host: ModelMachine) -> str:
    return host.machine.read(f"{CARD_PATH}/sriov_numvfs")


def test_a_card_whose_rule_wants_virtual_functions_has_no_handles_before_install(host: ModelMachine) -> None:
    work = make_runner(host, vfs=2, bind="vfio-pci")
    device = discover_card(work)
    assert device.deployables[0].handles == ()
    assert device.to_install.splitlines() == [
        f"bind no drivers to new virtual functions of {CARD}",
        f"make 2 virtual functions of {CARD}",
        "bind each of them to vfio-pci",
    ]
    assert device.acts == "detach health install partition reset uninstall"


def test_install_makes_virtual_functions_and_binds_them_in_two_plans(host: ModelMachine) -> None:
    work = make_runner(host, vfs=2, bind="vfio-pci")
    assert work.run_act("install", ASK) == 2
    assert handle_addresses(work) == ["01:00.1", "01:00.2"]
    assert [host.driver_of(address) for address in (CARD, FIRST_VF, SECOND_VF)] == ["nvme", "vfio-pci", "vfio-pci"]
    assert discover_card(work).to_install == ""
    assert work.plan("install", ASK).said == "2 virtual functions, bound to vfio-pci"


def test_virtual_functions_of_a_rule_with_an_empty_driver_stay_unbound(host: ModelMachine) -> None:
    work = make_runner(host, vfs=4, bind="")
    assert work.run_act("install", ASK) == 1
    assert {host.driver_of(address) for address in (FIRST_VF, SECOND_VF)} == {""}
    assert len(handle_addresses(work)) == 4


def test_virtual_functions_of_a_rule_without_bind_are_bound_by_the_kernel(host: ModelMachine) -> None:
    work = make_runner(host, vfs=1)
    work.run_act("install", ASK)
    assert host.driver_of(FIRST_VF) == "nvme"
    assert work.done_steps == [f"make 1 virtual function of {CARD}"]


def test_another_number_of_virtual_functions_removes_all_before_making_the_new_ones(host: ModelMachine) -> None:
    make_runner(host, vfs=2).run_act("install", ASK)
    work = make_runner(host, vfs=3)
    work.run_act("install", ASK)
    assert work.done_steps == [
        f"remove the virtual functions of {CARD}",
        f"make 3 virtual functions of {CARD}",
    ]
    assert len(handle_addresses(work)) == 3


def test_a_layout_takes_precedence_over_the_rule(host: ModelMachine) -> None:
    work = make_runner(host, vfs=1)
    work.run_act("partition", Ask(ASK.key, layout={"vfs": "4", "bind": ""}))
    assert read_numvfs(host) == "4"
    assert {host.driver_of(address) for address in (FIRST_VF, SECOND_VF)} == {""}


def test_existing_virtual_functions_are_offered_in_place_of_their_card(host: ModelMachine) -> None:
    host.write(f"{CARD_PATH}/sriov_numvfs", "2")
    work = make_runner(host)
    assert handle_addresses(work) == ["01:00.1", "01:00.2"]
    assert discover_card(work).to_install == ""
    assert discover_card(make_runner(host, vfs=0)).to_install == f"remove the virtual functions of {CARD}"


def test_virtual_functions_matched_without_their_card_are_separate_devices(host: ModelMachine) -> None:
    host.write(f"{CARD_PATH}/sriov_numvfs", "2")
    found = discover_devices(PlanRunner(host, PciDriver(), rules=[{"address": "0000:01:00.[12]"}]))
    assert [device.address for device in found] == [FIRST_VF, SECOND_VF]


@pytest.mark.parametrize(("override", "after"), [("\n", "(null)"), ("nvme", "nvme")])
def test_install_binds_a_whole_function_and_uninstall_restores_driver_and_override(
    host: ModelMachine, override: str, after: str
) -> None:
    host.write(f"{CARD_PATH}/driver_override", override)
    work = make_runner(host, bind="vfio-pci")
    assert discover_card(work).to_install.splitlines() == [
        f"let {CARD} be bound to vfio-pci only",
        f"unbind {CARD} from nvme",
        f"bind {CARD} to vfio-pci",
    ]
    work.run_act("install", ASK)
    assert host.driver_of(CARD) == "vfio-pci"
    work.run_act("uninstall", Ask(ASK.key, first=work.first_values))
    assert host.driver_of(CARD) == "nvme"
    assert host.machine.read(f"{CARD_PATH}/driver_override") == after


def test_uninstall_binds_the_original_driver_after_install_had_unbound_it(host: ModelMachine) -> None:
    work = make_runner(host, bind="")
    work.run_act("install", ASK)
    assert host.driver_of(CARD) == ""
    assert discover_card(work).to_install == ""
    work.run_act("uninstall", Ask(ASK.key, first=work.first_values))
    assert host.driver_of(CARD) == "nvme"


@pytest.mark.parametrize("before", ["0", "1"])
def test_uninstall_restores_the_original_number_of_virtual_functions(host: ModelMachine, before: str) -> None:
    host.write(f"{CARD_PATH}/sriov_numvfs", before)
    work = make_runner(host, vfs=4, bind="vfio-pci")
    work.run_act("install", ASK)
    work.run_act("uninstall", Ask(ASK.key, first=work.first_values))
    assert read_numvfs(host) == before
    assert host.machine.read(f"{CARD_PATH}/sriov_drivers_autoprobe") == "1"
    assert host.driver_of(CARD) == "nvme"
    assert work.plan("uninstall", Ask(ASK.key, first=work.first_values)).steps == ()


def test_uninstall_of_an_untouched_device_has_no_steps(host: ModelMachine) -> None:
    assert make_runner(host).plan("uninstall", ASK).steps == ()


def test_too_few_virtual_functions_fail_the_install_and_are_undone(host: ModelMachine) -> None:
    host.drivers["nvme"].gives = 2
    work = make_runner(host, vfs=4, bind="")
    with pytest.raises(Failed, match=r"make 4 virtual functions.*'2', not '4'"):
        work.run_act("install", ASK)
    assert read_numvfs(host) == "0"
    assert host.machine.read(f"{CARD_PATH}/sriov_drivers_autoprobe") == "1"


def test_a_failed_bind_restores_the_original_driver(host: ModelMachine) -> None:
    host.load("stubborn").refuses = errno.EIO
    with pytest.raises(Failed, match=f"bind {CARD} to stubborn"):
        make_runner(host, bind="stubborn").run_act("install", ASK)
    assert host.driver_of(CARD) == "nvme"
    assert host.machine.read(f"{CARD_PATH}/driver_override") == "(null)"


@pytest.mark.parametrize("act", ["install", "uninstall", "reset"])
def test_an_act_is_refused_while_a_guest_uses_one_virtual_function(host: ModelMachine, act: Act) -> None:
    work = make_runner(host, vfs=2, bind="vfio-pci")
    work.run_act("install", ASK)
    (node,) = {f"/dev/vfio/{host.machine.link(f'/sys/bus/pci/devices/{SECOND_VF}/iommu_group')}"}
    again = make_runner(host, vfs=4)
    with host.holding(node), pytest.raises(Busy, match=rf"{SECOND_VF}.*a guest uses it \({node} is open\)"):
        again.run_act(act, Ask(ASK.key, first=work.first_values))
    assert again.done_steps == []
    assert "cannot" not in discover_card(work).to_install


@pytest.mark.parametrize("act", ["install", "uninstall", "reset"])
def test_an_act_is_refused_while_a_guest_uses_a_function_of_a_variant_driver(host: ModelMachine, act: Act) -> None:
    host.load("mlx5_vfio_pci", vfio="group")
    work = make_runner(host, vfs=2, bind="mlx5_vfio_pci")
    work.run_act("install", ASK)
    node = f"/dev/vfio/{host.machine.link(f'/sys/bus/pci/devices/{SECOND_VF}/iommu_group')}"
    again = make_runner(host, vfs=4)
    with host.holding(node), pytest.raises(Busy, match=rf"{SECOND_VF}.*a guest uses it \({node} is open\)"):
        again.run_act(act, Ask(ASK.key, first=work.first_values))
    (host.dev / node.removeprefix("/dev/")).unlink()
    with pytest.raises(Denied, match=f"{SECOND_VF}.*not known whether a guest uses it.*does not see {node}"):
        again.run_act(act, Ask(ASK.key, first=work.first_values))
    assert again.done_steps == []


@pytest.mark.parametrize("bind", ["vfio-pci", ""])
def test_a_function_that_libvirt_bound_to_a_variant_driver_needs_no_install(host: ModelMachine, bind: str) -> None:
    host.load("mlx5_vfio_pci", vfio="group")
    make_runner(host, vfs=2, bind="mlx5_vfio_pci").run_act("install", ASK)
    work = make_runner(host, vfs=2, bind=bind)
    assert discover_card(work).to_install == ""
    node = f"/dev/vfio/{host.machine.link(f'/sys/bus/pci/devices/{SECOND_VF}/iommu_group')}"
    with host.holding(node):
        assert work.run_act("install", ASK) == 0
    assert host.driver_of(SECOND_VF) == "mlx5_vfio_pci"


def test_a_variant_driver_that_a_rule_names_is_bound_in_place_of_vfio_pci(host: ModelMachine) -> None:
    host.load("mlx5_vfio_pci", vfio="group")
    make_runner(host, bind="vfio-pci").run_act("install", ASK)
    make_runner(host, bind="mlx5_vfio_pci").run_act("install", ASK)
    assert host.driver_of(CARD) == "mlx5_vfio_pci"


@pytest.mark.parametrize("act", ["install", "reset"])
def test_an_act_is_refused_while_the_host_uses_a_virtual_function(host: ModelMachine, act: Act) -> None:
    host.write(f"{CARD_PATH}/sriov_numvfs", "2")
    disk = host.block("nvme0n1", "259:0", (host.sys / "bus/pci/devices" / FIRST_VF).resolve())
    host.mount("259:0", "/var", str(disk))
    work = make_runner(host, vfs=4)
    with pytest.raises(Busy, match="nvme0n1 is mounted at /var"):
        work.run_act(act, ASK)
    found = PciDriver().discover(host.machine, work.settings)
    assert [(fault.subject, fault.reason) for fault in found.faults] == [
        (FIRST_VF, "the host uses it: nvme0n1 is mounted at /var")
    ]
    assert handle_addresses(work) == ["01:00.2"]
    assert "nvme0n1 is mounted" in discover_card(work).to_install


def test_a_card_that_the_host_uses_is_a_fault_while_it_has_no_virtual_functions(host: ModelMachine) -> None:
    host.default_route(host.net("eth0", host.sys / "devices/pci0000:00" / CARD).name)
    found = PciDriver().discover(host.machine, make_runner(host, vfs=2).settings)
    assert (found.devices, found.faults[0].subject) == ((), CARD)


def test_existing_virtual_functions_of_a_card_that_the_host_uses_are_offered(host: ModelMachine) -> None:
    host.write(f"{CARD_PATH}/sriov_numvfs", "2")
    host.default_route(host.net("eth0", host.sys / "devices/pci0000:00" / CARD).name)
    work = make_runner(host, vfs=2, bind="vfio-pci")
    assert handle_addresses(work) == ["01:00.1", "01:00.2"]
    work.run_act("install", ASK)
    assert host.driver_of(FIRST_VF) == "vfio-pci"
    assert "eth0 carries the default route" in discover_card(make_runner(host, vfs=4)).to_install


@pytest.mark.parametrize("name", [CARD, "eth0"])
def test_a_card_that_the_host_uses_may_have_virtual_functions_if_its_rule_names_it(
    host: ModelMachine, name: str
) -> None:
    host.default_route(host.net("eth0", host.sys / "devices/pci0000:00" / CARD).name)
    refused = PciDriver().discover(host.machine, make_runner(host, vfs=2).settings)
    assert f'beside that use, add vfs_beside_host = ["{CARD}"]' in refused.faults[0].reason
    with pytest.raises(Busy, match=r"eth0 carries the default route.*vfs_beside_host"):
        make_runner(host, vfs=2, vfs_beside_host=["eth1"]).run_act("install", ASK)
    work = make_runner(host, vfs=2, bind="vfio-pci", vfs_beside_host=[name])
    assert handle_addresses(work) == [], "the card itself stays the host's"
    work.run_act("install", ASK)
    assert handle_addresses(work) == ["01:00.1", "01:00.2"]
    assert (host.driver_of(CARD), host.driver_of(FIRST_VF)) == ("nvme", "vfio-pci")
    with pytest.raises(Busy, match="eth0 carries the default route"):
        work.run_act("reset", ASK)
    with pytest.raises(Busy, match="eth0 carries the default route"):
        make_runner(host, vfs=0, bind="vfio-pci", vfs_beside_host=[name]).run_act("install", ASK)
    assert host.driver_of(CARD) == "nvme"


def test_the_permission_is_offered_only_for_a_known_use() -> None:
    assert sriov.explain_permission(CARD, f"{UNKNOWN}why") == ""
    assert CARD in sriov.explain_permission(CARD, f"{USED}why")


def test_virtual_functions_beside_the_host_are_not_removed_while_one_of_them_is_used(host: ModelMachine) -> None:
    work = make_runner(host, vfs=2, vfs_beside_host=[CARD])
    work.run_act("install", ASK)
    host.default_route(host.net("eth0", host.sys / "devices/pci0000:00" / CARD).name)
    disk = host.block("nvme0n1", "259:0", (host.sys / "bus/pci/devices" / FIRST_VF).resolve())
    host.mount("259:0", "/var", str(disk))
    with pytest.raises(Busy, match="nvme0n1 is mounted at /var"):
        work.run_act("uninstall", Ask(ASK.key, first=work.first_values))
    (host.proc / "self/mountinfo").write_text("")
    work.run_act("uninstall", Ask(ASK.key, first=work.first_values))
    assert read_numvfs(host) == "0"


@pytest.mark.parametrize(
    ("rule", "change", "kind", "says"),
    [
        ({"vfs": 9}, "", Invalid, "at most 4 virtual functions, not 9"),
        ({"vfs": 2}, "unbound", Unsupported, "bound to no kernel driver.*pci-pf-stub"),
        ({"vfs": 2}, "vfio-pci", Unsupported, "bound to vfio-pci"),
        ({"vfs": 2}, "mlx5_vfio_pci", Unsupported, "bound to mlx5_vfio_pci"),
        ({"vfs": 2}, "plain", Unsupported, "cannot have virtual functions"),
        ({"bind": "xocl"}, "", Unsupported, "modprobe xocl"),
        ({"bind": "vfio-pci"}, "neighbour", Busy, "as 0000:02:00.0, which is bound to the host's driver snd"),
        ({"bind": ""}, "neighbour", Busy, "as 0000:02:00.0, which is bound to the host's driver snd"),
        ({}, "neighbour", Busy, "as 0000:02:00.0, which is bound to the host's driver snd"),
    ],
)
def test_an_impossible_install_is_refused_with_the_reason_before_any_write(
    tmp_path: Path, rule: dict[str, object], change: str, kind: type[DriverError], says: str
) -> None:
    host = ModelMachine(tmp_path)
    host.load("nvme", "1b36:0010")
    host.pci(CARD, *DISK_IDS, group=7, vfs=0 if change == "plain" else 4)
    if change == "neighbour":
        host.load("snd", "1b36:00aa")
        host.pci("0000:02:00.0", "0x1b36", "0x00aa", "0x040300", group=7)
        host.pci("0000:00:1c.0", "0x1b36", "0x0001", "0x060400", group=7)
    if change == "unbound":
        host.write("/sys/bus/pci/drivers/nvme/unbind", CARD)
    if change.endswith("pci"):
        host.load("mlx5_vfio_pci", vfio="group")
        make_runner(host, bind=change).run_act("install", ASK)
    host.writes.clear()
    work = make_runner(host, product="0010", **rule)
    with pytest.raises(kind, match=says):
        work.run_act("install", ASK)
    assert host.writes == []
    assert re.search(f"^cannot be done: .*{says}", discover_card(work).to_install)


def test_an_unbound_neighbour_in_the_iommu_group_does_not_prevent_install(host: ModelMachine) -> None:
    host.pci("0000:01:00.7", "0x1b36", "0x00aa", "0x040300", group=7)
    make_runner(host, product="0010", bind="vfio-pci").run_act("install", ASK)
    assert host.driver_of(CARD) == "vfio-pci"


def test_many_virtual_functions_are_bound_in_several_plans_of_limited_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(functions, "MAX_STEPS", 12)
    host = ModelMachine(tmp_path)
    host.load("nvme", "1b36:0010")
    host.pci(CARD, *DISK_IDS, group=7, vfs=8)
    work = make_runner(host, vfs=8, bind="vfio-pci")
    assert work.run_act("install", ASK) == 3
    assert len(handle_addresses(work)) == 8
    assert len(make_runner(host, bind="nvme").plan("install", ASK).steps) == 12
    assert discover_card(make_runner(host, bind="nvme")).to_install.splitlines()[20:] == ["and 4 more steps"]


@pytest.mark.parametrize(
    ("layout", "says"), [({"vgs": "4"}, "no key 'vgs'"), ({"vfs": "many"}, "layout is not usable")]
)
def test_an_unusable_layout_is_refused(host: ModelMachine, layout: dict[str, str], says: str) -> None:
    with pytest.raises(Invalid, match=says):
        make_runner(host).plan("partition", Ask(ASK.key, layout=layout))


def test_reset_is_one_write_with_a_long_deadline(host: ModelMachine) -> None:
    work = make_runner(host)
    assert work.plan("reset", ASK).steps[0].timeout_s == 100
    work.run_act("reset", ASK)
    assert host.resets == [CARD]
    (host.sys / "bus/pci/devices" / CARD / "reset").unlink()
    with pytest.raises(Unsupported, match="cannot be reset"):
        work.run_act("reset", ASK)
    assert "reset" not in discover_card(work).acts.split()


@pytest.mark.parametrize("act", ["install", "uninstall", "partition", "reset"])
def test_an_act_on_an_unplugged_device_raises_gone(host: ModelMachine, act: Act) -> None:
    host.unplug(CARD)
    with pytest.raises(Gone, match=f"no pci:{CARD}"):
        make_runner(host, vfs=2).run_act(act, ASK)


def test_discovery_reads_no_attribute_that_may_wait_for_a_kernel_lock(host: ModelMachine) -> None:
    make_runner(host, vfs=2, bind="vfio-pci").run_act("install", ASK)
    for part in (CARD, FIRST_VF, SECOND_VF):
        for name in ("sriov_numvfs", "driver_override"):
            (host.sys / "bus/pci/devices" / part / name).unlink(missing_ok=True)
            (host.sys / "bus/pci/devices" / part / name).mkdir()  # Reading a directory fails.
    for rule in ({"vfs": 2, "bind": "nvme"}, {"vfs": 4}, {}):
        assert "01:00.1" in handle_addresses(make_runner(host, **rule))
    assert not PciDriver().discover(host.machine, make_runner(host).settings).faults


def test_a_detach_succeeds_only_if_no_guest_has_the_function_open(host: ModelMachine) -> None:
    work = make_runner(host, vfs=2, bind="vfio-pci")
    work.run_act("install", ASK)
    first, second = discover_card(work).deployables[0].handles
    assert not work.plan("detach", Ask(ASK.key, handle=second)).steps, "the agent itself asks the kernel"
    node = f"/dev/vfio/{host.machine.link(f'/sys/bus/pci/devices/{SECOND_VF}/iommu_group')}"
    with host.holding(node):
        with pytest.raises(Busy, match=f"a guest still uses {SECOND_VF}"):
            confirm_no_guest_uses(host.machine, second)
        assert confirm_no_guest_uses(host.machine, first) == f"no guest uses {FIRST_VF}"
    assert confirm_no_guest_uses(host.machine, second) == f"no guest uses {SECOND_VF}"
    (host.dev / node.removeprefix("/dev/")).unlink()
    with pytest.raises(
        Failed, match=f"not known whether a guest uses {SECOND_VF}, because the agent does not see /dev/vfio/"
    ):
        confirm_no_guest_uses(host.machine, second)
    host.file(host.dev / node.removeprefix("/dev/"), "")
    make_runner(host, vfs=0).run_act("install", ASK)
    assert confirm_no_guest_uses(host.machine, second) == f"{SECOND_VF} does not exist any more"
    (whole,) = discover_card(make_runner(host)).deployables[0].handles
    host.unplug(CARD)
    assert confirm_no_guest_uses(host.machine, whole) == f"{CARD} does not exist any more"


def test_what_is_no_handle_of_a_pci_function_is_refused(host: ModelMachine) -> None:
    (whole,) = discover_card(make_runner(host)).deployables[0].handles
    no_address = '{"domain": "0000", "bus": "g1", "device": "00", "function": "0"}'
    for handle in (None, AttachHandle("MDEV", whole.info), AttachHandle("PCI", no_address)):
        with pytest.raises(Invalid):
            confirm_no_guest_uses(host.machine, handle)


def test_a_report_tells_what_guests_may_use_without_opening_a_device_node(
    host: ModelMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = make_runner(host, vfs=2)
    work.run_act("install", ASK)
    assert [handle.in_use for handle in discover_card(work).deployables[0].handles] == ["", ""]
    make_runner(host, vfs=2, bind="vfio-pci").run_act("install", ASK)
    monkeypatch.setattr(type(host.machine), "is_open", lambda *_: pytest.fail("a guest that starts would find it busy"))
    assert [handle.in_use for handle in discover_card(work).deployables[0].handles] == ["unknown", "unknown"]


def test_a_report_tells_that_a_guest_may_use_a_card_that_is_being_pulled(host: ModelMachine) -> None:
    make_runner(host, bind="vfio-pci").run_act("install", ASK)
    folder = host.sys / "bus/pci/devices" / CARD
    (folder / "driver").unlink()  # the kernel keeps only the group until the guest has closed it
    shutil.rmtree(folder / "vfio-dev", ignore_errors=True)
    (handle,) = discover_card(make_runner(host)).deployables[0].handles
    assert host.machine.exists("/sys/class/vfio/7") and handle.in_use == "unknown"
