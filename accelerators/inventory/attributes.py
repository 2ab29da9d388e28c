"""Attributes that an operator gives to deployables, or takes from them. Called by the v2 API."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import UUID

from django.db import IntegrityError

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.errors import Reason, Refused
from accelerators.domain.states import Origin, Source
from accelerators.models import Attribute, Deployable

MAX_VALUE = 65_535


def put(deployable_id: int, key: str, value: str, caller: Caller) -> UUID:
    """Give a deployable an attribute that reports leave alone; one that is there is taken over. Returns its uuid.

    Raises Refused: UNKNOWN for a deployable that is not there, CONFLICT for what programming has written.
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
            except IntegrityError:  # reported in this very moment
                raise Refused(Reason.AWAY, f"Attribute {key} is being written by its agent: try again.") from None
        else:
            made = old
            Attribute.objects.filter(id=old.id).update(
                value=value, origin=Origin.OPERATOR.value, updated_at=datetime.now(UTC)
            )
        _attribute_changed(deployable, key, old and old.value, value, caller)
    return made.uuid


def remove(uuid: UUID, caller: Caller) -> None:
    """Remove an attribute; one that the agent reports comes back with its next report.

    Raises Refused: UNKNOWN, CONFLICT for what programming has written.
    """
    with conductor.writing():
        found = Attribute.objects.filter(uuid=uuid).first()
        deployable = _part(found.deployable_id) if found else None
        if deployable is None or not (found := Attribute.objects.select_for_update().filter(uuid=uuid).first()):
            raise Refused(Reason.UNKNOWN, f"Attribute not found with uuid={uuid}")
        _refuse_conductors(found)
        found.delete()
        _attribute_changed(deployable, found.key, found.value, None, caller)


def _refuse_conductors(attribute: Attribute | None) -> None:
    if attribute is not None and attribute.origin == Origin.CONDUCTOR:
        text = f"Attribute {attribute.key} says what was programmed, {attribute.value}: program to change it."
        raise Refused(Reason.CONFLICT, text)


def _part(deployable_id: int) -> Deployable:
    """Its host is locked first, as by a merge: then neither waits for the other."""
    rows = Deployable.objects.select_for_update(of=("device__host",)).select_related("device__host")
    found = rows.filter(id=deployable_id).first()
    if found is None:
        raise Refused(Reason.UNKNOWN, f"Deployable not found with id={deployable_id}")
    return found


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
    conductor.providers_changed([host])
