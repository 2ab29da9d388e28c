"""Tests of conflicts between drivers: each device has one owner or a fault, and a failing driver keeps its devices."""

from __future__ import annotations

from random import Random

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from drivers.inventory import AttachHandle, Backend, Deployable, Device, DriverReport
from drivers.pci.functions import PciDriver
from drivers.pci.ownership import resolve_conflicts

ADDRESSES = [f"0000:3b:00.{function}" for function in range(4)]


def pci_info(address: str) -> str:
    domain, bus, rest = address.split(":")
    device, function = rest.split(".")
    return f'{{"bus": "{bus}", "device": "{device}", "domain": "{domain}", "function": "{function}"}}'


def make_card(key: str, address: str | None, *deployables: Deployable) -> Device:
    return Device(key, "GPU", "10de", "1eb8", address, deployables=deployables)


def make_deployable(name: str, *addresses: str) -> Deployable:
    return Deployable(name, len(addresses), handles=tuple(AttachHandle("PCI", pci_info(a)) for a in addresses))


deployable_strategy = st.builds(
    lambda name, addresses: make_deployable(name, *addresses),
    st.sampled_from(["a", "b", "c"]),
    st.lists(st.sampled_from(ADDRESSES), max_size=2),
)
device_strategy = st.builds(
    lambda key, address, parts: make_card(key, address, *parts),
    st.sampled_from(["k1", "k2", "k3", "k4"]),
    st.sampled_from([None, *ADDRESSES]),
    st.lists(deployable_strategy, max_size=2),
)


def settle_by_driver(reports: list[DriverReport]) -> dict[str, DriverReport]:
    return {report.driver: report for report in resolve_conflicts(reports)}


@st.composite
def driver_reports(draw: st.DrawFn) -> list[DriverReport]:
    """Return reports of one to four drivers, each with devices or an error."""
    found = []
    for name in draw(st.permutations(["a", "b", "c", "d"]))[: draw(st.integers(1, 4))]:
        if draw(st.integers(0, 4)) == 0:
            found.append(DriverReport(name, error="broken"))
        else:
            found.append(DriverReport(name, devices=tuple(draw(st.lists(device_strategy, max_size=4)))))
    return found


def test_of_two_drivers_with_one_address_the_one_enabled_first_keeps_it() -> None:
    first, second = (
        DriverReport("nvidia", devices=(make_card("serial:1", ADDRESSES[0]),)),
        DriverReport(PciDriver.name, devices=(make_card("pci:x", ADDRESSES[0]), make_card("pci:y", ADDRESSES[1]))),
    )
    kept, later = resolve_conflicts([first, second])
    assert kept == first
    assert [device.key for device in later.devices] == ["pci:y"]
    assert later.faults[0].subject == ADDRESSES[0]
    assert later.faults[0].reason == f"{ADDRESSES[0]} already belongs to nvidia"


def test_the_address_of_a_handle_belongs_to_the_driver_of_the_handle() -> None:
    nic = DriverReport("nic", devices=(make_card("serial:1", ADDRESSES[0], make_deployable("n", ADDRESSES[1])),))
    _, pci = resolve_conflicts([nic, DriverReport("pci_driver", devices=(make_card("pci:v", ADDRESSES[1]),))])
    assert pci.devices == ()
    assert "already belongs to nic" in pci.faults[0].reason


def test_a_failing_driver_keeps_its_last_known_devices() -> None:
    good = DriverReport("nvidia", devices=(make_card("serial:1", ADDRESSES[0]),))
    other = DriverReport("pci_driver", devices=(make_card("pci:x", ADDRESSES[0]),))
    held = settle_by_driver([good, other])
    failing, while_failing = resolve_conflicts([DriverReport("nvidia", error="it hangs"), other], held)
    assert (failing.error, failing.devices) == ("it hangs", good.devices)
    assert while_failing.devices == ()
    assert while_failing.faults[0].reason == f"{ADDRESSES[0]} already belongs to nvidia"


def test_a_driver_keeps_a_device_it_still_reports_when_an_earlier_driver_reports_it_too() -> None:
    pci = DriverReport(PciDriver.name, devices=(make_card("pci:x", ADDRESSES[0]),))
    held = settle_by_driver([DriverReport("nvidia"), pci])
    nvidia = DriverReport("nvidia", devices=(make_card("serial:1", ADDRESSES[0]),))
    first, second = resolve_conflicts([nvidia, pci], held)
    assert (first.devices, second) == ((), pci)
    assert first.faults[0].reason == f"{ADDRESSES[0]} already belongs to {PciDriver.name}"
    let_go, _ = resolve_conflicts([nvidia, DriverReport(PciDriver.name)], held)
    assert let_go == nvidia


