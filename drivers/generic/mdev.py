"""Backends of kind `mdev`: mediated devices of PCI functions, created at attach and removed at detach.

A mediated device has the uuid of its attach handle. Its consumer is stored in a file in `/state/mdev`, because the
kernel does not know it. The format of handles is upstream's (contract section 6.3). Source:
Documentation/ABI/testing/sysfs-bus-vfio-mdev.

Nova (34 and later) is a second owner: when it starts a guest and finds no mediated device with the handle's uuid, for
example after a reboot of the host, it creates one, defines it persistent and lets it start with the host, and it never
removes either (nova/virt/libvirt/driver.py, `_create_mdev`). Therefore a detach removes the device and its definition,
whoever made them, because the uuid is ours. Those with other uuids are left alone.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, ClassVar, NamedTuple

import msgspec
from msgspec import Meta, Struct

from drivers.base import Findings
from drivers.errors import Busy, DriverError, Gone, Invalid
from drivers.generic.backend import make_service
from drivers.generic.pci_backend import OfferedFunctionBackend, make_reading_services
from drivers.inventory import AttachHandle, Attribute, BackendKind, Deployable, Device, Fault, Service
from drivers.machine import PCI_DEVICES, Machine
from drivers.pci import functions
from drivers.pci.guest_usage import refuse_if_guest_uses
from drivers.pci.identity import SERIAL_PREFIX
from drivers.pci.offer import merge_offers
from drivers.plan import MDEV_DEFINITIONS, Act, Ask, Check, Plan, Step, Write

NOTES_FOLDER = "/state/mdev"
UNITS_FOLDER = "/state/mdev_units"
"""Holds a file for each function and type whose number of handles an operator has chosen, with a `ChosenUnits`."""
UNITS = re.compile(r"[0-9]{1,4}")
CHOSEN_UNITS = re.compile(rf"({UNITS.pattern}) (\S+) (\S+)")
IDS = ("vendor", "device", "subsystem_vendor", "subsystem_device")
UNITS_KEY = "mdevs"
"""The layout key whose value is the number of handles of a function."""
MAX_UNITS = 1024
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
CREATE_S = 30.0


class DesiredMdev(Struct, frozen=True, forbid_unknown_fields=True):
    """The wanted type of mediated devices, as the kernel names it, such as `nvidia-223`."""

    mdev_type: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=64)]


class ChosenUnits(NamedTuple):
    """The number of handles that an operator has chosen for a card.

    `key` is the card's key, with its serial number if it has one, and `ids` are its PCI ids.
    """

    number: int
    key: str
    ids: str

    def is_for(self, key: str, ids: str) -> bool:
        """Return whether the card with this key and these ids is the one of the choice. It is the same card if it has
        the same ids and, where the serial number was read both times, the same number."""
        both_have_serials = self.key.startswith(SERIAL_PREFIX) and key.startswith(SERIAL_PREFIX)
        return self.ids == ids and (self.key == key or not both_have_serials)

    def __str__(self) -> str:
        return " ".join(map(str, self))


class MdevBackend(OfferedFunctionBackend, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="mdev"):
    """Offers a handle for each mediated device of the wanted type that can be created or that this agent created.

    A layout limits the number of handles of a function. The mediated devices themselves are created at attach, because
    each has the uuid of the handle that a request holds.
    """

    kind: ClassVar[BackendKind] = "mdev"
    writes: ClassVar[tuple[str, ...]] = (
        f"{PCI_DEVICES}/*:*:*.*/mdev_supported_types/*/create",
        f"{PCI_DEVICES}/*:*:*.*/*-*-*-*-*/remove",
        f"{NOTES_FOLDER}/*",
        f"{UNITS_FOLDER}/*",
        f"{MDEV_DEFINITIONS}/*:*:*.*/*-*-*-*-*",
    )

    desired: DesiredMdev

    def discover(self, machine: Machine) -> Findings:
        """Return the functions that support the wanted type, and a fault for each function that does not support it.

        Raises DriverError if it cannot be determined which functions the host uses.
        """
        findings = self.find_functions(machine, shared=True)
        devices, faults = [], [*findings.faults, *_find_definition_faults(machine)]
        for device in findings.devices:
            address = device.address or ""
            types = list_mdev_types(machine, address)
            if self.desired.mdev_type in types:
                devices.append(self._make_offered_device(machine, device, address))
            else:
                available_types = f"it has {', '.join(types)[:1000]}" if types else "it has none: is its driver bound?"
                faults.append(Fault(address, f"it has no mdev type {self.desired.mdev_type}; {available_types}"))
        return Findings(tuple(devices), tuple(faults))

    def list_services(self, machine: Machine, devices: tuple[Device, ...]) -> tuple[Service, ...]:
        """Return `mdev`, with the number of devices that can still be created in its limits, and health and stats."""
        available = sum(self._read_available_count(machine, device.address or "") for device in devices)
        types = sorted({name for device in devices for name in list_mdev_types(machine, device.address or "")})
        limits = {"type": self.desired.mdev_type, "types": " ".join(types), "available": str(available)}
        return make_service("mdev", limits=limits), *make_reading_services(machine, devices)

    def plan(self, act: Act, machine: Machine, ask: Ask) -> Plan:
        """Plan to create the mediated device at attach and to remove it at detach.

        Partition sets the number of handles; install has no steps.

        Raises Invalid without a valid uuid or, for attach, a valid consumer, and for an unusable layout; Gone if the
        function or the handle is absent; Busy if another consumer has the mediated device, no more can be created, a
        guest uses the one to be removed, or more exist than shall be offered; Unsupported for any other act.
        """
        if act == "partition":
            return Plan(tuple(self._plan_units(machine, functions.find_address(machine, ask.key, ask.address), ask)))
        if act not in ("attach", "detach"):
            return super().plan(act, machine, ask)
        if not UUID.fullmatch(ask.uuid) or (act == "attach" and not UUID.fullmatch(ask.consumer)):
            raise Invalid(f"an MDEV handle needs a uuid and a consumer, not {ask.uuid!r} and {ask.consumer!r}")
        address = functions.find_address(machine, ask.key, ask.address)
        return Plan(
            tuple(self._plan_attach(machine, address, ask) if act == "attach" else _plan_detach(machine, address, ask))
        )

    def _read_available_count(self, machine: Machine, address: str) -> int:
        """Return how many more mediated devices of the wanted type the function can have; 0 if that cannot be read."""
        path = f"{_types_folder(address)}/{self.desired.mdev_type}"
        return max(0, machine.read_int(f"{path}/available_instances", 0))

    def _list_handles(self, machine: Machine, address: str) -> tuple[AttachHandle, ...]:
        """Return the handles of a function: as many as it has room for, or as a layout has set if that is less.

        Raises Invalid if the file with the number is damaged.
        """
        name, room = self.desired.mdev_type, self._count_room(machine, address)
        chosen = self._read_chosen_units(machine, address)
        count = room if chosen is None else min(room, chosen.number)
        domain, bus, device, function = re.split("[:.]", address)
        place = {"asked_type": name, "bus": bus, "device": device, "domain": domain, "function": function}
        marks = (json.dumps({**place, "vgpu_mark": f"{name}_{number}"}) for number in range(count))
        return tuple(AttachHandle("MDEV", mark) for mark in marks)

    def _count_room(self, machine: Machine, address: str) -> int:
        """Return how many handles a function can have, at most MAX_UNITS: the mediated devices that can be created and
        those that this agent created.

        Mediated devices that others created, for example with mdevctl, are not counted: they are not ours to offer.
        """
        return min(MAX_UNITS, self._read_available_count(machine, address) + self._count_created(machine, address))

    def _count_created(self, machine: Machine, address: str) -> int:
        """Return how many mediated devices of the wanted type this agent has created on the function."""
        created = machine.names(f"{_types_folder(address)}/{self.desired.mdev_type}/devices")
        return len({*created} & {*machine.names(NOTES_FOLDER)})

    def _read_chosen_units(self, machine: Machine, address: str) -> ChosenUnits | None:
        """Return the number of handles that a layout has set for the card that is at this address now; None if there is
        none. Raises Invalid if the file with the number is damaged."""
        path = self._units_path(address)
        text = machine.text(path)
        if not text:
            return None
        found = CHOSEN_UNITS.fullmatch(text)
        if not found:
            raise Invalid(
                f"{path} must hold a number of units with a card, not {text[:40]!r}: delete it, and all are offered"
            )
        chosen = ChosenUnits(int(found[1]), found[2], found[3])
        key, ids = _read_identity(machine, address)
        return chosen if chosen.is_for(key, ids) else None

    def _count_other_handles(self, machine: Machine, address: str) -> int:
        """Return how many handles the backend's other functions have, before its limits are applied."""
        others = (device for device in self.discover(machine).devices if device.address != address)
        return sum(len(part.handles) for device in others for part in device.deployables)

    def _units_path(self, address: str) -> str:
        """Return the file with the number of handles that a layout has set for the function and the wanted type."""
        return f"{UNITS_FOLDER}/{address}-{self.desired.mdev_type}"

    def _make_offered_device(self, machine: Machine, device: Device, address: str) -> Device:
        """Return the device with its MDEV handles and a trait for the wanted type; its layout is their number.

        Its resource class is the one that the operator chose, else VGPU for a GPU and CUSTOM_MDEV for any other type.
        """
        (part,) = device.deployables
        trait = "CUSTOM_MDEV_" + re.sub("[^A-Z0-9_]", "_", self.desired.mdev_type.upper())
        other_attributes = [attribute for attribute in part.attributes if attribute.key != "rc"]
        rc = Attribute("rc", self._choose_resource_class(device))
        handles = self._list_handles(machine, address)
        part = Deployable(
            part.name,
            len(handles),
            (rc, *other_attributes, Attribute(f"trait{len(other_attributes)}", trait)),
            handles,
            part.driver_name,
        )
        return msgspec.structs.replace(
            device,
            deployables=(part,),
            acts="attach detach health partition",
            changeable=UNITS_KEY,
            sized_by=UNITS_KEY,
        )

    def _choose_resource_class(self, device: Device) -> str:
        """Return the resource class that the operator chose for the device, else the usual one of its type."""
        serial = functions.get_serial_number(device.key)
        offer = merge_offers(self.offer, self.devices, device.address or "", serial)
        return offer.resource_class or ("VGPU" if device.type == "GPU" else "CUSTOM_MDEV")

    def _plan_units(self, machine: Machine, address: str, ask: Ask) -> list[Step]:
        """Return the step that stores the number of handles of a function; none if that number is stored.

        Raises Invalid for another layout, or for more handles than the function has room for or the backend's limits
        allow; Busy if there would be fewer handles while a mediated device is attached, because nobody knows which
        handle it has.
        """
        name, text = self.desired.mdev_type, ask.layout.get(UNITS_KEY, "")
        if {*ask.layout} != {UNITS_KEY} or not UNITS.fullmatch(text):
            raise Invalid(f"the layout of a function with mediated devices has one key: {UNITS_KEY}, a number")
        wanted, room, created = int(text), self._count_room(machine, address), self._count_created(machine, address)
        offered = len(self._list_handles(machine, address))
        if wanted > room:
            full_text = "; it offers all of them, so units can be added only after some were removed"
            raise Invalid(
                f"{address} has room for {room} mediated devices of type {name}, not for {wanted}"
                + (full_text if offered == room else "")
            )
        if wanted > offered:
            self.refuse_above_max_handles(wanted, self._count_other_handles(machine, address))
        if created and wanted < offered:
            raise Busy(f"{created} mediated devices of type {name} on {address} are attached: detach them first")
        path, (key, ids) = self._units_path(address), _read_identity(machine, address)
        stored, text = machine.text(path), str(ChosenUnits(wanted, key, ids))
        if stored == text:
            return []
        return [
            Step(
                does=f"offer {wanted} mediated devices of type {name} on {address}",
                write=Write(path, text),
                seen=(Check(path, text),),
                undo=(Write(path, stored),),
            )
        ]

    def _plan_attach(self, machine: Machine, address: str, ask: Ask) -> list[Step]:
        """Return the steps that create the mediated device; none if it exists for this consumer.

        One that exists without a note of its consumer is taken over: Nova has created it under the handle's uuid, or
        its definition has started it. Raises Busy if the mediated device belongs to another consumer, if a guest uses
        one without a note, or if no more can be created; Denied if it is unknown whether a guest uses it; Gone for an
        unknown handle.
        """
        name, note, device = self.desired.mdev_type, f"{NOTES_FOLDER}/{ask.uuid}", f"{PCI_DEVICES}/{address}/{ask.uuid}"
        holder = machine.text(note)
        note_step = Step(
            does=f"note that {ask.uuid} is for {ask.consumer}",
            write=Write(note, ask.consumer),
            seen=(Check(note, ask.consumer),),
            undo=(Write(note, holder),),
        )
        if _is_created(machine, address, ask.uuid):
            if holder == ask.consumer:
                return []
            if holder or machine.link(f"{device}/mdev_type") != name:
                owner = holder or "an unknown consumer"
                raise Busy(f"the mediated device {ask.uuid} belongs to {owner}: detach it first")
            refuse_if_guest_uses(machine, [device])
            return [msgspec.structs.replace(note_step, idle=list_guest_nodes(machine, device))]
        if ask.handle not in self._list_handles(machine, address):
            raise Gone(f"{address} has no such handle (any more)")
        if not self._read_available_count(machine, address):
            raise Busy(f"{address} has no room for another mediated device of type {name}")
        create_step = Step(
            does=f"make a mediated device of type {name} on {address}",
            write=Write(f"{_types_folder(address)}/{name}/create", ask.uuid),
            expect=(Check(f"{device}/mdev_type", "", link=True),),
            seen=(Check(f"{device}/mdev_type", name, link=True),),
            undo=(Write(f"{device}/remove", "1"),),
            timeout_s=CREATE_S,
        )
        return [create_step] if holder == ask.consumer else [note_step, create_step]


