"""kill -9, or trouble on the other side, at every call and before every commit of an attachment: it ends attached and
claimed once, or failed with nothing left of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from django.db import transaction
from hypothesis import given
from hypothesis import strategies as st

from accelerators.models import AcceleratorRequest, Attachment, Event, Intent
from accelerators.workflows import attachments
from placement_sync import allocations
from placement_sync.allocations import AllocationWrite, ClaimShare, ConsumerAllocations
from placement_sync.jobs import attachments as attaching
from tests.placement import attaching as lab
from tests.placement.attaching import OLGA, ROOT, VM, Cloud, ask, cards, due_now, provider, state, there
from tests.placement.session import Session
from tests.placement.trouble import Killed, Trouble

database = pytest.mark.django_db


@pytest.fixture
def cloud(settings: Any) -> Iterator[Cloud]:
    with lab.a_cloud(settings) as one:
        cards()
        yield one


def at_every_call(cloud: Cloud, troubles: Iterable[Trouble] = (Trouble.KILLED,)) -> Iterator[str]:
    """The job runs with each trouble at its first call, its second, … from the same rows, then until it is done."""
    before = copy.deepcopy(cloud.placement)
    for trouble in troubles:
        reached, number = True, 0
        while reached:
            number += 1
            with transaction.atomic():
                cloud.placement = copy.deepcopy(before)
                there.__init__(cloud, number, trouble)  # type: ignore[misc]
                _until_done()
                reached = there.calls >= number
                if reached:
                    yield f"{trouble}, call {number}"
                transaction.set_rollback(True)
        assert number > 2
    cloud.placement = before
    there.__init__(cloud)  # type: ignore[misc]


def before_every_commit(cloud: Cloud) -> Iterator[str]:
    """The job is killed when all of a step is done but its commit."""
    before = copy.deepcopy(cloud.placement)
    done, number = False, 0
    while not done:
        number += 1
        with transaction.atomic():
            cloud.placement = copy.deepcopy(before)
            done = not all(attaching.step() for _ in range(number - 1))
            with transaction.atomic():
                attaching.step()
                transaction.set_rollback(True)
            _until_done()
            yield f"commit {number}"
            transaction.set_rollback(True)
    assert number > 3


def _until_done() -> None:
    for _ in range(8):
        due_now()
        try:
            attaching.run()
        except Killed:
            there.at, there.dead = 0, False
        if not Intent.objects.filter(kind="attachment").exists():
            return
    raise AssertionError(list(Intent.objects.values_list("last_error", flat=True)))


def attached(cloud: Cloud, row: Attachment, where: str) -> None:
    assert state(row) == "attached", where
    assert cloud.has() == {provider(): {"FPGA": 1}}, where
    assert list(AcceleratorRequest.objects.values_list("state", "uuid")) == [("Bound", row.requests[0])], where


def nothing_left(cloud: Cloud, row: Attachment, where: str) -> None:
    assert state(row) in ("failed", "detached"), where
    assert (cloud.has(), AcceleratorRequest.objects.count()) == ({}, 0), where
    assert Event.objects.filter(action="request.deleted").count() == len(row.requests), where


@pytest.mark.exhaustive
@database
@pytest.mark.parametrize("killed", [at_every_call, before_every_commit])
def test_an_attach_is_done_once(cloud: Cloud, killed: Callable[[Cloud], Iterator[str]]) -> None:
    row = ask()
    for where in killed(cloud):
        attached(cloud, row, where)
        assert Event.objects.filter(action="attachment.bound").count() == 1, where


@pytest.mark.exhaustive
@database
def test_an_attach_waits_for_who_does_not_answer(cloud: Cloud) -> None:
    row = ask()
    for where in at_every_call(cloud, [Trouble.LOST, Trouble.REFUSED]):
        attached(cloud, row, where)


@pytest.mark.exhaustive
@database
@pytest.mark.parametrize("killed", [at_every_call, before_every_commit])
@pytest.mark.parametrize("wanted", ["attached", "claimed", "claiming"])
def test_it_is_taken_back_once(cloud: Cloud, wanted: str, killed: Callable[[Cloud], Iterator[str]]) -> None:
    """What was attached, what was claimed, and what may have been."""
    row = ask()
    while wanted not in (state(row), row.step):
        attaching.step()
    attachments.order_detachment(row.uuid, OLGA)
    for where in killed(cloud):
        nothing_left(cloud, row, where)


@pytest.mark.exhaustive
@database
def test_what_is_refused_leaves_nothing(cloud: Cloud) -> None:
    cloud.placement.model.allocated[provider(), "FPGA"] = {"somebody": 2}
    row = ask()
    for where in at_every_call(cloud):
        nothing_left(cloud, row, where)
        assert cloud.placement.model.allocated[provider(), "FPGA"] == {"somebody": 2}, where


@database
def test_a_claim_that_arrives_when_nobody_wants_it_any_more(cloud: Cloud) -> None:
    """Nobody heard of the first write, and it is under way when the attachment is taken back."""
    model, late = cloud.placement.model, []
    real = model.replace_allocations

    def slow(uuid: str, body: dict[str, Any]) -> None:
        late.append(body)
        raise KeyError("no answer, so far")

    row = ask()
    while state(row) != "attaching" or row.step != "claiming":
        attaching.step()
    model.replace_allocations = slow  # type: ignore[method-assign]
    attaching.step()
    model.replace_allocations = real  # type: ignore[method-assign]
    attachments.order_detachment(row.uuid, OLGA)
    _until_done()
    assert state(row) == "failed"
    with pytest.raises(Exception, match="somebody was faster"):
        real(VM, late[0])
    assert cloud.has() == {}


PROVIDERS = ("a", "b")
SHARES = {"a": ClaimShare("FPGA", 1), "b": ClaimShare("FPGA", 2)}


class Counter:
    """Placement's rule for one consumer, and others that write it."""

    def __init__(self, has: dict[str, int], crashes: list[int]) -> None:
        self.generation, self.crashes = 3, iter(crashes)
        self.allocations = {ROOT: {"VCPU": 1}} | {rp: {"FPGA": n} for rp, n in has.items() if n}

    def seen(self) -> ConsumerAllocations:
        return ConsumerAllocations(VM, self.generation, copy.deepcopy(self.allocations), "p", "u")

    def step(
        self, shares: dict[str, ClaimShare], last: AllocationWrite | None, decide: Callable[..., AllocationWrite | None]
    ) -> Any:
        """One look, one record, one write; what happens between is drawn: (done, recorded)."""
        fate, seen = next(self.crashes, 0), self.seen()
        change = decide(seen, last)
        if change is None or (change.is_noop and decide.__name__ == "claim"):
            return True, last
        if change != last:
            return False, change
        if fate & 1:
            self.other()
        taken = change.generation == self.generation
        if taken and not fate & 2:
            body = allocations.build_body(seen, shares, change)
            self.allocations = {rp: one["resources"] for rp, one in body["allocations"].items()}
            self.generation += 1
        heard = taken and not fate & 6
        return heard, change

    def other(self) -> None:
        self.allocations[ROOT]["VCPU"] += 1
        self.generation += 1

    def amounts(self) -> dict[str, int]:
        return {rp: self.allocations.get(rp, {}).get("FPGA", 0) for rp in PROVIDERS}


