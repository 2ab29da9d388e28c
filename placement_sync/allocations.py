"""Compute the writes that add an attachment's shares to an instance's allocations and remove them, exactly once. This
module is pure.

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

ProviderAmounts = Mapping[str, int]
"""Provider → amount."""


class ConsumerAllocations(msgspec.Struct, frozen=True):
    """All allocations of a consumer: provider → resource class → amount.

    `generation` is the consumer's generation, None if the consumer has no allocations.
    """

    uuid: str
    generation: int | None = None
    allocations: dict[str, dict[str, int]] = {}
    project: str = ""
    user: str = ""


class ClaimShare(msgspec.Struct, frozen=True):
    """The amount of a resource class that an attachment claims from one provider."""

    resource_class: str
    amount: int


ClaimShares = Mapping[str, ClaimShare]
"""Provider → ClaimShare."""


class AllocationWrite(msgspec.Struct, frozen=True):
    """One write: the generation it names, and per provider the consumer's amount before and after it."""

    generation: int
    before: dict[str, int]
    after: dict[str, int]

    @property
    def is_noop(self) -> bool:
        """True if the write changes no amount."""
        return self.before == self.after


def plan_claim(
    consumer: ConsumerAllocations, shares: ClaimShares, recorded: AllocationWrite | None
) -> AllocationWrite | None:
    """Return the write that adds the attachment's shares to the instance's allocations, exactly once.

    `recorded` is the claim that was recorded before, None if there is none. It is returned unchanged while Placement
    has not applied it, so that it can be sent again. If `AllocationWrite.is_noop` is true, the shares are there already
    and nothing needs to be written. Returns None if the consumer has no allocations: then the instance is unknown to
    Placement, and nothing can be added.
    """
    if consumer.generation is None:
        return None
    before = _current_amounts(consumer, shares)
    if recorded and (recorded.generation, recorded.before) == (consumer.generation, before):
        return recorded
    already_claimed = {rp for rp, amount in before.items() if recorded and amount >= recorded.after[rp]}
    after = {rp: amount + (0 if rp in already_claimed else shares[rp].amount) for rp, amount in before.items()}
    return AllocationWrite(consumer.generation, before, after)


def plan_release(
    consumer: ConsumerAllocations,
    shares: ClaimShares,
    held_by_others: ProviderAmounts,
    recorded: AllocationWrite | None,
) -> AllocationWrite | None:
    """Return the write that removes the attachment's shares from the instance's allocations, exactly once.

    `recorded` is the release that was recorded before, None if there is none. It is returned unchanged while Placement
    has not applied it, so that it can be sent again. The amounts in `held_by_others` belong to other requests and are
    never removed. Returns None if nothing is left to remove. The first release is written even if it changes no amount:
    it raises the generation, so that a claim that was sent and not yet answered can no longer take effect.
    """
    if consumer.generation is None:
        return None
    before = _current_amounts(consumer, shares)
    if recorded and (recorded.generation, recorded.before) == (consumer.generation, before):
        return recorded
    if recorded and all(amount <= recorded.after[rp] for rp, amount in before.items()):
        return None
    after = {
        rp: min(amount, max(amount - shares[rp].amount, held_by_others.get(rp, 0)))
        if recorded is None or amount > recorded.after[rp]
        else amount
        for rp, amount in before.items()
    }
    return AllocationWrite(consumer.generation, before, after)


def build_body(consumer: ConsumerAllocations, shares: ClaimShares, change: AllocationWrite) -> dict[str, Any]:
    """Return the body of the write: all allocations of the consumer, with the change applied.

    Providers of which nothing is left are left out.
    """
    allocations = {rp: dict(amounts) for rp, amounts in consumer.allocations.items()}
    for rp, amount in change.after.items():
        allocations.setdefault(rp, {})[shares[rp].resource_class] = amount
    remaining = {rp: {name: n for name, n in amounts.items() if n} for rp, amounts in allocations.items()}
    return {
        "allocations": {rp: {"resources": amounts} for rp, amounts in remaining.items() if amounts},
        "project_id": consumer.project,
        "user_id": consumer.user,
        "consumer_generation": change.generation,
    }


def _current_amounts(consumer: ConsumerAllocations, shares: ClaimShares) -> dict[str, int]:
    """Return by provider how much the consumer has now of the resource class that the share of this provider names."""
    return {rp: consumer.allocations.get(rp, {}).get(share.resource_class, 0) for rp, share in shares.items()}
