"""Build the timeline of an accelerator request from its events and commands, and the list of its notices to Nova."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from django.utils.safestring import SafeString

from accelerators.domain.choices import Tone
from accelerators.domain.states import BIND_ENDED_STATES, CommandState
from accelerators.models import AcceleratorRequest, Command, Event, Intent
from accelerators.requests import notices
from accelerators.ui import badges
from accelerators.ui.timeline import describe_actor

MAX_EVENTS, MAX_COMMANDS = 100, 20
"""Maximum number of events and commands in a timeline, the newest ones; the lists have them all."""
NOTICE_ACTIONS = ("request.notified", "request.notice_refused")
EVENT_WORDS: dict[str, tuple[str, Tone]] = {
    "request.created": ("requested", "calm"),
    "request.bind_started": ("bind started", "busy"),
    "request.bound": ("bound", "good"),
    "request.bind_failed": ("bind failed", "bad"),
    "request.unbound": ("unbound", "calm"),
    "request.notified": ("Nova was notified", "good"),
    "request.notice_refused": ("Nova refused the notice", "bad"),
}
"""Word and tone of an event, by its action. Other events are shown with the verb of their action, in a calm tone."""


@dataclass(frozen=True)
class TimelineEntry:
    """One entry of a timeline, from an event or a command; `url` is the command's page, '' for an event."""

    at: datetime
    word: str
    tone: Tone
    text: str
    actor: str
    url: str = ""


@dataclass(frozen=True)
class RenderedTimelineEntry:
    """One entry of a timeline, ready for a template; `elapsed` is the time since the entry before it."""

    entry: TimelineEntry
    badge: SafeString
    at: SafeString
    elapsed: str


def build_timeline(events: Iterable[Event], commands: Iterable[Command]) -> list[RenderedTimelineEntry]:
    """Merge events and commands into one timeline, the oldest entry first.

    The commands must have their `host` loaded, otherwise each costs a statement.
    """
    entries = [
        *map(_build_event_entry, events),
        *(one for command in commands for one in _iterate_command_entries(command)),
    ]
    entries.sort(key=lambda one: one.at)
    previous_times = [None, *(one.at for one in entries)]
    return [
        RenderedTimelineEntry(
            entry,
            badges.render_badge(entry.word, entry.tone),
            badges.render_relative_time(entry.at),
            badges.format_duration(before, entry.at) if before else "",
        )
        for before, entry in zip(previous_times, entries, strict=False)
    ]


def _build_event_entry(event: Event) -> TimelineEntry:
    """Build the timeline entry of an event, with the word and tone of EVENT_WORDS or else the verb of its action."""
    default: tuple[str, Tone] = (event.action.rpartition(".")[2].replace("_", " "), "calm")
    word, tone = EVENT_WORDS.get(event.action, default)
    return TimelineEntry(event.at, word, tone, event.reason, describe_actor(event))


def _iterate_command_entries(command: Command) -> Iterator[TimelineEntry]:
    """Yield an entry for when the agent took the command, when it started, and when it was answered.

    The last one comes only when the command has ended; its time is that of the end if there was no answer. The order
    itself is left out, because the event that caused it, such as `request.bind_started`, is in the timeline.
    """
    op, agent, url = command.op, f"agent of {command.host.name}", badges.page_url("command", command.pk)
    if command.taken_at:
        yield TimelineEntry(command.taken_at, f"{op}: taken", "busy", "", agent, url)
    if command.started_at:
        yield TimelineEntry(command.started_at, f"{op}: started", "busy", command.progress, agent, url)
    if command.ended_at:  # a command ends when its report is applied; its answer came before
        tone, at = CommandState(command.state).tone, command.answered_at or command.ended_at
        yield TimelineEntry(at, f"{op}: {command.state}", tone, command.text, agent, url)


def describe_bind_duration(steps: Iterable[RenderedTimelineEntry]) -> str:
    """Return how long the first bind took: "bound after 1.2 s" or "bind failed after 60 s"; '' if none has ended.

    The time counts from the start of the bind, or from the creation of the request if the start is not in `steps`.
    """
    started_at = None
    for entry in (step.entry for step in steps):
        if started_at and entry.word in ("bound", "bind failed"):
            return f"{entry.word} after {badges.format_duration(started_at, entry.at)}"
        if entry.word == "bind started" or (entry.word == "requested" and started_at is None):
            started_at = entry.at
    return ""


@dataclass(frozen=True)
class NoticeRow:
    """One notice to Nova, ready for a template: answered, refused, or still to be sent.

    `status` is what is sent to Nova: completed or failed. `answer` is Nova's answer, or how often the notice was tried.
    """

    at: SafeString
    badge: SafeString
    status: str
    answer: str


def list_notices(request: AcceleratorRequest, events: Iterable[Event]) -> list[NoticeRow]:
    """Return the notices to Nova about a request, the oldest first, and at the end the one still to be sent, if any.

    `events` are those of the request. While Nova cannot be reached only the last try is stored. Costs one statement,
    for the waiting notice.
    """
    notice_rows = [
        _build_notice_row(event)
        for event in sorted(events, key=lambda event: event.at)
        if event.action in NOTICE_ACTIONS
    ]
    if pending_intent := Intent.objects.filter(kind=notices.NOTICE_INTENT, key=str(request.uuid)).first():
        status = "completed" if pending_intent.payload.get("completed") else "failed"
        plural = "" if pending_intent.attempts == 1 else "s"
        attempts_text = f"tried {pending_intent.attempts} time{plural}, last answer: {pending_intent.last_error}"
        badge = (
            badges.render_badge("retrying", "warn")
            if pending_intent.attempts
            else badges.render_badge("waiting", "calm")
        )
        notice_rows.append(
            NoticeRow(
                badges.render_relative_time(pending_intent.next_at),
                badge,
                status,
                attempts_text if pending_intent.attempts else "will be sent now",
            )
        )
    return notice_rows


def _build_notice_row(event: Event) -> NoticeRow:
    """Build the row of an event about a notice to Nova: answered or refused, the status that was sent, the answer."""
    status = str((event.changes.get("notice") or [None, ""])[1])
    badge = badges.render_badge(
        "answered" if event.action == NOTICE_ACTIONS[0] else "refused", EVENT_WORDS[event.action][1]
    )
    return NoticeRow(
        badges.render_relative_time(event.at), badge, status, event.reason.removeprefix(f"Nova was told {status}: ")
    )


def explain_missing_notices(request: AcceleratorRequest) -> str:
    """Return, as a sentence, why there are no notices to Nova; call it only if `list_notices` returns none."""
    if request.state not in BIND_ENDED_STATES:
        return "Nova is notified when a request is bound or its bind has failed."
    return "Nova was not notified: no cloud is configured (CYBORG_CLOUD, OS_…), or CYBORG_NOVA_ENDPOINT is off."
