"""The job `images`: give commands the images they wait for, and fetch images that are not stored here from Glance.

The client of the image service is registered when `placement_sync` starts. Images are fetched in threads that do
not use the database, and no transaction is open meanwhile. A fetch continues where the last one ended, so an image may
take longer than the time slice of one run (SLICE_S).
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Protocol
from uuid import UUID

from django.db.models import Q

from accelerators import conductor
from accelerators.commands import placing
from accelerators.domain.errors import RefusedError
from accelerators.domain.groups import BITSTREAM, FUNCTION
from accelerators.domain.states import CommandState
from accelerators.images import store
from accelerators.models import Command, Image, ImageSource
from accelerators.runtime import jobs

SLICE_S = 25.0
"""Seconds after which a run of the job ends; it wakes itself again if there is more to do."""
AT_ONCE = 4
"""Number of images that are fetched at the same time."""
WAITING = Q(state=CommandState.PREPARING.value, answered_at__isnull=True)
ALGORITHMS = ("sha256", "sha512")

Wanted = tuple[str, str]
"""How a command names its image: `bitstream_id` or `function_id`, and the value."""


class ImageUnusableError(Exception):
    """There is no such image, or it cannot be used; the text says why. A retry would not help."""


class ImageServiceUnavailableError(Exception):
    """The image cannot be fetched now; the text says why. A later retry may succeed."""


@dataclass(frozen=True)
class Offer:
    """An image as the image service describes it. `digest` is made by `algorithm`; both are '' if the service names
    none."""

    uuid: str
    name: str
    size: int
    properties: Mapping[str, str] = field(default_factory=dict)
    algorithm: str = ""
    digest: str = ""


class ImageService(Protocol):
    """The image service, Glance. Every method may raise ImageUnusableError or ImageServiceUnavailableError."""

    def image(self, uuid: str) -> Offer:
        """Return the image of this id."""
        ...

    def with_function(self, function: str) -> Sequence[Offer]:
        """Return the images whose property `accel:function_id` is `function`; of several at least two."""
        ...

    def read(self, uuid: str, start: int) -> tuple[int, Iterator[bytes]]:
        """Return the image's bytes from `start` on, in chunks, and the offset of the first byte.

        The offset is 0 if the service cannot begin at `start`.
        """
        ...


_services: list[ImageService] = []


def register(service: ImageService) -> None:
    """Fetch images from `service` from now on; it replaces the one registered before."""
    _services[:] = [service]


def run() -> None:
    """Run the job `images`: try each waiting command once, for SLICE_S at most.

    The job wakes itself again if a fetch is unfinished or a command was not tried.
    """
    jobs.take_up("images")
    end, tried, unfinished = time.monotonic() + SLICE_S, set[int](), False
    while (waiting := _waiting(tried)) and time.monotonic() < end:
        tried |= {number for numbers in waiting.values() for number in numbers}
        missing = _give_what_is_here(waiting)
        # Without the lock there is nothing to do: the process that holds it looks for waiting commands again.
        with jobs.alone("images") as mine:
            if missing and mine:
                unfinished |= _fetch_all(missing, end)
    if unfinished or waiting:
        jobs.kick("images")


def _waiting(tried: set[int]) -> dict[Wanted, list[int]]:
    """Return the images that commands wait for, with the ids of these commands; leave out those in `tried_ids`."""
    found: dict[Wanted, list[int]] = {}
    rows = Command.objects.filter(WAITING).exclude(id__in=tried).order_by("id")
    for number, wanted in rows.values_list("id", "arguments__wanted"):
        kind, value = next(iter((wanted or {}).items()), ("", ""))
        found.setdefault((str(kind), str(value)), []).append(number)
    return found


def _give_what_is_here(waiting: Mapping[Wanted, list[int]]) -> dict[Wanted, list[int]]:
    """Give commands the images that are stored here, refuse those whose image cannot be had, and return the others."""
    missing: dict[Wanted, list[int]] = {}
    for wanted, numbers in waiting.items():
        try:
            image = _here(*wanted)
        except ImageUnusableError as error:
            _refuse(numbers, str(error))
            continue
        if image:
            _give(numbers, image)
        elif not _services:
            _refuse(numbers, f"no image with {_said(*wanted)} is uploaded, and no image service is configured")
        else:
            missing[wanted] = numbers
    return missing


def _here(kind: str, value: str) -> Image | None:
    """Return the stored image that a command names; None if it has to be fetched.

    By its function only uploaded images are found: of a copy nobody knows whether the service has others with the same
    function. Raises ImageUnusableError for an invalid id, or if several images have the function.
    """
    if kind == "bitstream_id":
        try:
            image = Image.objects.filter(uuid=UUID(value)).first()
        except ValueError:
            raise ImageUnusableError(f"{value[:64]!r} is not the id of an image") from None
        return image if image and store.is_here(image) else None
    if kind != "function_id":
        raise ImageUnusableError("the command does not say which image it wants")
    uploaded = Image.objects.filter(source=ImageSource.UPLOAD, properties__contains={FUNCTION: value})
    return _single([image for image in uploaded[:3] if store.is_here(image)], value)


def _single(found: Sequence[Any], function: str) -> Any:
    """Return the only image with this function, or None. Raises ImageUnusableError if there are several."""
    if len(found) > 1:
        several = ", ".join(str(one.uuid) for one in found)
        raise ImageUnusableError(
            f"several images have {_said('function_id', function)} ({several}): name one by {BITSTREAM}"
        )
    return found[0] if found else None


def _said(kind: str, value: str) -> str:
    """Describe a wanted image for messages."""
    return f"{FUNCTION}={value[:255]}" if kind == "function_id" else f"the id {value[:255]}"


def _fetch_all(missing: Mapping[Wanted, list[int]], end: float) -> bool:
    """Fetch these images from the service, until the deadline; return True if some are not complete yet.

    Commands whose image is complete get it. Commands whose image is unusable are refused. All others show why they
    wait.
    """
    service, offers, wanting = _services[-1], dict[str, Offer](), dict[str, list[int]]()
    for wanted, numbers in missing.items():
        if time.monotonic() > end:
            return True
        try:
            offer = _offered(service, *wanted)
        except ImageUnusableError as error:
            _refuse(numbers, str(error))
        except ImageServiceUnavailableError as error:
            _tell(numbers, f"waiting for the image service: {error}")
        else:
            offers[offer.uuid] = offer
            wanting.setdefault(offer.uuid, []).extend(numbers)
    unfinished = False
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="image") as threads:
        tasks = {threads.submit(_fetch, service, offer, end): offer for offer in offers.values()}
        for task in as_completed(tasks):
            offer = tasks[task]
            numbers = wanting[offer.uuid]
            try:
                sha256, got = task.result()
            except ImageUnusableError as error:
                _refuse(numbers, str(error))
            except (ImageServiceUnavailableError, RefusedError) as error:
                _tell(numbers, f"fetching image {offer.uuid}: {error}")
            else:
                if sha256:
                    _give(numbers, store.add_copy(UUID(offer.uuid), offer.name, offer.size, sha256, offer.properties))
                else:
                    unfinished = True
                    _tell(numbers, f"fetching image {offer.uuid}: {100 * got // offer.size} %")
    return unfinished


def _offered(service: ImageService, kind: str, value: str) -> Offer:
    """Ask the service for the wanted image. Raises ImageServiceUnavailableError, and ImageUnusableError also for an
    image that is empty or too large."""
    if kind == "bitstream_id":
        offer = service.image(value)
    else:
        offer = _single(service.with_function(value), value)
        if offer is None:
            raise ImageUnusableError(f"no image has {_said(kind, value)}")
    most = store.limit()
    if not 0 < offer.size <= most:
        raise ImageUnusableError(
            f"image {offer.uuid} has {offer.size} bytes; 1 to {most} are taken (CYBORG_IMAGE_MAX_BYTES)"
        )
    return offer


def _fetch(service: ImageService, offer: Offer, end: float) -> tuple[str, int]:
    """Fetch an image until the deadline, starting where an earlier fetch ended. Uses no database.

    Returns the image's SHA-256 and the number of bytes that are stored. The SHA-256 is '' if the deadline passes before
    the image is complete. Raises ImageServiceUnavailableError if the transfer breaks off, ImageUnusableError if the
    size or the digest is wrong (the file is deleted then), and RefusedError AWAY if the file cannot be written.
    """
    with store.stored(offer.uuid, "r+b") as file:
        digests = [hashlib.sha256(), hashlib.new(offer.algorithm if offer.algorithm in ALGORITHMS else "sha256")]
        got = 0
        while known := file.read(store.CHUNK):
            _update(digests, known)
            got += len(known)
        begins, chunks = service.read(offer.uuid, got) if got < offer.size else (got, iter(()))
        if begins != got:
            file.seek(0)
            file.truncate()
            digests, got = [hashlib.new(digest.name) for digest in digests], 0
        for chunk in chunks:
            _update(digests, chunk)
            file.write(chunk)
            got += len(chunk)
            if got > offer.size or (time.monotonic() > end and got < offer.size):
                break
        if got < offer.size:
            if time.monotonic() > end:
                return "", got
            raise ImageServiceUnavailableError(f"the transfer ended after {got} of {offer.size} bytes")
        right = got == offer.size and (offer.algorithm not in ALGORITHMS or digests[1].hexdigest() == offer.digest)
        if not right:
            store.part(offer.uuid).unlink(missing_ok=True)
            raise ImageUnusableError(
                f"image {offer.uuid} is damaged: its bytes are not those that the image service names"
            )
        store.keep(file, offer.uuid)
        return digests[0].hexdigest(), got


def _update(digests: Sequence[Any], chunk: bytes) -> None:
    for digest in digests:
        digest.update(chunk)


def _give(numbers: Sequence[int], image: Image) -> None:
    """Give these commands (ids) their image, so that they are delivered, and note that the image is used."""
    with conductor.writing():
        Image.objects.filter(pk=image.pk).update(used_at=datetime.now(UTC))
    for number in numbers:
        placing.prepared(number, store.as_ref(image))


def _refuse(numbers: Sequence[int], why: str) -> None:
    """End these commands (ids) as refused, with this reason."""
    for number in numbers:
        placing.unprepared(number, why)


def _tell(numbers: Sequence[int], text: str) -> None:
    """Store why these commands (ids) wait, to be shown; commands that already have this text are not changed."""
    with conductor.writing():
        waiting = Command.objects.filter(WAITING, id__in=numbers).exclude(progress=text[:500])
        told = [str(uuid) for uuid in waiting.values_list("uuid", flat=True)]
        waiting.update(progress=text[:500], updated_at=datetime.now(UTC))
    placing.ring_changed(told)
