"""Models of events and the seals over them, intents (the outbox), ticks (woken jobs) and generations."""

from __future__ import annotations

from django.db import models
from django.db.models import Func, Q, Value
from django.db.models.functions import Now

from accelerators.domain.states import EventSource
from accelerators.models import fields


class Event(models.Model):
    """One recorded change: who changed what, the values before and after, and the reason.

    Triggers make the table append-only; it is partitioned by month (`migrations/sql/events.sql`).
    """

    at = models.DateTimeField(db_default=Now())
    source = models.CharField(max_length=8, choices=EventSource.choices())
    actor = fields.name_field(help_text="The person, the host of the agent, or the rule.")
    request_id = models.CharField(max_length=64, default="", blank=True)
    action = models.CharField(max_length=64, db_collation="C")
    subject_type = models.CharField(max_length=32)
    subject = models.UUIDField(null=True, blank=True)
    subject_name = fields.name_field(default="", blank=True)
    host = fields.name_field(default="", blank=True)
    changes = models.JSONField(default=dict, help_text="For each field: [before, after].")
    reason = models.TextField(default="", blank=True)
    tx = models.BigIntegerField(
        db_default=Func(function="accelerators_event_tx"),
        editable=False,
        help_text="The database transaction that wrote it.",
    )

    class Meta:
        ordering = ["-at", "-id"]
        constraints = [fields.one_of_constraint("source", EventSource, "event_source_known")]
        indexes = [
            models.Index(fields=["-at", "-id"], name="event_newest_first"),
            models.Index(fields=["subject", "-at"], name="event_subject"),
            models.Index(fields=["host", "-at"], name="event_host"),
        ]

    def __str__(self) -> str:
        return f"{self.action} {self.subject_name}"


EVENT_WORDS = Func("action", "actor", "host", "subject_name", "request_id", function="accelerators_event_words")
"""The searchable words of an event. It must equal the expression of the index `event_words`
(`migrations/sql/events.sql`).
"""

MAX_WORD_CHARS = 255
"""Characters of a word that are searched in the index of words; PostgreSQL limits the length of a word."""


def event_has_words(*words: str, exact: bool = False) -> Func:
    """Build a filter for event queries: every one of `words` must be the beginning of a word of the event; with
    `exact`, a whole word.

    The result is for `filter()`. The words of an event come from its action, the action's verb, its actor, host,
    subject name and request id. Case is ignored for ASCII letters. The filter uses the index `event_words`.
    """
    lowercase_words = ("".join(char.lower() if char.isascii() else char for char in word) for word in words)
    end = "'" if exact else "':*"
    terms = ("'" + word.replace("\\", "\\\\").replace("'", "''") + end for word in lowercase_words)
    query = Value(" & ".join(terms), output_field=models.TextField())
    return Func(
        EVENT_WORDS, query, arg_joiner=" @@ ", template="(%(expressions)s::tsquery)", output_field=models.BooleanField()
    )


def has_subject_type(subject_type: str) -> Q:
    """Build a filter for event queries: the subject of the event has this type.

    Every action begins with the type of its subject and a full stop (`conductor_sql.build_event_insert`), so the filter
    uses the index `event_words`.
    """
    return Q(event_has_words(f"{subject_type[:MAX_WORD_CHARS]}."), subject_type=subject_type)


