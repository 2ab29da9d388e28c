"""What the conductor knows of agents: who they are, when they were last heard, what they sent and is not merged."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from accelerators.models import Host


class Agent(models.Model):
    """The agent of one host, known by its Ed25519 public key (base64url)."""

    host = models.OneToOneField(Host, models.CASCADE, related_name="agent")
    public_key = models.CharField(max_length=64, db_collation="C", unique=True)
    enrolled_at = models.DateTimeField(db_default=Now())
    version = models.CharField(max_length=64, default="", blank=True)
    wire = models.CharField(
        max_length=32, default="", blank=True, help_text="Wire version agreed at its last connection."
    )
    boot_id = models.CharField(max_length=64, default="", blank=True)
    connected_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        ordering = ["host__name"]

    def __str__(self) -> str:
        return f"agent of {self.host}"


class Lease(models.Model):
    """When a host's agent was last heard. Narrow and hot: one statement renews all that are due."""

    host = models.OneToOneField(Host, models.CASCADE, primary_key=True, related_name="lease")
    seen_at = models.DateTimeField()
    epoch = models.BigIntegerField(default=0)

    class Meta:
        indexes = [models.Index(fields=["seen_at"], name="lease_seen")]

    def __str__(self) -> str:
        return f"lease of host {self.host_id}"


class JoinToken(models.Model):
    """Permission to bind one key to one host. Stored as a hash; the same key may use it again until it expires."""

    host_name = models.CharField(max_length=255, db_collation="C")
    secret_hash = models.CharField(max_length=64, unique=True)
    public_key = models.CharField(max_length=64, default="", blank=True, help_text="The key it bound.")
    created_at = models.DateTimeField(db_default=Now())
    created_by = models.CharField(max_length=255, default="", blank=True)
    expires_at = models.DateTimeField()
    used_at = models.DateTimeField(null=True, blank=True)

    class Meta:
        constraints = [
            models.CheckConstraint(condition=Q(public_key="") | Q(used_at__isnull=False), name="token_bound_means_used")
        ]

    def __str__(self) -> str:
        return f"join token for {self.host_name}"


class Spooled(models.Model):
    """A report that was acknowledged and is not merged yet. Logged, so that kill -9 and power cuts lose none."""

    host = models.ForeignKey(Host, models.CASCADE, db_constraint=False, related_name="+")
    epoch = models.BigIntegerField()
    seq = models.BigIntegerField()
    received_at = models.DateTimeField(db_default=Now())
    payload = models.TextField(help_text="The Report message as it came.")

    class Meta:
        db_table = "spool"

    def __str__(self) -> str:
        return f"report {self.epoch}.{self.seq} of host {self.host_id}"
