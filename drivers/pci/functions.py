"""The PCI driver: it offers the PCI functions that an operator's rules select, whole or as their virtual functions.

Settings: `rules`, a list of tables. `vendor`, `product`, `class` and `address` select functions; they are globs over
lower-case hex without 0x, and all that are given must match. `type` is the device type. `vfs` (the number of virtual
functions) and `bind` (the kernel driver of what is handed out, such as `vfio-pci`; '' for none) describe the wanted
state; what a rule does not set is left unchanged. `vfs_beside_host` names the functions that may have virtual functions
although the host itself uses them. `offer` and `devices` say how they are offered in Placement (`drivers.pci.offer`).
The formats are upstream's (contract section 6.3), its mistakes are not: the type comes from a rule or the PCI class,
and functions that the host itself uses, or that no IOMMU isolates, are never offered. `drivers.pci.sriov` and
`drivers.pci.binding` plan the steps; `drivers.pci.iommu` tells which functions belong together.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

from msgspec import Struct

from drivers.base import Driver, Findings, at_most
from drivers.errors import Busy, DriverError, Failed, Gone, Invalid, Unsupported
from drivers.inventory import AttachHandle, Deployable, Device, DeviceType, Fault, HandleType, Sample
from drivers.machine import MAX_TABLE, PCI_DEVICES, Machine
from drivers.pci import binding, guest_usage, iommu, pci_health, sriov
from drivers.pci.addresses import normalize_address, read_handle_address
from drivers.pci.cards import AnyCard, Selection
from drivers.pci.config_space import read_config_space
from drivers.pci.host_usage import find_functions_used_by_host, list_interfaces
from drivers.pci.identity import SERIAL_PREFIX
from drivers.pci.offer import make_attributes, merge_offers
from drivers.pci.rules import PciFunction, PciRule, PciSettings, apply_layout, read_rules
from drivers.plan import Act, Ask, Plan, Step, Vitals, Write

DSN_CAPABILITY = 0x0003

RESET_S = 100.0
"""Timeout of a reset in seconds; a function-level reset may take more than a minute."""
MAX_STEPS, MAX_LISTED_STEPS = 240, 20
"""Maximum steps in one plan (the next plan continues), and maximum steps that `to_install` lists."""
CAP_DAC_OVERRIDE = 1 << 1
BLOCKED_PREFIX = "cannot be done: "

_last_serial_numbers: dict[str, str] = {}
"""The last serial number that was read of each function in this process: directory in sysfs → number, '' if it has
none."""


class PciDriver(Driver):
    """Offers one device with one deployable for each function that a rule selects.

    The deployable has one `PCI` handle for each virtual function of the selected function or, if the function has no
    virtual functions, one handle for the function itself. If the rule wants virtual functions, the deployable has no
    handles until they exist. Virtual functions that the host uses get no handle. A function is not offered if it has no
    IOMMU, or if the host uses it and the rule does not permit virtual functions beside that use (`vfs_beside_host`).
    Companion functions (`drivers.pci.iommu`) have no device of their own.
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
    settings_type: ClassVar[type[Struct] | None] = PciSettings
    handle_types: ClassVar[tuple[HandleType, ...]] = ("PCI",)
    min_kernel: ClassVar[str] = "3.16"  # the first one with driver_override
    cards: ClassVar[AnyCard] = AnyCard()
    """The kind of cards that the driver offers."""
    finds_own_cards: ClassVar[bool] = False
    """Whether the driver offers all cards of its kind if there are no rules. A vendor's driver does."""

    def check_settings(self, settings: dict[str, object]) -> None:
        """Raise Invalid, which names the rule, if the settings are unusable."""
        self.read_selection(settings)

    def probe(self, machine: Machine, settings: dict[str, object]) -> tuple[str, ...]:
        """Return what is missing: privileges, a writable /sys, an IOMMU, kernel drivers that the rules name.

        Raises Invalid for unusable rules.
        """
        return tuple(_list_missing_requirements(machine, self.read_selection(settings).rules))

    def read_selection(self, settings: dict[str, object]) -> Selection:
        """Return the functions that the settings select. Raises Invalid for unusable rules."""
        rules = read_rules(settings, self.name, finds_own_cards=self.finds_own_cards)
        return Selection(rules or [PciRule()] * self.finds_own_cards, self.cards)

    def discover(self, machine: Machine, settings: dict[str, object]) -> Findings:
        """Return a device for each selected function, or only a fault if no function of the machine matches a rule.

        Raises Invalid for unusable rules, and DriverError if it cannot be determined which functions the host uses.
        """
        selection = self.read_selection(settings)
        findings = discover_devices(machine, selection) if selection.rules else Findings()
        if findings == Findings() and not self.finds_own_cards:
            no_match = Fault("rules", "no PCI function of this machine matches: say in `rules` which ones to offer")
            return Findings(faults=(no_match,))
        return findings

    def health(self, machine: Machine, settings: dict[str, object], ask: Ask) -> Vitals:
        """Return the same health as `discover`, with all readings from sysfs.

        Raises Gone if the function is absent, and another DriverError if its health cannot be read.
        """
        address = find_address(machine, ask.key, ask.address)
        return Vitals(*self.cards.read_status(machine, address), self.cards.read_signals(machine, address))

    def stats(self, machine: Machine, settings: dict[str, object], ask: Ask) -> tuple[Sample, ...]:
        """Return the load that sysfs shows: utilization, memory, temperatures, power, errors.

        Raises Gone if the function is absent.
        """
        return self.cards.read_samples(machine, ask.key, find_address(machine, ask.key, ask.address))

    def install(self, machine: Machine, settings: dict[str, object], ask: Ask) -> Plan:
        """Plan how to bring the function to the state of its rule; `vfs` and `bind` of `ask.layout` override the rule.

        Virtual functions must exist before steps to bind them can be planned: execute the steps and call this again
        until the plan has no steps. Usually two plans have steps; many virtual functions (about a hundred) need more,
        because one plan has at most MAX_STEPS steps. Raises Gone, Busy if the host or a guest uses a function that
        would be changed, and Invalid or Unsupported with a text that says what to do.
        """
        address = find_address(machine, ask.key, ask.address)
        rule = apply_layout(self._find_rule(machine, settings, address), ask.layout)
        view = inspect_usage_for_act(machine, address)
        return Plan(tuple(_plan_rule_steps(view, address, rule)[:MAX_STEPS]), _describe_rule(rule))

    def partition(self, machine: Machine, settings: dict[str, object], ask: Ask) -> Plan:
        """Return the same plan as `install`, where `ask.layout` overrides the rule; raises the same errors."""
        return self.install(machine, settings, ask)

    def uninstall(self, machine: Machine, settings: dict[str, object], ask: Ask) -> Plan:
        """Plan how to restore the first number of virtual functions and the first driver binding.

        Raises Gone if the function is absent, Busy if the host or a guest uses a function that would be changed, and
        Unsupported if the card's kernel driver cannot change the number of virtual functions.
        """
        address = find_address(machine, ask.key, ask.address)
        rule = self._find_rule(machine, settings, address)
        view = inspect_usage_for_act(machine, address)
        steps = sriov.plan_virtual_functions_restore(_permit_beside_host(view, address, rule), address, ask.first)
        virtual_functions = [] if steps else iommu.list_virtual_functions(machine, address)
        for part in [address, *iommu.list_companions(machine, address), *virtual_functions]:
            steps += binding.plan_binding_restore(view, part, ask.first)
        return Plan(
            tuple(steps[:MAX_STEPS]), "as it was before its first change" if ask.first else "it was never changed"
        )

    def reset(self, machine: Machine, settings: dict[str, object], ask: Ask) -> Plan:
        """Plan a reset of the function by the kernel's own method; its virtual functions are reset with it.

        Raises Gone if the function is absent, Busy if the host or a guest uses one of the card's functions
        (`iommu.list_card_functions`), and Unsupported if the kernel has no method.
        """
        address = find_address(machine, ask.key, ask.address)
        path, parts = f"{PCI_DEVICES}/{address}", iommu.list_card_functions(machine, address)
        if not machine.exists(f"{path}/reset"):
            raise Unsupported(f"{address} cannot be reset: the kernel knows no method for it")
        inspect_usage_for_act(machine, address).refuse_if_used(parts)
        step = Step(does=f"reset {address}", write=Write(f"{path}/reset", "1"), timeout_s=RESET_S)
        return Plan((step,), "reset")

    def _find_rule(self, machine: Machine, settings: dict[str, object], address: str) -> PciRule:
        """Return the rule that selects a function; a rule that leaves everything as it is if none does.

        Raises Invalid for unusable rules, and DriverError if the function cannot be read.
        """
        return self.read_selection(settings).find_rule(_read_function(machine, address)) or PciRule()


