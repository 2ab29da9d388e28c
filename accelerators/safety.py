"""Who holds a device: nothing destructive is done to one that is held (promise S1).

Witnesses are asked before every destructive act: our own requests, and whoever registers from `AppConfig.ready()`
(Placement, Nova). One that cannot be asked counts against the act.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from django.db.models import Q

from accelerators.models import AcceleratorRequest, Device
from accelerators.refusals import Reason, Refused

DEADLINE_S = 2.0
"""How long a witness may take to answer; it watches this itself."""


@dataclass(frozen=True)
class Testimony:
    """What a witness says of a device: who holds it (in words), or why it does not know. Both empty: nobody."""

    holders: tuple[str, ...] = ()
    unknown: str = ""


Witness = Callable[[Device], Testimony]
_witnesses: dict[str, Witness] = {}


def register(name: str, witness: Witness) -> None:
    """Have `witness` asked before every destructive act."""
    _witnesses[name] = witness


def requests(device: Device) -> Testimony:
    """The requests that hold a handle of the device, or are about to."""
    inside = Q(attach_handle__deployable__device=device) | Q(deployable__device=device)
    found = AcceleratorRequest.objects.filter(inside, state__in=["BindStarted", "Bound"])
    return Testimony(tuple(f"request {uuid} of instance {instance}" for uuid, instance in _ids(found)))


def _ids(found: object) -> list[tuple[object, object]]:
    return list(found.values_list("uuid", "instance_uuid")[:5])  # type: ignore[attr-defined]


register("requests", requests)


def refuse_unless_free(device: Device, act: str) -> None:
    """Raise Refused unless every witness says that nobody holds the device: HELD (who), or AWAY (who does not know).

    Call it inside the transaction that locked the device's row: a bind needs a share of that lock.
    """
    said = {name: witness(device) for name, witness in _witnesses.items()}
    if holders := [holder for testimony in said.values() for holder in testimony.holders]:
        raise Refused(Reason.HELD, f"Device {device.uuid} is held by {', '.join(holders)}: it cannot be {act}.")
    for name, testimony in said.items():
        if testimony.unknown:
            raise Refused(
                Reason.AWAY, f"Whether device {device.uuid} is held is unknown ({name}: {testimony.unknown})."
            )
