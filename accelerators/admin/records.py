"""What happened (events) and what is still to be told (intents)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib import admin
from django.db.models import Q, QuerySet
from django.http import HttpRequest
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.admin import marks, timeline
from accelerators.admin.listing import ReadOnly, as_uuid
from accelerators.models import Event, Intent

STUCK_AFTER = 10
"""Failures after which an intent is shown as stuck."""


class Window(admin.SimpleListFilter):
    """How far back. Each opens only the partitions it needs."""

    title, parameter_name = "time", "last"
    HOURS = {"hour": 1, "day": 24, "week": 168}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(name, f"last {name}") for name in self.HOURS]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Event]) -> QuerySet[Event]:
        hours = self.HOURS.get(self.value() or "")
        return queryset.filter(at__gte=datetime.now(UTC) - timedelta(hours=hours)) if hours else queryset


class Subject(admin.SimpleListFilter):
    """What kind of thing it happened to."""

    title, parameter_name = "subject", "about"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [(word, word) for word in ("device", "command", "driver", "host", "agent", "request", "profile", "list")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Event]) -> QuerySet[Event]:
        return queryset.filter(subject_type=self.value()) if self.value() else queryset


@admin.register(Event)
class EventAdmin(ReadOnly):
    """The audit: append-only in the database, so nothing can be changed here by anyone, ever."""

    list_display = ("time", "shown_action", "shown_subject", "shown_host", "shown_changes", "by")
    list_display_links = ("shown_action",)
    list_filter = (Window, Subject, "source")
    ordering = ("-at", "-id")
    sortable_by = ()
    search_fields = ("subject_name",)
    search_help_text = "subject's uuid or name, host, action, actor"
    fields = (
        "time",
        "shown_action",
        "shown_subject",
        "shown_host",
        "all_changes",
        "reason",
        "source",
        "actor",
        "request_id",
    )
    readonly_fields = fields
    exports = {
        "time": ("at",),
        "shown_action": ("action",),
        "shown_subject": ("subject_type", "subject", "subject_name"),
        "shown_host": ("host",),
        "shown_changes": ("changes", "reason"),
        "by": ("source", "actor", "request_id"),
    }
    empty = "No events yet. Every change of the inventory will be one."

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Event | None:
        known = object_id.isdecimal() and len(object_id) < 19
        return Event.objects.filter(pk=int(object_id)).first() if known else None

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Event], search_term: str
    ) -> tuple[QuerySet[Event], bool]:
        """By index where the term is a uuid; names match from their beginning, so that a search stays cheap."""
        for term in search_term.split():
            if uuid := as_uuid(term):
                queryset = queryset.filter(subject=uuid)
            else:
                queryset = queryset.filter(
                    Q(host__startswith=term)
                    | Q(subject_name__startswith=term)
                    | Q(action__startswith=term)
                    | Q(actor__startswith=term)
                )
        return queryset, False

    @display(description="Time")
    def time(self, event: Event) -> SafeString:
        return marks.ago(event.at)

    @display(description="Action")
    def shown_action(self, event: Event) -> SafeString:
        return marks.action(event.action)

    @display(description="Subject")
    def shown_subject(self, event: Event) -> SafeString | str:
        return timeline.subject(event)

    @display(description="Host")
    def shown_host(self, event: Event) -> SafeString | str:
        return timeline.host(event)

    @display(description="By")
    def by(self, event: Event) -> str:
        return timeline.by(event)

    @display(description="What changed, and why")
    def shown_changes(self, event: Event) -> SafeString:
        changes = marks.changes(event.changes, most=2) if event.changes else ""
        reason = format_html('<span class="reason">{}</span>', event.reason) if event.reason else ""
        return format_html("{}{}", changes, reason) if changes or reason else marks.NOTHING

    @display(description="Changes")
    def all_changes(self, event: Event) -> SafeString:
        return marks.changes(event.changes) if event.changes else marks.NOTHING


class Stuck(admin.SimpleListFilter):
    """Intents that failed too often to be left alone."""

    title, parameter_name = "progress", "stuck"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("yes", "stuck"), ("no", "waiting")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Intent]) -> QuerySet[Intent]:
        if self.value() == "yes":
            return queryset.filter(attempts__gte=STUCK_AFTER)
        return queryset.filter(attempts__lt=STUCK_AFTER) if self.value() == "no" else queryset


@admin.register(Intent)
class IntentAdmin(ReadOnly):
    """What the conductor still has to tell Placement, Nova or an agent."""

    list_display = ("kind", "key", "progress", "attempts", "next", "last_error", "created")
    list_filter = (Stuck, "kind")
    ordering = ("-attempts", "id")
    search_fields = ("uuid__startswith", "kind__startswith", "key__startswith")
    search_help_text = "kind, key, uuid"
    empty = "Nothing waits to be told: everything outside the database knows what it should."

    @display(description="Progress", ordering="attempts")
    def progress(self, intent: Intent) -> SafeString:
        if intent.attempts >= STUCK_AFTER:
            return marks.mark("stuck", "bad", intent.last_error)
        return marks.mark("retrying", "warn", intent.last_error) if intent.attempts else marks.mark("waiting", "calm")

    @display(description="Next try", ordering="next_at")
    def next(self, intent: Intent) -> SafeString:
        return marks.ago(intent.next_at)

    @display(description="Since", ordering="-created_at")
    def created(self, intent: Intent) -> SafeString:
        return marks.ago(intent.created_at)
