"""Delete devices with their deployables, attributes and attach handles."""

from __future__ import annotations

from collections.abc import Mapping

from accelerators import conductor
from accelerators.domain.states import EventSource
from accelerators.models import AttachHandle, Attribute, Deployable, Device


def delete_devices(reason_by_device: Mapping[Device, str], actor: str) -> None:
    """Delete these devices, and record an event with its reason for each.

    The caller must have locked them with `conductor.lock_devices(..., to_delete=True)`, and must know that nobody holds
    them. Raises ProtectedError if a request refers to one of them.
    """
    conductor.record_events(
        [
            conductor.build_event(
                "device.removed",
                EventSource.SYSTEM,
                actor,
                host=device.host,
                subject=(device.uuid, str(device)),
                changes={"device": [str(device.uuid), None], "model": [device.model, None], "key": [device.key, None]},
                reason=reason,
            )
            for device, reason in reason_by_device.items()
        ]
    )
    deployables = Deployable.objects.filter(device__in=list(reason_by_device))
    Attribute.objects.filter(deployable__in=deployables).delete()
    AttachHandle.objects.filter(deployable__in=deployables).delete()
    deployables.delete()
    Device.objects.filter(pk__in=[device.pk for device in reason_by_device]).delete()
