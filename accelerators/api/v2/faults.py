"""What an answer that is not 2xx looks like: the forms of contract section 2.1. Called by `view` and the resources."""

from __future__ import annotations

import json
from html import escape
from http import HTTPStatus

from rest_framework.exceptions import APIException

UNEXPECTED = "The service could not do this; its log has the reason under the id of this request."
_PAGE = "<html>\n <head>\n  <title>{0}</title>\n </head>\n <body>\n  <h1>{0}</h1>\n  {1}\n </body>\n</html>"


class Fault(APIException):
    """Raised by a handler: form A, whose text clients read out of a document inside a string."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status_code = status


class Unroutable(Exception):
    """Raised before a handler is chosen: form B (404, 405, 406), with the headers it is to carry."""

    def __init__(self, status: int, text: str, detail: str = "", headers: dict[str, str] | None = None) -> None:
        super().__init__(text)
        self.status, self.text, self.detail = HTTPStatus(status), text, detail
        self.headers = headers or {}


def nowhere() -> Unroutable:
    """404: there is no such URL."""
    return Unroutable(404, "The resource could not be found.", "\n\n")


def not_allowed(method: str | None, verbs: tuple[str, ...]) -> Unroutable:
    """405, naming the verbs there are."""
    text = f"The method {method} is not allowed for this resource. "
    return Unroutable(405, text, headers={"Allow": ", ".join(verbs)})


def unacceptable(detail: str = "", headers: dict[str, str] | None = None) -> Unroutable:
    """406, for the version or for the Accept header; upstream's preamble has the placeholder unexpanded."""
    text = "The resource could not be generated that was acceptable to your browser\n(content of type ${HTTP_ACCEPT}. "
    return Unroutable(406, text, detail, headers)


def in_handler(status: int, text: str) -> dict[str, str]:
    """Form A."""
    code = "Client" if status < HTTPStatus.INTERNAL_SERVER_ERROR else "Server"
    return {"error_message": json.dumps({"faultcode": code, "faultstring": text, "debuginfo": None})}


def in_routing(fault: Unroutable, html: bool) -> dict[str, str]:
    """Form B; a page inside the string for those who prefer HTML."""
    title = f"{fault.status.value} {fault.status.phrase}"
    if html:
        return {"error_message": _PAGE.format(title, f"{escape(fault.text)}<br /><br />\n{escape(fault.detail)}")}
    text, detail = (part.replace("\n", " ") for part in (fault.text, fault.detail))
    return {"error_message": f"{title}\n\n{text}\n\n {detail}"}


def unauthenticated(text: str) -> dict[str, dict[str, object]]:
    """Form E, which upstream's token middleware makes outside of the wrapper."""
    return {"error": {"code": 401, "title": "Unauthorized", "message": text}}