def inspect_usage_for_act(machine: Machine, address: str) -> binding.HostUsage:
    """Return what the host uses of a function, its companion functions and its virtual functions, for planning an act.

    Raises DriverError if it cannot be determined which functions the host uses.
    """
    in_use = find_functions_used_by_host(machine, iommu.list_card_functions(machine, address))
    return binding.HostUsage(machine, in_use, for_act=True)


def discover_devices(
    machine: Machine, selection: Selection, *, passthrough: bool = True, shared: bool = False
) -> Findings:
    """Return the devices that are selected, and faults for functions that cannot be offered.

    With `passthrough`, guests get the functions themselves, so a function without an IOMMU is a fault. Without it,
    guests get something else that the caller makes of them, such as mediated devices. `shared` is for functions that
    stay bound to their kernel driver when they are handed out: programs of the host may use them at the same time. A
    function whose reading fails becomes a fault; one that was unplugged meanwhile is left out. Raises DriverError if it
    cannot be determined which functions the host uses.
    """
    devices: list[Device] = []
    faults: list[Fault] = []
    addresses = machine.pci_functions()
    in_use = find_functions_used_by_host(machine, _list_candidates(machine, addresses, selection), shared=shared)
    for address in addresses:
        try:
            for finding in _discover_function(machine, address, selection, in_use, passthrough):
                if isinstance(finding, Fault):
                    faults.append(finding)
                else:
                    devices.append(finding)
        except Gone:
            continue  # unplugged during this call
        except DriverError as error:
            faults.append(Fault(address, str(error)))
    return Findings(tuple(devices), at_most(faults))


