"""Events as rows that people read: on the pages of devices and hosts, and on the overview."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from django.utils.safestring import SafeString

from accelerators.models import Event
from accelerators.ui import badges

ROWS = 25
"""So many of the newest are shown on a page; the list of events has them all."""

PAGES = {
    "device": "device",
    "host": "host",
    "command": "command",
    "bulk": "bulk",
    "request": "acceleratorrequest",
    "profile": "deviceprofile",
}
"""Types of subjects that have a page, and which."""


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
    """In the order given."""
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
    """What it happened to, linked where it has a page."""
    if event.subject and (model := PAGES.get(event.subject_type)):
        return badges.link(model, event.subject, event.subject_name or str(event.subject)[:8])
    return event.subject_name or badges.NOTHING


def host(event: Event) -> SafeString | str:
    """Where it happened."""
    return badges.link("host", event.host, event.host) if event.host else badges.NOTHING


def by(event: Event) -> str:
    """Who is behind it; an agent needs no name beside its host's."""
    return event.source if event.actor == event.host else f"{event.actor} ({event.source})"
