"""Store the images that devices are programmed with: uploaded ones and copies of Glance's. Each has a row and a file.

The row is written after the file, so a row means that its file is complete and checked.
"""

from __future__ import annotations

import fcntl
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
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource
from accelerators.models import Command, Image, ImageSource
from accelerators.models.commands import COMMAND_IS_OPEN
from drivers.files import sync_directory

CHUNK_BYTES = 1024 * 1024
MAX_PROPERTIES, MAX_KEY, MAX_VALUE = 64, 255, 1024
MAX_UPLOADS = 1000
"""Maximum number of uploaded images."""
MAX_COPIES = 64
MAX_COPIES_BYTES = 8 * 1024**3
"""Copies of Glance's images beyond this size in all (or beyond MAX_COPIES) are deleted, the longest unused first. The
newest copy always stays, and so do copies that an open command needs."""
ABANDONED_S = 24 * 3600.0
"""A file without a row is deleted when nothing has been written to it for this many seconds."""


def get_image_directory() -> Path:
    """Return the directory of the image files; it is created if it does not exist, readable by our user only."""
    image_directory: Path = settings.KEYS.state_path / "images"
    image_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    return image_directory


def get_max_image_bytes() -> int:
    """Return the maximum size of an image in bytes (CYBORG_IMAGE_MAX_BYTES)."""
    max_bytes: int = settings.KEYS.image_max_bytes
    return max_bytes


def get_image_path(uuid: UUID | str) -> Path:
    """Return the path of an image's complete file, which need not exist."""
    return get_image_directory() / str(uuid)


def has_complete_file(image: Image) -> bool:
    """Return whether the image's file exists on this machine and has the right size; its content is not checked."""
    try:
        return get_image_path(image.uuid).stat().st_size == image.size
    except OSError:
        return False


def to_image_ref(image: Image) -> dict[str, Any]:
    """Describe an image for the arguments of a command, with the fields of `agents.wire.ImageRef`."""
    return {
        "id": str(image.uuid),
        "size": image.size,
        "sha256": image.sha256,
        "name": image.name,
        "properties": image.properties,
    }


