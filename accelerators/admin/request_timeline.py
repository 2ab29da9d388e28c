"""Build the timeline of an accelerator request from its events and commands, and the list of its notices to Nova."""

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
"""Maximum number of events and commands in a timeline, the newest ones; the lists have them all."""
TOLD = ("request.notified", "request.notice_refused")
STEPS = {
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
class Happened:
    """One entry of a timeline, from an event or a command; `url` is the command's page, '' for an event."""

    at: datetime
    word: str
    tone: str
    said: str
    by: str
    url: str = ""


@dataclass(frozen=True)
class Step:
    """One entry of a timeline, ready for a template; `after` is the time since the entry before it."""

    what: Happened
    mark: SafeString
    at: SafeString
    after: str


def steps(events: Iterable[Event], commands: Iterable[Command]) -> list[Step]:
    """Merge events and commands into one timeline, the oldest entry first."""
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
    """Yield when a command was taken by its agent, started and answered.

    The order itself is left out, because the event that caused it, such as `request.bind_started`, is in the timeline.
    """
    op, agent, url = command.op, f"agent of {command.host.name}", badges.page("command", command.pk)
    if command.taken_at:
        yield Happened(command.taken_at, f"{op}: taken", "busy", "", agent, url)
    if command.started_at:
        yield Happened(command.started_at, f"{op}: started", "busy", command.progress, agent, url)
    if command.ended_at:  # a command ends when its report is applied; its answer came before
        tone, at = badges.COMMAND_STATES[command.state], command.answered_at or command.ended_at
        yield Happened(at, f"{op}: {command.state}", tone, command.text, agent, url)


def took(steps: Iterable[Step]) -> str:
    """Return how long the first bind took: "bound after 1.2 s" or "bind failed after 60 s"; '' if none has ended.

    The time counts from the start of the bind, or from the creation of the request if the start is not in `steps`.
    """
    begun = None
    for one in (step.what for step in steps):
        if begun and one.word in ("bound", "bind failed"):
            return f"{one.word} after {badges.lasted(begun, one.at)}"
        if one.word == "bind started" or (one.word == "requested" and begun is None):
            begun = one.at
    return ""


@dataclass(frozen=True)
class Telling:
    """One notice to Nova, ready for a template: answered, refused, or still to be sent."""

    at: SafeString
    mark: SafeString
    status: str
    said: str


def told(request: AcceleratorRequest, events: Iterable[Event]) -> list[Telling]:
    """Return the notices to Nova about a request, the oldest first, and at the end the one still to be sent, if any.

    While Nova cannot be reached only the last try is stored. Costs one statement, for the waiting notice.
    """
    tellings = [_answer(event) for event in sorted(events, key=lambda event: event.at) if event.action in TOLD]
    if waits := Intent.objects.filter(kind=notices.KIND, key=str(request.uuid)).first():
        status = "completed" if waits.payload.get("completed") else "failed"
        tried = f"tried {waits.attempts} time{'' if waits.attempts == 1 else 's'}, last answer: {waits.last_error}"
        mark = badges.mark("retrying", "warn") if waits.attempts else badges.mark("waiting", "calm")
        tellings.append(
            Telling(badges.ago(waits.next_at), mark, status, tried if waits.attempts else "will be sent now")
        )
    return tellings


def _answer(event: Event) -> Telling:
    status = str((event.changes.get("notice") or [None, ""])[1])
    mark = badges.mark("answered" if event.action == TOLD[0] else "refused", STEPS[event.action][1])
    return Telling(badges.ago(event.at), mark, status, event.reason.removeprefix(f"Nova was told {status}: "))


def untold(request: AcceleratorRequest) -> str:
    """Return, as a sentence, why there are no notices to Nova; call it only if `told` returns none."""
    if request.state not in RESOLVED:
        return "Nova is notified when a request is bound or its bind has failed."
    return "Nova was not notified: no cloud is configured (CYBORG_CLOUD, OS_…), or CYBORG_NOVA_ENDPOINT is off."
