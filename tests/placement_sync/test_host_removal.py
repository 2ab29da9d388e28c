"""Test the removal of a decommissioned host, also when a worker is killed at any statement or call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.db.transaction import TransactionManagementError
from django.test import Client
from django.urls import reverse

from accelerators import conductor, safety
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource
from accelerators.models import (
    AcceleratorRequest,
    AttachHandle,
    Command,
    Deployable,
    Device,
    DeviceProfile,
    DriverWish,
    Event,
    Host,
    Intent,
    ProviderOwner,
    ReleasedHandle,
)
from accelerators.workflows import host_removal
from agents import authentication
from agents.gateway import leases
from agents.models import Agent, JoinToken, Lease
from cyborgweb.models import ApiToken
from placement_sync.jobs import holder_checks, providers
from placement_sync.jobs.host_removal import delete_providers
from placement_sync.models import WrittenProvider
from placement_sync.reconcile import ObservedProvider
from tests.placement_sync.failing_session import KilledError
from tests.placement_sync.model import PlacementModel
from tests.placement_sync.session import PlacementModelSession
from tests.support.callguard import open_transaction_of_test
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db
CALLER = Caller("olga", "u", frozenset({"admin"}), "p1")
ROOT = "11111111-1111-1111-1111-111111111111"
LONG_AGO = "2020-01-01T00:00:00Z"


@pytest.fixture(autouse=True)
def _cleanups(placement: PlacementModelSession) -> Iterator[None]:
    """Register what a configured cloud registers: the deletion of providers, and the question who holds a device."""
    with (
        host_removal.HOST_CLEANUPS.replaced("placement", delete_providers),
        safety.HOLDER_CHECKS.replaced("placement", holder_checks.PLACEMENT_CHECK),
    ):
        holder_checks._outages.clear()
        yield
    holder_checks._outages.clear()


@pytest.fixture
def host(placement: PlacementModelSession) -> Host:
    """Return a host with two ready cards in Placement, an agent, an open join token, a wanted driver and a command."""
    placement.model.providers[ROOT] = ObservedProvider(ROOT, "cmp1", "", 0)
    host = get_or_create_host("cmp1")
    apply_report(host, make_driver_report(make_card(0, handles=2), make_card(1, handles=2)))
    for device in Device.objects.all():
        lifecycle.enable_device(device.uuid, CALLER)
    providers.step()
    assert len(placement.model.providers) == 3
    Agent.objects.create(host=host, public_key="k1")
    Lease.objects.create(host=host, seen_at=datetime.now(UTC))
    JoinToken.objects.create(host_name="cmp1", secret_hash="f" * 64, expires_at=datetime.now(UTC) + timedelta(hours=1))
    with conductor.writing():
        DriverWish.objects.create(host=host, driver="pci_driver")
        Command.objects.update(state="succeeded", ended_at=datetime.now(UTC))
        Intent.objects.all().delete()
    return host


def order(host: Host, typed: str = "cmp1") -> None:
    host_removal.order_removal(host.uuid, typed, CALLER, "decommissioned", EventSource.PERSON)


def run_when_due() -> None:
    with conductor.writing():
        Intent.objects.update(next_at=LONG_AGO)
    host_removal.run()


def assert_gone(placement: PlacementModelSession) -> None:
    """Fail unless nothing of the host is left but its events and its compute provider, which Nova owns."""
    for model in (
        Host,
        Device,
        Deployable,
        AttachHandle,
        Agent,
        Lease,
        DriverWish,
        WrittenProvider,
        ProviderOwner,
        Intent,
    ):
        assert not model.objects.exists(), model
    assert list(placement.model.providers) == [ROOT]
    assert Event.objects.filter(action="device.removed").count() == 2
    removed = Event.objects.get(action="host.removed")
    assert (removed.actor, removed.reason, removed.host) == ("olga", "decommissioned", "cmp1")


def test_a_free_host_is_removed_with_its_agent_devices_providers_and_wanted_drivers(
    host: Host, placement: PlacementModelSession
) -> None:
    preview = host_removal.preview_removal(host)
    assert (preview.devices, preview.handles, preview.providers, preview.refused) == (2, 4, 2, "")
    order(host)
    host.refresh_from_db()
    assert host.removing_since and host.agent.barred == "revoked"  # type: ignore[attr-defined]
    assert set(Device.objects.values_list("state", flat=True)) == {"retired"}
    assert not JoinToken.objects.filter(expires_at__gt=datetime.now(UTC)).exists()
    run_when_due()
    assert_gone(placement)
    assert [one.action for one in Event.objects.filter(action__in=("agent.revoked", "host.removing")).order_by("id")]
    get_or_create_host("cmp1")
    apply_report(Host.objects.get(), make_driver_report(make_card(0, handles=2)))
    assert Device.objects.get().state == "inactive", "the name joins again"


@pytest.mark.slow
def test_a_host_is_kept_while_a_request_or_an_allocation_exists_or_nobody_can_tell(
    host: Host, placement: PlacementModelSession
) -> None:
    def assert_refused(reason: RefusalReason, text: str) -> None:
        with pytest.raises(RefusedError, match=text) as refused:
            order(host)
        assert refused.value.reason is reason
        assert text in host_removal.preview_removal(host).refused

    with conductor.writing():
        profile = DeviceProfile.objects.create(name="p", groups=[{"resources:FPGA": "1"}])
        request = AcceleratorRequest.objects.create(
            project_id="p", profile=profile, group={}, state="BindFailed", hostname="cmp1"
        )
    assert_refused(RefusalReason.IN_USE, "has accelerator requests")
    with conductor.writing():
        request.delete()
    provider = str(Deployable.objects.order_by("id")[0].rp_uuid)
    placement.model.allocated[provider, "FPGA"] = {"vm-1": 1}
    assert_refused(RefusalReason.IN_USE, "Placement's consumer vm-1")
    placement.model.allocated.clear()
    placement.away = True
    assert_refused(RefusalReason.UNAVAILABLE, "It is unknown whether device")
    placement.away = False
    holder_checks._outages.clear()
    with conductor.writing():
        Command.objects.create(host=host, op="logs", start_by=datetime.now(UTC), end_by=datetime.now(UTC))
    assert_refused(RefusalReason.CONFLICT, "A command for host cmp1 is open")
    host.refresh_from_db()
    assert host.removing_since is None and host.agent.barred == ""  # type: ignore[attr-defined]
    assert not Event.objects.filter(action__in=("agent.revoked", "host.removing")).exists()


def test_a_released_handle_counts_only_while_the_host_can_confirm_it(host: Host) -> None:
    with conductor.writing():
        handle = AttachHandle.objects.order_by("id")[0]
        ReleasedHandle.objects.create(handle=handle, ask_at=datetime.now(UTC))
    with pytest.raises(RefusedError, match="a guest, perhaps"):
        order(host)
    conductor.set_hosts_stale_since([host.pk], datetime.now(UTC))
    assert host_removal.preview_removal(Host.objects.get()).guests_unconfirmed == 1
    order(host)
    run_when_due()
    assert not Host.objects.exists() and not ReleasedHandle.objects.exists()


def test_the_name_must_be_typed_and_a_second_order_changes_nothing(host: Host) -> None:
    with pytest.raises(RefusedError, match="enter exactly this name"):
        order(host, "cmp2")
    order(host)
    order(host)
    assert Event.objects.filter(action="host.removing").count() == 1


def test_nothing_of_a_host_that_is_being_removed_comes_back(host: Host, placement: PlacementModelSession) -> None:
    order(host)
    device = Device.objects.order_by("id")[0]
    apply_report(host, make_driver_report(make_card(0), make_card(1), make_card(7)), seq=2)
    assert Device.objects.count() == 2, "its reports are not merged any more"
    for decide in (lifecycle.enable_device,):
        with pytest.raises(RefusedError):
            decide(device.uuid, CALLER)
    (result,) = lifecycle.apply_action(lifecycle.Action.REINSTATE, [device.uuid], CALLER)
    assert result.outcome == "refused" and "is being removed" in result.text
    token = authentication.create_join_token("cmp1", address="http://127.0.0.1", hours=1, created_by="olga")
    secret = authentication.credentials.parse_join_string(token).secret
    credential = authentication.credentials.Credential("cmp1", "cmp1", 1, "n", "k2", "s", secret)
    with pytest.raises(authentication.ConnectionRejectedError) as refused:
        authentication.identify_or_enrol(credential, None)
    assert refused.value.code == "host-removing"
    conductor.raise_provider_intents([host])
    providers.step()
    assert list(placement.model.providers) == [ROOT], "the synchronisation deletes what is left and creates nothing"
    run_when_due()
    assert_gone(placement)
    assert authentication.identify_or_enrol(credential, None).host == "cmp1", "then the name joins again"


def test_a_heartbeat_of_a_removed_host_does_not_cost_the_lease_of_another(host: Host) -> None:
    other = get_or_create_host("cmp2")
    with connection.cursor() as cursor:
        cursor.execute(
            leases.UPSERT_LEASES,
            {"name": "g", "url": "", "hosts": [other.pk, 10**9], "ages": [0.0, 0.0], "epochs": [1, 1]},
        )
    assert Lease.objects.filter(host=other).exists()


def test_an_allocation_that_appears_later_keeps_the_host_and_is_shown(
    host: Host, placement: PlacementModelSession, client: Client
) -> None:
    order(host)
    provider = str(Deployable.objects.order_by("id")[1].rp_uuid)
    placement.model.allocated[provider, "FPGA"] = {"vm-1": 1}
    run_when_due()
    assert Device.objects.count() == 2 and "allocated to vm-1" in Intent.objects.get(kind="removal").last_error
    client.force_login(User.objects.create(username="root", is_staff=True, is_superuser=True))
    assert "allocated to vm-1" in client.get(reverse("admin:accelerators_host_change", args=[host.pk])).content.decode()
    placement.model.allocated.clear()
    run_when_due()
    assert_gone(placement)


def test_a_host_whose_compute_provider_is_gone_is_removed_too(host: Host, placement: PlacementModelSession) -> None:
    placement.model.providers.clear()
    order(host)
    run_when_due()
    assert not Host.objects.exists()


@pytest.mark.exhaustive
def test_the_removal_ends_when_its_worker_is_killed_at_any_statement(
    host: Host, placement: PlacementModelSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_removal, "ROW_BATCH", 1)
    order(host)
    before: PlacementModel = copy.deepcopy(placement.model)
    number, reached = 0, True
    while reached:
        number += 1
        with open_transaction_of_test():
            placement.model = copy.deepcopy(before)
            reached = _run_and_kill_at(number)
            run_when_due()
            assert_gone(placement)
            transaction.set_rollback(True)
    assert number > 30


def _run_and_kill_at(number: int) -> bool:
    """Run the job and kill it at this statement; return whether it came so far."""
    executed = SimpleNamespace(count=0)

    def execute(run: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        """Execute a statement, or raise KilledError instead of the one with the chosen number."""
        if not sql.startswith(("SAVEPOINT", "RELEASE", "ROLLBACK", "SELECT pg_advisory_unlock")):
            executed.count += 1
            if executed.count == number:
                raise KilledError
        return run(sql, params, many, context)

    try:
        with connection.execute_wrapper(execute):
            host_removal.run()
    except (KilledError, TransactionManagementError):  # the second one hides the first where a lock is given back
        transaction.set_rollback(False)  # the transaction of the test is not the product's, and goes on
        return True
    return executed.count >= number


@pytest.mark.slow
def test_the_console_shows_what_is_deleted_and_wants_the_name(host: Host, client: Client) -> None:
    client.force_login(User.objects.create(username="root", is_staff=True, is_superuser=True))
    page = reverse("admin:accelerators_host_change", args=[host.pk])
    url = reverse("admin:accelerators_host_remove", args=[host.pk])
    assert url in client.get(page).content.decode()
    assert "2, with 4 attach handles" in client.get(url).content.decode()
    assert "enter exactly this name" in client.post(url, {"name": "cmp"}).content.decode()
    answered = client.post(url, {"name": "cmp1", "reason": "sold"}, follow=True)
    assert "Host cmp1 is being removed." in answered.content.decode()
    assert "It is being removed since" in answered.content.decode()
    assert Event.objects.get(action="host.removing").actor == "root"


def test_the_api_previews_and_removes_a_host(host: Host, client: Client) -> None:
    token = ApiToken.create_with_secret("t", User.objects.create(username="ann"), ["admin"], "p1")

    def post(body: dict[str, Any]) -> Any:
        return client.post(f"/api/hosts/{host.uuid}/remove/", body, "application/json", headers={"X-Auth-Token": token})

    preview = post({"dry_run": True})
    assert (preview.status_code, preview.json()["devices"], preview.json()["refused"]) == (200, 2, "")
    assert (
        post({}).status_code == 409 and "enter exactly this name" in post({"confirm": "x"}).json()["error"]["message"]
    )
    assert not Event.objects.filter(action="host.removing").exists()
    for mistake in ({"dryrun": True}, {"dry_run": "yes"}):
        assert post({"confirm": "cmp1", "reason": "sold"} | mistake).status_code == 400
    assert not Host.objects.get().removing_since, "a mistake in the body removes nothing"
    assert post({"confirm": "cmp1", "reason": "sold"}).status_code == 202
    shown = client.get(f"/api/hosts/{host.uuid}/", headers={"X-Auth-Token": token})
    assert shown.json()["removing_since"]


def _make_slow_host(placement: PlacementModelSession, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Add 38 providers to the host, and return a clock that each call to Placement advances by 2 s."""
    host = Host.objects.get()
    for number in range(38):
        uuid = f"22222222-2222-2222-2222-{number:012}"
        placement.model.providers[uuid] = ObservedProvider(uuid, f"cmp1_{number}", ROOT, 0)
        WrittenProvider.objects.create(uuid=uuid, host=host)
    clock, answer = SimpleNamespace(now=0.0, sleeps=[]), placement.request

    def request(*args: Any, **options: Any) -> Any:
        clock.now += 2.0
        return answer(*args, **options)

    monkeypatch.setattr(placement, "request", request)
    fake_time = SimpleNamespace(monotonic=lambda: clock.now, sleep=clock.sleeps.append)
    monkeypatch.setattr("placement_sync.jobs.host_removal.time", fake_time, raising=False)
    return clock