def check_properties(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Check the properties of an image and return them as a dict; of equal keys the last one counts.

    Raises RefusedError INVALID for more than MAX_PROPERTIES, for an empty key, for a key above MAX_KEY characters or a
    value above MAX_VALUE, and for NUL in either.
    """
    checked: dict[str, str] = {}
    for key, value in pairs:
        if not key or len(key) > MAX_KEY or len(value) > MAX_VALUE or "\0" in key + value:
            bounds = f"a key of 1 to {MAX_KEY} characters and a value of up to {MAX_VALUE}, without NUL"
            raise RefusedError(RefusalReason.INVALID, f"Property {key[:64]!r}: write KEY=VALUE, {bounds}.")
        checked[key] = value
    if len(checked) > MAX_PROPERTIES:
        raise RefusedError(RefusalReason.INVALID, f"An image has at most {MAX_PROPERTIES} properties.")
    return checked


def store_upload(
    chunks: Iterable[bytes],
    size: int | None,
    name: str,
    properties: Mapping[str, str],
    caller: Caller,
    source: EventSource,
) -> Image:
    """Store an uploaded image of exactly `size` bytes: its file, its row and an event. Returns the row.

    `size` is None if it is not known before the last chunk; `chunks` must then raise an exception if bytes are missing.
    No transaction is open while the bytes arrive. Raises RefusedError, and then stores nothing: INVALID for a wrong
    size, name or properties; CONFLICT if there are MAX_UPLOADS uploaded images; UNAVAILABLE if the file cannot be
    written.
    """
    if size is not None:
        _check_size(size)
    if len(name) > 255 or "\0" in name:
        raise RefusedError(RefusalReason.INVALID, "An image's name has at most 255 characters, without NUL.")
    checked_properties = check_properties(properties.items())
    if Image.objects.filter(source=ImageSource.UPLOAD).count() >= MAX_UPLOADS:
        raise RefusedError(RefusalReason.CONFLICT, f"There are {MAX_UPLOADS} uploaded images: remove some first.")
    image = Image(name=name, properties=checked_properties, source=ImageSource.UPLOAD.value, by=caller.name[:255])
    image.uuid = uuid4()
    try:
        with open_partial_file(image.uuid, "wb") as file:
            image.sha256, image.size = _write_chunks(chunks, size, file)
            finalize_file(file, image.uuid)
        with conductor.writing():
            image.save(force_insert=True)
            _record_image_event("image.added", image, source, caller.name, f"uploaded, {image.size} bytes")
    except BaseException:
        get_partial_path(image.uuid).unlink(missing_ok=True)
        get_image_path(image.uuid).unlink(missing_ok=True)
        raise
    return image


def delete_image(uuid: UUID, caller: Caller, source: EventSource) -> None:
    """Delete an image's row and then its file, and record an event; locks the row.

    Raises RefusedError: NOT_FOUND, or CONFLICT while an open command needs the image.
    """
    with conductor.writing():
        image = Image.objects.select_for_update().filter(uuid=uuid).first()
        if image is None:
            raise RefusedError(RefusalReason.NOT_FOUND, f"Image not found with uuid={uuid}")
        if blocking_command := Command.objects.filter(COMMAND_IS_OPEN, arguments__image__id=str(uuid)).first():
            message = (
                f"Command {blocking_command.uuid} ({blocking_command}) needs image {uuid}:"
                " wait until the command has ended."
            )
            raise RefusedError(RefusalReason.CONFLICT, message)
        image.delete()
        _record_image_event("image.removed", image, source, caller.name, "")
    get_image_path(uuid).unlink(missing_ok=True)


def add_glance_copy(uuid: UUID, name: str, size: int, sha256: str, properties: Mapping[str, str]) -> Image:
    """Write the row of an image that was copied from Glance, and delete copies that exceed the limits.

    Returns the row; a row with this uuid is overwritten. The file must be in place already (`finalize_file`). Records
    an event for the copy and for each deleted one. Also deletes abandoned files (ABANDONED_S).
    """
    values = {"name": name, "size": size, "sha256": sha256, "properties": dict(properties), "by": "glance"}
    with conductor.writing():
        image, _ = Image.objects.update_or_create(uuid=uuid, defaults=values | {"source": ImageSource.GLANCE.value})
        _record_image_event("image.added", image, EventSource.SYSTEM, "images", f"copied from Glance, {size} bytes")
        deleted = _choose_copies_to_delete(image)
        Image.objects.filter(id__in=[old.pk for old in deleted]).delete()
        for deleted_image in deleted:
            _record_image_event(
                "image.removed",
                deleted_image,
                EventSource.SYSTEM,
                "images",
                "this copy of a Glance image was deleted to free space",
            )
    for deleted_image in deleted:
        get_image_path(deleted_image.uuid).unlink(missing_ok=True)
    _delete_abandoned_files()
    return image


def _choose_copies_to_delete(newest: Image) -> list[Image]:
    """Return the copies of Glance's images to delete, so that MAX_COPIES and MAX_COPIES_BYTES hold.

    The longest unused are deleted first. The newest copy and copies that an open command uses are never among them,
    even if they alone exceed the limits. Only reads.
    """
    open_commands = Command.objects.filter(COMMAND_IS_OPEN, arguments__image__id__isnull=False)
    protected_uuids = {*open_commands.values_list("arguments__image__id", flat=True), str(newest.uuid)}
    to_delete: list[Image] = []
    copies = [*Image.objects.filter(source=ImageSource.GLANCE).order_by("-used_at", "-id")]
    copies_left, bytes_left = MAX_COPIES, MAX_COPIES_BYTES
    for copy in sorted(copies, key=lambda copy: str(copy.uuid) not in protected_uuids):
        copies_left, bytes_left = copies_left - 1, bytes_left - copy.size
        if str(copy.uuid) not in protected_uuids and (copies_left < 0 or bytes_left < 0):
            to_delete.append(copy)
    return to_delete


def _delete_abandoned_files() -> None:
    """Delete files without a row to which nothing was written for ABANDONED_S: killed processes left them.

    A file that cannot be deleted is skipped.
    """
    known_uuids = {str(uuid) for uuid in Image.objects.values_list("uuid", flat=True)}
    for file in get_image_directory().iterdir():
        with suppress(OSError):
            if file.name not in known_uuids and time.time() - file.stat().st_mtime > ABANDONED_S:
                file.unlink()


def get_partial_path(uuid: UUID | str) -> Path:
    """Return the path of an image's file while it is incomplete; the file need not exist."""
    return get_image_directory() / f"{uuid}.part"


@contextmanager
def open_partial_file(uuid: UUID | str, mode: str) -> Iterator[IO[bytes]]:
    """Open an image's incomplete file at its beginning, to read and write, and lock it; create it if it does not exist.

    Mode "wb" empties the file, "r+b" keeps the bytes of an earlier transfer. If an OSError occurs here or inside the
    block, deletes the file and raises RefusedError UNAVAILABLE. Also raises RefusedError UNAVAILABLE if another
    transfer has locked the file, and then leaves it alone.
    """
    flags = os.O_RDWR | os.O_CREAT | (os.O_TRUNC if mode == "wb" else 0)
    try:
        with os.fdopen(os.open(get_partial_path(uuid), flags, 0o600), mode) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                text = f"An earlier transfer of image {uuid} has not ended yet."
                raise RefusedError(RefusalReason.UNAVAILABLE, text) from None
            yield file
    except OSError as error:
        get_partial_path(uuid).unlink(missing_ok=True)
        raise RefusedError(
            RefusalReason.UNAVAILABLE, f"The image cannot be stored in {get_image_directory()}: {error.strerror}."
        ) from error


def finalize_file(file: IO[bytes], uuid: UUID | str) -> None:
    """Flush a complete, checked file to the disk and give it its final name, so that it survives a power cut.

    `file` is the open file of `open_partial_file`. Raises OSError if the disk fails or is full.
    """
    file.flush()
    os.fsync(file.fileno())
    os.rename(get_partial_path(uuid), get_image_path(uuid))
    sync_directory(get_image_directory())


def _check_size(size: int) -> None:
    """Raise RefusedError INVALID if an image must not have this many bytes."""
    if not 0 < size <= get_max_image_bytes():
        raise RefusedError(
            RefusalReason.INVALID,
            f"An image must have 1 to {get_max_image_bytes()} bytes (CYBORG_IMAGE_MAX_BYTES); this one has {size}.",
        )


def _write_chunks(chunks: Iterable[bytes], size: int | None, file: IO[bytes]) -> tuple[str, int]:
    """Write the chunks to the file and return the SHA-256 and the number of their bytes.

    Raises RefusedError INVALID if these are not `size` bytes; if that is None, for a size that no image may have, as
    soon as it is exceeded.
    """
    digest, received_bytes = hashlib.sha256(), 0
    max_bytes = get_max_image_bytes() if size is None else size
    for chunk in chunks:
        received_bytes += len(chunk)
        if received_bytes > max_bytes:
            break
        digest.update(chunk)
        file.write(chunk)
    if size is None:
        _check_size(received_bytes)
    elif received_bytes != size:
        raise RefusedError(
            RefusalReason.INVALID, f"{size} bytes were announced, {received_bytes} came: send the image again."
        )
    return digest.hexdigest(), received_bytes


def _record_image_event(action: str, image: Image, source: EventSource, actor: str, reason: str) -> None:
    """Record an event about an image, with its size and SHA-256 as the values before (`image.removed`) or after."""
    facts = {"size": image.size, "sha256": image.sha256}
    changes = {name: [value, None] if action == "image.removed" else [None, value] for name, value in facts.items()}
    conductor.record_event(action, source, actor, subject=(image.uuid, str(image)), changes=changes, reason=reason)
