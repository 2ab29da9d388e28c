"""Any PCI function by an operator's rules, handed out whole. Loaded by `drivers.child`.

Settings: `rules`, a list of tables with `vendor`, `product`, `class`, `address` (globs over lower-case hex without 0x;
those given must all match) and `type`. Forms are upstream's (contract section 6.3), its faults are not:
a rule or the PCI class decides the type, and what the host itself uses is never offered.
"""

from __future__ import annotations

import json
import re
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta, Struct

from drivers.base import Driver, Findings, at_most
from drivers.errors import DriverError, Gone, Invalid
from drivers.inuse import used_by_host
from drivers.inventory import AttachHandle, Attribute, Deployable, Device, DeviceType, Fault, Health
from drivers.machine import PCI_DEVICES, Machine

VENDORS = {"10de": "NVIDIA", "102b": "MATROX", "10ee": "XILINX", "1bd4": "INSPUR", "8086": "INTEL", "19e5": "HUAWEI"}
"""Vendors that upstream calls by name; others go by number."""
CLASS_TYPES: tuple[tuple[str, str, DeviceType], ...] = (
    ("03", "*", "GPU"),
    ("0b40", "8086", "QAT"),
    ("0108", "*", "SSD"),
    ("02", "*", "NIC"),
)
"""PCI class prefix, vendor, type. 1200, processing accelerator, says nothing of what it processes: the rule must."""
BRIDGE = "06"
DSN_CAPABILITY = 0x0003

Glob = Annotated[str, Meta(pattern=r"^[0-9a-f*?\[\]!:.-]+$", max_length=64)]


class Rule(Struct, frozen=True, forbid_unknown_fields=True, rename={"pci_class": "class"}):
    """One line of what to take. A class has four digits (`0302`) or six (`030200`)."""

    vendor: Glob = "*"
    product: Glob = "*"
    pci_class: Glob = "*"
    address: Glob = "*"
    type: DeviceType | None = None


class Function(Struct, frozen=True):
    """A PCI function as sysfs has it; ids are lower-case hex without 0x, `pci_class` has six digits."""

    address: str
    vendor: str
    product: str
    pci_class: str


class PciDriver(Driver):
    """One device, one deployable, one `PCI` handle for each function that a rule takes and the host does not use."""

    name: ClassVar[str] = "pci_driver"
    subsystems: ClassVar[tuple[str, ...]] = ("pci",)
    watched: ClassVar[tuple[str, ...]] = ()

    def discover(self, machine: Machine, settings: dict[str, object]) -> Findings:
        """Raises Invalid for unusable rules, DriverError when it cannot be told what the host uses."""
        rules = read_rules(settings)
        taken: list[Device] = []
        faults: list[Fault] = []
        in_use = used_by_host(machine) if rules else {}
        for address in machine.pci_functions() if rules else ():
            try:
                found: Device | Fault | None = _take(machine, address, rules, in_use)
            except Gone:
                continue  # unplugged while we looked
            except DriverError as error:
                found = Fault(address, str(error))
            if isinstance(found, Fault):
                faults.append(found)
            elif found is not None:
                taken.append(found)
        if not taken and not faults:
            faults.append(Fault("rules", "no PCI function of this machine matches: say in `rules` which ones to offer"))
        return Findings(tuple(taken), at_most(faults))


def read_rules(settings: dict[str, object]) -> list[Rule]:
    """The rules of a settings table; raises Invalid with a sentence."""
    try:
        rules = msgspec.convert(settings.get("rules", []), list[Rule])
    except msgspec.ValidationError as error:
        hint = " (hex digits in lower case without 0x, and * ? [] as wildcards)" if "regex" in str(error) else ""
        raise Invalid(f"the rules of pci_driver are not usable: {error}{hint}") from None
    for number, rule in enumerate(rules, 1):
        if rule == Rule(type=rule.type):
            raise Invalid(f"rule {number} of pci_driver takes everything: state vendor, product, class or address")
    return rules


