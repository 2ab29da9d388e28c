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
from django.core.management import call_command
from django.db import models
from django.db.migrations import operations as step
from django.db.migrations.loader import MigrationLoader

from cyborgweb.auth import roles

FORMER = {
    "accelerators": "0006_images",
    "agents": "0001_initial",
    "placement_sync": "0001_initial",
    "cyborgweb": "0001_initial",
}
"""The oldest release beside which this one migrates: its last migrations. Before them, stop all and migrate."""
OURS = tuple(FORMER)
INDEX = "writers wait while it is built; none of these tables has millions of rows"
NEWER = "a row that only this release makes; while there is one, the former release cannot delete what it names"
NEVER = "hosts are never deleted"
PLACED = "new functions, triggers, sequences and views, which the code before neither names nor is hindered by"
MONTHLY = "an index of events, built CONCURRENTLY, one month after the other"
LEAN = "an index goes that began another, unique one; the column and whom it names stay, a lock is waited for 3 s"
LOOKED_AT = {
    "accelerators 0007_search: AddIndex accelerators.attachhandle": INDEX,
    "accelerators 0007_search: AddIndex accelerators.device": INDEX,
    "accelerators 0008_bulks: AddIndex accelerators.device": INDEX,
    "accelerators 0008_bulks: device → accelerators.device": NEWER,
    "accelerators 0009_backends: AlterField accelerators.host.drivers": "its help text alone",
    "accelerators 0009_backends: RunSQL": PLACED,
    "accelerators 0010_drivers: RunSQL": PLACED,
    "accelerators 0010_drivers: host → accelerators.host": NEVER,
    "accelerators 0013_event_words: RunPython": MONTHLY,
    "accelerators 0014_seals: RunSQL": "a column with a default, a lock that is waited for 3 s at most; " + PLACED,
    "accelerators 0015_event_order: RunPython": MONTHLY,
    "accelerators 0016_lean_indexes: AlterField accelerators.attachhandle.deployable": LEAN,
    "accelerators 0016_lean_indexes: AlterField accelerators.attribute.deployable": LEAN,
    "accelerators 0016_lean_indexes: AlterField accelerators.deployable.device": LEAN,
    "accelerators 0016_lean_indexes: AlterField accelerators.device.host": LEAN,
    "accelerators 0016_lean_indexes: RunSQL": "how long it waits for locks",
    "agents 0002_trust: RunSQL": PLACED,
    "agents 0006_urgent: AddIndex agents.spooled": INDEX,
    "cyborgweb 0002_keystone_users: user → auth.user": NEWER,
    "cyborgweb 0003_saved_views: user → auth.user": NEWER,
    "cyborgweb 0004_notify: user → auth.user": NEWER,
    "placement_sync 0003_discrepancy: device → accelerators.device": NEWER,
    "placement_sync 0003_discrepancy: host → accelerators.host": NEVER,
}


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