def test_a_backend_keeps_a_device_that_another_backend_reports_too() -> None:
    parts = {name: replace(make_card("pci:x", ADDRESSES[0]), backend=name) for name in "ab"}
    both = DriverReport("generic", devices=tuple(parts.values()), backends=tuple(Backend(n, "pci") for n in parts))
    held = settle_by_driver([replace(both, devices=(parts["b"],))])
    (kept,) = resolve_conflicts([both], held)
    assert kept.devices == (parts["b"],)
    assert kept.faults[0].reason == f"{ADDRESSES[0]} already belongs to generic:b"
    (fresh,) = resolve_conflicts([both])
    assert fresh.devices == (parts["a"],)


def test_two_cards_with_one_key_are_both_left_out_with_a_fault() -> None:
    twins = DriverReport("a", devices=(make_card("serial:1", ADDRESSES[0]), make_card("serial:1", ADDRESSES[1])))
    (settled,) = resolve_conflicts([twins])
    assert settled.devices == ()
    assert {fault.subject for fault in settled.faults} == set(ADDRESSES[:2])


def test_a_device_with_duplicate_deployables_or_handles_is_left_out_with_a_fault() -> None:
    same_name = make_card("k1", None, make_deployable("n"), make_deployable("n"))
    same_handle = make_card("k2", None, make_deployable("m", ADDRESSES[0], ADDRESSES[0]))
    (settled,) = resolve_conflicts([DriverReport("a", devices=(same_name, same_handle))])
    assert settled.devices == ()
    assert [fault.subject for fault in settled.faults] == ["k1", "k2"]


@given(driver_reports())
def test_every_device_has_one_owner_and_every_device_left_out_has_a_fault(reports: list[DriverReport]) -> None:
    settled = resolve_conflicts(reports)
    kept = [device for report in settled for device in report.devices]
    names = [part.name for device in kept for part in device.deployables]
    addresses = [device.address for device in kept if device.address]
    for things in (addresses, [device.key for device in kept], names):
        assert len(things) == len(set(things))
    for before, after in zip(reports, settled, strict=True):
        assert (before.driver, before.error) == (after.driver, after.error)
        missing = [device for device in before.devices if device not in after.devices]
        assert {fault.subject for fault in after.faults} >= {device.address or device.key for device in missing}


@given(driver_reports())
def test_settling_twice_changes_nothing(reports: list[DriverReport]) -> None:
    settled = resolve_conflicts(reports)
    assert resolve_conflicts(settled) == settled


@given(driver_reports(), st.randoms())
def test_devices_stay_with_their_drivers_when_the_order_of_drivers_changes(
    reports: list[DriverReport], random: Random
) -> None:
    before = settle_by_driver(reports)
    for report in resolve_conflicts(random.sample(reports, len(reports)), before):
        assert report.devices == before[report.driver].devices


@given(driver_reports(), st.data())
def test_a_failing_driver_does_not_change_the_devices_of_other_drivers(
    reports: list[DriverReport], data: st.DataObject
) -> None:
    settled = resolve_conflicts(reports, settle_by_driver(reports))
    broken = data.draw(st.integers(0, len(reports) - 1))
    failing = [*reports[:broken], DriverReport(reports[broken].driver, error="gone"), *reports[broken + 1 :]]
    again = resolve_conflicts(failing, settle_by_driver(reports))
    assert again[:broken] + again[broken + 1 :] == settled[:broken] + settled[broken + 1 :]


def test_a_failing_backend_keeps_its_devices_from_other_backends_and_drivers() -> None:
    def make_two_backends_report(error: str, *cards: Device) -> DriverReport:
        return DriverReport("generic", devices=cards, backends=(Backend("a", "pci", error=error), Backend("b", "pci")))

    mine, others = (replace(make_card(f"pci:{address}", address), backend="a") for address in ADDRESSES[:2])
    greedy = (replace(mine, backend="b"), replace(others, backend="b"))
    rival = DriverReport(PciDriver.name, devices=(make_card("pci:x", ADDRESSES[0]),))
    held = settle_by_driver([make_two_backends_report("", mine), rival])
    settled, rest = resolve_conflicts([make_two_backends_report("it hung", *greedy), rival], held)
    assert [(device.key, device.backend) for device in settled.devices] == [(mine.key, "a"), (others.key, "b")]
    assert not rest.devices and "already belongs to generic:a" in rest.faults[0].reason
