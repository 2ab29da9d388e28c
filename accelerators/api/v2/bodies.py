"""Read and check request bodies: JSON, and strings that the database can store (contract section 2.0)."""

from __future__ import annotations

from typing import Any

import orjson
from rest_framework.request import Request

from accelerators.api.v2.faults import V2Error, missing_argument

LONGEST = 255
READABLE = ("", "application/json", "text/javascript", "application/javascript")


def read(request: Request, name: str) -> Any:
    """Return the parsed body.

    Raises V2Error 400 if it is empty (`argument` is upstream's name for the missing argument) or not JSON, and 415 for
    another media type.
    """
    raw = request._request.body
    if not raw.strip():
        raise missing_argument(name)
    kind = request.headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind not in READABLE:
        raise V2Error(415, f"Unknown mimetype: {kind}")
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise V2Error(400, "Request is not in valid JSON format") from None


def shape(right: bool, sentence: str) -> None:
    """Raise V2Error 400 with `message` if `condition` is false."""
    if not right:
        raise V2Error(400, sentence)


def text(value: object, name: str, longest: int = LONGEST, shortest: int = 1) -> str:
    """Return `value` if it is a string of the allowed length without NUL; raise V2Error 400 otherwise."""
    if not isinstance(value, str) or not shortest <= len(value) <= longest or "\0" in value:
        raise V2Error(400, f"{name} must be a string of {shortest} to {longest} characters without NUL.")
    return value
