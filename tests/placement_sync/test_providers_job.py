"""Test the job `placement`, which processes provider intents and writes providers to Placement, also after outages."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.provider_ids import compute_provider_uuid
from accelerators.models import Device, Host, Intent, Tick
from accelerators.runtime import jobs
from cyborgweb.auth import keystone
from placement_sync.cloud import SERVICE_SESSION
from placement_sync.jobs import providers
from placement_sync.models import Tree, WrittenProvider
from placement_sync.reconcile import ObservedProvider
from tests.placement_sync.session import (
    COMPUTE_PROVIDER,
    PlacementModelSession,
    placement_session,
)
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.statements import count_call_statements

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("placement")]
ADMIN = Caller("ops", "u", frozenset({"admin"}), "p")


def make_ready_host(cards: int = 1, seq: int = 1) -> Host:
    host = get_or_create_host()
    apply_report(host, make_driver_report(*(make_card(n, handles=4) for n in range(cards))), seq=seq)
    for uuid in Device.objects.values_list("uuid", flat=True):
        lifecycle.enable_device(uuid, ADMIN)
    return host


def make_intents_due() -> None:
    with conductor.writing():
        Intent.objects.update(next_at="2020-01-01T00:00:00Z")


def observed_provider(n: int = 0) -> ObservedProvider:
    return placement_session.model.providers[str(compute_provider_uuid(f"cmp1_0000:{n:02x}:00.0"))]


def test_an_enabled_device_becomes_a_provider_whose_reserve_follows_its_state() -> None:
    host = make_ready_host()
    assert not providers.step()
    assert (observed_provider().inventories["FPGA"]["total"], observed_provider().inventories["FPGA"]["reserved"]) == (
        4,
        0,
    )
    assert observed_provider().traits == {"CUSTOM_TEST"}
    assert not Intent.objects.filter(kind="provider")
    lifecycle.disable_device(Device.objects.get().uuid, ADMIN)
    providers.step()
    assert observed_provider().inventories["FPGA"]["reserved"] == 4
    apply_report(host, make_driver_report(), seq=2)
    providers.step()
    assert observed_provider().inventories["FPGA"]["reserved"] == 4


def take_write_calls(placement: PlacementModelSession) -> list[str]:
    """Return the calls since the last invocation that change something in Placement."""
    found = [call for call in placement.seen_calls if not call.startswith("GET ")]
    placement.seen_calls.clear()
    return found


def test_only_a_report_that_changes_devices_triggers_the_placement_job(django_capture_on_commit_callbacks: Any) -> None:
    host = get_or_create_host()
    with jobs.JOBS.replaced("placement", jobs.Job("unused", intent_kind="provider")):
        with django_capture_on_commit_callbacks(execute=True):
            apply_report(host, make_driver_report(make_card(1)))
        assert Tick.objects.filter(name="placement").count() == 1
        jobs.clear_tick("placement")
        with django_capture_on_commit_callbacks(execute=True):
            apply_report(host, make_driver_report(make_card(1)), seq=2)
        assert not Tick.objects.filter(name="placement").exists()


def test_L4_reconciling_twice_writes_once(placement: PlacementModelSession) -> None:
    host = make_ready_host(2)
    providers.step()
    assert take_write_calls(placement)
    generations = {uuid: one.generation for uuid, one in placement.model.providers.items()}
    for forgets in (False, True):  # first with the recorded writes, then only from the state of Placement
        if forgets:
            WrittenProvider.objects.all().delete()
        with conductor.writing():
            conductor.raise_provider_intents([host])
        assert Intent.objects.filter(kind="provider").exists()
        providers.step()
        assert placement.seen_calls, "it was looked at again"
        assert take_write_calls(placement) == []
        assert not Intent.objects.filter(kind="provider").exists()
    assert {uuid: one.generation for uuid, one in placement.model.providers.items()} == generations
    lifecycle.disable_device(Device.objects.order_by("id")[0].uuid, ADMIN)
    providers.step()
    assert len(take_write_calls(placement)) == 1, "one provider has changed"
    with conductor.writing():
        conductor.raise_provider_intents([host])
    providers.step()
    assert take_write_calls(placement) == []


@pytest.mark.slow
def test_the_placement_job_costs_the_same_statements_at_any_number_of_devices() -> None:
    make_ready_host()
    providers.step()
    make_ready_host(2, seq=2)
    few = count_call_statements(providers.step)
    make_ready_host(12, seq=3)
    assert count_call_statements(providers.step) == few


def test_an_intent_waits_while_placement_is_away_and_is_done_afterwards(placement: PlacementModelSession) -> None:
    make_ready_host()
    placement.away = True
    assert not providers.step()
    intent = Intent.objects.get(kind="provider")
    assert "nobody is there" in intent.last_error
    assert intent.attempts == 1
    providers.step()
    assert Intent.objects.get(kind="provider").attempts == 1
    placement.away = False
    make_intents_due()
    providers.step()
    assert observed_provider().inventories["FPGA"]["total"] == 4
    assert not Intent.objects.filter(kind="provider")


def test_an_intent_waits_until_nova_has_made_the_compute_provider(placement: PlacementModelSession) -> None:
    make_ready_host()
    placement.model.providers.clear()
    providers.step()
    assert Intent.objects.get(kind="provider").last_error == "waiting for compute provider cmp1"
    placement.model.providers[COMPUTE_PROVIDER] = ObservedProvider(COMPUTE_PROVIDER, "cmp1", "", 0)
    make_intents_due()
    providers.step()
    assert observed_provider().inventories["FPGA"]["total"] == 4


@pytest.mark.django_db(transaction=True)
def test_an_intent_raised_again_while_it_is_processed_stays_open(placement: PlacementModelSession) -> None:
    host = make_ready_host()

    def again() -> None:
        placement.model.before_write = lambda: None
        threads.submit(_raise_intent_and_disconnect, host).result()

    with ThreadPoolExecutor(1) as threads:
        placement.model.before_write = again
        providers.step()
    assert observed_provider()
    assert Intent.objects.filter(kind="provider").exists()
    providers.step()
    assert not Intent.objects.filter(kind="provider").exists()


def _raise_intent_and_disconnect(host: Host) -> None:
    try:
        conductor.raise_provider_intents([host])
    finally:
        connection.close()


def test_a_provider_deleted_by_others_is_restored_by_the_periodic_check(placement: PlacementModelSession) -> None:
    make_ready_host()
    providers.step()
    uuid = observed_provider().uuid
    del placement.model.providers[uuid]
    providers.step()
    assert uuid not in placement.model.providers
    Tree.objects.update(looked_at="2020-01-01T00:00:00Z")
    providers.step()
    assert uuid in placement.model.providers


def test_the_periodic_check_selects_hosts_with_providers_that_nobody_looked_at_and_that_have_no_intent() -> None:
    host = make_ready_host()
    apply_report(get_or_create_host("cmp2"), make_driver_report(make_card(1)))
    delete_intents()
    providers._enqueue_hosts_to_sweep()
    intent = Intent.objects.get(kind=providers.KIND)
    assert intent.key == str(host.uuid), "it was never looked at, and cmp2 has no provider"
    intent.payload = {"host": "kept"}
    with conductor.writing():
        intent.save()
    providers._enqueue_hosts_to_sweep()
    assert Intent.objects.get(kind=providers.KIND).payload == {"host": "kept"}, "an open intent is not renewed"
    delete_intents()
    Tree.objects.create(host=host)
    providers._enqueue_hosts_to_sweep()
    assert not Intent.objects.filter(kind=providers.KIND).exists(), "it was looked at just now"


def delete_intents() -> None:
    with conductor.writing():
        Intent.objects.filter(kind=providers.KIND).delete()


def test_the_job_calls_nobody_without_a_service_session(placement: PlacementModelSession) -> None:
    make_ready_host()
    with SERVICE_SESSION.replaced("keystone", keystone.service_session):
        assert not providers.step()
    assert placement.seen_calls == []


def test_the_placement_sync_command_prints_the_differences_and_writes_them() -> None:
    make_ready_host()
    out = StringIO()
    call_command("placement_sync", dry_run=True, stdout=out)
    assert out.getvalue().splitlines() == [
        "cmp1",
        "  + cmp1_0000:00:00.0: a new provider",
        "  + cmp1_0000:00:00.0: FPGA 4",
        "  + cmp1_0000:00:00.0: trait CUSTOM_TEST",
        "1 host, 3 to be written",
    ]
    assert list(placement_session.model.providers) == [COMPUTE_PROVIDER]
    call_command("placement_sync", host=["cmp1"], stdout=StringIO())
    assert observed_provider().inventories["FPGA"]["total"] == 4
    again = StringIO()
    call_command("placement_sync", stdout=again)
    assert again.getvalue().splitlines() == ["1 host, 0 written"]


def test_hosts_that_a_batch_has_no_time_to_begin_are_left_for_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow Placement must not keep the job until the cluster kills it."""
    conductor.raise_provider_intents([get_or_create_host("cmp1")])
    monkeypatch.setattr(providers, "BEGIN_DEADLINE_S", -1.0)
    calls = len(placement_session.seen_calls)
    assert providers.step() and len(placement_session.seen_calls) == calls
    intent = Intent.objects.get(kind="provider")
    assert (intent.attempts, intent.last_error) == (0, "")
    monkeypatch.setattr(providers, "BEGIN_DEADLINE_S", 20.0)
    monkeypatch.setattr(providers, "CALL_DEADLINE_S", -1.0)
    assert not providers.step() and len(placement_session.seen_calls) == calls
    assert "Placement is too slow" in Intent.objects.get(kind="provider").last_error
