"""Model of commands to agents.

A command is inserted in the transaction that needs it, so it exists exactly if that transaction commits.
`accelerators.commands.command_queue` inserts the rows; `agents.gateway.command_dispatch` and `agents.gateway.asgi_app`
deliver them and receive the answers.
"""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from accelerators.domain.states import CommandState
from accelerators.models import fields
from accelerators.models.devices import Device
from accelerators.models.hosts import Host

COMMAND_IS_OPEN = Q(ended_at__isnull=True)


class Command(fields.Row):
    """A command that one host's agent runs at most once. `id` is the command's number in the agent protocol.

    While an *exclusive* command is open, nothing is bound to its device (`Device.busy_with`). The agent's answer is
    stored first (`answered_at`); the command ends (`ended_at`) when the report that belongs to the answer is applied.
    Without an answer it ends when `start_by` has passed before an agent took it, or when `end_by` has passed.
    """

    host = models.ForeignKey(Host, models.PROTECT, related_name="commands")
    device = models.ForeignKey(Device, models.SET_NULL, null=True, blank=True, related_name="commands")
    device_name = fields.name_field(default="", blank=True)
    op = models.CharField(max_length=16, db_collation="C")
    arguments = models.JSONField(
        default=dict, help_text="The arguments as they are sent to the agent: driver, key, handle, layout …"
    )
    exclusive = models.BooleanField(default=False)
    request = models.UUIDField(null=True, blank=True, help_text="The accelerator request that waits for it.")
    actor = fields.name_field(default="")
    request_id = models.CharField(max_length=64, default="", blank=True)
    reason = models.TextField(default="", blank=True)

    state = models.CharField(max_length=16, choices=CommandState.choices(), default=CommandState.QUEUED.value)
    start_by = models.DateTimeField(help_text="If the agent has not accepted the command by then, it expires.")
    end_by = models.DateTimeField(help_text="If the agent has not answered by then, the outcome is unknown.")
    taken_at = models.DateTimeField(null=True, blank=True)
    started_at = models.DateTimeField(null=True, blank=True)
    percent = models.IntegerField(default=0)
    progress = models.CharField(max_length=500, default="", blank=True)

    answered_at = models.DateTimeField(null=True, blank=True)
    outcome = models.CharField(max_length=16, default="", blank=True, help_text="The outcome that the agent reported.")
    text = models.TextField(default="", blank=True, help_text="The outcome as a sentence.")
    detail = models.JSONField(default=dict)
    report_epoch = models.BigIntegerField(default=0)
    report_seq = models.BigIntegerField(default=0)
    report_hash = models.CharField(max_length=64, default="", blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        constraints = [
            fields.one_of_constraint("state", CommandState, "command_state_known"),
            models.UniqueConstraint(
                fields=["device"],
                condition=COMMAND_IS_OPEN & Q(exclusive=True),
                name="command_one_exclusive_per_device",
            ),
        ]
        indexes = [
            models.Index(fields=["host", "id"], condition=COMMAND_IS_OPEN, name="command_open"),
            models.Index(fields=["end_by"], condition=COMMAND_IS_OPEN, name="command_deadline"),
            models.Index(fields=["request"], condition=Q(request__isnull=False), name="command_request"),
            models.Index(fields=["device", "-id"], name="command_device"),
            models.Index(fields=["request_id"], name="command_request_id"),
        ]

    def __str__(self) -> str:
        return f"{self.op} {self.device_name or self.host}"
