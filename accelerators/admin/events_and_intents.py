"""Console lists of events (the audit) and intents (the outbox), and the page of one event."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import DateTimeField, ExpressionWrapper, F, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.audit import sealing
from accelerators.models import Event, Intent
from accelerators.models.records import event_has_words
from accelerators.runtime import database_clock
from accelerators.ui import badges, timeline
from accelerators.ui.changelist import ConsoleChangeList, ReadOnlyModelAdmin, parse_uuid
from accelerators.ui.empty_lists import Source

STUCK_AFTER = 10
"""Failures after which an intent is shown as stuck."""
SUBJECT_TYPES = (
    *("device", "command", "driver", "backend", "host", "agent", "report", "request", "instance", "attachment"),
    *("profile", "rule", "image", "rollout", "bulk", "placement", "nova", "discrepancy", "events", "user", "token"),
    "list",
)
EXACT_LOOKUPS = {
    "actor": "actor",
    "host": "host",
    "kind": "subject_type",
    "action": "action",
    "request": "request_id",
    "since": "at__gte",
    "until": "at__lt",
}
"""Query lookup of a search term with a prefix, by prefix: `actor:olga`, `since:2026-11-01T10:30`."""
MAX_SEARCH_TERMS, MAX_SUBJECT_EVENTS = 10, 10
"""MAX_SEARCH_TERMS: number of search terms that are used, the rest is ignored. MAX_SUBJECT_EVENTS: number of other
events of the same subject on the page of an event."""


class EventAgeListFilter(admin.SimpleListFilter):
    """Filter by age. PostgreSQL reads only the partitions that the period needs."""

    title, parameter_name = "time", "last"
    HOURS = {"hour": 1, "day": 24, "week": 168}

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the choices: last hour, last day, last week."""
        return [(name, f"last {name}") for name in self.HOURS]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Event]) -> QuerySet[Event]:
        """Return the events of the chosen period before now; all if none is chosen."""
        hours = self.HOURS.get(self.value() or "")
        return queryset.filter(at__gte=database_clock.now() - timedelta(hours=hours)) if hours else queryset


class EventChangeList(ConsoleChangeList):
    """List of events that finds all matches of a search first and then sorts them.

    Otherwise the database would read events from the newest on until a page is full; for words that are each frequent
    but rare together, that was a million events. A search with more matches than are counted exactly is still read from
    the newest event on, because its pages fill quickly.
    """

    def get_results(self, request: HttpRequest) -> None:
        """Load the rows of the page.

        The rows of a search with at most `BoundedPaginator.EXACT` matches are sorted by an expression that no index
        has, so that the database finds all matches first.
        """
        super().get_results(request)
        if self.query and self.result_count and not self.paginator.estimated:
            offset = (self.page_num - 1) * self.list_per_page
            newest = ExpressionWrapper(F("at") + timedelta(0), output_field=DateTimeField())  # no index has this order
            self.result_list = self.queryset.order_by(newest.desc(), "-id")[offset : offset + self.list_per_page]


