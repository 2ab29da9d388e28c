"""Store what was written to Placement and how each host compares with it. This is bookkeeping, not inventory."""

from __future__ import annotations

from django.db import models
from django.db.models.functions import Now

from accelerators.domain.choices import Choice
from accelerators.models import Device, Host, fields


class Tree(models.Model):
    """The state of one host's provider tree in Placement (the compute provider and its children) at the last look."""

    host = models.OneToOneField(Host, models.CASCADE, primary_key=True, related_name="placement")
    root = models.UUIDField(null=True, help_text="The compute provider of the host.")
    looked_at = models.DateTimeField(db_default=Now(), db_index=True)
    synced_at = models.DateTimeField(null=True, help_text="When Placement last matched the inventory completely.")
    problems = models.JSONField(default=list, help_text="What could not be done, as sentences.")
    foreign = models.JSONField(
        default=list, db_default=[], help_text="The providers of others below the compute provider, as last seen."
    )
    compared_at = models.DateTimeField(
        null=True, help_text="The time of the observation that the job `faults` compared last."
    )
    compare_at = models.DateTimeField(null=True, help_text="When it is compared again even if nothing changed.")

    class Meta:
        verbose_name, verbose_name_plural = "host in Placement", "hosts in Placement"

    def __str__(self) -> str:
        return f"placement of {self.host}"


class WrittenProvider(models.Model):
    """The data that was last written to one provider, and the provider as Placement showed it then (`seen`).

    The next synchronization reads inventories and traits only of providers that changed since `seen`.
    """

    uuid = models.UUIDField(primary_key=True)
    host = models.ForeignKey(Host, models.CASCADE, related_name="written_providers")
    classes = models.JSONField(default=list)
    traits = models.JSONField(default=list)
    seen = models.JSONField(null=True, help_text="name, parent, generation, inventories, traits.")
    claims = models.JSONField(
        null=True,
        help_text="The consumers with allocations there, and the generation at which they were read (job `faults`).",
    )

    def __str__(self) -> str:
        return str(self.uuid)


class WriterChoice(Choice):
    """The two possible writers to Placement."""

    CONDUCTOR = "conductor", "calm", "Conductor"
    AGENTS = "agents", "calm", "Agents"


class Writer(models.Model):
    """The current writer to Placement, in a single row (id 1).

    `writer_election.switch_writer` changes it. If there is no row, the conductor writes, and the epoch is 0.
    """

    who = models.CharField(max_length=16, choices=WriterChoice.choices(), default=WriterChoice.CONDUCTOR.value)
    epoch = models.BigIntegerField(
        default=0, help_text="Increases by one with every change; writers with a smaller epoch stop writing."
    )
    since = models.DateTimeField(db_default=Now())
    by = models.CharField(max_length=255, default="", blank=True)
    reason = models.CharField(max_length=500, default="", blank=True)

    class Meta:
        verbose_name_plural = "writer"
        constraints = [
            models.CheckConstraint(condition=models.Q(id=1), name="writer_is_one_row"),
            fields.one_of_constraint("who", WriterChoice, "writer_known"),
        ]

    def __str__(self) -> str:
        return f"{self.who} (epoch {self.epoch})"


class Look(models.Model):
    """The last run time of a job that runs at fixed intervals."""

    job = models.CharField(max_length=64, primary_key=True)
    at = models.DateTimeField()

    def __str__(self) -> str:
        return self.job


