"""Tables of notifications: subscriptions, deliveries, the state of the mail server, slow projects, and the position up
to which events were read."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models import Q
from django.db.models.functions import Now

from accelerators.domain.states import DeviceType
from accelerators.models import fields
from accelerators.runtime.hardware_names import get_hardware_name
from cyborgweb.models.event_types import (
    DeliveryProgress,
    DeliveryWay,
    NotificationKind,
    SubscriptionScope,
    SubscriptionStanding,
)


class Subscription(fields.SettingsRow):
    """The events about which somebody wants to be notified, and how. It belongs to a person or to a whole project."""

    name = models.CharField(max_length=64, help_text="A name of your choice.")
    project_id = models.CharField(max_length=255, db_collation="C", help_text="The project in which it was created.")
    person = models.CharField(
        max_length=255,
        db_collation="C",
        default="",
        blank=True,
        help_text="The id of the person it belongs to; empty if it belongs to the project.",
    )
    user = models.ForeignKey(
        settings.AUTH_USER_MODEL,
        models.SET_NULL,
        null=True,
        blank=True,
        related_name="subscriptions",
        help_text="The user of its owner, if the owner has one here; it ends when this user is deleted.",
    )
    owner = models.CharField(
        max_length=255,
        db_collation="C",
        default="",
        db_default="",
        blank=True,
        editable=False,
        help_text="The id of the person whose rights it needs: who created it, or to whom it was handed over.",
    )
    owner_confirmed_at = models.DateTimeField(
        db_default=Now(), editable=False, help_text="When it was last confirmed that its owner has these rights."
    )
    owner_check_at = models.DateTimeField(
        db_default=Now(), editable=False, help_text="When Keystone is asked about its owner next."
    )
    owner_doubt = models.TextField(
        default="",
        db_default="",
        blank=True,
        editable=False,
        help_text="Why the rights of its owner could not be confirmed; empty if they were.",
    )
    scope = models.CharField(
        max_length=8,
        choices=SubscriptionScope.choices(),
        default=SubscriptionScope.PROJECT.value,
        help_text="The requests of the project and the devices they hold, or the whole cloud.",
    )
    kinds = ArrayField(
        models.CharField(max_length=32, choices=[(kind.value, kind.value) for kind in NotificationKind]),
        help_text="The kinds of events that you want to hear about.",
    )
    host = fields.name_field(
        default="", blank=True, help_text="Only this host, with the wildcards * and ?. For the scope cloud only."
    )
    type = models.CharField(
        max_length=16,
        choices=[("", "any"), *DeviceType.choices()],
        default="",
        blank=True,
        help_text="Only devices of this type.",
    )
    label = models.CharField(max_length=255, default="", blank=True, help_text="Only requests with exactly this label.")
    way = models.CharField(max_length=8, choices=DeliveryWay.choices(), help_text="How messages are delivered.")
    target = models.CharField(
        max_length=2000, default="", blank=True, help_text="The webhook's URL, or the e-mail address."
    )
    secret = models.TextField(
        default="", blank=True, editable=False, help_text="The secret that signs webhooks; stored encrypted."
    )
    standing = models.CharField(
        max_length=8,
        choices=SubscriptionStanding.choices(),
        default=SubscriptionStanding.ACTIVE.value,
        help_text="Paused: its destination failed for days. Gone: it answered 410. Ended: its owner may not have it.",
    )
    last_error = models.TextField(default="", blank=True, help_text="The error of the last attempt.")
    failures = models.IntegerField(default=0, help_text="Failed attempts since the last success.")
    failing_since = models.DateTimeField(null=True, blank=True, help_text="Since when attempts have failed.")
    retry_at = models.DateTimeField(db_default=Now(), help_text="No attempt is made before this time.")
    confirmed_at = models.DateTimeField(
        null=True,
        blank=True,
        editable=False,
        help_text="When the recipient of the mails confirmed the address; empty while it waits for confirmation.",
    )

    class Meta:
        ordering = ["id"]
        constraints = [
            fields.one_of_constraint("scope", SubscriptionScope, "subscription_scope_known"),
            fields.one_of_constraint("way", DeliveryWay, "subscription_way_known"),
            fields.one_of_constraint("standing", SubscriptionStanding, "subscription_standing_known"),
            models.CheckConstraint(condition=~Q(way="inbox") | ~Q(person=""), name="subscription_inbox_has_a_person"),
        ]
        indexes = [models.Index(fields=["project_id", "person"], name="subscription_owner")]

    def __str__(self) -> str:
        return self.name

    @property
    def is_unconfirmed(self) -> bool:
        """Whether it waits until the recipient of its mails confirms the address."""
        return self.way == DeliveryWay.EMAIL and self.confirmed_at is None

    @property
    def personal(self) -> bool:
        """Whether the subscription belongs to a person, not to a project."""
        return bool(self.person)

    @property
    def destination(self) -> str:
        """The subscription's target in a form that everybody may see.

        For a webhook it is the scheme, host and port of the URL, because the path may hold a token; for mail it is the
        whole address; for an inbox it is `the inbox`.
        """
        if self.way == DeliveryWay.WEBHOOK:
            parts = urlsplit(self.target)
            return f"{parts.scheme}://{parts.netloc}"
        return self.target or "the inbox"


def add_hardware_name(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data of a message with `hardware`, what people call its device, after `model` if it has a model.

    Names are looked up when a message is shown or sent, so they follow the configuration. Messages of earlier releases
    have no vendor: their hardware is the model.
    """
    named: dict[str, Any] = {}
    for word, value in data.items():
        named[word] = value
        if word == "model":
            vendor, subsystem = data.get("vendor", ""), data.get("subsystem", "")
            named["hardware"] = get_hardware_name(vendor, value, subsystem).full if vendor else value
    return named


