"""The course of a request in one line of time, from its events and its commands; and what Nova was told of it.

Called by `admin.requests`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from django.utils.safestring import SafeString

from accelerators.domain.states import RESOLVED
from accelerators.models import AcceleratorRequest, Command, Event, Intent
from accelerators.requests import notices
from accelerators.ui import badges
from accelerators.ui.timeline import by

EVENTS, COMMANDS = 100, 20
"""So many of the newest are shown; the lists have them all."""
TOLD = ("request.notified", "request.notice_refused")
STEPS = {
    "request.created": ("requested", "calm"),
    "request.bind_started": ("bind started", "busy"),
    "request.bound": ("bound", "good"),
    "request.bind_failed": ("bind failed", "bad"),
    "request.unbound": ("unbound", "calm"),
    "request.notified": ("Nova was told", "good"),
    "request.notice_refused": ("Nova refused", "bad"),
}
"""The word and the tone of an event; others are shown as they are called."""


@dataclass(frozen=True)
class Happened:
    """A moment of the course; `url` is the page of the command it belongs to."""

    at: datetime
    word: str
    tone: str
    said: str
    by: str
    url: str = ""


@dataclass(frozen=True)
class Step:
    """The same for a template; `after` is how long after the one before."""

    what: Happened
    mark: SafeString
    at: SafeString
    after: str


def steps(events: Iterable[Event], commands: Iterable[Command]) -> list[Step]:
    """The oldest first."""
    happened = [*map(_event, events), *(one for command in commands for one in _command(command))]
    happened.sort(key=lambda one: one.at)
    befores = [None, *(one.at for one in happened)]
    return [
        Step(one, badges.mark(one.word, one.tone), badges.ago(one.at), badges.lasted(before, one.at) if before else "")
        for before, one in zip(befores, happened, strict=False)
    ]


def _event(event: Event) -> Happened:
    plain = (event.action.rpartition(".")[2].replace("_", " "), "calm")
    word, tone = STEPS.get(event.action, plain)
    return Happened(event.at, word, tone, event.reason, by(event))


def _command(command: Command) -> Iterator[Happened]:
    """From when its agent has it: that it was ordered goes with the event that wanted it."""
    op, agent, url = command.op, f"agent of {command.host.name}", badges.page("command", command.pk)
    if command.taken_at:
        yield Happened(command.taken_at, f"{op}: taken", "busy", "", agent, url)
    if command.started_at:
        yield Happened(command.started_at, f"{op}: begun", "busy", command.progress, agent, url)
    if command.ended_at:  # it counts when its report is applied, and was answered before
        tone, at = badges.COMMAND_STATES[command.state], command.answered_at or command.ended_at
        yield Happened(at, f"{op}: {command.state}", tone, command.text, agent, url)


def took(steps: Iterable[Step]) -> str:
    """From the first bind's begin to its end: "bound after 1.2 s", "bind failed after 60 s"; '' without one."""
    begun = None
    for one in (step.what for step in steps):
        if begun and one.word in ("bound", "bind failed"):
            return f"{one.word} after {badges.lasted(begun, one.at)}"
        if one.word == "bind started" or (one.word == "requested" and begun is None):
            begun = one.at
    return ""


@dataclass(frozen=True)
class Telling:
    """One answer of Nova, or what is still to be told."""

    at: SafeString
    mark: SafeString
    status: str
    said: str


def told(request: AcceleratorRequest, events: Iterable[Event]) -> list[Telling]:
    """The oldest first; one statement, for what waits. While Nova is away only the last try is remembered."""
    tellings = [_answer(event) for event in sorted(events, key=lambda event: event.at) if event.action in TOLD]
    if waits := Intent.objects.filter(kind=notices.KIND, key=str(request.uuid)).first():
        status = "completed" if waits.payload.get("completed") else "failed"
        tried = f"tried {waits.attempts} time{'' if waits.attempts == 1 else 's'}, the last answer: {waits.last_error}"
        mark = badges.mark("retrying", "warn") if waits.attempts else badges.mark("waiting", "calm")
        tellings.append(Telling(badges.ago(waits.next_at), mark, status, tried if waits.attempts else "to be told now"))
    return tellings


def _answer(event: Event) -> Telling:
    status = str((event.changes.get("notice") or [None, ""])[1])
    mark = badges.mark("answered" if event.action == TOLD[0] else "refused", STEPS[event.action][1])
    return Telling(badges.ago(event.at), mark, status, event.reason.removeprefix(f"Nova was told {status}: "))


def untold(request: AcceleratorRequest) -> str:
    """Why there is nothing to show of Nova, in a sentence."""
    if request.state not in RESOLVED:
        return "Nova hears of a request when it is bound or its bind has failed."
    return "Nova was not told: no cloud is configured (CYBORG_CLOUD, OS_…), or CYBORG_NOVA_ENDPOINT is off."
