"""Console lists of events (the audit) and intents (the outbox), and the page of one event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import reduce
from operator import or_
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import CharField, Max, Q, QuerySet, Value
from django.db.models.functions import Cast, Now
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.audit import sealing
from accelerators.domain.uuids import uuid_bounds
from accelerators.models import Device, Event, Host, Intent
from accelerators.models.records import event_has_words, has_subject_type
from accelerators.ui import badges, first_events, timeline
from accelerators.ui.changelist import (
    AFTER_PARAM,
    MAX_LISTED_KEYS,
    ConsoleChangeList,
    ReadOnlyModelAdmin,
    note_exact_word,
    parse_uuid,
)
from accelerators.ui.empty_lists import Source
from accelerators.ui.search import BEGINNING_MARK, build_word_conditions, list_search_prefixes

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
        return queryset.filter(at__gte=Now() - timedelta(hours=hours)) if hours else queryset


class EventChangeList(ConsoleChangeList):
    """List of events that finds all matches of a search or of filters first and then sorts them.

    Otherwise the database would read events from the newest on until a page is full. For words that are each frequent
    but rare together, or that only old events have, that was a million events.
    """

    def get_results(self, request: HttpRequest) -> None:
        """Load the rows of the page.

        The matches of a search or of filters with at most `BoundedPaginator.EXACT` of them are sorted by an expression
        that no index has, so that the database finds all of them first. If there are more, at most
        `first_events.MAX_READ_EVENTS` events are read from the beginning of the list on, and if these do not fill the
        page, as many from the newest match on. Only if these do not fill it either, all matches are sorted. Costs at
        most six statements.
        """
        super().get_results(request)
        if not ((self.query or self.has_active_filters) and self.result_count):
            return
        page = slice((self.page_num - 1) * self.list_per_page, self.page_num * self.list_per_page)
        if self.paginator.estimated:
            for find_time in (self._find_beginning, self._find_newest_match):
                rows = list(first_events.select_matches_near(self.queryset, find_time(), is_descending=True)[page])
                if len(rows) == self.list_per_page:
                    self.result_list = rows
                    return
        self.result_list = first_events.sort_all_matches(self.queryset, is_descending=True)[page]

    def _find_beginning(self) -> datetime | None:
        """Return the time of the row behind which the list begins; None for a list that begins with the newest event.
        Costs one statement or none."""
        if not self.is_continued:
            return None
        return Event.objects.filter(pk=self.params[AFTER_PARAM]).values_list("at", flat=True).first()

    def _find_newest_match(self) -> datetime | None:
        """Return the time of the newest match. The database finds all matches for it, but sorts none. Costs one
        statement."""
        found: datetime | None = self.queryset.order_by().aggregate(at=Max(first_events.UNINDEXED_TIME))["at"]
        return found


class SubjectTypeListFilter(admin.SimpleListFilter):
    """Filter by the type of the event's subject."""

    title, parameter_name = "subject", "about"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the types of SUBJECT_TYPES as choices."""
        return [(word, word) for word in SUBJECT_TYPES]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Event]) -> QuerySet[Event]:
        """Return the events about subjects of the chosen type; all if none is chosen."""
        return queryset.filter(has_subject_type(self.value() or "")) if self.value() else queryset


@admin.register(Event)
class EventAdmin(ReadOnlyModelAdmin):
    """List of events (the audit) and the page of one. The database table is append-only: nobody can change an event."""

    list_display = ("time", "shown_action", "shown_subject", "shown_host", "shown_changes", "by")
    list_display_links = ("shown_action",)
    list_filter = (EventAgeListFilter, SubjectTypeListFilter, "source")
    ordering = ("-at", "-id")
    sortable_by = ()
    search_fields = ("subject_name",)
    search_help_text = "beginnings of subject, uuid, serial, host, action, actor, request id; actor:… host:… since:…"
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
        `until:` limit the time. Every other term matches as `_build_word_conditions` describes. Terms after the first
        MAX_SEARCH_TERMS are ignored. Costs one statement. Raises ValueError for an invalid time.
        """
        terms = search_term.split()[:MAX_SEARCH_TERMS]
        for name, _, value in [term.partition(":") for term in terms if _is_exact_term(term)]:
            lookup, exact_value = EXACT_LOOKUPS[name], value[:255]
            if name == "kind":
                queryset = queryset.filter(has_subject_type(exact_value))
            elif name in ("since", "until"):
                queryset = queryset.filter(**{lookup: _parse_time(exact_value)})
            elif name == "host":
                queryset = queryset.filter(host=exact_value)
            else:  # no other index than `event_words` has these fields
                queryset = queryset.filter(event_has_words(exact_value), **{lookup: exact_value})
        words = []
        for term in dict.fromkeys(term[:255] for term in terms if not _is_exact_term(term)):
            if uuid := parse_uuid(term):
                queryset = queryset.filter(subject=uuid)
            else:
                words.append(term)
        for condition in self._build_word_conditions(request, words):
            queryset = queryset.filter(condition)
        return queryset, False

    def _build_word_conditions(self, request: HttpRequest, words: list[str]) -> Iterator[Q]:
        """Yield for each word the condition that it is the beginning of a word of the event, of the uuid of its
        subject, or of the PCI address, the serial number or the key of the device that it is about.

        The name of a host must be a whole word of the event, so that cmp1 does not find cmp10. A word that ends in `*`
        is always a beginning.

        If more than MAX_LISTED_KEYS devices have such an address or serial number, they are not searched, and a message
        says so. Costs one statement for all words.
        """
        for word, (host_names, subjects) in _find_hosts_and_devices(words).items():
            if word in host_names:
                if len(host_names) > 1:
                    note_exact_word(request, word)
                yield Q(event_has_words(word, exact=True))
                continue
            text = word.removesuffix(BEGINNING_MARK)
            condition = reduce(
                or_, (Q(event_has_words(one)) for one in dict.fromkeys([text, *list_search_prefixes("address", text)]))
            )
            if bounds := uuid_bounds(text):
                condition |= Q(subject__range=bounds)
            if len(subjects) > MAX_LISTED_KEYS:
                note = f"More than {MAX_LISTED_KEYS} devices have an address or a serial number that begins with"
                note += f" “{text}”. Their events are listed only if they contain this word. To find the others,"
                note += " search for more of it, or for the beginning of the device's uuid."
                messages.info(request, note, fail_silently=True)
            elif subjects:
                condition |= Q(subject__in=subjects)
            yield condition

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


