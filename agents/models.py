"""Models of agents: their keys and leases, join tokens, gateways, used nonces, and reports that wait to be
merged."""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from accelerators.domain.choices import Choice
from accelerators.models import Host


class BarKind(Choice):
    """The reasons why an agent may not connect."""

    NONE = "", "calm", "None"
    REVOKED = "revoked", "bad", "Revoked"
    CLONE = "clone", "bad", "Clone"


class Agent(models.Model):
    """The agent of one host, identified by its Ed25519 public key (base64url).

    The row says whether the agent may connect, and what it said about itself in its last Hello. Gateways look every few
    seconds for rows with a new `changed_at`, and end the connections that are not allowed any more.
    """

    host = models.OneToOneField(Host, models.CASCADE, related_name="agent")
    public_key = models.CharField(max_length=64, db_collation="C", unique=True)
    enrolled_at = models.DateTimeField(db_default=Now())
    key_since = models.DateTimeField(db_default=Now(), help_text="Since when it has this key.")
    barred = models.CharField(max_length=16, choices=BarKind.choices(), db_default="", default="", blank=True)
    barred_reason = models.CharField(max_length=500, db_default="", default="", blank=True)
    rotate_asked_at = models.DateTimeField(
        null=True, blank=True, help_text="When a new key was requested that the agent has not sent yet."
    )
    changed_at = models.DateTimeField(
        db_default=Now(), db_index=True, help_text="When its key, its barring or its connection last changed."
    )
    version = models.CharField(max_length=64, default="", blank=True)
    wire = models.CharField(
        max_length=32, default="", blank=True, help_text="Protocol version that was agreed at its last connection."
    )
    boot_id = models.CharField(max_length=64, default="", blank=True)
    ops = models.TextField(
        null=True,
        blank=True,
        help_text="The commands that it accepts, separated by blanks; null if it has never reported them.",
    )
    writes = models.TextField(
        null=True,
        blank=True,
        help_text="Why it cannot write to Placement itself; empty if it can; null if it has never reported this.",
    )
    fingerprint = models.CharField(
        max_length=64,
        db_default="",
        default="",
        blank=True,
        help_text="The pinned certificate of its last connection; empty if it pins none.",
    )
    newest_certificate = models.CharField(
        max_length=64,
        db_default="",
        default="",
        blank=True,
        help_text="The certificate to which the announcements that it has lead; empty if it accepts none.",
    )
    connected_at = models.DateTimeField(null=True, blank=True)
    connection = models.BigIntegerField(
        db_default=0, default=0, help_text="Number of its last connection; later ones have higher numbers."
    )
    epoch = models.BigIntegerField(db_default=0, default=0, help_text="The epoch of its last connection.")
    address = models.CharField(max_length=64, db_default="", default="", blank=True)

    class Meta:
        ordering = ["host__name"]

    def __str__(self) -> str:
        return f"agent of {self.host}"


class Lease(models.Model):
    """The time at which a host's agent was last heard. The table is narrow because it is written often: one statement
    renews all leases that are due.
    """

    host = models.OneToOneField(Host, models.CASCADE, primary_key=True, related_name="lease")
    seen_at = models.DateTimeField()
    epoch = models.BigIntegerField(default=0)

    class Meta:
        indexes = [models.Index(fields=["seen_at"], name="lease_seen")]

    def __str__(self) -> str:
        return f"lease of host {self.host_id}"


class Gateway(models.Model):
    """A process that has connections from agents, and the URL where other processes reach it.

    The gateway renews its row whenever it writes leases.
    """

    url = models.CharField(max_length=255, primary_key=True, db_collation="C")
    name = models.CharField(max_length=100, db_collation="C", help_text="A new name after every start.")
    seen_at = models.DateTimeField(db_default=Now())

    def __str__(self) -> str:
        return f"gateway {self.name} at {self.url}"


class JoinToken(models.Model):
    """Permission to bind one key to one host. Only a hash of its secret is stored.

    The key that was bound may use the token again until it expires.
    """

    host_name = models.CharField(max_length=255, db_collation="C")
    secret_hash = models.CharField(max_length=64, unique=True)
    public_key = models.CharField(
        max_length=64, default="", blank=True, help_text="The public key that was bound with it."
    )
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


class UsedNonce(models.Model):
    """The random part of a challenge's nonce that a gateway has accepted, so that no gateway accepts it again.

    Gateways delete rows that are older than any valid challenge.
    """

    nonce = models.CharField(max_length=64, primary_key=True, db_collation="C")
    used_at = models.DateTimeField(db_default=Now(), db_index=True)

    def __str__(self) -> str:
        return f"nonce used at {self.used_at}"


class Spooled(models.Model):
    """A report that was stored and is not merged yet.

    The table is a logged one, so that neither kill -9 nor a power failure loses an acknowledged report.
    """

    host = models.ForeignKey(Host, models.CASCADE, db_constraint=False, related_name="+")
    epoch = models.BigIntegerField()
    seq = models.BigIntegerField()
    received_at = models.DateTimeField(db_default=Now())
    payload = models.TextField(help_text="The Report message as it was received.")
    urgent = models.BooleanField(
        db_default=False, default=False, help_text="It reports a fault, so it is merged before others."
    )

    class Meta:
        db_table = "spool"
        indexes = [models.Index(fields=["host"], condition=Q(urgent=True), name="spool_urgent")]

    def __str__(self) -> str:
        return f"report {self.epoch}.{self.seq} of host {self.host_id}"