def _list_candidates(machine: Machine, addresses: list[str], selection: Selection) -> set[str]:
    """Return the functions that are selected, with their companion and virtual functions.

    Functions that cannot be read are left out.
    """
    candidates: set[str] = set()
    for address in addresses:
        try:
            if selection.find_rule(_read_function(machine, address)):
                candidates.update(iommu.list_card_functions(machine, address))
        except DriverError:
            continue  # `_discover_function` reports it
    return candidates


def _list_missing_requirements(machine: Machine, rules: Sequence[PciRule]) -> Iterator[str]:
    """Yield a sentence for each thing that the driver needs and this host or process lacks."""
    status = dict(line.split(":", 1) for line in machine.text("/proc/self/status").splitlines() if ":" in line)
    user, capabilities = status.get("Uid", "0").split()[:1], int(status.get("CapEff", "2").strip(), 16)
    if user != ["0"] and not capabilities & CAP_DAC_OVERRIDE:
        yield "the agent may not write to /sys: run it as root, or with CAP_DAC_OVERRIDE"
    for line in machine.read("/proc/self/mountinfo", MAX_TABLE).splitlines():
        fields = line.split()
        if fields[4:5] == ["/sys"] and "ro" in fields[5].split(","):
            yield "/sys is mounted read-only for the agent (a container without write access?)"
    if not iommu.has_iommu(machine):
        yield f"no guest gets a PCI function: {iommu.describe_missing_iommu(machine)}"
    if unseen := machine.list_open_nodes().unseen:
        yield f"what programs of the host use is not known, so such devices are not offered: {unseen}"
    for name in sorted({rule.bind for rule in rules if rule.bind}):
        if not machine.exists(f"{binding.DRIVERS_FOLDER}/{name}"):
            yield f"the kernel has no driver {name}, which a rule binds to: load it (modprobe {name})"


