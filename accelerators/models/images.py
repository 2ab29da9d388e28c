"""Model of the images (bitstreams, firmware) that devices are programmed with.

The table holds only metadata. `accelerators.images.store` writes it, and keeps the images' bytes as files.
"""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from accelerators.domain.choices import Choice
from accelerators.models import fields


class ImageSource(Choice):
    """Origin of an image."""

    GLANCE = "glance"
    """A copy from Glance. It may be deleted when space is needed, and fetched again."""
    UPLOAD = "upload"
    """Uploaded by a person. It is deleted only by a person."""


class Image(fields.Row):
    """An image whose bytes are stored here and verified. An image from Glance keeps its Glance uuid."""

    name = fields.name_field(default="", blank=True)
    size = models.BigIntegerField()
    sha256 = models.CharField(max_length=64, db_collation="C")
    properties = models.JSONField(default=dict, help_text="Properties as in Glance: accel:function_id …")
    source = models.CharField(max_length=8, choices=ImageSource.choices())
    by = fields.name_field(default="", help_text="Who uploaded it.")
    used_at = models.DateTimeField(db_default=Now(), help_text="When a command last used it.")

    class Meta:
        ordering = ["id"]
        constraints = [
            fields.one_of_constraint("source", ImageSource, "image_source_known"),
            models.CheckConstraint(condition=Q(size__gte=0), name="image_size_not_negative"),
        ]
        indexes = [models.Index(fields=["used_at"], condition=Q(source="glance"), name="image_longest_unused")]

    def __str__(self) -> str:
        return self.name or str(self.uuid)
