"""Test the data that the job `placement` loads for a host and stores after a synchronization."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.models import Deployable, Device
from placement_sync.apply_writes import SyncOutcome
from placement_sync.jobs import repository
from placement_sync.mapping import compute_desired_providers
from placement_sync.models import Tree, WrittenProvider
from placement_sync.reconcile import ObservedProvider, WrittenRecord
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db
ADMIN = Caller("ops", "u", frozenset({"admin"}), "p")


def test_missing_deployables_come_last_without_units_and_are_not_offered() -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1, handles=4), make_card(2, handles=4), make_card(3)))
    missing, offered, _ = Device.objects.order_by("id")
    for device in (missing, offered):
        lifecycle.enable_device(device.uuid, ADMIN)
    with conductor.writing():
        Deployable.objects.filter(device=missing).update(missing_since=datetime.now(UTC))
    first, last = repository.load_deployables(host)
    assert (first.name, first.total, first.is_offered) == ("cmp1_0000:02:00.0", 4, True)
    assert first.attributes == {"rc": "FPGA", "trait0": "CUSTOM_TEST"}
    assert (last.name, last.total, last.is_offered) == ("cmp1_0000:01:00.0", 0, False)


def test_a_card_that_replaced_another_one_in_its_slot_is_offered_instead_of_it() -> None:
    host = get_or_create_host()
    for seq, key in enumerate(("serial:S1", "serial:S2"), start=1):
        apply_report(host, make_driver_report(make_card(1, key=key)), seq=seq)
        lifecycle.enable_device(Device.objects.get(key=key).uuid, ADMIN)
    assert [device.state for device in Device.objects.order_by("id")] == ["missing", "ready"]
    deployables = repository.load_deployables(host)
    assert [one.is_offered for one in deployables] == [True, False]
    ((provider,),) = [list(compute_desired_providers(deployables)[0].values())]
    assert (provider.total, provider.reserved) == (1, 0)


def test_an_outcome_replaces_the_hosts_rows_in_three_statements_and_keeps_the_claims() -> None:
    host, other_host = get_or_create_host(), get_or_create_host("cmp2")
    kept, dropped, foreign, new = (str(uuid4()) for _ in range(4))
    seen = ObservedProvider(kept, "part", "root", 7, {"FPGA": {"total": 4}}, frozenset({"CUSTOM_A", "CUSTOM_B"}))
    first = WrittenRecord(frozenset({"FPGA"}), frozenset({"CUSTOM_A"}), seen)
    repository.store_outcome(other_host, SyncOutcome(written={foreign: WrittenRecord()}))
    repository.store_outcome(host, SyncOutcome(written={kept: first, dropped: WrittenRecord()}, problems=["why"]))
    assert repository.load_written(host) == {kept: first, dropped: WrittenRecord()}
    assert (repository.load_root_and_foreign(host), Tree.objects.get(host=host).problems) == (("", {}), ["why"])
    WrittenProvider.objects.filter(uuid=kept).update(claims={"generation": 7})
    Tree.objects.update(looked_at="2020-01-01T00:00:00Z", synced_at=None, compared_at="2020-01-01T00:00:00Z")
    second = WrittenRecord(frozenset({"PGPU"}), frozenset(), seen)
    with CaptureQueriesContext(connection) as statements:
        repository.store_outcome(host, SyncOutcome(written={kept: second, new: first}, root=new))
    assert len([one for one in statements if "SAVEPOINT" not in one["sql"]]) == 3
    assert repository.load_written(host) == {kept: second, new: first}
    assert repository.load_written(other_host) == {foreign: WrittenRecord()}
    assert WrittenProvider.objects.get(uuid=kept).claims == {"generation": 7}
    tree = Tree.objects.get(host=host)
    assert tree.synced_at and tree.compared_at
    assert (repository.load_root_and_foreign(host)[0], tree.problems, tree.looked_at.year > 2020) == (new, [], True)
    assert tree.compared_at.year == 2020, "what the job `faults` has stored is kept"


def test_an_outcome_with_problems_keeps_the_time_of_the_last_complete_match() -> None:
    host = get_or_create_host()
    repository.store_outcome(host, SyncOutcome(problems=["the class is in use"]))
    assert Tree.objects.get(host=host).synced_at is None
    repository.store_outcome(host, SyncOutcome())
    synced_at = Tree.objects.get(host=host).synced_at
    assert synced_at is not None
    Tree.objects.update(synced_at="2020-01-01T00:00:00Z")
    repository.store_outcome(host, SyncOutcome(problems=["the class is in use"]))
    tree = Tree.objects.get(host=host)
    assert (tree.synced_at.year, tree.problems) == (2020, ["the class is in use"])
