"""Test the removal of a decommissioned host, also when a worker is killed at any statement or call."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from django.contrib.auth.models import User
from django.db import connection, transaction
from django.db.transaction import TransactionManagementError
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from accelerators import conductor, outbox, safety
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
from agents import authentication, join_tokens
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


def make_token() -> str:
    return authentication.create_join_token("cmp1", address="http://127.0.0.1", hours=1, created_by="olga")


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
    assert host.removing_since and host.agent.barred == ""  # type: ignore[attr-defined]
    assert set(Device.objects.values_list("state", flat=True)) == {"retired"}
    host_removal.run()
    assert Device.objects.exists() and not Host.objects.get().deleting_since, "it waits until it is due"
    run_when_due()
    assert not JoinToken.objects.filter(expires_at__gt=datetime.now(UTC)).exists()
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
    with pytest.raises(RefusedError, match="is being removed"):
        make_token()
    with conductor.writing():
        Host.objects.update(removing_since=None)
        token = make_token()
        Host.objects.update(removing_since=host.created_at)
    secret = authentication.credentials.parse_join_string(token).secret
    credential = authentication.credentials.Credential("cmp1", "cmp1", 1, "n", "k2", "s", secret)
    with pytest.raises(authentication.ConnectionRejectedError) as refused:
        authentication.identify_or_enrol(credential, None)
    assert refused.value.code == "host-removing"
    conductor.raise_provider_intents([host])
    providers.step()
    assert len(placement.model.providers) == 3, "the synchronisation deletes nothing while it can be cancelled"
    with conductor.writing():
        Host.objects.update(deleting_since=host.created_at)
    conductor.raise_provider_intents([host])
    providers.step()
    assert list(placement.model.providers) == [ROOT], "then it deletes what is left and creates nothing"
    run_when_due()
    assert_gone(placement)
    with pytest.raises(authentication.ConnectionRejectedError) as refused:
        authentication.identify_or_enrol(credential, None)
    assert refused.value.code == "token-expired", "a token that was made before the removal does not work any more"
    credential = msgspec.structs.replace(
        credential, token=authentication.credentials.parse_join_string(make_token()).secret
    )
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


def test_a_token_that_is_made_between_check_and_mark_does_not_outlive_the_removal(
    host: Host, placement: PlacementModelSession, settings: Any
) -> None:
    settings.KEYS = SimpleNamespace(**settings.KEYS.__dict__ | {"host_removal_delay_s": 0})

    def order_meanwhile(*_: Any) -> tuple[str, str]:
        """Order the removal between the checks of a new token and its creation."""
        order(host)
        return "http://127.0.0.1", ""

    with (
        authentication.CONDUCTOR_ADDRESS.replaced("server", order_meanwhile),
        pytest.raises(RefusedError, match="is being removed"),
    ):
        join_tokens.issue_join_token("cmp1", "http://127.0.0.1", True, 1, "olga", EventSource.PERSON)
    host_removal.run()
    assert_gone(placement)
    assert not JoinToken.objects.filter(expires_at__gt=datetime.now(UTC)).exists()


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_a_token_and_an_order_at_the_same_time_wait_for_each_other(host: Host) -> None:
    has_inserted, may_commit = threading.Event(), threading.Event()

    def make_token_slowly() -> None:
        """Make a token in a transaction that stays open until the test lets it commit."""
        with conductor.writing():
            make_token()
            has_inserted.set()
            may_commit.wait(20)
        connection.close()

    def order_in_thread() -> None:
        order(host)
        connection.close()

    making, ordering = threading.Thread(target=make_token_slowly), threading.Thread(target=order_in_thread)
    making.start()
    assert has_inserted.wait(20)
    ordering.start()
    ordering.join(0.5)
    assert ordering.is_alive(), "the order waits for the token"
    may_commit.set()
    for thread in (making, ordering):
        thread.join(20)
    run_when_due()
    assert not Host.objects.exists()
    assert not JoinToken.objects.filter(expires_at__gt=datetime.now(UTC)).exists()


def test_a_cancelled_removal_leaves_the_host_as_it_was(host: Host, placement: PlacementModelSession) -> None:
    lifecycle.disable_device(Device.objects.order_by("id")[1].uuid, CALLER)
    before = list(Device.objects.order_by("id").values_list("uuid", "state", "returns_to", "drain_to"))
    order(host)
    host_removal.cancel_removal(host.uuid, CALLER, "wrong host", EventSource.PERSON)
    assert list(Device.objects.order_by("id").values_list("uuid", "state", "returns_to", "drain_to")) == before
    assert {state for _, state, _, _ in before} == {"ready", "maintenance"}
    host.refresh_from_db()
    assert not host.removing_since and host.applied_hash == "", "the gateway asks for its report again"
    assert host.agent.barred == "" and JoinToken.objects.filter(expires_at__gt=datetime.now(UTC)).exists()  # type: ignore[attr-defined]
    event = Event.objects.get(action="host.removal_cancelled")
    assert (event.actor, event.reason) == ("olga", "wrong host")
    run_when_due()
    providers.step()
    assert len(placement.model.providers) == 3 and Device.objects.count() == 2
    with pytest.raises(RefusedError, match="is not being removed"):
        host_removal.cancel_removal(host.uuid, CALLER, "", EventSource.PERSON)
    order(host)
    run_when_due()
    assert_gone(placement)
    with pytest.raises(RefusedError, match="There is no host"):
        host_removal.cancel_removal(host.uuid, CALLER, "", EventSource.PERSON)


def test_a_removal_that_deletes_cannot_be_cancelled(
    host: Host, placement: PlacementModelSession, client: Client
) -> None:
    order(host)
    client.force_login(User.objects.create(username="root", is_staff=True, is_superuser=True))
    page = reverse("admin:accelerators_host_change", args=[host.pk])
    assert "can be cancelled until the deletion begins, at" in client.get(page).content.decode()
    placement.away = True
    run_when_due()
    host.refresh_from_db()
    assert host.deleting_since and host.agent.barred == "revoked"  # type: ignore[attr-defined]
    with pytest.raises(RefusedError, match="cannot be cancelled any more: it has been deleting since"):
        host_removal.cancel_removal(host.uuid, CALLER, "", EventSource.PERSON)
    cancel = reverse("admin:accelerators_host_cancel_removal", args=[host.pk])
    shown = client.post(cancel, follow=True).content.decode()
    assert "cannot be cancelled any more" in shown and "Cancel the removal" not in shown
    assert set(Device.objects.values_list("state", flat=True)) == {"retired"}


def test_a_cancellation_between_two_looks_of_the_job_wins(host: Host, placement: PlacementModelSession) -> None:
    order(host)
    with conductor.writing():
        Intent.objects.update(next_at=LONG_AGO)
    (due,) = outbox.load_due_intents(host_removal.REMOVAL_INTENT, 1)
    host_removal.cancel_removal(host.uuid, CALLER, "", EventSource.PERSON)
    assert host_removal._continue_removal(host, due) == ""
    order(host)
    assert host_removal._continue_removal(host, due) == "", "another order has a time of its own"
    host.refresh_from_db()
    assert host.deleting_since is None and host.agent.barred == "" and len(placement.model.providers) == 3  # type: ignore[attr-defined]


def test_a_request_that_was_made_after_the_order_keeps_the_host(host: Host, placement: PlacementModelSession) -> None:
    order(host)
    _make_requests(1)
    run_when_due()
    host.refresh_from_db()
    assert host.deleting_since is None and "has accelerator requests" in Intent.objects.get(kind="removal").last_error
    host_removal.cancel_removal(host.uuid, CALLER, "", EventSource.PERSON)
    assert Device.objects.filter(state="ready").count() == 2


def _make_requests(count: int) -> None:
    """Make failed requests that name the host."""
    with conductor.writing():
        profile, _ = DeviceProfile.objects.get_or_create(name="p", defaults={"groups": [{"resources:FPGA": "1"}]})
        fields = {"project_id": "p", "profile": profile, "group": {}, "state": "BindFailed", "hostname": "cmp1"}
        AcceleratorRequest.objects.bulk_create([AcceleratorRequest(**fields) for _ in range(count)])


@pytest.mark.slow
def test_an_order_costs_a_constant_number_of_statements_and_asks_services_once(
    host: Host, placement: PlacementModelSession, client: Client
) -> None:
    def count_statements(act: Callable[[], Any]) -> int:
        with CaptureQueriesContext(connection) as captured, suppress(RefusedError):
            act()
        return len(captured)

    few = count_statements(lambda: _order_and_cancel(host))
    _make_requests(1)
    few_requests = count_statements(lambda: order(host))
    _make_requests(300)
    assert count_statements(lambda: order(host)) == few_requests
    with conductor.writing():
        AcceleratorRequest.objects.all().delete()
    cards = [make_card(number, handles=2) for number in range(60)]
    apply_report(host, make_driver_report(*cards), seq=5)
    for device in Device.objects.filter(state="inactive"):
        lifecycle.enable_device(device.uuid, CALLER)
    assert count_statements(lambda: _order_and_cancel(host)) <= few + 2
    client.force_login(User.objects.create(username="root", is_staff=True, is_superuser=True))
    url = reverse("admin:accelerators_host_remove", args=[host.pk])
    placement.away, asked = True, []
    with safety.HOLDER_CHECKS.replaced("placement", _count_questions(asked)):
        assert "It cannot be removed now" in client.post(url, {"name": "cmp1"}).content.decode()
        assert len(asked) == 1, "the refusal is shown without asking again"
        placement.away = False
        holder_checks._outages.clear()
        order(host)
        assert len(asked) == 2
        order(host)
        assert len(asked) == 2, "a host that is being removed is not asked about again"


def _order_and_cancel(host: Host) -> None:
    order(host)
    host_removal.cancel_removal(host.uuid, CALLER, "", EventSource.PERSON)


def _count_questions(asked: list[int]) -> safety.HolderCheck:
    """Return the check of Placement that also appends the number of devices to `asked` when it is asked."""

    def ask(questions: Any, seconds: float) -> Any:
        asked.append(len(questions))
        return holder_checks.PLACEMENT_CHECK.ask(questions, seconds)

    return replace(holder_checks.PLACEMENT_CHECK, ask=ask)


@pytest.mark.exhaustive
@pytest.mark.parametrize("act", ["order", "cancel"])
def test_an_order_or_cancellation_that_is_killed_at_any_statement_changes_nothing(host: Host, act: str) -> None:
    def get_states() -> tuple[Any, ...]:
        states = list(Device.objects.order_by("id").values_list("state", flat=True))
        return states, Host.objects.get().removing_since, Intent.objects.filter(kind="removal").exists()

    if act == "cancel":
        order(host)
    before, number, reached = get_states(), 0, True

    def run() -> None:
        if act == "order":
            order(host)
        else:
            host_removal.cancel_removal(host.uuid, CALLER, "", EventSource.PERSON)

    while reached:
        number += 1
        with open_transaction_of_test():
            reached = _run_and_kill_at(number, run)
            assert get_states() == before or not reached
            transaction.set_rollback(True)
    assert number > 8


@pytest.mark.exhaustive
def test_the_removal_ends_when_its_worker_is_killed_at_any_statement(
    host: Host, placement: PlacementModelSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_removal, "ROW_BATCH", 1)
    order(host)
    with conductor.writing():
        Intent.objects.update(next_at=LONG_AGO)
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


def _run_and_kill_at(number: int, run: Callable[[], None] = host_removal.run) -> bool:
    """Run the job, or something else, and kill it at this statement; return whether it came so far."""
    executed = SimpleNamespace(count=0)

    def execute(send: Callable[..., Any], sql: str, params: Any, many: bool, context: dict[str, Any]) -> Any:
        """Execute a statement, or raise KilledError instead of the one with the chosen number."""
        if not sql.startswith(("SAVEPOINT", "RELEASE", "ROLLBACK", "SELECT pg_advisory_unlock")):
            executed.count += 1
            if executed.count == number:
                raise KilledError
        return send(sql, params, many, context)

    try:
        with connection.execute_wrapper(execute):
            run()
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
    cancelled = client.post(reverse("admin:accelerators_host_cancel_removal", args=[host.pk]), {}, follow=True)
    assert "The removal of host cmp1 was cancelled." in cancelled.content.decode()
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
    cancel = f"/api/hosts/{host.uuid}/cancel_removal/"
    cancelled = client.post(cancel, {"reason": "wrong"}, "application/json", headers={"X-Auth-Token": token})
    assert (cancelled.status_code, cancelled.json()["removing_since"]) == (200, None)
    again = client.post(cancel, {}, "application/json", headers={"X-Auth-Token": token})
    assert again.status_code == 409 and "is not being removed" in again.json()["error"]["message"]


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
