"""Keep a released handle from other requests until its host has confirmed that no guest uses it (promise S1).

The request of a handle may end while its guest still runs: it is detached from a running instance, or Nova deletes an
instance on a host that it cannot reach. The row of `ReleasedHandle` is what keeps the handle back; the job `releases`
asks the host until it has an answer (`accelerators.workflows.release_checks`). What a host has made for a handle, such
as a mediated device, is gone when it confirms; so a host has exactly those of the handles that requests hold or that
wait here.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta

from django.conf import settings

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.domain.states import EventSource, HandleType
from accelerators.models import AttachHandle, Device, ReleasedHandle

FIRST_PAUSE_S = 2.0
"""Seconds until a host that has not confirmed a release is asked again for the first time."""


def hold_back_used_handles(instances: Mapping[int, str | None], actor: str, *, instance_is_gone: bool) -> None:
    """Keep those of these released handles back that a guest may still use, and ask their hosts about them.

    `instances` maps the id of each handle to the instance that had it. For handles that are made on the host, the
    caller has ordered the detach already. One statement if no handle has to wait, otherwise a constant number: the
    waiting handles, the commands, their events, and the `provider` intents that reserve the units in Placement. Call it
    inside `conductor.writing()`, after the requests were released.
    """
    if not instances:
        return
    waiting = [
        handle
        for handle in AttachHandle.objects.filter(id__in=instances)
        .select_related("deployable__device__host")
        .order_by("id")
        if _may_be_in_use(handle, instance_is_gone)
    ]
    if not waiting:
        return
    now = datetime.now(UTC)
    ReleasedHandle.objects.bulk_create(
        ReleasedHandle(
            handle=handle,
            instance=instances[handle.id],
            ask_at=now + timedelta(seconds=FIRST_PAUSE_S),
            ask_until=now + timedelta(seconds=settings.KEYS.detach_timeout_s) if _is_function(handle) else None,
        )
        for handle in waiting
    )
    conductor.record_events(
        [
            conductor.build_event(
                "device.handle_held_back",
                EventSource.API,
                actor,
                host=handle.deployable.device.host,
                subject=(handle.deployable.device.uuid, str(handle.deployable.device)),
                changes={f"release of handle {handle.attach_info}": [None, instances[handle.id]]},
                reason="its request is gone; it is given again when the host has confirmed that no guest uses it",
            )
            for handle in waiting
        ]
    )
    command_queue.place_commands(
        [build_question(handle.id, instances[handle.id], actor) for handle in waiting if _is_function(handle)]
    )
    conductor.raise_provider_intents({h.deployable.device.host_id: h.deployable.device.host for h in waiting}.values())


def build_question(handle: int, instance: object, actor: str) -> command_queue.CommandOrder:
    """Build the order of a `detach` command for a released handle, which succeeds if no guest uses the handle.

    For a PCI handle it changes nothing; what the host has made for another handle is removed.
    """
    reason = "is the handle unused?"
    return command_queue.build_detach_order(handle, str(instance or ""), None, reason, actor)


def can_answer(device: Device) -> bool:
    """Return whether the device's driver tells who uses a function: only then its `acts` name `detach`."""
    return "detach" in device.acts.split()


def _may_be_in_use(handle: AttachHandle, instance_is_gone: bool) -> bool:
    """Return whether a released handle must wait for its host.

    One that was made on the host must. If the driver of a PCI handle cannot answer (one of an agent of an older
    release, for example), it need not: the question would never be answered. If Nova says that the instance is gone,
    the last report decides.
    """
    if not _is_function(handle):
        return handle.attach_type in command_queue.TYPES_CREATED_ON_HOST
    return can_answer(handle.deployable.device) and not (instance_is_gone and handle.in_use == "")


def _is_function(handle: AttachHandle) -> bool:
    """Return whether the handle is a PCI function, which libvirt itself attaches and detaches."""
    return handle.attach_type == HandleType.PCI
