"""Store the images that devices are programmed with: uploaded ones and copies of Glance's. Each has a row and a file.

The row is written after the file, so a row means that its file is complete and checked.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any
from uuid import UUID, uuid4

from django.conf import settings

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import Source
from accelerators.models import Command, Image, ImageSource
from accelerators.models.commands import OPEN
from drivers.files import sync_directory

CHUNK = 1024 * 1024
MAX_PROPERTIES, MAX_KEY, MAX_VALUE = 64, 255, 1024
MAX_UPLOADS = 1000
"""Maximum number of uploaded images."""
MAX_COPIES = 64
COPIES_BYTES = 8 * 1024**3
"""Copies of Glance's images beyond this size in all (or beyond MAX_COPIES) are deleted, the longest unused first. The
newest copy always stays."""
ABANDONED_S = 24 * 3600.0
"""A file without a row is deleted when nothing has been written to it for this many seconds."""


def directory() -> Path:
    """Return the directory of the image files; it is created if it does not exist, readable by our user only."""
    found: Path = settings.KEYS.state / "images"
    found.mkdir(mode=0o700, parents=True, exist_ok=True)
    return found


def limit() -> int:
    """Return the maximum size of an image in bytes (CYBORG_IMAGE_MAX_BYTES)."""
    most: int = settings.KEYS.image_max_bytes
    return most


def path(uuid: UUID | str) -> Path:
    """Return the path of an image's complete file."""
    return directory() / str(uuid)


def is_here(image: Image) -> bool:
    """Return whether the image's file exists on this machine and has the right size."""
    try:
        return path(image.uuid).stat().st_size == image.size
    except OSError:
        return False


def as_ref(image: Image) -> dict[str, Any]:
    """Describe an image for the arguments of a command, with the fields of `agents.wire.ImageRef`."""
    return {
        "id": str(image.uuid),
        "size": image.size,
        "sha256": image.sha256,
        "name": image.name,
        "properties": image.properties,
    }


