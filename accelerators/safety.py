"""Who holds a device: nothing destructive is done to one that is held (promise S1).

Witnesses are asked before every destructive act: our own requests, and whoever registers from `AppConfig.ready()`
(Placement, Nova). One that cannot be asked counts against the act.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet

from accelerators.domain.errors import Reason, Refused
from accelerators.models import AcceleratorRequest, Device

DEADLINE_S = 2.0
"""How long a witness may take to answer; it watches this itself."""


@dataclass(frozen=True)
class Testimony:
    """What a witness says of a device: who holds it (in words), or why it does not know. Both empty: nobody."""

    holders: tuple[str, ...] = ()
    unknown: str = ""


REQUESTS = "requests"
"""The witness of our own requests."""
Witness = Callable[[Device], Testimony]
_witnesses: dict[str, Witness] = {}


def register(name: str, witness: Witness) -> None:
    """Have `witness` asked before every destructive act."""
    _witnesses[name] = witness


def requests(device: Device) -> Testimony:
    """The requests that hold a handle of the device, or are about to."""
    found = holding([device.pk], "uuid", "instance_uuid")[:5]
    return Testimony(tuple(f"request {uuid} of instance {instance}" for _, uuid, instance in found))


def holding(devices: Collection[int], *columns: str) -> QuerySet[Any, Any]:
    """Rows (device id, then `columns`) of the requests that hold a handle of these devices, or are about to.

    A union, because with OR the database would look at every request there is.
    """
    live = AcceleratorRequest.objects.filter(state__in=["BindStarted", "Bound"]).order_by()
    by_part, by_handle = (
        live.filter(**{f"{path}__in": devices}).values_list(path, *columns)
        for path in ("deployable__device", "attach_handle__deployable__device")
    )
    return by_part.union(by_handle)


register(REQUESTS, requests)


def refuse_unless_free(device: Device, act: str, heard: Collection[str] = ()) -> None:
    """Raise Refused unless every witness says that nobody holds the device: HELD (who), or AWAY (who does not know).

    Call it inside the transaction that locked the device's row: a bind needs a share of that lock. `heard` are the
    witnesses that have said so already, of many devices at once and under that lock.
    """
    said = {name: witness(device) for name, witness in _witnesses.items() if name not in heard}
    if holders := [holder for testimony in said.values() for holder in testimony.holders]:
        raise Refused(Reason.HELD, f"Device {device.uuid} is held by {', '.join(holders)}: it cannot be {act}.")
    for name, testimony in said.items():
        if testimony.unknown:
            raise Refused(
                Reason.AWAY, f"Whether device {device.uuid} is held is unknown ({name}: {testimony.unknown})."
            )
