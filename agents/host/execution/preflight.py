"""Check on the host, right before an act, that it may touch what its plan names (promise S3).

These functions write nothing. Every act and every plan is checked, whichever driver made it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from drivers.errors import Busy, Denied, Invalid
from drivers.machine import PCI_ADDRESS, PCI_DEVICES, Machine, get_sys_path
from drivers.pci.binding import HostUsage
from drivers.pci.functions import confirm_no_guest_uses, parse_handle
from drivers.pci.guest_usage import refuse_if_guest_uses
from drivers.pci.host_usage import find_functions_used_by_host
from drivers.pci.iommu import list_card_functions, list_virtual_functions
from drivers.plan import DESTRUCTIVE, DEVICE_SCOPE, MDEV_DEFINITIONS, Act, Ask, Plan, Write, get_affected_prefix, stray

FILES_TAKING_ADDRESS = frozenset({"bind", "unbind", "drivers_probe", "new_id", "remove_id"})
"""Files below /sys/bus/pci that act on the device whose address is written into them."""
FILES_TAKING_AWAY = frozenset({"sriov_numvfs", "unbind", "remove", "reset", "reset_subordinate"})
"""Files whose write takes a device away from its user; the kernel waits in it, unkillably, while a guest has it."""
FILES_AFFECTING_SCOPE = FILES_TAKING_AWAY - FILES_TAKING_ADDRESS
"""Those of them that may affect all devices in the scope of the act; the others take away the named device only."""


def find_device_addresses(machine: Machine, address: str | None) -> frozenset[str]:
    """Return the PCI addresses of a device: its own, those of its companion and its virtual functions; none without an
    address."""
    return frozenset(list_card_functions(machine, address)) if address else frozenset()


def find_handle_addresses(ask: Ask) -> frozenset[str]:
    """Return the PCI address in an MDEV handle of the command; none for other handles."""
    try:
        return frozenset({parse_handle(ask.handle, "MDEV")})
    except Invalid:
        return frozenset()


def check_plan_paths(
    plan: Plan,
    writable_paths: Sequence[str],
    own_addresses: Collection[str],
    resolve_path: Callable[[str], str],
    is_own_write: Callable[[Write], bool] = lambda _: False,
) -> None:
    """Raise Denied unless every path that the plan may write is in `writable_paths` and belongs to the device.

    `own_addresses` are those of the device; `resolve_path` resolves the symbolic links of a path (`Machine.resolve`).
    `is_own_write` is asked about a write that concerns no PCI device: `owns_write_off_pci`.
    """
    if path := stray(plan, writable_paths):
        raise Denied(f"the driver wants to write {path}, which is not among the paths that it declares")
    for step in plan.steps:
        for write in (step.write, *step.undo):
            if not _belongs_to_device(write, own_addresses, resolve_path) and not is_own_write(write):
                raise Denied(f"{step.does}: writing {write.value!r} to {write.path} may affect more than this device")


def owns_write_off_pci(machine: Machine, key: str, write: Write) -> bool:
    """Return whether a write concerns only the device whose key names its directory, on another bus than PCI.

    It must go to a file whose nearest device on a bus is that device, so its parent and its children on a bus are
    others. A file that takes a device's name (`bind`, `unbind`, `drivers_probe`) must be of the same bus and get its
    name. A path that leads to a PCI device belongs to nobody by its key.
    """
    folder, _, name = write.path.rpartition("/")
    sys_path, real_folder = get_sys_path(key), machine.resolve(folder)
    if not sys_path or machine.find_bus_device(sys_path) != sys_path or not real_folder.startswith("/sys/"):
        return False
    if any(map(PCI_ADDRESS.fullmatch, f"{sys_path}/{real_folder}/{name}".split("/"))):
        return False
    if name in FILES_TAKING_ADDRESS:
        bus = machine.resolve(f"{sys_path}/subsystem")
        return f"{real_folder}/".startswith(f"{bus}/") and write.value.strip() == sys_path.rpartition("/")[2]
    return machine.find_bus_device(real_folder) == sys_path


def check_attachments(act: Act, ask: Ask, attachments: Mapping[str, str]) -> None:
    """Raise Busy when the act would harm a consumer of the device.

    A destructive act is refused while a handle is attached, other than to the consumer that the act itself names;
    `attach` and `detach` that name a consumer are refused while their handle is attached to another one. `attachments`
    is handle uuid → consumer, of this device.
    """
    others = {uuid: who for uuid, who in attachments.items() if uuid != ask.uuid or who != ask.consumer}
    if act in DESTRUCTIVE and others:
        uuid, consumer = min(others.items())
        raise Busy(f"its handle {uuid} is attached to {consumer}: detach it first")
    if act in ("attach", "detach") and ask.uuid in others and ask.consumer:
        raise Busy(f"the handle {ask.uuid} is attached to {others[ask.uuid]}: detach it first")


def is_function_detach(act: Act, ask: Ask) -> bool:
    """Return whether the act is the detach of a PCI function, which the kernel is asked about (`check_detached`)."""
    return act == "detach" and ask.handle is not None and ask.handle.attach_type == "PCI"


def check_detached(machine: Machine, act: Act, ask: Ask) -> str:
    """Return that no guest uses the function of a PCI handle whose `detach` the driver has answered, as a sentence.

    Raises DriverError if a guest uses it, or if that is not known. The conductor gives the handle to others when the
    detach has succeeded. The kernel is asked as well as the driver, because a driver that does not override `detach`
    answers that nothing is to be done; and it is asked about the function at the handle's address, because the card may
    have been pulled or replaced since. Other acts and handles of other types are not checked: '' is returned.
    """
    return confirm_no_guest_uses(machine, ask.handle) if is_function_detach(act, ask) else ""


def refuse_if_user_is_harmed(
    machine: Machine, act: Act, write: Write, key: str, address: str | None, scope: str = DEVICE_SCOPE
) -> None:
    """Raise Busy if a guest or the host itself uses what the write may take away, or if it is unknown what the host
    uses; Denied if it is not known whether a guest does; and another DriverError if the host cannot be asked.

    `key` and `address` are those of the device, and `scope` is what the driver declares for the act. A destructive act
    is refused while a guest uses the device; in any other act, only the writes to FILES_TAKING_AWAY are checked. The
    other functions that a destructive act affects are checked before each write to FILES_AFFECTING_SCOPE, and once
    before the plan (`refuse_if_guest_in_scope`): there may be hundreds, and a guest that starts at that moment finds
    its group busy. The kernel is asked whether a guest uses a function, whichever driver planned the write and
    whichever kernel driver the function is bound to (`drivers.pci.guest_usage`). The host's own use
    (`drivers.pci.host_usage`) is checked in every act, for the functions that the write takes away from the host
    (`_list_functions_taken_from_host`).
    """
    folders = _list_devices_taken_away(machine, write)
    if act in DESTRUCTIVE:
        addresses = find_device_addresses(machine, address)
        if write.path.rpartition("/")[2] in FILES_AFFECTING_SCOPE:
            addresses |= _find_scope_addresses(machine, scope, address)
        folders += (f"{PCI_DEVICES}/{one}" for one in sorted(addresses))
    if (sys_path := get_sys_path(key)) and (act in DESTRUCTIVE or folders):
        folders.append(sys_path)
    refuse_if_guest_uses(machine, dict.fromkeys(folders))
    if functions := _list_functions_taken_from_host(machine, write):
        HostUsage(machine, find_functions_used_by_host(machine, functions), for_act=False).refuse_if_used(functions)


def _list_functions_taken_from_host(machine: Machine, write: Write) -> list[str]:
    """Return the PCI functions that a write takes away from the host, if the host uses them.

    `driver_override` names another driver for a function. `unbind` takes a function away, and its virtual functions
    with it. `sriov_numvfs` removes the virtual functions, while the card itself stays with the host: an operator may
    have permitted that beside the host's use of the card (`vfs_beside_host`). A reset or removal concerns all functions
    of the card.
    """
    folder, _, name = write.path.rpartition("/")
    address = write.value.strip() if name in FILES_TAKING_ADDRESS else machine.resolve(folder).rpartition("/")[2]
    if not folder.startswith("/sys/") or not PCI_ADDRESS.fullmatch(address):
        return []
    match name:
        case "driver_override" if write.value.strip():
            return [address]
        case "unbind":
            return [address, *list_virtual_functions(machine, address)]
        case "sriov_numvfs":
            return list_virtual_functions(machine, address)
        case "remove" | "reset" | "reset_subordinate":
            return list_card_functions(machine, address)
    return []


def refuse_if_guest_in_scope(machine: Machine, act: Act, address: str | None, scope: str) -> None:
    """Raise Busy if a guest uses a function that a destructive act affects beside its device, Denied if that is not
    known.

    The arguments are those of `refuse_if_user_is_harmed`. Nothing is checked for an act that affects the device alone.
    """
    if act in DESTRUCTIVE:
        refuse_if_guest_uses(
            machine, (f"{PCI_DEVICES}/{one}" for one in sorted(_find_scope_addresses(machine, scope, address)))
        )


def _find_scope_addresses(machine: Machine, scope: str, address: str | None) -> frozenset[str]:
    """Return the PCI functions of the host that an act with this scope affects; none if it affects the device alone."""
    if (prefix := get_affected_prefix(scope, address)) is None:
        return frozenset()
    return frozenset(one for one in machine.pci_functions() if one.startswith(prefix))


def _list_devices_taken_away(machine: Machine, write: Write) -> list[str]:
    """Return the directories of all devices that a write takes away from their users; a card's with its functions."""
    folder, _, name = write.path.rpartition("/")
    if name not in FILES_TAKING_AWAY or not folder.startswith("/sys/"):
        return []
    device = write.value.strip() if name in FILES_TAKING_ADDRESS else machine.resolve(folder).rpartition("/")[2]
    if not PCI_ADDRESS.fullmatch(device):
        return [folder]  # a mediated device, or hardware that is not on PCI
    return [f"{PCI_DEVICES}/{one}" for one in list_card_functions(machine, device)]


