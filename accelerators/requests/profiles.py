"""Create, edit, delete and look up device profiles.

A profile can be edited or deleted only while no request refers to it. Look-ups by name are cached in each process.
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
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.groups import Group
from accelerators.domain.states import Source
from accelerators.models import DeviceProfile
from accelerators.runtime import pubsub
from accelerators.runtime.cache import Cache

MAX_DESCRIPTION = 65_535


@dataclass(frozen=True)
class Profile:
    """A cached profile. Compare `updated_at` with the database to find out whether it is still current."""

    id: int
    name: str
    groups: tuple[Group, ...]
    updated_at: datetime | None


def _load(name: str) -> Profile | None:
    """Read a profile from the database; None if there is none of this name."""
    found = DeviceProfile.objects.filter(name=name).values_list("id", "name", "groups", "updated_at").first()
    return found and Profile(found[0], found[1], tuple(found[2]), found[3])


_by_name = Cache("profiles", _load)


def by_name(name: str) -> Profile | None:
    """Return the profile of this name from the cache, None if there is none.

    A change by another process is seen within a second, or within 15 s if its notification is lost.
    """
    return _by_name.get(name)


def forget() -> None:
    """Clear this process's cache of profiles. Call it when a cached profile turned out to be out of date."""
    _by_name.drop()


def _changed() -> None:
    """Clear the cache of this process now, and the caches of all processes after the commit of the transaction."""
    forget()
    transaction.on_commit(partial(pubsub.ring, "profiles"))


def create(name: str, groups: list[Group], description: str | None, uuid: UUID | None, caller: Caller) -> UUID:
    """Store a profile and record an event; return its uuid. The caller must have checked the name and the groups.

    Without `uuid` a random one is chosen. Raises RefusedError: CONFLICT if the name is in use, DUPLICATE if the uuid
    is.
    """
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
    """Change the name, groups or description of a profile and record an event; locks its row.

    Raises RefusedError: UNKNOWN; CONFLICT if the new name is in use; HELD while there are requests of this profile,
    because they refer to its groups.
    """
    try:
        with conductor.writing():
            profile = _locked(uuid)
            if profile.requests.exists():
                text = f"Device profile {profile.name} is used by accelerator requests: make another one instead."
                raise RefusedError(Reason.HELD, text)
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
    """Delete a profile and record an event; locks its row.

    Raises RefusedError: UNKNOWN; HELD while there are requests of this profile.
    """
    with conductor.writing():
        profile = _locked(uuid)
        try:
            profile.delete()
        except ProtectedError:
            text = f"Device profile {profile.name} is used by accelerator requests: delete those first."
            raise RefusedError(Reason.HELD, text) from None
        _record("deleted", uuid, profile.name, caller, {"name": [profile.name, None], "groups": [profile.groups, None]})
        _changed()


def _locked(uuid: UUID) -> DeviceProfile:
    """Lock and return a profile's row; raise RefusedError UNKNOWN if there is none."""
    found = DeviceProfile.objects.select_for_update().filter(uuid=uuid).first()
    if found is None:
        raise RefusedError(Reason.UNKNOWN, f"Device Profile not found with uuid={uuid}")
    return found


def _taken(error: IntegrityError, name: str, uuid: UUID) -> RefusedError:
    """Return the RefusedError for a violated unique constraint: DUPLICATE for the uuid, otherwise CONFLICT for the
    name."""
    cause = error.__cause__
    if isinstance(cause, psycopg.Error) and "uuid" in (cause.diag.constraint_name or ""):
        return RefusedError(Reason.DUPLICATE, f"DeviceProfile with uuid {uuid} already exists.")
    return RefusedError(Reason.CONFLICT, f"A device_profile with name {name} already exists.")


def _record(what: str, uuid: UUID, name: str, caller: Caller, changes: dict[str, Any]) -> None:
    conductor.record(f"profile.{what}", Source.API, caller.name, subject=(uuid, name), changes=changes)
