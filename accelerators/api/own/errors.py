"""The error format of `/api/`: `{"error": {"code", "title", "message", "request_id", "reason"}}`.

The code is the HTTP status. The message is one sentence that tells the caller what to do. The reason is a stable code
for programs, one of REASONS. An error 409 with the reason `not_confirmed` has a preview beside `error`. If a change is
refused because it is based on an older generation (409) or on none (428), the present version is beside `error`, as
`current`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any

from django.core.exceptions import SuspiciousOperation
from django.db import DataError, InterfaceError, OperationalError
from django.http import Http404
from rest_framework import exceptions
from rest_framework.response import Response

from accelerators.domain.caller import request_id
from accelerators.domain.errors import AcceleratorsError, RefusalReason, RefusedError
from accelerators.domain.generations import GenerationError
from accelerators.runtime import database_outage

log = logging.getLogger(__name__)

MESSAGE_BY_STATUS: Mapping[int, str] = {
    404: "There is nothing here that you may see; the address one level above lists what you may see.",
    406: "This is served as application/json, or as an HTML page to a browser; name one of them in the Accept header.",
    413: "The body is larger than 1 MiB; send less at a time.",
    415: "Send the body as application/json.",
    503: "The database does not answer; try again in a moment.",
    500: "The service failed on this request; its log says why, under this answer's request id.",
}
STATUS_BY_REASON: Mapping[RefusalReason, int] = {
    RefusalReason.NOT_FOUND: 404,
    RefusalReason.INVALID: 400,
    RefusalReason.NO_GENERATION: 428,
    RefusalReason.SERVICE_TOKEN: 403,
    RefusalReason.UNAVAILABLE: 503,
}
"""HTTP status for each reason of a RefusedError; a reason that is not listed is answered with 409."""
REASON_BY_STATUS: Mapping[int, str] = {
    400: RefusalReason.INVALID.value,
    401: "not_authenticated",
    403: "not_allowed",
    404: RefusalReason.NOT_FOUND.value,
    405: "method_not_allowed",
    406: "not_acceptable",
    408: "request_timeout",
    409: RefusalReason.CONFLICT.value,
    411: "length_required",
    413: "too_large",
    415: "unsupported_media_type",
    428: RefusalReason.NO_GENERATION.value,
    429: "throttled",
    500: "internal_error",
    503: RefusalReason.UNAVAILABLE.value,
}
"""Reason of an error that has none of its own, by its HTTP status."""
READ_ONLY = "read_only"
"""Reason of a change that is refused while everything is read only."""
REASONS = sorted({*(reason.value for reason in RefusalReason), *REASON_BY_STATUS.values(), READ_ONLY})
"""Every reason that an error body can have. They are documented in `docs/cli.md`; existing ones never change."""


class ApiError(AcceleratorsError, exceptions.APIException):
    """An error with its own HTTP status and sentence; its `reason` follows from the status unless one is given."""

    def __init__(self, status: int, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.status_code = status
        self.reason = reason or REASON_BY_STATUS[status]


def body_too_large_error() -> ApiError:
    """Return the error 413 for a body that is too large."""
    return ApiError(413, MESSAGE_BY_STATUS[413])


def build_error_body(status: int, message: str, reason: str = "") -> dict[str, Any]:
    """Return the body of an error answer, with the id of the current request.

    Without `reason`, REASON_BY_STATUS gives it; raises KeyError for a status that is not listed there.
    """
    error = {
        "code": status,
        "title": HTTPStatus(status).phrase,
        "message": message,
        "request_id": request_id.get(),
        "reason": reason or REASON_BY_STATUS[status],
    }
    return {"error": error}


def handle_exception(error: Exception, context: Mapping[str, Any]) -> Response:
    """Render any exception in the API's error format (this is DRF's exception handler).

    An unexpected exception is logged and answered with 500 without its details. Adds WWW-Authenticate, Allow and
    Retry-After where they apply.
    """
    status, message = explain_error(error)
    reason = error.reason if isinstance(error, RefusedError | ApiError) else ""
    preview = getattr(error, "preview", None)
    body = build_error_body(status, message, reason) | ({"preview": preview} if preview else {})
    if isinstance(error, GenerationError) and (current := context["view"].build_current(error)):
        body["current"] = current
    response = Response(body, status)
    if challenge := getattr(error, "auth_header", None):
        response["WWW-Authenticate"] = challenge
    if status == HTTPStatus.METHOD_NOT_ALLOWED:
        response["Allow"] = ", ".join(context["view"].allowed_methods)
    if wait := getattr(error, "wait", None):
        response["Retry-After"] = f"{wait:.0f}"
    return response


def explain_error(error: Exception) -> tuple[int, str]:
    """Return the HTTP status and the message for an exception.

    An unexpected exception gives 500 and is logged; a database outage gives 503 and is logged.
    """
    match error:
        case RefusedError():
            return STATUS_BY_REASON.get(error.reason, 409), error.text
        case Http404():
            return 404, MESSAGE_BY_STATUS[404]
        case exceptions.APIException():
            return error.status_code, _build_message(error)
        case SuspiciousOperation() | DataError():
            return 400, "The request holds a value that cannot be read, stored or compared."
        case OperationalError() | InterfaceError():
            database_outage.log_outage(error)
            return 503, MESSAGE_BY_STATUS[503]
    log.error("a request failed with an unexpected error", exc_info=error)
    return 500, MESSAGE_BY_STATUS[500]


def _build_message(error: exceptions.APIException) -> str:
    """Return the message for an exception of DRF: its own text, or a sentence that says what to do.

    The messages of a validation error are joined to one text.
    """
    match error:
        case exceptions.ValidationError():
            return "; ".join(_iterate_validation_messages(error.detail))
        case exceptions.MethodNotAllowed():
            return f"{str(error.detail).rstrip('.')} here; the Allow header lists the allowed methods."
        case exceptions.NotAcceptable() | exceptions.UnsupportedMediaType():
            return MESSAGE_BY_STATUS[error.status_code]
        case exceptions.PermissionDenied() if explanation := getattr(error, "explanation", ""):
            return str(explanation)
    return str(error.detail)


def _iterate_validation_messages(detail: Any, path: str = "") -> Iterator[str]:
    """Yield the messages of a validation error as `field: sentence`; the path to a nested field is joined by dots."""
    if isinstance(detail, Mapping):
        for key, inner in detail.items():
            yield from _iterate_validation_messages(
                inner, path if key == "non_field_errors" else f"{path}.{key}".strip(".")
            )
    elif isinstance(detail, list | tuple):
        for inner in detail:
            yield from _iterate_validation_messages(inner, path)
    else:
        yield f"{path}: {detail}" if path else str(detail)
