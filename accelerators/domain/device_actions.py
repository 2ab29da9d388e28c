"""The actions that an operator can do to a device, and the state that each leads to. `lifecycle` carries them out.

Taking a device out of offer (disable, drain, quarantine) is never refused. An action on a missing device changes only
the state that the device returns to: it stays missing until its driver reports it again. A missing device cannot be
enabled.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from enum import StrEnum

from accelerators.domain.states import DeviceState, DrainTarget, IllegalTransitionError

_S = DeviceState


class Action(StrEnum):
    """The actions that an operator can do to a device, in the order in which users see them.

    The values are the names of the actions in our own API, whose view has a method of that name for each.
    """

    ENABLE = "enable"
    DRAIN = "drain"
    DISABLE = "disable"
    RELEASE = "release"
    QUARANTINE = "quarantine"
    REINSTATE = "reinstate"
    RETIRE = "retire"


ACTION_DESCRIPTIONS = {
    Action.ENABLE: "Offer the device; this also ends a drain.",
    Action.DRAIN: (
        "Take the device out of offer now; when its last request ends, the device is in maintenance or retired. "
        "Nothing is evicted."
    ),
    Action.DISABLE: "Take the device out of offer; bound requests stay bound.",
    Action.RELEASE: "End the quarantine of the device; it is in maintenance then.",
    Action.QUARANTINE: "Take the device out of offer because it cannot be trusted; bound requests stay bound.",
    Action.REINSTATE: "Take a retired device back into use; its state is inactive then.",
    Action.RETIRE: "Take the device out of use for good; refused while anybody holds it.",
}
"""Description of each action, for the console, the command line and the API's documentation."""


@dataclass(frozen=True)
class LifecycleState:
    """The facts about a device that decide which actions are possible.

    `state` is the device's state. `returns_to` is the state to which the device returns if it is missing now,
    `drain_to` the final state if it drains; None if it is not missing or does not drain. `holding_requests` is the
    number of requests that hold the device. `needs_install` says that the driver has to prepare the device before it
    can be offered.
    """

    state: DeviceState
    returns_to: DeviceState | None = None
    drain_to: DrainTarget | None = None
    holding_requests: int = 0
    needs_install: bool = False

    @property
    def effective_state(self) -> DeviceState:
        """The device's state or, if it is missing, the state that it returns to."""
        return (self.returns_to or _S.INACTIVE) if self.state == _S.MISSING else self.state

    @property
    def as_text(self) -> str:
        """The state, the state it returns to and the state it drains to, as text.

        Compare two texts to find out whether a device has changed; requests that hold the device have no influence on
        the text.
        """
        returns = f", returns to {self.returns_to}" if self.returns_to else ""
        return f"{self.state}{returns}" + (f", drains to {self.drain_to}" if self.drain_to else "")

    def with_state(self, state: DeviceState, drain_to: DrainTarget | None = None) -> LifecycleState:
        """Return a copy in another state, with this `drain_to` (None: it does not drain).

        A missing device stays missing; the state that it returns to is replaced.
        """
        if self.state == _S.MISSING:
            return replace(self, returns_to=state, drain_to=drain_to)
        return replace(self, state=state, drain_to=drain_to)


@dataclass(frozen=True)
class _ActionRule:
    """One action: the state it leads to (`target`), the states from which it moves a device there (`moves_from`), and
    the states in which there is nothing to do (`already_in`). In all other states the action is refused."""

    target: DeviceState
    moves_from: frozenset[DeviceState]
    already_in: frozenset[DeviceState]


def _action_rule(target: DeviceState, moves_from: Set[DeviceState], already_in: Set[DeviceState]) -> _ActionRule:
    """Build the rule of one action, with the two sets made immutable."""
    return _ActionRule(target, frozenset(moves_from), frozenset(already_in))


