"""Keep a released handle from other requests until its host has confirmed that no guest uses it (promise S1).

The request of a handle may end while its guest still runs: it is detached from a running instance, or Nova deletes an
instance on a host that it cannot reach. The row of `ReleasedHandle` is what keeps the handle back; the job `releases`
asks the host until it has an answer (`accelerators.workflows.release_checks`). When a host confirms, it has removed the
objects that it made for the handle, such as a mediated device. So a host has such objects exactly for the handles that
requests hold or that wait here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from django.conf import settings

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandOrder
from accelerators.domain.states import EventSource, HandleType
from accelerators.models import AttachHandle, Device, ReleasedHandle
from accelerators.runtime import database_clock

FIRST_PAUSE_S = 2.0
"""Seconds after a release until the host is asked for the second time, if it has not confirmed the release by then.
Also the minimum number of seconds between two later questions."""


def release_handles(
    instances: Mapping[int, str | None],
    detach_orders: Sequence[CommandOrder],
    actor: str,
    source: EventSource,
    *,
    instance_is_gone: bool,
) -> None:
    """Keep those of these released handles back that may still be in use, and ask their hosts about them.

    `instances` maps the id of each handle to the instance that had it. `detach_orders` are placed: they ask about the
    handles that are made on a host. Costs one statement if no handle has to wait, otherwise a constant number: the
    waiting handles, their events, the commands, and the `provider` intents that reserve the units in Placement. Call it
    inside `conductor.writing()`, after the requests were released.
    """
    # The rows come before the commands, because an answer counts only if its question is not older than the row. The
    # intents come last: whoever has locked a device may wait for them, and the commands wait for the device.
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
    now = database_clock.now()
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
                source,
                actor,
                host=handle.deployable.device.host,
                subject=(handle.deployable.device.uuid, str(handle.deployable.device)),
                changes={f"release of handle {handle.attach_info}": [None, instances[handle.id]]},
                reason="its request is gone; it is given again when the host has confirmed that no guest uses it",
            )
            for handle in waiting
        ]
    )
    questions = [build_question(handle.id, instances[handle.id], actor) for handle in waiting if _is_function(handle)]
    command_queue.place_commands([*detach_orders, *questions], source)
    conductor.raise_provider_intents({h.deployable.device.host_id: h.deployable.device.host for h in waiting}.values())


def build_question(handle: int, instance: object, actor: str) -> CommandOrder:
    """Build the order of a `detach` command for a released handle, which succeeds if no guest uses the handle.

    For a PCI handle it changes nothing; what the host has made for another handle is removed.
    """
    reason = "is the handle unused?"
    return command_queue.build_detach_order(handle, str(instance or ""), None, reason, actor)


def can_answer(device: Device) -> bool:
    """Return whether the device's driver can tell who uses a function. The `acts` of such a device name `detach`."""
    return "detach" in device.acts.split()


def _may_be_in_use(handle: AttachHandle, instance_is_gone: bool) -> bool:
    """Return whether a released handle must wait for its host.

    One that was made on the host must. If the driver of a PCI handle cannot answer (one of an agent of an older
    release, for example), it need not: the question would never be answered.

    If Nova says that the instance is gone, the handle is free at once if the host's last report shows it unused and
    still describes the host: its agent sends heartbeats, and the driver and the backend answered. An agent reports only
    changes, so the age of the report tells nothing. A silent agent would not have reported a guest that started
    meanwhile, and Nova deletes an instance also if it cannot reach the host, while the guest runs. It does so when the
    compute service has been silent for a minute by default (`service_down_time`). Within that time an agent that works
    has seen the guest that was started last, by a uevent or by its search once a minute (CYBORG_RESCAN_S).
    """
    if not _is_function(handle):
        return handle.attach_type in command_queue.TYPES_CREATED_ON_HOST
    device = handle.deployable.device
    is_known_unused = handle.in_use == "" and not device.host.stale_reason(device.driver, device.backend)
    return can_answer(device) and not (instance_is_gone and is_known_unused)


def _is_function(handle: AttachHandle) -> bool:
    """Return whether the handle is a PCI function, which libvirt itself attaches and detaches."""
    return handle.attach_type == HandleType.PCI