class Seal(models.Model):
    """A link of the hash chain over events. It covers the events that follow the last event of the previous seal, up to
    and including the event in `event`.

    `accelerators.audit.sealing` adds seals. Triggers make the table append-only, with one exception: the column `marks`
    is cleared when the events are dropped (`migrations/sql/seals.sql`, `migrations/sql/signed_seals.sql`).
    """

    number = models.BigIntegerField(primary_key=True)
    month = models.CharField(
        max_length=7, db_collation="C", help_text="The month of its events; a seal covers events of one month only."
    )
    tx = models.BigIntegerField(help_text="The transaction of its last event.")
    event = models.BigIntegerField(help_text="Its last event in the order of transaction and id.")
    events = models.IntegerField(help_text="The number of events that it covers.")
    digest = models.CharField(max_length=64, db_collation="C", help_text="Hash over all its events.")
    drops = models.CharField(
        max_length=7,
        db_collation="C",
        default="",
        blank=True,
        help_text="The month whose events were dropped when this seal was made.",
    )
    sealed_at = models.DateTimeField()
    hash = models.CharField(
        max_length=64, db_collation="C", help_text="Hash over this seal's fields and the hash of the previous seal."
    )
    kind = models.CharField(
        max_length=8,
        db_collation="C",
        default="",
        db_default="",
        blank=True,
        help_text="What it records: `events`, `drop` (of a month), `key` (another key signs from the next seal on) or "
        "`restored` (the database was restored from a backup). Empty in seals that are not signed.",
    )
    details = models.TextField(
        default="",
        db_default="",
        blank=True,
        help_text="A JSON object: what justified the drop of a month, or the new key and why it signs.",
    )
    key = models.CharField(
        max_length=64,
        db_collation="C",
        default="",
        db_default="",
        blank=True,
        help_text="The public key (Ed25519, in hex) that verifies its signature; empty: it is not signed.",
    )
    signature = models.CharField(
        max_length=128,
        db_collation="C",
        default="",
        db_default="",
        blank=True,
        help_text="Signature (Ed25519, in hex) over the same values as the hash.",
    )
    marks = models.BinaryField(default=b"", help_text="Four bytes for each event, by which a changed event is found.")

    class Meta:
        ordering = ["-number"]
        indexes = [models.Index(fields=["tx", "event"], name="seal_last")]

    def __str__(self) -> str:
        return f"№{self.number}"


class AuditStatus(models.Model):
    """What the jobs that seal and verify events found in their last run on one node.

    It is only shown: who can write to the database can change it, until the next run of the jobs.
    """

    node = models.CharField(primary_key=True, max_length=255, db_collation="C", help_text="The name of the machine.")
    updated_at = models.DateTimeField(db_default=Now(), help_text="When a job last wrote this row.")
    sealed_at = models.DateTimeField(
        null=True, blank=True, help_text="When the job `seals` last succeeded, with a precision of a minute."
    )
    refusal = models.TextField(default="", db_default="", blank=True, help_text="Why this node seals nothing.")
    refused_since = models.DateTimeField(null=True, blank=True)
    verified_number = models.BigIntegerField(
        default=0, db_default=0, help_text="All seals up to this number were verified since the verification began."
    )
    verified_at = models.DateTimeField(
        null=True, blank=True, help_text="When the newest seal of that time had been verified."
    )
    findings = models.IntegerField(default=0, db_default=0, help_text="How many differences the verification found.")
    finding = models.TextField(default="", db_default="", blank=True, help_text="The first difference.")
    restored_at = models.DateTimeField(null=True, blank=True, help_text="When the database was last restored.")
    restore = models.TextField(default="", db_default="", blank=True, help_text="What the seal of that restore says.")

    class Meta:
        verbose_name_plural = "audit status"

    def __str__(self) -> str:
        return f"{self.node}: {self.refusal or self.finding or 'as it should be'}"


class Intent(fields.Row):
    """Work to be done outside the database because of a change in it (outbox).

    An intent is inserted in the transaction of the change and deleted only when the work is done. There is at most one
    for each kind and key. It is due at `next_at`; `attempts` counts the failures. See `accelerators.outbox`.
    """

    kind = models.CharField(max_length=32, db_collation="C")
    key = fields.name_field()
    payload = models.JSONField(default=dict)
    attempts = models.IntegerField(default=0)
    next_at = models.DateTimeField(db_default=Now())
    last_error = models.TextField(default="", blank=True)

    class Meta:
        ordering = ["id"]
        constraints = [models.UniqueConstraint(fields=["kind", "key"], name="intent_one_per_kind_and_key")]
        indexes = [models.Index(fields=["next_at"], name="intent_next")]

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"


class Tick(models.Model):
    """A job that was woken and that no worker has taken up yet. Bookkeeping of `accelerators.runtime.jobs`."""

    name = models.CharField(max_length=64, primary_key=True)
    at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "tick"

    def __str__(self) -> str:
        return self.name


class Generation(models.Model):
    """A counter of writes to a collection; the collection's generation is the sum of its rows.

    Triggers do the counting. See `accelerators.runtime.generations`.
    """

    collection = models.CharField(max_length=16, db_collation="C", db_index=True)
    value = models.BigIntegerField(default=0)

    class Meta:
        db_table = "generation"

    def __str__(self) -> str:
        return f"{self.collection} {self.value}"
