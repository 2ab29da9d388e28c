"""Set and remove attributes of deployables on behalf of an operator."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from django.db import IntegrityError

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import Origin, Source
from accelerators.models import Attribute, Deployable

MAX_VALUE = 65_535


def put(deployable_id: int, key: str, value: str, caller: Caller) -> UUID:
    """Set an attribute of a deployable, with origin operator, so that reports do not change it. Return its uuid.

    An existing attribute of the agent becomes the operator's. The device's host is locked. Raise RefusedError: UNKNOWN
    if there is no such deployable; CONFLICT if programming has written the attribute; AWAY if the agent's report
    inserts it at the same moment.
    """
    with conductor.writing():
        deployable = _part(deployable_id)
        old = Attribute.objects.select_for_update().filter(deployable=deployable, key=key).first()
        _refuse_conductors(old)
        if old is None:
            try:
                made = Attribute.objects.create(
                    deployable=deployable, key=key, value=value, origin=Origin.OPERATOR.value
                )
            except IntegrityError:  # a report inserted it meanwhile
                raise RefusedError(Reason.AWAY, f"Attribute {key} is being written by its agent: try again.") from None
        else:
            made = old
            Attribute.objects.filter(id=old.id).update(
                value=value, origin=Origin.OPERATOR.value, updated_at=datetime.now(UTC)
            )
        _attribute_changed(deployable, key, old and old.value, value, caller)
    return made.uuid


def remove(uuid: UUID, caller: Caller) -> None:
    """Remove an attribute; if the agent reports it, its next report brings it back. The device's host is locked.

    Raise RefusedError: UNKNOWN if there is no such attribute; CONFLICT if programming has written it.
    """
    with conductor.writing():
        found = Attribute.objects.filter(uuid=uuid).first()
        deployable = _part(found.deployable_id) if found else None
        if deployable is None or not (found := Attribute.objects.select_for_update().filter(uuid=uuid).first()):
            raise RefusedError(Reason.UNKNOWN, f"Attribute not found with uuid={uuid}")
        _refuse_conductors(found)
        found.delete()
        _attribute_changed(deployable, found.key, found.value, None, caller)


def _refuse_conductors(attribute: Attribute | None) -> None:
    """Raise RefusedError CONFLICT if programming has written the attribute."""
    if attribute is not None and attribute.origin == Origin.CONDUCTOR:
        text = f"Attribute {attribute.key} says what was programmed, {attribute.value}: program to change it."
        raise RefusedError(Reason.CONFLICT, text)


def _part(deployable_id: int) -> Deployable:
    """Return the deployable with its device and host; lock the host. Raise RefusedError UNKNOWN if it does not exist.

    A merge locks the host first, too; the same order here prevents deadlocks.
    """
    rows = Deployable.objects.select_for_update(of=("device__host",)).select_related("device__host")
    found = rows.filter(id=deployable_id).first()
    if found is None:
        raise RefusedError(Reason.UNKNOWN, f"Deployable not found with id={deployable_id}")
    return found


def _attribute_changed(deployable: Deployable, key: str, was: str | None, value: str | None, caller: Caller) -> None:
    """Record the change, and have the host's deployables synchronised with Placement.

    Also clear the host's `applied_hash`, so that its next report is compared in full: the stored rows are no longer
    what the last report left.
    """
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
    conductor.providers_changed([host])
