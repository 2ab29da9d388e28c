"""The base class of every resource of our own API. A subclass declares its rows, fields, filters and orders.

A request is checked in this order: 406, 401, 405, 403, then 400 or 413. Authentication and permission classes come from
the settings; a collection only names its `policy`, and the names of its rules follow from it. The ETag of a page
contains the generations of the collections it shows. They are read before the rows, so a page may be newer than its
ETag, but never older.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from uuid import UUID

import django_filters as filters
import orjson
from django.db.models import QuerySet
from django.http import HttpResponse
from django.utils.cache import get_conditional_response, patch_vary_headers
from django_filters.rest_framework import DjangoFilterBackend
from rest_framework.exceptions import APIException, ParseError, PermissionDenied
from rest_framework.generics import get_object_or_404
from rest_framework.parsers import BaseParser
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.serializers import BaseSerializer, Serializer
from rest_framework.viewsets import GenericViewSet

from accelerators.api.browsable import BrowsableRenderer
from accelerators.api.json import JsonRenderer
from accelerators.api.own import errors
from accelerators.api.own.fields import MAX_GENERATION, parse_field_names
from accelerators.api.own.paging import RowPagination, get_list_parameters
from accelerators.domain.caller import Caller
from accelerators.domain.generations import GenerationError, require_generation
from accelerators.runtime import generations

MAX_BODY_BYTES = 1_048_576
RELEASE = version("cyborgweb")


class JsonBodyParser(BaseParser):
    """Parse a JSON body of at most 1 MiB."""

    media_type = "application/json"

    def parse(self, stream: Any, media_type: str | None = None, parser_context: Any = None) -> Any:
        """Return the parsed body; raise ApiError 413 if it is larger than 1 MiB, ParseError (400) if it is not JSON."""
        body = stream.read(MAX_BODY_BYTES + 1)
        if len(body) > MAX_BODY_BYTES:
            raise errors.body_too_large_error()
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise ParseError(f"The body is not valid JSON: {error}.") from error


class DeclaredFilterBackend(DjangoFilterBackend):
    """Filter a list by its declared filters only, and accept only the values they define.

    On an HTML page, whose form sends every field, an empty filter is ignored.
    """

    def get_filterset_kwargs(self, request: Request, queryset: Any, view: Any) -> dict[str, Any]:
        """Return the filter set's arguments with the query of this request.

        Raises ParseError (400) for an empty value of a filter that is not a text filter, and for a boolean other than
        `true` and `false`. Other invalid values are refused later, by the filter set.
        """
        query = request.query_params.copy()
        for name, query_filter in view.get_filters().items():
            values = query.getlist(name)
            if request.accepted_renderer.format == BrowsableRenderer.format and not any(values):
                query.pop(name, None)
            elif "" in values and not isinstance(query_filter, filters.CharFilter):
                raise ParseError(f"{name}: say a value, or leave it out.")
            elif isinstance(query_filter, filters.BooleanFilter) and not {*values} <= {"true", "false"}:
                raise ParseError(f"{name}: say true or false.")
        arguments: dict[str, Any] = super().get_filterset_kwargs(request, queryset, view)
        return arguments | {"data": query}


class CollectionView(GenericViewSet[Any]):
    """Rows of one kind, as a list (in pages) and as single members. This class reads; subclasses that write add
    methods.

    A subclass sets `policy`, `queryset` and `serializer_class`; the other attributes below are optional. Every method
    needs its rule of `policy_rules`. An answer to GET has an ETag, except an HTML page; if the request has the same
    ETag in If-None-Match, the answer is 304. Unknown query parameters are refused (400), and so are bodies above
    MAX_BODY_BYTES (413).
    """

    renderer_classes = [JsonRenderer, BrowsableRenderer]
    parser_classes = [JsonBodyParser]
    pagination_class = RowPagination
    filter_backends = [DeclaredFilterBackend]
    http_method_names = ["get", "head", "post", "patch", "delete"]
    lookup_field = "uuid"
    lookup_value_regex = "[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"

    filterset_class: ClassVar[Any] = None
    policy: ClassVar[str]
    """Prefix of its policy rules: `cyborg:<policy>:get_all`, `get_one`, `create`, `update`, `delete`."""
    read_policy: ClassVar[str] = ""
    """Prefix of the rules `get_all` and `get_one`, if it is another one than `policy`."""
    elevated_rule: ClassVar[str] = ""
    """The policy rule that allows callers who are no administrators to see the rows of all projects."""
    elevated_write_rule: ClassVar[str] = ""
    """The policy rule that allows callers who are no administrators to change the rows of all projects. A caller who
    may see a row of another project may not therefore change it."""
    sort_fields: ClassVar[Mapping[str, str]] = {"created": "id"}
    """The words that `ordering` accepts, each with the indexed field that it sorts by."""
    default_ordering: ClassVar[str] = "created"
    member_actions: ClassVar[Mapping[str, type[Serializer[Any]]]] = {}
    """Actions on one member, each with the serializer of its body. An action is a POST to the member's address followed
    by the action's name, and is handled by the method of that name. It needs the rule for updating a member."""
    actions_to_confirm: ClassVar[tuple[str, ...]] = ()
    """Actions for which the HTML page asks for confirmation."""
    collection_actions: ClassVar[Mapping[str, str]] = {}
    """Actions on several members at once: name in the URL → name of the method that handles it. An action is a POST to
    the collection's address followed by its name. `get_collection_rule` returns its rule."""
    body_serializers: ClassVar[Mapping[str, type[Serializer[Any]]]] = {}
    """The serializer of an action's body, for actions whose body is not the row that is shown."""
    response_serializers: ClassVar[Mapping[str, tuple[int, type[Serializer[Any]]]]] = {}
    """The status and the serializer of an action's answer, for actions that do not answer with the row."""
    preview_serializers: ClassVar[Mapping[str, type[Serializer[Any]]]] = {}
    """The serializer of the preview with which an action answers (200) if its body has `dry_run`."""
    detail_parameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Query parameters for reading a member, in addition to `fields`: `type` is a JSON schema, `description` a
    sentence."""
    etag_collections: ClassVar[tuple[generations.CollectionName, ...]] = ()
    """The collections whose generations make the ETag of an answer. If empty, the ETag is a digest of the answer."""

    delete_parameters: ClassVar[tuple[str, ...]] = ()
    """The query parameters that DELETE of a member accepts, such as `generation`."""

    @property
    def policy_rules(self) -> dict[str, str]:
        """Map each HTTP method to the policy rule that it needs, for the permission classes."""
        rule_by_method = {"POST": "create", "PATCH": "update", "DELETE": "delete"}
        if self.detail:
            rule_by_method["POST"] = "update"
        read_rule = f"cyborg:{self.read_policy or self.policy}:{'get_one' if self.detail else 'get_all'}"
        rules = {method: f"cyborg:{self.policy}:{rule}" for method, rule in rule_by_method.items()}
        if self.collection_action_name:
            rules["POST"] = self.get_collection_rule(self.collection_action_name)
        return {"GET": read_rule, "HEAD": read_rule} | rules

    def get_collection_rule(self, name: str) -> str:
        """Return the policy rule of an action on several members, given its name in the URL."""
        return f"cyborg:{self.policy}:{name}"

    @property
    def collection_action_name(self) -> str:
        """The name in the URL of an action on several members, '' for any other action."""
        return next((name for name, action in self.collection_actions.items() if action == self.action), "")

    @property
    def caller(self) -> Caller:
        """The authenticated caller of this request."""
        return cast(Caller, self.request.user)  # Our authentication class sets it; the stub knows only Django's users.

    @property
    def paginator(self) -> RowPagination:
        """The paginator of the list, an instance of `pagination_class`."""
        return cast(RowPagination, super().paginator)

    def get_exception_handler(self) -> Callable[..., Response]:
        """Return the handler that renders every error in this API's one format."""
        return errors.handle_exception

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Check authentication, permissions, the body's length and the query string before the handler runs.

        Raise 413 for a body above 1 MiB (or an unreadable Content-Length) and 400 for an unknown query parameter or
        field.
        """
        super().initial(request, *args, **kwargs)
        length = request.META.get("CONTENT_LENGTH") or "0"
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise errors.body_too_large_error()
        self._check_query(request)

    def check_permissions(self, request: Request) -> None:
        """Raise MethodNotAllowed (405) for a method that this URL does not have; then check the policy rules (403)."""
        assert request.method is not None, "only a request that was not received has no method"
        if request.method.lower() not in self.action_map:
            self.http_method_not_allowed(request)
        super().check_permissions(request)

    def is_rule_satisfied(self, rule: str) -> bool:
        """Return whether the caller satisfies `rule`, which need not be a rule of this URL. A person who runs
        `manage.py` satisfies every rule.

        Raises KeyError for an unknown rule. Raises ReadOnlyError (503) if the rule is satisfied while everything is
        read only and this request's method is not GET, HEAD or OPTIONS; whether the rule is about a write does not
        matter.
        """
        try:
            self.require_rule(rule)
        except PermissionDenied:
            return False
        return True

    def require_rule(self, rule: str) -> None:
        """Raise PermissionDenied unless the caller satisfies `rule`, which need not be a rule of this URL.

        Raises KeyError for an unknown rule. Raises ReadOnlyError (503) if the rule is satisfied while everything is
        read only and this request's method is not GET, HEAD or OPTIONS; whether the rule is about a write does not
        matter.
        """
        # Permission classes read only this attribute of a view.
        rule_holder: Any = SimpleNamespace(policy_rules={self.request.method: rule})
        if not all(permission.has_permission(self.request, rule_holder) for permission in self.get_permissions()):
            raise PermissionDenied

    def explain_refusal(self, request: Request, rule: str = "") -> str:
        """Return why the caller may not send this request now, with what would allow it; '' if the caller may.

        It is checked for the rule of the request's method, or for `rule`. The text is that of the answer to the
        request, also while everything is read only.
        """
        try:
            if rule:
                self.require_rule(rule)
            else:
                self.check_permissions(request)
        except APIException as error:
            return errors.explain_error(error)[1]
        return ""

    def can_see_all_projects(self) -> bool:
        """Return whether the caller may see the rows of all projects: an administrator, or a caller whom
        `elevated_rule` allows."""
        return self.caller.is_admin or (bool(self.elevated_rule) and self.is_rule_satisfied(self.elevated_rule))

    def can_change_all_projects(self) -> bool:
        """Return whether the caller may change the rows of all projects: an administrator, or a caller whom
        `elevated_write_rule` allows."""
        return self.caller.is_admin or (
            bool(self.elevated_write_rule) and self.is_rule_satisfied(self.elevated_write_rule)
        )

    def require_project(self, project_id: str) -> None:
        """Raise PermissionDenied (403) unless the caller may change rows of this project: its own; any for an
        administrator, or for a caller whom `elevated_write_rule` allows."""
        if self.caller.is_admin or (project_id and project_id == self.caller.project_id):
            return
        if not self.elevated_write_rule:
            raise PermissionDenied("This belongs to another project. Use a token of that project.")
        self.require_rule(self.elevated_write_rule)

    def list_orderings(self) -> Sequence[str]:
        """Return the values that `ordering` accepts: each key of `sort_fields`, also with a leading `-`."""
        return tuple(sign + word for word in self.sort_fields for sign in ("", "-"))

    def get_requested_ordering(self, request: Request) -> str:
        """Return the requested order: a key of `sort_fields`, with a leading `-` for descending; `default_ordering` if
        none.

        Raises ParseError (400) for any other value.
        """
        requested = request.query_params.get("ordering", self.default_ordering)
        if requested not in self.list_orderings():
            raise ParseError(f"ordering: say one of {', '.join(self.sort_fields)}; a leading - reverses the order.")
        return requested

    def get_serializer_context(self) -> dict[str, Any]:
        """Add the base of all addresses (`base`) and the requested fields (`fields`) to the serializer context.

        Without a host the base is "", so that addresses are paths.
        """
        host = self.request.get_host() if self.request else ""
        base = f"{self.request.scheme}://{host}" if host else ""
        return {**super().get_serializer_context(), "base": base, "fields": getattr(self, "chosen_fields", ())}

    # Stands before `list`, which hides the type of that name from the annotations below it.
    def load_row_details(self, rows: list[Any]) -> list[Any]:
        """Add to the rows of a page the details that are not in the database, and return the rows. The default adds
        nothing."""
        return rows

    def list(self, request: Request) -> HttpResponse:
        """Return one page of the list, or 304 if the client's ETag is still valid.

        Invalid parameters are refused (400, or 404 for the cursor) before the ETag is compared.
        """
        rows = self.filter_queryset(self.get_queryset())
        self.paginator.parse_request(request, self)
        return self._respond_with_etag(request, lambda: self._build_page(rows))

    def retrieve(self, request: Request, **kwargs: str) -> HttpResponse:
        """Return one member, or 304 if the client's ETag is still valid; 404 if the caller may not see the member."""
        return self._respond_with_etag(request, lambda: self.get_serializer(self.get_object()).data)

    def _build_page(self, queryset: QuerySet[Any]) -> Any:
        """Return the answer of a list: one page of rows (`results`), and the addresses of the pages beside it."""
        rows = self.paginate_queryset(queryset)
        assert rows is not None, "every collection has a paginator"
        return self.get_paginated_response(self.get_serializer(self.load_row_details(rows), many=True).data).data

    def get_body_serializer_class(self, action: str) -> type[BaseSerializer[Any]]:
        """Return the serializer of an action's body: the one that is declared for the action, else that of the row."""
        return self.member_actions.get(action) or self.body_serializers.get(action) or self.get_serializer_class()

    def validate_body(self, row: Any = None) -> dict[str, Any]:
        """Validate the body of this request and return its values by field; raise ValidationError (400) if it is
        invalid.

        A body that changes `row` may leave fields out.
        """
        body = self.get_body_serializer_class(self.action)(
            row, data=self.request.data, partial=row is not None, context=self.get_serializer_context()
        )
        body.is_valid(raise_exception=True)
        return dict(body.validated_data)

    def validate_change(self, row: Any, *, is_partial: bool = True) -> tuple[dict[str, Any], int]:
        """Validate the body that changes `row`, and return its values by field, and the generation that it names.

        A body may leave required fields out only if it `is_partial`; that of an action is not.

        Raises ValidationError (400) if the body is invalid, NoGenerationError (428) if it names no generation.
        """
        values = self.validate_body(row if is_partial else None)
        return values, require_generation(f"{row}", row.generation, values.pop("generation", None))

    def get_generation_to_delete(self, row: Any) -> int:
        """Return the query parameter `generation` of a DELETE of `row`. Raises ParseError (400) if it is no number,
        NoGenerationError (428) if there is none."""
        return require_generation(f"{row}", row.generation, self.read_generation_parameter())

    def read_generation_parameter(self) -> int | None:
        """Return the query parameter `generation`, None if there is none. Raises ParseError (400) if it is no
        number."""
        text = self.request.query_params.get("generation")
        if text is None:
            return None
        if not (text.isascii() and text.isdecimal()) or int(text[:20]) > MAX_GENERATION:
            raise ParseError("generation: say the number that the row shows.")
        return int(text)

    def build_current(self, error: GenerationError) -> Any:
        """Return the present version of what could not be changed, for the answers 409 and 428: the member of this URL,
        None if this is the URL of a collection."""
        return self.get_serializer(self.get_object()).data if self.detail else None

    def respond_with_stored_row(self, uuid: UUID, status: int = 201) -> Response:
        """Read the row that an action has created or changed, and return it with `respond_with_row`; raise 404 if it
        has been deleted since."""
        (row,) = self.load_row_details([get_object_or_404(self.get_queryset(), uuid=uuid)])
        return self.respond_with_row(row, status)

    def respond_with_row(self, row: Any, status: int = 201) -> Response:
        """Return the answer of an action that creates a row: the row, its address in the header Location, and `status`.

        The row must have everything that the serializer shows.
        """
        data = self.get_serializer(row).data
        return Response(data, status, headers={"Location": data["url"]})

    def get_offered_actions(self, data: Mapping[str, Any]) -> Iterable[str]:
        """Return the actions that the HTML page offers for the member shown as `data`."""
        return self.member_actions.keys()

    def _respond_with_etag(self, request: Request, build_data: Callable[[], Any]) -> HttpResponse:
        """Return the answer with its ETag; if the client has sent this ETag in If-None-Match, 304 without a body.

        With `etag_collections` the rows are not read for a 304, except those of a saved view. The ETag also depends on
        the release, on the projects that the caller may see and on the address. An HTML page has no ETag.
        """
        if request.accepted_renderer.format != JsonRenderer.format:
            return Response(build_data())
        data = None
        if self.etag_collections and "saved_view" not in request.query_params:  # no generation counts saved views
            content_tag = f"{self.etag_collections[0]}-{generations.current_generation(*self.etag_collections)}"
        else:
            data = build_data()
            content_tag = f"{self.policy}-{_compute_digest(orjson.dumps(data, default=str))}"
        scope = "all" if self.can_see_all_projects() else self.caller.project_id
        variant = f"{RELEASE} {scope} {request.build_absolute_uri()}"
        etag = f'W/"{content_tag}-{_compute_digest(variant.encode())}"'
        response = get_conditional_response(request._request, etag=etag)
        if response is None:
            response = Response(data if data is not None else build_data())
        response["ETag"] = etag
        response["Cache-Control"] = "private, no-cache"
        patch_vary_headers(response, ["X-Auth-Token", "Cookie"])
        return response

    def _check_query(self, request: Request) -> None:
        """Check the query parameters, and store the fields that `fields` selects in `chosen_fields`.

        Raises ParseError (400) for an unknown parameter or field. GET and HEAD accept
        parameters, and DELETE accepts `delete_parameters`.
        """
        known_parameters: tuple[str, ...] = ()
        if request.method in ("GET", "HEAD"):
            known_parameters = (
                ("fields", *self.detail_parameters) if self.detail else (*get_list_parameters(), *self.get_filters())
            )
        elif request.method == "DELETE":
            known_parameters = self.delete_parameters
        if unknown := sorted(set(request.query_params) - set(known_parameters)):
            known_text = (
                f"known are {', '.join(sorted(known_parameters))}" if known_parameters else "this address takes none"
            )
            raise ParseError(f"{', '.join(unknown)[:200]}: unknown parameter; {known_text}.")
        # A `ListSerializer` has no fields, but no collection names one as its class.
        serializer = cast("type[Serializer[Any]]", self.get_serializer_class())
        self.chosen_fields = parse_field_names(request.query_params.get("fields", ""), serializer().fields)

    def get_filters(self) -> Mapping[str, Any]:
        """Return the filters of the list by name; empty if the list has none."""
        return self.filterset_class.base_filters if self.filterset_class else {}


def _compute_digest(content: bytes) -> str:
    """Return a short digest for an ETag, in hex; not meant to be secure."""
    return hashlib.blake2b(content, digest_size=9).hexdigest()
