"""Several attachments of one instance, and the cloud in the way: each is claimed once, given back once, and ends."""

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
from accelerators.domain.errors import Reason, RefusedError
from accelerators.models import AcceleratorRequest, Attachment, Device, Intent
from accelerators.runtime import jobs
from accelerators.workflows import attachments
from placement_sync import allocations
from placement_sync.allocations import Change, Consumer, Share
from placement_sync.client import PlacementConflictError
from tests.placement import attaching as lab
from tests.placement.attaching import LONG_AGO, OLGA, VM, Cloud, ask, cards, held, provider, state, work

database = pytest.mark.django_db
LATER = "2999-01-01T00:00:00Z"
SHARES = {"a": Share("FPGA", 1)}


@pytest.fixture
def cloud(settings: Any) -> Iterator[Cloud]:
    with lab.a_cloud(settings) as one:
        yield one


def alternately(rows: Sequence[Attachment], turns: str = "01", most: int = 25) -> None:
    """A step of each in turn, by their numbers in `turns`, until none has any left."""
    for _ in range(most):
        for number in turns:
            turn(rows[int(number)])
        if not Intent.objects.filter(kind="attachment").exists():
            return
    raise AssertionError(list(Intent.objects.values_list("last_error", flat=True)))


def turn(row: Attachment, until: str = "") -> None:
    """A step of this one, or as many as it takes."""
    with conductor.writing():
        Intent.objects.update(next_at=LATER)
        Intent.objects.filter(key=str(row.uuid)).update(next_at=LONG_AGO)
    lab.attaching.step()
    row.refresh_from_db()
    if until not in ("", row.step):
        turn(row, until)


def unheard(cloud: Cloud, number: int, late: bool) -> None:
    """Nobody answers the write of that number: it did not happen, or (`late`) it did."""
    writes, real = count(1), cloud.placement.model.allocate

    def allocate(consumer: str, body: Any) -> None:
        mine = next(writes) == number
        if not mine or late:
            real(consumer, body)
        if mine:
            raise ConnectFailure("no answer")

    cloud.placement.model.allocate = allocate  # type: ignore[method-assign]


@pytest.mark.exhaustive
@database
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("attached", "turns"), [(0, "01"), (1, "01"), (1, "111000"), (2, "01")])
def test_two_of_one_instance_on_one_provider(cloud: Cloud, attached: int, turns: str, late: bool) -> None:
    """Those that are attached are detached while the others are attached, with trouble at a write."""
    cards(handles=4)
    rows = [ask() for _ in range(attached)]
    work()
    for row in rows:
        attachments.detach(row.uuid, OLGA)
    left = 2 - attached
    rows += [ask() for _ in range(left)]
    before = cloud.placement
    for number in (1, 2):
        with transaction.atomic():
            cloud.placement = copy.deepcopy(before)
            unheard(cloud, number, late)
            alternately(rows, turns)
            assert cloud.has() == ({provider(): {"FPGA": left}} if left else {}), number
            assert held() == ["Bound"] * left, number
            transaction.set_rollback(True)


@database
@pytest.mark.parametrize("given_up", [False, True])
def test_one_waits_for_the_other_and_says_so(cloud: Cloud, given_up: bool) -> None:
    cards(handles=4)
    first, second = ask(), ask()
    turn(first, "claiming")
    if given_up:
        attachments.detach(first.uuid, OLGA)
    turn(second, "chosen")
    turn(second)
    assert second.step == "chosen"
    said = f"attachment {first.uuid} of this instance has to finish first"
    assert Intent.objects.get(key=str(second.uuid)).last_error == said


