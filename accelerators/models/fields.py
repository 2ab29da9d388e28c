"""Columns every table shares: a public uuid, timestamps made by the database, names sorted by byte."""

from __future__ import annotations

import uuid
from enum import StrEnum
from typing import Any

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now
from psycopg.types.json import Json


class Row(models.Model):
    """A row with a public `uuid`; `updated_at` stays null until the first change, as clients of v2 expect."""

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    updated_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        abstract = True


class KeptJson(models.JSONField):
    """JSON as it was written, keys in their order: clients get back what they sent. It cannot be compared."""

    def db_type(self, connection: Any) -> str:
        """The type that keeps its text, not the parsed one."""
        return "json"

    def get_db_prep_value(self, value: Any, connection: Any, prepared: bool = False) -> Any:
        """As JSON text; Django's own would have it parsed on the way in."""
        return None if value is None else Json(value)

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> Any:
        """Parsed by the driver already, unlike the other type."""
        return value


def name(**options: Any) -> models.CharField:
    """A name of at most 255 characters, compared and sorted byte by byte whatever the database's locale."""
    return models.CharField(max_length=255, db_collation="C", **options)


def choices(words: type[StrEnum]) -> list[tuple[str, str]]:
    """A vocabulary as Django wants it; shown as it is."""
    return [(word.value, word.value) for word in words]


def one_of(field: str, words: type[StrEnum], label: str) -> models.CheckConstraint:
    """The database refuses what is not in `words`."""
    return models.CheckConstraint(condition=Q(**{f"{field}__in": [word.value for word in words]}), name=label)