def plan_detach_without_backend(machine: Machine, ask: Ask) -> Plan:
    """Plan the detach of a handle whose card was pulled or has a fault, at the address that the handle names.

    Raises Invalid for an unusable uuid or handle, and the errors of `_plan_detach`.
    """
    if not UUID.fullmatch(ask.uuid):
        raise Invalid(f"an MDEV handle needs a uuid, not {ask.uuid!r}")
    return Plan(tuple(_plan_detach(machine, functions.parse_handle(ask.handle, "MDEV"), ask)))


def list_mdev_types(machine: Machine, address: str) -> list[str]:
    """Return the types of mediated devices that a function supports; without its kernel driver it has none."""
    return machine.names(_types_folder(address))


def _read_identity(machine: Machine, address: str) -> tuple[str, str]:
    """Return the key of the card at `address`, and its PCI ids as one text. Raises DriverError if it is absent."""
    ids = ":".join(machine.text(f"{PCI_DEVICES}/{address}/{name}").removeprefix("0x") or "-" for name in IDS)
    return functions.read_device_key(machine, address), ids


def _types_folder(address: str) -> str:
    """Return the sysfs directory that has a subdirectory for each mdev type of the function."""
    return f"{PCI_DEVICES}/{address}/mdev_supported_types"


def _is_created(machine: Machine, address: str, uuid: str) -> bool:
    """Return whether the function has the mediated device `uuid`, whoever created it."""
    return bool(machine.link(f"{PCI_DEVICES}/{address}/{uuid}/mdev_type"))


