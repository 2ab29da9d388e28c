"""What an instance is given in Placement beside what it has, and how that is taken back: exactly once. Pure.

Used by `attaching`. Placement counts every write of a consumer in its generation and takes only writes that name the
present one. So a write is recorded before it is tried, with the generation it names: as long as that is the present
one, it has not happened, and may be tried again; once another is, it has happened or never will, and the amounts tell
which (contract section 6; Placement's `PUT /allocations/{consumer}` from microversion 1.28 on). A consumer that was
deleted and made again counts from the beginning: the amounts have to be those of the record, too. And they tell only
while nobody else claims or gives back for the same consumer: `attaching` lets one attachment of an instance at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

Amounts = Mapping[str, int]
"""Provider → how many."""


class Consumer(msgspec.Struct, frozen=True):
    """All that a consumer has, provider → class → amount. `generation` is None when it has nothing."""

    uuid: str
    generation: int | None = None
    allocations: dict[str, dict[str, int]] = {}
    project: str = ""
    user: str = ""


class Share(msgspec.Struct, frozen=True):
    """What is asked of one provider."""

    resource_class: str
    amount: int


Shares = Mapping[str, Share]
"""By provider."""


class Change(msgspec.Struct, frozen=True):
    """One write: the generation it names, what the consumer had of each provider, what it shall have."""

    generation: int
    before: dict[str, int]
    after: dict[str, int]

    @property
    def nothing(self) -> bool:
        """It is so already."""
        return self.before == self.after


def claiming(seen: Consumer, shares: Shares, last: Change | None) -> Change | None:
    """The write that adds the shares, once; `last` is the one recorded. None for a consumer that has nothing: then
    there is nobody to give anything to. Nothing is to be written when `Change.nothing`."""
    if seen.generation is None:
        return None
    before = _amounts(seen, shares)
    if last and (last.generation, last.before) == (seen.generation, before):
        return last
    there = {rp for rp, amount in before.items() if last and amount >= last.after[rp]}
    after = {rp: amount + (0 if rp in there else shares[rp].amount) for rp, amount in before.items()}
    return Change(seen.generation, before, after)


def releasing(seen: Consumer, shares: Shares, others: Amounts, last: Change | None) -> Change | None:
    """The write that takes the shares back, once, and never what `others` have there. None: all is gone already.

    The first is made even when it changes nothing: it moves the generation on, so that a claim that is still under
    way, of which nobody heard, cannot happen any more.
    """
    if seen.generation is None:
        return None
    before = _amounts(seen, shares)
    if last and (last.generation, last.before) == (seen.generation, before):
        return last
    if last and all(amount <= last.after[rp] for rp, amount in before.items()):
        return None
    after = {
        rp: min(amount, max(amount - shares[rp].amount, others.get(rp, 0)))
        if last is None or amount > last.after[rp]
        else amount
        for rp, amount in before.items()
    }
    return Change(seen.generation, before, after)


def body(seen: Consumer, shares: Shares, change: Change) -> dict[str, Any]:
    """What is written: all the consumer has, changed. Providers of which nothing is left are not named."""
    allocations = {rp: dict(amounts) for rp, amounts in seen.allocations.items()}
    for rp, amount in change.after.items():
        allocations.setdefault(rp, {})[shares[rp].resource_class] = amount
    kept = {rp: {name: n for name, n in amounts.items() if n} for rp, amounts in allocations.items()}
    return {
        "allocations": {rp: {"resources": amounts} for rp, amounts in kept.items() if amounts},
        "project_id": seen.project,
        "user_id": seen.user,
        "consumer_generation": change.generation,
    }


def _amounts(seen: Consumer, shares: Shares) -> dict[str, int]:
    return {rp: seen.allocations.get(rp, {}).get(share.resource_class, 0) for rp, share in shares.items()}
