"""Refuse destructive acts on a device that somebody holds (promise S1).

Before every destructive act all registered holder checks are asked whether the device is held: the check of our own
requests, and those of other apps (Placement, Nova). If a check cannot answer, the act is refused.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from django.db.models import F, Func, IntegerField, QuerySet, TextField, Value
from django.db.models.expressions import RawSQL

from accelerators.domain import driver_status
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import DeviceState, HandleType
from accelerators.models import AcceleratorRequest, Device, ReleasedHandle
from accelerators.runtime.registry import Registry
from drivers.plan import get_affected_prefix

HOLDER_CHECK_DEADLINE_S = 2.0
"""Seconds that a holder check may take to answer. The check itself must enforce this limit."""
HOLDER_CHECKS_TIMEOUT_S = 10.0
"""Seconds that one transaction spends on holder checks. Devices whose holder checks have not been made by then
are refused with UNAVAILABLE, so that they are tried again."""


@dataclass(frozen=True)
class HolderCheckResult:
    """The answer of a holder check for one device.

    `holders` describes each known holder in words; `unknown` is the reason if the check could not find out about all.
    Both may be given. If both are empty, nobody holds the device.
    """

    holders: tuple[str, ...] = ()
    unknown: str = ""


HOLDS_ADDRESS = """accelerators_device.id = ANY(%s) AND accelerators_acceleratorrequest.claim
  && accelerators_whole_function(accelerators_device.host_id, accelerators_device.address)"""
"""Condition: the request holds the function at the address of one of these devices, or a part of it."""
IS_RELEASED_OF_DEVICE = """accelerators_device.id = ANY(%s) AND (
  accelerators_deployable.device_id = accelerators_device.id OR accelerators_releasedhandle.claim
  && accelerators_whole_function(accelerators_device.host_id, accelerators_device.address))"""
"""Condition: the released handle is one of these devices', or claims the function at the address of one of them, or a
part of it."""
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
    releases = [release for _, release in find_releases_of_devices([device.pk])]
    return HolderCheckResult(tuple(f"a guest, perhaps: {release.description}" for release in releases[:5]))


def find_releases_of_devices(devices: Collection[int]) -> list[tuple[int, ReleasedHandle]]:
    """Return the released PCI handles of these devices that their hosts have not confirmed as unused; one statement.

    A function at a device's PCI address, or a part of it, that was released through another device also counts: it is
    the same hardware. Each handle stands behind the id of the device of `devices` that it concerns, and may stand there
    more than once. Handles that are made on the host are left out: the agent knows them, refuses destructive acts while
    they exist, and carries out the commands of a device in their order, so that the detach comes first.
    """
    releases = ReleasedHandle.objects.filter(handle__attach_type=HandleType.PCI)
    of_devices = releases.select_related("handle__deployable").extra(
        tables=["accelerators_device"], where=[IS_RELEASED_OF_DEVICE], params=[list(devices)]
    )
    concerned = RawSQL("accelerators_device.id", (), output_field=IntegerField())
    return [(release.concerned_device, release) for release in of_devices.annotate(concerned_device=concerned)]


def query_requests_of_devices(devices: Collection[int], *columns: str) -> QuerySet[Any, Any]:
    """Query the requests that hold a handle of these devices or are being bound to them (BindStarted, Bound).

    A request that holds the function at a device's PCI address, or a part of it, through another device also counts:
    it is the same hardware. Each row is the device id followed by `columns`. The query is a UNION, because with OR
    PostgreSQL would scan all requests.
    """
    holding_requests = AcceleratorRequest.objects.filter(state__in=["BindStarted", "Bound"]).order_by()
    by_deployable, by_handle = (
        holding_requests.filter(**{f"{path}__in": devices}).values_list(path, *columns)
        for path in ("deployable__device", "attach_handle__deployable__device")
    )
    by_address = holding_requests.extra(tables=["accelerators_device"], where=[HOLDS_ADDRESS], params=[list(devices)])
    return by_deployable.union(
        by_handle, by_address.annotate(device=RawSQL("accelerators_device.id", ())).values_list("device", *columns)
    )


def find_affected_siblings(device: Device, act: str) -> list[Device]:
    """Return the other devices of the host that `act` on this device affects, by their ids; retired ones are left out.

    Costs one statement, and none if the driver declares that the act affects the device alone. `device.host` must be
    loaded.
    """
    scope = driver_status.get_declared_scope(device.host.drivers.get(device.driver, {}), act)
    prefix = get_affected_prefix(scope, device.address)
    if prefix is None:
        return []
    others = Device.objects.filter(host=device.host_id).exclude(pk=device.pk).exclude(state=DeviceState.RETIRED)
    return list((others.filter(address__startswith=prefix) if prefix else others).order_by("id"))


def find_affected_outside(selected: QuerySet[Device], act: str) -> list[Device]:
    """Return the devices that are not selected, and that `act` on the selected ones affects, by their ids.

    Retired devices are left out; `host` is loaded. Costs two statements, whatever the size of the selection, and one if
    no driver of these devices declares that the act affects more than the device.
    """
    path = (Value("declares"), Value("affects"), Value(act))
    scope = Func(F("host__drivers"), F("driver"), *path, function="jsonb_extract_path_text", output_field=TextField())
    declared = (
        selected.order_by().annotate(scope=scope).filter(scope__isnull=False).values_list("host_id", "scope", "address")
    )
    prefixes: dict[int, set[str]] = {}
    for host_id, scope_name, address in declared:
        if (prefix := get_affected_prefix(scope_name, address)) is not None:
            prefixes.setdefault(host_id, set()).add(prefix)
    if not prefixes:
        return []
    others = Device.objects.filter(host__in=prefixes).exclude(pk__in=selected.order_by().values("pk"))
    return [
        device
        for device in others.exclude(state=DeviceState.RETIRED).select_related("host").order_by("id")
        if (device.address or "").startswith(tuple(prefixes[device.host_id]))
    ]


def refuse_unless_siblings_free(device: Device, affected: Collection[Device], act: str, give_up_at: float) -> None:
    """Raise RefusedError unless nobody holds a device that `act` on `device` affects, too; see `refuse_unless_free`."""
    for sibling in affected:
        refuse_unless_free(sibling, f"affected by the {act} of device {device.uuid}", give_up_at=give_up_at)


def refuse_unless_free(
    device: Device, act: str, already_checked: Collection[str] = (), give_up_at: float = math.inf
) -> None:
    """Raise RefusedError unless all holder checks answer that nobody holds the device.

    The reason is IN_USE, with the holders, or UNAVAILABLE, with the check that cannot answer. `act` completes "it
    cannot be ..." in the message. Call this inside the transaction that locked the device's row: a bind needs a shared
    lock on it. `already_checked` names checks to skip, because the caller has already made them for many devices at
    once under that lock. `give_up_at` is a time of the monotonic clock; after it no check is made, and the reason is
    UNAVAILABLE. Whoever checks several devices in one transaction must give it (HOLDER_CHECKS_TIMEOUT_S).
    """
    if time.monotonic() > give_up_at:
        raise RefusedError(
            RefusalReason.UNAVAILABLE, f"The check whether device {device.uuid} is held took too long: try again."
        )
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
