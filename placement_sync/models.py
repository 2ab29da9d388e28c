"""What this room remembers: what it wrote to Placement, and how each host stands there. Bookkeeping, not inventory."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now

from accelerators.models import Host


class Tree(models.Model):
    """A host's compute provider and its children in Placement, as of the last look."""

    host = models.OneToOneField(Host, models.CASCADE, primary_key=True, related_name="placement")
    root = models.UUIDField(null=True, help_text="The compute provider.")
    looked_at = models.DateTimeField(db_default=Now(), db_index=True)
    synced_at = models.DateTimeField(null=True, help_text="When all was as it should be.")
    problems = models.JSONField(default=list, help_text="What could not be done, in sentences.")

    def __str__(self) -> str:
        return f"placement of {self.host}"


class WrittenProvider(models.Model):
    """What we last wrote of a provider, and how it looked then; the next look reads only what moved since."""

    uuid = models.UUIDField(primary_key=True)
    host = models.ForeignKey(Host, models.CASCADE, related_name="written_providers")
    classes = models.JSONField(default=list)
    traits = models.JSONField(default=list)
    seen = models.JSONField(null=True, help_text="name, parent, generation, inventories, traits.")

    def __str__(self) -> str:
        return str(self.uuid)


class Look(models.Model):
    """When a job that looks around once in a while did so last."""

    job = models.CharField(max_length=64, primary_key=True)
    at = models.DateTimeField()

    def __str__(self) -> str:
        return self.job


class Vanished(models.Model):
    """An instance that holds requests and that Nova's listing lacked; forgotten when a listing has it again."""

    instance = models.UUIDField(primary_key=True)
    since = models.DateTimeField(db_default=Now(), help_text="The first listing that lacked it.")

    def __str__(self) -> str:
        return str(self.instance)
