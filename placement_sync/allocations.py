"""Compute the writes that add an attachment's shares to an instance's allocations and remove them, exactly once. Pure.

Placement raises a consumer's generation with every write, and accepts only writes that name the current generation. So
each write is recorded, with its generation, before it is sent. While that generation is still current, the write has
not happened and may be sent again. When the generation has changed, the write has happened or never will; the amounts
show which (contract section 6; Placement's `PUT /allocations/{consumer}` from microversion 1.28 on).

A consumer that was deleted and created again starts its generations anew; therefore the amounts must match the record,
too. The amounts are conclusive only while nobody else claims or releases for the same consumer: `jobs.attachments`
processes one attachment of an instance at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

Amounts = Mapping[str, int]
"""Provider → amount."""


class Consumer(msgspec.Struct, frozen=True):
    """All allocations of a consumer: provider → resource class → amount. `generation` is None if it has none."""

    uuid: str
    generation: int | None = None
    allocations: dict[str, dict[str, int]] = {}
    project: str = ""
    user: str = ""


class Share(msgspec.Struct, frozen=True):
    """What an attachment claims of one provider."""

    resource_class: str
    amount: int


Shares = Mapping[str, Share]
"""Provider → ClaimShare."""


class Change(msgspec.Struct, frozen=True):
    """One write: the generation it names, and per provider the consumer's amount before and after it."""

    generation: int
    before: dict[str, int]
    after: dict[str, int]

    @property
    def nothing(self) -> bool:
        """Whether the write changes no amount."""
        return self.before == self.after


def claiming(seen: Consumer, shares: Shares, last: Change | None) -> Change | None:
    """Return the write that adds the shares exactly once; `recorded` is the recorded write, if any.

    `recorded` itself is returned while it has not happened yet. If `AllocationWrite.is_noop` is true, the shares are
    there already and nothing needs to be written. Returns None if the consumer has no allocations: then the instance is
    unknown to Placement, and nothing can be added.
    """
    if seen.generation is None:
        return None
    before = _amounts(seen, shares)
    if last and (last.generation, last.before) == (seen.generation, before):
        return last
    there = {rp for rp, amount in before.items() if last and amount >= last.after[rp]}
    after = {rp: amount + (0 if rp in there else shares[rp].amount) for rp, amount in before.items()}
    return Change(seen.generation, before, after)


def releasing(seen: Consumer, shares: Shares, others: Amounts, last: Change | None) -> Change | None:
    """Return the write that removes the shares exactly once; `recorded` is the recorded write, if any.

    `recorded` itself is returned while it has not happened yet. The amounts in `held_by_others` belong to other
    requests and are never removed. Returns None if nothing is left to remove. The first release is written even if it
    changes no amount: it raises the generation, so that a claim that was sent and not yet answered can no longer take
    effect.
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
    """Return the body of the write: all allocations of the consumer, with the change applied.

    Providers of which nothing is left are left out.
    """
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
    """Return, per provider of the shares, how much the consumer has now of the share's resource class."""
    return {rp: seen.allocations.get(rp, {}).get(share.resource_class, 0) for rp, share in shares.items()}
