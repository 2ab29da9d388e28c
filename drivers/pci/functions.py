"""The PCI driver: it offers the PCI functions that an operator's rules select, whole or as their virtual functions.

Settings: `rules`, a list of tables. `vendor`, `product`, `class` and `address` select functions; they are globs over
lower-case hex without 0x, and all that are given must match. `type` is the device type. `vfs` (the number of virtual
functions) and `bind` (the kernel driver of what is handed out, such as `vfio-pci`; '' for none) describe the wanted
state; what a rule does not set is left unchanged.
The formats are upstream's (contract section 6.3), its mistakes are not: the type comes from a rule or the PCI class,
and functions that the host itself uses are never offered. `drivers.pci.sriov` and `drivers.pci.binding` plan the steps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, ClassVar, TypeVar

import msgspec
from msgspec import Meta, Struct

from drivers.base import Driver, Findings, at_most
from drivers.errors import Busy, DriverError, Failed, Gone, Invalid, Unsupported
from drivers.inventory import AttachHandle, Attribute, Deployable, Device, DeviceType, Fault, Sample
from drivers.machine import MAX_TABLE, PCI_DEVICES, Machine
from drivers.pci import binding, pci_health, sriov
from drivers.pci.host_usage import find_functions_used_by_host
from drivers.plan import Act, Ask, Plan, Step, Vitals, Write

VENDORS = {"10de": "NVIDIA", "102b": "MATROX", "10ee": "XILINX", "1bd4": "INSPUR", "8086": "INTEL", "19e5": "HUAWEI"}
"""Vendors that upstream shows by name; other vendors are shown by their number."""
CLASS_TYPES: tuple[tuple[str, str, DeviceType], ...] = (
    ("03", "*", "GPU"),
    ("0b40", "8086", "QAT"),
    ("0108", "*", "SSD"),
    ("02", "*", "NIC"),
)
"""(PCI class prefix, vendor, type). Class 1200, processing accelerator, does not tell the type, so the rule must."""
BRIDGE = "06"
DSN_CAPABILITY = 0x0003

RESET_S = 100.0
"""Timeout of a reset in seconds; a function-level reset may take more than a minute."""
MAX_STEPS, MAX_LISTED_STEPS = 240, 20
"""Maximum steps in one plan (the next plan continues), and maximum steps that `to_install` lists."""
CAP_DAC_OVERRIDE = 1 << 1
BLOCKED_PREFIX = "cannot be done: "

MatchT = TypeVar("MatchT", bound="PciMatch")
VfCount = Annotated[int, Meta(ge=0, le=1024)]
KernelDriverName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]*$", max_length=64)]
HexGlob = Annotated[str, Meta(pattern=r"^[0-9a-f*?\[\]!:.-]+$", max_length=64)]


class PciMatch(Struct, frozen=True, forbid_unknown_fields=True, rename={"pci_class": "class"}):
    """Selects PCI functions by globs. `class` is compared with four digits (`0302`) and with six (`030200`)."""

    vendor: HexGlob = "*"
    product: HexGlob = "*"
    pci_class: HexGlob = "*"
    address: HexGlob = "*"


class PciRule(PciMatch, frozen=True, forbid_unknown_fields=True):
    """One rule of the settings: it selects functions to offer, and sets their type and wanted state.

    `type` is the device type; None takes it from the PCI class. The wanted state is `vfs`, the number of virtual
    functions, and `bind`, the kernel driver ('' for no driver of the host); None leaves either as it is.
    """

    type: DeviceType | None = None
    vfs: VfCount | None = None
    bind: KernelDriverName | None = None


class PciFunction(Struct, frozen=True):
    """A PCI function as sysfs describes it; ids are lower-case hex without 0x, and `pci_class` has six digits."""

    address: str
    vendor: str
    product: str
    pci_class: str


class PciDriver(Driver):
    """Offers one device with one deployable for each function that a rule selects and the host does not use.

    The deployable has one `PCI` handle for each virtual function that the host does not use, or one for the function
    itself if there are none. If the rule wants virtual functions, the deployable has no handles until they exist.
    """

    name: ClassVar[str] = "pci_driver"
    version: ClassVar[str] = "2"
    subsystems: ClassVar[tuple[str, ...]] = ("pci",)
    watched: ClassVar[tuple[str, ...]] = ()
    writes: ClassVar[tuple[str, ...]] = (
        *(
            f"{PCI_DEVICES}/*:*:*.*/{name}"
            for name in ("sriov_numvfs", "sriov_drivers_autoprobe", "driver_override", "reset")
        ),
        f"{binding.DRIVERS_FOLDER}/*/bind",
        f"{binding.DRIVERS_FOLDER}/*/unbind",
        "/sys/bus/pci/drivers_probe",
    )
    acts: ClassVar[tuple[Act, ...]] = ("install", "uninstall", "detach", "partition", "reset")

    def probe(self, machine: Machine, settings: dict[str, object]) -> tuple[str, ...]:
        """Return what is missing: privileges, a writable /sys, an IOMMU, kernel drivers that the rules name.

        Raises Invalid for unusable rules.
        """
        return tuple(_list_missing_requirements(machine, read_rules(settings)))

    def discover(self, machine: Machine, settings: dict[str, object]) -> Findings:
        """Return a device for each selected function, or only a fault if no function of the machine matches a rule.

        Raises Invalid for unusable rules, and DriverError if it cannot be determined which functions the host uses.
        """
        rules = read_rules(settings)
        findings = discover_devices(machine, rules) if rules else Findings()
        if findings == Findings():
            no_match = Fault("rules", "no PCI function of this machine matches: say in `rules` which ones to offer")
            return Findings(faults=(no_match,))
        return findings

    def health(self, machine: Machine, settings: dict[str, object], ask: Ask) -> Vitals:
        """Return the same health as `discover`, with all readings from sysfs.

        Raises Gone if the function is absent, and another DriverError if its health cannot be read.
        """
        address = find_address(machine, ask.key)
        return Vitals(*pci_health.read_status(machine, address), pci_health.read_signals(machine, address))

    def stats(self, machine: Machine, settings: dict[str, object], ask: Ask) -> tuple[Sample, ...]:
        """Return the load that sysfs shows: utilization, memory, temperatures, power, errors.

        Raises Gone if the function is absent.
        """
        return pci_health.read_samples(machine, ask.key, find_address(machine, ask.key))

    def install(self, machine: Machine, settings: dict[str, object], ask: Ask) -> Plan:
        """Plan how to bring the function to the state of its rule; `vfs` and `bind` of `ask.layout` override the rule.

        Virtual functions must exist before steps to bind them can be planned: execute the steps and call this again
        until the plan has no steps. Usually two plans have steps; many virtual functions (about a hundred) need more,
        because one plan has at most MAX_STEPS steps. Raises Gone, Busy if the host or a guest uses a function that
        would be changed, and Invalid or Unsupported with a text that says what to do.
        """
        address = find_address(machine, ask.key)
        rule = _apply_layout(
            find_matching_rule(_read_function(machine, address), read_rules(settings)) or PciRule(), ask.layout
        )
        view = binding.HostUsage(machine, find_functions_used_by_host(machine), for_act=True)
        return Plan(tuple(_plan_rule_steps(view, address, rule)[:MAX_STEPS]), _describe_rule(rule))

    def partition(self, machine: Machine, settings: dict[str, object], ask: Ask) -> Plan:
        """Return the same plan as `install`, where `ask.layout` overrides the rule; raises the same errors."""
        return self.install(machine, settings, ask)

    def uninstall(self, machine: Machine, settings: dict[str, object], ask: Ask) -> Plan:
        """Plan how to restore the first number of virtual functions and the first driver binding.

        Raises Gone if the function is absent, Busy if the host or a guest uses a function that would be changed, and
        Unsupported if the card's kernel driver cannot change the number of virtual functions.
        """
        address = find_address(machine, ask.key)
        view = binding.HostUsage(machine, find_functions_used_by_host(machine), for_act=True)
        steps = sriov.plan_virtual_functions_restore(view, address, ask.first)
        for part in [address] if steps else [address, *sriov.list_virtual_functions(machine, address)]:
            steps += binding.plan_binding_restore(view, part, ask.first)
        return Plan(
            tuple(steps[:MAX_STEPS]), "as it was before its first change" if ask.first else "it was never changed"
        )

    def detach(self, machine: Machine, settings: dict[str, object], ask: Ask) -> Plan:
        """Return a plan without steps if no guest uses the function of `ask.handle`; libvirt itself detaches it.

        Raises Busy while a guest uses it, Failed if that cannot be found out, and Invalid or Gone for an unknown handle
        or device. A function that does not exist any more is used by nobody, because the kernel removes a function only
        when its guest has ended (drivers/vfio/vfio_main.c, `vfio_unregister_group_dev`).
        """
        address = _parse_handle(ask.handle)
        if not machine.exists(f"{PCI_DEVICES}/{address}"):
            return Plan(said=f"{address} does not exist any more")
        card = find_address(machine, ask.key)
        if address != card and machine.link(f"{PCI_DEVICES}/{address}/physfn") != card:
            raise Invalid(f"{address} is not a function of {ask.key}")
        use = binding.find_guest_use(machine, address, for_act=True)
        if use == "guest":
            raise Busy(f"a guest still uses {address}: detach it from the guest, or end the guest")
        if use == "unknown":
            raise Failed(
                f"whether a guest uses {address} cannot be found out: does the agent see /dev/vfio and the function's "
                "IOMMU group?"
            )
        return Plan(said=f"no guest uses {address}")

    def reset(self, machine: Machine, settings: dict[str, object], ask: Ask) -> Plan:
        """Plan a reset of the function by the kernel's own method; its virtual functions are reset with it.

        Raises Gone if the function is absent, Busy if the host or a guest uses the function or one of its virtual
        functions, and Unsupported if the kernel has no method.
        """
        address = find_address(machine, ask.key)
        path, parts = f"{PCI_DEVICES}/{address}", [address, *sriov.list_virtual_functions(machine, address)]
        if not machine.exists(f"{path}/reset"):
            raise Unsupported(f"{address} cannot be reset: the kernel knows no method for it")
        binding.HostUsage(machine, find_functions_used_by_host(machine), for_act=True).refuse_if_used(parts)
        step = Step(
            does=f"reset {address}",
            write=Write(f"{path}/reset", "1"),
            idle=binding.list_guest_nodes(machine, parts),
            timeout_s=RESET_S,
        )
        return Plan((step,), "reset")


def discover_devices(machine: Machine, rules: list[PciRule]) -> Findings:
    """Return the devices that the rules select, and faults for functions that cannot be offered.

    A function whose reading fails becomes a fault; one that was unplugged meanwhile is left out. Raises DriverError if
    it cannot be determined which functions the host uses.
    """
    devices: list[Device] = []
    faults: list[Fault] = []
    in_use = find_functions_used_by_host(machine)
    for address in machine.pci_functions():
        try:
            for finding in _discover_function(machine, address, rules, in_use):
                if isinstance(finding, Fault):
                    faults.append(finding)
                else:
                    devices.append(finding)
        except Gone:
            continue  # unplugged during this call
        except DriverError as error:
            faults.append(Fault(address, str(error)))
    return Findings(tuple(devices), at_most(faults))


def read_rules(settings: dict[str, object]) -> list[PciRule]:
    """Return the validated rules of the settings. Raises Invalid if one is unusable or selects every function."""
    try:
        rules = msgspec.convert(settings.get("rules", []), list[PciRule])
    except msgspec.ValidationError as error:
        hint = " (hex digits in lower case without 0x, and * ? [] as wildcards)" if "regex" in str(error) else ""
        raise Invalid(f"the rules of pci_driver are not usable: {error}{hint}") from None
    for number, rule in enumerate(rules, 1):
        if rule == PciRule(type=rule.type, vfs=rule.vfs, bind=rule.bind):
            raise Invalid(
                f"rule {number} of pci_driver selects every function: state vendor, product, class or address"
            )
    return rules


def _apply_layout(rule: PciRule, layout: dict[str, str]) -> PciRule:
    """Return the rule with the values of a layout in place of its own. Raises Invalid for an unusable layout."""
    try:
        if unknown := set(layout) - {"vfs", "bind"}:
            raise Invalid(f"the layout of a PCI function has no key {min(unknown)!r}: its keys are vfs and bind")
        changed = {**msgspec.to_builtins(rule), **layout}
        return msgspec.convert(changed, PciRule, strict=False)
    except msgspec.ValidationError as error:
        raise Invalid(f"the layout is not usable: {error}") from None


def _list_missing_requirements(machine: Machine, rules: list[PciRule]) -> Iterator[str]:
    """Yield a sentence for each thing that the driver needs and this host or process lacks."""
    status = dict(line.split(":", 1) for line in machine.text("/proc/self/status").splitlines() if ":" in line)
    user, capabilities = status.get("Uid", "0").split()[:1], int(status.get("CapEff", "2").strip(), 16)
    if user != ["0"] and not capabilities & CAP_DAC_OVERRIDE:
        yield "the agent may not write to /sys: run it as root, or with CAP_DAC_OVERRIDE"
    for line in machine.read("/proc/self/mountinfo", MAX_TABLE).splitlines():
        fields = line.split()
        if fields[4:5] == ["/sys"] and "ro" in fields[5].split(","):
            yield "/sys is mounted read-only for the agent (a container without write access?)"
    if not machine.names("/sys/kernel/iommu_groups"):
        yield "no IOMMU, so no guest gets a PCI function: switch it on in the firmware and on the kernel's command line"
    for name in sorted({rule.bind for rule in rules if rule.bind}):
        if not machine.exists(f"{binding.DRIVERS_FOLDER}/{name}"):
            yield f"the kernel has no driver {name}, which a rule binds to: load it (modprobe {name})"


def find_address(machine: Machine, key: str) -> str:
    """Return the PCI address of the device with this key. Raises Gone if this host has no such device.

    For a key with a serial number it reads the functions of that vendor until one matches.
    """
    kind, _, identity = key.partition(":")
    for address in [identity] if kind == "pci" else machine.pci_functions():
        try:
            if kind != "pci" and not identity.startswith(f"{_read_id(machine, address, 'vendor')}:"):
                continue  # avoids most reads on a host with hundreds of functions
            function = _read_function(machine, address)
            if kind == "pci" or _make_device_key(machine, function) == key:
                return address
        except Gone:
            continue
    raise Gone(f"there is no {key} on this host (any more)")


def _read_function(machine: Machine, address: str) -> PciFunction:
    """Return a function as sysfs describes it.

    Raises Gone if it is absent, and another DriverError if it is unreadable.
    """
    return PciFunction(address, *(_read_id(machine, address, name) for name in ("vendor", "device", "class")))


def _read_id(machine: Machine, address: str, name: str) -> str:
    """Return an id attribute without its 0x. Raises the errors of `Machine.read`."""
    return machine.read(f"{PCI_DEVICES}/{address}/{name}").removeprefix("0x")


def _discover_function(
    machine: Machine, address: str, rules: list[PciRule], in_use: dict[str, str]
) -> Iterator[Device | Fault]:
    """Yield the device of a function if a rule selects it, and a fault for each part that cannot be handed out.

    The parts are its virtual functions or, if there are none, the function itself. `in_use` (address → reason) holds
    the functions that the host uses: such a part is a fault with that reason, and no handle of the device. There is no
    device if the function itself is such a part, or if its type is unknown, which is a fault, too. A virtual function
    of a selected card is part of that card's device, so it yields nothing by itself. Raises DriverError, which is Gone
    if the function was unplugged.
    """
    function = _read_function(machine, address)
    rule = find_matching_rule(function, rules)
    if rule is None or _is_part_of_selected_card(machine, address, rules):
        return
    virtual_functions = sriov.list_virtual_functions(machine, address)
    parts = virtual_functions or [address]
    yield from (Fault(part, in_use[part]) for part in parts if part in in_use)
    if parts == [address] and address in in_use:
        return
    device_type = rule.type or get_class_type(function)
    if device_type is None:
        yield Fault(
            address, f"its PCI class {function.pci_class} does not determine the device type: set `type` in the rule"
        )
        return
    handed_out = [part for part in parts if part not in in_use and (virtual_functions or not rule.vfs)]
    to_install = _describe_install_steps(binding.HostUsage(machine, in_use, for_act=False), address, rule)
    yield _build_device(machine, function, device_type, handed_out, to_install)


def _is_part_of_selected_card(machine: Machine, address: str, rules: list[PciRule]) -> bool:
    """Return whether the function is a virtual function of a card that a rule selects. Raises DriverError."""
    card = machine.link(f"{PCI_DEVICES}/{address}/physfn")
    return bool(card) and find_matching_rule(_read_function(machine, card), rules) is not None


def _plan_rule_steps(view: binding.HostUsage, address: str, rule: PciRule) -> list[Step]:
    """Return the steps towards the rule that are possible now; virtual functions are bound only after they exist.

    Raises the errors of `sriov.plan_virtual_functions` and `binding.plan_binding`.
    """
    unbound = rule.bind is not None
    steps = [] if rule.vfs is None else sriov.plan_virtual_functions(view, address, rule.vfs, unbound=unbound)
    if rule.bind is None:
        return steps
    if steps:
        binding.refuse_unless_bindable(view.machine, address, rule.bind)  # refuse before the first change, not halfway
        return steps
    parts = sriov.list_virtual_functions(view.machine, address) or [address]
    return [step for part in parts for step in binding.plan_binding(view, part, rule.bind)]


def _describe_install_steps(view: binding.HostUsage, address: str, rule: PciRule) -> str:
    """List, one per line, what `install` would do now, at most MAX_LISTED_STEPS steps; or why it cannot be done.

    '' means that nothing has to be done. With a `view` that is not `for_act`, running guests are ignored: whether one
    runs is not a change of the device.
    """
    try:
        steps = _plan_rule_steps(view, address, rule)
    except (Busy, Invalid, Unsupported) as error:
        return f"{BLOCKED_PREFIX}{error}"
    lines = [step.does for step in steps]
    if rule.bind and lines and rule.vfs and len(sriov.list_virtual_functions(view.machine, address)) != rule.vfs:
        lines.append(f"bind each of them to {rule.bind}")
    overflow_line = [f"and {len(lines) - MAX_LISTED_STEPS} more steps"] if len(lines) > MAX_LISTED_STEPS else []
    return "\n".join(lines[:MAX_LISTED_STEPS] + overflow_line)


def _describe_rule(rule: PciRule) -> str:
    """Describe the state that the rule wants; '' if it sets neither `vfs` nor `bind`."""
    bound = "" if rule.bind is None else f"bound to {rule.bind or 'no driver of the host'}"
    return ", ".join(filter(None, ("" if rule.vfs is None else f"{rule.vfs} virtual functions", bound)))


def find_matching_rule(function: PciFunction, rules: Sequence[MatchT]) -> MatchT | None:
    """Return the first rule whose globs all match the function, or None. A bridge matches no rule."""
    for rule in rules if not function.pci_class.startswith(BRIDGE) else ():
        pairs = (
            (function.vendor, rule.vendor),
            (function.product, rule.product),
            (function.address, rule.address),
        )
        classes = (function.pci_class, function.pci_class[:4])
        if all(fnmatchcase(*pair) for pair in pairs) and any(fnmatchcase(c, rule.pci_class) for c in classes):
            return rule
    return None


def get_class_type(function: PciFunction) -> DeviceType | None:
    """Return the device type that the PCI class stands for, or None if the class does not tell it."""
    for prefix, vendor, kind in CLASS_TYPES:
        if function.pci_class.startswith(prefix) and fnmatchcase(function.vendor, vendor):
            return kind
    return None


def _build_device(
    machine: Machine, function: PciFunction, device_type: DeviceType, handed_out: list[str], to_install: str
) -> Device:
    """Return the device of a function, with one deployable that has a `PCI` handle for each address in `handed_out`.

    Its health, kernel driver, bridges and possible acts are read here. Raises DriverError if the health cannot be read.
    """
    address, path = function.address, f"{PCI_DEVICES}/{function.address}"
    status, reason = pci_health.read_status(machine, address)
    traits = ["OWNER_CYBORG"]
    if vendor := VENDORS.get(function.vendor):
        traits.append(f"CUSTOM_PCI_{vendor}")
    traits.append(f"CUSTOM_PCI_PRODUCT_ID_{function.product.upper()}")
    attributes = (Attribute("rc", "CUSTOM_PCI"), *(Attribute(f"trait{n}", trait) for n, trait in enumerate(traits)))
    handles = tuple(_make_handle(machine, part) for part in handed_out)
    owner = vendor or function.vendor.upper()
    supported_acts = {"partition": sriov.supports_sriov(machine, address), "reset": machine.exists(f"{path}/reset")}
    return Device(
        key=_make_device_key(machine, function),
        type=device_type,
        vendor=function.vendor,
        model=function.product,
        address=address,
        std_board_info=json.dumps({"product_id": function.product, "controller": None}),
        vendor_board_info="miss_vb_info",
        status=status,
        status_reason=reason,
        numa_node=max(-1, machine.read_int(f"{path}/numa_node", -1)),
        kernel_driver=machine.link(f"{path}/driver"),
        bridges=pci_health.list_bridges(machine, address),
        deployables=(Deployable(f"{machine.node}_{address}", len(handles), attributes, handles, owner),),
        to_install=to_install,
        acts=" ".join(
            ["detach", "health", "install", *(word for word, can in supported_acts.items() if can), "uninstall"]
        ),
        changeable="bind vfs" if supported_acts["partition"] else "bind",
        sized_by="vfs" if supported_acts["partition"] else "",
    )


def _make_handle(machine: Machine, address: str) -> AttachHandle:
    """Return the `PCI` handle of a function, with what can be seen of its use."""
    domain, bus, slot, number = re.split("[:.]", address)
    use = binding.find_guest_use(machine, address, for_act=False)
    info = json.dumps({"bus": bus, "device": slot, "domain": domain, "function": number})
    return AttachHandle("PCI", info, "" if use == "free" else use)


def _parse_handle(handle: AttachHandle | None) -> str:
    """Return the PCI address of a `PCI` handle. Raises Invalid for any other handle."""
    try:
        fields = json.loads(handle.info) if handle and handle.attach_type == "PCI" else {}
        return f"{fields['domain']}:{fields['bus']}:{fields['device']}.{fields['function']}"
    except (ValueError, KeyError):
        raise Invalid(f"{handle} is not the handle of a PCI function") from None


def _make_device_key(machine: Machine, function: PciFunction) -> str:
    """Return the device key: from the serial number if the function has one, else from its PCI address.

    The serial number of a virtual function is not used, because it repeats the one of its card.
    """
    path = f"{PCI_DEVICES}/{function.address}"
    serial = "" if machine.exists(f"{path}/physfn") else _read_serial_number(machine, path)
    number = function.address.rpartition(".")[2]
    return f"serial:{function.vendor}:{serial}:{number}" if serial else f"pci:{function.address}"


def _read_serial_number(machine: Machine, path: str) -> str:
    """Return the Device Serial Number (capability of PCIe 7.9.3) in hex, '' if there is none or it cannot be read.

    Only root can read more than the first 64 bytes of `config`, so other users always get ''.
    """
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
