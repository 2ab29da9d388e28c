"""Change the state of devices from the console: the buttons of a device's page, and the actions of the device list.

Every change is a POST. To retire a device, or to change one that a request holds, needs a confirmation. An action on
many devices is a bulk action (`accelerators.admin.bulk_actions`).
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
from accelerators.devices.lifecycle import SeenStates
from accelerators.devices.partitioning import PartitionChange
from accelerators.domain import device_actions
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action, LifecycleState
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import DrainTarget, EventSource, IllegalTransitionError
from accelerators.models import Bulk, Device
from accelerators.ui import badges, permissions
from accelerators.ui.permissions import Right
from accelerators.workflows import bulk_actions, bulk_admission, bulk_commands, bulk_detachments, bulk_labels


@dataclass(frozen=True)
class StateChoice:
    """A button that changes a device's state.

    `action` is the change, `then` the state in which a drain ends. With `danger` the button always asks for
    confirmation.
    """

    name: str
    label: str
    action: Action
    then: DrainTarget = DrainTarget.MAINTENANCE
    danger: bool = False

    @property
    def rights(self) -> tuple[Right, ...]:
        """Return the rights that the action needs, on one device or on many."""
        return (permissions.UPDATE_DEVICE,)

    @property
    def meaning(self) -> str:
        """Return one sentence for people that says what the action does."""
        retirement_text = " When its last request has ended, it is retired." if self.then is DrainTarget.RETIRED else ""
        return device_actions.ACTION_DESCRIPTIONS[self.action] + retirement_text

    def is_offered(self, current: LifecycleState) -> bool:
        """Return whether the button is shown: the action is possible now, and would change something.

        "Retire" is not shown while one of our requests holds the device. "Drain, then retire" is shown only while a
        request holds the device, or while it is offered or being installed. Placement and Nova are not asked.
        """
        try:
            changes = device_actions.state_after_action(self.action, current, self.then) != current
        except IllegalTransitionError:
            return False
        if (
            self.then is DrainTarget.RETIRED
        ):  # on a device that is free and not offered, the button "Retire" does the same
            return changes and (
                bool(current.holding_requests) or current.effective_state in device_actions.OFFERED_STATES
            )
        return changes and not (self.action is Action.RETIRE and current.holding_requests)

    def explain_unavailable(self, current: LifecycleState) -> str:
        """Return, as a sentence, why the button is not shown; call it only if `is_offered` is False."""
        try:
            if device_actions.state_after_action(self.action, current, self.then) == current:
                return f"It is {current.state} already."
        except IllegalTransitionError as error:
            return f"It {error}."
        if self.action is Action.RETIRE and current.holding_requests:
            verb = "is" if current.holding_requests == 1 else "are"
            return (
                f"{current.holding_requests} of its units {verb} held. Choose “Drain, then retire”: that waits"
                " until they are free."
            )
        return "It is not offered and nobody holds it. Choose “Retire” instead."


STATE_CHOICES = {
    choice.name: choice
    for choice in (
        StateChoice("enable", "Enable", Action.ENABLE),
        StateChoice("drain", "Drain", Action.DRAIN),
        StateChoice("disable", "Disable", Action.DISABLE),
        StateChoice("release", "Release", Action.RELEASE),
        StateChoice("quarantine", "Quarantine", Action.QUARANTINE),
        StateChoice("reinstate", "Reinstate", Action.REINSTATE),
        StateChoice("drain-retire", "Drain, then retire", Action.DRAIN, DrainTarget.RETIRED, danger=True),
        StateChoice("retire", "Retire", Action.RETIRE, danger=True),
    )
}


@dataclass(frozen=True)
class CommandChoice:
    """An action of the device list that orders a command from each device's agent and does not change its state.

    It has the attributes of `StateChoice` that bulk actions need, so that a bulk action can be made from either class.
    """

    name: str
    label: str
    then: DrainTarget = DrainTarget.MAINTENANCE

    @property
    def rights(self) -> tuple[Right, ...]:
        """Return the rights that the command needs, for one device or for many."""
        return (permissions.CREATE_COMMAND,)

    @property
    def action(self) -> str:
        """Return the command's operation, under which a bulk action stores it."""
        return self.name

    @property
    def danger(self) -> bool:
        """Return whether the command is destructive, so that it is refused while somebody holds the device."""
        return catalogue.ORDERABLE_COMMANDS[self.name].danger

    @property
    def meaning(self) -> str:
        """Return one sentence for people that says what the command does."""
        return catalogue.ORDERABLE_COMMANDS[self.name].meaning


COMMAND_CHOICES = {ask.name: ask for ask in (CommandChoice("health", "Check health"), CommandChoice("reset", "Reset"))}


