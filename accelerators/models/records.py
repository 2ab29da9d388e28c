"""What happened (events, and the seals over them), what is still to be told (intents), which job was woken (ticks),
what moved (generations)."""

from __future__ import annotations

from django.db import models
from django.db.models import Func, Value
from django.db.models.functions import Now

from accelerators.domain.states import Source
from accelerators.models import fields


class Event(models.Model):
    """One change: who, what, before and after, why. Append-only by trigger, partitioned by month (migration 0002)."""

    at = models.DateTimeField(db_default=Now())
    source = models.CharField(max_length=8, choices=fields.choices(Source))
    actor = fields.name(help_text="The person, the agent's host or the rule.")
    request_id = models.CharField(max_length=64, default="", blank=True)
    action = models.CharField(max_length=64, db_collation="C")
    subject_type = models.CharField(max_length=32)
    subject = models.UUIDField(null=True, blank=True)
    subject_name = fields.name(default="", blank=True)
    host = fields.name(default="", blank=True)
    changes = models.JSONField(default=dict, help_text="Per field: [before, after].")
    reason = models.TextField(default="", blank=True)
    tx = models.BigIntegerField(
        db_default=Func(function="accelerators_event_tx"),
        editable=False,
        help_text="The database's transaction that wrote it.",
    )

    class Meta:
        ordering = ["-at", "-id"]
        constraints = [fields.one_of("source", Source, "event_source_known")]
        indexes = [
            models.Index(fields=["-at", "-id"], name="event_newest_first"),
            models.Index(fields=["subject", "-at"], name="event_subject"),
            models.Index(fields=["host", "-at"], name="event_host"),
        ]

    def __str__(self) -> str:
        return f"{self.action} {self.subject_name}"


WORDS = Func("action", "actor", "host", "subject_name", "request_id", function="accelerators_event_words")
"""As the index `event_words` has it (migration 0013), so that it is used."""


def saying(*words: str) -> Func:
    """For queries of events: those of which the action, its verb, actor, host, request id or a word of the subject's
    name begin with each of `words`; upper and lower case of ASCII are alike."""
    folded = ("".join(char.lower() if char.isascii() else char for char in word) for word in words)
    quoted = ("'" + word.replace("\\", "\\\\").replace("'", "''") + "':*" for word in folded)
    query = Value(" & ".join(quoted), output_field=models.TextField())
    return Func(
        WORDS, query, arg_joiner=" @@ ", template="(%(expressions)s::tsquery)", output_field=models.BooleanField()
    )


class Seal(models.Model):
    """A link of the hash chain over events (`accelerators.audit.sealing`): about those after the seal before, up to
    its last one. Append-only by trigger, but for `marks`, which go with the events (migration 0014)."""

    number = models.BigIntegerField(primary_key=True)
    month = models.CharField(max_length=7, db_collation="C", help_text="Of its events; none has those of two.")
    tx = models.BigIntegerField(help_text="Transaction of its last event.")
    event = models.BigIntegerField(help_text="Its last event, in the order of transaction and id.")
    events = models.IntegerField(help_text="How many it is about.")
    digest = models.CharField(max_length=64, db_collation="C", help_text="Over all of them.")
    drops = models.CharField(
        max_length=7,
        db_collation="C",
        default="",
        blank=True,
        help_text="The month whose events were dropped with it.",
    )
    sealed_at = models.DateTimeField()
    hash = models.CharField(
        max_length=64, db_collation="C", help_text="Over what stands here and the hash of the seal before."
    )
    marks = models.BinaryField(default=b"", help_text="Four bytes an event, to find the one that does not fit.")

    class Meta:
        ordering = ["-number"]
        indexes = [models.Index(fields=["tx", "event"], name="seal_last")]

    def __str__(self) -> str:
        return f"№{self.number}"


class Intent(fields.Row):
    """Something to be done outside the database because of a change in it: made in its transaction, never dropped."""

    kind = models.CharField(max_length=32, db_collation="C")
    key = fields.name()
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
    """A job that was woken and not yet taken up (`accelerators.runtime.jobs`). Bookkeeping, not inventory."""

    name = models.CharField(max_length=64, primary_key=True)
    at = models.DateTimeField(db_default=Now())

    class Meta:
        db_table = "tick"

    def __str__(self) -> str:
        return self.name


class Generation(models.Model):
    """How often a collection was written: the sum of its rows (`accelerators.runtime.generations`). Triggers count."""

    collection = models.CharField(max_length=16, db_collation="C", db_index=True)
    value = models.BigIntegerField(default=0)

    class Meta:
        db_table = "generation"

    def __str__(self) -> str:
        return f"{self.collection} {self.value}"
