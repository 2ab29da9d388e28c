"""What every v2 view does before and after its handler: the order of evaluation, the headers, the forms of errors.

Subclassed by `discovery` and by one module per resource. Identity and policy come in through `REST_FRAMEWORK`.
"""

from __future__ import annotations

import logging
from typing import Any, ClassVar

import orjson
from django.core.exceptions import SuspiciousOperation
from rest_framework.exceptions import APIException, AuthenticationFailed, NotAuthenticated
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView, set_rollback

from accelerators.api.v2 import faults, microversion
from accelerators.api.v2.query import check_known

log = logging.getLogger(__name__)


class Json(BaseRenderer):
    """Bytes pass through: lists come out of PostgreSQL as text. Anything else is encoded here."""

    media_type = "application/json"
    format = "json"
    charset = None

    def render(self, data: Any, accepted_media_type: str | None = None, renderer_context: Any = None) -> bytes:
        """The body; nothing for None (202, 204)."""
        if data is None or isinstance(data, bytes):
            return data or b""
        return orjson.dumps(data)


class View(APIView):
    """401, then microversion 406, routing 404/405/406, policy 403, query 400, handler (contract section 2.0)."""

    renderer_classes = [Json]
    policy_rules: ClassVar[dict[str, str]] = {}
    verbs: ClassVar[tuple[str, ...]] = ("GET",)
    """What a 405 allows: the whole resource's verbs, on its collection and its members alike."""
    unrouted: ClassVar[frozenset[str]] = frozenset()
    """Methods that are a 404 here, where others are a 405."""
    arguments: ClassVar[frozenset[str]] = frozenset()
    """The query parameters there are; `filters` stands for its pairs. All others are a 400."""
    version: microversion.Version

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Everything that may refuse a request before its handler sees it."""
        self.perform_authentication(request)
        self.negotiate(request)
        self.route(request)
        self.check_permissions(request)
        check_known(request.query_params, self.arguments)

    def negotiate(self, request: Request) -> None:
        """Set `version`, and what the answer says about it once routing has found a handler; or a 406."""
        try:
            self.version = microversion.wanted(request.headers.get(microversion.HEADER, ""))
        except microversion.Unsupported as refused:
            raise faults.unacceptable(str(refused), microversion.SUPPORTED if refused.offered else None) from None

    def route(self, request: Request) -> None:
        """404, 405 or 406; past it, every answer carries the microversion headers."""
        if request.method in self.unrouted:
            raise faults.nowhere()
        if request.method not in self.verbs or not hasattr(self, request.method.lower()):
            raise faults.not_allowed(request.method, self.verbs)
        if not _takes_json(request):
            raise faults.unacceptable()
        self.headers |= microversion.SUPPORTED
        self.headers[microversion.HEADER] = f"{microversion.SERVICE} {microversion.shown(self.version)}"

    def perform_content_negotiation(self, request: Request, force: bool = False) -> tuple[BaseRenderer, str]:
        """There is one form; `route` has refused those who do not take it."""
        return Json(), Json.media_type

    @property
    def default_response_headers(self) -> dict[str, str]:
        """None of DRF's: `Allow` belongs to 405 alone."""
        return {}

    def handle_exception(self, exc: Exception) -> Response:
        """Any exception as its form of contract section 2.1. What nobody foresaw is logged and told as a 500."""
        set_rollback()
        match exc:
            case AuthenticationFailed() | NotAuthenticated():
                challenge = {"WWW-Authenticate": self.get_authenticate_header(self.request) or "Keystone"}
                return Response(faults.unauthenticated(str(exc.detail)), 401, headers=challenge)
            case faults.Unroutable():
                return Response(self._unroutable(exc), exc.status, headers=exc.headers)
            case APIException():
                status, text = exc.status_code, str(exc.detail)
            case SuspiciousOperation():
                status, text = 400, "The request has more parameters than are allowed."
            case _:
                log.error("%s %s", self.request.method, self.request.path, exc_info=exc)
                status, text = 500, faults.UNEXPECTED
        return Response(faults.in_handler(status, text), status)

    def _unroutable(self, fault: faults.Unroutable) -> dict[str, str]:
        if self.request.method == "HEAD":
            return {"error_message": ""}
        prefers_html = self.request.get_preferred_type(["text/plain", "text/html"]) == "text/html"
        return faults.in_routing(fault, prefers_html)

    @property
    def base(self) -> str:
        """Scheme and host the client used, before every link."""
        return self.request.build_absolute_uri("/").rstrip("/")


def _takes_json(request: Request) -> bool:
    """Whether the Accept header allows JSON; its parameters (a charset, say) are nobody's reason to refuse."""
    return not request.headers.get("Accept", "").strip() or any(
        accepted.main_type in ("application", "*") and accepted.sub_type in ("json", "*")
        for accepted in request.accepted_types
    )


class Nowhere(View):
    """Every URL that is no other view's: it needs a token and a good version before it is a 404."""

    def route(self, request: Request) -> None:
        """404."""
        raise faults.nowhere()
