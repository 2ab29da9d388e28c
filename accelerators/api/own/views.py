"""What every resource of our own API has in common; a resource says its rows, fields, filters and orders.

Judged in this order: 406, 401, 405, 403, then 400 or 413. Who the caller is and what they may do comes from the
settings; a collection names `policy`, from which its rules follow. Pages are tagged with the generation of what they
show, read before the rows: a page may be newer than its tag, never older.
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
    """A JSON body of at most 1 MiB."""

    media_type = "application/json"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        """Refuses what is larger or no JSON."""
        body = stream.read(MAX_BODY + 1)
        if len(body) > MAX_BODY:
            raise errors.too_large()
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise ParseError(f"The body is no JSON: {error}.") from error


class Filters(DjangoFilterBackend):
    """Closed filters with closed values. On a page, whose form sends every field, an empty one says nothing."""

    def get_filterset_kwargs(self, request: Request, queryset: Any, view: Any) -> dict[str, Any]:
        """What was asked; 400 for an empty value where there is none, and for a third truth."""
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
    """Rows of one kind. Reading is here; what writes adds its methods."""

    renderer_classes = [Json, Browsable]
    parser_classes = [JsonBody]
    pagination_class = Pages
    filter_backends = [Filters]
    http_method_names = ["get", "head", "post", "patch", "delete"]
    lookup_field = "uuid"
    lookup_value_regex = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"

    filterset_class: ClassVar[Any] = None
    policy: ClassVar[str]
    """Its rules are `cyborg:<policy>:get_all`, `get_one`, `create`, `update`, `delete`."""
    orders: ClassVar[Mapping[str, str]] = {"created": "id"}
    """What a list can be ordered by, and the indexed field behind the word; the first is the default."""
    default_order: ClassVar[str] = "created"
    verbs: ClassVar[Mapping[str, type[Serializer]]] = {}
    """What can be done to a member beside changing it, and what may be sent with it: POST to its address and the word,
    answered by the method of that name. Its rule is that of changing a member."""
    dangerous: ClassVar[tuple[str, ...]] = ()
    """Verbs about which a page asks twice."""
    words: ClassVar[Mapping[str, str]] = {}
    """What can be done to several members at once: POST to the collection's address and the word, answered by the
    method of the other name. Its rule is `cyborg:<policy>:<word>`."""
    bodies: ClassVar[Mapping[str, type[Serializer]]] = {}
    """What is sent with an action, where that is not the row that is shown."""
    answers: ClassVar[Mapping[str, tuple[int, type[Serializer]]]] = {}
    """What an action is answered with, where that is not the row, and its status."""
    parameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """What reading a member understands beside `fields`: `type` is a JSON schema, `description` a sentence."""
    shows: ClassVar[tuple[generations.Collection, ...]] = ()
    """The collections whose generations a page depends on; none: the page itself is its tag."""

    @property
    def policy_rules(self) -> dict[str, str]:
        """Method → rule, as permission classes ask for it."""
        read = "get_one" if self.detail else "get_all"
        verbs = {"GET": read, "HEAD": read, "POST": "create", "PATCH": "update", "DELETE": "delete"}
        if self.detail:
            verbs["POST"] = "update"
        if word := next((word for word, action in self.words.items() if action == self.action), ""):
            verbs["POST"] = word
        return {method: f"cyborg:{self.policy}:{verb}" for method, verb in verbs.items()}

    @property
    def caller(self) -> Caller:
        """Who asks."""
        return self.request.user

    def get_exception_handler(self) -> Callable[..., Response]:
        """Our one shape."""
        return errors.handle

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Judge the request: what is raised here is answered instead of the handler's answer."""
        super().initial(request, *args, **kwargs)
        length = request.META.get("CONTENT_LENGTH") or "0"
        if not length.isdecimal() or int(length) > MAX_BODY:
            raise errors.too_large()
        self._read_query(request)

    def check_permissions(self, request: Request) -> None:
        """A method that there is not is a 405, whatever the rules say."""
        if request.method.lower() not in self.action_map:
            self.http_method_not_allowed(request)
        super().check_permissions(request)

    def allowed(self, rule: str) -> bool:
        """Whether the caller satisfies a rule other than this URL's own."""
        try:
            self.require(rule)
        except PermissionDenied:
            return False
        return True

    def require(self, rule: str) -> None:
        """Raises PermissionDenied unless the caller satisfies this rule."""
        asked = SimpleNamespace(policy_rules={self.request.method: rule})
        if not all(permission.has_permission(self.request, asked) for permission in self.get_permissions()):
            raise PermissionDenied

    def sees_all(self) -> bool:
        """Whether the caller sees every project's rows."""
        return self.caller.is_admin

    def order(self, request: Request) -> str:
        """How the list is ordered: a word of `orders`, with `-` for downwards; 400 for another one."""
        asked = request.query_params.get("ordering", self.default_order)
        if asked.removeprefix("-") not in self.orders:
            raise ParseError(f"ordering: say one of {', '.join(self.orders)}, or one with a - before it.")
        return asked

    def get_serializer_context(self) -> dict[str, Any]:
        """Where addresses begin, and which fields are wanted."""
        base = f"{self.request.scheme}://{self.request.get_host()}" if self.request else ""
        return super().get_serializer_context() | {"base": base, "fields": getattr(self, "chosen", ())}

    def list(self, request: Request) -> Response:
        """A page. What was asked is judged before its tag is."""
        rows = self.filter_queryset(self.get_queryset())
        self.paginator.read(request, self)
        return self._tagged(request, lambda: self._page(rows))

    def retrieve(self, request: Request, **kwargs: str) -> Response:
        """One of them."""
        return self._tagged(request, lambda: self.get_serializer(self.get_object()).data)

    def _page(self, queryset: QuerySet[Any]) -> Any:
        rows = self.paginate_queryset(queryset)
        return self.get_paginated_response(self.get_serializer(self.prepare(rows), many=True).data).data

    def body(self) -> dict[str, Any]:
        """What was sent with an action that has a body of its own."""
        body = self.bodies[self.action](data=self.request.data, context=self.get_serializer_context())
        body.is_valid(raise_exception=True)
        return dict(body.validated_data)

    def said(self, request: Request) -> dict[str, Any]:
        """What the body of a verb says; there need be none."""
        body = self.verbs[self.action](data=request.data, context=self.get_serializer_context())
        body.is_valid(raise_exception=True)
        return dict(body.validated_data)

    def offered(self, data: Mapping[str, Any]) -> Iterable[str]:
        """The verbs to offer on the page of a member that is shown as `data`."""
        return self.verbs.keys()

    def prepare(self, rows: list[Any]) -> list[Any]:
        """A page's rows before they are shown, for what is not in the database."""
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
        """The query string is a closed set; only reading has one."""
        known: tuple[str, ...] = ()
        if request.method in ("GET", "HEAD"):
            known = ("fields", *self.parameters) if self.detail else (*page_parameters(), *self.filters())
        if unknown := sorted(set(request.query_params) - set(known)):
            there_are = f"known are {', '.join(sorted(known))}" if known else "there are none"
            raise ParseError(f"{', '.join(unknown)[:200]}: unknown here; {there_are}.")
        serializer: type[Chosen] = self.get_serializer_class()
        self.chosen = chosen(request.query_params.get("fields", ""), serializer().fields)

    def filters(self) -> Mapping[str, Any]:
        """The list's filters by name."""
        return self.filterset_class.base_filters if self.filterset_class else {}


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=9).hexdigest()