def _find_hosts_and_devices(words: Sequence[str]) -> dict[str, tuple[list[str], list[str]]]:
    """Return for each word two names of hosts that begin with it, the word itself first if it is one, and the uuids of
    at most MAX_LISTED_KEYS + 1 devices whose address or key begins with it. Costs one statement for all words.

    The mark of a beginning is removed from a word for the search of devices, but not for that of hosts.
    """
    found: dict[str, tuple[list[str], list[str]]] = {word: ([], []) for word in words}
    queries = []
    for word in words:
        hosts = Host.objects.filter(name__startswith=word).order_by("name")
        queries.append(_select_texts(word, False, hosts, "name")[:2])
        if conditions := build_word_conditions(("address", "key"), word).beginnings:
            devices = Device.objects.filter(reduce(or_, conditions)).order_by()
            queries.append(_select_texts(word, True, devices, "uuid")[: MAX_LISTED_KEYS + 1])
    if queries:
        for word, is_device, text in queries[0].union(*queries[1:], all=True):
            found[word][is_device].append(text)
    return found


def _select_texts(word: str, is_device: bool, rows: QuerySet[Any], field: str) -> QuerySet[Any, tuple[Any, ...]]:
    """Return the query for the word, whether the rows are devices, and this field of the rows as text."""
    return rows.values_list(Value(word, CharField()), Value(is_device), Cast(field, CharField()))


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