def find_address(machine: Machine, key: str, address: str = "") -> str:
    """Return the PCI address of the device with this key.

    `address` is where the agent has reported the device, '' if that is not known. The device is taken to be there,
    unless the function at `address` has another serial number now; a serial number that cannot be read is no reason to
    doubt it. Without `address`, all functions of the vendor are read. Raises Gone if this host has no such device,
    Invalid if several functions have the serial number, and another DriverError if a function cannot be read.
    """
    kind, _, identity = key.partition(":")
    if kind != "pci" and address:
        read_key = read_device_key(machine, address)
        if read_key not in (key, f"pci:{address}"):
            raise Gone(f"the device at {address} is not {key} any more: it is {read_key}")
        return address
    found: list[str] = []
    for place in [identity] if kind == "pci" else machine.pci_functions():
        try:
            if kind != "pci" and not identity.startswith(f"{_read_id(machine, place, 'vendor')}:"):
                continue  # avoids most reads on a host with hundreds of functions
            function = _read_function(machine, place)
            if kind == "pci" or _make_device_key(machine, function) == key:
                found.append(place)
        except Gone:
            continue
    if len(found) > 1:
        raise Invalid(f"{' and '.join(found)} have the same serial number, so it is unclear which of them is {key}")
    if not found:
        raise Gone(f"there is no {key} on this host (any more)")
    return found[0]


def _read_function(machine: Machine, address: str) -> PciFunction:
    """Return a function as sysfs describes it.

    Raises Gone if it is absent, and another DriverError if it is unreadable.
    """
    return PciFunction(address, *(_read_id(machine, address, name) for name in ("vendor", "device", "class")))


def _read_id(machine: Machine, address: str, name: str) -> str:
    """Return an id attribute without its 0x. Raises the errors of `Machine.read`."""
    return machine.read(f"{PCI_DEVICES}/{address}/{name}").removeprefix("0x")


def _discover_function(
    machine: Machine, address: str, selection: Selection, in_use: dict[str, str], passthrough: bool
) -> Iterator[Device | Fault]:
    """Yield the device of a function if a rule selects it, and a fault for each part that cannot be handed out.

    The parts are its virtual functions or, if there are none, the function itself. `in_use` (address → reason) holds
    the functions that the host uses: such a part is a fault with that reason, and no handle of the device. There is no
    device if the function itself is such a part (unless the rule lets it have virtual functions beside the host's use),
    if it has no IOMMU although `passthrough`, or if its type is unknown; these are faults, too. A virtual or companion
    function of a selected card is part of that card's device, so it yields nothing by itself; a companion function of
    any other card is a fault. Raises DriverError, which is Gone if the function was unplugged.
    """
    function = _read_function(machine, address)
    rule = selection.find_rule(function)
    if rule is None or _is_part_of_selected_card(machine, address, selection):
        return
    if main_function := iommu.find_main_function(machine, address):
        yield Fault(address, f"it is part of the card {main_function} and given away with it: select {main_function}")
        return
    virtual_functions = iommu.list_virtual_functions(machine, address)
    parts = virtual_functions or [address]
    view = binding.HostUsage(machine, in_use, for_act=False)
    effective_use = _permit_beside_host(view, address, rule).in_use if rule.vfs else in_use
    unusable = _explain_unusable_parts(machine, address, parts, effective_use, passthrough)
    for part, reason in unusable.items():
        can_be_permitted = bool(rule.vfs) and part == address
        yield Fault(part, reason + (sriov.explain_permission(part, reason) if can_be_permitted else ""))
    if address in unusable:
        return
    device_type = rule.type or selection.cards.get_type(function)
    if device_type is None:
        yield Fault(
            address, f"its PCI class {function.pci_class} does not determine the device type: set `type` in the rule"
        )
        return
    handed_out = [part for part in parts if part not in unusable and (virtual_functions or not rule.vfs)]
    is_virtual = bool(virtual_functions or machine.link(f"{PCI_DEVICES}/{address}/physfn"))
    if passthrough and (reason := selection.cards.explain_withheld(machine, function, divided=is_virtual)):
        yield Fault(address, reason)
        handed_out = []
    to_install = _describe_install_steps(view, address, rule) if passthrough else ""
    is_divided = is_virtual or bool(rule.vfs)
    yield _build_device(machine, function, device_type, selection.cards, rule, handed_out, to_install, is_divided)