@database
def test_what_is_claimed_and_not_bound_yet_is_not_given_back_with_another(cloud: Cloud) -> None:
    """A resize by Nova dropped the one that is detached."""
    cards(handles=4)
    rows = [ask()]
    work()
    rows.append(ask())
    turn(rows[1], "claimed")
    model = cloud.placement.model
    model.allocated[provider(), "FPGA"][VM] = 1
    model.written[VM] += 1
    attachments.detach(rows[0].uuid, OLGA)
    alternately(rows, "000111")
    assert [state(row) for row in rows] == ["detached", "attached"]
    assert cloud.has() == {provider(): {"FPGA": 1}}


@database
def test_pci_and_another_kind_that_were_chosen_at_once(cloud: Cloud) -> None:
    cards(2)
    pci, other = Device.objects.order_by("id")
    with conductor.writing():
        other.deployables.get().attach_handles.update(attach_type="TEST_PCI")
    rows = [ask("", device=pci.uuid), ask("", device=other.uuid)]
    alternately(rows)
    assert [state(row) for row in rows] == ["attached", "failed"]
    assert "has PCI devices, and Nova does not pass those" in rows[1].fault
    assert (held(), len(cloud.has())) == (["Bound"], 1)


@database
def test_it_is_detached_though_nova_is_switched_off_meanwhile(cloud: Cloud, settings: Any) -> None:
    cards(handles=4)
    assert jobs.has_taker("attachment"), "whatever is configured"
    rows = [ask()]
    work()
    rows.append(ask())
    settings.KEYS.nova_endpoint = "off"
    attachments.detach(rows[0].uuid, OLGA)
    work()
    assert [state(row) for row in rows] == ["detached", "failed"]
    assert (cloud.has(), AcceleratorRequest.objects.count()) == ({}, 0)


@database
def test_what_placement_refuses_for_anothers_sake_ends(cloud: Cloud) -> None:
    """Nothing of it is there, and no claim of it can be under way any more."""

    def refused() -> None:
        raise PlacementConflictError("placement.undefined_code", "something else of this consumer is over capacity")

    cards(handles=4)
    row = ask()
    cloud.placement.model.before_write = refused
    work(12)
    assert (state(row), row.step) == ("undoing", "returning"), "its claim may be under way"
    with conductor.writing():
        Attachment.objects.update(steps=[one | {"at": LONG_AGO} for one in row.steps])
    work()
    assert (state(row), row.steps[-1]["text"]) == ("failed", "Placement has nothing of it")
    assert AcceleratorRequest.objects.count() == 0


@database
def test_one_that_nova_cannot_tell_of_delays_no_other(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    def half_blind(instance: str, project: str | None = None) -> attachments.Instance:
        if instance == VM:
            raise RefusedError(Reason.AWAY, "Nova cannot tell.")
        return lab.attaching.look(instance, project)

    cards(handles=4)
    rows = [ask(), ask(instance=cloud.boots(str(uuid.uuid4())))]
    attachments.register(half_blind)
    while lab.attaching.step():
        pass
    assert [state(row) for row in rows] == ["asked", "attached"]
    assert Intent.objects.get(kind="attachment").last_error == "Nova cannot tell."


@database
def test_x4_strangers_do_not_learn_which_instances_there_are(cloud: Cloud) -> None:
    cards()
    cloud.placement.model.allocated[lab.ROOT, "VCPU"].clear()
    stranger = Caller("eve", "u", frozenset({"member"}), "p2")
    with pytest.raises(RefusedError) as error:
        attachments.ask(uuid.UUID(VM), stranger, profile="one", everyone=False)
    assert (error.value.reason, error.value.text) == (Reason.UNKNOWN, f"Nova has no instance {VM}.")


def test_a_consumer_that_was_made_again_counts_from_the_beginning() -> None:
    """The generation is that of the record, and the amounts are not."""
    again = Consumer(VM, 3, {"r": {"VCPU": 1}}, "p", "u")
    assert allocations.claiming(again, SHARES, Change(3, {"a": 2}, {"a": 3})) == Change(3, {"a": 0}, {"a": 1})
    assert allocations.releasing(again, SHARES, {}, Change(3, {"a": 2}, {"a": 1})) is None
