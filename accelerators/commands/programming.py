"""Store what a deployable contains after it was programmed, and wait for a command to end.

`store_programmed_image` and `end_programs` must be called in the transaction that ends the command.
`wait_until_ended` waits without holding a database connection.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any
from uuid import UUID

from django.db import connection
from django.db.models import Exists, OuterRef, Q

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.domain import traits
from accelerators.domain.groups import FUNCTION_KEY
from accelerators.domain.states import AttributeOrigin, EventSource
from accelerators.models import Attribute, Command, Deployable, Device
from accelerators.runtime import database_clock, pubsub

POLL_S = 1.0
"""Seconds after which `wait_until_ended` reads the command again, in case a notification was lost."""


def store_programmed_image(
    device: Device, deployable_name: str, image: Mapping[str, Any], actor: str, *, in_flash: bool = False
) -> None:
    """Store the image's bitstream as the content of a deployable, and the image's function as its only function trait.

    If `deployable_name` is '', all deployables of the device get it. Deployables that are missing are skipped. `image`
    has the fields of `agents.wire.ImageRef`. `in_flash` says that the content survives resets and reboots. Locks the
    deployables FOR NO KEY UPDATE. Records an event for each and raises a `provider` intent for the host. Call it inside
    `conductor.writing()`, with the device's host locked first.
    """
    with conductor.writing():
        locked = Deployable.objects.select_for_update(of=("self",), no_key=True)
        deployables = locked.filter(device=device, missing_since__isnull=True)
        selected = deployables.filter(name=deployable_name) if deployable_name else deployables
        for deployable in selected.select_related("device__host").order_by("id"):
            _store_image_of_deployable(deployable, image, actor, in_flash)


def _store_image_of_deployable(deployable: Deployable, image: Mapping[str, Any], actor: str, in_flash: bool) -> None:
    """Store bitstream and function trait of one deployable, with an event and a `provider` intent.

    Without a function id in the image's properties, the image's own id names the function.
    """
    device, bitstream = deployable.device, UUID(image["id"])
    function = image.get("properties", {}).get(FUNCTION_KEY) or image["id"]
    trait = traits.build_function_trait(deployable.driver_name or device.driver, function)
    old_traits = Attribute.objects.filter(
        deployable=deployable, value__startswith=traits.FUNCTION_TRAIT_PREFIX
    ).order_by("id")
    before = ", ".join(old_traits.values_list("value", flat=True)) or None
    old_traits.exclude(key=traits.FUNCTION_TRAIT_KEY).delete()
    now = database_clock.now()
    values = {"value": trait, "origin": AttributeOrigin.CONDUCTOR.value}
    Attribute.objects.update_or_create(
        deployable=deployable,
        key=traits.FUNCTION_TRAIT_KEY,
        defaults=values | {"updated_at": now},
        create_defaults=values,
    )
    old_bitstream, deployable.bitstream_id, deployable.updated_at = deployable.bitstream_id, bitstream, now
    deployable.bitstream_in_flash = in_flash
    deployable.save(update_fields=["bitstream_id", "bitstream_in_flash", "updated_at"])
    conductor.record_event(
        "device.programmed",
        EventSource.SYSTEM,
        actor,
        host=device.host,
        subject=(device.uuid, str(device)),
        changes={
            f"{deployable.name} bitstream": [str(old_bitstream) if old_bitstream else None, str(bitstream)],
            f"{deployable.name} function": [before, trait],
        },
        reason=f"image {image.get('name') or image['id']}",
    )
    conductor.raise_provider_intents([device.host])


def end_programs(device: int, deployable_name: str, reason: str, *, also_in_flash: bool) -> None:
    """Delete the stored bitstream and function trait of a deployable, because its program has ended.

    If the name is '', this is done for all deployables of the device. Deployables whose program is in flash memory are
    left as they are, unless `also_in_flash` is true. If anything is deleted, one event with the `reason` is recorded.
    If a trait is deleted, the host's provider is written again, and its next report is compared in full, so that the
    function traits that the driver reports come back. Call it inside `conductor.writing()`, with the device's host
    locked first.
    """
    trait_rows = Attribute.objects.filter(key=traits.FUNCTION_TRAIT_KEY, origin=AttributeOrigin.CONDUCTOR.value)
    programmed = Deployable.objects.filter(
        Q(bitstream_id__isnull=False) | Exists(trait_rows.filter(deployable=OuterRef("pk"))), device=device
    ).select_related("device__host")
    if deployable_name:
        programmed = programmed.filter(name=deployable_name)
    ended = list(programmed if also_in_flash else programmed.filter(bitstream_in_flash=False))
    if not ended:
        return
    changes: dict[str, Any] = {
        f"{deployable.name} bitstream": [deployable.bitstream_id and str(deployable.bitstream_id), None]
        for deployable in ended
    }
    ended_traits = trait_rows.filter(deployable__in=ended)
    for name, trait in ended_traits.values_list("deployable__name", "value"):
        changes[f"{name} function"] = [trait, None]
    Deployable.objects.filter(id__in=[part.pk for part in ended]).update(
        bitstream_id=None, bitstream_in_flash=False, updated_at=database_clock.now()
    )
    device_row, host = ended[0].device, ended[0].device.host
    if ended_traits.delete()[0]:
        conductor.forget_applied_report(host)
        conductor.raise_provider_intents([host])
    conductor.record_event(
        "device.unclear",
        EventSource.SYSTEM,
        command_queue.COMMANDS_JOB,
        host=host,
        subject=(device_row.uuid, str(device_row)),
        changes=changes,
        reason=reason,
    )


_waiters: dict[str, list[threading.Event]] = {}
_lock = threading.Lock()
_subscribed = False


def wait_until_ended(uuid: UUID, seconds: float) -> Command | None:
    """Wait until a command has ended, or for at most `seconds`; return it as it is then, None if it does not exist.

    The connection to the database is closed while waiting, unless the caller is in a transaction. Notifications wake
    this function; in case one is lost it also reads the command every `POLL_S` seconds.
    """
    changed, give_up_at = threading.Event(), time.monotonic() + seconds
    _add_waiter(str(uuid), changed)
    try:
        while True:
            changed.clear()
            command = Command.objects.filter(uuid=uuid).first()
            remaining_s = give_up_at - time.monotonic()
            if command is None or command.ended_at is not None or remaining_s <= 0:
                return command
            if not connection.in_atomic_block:
                connection.close()
            changed.wait(min(remaining_s, POLL_S))
    finally:
        with _lock:
            _waiters[str(uuid)].remove(changed)
            if not _waiters[str(uuid)]:
                del _waiters[str(uuid)]


def _add_waiter(uuid: str, changed: threading.Event) -> None:
    """Register a waiting thread; at the first call also subscribe to the notifications about commands."""
    global _subscribed
    with _lock:
        _waiters.setdefault(uuid, []).append(changed)
        is_first, _subscribed = not _subscribed, True
    if is_first:
        pubsub.subscribe(command_queue.COMMAND_CHANGED_TOPIC, _wake_waiters)
    pubsub.start_listener()


def _wake_waiters(uuid: str | None) -> None:
    """Wake the threads that wait for this command, or all if `uuid` is None (notifications may have been lost)."""
    with _lock:
        waiters = [*_waiters.values()] if uuid is None else [_waiters.get(uuid, [])]
        for events in waiters:
            for changed in events:
                changed.set()