def _explain_unusable_parts(
    machine: Machine, address: str, parts: list[str], in_use: Mapping[str, str], passthrough: bool
) -> dict[str, str]:
    """Return why parts of the device of `address` cannot be handed out: address → reason.

    The host uses the part or, with `passthrough`, a companion function in the part's IOMMU group. If there is no IOMMU
    although `passthrough`, this is the reason of `address` itself, whatever its parts are.
    """
    reasons = {part: in_use[part] for part in parts if part in in_use}
    if not passthrough:
        return reasons
    for companion in filter(in_use.__contains__, iommu.list_companions(machine, address)):
        group = iommu.find_group(machine, companion)
        for part in parts:
            if group and iommu.find_group(machine, part) == group:
                reasons.setdefault(part, f"{companion} would be given away with it, but {in_use[companion]}")
    if not iommu.find_group(machine, address):
        reasons.setdefault(address, f"no guest can get it: {iommu.describe_missing_iommu(machine)}")
    return reasons


def _permit_beside_host(view: binding.HostUsage, address: str, rule: PciRule) -> binding.HostUsage:
    """Return the view that is used to plan a change of the number of virtual functions of the card `address`.

    If the rule names the card (its address or a network interface of it) in `vfs_beside_host`, the host's use of the
    card itself is left out, so that it does not prevent the change. The host's use of a virtual function is never left
    out.
    """
    interfaces = list_interfaces(view.machine, address) if rule.vfs_beside_host else ()
    if not any(name in interfaces or normalize_address(name) == address for name in rule.vfs_beside_host):
        return view
    return replace(view, in_use={used: reason for used, reason in view.in_use.items() if used != address})


def _is_part_of_selected_card(machine: Machine, address: str, selection: Selection) -> bool:
    """Return whether the function is a virtual or companion function of a card that a rule selects.

    Raises DriverError if the card cannot be read.
    """
    card = machine.link(f"{PCI_DEVICES}/{address}/physfn") or iommu.find_main_function(machine, address)
    return bool(card) and selection.find_rule(_read_function(machine, card)) is not None


def _plan_rule_steps(view: binding.HostUsage, address: str, rule: PciRule) -> list[Step]:
    """Return the steps towards the state that the rule wants, as far as they can be planned now.

    Virtual functions are bound only after they exist, so the steps that make them are returned alone. If the rule wants
    a driver of VFIO or none, companion functions that share an IOMMU group with what is handed out get a driver of VFIO
    or none, too. Raises the errors of `sriov.plan_virtual_functions`, `binding.plan_binding` and
    `iommu.refuse_blocked_groups`.
    """
    machine, unbound = view.machine, rule.bind is not None
    card_view = _permit_beside_host(view, address, rule)
    steps = [] if rule.vfs is None else sriov.plan_virtual_functions(card_view, address, rule.vfs, unbound=unbound)
    if steps:
        if rule.bind is not None:  # refuse before the first change, not halfway
            binding.refuse_unless_bindable(machine, address, rule.bind)
        return steps
    parts = iommu.list_virtual_functions(machine, address) or [address]
    wanted = {} if rule.bind is None else dict.fromkeys(parts, rule.bind)
    if rule.bind == "" or (rule.bind and iommu.is_vfio_driver(rule.bind)):
        companions = iommu.list_companions_in_groups(machine, address, parts)
        wanted |= dict.fromkeys(companions, binding.VFIO if rule.bind else "")
    steps = [step for part, driver in wanted.items() for step in binding.plan_binding(view, part, driver)]
    iommu.refuse_blocked_groups(machine, parts, {*parts, *wanted})
    return steps


