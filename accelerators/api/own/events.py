"""Events (who changed what, when and why) and the seals over them. A project sees the events of its own requests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import django_filters as filters
from django.db.models import F, QuerySet
from rest_framework import serializers
from rest_framework.exceptions import ParseError
from rest_framework.request import Request

from accelerators.api.own.fields import RowSerializer, UrlField
from accelerators.api.own.filters import SavedViewFilter, choice_filter, host_filter
from accelerators.api.own.paging import RowPagination
from accelerators.api.own.views import CollectionView
from accelerators.domain.states import EventSource
from accelerators.models import AcceleratorRequest, Event, Seal
from accelerators.models.records import MAX_WORD_CHARS, event_has_words, has_subject_type
from accelerators.ui.extensions import SAVED_VIEW
from accelerators.ui.first_events import load_first_matches


class UtcDateTimeFilter(filters.IsoDateTimeFilter):
    """A filter by time, converted to UTC because the database accepts fewer offsets than ISO 8601 has."""

    def filter(self, qs: QuerySet[Event], value: datetime | None) -> QuerySet[Event]:
        """Filter by the time; raise ParseError (400) if in UTC it lies outside the years 1 to 9999."""
        try:
            filtered: QuerySet[Event] = super().filter(qs, value and value.astimezone(UTC))
        except OverflowError as error:
            raise ParseError(f"{value} is not a time between the years 1 and 9999.") from error
        return filtered


class EventFilter(SavedViewFilter):
    """Filter by subject, actor, host, action, source, request id or time."""

    subject = filters.UUIDFilter(help_text="The uuid of a host, device or request.")
    subject_type = filters.CharFilter(method="filter_by_subject_type", help_text="For example device, request, rule.")
    actor = filters.CharFilter(method="filter_by_word", help_text="Exactly this person, host or rule.")
    host = host_filter()
    action = filters.CharFilter(method="filter_by_word", help_text="For example device.missing.")
    source = choice_filter(EventSource)
    request_id = filters.CharFilter(
        method="filter_by_word", help_text="The x-openstack-request-id of the API call that caused the event."
    )
    since = UtcDateTimeFilter(field_name="at", lookup_expr="gte", help_text="At this time or later.")
    until = UtcDateTimeFilter(field_name="at", lookup_expr="lt", help_text="Before this time.")

    def filter_by_saved_view(self, rows: QuerySet[Event], name: str, value: str) -> QuerySet[Event]:
        """Keep the events that the saved view shows. Its conditions become those of the query itself, because a list of
        the keys of its events would be read completely for each page.

        Raises RefusedError INVALID (400) if the caller has no view of this name.
        """
        return rows & SAVED_VIEW.only()(self.request.user, Event._meta.label_lower, value).order_by()

    def filter_by_subject_type(self, rows: QuerySet[Event], name: str, value: str) -> QuerySet[Event]:
        """Keep events about subjects of this type."""
        return rows.filter(has_subject_type(value))

    def filter_by_word(self, rows: QuerySet[Event], name: str, value: str) -> QuerySet[Event]:
        """Keep events whose field `name` is exactly the value. The word index narrows the search first; it uses at most
        ten words."""
        rows = rows.filter(**{name: value})
        words = value[:MAX_WORD_CHARS].split()[:10]
        return rows.filter(event_has_words(*words)) if words else rows


class EventPagination(RowPagination):
    """Pages of events, of which a limited number is read one by one if the index of words narrows the list."""

    WORD_FILTERS = ("actor", "action", "request_id", "subject_type", "saved_view")

    def parse_request(self, request: Request, view: Any) -> None:
        """Read the request as usual, and whether it has a filter by words."""
        super().parse_request(request, view)
        self.has_word_filter = any(request.query_params.get(name) for name in self.WORD_FILTERS)

    def load_first_rows(self, queryset: QuerySet[Any], count: int) -> list[Any]:
        """Return the first `count` events of the query. Costs one statement, or two if the list is filtered by words:
        see `load_first_matches`."""
        if not self.has_word_filter:
            return super().load_first_rows(queryset, count)
        cursor = self.page_cursor
        start = Event._meta.get_field("at").to_python(cursor.value).astimezone(UTC) if cursor else None
        is_descending = self.order.startswith("-") != (cursor is not None and cursor.backwards)
        return load_first_matches(queryset, start, count, is_descending=is_descending)


class EventSerializer(RowSerializer):
    """One change: the actor, the subject, the values before and after, and the reason."""

    url = UrlField("events", source="id")
    changes = serializers.JSONField(read_only=True, help_text="For each field, the value before and after.")

    class Meta:
        model = Event
        fields = (
            "id",
            "url",
            "at",
            "action",
            "source",
            "actor",
            "request_id",
            "subject_type",
            "subject",
            "subject_name",
            "host",
            "changes",
            "reason",
        )


class EventView(CollectionView):
    """Events, newest first."""

    policy = "event"
    elevated_rule = "cyborg:event:elevated"
    sort_fields = {"at": "at"}
    default_ordering = "-at"
    etag_collections = ("events",)
    pagination_class = EventPagination
    lookup_field = "id"
    lookup_value_regex = "[0-9]{1,18}"
    serializer_class = EventSerializer
    filterset_class = EventFilter
    queryset = Event.objects.all()

    def get_queryset(self) -> QuerySet[Event]:
        """Return the events that the caller may see: all events, or only those about requests of the caller's project.

        Events of deleted requests are seen only by callers who may see all projects.
        """
        if self.can_see_all_projects():
            return super().get_queryset()
        own_requests = AcceleratorRequest.objects.filter(project_id=self.caller.project_id)
        return super().get_queryset().filter(subject__in=own_requests.values("uuid"))


class SealSerializer(RowSerializer):
    """One link of the hash chain over events."""

    url = UrlField("seals", source="number")

    class Meta:
        model = Seal
        fields = (
            "number",
            "url",
            "sealed_at",
            "month",
            "events",
            "tx",
            "event",
            "digest",
            "drops",
            "kind",
            "details",
            "key",
            "hash",
            "signature",
        )


class SealView(CollectionView):
    """Seals over events, newest first. `manage.py verify_events` computes them again and verifies their signatures."""

    policy = "seal"
    sort_fields = {"number": "number"}
    default_ordering = "-number"
    lookup_field = "number"
    lookup_value_regex = "[0-9]{1,18}"
    serializer_class = SealSerializer
    queryset = Seal.objects.defer("marks").annotate(id=F("number"))  # the cursor of a page uses `id`
