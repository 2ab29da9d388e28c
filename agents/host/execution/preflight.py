"""Check on the host, right before an act, that it may touch what its plan names (promise S3).

These functions write nothing. Every act and every plan is checked, whichever driver made it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from drivers.errors import Busy, Denied
from drivers.machine import PCI_ADDRESS, PCI_DEVICES, Machine
from drivers.pci.iommu import list_companions
from drivers.plan import DESTRUCTIVE, Act, Ask, Plan, Write, get_affected_prefix, stray

FILES_TAKING_ADDRESS = frozenset({"bind", "unbind", "drivers_probe", "new_id", "remove_id"})
"""Files below /sys/bus/pci that act on the device whose address is written into them."""


def find_device_addresses(machine: Machine, address: str | None) -> frozenset[str]:
    """Return the PCI addresses of a device: its own, those of its virtual and its companion functions; none without an
    address."""
    if not address:
        return frozenset()
    device_dir = f"{PCI_DEVICES}/{address}"
    virtual_functions = {machine.link(f"{device_dir}/{name}") for name in machine.names(device_dir, "virtfn*")}
    return frozenset({address, *virtual_functions, *list_companions(machine, address)})


def check_plan_paths(
    plan: Plan, writable_paths: Sequence[str], own_addresses: Collection[str], resolve_path: Callable[[str], str]
) -> None:
    """Raise Denied unless every path that the plan may write is in `writable_paths` and belongs to the device.

    `own_addresses` are those of the device; `resolve_path` resolves the symbolic links of a path (`Machine.resolve`).
    """
    if path := stray(plan, writable_paths):
        raise Denied(f"the driver wants to write {path}, which is not among the paths that it declares")
    for step in plan.steps:
        for write in (step.write, *step.undo):
            if not _belongs_to_device(write, own_addresses, resolve_path):
                raise Denied(f"{step.does}: writing {write.value!r} to {write.path} may affect more than this device")


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
    real_folder = resolve_path(folder)
    if not real_folder.startswith("/sys/"):
        return False
    if name in FILES_TAKING_ADDRESS:
        return write.value.strip() in own_addresses
    addresses = [part for part in f"{real_folder}/{name}".split("/") if PCI_ADDRESS.fullmatch(part)]
    return bool(addresses) and addresses[-1] in own_addresses
