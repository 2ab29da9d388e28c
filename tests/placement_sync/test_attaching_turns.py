"""Test several attachments of one instance that are processed alternately, and attachments while a service fails.

Each attachment is claimed once, released once, and always ends.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import pytest
from django.db import transaction
from keystoneauth1.exceptions import ConnectFailure

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import AcceleratorRequest, Attachment, Device, Intent
from accelerators.runtime import jobs
from accelerators.workflows import attachment_orders
from placement_sync import allocations
from placement_sync.allocations import AllocationWrite, ClaimShare, ConsumerAllocations
from placement_sync.client import PlacementConflictError
from tests.placement_sync import attaching as lab
from tests.placement_sync.attaching import (
    ADMIN_CALLER,
    INSTANCE,
    LONG_AGO,
    FakeCloud,
    ask_attachment,
    current_state,
    make_ready_cards,
    provider_of_card,
    request_states,
    run_steps,
)
from tests.support.callguard import open_transaction_of_test

database = pytest.mark.django_db
LATER = "2999-01-01T00:00:00Z"
SHARES = {"a": ClaimShare("FPGA", 1)}


@pytest.fixture
def cloud(settings: Any) -> Iterator[FakeCloud]:
    with lab.configured_cloud(settings) as one:
        yield one


def run_alternately(rows: Sequence[Attachment], turns: str = "01", most: int = 25) -> None:
    """Process one step of each attachment in turn, in the order of `turns`, until no intent is left.

    `turns` are indexes of `rows`. Fails if intents are left after `most` rounds.
    """
    for _ in range(most):
        for number in turns:
            run_step_of(rows[int(number)])
        if not Intent.objects.filter(kind="attachment").exists():
            return
    raise AssertionError(list(Intent.objects.values_list("last_error", flat=True)))


def run_step_of(row: Attachment, until: str = "") -> None:
    """Process one step of this attachment; with `until`, as many as it takes to reach that step."""
    with conductor.writing():
        Intent.objects.update(next_at=LATER)
        Intent.objects.filter(key=str(row.uuid)).update(next_at=LONG_AGO)
    lab.attaching.step()
    row.refresh_from_db()
    if until not in ("", row.step):
        run_step_of(row, until)


def lose_write_answer(cloud: FakeCloud, number: int, late: bool) -> None:
    """Let write number `number` to Placement end without an answer; with `late` the write takes effect, else not."""
    writes, real = count(1), cloud.placement.model.replace_allocations

    def allocate(consumer: str, body: Any) -> None:
        mine = next(writes) == number
        if not mine or late:
            real(consumer, body)
        if mine:
            raise ConnectFailure("no answer")

    cloud.placement.model.replace_allocations = allocate  # type: ignore[method-assign]


@pytest.mark.exhaustive
@database
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("attached", "turns"), [(0, "01"), (1, "01"), (1, "111000"), (2, "01")])
def test_two_attachments_of_one_instance_on_one_provider_are_each_claimed_and_released_once(
    cloud: FakeCloud, attached: int, turns: str, late: bool
) -> None:
    """The attachments attached first are detached while the others are attached, and one write gets no answer."""
    make_ready_cards(handles=4)
    rows = [ask_attachment() for _ in range(attached)]
    run_steps()
    for row in rows:
        attachment_orders.order_detachment(row.uuid, ADMIN_CALLER)
    left = 2 - attached
    rows += [ask_attachment() for _ in range(left)]
    before = cloud.placement
    for number in (1, 2):
        with open_transaction_of_test():
            cloud.placement = copy.deepcopy(before)
            lose_write_answer(cloud, number, late)
            run_alternately(rows, turns)
            assert cloud.device_allocations() == ({provider_of_card(): {"FPGA": left}} if left else {}), number
            assert request_states() == ["Bound"] * left, number
            transaction.set_rollback(True)


@database
@pytest.mark.parametrize("given_up", [False, True])
def test_an_attachment_waits_for_another_of_its_instance_and_names_it(cloud: FakeCloud, given_up: bool) -> None:
    make_ready_cards(handles=4)
    first, second = ask_attachment(), ask_attachment()
    run_step_of(first, "claiming")
    if given_up:
        attachment_orders.order_detachment(first.uuid, ADMIN_CALLER)
    run_step_of(second, "chosen")
    run_step_of(second)
    assert second.step == "chosen"
    said = f"attachment {first.uuid} of this instance has to finish first"
    assert Intent.objects.get(key=str(second.uuid)).last_error == said


@database
@pytest.mark.slow
def test_detaching_keeps_the_unbound_claim_of_another_attachment(cloud: FakeCloud) -> None:
    """A resize by Nova has removed the claim of the attachment that is detached."""
    make_ready_cards(handles=4)
    rows = [ask_attachment()]
    run_steps()
    rows.append(ask_attachment())
    run_step_of(rows[1], "claimed")
    model = cloud.placement.model
    model.allocated[provider_of_card(), "FPGA"][INSTANCE] = 1
    model.consumer_generations[INSTANCE] += 1
    attachment_orders.order_detachment(rows[0].uuid, ADMIN_CALLER)
    run_alternately(rows, "000111")
    assert [current_state(row) for row in rows] == ["detached", "attached"]
    assert cloud.device_allocations() == {provider_of_card(): {"FPGA": 1}}


@database
@pytest.mark.slow
def test_of_a_pci_and_another_attachment_chosen_at_once_the_second_fails(cloud: FakeCloud) -> None:
    make_ready_cards(2)
    pci, other = Device.objects.order_by("id")
    with conductor.writing():
        other.deployables.get().attach_handles.update(attach_type="TEST_PCI")
    rows = [ask_attachment("", device=pci.uuid), ask_attachment("", device=other.uuid)]
    run_alternately(rows)
    assert [current_state(row) for row in rows] == ["attached", "failed"]
    assert "has PCI devices, and Nova does not pass those" in rows[1].fault
    assert (request_states(), len(cloud.device_allocations())) == (["Bound"], 1)


@database
def test_attachments_are_detached_or_fail_after_nova_was_switched_off(cloud: FakeCloud, settings: Any) -> None:
    make_ready_cards(handles=4)
    assert jobs.has_handler("attachment"), "whatever is configured"
    rows = [ask_attachment()]
    run_steps()
    rows.append(ask_attachment())
    settings.KEYS.nova_endpoint = "off"
    attachment_orders.order_detachment(rows[0].uuid, ADMIN_CALLER)
    run_steps()
    assert [current_state(row) for row in rows] == ["detached", "failed"]
    assert (cloud.device_allocations(), AcceleratorRequest.objects.count()) == ({}, 0)


@database
def test_an_attachment_that_placement_keeps_refusing_fails_once_no_claim_can_be_pending(cloud: FakeCloud) -> None:
    """The attachment waits while its claim may still arrive. It fails later, because Placement has nothing of it."""

    def refused() -> None:
        raise PlacementConflictError("placement.undefined_code", "something else of this consumer is over capacity")

    make_ready_cards(handles=4)
    row = ask_attachment()
    cloud.placement.model.before_write = refused
    run_steps(12)
    assert (current_state(row), row.step) == ("undoing", "returning"), "its claim may be under way"
    with conductor.writing():
        Attachment.objects.update(steps=[one | {"at": LONG_AGO} for one in row.steps])
    run_steps()
    assert (current_state(row), row.steps[-1]["text"]) == ("failed", "Placement has nothing of it")
    assert AcceleratorRequest.objects.count() == 0


@database
def test_an_attachment_whose_instance_nova_cannot_show_does_not_delay_others(cloud: FakeCloud) -> None:
    def half_blind(instance: str, project: str | None = None) -> attachment_orders.NovaInstance:
        if instance == INSTANCE:
            raise RefusedError(RefusalReason.UNAVAILABLE, "Nova cannot tell.")
        return lab.attaching.look_up_instance(instance, project)

    make_ready_cards(handles=4)
    rows = [ask_attachment(), ask_attachment(instance=cloud.boot_instance(str(uuid.uuid4())))]
    with attachment_orders.INSTANCE_LOOKUP.replaced("nova", half_blind):
        while lab.attaching.step():
            pass
    assert [current_state(row) for row in rows] == ["asked", "attached"]
    assert Intent.objects.get(kind="attachment").last_error == "Nova cannot tell."


@database
def test_x4_a_caller_of_another_project_does_not_learn_that_an_instance_exists(cloud: FakeCloud) -> None:
    make_ready_cards()
    cloud.placement.model.allocated[lab.ROOT, "VCPU"].clear()
    stranger = Caller("eve", "u", frozenset({"member"}), "p2")
    with pytest.raises(RefusedError) as error:
        attachment_orders.order_attachment(uuid.UUID(INSTANCE), stranger, profile="one", all_projects=False)
    assert (error.value.reason, error.value.text) == (RefusalReason.NOT_FOUND, f"Nova has no instance {INSTANCE}.")


def test_a_recreated_consumer_of_the_same_generation_is_claimed_from_its_present_amounts() -> None:
    """The record of the last write has the same generation, but other amounts than the consumer has now."""
    again = ConsumerAllocations(INSTANCE, 3, {"r": {"VCPU": 1}}, "p", "u")
    assert allocations.plan_claim(again, SHARES, AllocationWrite(3, {"a": 2}, {"a": 3})) == AllocationWrite(
        3, {"a": 0}, {"a": 1}
    )
    assert allocations.plan_release(again, SHARES, {}, AllocationWrite(3, {"a": 2}, {"a": 1})) is None
