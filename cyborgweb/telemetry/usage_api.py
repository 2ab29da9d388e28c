"""The resources `/api/usage/` (units and load, by groups) and `/api/census/` (ask hosts now how busy they are)."""

from __future__ import annotations

from typing import Any, cast

import django_filters as filters
import msgspec
from django.db.models import QuerySet
from django.http import HttpResponse
from rest_framework import serializers
from rest_framework.exceptions import NotFound, ParseError
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.utils.urls import replace_query_param

from accelerators.api.own.fields import (
    ChosenFieldsSerializer,
    ClosedSerializer,
    HostReference,
    StrictIntegerField,
    StrictTextField,
)
from accelerators.api.own.filters import single_choice_filter
from accelerators.api.own.paging import PageCursor, RowPagination
from accelerators.api.own.views import CollectionView
from accelerators.domain.states import DeviceType
from accelerators.models import Device
from accelerators.requests import capacity
from accelerators.requests.capacity import CapacityGroup, CapacityQuery
from agents import telemetry
from cyborgweb.telemetry import census, usage_with_load

PROJECT_COLUMNS = ("project", "type", "resource_class")
"""Columns by which callers that see one project alone may group; hosts are shown to operators only."""


class LoadSerializer(serializers.Serializer[Any]):
    """The load of devices, from samples of the last minutes. A number is null if no device reports it. The sums of
    memory include only devices that report both used and total memory.
    """

    devices = serializers.IntegerField(read_only=True)
    sampled = serializers.IntegerField(read_only=True, help_text="How many of the devices sent samples.")
    utilization_percent_mean = serializers.FloatField(source="mean", read_only=True, allow_null=True)
    utilization_percent_max = serializers.FloatField(source="highest", read_only=True, allow_null=True)
    memory_used_bytes = serializers.IntegerField(source="used", read_only=True, allow_null=True)
    memory_total_bytes = serializers.IntegerField(source="size", read_only=True, allow_null=True)
    power_watts = serializers.FloatField(source="power", read_only=True, allow_null=True)


class GroupSerializer(ChosenFieldsSerializer):
    """Units of one group. Groups by project have no total, because they count only what is held."""

    group = serializers.DictField(
        child=serializers.CharField(), read_only=True, help_text="Each grouping column and its value."
    )
    total = serializers.IntegerField(read_only=True, allow_null=True)
    held = serializers.IntegerField(read_only=True)
    free = serializers.IntegerField(read_only=True, allow_null=True, help_text="Units that requests can get now.")
    reserved = serializers.IntegerField(
        read_only=True, help_text="Units that are neither held nor free, thus not offered."
    )
    load = LoadSerializer(read_only=True, allow_null=True, help_text="Null for callers that see one project only.")


