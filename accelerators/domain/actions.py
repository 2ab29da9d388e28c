"""What can be asked of a device by hand, and what it makes of its state. Pure; `lifecycle` does it.

Called by `lifecycle`, and by whoever offers buttons: the console and our own API. Taking out of offer is never refused.
What is asked of a missing device is decided about what it returns to: it stays missing until its driver names it.
"""

from __future__ import annotations

from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from enum import StrEnum

from accelerators.domain.states import DeviceState, Drain, IllegalMove

_S = DeviceState


class Action(StrEnum):
    """The verbs, in the order in which they are offered."""

    ENABLE = "enable"
    DRAIN = "drain"
    DISABLE = "disable"
    RELEASE = "release"
    QUARANTINE = "quarantine"
    REINSTATE = "reinstate"
    RETIRE = "retire"


MEANING = {
    Action.ENABLE: "Offer it; ends a drain.",
    Action.DRAIN: "Take it out of offer now, and say when its last request is gone; nothing is evicted.",
    Action.DISABLE: "Take it out of offer; what is bound stays bound.",
    Action.RELEASE: "End its quarantine; it is in maintenance then.",
    Action.QUARANTINE: "Take it out of offer because it is not to be trusted; what is bound stays bound.",
    Action.REINSTATE: "Take it back among the devices that can be offered, as inactive.",
    Action.RETIRE: "Take it out of use for good; refused while anybody holds it.",
}


@dataclass(frozen=True)
class Standing:
    """What decides about a device: its state, what it returns to while it is missing, whether it drains, how many
    requests hold it, and whether its driver has to do something before it can be offered."""

    state: DeviceState
    returns_to: DeviceState | None = None
    drain_to: Drain | None = None
    held: int = 0
    installs: bool = False

    @property
    def here(self) -> DeviceState:
        """Its state, were it not missing."""
        return (self.returns_to or _S.INACTIVE) if self.state == _S.MISSING else self.state

    @property
    def word(self) -> str:
        """How it stands, in words that are equal when it stands the same; who holds it is not among them."""
        returns = f", returns to {self.returns_to}" if self.returns_to else ""
        return f"{self.state}{returns}" + (f", drains to {self.drain_to}" if self.drain_to else "")

    def at(self, state: DeviceState, drain_to: Drain | None = None) -> Standing:
        """The same device in another state; a missing one stays so, and returns to it."""
        if self.state == _S.MISSING:
            return replace(self, returns_to=state, drain_to=drain_to)
        return replace(self, state=state, drain_to=drain_to)


@dataclass(frozen=True)
class _Ask:
    """Where an action leads, from where, and in which states there is nothing to do; elsewhere it is refused."""

    to: DeviceState
    moves: frozenset[DeviceState]
    there: frozenset[DeviceState]


def _ask(to: DeviceState, moves: Set[DeviceState], there: Set[DeviceState]) -> _Ask:
    return _Ask(to, frozenset(moves), frozenset(there))


_OUT = {_S.INACTIVE, _S.MAINTENANCE, _S.FAILED, _S.QUARANTINED}
"""Not offered, and not retired either."""
OFFERED = frozenset({_S.READY, _S.INSTALLING})
"""Offered, or on the way to it."""
_ASKS = {
    Action.ENABLE: _ask(_S.READY, {_S.INACTIVE, _S.MAINTENANCE, _S.FAILED}, OFFERED),
    Action.DISABLE: _ask(_S.MAINTENANCE, OFFERED, _OUT | {_S.RETIRED}),
    Action.QUARANTINE: _ask(_S.QUARANTINED, OFFERED | _OUT - {_S.QUARANTINED}, {_S.QUARANTINED, _S.RETIRED}),
    Action.RELEASE: _ask(_S.MAINTENANCE, {_S.QUARANTINED}, {_S.MAINTENANCE}),
    Action.RETIRE: _ask(_S.RETIRED, _OUT, {_S.RETIRED}),
    Action.REINSTATE: _ask(_S.INACTIVE, {_S.RETIRED}, {_S.INACTIVE}),
}


def decide(action: Action, now: Standing, then: Drain = Drain.MAINTENANCE) -> Standing:
    """What becomes of a device that stands as `now`; equal to it when there is nothing to do. `then`: of a drain.

    Raises IllegalMove, saying what is possible. Whether somebody holds what is to be retired is not asked here.
    """
    if (after := _outcome(action, now, then)) is not None:
        return after
    if action is Action.RETIRE:
        raise IllegalMove(f"is {now.here}: it cannot be retired while it is offered; drain or disable it first")
    there_is = ", ".join(possible(now))
    raise IllegalMove(f"is {now.state}: {action} is not possible; possible are {there_is}")


def _outcome(action: Action, now: Standing, then: Drain = Drain.MAINTENANCE) -> Standing | None:
    """What `decide` answers; None where it raises."""
    if action is Action.DRAIN:
        return _drain(now, then)
    ask = _ASKS[action]
    if action is Action.ENABLE and now.state == _S.MISSING:
        return None  # nobody knows what its driver will say of it
    if now.here in ask.moves:
        return now.at(_S.INSTALLING if ask.to is _S.READY and now.installs else ask.to)
    return now if now.here in ask.there else None


def _drain(now: Standing, then: Drain) -> Standing:
    if now.here in OFFERED:
        return now.at(_S.MAINTENANCE, then)
    if then is Drain.RETIRED:
        return replace(now, drain_to=then) if now.here in _OUT else now
    if now.here == _S.MAINTENANCE:
        return replace(now, drain_to=then if now.held else None)
    return now


def drained(now: Standing) -> Standing:
    """What becomes of a draining device whose last request is gone."""
    return now.at(_S.RETIRED) if now.drain_to is Drain.RETIRED else replace(now, drain_to=None)


def possible(now: Standing) -> Iterator[Action]:
    """The actions that would change something now, as far as our own requests tell."""
    for action in Action:
        if _outcome(action, now) not in (None, now) and not (action is Action.RETIRE and now.held):
            yield action
