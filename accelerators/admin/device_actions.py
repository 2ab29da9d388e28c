"""Change the state of devices from the console: the buttons of a device's page, and the actions of the device list.

Every change is a POST. An action that cannot be undone, or on a device that somebody holds, asks for confirmation. An
action on many devices is a bulk action (`accelerators.admin.bulk_actions`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseNotAllowed, HttpResponseRedirect
from django.template.response import TemplateResponse

from accelerators import safety
from accelerators.commands import catalogue
from accelerators.devices import lifecycle
from accelerators.devices.lifecycle import Seen
from accelerators.domain import actions
from accelerators.domain.actions import Action, Standing
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import Drain, IllegalTransitionError, Source
from accelerators.models import Bulk, Device
from accelerators.ui import badges, permissions
from accelerators.workflows import bulk_actions


@dataclass(frozen=True)
class Choice:
    """A button that changes a device's state.

    `action` is the change, `then` the state in which a drain ends; with `danger` the button always asks for
    confirmation.
    """

    name: str
    label: str
    action: Action
    then: Drain = Drain.MAINTENANCE
    danger: bool = False

    @property
    def meaning(self) -> str:
        """Return one sentence for people that says what the action does."""
        ends = " When its last request has ended, it is retired." if self.then is Drain.RETIRED else ""
        return actions.MEANING[self.action] + ends

    def offered(self, now: Standing) -> bool:
        """Return whether the button is shown: the action is legal now, and would change something.

        Only our own requests count as holders; Placement and Nova are not asked.
        """
        try:
            changes = actions.decide(self.action, now, self.then) != now
        except IllegalTransitionError:
            return False
        if self.then is Drain.RETIRED:  # on a device that is free and not offered, the button "Retire" does the same
            return changes and (bool(now.held) or now.here in actions.OFFERED)
        return changes and not (self.action is Action.RETIRE and now.held)

    def why_not(self, now: Standing) -> str:
        """Return, as a sentence, why the button is not shown; call it only if `offered` is False."""
        try:
            if actions.decide(self.action, now, self.then) == now:
                return f"It is {now.state} already."
        except IllegalTransitionError as error:
            return f"It {error}."
        if self.action is Action.RETIRE and now.held:
            verb = "is" if now.held == 1 else "are"
            return f"{now.held} of its units {verb} held. Choose “Drain, then retire”: that waits until they are free."
        return "It is not offered and nobody holds it. Choose “Retire” instead."


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


@dataclass(frozen=True)
class Ask:
    """An action of the device list that orders a command from each device's agent and does not change its state.

    It has those attributes of `Choice` that bulk actions need, so that a bulk action can be made from either.
    """

    name: str
    label: str
    then: Drain = Drain.MAINTENANCE

    @property
    def action(self) -> str:
        """Return the name under which a bulk action stores it."""
        return self.name

    @property
    def danger(self) -> bool:
        """Return whether the command is destructive, so that it is refused while somebody holds the device."""
        return catalogue.ACTS[self.name].danger

    @property
    def meaning(self) -> str:
        """Return one sentence for people that says what the command does."""
        return catalogue.ACTS[self.name].meaning


ASKS = {ask.name: ask for ask in (Ask("health", "Check health"), Ask("reset", "Reset"))}


def choice_of(bulk: Bulk) -> Choice | Ask:
    """Return the action of the list with which a bulk action was made."""
    every = (*CHOICES.values(), *ASKS.values())
    return next(c for c in every if c.action == bulk.action and c.then == bulk.then)


def person(request: HttpRequest) -> Caller:
    """Return the logged-in user as the caller that events name: user name and id, without roles and project."""
    return Caller(request.user.get_username(), str(request.user.pk), frozenset(), "")


def possible(device: Device, held: int) -> list[Choice]:
    """Return the actions whose buttons a device's page shows; `held` is the number of our requests that hold it."""
    now = lifecycle.standing(device, held)
    return [choice for choice in CHOICES.values() if choice.offered(now)]


