"""The base views of v2, and the order in which a request is checked (contract section 2.0).

The order is: 401, 406 for the version, 404 or 405, 406 for Accept, 403, 400, the handler. Authentication and policy
come from the settings (`cyborgweb.auth.authentication`, `cyborgweb.auth.policy`); a view only names its rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, cast

from rest_framework.exceptions import APIException, AuthenticationFailed, NotAuthenticated
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from accelerators.api import browsable
from accelerators.api.json import JsonRenderer
from accelerators.api.v2 import arguments, faults, versions
from accelerators.api.v2.resource import V2Resource
from accelerators.domain.caller import Caller

JSON_MEDIA_TYPE, HTML_MEDIA_TYPE = "application/json", "text/html"


class V2View(APIView):
    """The base class of every view of v2. `allow_header` lists the methods of the whole collection, not of one URL."""

    renderer_classes = [JsonRenderer]
    http_method_names = ["get", "post", "patch", "delete"]
    default_response_headers: ClassVar[dict[str, str]] = {}
    policy_rules: ClassVar[Mapping[str, str]] = {}
    allow_header: ClassVar[str] = "GET"
    not_found_methods: ClassVar[Collection[str]] = ()
    """Methods that upstream answers with 404 instead of 405."""
    has_microversions: ClassVar[bool] = True
    version = versions.MIN_VERSION
    denial = ""
    """Why the caller may not send this request, and what would allow it. Only pages for browsers show it: the answers
    to other clients have upstream's sentence alone."""

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Check authentication, microversion, method, Accept and permissions, in this order, before the handler runs.

        Sets `version`. The first check that fails raises its error: 401, 406, 404 or 405, 406, 403.
        """
        self.perform_authentication(request)
        if self.has_microversions:
            self.version = versions.parse_requested_version(request.headers.get(versions.VERSION_HEADER, ""))
        self._check_method_and_accept(request)
        # From here on every answer carries the version headers. Errors of the router do not carry them.
        self.headers = versions.build_version_headers(self.version) if self.has_microversions else {}
        self.check_permissions(request)

    def _check_method_and_accept(self, request: Request) -> None:
        """Raise RouterError 404 or 405 for a method that this URL does not have, 406 if the Accept header excludes
        JSON."""
        if request.method in self.not_found_methods:
            raise faults.no_such_url_error()
        assert request.method is not None, "only a request that was not received has no method"
        if request.method.lower() not in self.http_method_names or not hasattr(self, request.method.lower()):
            raise faults.method_not_allowed_error(request.method, self.allow_header)
        # Parameters of a media type, for example a charset, are ignored.
        accepted_types = {str(accepted).partition(";")[0] for accepted in request.accepted_types}
        if request.headers.get("Accept") and not accepted_types & {JSON_MEDIA_TYPE, "application/*", "*/*"}:
            raise faults.not_acceptable_error()

    def perform_content_negotiation(self, request: Request, force: bool = False) -> tuple[BaseRenderer, str]:
        """Return the HTML renderer for browsers and the JSON renderer for everybody else; `initial` refuses other
        Accept headers."""
        if browsable.is_browser_accept_header(request.headers.get("Accept", "")):
            return browsable.BrowsableRenderer(), browsable.BrowsableRenderer.media_type
        return JsonRenderer(), JSON_MEDIA_TYPE

    def handle_exception(self, exc: Exception) -> Response:
        """Return the answer for any exception, in the form that upstream uses on the wire.

        Adds WWW-Authenticate to a 401 and Retry-After to a 503. Unexpected exceptions are logged and give 500. Sets
        `denial`.
        """
        self.denial = getattr(exc, "explanation", "")
        if isinstance(exc, faults.RouterError):
            self.headers = exc.headers
            accept = self.request.headers.get("Accept")
            wants_html = self.request.get_preferred_type(
                [JSON_MEDIA_TYPE, HTML_MEDIA_TYPE]
            ) == HTML_MEDIA_TYPE and not browsable.is_browser_accept_header(accept or "")
            return Response(exc.build_body(accept, wants_html, is_head=self.request.method == "HEAD"), exc.status)
        if isinstance(exc, AuthenticationFailed | NotAuthenticated):
            self.headers = {"WWW-Authenticate": self.get_authenticate_header(self.request)}
            return Response(faults.build_unauthenticated_body(str(exc.detail)), 401)
        status, text = faults.explain_error(exc)
        if status == 503:
            self.headers = {**self.headers, "Retry-After": f"{getattr(exc, 'wait', 1):.0f}"}
        return Response(faults.wrap_fault(status, text), status)

    def explain_refusal(self, request: Request, rule: str = "") -> str:
        """Return why the caller may not send this request now, with what would allow it; '' if the caller may. It is
        also a reason that everything is read only. Raises ValueError for a `rule`: actions of v2 have no rule beside
        that of their method."""
        if rule:
            raise ValueError(f"no action of v2 needs {rule}")
        try:
            self.check_permissions(request)
        except APIException as error:
            return getattr(error, "explanation", "") or faults.explain_error(error)[1]
        return ""

    @property
    def caller(self) -> Caller:
        """The authenticated caller of this request."""
        return cast(Caller, self.request.user)  # Our authentication class sets it; the stub knows only Django's users.

    def build_visible_params(self) -> dict[str, Any]:
        """Return the SQL parameters of the resource's `visible_condition`; by default none."""
        return {}

    @property
    def base_url(self) -> str:
        """Return the scheme and host that the caller used; links begin with them."""
        return f"{self.request.scheme}://{self.request.get_host()}"


class V2NotFoundView(V2View):
    """Handles all other URLs: 404 for GET, 405 for other methods, both only after authentication."""

    not_found_methods = ("GET",)


class V2ListView(V2View):
    """GET of a collection. `column_filters` names the parameters that are compared with a column of the same name."""

    resource: ClassVar[V2Resource]
    column_filters: ClassVar[Collection[str]] = ()
    not_found_methods: ClassVar[Collection[str]] = ("PATCH",)

    def get(self, request: Request) -> Response:
        """Return the visible elements, filtered, sorted and limited as the query string says; 400 if it is invalid."""
        query = arguments.parse_list_query(
            request.query_params.lists(), self.column_filters, self.resource.sort_expressions
        )
        return Response(self.resource.fetch_list(query, self.version, self.base_url, **self.build_visible_params()))


class V2DetailView(V2View):
    """GET of a member. Only some of upstream's collections check that the uuid is valid."""

    resource: ClassVar[V2Resource]
    checks_uuid: ClassVar[bool] = True

    def get(self, request: Request, uuid: str) -> Response:
        """Return the element without a wrapper. A uuid in another form than the stored one is answered with 404
        (contract 2.0)."""
        arguments.parse_known_arguments(request.query_params.lists())
        if self.checks_uuid:
            arguments.check_uuid(uuid, "uuid")
        is_canonical = arguments.is_canonical_uuid(uuid)
        element = (
            self.resource.fetch_one(uuid, self.version, self.base_url, **self.build_visible_params())
            if is_canonical
            else None
        )
        if element is None:
            raise faults.V2Error(404, f"{self.resource.noun} not found with uuid={uuid}")
        return Response(element)
