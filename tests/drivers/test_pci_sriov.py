"""Virtual functions and kernel drivers, on a host whose /sys answers as the kernel does."""

from __future__ import annotations

import errno
import re
from pathlib import Path

import pytest

from drivers.errors import Busy, DriverError, Failed, Gone, Invalid, Unsupported
from drivers.inventory import Device
from drivers.pci import functions
from drivers.pci.functions import PciDriver
from drivers.plan import Act, Ask
from tests.drivers.doing import Doer
from tests.support.modelmachine import ModelMachine

CARD, DISK = "0000:01:00.0", ("0x1b36", "0x0010", "0x010802")
FIRST, SECOND = "0000:01:00.1", "0000:01:00.2"
PATH = f"/sys/bus/pci/devices/{CARD}"
ASK = Ask(key=f"pci:{CARD}")


@pytest.fixture
def host(tmp_path: Path) -> ModelMachine:
    """A disk controller that can have four virtual functions, behind an IOMMU."""
    machine = ModelMachine(tmp_path)
    machine.load("nvme", "1b36:0010")
    machine.pci(CARD, *DISK, group=7, vfs=4)
    return machine


def doer(host: ModelMachine, **rule: object) -> Doer:
    return Doer(host, PciDriver(), rules=[{"vendor": "1b36", **rule}])


def devices(doer: Doer) -> list[Device]:
    return list(PciDriver().discover(doer.host.machine, doer.settings).devices)


def card(doer: Doer) -> Device:
    (device,) = devices(doer)
    assert (device.key, device.address, device.deployables[0].name) == (f"pci:{CARD}", CARD, f"node-1_{CARD}")
    assert device.deployables[0].num_accelerators == len(device.deployables[0].handles)
    return device


def handed_out(doer: Doer) -> list[str]:
    found = [re.findall(r'"([0-9a-f]+)"', handle.info) for handle in card(doer).deployables[0].handles]
    return [f"{bus}:{device}.{function}" for bus, device, _, function in found]


def numvfs(host: ModelMachine) -> str:
    return host.machine.read(f"{PATH}/sriov_numvfs")


def test_a_rule_that_wants_virtual_functions_offers_nothing_before_they_are_there(host: ModelMachine) -> None:
    work = doer(host, vfs=2, bind="vfio-pci")
    device = card(work)
    assert device.deployables[0].handles == ()
    assert device.to_install.splitlines() == [
        f"bind no drivers to new virtual functions of {CARD}",
        f"make 2 virtual functions of {CARD}",
        "bind each of them to vfio-pci",
    ]
    assert device.acts == "health install partition reset uninstall"


def test_install_makes_them_and_binds_them_in_two_plans(host: ModelMachine) -> None:
    work = doer(host, vfs=2, bind="vfio-pci")
    assert work.do("install", ASK) == 2
    assert handed_out(work) == ["01:00.1", "01:00.2"]
    assert [host.driver_of(address) for address in (CARD, FIRST, SECOND)] == ["nvme", "vfio-pci", "vfio-pci"]
    assert card(work).to_install == ""
    assert work.plan("install", ASK).said == "2 virtual functions, bound to vfio-pci"


def test_autoprobe_alone_keeps_them_without_a_driver(host: ModelMachine) -> None:
    work = doer(host, vfs=4, bind="")
    assert work.do("install", ASK) == 1
    assert {host.driver_of(address) for address in (FIRST, SECOND)} == {""}
    assert len(handed_out(work)) == 4


def test_a_rule_that_names_no_driver_leaves_that_to_the_kernel(host: ModelMachine) -> None:
    work = doer(host, vfs=1)
    work.do("install", ASK)
    assert host.driver_of(FIRST) == "nvme"
    assert work.told == [f"make 1 virtual function of {CARD}"]


