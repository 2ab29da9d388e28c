"""Bitstreams and firmware that devices are programmed with: what is kept of them here. Their bytes are files.

Written by `accelerators.images.store`, in whose directory the files lie.
"""

from __future__ import annotations

from enum import StrEnum

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from accelerators.models import fields


class ImageSource(StrEnum):
    """Where an image came from."""

    GLANCE = "glance"
    """A copy: it is dropped when there is no room, and fetched again."""
    UPLOAD = "upload"
    """Somebody put it here, and only somebody removes it."""


class Image(fields.Row):
    """An image whose bytes are here, checked. Its uuid is Glance's for what came from there."""

    name = fields.name(default="", blank=True)
    size = models.BigIntegerField()
    sha256 = models.CharField(max_length=64, db_collation="C")
    properties = models.JSONField(default=dict, help_text="Words about it, as Glance has them: accel:function_id …")
    source = models.CharField(max_length=8, choices=fields.choices(ImageSource))
    by = fields.name(default="", help_text="Who put it here.")
    used_at = models.DateTimeField(db_default=Now(), help_text="When a command was last given it.")

    class Meta:
        ordering = ["id"]
        constraints = [
            fields.one_of("source", ImageSource, "image_source_known"),
            models.CheckConstraint(condition=Q(size__gte=0), name="image_size_not_negative"),
        ]
        indexes = [models.Index(fields=["used_at"], condition=Q(source="glance"), name="image_longest_unused")]

    def __str__(self) -> str:
        return self.name or str(self.uuid)