class NovaEndpoint(fields.Row):
    """An address at which Nova was asked about instances that hold requests, and whether its answer 404 is believed.

    The answer is believed once the address has shown an instance that held a request here (`proven_at`), or an
    administrator has confirmed the address (`confirmed_at`): a Nova of another region or cloud answers 404 for every
    instance. Each address has a row of its own, which is not trusted at first. An address that suddenly knows none of
    the instances loses both.
    """

    url = models.CharField(
        "address", max_length=500, unique=True, help_text="The address of Nova, without a slash at its end."
    )
    proven_at = models.DateTimeField(
        null=True, help_text="When it first showed an instance that held a request here; null: never."
    )
    confirmed_at = models.DateTimeField(
        null=True, help_text="When an administrator confirmed that it is the Nova of this cloud; null: never."
    )
    confirmed_by = models.CharField(max_length=255, default="", db_default="", blank=True)
    reason = models.CharField(
        max_length=500, default="", db_default="", blank=True, help_text="Why it was confirmed; empty: not said."
    )
    unknown_instances = models.PositiveIntegerField(
        default=0,
        db_default=0,
        help_text="Instances that hold requests here and that it answered 404 for, so far; 0 if it is trusted.",
    )
    changes_since = models.DateTimeField(
        null=True, help_text="By Nova's clock: up to here its listings of deleted instances were read completely."
    )
    next_changes_since = models.DateTimeField(
        null=True, help_text="The next value of `changes_since`, once all pages of the present listing are read."
    )
    page_marker = models.CharField(
        max_length=64, default="", db_default="", blank=True, help_text="The last instance of the last page read."
    )
    looked_up_to = models.UUIDField(
        null=True, help_text="The instance that was looked up last in turn; the next run continues behind it."
    )

    class Meta:
        ordering = ["id"]
        verbose_name, verbose_name_plural = "address of Nova", "addresses of Nova"

    @property
    def is_trusted(self) -> bool:
        """Return whether the answer 404 of this address means that the instance does not exist."""
        return bool(self.proven_at or self.confirmed_at)

    def __str__(self) -> str:
        return self.url


class Vanished(models.Model):
    """An instance that holds requests, and that Nova listed as deleted or did not know.

    Deleted by the first later look-up that finds it, and when its requests are gone.
    """

    instance = models.UUIDField(primary_key=True)
    since = models.DateTimeField(db_default=Now(), help_text="When Nova first listed it as deleted or answered 404.")
    listed = models.BooleanField(
        default=False, db_default=False, help_text="Whether Nova listed it as deleted, and did not only answer 404."
    )
    endpoint = models.ForeignKey(
        NovaEndpoint,
        models.CASCADE,
        null=True,
        help_text="The address of Nova that gave this answer; null: it is not known, so the answer does not count.",
    )

    def __str__(self) -> str:
        return str(self.instance)


class DiscrepancyKind(Choice):
    """The kinds of contradiction between the bound requests and Placement, Nova or the hardware.

    * UNCLAIMED: a bound request has no allocation in Placement.
    * UNATTACHED: an allocation in Placement has no request that holds a handle there. It only wastes capacity.
    * WITHOUT_DEVICE: Nova shows the instance as running, but its device is missing or has failed.
    * FOREIGN: a provider below a host's compute provider offers accelerators like ours, but no device here has it.
    """

    UNCLAIMED = "unclaimed", "bad", "attached but unclaimed"
    UNATTACHED = "unattached", "warn", "claimed but not attached"
    WITHOUT_DEVICE = "without_device", "bad", "instance without its device"
    FOREIGN = "foreign", "bad", "provider of somebody else"


class Discrepancy(fields.Row):
    """A contradiction about one provider, and usually about one instance there. Only the job `faults` creates and
    deletes these rows."""

    kind = models.CharField(max_length=16, choices=DiscrepancyKind.choices())
    host = models.ForeignKey(Host, models.CASCADE, related_name="discrepancies")
    device = models.ForeignKey(Device, models.CASCADE, null=True, blank=True, related_name="discrepancies")
    provider = models.UUIDField()
    provider_name = fields.name_field()
    instance = models.UUIDField(
        null=True, blank=True, help_text="The instance or other consumer in Placement; null: it is about the provider."
    )
    since = models.DateTimeField(help_text="When it was first seen.")
    seen_at = models.DateTimeField(help_text="When it was last seen.")
    said = models.TextField(help_text="What is wrong, and what to do.")

    class Meta:
        ordering = ["-id"]
        verbose_name_plural = "discrepancies"
        constraints = [
            models.UniqueConstraint(
                fields=["kind", "provider", "instance"], name="discrepancy_once", nulls_distinct=False
            ),
            fields.one_of_constraint("kind", DiscrepancyKind, "discrepancy_kind_known"),
        ]

    @property
    def label(self) -> str:
        """Return the kind in words."""
        return DiscrepancyKind(self.kind).label

    def __str__(self) -> str:
        return f"{self.label}: {self.instance or self.provider_name}"
