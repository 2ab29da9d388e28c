"""Create, edit, delete and look up device profiles.

A profile can be edited or deleted only while no request refers to it. Look-ups by name are cached in each process.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
from django.db import IntegrityError, transaction
from django.db.models import ProtectedError

from accelerators import conductor
from accelerators.domain import generations
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.groups import ProfileGroup
from accelerators.domain.states import EventSource
from accelerators.models import DeviceProfile
from accelerators.runtime import database_clock, pubsub
from accelerators.runtime.cache import GenerationCache

MAX_DESCRIPTION = 65_535


@dataclass(frozen=True)
class CachedProfile:
    """A profile as it was when it was read. It is still current if the stored row has the same `updated_at`."""

    id: int
    name: str
    groups: tuple[ProfileGroup, ...]
    updated_at: datetime | None


def _read_profile(name: str) -> CachedProfile | None:
    """Read a profile from the database; None if there is none of this name."""
    row = DeviceProfile.objects.filter(name=name).values_list("id", "name", "groups", "updated_at").first()
    return row and CachedProfile(row[0], row[1], tuple(row[2]), row[3])


_profiles_by_name = GenerationCache("profiles", _read_profile)


def get_profile_by_name(name: str) -> CachedProfile | None:
    """Return the profile of this name from the cache, None if there is none.

    A change by another process is seen within a second, or within 15 s if its notification is lost.
    """
    return _profiles_by_name.get(name)


def clear_profile_cache() -> None:
    """Clear this process's cache of profiles, for example because a cached profile turned out to be out of date."""
    _profiles_by_name.drop_all()


def _clear_all_profile_caches() -> None:
    """Clear the cache of this process now, and the caches of all processes after the commit of the transaction."""
    clear_profile_cache()
    transaction.on_commit(partial(pubsub.publish, "profiles"))


def create_profile(
    name: str,
    groups: list[ProfileGroup],
    description: str | None,
    uuid: UUID | None,
    caller: Caller,
    source: EventSource = EventSource.API,
) -> UUID:
    """Store a profile and record an event; return its uuid. The caller must have checked the name and the groups.

    Without `uuid` a random one is chosen. Raises RefusedError: CONFLICT if the name is in use, DUPLICATE if the uuid is
    in use.
    """
    profile_uuid = uuid or uuid4()
    try:
        with conductor.writing():
            DeviceProfile.objects.create(uuid=profile_uuid, name=name, groups=groups, description=description)
            event_fields = {"name": name, "groups": groups} | (
                {} if description is None else {"description": description}
            )
            _record_profile_event(
                "created",
                profile_uuid,
                name,
                caller,
                {field: [None, value] for field, value in event_fields.items()},
                source,
            )
            _clear_all_profile_caches()
    except IntegrityError as error:
        raise _build_duplicate_error(error, name, profile_uuid) from None
    return profile_uuid


def edit_profile(uuid: UUID, changes: dict[str, Any], caller: Caller, *, generation: int | None = None) -> None:
    """Change the name, groups or description of a profile and record an event; locks its row.

    `changes` maps these fields to their new values, which the caller must have checked. Raises RefusedError: NOT_FOUND;
    CONFLICT if the new name is in use; IN_USE while there are requests of this profile, because they refer to its
    groups. Raises ChangedMeanwhileError if the profile's generation is not `generation`.
    """
    try:
        with conductor.writing():
            profile = _load_profile_for_update(uuid)
            if profile.requests.exists():
                text = f"Device profile {profile.name} is used by accelerator requests: make another one instead."
                raise RefusedError(RefusalReason.IN_USE, text)
            before = {field: getattr(profile, field) for field in changes}
            if before != changes:
                generations.refuse_if_changed(f"Device profile {profile.name}", profile.generation, generation)
                profile.generation += 1
            for field, value in changes.items():
                setattr(profile, field, value)
            profile.updated_at = database_clock.now()
            profile.save()
            values = {field: [before[field], changes[field]] for field in changes}
            _record_profile_event("changed", uuid, profile.name, caller, values, EventSource.API)
            _clear_all_profile_caches()
    except IntegrityError as error:
        raise _build_duplicate_error(error, changes.get("name", ""), uuid) from None


def delete_profile(
    uuid: UUID, caller: Caller, source: EventSource = EventSource.API, *, generation: int | None = None
) -> None:
    """Delete a profile and record an event; locks its row.

    Raises RefusedError: NOT_FOUND; IN_USE while there are requests of this profile. Raises ChangedMeanwhileError if the
    profile's generation is not `generation`.
    """
    with conductor.writing():
        profile = _load_profile_for_update(uuid)
        generations.refuse_if_changed(f"Device profile {profile.name}", profile.generation, generation)
        try:
            profile.delete()
        except ProtectedError:
            text = f"Device profile {profile.name} is used by accelerator requests: delete those first."
            raise RefusedError(RefusalReason.IN_USE, text) from None
        before = {"name": [profile.name, None], "groups": [profile.groups, None]}
        _record_profile_event("deleted", uuid, profile.name, caller, before, source)
        _clear_all_profile_caches()


def _load_profile_for_update(uuid: UUID) -> DeviceProfile:
    """Lock and return a profile's row; raise RefusedError NOT_FOUND if there is none."""
    profile = DeviceProfile.objects.select_for_update().filter(uuid=uuid).first()
    if profile is None:
        raise RefusedError(RefusalReason.NOT_FOUND, f"Device Profile not found with uuid={uuid}")
    return profile


def _build_duplicate_error(error: IntegrityError, name: str, uuid: UUID) -> RefusedError:
    """Return the RefusedError for a violated unique constraint: DUPLICATE for the uuid, otherwise CONFLICT for the
    name."""
    cause = error.__cause__
    if isinstance(cause, psycopg.Error) and "uuid" in (cause.diag.constraint_name or ""):
        return RefusedError(RefusalReason.DUPLICATE, f"DeviceProfile with uuid {uuid} already exists.")
    return RefusedError(RefusalReason.CONFLICT, f"A device_profile with name {name} already exists.")


def _record_profile_event(
    verb: str, uuid: UUID, name: str, caller: Caller, changes: dict[str, Any], source: EventSource
) -> None:
    """Write the event `profile.VERB`; `changes` maps each field to its values before and after."""
    conductor.record_event(f"profile.{verb}", source, caller.name, subject=(uuid, name), changes=changes)