def test_another_number_takes_all_away_first(host: ModelMachine) -> None:
    doer(host, vfs=2).do("install", ASK)
    work = doer(host, vfs=3)
    work.do("install", ASK)
    assert work.told == [
        f"remove the virtual functions of {CARD}",
        f"make 3 virtual functions of {CARD}",
    ]
    assert len(handed_out(work)) == 3


def test_a_layout_goes_over_the_rule(host: ModelMachine) -> None:
    work = doer(host, vfs=1)
    work.do("partition", Ask(ASK.key, layout={"vfs": "4", "bind": ""}))
    assert numvfs(host) == "4"
    assert {host.driver_of(address) for address in (FIRST, SECOND)} == {""}


def test_virtual_functions_somebody_made_are_handed_out_and_never_their_card(host: ModelMachine) -> None:
    host.write(f"{PATH}/sriov_numvfs", "2")
    work = doer(host)
    assert handed_out(work) == ["01:00.1", "01:00.2"]
    assert card(work).to_install == ""
    assert card(doer(host, vfs=0)).to_install == f"remove the virtual functions of {CARD}"


def test_virtual_functions_of_a_card_no_rule_takes_are_devices_of_their_own(host: ModelMachine) -> None:
    host.write(f"{PATH}/sriov_numvfs", "2")
    found = devices(Doer(host, PciDriver(), rules=[{"address": "0000:01:00.[12]"}]))
    assert [device.address for device in found] == [FIRST, SECOND]


@pytest.mark.parametrize(("override", "after"), [("\n", "(null)"), ("nvme", "nvme")])
def test_a_whole_function_is_bound_and_given_back(host: ModelMachine, override: str, after: str) -> None:
    host.write(f"{PATH}/driver_override", override)
    work = doer(host, bind="vfio-pci")
    assert card(work).to_install.splitlines() == [
        f"let {CARD} be bound to vfio-pci only",
        f"unbind {CARD} from nvme",
        f"bind {CARD} to vfio-pci",
    ]
    work.do("install", ASK)
    assert host.driver_of(CARD) == "vfio-pci"
    work.do("uninstall", Ask(ASK.key, first=work.first))
    assert host.driver_of(CARD) == "nvme"
    assert host.machine.read(f"{PATH}/driver_override") == after


def test_no_driver_is_the_host_s_own_again_after_uninstalling(host: ModelMachine) -> None:
    work = doer(host, bind="")
    work.do("install", ASK)
    assert host.driver_of(CARD) == ""
    assert card(work).to_install == ""
    work.do("uninstall", Ask(ASK.key, first=work.first))
    assert host.driver_of(CARD) == "nvme"


@pytest.mark.parametrize("before", ["0", "1"])
def test_uninstall_goes_back_to_the_first_state(host: ModelMachine, before: str) -> None:
    host.write(f"{PATH}/sriov_numvfs", before)
    work = doer(host, vfs=4, bind="vfio-pci")
    work.do("install", ASK)
    work.do("uninstall", Ask(ASK.key, first=work.first))
    assert numvfs(host) == before
    assert host.machine.read(f"{PATH}/sriov_drivers_autoprobe") == "1"
    assert host.driver_of(CARD) == "nvme"
    assert work.plan("uninstall", Ask(ASK.key, first=work.first)).steps == ()


def test_what_was_never_touched_needs_no_uninstalling(host: ModelMachine) -> None:
    assert doer(host).plan("uninstall", ASK).steps == ()


def test_fewer_than_asked_is_a_failure_and_taken_back(host: ModelMachine) -> None:
    host.drivers["nvme"].gives = 2
    work = doer(host, vfs=4, bind="")
    with pytest.raises(Failed, match=r"make 4 virtual functions.*'2', not '4'"):
        work.do("install", ASK)
    assert numvfs(host) == "0"
    assert host.machine.read(f"{PATH}/sriov_drivers_autoprobe") == "1"


