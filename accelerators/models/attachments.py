"""Model of accelerators that are attached to a running instance: what was asked, its progress, and what was written
to Placement.

`accelerators.workflows.attachment_orders` writes it.
"""

from __future__ import annotations

from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q

from accelerators.domain.choices import Choice
from accelerators.domain.libvirt_xml import HeldHandle
from accelerators.models import fields


class AttachmentState(Choice):
    """States of an attachment. In the states `detached` and `failed` it has ended."""

    ASKED = "asked"
    ATTACHING = "attaching", "busy"
    ATTACHED = "attached", "good"
    UNDOING = "undoing", "warn"
    """Attaching failed or was cancelled; the steps that were done are being undone."""
    FAILED = "failed", "bad"
    """Attaching failed or was cancelled, and everything has been undone."""
    DETACHING = "detaching", "busy"
    DETACHED = "detached"


ENDED_ATTACHMENT_STATES = (AttachmentState.FAILED.value, AttachmentState.DETACHED.value)
HOLDS_ACCELERATORS = Q(state=AttachmentState.ATTACHED.value)


class Attachment(fields.Row):
    """Accelerators that are added to an existing instance.

    `step` is the step that was last begun or done. A step is recorded before it is tried, so that a worker that resumes
    after a crash knows which step to check.
    """

    instance = models.UUIDField()
    project_id = models.CharField(max_length=255, db_collation="C", help_text="The instance's project.")
    host = fields.name_field(help_text="The host on which the instance runs.")
    profile = fields.name_field(
        default="", blank=True, help_text="The requested device profile; empty if a device was requested."
    )
    device = models.UUIDField(null=True, blank=True, help_text="The requested device.")
    state = models.CharField(max_length=16, choices=AttachmentState.choices(), default=AttachmentState.ASKED.value)
    step = models.CharField(max_length=16, default="", blank=True)
    steps = models.JSONField(default=list, help_text="The steps that were done: step, at, text.")
    requests = ArrayField(
        models.UUIDField(), default=list, help_text="The accelerator requests that were created for it, in order."
    )
    providers = ArrayField(models.UUIDField(), default=list, help_text="For each request: where it is bound.")
    shares = models.JSONField(default=dict, help_text="The claimed resources: provider → class and amount.")
    claim = models.JSONField(
        null=True, help_text="The last write to Placement that claims resources, stored before it is tried."
    )
    release = models.JSONField(
        null=True, help_text="The last write to Placement that releases resources, stored before it is tried."
    )
    fault = models.TextField(default="", blank=True, help_text="Why it failed, or what blocks it.")
    actor = fields.name_field()
    reason = models.TextField(default="", blank=True)
    request_id = models.CharField(max_length=64, default="", blank=True)
    attached_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    held: list[HeldHandle]
    """Not a column: its attach handles, once `accelerators.workflows.attachment_orders.load_handles` has loaded them.
    """

    class Meta:
        ordering = ["-id"]
        constraints = [fields.one_of_constraint("state", AttachmentState, "attachment_state_known")]
        indexes = [
            models.Index(fields=["instance", "-id"], name="attachment_instance"),
            models.Index(fields=["id"], condition=HOLDS_ACCELERATORS, name="attachment_attached"),
            models.Index(fields=["ended_at"], condition=Q(ended_at__isnull=False), name="attachment_ended"),
        ]

    def __str__(self) -> str:
        return f"{self.profile or self.device} to {self.instance}"
