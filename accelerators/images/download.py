"""The job `images`: give commands the images they wait for, and fetch images that are not stored here from Glance.

Images are fetched in threads that do not use the database, and no transaction is open meanwhile. A fetch continues
where the last one ended, so an image may take longer than the time slice of one run (SLICE_S). A run ends in time also
if the image service answers slowly or not at all: then it leaves its threads alone. A thread that is left alone ends
after the part that it is receiving. Until then it keeps its lock on the incomplete file, so no second one writes there.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Protocol, TypeVar
from uuid import UUID

from django.db.models import Q

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.domain.errors import AcceleratorsError, RefusedError
from accelerators.domain.groups import BITSTREAM_KEY, FUNCTION_KEY
from accelerators.domain.states import CommandState
from accelerators.images import store
from accelerators.models import Command, Image, ImageSource
from accelerators.runtime import database_clock, jobs
from accelerators.runtime.registry import Registry
from drivers.isolation.threads import call_in_parallel, is_ended

SLICE_S = 25.0
"""Seconds after which a run of the job ends; it wakes itself again if there is more to do."""
LOOKUP_TIMEOUT_S = 10.0
"""Seconds that all questions of one step to the image service may take together, so that time is left for fetches."""
ABANDON_AFTER_S = 2.0
"""Seconds after the end of the time slice for which fetches that have not ended are still waited for."""
NO_ANSWER_IN_TIME = "it did not answer in time"
MAX_PARALLEL_FETCHES = 4
"""Number of images that are fetched at the same time."""
MAX_IMAGES_NAMED = 3
"""Number of images with the same function that a refusal names."""
IS_WAITING_FOR_IMAGE = Q(state=CommandState.PREPARING.value, answered_at__isnull=True)
DIGEST_ALGORITHMS = ("sha256", "sha512")

WantedImage = tuple[str, str]
"""How a command names its image: `bitstream_id` or `function_id`, and the value."""


class ImageUnusableError(AcceleratorsError):
    """The image does not exist or cannot be used; the text says why. A retry would not help."""


class ImageServiceUnavailableError(AcceleratorsError):
    """The image cannot be fetched now; the text says why. A later retry may succeed."""


@dataclass(frozen=True)
class ServiceImage:
    """An image as the image service describes it. `size` is in bytes.

    `digest` is the digest of the image's bytes in hex, `algorithm` the hash algorithm; both are '' if the service names
    none that can be checked.
    """

    uuid: str
    name: str
    size: int
    properties: Mapping[str, str] = field(default_factory=dict)
    algorithm: str = ""
    digest: str = ""


_AnyImage = TypeVar("_AnyImage", Image, ServiceImage)


class ImageService(Protocol):
    """The image service, Glance. Every method may raise ImageUnusableError or ImageServiceUnavailableError."""

    def image(self, uuid: str) -> ServiceImage:
        """Return the description of the image with this id."""
        ...

    def with_function(self, function: str) -> Sequence[ServiceImage]:
        """Return the images whose property `accel:function_id` is `function`; if there are several, at least two of
        them."""
        ...

    def read(self, uuid: str, start: int) -> tuple[int, Iterator[bytes]]:
        """Return the offset of the first byte, and the image's bytes from there on, in chunks.

        The offset is `start`, or 0 if the service cannot begin at `start`.
        """
        ...


IMAGE_SERVICE: Registry[ImageService] = Registry("image service", single=True)
"""The service from which the job `images` fetches. Without it, only uploaded images can be used."""


def run() -> None:
    """Run the job `images`: try each waiting command once, for SLICE_S at most.

    Only one process fetches images at the same time; the others only give commands the images that are stored. The job
    wakes itself again if a fetch is unfinished or a command was not tried.
    """
    jobs.clear_tick("images")
    deadline, tried_ids, unfinished = time.monotonic() + SLICE_S, set[int](), False
    while (waiting := _load_waiting_commands(tried_ids)) and time.monotonic() < deadline:
        tried_ids |= {command_id for command_ids in waiting.values() for command_id in command_ids}
        missing = _give_stored_images(waiting)
        # Without the lock there is nothing to do: the process that holds it looks for waiting commands again.
        with jobs.try_connection_lock("images") as has_lock:
            if missing and has_lock:
                unfinished |= _fetch_missing_images(missing, deadline)
    if unfinished or waiting:
        jobs.enqueue_job("images")


def _load_waiting_commands(tried_ids: set[int]) -> dict[WantedImage, list[int]]:
    """Return the images that commands wait for, with the ids of these commands; leave out those in `tried_ids`."""
    waiting: dict[WantedImage, list[int]] = {}
    rows = Command.objects.filter(IS_WAITING_FOR_IMAGE).exclude(id__in=tried_ids).order_by("id")
    for command_id, wanted in rows.values_list("id", "arguments__wanted"):
        kind, value = next(iter((wanted or {}).items()), ("", ""))
        waiting.setdefault((str(kind), str(value)), []).append(command_id)
    return waiting


def _give_stored_images(waiting: Mapping[WantedImage, list[int]]) -> dict[WantedImage, list[int]]:
    """Give commands the images that are stored here; return the images that must be fetched, with their commands (ids).

    Commands are refused if their image is ambiguous or invalid, or if it is not stored and no image service is
    configured.
    """
    missing: dict[WantedImage, list[int]] = {}
    for wanted, command_ids in waiting.items():
        try:
            image = _find_stored_image(*wanted)
        except ImageUnusableError as error:
            _refuse_commands(command_ids, str(error))
            continue
        if image:
            _give_image(command_ids, image)
        elif not IMAGE_SERVICE:
            _refuse_commands(
                command_ids,
                f"no image with {_describe_wanted_image(*wanted)} is uploaded, and no image service is configured",
            )
        else:
            missing[wanted] = command_ids
    return missing


def _find_stored_image(kind: str, value: str) -> Image | None:
    """Return the stored image that a command names; None if it has to be fetched.

    An image that is named by its function is found only if it was uploaded: for a copy it is unknown whether the
    service has other images with the same function. Raises ImageUnusableError for an invalid id, if several images have
    the function, or if the command names no image.
    """
    if kind == "bitstream_id":
        try:
            image = Image.objects.filter(uuid=UUID(value)).first()
        except ValueError:
            raise ImageUnusableError(f"{value[:64]!r} is not the id of an image") from None
        return image if image and store.has_complete_file(image) else None
    if kind != "function_id":
        raise ImageUnusableError("the command does not say which image it wants")
    uploaded = Image.objects.filter(source=ImageSource.UPLOAD, properties__contains={FUNCTION_KEY: value})
    complete = (image for image in uploaded.iterator() if store.has_complete_file(image))
    return _require_at_most_one(list(islice(complete, MAX_IMAGES_NAMED)), value)


def _require_at_most_one(images: Sequence[_AnyImage], function: str) -> _AnyImage | None:
    """Return the only image with this function, or None. Raises ImageUnusableError if there are several."""
    if len(images) > 1:
        uuids = ", ".join(str(one.uuid) for one in images)
        raise ImageUnusableError(
            f"several images have {_describe_wanted_image('function_id', function)} ({uuids}):"
            f" name one by {BITSTREAM_KEY}"
        )
    return images[0] if images else None


def _describe_wanted_image(kind: str, value: str) -> str:
    """Describe a wanted image for messages, by its id or as `accel:function_id=VALUE`."""
    return f"{FUNCTION_KEY}={value[:255]}" if kind == "function_id" else f"the id {value[:255]}"


def _fetch_missing_images(missing: Mapping[WantedImage, list[int]], deadline: float) -> bool:
    """Fetch these images from the service, until the deadline; return True if the deadline ended a fetch or came before
    it.

    Commands whose image is complete get it. Commands whose image is unusable are refused. All others show why they
    wait. A fetch that failed for another reason does not make the result True: it is tried again when the job is woken
    the next time, after at most a minute (`jobs.backstop`).
    """
    if deadline <= time.monotonic():
        return True
    service = IMAGE_SERVICE.only()
    offers, command_ids_by_uuid, unfinished = _find_service_images(service, missing, deadline)
    fetches = call_in_parallel(
        lambda uuid: _fetch_image(service, offers[uuid], deadline),
        offers,
        deadline - time.monotonic() + ABANDON_AFTER_S,
        MAX_PARALLEL_FETCHES,
    )
    for uuid, offer in offers.items():
        command_ids = command_ids_by_uuid[uuid]
        if fetches[uuid].cancelled():
            unfinished = True
            continue
        try:
            if not is_ended(fetches[uuid]):
                raise ImageServiceUnavailableError(NO_ANSWER_IN_TIME)
            sha256, received_bytes = fetches[uuid].result()
        except ImageUnusableError as error:
            _refuse_commands(command_ids, str(error))
        except (ImageServiceUnavailableError, RefusedError) as error:
            _set_progress(command_ids, f"fetching image {uuid}: {error}")
        else:
            if sha256:
                _give_image(
                    command_ids, store.add_glance_copy(UUID(uuid), offer.name, offer.size, sha256, offer.properties)
                )
            else:
                unfinished = True
                _set_progress(command_ids, f"fetching image {uuid}: {100 * received_bytes // offer.size} %")
    return unfinished


def _find_service_images(
    service: ImageService, missing: Mapping[WantedImage, list[int]], deadline: float
) -> tuple[dict[str, ServiceImage], dict[str, list[int]], bool]:
    """Ask the service for the descriptions of these images, until the deadline and for LOOKUP_TIMEOUT_S at most.

    Returns the descriptions, and the ids of the commands that wait, both by the image's id; and whether the deadline
    came before all questions were asked. Images without a usable description are left out: their commands are refused,
    or show why they wait.
    """
    offers, command_ids_by_uuid = dict[str, ServiceImage](), dict[str, list[int]]()
    unfinished = False
    max_bytes = store.get_max_image_bytes()
    answers = call_in_parallel(
        lambda wanted: _find_service_image(service, *wanted, max_bytes),
        missing,
        min(deadline - time.monotonic(), LOOKUP_TIMEOUT_S),
        MAX_PARALLEL_FETCHES,
    )
    for wanted, command_ids in missing.items():
        if answers[wanted].cancelled():
            unfinished = True
            continue
        try:
            if not is_ended(answers[wanted]):
                raise ImageServiceUnavailableError(NO_ANSWER_IN_TIME)
            offer = answers[wanted].result()
        except ImageUnusableError as error:
            _refuse_commands(command_ids, str(error))
        except ImageServiceUnavailableError as error:
            _set_progress(command_ids, f"waiting for the image service: {error}")
        else:
            offers[offer.uuid] = offer
            command_ids_by_uuid.setdefault(offer.uuid, []).extend(command_ids)
    return offers, command_ids_by_uuid, unfinished


def _find_service_image(service: ImageService, kind: str, value: str, max_bytes: int) -> ServiceImage:
    """Ask the service for the description of the wanted image, which may have at most `max_bytes`. Uses no database.

    Raises ImageServiceUnavailableError if the service cannot answer now. Raises ImageUnusableError if there is no such
    image, if several images have the function, or if the image is empty or too large.
    """
    offer: ServiceImage | None
    if kind == "bitstream_id":
        offer = service.image(value)
    else:
        offer = _require_at_most_one(service.with_function(value), value)
        if offer is None:
            raise ImageUnusableError(f"no image has {_describe_wanted_image(kind, value)}")
    if not 0 < offer.size <= max_bytes:
        raise ImageUnusableError(
            f"image {offer.uuid} has {offer.size} bytes; 1 to {max_bytes} are taken (CYBORG_IMAGE_MAX_BYTES)"
        )
    return offer


def _fetch_image(service: ImageService, offer: ServiceImage, deadline: float) -> tuple[str, int]:
    """Fetch an image until the deadline, starting where an earlier fetch ended. Uses no database.

    Returns the image's SHA-256 and the number of bytes that are stored. The SHA-256 is '' if the deadline passes before
    the image is complete. Raises ImageServiceUnavailableError if the transfer breaks off, ImageUnusableError if the
    size or the digest is wrong (the file is deleted then) or the service refuses, and RefusedError UNAVAILABLE if the
    file cannot be written, or if an earlier fetch of the image has not ended.

    If an earlier fetch was completed after its run had ended, the file exists already and is only checked.
    """
    if sha256 := _check_complete_file(offer):
        return sha256, offer.size
    with store.open_partial_file(offer.uuid, "r+b") as file:
        digests = [hashlib.sha256(), hashlib.new(offer.algorithm if offer.algorithm in DIGEST_ALGORITHMS else "sha256")]
        received_bytes = 0
        while stored_chunk := file.read(store.CHUNK_BYTES):
            _update_digests(digests, stored_chunk)
            received_bytes += len(stored_chunk)
        first_offset, chunks = (
            service.read(offer.uuid, received_bytes) if received_bytes < offer.size else (received_bytes, iter(()))
        )
        if first_offset != received_bytes:
            file.seek(0)
            file.truncate()
            digests, received_bytes = [hashlib.new(digest.name) for digest in digests], 0
        for chunk in chunks:
            _update_digests(digests, chunk)
            file.write(chunk)
            received_bytes += len(chunk)
            if received_bytes > offer.size or (time.monotonic() > deadline and received_bytes < offer.size):
                break
        if received_bytes < offer.size:
            if time.monotonic() > deadline:
                return "", received_bytes
            raise ImageServiceUnavailableError(f"the transfer ended after {received_bytes} of {offer.size} bytes")
        is_intact = received_bytes == offer.size and (
            offer.algorithm not in DIGEST_ALGORITHMS or digests[1].hexdigest() == offer.digest
        )
        if not is_intact:
            store.get_partial_path(offer.uuid).unlink(missing_ok=True)
            raise ImageUnusableError(
                f"image {offer.uuid} is damaged: its bytes are not those that the image service names"
            )
        store.finalize_file(file, offer.uuid)
        return digests[0].hexdigest(), received_bytes


def _check_complete_file(offer: ServiceImage) -> str:
    """Return the SHA-256 of the image's complete file, '' if it does not exist or has another size or digest."""
    path = store.get_image_path(offer.uuid)
    digests = [hashlib.sha256(), hashlib.new(offer.algorithm if offer.algorithm in DIGEST_ALGORITHMS else "sha256")]
    try:
        if path.stat().st_size != offer.size:
            return ""
        with path.open("rb") as file:
            while stored_chunk := file.read(store.CHUNK_BYTES):
                _update_digests(digests, stored_chunk)
    except FileNotFoundError:
        return ""
    is_right = offer.algorithm not in DIGEST_ALGORITHMS or digests[1].hexdigest() == offer.digest
    return digests[0].hexdigest() if is_right else ""