class UsageFilter(filters.FilterSet):
    """Choose the grouping, and which units are counted."""

    by = filters.CharFilter(
        help_text=f"One or two of {', '.join(capacity.GROUP_COLUMNS)}, separated by a comma. "
        "The default is resource_class, or project for callers that see one project only."
    )
    host = filters.CharFilter(help_text="Only of this host.")
    type = single_choice_filter(DeviceType, help_text="Only of this type.")
    resource_class = filters.CharFilter(help_text="Only of this resource class.")

    def filter_queryset(self, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the queryset unchanged: there are no rows, the parameters are only validated."""
        return queryset


class UsageGroupPaginator(RowPagination):
    """Forward-only pages of groups: each begins after the last group of the page before."""

    def parse_cursor(self) -> tuple[str, ...] | None:
        """Return the group after which this page begins: its values of the grouping columns, as two texts ('' for a
        missing second one); None for the first page.

        Raises NotFound for a cursor that names no group.
        """
        if self.page_cursor is None:
            return None
        try:
            return msgspec.json.decode(self.page_cursor.value, type=tuple[str, str])
        except msgspec.MsgspecError as error:
            raise NotFound("cursor: it names no group; leave it out to start at the first page.") from error

    def split_page(self, rows: list[CapacityGroup]) -> tuple[list[CapacityGroup], str | None]:
        """Split `size` + 1 rows into the rows of this page and the URL of the next page, None if there is none."""
        if len(rows) <= self.size:
            return rows, None
        value = msgspec.json.encode((*rows[self.size - 1].names, "")[:2]).decode()
        cursor = PageCursor(self.order, False, value, 0)
        return rows[: self.size], replace_query_param(self.base_url, self.cursor_query_param, cursor.encode())


class UsageView(CollectionView):
    """The numbers of all units, and of those that are held, free and out of offer, by host, type, resource class or
    project, with the load of their devices. A project sees only the units that it holds itself.
    """

    policy = "usage"
    elevated_rule = "cyborg:usage:elevated"
    http_method_names = ["get", "head"]
    pagination_class = UsageGroupPaginator
    sort_fields = {"group": "group"}
    default_ordering = "group"
    serializer_class = GroupSerializer
    filterset_class = UsageFilter
    queryset = Device.objects.none()

    @property
    def policy_rules(self) -> dict[str, str]:
        """Return the policy rule by method: `cyborg:usage:get` for GET and HEAD, so every other method is refused."""
        return dict.fromkeys(("GET", "HEAD"), "cyborg:usage:get")

    @property
    def paginator(self) -> UsageGroupPaginator:
        """The view's paginator, which is a UsageGroupPaginator."""
        return cast(UsageGroupPaginator, super().paginator)

    def list(self, request: Request) -> HttpResponse:
        """Return a page of groups of units, with an ETag. The parameters are validated before anything is counted."""
        self.filter_queryset(self.get_queryset())
        self.paginator.parse_request(request, self)
        elevated = self.can_see_all_projects()
        query = self._parse_query(request, elevated)
        return self._respond_with_etag(request, lambda: self._list_groups(query, elevated))

    def _parse_query(self, request: Request, elevated: bool) -> CapacityQuery:
        """Return the query that the parameters describe. Raises ParseError (400) for an unusable `by`, NotFound for a
        bad cursor.

        A caller who sees one project only (not `elevated`) must group by project and PROJECT_COLUMNS alone, and may not
        choose a host. Otherwise it raises PolicyDeniedError.
        """
        parameters = request.query_params
        by = tuple((parameters.get("by") or ("resource_class" if elevated else "project")).split(","))
        if not 1 <= len(set(by)) == len(by) <= 2 or not set(by) <= capacity.GROUP_COLUMNS.keys():
            raise ParseError(f"by: say one or two of {', '.join(capacity.GROUP_COLUMNS)}.")
        if not elevated and ("project" not in by or not set(by) <= set(PROJECT_COLUMNS) or parameters.get("host")):
            self.require_rule(self.elevated_rule)
        return CapacityQuery(
            by,
            host=parameters.get("host") or None,
            type=parameters.get("type") or None,
            resource_class=parameters.get("resource_class") or None,
            project=None if elevated else self.caller.project_id,
            order=self.paginator.order,
            after=self.paginator.parse_cursor(),
            limit=self.paginator.size + 1,
        )

    def _list_groups(self, query: CapacityQuery, elevated: bool) -> dict[str, Any]:
        """Return the body of the answer: one page of groups, and the URL of the next page (None if there is none).

        With `elevated` (the caller sees all projects) each group has its load. That asks the gateways, which takes up
        to about a second; otherwise every `load` is None. One statement counts the units. `query.limit` must be the
        page's size + 1, and the paginator must have parsed the request. Raises DatabaseError.
        """
        loads = telemetry.get_last_loads() if elevated else None
        rows, next_url = self.paginator.split_page(usage_with_load.count_groups_with_load(loads, query)[0])
        results = [
            {
                "group": dict(zip(query.by, row.names, strict=True)),
                **{name: getattr(row, name) for name in ("total", "held", "free", "reserved")},
                "load": row.load if loads else None,
            }
            for row in rows
        ]
        return {"next": next_url, "previous": None, "results": self.get_serializer(results, many=True).data}


class SecondsField(serializers.FloatField):
    """A number of seconds; text is refused."""

    def to_internal_value(self, data: Any) -> float:
        """Return an integer or a float as a float. Raises ValidationError for a text, a boolean or anything else."""
        if isinstance(data, bool) or not isinstance(data, int | float):
            self.fail("invalid")
        return float(super().to_internal_value(data))


class QuestionSerializer(ClosedSerializer):
    """A question to the hosts: their load, and how many more requests of a profile they have room for."""

    hosts = serializers.ListField(
        child=StrictTextField(max_length=255),
        required=False,
        min_length=1,
        max_length=census.MAX_NAMED_HOSTS,
        help_text="Names; all hosts if absent.",
    )
    profile = StrictTextField(
        max_length=255, required=False, help_text="Name of a device profile; any unit will do if absent."
    )
    count = StrictIntegerField(
        min_value=1,
        max_value=census.MAX_REQUEST_COUNT,
        required=False,
        help_text="How many more requests of it; 1 if absent.",
    )
    within_s = SecondsField(
        min_value=0.1,
        max_value=census.MAX_WAIT_S,
        required=False,
        help_text=f"Seconds to wait for answers; {census.DEFAULT_WAIT_S:g} if absent.",
    )


class CandidateSerializer(serializers.Serializer[Any]):
    """One host and its answer."""

    host = HostReference(read_only=True)
    free = serializers.IntegerField(read_only=True, help_text="Units that fit what is asked for.")
    room = serializers.IntegerField(read_only=True, help_text="How many requests find a place, at most `count`.")
    fits = serializers.BooleanField(read_only=True)
    why = serializers.CharField(read_only=True, help_text="Why the host does not fit.")
    load = LoadSerializer(read_only=True, allow_null=True, help_text="Null if the host did not answer.")


class MissingSerializer(serializers.Serializer[Any]):
    """A host that did not answer, and why."""

    host = serializers.CharField(read_only=True)
    why = serializers.CharField(read_only=True)


class CensusSerializer(serializers.Serializer[Any]):
    """Answers of the hosts: those that fit come first, the least busy first; hosts whose load is unknown come last
    in each part.
    """

    came = serializers.IntegerField(read_only=True, help_text="How many hosts answered.")
    fitting = serializers.IntegerField(read_only=True)
    took_s = serializers.FloatField(read_only=True)
    left_out = serializers.IntegerField(
        read_only=True, help_text="Hosts beyond the first 10 000, which were not asked."
    )
    missing = MissingSerializer(many=True, read_only=True)
    hosts = CandidateSerializer(many=True, read_only=True)


class CensusView(CollectionView):
    """Load census: ask hosts how busy they are."""

    policy = "census"
    only_reads = True
    """A census changes nothing, although it is a POST."""
    http_method_names = ["post"]
    serializer_class = CensusSerializer
    body_serializers = {"create": QuestionSerializer}
    response_serializers = {"create": (200, CensusSerializer)}
    queryset = Device.objects.none()

    def create(self, request: Request) -> Response:
        """Ask hosts now how busy they are, and which of them have room for so many more requests of a profile.

        Nothing is reserved for the caller: Placement and the bind decide again.
        """
        body = self.validate_body()
        hosts = tuple(body.pop("hosts")) if "hosts" in body else None
        result = census.take_census(census.CensusQuestion(hosts, **body))
        missing = [{"host": host.name, "why": why} for host, why in result.missing]
        numbers = {name: getattr(result, name) for name in ("came", "fitting", "took_s", "left_out")}
        answer = {**numbers, "missing": missing, "hosts": result.rows}
        return Response(CensusSerializer(answer, context=self.get_serializer_context()).data)
