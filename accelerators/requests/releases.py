"""Keep a released PCI handle from other requests until its host has confirmed that no guest uses it (promise S1).

The request of a PCI handle may end while its guest still runs: the handle is detached from a running instance, or Nova
deletes an instance on a host that it cannot reach. While there is a row of `ReleasedHandle` for a handle, no request
gets the handle. The job `releases` asks the host again and again until it confirms
(`accelerators.workflows.release_checks`).
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
"""Seconds after a release until the host is asked for the second time, if it has not confirmed the release by then.
Also the minimum number of seconds between two later questions."""


def hold_back_used_handles(instances: Mapping[int, str | None], actor: str, *, instance_is_gone: bool) -> None:
    """Keep released handles from other requests if a guest may still use them, and ask their hosts about them.

    `instances` maps the id of each released handle to the uuid of the instance that had it, None if it had none.
    `actor` is the name in the events. `instance_is_gone` says that Nova has no such instance any more; then only
    handles wait that were reported as used, or whose use was unknown.

    One statement if no handle has to wait, otherwise a constant number: for the waiting handles, the commands, their
    events, and the `provider` intents that reserve the units in Placement. Call it inside `conductor.writing()`, after
    the requests were released.
    """
    waiting = [
        handle
        for handle in AttachHandle.objects.filter(id__in=instances, attach_type=HandleType.PCI)
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
            ask_until=now + timedelta(seconds=settings.KEYS.detach_timeout_s),
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
    command_queue.place_commands([build_question(handle.id, instances[handle.id], actor) for handle in waiting])
    conductor.raise_provider_intents({h.deployable.device.host_id: h.deployable.device.host for h in waiting}.values())


def build_question(handle: int, instance: object, actor: str) -> command_queue.CommandOrder:
    """Build the order of a `detach` command that asks whether a guest still uses a PCI handle. The order is not placed.

    The command changes nothing, and succeeds if no guest uses the function. `handle` is the primary key of the handle,
    `instance` the uuid of the instance that had it, None if it had none.
    """
    reason = "is the function unused?"
    return command_queue.build_detach_order(handle, str(instance or ""), None, reason, actor)


def can_answer(device: Device) -> bool:
    """Return whether the device's driver can tell who uses a function. The `acts` of such a device name `detach`."""
    return "detach" in device.acts.split()


def _may_be_in_use(handle: AttachHandle, instance_is_gone: bool) -> bool:
    """Return whether a released PCI handle must wait until its host confirms that no guest uses it.

    Returns False if the device's driver cannot answer, for example because the agent is of an older release: the handle
    would wait for ever. If `instance_is_gone`, the last report decides: the handle waits unless its `in_use` is ''.
    """
    return can_answer(handle.deployable.device) and not (instance_is_gone and handle.in_use == "")
