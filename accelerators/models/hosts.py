"""Model of compute hosts, including which of their reports was applied last."""

from __future__ import annotations

from django.db import models
from django.db.models import Q

from accelerators.models import fields


class Host(fields.Row):
    """A compute host.

    `name` is the name of the host's compute provider in Placement; the v2 API shows it as `hostname`. `node`
    corresponds to the option `[DEFAULT]host` of upstream Cyborg.
    """

    name = fields.name_field(
        unique=True, help_text="The name of the compute provider in Placement; `hostname` in the v2 API."
    )
    node = fields.name_field(help_text="The names of deployables and providers begin with it.")
    stale_since = models.DateTimeField(
        null=True, help_text="Since when its agent has sent no heartbeat; empty if it is live."
    )
    reported_at = models.DateTimeField(null=True, help_text="When its last report was applied.")
    applied_hash = models.CharField(max_length=64, default="", help_text="Hash of the last applied report.")
    boot_id = models.CharField(
        max_length=64,
        default="",
        db_default="",
        blank=True,
        help_text="The boot of the host in which its last report was made; empty if its agent does not tell it.",
    )
    applied_epoch = models.BigIntegerField(default=0)
    applied_seq = models.BigIntegerField(default=0)
    removing_since = models.DateTimeField(
        null=True,
        blank=True,
        help_text="Since when it is being removed; empty if it is not. No report of it is merged any more.",
    )
    deleting_since = models.DateTimeField(
        null=True,
        blank=True,
        help_text="Since when its removal deletes what is stored of it; empty if the removal can be cancelled.",
    )
    drivers = models.JSONField(
        default=dict,
        help_text="Per driver: error (empty when it answered), since when, its number of devices, its faults, "
        "and its backends by name, each with error, since when, and services.",
    )

    class Meta:
        ordering = ["name"]
        constraints = [models.UniqueConstraint(fields=["node"], name="host_one_per_node")]
        indexes = [
            # Each gateway looks for these hosts every few seconds.
            models.Index(fields=["id"], condition=Q(applied_hash=""), name="host_without_applied_report")
        ]

    def __str__(self) -> str:
        return self.name

    def stale_reason(self, driver: str, backend: str = "") -> str:
        """Return the reason why the stored devices of this driver and backend may be out of date, else ''.

        Possible reasons are that the agent is silent, or that the driver or the backend failed.
        """
        if self.stale_since:
            return f"the agent of {self.name} has sent no heartbeat since {self.stale_since:%Y-%m-%d %H:%M:%S} UTC"
        driver_entry = self.drivers.get(driver, {})
        error = driver_entry.get("error", "") or driver_entry.get("backends", {}).get(backend, {}).get("error", "")
        return f"{driver}: {error}" if error else ""