def list_guest_nodes(machine: Machine, device: str) -> tuple[str, ...]:
    """Return the device node that a guest opens in order to use the mediated device `device`; none without a group."""
    group = machine.link(f"{device}/iommu_group")
    return (f"/dev/vfio/{group}",) if group else ()


def _find_definition_faults(machine: Machine) -> list[Fault]:
    """Return a fault if the definitions of mediated devices exist and cannot be read: then no detach removes them."""
    try:
        machine.list_entries(MDEV_DEFINITIONS)
    except DriverError as error:
        return [Fault("definitions", f"{error}: let the agent read it, because a detach has to remove definitions")]
    return []


def _plan_detach(machine: Machine, address: str, ask: Ask) -> list[Step]:
    """Return the steps that remove the mediated device, its definition and its note in NOTES_FOLDER, each only if it
    exists.

    There are no steps if the note names another consumer and `ask.consumer` is not empty. Raises Busy while a guest has
    the mediated device open, because the kernel would wait until the guest ends, Denied if that is unknown, and another
    DriverError if the definitions cannot be read.
    """
    device, note = f"{PCI_DEVICES}/{address}/{ask.uuid}", f"{NOTES_FOLDER}/{ask.uuid}"
    definition = f"{MDEV_DEFINITIONS}/{address}/{ask.uuid}"
    holder = machine.text(note)
    if holder and ask.consumer not in ("", holder):
        return []
    is_created, steps = _is_created(machine, address, ask.uuid), []
    if is_created:
        refuse_if_guest_uses(machine, [device])
    if ask.uuid in machine.list_entries(f"{MDEV_DEFINITIONS}/{address}"):
        steps.append(
            Step(
                f"remove the definition of {ask.uuid}",
                Write(definition, ""),
                idle=list_guest_nodes(machine, device),
                seen=(Check(definition, ""),),
            )
        )
    if is_created:
        removed_check = (Check(f"{device}/mdev_type", "", link=True),)
        write = Write(f"{device}/remove", "1")
        steps.append(Step(f"remove the mediated device {ask.uuid}", write, seen=removed_check, timeout_s=CREATE_S))
    if holder:
        steps.append(Step(f"remove the note of who has {ask.uuid}", Write(note, ""), seen=(Check(note, ""),)))
    return steps
