"""Read images from Glance through openstacksdk and the service user's session. It does not use Django.

`placement_sync.apps` registers it as the image service of `accelerators.images.download`. It makes three kinds of
calls: one image by its id, the images with a given function id, and the bytes of an image from an offset on.

Every member of a project can make private images with any properties, and the service user often sees all of them.
Therefore only trusted images say which function they have: public ones, which by default only an administrator of
Glance can make, and those of the projects in CYBORG_IMAGE_OWNERS.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from accelerators.domain.groups import FUNCTION_KEY
from accelerators.images.download import (
    DIGEST_ALGORITHMS,
    ImageServiceUnavailableError,
    ImageUnusableError,
    ServiceImage,
)
from accelerators.images.store import CHUNK_BYTES, MAX_KEY, MAX_PROPERTIES, MAX_VALUE
from drivers.configuration import ConfigurationError

ACTIVE, PENDING_STATES = "active", ("queued", "saving", "uploading", "importing")
PARTIAL_CONTENT = 206
PROPERTY_PREFIX = "accel:"


class GlanceClient:
    """The image service; one per process. `session` creates the service user's session at the first call. `owners` are
    the ids of the projects whose images are trusted although they are not public."""

    def __init__(self, session: Callable[[], Any], endpoint: str = "", owners: Sequence[str] = ()) -> None:
        self._session, self._endpoint, self._owners = session, endpoint, owners
        self._image_proxy: Any = None

    def image(self, uuid: str) -> ServiceImage:
        """Return the image with this id; without its function id if it is not a trusted image.

        Raises ImageUnusableError if there is none or it has no bytes; ImageServiceUnavailableError to retry later.
        """
        with _translate_errors():
            answer = self._get_image_proxy().get(f"/images/{uuid}")
            if answer.status_code == 404:
                raise ImageUnusableError(f"Glance has no image {uuid}")
            _raise_for_status(answer)
            return parse_offer(answer.json(), self._owners)

    def with_function(self, function: str) -> Sequence[ServiceImage]:
        """Return active, trusted images whose property `accel:function_id` is `function`: all of them if there are at
        most two, otherwise at least two, which is enough to show that the id is ambiguous.

        One call for the public images, and one for each owner. Glance's filters keep images of others from filling the
        answer; what it answers is checked again. Raises ImageUnusableError and ImageServiceUnavailableError.
        """
        offers: dict[str, ServiceImage] = {}
        for trusted in ({"visibility": "public"}, *({"owner": owner} for owner in self._owners)):
            with _translate_errors():
                query = {FUNCTION_KEY: function, "status": ACTIVE, "limit": "2"} | trusted
                answer = self._get_image_proxy().get("/images", params=query)
                _raise_for_status(answer)
                for document in answer.json()["images"]:
                    if document.get(FUNCTION_KEY) == function and is_trusted(document, self._owners):
                        offer = parse_offer(document, self._owners)
                        offers[offer.uuid] = offer
        return [*offers.values()]

    def read(self, uuid: str, start: int) -> tuple[int, Iterator[bytes]]:
        """Return the offset at which the bytes begin (`start`, or 0 if Glance ignores the range), and the bytes.

        Raises ImageUnusableError if Glance has no bytes or refuses them, ImageServiceUnavailableError to retry later;
        the iterator may raise the latter as well.
        """
        with _translate_errors():
            headers = {"Range": f"bytes={start}-"} if start else {}
            answer = self._get_image_proxy().get(f"/images/{uuid}/file", stream=True, headers=headers)
            _raise_for_status(answer)
            if answer.status_code == 204:
                raise ImageUnusableError(f"Glance has no bytes of image {uuid}")
        return start if answer.status_code == PARTIAL_CONTENT else 0, _iterate_chunks(answer)

    def _get_image_proxy(self) -> Any:
        """Return the openstacksdk proxy for images.

        It is imported at the first call, because that costs as much as all of Django.
        """
        if self._image_proxy is None:
            from openstack.connection import Connection

            endpoint_options: dict[str, Any] = {"image_endpoint_override": self._endpoint} if self._endpoint else {}
            self._image_proxy = Connection(session=self._session(), **endpoint_options).image
        return self._image_proxy


def is_trusted(document: Mapping[str, Any], owners: Sequence[str]) -> bool:
    """Return whether Glance's image is public or belongs to one of the projects `owners` (ids). Images of the
    visibility `shared` and `community` are their owner's alone to make, like private ones."""
    return document.get("visibility") == "public" or document.get("owner") in owners


