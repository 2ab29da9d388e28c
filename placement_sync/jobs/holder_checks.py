"""The holder checks of Placement and Nova before a destructive act (`accelerators.safety`).

Placement tells which consumers have an allocation of the device. Nova tells which of the instances that gave their
request back are still on the host. `placement_sync.apps` registers both where a cloud is configured. Both are
asked about many devices at once, and no call takes longer than CALL_TIMEOUT_S.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from itertools import islice
from typing import NamedTuple

from django.conf import settings
from django.db.models import Exists, Max, OuterRef, Q, UUIDField
from django.db.models.fields.json import KT
from django.db.models.functions import Cast, Now

from accelerators.models import AttachHandle, Attachment, Deployable, Device, Event
from accelerators.safety import HolderCheck, HolderCheckResult
from drivers.isolation.threads import call_in_parallel, is_ended
from placement_sync.client import (
    PlacementClient,
    PlacementConflictError,
    PlacementRejectedError,
    PlacementUnavailableError,
)
from placement_sync.cloud import get_cloud_session
from placement_sync.nova import client, endpoints
from placement_sync.nova.client import MAX_PARALLEL_CALLS

CALL_TIMEOUT_S = 2.0
"""Seconds that Placement or Nova may take to answer one call."""
MIN_CALL_TIMEOUT_S = 0.5
"""With less time than this, no service is asked: its answer would come too late."""
MAX_SHOWN = 5
BACK_OFF_S = 10.0
"""A service that was away is not asked again for this many seconds, so that acts are refused at once."""
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

ProviderQuestion = tuple[str, ...]
"""The uuids of a device's providers."""


class NovaQuestion(NamedTuple):
    """The names of a device's host, and the instances that gave back a handle of the device with the time when they
    did, the latest first."""

    host_names: tuple[str, ...]
    former_holders: tuple[tuple[str, datetime], ...]


def load_providers(devices: Collection[Device]) -> dict[int, ProviderQuestion]:
    """Return the recorded providers of each device that has any, by the device's id. Costs one statement."""
    recorded = Deployable.objects.filter(device__in=[device.pk for device in devices], rp_uuid__isnull=False)
    providers: dict[int, list[str]] = {}
    for device, uuid in recorded.order_by("rp_uuid").values_list("device", "rp_uuid"):
        providers.setdefault(device, []).append(str(uuid))
    return {device: tuple(uuids) for device, uuids in providers.items()}


def ask_placement(questions: Mapping[int, ProviderQuestion], seconds: float) -> dict[int, HolderCheckResult]:
    """Return the consumers with an allocation of any of each device's providers, or why that is unknown.

    The providers are read in parallel, in the order of the devices; a call takes at most CALL_TIMEOUT_S. Devices whose
    providers were not all read within `seconds` are left out. After a call without an answer no other is begun, and for
    BACK_OFF_S Placement is not asked again. Nobody holds a device if Placement is switched off or no cloud is
    configured.
    """
    endpoint = settings.KEYS.placement_endpoint
    if (cloud := get_cloud_session(endpoint)) is None:
        return dict.fromkeys(questions, NO_HOLDERS)
    if why := _describe_outage("placement"):
        return dict.fromkeys(questions, HolderCheckResult(unknown=why))
    if seconds < MIN_CALL_TIMEOUT_S:
        return {}
    timeout_s = min(CALL_TIMEOUT_S, seconds)

    def read_consumers(provider: str) -> Collection[str]:
        """Return the consumers with an allocation of the provider. Runs on a thread and uses no database."""
        if outage := _describe_outage("placement"):
            raise PlacementUnavailableError(outage)
        try:
            return PlacementClient(cloud, endpoint, timeout_s=timeout_s).read_allocations(provider)
        except PlacementUnavailableError as error:
            _record_outage("placement", str(error), timeout_s)
            raise

    providers = dict.fromkeys(provider for of_device in questions.values() for provider in of_device)
    futures = call_in_parallel(read_consumers, providers, seconds, MAX_PARALLEL_CALLS)
    results = {}
    for device, of_device in questions.items():
        consumers, unknown = set[str](), ""
        ended = [future for future in (futures[provider] for provider in of_device) if is_ended(future)]
        for future in ended:
            try:
                consumers.update(future.result())
            except (PlacementUnavailableError, PlacementConflictError, PlacementRejectedError) as error:
                unknown = str(error)
        if unknown or consumers or len(ended) == len(of_device):
            holders = tuple(f"Placement's consumer {consumer}" for consumer in sorted(consumers)[:MAX_SHOWN])
            results[device] = HolderCheckResult(holders, unknown)
    return results