class SubjectTypeListFilter(admin.SimpleListFilter):
    """Filter by the type of the event's subject."""

    title, parameter_name = "subject", "about"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the types of SUBJECT_TYPES as choices."""
        return [(word, word) for word in SUBJECT_TYPES]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Event]) -> QuerySet[Event]:
        """Return the events about subjects of the chosen type; all if none is chosen."""
        return queryset.filter(subject_type=self.value()) if self.value() else queryset


@admin.register(Event)
class EventAdmin(ReadOnlyModelAdmin):
    """List of events (the audit) and the page of one. The database table is append-only: nobody can change an event."""

    list_display = ("time", "shown_action", "shown_subject", "shown_host", "shown_changes", "by")
    list_display_links = ("shown_action",)
    list_filter = (EventAgeListFilter, SubjectTypeListFilter, "source")
    ordering = ("-at", "-id")
    sortable_by = ()
    search_fields = ("subject_name",)
    search_help_text = "beginnings of subject, host, action, actor, request id; a uuid; actor:… host:… kind:… since:…"
    exports = {
        "time": ("at",),
        "shown_action": ("action",),
        "shown_subject": ("subject_type", "subject", "subject_name"),
        "shown_host": ("host",),
        "shown_changes": ("changes", "reason"),
        "by": ("source", "actor", "request_id"),
    }
    empty = "No events yet. Every change of the inventory is recorded as an event."
    sources = (Source("Hosts", "accelerators.host"), Source("Devices", "accelerators.device"))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Event | None:
        """Return an event by its id; None if `object_id` is no number or there is no such event."""
        is_id = object_id.isdecimal() and len(object_id) < 19
        return Event.objects.filter(pk=int(object_id)).first() if is_id else None

    def get_search_results(
        self, request: HttpRequest, queryset: QuerySet[Event], search_term: str
    ) -> tuple[QuerySet[Event], bool]:
        """Search events; every kind of search term uses an index, and all terms must match.

        A uuid is that of the subject. A term with a prefix of EXACT_LOOKUPS matches the whole value; `since:` and
        `until:` limit the time. Every other term must be the beginning of a word of the event (`event_has_words`).
        Terms after the first MAX_SEARCH_TERMS are ignored. Raises ValueError for an invalid time.
        """
        terms = search_term.split()[:MAX_SEARCH_TERMS]
        for name, _, value in [term.partition(":") for term in terms if _is_exact_term(term)]:
            exact_value = value[:255]
            queryset = queryset.filter(
                **{EXACT_LOOKUPS[name]: _parse_time(exact_value) if name in ("since", "until") else exact_value}
            )
            if name in ("actor", "request", "action"):  # no other index than `event_words` has these fields
                queryset = queryset.filter(event_has_words(exact_value))
        terms = [term for term in terms if not _is_exact_term(term)]
        for uuid in filter(None, map(parse_uuid, terms)):
            queryset = queryset.filter(subject=uuid)
        words = [term[:255] for term in terms if parse_uuid(term) is None]
        return (queryset.filter(event_has_words(*words)) if words else queryset), False

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ConsoleChangeList]:
        """Return `EventChangeList`."""
        return EventChangeList

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the page of one event: what changed, by whom and why, its seal, and related events.

        Related events are those with the same request id, and the latest ones of the same subject. Raises Http404 if
        there is no such event; PermissionDenied for a user who may not view it, and for methods other than GET and
        HEAD.
        """
        event = self.get_object(request, object_id)
        if event is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if request.method not in ("GET", "HEAD") or not self.has_view_permission(request, event):
            raise PermissionDenied
        others = Event.objects.exclude(pk=event.pk)
        same_request = (
            others.filter(event_has_words(event.request_id), request_id=event.request_id) if event.request_id else None
        )
        context = self.admin_site.each_context(request) | {
            "title": str(event),
            "opts": self.opts,
            "event": event,
            "action": badges.render_event_action(event.action),
            "at": badges.render_relative_time(event.at),
            "subject": timeline.render_subject(event),
            "host": timeline.render_host(event),
            "by": timeline.describe_actor(event),
            "changed": badges.list_changes(event.changes),
            "seal": sealing.find_seal_of_event(event),
            "same_request_events": timeline.render_events(same_request[: timeline.MAX_EVENTS])
            if same_request is not None
            else [],
            "same_subject_events": timeline.render_events(others.filter(subject=event.subject)[:MAX_SUBJECT_EVENTS])
            if event.subject
            else [],
        }
        return TemplateResponse(request, "accelerators/admin/event.html", context)

    @display(description="Time")
    def time(self, event: Event) -> SafeString:
        """Render when the event happened."""
        return badges.render_relative_time(event.at)

    @display(description="Action")
    def shown_action(self, event: Event) -> SafeString:
        """Render the event's action as a badge."""
        return badges.render_event_action(event.action)

    @display(description="Subject")
    def shown_subject(self, event: Event) -> SafeString | str:
        """Render the event's subject: as a link if its type has a page, else as its name."""
        return timeline.render_subject(event)

    @display(description="Host")
    def shown_host(self, event: Event) -> SafeString | str:
        """Render the event's host as a link; a dash if it has none."""
        return timeline.render_host(event)

    @display(description="By")
    def by(self, event: Event) -> str:
        """Return the event's actor and source."""
        return timeline.describe_actor(event)

    @display(description="What changed, and why")
    def shown_changes(self, event: Event) -> SafeString:
        """Render at most two changes of the event, and its reason; a dash if it has neither."""
        changes = badges.render_changes(event.changes, max_changes=2) if event.changes else ""
        reason = format_html('<span class="reason">{}</span>', event.reason) if event.reason else ""
        return format_html("{}{}", changes, reason) if changes or reason else badges.DASH


def _is_exact_term(term: str) -> bool:
    """Return whether the search term has a prefix of EXACT_LOOKUPS and a value, as `actor:olga` has."""
    name, _, value = term.partition(":")
    return bool(value) and name in EXACT_LOOKUPS


def _parse_time(text: str) -> datetime:
    """Parse an ISO time; it is in UTC unless it has an offset. Raises ValueError for text that is no ISO time."""
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


class StuckIntentListFilter(admin.SimpleListFilter):
    """Filter by whether an intent is stuck: it has failed at least STUCK_AFTER times."""

    title, parameter_name = "progress", "stuck"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the two choices: stuck and waiting."""
        return [("yes", "stuck"), ("no", "waiting")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Intent]) -> QuerySet[Intent]:
        """Return the stuck intents, the others or, if nothing is chosen, all."""
        if self.value() == "yes":
            return queryset.filter(attempts__gte=STUCK_AFTER)
        return queryset.filter(attempts__lt=STUCK_AFTER) if self.value() == "no" else queryset


@admin.register(Intent)
class IntentAdmin(ReadOnlyModelAdmin):
    """List of intents: what the conductor still has to send to Placement, Nova or an agent."""

    list_display = ("kind", "key", "progress", "attempts", "next", "last_error", "created")
    list_filter = (StuckIntentListFilter, "kind")
    ordering = ("-attempts", "id")
    search_fields = ("uuid__startswith", "kind__startswith", "key__startswith")
    search_help_text = "kind, key, uuid"
    empty = "Nothing waits to be sent: Placement, Nova and the agents have received everything."
    sources = (Source("Placement", "placement_sync.tree"),)

    @display(description="Progress", ordering="attempts")
    def progress(self, intent: Intent) -> SafeString:
        """Render a badge by the number of failed attempts (waiting, retrying, stuck), with the last error on hover."""
        if intent.attempts >= STUCK_AFTER:
            return badges.render_badge("stuck", "bad", intent.last_error)
        return (
            badges.render_badge("retrying", "warn", intent.last_error)
            if intent.attempts
            else badges.render_badge("waiting", "calm")
        )

    @display(description="Next try", ordering="next_at")
    def next(self, intent: Intent) -> SafeString:
        """Render when the intent is tried next."""
        return badges.render_relative_time(intent.next_at)

    @display(description="Since", ordering="-created_at")
    def created(self, intent: Intent) -> SafeString:
        """Render when the intent was made."""
        return badges.render_relative_time(intent.created_at)
