"""Device profiles: made, edited until they are used, deleted while they are not. Remembered by name.

Called by both APIs and by `binding`.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
from django.db import IntegrityError, transaction
from django.db.models import ProtectedError

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.errors import Reason, Refused
from accelerators.domain.groups import Group
from accelerators.domain.states import Source
from accelerators.models import DeviceProfile
from accelerators.runtime import pubsub
from accelerators.runtime.cache import Cache

MAX_DESCRIPTION = 65_535


@dataclass(frozen=True)
class Profile:
    """A profile as it is remembered; `updated_at` tells whether it still is."""

    id: int
    name: str
    groups: tuple[Group, ...]
    updated_at: datetime | None


def _load(name: str) -> Profile | None:
    found = DeviceProfile.objects.filter(name=name).values_list("id", "name", "groups", "updated_at").first()
    return found and Profile(found[0], found[1], tuple(found[2]), found[3])


_by_name = Cache("profiles", _load)


def by_name(name: str) -> Profile | None:
    """The profile of this name. Another process's change shows within a second, within 15 s when its ring is lost."""
    return _by_name.get(name)


def forget() -> None:
    """Read every profile anew in this process: what it remembered has proved old."""
    _by_name.drop()


def _changed() -> None:
    """Have every process read anew, this one already inside the transaction we are in, all after its commit."""
    forget()
    transaction.on_commit(partial(pubsub.ring, "profiles"))


def create(name: str, groups: list[Group], description: str | None, uuid: UUID | None, caller: Caller) -> UUID:
    """Store a profile of checked parts, return its uuid; refuses a name (CONFLICT) or a uuid (DUPLICATE) in use."""
    chosen = uuid or uuid4()
    try:
        with conductor.writing():
            DeviceProfile.objects.create(uuid=chosen, name=name, groups=groups, description=description)
            told = {"name": name, "groups": groups} | ({} if description is None else {"description": description})
            _record("created", chosen, name, caller, {field: [None, value] for field, value in told.items()})
            _changed()
    except IntegrityError as error:
        raise _taken(error, name, chosen) from None
    return chosen


def edit(uuid: UUID, changes: dict[str, Any], caller: Caller) -> None:
    """Change name, groups or description of a profile; HELD once requests were made of it, as they name its groups."""
    try:
        with conductor.writing():
            profile = _locked(uuid)
            if profile.requests.exists():
                text = f"Device profile {profile.name} is used by accelerator requests: make another one instead."
                raise Refused(Reason.HELD, text)
            before = {field: getattr(profile, field) for field in changes}
            for field, value in changes.items():
                setattr(profile, field, value)
            profile.updated_at = datetime.now(UTC)
            profile.save()
            _record("changed", uuid, profile.name, caller, {f: [before[f], changes[f]] for f in changes})
            _changed()
    except IntegrityError as error:
        raise _taken(error, changes.get("name", ""), uuid) from None


def delete(uuid: UUID, caller: Caller) -> None:
    """Remove a profile; HELD while a request names it."""
    with conductor.writing():
        profile = _locked(uuid)
        try:
            profile.delete()
        except ProtectedError:
            text = f"Device profile {profile.name} is used by accelerator requests: delete those first."
            raise Refused(Reason.HELD, text) from None
        _record("deleted", uuid, profile.name, caller, {"name": [profile.name, None], "groups": [profile.groups, None]})
        _changed()


def _locked(uuid: UUID) -> DeviceProfile:
    found = DeviceProfile.objects.select_for_update().filter(uuid=uuid).first()
    if found is None:
        raise Refused(Reason.UNKNOWN, f"Device Profile not found with uuid={uuid}")
    return found


def _taken(error: IntegrityError, name: str, uuid: UUID) -> Refused:
    cause = error.__cause__
    if isinstance(cause, psycopg.Error) and "uuid" in (cause.diag.constraint_name or ""):
        return Refused(Reason.DUPLICATE, f"DeviceProfile with uuid {uuid} already exists.")
    return Refused(Reason.CONFLICT, f"A device_profile with name {name} already exists.")


def _record(what: str, uuid: UUID, name: str, caller: Caller, changes: dict[str, Any]) -> None:
    conductor.record(f"profile.{what}", Source.API, caller.name, subject=(uuid, name), changes=changes)
