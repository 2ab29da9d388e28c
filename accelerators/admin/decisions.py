"""What a person at the console decides about devices: the buttons of a device's page, the actions of the list.

Called by `admin.devices`. Everything is a POST; what cannot be undone asks once more, and so does what is done to many.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.contrib import messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.utils.safestring import SafeString

from accelerators import actions, lifecycle
from accelerators.actions import Action, Standing
from accelerators.admin import marks
from accelerators.caller import Caller
from accelerators.models import Device
from accelerators.refusals import Refused
from accelerators.states import Drain, IllegalMove, Source

MOST = 10_000
"""So many devices are moved by one click; it takes seconds, slice by slice."""
ROWS = 200
"""So many results are listed, those that were refused first; all are counted."""


@dataclass(frozen=True)
class Choice:
    """A button: what it asks for, what a drain ends with, whether it asks once more."""

    name: str
    label: str
    action: Action
    then: Drain = Drain.MAINTENANCE
    danger: bool = False

    @property
    def meaning(self) -> str:
        """One sentence."""
        ends = " It is retired then." if self.then is Drain.RETIRED else ""
        return actions.MEANING[self.action] + ends

    def offered(self, now: Standing) -> bool:
        """Whether it would do something, as far as our own requests tell."""
        try:
            changes = actions.decide(self.action, now, self.then) != now
        except IllegalMove:
            return False
        if self.then is Drain.RETIRED:  # of what is free and out of offer already, it were the same as to retire it
            return changes and (bool(now.held) or now.here in actions.OFFERED)
        return changes and not (self.action is Action.RETIRE and now.held)


CHOICES = {
    choice.name: choice
    for choice in (
        Choice("enable", "Enable", Action.ENABLE),
        Choice("drain", "Drain", Action.DRAIN),
        Choice("disable", "Disable", Action.DISABLE),
        Choice("release", "Release", Action.RELEASE),
        Choice("quarantine", "Quarantine", Action.QUARANTINE),
        Choice("reinstate", "Reinstate", Action.REINSTATE),
        Choice("drain-retire", "Drain, then retire", Action.DRAIN, Drain.RETIRED, danger=True),
        Choice("retire", "Retire", Action.RETIRE, danger=True),
    )
}


def may(request: HttpRequest) -> bool:
    """Whether this person decides about devices: Django's permission to change them."""
    return bool(request.user.has_perm("accelerators.change_device"))


def person(request: HttpRequest) -> Caller:
    """Who decides, for events."""
    return Caller(request.user.get_username(), str(request.user.pk), frozenset(), "")


def possible(request: HttpRequest, device: Device, held: int) -> list[Choice]:
    """The buttons of a device's page for this person."""
    now = lifecycle.standing(device, held)
    return [choice for choice in CHOICES.values() if may(request) and choice.offered(now)]


def one(admin: Any, request: HttpRequest, device: Device) -> HttpResponse:
    """POST of a device's page: do it and show the page again, with a sentence; ask once more before the destructive."""
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    choice = CHOICES.get(request.POST.get("choice", ""))
    if choice is None or not may(request):
        raise PermissionDenied
    reason = request.POST.get("reason", "")
    if choice.danger and "sure" not in request.POST:
        return _ask(admin, request, choice, 1, device)
    try:
        result = lifecycle.ask(choice.action, device.uuid, person(request), reason, choice.then, Source.PERSON)
    except Refused as refused:
        messages.error(request, refused.text)
    else:
        done = "is already" if result.outcome == "unchanged" else "is now"
        messages.success(request, f"{device} {done} {result.state}{result.text and f', {result.text}'}.")
    return HttpResponseRedirect(marks.page("device", device.pk))


def of_list() -> Iterator[Callable[..., HttpResponse | None]]:
    """The actions of the list of devices, as Django's admin wants them."""
    for choice in CHOICES.values():
        yield _of_list(choice)


def _of_list(choice: Choice) -> Callable[..., HttpResponse | None]:
    def act(admin: Any, request: HttpRequest, queryset: QuerySet[Device]) -> HttpResponse | None:
        uuids = list(queryset.order_by("id").values_list("uuid", flat=True)[: MOST + 1])
        if len(uuids) > MOST:
            messages.error(request, f"More than {MOST} devices are selected: narrow the list by filters first.")
            return None
        if "sure" not in request.POST:
            return _ask(admin, request, choice, len(uuids))
        return _done(admin, request, choice, uuids)

    act.__name__ = choice.name
    act.short_description = choice.label  # type: ignore[attr-defined]
    act.allowed_permissions = ("decide",)  # type: ignore[attr-defined]
    return act


def _ask(admin: Any, request: HttpRequest, choice: Choice, number: int, device: Device | None = None) -> HttpResponse:
    """Once more, with what will happen to how many."""
    about = str(device) if device else f"{number} device{'' if number == 1 else 's'}"
    kept = [("choice", choice.name)] if device else [("action", choice.name)]
    if device is None:
        kept += [("select_across", request.POST.get("select_across", "0"))]
        kept += [(ACTION_CHECKBOX_NAME, key) for key in request.POST.getlist(ACTION_CHECKBOX_NAME)]
    context = admin.admin_site.each_context(request) | {
        "title": f"{choice.label}: {about}?",
        "opts": admin.opts,
        "choice": choice,
        "device": device,
        "kept": kept,
        "reason": request.POST.get("reason", ""),
        "longest": lifecycle.MAX_REASON,
    }
    return TemplateResponse(request, "accelerators/decide.html", context)


def _done(admin: Any, request: HttpRequest, choice: Choice, uuids: list[UUID]) -> HttpResponse | None:
    """Do it to all of them and show what became of each."""
    reason, results = request.POST.get("reason", ""), []
    try:
        for part in lifecycle.many(choice.action, uuids, person(request), reason, choice.then):
            results += part
    except Refused as refused:  # the reason, before anything was done
        messages.error(request, refused.text)
        return None
    counts = Counter(result.outcome for result in results)
    shown = sorted(results, key=lambda result: ("refused", "moved", "unchanged").index(result.outcome))[:ROWS]
    context = admin.admin_site.each_context(request) | {
        "title": f"{choice.label}: {len(results)} device{'' if len(results) == 1 else 's'}",
        "opts": admin.opts,
        "counts": [(outcome(word), counts[word]) for word in OUTCOMES if counts[word]],
        "rows": [
            {"result": one, "outcome": outcome(one.outcome), "state": one.state and marks.state(one.state)}
            for one in shown
        ],
        "left": len(results) - len(shown),
    }
    return TemplateResponse(request, "accelerators/decided.html", context)


OUTCOMES = {"moved": ("done", "good"), "unchanged": ("already so", "calm"), "refused": ("refused", "bad")}


def outcome(word: str) -> SafeString:
    """What became of it."""
    return marks.mark(*OUTCOMES[word])
