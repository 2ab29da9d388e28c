"""The errors of v2 and their form on the wire (contract section 2.1)."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from html import escape
from http import HTTPStatus
from types import MappingProxyType

from django.core.exceptions import RequestDataTooBig, SuspiciousOperation
from django.db import InterfaceError, OperationalError
from rest_framework.exceptions import APIException

from accelerators.domain.errors import AcceleratorsError, RefusalReason, RefusedError
from accelerators.runtime import database_outage

log = logging.getLogger(__name__)


STATUS_BY_REASON: Mapping[RefusalReason, int] = {
    RefusalReason.NOT_FOUND: 404,
    RefusalReason.NONE_FREE: 404,
    RefusalReason.WRONG_STATE: 500,
    RefusalReason.CONFLICT: 409,
    RefusalReason.INVALID: 400,
    RefusalReason.DUPLICATE: 500,
    RefusalReason.SERVICE_TOKEN: 403,
    RefusalReason.IN_USE: 409,
    RefusalReason.NOT_CONFIRMED: 409,
    RefusalReason.STALE_PREVIEW: 409,
    RefusalReason.UNAVAILABLE: 503,
}
"""HTTP status for each reason of a RefusedError. The two 500 are upstream's; its clients and tests expect them
(contract section 2.3, annex A.4)."""


class V2Error(AcceleratorsError):
    """An error raised by a handler. Its body has form A (`wrap_fault`). `status` is the HTTP status, `text` the message
    for people, on one line."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


def bad_input_error(name: str, value: str, explanation: str) -> V2Error:
    """Return the error 400 for a value that cannot be used; `name` is the parameter or field that has this value."""
    return V2Error(400, f"Invalid input for field/attribute {name}. Value: '{value}'. {explanation}")


def missing_argument_error(name: str) -> V2Error:
    """Return the error 400 for a required argument that is missing."""
    return V2Error(400, f'Missing argument: "{name}"')


class RouterError(AcceleratorsError):
    """An error raised before a handler is reached. Its body has form B: text or an HTML page (`build_body`).

    `reason` is the standard text of the status, `detail` is further text. The answer has only the headers given here.
    """

    def __init__(
        self, status: int, reason: str, detail: str = "", headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(detail or reason)
        self.status, self.headers = status, dict(headers)
        self._reason, self._detail = reason, detail

    def build_body(self, accept: str | None, as_html: bool, is_head: bool) -> dict[str, str]:
        """Return the wrapped text: an HTML page if `as_html`, plain text otherwise, and empty for HEAD (`is_head`,
        form D)."""
        return {"error_message": "" if is_head else self._render_html(accept) if as_html else self._render_text(accept)}

    def _fill_template(self, accept: str | None, detail: str) -> str:
        """Return the message with `<br />` between its parts: the reason, which may quote the Accept header, and
        `detail`."""
        # Without an Accept header upstream does not replace its placeholder.
        reason = self._reason.replace("${HTTP_ACCEPT}", accept or "${HTTP_ACCEPT}")
        tail = "\n\n" if self.status == HTTPStatus.NOT_FOUND else ""
        return f"{reason}<br /><br />\n{detail}{tail}"

    def _render_text(self, accept: str | None) -> str:
        """Return the plain text: the status line, an empty line and the message."""
        body = self._fill_template(accept, self._detail).replace("\n", " ").replace("<br />", "\n")
        return f"{self._status_line}\n\n{body}"

    def _render_html(self, accept: str | None) -> str:
        """Return the HTML page with the status line and the message; the Accept header and the detail are escaped."""
        body = self._fill_template(accept and escape(accept), escape(self._detail))
        head = f"<html>\n <head>\n  <title>{self._status_line}</title>\n </head>\n"
        return f"{head} <body>\n  <h1>{self._status_line}</h1>\n  {body}\n </body>\n</html>"

    @property
    def _status_line(self) -> str:
        """The status with its standard phrase, for example `404 Not Found`."""
        return f"{self.status} {HTTPStatus(self.status).phrase}"


def no_such_url_error() -> RouterError:
    """Return the error 404 for an address that does not exist."""
    return RouterError(404, "The resource could not be found.")


def method_not_allowed_error(method: str, allow: str) -> RouterError:
    """Return the error 405. `allow` lists the methods of the whole collection, as upstream does."""
    return RouterError(405, f"The method {method} is not allowed for this resource. ", headers={"Allow": allow})


def not_acceptable_error(detail: str = "", headers: Mapping[str, str] = MappingProxyType({})) -> RouterError:
    """Return the error 406 for a version or an Accept header. The unclosed bracket in the text is upstream's."""
    reason = (
        "The resource could not be generated that was acceptable to your browser\n(content of type ${HTTP_ACCEPT}. "
    )
    return RouterError(406, reason, detail, headers)


def explain_error(error: Exception) -> tuple[int, str]:
    """Return the status and the message for an exception that a handler raised.

    An unexpected exception is logged, and its details are not shown. A database outage is logged and gives 503.
    """
    match error:
        case V2Error():
            answer = error.status, error.text
        case RefusedError():
            answer = STATUS_BY_REASON[error.reason], error.text
        case APIException():
            answer = error.status_code, str(error.detail)
        case RequestDataTooBig():
            answer = 413, "The body is larger than 1 MiB; send less at a time."
        case SuspiciousOperation():
            answer = 400, "The request cannot be read."
        case OperationalError() | InterfaceError():
            database_outage.log_outage(error)
            answer = 503, "The database does not answer; try again in a moment."
        case _:
            log.error("a request failed with an unexpected error", exc_info=error)
            answer = 500, "The service failed on this request; its log says why, under this answer's request id."
    return answer


def wrap_fault(status: int, text: str) -> dict[str, str]:
    """Return an error body in form A: a JSON document inside a string. openstacksdk reads its `faultstring`."""
    code = "Client" if status < 500 else "Server"
    return {"error_message": json.dumps({"faultcode": code, "faultstring": text, "debuginfo": None})}


def build_unauthenticated_body(text: str) -> dict[str, dict[str, object]]:
    """Return an error body in form E, the only one that upstream sends without its usual wrapper."""
    return {"error": {"code": 401, "title": "Unauthorized", "message": text}}