def load_former_holders(devices: Collection[Device]) -> dict[int, NovaQuestion]:
    """Return the instances that gave back a handle of each device within RELEASED_WITHIN_DAYS, at most MAX_INSTANCES.

    Devices without any are left out. They are read from events: each unbind and each deletion records which handle was
    held. Two statements.

    Attachments that ended without a fault, or were never attached, are left out: Nova did not plug the device into the
    running instance, and whoever detached it has removed it from the guest. If somebody else deleted the requests, the
    attachment ends with a fault and is not left out. The host itself checks once more before anything is touched.
    """
    handles = AttachHandle.objects.filter(deployable__device__in=[device.pk for device in devices])
    device_by_handle = {str(id): device for id, device in handles.values_list("id", "deployable__device")}
    if not device_by_handle:
        return {}
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
        host__in={device.host.name for device in devices},
        at__gt=Now() - timedelta(days=RELEASED_WITHIN_DAYS),
        action__in=["request.unbound", "request.deleted"],
        instance__isnull=False,
        handle__in=list(device_by_handle),
    )
    rows = releases.values("handle", "instance").annotate(latest=Max("at")).order_by("-latest")
    former_holders: dict[int, dict[str, datetime]] = {}
    for handle, instance, latest in rows.values_list("handle", "instance", "latest"):
        former_holders.setdefault(device_by_handle[handle], {}).setdefault(instance, latest)
    return {
        device.pk: NovaQuestion(
            (device.host.name, device.host.node), tuple(islice(former_holders[device.pk].items(), MAX_INSTANCES))
        )
        for device in devices
        if device.pk in former_holders
    }


