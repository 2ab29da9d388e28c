"""Read and check request bodies: JSON, and strings that the database can store (contract section 2.0)."""

from __future__ import annotations

from typing import Any

import orjson
from rest_framework.request import Request

from accelerators.api.v2.faults import V2Error, missing_argument_error

MAX_TEXT_CHARS = 255
JSON_MEDIA_TYPES = ("", "application/json", "text/javascript", "application/javascript")


def read_json_body(request: Request, argument: str) -> Any:
    """Return the parsed body.

    Raises V2Error 400 if it is empty (`argument` is upstream's name for the missing argument) or not JSON, and 415 for
    another media type.
    """
    raw = request._request.body
    if not raw.strip():
        raise missing_argument_error(argument)
    media_type = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if media_type not in JSON_MEDIA_TYPES:
        raise V2Error(415, f"Unknown mimetype: {media_type}")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise V2Error(400, "Request is not in valid JSON format") from None


def check_condition(condition: bool, message: str) -> None:
    """Raise V2Error 400 with `message` if `condition` is false."""
    if not condition:
        raise V2Error(400, message)


def check_text(value: object, name: str, max_length: int = MAX_TEXT_CHARS, min_length: int = 1) -> str:
    """Return `value` if it is a string of the allowed length without NUL; raise V2Error 400 otherwise."""
    if not isinstance(value, str) or not min_length <= len(value) <= max_length or "\0" in value:
        raise V2Error(400, f"{name} must be a string of {min_length} to {max_length} characters without NUL.")
    return value
