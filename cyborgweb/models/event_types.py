"""The kinds of notifications, and their titles and sentences. Pure functions and constants, without Django.

A kind is part of the contract with receivers (docs/notifications.md) and is never renamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Self

from accelerators.domain.choices import Choice


class NotificationKind(StrEnum):
    """The kind of event that a message reports. `label` is the title of its messages, `meaning` says what happened."""

    label: str
    meaning: str

    def __new__(cls, value: str, label: str, meaning: str) -> Self:
        """Make a member from its value, its title (`label`) and a sentence that explains it (`meaning`)."""
        member = str.__new__(cls, value)
        member._value_, member.label, member.meaning = value, label, meaning
        return member

    REQUEST_BOUND = "request.bound", "Accelerator ready", "An accelerator is ready for its instance."
    REQUEST_FAILED = (
        "request.failed",
        "Accelerator not bound",
        "An accelerator could not be bound; the message says why.",
    )
    REQUEST_UNBOUND = "request.unbound", "Accelerator released", "An accelerator was released."
    DEVICE_READY = "device.ready", "Device ready", "A device is ready and offered."
    DEVICE_FAILED = "device.failed", "Device failed", "A device failed."
    DEVICE_MISSING = "device.missing", "Device missing", "A device is no longer found on its host."
    DEVICE_QUARANTINED = "device.quarantined", "Device in quarantine", "A device is in quarantine."
    DEVICE_HEALTH = "device.health", "Health of a device changed", "The health that a device reports has changed."


class DeliveryWay(Choice):
    """The ways in which messages are delivered."""

    WEBHOOK = "webhook"
    EMAIL = "email"
    INBOX = "inbox"


class SubscriptionScope(Choice):
    """The set of requests and devices that a subscription covers."""

    PROJECT = "project"
    """The project's own requests, and the devices they hold."""
    CLOUD = "cloud"
    """All requests and devices; for people who operate accelerators."""


class DeliveryProgress(Choice):
    """The state of a delivery."""

    WAITING = "waiting", "busy"
    DELIVERED = "delivered", "good"
    GIVEN_UP = "given up", "bad"


class SubscriptionStanding(Choice):
    """The state of a subscription. Deliveries are written only while it is active; it stays off, paused or gone until
    somebody makes it active, and ended until it is handed over, or its owner has the right again.
    """

    ACTIVE = "active", "good"
    OFF = "off"
    """Somebody turned it off."""
    PAUSED = "paused", "bad"
    """Its destination failed for days."""
    GONE = "gone", "bad"
    """Its destination answered 410 Gone."""
    ENDED = "ended", "bad"
    """Its owner has left, or has lost the right to have it."""


JOB_BY_WAY: Mapping[str, str] = {DeliveryWay.WEBHOOK: "deliveries", DeliveryWay.EMAIL: "mails"}
"""The job that sends the messages of each way. An inbox needs no job: its messages are delivered when written."""
TEST_KIND = "subscription.test"
PAUSED_KIND = "subscription.paused"
CONFIRMATION_KIND = "subscription.confirmation"
"""The kinds `TEST_KIND`, `PAUSED_KIND` and `CONFIRMATION_KIND` are messages about a subscription itself."""
KIND_TITLES: Mapping[str, str] = {
    **{kind: kind.label for kind in NotificationKind},
    TEST_KIND: "Test",
    PAUSED_KIND: "Subscription paused",
    CONFIRMATION_KIND: "Request to confirm the address",
}
_WORD_BY_FIELD = {
    "profile": "profile",
    "instance": "instance",
    "name": "",
    "hardware": "",
    "host": "on",
    "health": "health",
}
"""The fields of a message's data that a sentence contains, each with the word that precedes it."""


def describe_event(kind: str, data: Mapping[str, Any]) -> str:
    """Return one line for people that says what happened to which object, where and why; about 600 characters at most.

    `data` is the data of a message of this `kind`, with the names of its hardware
    (`cyborgweb.models.notify.add_hardware_name`).
    """
    subject = data.get("name") or data.get("request") or data.get("device") or data.get("subscription") or ""
    details = [
        f"{word} {data[name]}".strip() for name, word in _WORD_BY_FIELD.items() if name != "name" and data.get(name)
    ]
    line = ", ".join(
        part for part in (f"{KIND_TITLES.get(kind, kind)}: {subject}".removesuffix(": "), *details) if part
    )
    return " ".join(f"{line}. {data.get('reason') or ''}".split())[:600].rstrip(" .") + "."
