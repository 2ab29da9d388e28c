"""The order in which a request is judged, and the views all resources share (contract section 2.0).

401 → 406 for the version → 404, 405 → 406 for Accept → 403 → 400 → the handler. Who the caller is and what they may do
come from the settings (`cyborgweb.auth.authentication`, `cyborgweb.auth.policy`): a view names its rules only.
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
    """What every URL of v2 has in common. `allow` lists the verbs of the collection, not of the URL."""

    renderer_classes = [Json]
    http_method_names = ["get", "post", "patch", "delete"]
    default_response_headers: ClassVar[Mapping[str, str]] = {}
    policy_rules: ClassVar[Mapping[str, str]] = {}
    allow: ClassVar[str] = "GET"
    unrouted: ClassVar[Collection[str]] = ()
    """Methods that upstream answers with 404 where 405 would be expected."""
    microversioned: ClassVar[bool] = True
    version = versions.MINIMUM

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Judge the request; what is raised here is answered instead of the handler's answer."""
        self.perform_authentication(request)
        if self.microversioned:
            self.version = versions.requested(request.headers.get(versions.HEADER, ""))
        self._route(request)
        # From here on every answer says which version it is; what the router refuses does not.
        self.headers = versions.headers(self.version) if self.microversioned else {}
        self.check_permissions(request)

    def _route(self, request: Request) -> None:
        if request.method in self.unrouted:
            raise faults.no_such_url()
        if request.method.lower() not in self.http_method_names or not hasattr(self, request.method.lower()):
            raise faults.not_allowed(request.method, self.allow)
        # What a type says beside its name (a charset, say) is nobody's reason to refuse.
        names = {str(accepted).partition(";")[0] for accepted in request.accepted_types}
        if request.headers.get("Accept") and not names & {JSON, "application/*", "*/*"}:
            raise faults.not_acceptable()

    def perform_content_negotiation(self, request: Request, force: bool = False) -> tuple[BaseRenderer, str]:
        """There is one form, and a page for browsers; whoever can read neither was refused by then."""
        if browsable.wants_page(request.headers.get("Accept", "")):
            return browsable.Browsable(), browsable.Browsable.media_type
        return Json(), JSON

    def handle_exception(self, exc: Exception) -> Response:
        """Every refusal and every failure, in the form it has on the wire."""
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
        """What the resource's `shown` asks of the caller."""
        return {}

    @property
    def base(self) -> str:
        """What links begin with: the address under which the caller reached us."""
        return f"{self.request.scheme}://{self.request.get_host()}"


class Nowhere(View):
    """Every other URL: 404 for GET, 405 for the rest, once the caller is known."""

    unrouted = ("GET",)


class ListView(View):
    """GET of a collection. `exact` are the parameters that compare a column."""

    resource: ClassVar[Resource]
    exact: ClassVar[Collection[str]] = ()
    unrouted = ("PATCH",)

    def get(self, request: Request) -> Response:
        """Every element that is shown, filtered, sorted and cut as the query string says."""
        query = arguments.listing(request.query_params.lists(), self.exact, self.resource.sortable)
        return Response(self.resource.list(query, self.version, self.base, **self.scope))


class DetailView(View):
    """GET of a member. Only some of upstream's collections check that the uuid is one."""

    resource: ClassVar[Resource]
    checks_uuid: ClassVar[bool] = True

    def get(self, request: Request, uuid: str) -> Response:
        """The bare element; 404 also for a uuid in another form than the stored one (contract 2.0)."""
        arguments.only(request.query_params.lists())
        if self.checks_uuid:
            arguments.check_uuid(uuid)
        there = arguments.stored(uuid)
        found = self.resource.find(uuid, self.version, self.base, **self.scope) if there else None
        if found is None:
            raise faults.V2Error(404, f"{self.resource.noun} not found with uuid={uuid}")
        return Response(found)
