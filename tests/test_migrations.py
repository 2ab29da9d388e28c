"""Test that every migration step is safe while the former release still serves (docs/upgrade.md).

Each step only adds something, or is listed in `REVIEWED_STEPS` with the reason why the former release works on.
`tests/system/test_upgrade.py` writes as that release does, before and after the migration.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.contrib.postgres.operations import AddIndexConcurrently
from django.core.management import CommandError, call_command
from django.db import connection, models
from django.db.migrations import Migration
from django.db.migrations import operations as step
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.recorder import MigrationRecorder

from cyborgweb.auth import roles

LAST_MIGRATIONS_OF_FORMER_RELEASE = {
    "accelerators": "0001_initial",
    "agents": "0001_initial",
    "placement_sync": "0001_initial",
}
LAST_MIGRATIONS_OF_FORMER_RELEASE |= {"cyborgweb": "0001_initial"}
"""The last migrations of the oldest release that may run during a migration. An older release must be stopped first."""
OWN_APPS = tuple(LAST_MIGRATIONS_OF_FORMER_RELEASE)
_ONE_FUNCTION = "accelerators 0004_one_function_one_request"
REVIEWED_STEPS: dict[str, str] = {
    f"{_ONE_FUNCTION}: host → accelerators.host": "it deletes no host",
    f"{_ONE_FUNCTION}: RunSQL": "triggers fill the new column and table; what they refuse, it retries or answers as an "
    "error: a bind of a held function, an agent with another host's node, a report with another host's provider",
    f"{_ONE_FUNCTION}: AddConstraint accelerators.host": "it answers 503 to an agent with another host's node",
    "accelerators 0005_index_hosts_without_applied_report: AddIndex accelerators.host": "its writes of hosts wait "
    "for a few milliseconds: the table has one row for each host",
    "accelerators 0005_index_hosts_without_applied_report: RunSQL": "it sets a time limit for the migration's locks",
    "placement_sync 0004_foreign_providers: RunSQL": "it sets a time limit for the migration's locks",
    **{
        f"placement_sync 0004_foreign_providers: {step} placement_sync.discrepancy{field}": "it writes the three kinds "
        "that it knows, with an instance; its console cannot show a row of the new kind"
        for step, field in (
            ("AlterField", ".instance"),
            ("AlterField", ".kind"),
            ("AddConstraint", ""),
            ("RemoveConstraint", ".discrepancy_kind_known"),
            ("RemoveConstraint", ".discrepancy_once"),
        )
    },
    "accelerators 0003_add_lifetime_of_programs: RunSQL": "it sets a time limit for the migration's locks",
    "accelerators 0006_correct_claims_in_sets: RunSQL": "it replaces functions and triggers of 0002 and 0004, and adds "
    "a column that triggers fill",
    "accelerators 0002_released_handles: RunSQL": "it sets a time limit for the migration's locks, and adds a "
    "trigger that rejects a bind of a released handle, as the unique index rejects one of a held handle: the former "
    "release retries and answers that the handles are taken",
    "accelerators 0008_audit_status_and_pauses: AlterField accelerators.seal.kind": "only its help text is another",
    "accelerators 0008_audit_status_and_pauses: RunSQL": "it sets a time limit for the migration's locks",
    "accelerators 0009_confirmations: RunSQL": "it sets a time limit for the migration's locks",
    "accelerators 0009_confirmations: RemoveConstraint accelerators.rollout.rollout_state_known": "the constraint is "
    "replaced by a wider one",
    "accelerators 0009_confirmations: AddConstraint accelerators.rollout": "it allows what the former one did, and the "
    "table has one row for each rollout of the last 90 days",
    "accelerators 0009_confirmations: AlterField accelerators.rollout.state": "only its choices are others; the former "
    "release does not advance a draft, and its list of rollouts fails until the drafts are confirmed or deleted",
    "accelerators 0010_generations_of_settings: RunSQL": "it sets a time limit for the migration's locks",
    "cyborgweb 0005_generations_of_subscriptions: RunSQL": "it sets a time limit for the migration's locks",
    "accelerators 0011_host_removing_since: RunSQL": "it sets a time limit for the migration's locks",
    "accelerators 0012_arguments_of_bulk_actions: RunSQL": "it sets a time limit for the migration's locks",
    "accelerators 0015_device_subsystem: RunSQL": "it sets a time limit for the migration's locks",
    "accelerators 0014_wanted_backends: RunSQL": "a time limit for locks, and a view that only gets rows and columns",
    "accelerators 0013_bulk_targets: RunSQL": "it sets a time limit for the migration's locks",
    "accelerators 0013_bulk_targets: AlterField accelerators.bulkitem.stood": "the column becomes wider; it writes and "
    "reads the states of devices as before",
    "accelerators 0017_generation_of_labels: RunSQL": "it sets a time limit for the migration's locks",
    "accelerators 0016_host_removal_progress: RunSQL": "it sets a time limit for the migration's locks",
    "accelerators 0016_host_removal_progress: AddIndex accelerators.acceleratorrequest": "no request can be written "
    "while the index is built, which takes less than a second for 100 000 requests",
    "accelerators 0018_index_commands_by_request_id: RunSQL": "it sets a time limit for the migration's locks",
    "accelerators 0018_index_commands_by_request_id: AddIndex accelerators.command": "no command can be written while "
    "the index is built: 0.6 s of processor time for 1 000 000 commands",
    "agents 0003_agent_announcement: RunSQL": "it sets a time limit for the migration's locks",
    "agents 0002_used_nonces: RunSQL": "it sets a time limit for the migration's locks",
    "cyborgweb 0002_mail_server: RunSQL": "it sets a time limit for the migration's locks",
    "cyborgweb 0003_mail_confirmations: RunSQL": "it sets a time limit for the migration's locks, and fills the new "
    "column, which the former release does not read",
    "cyborgweb 0004_subscription_owners: RunSQL": "it sets a time limit for the migration's locks, fills a new "
    "column, which the former release does not read, and the column user where it was empty, which the former release "
    "does when it creates a subscription",
    "cyborgweb 0004_subscription_owners: RemoveConstraint cyborgweb.subscription.subscription_standing_known": "the "
    "constraint is replaced by a wider one",
    "cyborgweb 0004_subscription_owners: AddConstraint cyborgweb.subscription": "it allows what the former one did, "
    "and the table has at most 50 rows for each person and project",
    "cyborgweb 0004_subscription_owners: AlterField cyborgweb.subscription.standing": "only its choices and its help "
    "text are others",
    "cyborgweb 0004_subscription_owners: AlterField cyborgweb.subscription.user": "only Django's own action at a "
    "deletion and the help text are others: the former release goes on to delete a user's subscriptions itself",
    "accelerators 0007_sign_seals: RunSQL": "it sets a time limit for the migration's locks, and adds a trigger that "
    "rejects an unsigned seal after a signed one: the job of the former release fails, and that of this one seals",
    "placement_sync 0003_vanished_listed: RunSQL": "it sets a time limit for the migration's locks",
    "placement_sync 0002_nova_endpoints: RunSQL": "it sets a time limit for the migration's locks",
    "placement_sync 0002_nova_endpoints: AlterField placement_sync.vanished.since": "only its help text is another",
    "placement_sync 0002_nova_endpoints: endpoint → placement_sync.novaendpoint": "it leaves the new column empty",
}
"""Each incompatibility found in a step that does more than add something → the reason why the former release works on.
"""


def list_new_steps() -> Iterator[tuple[str, Any, set[str]]]:
    """Yield every step after `LAST_MIGRATIONS_OF_FORMER_RELEASE`.

    Each item has the name of the migration, the step, and the names of the models that the migration creates.
    """
    for (app, name), migration in sorted(MigrationLoader(None).disk_migrations.items()):
        if app in LAST_MIGRATIONS_OF_FORMER_RELEASE and name > LAST_MIGRATIONS_OF_FORMER_RELEASE[app]:
            made = {f"{app}.{one.name_lower}" for one in migration.operations if isinstance(one, step.CreateModel)}
            for one in migration.operations:
                inside = one.database_operations if isinstance(one, step.SeparateDatabaseAndState) else [one]
                yield from ((f"{app} {name}", single, made) for single in inside)


def find_incompatibilities(operation: Any, app: str, created_models: set[str]) -> Iterator[str]:
    """Yield what in a step could break the former release; nothing if the step only adds something."""
    kind = type(operation).__name__
    about = f"{app}.{getattr(operation, 'model_name', '')}".lower()
    if isinstance(operation, step.CreateModel):
        yield from (
            f"{name} → {where}"
            for name, where in list_foreign_keys(operation.fields, app)
            if where not in created_models
        )
    elif isinstance(operation, step.AddField):
        if not (operation.field.null or operation.field.has_db_default()):
            yield f"{about}.{operation.name} has no default in the database"
        yield from (f"{name} → {where}" for name, where in list_foreign_keys([(operation.name, operation.field)], app))
    elif isinstance(operation, step.AddIndex | step.AddConstraint) and not isinstance(operation, AddIndexConcurrently):
        if about not in created_models:
            yield f"{kind} {about}"
    elif isinstance(operation, step.RunSQL | step.RunPython):
        yield kind
    elif not isinstance(operation, AddIndexConcurrently | step.AlterModelOptions):
        yield f"{kind} {about}.{getattr(operation, 'name', '')}"


def may_wait_without_limit(migration: Migration) -> bool:
    """Return whether a step of the migration could make readers or writers of a table wait behind it without limit.

    A migration in a transaction must first limit how long it waits for locks. Outside a transaction, only indexes may
    be built concurrently: while such a step waits for its lock, readers and writers go on.
    """
    if migration.atomic:
        return "SET LOCAL lock_timeout" not in str(vars(migration.operations[0]).get("sql"))
    return not all(isinstance(one, AddIndexConcurrently) for one in migration.operations)


def list_foreign_keys(fields: Any, app: str) -> Iterator[tuple[str, str]]:
    """Yield the fields that have a foreign key constraint, each with the table that it refers to."""
    for name, field in fields:
        if field.is_relation and field.db_constraint:
            where = str(getattr(field.remote_field.model, "_meta", field.remote_field.model)).lower()
            yield name, where if "." in where else f"{app}.{where}"


def test_every_new_migration_step_only_adds_or_is_listed_as_reviewed() -> None:
    found = {
        f"{where}: {doubt}"
        for where, one, made in list_new_steps()
        for doubt in find_incompatibilities(one, where.split()[0], made)
    }
    assert sorted(found) == sorted(REVIEWED_STEPS)


def test_every_new_migration_first_limits_how_long_it_waits_for_locks() -> None:
    """A statement that waits for the lock of a table makes all later statements on that table wait behind it."""
    new = {where for where, _, _ in list_new_steps()}
    migrations = {" ".join(key): migration for key, migration in MigrationLoader(None).disk_migrations.items()}
    assert not [where for where in new if may_wait_without_limit(migrations[where])]


def test_only_indexes_that_are_built_concurrently_need_no_limit_for_locks() -> None:
    index = AddIndexConcurrently("agent", models.Index(fields=["at"], name="i"))
    limit = step.RunSQL("SET LOCAL lock_timeout = '3s'")

    def build(atomic: bool, *operations: Any) -> Migration:
        return type("Built", (Migration,), {"atomic": atomic, "operations": operations})("built", "agents")

    assert not may_wait_without_limit(build(True, limit, step.RunSQL("SELECT 1")))
    assert not may_wait_without_limit(build(False, index, index))
    assert may_wait_without_limit(build(True, index)), "it is not built concurrently in a transaction"
    assert may_wait_without_limit(build(False, index, step.RunSQL("SELECT 1")))
    assert may_wait_without_limit(build(False, limit, index)), "without a transaction the limit has no effect"
    assert may_wait_without_limit(build(True, step.RunSQL("SELECT 1"), limit))


def test_columns_without_default_locks_and_removals_are_reported_as_incompatible() -> None:
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
    assert all(list(find_incompatibilities(one, "agents", made)) for one in bad)
    assert not any(list(find_incompatibilities(one, "agents", made)) for one in good)


@pytest.mark.django_db
def test_migrate_creates_the_missing_groups_of_the_roles_with_permissions() -> None:
    Group.objects.all().delete()
    call_command("migrate", verbosity=0)
    permissions_by_group = {group.name: group.permissions.count() for group in Group.objects.all()}
    assert permissions_by_group.keys() == {role.group for role in roles.ROLES}
    assert all(permissions_by_group.values())


@pytest.mark.django_db
def test_migrate_refuses_a_database_from_before_the_first_release_and_changes_nothing() -> None:
    MigrationRecorder(connection).record_applied("accelerators", "0002_events")
    Group.objects.all().delete()
    with pytest.raises(CommandError, match="before the first release and cannot be upgraded: start with an empty"):
        call_command("migrate", verbosity=0)
    assert not Group.objects.exists()
