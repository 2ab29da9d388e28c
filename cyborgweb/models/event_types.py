"""The kinds of notifications, and their titles and sentences. Pure functions and constants, without Django.

A kind is part of the contract with receivers (docs/notifications.md) and is never renamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class NotificationKind(StrEnum):
    """The kind of event that a message reports."""

    REQUEST_BOUND = "request.bound"
    REQUEST_FAILED = "request.failed"
    REQUEST_UNBOUND = "request.unbound"
    DEVICE_READY = "device.ready"
    DEVICE_FAILED = "device.failed"
    DEVICE_MISSING = "device.missing"
    DEVICE_QUARANTINED = "device.quarantined"
    DEVICE_HEALTH = "device.health"


class DeliveryWay(StrEnum):
    """How a message is delivered."""

    WEBHOOK = "webhook"
    EMAIL = "email"
    INBOX = "inbox"


class SubscriptionScope(StrEnum):
    """Which requests and devices a subscription covers."""

    PROJECT = "project"
    """The project's own requests, and the devices they hold."""
    CLOUD = "cloud"
    """All requests and devices; for people who operate accelerators."""


class DeliveryProgress(StrEnum):
    """The state of a delivery."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    GIVEN_UP = "given up"


class SubscriptionStanding(StrEnum):
    """The state of a subscription. Deliveries are written only while it is active; it stays off, paused or gone until
    somebody resumes it."""

    ACTIVE = "active"
    OFF = "off"
    """Somebody turned it off."""
    PAUSED = "paused"
    """Its destination failed for days."""
    GONE = "gone"
    """Its destination answered 410 Gone."""


JOB_BY_WAY: Mapping[str, str] = {DeliveryWay.WEBHOOK: "deliveries", DeliveryWay.EMAIL: "mails"}
"""The job that sends the messages of each way. An inbox needs no job: its messages are delivered when written."""
TEST_KIND = "subscription.test"
PAUSED_KIND = "subscription.paused"
"""The kinds `TEST_KIND` and `PAUSED_KIND` are messages about a subscription itself."""

KIND_MEANINGS: Mapping[str, str] = {
    NotificationKind.REQUEST_BOUND: "An accelerator is ready for its instance.",
    NotificationKind.REQUEST_FAILED: "An accelerator could not be bound; the message says why.",
    NotificationKind.REQUEST_UNBOUND: "An accelerator was released.",
    NotificationKind.DEVICE_READY: "A device is ready and offered.",
    NotificationKind.DEVICE_FAILED: "A device failed.",
    NotificationKind.DEVICE_MISSING: "A device is no longer found on its host.",
    NotificationKind.DEVICE_QUARANTINED: "A device is in quarantine.",
    NotificationKind.DEVICE_HEALTH: "The health that a device reports has changed.",
    TEST_KIND: "Somebody sent a test message.",
    PAUSED_KIND: "A subscription is paused, because its destination failed for days.",
}
KIND_TITLES: Mapping[str, str] = {
    NotificationKind.REQUEST_BOUND: "Accelerator ready",
    NotificationKind.REQUEST_FAILED: "Accelerator not bound",
    NotificationKind.REQUEST_UNBOUND: "Accelerator released",
    NotificationKind.DEVICE_READY: "Device ready",
    NotificationKind.DEVICE_FAILED: "Device failed",
    NotificationKind.DEVICE_MISSING: "Device missing",
    NotificationKind.DEVICE_QUARANTINED: "Device in quarantine",
    NotificationKind.DEVICE_HEALTH: "Health of a device changed",
    TEST_KIND: "Test",
    PAUSED_KIND: "Subscription paused",
}
_WORD_BY_FIELD = {
    "profile": "profile",
    "instance": "instance",
    "name": "",
    "model": "",
    "host": "on",
    "health": "health",
}
"""The fields of a message's data that a sentence contains, each with the word that precedes it."""


def describe_event(kind: str, data: Mapping[str, Any]) -> str:
    """Return one line for people that says what happened to which object, where and why; about 600 characters at most.

    `data` is the data of a message of this `kind`.
    """
    subject = data.get("name") or data.get("request") or data.get("device") or data.get("subscription") or ""
    details = [
        f"{word} {data[name]}".strip() for name, word in _WORD_BY_FIELD.items() if name != "name" and data.get(name)
    ]
    line = ", ".join(
        part for part in (f"{KIND_TITLES.get(kind, kind)}: {subject}".removesuffix(": "), *details) if part
    )
    return " ".join(f"{line}. {data.get('reason') or ''}".split())[:600].rstrip(" .") + "."
