"""Check on the host, right before an act, that it may touch what its plan names (promise S3).

These functions write nothing. Every act and every plan is checked, whichever driver made it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from drivers.errors import Busy, Denied
from drivers.machine import PCI_ADDRESS, PCI_DEVICES, Machine
from drivers.plan import DESTRUCTIVE, Act, Ask, Plan, Write, stray

BY_VALUE = frozenset({"bind", "unbind", "drivers_probe", "new_id", "remove_id"})
"""Files below /sys/bus/pci that act on the device whose address is written into them."""


def owned(machine: Machine, address: str | None) -> frozenset[str]:
    """Return the PCI addresses of a device: its own and those of its virtual functions; none without an address."""
    if not address:
        return frozenset()
    home = f"{PCI_DEVICES}/{address}"
    return frozenset({address} | {machine.link(f"{home}/{name}") for name in machine.names(home, "virtfn*")})


def check(plan: Plan, manifest: Sequence[str], own: Collection[str], place: Callable[[str], str]) -> None:
    """Raise Denied unless every path that the plan may write is in `writable_paths` and belongs to the device.

    `own_addresses` are those of the device; `resolve_path` resolves the symbolic links of a path (`Machine.resolve`).
    """
    if path := stray(plan, manifest):
        raise Denied(f"the driver wants to write {path}, which is not among the paths that it declares")
    for step in plan.steps:
        for write in (step.write, *step.undo):
            if not _belongs(write, own, place):
                raise Denied(f"{step.does}: writing {write.value!r} to {write.path} may affect more than this device")


def unattached(act: Act, ask: Ask, attachments: Mapping[str, str]) -> None:
    """Raise Busy when the act would harm a consumer of the device.

    A destructive act is refused while a handle is attached, other than to the consumer that the act itself names;
    `attach` and `detach` that name a consumer are refused while their handle is attached to another one. `attachments`
    is handle uuid → consumer, of this device.
    """
    others = {uuid: who for uuid, who in attachments.items() if uuid != ask.uuid or who != ask.consumer}
    if act in DESTRUCTIVE and others:
        uuid, who = min(others.items())
        raise Busy(f"its handle {uuid} is attached to {who}: detach it first")
    if act in ("attach", "detach") and ask.uuid in others and ask.consumer:
        raise Busy(f"the handle {ask.uuid} is attached to {others[ask.uuid]}: detach it first")


def _belongs(write: Write, own: Collection[str], place: Callable[[str], str]) -> bool:
    """Return whether a write concerns only this device or the driver's own directory.

    The path is judged with its symbolic links resolved: `…/iommu_group/devices/…`, for example, leads to other devices.
    """
    if write.path.startswith("/state/"):
        return True  # the driver's own directory, whatever the device
    folder, _, name = write.path.rpartition("/")
    real = place(folder)
    if not real.startswith("/sys/"):
        return False
    if name in BY_VALUE:
        return write.value.strip() in own
    addresses = [part for part in f"{real}/{name}".split("/") if PCI_ADDRESS.fullmatch(part)]
    return bool(addresses) and addresses[-1] in own
