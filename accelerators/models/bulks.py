"""Models of bulk actions: one action on many objects, and the outcome for each of them.

`accelerators.workflows.bulk_actions` writes them.
"""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from accelerators.domain.states import BulkState, BulkTarget, DeviceOutcome, DrainTarget, EventSource
from accelerators.models import fields
from accelerators.models.devices import Device

ITEM_IS_WAITING = Q(outcome="")
BULK_IS_RUNNING = Q(state=BulkState.RUNNING.value)


class Bulk(fields.Row):
    """An action on a set of devices, attachments or accelerators.

    The set is selected once, together with the state of each object at that time, and never grows.
    """

    action = models.CharField(max_length=16, db_collation="C", help_text="The action for each object.")
    target = models.CharField(
        max_length=16,
        choices=BulkTarget.choices(),
        default=BulkTarget.DEVICE.value,
        db_default=BulkTarget.DEVICE.value,
        help_text="The kind of its objects.",
    )
    project_id = models.CharField(
        max_length=255,
        db_collation="C",
        default="",
        db_default="",
        blank=True,
        help_text="The project to which all its objects belong; empty if the caller may see all projects.",
    )
    then = models.CharField(max_length=16, choices=DrainTarget.choices(), default=DrainTarget.MAINTENANCE.value)
    arguments = models.JSONField(
        null=True, blank=True, help_text="The arguments of the action, if it has any, such as the layout or the label."
    )
    selection = models.CharField(
        max_length=1000, default="", blank=True, help_text="The filters of the list when the objects were selected."
    )
    total = models.IntegerField(default=0)
    state = models.CharField(max_length=16, choices=BulkState.choices(), default=BulkState.DRAFT.value)
    dry = models.BooleanField(default=False, help_text="The run in progress is a dry run, which changes nothing.")
    held_too = models.BooleanField(default=False, help_text="The confirmation includes objects that are held.")
    actor = fields.name_field()
    caller_id = models.CharField(
        max_length=255, default="", db_default="", blank=True, help_text="The user id of the actor."
    )
    source = models.CharField(
        max_length=16,
        choices=EventSource.choices(),
        default=EventSource.PERSON.value,
        db_default=EventSource.PERSON.value,
        help_text="The source of its events.",
    )
    reason = models.TextField(default="", blank=True)
    request_id = models.CharField(max_length=64, default="", blank=True)
    started_at = models.DateTimeField(null=True, blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)
    moved = models.IntegerField(default=0)
    unchanged = models.IntegerField(default=0)
    refused = models.IntegerField(default=0)

    class Meta:
        ordering = ["-id"]
        verbose_name = "bulk action"
        constraints = [fields.one_of_constraint("state", BulkState, "bulk_state_known")]
        indexes = [models.Index(fields=["updated_at"], condition=BULK_IS_RUNNING, name="bulk_under_way")]

    def __str__(self) -> str:
        return f"{self.action} {self.count_targets(self.total)}"

    def count_targets(self, number: int) -> str:
        """Return a number of its objects with their noun, such as "2 devices"."""
        return f"{number} {self.target}{'' if number == 1 else 's'}"

    @property
    def finished_count(self) -> int:
        """Return the number of objects that have an outcome."""
        return self.moved + self.unchanged + self.refused


class BulkItem(models.Model):
    """One object of a bulk action: a device, an attachment or an accelerator, as `Bulk.target` says.

    Its outcome is written in the transaction that changes the object, so that the object is changed only once.
    """

    bulk = models.ForeignKey(Bulk, models.CASCADE, related_name="items")
    device = models.ForeignKey(
        Device, models.SET_NULL, null=True, related_name="+", help_text="The device, if the object is one."
    )
    target_uuid = models.UUIDField(
        db_column="device_uuid", help_text="The uuid of the object; of an accelerator that of its request."
    )
    target_name = fields.name_field(db_column="device_name")
    host = fields.name_field()
    stood = models.TextField(
        help_text="The state of the object when it was selected: that of the device or of the attachment, or the label."
    )
    held = models.BooleanField(
        default=False, db_default=False, help_text="Whether a request held the object when it was selected."
    )
    outcome = models.CharField(
        max_length=16,
        choices=DeviceOutcome.choices(),
        default="",
        blank=True,
        help_text="The outcome; empty until the object was processed.",
    )
    why = models.CharField(max_length=16, default="", blank=True, help_text="The code of the refusal.")
    state = models.CharField(max_length=16, default="", blank=True, help_text="The state of the object afterwards.")
    text = models.TextField(default="", blank=True)
    attempts = models.IntegerField(
        default=0, db_default=0, help_text="How often it stayed unknown whether the object is held."
    )
    next_at = models.DateTimeField(null=True, blank=True, help_text="Not tried again before this time.")

    class Meta:
        ordering = ["id"]
        verbose_name = "object of a bulk action"
        verbose_name_plural = "objects of bulk actions"
        indexes = [
            models.Index(fields=["bulk", "id"], condition=ITEM_IS_WAITING, name="bulk_item_waiting"),
            models.Index(fields=["bulk", "outcome", "id"], name="bulk_item_outcome"),
        ]

    def __str__(self) -> str:
        return self.target_name
