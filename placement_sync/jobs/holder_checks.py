"""The holder checks of Placement and Nova before a destructive act (`accelerators.safety`).

Placement tells which consumers have an allocation of the device. Nova tells which of the instances that gave their
request back are still on the host. `placement_sync.apps` registers both where a cloud is configured. If a service does
not answer within 2 s, the act is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from django.conf import settings
from django.db.models import Exists, Max, OuterRef, Q, TextField, UUIDField
from django.db.models.fields.json import KT
from django.db.models.functions import Cast, Now

from accelerators.models import AttachHandle, Attachment, Deployable, Device, Event
from accelerators.runtime.after_commit import call_after_commit
from accelerators.safety import HOLDER_CHECK_DEADLINE_S, HolderCheckResult
from placement_sync.client import (
    PlacementClient,
    PlacementConflictError,
    PlacementRejectedError,
    PlacementUnavailableError,
)
from placement_sync.cloud import get_cloud_session
from placement_sync.nova import client, endpoints

MAX_SHOWN = 5
BACK_OFF_S = 10.0
"""A service that was away is not asked again for this many seconds, because a sweep asks about hundreds of devices."""
RELEASED_WITHIN_DAYS, MAX_INSTANCES = 30, 64
"""The check of Nova covers the instances that gave back a handle of the device within these days, the latest first, and
at most this number of them.
"""
NO_HOLDERS = HolderCheckResult()
MAX_UNKNOWN_INSTANCES = 10_000
"""Largest number of instances that are remembered as unknown to a trusted Nova. Their ids never come back."""

_outages: dict[str, tuple[float, str]] = {}
_unknown_instances: set[tuple[str, str, str]] = set()
"""Address of Nova, since when it was trusted, and uuid of each instance that it does not know."""


def check_placement(device: Device) -> HolderCheckResult:
    """Return the consumers with an allocation of any of the device's providers, or why that is unknown.

    Nobody holds the device if it has no recorded provider, Placement is switched off, or no cloud is configured.
    """
    recorded = Deployable.objects.filter(device=device, rp_uuid__isnull=False).values_list("rp_uuid", flat=True)
    providers = [str(uuid) for uuid in recorded]
    return _ask_unless_away("placement", settings.KEYS.placement_endpoint, providers, _read_consumers)


def _read_consumers(cloud: Any, endpoint: str, providers: Sequence[str]) -> HolderCheckResult:
    """Return the consumers with an allocation of any of these providers (at most MAX_SHOWN), or why that is unknown.

    Costs one call per provider, each with a deadline of 2 s. If one of them fails, the result has only `unknown`.
    """
    placement = PlacementClient(cloud, endpoint, timeout_s=HOLDER_CHECK_DEADLINE_S)
    consumers: set[str] = set()
    try:
        for uuid in providers:
            consumers |= placement.read_allocations(uuid).keys()
    except (PlacementUnavailableError, PlacementConflictError, PlacementRejectedError) as error:
        return HolderCheckResult(unknown=str(error))
    return HolderCheckResult(tuple(f"Placement's consumer {consumer}" for consumer in sorted(consumers)[:MAX_SHOWN]))


def check_nova(device: Device) -> HolderCheckResult:
    """Return the instances that gave back their request of this device and are still on its host, or why it is unknown.

    Their guests may still use the device. An instance that was deleted, is shelved and offloaded, or is on another host
    does not hold it any more; one whose host Nova does not show counts as on this host. The answer 404 counts only at a
    trusted address (`nova.endpoints`). Nobody holds the device if Nova is switched off or no cloud is configured.
    """
    host = device.host
    ask = partial(_find_instances_on_host, host_names=(host.name, host.node))
    try:
        return _ask_unless_away("nova", settings.KEYS.nova_endpoint, _load_former_holders(device), ask)
    except endpoints.UntrustedEndpointError as error:  # Nova is not away: it can be confirmed at any moment
        return HolderCheckResult(unknown=str(error))


def _load_former_holders(device: Device) -> list[str]:
    """Return the instances that gave back a handle of the device within RELEASED_WITHIN_DAYS, the latest first, at most
    MAX_INSTANCES. They are read from events: each unbind and each deletion records which handle was held. One
    statement.

    Attachments that ended without a fault, or were never attached, are left out: Nova did not plug the device into the
    running instance, and whoever detached it has removed it from the guest. If somebody else deleted the requests, the
    attachment ends with a fault and is not left out. The host itself checks once more before anything is touched.
    """
    handles = AttachHandle.objects.filter(deployable__device=device).order_by()
    detachments = Attachment.objects.filter(
        Q(fault="") | Q(attached_at=None),
        ended_at__isnull=False,
        instance=Cast(OuterRef("instance"), UUIDField()),
        requests__contains=[OuterRef("subject")],
    )
    releases = Event.objects.annotate(
        instance=KT("changes__instance_uuid__0"), handle=KT("changes__attach_handle__0")
    ).filter(
        ~Exists(detachments),
        host=device.host.name,
        at__gt=Now() - timedelta(days=RELEASED_WITHIN_DAYS),
        action__in=["request.unbound", "request.deleted"],
        instance__isnull=False,
        handle__in=handles.values_list(Cast("id", TextField())),
    )
    latest_first = releases.values("instance").annotate(latest=Max("at")).order_by("-latest")
    return list(latest_first.values_list("instance", flat=True)[:MAX_INSTANCES])


def _find_instances_on_host(
    cloud: Any, endpoint: str, former_holders: Sequence[str], host_names: Sequence[str]
) -> HolderCheckResult:
    """Ask Nova for these instances and return those that are on the host with one of `host_names`, at most MAX_SHOWN.

    `unknown` of the result is the first error, if Nova did not answer for an instance. Instances that a trusted Nova
    does not know are remembered, so that they are not asked for again. An answer that shows one proves the address.
    Raises UntrustedEndpointError if none is shown, and one is unknown to a Nova that is not trusted.
    """
    end = time.monotonic() + HOLDER_CHECK_DEADLINE_S
    try:
        url = endpoints.resolve_url(cloud, endpoint, HOLDER_CHECK_DEADLINE_S)
    except client.NovaUnavailableError as error:
        return HolderCheckResult(unknown=str(error))
    trust = endpoints.describe_trust(url)
    asked = [uuid for uuid in former_holders if not trust or (url, trust, uuid) not in _unknown_instances]
    answers = client.get_servers(cloud, endpoint, asked, max(0.1, end - time.monotonic()))
    holders = [
        f"instance {uuid} ({answer.status} on {host_names[0]}), which may still use it, according to Nova"
        for uuid, answer in answers.items()
        if isinstance(answer, client.NovaServer) and answer.is_on_host(*host_names)
    ]
    has_shown_one = any(isinstance(answer, client.NovaServer) for answer in answers.values())
    if has_shown_one:
        call_after_commit(endpoints.record_proof_at, url)
    unknown_instances = {(url, trust, uuid) for uuid, answer in answers.items() if answer is None}
    if unknown_instances and not holders:
        if not has_shown_one:
            endpoints.refuse_unless_trusted(url)
        if len(_unknown_instances) > MAX_UNKNOWN_INSTANCES:
            _unknown_instances.clear()
        _unknown_instances.update(unknown_instances)
    unknown = next((str(answer) for answer in answers.values() if isinstance(answer, client.NovaUnavailableError)), "")
    return HolderCheckResult(tuple(holders[:MAX_SHOWN]), unknown)


def _ask_unless_away(
    name: str, endpoint: str, uuids: Sequence[str], ask: Callable[[Any, str, Sequence[str]], HolderCheckResult]
) -> HolderCheckResult:
    """Call `ask` with the cloud session, the endpoint and `uuids`, and return its answer. If no cloud is configured, or
    `uuids` is empty, return NO_HOLDERS.

    If the service failed less than BACK_OFF_S ago, return its last error without a call.
    """
    if not uuids or (cloud := get_cloud_session(endpoint)) is None:
        return NO_HOLDERS
    until, why = _outages.get(name, (0.0, ""))
    if time.monotonic() < until:
        return HolderCheckResult(unknown=why)
    check = ask(cloud, endpoint, uuids)
    if check.unknown and not check.holders:
        _outages[name] = (time.monotonic() + BACK_OFF_S, check.unknown)
    return check