@given(
    st.fixed_dictionaries(dict.fromkeys(PROVIDERS, st.integers(0, 3))),
    st.lists(st.integers(0, 7), max_size=12),
    st.integers(0, 12),
)
def test_claims_are_added_once_and_taken_back_once(has: dict[str, int], fates: list[int], stop: int) -> None:
    """Whatever was heard of each write, whoever wrote between, and wherever the claiming was given up."""
    there = Counter(has, fates)
    claim, release = None, None

    def claim_(seen: ConsumerAllocations, last: AllocationWrite | None) -> AllocationWrite | None:
        return allocations.plan_claim(seen, SHARES, last)

    def release_(seen: ConsumerAllocations, last: AllocationWrite | None) -> AllocationWrite | None:
        return allocations.plan_release(seen, SHARES, has, last)

    claim_.__name__ = "claim"
    done = False
    for _ in range(stop):
        if not done:
            done, claim = there.step(SHARES, claim, claim_)
    if done:
        assert there.amounts() == {rp: has[rp] + SHARES[rp].amount for rp in PROVIDERS}
    while claim is not None:
        done, release = there.step(SHARES, release, release_)
        if done:
            break
    assert there.amounts() == has


def test_a_session_answers_for_consumers() -> None:
    """The model is asked as Placement is: through the client."""
    from placement_sync.client import PlacementClient

    one = Session()
    one.model.allocated[ROOT, "VCPU"] = {VM: 2}
    assert PlacementClient(one).read_consumer(VM) == ConsumerAllocations(VM, 1, {ROOT: {"VCPU": 2}}, "p1", "u1")
    assert PlacementClient(one).read_consumer("nobody") == ConsumerAllocations("nobody")
