"""What one can be told of, and in which words. Pure; called by the models, the API, the console, e-mail.

A kind is part of the contract with receivers (docs/notifications.md): it is never renamed.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What a message is about."""

    REQUEST_BOUND = "request.bound"
    REQUEST_FAILED = "request.failed"
    REQUEST_UNBOUND = "request.unbound"
    DEVICE_READY = "device.ready"
    DEVICE_FAILED = "device.failed"
    DEVICE_MISSING = "device.missing"
    DEVICE_QUARANTINED = "device.quarantined"
    DEVICE_HEALTH = "device.health"


class Way(StrEnum):
    """How a message reaches its reader."""

    WEBHOOK = "webhook"
    EMAIL = "email"
    INBOX = "inbox"


class Scope(StrEnum):
    """Whose requests and devices."""

    PROJECT = "project"
    """The project's own requests, and the devices they hold."""
    CLOUD = "cloud"
    """All there are: for who runs accelerators."""


class Progress(StrEnum):
    """How a delivery stands."""

    WAITING = "waiting"
    DELIVERED = "delivered"
    GIVEN_UP = "given up"


class Standing(StrEnum):
    """How a subscription stands. One that is paused or gone writes no deliveries until somebody resumes it."""

    ACTIVE = "active"
    OFF = "off"
    """Somebody turned it off."""
    PAUSED = "paused"
    """Its destination failed for days."""
    GONE = "gone"
    """Its destination answered 410 Gone."""


JOBS: Mapping[str, str] = {Way.WEBHOOK: "deliveries", Way.EMAIL: "mails"}
"""Which job brings messages; those of an inbox are there when they are written."""
TEST = "subscription.test"
PAUSED = "subscription.paused"
"""Kinds of messages about a subscription itself."""

MEANINGS: Mapping[str, str] = {
    Kind.REQUEST_BOUND: "An accelerator is ready for its instance.",
    Kind.REQUEST_FAILED: "An accelerator could not be bound; the message says why.",
    Kind.REQUEST_UNBOUND: "An accelerator was given back.",
    Kind.DEVICE_READY: "A device is offered.",
    Kind.DEVICE_FAILED: "A device failed.",
    Kind.DEVICE_MISSING: "A device is not seen any more.",
    Kind.DEVICE_QUARANTINED: "A device is in quarantine.",
    Kind.DEVICE_HEALTH: "A device says that its health has changed.",
    TEST: "Somebody pressed Test.",
    PAUSED: "A subscription is paused, because its destination failed for days.",
}
TITLES: Mapping[str, str] = {
    Kind.REQUEST_BOUND: "Accelerator ready",
    Kind.REQUEST_FAILED: "Accelerator not bound",
    Kind.REQUEST_UNBOUND: "Accelerator given back",
    Kind.DEVICE_READY: "Device ready",
    Kind.DEVICE_FAILED: "Device failed",
    Kind.DEVICE_MISSING: "Device missing",
    Kind.DEVICE_QUARANTINED: "Device in quarantine",
    Kind.DEVICE_HEALTH: "Health of a device changed",
    TEST: "Test",
    PAUSED: "Subscription paused",
}
_TOLD = {"profile": "profile", "instance": "instance", "name": "", "model": "", "host": "on", "health": "health"}
"""What a sentence tells of a message's data, and the word before it."""


def sentence(kind: str, data: Mapping[str, Any]) -> str:
    """One line for people: what happened to what, where and why."""
    about = data.get("name") or data.get("request") or data.get("device") or data.get("subscription") or ""
    told = [f"{word} {data[name]}".strip() for name, word in _TOLD.items() if name != "name" and data.get(name)]
    line = ", ".join(part for part in (f"{TITLES.get(kind, kind)}: {about}".removesuffix(": "), *told) if part)
    return " ".join(f"{line}. {data.get('reason') or ''}".split())[:600].rstrip(" .") + "."
