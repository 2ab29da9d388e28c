"""Apply the admission rules to devices that were found before the rules were made: a bulk action.

The rules are kept with the bulk action when its devices are chosen. A device is moved only if the rules decide the same
about it when its turn comes, so that what was previewed is done, or nothing. `decide_admission` decides both in the
forecast and when the turn of a device comes; then the checks of `accelerators.devices.lifecycle` are made, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from accelerators import conductor, safety
from accelerators.devices import admission_rules, lifecycle
from accelerators.devices.lifecycle import ActionResult, SeenStates
from accelerators.domain.admission import AdmissionFacts, EnabledRule, first_matching_rule
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action, LifecycleState, state_after_action
from accelerators.domain.errors import RefusalReason
from accelerators.domain.states import AdmittedState, DeviceOutcome, DeviceState, EventSource
from accelerators.models import Device
from accelerators.workflows import bulk_commands

ADMIT = "admit"
"""The bulk action that applies the admission rules. Its argument `rules` are those of the time of the preview."""
ACTION_BY_ADMISSION = {AdmittedState.READY: Action.ENABLE, AdmittedState.QUARANTINED: Action.QUARANTINE}
"""The action that a rule takes on an inactive device; a rule for `inactive` leaves it as it is."""
_NO_RULE_TEXT = "no rule makes it ready or quarantined"
HOST_REMOVED_TEXT = "its host is being removed"
_RULES_CHANGED_TEXT = "the rules have changed since it was chosen"


class AdmissionDecision(NamedTuple):
    """The decision of the rules about a device: the outcome, a text that explains it, the reason code of a refusal, and
    what the device becomes, None if it stays as it is."""

    outcome: DeviceOutcome
    text: str
    reason: RefusalReason | None = None
    after: LifecycleState | None = None


def build_arguments() -> dict[str, Any]:
    """Return the arguments of a new bulk action: the enabled rules, in the order in which they are tried."""
    return {"rules": msgspec.to_builtins(admission_rules.load_enabled_rules())}


def read_rules(arguments: Mapping[str, Any] | None) -> tuple[EnabledRule, ...]:
    """Return the rules that are kept with a bulk action."""
    return msgspec.convert((arguments or {}).get("rules", ()), tuple[EnabledRule, ...])


def decide_admission(
    chosen_rules: Sequence[EnabledRule],
    present_rules: Sequence[EnabledRule],
    facts: AdmissionFacts,
    word_when_chosen: str,
    state_now: LifecycleState,
    *,
    is_busy: bool,
    is_held: bool,
    is_released: bool,
    is_host_removed: bool,
) -> AdmissionDecision:
    """Decide what the rules do to a device. This is a pure function, for the forecast and for `admit_each`.

    `chosen_rules` are those of the time when the device was chosen; `word_when_chosen` is what its
    `LifecycleState.as_text` was then. `is_busy` says that a command is working on it, `is_released` that a guest may
    still use a released handle of it, and `is_host_removed` that its host is being removed.
    """
    refused, conflict = DeviceOutcome.REFUSED, RefusalReason.CONFLICT
    if word_when_chosen != state_now.as_text:
        text = f"was {word_when_chosen} when it was chosen, is {state_now.as_text} now"
        return AdmissionDecision(refused, text, conflict)
    decided = _decide(chosen_rules, facts, state_now)
    if present_rules != chosen_rules and decided != _decide(present_rules, facts, state_now):
        return AdmissionDecision(refused, _RULES_CHANGED_TEXT, conflict)
    if isinstance(decided, str):
        return AdmissionDecision(DeviceOutcome.UNCHANGED, decided)
    rule, action = decided
    after = state_after_action(action, state_now)
    is_installed = after.state is DeviceState.INSTALLING
    refusals = (
        (is_host_removed, HOST_REMOVED_TEXT, conflict),
        (is_held, "is held by a request: rules change only devices that nobody holds", RefusalReason.IN_USE),
        (is_released and is_installed, bulk_commands.describe_release("installed"), RefusalReason.IN_USE),
        (is_busy and action is Action.ENABLE, "is busy with a command", conflict),
    )
    for applies, text, reason in refusals:
        if applies:
            return AdmissionDecision(refused, text, reason)
    return AdmissionDecision(DeviceOutcome.MOVED, f"becomes {after.as_text} by rule {rule.name}", after=after)


def admit_each(
    arguments: Mapping[str, Any] | None, words_when_chosen: Mapping[UUID, str], caller: Caller, reason: str
) -> list[ActionResult]:
    """Apply the rules to each of these devices in one transaction; a refusal of one device stops no other.

    Returns one result for each device. `words_when_chosen` maps each device to its `LifecycleState.as_text` when it was
    chosen. Locks the devices and their hosts. The actor of each event is the rule; its reason names the caller. A
    device that is gone is refused with NOT_FOUND; one that a request holds with IN_USE; one about which the rules
    decide otherwise by now, or whose state has changed, with CONFLICT.
    """
    chosen_rules = read_rules(arguments)
    results: list[ActionResult] = []
    uuids_by_decision: defaultdict[tuple[EnabledRule, Action], list[UUID]] = defaultdict(list)
    with conductor.writing():
        locked = conductor.lock_devices(Device.objects.filter(uuid__in=list(words_when_chosen)))
        present_rules = admission_rules.load_enabled_rules()
        locked_ids = [device.id for device in locked]
        held_ids = {pk for pk, _ in safety.query_requests_of_devices(locked_ids, "id")}
        for device in locked:
            facts, state_now = _get_facts(device), lifecycle.build_lifecycle_state(device)
            word = words_when_chosen[device.uuid]
            outcome, text, refusal, _ = decide_admission(
                *(chosen_rules, present_rules, facts, word, state_now),
                is_busy=device.busy_with is not None,
                is_held=device.id in held_ids,
                is_released=False,  # `apply_action` refuses to install it, and names the guest
                is_host_removed=device.host.removing_since is not None,
            )
            decided = _decide(chosen_rules, facts, state_now)
            if outcome is DeviceOutcome.MOVED and not isinstance(decided, str):
                uuids_by_decision[decided].append(device.uuid)
                continue
            described = (str(device), device.host.name, device.state, text)
            results.append(
                ActionResult(device.uuid, "unchanged" if refusal is None else "refused", *described, refusal)
            )
        for (rule, action), uuids in uuids_by_decision.items():
            results += _apply_rule(rule, action, uuids, words_when_chosen, caller, reason)
    missing_uuids = words_when_chosen.keys() - {device.uuid for device in locked}
    return [*results, *lifecycle.refuse_unknown_devices(missing_uuids)]


def _apply_rule(
    rule: EnabledRule,
    action: Action,
    uuids: Sequence[UUID],
    words_when_chosen: Mapping[UUID, str],
    caller: Caller,
    reason: str,
) -> list[ActionResult]:
    """Take the action of a rule on locked devices; the rule is the actor, and the reason names the caller."""
    full_reason = f"admitted by rule {rule.name}, applied by {caller.name}" + (f": {reason}" if reason else "")
    return lifecycle.apply_action(
        action,
        uuids,
        Caller(rule.name, "", frozenset(), ""),
        full_reason[: lifecycle.MAX_REASON],
        source=EventSource.RULE,
        seen=SeenStates(words_when_chosen, held_too=False),
        state_by=rule.state_by,
    )


def _decide(
    rules: Iterable[EnabledRule], facts: AdmissionFacts, state_now: LifecycleState
) -> tuple[EnabledRule, Action] | str:
    """Return the rule that moves a device in this state, with its action; as text why there is none."""
    if state_now.state is not DeviceState.INACTIVE or state_now.drain_to:
        return f"is {state_now.as_text}: rules decide about inactive devices only"
    rule = first_matching_rule(rules, facts)
    action = ACTION_BY_ADMISSION.get(AdmittedState(rule.action)) if rule else None
    return (rule, action) if rule and action else _NO_RULE_TEXT


def _get_facts(device: Device) -> AdmissionFacts:
    """Return the properties of a device that rules match."""
    return AdmissionFacts(device.host.name, device.driver, device.vendor, device.model, device.type)
