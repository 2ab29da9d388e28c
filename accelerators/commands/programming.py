"""Store what a deployable contains after it was programmed, and wait for a command to end.

`store_programmed_image` and `clear_bitstreams` must be called in the transaction that ends the command.
`wait_until_ended` waits without holding a database connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from django.db import connection

from accelerators import conductor
from accelerators.commands import placing
from accelerators.domain import traits
from accelerators.domain.groups import FUNCTION
from accelerators.domain.states import Origin, Source
from accelerators.models import Attribute, Command, Deployable, Device
from accelerators.runtime import pubsub

POLL_S = 1.0
"""Seconds after which `wait_until_ended` reads the command again, in case a notification was lost."""


def programmed(device: Device, deployable_name: str, image: Mapping[str, Any], actor: str) -> None:
    """Store the image's bitstream as the content of a deployable, and the image's function as its only function trait.

    If `deployable_name` is '', all deployables of the device get it. Deployables that are missing are skipped. `image`
    has the fields of `agents.wire.ImageRef`. Each deployable gets an event, and the provider of its host is written
    again. Call it inside `conductor.writing()`, with the device's host locked first.
    """
    with conductor.writing():
        parts = Deployable.objects.select_for_update(of=("self",)).filter(device=device, missing_since__isnull=True)
        named = parts.filter(name=deployable_name) if deployable_name else parts
        for part in named.select_related("device__host").order_by("id"):
            _programmed(part, image, actor)


def _programmed(part: Deployable, image: Mapping[str, Any], actor: str) -> None:
    """Store bitstream and function trait of one deployable, with an event and a `provider` intent.

    Without a function id in the image's properties, the image's own id names the function.
    """
    device, bitstream = part.device, UUID(image["id"])
    function = image.get("properties", {}).get(FUNCTION) or image["id"]
    trait = traits.function_trait(part.driver_name or device.driver, function)
    earlier = Attribute.objects.filter(deployable=part, value__startswith=traits.FUNCTION_ID).order_by("id")
    before = ", ".join(earlier.values_list("value", flat=True)) or None
    earlier.exclude(key=traits.KEY).delete()
    now = datetime.now(UTC)
    values = {"value": trait, "origin": Origin.CONDUCTOR.value}
    Attribute.objects.update_or_create(
        deployable=part, key=traits.KEY, defaults=values | {"updated_at": now}, create_defaults=values
    )
    was, part.bitstream_id, part.updated_at = part.bitstream_id, bitstream, now
    part.save(update_fields=["bitstream_id", "updated_at"])
    conductor.record(
        "device.programmed",
        Source.SYSTEM,
        actor,
        host=device.host,
        subject=(device.uuid, str(device)),
        changes={
            f"{part.name} bitstream": [str(was) if was else None, str(bitstream)],
            f"{part.name} function": [before, trait],
        },
        reason=f"image {image.get('name') or image['id']}",
    )
    conductor.providers_changed([device.host])


def unclear(device: int, deployable_name: str) -> None:
    """Forget the bitstream of a deployable (all of the device if the name is ''), because its content is unknown.

    Records one event if any deployable had a bitstream. Call it inside `conductor.writing()`.
    """
    parts = Deployable.objects.filter(device=device, bitstream_id__isnull=False).select_related("device__host")
    held = list(parts.filter(name=deployable_name) if deployable_name else parts)
    Deployable.objects.filter(id__in=[part.pk for part in held]).update(bitstream_id=None, updated_at=datetime.now(UTC))
    if held:
        about = held[0].device
        conductor.record(
            "device.unclear",
            Source.SYSTEM,
            placing.JOB,
            host=about.host,
            subject=(about.uuid, str(about)),
            changes={f"{part.name} bitstream": [str(part.bitstream_id), None] for part in held},
            reason="programming was interrupted, and its result is unknown",
        )


_waiting: dict[str, list[threading.Event]] = {}
_lock = threading.Lock()
_subscribed = False


def until_ended(uuid: UUID, seconds: float) -> Command | None:
    """Wait until a command has ended, or for at most `seconds`; return it as it is then, None if it does not exist.

    The connection to the database is closed while waiting, unless the caller is in a transaction. Notifications wake
    this function; in case one is lost it also reads the command every `POLL_S` seconds.
    """
    news, end = threading.Event(), time.monotonic() + seconds
    _enter(str(uuid), news)
    try:
        while True:
            news.clear()
            command = Command.objects.filter(uuid=uuid).first()
            left = end - time.monotonic()
            if command is None or command.ended_at is not None or left <= 0:
                return command
            if not connection.in_atomic_block:
                connection.close()
            news.wait(min(left, POLL_S))
    finally:
        with _lock:
            _waiting[str(uuid)].remove(news)
            if not _waiting[str(uuid)]:
                del _waiting[str(uuid)]


def _enter(uuid: str, news: threading.Event) -> None:
    """Register a waiting thread; at the first call also subscribe to the notifications about commands."""
    global _subscribed
    with _lock:
        _waiting.setdefault(uuid, []).append(news)
        first, _subscribed = not _subscribed, True
    if first:
        pubsub.subscribe(placing.CHANGED, _heard)
    pubsub.listen()


def _heard(uuid: str | None) -> None:
    """Wake the threads that wait for this command, or all if `uuid` is None (notifications may have been lost)."""
    with _lock:
        waiting = [*_waiting.values()] if uuid is None else [_waiting.get(uuid, [])]
        for events in waiting:
            for news in events:
                news.set()
