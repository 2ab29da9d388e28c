"""The actions that an operator can do to a device, and the state that each leads to. `lifecycle` carries them out.

Taking a device out of offer (disable, drain, quarantine) is never refused. An action on a missing device changes only
the state that the device returns to: it stays missing until its driver reports it again. A missing device cannot be
enabled.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from enum import StrEnum

from accelerators.domain.states import DeviceState, Drain, IllegalTransitionError

_S = DeviceState


class Action(StrEnum):
    """The actions, in the order in which users see them."""

    ENABLE = "enable"
    DRAIN = "drain"
    DISABLE = "disable"
    RELEASE = "release"
    QUARANTINE = "quarantine"
    REINSTATE = "reinstate"
    RETIRE = "retire"


MEANING = {
    Action.ENABLE: "Offer the device; this also ends a drain.",
    Action.DRAIN: "Take the device out of offer now and record when its last request is gone; nothing is evicted.",
    Action.DISABLE: "Take the device out of offer; bound requests stay bound.",
    Action.RELEASE: "End the quarantine of the device; it is in maintenance then.",
    Action.QUARANTINE: "Take the device out of offer because it cannot be trusted; bound requests stay bound.",
    Action.REINSTATE: "Take a retired device back into use; its state is inactive then.",
    Action.RETIRE: "Take the device out of use for good; refused while anybody holds it.",
}
"""What each action does, for the console, the command line and the API's documentation."""


@dataclass(frozen=True)
class Standing:
    """The facts about a device that decide which actions are possible.

    Its state; the state it returns to if it is missing; the state it drains to, if it drains; how many requests hold
    it (`held`); and whether its driver has to prepare it before it can be offered (`installs`).
    """

    state: DeviceState
    returns_to: DeviceState | None = None
    drain_to: Drain | None = None
    held: int = 0
    installs: bool = False

    @property
    def here(self) -> DeviceState:
        """The device's state or, if it is missing, the state that it returns to."""
        return (self.returns_to or _S.INACTIVE) if self.state == _S.MISSING else self.state

    @property
    def word(self) -> str:
        """The state, the state it returns to and the state it drains to, as text.

        Compare two texts to find out whether a device has changed; requests that hold the device have no influence on
        the text.
        """
        returns = f", returns to {self.returns_to}" if self.returns_to else ""
        return f"{self.state}{returns}" + (f", drains to {self.drain_to}" if self.drain_to else "")

    def at(self, state: DeviceState, drain_to: Drain | None = None) -> Standing:
        """Return a copy in another state. A missing device stays missing; the state that it returns to is replaced."""
        if self.state == _S.MISSING:
            return replace(self, returns_to=state, drain_to=drain_to)
        return replace(self, state=state, drain_to=drain_to)


@dataclass(frozen=True)
class _Ask:
    """One action: the state it leads `to`, the states from which it `moves` a device there, and
    the states in which there is nothing to do (`there`). In all other states the action is refused."""

    to: DeviceState
    moves: frozenset[DeviceState]
    there: frozenset[DeviceState]


def _ask(to: DeviceState, moves: Set[DeviceState], there: Set[DeviceState]) -> _Ask:
    return _Ask(to, frozenset(moves), frozenset(there))


_OUT = {_S.INACTIVE, _S.MAINTENANCE, _S.FAILED, _S.QUARANTINED}
"""The states of a device that is neither offered nor retired."""
OFFERED = frozenset({_S.READY, _S.INSTALLING})
"""The states of a device that is offered or is being prepared for it."""
_ASKS = {
    Action.ENABLE: _ask(_S.READY, {_S.INACTIVE, _S.MAINTENANCE, _S.FAILED}, OFFERED),
    Action.DISABLE: _ask(_S.MAINTENANCE, OFFERED, _OUT | {_S.RETIRED}),
    Action.QUARANTINE: _ask(_S.QUARANTINED, OFFERED | _OUT - {_S.QUARANTINED}, {_S.QUARANTINED, _S.RETIRED}),
    Action.RELEASE: _ask(_S.MAINTENANCE, {_S.QUARANTINED}, {_S.MAINTENANCE}),
    Action.RETIRE: _ask(_S.RETIRED, _OUT, {_S.RETIRED}),
    Action.REINSTATE: _ask(_S.INACTIVE, {_S.RETIRED}, {_S.INACTIVE}),
}


def decide(action: Action, now: Standing, then: Drain = Drain.MAINTENANCE) -> Standing:
    """Return what an action makes of a device; equal to `now` if there is nothing to do.

    `then` is the final state of a drain; other actions ignore it. Raises IllegalTransitionError, which names the
    possible actions. A device is retired here even if it is held: the caller must check that nobody holds it.
    """
    if (after := _outcome(action, now, then)) is not None:
        return after
    if action is Action.RETIRE:
        raise IllegalTransitionError(
            f"is {now.here}: it cannot be retired while it is offered; drain or disable it first"
        )
    there_is = ", ".join(possible(now))
    raise IllegalTransitionError(f"is {now.state}: {action} is not possible; possible are {there_is}")


def _outcome(action: Action, now: Standing, then: Drain = Drain.MAINTENANCE) -> Standing | None:
    """Return what `decide` returns, or None where it raises IllegalTransitionError."""
    if action is Action.DRAIN:
        return _drain(now, then)
    ask = _ASKS[action]
    if action is Action.ENABLE and now.state == _S.MISSING:
        return None  # whether it has to be installed is not known before its driver reports it again
    if now.here in ask.moves:
        return now.at(_S.INSTALLING if ask.to is _S.READY and now.installs else ask.to)
    return now if now.here in ask.there else None


def _drain(now: Standing, then: Drain) -> Standing:
    """Return what a drain makes of a device; never refused.

    An offered device goes to maintenance and drains. A device that is not offered drains to `retired` if `then`
    says so; one in maintenance drains to `maintenance` only if it is held, otherwise its drain ends.
    """
    if now.here in OFFERED:
        return now.at(_S.MAINTENANCE, then)
    if then is Drain.RETIRED:
        return replace(now, drain_to=then) if now.here in _OUT else now
    if now.here == _S.MAINTENANCE:
        return replace(now, drain_to=then if now.held else None)
    return now


def drained(now: Standing) -> Standing:
    """Return what becomes of a draining device when its last request is gone: retired, or no longer draining."""
    return now.at(_S.RETIRED) if now.drain_to is Drain.RETIRED else replace(now, drain_to=None)


def possible(now: Standing) -> Iterator[Action]:
    """Yield the actions that would change the device now.

    Retiring is left out while requests hold the device. Other holders, which only Placement or Nova know, are not
    considered.
    """
    for action in Action:
        if _outcome(action, now) not in (None, now) and not (action is Action.RETIRE and now.held):
            yield action