def _take(machine: Machine, address: str, rules: list[Rule], in_use: dict[str, str]) -> Device | Fault | None:
    path = f"{PCI_DEVICES}/{address}"
    vendor, product, pci_class = (
        machine.read(f"{path}/{name}").removeprefix("0x") for name in ("vendor", "device", "class")
    )
    function = Function(address, vendor, product, pci_class)
    rule = matching(function, rules)
    if rule is None or function.pci_class.startswith(BRIDGE):
        return None
    if reason := in_use.get(address):
        return Fault(address, reason)
    if parts := machine.read_int(f"{path}/sriov_numvfs", 0):
        return Fault(address, f"it is split into {parts} virtual functions: they can be offered, it cannot")
    kind = rule.type or class_type(function)
    if kind is None:
        return Fault(address, f"its PCI class {function.pci_class} does not tell what it is: state the rule's type")
    return _device(machine, path, function, kind)


def matching(function: Function, rules: list[Rule]) -> Rule | None:
    """The first rule whose globs all match."""
    for rule in rules:
        pairs = (
            (function.vendor, rule.vendor),
            (function.product, rule.product),
            (function.address, rule.address),
        )
        classes = (function.pci_class, function.pci_class[:4])
        if all(fnmatchcase(*pair) for pair in pairs) and any(fnmatchcase(c, rule.pci_class) for c in classes):
            return rule
    return None


def class_type(function: Function) -> DeviceType | None:
    """What its PCI class says a function is, None when it does not."""
    for prefix, vendor, kind in CLASS_TYPES:
        if function.pci_class.startswith(prefix) and fnmatchcase(function.vendor, vendor):
            return kind
    return None


def _device(machine: Machine, path: str, function: Function, kind: DeviceType) -> Device:
    address = function.address
    domain, bus, slot, number = re.split("[:.]", address)
    info = json.dumps({"bus": bus, "device": slot, "domain": domain, "function": number})
    status, reason = _health(machine, path, function)
    traits = ["OWNER_CYBORG"]
    if vendor := VENDORS.get(function.vendor):
        traits.append(f"CUSTOM_PCI_{vendor}")
    traits.append(f"CUSTOM_PCI_PRODUCT_ID_{function.product.upper()}")
    attributes = (Attribute("rc", "CUSTOM_PCI"), *(Attribute(f"trait{n}", trait) for n, trait in enumerate(traits)))
    name = f"{machine.node}_{address}"
    owner = vendor or function.vendor.upper()
    serial = "" if machine.exists(f"{path}/physfn") else _serial(machine, path)
    return Device(
        key=f"serial:{function.vendor}:{serial}:{number}" if serial else f"pci:{address}",
        type=kind,
        vendor=function.vendor,
        model=function.product,
        address=address,
        std_board_info=json.dumps({"product_id": function.product, "controller": None}),
        vendor_board_info="miss_vb_info",
        status=status,
        status_reason=reason,
        numa_node=max(-1, machine.read_int(f"{path}/numa_node", -1)),
        kernel_driver=machine.link(f"{path}/driver"),
        deployables=(Deployable(name, 1, attributes, (AttachHandle("PCI", info),), owner),),
    )


def _health(machine: Machine, path: str, function: Function) -> tuple[Health, str]:
    """From sysfs alone: off the bus, or a link narrower than it could be. An idle link slows down, it stays wide."""
    if function.vendor == "ffff" or machine.text(f"{path}/power_state") == "error":
        return "failed", "it does not answer on the bus"
    now, best = (machine.read_int(f"{path}/{name}_link_width", 0) for name in ("current", "max"))
    if 0 < now < best < 255:
        return "degraded", f"its PCIe link is x{now}, it could be x{best}"
    return "ok", ""


def _serial(machine: Machine, path: str) -> str:
    """The Device Serial Number capability (PCIe 7.9.3), '' without one. Beyond 64 bytes `config` is root's to read."""
    try:
        config = machine.read_bytes(f"{path}/config", 4096)
    except DriverError:
        return ""
    offset, hops = 0x100, 0
    while 0x100 <= offset <= len(config) - 12 and hops < 64:
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == DSN_CAPABILITY:
            serial = config[offset + 4 : offset + 12][::-1].hex()
            return "" if serial in ("0" * 16, "f" * 16) else serial
        offset, hops = header >> 20, hops + 1
    return ""