def check_affected_attachments(
    act: Act, scope: str, address: str | None, attached_elsewhere: Iterable[tuple[str, str | None]]
) -> None:
    """Raise Busy when the act would affect another device of the host that has an attached handle.

    `scope` is what the driver declares for the act, and `address` the device's PCI address. `attached_elsewhere` has
    (device key, PCI address) of each other device with an attached handle; a device whose address is not known counts
    as affected.
    """
    prefix = get_affected_prefix(scope, address)
    for key, other_address in attached_elsewhere if prefix is not None else ():
        if other_address is None or other_address.startswith(prefix or ""):
            raise Busy(f"{act} would also affect the device {key}, which has an attached handle: detach it first")


def _belongs_to_device(write: Write, own_addresses: Collection[str], resolve_path: Callable[[str], str]) -> bool:
    """Return whether a write concerns only this device or the driver's own directory.

    The path is judged with its symbolic links resolved: `…/iommu_group/devices/…`, for example, leads to other devices.
    """
    if write.path.startswith("/state/"):
        return True  # the driver's own directory, whatever the device
    folder, _, name = write.path.rpartition("/")
    if folder.startswith(f"{MDEV_DEFINITIONS}/"):  # PARENT/UUID, and links are not followed: only its name counts
        return folder.rpartition("/")[2] in own_addresses and not write.value
    real_folder = resolve_path(folder)
    if not real_folder.startswith("/sys/"):
        return False
    if name in FILES_TAKING_ADDRESS:
        return write.value.strip() in own_addresses
    addresses = [part for part in f"{real_folder}/{name}".split("/") if PCI_ADDRESS.fullmatch(part)]
    return bool(addresses) and addresses[-1] in own_addresses
