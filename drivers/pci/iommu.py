"""Decide from a function's IOMMU group whether a guest can get the function, and which other functions go with it.

A guest gets all functions of an IOMMU group or none: while it uses one of them, no other function of the group may be
bound to a driver of the host. Bridges do not count, because their driver (pcieport) does no DMA of its own. Source:
vfio_dev_viable in drivers/vfio of Linux up to 5.18, and `driver_managed_dma` of the drivers since then;
Documentation/driver-api/vfio.rst.

Many cards have companion functions beside their main function: the audio function of a GPU's monitor connector, its
USB-C controller, the serial port of an FPGA card. They are part of the card: they are bound together with the main
function and never offered by themselves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from drivers.errors import Busy
from drivers.machine import MAX_TABLE, PCI_ADDRESS, PCI_DEVICES, Machine

GROUPS_FOLDER = "/sys/kernel/iommu_groups"
NOIOMMU_GROUP = "vfio-noiommu"
"""The name that the kernel gives to a group which VFIO makes for a device without an IOMMU (drivers/vfio/group.c). Such
a group isolates nothing."""
COMPANION_CLASSES = ("0403", "0c03", "0c80", "0700")
"""PCI classes of companion functions: audio, USB controller, USB-C connector manager (UCSI), serial port."""
BRIDGE_CLASSES = ("0604", "0607", "0609")
"""PCI classes of bridges. They may stay bound to their driver while a guest uses another function of their group."""
DRIVERS_BESIDE_GUEST = frozenset({"", "pci-stub", "pcieport"})
"""Kernel drivers that may be bound to a function while a guest uses another function of its group; '' is no driver.
Those of the VFIO family (`is_vfio_driver`) may, too."""


def is_vfio_driver(name: str) -> bool:
    """Return whether the kernel driver `name` hands functions to guests: vfio-pci, or a variant such as
    mlx5_vfio_pci."""
    return name.replace("_", "-").endswith("vfio-pci")


def find_group(machine: Machine, address: str) -> str:
    """Return the number of the IOMMU group that isolates a function, as text; '' if the function has no IOMMU."""
    group = machine.link(f"{PCI_DEVICES}/{address}/iommu_group")
    return "" if group and machine.text(f"{GROUPS_FOLDER}/{group}/name") == NOIOMMU_GROUP else group


def has_iommu(machine: Machine) -> bool:
    """Return whether the host has an IOMMU: one of its groups isolates the functions in it."""
    return any(machine.text(f"{GROUPS_FOLDER}/{group}/name") != NOIOMMU_GROUP for group in machine.names(GROUPS_FOLDER))


def describe_missing_iommu(machine: Machine) -> str:
    """Return why functions have no IOMMU and what the operator has to change.

    The advice depends on the processor's vendor, the kernel's command line, and whether the firmware describes an IOMMU
    of Intel (the ACPI table DMAR). Sources: Documentation/admin-guide/kernel-parameters.txt,
    Documentation/arch/x86/iommu.rst.
    """
    words = machine.text("/proc/cmdline").split()
    processor = _read_processor(machine)
    vendor, is_virtual = processor.get("vendor_id", ""), "hypervisor" in processor.get("flags", "").split()
    switched_off = sorted({"intel_iommu=off", "amd_iommu=off", "iommu=off"} & {*words})
    if has_iommu(machine):
        remedy = "the IOMMU does not cover it: update the firmware, or move the card to another slot"
    elif switched_off:
        remedy = f"remove {' and '.join(switched_off)} from the kernel's command line"
    elif vendor == "GenuineIntel" and "intel_iommu=on" not in words:
        also = "" if _has_acpi_table(machine, "DMAR") else ", and switch VT-d on in the firmware"
        remedy = f"add intel_iommu=on to the kernel's command line{also}"
    elif vendor == "GenuineIntel":
        remedy = "switch VT-d on in the firmware; the kernel's command line has intel_iommu=on already"
    elif vendor == "AuthenticAMD":
        remedy = "switch the IOMMU (AMD-Vi) on in the firmware; the kernel needs no parameter"
    else:
        remedy = "switch it on in the firmware; Intel processors also need intel_iommu=on on the kernel's command line"
    if is_virtual:
        remedy += " (this is a virtual machine: its hypervisor has to give it a virtual IOMMU)"
    return f"no IOMMU: {remedy}"


def list_card_functions(machine: Machine, address: str) -> list[str]:
    """Return the function `address`, its companion functions and its virtual functions: all functions that an act may
    affect."""
    return [address, *list_companions(machine, address), *list_virtual_functions(machine, address)]


def list_virtual_functions(machine: Machine, address: str) -> list[str]:
    """Return the addresses of a card's virtual functions, sorted as text; empty if there are none or the card is
    absent."""
    path = f"{PCI_DEVICES}/{address}"
    links = (machine.link(f"{path}/{name}") for name in machine.names(path, "virtfn*"))
    return sorted(filter(None, links))


def list_companions(machine: Machine, address: str) -> list[str]:
    """Return the companion functions of the card whose main function is `address`; empty if `address` is no main
    function."""
    slot, _, number = address.rpartition(".")
    if number != "0":
        return []
    others = (f"{slot}.{number}" for number in range(1, 8))
    return [other for other in others if find_main_function(machine, other) == address]


def find_main_function(machine: Machine, address: str) -> str:
    """Return the main function of the card to which the companion function `address` belongs; '' if it is no companion.

    The main function is function 0 of the same slot. If function 0 is a bridge or has a companion's class itself, such
    as a sound card, its card has no companions. Functions with SR-IOV, physical or virtual, are no companions.
    """
    slot, _, number = address.rpartition(".")
    main_function, path = f"{slot}.0", f"{PCI_DEVICES}/{address}"
    if number == "0" or not _read_class(machine, address).startswith(COMPANION_CLASSES):
        return ""
    if machine.exists(f"{path}/physfn") or machine.read_int(f"{path}/sriov_totalvfs", 0) > 0:
        return ""
    main_class = _read_class(machine, main_function)
    return main_function if main_class and not main_class.startswith(("06", *COMPANION_CLASSES)) else ""


def list_companions_in_groups(machine: Machine, card: str, parts: Iterable[str]) -> list[str]:
    """Return the companions of `card` (the address of its main function) that share an IOMMU group with one of `parts`.

    `parts` are the functions that are handed out. A companion in a group of its own does not concern a guest that uses
    the card, so the host may keep that companion.
    """
    groups = {find_group(machine, part) for part in parts} - {""}
    return [one for one in list_companions(machine, card) if find_group(machine, one) in groups]


def refuse_blocked_groups(machine: Machine, parts: Iterable[str], together: Collection[str]) -> None:
    """Raise Busy, with advice, if one of `parts` shares its IOMMU group with a function that is bound to a driver of
    the host.

    Functions in `together` are handed out together with `parts`, so their present drivers do not matter.
    """
    for group, part in {find_group(machine, part): part for part in parts}.items():
        for other in machine.names(f"{GROUPS_FOLDER}/{group}/devices") if group else ():
            driver = machine.link(f"{GROUPS_FOLDER}/{group}/devices/{other}/driver")
            if other not in together and not _may_stay(machine, other, driver):
                raise Busy(
                    f"{part} is in the same IOMMU group ({group}) as {other}, which is bound to the host's driver "
                    f"{driver}: a guest gets all functions of a group or none; {_advise(machine, part, other, driver)}"
                )


def _may_stay(machine: Machine, address: str, driver: str) -> bool:
    """Return whether a function may stay bound to `driver` while a guest uses another function of its group."""
    return (
        driver in DRIVERS_BESIDE_GUEST
        or is_vfio_driver(driver)
        or _read_class(machine, address).startswith(BRIDGE_CLASSES)
    )


def _advise(machine: Machine, address: str, other: str, driver: str) -> str:
    """Return what an operator can do about the function `other`, which is bound to `driver` and so blocks `address`."""
    if find_main_function(machine, other) == address:
        return f'set bind = "vfio-pci" for {address}: then {other}, which is part of the card, is bound with it'
    if other.rpartition(".")[0] == address.rpartition(".")[0]:
        return (
            f"the card does not isolate its functions from each other: keep {other} unbound from {driver} at every "
            "boot if the host can do without it"
        )
    places = " or ".join(_describe_place(machine, one) for one in (address, other))
    return (
        f"move {places} to a slot below another root port, or switch ACS (access control services) on in the "
        f"firmware; if the host can do without {other}, keep it unbound from {driver} at every boot"
    )


def _describe_place(machine: Machine, address: str) -> str:
    """Return the address, with the name of its physical slot if the firmware names the slot."""
    slot = address.rpartition(".")[0]
    folder = "/sys/bus/pci/slots"
    names = (name for name in machine.names(folder) if machine.text(f"{folder}/{name}/address") == slot)
    name = next(names, "")
    return f"{address} (slot {name})" if name else address


def _read_class(machine: Machine, address: str) -> str:
    """Return a function's PCI class as six hex digits without 0x; '' if the function is absent or `address` is no PCI
    address."""
    if not PCI_ADDRESS.fullmatch(address):
        return ""
    return machine.text(f"{PCI_DEVICES}/{address}/class").removeprefix("0x")


def _read_processor(machine: Machine) -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo, such as `vendor_id`; empty without that file."""
    table = machine.read("/proc/cpuinfo", MAX_TABLE) if machine.exists("/proc/cpuinfo") else ""
    fields = (line.partition(":") for line in table.partition("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in fields}


def _has_acpi_table(machine: Machine, name: str) -> bool:
    """Return whether the firmware has the ACPI table `name`. Only its existence is checked: the table need not be
    readable."""
    return machine.exists(f"/sys/firmware/acpi/tables/{name}")