def impossible(device: Device, held: int) -> list[tuple[str, str]]:
    """Return the labels of the actions that are not possible now, each with the reason."""
    now = lifecycle.standing(device, held)
    return [(choice.label, choice.why_not(now)) for choice in CHOICES.values() if not choice.offered(now)]


def one(admin: Any, request: HttpRequest, device: Device) -> HttpResponse:
    """Handle the POST of a device's page: change the device's state and redirect to its page with a message.

    An action that cannot be undone first answers with a confirmation page. If requests hold the device, any action does
    so, and the user has to type the device's address, or its key if it has none. A device that changed since the page
    was shown is left as it is. Refusals become messages; raises PermissionDenied for users who may not decide, and for
    unknown actions.
    """
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    permissions.require(request)
    choice = CHOICES.get(request.POST.get("choice", ""))
    if choice is None:
        raise PermissionDenied("This page has no such button. Go back and try again.")
    holders = safety.requests(device).holders
    typed = request.POST.get("typed", "").strip()
    if (choice.danger or holders) and "sure" not in request.POST:
        return _ask(admin, request, choice, device, holders)
    if holders and typed != (device.address or device.key):
        return _ask(admin, request, choice, device, holders, "The text does not match. Nothing was done.")
    words = {device.uuid: request.POST["seen"][:200]} if request.POST.get("seen") else {}
    reason, seen = request.POST.get("reason", ""), Seen(words, held_too=bool(holders))
    try:
        result = lifecycle.ask(choice.action, device.uuid, person(request), reason, choice.then, Source.PERSON, seen)
    except RefusedError as refused:
        messages.error(request, refused.text)
    else:
        done = "is already" if result.outcome == "unchanged" else "is now"
        messages.success(request, f"{device} {done} {result.state}{result.text and f', {result.text}'}.")
    return HttpResponseRedirect(badges.page("device", device.pk))


def of_list() -> Iterator[Callable[..., HttpResponse | None]]:
    """Yield the actions of the list of devices as the functions that Django's admin expects."""
    for choice in (*CHOICES.values(), *ASKS.values()):
        yield _of_list(choice)


def _of_list(choice: Choice | Ask) -> Callable[..., HttpResponse | None]:
    """Build an admin action that stores the selected devices as a draft bulk action and redirects to its page.

    That page predicts the result and asks for confirmation; until then no device is changed.
    """

    def act(admin: Any, request: HttpRequest, queryset: QuerySet[Device]) -> HttpResponse | None:
        selection = request.GET.urlencode()
        try:
            bulk = bulk_actions.choose(choice.action, choice.then, queryset, person(request), selection)
        except RefusedError as refused:
            messages.error(request, refused.text)
            return None
        return HttpResponseRedirect(badges.page("bulk", bulk.uuid))

    act.__name__ = choice.name
    act.short_description = choice.label  # type: ignore[attr-defined]
    act.allowed_permissions = ("decide",)  # type: ignore[attr-defined]
    return act


def _ask(
    admin: Any, request: HttpRequest, choice: Choice, device: Device, holders: tuple[str, ...], wrong: str = ""
) -> HttpResponse:
    """Show the confirmation page: what will happen, and which requests hold the device.

    `wrong` is the message shown if the typed address was wrong.
    """
    context = admin.admin_site.each_context(request) | {
        "title": f"{choice.label}: {device}?",
        "opts": admin.opts,
        "choice": choice,
        "device": device,
        "holders": holders,
        "word": device.address or device.key,
        "wrong": wrong,
        "kept": [("choice", choice.name), ("seen", request.POST.get("seen", ""))],
        "reason": request.POST.get("reason", ""),
        "longest": lifecycle.MAX_REASON,
    }
    return TemplateResponse(request, "accelerators/decide.html", context)
