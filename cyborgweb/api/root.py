"""URL routes of our own API below `/api/`: the resources of all packages, the root page, the OpenAPI document and
Swagger UI.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import URLPattern, path, re_path
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.views import APIView

from accelerators.api.browsable import BrowsableRenderer, build_navigation
from accelerators.api.json import JsonRenderer
from accelerators.api.own import errors
from accelerators.api.own.routes import RESOURCES
from accelerators.api.own.views import CollectionView
from agents.api import AgentView, DeviceUsageView, JoinTokenView
from cyborgweb.notify.api import DeliveryView, InboxView, SubscriptionView
from cyborgweb.telemetry.usage_api import CensusView, UsageView
from placement_sync.api import DiscrepancyView, NovaEndpointView

if TYPE_CHECKING:
    from rest_framework.decorators import ViewSetAction

COLLECTIONS: Mapping[str, type[CollectionView]] = {
    "hosts": RESOURCES["hosts"],
    "agents": AgentView,
    "join_tokens": JoinTokenView,
    **RESOURCES,
    "discrepancies": DiscrepancyView,
    "nova_endpoints": NovaEndpointView,
    "subscriptions": SubscriptionView,
    "deliveries": DeliveryView,
    "inbox": InboxView,
}
OTHER_RESOURCES: Mapping[str, tuple[type[CollectionView], dict[str, str | ViewSetAction[Any]], str]] = {
    "usage": (UsageView, {"get": "list"}, "usage"),
    "census": (CensusView, {"post": "create"}, "censuses"),
}
"""Resources that are not collections of rows: the view, its actions by method, and its name in the document."""
LIST_METHODS = {"get": "list", "post": "create"}
MEMBER_METHODS = {"get": "retrieve", "patch": "partial_update", "delete": "destroy"}


class UnauthenticatedView(APIView):
    """A view that needs no login, because it shows nothing that is stored."""

    authentication_classes = []
    permission_classes = []
    renderer_classes = [JsonRenderer, BrowsableRenderer]
    http_method_names = ["get", "head"]
    schema = None

    def get_exception_handler(self) -> Any:
        """Return the handler that gives all errors of the API the same shape."""
        return errors.handle_exception


class ApiRootView(UnauthenticatedView):
    """The addresses of all resources. They can be read with a token in X-Auth-Token, or with a session of the
    console.
    """

    def get(self, request: Request) -> Response:
        """Return the address of every resource of our own API, by name."""
        base = request.build_absolute_uri("/api/")
        return Response({name: f"{base}{name}/" for name in (*COLLECTIONS, *OTHER_RESOURCES, "schema", "docs")})


class ApiNotFoundView(UnauthenticatedView):
    """Answer 404, in the API's error shape, for every address that does not exist."""

    def get(self, request: Request, **kwargs: str) -> Response:
        """Raise Http404. The other HTTP methods are the same function, so each of them is answered with 404, too."""
        raise Http404

    post = patch = put = delete = get
    http_method_names = ["get", "head", "post", "patch", "put", "delete"]


def serve_openapi_document(request: HttpRequest) -> HttpResponse:
    """Return the OpenAPI document as YAML, or as JSON if the client accepts only that."""
    media = request.get_preferred_type(["application/vnd.oai.openapi", "application/yaml", "application/json"])
    as_json = media == "application/json"
    return HttpResponse(
        _render_document(as_json), content_type="application/json" if as_json else media or "application/yaml"
    )


@lru_cache(maxsize=2)
def _render_document(as_json: bool) -> str:
    """Return the OpenAPI document as JSON or YAML, rendered once per process. Raises ValueError if it has gaps."""
    from cyborgweb.api import openapi

    return openapi.render_json() if as_json else openapi.render_yaml()


def show_documentation(request: HttpRequest) -> HttpResponse:
    """Show Swagger UI, served from our own static files."""
    crumbs = [("API", "/api/"), ("docs", "/api/docs/")]
    page = {"title": "Documentation", "crumbs": crumbs, "navigation": build_navigation(request.path)}
    return render(request, "cyborgweb/api/docs.html", page)


def _build_routes() -> Iterator[URLPattern]:
    """Yield the routes of each collection of our own API, of its members and of its verbs.

    As in v2, a slash at the end of an address is optional.
    """
    for name, view in COLLECTIONS.items():
        key = view.lookup_url_kwarg or view.lookup_field
        member = rf"{name}/(?P<{key}>{view.lookup_value_regex})"
        for pattern, verbs, detail in ((name, LIST_METHODS, False), (member, MEMBER_METHODS, True)):
            actions: dict[str, str | ViewSetAction[Any]] = {
                method: action for method, action in verbs.items() if hasattr(view, action)
            }
            yield re_path(rf"\A{pattern}/?\Z", view.as_view(actions, detail=detail, basename=name))
        for word, action in view.collection_actions.items():
            yield re_path(rf"\A{name}/{word}/?\Z", view.as_view({"post": action}, detail=False, basename=name))
        for verb in view.member_actions:
            yield re_path(rf"\A{member}/{verb}/?\Z", view.as_view({"post": verb}, detail=True, basename=name))


urlpatterns = [
    path("", ApiRootView.as_view()),
    re_path(r"\Aschema/?\Z", serve_openapi_document),
    re_path(r"\Adocs/?\Z", show_documentation),
    *(
        re_path(rf"\A{name}/?\Z", view.as_view(does, basename=word))
        for name, (view, does, word) in OTHER_RESOURCES.items()
    ),
    re_path(
        rf"\Adevices/(?P<uuid>{DeviceUsageView.lookup_value_regex})/usage/?\Z",
        DeviceUsageView.as_view({"get": "retrieve"}, detail=True, basename="device_usage"),
    ),
    *_build_routes(),
    re_path("", ApiNotFoundView.as_view()),
]
