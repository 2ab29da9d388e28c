"""Render events as rows of a table, for console pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.utils.safestring import SafeString

from accelerators.models import Event
from accelerators.ui import badges

MAX_EVENTS = 25
"""Number of events that a page shows, the newest ones; the list of events has them all."""

PAGE_MODELS = {
    "device": "device",
    "host": "host",
    "command": "command",
    "bulk": "bulk",
    "request": "acceleratorrequest",
    "profile": "deviceprofile",
}
"""The model whose admin page shows a subject, by subject type. Other types have no page."""


@dataclass(frozen=True)
class EventRow:
    """One event, ready for a template. `by` is its actor and source as text (`describe_actor`)."""

    at: SafeString
    action: SafeString
    subject: SafeString | str
    host: SafeString | str
    changes: SafeString
    reason: str
    by: str


def render_events(events: Iterable[Event]) -> list[EventRow]:
    """Render events as rows, in the order given; each row shows at most four changes."""
    return [
        EventRow(
            at=badges.render_relative_time(event.at),
            action=badges.render_event_action(event.action),
            subject=render_subject(event),
            host=render_host(event),
            changes=badges.render_changes(event.changes, max_changes=4),
            reason=event.reason,
            by=describe_actor(event),
        )
        for event in events
    ]


def render_subject(event: Event) -> SafeString | str:
    """Render the subject of an event: as a link if its type has a page, else as its name; a dash if it has no name."""
    if event.subject and (model := PAGE_MODELS.get(event.subject_type)):
        return badges.render_page_link(model, event.subject, event.subject_name or str(event.subject)[:8])
    return event.subject_name or badges.DASH


def render_host(event: Event) -> SafeString | str:
    """Render the host of an event as a link; a dash if it has none."""
    return badges.render_host_link(event.host)


def describe_actor(event: Event) -> str:
    """Return the actor and source of an event; for an agent only the source, because its name is the host's name."""
    return event.source if event.actor == event.host else f"{event.actor} ({event.source})"