def parse_offer(document: Mapping[str, Any], owners: Sequence[str]) -> ServiceImage:
    """Convert Glance's image document into a ServiceImage; without its function id if it is not a trusted image of
    `owners` (`is_trusted`). The image's own id then names the function of a device that is programmed with it.

    Raises ImageServiceUnavailableError if the image is still being uploaded, ImageUnusableError if it has another state
    or no size.
    """
    uuid, status = str(document["id"]), str(document.get("status"))
    if status in PENDING_STATES:
        raise ImageServiceUnavailableError(f"image {uuid} is {status} in Glance, not {ACTIVE} yet")
    if status != ACTIVE:
        raise ImageUnusableError(f"image {uuid} is {status} in Glance, not {ACTIVE}")
    if not isinstance(document.get("size"), int):
        raise ImageUnusableError(f"Glance has no bytes of image {uuid}")
    algorithm, digest = document.get("os_hash_algo"), document.get("os_hash_value")
    checksum = (algorithm, str(digest)) if algorithm in DIGEST_ALGORITHMS and digest else ("", "")
    name = str(document.get("name") or "")[:255]
    properties = select_properties(document)
    if not is_trusted(document, owners):
        properties.pop(FUNCTION_KEY, None)
    return ServiceImage(uuid, name, document["size"], properties, *checksum)


def select_properties(document: Mapping[str, Any]) -> dict[str, str]:
    """Return the image's `accel:` properties, at most MAX_PROPERTIES, without those that are too long.

    Other properties belong to Glance and may contain secrets of its stores.
    """
    own_properties = [
        (key, value) for key, value in document.items() if key.startswith(PROPERTY_PREFIX) and isinstance(value, str)
    ]
    return dict(
        [pair for pair in own_properties if len(pair[0]) <= MAX_KEY and len(pair[1]) <= MAX_VALUE][:MAX_PROPERTIES]
    )


def _raise_for_status(answer: Any) -> None:
    """Raise an error if Glance answered with one.

    It is ImageServiceUnavailableError for 401, 429 and 5xx, ImageUnusableError for every other status from 400 on.
    """
    status = answer.status_code
    if status < 400:
        return
    text = f"Glance answered {status}"
    if status in (401, 429) or status >= 500:
        raise ImageServiceUnavailableError(text)
    raise ImageUnusableError(f"{text}: the service user may not read this image")


def _iterate_chunks(answer: Any) -> Iterator[bytes]:
    """Yield the bytes of the answer, and close it at the end."""
    with _translate_errors():
        try:
            yield from answer.iter_content(CHUNK_BYTES)
        finally:
            answer.close()


@contextmanager
def _translate_errors() -> Iterator[None]:
    """Turn the errors of openstacksdk, keystoneauth1 and requests into ImageServiceUnavailableError.

    A missing cloud configuration becomes ImageUnusableError.
    """
    import requests
    from keystoneauth1.exceptions import ClientException
    from openstack.exceptions import SDKException

    try:
        yield
    except ConfigurationError as error:
        raise ImageUnusableError(f"it is not uploaded here, and Glance cannot be asked: {error}") from None
    except (ClientException, SDKException, requests.RequestException, KeyError, ValueError) as error:
        raise ImageServiceUnavailableError(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from None
