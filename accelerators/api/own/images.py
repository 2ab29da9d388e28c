"""Images that devices are programmed with: uploaded images, and local copies of Glance images."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import django_filters as filters
from rest_framework import serializers
from rest_framework.exceptions import ParseError
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api.browsable import BrowsableRenderer
from accelerators.api.own import errors
from accelerators.api.own.fields import RowSerializer, UrlField
from accelerators.api.own.filters import RowFilter, single_choice_filter
from accelerators.api.own.views import CollectionView
from accelerators.domain.groups import FUNCTION_KEY
from accelerators.images import store
from accelerators.models import Image, ImageSource

IMAGE_MEDIA_TYPE = "application/octet-stream"
PROPERTY_PATTERN = rf"^[^=\x00]{{1,{store.MAX_KEY}}}=[^\x00]{{0,{store.MAX_VALUE}}}$"
MAX_PARALLEL_UPLOADS = 2
"""The number of uploads that one process accepts at the same time."""
_upload_slots = threading.BoundedSemaphore(MAX_PARALLEL_UPLOADS)


class ImageFilter(RowFilter):
    """Filter by name, source, or function (the property accel:function_id)."""

    name = filters.CharFilter(help_text="Exactly this name.")
    source = single_choice_filter(ImageSource)
    function = filters.CharFilter(method="filter_by_function", help_text="Its property accel:function_id.")

    def filter_by_function(self, rows: Any, name: str, value: str) -> Any:
        """Keep images whose accel:function_id is exactly `value`."""
        return rows.filter(properties__contains={FUNCTION_KEY: value})


class ImageSerializer(RowSerializer):
    """An image that a device can be programmed with; its bytes are complete and were checked."""

    url = UrlField("images", source="uuid")
    size = serializers.IntegerField(read_only=True, help_text="The size in bytes.")
    properties = serializers.DictField(
        child=serializers.CharField(), read_only=True, help_text="For example accel:function_id."
    )

    class Meta:
        model = Image
        fields = ("uuid", "url", "name", "size", "sha256", "properties", "source", "by", "used_at", "created_at")


class ImageView(CollectionView):
    """Images. To upload one, POST its bytes as application/octet-stream to `/api/images/?name=…&property=KEY=VALUE`;
    repeat `property` as needed. Uploading needs the permission to program devices."""

    policy = "image"
    default_ordering = "-created"
    serializer_class = ImageSerializer
    filterset_class = ImageFilter
    queryset = Image.objects.all()
    upload_media_type: ClassVar[str] = IMAGE_MEDIA_TYPE
    """The media type of an upload's body."""
    upload_parameters: ClassVar[Mapping[str, tuple[dict[str, Any], str]]] = {
        "name": ({"type": "string", "maxLength": 255, "pattern": "^[^\\x00]*$"}, "The name of the image."),
        "property": (
            {
                "type": "array",
                "maxItems": store.MAX_PROPERTIES,
                "items": {"type": "string", "pattern": PROPERTY_PATTERN},
            },
            "KEY=VALUE; accel:function_id names the function of a device that is programmed with the image.",
        ),
    }

    @property
    def policy_rules(self) -> dict[str, str]:
        """Reading needs the rules of `inventory`; uploading and deleting need `cyborg:deployable:program`."""
        read_rule = "cyborg:inventory:get_one" if self.detail else "cyborg:inventory:get_all"
        return {"GET": read_rule, "HEAD": read_rule, **dict.fromkeys(("POST", "DELETE"), "cyborg:deployable:program")}

    @property
    def allowed_methods(self) -> list[str]:
        """Return the allowed methods; on an HTML page without POST, because a form there cannot send an image."""
        is_page = isinstance(getattr(self.request, "accepted_renderer", None), BrowsableRenderer)
        return [method for method in super().allowed_methods if method != "POST" or not is_page]

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Run the checks of `CollectionView.initial`, but for an upload only those of authentication and permissions.

        An upload may be larger than other bodies, and is described by its query, which `create` checks.
        """
        if self.action == "create":
            super(CollectionView, self).initial(request, *args, **kwargs)
        else:
            super().initial(request, *args, **kwargs)

    def create(self, request: Request) -> Response:
        """Store the body as an image, whose name and properties are in the query; 201 with the image.

        The bytes are written to the file while they arrive. Their number is in Content-Length, or they come in chunks.
        400 for a wrong query or number of bytes; 415, 411 or 413 for a wrong type or length; 409 if MAX_UPLOADS
        uploaded images exist; 503 if MAX_PARALLEL_UPLOADS uploads run in this process, or if the file cannot be
        written.
        """
        name, properties = _read_name_and_properties(request)
        size = _read_size(request)
        if not _upload_slots.acquire(blocking=False):
            raise errors.ApiError(
                503, f"{MAX_PARALLEL_UPLOADS} images are being uploaded already: try again in a moment."
            )
        try:
            chunks = _iterate_body(request) if size is not None else _iterate_chunked_body(request)
            image = store.store_upload(chunks, size, name, properties, self.caller, self.caller.event_source)
        finally:
            _upload_slots.release()
        return self.respond_with_stored_row(image.uuid)

    def destroy(self, request: Request, **kwargs: str) -> Response:
        """Delete an image; 204. 409 while an open command needs it. If it is a copy from Glance, Glance keeps the
        original."""
        store.delete_image(self.get_object().uuid, self.caller, self.caller.event_source)
        return Response(status=204)


def _read_name_and_properties(request: Request) -> tuple[str, dict[str, str]]:
    """Return the name and the properties in the query of an upload; the name may be ''.

    Raises ParseError (400) for an unknown parameter, RefusedError INVALID for a property that breaks a limit.
    """
    if unknown := sorted(set(request.query_params) - {*ImageView.upload_parameters}):
        raise ParseError(
            f"{', '.join(unknown)[:200]}: unknown parameter; known are {', '.join(ImageView.upload_parameters)}."
        )
    pairs = (text.partition("=") for text in request.query_params.getlist("property"))
    return request.query_params.get("name", ""), store.check_properties((key, value) for key, _, value in pairs)


def _read_size(request: Request) -> int | None:
    """Return the number of bytes that an upload announces, None if its body comes in chunks.

    Raises ApiError: 415 for another media type, 411 if there is neither a valid Content-Length nor a body in chunks,
    413 for more bytes than an image may have.
    """
    if request.content_type.partition(";")[0].strip().lower() != IMAGE_MEDIA_TYPE:
        raise errors.ApiError(415, f"Send the image's bytes as {IMAGE_MEDIA_TYPE}.")
    length = request.META.get("CONTENT_LENGTH") or ""
    if not length and "HTTP_TRANSFER_ENCODING" in request.META:
        return None
    if not length.isdecimal():
        raise errors.ApiError(
            411, "Send the number of bytes of the image in the Content-Length header, or send the image in chunks."
        )
    _check_size(int(length))
    return int(length)


def _check_size(size: int) -> None:
    """Raise ApiError 413 if an image may not have so many bytes."""
    if size > store.get_max_image_bytes():
        raise errors.ApiError(
            413, f"An image may have at most {store.get_max_image_bytes()} bytes (CYBORG_IMAGE_MAX_BYTES)."
        )


def _iterate_body(request: Request) -> Iterator[bytes]:
    """Yield the body in chunks of at most CHUNK_BYTES; end early, without an error, if the client disconnects."""
    try:
        while chunk := request._request.read(store.CHUNK_BYTES):
            yield chunk
    except OSError:
        return  # the client disconnected: the store then sees too few bytes and refuses the image


def _iterate_chunked_body(request: Request) -> Iterator[bytes]:
    """Yield a body that comes in chunks, in parts of at most CHUNK_BYTES.

    It is read from the server's input, because Django reads no body whose length it does not know. Raises ApiError: 413
    as soon as more bytes have come than an image may have, 400 if the body ends before its last chunk.
    """
    size = 0
    try:
        while chunk := request.META["wsgi.input"].read(store.CHUNK_BYTES):
            size += len(chunk)
            _check_size(size)
            yield chunk
    except OSError:
        raise errors.ApiError(400, "The image is not complete: send it again.") from None
