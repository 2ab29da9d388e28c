"""Render events as rows of a table, for console pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.utils.safestring import SafeString

from accelerators.models import Event
from accelerators.ui import badges

ROWS = 25
"""Number of events that a page shows, the newest ones; the list of events has them all."""

PAGES = {
    "device": "device",
    "host": "host",
    "command": "command",
    "bulk": "bulk",
    "request": "acceleratorrequest",
    "profile": "deviceprofile",
}
"""The model whose admin page shows a subject, by subject type. Other types have no page."""


@dataclass(frozen=True)
class Row:
    """One event, ready for a template."""

    at: SafeString
    action: SafeString
    subject: SafeString | str
    host: SafeString | str
    changes: SafeString
    reason: str
    by: str


def rows(events: Iterable[Event]) -> list[Row]:
    """Render events as rows, in the order given; each row shows at most four changes."""
    return [
        Row(
            at=badges.ago(event.at),
            action=badges.action(event.action),
            subject=subject(event),
            host=host(event),
            changes=badges.changes(event.changes, most=4),
            reason=event.reason,
            by=by(event),
        )
        for event in events
    ]


def subject(event: Event) -> SafeString | str:
    """Render the subject of an event: as a link if its type has a page, else as its name; a dash if it has no name."""
    if event.subject and (model := PAGES.get(event.subject_type)):
        return badges.link(model, event.subject, event.subject_name or str(event.subject)[:8])
    return event.subject_name or badges.NOTHING


def host(event: Event) -> SafeString | str:
    """Render the host of an event as a link; a dash if it has none."""
    return badges.link("host", event.host, event.host) if event.host else badges.NOTHING


def by(event: Event) -> str:
    """Return the actor and source of an event; for an agent only the source, because its name is the host's name."""
    return event.source if event.actor == event.host else f"{event.actor} ({event.source})"