def _update_digests(digests: Sequence[Any], chunk: bytes) -> None:
    """Add the bytes of `chunk` to each of these hash objects."""
    for digest in digests:
        digest.update(chunk)


def _give_image(command_ids: Sequence[int], image: Image) -> None:
    """Give these commands (ids) their image, so that they are delivered, and set the time at which it was used.

    Commands that no longer wait for an image are skipped.
    """
    with conductor.writing():
        Image.objects.filter(pk=image.pk).update(used_at=database_clock.now())
    for command_id in command_ids:
        command_queue.mark_image_ready(command_id, store.to_image_ref(image))


def _refuse_commands(command_ids: Sequence[int], reason: str) -> None:
    """Refuse these commands (ids) with this reason, so that they end; commands that an agent has taken are skipped."""
    for command_id in command_ids:
        command_queue.mark_image_failed(command_id, reason)


def _set_progress(command_ids: Sequence[int], text: str) -> None:
    """Store as `progress` why these commands (ids) wait, cut at 500 characters, and notify their watchers.

    Commands that already have this text, or wait for no image any more, are not changed.
    """
    with conductor.writing():
        waiting = Command.objects.filter(IS_WAITING_FOR_IMAGE, id__in=command_ids).exclude(progress=text[:500])
        changed_uuids = [str(uuid) for uuid in waiting.values_list("uuid", flat=True)]
        waiting.update(progress=text[:500], updated_at=database_clock.now())
    command_queue.publish_changed_commands(changed_uuids)
