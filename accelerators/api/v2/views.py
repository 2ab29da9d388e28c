"""The base views of v2, and the order in which a request is checked (contract section 2.0).

The order is: 401, 406 for the version, 404 or 405, 406 for Accept, 403, 400, the handler. Authentication and policy
come from the settings (`cyborgweb.auth.authentication`, `cyborgweb.auth.policy`); a view only names its rules.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

from rest_framework.exceptions import AuthenticationFailed, NotAuthenticated
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from accelerators.api import browsable
from accelerators.api.json import Json
from accelerators.api.v2 import arguments, faults, versions
from accelerators.api.v2.resource import Resource

JSON, HTML = "application/json", "text/html"


class View(APIView):
    """The base class of every view of v2. `allow_header` lists the methods of the whole collection, not of one URL."""

    renderer_classes = [Json]
    http_method_names = ["get", "post", "patch", "delete"]
    default_response_headers: ClassVar[Mapping[str, str]] = {}
    policy_rules: ClassVar[Mapping[str, str]] = {}
    allow: ClassVar[str] = "GET"
    unrouted: ClassVar[Collection[str]] = ()
    """Methods that upstream answers with 404 instead of 405."""
    microversioned: ClassVar[bool] = True
    version = versions.MINIMUM

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Check authentication, microversion, method, Accept and permissions before the handler runs; raise the
        matching error."""
        self.perform_authentication(request)
        if self.microversioned:
            self.version = versions.requested(request.headers.get(versions.HEADER, ""))
        self._route(request)
        # From here on every answer carries the version headers. Errors of the router do not carry them.
        self.headers = versions.headers(self.version) if self.microversioned else {}
        self.check_permissions(request)

    def _route(self, request: Request) -> None:
        if request.method in self.unrouted:
            raise faults.no_such_url()
        if request.method.lower() not in self.http_method_names or not hasattr(self, request.method.lower()):
            raise faults.not_allowed(request.method, self.allow)
        # Parameters of a media type, for example a charset, are ignored.
        names = {str(accepted).partition(";")[0] for accepted in request.accepted_types}
        if request.headers.get("Accept") and not names & {JSON, "application/*", "*/*"}:
            raise faults.not_acceptable()

    def perform_content_negotiation(self, request: Request, force: bool = False) -> tuple[BaseRenderer, str]:
        """Return the HTML renderer for browsers and the JSON renderer for everybody else; `initial` refuses other
        Accept headers."""
        if browsable.wants_page(request.headers.get("Accept", "")):
            return browsable.Browsable(), browsable.Browsable.media_type
        return Json(), JSON

    def handle_exception(self, exc: Exception) -> Response:
        """Return the answer for any exception, in the form that upstream uses on the wire."""
        if isinstance(exc, faults.RouterError):
            self.headers = exc.headers
            accept = self.request.headers.get("Accept")
            page = self.request.get_preferred_type([JSON, HTML]) == HTML and not browsable.wants_page(accept or "")
            return Response(exc.body(accept, page, silent=self.request.method == "HEAD"), exc.status)
        if isinstance(exc, AuthenticationFailed | NotAuthenticated):
            self.headers = {"WWW-Authenticate": self.get_authenticate_header(self.request)}
            return Response(faults.unauthenticated(str(exc.detail)), 401)
        status, text = faults.explain(exc)
        if status == 503:
            self.headers = {**self.headers, "Retry-After": f"{getattr(exc, 'wait', 1):.0f}"}
        return Response(faults.wrapped(status, text), status)

    @property
    def scope(self) -> dict[str, object]:
        """Return the parameters for the resource's `visible_condition`."""
        return {}

    @property
    def base(self) -> str:
        """Return the scheme and host that the caller used; links begin with them."""
        return f"{self.request.scheme}://{self.request.get_host()}"


class Nowhere(View):
    """Handles all other URLs: 404 for GET, 405 for other methods, both only after authentication."""

    unrouted = ("GET",)


class ListView(View):
    """GET of a collection. `column_filters` names the parameters that are compared with a column."""

    resource: ClassVar[Resource]
    exact: ClassVar[Collection[str]] = ()
    unrouted = ("PATCH",)

    def get(self, request: Request) -> Response:
        """Return the visible elements, filtered, sorted and limited as the query string says."""
        query = arguments.listing(request.query_params.lists(), self.exact, self.resource.sortable)
        return Response(self.resource.list(query, self.version, self.base, **self.scope))


class DetailView(View):
    """GET of a member. Only some of upstream's collections check that the uuid is valid."""

    resource: ClassVar[Resource]
    checks_uuid: ClassVar[bool] = True

    def get(self, request: Request, uuid: str) -> Response:
        """Return the element without a wrapper. A uuid in another form than the stored one is answered with 404
        (contract 2.0)."""
        arguments.only(request.query_params.lists())
        if self.checks_uuid:
            arguments.check_uuid(uuid)
        there = arguments.stored(uuid)
        found = self.resource.find(uuid, self.version, self.base, **self.scope) if there else None
        if found is None:
            raise faults.V2Error(404, f"{self.resource.noun} not found with uuid={uuid}")
        return Response(found)