@pytest.mark.slow
def test_a_slow_placement_is_given_up_in_time_and_each_call_leaves_less_to_do(
    host: Host, placement: PlacementModelSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    order(host)
    clock = _make_slow_host(placement, monkeypatch)
    numbers = [len(placement.model.providers)]
    while len(numbers) < 20:
        clock.now = 0.0
        obstacle = delete_providers(host)
        assert clock.now <= 20.0, "it returns within its deadline"
        numbers.append(len(placement.model.providers))
        if not obstacle:
            break
        assert "Placement is slow" in obstacle and numbers[-1] < numbers[-2]
        known = Deployable.objects.filter(rp_uuid__isnull=False).count()
        assert WrittenProvider.objects.count() == numbers[-1] - 1 >= known, "what is deleted is remembered"
    assert list(placement.model.providers) == [ROOT]
    calls = [one for one in placement.seen_calls if one.startswith("DELETE")]
    assert len(calls) == len(set(calls)) == 40, "no provider is deleted twice"
    run_when_due()
    assert not Host.objects.exists()


@pytest.mark.slow
def test_other_hosts_are_written_between_the_chunks_of_a_removal(
    host: Host, placement: PlacementModelSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    order(host)
    clock = _make_slow_host(placement, monkeypatch)
    monkeypatch.setattr("placement_sync.jobs.host_removal.CALL_DEADLINE_S", 1000.0, raising=False)
    assert delete_providers(host) == ""
    assert len(clock.sleeps) == 4, "40 providers are deleted in five chunks"


def test_providers_without_allocations_are_deleted_although_others_have_some(
    host: Host, placement: PlacementModelSession
) -> None:
    order(host)
    uuids = sorted(map(str, Deployable.objects.values_list("rp_uuid", flat=True)))
    placement.model.allocated[uuids[0], "FPGA"] = {"vm-1": 1}
    assert "allocated to vm-1" in delete_providers(host)
    assert sorted(placement.model.providers) == sorted([ROOT, uuids[0]])
