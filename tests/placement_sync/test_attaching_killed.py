"""Test attachments whose worker is killed, or whose services fail, at any call or before any commit.

The attachment ends attached and claimed once, or failed with nothing left of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from django.db import transaction
from hypothesis import given
from hypothesis import strategies as st

from accelerators.models import AcceleratorRequest, Attachment, Event, Intent
from accelerators.workflows import attachment_orders
from placement_sync import allocations
from placement_sync.allocations import AllocationWrite, ClaimShare, ConsumerAllocations
from placement_sync.jobs import attachments as attaching
from tests.placement_sync import attaching as lab
from tests.placement_sync.attaching import (
    ADMIN_CALLER,
    INSTANCE,
    ROOT,
    FakeCloud,
    ask_attachment,
    current_state,
    make_intents_due,
    make_ready_cards,
    provider_of_card,
    troubled_session,
)
from tests.placement_sync.failing_session import KilledError, Trouble
from tests.placement_sync.session import PlacementModelSession
from tests.support.callguard import open_transaction_of_test

database = pytest.mark.django_db


@pytest.fixture
def cloud(settings: Any) -> Iterator[FakeCloud]:
    with lab.configured_cloud(settings) as one:
        make_ready_cards()
        yield one


def at_every_call(cloud: FakeCloud, troubles: Iterable[Trouble] = (Trouble.KILLED,)) -> Iterator[str]:
    """Run the job with each trouble at its first call, at its second, and so on, each time from the same rows.

    After each failure the job runs until it is done; then a description is yielded and the rows are rolled back.
    """
    before = copy.deepcopy(cloud.placement)
    for trouble in troubles:
        reached, number = True, 0
        while reached:
            number += 1
            with open_transaction_of_test():
                cloud.placement = copy.deepcopy(before)
                troubled_session.__init__(cloud, number, trouble)  # type: ignore[misc]
                _run_until_done()
                reached = troubled_session.calls >= number
                if reached:
                    yield f"{trouble}, call {number}"
                transaction.set_rollback(True)
        assert number > 2
    cloud.placement = before
    troubled_session.__init__(cloud)  # type: ignore[misc]


def before_every_commit(cloud: FakeCloud) -> Iterator[str]:
    """Kill the job before the commit of its first step, of its second, and so on.

    The calls of that step took effect, but the rows did not change. After that the job runs until it is done; then a
    description is yielded and the rows are rolled back.
    """
    before = copy.deepcopy(cloud.placement)
    done, number = False, 0
    while not done:
        number += 1
        with open_transaction_of_test():
            cloud.placement = copy.deepcopy(before)
            done = not all(attaching.step() for _ in range(number - 1))
            with open_transaction_of_test():
                attaching.step()
                transaction.set_rollback(True)
            _run_until_done()
            yield f"commit {number}"
            transaction.set_rollback(True)
    assert number > 3


def _run_until_done() -> None:
    for _ in range(8):
        make_intents_due()
        try:
            attaching.run()
        except KilledError:
            troubled_session.trouble_at, troubled_session.dead = 0, False
        if not Intent.objects.filter(kind="attachment").exists():
            return
    raise AssertionError(list(Intent.objects.values_list("last_error", flat=True)))


def check_attached_once(cloud: FakeCloud, row: Attachment, where: str) -> None:
    assert current_state(row) == "attached", where
    assert cloud.device_allocations() == {provider_of_card(): {"FPGA": 1}}, where
    assert list(AcceleratorRequest.objects.values_list("state", "uuid")) == [("Bound", row.requests[0])], where


def check_nothing_is_left(cloud: FakeCloud, row: Attachment, where: str) -> None:
    assert current_state(row) in ("failed", "detached"), where
    assert (cloud.device_allocations(), AcceleratorRequest.objects.count()) == ({}, 0), where
    assert Event.objects.filter(action="request.deleted").count() == len(row.requests), where


@pytest.mark.exhaustive
@database
@pytest.mark.parametrize("killed", [at_every_call, before_every_commit])
def test_an_attachment_is_claimed_and_bound_once_when_the_worker_is_killed_anywhere(
    cloud: FakeCloud, killed: Callable[[FakeCloud], Iterator[str]]
) -> None:
    row = ask_attachment()
    for where in killed(cloud):
        check_attached_once(cloud, row, where)
        assert Event.objects.filter(action="attachment.bound").count() == 1, where


@pytest.mark.exhaustive
@database
def test_an_attachment_succeeds_after_a_lost_or_refused_call(cloud: FakeCloud) -> None:
    row = ask_attachment()
    for where in at_every_call(cloud, [Trouble.LOST, Trouble.REFUSED]):
        check_attached_once(cloud, row, where)


@pytest.mark.exhaustive
@database
@pytest.mark.parametrize("killed", [at_every_call, before_every_commit])
@pytest.mark.parametrize("wanted", ["attached", "claimed", "claiming"])
def test_a_detached_attachment_leaves_nothing_when_the_worker_is_killed_anywhere(
    cloud: FakeCloud, wanted: str, killed: Callable[[FakeCloud], Iterator[str]]
) -> None:
    """The attachment is detached when it is attached, when it is claimed, and when its claim may have been written."""
    row = ask_attachment()
    while wanted not in (current_state(row), row.step):
        attaching.step()
    attachment_orders.order_detachment(row.uuid, ADMIN_CALLER)
    for where in killed(cloud):
        check_nothing_is_left(cloud, row, where)


@pytest.mark.exhaustive
@database
def test_a_failed_attachment_leaves_nothing_when_the_worker_is_killed_at_any_call(cloud: FakeCloud) -> None:
    cloud.placement.model.allocated[provider_of_card(), "FPGA"] = {"somebody": 2}
    row = ask_attachment()
    for where in at_every_call(cloud):
        check_nothing_is_left(cloud, row, where)
        assert cloud.placement.model.allocated[provider_of_card(), "FPGA"] == {"somebody": 2}, where


@database
def test_a_claim_that_arrives_after_the_attachment_was_withdrawn_is_refused(cloud: FakeCloud) -> None:
    """The first write gets no answer, and it is still on its way when the attachment is detached."""
    model, late = cloud.placement.model, []
    real = model.replace_allocations

    def slow(uuid: str, body: dict[str, Any]) -> None:
        late.append(body)
        raise KeyError("no answer, so far")

    row = ask_attachment()
    while current_state(row) != "attaching" or row.step != "claiming":
        attaching.step()
    model.replace_allocations = slow  # type: ignore[method-assign]
    attaching.step()
    model.replace_allocations = real  # type: ignore[method-assign]
    attachment_orders.order_detachment(row.uuid, ADMIN_CALLER)
    _run_until_done()
    assert current_state(row) == "failed"
    with pytest.raises(Exception, match="somebody was faster"):
        real(INSTANCE, late[0])
    assert cloud.device_allocations() == {}


PROVIDERS = ("a", "b")
SHARES = {"a": ClaimShare("FPGA", 1), "b": ClaimShare("FPGA", 2)}


class ConsumerSimulation:
    """Placement's rule for one consumer: a write needs its current generation. Others write the same consumer.

    `crashes` are bit masks, one for each step: 1 another client writes first, 2 our write is lost, 4 its answer is
    lost.
    """

    def __init__(self, has: dict[str, int], crashes: list[int]) -> None:
        self.generation, self.crashes = 3, iter(crashes)
        self.allocations = {ROOT: {"VCPU": 1}} | {rp: {"FPGA": n} for rp, n in has.items() if n}

    def read(self) -> ConsumerAllocations:
        return ConsumerAllocations(INSTANCE, self.generation, copy.deepcopy(self.allocations), "p", "u")

    def step(
        self, shares: dict[str, ClaimShare], last: AllocationWrite | None, decide: Callable[..., AllocationWrite | None]
    ) -> Any:
        """Read and plan; then record a new plan, or write the recorded one. Return (done, recorded plan)."""
        fate, seen = next(self.crashes, 0), self.read()
        change = decide(seen, last)
        if change is None or (change.is_noop and decide.__name__ == "claim"):
            return True, last
        if change != last:
            return False, change
        if fate & 1:
            self.write_as_other()
        taken = change.generation == self.generation
        if taken and not fate & 2:
            body = allocations.build_body(seen, shares, change)
            self.allocations = {rp: one["resources"] for rp, one in body["allocations"].items()}
            self.generation += 1
        heard = taken and not fate & 6
        return heard, change

    def write_as_other(self) -> None:
        self.allocations[ROOT]["VCPU"] += 1
        self.generation += 1

    def amounts(self) -> dict[str, int]:
        return {rp: self.allocations.get(rp, {}).get("FPGA", 0) for rp in PROVIDERS}


@given(
    st.fixed_dictionaries(dict.fromkeys(PROVIDERS, st.integers(0, 3))),
    st.lists(st.integers(0, 7), max_size=12),
    st.integers(0, 12),
)
def test_a_claim_is_added_once_and_removed_once_whatever_is_lost_between(
    initial_amounts: dict[str, int], fates: list[int], stop: int
) -> None:
    """Any write or answer may be lost, other clients may write between, and the claim may be given up at any step."""
    there = ConsumerSimulation(initial_amounts, fates)
    claim, release = None, None

    def claim_(seen: ConsumerAllocations, last: AllocationWrite | None) -> AllocationWrite | None:
        return allocations.plan_claim(seen, SHARES, last)

    def release_(seen: ConsumerAllocations, last: AllocationWrite | None) -> AllocationWrite | None:
        return allocations.plan_release(seen, SHARES, initial_amounts, last)

    claim_.__name__ = "claim"
    done = False
    for _ in range(stop):
        if not done:
            done, claim = there.step(SHARES, claim, claim_)
    if done:
        assert there.amounts() == {rp: initial_amounts[rp] + SHARES[rp].amount for rp in PROVIDERS}
    while claim is not None:
        done, release = there.step(SHARES, release, release_)
        if done:
            break
    assert there.amounts() == initial_amounts


def test_the_placement_model_answers_the_client_about_consumers() -> None:
    """The model is called through the client, as Placement is."""
    from placement_sync.client import PlacementClient

    one = PlacementModelSession()
    one.model.allocated[ROOT, "VCPU"] = {INSTANCE: 2}
    assert PlacementClient(one).read_consumer(INSTANCE) == ConsumerAllocations(
        INSTANCE, 1, {ROOT: {"VCPU": 2}}, "p1", "u1"
    )
    assert PlacementClient(one).read_consumer("nobody") == ConsumerAllocations("nobody")
