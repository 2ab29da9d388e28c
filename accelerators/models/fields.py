"""Base model and field helpers that all tables share.

They provide a public uuid, timestamps set by the database, and names that are sorted by byte.
"""

from __future__ import annotations

import uuid
from enum import StrEnum
from typing import Any

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from psycopg.types.json import Json


class Row(models.Model):
    """Abstract model with a public `uuid`. `updated_at` is null until the first change, as v2 API clients expect."""

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    updated_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        abstract = True


class SettingsRow(Row):
    """Abstract model of settings that people change. `generation` detects that two people change the same row.

    The function that changes the row calls `domain.generations.refuse_if_changed`, and adds 1 to `generation`.
    """

    generation = models.BigIntegerField(
        default=1, db_default=1, editable=False, help_text="It grows by 1 with each change of the settings."
    )

    class Meta:
        abstract = True


class KeptJson(models.JSONField):
    """JSON field that keeps the text and the order of keys, so that clients get back what they sent.

    Queries cannot compare its values, because PostgreSQL's type `json` has no equality.
    """

    def db_type(self, connection: Any) -> str:
        """Return PostgreSQL's `json`, which keeps the text, not `jsonb`, which stores a parsed value."""
        return "json"

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """Wrap the value to be sent as `json`; Django would send it as `jsonb`, which loses the order of keys."""
        return None if value is None else Json(value)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Return the value unchanged: psycopg has already parsed it, unlike `jsonb`, which Django parses itself."""
        return value


def name_field(**options: Any) -> models.CharField[str, str]:
    """Build a field for a name of at most 255 characters, compared and sorted by byte in every database locale."""
    return models.CharField(max_length=255, db_collation="C", **options)


def one_of_constraint(field: str, enum: type[StrEnum], constraint_name: str) -> models.CheckConstraint:
    """Build a check constraint named `constraint_name`: `field` must contain a value of `enum`, or NULL."""
    return models.CheckConstraint(condition=Q(**{f"{field}__in": [word.value for word in enum]}), name=constraint_name)