def test_a_driver_that_refuses_costs_nothing_that_was(host: ModelMachine) -> None:
    host.load("stubborn").refuses = errno.EIO
    with pytest.raises(Failed, match=f"bind {CARD} to stubborn"):
        doer(host, bind="stubborn").do("install", ASK)
    assert host.driver_of(CARD) == "nvme"
    assert host.machine.read(f"{PATH}/driver_override") == "(null)"


@pytest.mark.parametrize("act", ["install", "uninstall", "reset"])
def test_nothing_is_touched_while_a_guest_uses_any_of_it(host: ModelMachine, act: Act) -> None:
    work = doer(host, vfs=2, bind="vfio-pci")
    work.do("install", ASK)
    (node,) = {f"/dev/vfio/{host.machine.link(f'/sys/bus/pci/devices/{SECOND}/iommu_group')}"}
    again = doer(host, vfs=4)
    with host.holding(node), pytest.raises(Busy, match=rf"{SECOND}.*a guest uses it \({node} is open\)"):
        again.do(act, Ask(ASK.key, first=work.first))
    assert again.told == []
    assert "cannot" not in card(work).to_install
    if act == "install":  # its opening later is seen by the step itself
        plan = again.plan(act, ASK)
        assert node in plan.steps[0].idle


@pytest.mark.parametrize("act", ["install", "reset"])
def test_what_the_host_uses_is_left_alone(host: ModelMachine, act: Act) -> None:
    host.write(f"{PATH}/sriov_numvfs", "2")
    disk = host.block("nvme0n1", "259:0", (host.sys / "bus/pci/devices" / FIRST).resolve())
    host.mount("259:0", "/var", str(disk))
    work = doer(host, vfs=4)
    with pytest.raises(Busy, match="nvme0n1 is mounted at /var"):
        work.do(act, ASK)
    found = PciDriver().discover(host.machine, work.settings)
    assert [(fault.subject, fault.reason) for fault in found.faults] == [
        (FIRST, "the host uses it: nvme0n1 is mounted at /var")
    ]
    assert handed_out(work) == ["01:00.2"]
    assert "nvme0n1 is mounted" in card(work).to_install


def test_a_card_the_host_uses_gets_no_virtual_functions(host: ModelMachine) -> None:
    host.default_route(host.net("eth0", host.sys / "devices/pci0000:00" / CARD).name)
    found = PciDriver().discover(host.machine, doer(host, vfs=2).settings)
    assert (found.devices, found.faults[0].subject) == ((), CARD)


def test_a_card_the_host_uses_hands_out_the_virtual_functions_it_has(host: ModelMachine) -> None:
    host.write(f"{PATH}/sriov_numvfs", "2")
    host.default_route(host.net("eth0", host.sys / "devices/pci0000:00" / CARD).name)
    work = doer(host, vfs=2, bind="vfio-pci")
    assert handed_out(work) == ["01:00.1", "01:00.2"]
    work.do("install", ASK)
    assert host.driver_of(FIRST) == "vfio-pci"
    assert "eth0 carries the default route" in card(doer(host, vfs=4)).to_install


