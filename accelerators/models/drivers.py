"""Models of the drivers that are wanted on each host, and of the rollouts that install, update or uninstall them.

`accelerators.workflows.driver_config` and `accelerators.workflows.driver_rollouts` write them.
"""

from __future__ import annotations

from typing import Any

from django.db import models
from django.db.models import Q

from accelerators.domain.states import EventSource, RolloutOp, RolloutState, RolloutStepState
from accelerators.models import fields
from accelerators.models.commands import Command
from accelerators.models.hosts import Host

ROLLOUT_IS_OPEN = Q(ended_at__isnull=True)


STEP_IS_OPEN = Q(state__in=[RolloutStepState.WAITING.value, RolloutStepState.ORDERED.value])


_REPORTED_DEFAULTS: dict[str, Any] = {"generation": 0, "version": "", "error": "", "since": None, "declares": {}}


def _command_key(help_text: str = "") -> models.ForeignKey[Command | None]:
    """Build a foreign key to a command; it becomes NULL when the command is deleted.

    It has no database constraint, because the previous release also deletes old commands, and does not know these
    tables.
    """
    return models.ForeignKey(
        Command, models.SET_NULL, null=True, related_name="+", db_constraint=False, help_text=help_text
    )


class DriverWish(fields.Row):
    """The wanted state of a driver on a host. It takes precedence over the host's own configuration file.

    The row of an uninstalled driver is kept with `installed` false, so that the host's configuration does not install
    the driver again. `generation` grows with every change; it is compared with the generation that the agent reports as
    applied.
    """

    host = models.ForeignKey(Host, models.CASCADE, related_name="wishes")
    driver = models.CharField(max_length=64, db_collation="C")
    installed = models.BooleanField(default=True)
    enabled = models.BooleanField(default=True)
    settings = models.JSONField(null=True, help_text="Null: the settings of the host's own file apply.")
    generation = models.BigIntegerField(default=1)
    command = _command_key("Which told it last.")
    actor = fields.name_field()
    reason = models.TextField(default="", blank=True)

    class Meta:
        ordering = ["host", "driver"]
        verbose_name = "wanted driver"
        constraints = [models.UniqueConstraint(fields=["host", "driver"], name="driver_wish_one_per_host")]

    def __str__(self) -> str:
        return f"{self.driver} on {self.host}"


class Rollout(fields.Row):
    """One change of a driver on a fixed list of hosts, on at most `max_parallel` hosts at a time."""

    op = models.CharField(max_length=16, choices=RolloutOp.choices())
    driver = models.CharField(max_length=64, db_collation="C")
    enabled = models.BooleanField(null=True, help_text="Null: unchanged; a newly installed driver is enabled.")
    settings = models.JSONField(null=True, help_text="Null: the settings stay unchanged.")
    edits = models.JSONField(
        null=True, help_text="Changes of single settings: `set` maps paths to values, `unset` lists paths."
    )
    selection = models.CharField(max_length=1000, default="", help_text="How the hosts were selected.")
    max_parallel = models.IntegerField(default=5)
    stop_on_failure = models.BooleanField(default=True)
    total = models.IntegerField(default=0)
    state = models.CharField(max_length=16, choices=RolloutState.choices(), default=RolloutState.RUNNING.value)
    actor = fields.name_field()
    caller_id = models.CharField(
        max_length=255, default="", db_default="", blank=True, help_text="The user id of the actor."
    )
    source = models.CharField(max_length=16, choices=EventSource.choices())
    reason = models.TextField(default="", blank=True)
    request_id = models.CharField(max_length=64, default="", blank=True)
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["-id"]
        verbose_name = "driver rollout"
        constraints = [fields.one_of_constraint("state", RolloutState, "rollout_state_known")]
        indexes = [models.Index(fields=["id"], condition=ROLLOUT_IS_OPEN, name="rollout_under_way")]

    def __str__(self) -> str:
        return f"{self.op} {self.driver} on {self.total} host{'' if self.total == 1 else 's'}"


class HostDriver(models.Model):
    """A driver on a host: its wanted state and its reported state. A read-only database view."""

    key = models.CharField(max_length=128, db_collation="C", help_text="The host's uuid and the driver's name.")
    place = models.CharField(max_length=400, db_collation="C", help_text="Sort key: host, driver.")
    host = models.ForeignKey(Host, models.DO_NOTHING, related_name="+")
    driver = models.CharField(max_length=64, db_collation="C")
    seen = models.JSONField(null=True, help_text="The driver's entry in `Host.drivers`.")
    state = models.CharField(max_length=16)
    devices = models.IntegerField()
    wish = models.ForeignKey(DriverWish, models.DO_NOTHING, null=True, related_name="+")
    drifts = models.BooleanField(help_text="Whether the reported state differs from the wanted one.")

    @property
    def wanted(self) -> DriverWish | None:
        """Return the wanted state, or None if there is none or the driver was uninstalled."""
        return self.wish if self.wish and self.wish.installed else None

    @property
    def reported(self) -> dict[str, Any] | None:
        """Return the driver's entry in `Host.drivers`, with defaults for absent fields and with `state`.

        None if the host never reported the driver.
        """
        seen = self.seen
        return seen and _REPORTED_DEFAULTS | seen | {"state": self.state}

    @property
    def text(self) -> str:
        """Return the driver's error.

        If it has none and its reported state differs from the wanted one, return the result text of the last command.
        Otherwise return ''.
        """
        error = str((self.reported or {}).get("error", ""))
        return error or (self.wish.command.text if self.drifts and self.wish and self.wish.command else "")

    class Meta:
        managed = False
        db_table = "accelerators_hostdriver"
        ordering = ["place"]
        verbose_name = "driver"

    def __str__(self) -> str:
        return f"{self.driver} on {self.host}"


class RolloutStep(models.Model):
    """One host of a rollout.

    Its command is placed in the transaction that sets its state to ordered, so that each host gets only one command.
    """

    rollout = models.ForeignKey(Rollout, models.CASCADE, related_name="steps")
    host = models.ForeignKey(Host, models.SET_NULL, null=True, related_name="+")
    host_name = fields.name_field()
    state = models.CharField(max_length=16, choices=RolloutStepState.choices(), default=RolloutStepState.WAITING.value)
    text = models.TextField(default="", blank=True)
    generation = models.BigIntegerField(
        null=True,
        help_text="The generation of the driver's desired state when the hosts were chosen, 0 if it had none; "
        "null: any.",
    )
    command = _command_key()
    attempts = models.IntegerField(
        default=0, db_default=0, help_text="How often it stayed unknown whether the devices are held."
    )
    next_at = models.DateTimeField(null=True, blank=True, help_text="Not tried again before this time.")
    ended_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["id"]
        verbose_name = "host of a driver rollout"
        verbose_name_plural = "hosts of driver rollouts"
        constraints = [fields.one_of_constraint("state", RolloutStepState, "rollout_step_state_known")]
        indexes = [models.Index(fields=["rollout", "id"], condition=STEP_IS_OPEN, name="rollout_step_open")]

    @property
    def has_foreseen_refusal(self) -> bool:
        """Return whether it was foreseen when the draft was stored that the host would refuse the change.

        `text` is then the reason; later it is that of the last attempt.
        """
        return bool(self.text) and not self.attempts

    def __str__(self) -> str:
        return f"{self.host_name}: {self.state}"
