"""The job that keeps Placement in step: intents in, providers out, whatever is away."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.provider_ids import compute_provider_uuid
from accelerators.models import Device, Host, Intent, Tick
from accelerators.runtime import jobs
from placement_sync.jobs import providers
from placement_sync.models import Tree, WrittenProvider
from placement_sync.reconcile import ObservedProvider
from tests.placement.session import Session
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db
ADMIN = Caller("ops", "u", frozenset({"admin"}), "p")
ROOT = "11111111-1111-1111-1111-111111111111"
there = Session()


def cloud() -> Session:
    return there


@pytest.fixture(autouse=True)
def placement(settings: Any) -> Session:
    there.__init__()  # type: ignore[misc]
    there.model.providers[ROOT] = ObservedProvider(ROOT, "cmp1", "", 0)
    settings.SERVICE_SESSION = "tests.placement.test_tasks.cloud"
    return there


def ready(cards: int = 1, seq: int = 1) -> Host:
    host = a_host()
    apply(host, answer(*(card(n, handles=4) for n in range(cards))), seq=seq)
    for uuid in Device.objects.values_list("uuid", flat=True):
        lifecycle.enable_device(uuid, ADMIN)
    return host


def due_now() -> None:
    with conductor.writing():
        Intent.objects.update(next_at="2020-01-01T00:00:00Z")


def provider(n: int = 0) -> ObservedProvider:
    return there.model.providers[str(compute_provider_uuid(f"node_0000:{n:02x}:00.0"))]


def test_what_leaves_inactive_becomes_a_provider_and_its_reserve_follows_its_state() -> None:
    host = ready()
    assert not providers.step()
    assert (provider().inventories["FPGA"]["total"], provider().inventories["FPGA"]["reserved"]) == (4, 0)
    assert provider().traits == {"CUSTOM_TEST"}
    assert not Intent.objects.filter(kind="provider")
    lifecycle.disable_device(Device.objects.get().uuid, ADMIN)
    providers.step()
    assert provider().inventories["FPGA"]["reserved"] == 4
    apply(host, answer(), seq=2)
    providers.step()
    assert provider().inventories["FPGA"]["reserved"] == 4


def writes(placement: Session) -> list[str]:
    """The calls since the last time that change something in Placement."""
    found = [call for call in placement.seen if not call.startswith("GET ")]
    placement.seen.clear()
    return found


def test_a_report_that_changes_devices_wakes_the_job_and_an_equal_one_does_not(
    monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any
) -> None:
    monkeypatch.setitem(jobs._registered, "placement", jobs.Job("placement", "unused", "work", intent_kind="provider"))
    host = a_host()
    with django_capture_on_commit_callbacks(execute=True):
        apply(host, answer(card(1)))
    assert Tick.objects.filter(name="placement").count() == 1
    jobs.clear_tick("placement")
    with django_capture_on_commit_callbacks(execute=True):
        apply(host, answer(card(1)), seq=2)
    assert not Tick.objects.filter(name="placement").exists()


def test_L4_reconciling_twice_writes_once(placement: Session) -> None:
    host = ready(2)
    providers.step()
    assert writes(placement)
    generations = {uuid: one.generation for uuid, one in placement.model.providers.items()}
    for forgets in (False, True):  # by what it remembers to have written, and by what Placement shows alone
        if forgets:
            WrittenProvider.objects.all().delete()
        with conductor.writing():
            conductor.raise_provider_intents([host])
        assert Intent.objects.filter(kind="provider").exists()
        providers.step()
        assert placement.seen, "it was looked at again"
        assert writes(placement) == []
        assert not Intent.objects.filter(kind="provider").exists()
    assert {uuid: one.generation for uuid, one in placement.model.providers.items()} == generations
    lifecycle.disable_device(Device.objects.order_by("id")[0].uuid, ADMIN)
    providers.step()
    assert len(writes(placement)) == 1, "one provider has changed"
    with conductor.writing():
        conductor.raise_provider_intents([host])
    providers.step()
    assert writes(placement) == []


def test_a_host_costs_the_same_statements_however_much_is_on_it() -> None:
    ready()
    providers.step()
    assert _statements(2, seq=2) == _statements(12, seq=3)


def _statements(cards: int, seq: int) -> int:
    ready(cards, seq)
    with CaptureQueriesContext(connection) as asked:
        providers.step()
    return len(asked)


def test_while_it_is_away_intents_wait_together_and_then_drain(placement: Session) -> None:
    ready()
    placement.away = True
    assert not providers.step()
    intent = Intent.objects.get(kind="provider")
    assert "nobody is there" in intent.last_error
    assert intent.attempts == 1
    providers.step()
    assert Intent.objects.get(kind="provider").attempts == 1
    placement.away = False
    due_now()
    providers.step()
    assert provider().inventories["FPGA"]["total"] == 4
    assert not Intent.objects.filter(kind="provider")


def test_a_compute_provider_that_is_not_there_yet_is_waited_for(placement: Session) -> None:
    ready()
    placement.model.providers.clear()
    providers.step()
    assert Intent.objects.get(kind="provider").last_error == "waiting for compute provider cmp1"
    placement.model.providers[ROOT] = ObservedProvider(ROOT, "cmp1", "", 0)
    due_now()
    providers.step()
    assert provider().inventories["FPGA"]["total"] == 4


@pytest.mark.django_db(transaction=True)
def test_an_intent_raised_again_meanwhile_is_not_done(placement: Session) -> None:
    host = ready()

    def again() -> None:
        placement.model.before_write = lambda: None
        threads.submit(_raise_elsewhere, host).result()

    with ThreadPoolExecutor(1) as threads:
        placement.model.before_write = again
        providers.step()
    assert provider()
    assert Intent.objects.filter(kind="provider").exists()
    providers.step()
    assert not Intent.objects.filter(kind="provider").exists()


def _raise_elsewhere(host: Host) -> None:
    try:
        conductor.raise_provider_intents([host])
    finally:
        connection.close()


def test_what_somebody_broke_is_found_by_the_look_every_few_minutes(placement: Session) -> None:
    ready()
    providers.step()
    uuid = provider().uuid
    del placement.model.providers[uuid]
    providers.step()
    assert uuid not in placement.model.providers
    Tree.objects.update(looked_at="2020-01-01T00:00:00Z")
    providers.step()
    assert uuid in placement.model.providers


def test_switched_off_nobody_is_asked(placement: Session, settings: Any) -> None:
    ready()
    settings.SERVICE_SESSION = "cyborgweb.auth.keystone.service_session"
    assert not providers.step()
    assert placement.seen == []


def test_the_command_says_what_differs_and_mends_it() -> None:
    ready()
    out = StringIO()
    call_command("placement_sync", dry_run=True, stdout=out)
    assert out.getvalue().splitlines() == [
        "cmp1",
        "  + node_0000:00:00.0: a new provider",
        "  + node_0000:00:00.0: FPGA 4",
        "  + node_0000:00:00.0: trait CUSTOM_TEST",
        "1 host, 3 to be written",
    ]
    assert list(there.model.providers) == [ROOT]
    call_command("placement_sync", host=["cmp1"], stdout=StringIO())
    assert provider().inventories["FPGA"]["total"] == 4
    again = StringIO()
    call_command("placement_sync", stdout=again)
    assert again.getvalue().splitlines() == ["1 host, 0 written"]