@pytest.mark.parametrize(
    ("rule", "change", "kind", "says"),
    [
        ({"vfs": 9}, "", Invalid, "at most 4 virtual functions, not 9"),
        ({"vfs": 2}, "unbound", Unsupported, "bound to no kernel driver.*pci-pf-stub"),
        ({"vfs": 2}, "vfio", Unsupported, "bound to vfio-pci"),
        ({"vfs": 2}, "plain", Unsupported, "cannot have virtual functions"),
        ({"bind": "xocl"}, "", Unsupported, "modprobe xocl"),
        ({"bind": "vfio-pci"}, "no iommu", Unsupported, "intel_iommu=on"),
        ({"vfs": 2, "bind": "vfio-pci"}, "no iommu", Unsupported, "intel_iommu=on"),
        ({"bind": "vfio-pci"}, "neighbour", Busy, "as 0000:01:00.7, which is bound to the host's driver snd"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_touched(
    tmp_path: Path, rule: dict[str, object], change: str, kind: type[DriverError], says: str
) -> None:
    host = ModelMachine(tmp_path)
    host.load("nvme", "1b36:0010")
    host.pci(CARD, *DISK, group=None if change == "no iommu" else 7, vfs=0 if change == "plain" else 4)
    if change == "neighbour":
        host.load("snd", "1b36:00aa")
        host.pci("0000:01:00.7", "0x1b36", "0x00aa", "0x040300", group=7)
        host.pci("0000:00:1c.0", "0x1b36", "0x0001", "0x060400", group=7)
    if change == "unbound":
        host.write("/sys/bus/pci/drivers/nvme/unbind", CARD)
    if change == "vfio":
        doer(host, bind="vfio-pci").do("install", ASK)
    host.writes.clear()
    work = doer(host, product="0010", **rule)
    with pytest.raises(kind, match=says):
        work.do("install", ASK)
    assert host.writes == []
    assert re.search(f"^cannot be done: .*{says}", card(work).to_install)


def test_a_neighbour_in_the_group_that_is_free_is_in_nobody_s_way(host: ModelMachine) -> None:
    host.pci("0000:01:00.7", "0x1b36", "0x00aa", "0x040300", group=7)
    doer(host, product="0010", bind="vfio-pci").do("install", ASK)
    assert host.driver_of(CARD) == "vfio-pci"


def test_many_are_bound_in_plans_of_bounded_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(functions, "MAX_STEPS", 12)
    host = ModelMachine(tmp_path)
    host.load("nvme", "1b36:0010")
    host.pci(CARD, *DISK, group=7, vfs=8)
    work = doer(host, vfs=8, bind="vfio-pci")
    assert work.do("install", ASK) == 3
    assert len(handed_out(work)) == 8
    assert len(doer(host, bind="nvme").plan("install", ASK).steps) == 12
    assert card(doer(host, bind="nvme")).to_install.splitlines()[20:] == ["and 4 more steps"]


@pytest.mark.parametrize(
    ("layout", "says"), [({"vgs": "4"}, "no key 'vgs'"), ({"vfs": "many"}, "layout is not usable")]
)
def test_a_layout_is_checked(host: ModelMachine, layout: dict[str, str], says: str) -> None:
    with pytest.raises(Invalid, match=says):
        doer(host).plan("partition", Ask(ASK.key, layout=layout))


def test_reset_is_one_write_with_a_long_deadline(host: ModelMachine) -> None:
    work = doer(host)
    assert work.plan("reset", ASK).steps[0].timeout_s == 100
    work.do("reset", ASK)
    assert host.resets == [CARD]
    (host.sys / "bus/pci/devices" / CARD / "reset").unlink()
    with pytest.raises(Unsupported, match="cannot be reset"):
        work.do("reset", ASK)
    assert "reset" not in card(work).acts.split()


@pytest.mark.parametrize("act", ["install", "uninstall", "partition", "reset"])
def test_a_device_that_was_pulled_out_is_gone(host: ModelMachine, act: Act) -> None:
    host.unplug(CARD)
    with pytest.raises(Gone, match=f"no pci:{CARD}"):
        doer(host, vfs=2).do(act, ASK)


def test_a_report_reads_nothing_that_waits_for_a_lock_and_opens_no_node(host: ModelMachine) -> None:
    doer(host, vfs=2, bind="vfio-pci").do("install", ASK)
    for part in (CARD, FIRST, SECOND):
        for name in ("sriov_numvfs", "driver_override"):
            (host.sys / "bus/pci/devices" / part / name).unlink(missing_ok=True)
            (host.sys / "bus/pci/devices" / part / name).mkdir()  # reading it is an error
    for rule in ({"vfs": 2, "bind": "nvme"}, {"vfs": 4}, {}):
        assert "01:00.1" in handed_out(doer(host, **rule))
    assert not PciDriver().discover(host.machine, doer(host).settings).faults