@dataclass(frozen=True)
class AdmissionChoice:
    """The action of the device list that applies the admission rules. It has the attributes of `StateChoice` that bulk
    actions need."""

    name: str = bulk_admission.ADMIT
    label: str = "Apply the admission rules"
    action: str = bulk_admission.ADMIT
    then: DrainTarget = DrainTarget.MAINTENANCE
    danger: bool = False
    meaning: str = "Each inactive device gets the state that the first matching rule gives to newly found devices."

    @property
    def rights(self) -> tuple[Right, ...]:
        """Return the rights that the action needs, on one device or on many."""
        return (permissions.UPDATE_DEVICE,)


ADMISSION_CHOICE = AdmissionChoice()

LIST_CHOICES: tuple[StateChoice | AdmissionChoice | CommandChoice, ...] = (
    *STATE_CHOICES.values(),
    ADMISSION_CHOICE,
    *COMMAND_CHOICES.values(),
)
"""All actions of the device list, in their order, except for changes of units."""


@dataclass(frozen=True)
class UnitsChoice:
    """A change of the number of units. It has the attributes of `StateChoice` that bulk actions need."""

    change: PartitionChange
    name: str = bulk_commands.PARTITION
    danger: bool = True

    @property
    def label(self) -> str:
        """Return what the change does, such as "Add 2 units"."""
        if self.change.unit_delta is None:
            return "Remove all units"
        if self.change.sets_layout_only:
            return "Change the layout"
        if self.change.unit_delta == 0:  # the devices are chosen, and the number is not
            return "Change the number of units"
        number = abs(self.change.unit_delta)
        return f"{'Add' if self.change.adds_units else 'Remove'} {number} unit{'' if number == 1 else 's'}"

    @property
    def rights(self) -> tuple[Right, ...]:
        """Return the rights that the change needs, on one device or on many."""
        if self.change.sets_layout_only:
            return (permissions.UPDATE_DEVICE,)
        return (permissions.ADD_UNITS if self.change.adds_units else permissions.REMOVE_UNITS,)

    @property
    def meaning(self) -> str:
        """Return one sentence for people that says what the change does."""
        words = ", ".join(f"{word}={value}" for word, value in self.change.layout.items())
        layout_text = f", with {words}" if words else ""
        return f"Each device is divided again{layout_text}. A device is refused while anybody holds one of its units."


@dataclass(frozen=True)
class TargetChoice:
    """An action on objects that are not devices. It has the attributes of `StateChoice` that bulk actions need."""

    name: str
    label: str
    meaning: str
    rights: tuple[Right, ...]
    danger: bool = False


def build_target_choices(bulk: Bulk) -> Iterator[TargetChoice]:
    """Yield the actions on objects that are not devices; `bulk` has the label of the one that sets labels."""
    yield TargetChoice(
        bulk_detachments.DETACH,
        "Detach",
        "Requests that hold units for the attachments are deleted, and their claims are removed from Placement. Remove"
        " the devices from the guests first: a PCI function is free when its host confirms that no guest uses it. An"
        " attachment that is not attached yet is undone.",
        permissions.DETACH,
        danger=True,
    )
    label = (bulk.arguments or {}).get("label", "")
    yield TargetChoice(
        bulk_labels.LABEL,
        f"Set the label “{label}”" if label else "Remove the label",
        "The label is the name that a project gives to an accelerator. An accelerator keeps it until its request ends.",
        permissions.LABEL,
    )


def find_choice_of_bulk(
    bulk: Bulk,
) -> StateChoice | AdmissionChoice | CommandChoice | UnitsChoice | TargetChoice:
    """Return the action of a bulk action.

    For an action that this release does not know it is a choice that can only be cancelled, with the right to change
    devices.
    """
    if bulk.action == bulk_commands.PARTITION:
        return UnitsChoice(PartitionChange.from_arguments(bulk.arguments or {}))
    if bulk.action in bulk_actions.TARGET_ACTIONS:
        return next(choice for choice in build_target_choices(bulk) if choice.name == bulk.action)
    unknown_text = "This release does not know the action. A conductor of a newer release works on it."
    unknown = TargetChoice(bulk.action, f"Action {bulk.action}", unknown_text, (permissions.UPDATE_DEVICE,))
    known = (choice for choice in LIST_CHOICES if choice.action == bulk.action and choice.then == bulk.then)
    return next(known, unknown)


def get_caller(request: HttpRequest) -> Caller:
    """Return the logged-in user as the caller that events name: user name and id, without roles and project.

    Do not check policy rules with it; `accelerators.ui.permissions` does that.
    """
    return Caller(request.user.get_username(), str(request.user.pk), frozenset(), "")