def _describe_install_steps(view: binding.HostUsage, address: str, rule: PciRule) -> str:
    """Return what `install` would do now, or why it cannot be done; '' if nothing has to be done.

    There is one line for each step, at most MAX_LISTED_STEPS, and one for the number of the others. With a `view` that
    is not `for_act`, running guests are ignored, because the start or the end of a guest is not a change of the device.
    """
    try:
        steps = _plan_rule_steps(view, address, rule)
    except (Busy, Invalid, Unsupported) as error:
        return f"{BLOCKED_PREFIX}{error}"
    lines = [step.does for step in steps]
    if rule.bind and lines and rule.vfs and len(iommu.list_virtual_functions(view.machine, address)) != rule.vfs:
        lines.append(f"bind each of them to {rule.bind}")
    overflow_line = [f"and {len(lines) - MAX_LISTED_STEPS} more steps"] if len(lines) > MAX_LISTED_STEPS else []
    return "\n".join(lines[:MAX_LISTED_STEPS] + overflow_line)


def _describe_rule(rule: PciRule) -> str:
    """Describe the state that the rule wants; '' if it sets neither `vfs` nor `bind`."""
    bound = "" if rule.bind is None else f"bound to {rule.bind or 'no driver of the host'}"
    return ", ".join(filter(None, ("" if rule.vfs is None else f"{rule.vfs} virtual functions", bound)))


def _build_device(
    machine: Machine,
    function: PciFunction,
    device_type: DeviceType,
    cards: AnyCard,
    rule: PciRule,
    handed_out: list[str],
    to_install: str,
    is_divided: bool,
) -> Device:
    """Return the device of a function, with one deployable that has a `PCI` handle for each address in `handed_out`.

    `is_divided` means that virtual functions are handed out. Health, kernel driver, bridges and possible acts are read
    here. Raises DriverError if the health cannot be read.
    """
    address, path = function.address, f"{PCI_DEVICES}/{function.address}"
    status, reason = cards.read_status(machine, address)
    key = _make_device_key(machine, function)
    card = cards.describe(function, divided=is_divided)
    offer = merge_offers(rule.offer, rule.devices, address, get_serial_number(key))
    attributes = make_attributes(offer.resource_class or card.resource_class, [*card.traits, *offer.traits])
    handles = tuple(_make_handle(machine, part, offer.physical_network) for part in handed_out)
    supported_acts = {"partition": sriov.supports_sriov(machine, address), "reset": machine.exists(f"{path}/reset")}
    return Device(
        key=key,
        type=device_type,
        vendor=function.vendor,
        model=function.product,
        address=address,
        std_board_info=card.std_board_info,
        vendor_board_info="miss_vb_info",
        status=status,
        status_reason=reason,
        numa_node=max(-1, machine.read_int(f"{path}/numa_node", -1)),
        kernel_driver=machine.link(f"{path}/driver"),
        bridges=pci_health.list_bridges(machine, address),
        physical_function=machine.link(f"{path}/physfn") or None,
        subsystem=_read_subsystem(machine, path),
        deployables=(Deployable(f"{machine.node}_{address}", len(handles), attributes, handles, card.owner),),
        to_install=to_install,
        acts=" ".join(
            ["detach", "health", "install", *(word for word, can in supported_acts.items() if can), "uninstall"]
        ),
        changeable="bind vfs" if supported_acts["partition"] else "bind",
        sized_by="vfs" if supported_acts["partition"] else "",
    )


def _read_subsystem(machine: Machine, path: str) -> str:
    """Return the ids of the function's subsystem as `vendor:model`; '' if it has none or sysfs does not show them."""
    vendor, model = (machine.text(f"{path}/subsystem_{name}").strip() for name in ("vendor", "device"))
    ids = f"{vendor.removeprefix('0x')}:{model.removeprefix('0x')}"
    return ids if re.fullmatch(r"[0-9a-f]{4}:[0-9a-f]{4}", ids) and ids != "0000:0000" else ""


