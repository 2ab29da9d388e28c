"""Columns every table shares: a public uuid, timestamps made by the database, names sorted by byte."""

from __future__ import annotations

import uuid
from enum import StrEnum
from typing import Any

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now


class Row(models.Model):
    """A row with a public `uuid`; `updated_at` stays null until the first change, as clients of v2 expect."""

    uuid = models.UUIDField(default=uuid.uuid4, unique=True, editable=False)
    created_at = models.DateTimeField(db_default=Now(), editable=False)
    updated_at = models.DateTimeField(null=True, editable=False)

    class Meta:
        abstract = True


def name(**options: Any) -> models.CharField:
    """A name of at most 255 characters, compared and sorted byte by byte whatever the database's locale."""
    return models.CharField(max_length=255, db_collation="C", **options)


def choices(words: type[StrEnum]) -> list[tuple[str, str]]:
    """A vocabulary as Django wants it; shown as it is."""
    return [(word.value, word.value) for word in words]


def one_of(field: str, words: type[StrEnum], label: str) -> models.CheckConstraint:
    """The database refuses what is not in `words`."""
    return models.CheckConstraint(condition=Q(**{f"{field}__in": [word.value for word in words]}), name=label)
