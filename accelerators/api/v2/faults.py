"""What a refusal looks like on the wire (contract section 2.1). Raised everywhere in `v2`, rendered by `views`."""

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

from accelerators.domain.errors import Reason, RefusedError
from accelerators.runtime import database_outage

log = logging.getLogger(__name__)


STATUSES: Mapping[Reason, int] = {
    Reason.UNKNOWN: 404,
    Reason.NONE_FREE: 404,
    Reason.STATE: 500,
    Reason.CONFLICT: 409,
    Reason.INVALID: 400,
    Reason.DUPLICATE: 500,
    Reason.SERVICE_TOKEN: 403,
    Reason.HELD: 409,
    Reason.AWAY: 503,
}
"""The two 500 are upstream's: its clients and tests look for them (contract section 2.3, annex A.4)."""


class V2Error(Exception):
    """A handler's refusal (form A): `text` is what a person reads, on one line."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status, self.text = status, text


def bad_input(name: str, value: str, why: str) -> V2Error:
    """A value that cannot be used; 400."""
    return V2Error(400, f"Invalid input for field/attribute {name}. Value: '{value}'. {why}")


def missing_argument(name: str) -> V2Error:
    """An argument that must be there; 400."""
    return V2Error(400, f'Missing argument: "{name}"')


class RouterError(Exception):
    """Answered before any handler is reached (form B), with no other headers than its own."""

    def __init__(
        self, status: int, reason: str, detail: str = "", headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        super().__init__(detail or reason)
        self.status, self.headers = status, dict(headers)
        self._reason, self._detail = reason, detail

    def body(self, accept: str | None, page: bool, silent: bool) -> dict[str, str]:
        """The wrapped text; an HTML `page` for who prefers one, nothing at all for HEAD (`silent`, form D)."""
        return {"error_message": "" if silent else self._page(accept) if page else self._text(accept)}

    def _fill(self, accept: str | None, detail: str) -> str:
        # Without an Accept header upstream leaves its placeholder standing.
        reason = self._reason.replace("${HTTP_ACCEPT}", accept or "${HTTP_ACCEPT}")
        tail = "\n\n" if self.status == HTTPStatus.NOT_FOUND else ""
        return f"{reason}<br /><br />\n{detail}{tail}"

    def _text(self, accept: str | None) -> str:
        body = self._fill(accept, self._detail).replace("\n", " ").replace("<br />", "\n")
        return f"{self._line}\n\n{body}"

    def _page(self, accept: str | None) -> str:
        body = self._fill(accept and escape(accept), escape(self._detail))
        head = f"<html>\n <head>\n  <title>{self._line}</title>\n </head>\n"
        return f"{head} <body>\n  <h1>{self._line}</h1>\n  {body}\n </body>\n</html>"

    @property
    def _line(self) -> str:
        return f"{self.status} {HTTPStatus(self.status).phrase}"


def no_such_url() -> RouterError:
    """404 for an address that is none."""
    return RouterError(404, "The resource could not be found.")


def not_allowed(method: str, allow: str) -> RouterError:
    """405; `allow` lists the verbs of the whole collection, as upstream's does."""
    return RouterError(405, f"The method {method} is not allowed for this resource. ", headers={"Allow": allow})


def not_acceptable(detail: str = "", headers: Mapping[str, str] = MappingProxyType({})) -> RouterError:
    """406, for a version as well as for an Accept header. The unclosed bracket is upstream's."""
    reason = (
        "The resource could not be generated that was acceptable to your browser\n(content of type ${HTTP_ACCEPT}. "
    )
    return RouterError(406, reason, detail, headers)


def explain(error: Exception) -> tuple[int, str]:
    """Status and sentence of whatever a handler raised. What nobody foresaw is logged, and never shown."""
    match error:
        case V2Error():
            answer = error.status, error.text
        case RefusedError():
            answer = STATUSES[error.reason], error.text
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
            log.error("a request failed", exc_info=error)
            answer = 500, "The service failed on this request; its log says why, under this answer's request id."
    return answer


def wrapped(status: int, text: str) -> dict[str, str]:
    """Form A: a JSON document inside a string. openstacksdk takes its `faultstring` out of it."""
    code = "Client" if status < 500 else "Server"
    return {"error_message": json.dumps({"faultcode": code, "faultstring": text, "debuginfo": None})}


def unauthenticated(text: str) -> dict[str, dict[str, object]]:
    """Form E: the one answer that upstream gives from outside of its wrapper."""
    return {"error": {"code": 401, "title": "Unauthorized", "message": text}}