def _make_handle(machine: Machine, address: str, physical_network: str | None) -> AttachHandle:
    """Return the `PCI` handle of a function, with its physical network if one is known.

    If a guest may have the function open, the handle's use is `unknown`. No VFIO node is opened to find out the use,
    because a guest that starts at that moment would find the node busy.
    """
    domain, bus, slot, number = re.split("[:.]", address)
    place = {"bus": bus, "device": slot, "domain": domain, "function": number}
    info = json.dumps({**place, "physical_network": physical_network} if physical_network else place)
    may_be_open = guest_usage.is_registered_with_vfio(machine, f"{PCI_DEVICES}/{address}")
    return AttachHandle("PCI", info, "unknown" if may_be_open else "")


def confirm_no_guest_uses(machine: Machine, handle: AttachHandle | None) -> str:
    """Return a sentence which says that no guest uses the function of a `PCI` handle.

    Raises Busy while a guest uses it, Failed if that cannot be found out, and Invalid for any other handle. A function
    that does not exist any more is used by nobody, because the kernel removes a function only when its guest has ended
    (drivers/vfio/vfio_main.c, `vfio_unregister_group_dev`).
    """
    address = parse_handle(handle)
    folder = f"{PCI_DEVICES}/{address}"
    if not machine.exists(folder):
        return f"{address} does not exist any more"
    use = guest_usage.find_guest_uses(machine, [folder])[folder]
    if use.state == "used":
        raise Busy(f"a guest still uses {address} ({use.reason}): detach it from the guest, or end the guest")
    if use.state == "unknown":
        raise Failed(f"it is not known whether a guest uses {address}, because {use.reason}")
    return f"no guest uses {address}"


def parse_handle(handle: AttachHandle | None, attach_type: HandleType = "PCI") -> str:
    """Return the PCI address of a handle of this type, as sysfs writes it, however the handle spells it.

    Raises Invalid for a handle of another type or without an address.
    """
    address = read_handle_address(handle.info) if handle and handle.attach_type == attach_type else ""
    if not address:
        raise Invalid(f"{handle} is not the handle of a PCI function")
    return address


def read_device_key(machine: Machine, address: str) -> str:
    """Return the key of the device at `address`, as it is read there now. Raises as `_read_function` does."""
    return _make_device_key(machine, _read_function(machine, address))


def _make_device_key(machine: Machine, function: PciFunction) -> str:
    """Return the device key: from the serial number if the function has one, else from its PCI address.

    The serial number of a virtual function is not used, because it repeats the one of its card.
    """
    path = f"{PCI_DEVICES}/{function.address}"
    serial = "" if machine.exists(f"{path}/physfn") else _read_serial_number(machine, path)
    number = function.address.rpartition(".")[2]
    return f"serial:{function.vendor}:{serial}:{number}" if serial else f"pci:{function.address}"


def get_serial_number(key: str) -> str:
    """Return the serial number in a device key; '' if it has none."""
    return key.split(":")[2] if key.startswith(SERIAL_PREFIX) else ""


def _read_serial_number(machine: Machine, path: str) -> str:
    """Return the Device Serial Number (capability of PCIe 7.9.3) in hex, '' if there is none or it cannot be read.

    Only root can read more than the first 64 bytes of `config`, so other users always get ''. The result is also '' if
    the read does not return in time. While the function is powered off (D3cold), the result is the last one of this
    process, because reading would power the function on. Only the first read does: without the serial number, a device
    would get another identity once a guest uses it.
    """
    place = machine.resolve(path)
    try:
        if place in _last_serial_numbers and pci_health.is_powered_off(machine, path):
            return _last_serial_numbers[place]
        config = read_config_space(machine, path, 4096)
    except DriverError:
        return ""
    _last_serial_numbers[place] = serial = _parse_serial_number(config)
    return serial


def _parse_serial_number(config: bytes) -> str:
    """Return the Device Serial Number in a function's configuration space in hex, '' if it has none."""
    offset, hops = 0x100, 0
    while 0x100 <= offset <= len(config) - 12 and hops < 64:
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header & 0xFFFF == DSN_CAPABILITY:
            serial = config[offset + 4 : offset + 12][::-1].hex()
            return "" if serial in ("0" * 16, "f" * 16) else serial
        offset, hops = header >> 20, hops + 1
    return ""
