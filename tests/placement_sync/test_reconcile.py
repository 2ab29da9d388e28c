"""Test `mapping`, `reconcile` and `sync` on a model of Placement: they reach every state despite foreign writes."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from accelerators.domain.provider_ids import compute_provider_uuid
from placement_sync.apply_writes import ProviderMissingError, SyncOutcome, synchronize_host
from placement_sync.client import (
    PlacementClient,
    PlacementConflictError,
    PlacementRejectedError,
    PlacementUnavailableError,
)
from placement_sync.mapping import DeployableRecord, compute_desired_providers
from placement_sync.reconcile import ObservedProvider, WrittenRecord
from tests.placement_sync.model import CONCURRENT_UPDATE, PlacementModel
from tests.placement_sync.session import PlacementModelSession
from tests.support.clocks import replace_sleep

HOST, ROOT = "cmp1", "11111111-1111-1111-1111-111111111111"


def make_part(
    name: str = "cmp1_FakeDevice", total: int = 16, offered: bool = True, **attributes: str
) -> DeployableRecord:
    known = {"rc": "FPGA", "traits1": "CUSTOM_FAKE_DEVICE"} | attributes
    return DeployableRecord(name, "", total, known, offered)


def make_placement() -> PlacementModel:
    return PlacementModel({ROOT: ObservedProvider(ROOT, HOST, "", 1, {"VCPU": {"total": 8}})})


def sync(
    placement: PlacementModel, parts: list[DeployableRecord], written: dict[str, WrittenRecord], dry_run: bool = False
) -> SyncOutcome:
    return synchronize_host(placement, HOST, compute_desired_providers(parts)[0], written, ROOT, dry_run)  # type: ignore[arg-type]


PROVIDER_UUID = str(compute_provider_uuid("cmp1_FakeDevice"))


def test_a_new_deployable_becomes_a_provider_as_upstream_makes_it_in_three_writes() -> None:
    placement = make_placement()
    outcome = sync(placement, [make_part()], {})
    provider = placement.providers[PROVIDER_UUID]
    assert (provider.name, provider.parent) == ("cmp1_FakeDevice", ROOT)
    assert (provider.inventories["FPGA"]["total"], provider.inventories["FPGA"]["max_unit"]) == (16, 16)
    assert provider.inventories["FPGA"]["reserved"] == 0
    assert provider.traits == {"CUSTOM_FAKE_DEVICE"}
    assert placement.writes == 3
    before = placement.writes, placement.reads
    sync(placement, [make_part()], outcome.written)
    assert (placement.writes, placement.reads) == (before[0], before[1] + 1)


def test_a_provider_out_of_offer_is_fully_reserved_and_keeps_values_of_others() -> None:
    placement = make_placement()
    written = sync(placement, [make_part()], {}).written
    provider = placement.providers[PROVIDER_UUID]
    other = {"FPGA": {**provider.inventories["FPGA"], "allocation_ratio": 2.0}, "CUSTOM_THEIRS": {"total": 3}}
    traits = provider.traits | {"CUSTOM_THEIRS"}
    placement.providers[PROVIDER_UUID] = replace(provider, inventories=other, traits=traits, generation=99)
    written = sync(placement, [make_part(offered=False)], written).written
    now = placement.providers[PROVIDER_UUID]
    assert (now.inventories["FPGA"]["reserved"], now.inventories["FPGA"]["allocation_ratio"]) == (16, 2.0)
    assert now.inventories["CUSTOM_THEIRS"]["total"] == 3
    sync(placement, [make_part(traits1="CUSTOM_OTHER")], written)
    assert placement.providers[PROVIDER_UUID].traits == {"CUSTOM_OTHER", "CUSTOM_THEIRS"}


def test_an_old_resource_class_stays_fully_reserved_while_it_is_allocated() -> None:
    placement = make_placement()
    written = sync(placement, [make_part()], {}).written
    placement.allocated[PROVIDER_UUID, "FPGA"] = {"vm": 1}
    outcome = sync(placement, [make_part(rc="PGPU")], written)
    inventories = placement.providers[PROVIDER_UUID].inventories
    assert (inventories["FPGA"]["reserved"], inventories["PGPU"]["total"]) == (16, 16)
    assert outcome.problems == ["cmp1_FakeDevice keeps FPGA, fully reserved, because of its allocations"]
    placement.allocated.clear()
    sync(placement, [make_part(rc="PGPU")], outcome.written)
    assert list(placement.providers[PROVIDER_UUID].inventories) == ["PGPU"]


def test_a_removed_provider_is_deleted_only_when_it_has_no_allocations() -> None:
    placement = make_placement()
    written = sync(placement, [make_part()], {}).written
    placement.allocated[PROVIDER_UUID, "FPGA"] = {"vm": 1}
    outcome = sync(placement, [], written)
    assert PROVIDER_UUID in placement.providers
    assert outcome.problems == [
        "cmp1_FakeDevice was removed from its host but stays in Placement, because it is allocated to vm"
    ]
    placement.allocated.clear()
    assert sync(placement, [], outcome.written).written == {}
    assert set(placement.providers) == {ROOT}


def test_a_provider_below_another_host_is_moved_to_this_host() -> None:
    placement = make_placement()
    placement.providers["other"] = ObservedProvider("other", "cmp2", "", 0)
    placement.providers[PROVIDER_UUID] = ObservedProvider(PROVIDER_UUID, "cmp1_FakeDevice", "other", 7)
    sync(placement, [make_part()], {})
    assert placement.providers[PROVIDER_UUID].parent == ROOT
    assert placement.providers[PROVIDER_UUID].inventories["FPGA"]["total"] == 16
    assert placement.writes == 4, "creation, which conflicts, move, inventories and traits: none is tried twice"


@pytest.mark.parametrize("is_allocated", [True, False])
def test_a_conflict_at_a_deletion_keeps_an_allocated_provider_and_repeats_any_other_one(is_allocated: bool) -> None:
    placement = make_placement()
    written = sync(placement, [make_part()], {}).written
    placement.writes = 0

    def interfere() -> None:
        """Allocate the provider right before the deletion, or change it once."""
        if is_allocated:
            placement.allocated[PROVIDER_UUID, "FPGA"] = {"vm": 1}
        elif placement.writes == 1:
            raise CONCURRENT_UPDATE

    placement.before_write = interfere
    outcome = sync(placement, [], written)
    assert (PROVIDER_UUID in placement.providers, PROVIDER_UUID in outcome.written) == (is_allocated, is_allocated)
    assert (placement.writes, len(outcome.problems)) == ((1, 1) if is_allocated else (2, 0))


def test_reconciling_without_a_compute_provider_raises_that_it_is_missing() -> None:
    with pytest.raises(ProviderMissingError, match="waiting for compute provider cmp1"):
        synchronize_host(PlacementModel(), HOST, compute_desired_providers([make_part()])[0], {})  # type: ignore[arg-type]


def test_reconciling_gives_up_after_seven_backed_off_conflicts_and_succeeds_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pauses: list[float] = []
    replace_sleep(monkeypatch, pauses.append)
    monkeypatch.setattr("random.uniform", lambda _, longest: longest)
    placement = make_placement()
    written = sync(placement, [make_part()], {}).written

    def tamper() -> None:
        placement.providers[PROVIDER_UUID] = replace(
            placement.providers[PROVIDER_UUID], generation=random.randrange(100, 10**6)
        )

    placement.before_write = tamper
    with pytest.raises(PlacementConflictError):
        sync(placement, [make_part(total=8)], written)
    assert pauses == [0.02, 0.04, 0.08, 0.16, 0.32, 0.5, 0.5], "the limit of a random pause doubles up to 0.5 s"
    placement.before_write = lambda: None
    sync(placement, [make_part(total=8)], written)
    assert placement.providers[PROVIDER_UUID].inventories["FPGA"]["total"] == 8


def make_placement_with_foreign_children(count: int) -> PlacementModel:
    """Return a model whose compute provider has children that are not ours, as Nova and Neutron make them."""
    placement = make_placement()
    for number in range(count):
        child = ObservedProvider(f"child{number}", f"cmp1_child{number}", ROOT, 3, {"VGPU": {"total": 1}})
        placement.providers[child.uuid] = child
    return placement


def sync_with_foreign(placement: PlacementModel, known: dict[str, ObservedProvider]) -> SyncOutcome:
    desired, _ = compute_desired_providers([make_part()])
    return synchronize_host(placement, HOST, desired, {}, ROOT, known_foreign=known)  # type: ignore[arg-type]


def test_providers_of_others_are_read_once_and_after_the_writes_however_many_conflicts_there_are() -> None:
    placement = make_placement_with_foreign_children(3)
    reads_before_writes: list[int] = []

    def conflict_once() -> None:
        reads_before_writes.append(placement.reads)
        if placement.writes == 1:
            raise CONCURRENT_UPDATE

    placement.before_write = conflict_once
    outcome = sync_with_foreign(placement, {})
    assert set(outcome.foreign) == {"child0", "child1", "child2"}
    *_, before_last_write = reads_before_writes
    assert placement.reads - before_last_write == 3 * 2, "two calls for each of the three, after the last write"
    assert before_last_write == 3, "the tree is read twice, and once whether the provider exists: nothing else"


@pytest.mark.parametrize("deadline_is_over", [True, False])
def test_failing_reads_of_providers_of_others_stop_neither_the_writes_nor_forget_what_is_known(
    deadline_is_over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    placement = make_placement_with_foreign_children(3)
    known = {uuid: replace(one, generation=2) for uuid, one in placement.providers.items() if uuid != ROOT}
    del known["child2"]
    attempts: list[str] = []
    read_details = placement.read_details

    def fail_for_children(provider: ObservedProvider) -> ObservedProvider:
        if provider.uuid.startswith("child"):
            attempts.append(provider.uuid)
            raise (
                PlacementUnavailableError("Placement is too slow")
                if deadline_is_over
                else PlacementRejectedError("it is gone")
            )
        return read_details(provider)

    monkeypatch.setattr(placement, "read_details", fail_for_children)
    outcome = sync_with_foreign(placement, known)
    assert placement.providers[PROVIDER_UUID].inventories["FPGA"]["total"] == 16
    assert (len(outcome.writes), outcome.foreign) == (3, known)
    assert len(attempts) == (1 if deadline_is_over else 3), "no call follows one that Placement did not answer"


def test_a_rejected_call_raises_an_error_with_placements_message() -> None:
    placement = PlacementClient(PlacementModelSession(make_placement()))
    with pytest.raises(
        PlacementRejectedError, match=f"^PUT /resource_providers/{PROVIDER_UUID}: 404 no such provider$"
    ):
        placement.move_provider(PROVIDER_UUID, "cmp1_FakeDevice", ROOT)
    with pytest.raises(
        PlacementRejectedError, match=f"^GET /resource_providers/{PROVIDER_UUID}/inventories: 404 no such provider$"
    ):
        placement.read_details(ObservedProvider(PROVIDER_UUID, "cmp1_FakeDevice", ROOT, 1))


def test_unusable_resource_classes_and_traits_are_named_as_problems() -> None:
    providers, problems = compute_desired_providers(
        [make_part(rc="gpu", traits1="bad trait"), make_part("x", rc="CUSTOM_X")]
    )
    assert [one.resource_class for one in providers.values()] == ["", "CUSTOM_X"]
    assert problems == [
        "cmp1_FakeDevice has no usable resource class ('gpu'), so it has no inventory",
        "cmp1_FakeDevice has a trait whose name Placement does not accept: 'bad trait'",
    ]


NAMES = st.sampled_from([f"cmp1_dev{n}" for n in range(4)])
PARTS = st.dictionaries(
    NAMES,
    st.builds(
        dict,
        total=st.integers(0, 4),
        offered=st.booleans(),
        rc=st.sampled_from(["FPGA", "PGPU", "", "bad"]),
        traits1=st.sampled_from(["CUSTOM_A", "CUSTOM_B", "no"]),
    ),
    max_size=4,
)
TAMPERS = st.lists(
    st.tuples(NAMES, st.sampled_from(["delete", "move", "trait", "ratio", "allocate", "free"])), max_size=4
)


def _tamper(placement: PlacementModel, name: str, how: str) -> None:
    uuid = str(compute_provider_uuid(name))
    now = placement.providers.get(uuid)
    if how == "free" or now is None:
        placement.allocated = {at: held for at, held in placement.allocated.items() if at[0] != uuid}
    elif how == "allocate":
        for resource_class in now.inventories:
            placement.allocated[uuid, resource_class] = {"vm": 1}
    elif how == "delete":
        if not placement.read_allocations(uuid):
            del placement.providers[uuid]
    else:
        changes: dict[str, Any] = {
            "move": {"parent": "elsewhere"},
            "trait": {"traits": now.traits | {"CUSTOM_FOREIGN"} - {"CUSTOM_A"}},
            "ratio": {"inventories": {k: {**v, "allocation_ratio": 9.0} for k, v in now.inventories.items()}},
        }[how]
        placement.providers[uuid] = replace(now, generation=now.generation + 1, **changes)


@settings(max_examples=120)
@example([({"cmp1_dev0": {"total": 1}}, []), ({}, [("cmp1_dev0", "allocate")])])
@example([({"cmp1_dev0": {"total": 1}}, []), ({"cmp1_dev0": {"rc": "CUSTOM_A"}}, [("cmp1_dev0", "allocate")])])
@given(st.lists(st.tuples(PARTS, TAMPERS), min_size=1, max_size=4))
@pytest.mark.slow
def test_L4_reconciling_converges_and_a_second_run_writes_nothing(
    rounds: list[tuple[dict[str, Any], list[tuple[str, str]]]],
) -> None:
    """Change the desired state and Placement at random, in several rounds.

    In each round one run must reach the desired state, a second run must write nothing, and providers with allocations
    and foreign providers must remain.
    """
    placement, written = make_placement(), {}
    foreign = ObservedProvider("foreign", "cmp1_theirs", ROOT, 3, {"CUSTOM_T": {"total": 1}}, frozenset({"CUSTOM_T"}))
    placement.providers["foreign"] = foreign
    for wanted, tampers in rounds:
        for tamper in tampers:
            _tamper(placement, *tamper)
        parts = [make_part(name, **values) for name, values in wanted.items()]
        held = {uuid for uuid, _ in placement.allocated}
        first = sync(placement, parts, written)
        written = first.written
        assert held <= placement.providers.keys()
        assert placement.providers["foreign"] == foreign
        for uuid, provider in compute_desired_providers(parts)[0].items():
            now = placement.providers[uuid]
            assert (now.name, now.parent) == (provider.name, ROOT)
            assert provider.traits <= now.traits
            if provider.total:
                entry = now.inventories[provider.resource_class]
                assert (entry["total"], entry["reserved"]) == (provider.total, provider.reserved)
        sent = placement.writes
        second = sync(placement, parts, written)
        planned = sync(placement, parts, second.written, dry_run=True).writes
        assert not second.writes and placement.writes == sent
        # A dry run also lists the writes that allocations prevent; the second run reported a problem for each of them.
        assert len(planned) == len(second.problems)
        assert all(any(problem.startswith(f"{write.name} ") for problem in second.problems) for write in planned)
