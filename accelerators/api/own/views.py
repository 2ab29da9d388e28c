"""The base class of every resource of our own API. A subclass declares its rows, fields, filters and orders.

A request is checked in this order: 406, 401, 405, 403, then 400 or 413. Authentication and permission classes come from
the settings; a collection only names its `policy`, and the names of its rules follow from it. The ETag of a page
contains the generations of the collections it shows. They are read before the rows, so a page may be newer than its
ETag, but never older.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, ClassVar

import django_filters as filters
import orjson
from django.db.models import QuerySet
from django.utils.cache import get_conditional_response, patch_vary_headers
from django_filters.rest_framework import DjangoFilterBackend
from rest_framework.exceptions import ParseError, PermissionDenied
from rest_framework.parsers import BaseParser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import Serializer
from rest_framework.viewsets import GenericViewSet

from accelerators.api.browsable import Browsable
from accelerators.api.json import Json
from accelerators.api.own import errors
from accelerators.api.own.fields import Chosen, chosen
from accelerators.api.own.paging import Pages, page_parameters
from accelerators.domain.caller import Caller
from accelerators.runtime import generations

MAX_BODY = 1_048_576
RELEASE = version("cyborgweb")


class JsonBody(BaseParser):
    """Parse a JSON body of at most 1 MiB."""

    media_type = "application/json"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        """Return the parsed body; raise 413 if it is larger than 1 MiB and 400 if it is not JSON."""
        body = stream.read(MAX_BODY + 1)
        if len(body) > MAX_BODY:
            raise errors.too_large()
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise ParseError(f"The body is not valid JSON: {error}.") from error


class Filters(DjangoFilterBackend):
    """Filter a list by its declared filters only, and accept only the values they define.

    On an HTML page, whose form sends every field, an empty filter is ignored.
    """

    def get_filterset_kwargs(self, request: Request, queryset: Any, view: Any) -> dict[str, Any]:
        """Return the filter set's arguments with the query of this request.

        Raise 400 for an empty value of a filter that is not a text filter, and for a boolean other than `true` and
        `false`.
        """
        said = request.query_params.copy()
        for name, one in view.filters().items():
            values = said.getlist(name)
            if request.accepted_renderer.format == Browsable.format and not any(values):
                said.pop(name, None)
            elif "" in values and not isinstance(one, filters.CharFilter):
                raise ParseError(f"{name}: say a value, or leave it out.")
            elif isinstance(one, filters.BooleanFilter) and not {*values} <= {"true", "false"}:
                raise ParseError(f"{name}: say true or false.")
        return super().get_filterset_kwargs(request, queryset, view) | {"data": said}


class Collection(GenericViewSet):
    """Rows of one kind, as a list and as single members. This class reads; subclasses that write add methods."""

    renderer_classes = [Json, Browsable]
    parser_classes = [JsonBody]
    pagination_class = Pages
    filter_backends = [Filters]
    http_method_names = ["get", "head", "post", "patch", "delete"]
    lookup_field = "uuid"
    lookup_value_regex = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"

    filterset_class: ClassVar[Any] = None
    policy: ClassVar[str]
    """Prefix of its policy rules: `cyborg:<policy>:get_all`, `get_one`, `create`, `update`, `delete`."""
    orders: ClassVar[Mapping[str, str]] = {"created": "id"}
    """The words that `ordering` accepts, each with the indexed field that it sorts by."""
    default_order: ClassVar[str] = "created"
    verbs: ClassVar[Mapping[str, type[Serializer]]] = {}
    """Actions on one member, each with the serializer of its body. An action is a POST to the member's address followed
    by the action's name, and is handled by the method of that name. It needs the rule for updating a member."""
    dangerous: ClassVar[tuple[str, ...]] = ()
    """Actions for which the HTML page asks for confirmation."""
    words: ClassVar[Mapping[str, str]] = {}
    """Actions on several members at once: name in the URL → name of the method that handles it. An action is a POST to
    the collection's address followed by its name. Its rule is `cyborg:<policy>:<name in the URL>`."""
    bodies: ClassVar[Mapping[str, type[Serializer]]] = {}
    """The serializer of an action's body, for actions whose body is not the row that is shown."""
    answers: ClassVar[Mapping[str, tuple[int, type[Serializer]]]] = {}
    """The status and the serializer of an action's answer, for actions that do not answer with the row."""
    parameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Query parameters for reading a member, in addition to `fields`: `type` is a JSON schema, `description` a
    sentence."""
    shows: ClassVar[tuple[generations.Collection, ...]] = ()
    """The collections whose generations make the ETag of an answer. If empty, the ETag is a digest of the answer."""

    @property
    def policy_rules(self) -> dict[str, str]:
        """Map each HTTP method to the policy rule that it needs, for the permission classes."""
        read = "get_one" if self.detail else "get_all"
        verbs = {"GET": read, "HEAD": read, "POST": "create", "PATCH": "update", "DELETE": "delete"}
        if self.detail:
            verbs["POST"] = "update"
        if word := next((word for word, action in self.words.items() if action == self.action), ""):
            verbs["POST"] = word
        return {method: f"cyborg:{self.policy}:{verb}" for method, verb in verbs.items()}

    @property
    def caller(self) -> Caller:
        """The authenticated caller of this request."""
        return self.request.user

    def get_exception_handler(self) -> Callable[..., Response]:
        """Return the handler that renders every error in this API's one format."""
        return errors.handle

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Check authentication, permissions, the body's length and the query string before the handler runs.

        Raise 413 for a body above 1 MiB (or an unreadable Content-Length) and 400 for an unknown query parameter or
        field.
        """
        super().initial(request, *args, **kwargs)
        length = request.META.get("CONTENT_LENGTH") or "0"
        if not length.isdecimal() or int(length) > MAX_BODY:
            raise errors.too_large()
        self._read_query(request)

    def check_permissions(self, request: Request) -> None:
        """Raise 405 for a method that this URL does not have, before the policy rules are checked."""
        if request.method.lower() not in self.action_map:
            self.http_method_not_allowed(request)
        super().check_permissions(request)

    def allowed(self, rule: str) -> bool:
        """Return whether the caller satisfies `rule`, which need not be a rule of this URL."""
        try:
            self.require(rule)
        except PermissionDenied:
            return False
        return True

    def require(self, rule: str) -> None:
        """Raise PermissionDenied unless the caller satisfies `rule`."""
        asked = SimpleNamespace(policy_rules={self.request.method: rule})
        if not all(permission.has_permission(self.request, asked) for permission in self.get_permissions()):
            raise PermissionDenied

    def sees_all(self) -> bool:
        """Return whether the caller may see the rows of all projects."""
        return self.caller.is_admin

    def order(self, request: Request) -> str:
        """Return the requested order: a key of `sort_fields`, with a leading `-` for descending. Raise 400 for any
        other value."""
        asked = request.query_params.get("ordering", self.default_order)
        if asked.removeprefix("-") not in self.orders:
            raise ParseError(f"ordering: say one of {', '.join(self.orders)}; a leading - reverses the order.")
        return asked

    def get_serializer_context(self) -> dict[str, Any]:
        """Add the base of all addresses (`base`) and the requested fields (`fields`) to the serializer context."""
        base = f"{self.request.scheme}://{self.request.get_host()}" if self.request else ""
        return super().get_serializer_context() | {"base": base, "fields": getattr(self, "chosen", ())}

    def list(self, request: Request) -> Response:
        """Return one page of the list. Invalid parameters are refused before the ETag is compared."""
        rows = self.filter_queryset(self.get_queryset())
        self.paginator.read(request, self)
        return self._tagged(request, lambda: self._page(rows))

    def retrieve(self, request: Request, **kwargs: str) -> Response:
        """Return one member."""
        return self._tagged(request, lambda: self.get_serializer(self.get_object()).data)

    def _page(self, queryset: QuerySet[Any]) -> Any:
        rows = self.paginate_queryset(queryset)
        return self.get_paginated_response(self.get_serializer(self.prepare(rows), many=True).data).data

    def body(self) -> dict[str, Any]:
        """Validate and return the body of an action with an entry in `body_serializers`; raise 400 if it is invalid."""
        body = self.bodies[self.action](data=self.request.data, context=self.get_serializer_context())
        body.is_valid(raise_exception=True)
        return dict(body.validated_data)

    def said(self, request: Request) -> dict[str, Any]:
        """Validate and return the body of an action that is declared in `member_actions`; raise 400 if it is invalid.
        The body may be empty."""
        body = self.verbs[self.action](data=request.data, context=self.get_serializer_context())
        body.is_valid(raise_exception=True)
        return dict(body.validated_data)

    def offered(self, data: Mapping[str, Any]) -> Iterable[str]:
        """Return the actions that the HTML page offers for the member shown as `data`."""
        return self.verbs.keys()

    def prepare(self, rows: list[Any]) -> list[Any]:
        """Add to the rows of a page the details that are not in the database, and return the rows. The default adds
        nothing."""
        return rows

    def _tagged(self, request: Request, produce: Callable[[], Any]) -> Response:
        if request.accepted_renderer.format != Json.format:
            return Response(produce())
        data = None
        if self.shows:
            tag = f"{self.shows[0]}-{generations.current(*self.shows)}"
        else:
            data = produce()
            tag = f"{self.policy}-{_digest(orjson.dumps(data, default=str))}"
        scope = "all" if self.sees_all() else self.caller.project_id
        about = f"{RELEASE} {scope} {request.build_absolute_uri()}"
        etag = f'W/"{tag}-{_digest(about.encode())}"'
        response = get_conditional_response(request._request, etag=etag)
        if response is None:
            response = Response(data if data is not None else produce())
        response["ETag"] = etag
        response["Cache-Control"] = "private, no-cache"
        patch_vary_headers(response, ["X-Auth-Token", "Cookie"])
        return response

    def _read_query(self, request: Request) -> None:
        """Check the query parameters, and remember the fields that `fields` selects.

        Raise 400 for an unknown parameter. Only GET and HEAD accept parameters.
        """
        known: tuple[str, ...] = ()
        if request.method in ("GET", "HEAD"):
            known = ("fields", *self.parameters) if self.detail else (*page_parameters(), *self.filters())
        if unknown := sorted(set(request.query_params) - set(known)):
            there_are = f"known are {', '.join(sorted(known))}" if known else "this address takes none"
            raise ParseError(f"{', '.join(unknown)[:200]}: unknown parameter; {there_are}.")
        serializer: type[Chosen] = self.get_serializer_class()
        self.chosen = chosen(request.query_params.get("fields", ""), serializer().fields)

    def filters(self) -> Mapping[str, Any]:
        """Return the list's filters by name."""
        return self.filterset_class.base_filters if self.filterset_class else {}


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=9).hexdigest()