def list_available_choices(device: Device, held: int) -> list[StateChoice]:
    """Return the actions whose buttons a device's page shows; `held` is the number of our requests that hold it.

    The user's permission is not checked.
    """
    current = lifecycle.build_lifecycle_state(device, held)
    return [choice for choice in STATE_CHOICES.values() if choice.is_offered(current)]


def explain_unavailable_choices(device: Device, held: int) -> list[tuple[str, str]]:
    """Return the labels of the actions whose buttons are not shown now, each with the reason as a sentence.

    `held` is the number of our requests that hold the device.
    """
    current = lifecycle.build_lifecycle_state(device, held)
    return [
        (choice.label, choice.explain_unavailable(current))
        for choice in STATE_CHOICES.values()
        if not choice.is_offered(current)
    ]


def handle_state_change(admin: Any, request: HttpRequest, device: Device) -> HttpResponse:
    """Handle the POST of a device's page: change the device's state and redirect to its page with a message.

    An action with `danger` first answers with a confirmation page. If requests hold the device, every action does so,
    and the user has to type the device's address, or its key if it has none. If the form says which state the user saw
    (`seen`), a device whose state has changed since then is left as it is. Refusals become messages. Answers 405 to
    other methods than POST. Raises PermissionDenied for users who may not change devices, and for unknown actions.
    """
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    permissions.require_permission(request, permissions.UPDATE_DEVICE)
    choice = STATE_CHOICES.get(request.POST.get("choice", ""))
    if choice is None:
        raise PermissionDenied("This page has no such button. Go back and try again.")
    holders = safety.find_requests_of_device(device)
    typed = request.POST.get("typed", "").strip()
    if (choice.danger or holders) and "sure" not in request.POST:
        return _render_confirmation(admin, request, choice, device, holders)
    if holders and typed != (device.address or device.key):
        return _render_confirmation(
            admin, request, choice, device, holders, "The text does not match. Nothing was done."
        )
    expected_states = {device.uuid: request.POST["seen"][:200]} if request.POST.get("seen") else {}
    reason, expectation = request.POST.get("reason", ""), SeenStates(expected_states, held_too=bool(holders))
    try:
        result = lifecycle.apply_action_to_device(
            choice.action, device.uuid, get_caller(request), reason, choice.then, EventSource.PERSON, expectation
        )
    except RefusedError as refused:
        messages.error(request, refused.text)
    else:
        outcome_text = "is already" if result.outcome == "unchanged" else "is now"
        messages.success(request, f"{device} {outcome_text} {result.state}{result.text and f', {result.text}'}.")
    return HttpResponseRedirect(badges.page_url("device", device.pk))


def iterate_list_actions() -> Iterator[Callable[..., HttpResponse | None]]:
    """Yield the actions of the list of devices as the functions that Django's admin expects."""
    for choice in LIST_CHOICES:
        yield _build_list_action(choice)


def _build_list_action(choice: StateChoice | AdmissionChoice | CommandChoice) -> Callable[..., HttpResponse | None]:
    """Build an admin action that stores the selected devices as a draft bulk action and redirects to its page.

    That page predicts the result and asks for confirmation; until then no device is changed.
    """

    def create_draft(admin: Any, request: HttpRequest, queryset: QuerySet[Device]) -> HttpResponse | None:
        """Store the selected devices as a draft and redirect to its page; show the list again if that is refused."""
        selection = request.GET.urlencode()
        try:
            bulk = bulk_actions.create_draft(choice.action, choice.then, queryset, get_caller(request), selection)
        except RefusedError as refused:
            messages.error(request, refused.text)
            return None
        return HttpResponseRedirect(badges.page_url("bulk", bulk.uuid))

    create_draft.__name__ = choice.name
    create_draft.short_description = choice.label  # type: ignore[attr-defined]
    permission = "order" if isinstance(choice, CommandChoice) else "decide"  # see `DeviceAdmin`
    create_draft.allowed_permissions = (permission,)  # type: ignore[attr-defined]
    return create_draft


def _render_confirmation(
    admin: Any, request: HttpRequest, choice: StateChoice, device: Device, holders: tuple[str, ...], error: str = ""
) -> HttpResponse:
    """Answer with the confirmation page: what will happen, and which requests hold the device. Changes nothing.

    `error` is a message on the page, shown after the typed address was wrong.
    """
    context = admin.admin_site.each_context(request) | {
        "title": f"{choice.label}: {device}?",
        "opts": admin.opts,
        "choice": choice,
        "device": device,
        "holders": holders,
        "confirmation_text": device.address or device.key,
        "error": error,
        "hidden_fields": [("choice", choice.name), ("seen", request.POST.get("seen", ""))],
        "reason": request.POST.get("reason", ""),
        "max_reason_length": lifecycle.MAX_REASON,
    }
    return TemplateResponse(request, "accelerators/admin/confirm_device_action.html", context)
