"""The kinds of notifications, and their titles and sentences. Pure functions and constants, without Django.

A kind is part of the contract with receivers (docs/notifications.md) and is never renamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """The kind of event that a message reports."""

    REQUEST_BOUND = "request.bound"
    REQUEST_FAILED = "request.failed"
    REQUEST_UNBOUND = "request.unbound"
    DEVICE_READY = "device.ready"
    DEVICE_FAILED = "device.failed"
    DEVICE_MISSING = "device.missing"
    DEVICE_QUARANTINED = "device.quarantined"
    DEVICE_HEALTH = "device.health"


class Way(StrEnum):
    """How a message is delivered."""

    WEBHOOK = "webhook"
    EMAIL = "email"
    INBOX = "inbox"


class Scope(StrEnum):
    """Which requests and devices a subscription covers."""

    PROJECT = "project"
    """The project's own requests, and the devices they hold."""
    CLOUD = "cloud"
    """All requests and devices; for people who operate accelerators."""


class Progress(StrEnum):
    """The state of a delivery."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    GIVEN_UP = "given up"


class Standing(StrEnum):
    """The state of a subscription. Deliveries are written only while it is active; it stays off, paused or gone until
    somebody resumes it."""

    ACTIVE = "active"
    OFF = "off"
    """Somebody turned it off."""
    PAUSED = "paused"
    """Its destination failed for days."""
    GONE = "gone"
    """Its destination answered 410 Gone."""


JOBS: Mapping[str, str] = {Way.WEBHOOK: "deliveries", Way.EMAIL: "mails"}
"""The job that sends the messages of each way. An inbox needs no job: its messages are delivered when written."""
TEST = "subscription.test"
PAUSED = "subscription.paused"
"""The kinds `TEST_KIND` and `PAUSED_KIND` are messages about a subscription itself."""

MEANINGS: Mapping[str, str] = {
    Kind.REQUEST_BOUND: "An accelerator is ready for its instance.",
    Kind.REQUEST_FAILED: "An accelerator could not be bound; the message says why.",
    Kind.REQUEST_UNBOUND: "An accelerator was released.",
    Kind.DEVICE_READY: "A device is ready and offered.",
    Kind.DEVICE_FAILED: "A device failed.",
    Kind.DEVICE_MISSING: "A device is no longer found on its host.",
    Kind.DEVICE_QUARANTINED: "A device is in quarantine.",
    Kind.DEVICE_HEALTH: "The health that a device reports has changed.",
    TEST: "Somebody sent a test message.",
    PAUSED: "A subscription is paused, because its destination failed for days.",
}
TITLES: Mapping[str, str] = {
    Kind.REQUEST_BOUND: "Accelerator ready",
    Kind.REQUEST_FAILED: "Accelerator not bound",
    Kind.REQUEST_UNBOUND: "Accelerator released",
    Kind.DEVICE_READY: "Device ready",
    Kind.DEVICE_FAILED: "Device failed",
    Kind.DEVICE_MISSING: "Device missing",
    Kind.DEVICE_QUARANTINED: "Device in quarantine",
    Kind.DEVICE_HEALTH: "Health of a device changed",
    TEST: "Test",
    PAUSED: "Subscription paused",
}
_TOLD = {"profile": "profile", "instance": "instance", "name": "", "model": "", "host": "on", "health": "health"}
"""The fields of a message's data that a sentence contains, each with the word that precedes it."""


def sentence(kind: str, data: Mapping[str, Any]) -> str:
    """Return one line for people that says what happened to which object, where and why; about 600 characters at most.

    `data` is the data of a message of this `kind`.
    """
    about = data.get("name") or data.get("request") or data.get("device") or data.get("subscription") or ""
    told = [f"{word} {data[name]}".strip() for name, word in _TOLD.items() if name != "name" and data.get(name)]
    line = ", ".join(part for part in (f"{TITLES.get(kind, kind)}: {about}".removesuffix(": "), *told) if part)
    return " ".join(f"{line}. {data.get('reason') or ''}".split())[:600].rstrip(" .") + "."
