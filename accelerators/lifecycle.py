"""What an operator decides about devices: offer them, take them out of offer; attributes of their own.

Called by both APIs. Taking out of offer is never refused and never touches a bound request; an intent tells Placement.
"""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from django.db import IntegrityError

from accelerators import conductor
from accelerators.caller import Caller
from accelerators.models import Attribute, Deployable, Device
from accelerators.providers import provider_uuid
from accelerators.refusals import Reason, Refused
from accelerators.states import DeviceState, Origin, Source

MAX_VALUE = 65_535

_S = DeviceState
ENABLED_FROM = (_S.INACTIVE, _S.MAINTENANCE, _S.FAILED)
DISABLED_FROM = (_S.READY, _S.INSTALLING)


def enable(uuid: UUID, caller: Caller, reason: str = "") -> None:
    """Offer a device. No driver there is plans a step of installation, so it is ready at once; already offered is well.

    Raises Refused: UNKNOWN, or CONFLICT for a device that is missing, quarantined or retired.
    """
    with conductor.writing():
        device = _locked(uuid)
        if device.state in ENABLED_FROM:
            _move(device, _S.READY, caller, reason or "enabled")
        elif device.state not in (_S.READY, _S.INSTALLING):
            raise Refused(Reason.CONFLICT, f"Device {uuid} is {device.state}: it cannot be enabled.")


def disable(uuid: UUID, caller: Caller, reason: str = "") -> None:
    """Take a device out of offer; what is bound stays bound. No change for a device that is not offered."""
    with conductor.writing():
        device = _locked(uuid)
        if device.state in DISABLED_FROM:
            _move(device, _S.MAINTENANCE, caller, reason or "disabled")


def set_attribute(deployable_id: int, key: str, value: str, caller: Caller) -> UUID:
    """Give a deployable an attribute that reports leave alone; one that is there is taken over. Returns its uuid.

    Raises Refused UNKNOWN for a deployable that is not there.
    """
    with conductor.writing():
        deployable = _part(deployable_id)
        old = Attribute.objects.select_for_update().filter(deployable=deployable, key=key).first()
        if old is None:
            try:
                made = Attribute.objects.create(
                    deployable=deployable, key=key, value=value, origin=Origin.OPERATOR.value
                )
            except IntegrityError:  # reported in this very moment
                raise Refused(Reason.AWAY, f"Attribute {key} is being written by its agent: try again.") from None
        else:
            made = old
            Attribute.objects.filter(id=old.id).update(
                value=value, origin=Origin.OPERATOR.value, updated_at=datetime.now(UTC)
            )
        _attribute_changed(deployable, key, old and old.value, value, caller)
    return made.uuid


def remove_attribute(uuid: UUID, caller: Caller) -> None:
    """Remove an attribute; one that the agent reports comes back with its next report. Raises Refused UNKNOWN."""
    with conductor.writing():
        found = Attribute.objects.select_for_update().filter(uuid=uuid).first()
        if found is None:
            raise Refused(Reason.UNKNOWN, f"Attribute not found with uuid={uuid}")
        deployable = _part(found.deployable_id)
        found.delete()
        _attribute_changed(deployable, found.key, found.value, None, caller)


def _locked(uuid: UUID) -> Device:
    found = Device.objects.select_for_update(of=("self",)).select_related("host").filter(uuid=uuid).first()
    if found is None:
        raise Refused(Reason.UNKNOWN, f"Device not found with uuid={uuid}")
    return found


def _part(deployable_id: int) -> Deployable:
    found = Deployable.objects.select_related("device__host").filter(id=deployable_id).first()
    if found is None:
        raise Refused(Reason.UNKNOWN, f"Deployable not found with id={deployable_id}")
    return found


def _move(device: Device, to: DeviceState, caller: Caller, reason: str) -> None:
    was, now = device.state, datetime.now(UTC)
    device.state, device.state_reason, device.state_since = to.value, reason, now
    device.state_by, device.updated_at = caller.name[:255], now
    device.save(update_fields=["state", "state_reason", "state_since", "state_by", "updated_at"])
    # Its providers' ids are known from now on; one that is recorded (adopted, say) always wins.
    for part in Deployable.objects.filter(device=device, rp_uuid__isnull=True):
        Deployable.objects.filter(id=part.id).update(rp_uuid=provider_uuid(part.name), updated_at=now)
    conductor.record(
        f"device.{to.value}",
        Source.API,
        caller.name,
        host=device.host,
        subject=(device.uuid, str(device)),
        changes={"state": [was, to.value]},
        reason=reason,
    )
    conductor.provider_changed(device.host)


def _attribute_changed(deployable: Deployable, key: str, was: str | None, value: str | None, caller: Caller) -> None:
    """The host's next report is compared afresh, as what was applied of the last one is no longer what is stored."""
    device, host = deployable.device, deployable.device.host
    host.applied_hash = ""
    host.save(update_fields=["applied_hash"])
    conductor.record(
        "device.attribute",
        Source.API,
        caller.name,
        host=host,
        subject=(device.uuid, str(device)),
        changes={f"{deployable.name} {key}": [was, value]},
    )
    conductor.provider_changed(host)