_NOT_OFFERED = {_S.INACTIVE, _S.MAINTENANCE, _S.FAILED, _S.QUARANTINED}
"""The states of a device that is neither offered nor retired."""
OFFERED_STATES = frozenset({_S.READY, _S.INSTALLING})
"""The states of a device that is offered or is being prepared for it."""
_ACTION_RULES = {
    Action.ENABLE: _action_rule(_S.READY, {_S.INACTIVE, _S.MAINTENANCE, _S.FAILED}, OFFERED_STATES),
    Action.DISABLE: _action_rule(_S.MAINTENANCE, OFFERED_STATES, _NOT_OFFERED | {_S.RETIRED}),
    Action.QUARANTINE: _action_rule(
        _S.QUARANTINED, OFFERED_STATES | _NOT_OFFERED - {_S.QUARANTINED}, {_S.QUARANTINED, _S.RETIRED}
    ),
    Action.RELEASE: _action_rule(_S.MAINTENANCE, {_S.QUARANTINED}, {_S.MAINTENANCE}),
    Action.RETIRE: _action_rule(_S.RETIRED, _NOT_OFFERED, {_S.RETIRED}),
    Action.REINSTATE: _action_rule(_S.INACTIVE, {_S.RETIRED}, {_S.INACTIVE}),
}


def state_after_action(
    action: Action, current: LifecycleState, drain_to: DrainTarget = DrainTarget.MAINTENANCE
) -> LifecycleState:
    """Return what an action makes of a device; equal to `current` if there is nothing to do.

    `drain_to` is the final state of a drain; other actions ignore it. Raises IllegalTransitionError, which names the
    possible actions. A device is retired here even if it is held: the caller must check that nobody holds it.
    """
    if (after := _state_after_action_or_none(action, current, drain_to)) is not None:
        return after
    if action is Action.RETIRE:
        raise IllegalTransitionError(
            f"is {current.effective_state}: it cannot be retired while it is offered; drain or disable it first"
        )
    possible_names = ", ".join(possible_actions(current))
    raise IllegalTransitionError(f"is {current.state}: {action} is not possible; possible are {possible_names}")


def _state_after_action_or_none(
    action: Action, current: LifecycleState, drain_to: DrainTarget = DrainTarget.MAINTENANCE
) -> LifecycleState | None:
    """Return what `state_after_action` returns, or None where it raises IllegalTransitionError."""
    if action is Action.DRAIN:
        return _state_after_drain(current, drain_to)
    rule = _ACTION_RULES[action]
    if action is Action.ENABLE and current.state == _S.MISSING:
        return None  # whether it has to be installed is not known before its driver reports it again
    if current.effective_state in rule.moves_from:
        return current.with_state(_S.INSTALLING if rule.target is _S.READY and current.needs_install else rule.target)
    return current if current.effective_state in rule.already_in else None


def _state_after_drain(current: LifecycleState, drain_to: DrainTarget) -> LifecycleState:
    """Return what a drain makes of a device; never refused.

    An offered device goes to maintenance and drains. A device that is not offered drains to `retired` if `drain_to`
    says so; one in maintenance drains to `maintenance` only if it is held, otherwise its drain ends.
    """
    if current.effective_state in OFFERED_STATES:
        return current.with_state(_S.MAINTENANCE, drain_to)
    if drain_to is DrainTarget.RETIRED:
        return replace(current, drain_to=drain_to) if current.effective_state in _NOT_OFFERED else current
    if current.effective_state == _S.MAINTENANCE:
        return replace(current, drain_to=drain_to if current.holding_requests else None)
    return current


def state_after_last_request(current: LifecycleState) -> LifecycleState:
    """Return what becomes of a draining device when its last request is gone: retired, or no longer draining.

    `holding_requests` is not looked at: the caller must check that no request is left.
    """
    return (
        current.with_state(_S.RETIRED) if current.drain_to is DrainTarget.RETIRED else replace(current, drain_to=None)
    )


def possible_actions(current: LifecycleState) -> Iterator[Action]:
    """Yield the actions that would change the device now.

    Retiring is left out while requests hold the device. Other holders, which only Placement or Nova know, are not
    considered.
    """
    for action in Action:
        if _state_after_action_or_none(action, current) not in (None, current) and not (
            action is Action.RETIRE and current.holding_requests
        ):
            yield action