def check_properties(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Check the properties of an image and return them as a dict. Raises RefusedError INVALID if one breaks a limit."""
    checked: dict[str, str] = {}
    for key, value in pairs:
        if not key or len(key) > MAX_KEY or len(value) > MAX_VALUE or "\0" in key + value:
            bounds = f"a key of 1 to {MAX_KEY} characters and a value of up to {MAX_VALUE}, without NUL"
            raise RefusedError(Reason.INVALID, f"Property {key[:64]!r}: write KEY=VALUE, {bounds}.")
        checked[key] = value
    if len(checked) > MAX_PROPERTIES:
        raise RefusedError(Reason.INVALID, f"An image has at most {MAX_PROPERTIES} properties.")
    return checked


def upload(
    chunks: Iterable[bytes], size: int, name: str, properties: Mapping[str, str], caller: Caller, source: Source
) -> Image:
    """Store an uploaded image of exactly `size` bytes: its file, its row and an event. Returns the row.

    No transaction is open while the bytes arrive. Raises RefusedError, and then stores nothing: INVALID for a wrong
    size, name or properties; CONFLICT if there are MAX_UPLOADS uploaded images; AWAY if the file cannot be written.
    """
    if not 0 < size <= limit():
        raise RefusedError(
            Reason.INVALID, f"An image must have 1 to {limit()} bytes (CYBORG_IMAGE_MAX_BYTES); this one has {size}."
        )
    if len(name) > 255 or "\0" in name:
        raise RefusedError(Reason.INVALID, "An image's name has at most 255 characters, without NUL.")
    words = check_properties(properties.items())
    if Image.objects.filter(source=ImageSource.UPLOAD).count() >= MAX_UPLOADS:
        raise RefusedError(Reason.CONFLICT, f"There are {MAX_UPLOADS} uploaded images: remove some first.")
    image = Image(name=name, size=size, properties=words, source=ImageSource.UPLOAD.value, by=caller.name[:255])
    image.uuid = uuid4()
    try:
        with stored(image.uuid, "wb") as file:
            image.sha256 = _receive(chunks, size, file)
            keep(file, image.uuid)
        with conductor.writing():
            image.save(force_insert=True)
            _record("image.added", image, source, caller.name, f"uploaded, {size} bytes")
    except BaseException:
        part(image.uuid).unlink(missing_ok=True)
        path(image.uuid).unlink(missing_ok=True)
        raise
    return image


def remove(uuid: UUID, caller: Caller, source: Source) -> None:
    """Delete an image's row and its file. Raises RefusedError: UNKNOWN, or CONFLICT while an open command needs it."""
    with conductor.writing():
        image = Image.objects.select_for_update().filter(uuid=uuid).first()
        if image is None:
            raise RefusedError(Reason.UNKNOWN, f"Image not found with uuid={uuid}")
        if wanted := Command.objects.filter(OPEN, arguments__image__id=str(uuid)).first():
            text = f"Command {wanted.uuid} ({wanted}) needs image {uuid}: wait until the command has ended."
            raise RefusedError(Reason.CONFLICT, text)
        image.delete()
        _record("image.removed", image, source, caller.name, "")
    path(uuid).unlink(missing_ok=True)


def add_copy(uuid: UUID, name: str, size: int, sha256: str, properties: Mapping[str, str]) -> Image:
    """Write the row of an image that was copied from Glance, and delete older copies that exceed the limits.

    Returns the row. The file must be in place already (`finalize_file`). Also deletes abandoned files (ABANDONED_S).
    """
    values = {"name": name, "size": size, "sha256": sha256, "properties": dict(properties), "by": "glance"}
    with conductor.writing():
        image, _ = Image.objects.update_or_create(uuid=uuid, defaults=values | {"source": ImageSource.GLANCE.value})
        _record("image.added", image, Source.SYSTEM, "images", f"copied from Glance, {size} bytes")
        dropped = _longest_unused(image)
        Image.objects.filter(id__in=[old.pk for old in dropped]).delete()
        for old in dropped:
            _record(
                "image.removed", old, Source.SYSTEM, "images", "this copy of a Glance image was deleted to free space"
            )
    for old in dropped:
        path(old.uuid).unlink(missing_ok=True)
    _tidy()
    return image


def _longest_unused(newest: Image) -> list[Image]:
    """Return the copies of Glance's images to delete, so that MAX_COPIES and MAX_COPIES_BYTES hold.

    The longest unused are deleted first. The newest copy and copies that an open command uses are never among them.
    """
    wanted = Command.objects.filter(OPEN, arguments__image__id__isnull=False)
    kept = {*wanted.values_list("arguments__image__id", flat=True), str(newest.uuid)}
    dropped: list[Image] = []
    copies = [*Image.objects.filter(source=ImageSource.GLANCE).order_by("-used_at", "-id")]
    left, room = MAX_COPIES, COPIES_BYTES
    for copy in sorted(copies, key=lambda copy: str(copy.uuid) not in kept):
        left, room = left - 1, room - copy.size
        if str(copy.uuid) not in kept and (left < 0 or room < 0):
            dropped.append(copy)
    return dropped


def _tidy() -> None:
    """Delete files without a row to which nothing was written for ABANDONED_S: killed processes left them."""
    known = {str(uuid) for uuid in Image.objects.values_list("uuid", flat=True)}
    for file in directory().iterdir():
        with suppress(OSError):
            if file.name not in known and time.time() - file.stat().st_mtime > ABANDONED_S:
                file.unlink()


def part(uuid: UUID | str) -> Path:
    """Return the path of an image's file while it is incomplete."""
    return directory() / f"{uuid}.part"


@contextmanager
def stored(uuid: UUID | str, mode: str) -> Iterator[IO[bytes]]:
    """Open an image's incomplete file for writing: mode "wb" empties it, "r+b" continues an earlier transfer.

    If an OSError occurs inside the block, deletes the file and raises RefusedError AWAY.
    """
    flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if mode == "wb" else 0)
    try:
        with os.fdopen(os.open(part(uuid), flags, 0o600), mode) as file:
            yield file
    except OSError as error:
        part(uuid).unlink(missing_ok=True)
        raise RefusedError(Reason.AWAY, f"The image cannot be stored in {directory()}: {error.strerror}.") from error


def keep(file: IO[bytes], uuid: UUID | str) -> None:
    """Flush a complete, checked file to the disk and give it its final name, so that it survives a power cut."""
    file.flush()
    os.fsync(file.fileno())
    os.rename(part(uuid), path(uuid))
    sync_directory(directory())


def _receive(chunks: Iterable[bytes], size: int, file: IO[bytes]) -> str:
    """Write `size` bytes to the file and return their SHA-256. Raises RefusedError INVALID if fewer or more arrive."""
    digest, got = hashlib.sha256(), 0
    for chunk in chunks:
        got += len(chunk)
        if got > size:
            break
        digest.update(chunk)
        file.write(chunk)
    if got != size:
        raise RefusedError(Reason.INVALID, f"{size} bytes were announced, {got} came: send the image again.")
    return digest.hexdigest()


def _record(action: str, image: Image, source: Source, actor: str, reason: str) -> None:
    facts = {"size": image.size, "sha256": image.sha256}
    changes = {name: [value, None] if action == "image.removed" else [None, value] for name, value in facts.items()}
    conductor.record(action, source, actor, subject=(image.uuid, str(image)), changes=changes, reason=reason)
