"""The job `images`: commands that wait for an image are given it, fetched from the image service where it is not here.

Whoever speaks to the service registers it from `AppConfig.ready()`. Bytes arrive in threads that know no database, and
while they do nobody holds a transaction. A fetch goes on where the last one ended: no image is too large for a slice.
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
from accelerators.domain.errors import Refused
from accelerators.domain.groups import BITSTREAM, FUNCTION
from accelerators.domain.states import CommandState
from accelerators.images import store
from accelerators.models import Command, Image, ImageSource
from accelerators.runtime import jobs

SLICE_S = 25.0
AT_ONCE = 4
WAITING = Q(state=CommandState.PREPARING.value, answered_at__isnull=True)
ALGORITHMS = ("sha256", "sha512")

Wanted = tuple[str, str]
"""`bitstream_id` or `function_id`, and which."""


class Unusable(Exception):
    """There is no such image, or it will not do; the text says why. Asking again would not help."""


class Away(Exception):
    """It cannot be had now; the text says why."""


@dataclass(frozen=True)
class Offer:
    """What the service says of an image: its `digest` by `algorithm` ('' when it tells none)."""

    uuid: str
    name: str
    size: int
    properties: Mapping[str, str] = field(default_factory=dict)
    algorithm: str = ""
    digest: str = ""


class ImageService(Protocol):
    """Glance. Everything raises Unusable or Away."""

    def image(self, uuid: str) -> Offer:
        """The image of this id."""
        ...

    def with_function(self, function: str) -> Sequence[Offer]:
        """The images whose property `accel:function_id` is this; two are enough."""
        ...

    def read(self, uuid: str, start: int) -> tuple[int, Iterator[bytes]]:
        """Its bytes, and where they begin: at `start`, or at 0 if the service cannot begin there."""
        ...


_services: list[ImageService] = []


def register(service: ImageService) -> None:
    """Fetch what is not here from `service`, the last one registered."""
    _services[:] = [service]


def run() -> None:
    """The job: every command that waits is tried once; what is unfinished then is gone on with at once."""
    jobs.take_up("images")
    end, tried, unfinished = time.monotonic() + SLICE_S, set[int](), False
    while (waiting := _waiting(tried)) and time.monotonic() < end:
        tried |= {number for numbers in waiting.values() for number in numbers}
        missing = _give_what_is_here(waiting)
        with jobs.alone("images") as mine:  # who looked while it was taken is served by its holder, who looks again
            if missing and mine:
                unfinished |= _fetch_all(missing, end)
    if unfinished or waiting:
        jobs.kick("images")


def _waiting(tried: set[int]) -> dict[Wanted, list[int]]:
    """What is wanted, by which commands that were not tried yet."""
    found: dict[Wanted, list[int]] = {}
    rows = Command.objects.filter(WAITING).exclude(id__in=tried).order_by("id")
    for number, wanted in rows.values_list("id", "arguments__wanted"):
        kind, value = next(iter((wanted or {}).items()), ("", ""))
        found.setdefault((str(kind), str(value)), []).append(number)
    return found


def _give_what_is_here(waiting: Mapping[Wanted, list[int]]) -> dict[Wanted, list[int]]:
    """Serve everybody whose image needs no service; returns the others."""
    missing: dict[Wanted, list[int]] = {}
    for wanted, numbers in waiting.items():
        try:
            image = _here(*wanted)
        except Unusable as error:
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
    """An image by its id; by its function only uploaded ones, as the service may have more than its copies here."""
    if kind == "bitstream_id":
        try:
            image = Image.objects.filter(uuid=UUID(value)).first()
        except ValueError:
            raise Unusable(f"{value[:64]!r} is no image's id") from None
        return image if image and store.is_here(image) else None
    if kind != "function_id":
        raise Unusable("the command does not say which image it wants")
    uploaded = Image.objects.filter(source=ImageSource.UPLOAD, properties__contains={FUNCTION: value})
    return _single([image for image in uploaded[:3] if store.is_here(image)], value)


def _single(found: Sequence[Any], function: str) -> Any:
    if len(found) > 1:
        several = ", ".join(str(one.uuid) for one in found)
        raise Unusable(f"several images have {_said('function_id', function)} ({several}): name one by {BITSTREAM}")
    return found[0] if found else None


def _said(kind: str, value: str) -> str:
    return f"{FUNCTION}={value[:255]}" if kind == "function_id" else f"the id {value[:255]}"


def _fetch_all(missing: Mapping[Wanted, list[int]], end: float) -> bool:
    """Ask the service for all of these; True when some are not complete yet."""
    service, offers, wanting = _services[-1], dict[str, Offer](), dict[str, list[int]]()
    for wanted, numbers in missing.items():
        if time.monotonic() > end:
            return True
        try:
            offer = _offered(service, *wanted)
        except Unusable as error:
            _refuse(numbers, str(error))
        except Away as error:
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
            except Unusable as error:
                _refuse(numbers, str(error))
            except (Away, Refused) as error:
                _tell(numbers, f"fetching image {offer.uuid}: {error}")
            else:
                if sha256:
                    _give(numbers, store.add_copy(UUID(offer.uuid), offer.name, offer.size, sha256, offer.properties))
                else:
                    unfinished = True
                    _tell(numbers, f"fetching image {offer.uuid}: {100 * got // offer.size} %")
    return unfinished


def _offered(service: ImageService, kind: str, value: str) -> Offer:
    if kind == "bitstream_id":
        offer = service.image(value)
    else:
        offer = _single(service.with_function(value), value)
        if offer is None:
            raise Unusable(f"no image has {_said(kind, value)}")
    most = store.limit()
    if not 0 < offer.size <= most:
        raise Unusable(f"image {offer.uuid} has {offer.size} bytes; 1 to {most} are taken (CYBORG_IMAGE_MAX_BYTES)")
    return offer


def _fetch(service: ImageService, offer: Offer, end: float) -> tuple[str, int]:
    """Its sha256 once it is here, '' when time is up before, and how much there is of it. Without a database."""
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
            raise Away(f"the transfer ended after {got} of {offer.size} bytes")
        right = got == offer.size and (offer.algorithm not in ALGORITHMS or digests[1].hexdigest() == offer.digest)
        if not right:
            store.part(offer.uuid).unlink(missing_ok=True)
            raise Unusable(f"image {offer.uuid} is damaged: its bytes are not those that the image service names")
        store.keep(file, offer.uuid)
        return digests[0].hexdigest(), got


def _update(digests: Sequence[Any], chunk: bytes) -> None:
    for digest in digests:
        digest.update(chunk)


def _give(numbers: Sequence[int], image: Image) -> None:
    with conductor.writing():
        Image.objects.filter(pk=image.pk).update(used_at=datetime.now(UTC))
    for number in numbers:
        placing.prepared(number, store.as_ref(image))


def _refuse(numbers: Sequence[int], why: str) -> None:
    for number in numbers:
        placing.unprepared(number, why)


def _tell(numbers: Sequence[int], text: str) -> None:
    """Show why they wait; a sentence that stands there already is not written again."""
    with conductor.writing():
        waiting = Command.objects.filter(WAITING, id__in=numbers).exclude(progress=text[:500])
        told = [str(uuid) for uuid in waiting.values_list("uuid", flat=True)]
        waiting.update(progress=text[:500], updated_at=datetime.now(UTC))
    placing.ring_changed(told)
