"""Refuse destructive acts on a device that somebody holds (promise S1).

Before every destructive act all registered holder checks are asked whether the device is held: the check of our own
requests, and those that other apps register in `AppConfig.ready()` (Placement, Nova). If a check cannot answer, the act
is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet

from accelerators.domain.errors import Reason, RefusedError
from accelerators.models import AcceleratorRequest, Device

DEADLINE_S = 2.0
"""Seconds that a holder check may take to answer. The check itself must enforce this limit."""


@dataclass(frozen=True)
class HolderCheck:
    """The answer of a holder check for one device.

    `holders` describes each holder in words; `unknown` is the reason if the check cannot answer. If both are empty,
    nobody holds the device.
    """

    holders: tuple[str, ...] = ()
    unknown: str = ""


REQUESTS = "requests"
"""Name of the holder check for our own accelerator requests."""
Witness = Callable[[Device], HolderCheck]
_witnesses: dict[str, Witness] = {}


def register(name: str, witness: Witness) -> None:
    """Register a holder check that is asked before every destructive act; it replaces one of the same name."""
    _witnesses[name] = witness


def requests(device: Device) -> HolderCheck:
    """Return up to five requests that hold a handle of the device or are being bound to it, as a holder check."""
    found = holding([device.pk], "uuid", "instance_uuid")[:5]
    return HolderCheck(tuple(f"request {uuid} of instance {instance}" for _, uuid, instance in found))


def holding(devices: Collection[int], *columns: str) -> QuerySet[Any, Any]:
    """Query the requests that hold a handle of these devices or are being bound to them (BindStarted, Bound).

    Each row is the device id followed by `columns`. The query is a UNION, because with OR PostgreSQL would scan all
    requests.
    """
    live = AcceleratorRequest.objects.filter(state__in=["BindStarted", "Bound"]).order_by()
    by_part, by_handle = (
        live.filter(**{f"{path}__in": devices}).values_list(path, *columns)
        for path in ("deployable__device", "attach_handle__deployable__device")
    )
    return by_part.union(by_handle)


register(REQUESTS, requests)


def refuse_unless_free(device: Device, act: str, heard: Collection[str] = ()) -> None:
    """Raise RefusedError unless all holder checks answer that nobody holds the device.

    The reason is HELD, with the holders, or AWAY, with the check that cannot answer. `act` completes "it cannot be ..."
    in the message. Call this inside the transaction that locked the device's row: a bind needs a shared lock on it.
    `heard` names checks to skip, because the caller has already made them for many devices at once under that
    lock.
    """
    said = {name: witness(device) for name, witness in _witnesses.items() if name not in heard}
    if holders := [holder for testimony in said.values() for holder in testimony.holders]:
        raise RefusedError(Reason.HELD, f"Device {device.uuid} is held by {', '.join(holders)}: it cannot be {act}.")
    for name, testimony in said.items():
        if testimony.unknown:
            raise RefusedError(
                Reason.AWAY, f"It is unknown whether device {device.uuid} is held ({name}: {testimony.unknown})."
            )
