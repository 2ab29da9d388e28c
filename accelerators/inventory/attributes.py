"""Set and remove attributes of deployables on behalf of an operator."""

from __future__ import annotations

from uuid import UUID

from django.db import IntegrityError

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import AttributeOrigin, EventSource
from accelerators.models import Attribute, Deployable
from accelerators.runtime import database_clock

MAX_VALUE = 65_535


def set_operator_attribute(deployable_id: int, key: str, value: str, caller: Caller) -> UUID:
    """Set an attribute of a deployable, with origin operator, so that reports do not change it. Return its uuid.

    An existing attribute of the agent becomes the operator's. The device's host is locked. Raise RefusedError:
    NOT_FOUND if there is no such deployable; CONFLICT if programming has written the attribute; UNAVAILABLE if the
    agent's report inserts it at the same moment.
    """
    with conductor.writing():
        deployable = _load_deployable_with_host_lock(deployable_id)
        present = Attribute.objects.select_for_update().filter(deployable=deployable, key=key).first()
        _refuse_if_programmed(present)
        if present is None:
            try:
                attribute = Attribute.objects.create(
                    deployable=deployable, key=key, value=value, origin=AttributeOrigin.OPERATOR.value
                )
            except IntegrityError:  # a report inserted it meanwhile
                raise RefusedError(
                    RefusalReason.UNAVAILABLE, f"Attribute {key} is being written by its agent: try again."
                ) from None
        else:
            attribute = present
            Attribute.objects.filter(id=present.id).update(
                value=value, origin=AttributeOrigin.OPERATOR.value, updated_at=database_clock.now()
            )
        _record_attribute_change(deployable, key, present.value if present else None, value, caller)
    return attribute.uuid


def remove_attribute(uuid: UUID, caller: Caller) -> None:
    """Remove an attribute; if the agent reports it, its report, which is sent again at once, brings it back.

    The device's host is locked. Raise RefusedError: NOT_FOUND if there is no such attribute; CONFLICT if programming
    has written it.
    """
    with conductor.writing():
        attribute = Attribute.objects.filter(uuid=uuid).first()
        deployable = _load_deployable_with_host_lock(attribute.deployable_id) if attribute else None
        if deployable is None or not (attribute := Attribute.objects.select_for_update().filter(uuid=uuid).first()):
            raise RefusedError(RefusalReason.NOT_FOUND, f"Attribute not found with uuid={uuid}")
        _refuse_if_programmed(attribute)
        attribute.delete()
        _record_attribute_change(deployable, attribute.key, attribute.value, None, caller)


def _refuse_if_programmed(attribute: Attribute | None) -> None:
    """Raise RefusedError CONFLICT if programming has written the attribute; None is never refused."""
    if attribute is not None and attribute.origin == AttributeOrigin.CONDUCTOR:
        text = f"Attribute {attribute.key} says what was programmed, {attribute.value}: program to change it."
        raise RefusedError(RefusalReason.CONFLICT, text)


def _load_deployable_with_host_lock(deployable_id: int) -> Deployable:
    """Return the deployable with its device and host; lock the host (FOR NO KEY UPDATE). Raise RefusedError
    NOT_FOUND if it does not exist.

    A merge locks the host first, too; the same order here prevents deadlocks.
    """
    rows = Deployable.objects.select_for_update(of=("device__host",), no_key=True).select_related("device__host")
    deployable = rows.filter(id=deployable_id).first()
    if deployable is None:
        raise RefusedError(RefusalReason.NOT_FOUND, f"Deployable not found with id={deployable_id}")
    return deployable


def _record_attribute_change(
    deployable: Deployable, key: str, old_value: str | None, value: str | None, caller: Caller
) -> None:
    """Record an event of the change, and raise an intent so that the host's deployables are synchronised with
    Placement.

    Also have the host's report sent again and compared in full, because the stored attributes differ from those of the
    last report now.
    """
    device, host = deployable.device, deployable.device.host
    conductor.forget_applied_report(host)
    conductor.record_event(
        "device.attribute",
        EventSource.API,
        caller.name,
        host=host,
        subject=(device.uuid, str(device)),
        changes={f"{deployable.name} {key}": [old_value, value]},
    )
    conductor.raise_provider_intents([host])
