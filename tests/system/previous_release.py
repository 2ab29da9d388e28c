"""Write to the database as the former release does, before and after the migrations of this release.

It uses the former release's historical models, so it writes one row to each of its tables with only its columns.
`test_upgrade` runs `python -m tests.system.previous_release` over an empty embedded database.
"""

from __future__ import annotations

import os
import uuid
from datetime import UTC, datetime
from typing import Any

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
django.setup()

from django.contrib.postgres.fields import ArrayField  # noqa: E402  (what follows needs Django's registry)
from django.db import connection, models, transaction  # noqa: E402
from django.db.migrations.executor import MigrationExecutor  # noqa: E402

from tests.test_migrations import LAST_MIGRATIONS_OF_FORMER_RELEASE, OWN_APPS  # noqa: E402

OTHERS = [("auth", "0012_alter_user_first_name_max_length"), ("contenttypes", "0002_remove_content_type_name")]
APPEND_ONLY = {"accelerators.event", "accelerators.seal"}
SINGLE_ROW = {"cyborgweb.maintenance", "placement_sync.writer"}
GIVEN_FIELDS = {"auth.user.username", "accelerators.device.key"}
"""Unique columns that have a default, which would be the same in each row."""
VALUES = {
    "accelerators.device.type": "GPU",
    "accelerators.attachhandle.attach_type": "PCI",
    "accelerators.attribute.origin": "agent",
    "accelerators.event.source": "system",
    "accelerators.intent.kind": "provider",
}
"""Values of columns for which check constraints of the database allow only certain values."""


class FormerRelease:
    """The former release with its historical models. `made` has the row of each model from the current turn."""

    def __init__(self, apps: Any) -> None:
        self.models = [model for label in OWN_APPS for model in apps.get_app_config(label).get_models()]
        self.made: dict[str, models.Model] = {}

    def write(self, turn: str) -> None:
        """Write a row of each model, then UPDATE all columns of each row, unless its table is append-only."""
        self.made.clear()
        for model in self.models:
            if model._meta.managed:
                self.make_row(model, turn)
        for label, row in self.made.items():
            if label not in APPEND_ONLY:
                row.save()

    def make_row(self, model: Any, turn: str) -> models.Model:
        """Return this turn's row of a model; create it, and the rows that it refers to, if it does not exist yet."""
        if (label := model._meta.label_lower) not in self.made:
            values = {
                field.name: self.make_value(field, turn) for field in model._meta.concrete_fields if is_required(field)
            }
            first = model.objects.first() if label in SINGLE_ROW else None
            self.made[label] = first or model.objects.create(**values)
        return self.made[label]

    def make_value(self, field: Any, turn: str) -> Any:
        """Return a value that the column accepts; `turn` makes it unique."""
        if field.is_relation:
            return self.make_row(field.remote_field.model, turn)
        if (known := VALUES.get(str(field).lower())) is not None:
            return known
        if field.choices:
            return field.choices[0][0]
        kinds = {models.UUIDField: uuid.uuid4(), models.DateTimeField: datetime.now(UTC), models.JSONField: {}}
        kinds |= {models.BigIntegerField: int(turn), models.IntegerField: 1, models.BinaryField: b""}
        kinds |= {ArrayField: [], models.BooleanField: True}
        found = [made for kind, made in kinds.items() if isinstance(field, kind)]
        return found[0] if found else f"{turn}-{field.name}"[: field.max_length]


def is_required(field: Any) -> bool:
    """Tell whether an INSERT of the former release must give this column, because it has no usable default."""
    automatic = field.has_default() or field.has_db_default() or isinstance(field, models.AutoField)
    return str(field).lower() in GIVEN_FIELDS or not (field.null or automatic)


def main() -> None:
    """Write, migrate and write again. It ends with a traceback if the former release would have failed."""
    executor = MigrationExecutor(connection)
    writer = FormerRelease(executor.migrate([*LAST_MIGRATIONS_OF_FORMER_RELEASE.items(), *OTHERS]).apps)
    with transaction.atomic():
        writer.write("1")
    executor = MigrationExecutor(connection)
    executor.migrate(executor.loader.graph.leaf_nodes())
    with transaction.atomic():
        writer.write("2")


if __name__ == "__main__":
    main()
