"""Refuse destructive acts on a device that somebody holds (promise S1).

Before every destructive act all registered holder checks are asked whether the device is held: the check of our own
requests, and those of other apps (Placement, Nova). If a check cannot answer, the act is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from django.db.models import QuerySet

from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import HandleType
from accelerators.models import AcceleratorRequest, Device, ReleasedHandle
from accelerators.runtime.registry import Registry

HOLDER_CHECK_DEADLINE_S = 2.0
"""Seconds that a holder check may take to answer. The check itself must enforce this limit."""


@dataclass(frozen=True)
class HolderCheckResult:
    """The answer of a holder check for one device.

    `holders` describes each known holder in words; `unknown` is the reason if the check could not find out about all.
    Both may be given. If both are empty, nobody holds the device.
    """

    holders: tuple[str, ...] = ()
    unknown: str = ""


REQUESTS_CHECK, RELEASES_CHECK = "requests", "releases"
"""Names of the holder checks for our own accelerator requests, and for handles that a guest may still use."""
HOLDER_CHECKS: Registry[Callable[[Device], HolderCheckResult]] = Registry("holder check")
"""Functions that tell who holds a device. `refuse_unless_free` asks all of them."""


def find_requests_of_device(device: Device) -> HolderCheckResult:
    """Return up to five requests that hold a handle of the device or are being bound to it: the holder check of our own
    requests.

    Reads rows without locking them; `unknown` of the HolderCheckResult is always ''.
    """
    rows = query_requests_of_devices([device.pk], "uuid", "instance_uuid")[:5]
    return HolderCheckResult(tuple(f"request {uuid} of instance {instance}" for _, uuid, instance in rows))


def find_releases_of_device(device: Device) -> HolderCheckResult:
    """Return up to five released functions of the device that a guest may still use: the holder check for them.

    Reads rows without locking them; `unknown` of the HolderCheckResult is always ''.
    """
    return HolderCheckResult(
        tuple(f"a guest, perhaps: {release.description}" for release in query_releases_of_devices([device.pk])[:5])
    )


def query_releases_of_devices(devices: Collection[int]) -> QuerySet[ReleasedHandle]:
    """Query the released PCI handles of these devices that their hosts have not confirmed as unused.

    Handles that are made on the host are left out: the agent knows them, refuses destructive acts while they exist, and
    carries out the commands of a device in their order, so that the detach comes first.
    """
    releases = ReleasedHandle.objects.filter(handle__deployable__device__in=devices, handle__attach_type=HandleType.PCI)
    return releases.select_related("handle__deployable").order_by("id")


def query_requests_of_devices(devices: Collection[int], *columns: str) -> QuerySet[Any, Any]:
    """Query the requests that hold a handle of these devices or are being bound to them (BindStarted, Bound).

    Each row is the device id followed by `columns`. The query is a UNION, because with OR PostgreSQL would scan all
    requests.
    """
    holding_requests = AcceleratorRequest.objects.filter(state__in=["BindStarted", "Bound"]).order_by()
    by_deployable, by_handle = (
        holding_requests.filter(**{f"{path}__in": devices}).values_list(path, *columns)
        for path in ("deployable__device", "attach_handle__deployable__device")
    )
    return by_deployable.union(by_handle)


def refuse_unless_free(device: Device, act: str, already_checked: Collection[str] = ()) -> None:
    """Raise RefusedError unless all holder checks answer that nobody holds the device.

    The reason is IN_USE, with the holders, or UNAVAILABLE, with the check that cannot answer. `act` completes "it
    cannot be ..." in the message. Call this inside the transaction that locked the device's row: a bind needs a shared
    lock on it. `already_checked` names checks to skip, because the caller has already made them for many devices at
    once under that lock.
    """
    results = {name: check(device) for name, check in HOLDER_CHECKS.items() if name not in already_checked}
    if holders := [holder for result in results.values() for holder in result.holders]:
        raise RefusedError(
            RefusalReason.IN_USE, f"Device {device.uuid} is held by {', '.join(holders)}: it cannot be {act}."
        )
    for name, result in results.items():
        if result.unknown:
            raise RefusedError(
                RefusalReason.UNAVAILABLE,
                f"It is unknown whether device {device.uuid} is held ({name}: {result.unknown}).",
            )