def ask_nova(questions: Mapping[int, NovaQuestion], seconds: float) -> dict[int, HolderCheckResult]:
    """Return the former holders of each device that are still on its host, or why that is unknown; within `seconds`.

    Their guests may still use the device. An instance that was deleted, is shelved and offloaded, or is on another host
    does not hold it any more; one whose host Nova does not show counts as on this host. The answer 404 counts only at a
    trusted address (`nova.endpoints`), or if Nova shows another of the instances now, which proves the address.
    Instances that Nova does not know then are not asked for again. After a call without an answer no other is begun. If
    Nova did not answer, or not usefully, it is not asked again for BACK_OFF_S. Nobody holds a device if Nova is
    switched off or no cloud is configured.
    """
    endpoint = settings.KEYS.nova_endpoint
    if (cloud := get_cloud_session(endpoint)) is None:
        return dict.fromkeys(questions, NO_HOLDERS)
    end = time.monotonic() + seconds
    if why := _describe_outage("nova"):
        return dict.fromkeys(questions, HolderCheckResult(unknown=why))
    if seconds < MIN_CALL_TIMEOUT_S:
        return {}
    timeout_s = min(CALL_TIMEOUT_S, seconds)
    try:
        url = endpoints.resolve_url(cloud, endpoint, timeout_s)
    except client.NovaUnavailableError as error:
        _record_outage("nova", str(error), timeout_s)
        return dict.fromkeys(questions, HolderCheckResult(unknown=str(error)))
    trust = endpoints.describe_trust(url)
    instances = dict.fromkeys(uuid for question in questions.values() for uuid, _ in question.former_holders)
    asked = [uuid for uuid in instances if not trust or (url, trust, uuid) not in _unknown_instances]
    seconds_left = end - time.monotonic()
    if seconds_left < MIN_CALL_TIMEOUT_S:
        return {}
    timeout_s = min(CALL_TIMEOUT_S, seconds_left)

    def read_server(uuid: str) -> client.NovaServer | None:
        """Return the instance, None if Nova answers 404. Runs on a thread and uses no database."""
        if outage := _describe_outage("nova"):
            raise client.NovaUnavailableError(outage)
        try:
            return client.get_server(cloud, endpoint, uuid, timeout_s)
        except client.NovaSilentError as error:
            _record_outage("nova", str(error), timeout_s)
            raise

    answers = client.collect_servers(read_server, asked, seconds_left)
    untrusted = ""
    if any(isinstance(answer, client.NovaServer) for answer in answers.values()):
        endpoints.record_proof_at(url)
    elif None in answers.values():
        try:
            endpoints.refuse_unless_trusted(url)
        except endpoints.UntrustedEndpointError as error:  # Nova is not away: it can be confirmed at any moment
            untrusted = str(error)
    if not untrusted:
        _remember_unknown_instances({(url, trust, uuid) for uuid, answer in answers.items() if answer is None})
    unavailable = [answer for answer in answers.values() if isinstance(answer, client.NovaUnavailableError)]
    failures = [str(error) for error in unavailable if not isinstance(error, client.NovaSilentError)]
    if failures and time.monotonic() < end:
        _record_outage("nova", failures[0], CALL_TIMEOUT_S)
    return {device: _judge_answers(question, answers, untrusted) for device, question in questions.items()}


def _judge_answers(
    question: NovaQuestion,
    answers: Mapping[str, client.NovaServer | client.NovaUnavailableError | None],
    untrusted: str,
) -> HolderCheckResult:
    """Return which former holders are on the device's host, at most MAX_SHOWN, or why that is unknown.

    An instance without an answer was not asked for, because Nova does not know it. `untrusted` says why the answer 404
    does not count; '' if it does.
    """
    holders, unknown = [], ""
    for uuid, _ in question.former_holders:
        answer = answers.get(uuid)
        if isinstance(answer, client.NovaServer) and answer.is_on_host(*question.host_names):
            place = f"{answer.status} on {question.host_names[0]}"
            holders.append(f"instance {uuid} ({place}), which may still use it, according to Nova")
        elif isinstance(answer, client.NovaUnavailableError):
            unknown = unknown or str(answer)
        elif answer is None and untrusted:
            unknown = unknown or untrusted
    return HolderCheckResult(tuple(holders[:MAX_SHOWN]), unknown)


def _remember_unknown_instances(instances: Collection[tuple[str, str, str]]) -> None:
    """Do not ask again for these instances, which a trusted Nova does not know."""
    if len(_unknown_instances) > MAX_UNKNOWN_INSTANCES:
        _unknown_instances.clear()
    _unknown_instances.update(instances)


def _describe_outage(service: str) -> str:
    """Return the error of a service that failed less than BACK_OFF_S ago, '' if it has not."""
    until, why = _outages.get(service, (0.0, ""))
    return why if time.monotonic() < until else ""


def _record_outage(service: str, why: str, timeout_s: float) -> None:
    """Do not ask this service again for BACK_OFF_S seconds, unless the call that failed had less than CALL_TIMEOUT_S:
    then the service may only be slow."""
    if timeout_s >= CALL_TIMEOUT_S:
        _outages[service] = (time.monotonic() + BACK_OFF_S, why)


PLACEMENT_CHECK = HolderCheck(load_providers, ask_placement)
NOVA_CHECK = HolderCheck(load_former_holders, ask_nova)
