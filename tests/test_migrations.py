"""Migrations while the release before still serves (docs/upgrade.md): each step only adds, or stands below with the
reason why it harms nobody all the same.

`tests/system/test_upgrade.py` writes as that release does, before and after.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.contrib.postgres.operations import AddIndexConcurrently
from django.core.management import CommandError, call_command
from django.db import connection, models
from django.db.migrations import operations as step
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from cyborgweb.auth import roles

FORMER = {"accelerators": "0001_initial", "agents": "0001_initial", "placement_sync": "0001_initial"}
FORMER |= {"cyborgweb": "0001_initial"}
"""The oldest release beside which this one migrates: its last migrations. Before them, stop all and migrate."""
OURS = tuple(FORMER)
LOOKED_AT: dict[str, str] = {}
"""Each step that does more than add something → the reason why the release before works on all the same."""


def steps() -> Iterator[tuple[str, Any, set[str]]]:
    """Every step after `FORMER`: its migration, itself, and the models that its migration makes."""
    for (app, name), migration in sorted(MigrationLoader(None).disk_migrations.items()):
        if app in FORMER and name > FORMER[app]:
            made = {f"{app}.{one.name_lower}" for one in migration.operations if isinstance(one, step.CreateModel)}
            for one in migration.operations:
                inside = one.database_operations if isinstance(one, step.SeparateDatabaseAndState) else [one]
                yield from ((f"{app} {name}", single, made) for single in inside)


def doubts(operation: Any, app: str, made: set[str]) -> Iterator[str]:
    """What the code before may meet with it; nothing where it can only add."""
    kind = type(operation).__name__
    about = f"{app}.{getattr(operation, 'model_name', '')}".lower()
    if isinstance(operation, step.CreateModel):
        yield from (f"{name} → {where}" for name, where in named(operation.fields, app) if where not in made)
    elif isinstance(operation, step.AddField):
        if not (operation.field.null or operation.field.has_db_default()):
            yield f"{about}.{operation.name} has no default in the database"
        yield from (f"{name} → {where}" for name, where in named([(operation.name, operation.field)], app))
    elif isinstance(operation, step.AddIndex | step.AddConstraint) and not isinstance(operation, AddIndexConcurrently):
        if about not in made:
            yield f"{kind} {about}"
    elif isinstance(operation, step.RunSQL | step.RunPython):
        yield kind
    elif not isinstance(operation, AddIndexConcurrently | step.AlterModelOptions):
        yield f"{kind} {about}.{getattr(operation, 'name', '')}"


def named(fields: Any, app: str) -> Iterator[tuple[str, str]]:
    """The fields that hold a row of another table by a foreign key, and which."""
    for name, field in fields:
        if field.is_relation and field.db_constraint:
            where = str(getattr(field.remote_field.model, "_meta", field.remote_field.model)).lower()
            yield name, where if "." in where else f"{app}.{where}"


def test_every_step_adds_or_was_looked_at() -> None:
    found = {f"{where}: {doubt}" for where, one, made in steps() for doubt in doubts(one, where.split()[0], made)}
    assert sorted(found) == sorted(LOOKED_AT)


def test_a_column_without_a_default_a_lock_and_a_removal_are_found() -> None:
    made = {"agents.gateway"}
    index = models.Index(fields=["at"], name="i")
    bad = [
        step.AddField("agent", "new", models.CharField(max_length=1, default="")),
        step.AddIndex("agent", index),
        step.RemoveField("agent", "old"),
        step.RenameField("agent", "old", "new"),
        step.RunSQL("SELECT 1"),
    ]
    good = [
        step.AddField("agent", "new", models.CharField(max_length=1, default="", db_default="")),
        step.AddIndex("gateway", index),
        AddIndexConcurrently("agent", index),
    ]
    assert all(list(doubts(one, "agents", made)) for one in bad)
    assert not any(list(doubts(one, "agents", made)) for one in good)


@pytest.mark.django_db
def test_migrating_makes_the_groups_of_the_roles_where_they_are_missing() -> None:
    Group.objects.all().delete()
    call_command("migrate", verbosity=0)
    there = {group.name: group.permissions.count() for group in Group.objects.all()}
    assert there.keys() == {role.group for role in roles.ROLES}
    assert all(there.values())


@pytest.mark.django_db
def test_a_database_from_before_the_first_release_is_refused_before_anything_is_changed() -> None:
    MigrationRecorder(connection).record_applied("accelerators", "0002_events")
    Group.objects.all().delete()
    with pytest.raises(CommandError, match="before the first release and cannot be upgraded: start with an empty"):
        call_command("migrate", verbosity=0)
    assert not Group.objects.exists()