class Delivery(models.Model):
    """One message for one subscription, and the progress of its delivery. `message` is the message's id."""

    message = models.UUIDField(
        default=uuid.uuid4,
        unique=True,
        editable=False,
        help_text="The same at every attempt, so that receivers recognise repetitions.",
    )
    subscription = models.ForeignKey(Subscription, models.CASCADE, related_name="deliveries")
    event = models.BigIntegerField(null=True, blank=True, help_text="The number of the event that it reports.")
    kind = models.CharField(max_length=32, help_text="The kind of event.")
    at = models.DateTimeField(db_default=Now(), help_text="When the event happened.")
    data = models.JSONField(default=dict, help_text="The data of the message, as it is sent.")
    progress = models.CharField(
        max_length=16,
        choices=DeliveryProgress.choices(),
        default=DeliveryProgress.WAITING.value,
        help_text="The progress of the delivery.",
    )
    attempts = models.IntegerField(default=0, db_default=0, help_text="The number of attempts.")
    next_at = models.DateTimeField(db_default=Now(), help_text="When the next attempt is made.")
    last_error = models.TextField(default="", db_default="", blank=True, help_text="The error of the last attempt.")
    delivered_at = models.DateTimeField(null=True, blank=True, help_text="When it was delivered.")
    reader = models.CharField(
        max_length=255,
        db_collation="C",
        default="",
        db_default="",
        blank=True,
        help_text="The id of the person in whose inbox it is; empty if in none.",
    )
    read_at = models.DateTimeField(null=True, blank=True, help_text="When its reader marked it as read.")
    created_at = models.DateTimeField(db_default=Now(), help_text="When the message was created.")

    class Meta:
        ordering = ["-id"]
        verbose_name_plural = "deliveries"
        constraints = [
            fields.one_of_constraint("progress", DeliveryProgress, "delivery_progress_known"),
            models.UniqueConstraint(fields=["subscription", "event"], name="delivery_one_per_event"),
        ]
        indexes = [
            models.Index(fields=["subscription", "next_at"], condition=Q(progress="waiting"), name="delivery_waiting"),
            models.Index(fields=["subscription", "-id"], name="delivery_of"),
            models.Index(fields=["reader", "-id"], condition=~Q(reader=""), name="delivery_inbox"),
            models.Index(fields=["reader"], condition=~Q(reader="") & Q(read_at__isnull=True), name="delivery_unread"),
            models.Index(fields=["created_at"], name="delivery_age"),
        ]

    def __str__(self) -> str:
        return f"{self.kind} to {self.subscription}"

    @property
    def named_data(self) -> dict[str, Any]:
        """Return the data with the name of its hardware, as it is sent and shown."""
        return add_hardware_name(self.data)


class ConfirmationRequest(models.Model):
    """A letter that asked somebody to confirm an address; it limits how many more are sent. It outlives its
    subscription. `address` is the mailbox (`subscriptions.find_mailbox`), `project_id` the project of
    the subscription, `asked_by` the id of the caller.
    """

    address = models.CharField(max_length=320, db_collation="C")
    project_id = models.CharField(max_length=255, db_collation="C")
    asked_by = models.CharField(max_length=255, db_collation="C")
    asked_at = models.DateTimeField(db_default=Now())

    class Meta:
        default_permissions = ()
        indexes = [
            models.Index(fields=["address", "asked_at"], name="confirmation_address"),
            models.Index(fields=["asked_by", "asked_at"], name="confirmation_asker"),
        ]

    def __str__(self) -> str:
        return self.address


class MailServer(models.Model):
    """The circuit breaker of the mail server, in one row: after a failure no mail is tried before `retry_at`."""

    failures = models.IntegerField(default=0)
    retry_at = models.DateTimeField(db_default=Now())
    last_error = models.TextField(default="")

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.last_error or "available"


class SlowProject(models.Model):
    """A project with a webhook whose receiver was slow. Until `slow_until` it gets only a share of the places."""

    project_id = models.CharField(max_length=255, db_collation="C", primary_key=True)
    times = models.IntegerField(default=1, help_text="How many times it was slow, after one another.")
    slow_until = models.DateTimeField()

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return self.project_id


class Reader(models.Model):
    """The position up to which `notify.fanout` has read the events, in one row.

    All events up to (`transaction`, `event`) have been read, in the order of the transactions that wrote them. Every
    event that has not been read yet happened at `since` or later.
    """

    transaction = models.BigIntegerField(default=0)
    event = models.BigIntegerField(default=0)
    since = models.DateTimeField(db_default=Now())

    class Meta:
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.transaction}, {self.event}"
