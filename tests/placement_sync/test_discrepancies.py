"""Test that contradictions between our requests, Placement, Nova and the hardware are found.

Each is shown with an event, and removed once it is repaired.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.db.models import Model
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusedError
from accelerators.models import AcceleratorRequest, AttachHandle, Deployable, Device, DeviceProfile, Event, Host
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from placement_sync.cloud import SERVICE_SESSION
from placement_sync.jobs import discrepancies, providers
from placement_sync.models import Discrepancy, DiscrepancyKind, NovaEndpoint, Tree, WrittenProvider
from placement_sync.reconcile import ObservedProvider
from tests.placement_sync.session import (
    COMPUTE_PROVIDER,
    PlacementModelSession,
    placement_session,
    using_placement_model,
)
from tests.support.nova import FakeNova, running_nova
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db
NOVA = Caller("nova", "u", frozenset({"admin"}), "p1", service=True)
LONG_AGO = "2020-01-01T00:00:00Z"


class CloudSession(PlacementModelSession):
    """A session that calls the model of Placement for Placement and the fake Nova for Nova."""

    def request(self, url: str, method: str, **values: Any) -> Any:
        if values["endpoint_filter"]["service_type"] == "placement":
            return placement_session.request(url, method, values.get("json"), values.get("headers"))
        from keystoneauth1.session import Session as Real
        from keystoneauth1.token_endpoint import Token

        return Real(Token("http://unused", "token")).request(url, method, **values)


@pytest.fixture(autouse=True)
def nova(settings: Any) -> Iterator[FakeNova]:
    keys = settings.KEYS
    with using_placement_model(), SERVICE_SESSION.replaced("keystone", CloudSession), running_nova() as one:
        known = {name: getattr(keys, name) for name in keys.__dataclass_fields__}
        settings.KEYS = SimpleNamespace(**known | {"nova_endpoint": one.url})
        yield one


def make_bound_cards(cards: int = 1) -> list[str]:
    """Create ready cards on cmp1, each bound to an instance that has the allocation in Placement; return the instances.

    Everything is compared once, and no discrepancy is found.
    """
    apply_report(get_or_create_host(), make_driver_report(*(make_card(n, handles=2) for n in range(cards))))
    for device in Device.objects.values_list("uuid", flat=True):
        lifecycle.enable_device(device, NOVA)
    with conductor.writing():
        DeviceProfile.objects.create(name="one", groups=[{"resources:FPGA": "1"}])
    instances = []
    for provider in Deployable.objects.order_by("id").values_list("rp_uuid", flat=True):
        instances.append(str(uuid.uuid4()))
        (request,) = binding.create_requests("one", NOVA)
        binding.bind_requests([BindSpec(request, "cmp1", str(provider), instances[-1])], NOVA)
        set_allocations(str(provider), instances[-1])
    compare_again()
    assert list_discrepancies() == []
    return instances


def compare_again() -> None:
    """Read Placement and compare again, as if the required pauses had passed."""
    with conductor.writing():
        AcceleratorRequest.objects.update(updated_at=LONG_AGO)
    Tree.objects.update(looked_at=LONG_AGO, compared_at=LONG_AGO)
    providers.step()
    while discrepancies.step():
        pass


def list_discrepancies() -> list[tuple[str, str]]:
    return sorted(Discrepancy.objects.values_list("kind", "provider_name"))


def first_provider() -> str:
    return str(Deployable.objects.order_by("id").first().rp_uuid)


def age_unattached_claims() -> None:
    """Make unattached claims old enough for the second comparison, which reports them."""
    for row in WrittenProvider.objects.exclude(claims=None):
        loose = dict.fromkeys(row.claims["loose"], LONG_AGO)
        WrittenProvider.objects.filter(pk=row.pk).update(claims=row.claims | {"loose": loose})
    Tree.objects.update(compare_at=LONG_AGO)


def set_allocations(provider: str, *consumers: str) -> None:
    """Give each of these consumers one unit, and raise the provider's generation, as the real Placement does."""
    placement_session.model.allocated[provider, "FPGA"] = dict.fromkeys(consumers, 1)
    if provider in placement_session.model.providers:
        placement_session.model._raise_generation(provider)


def test_a_bound_request_without_an_allocation_is_a_discrepancy_until_it_has_one() -> None:
    (instance,) = make_bound_cards()
    set_allocations(first_provider())
    compare_again()
    (row,) = Discrepancy.objects.all()
    assert (row.kind, str(row.instance), row.device) == (DiscrepancyKind.UNCLAIMED, instance, Device.objects.get())
    assert instance in row.said
    assert "Shelve and unshelve" in row.said
    (found,) = discrepancies.list_discrepancies_of_devices([row.device_id])
    assert (found.kind, found.host, found.instance) == (DiscrepancyKind.UNCLAIMED, "cmp1", instance)
    assert discrepancies.list_discrepancies_of_host(row.host_id) == [found]
    event = Event.objects.get(action="discrepancy.appeared")
    assert (event.subject, event.host, event.changes["instance"]) == (row.device.uuid, "cmp1", [None, instance])

    set_allocations(first_provider(), instance)
    Tree.objects.update(compare_at=LONG_AGO)
    discrepancies.step()
    assert list_discrepancies() == []
    assert Event.objects.get(action="discrepancy.mended").changes["discrepancy"] == ["attached but unclaimed", None]


@pytest.mark.slow
def test_pages_of_the_host_the_device_and_the_request_show_a_discrepancy(client: Client) -> None:
    instance, _ = make_bound_cards(2)
    client.force_login(User.objects.create(username="olga", is_staff=True, is_superuser=True))

    def list_faults(row: Model) -> list[str]:
        page = client.get(reverse(f"admin:accelerators_{row._meta.model_name}_change", args=[row.pk]))
        assert ('id="faults"' in page.content.decode()) is bool(page.context["faults"])
        return [fault["explanation"] for fault in page.context["faults"]]

    requests = AcceleratorRequest.objects.order_by("id")
    rows = (Host.objects.get(), *Device.objects.order_by("id"), *requests)
    assert [list_faults(row) for row in rows] == [[]] * 5
    set_allocations(first_provider())
    compare_again()
    host, device, other_device, request, other_request = map(list_faults, rows)
    assert len(host) == 1 and instance in host[0]
    assert (device, other_device, request, other_request) == (host, [], host, [])


def test_a_deleted_allocation_is_found_by_rereading_although_the_generation_stays() -> None:
    make_bound_cards()
    placement_session.model.allocated.clear()
    compare_again()
    assert list_discrepancies() == []
    discrepancies.invalidate_claims(Tree.objects.values_list("pk", flat=True))
    compare_again()
    assert [kind for kind, _ in list_discrepancies()] == ["unclaimed"]


def test_only_allocations_of_providers_in_use_are_reread_after_a_while() -> None:
    make_bound_cards()
    row = WrittenProvider.objects.get()
    WrittenProvider.objects.update(claims=row.claims | {"read_at": LONG_AGO})
    placement_session.model.allocated.clear()
    compare_again()
    assert "allocations" in " ".join(placement_session.seen_calls[-3:])
    with conductor.writing():
        AcceleratorRequest.objects.update(state="Unbound", attach_handle=None)
    row = WrittenProvider.objects.get()
    Discrepancy.objects.all().delete()
    WrittenProvider.objects.update(claims=row.claims | {"read_at": LONG_AGO})
    placement_session.seen_calls.clear()
    compare_again()
    assert not [call for call in placement_session.seen_calls if "allocations" in call]


def test_an_allocation_without_a_request_is_a_discrepancy_only_after_a_minute() -> None:
    (instance,) = make_bound_cards()
    stranger = str(uuid.uuid4())
    set_allocations(first_provider(), instance, stranger)
    compare_again()
    assert list_discrepancies() == []
    compare_at = Tree.objects.get().compare_at
    assert compare_at and timedelta(seconds=30) < compare_at - datetime.now(UTC) <= timedelta(seconds=60)
    age_unattached_claims()
    discrepancies.step()
    (row,) = Discrepancy.objects.all()
    assert (row.kind, str(row.instance)) == (DiscrepancyKind.UNATTACHED, stranger)
    assert f"allocation unset --provider {first_provider()} {stranger}" in row.said
    del placement_session.model.allocated[first_provider(), "FPGA"][stranger]
    Tree.objects.update(compare_at=LONG_AGO)
    discrepancies.step()
    assert list_discrepancies() == []
    assert Tree.objects.get().compare_at is None


@pytest.mark.parametrize("state", ["Bound", "BindStarted"])
def test_an_allocation_whose_request_is_bound_or_being_bound_meanwhile_is_no_discrepancy(state: str) -> None:
    (instance,) = make_bound_cards()
    late = str(uuid.uuid4())
    set_allocations(first_provider(), instance, late)
    compare_again()
    (request,) = binding.create_requests("one", NOVA)
    binding.bind_requests([BindSpec(request, "cmp1", first_provider(), late)], NOVA)
    with conductor.writing():
        AcceleratorRequest.objects.filter(uuid=request).update(state=state, deadline=datetime.now(UTC))
    age_unattached_claims()
    discrepancies.step()
    assert list_discrepancies() == []


@pytest.mark.slow
def test_an_active_instance_whose_device_is_missing_or_failed_is_a_discrepancy(nova: FakeNova) -> None:
    (instance,) = make_bound_cards()
    with conductor.writing():
        Device.objects.update(state="missing", state_reason="its driver did not see it")
    compare_again()
    assert list_discrepancies() == [], "Nova has no such instance"
    for status, place in (("SHUTOFF", "cmp1"), ("ACTIVE", "elsewhere")):
        nova.shown[instance] = (status, place)
        compare_again()
        assert list_discrepancies() == []
    nova.shown[instance] = ("ACTIVE", "cmp1")
    compare_again()
    (row,) = Discrepancy.objects.all()
    assert (row.kind, str(row.instance)) == (DiscrepancyKind.WITHOUT_DEVICE, instance)
    assert "the device is missing: its driver did not see it" in row.said
    nova.status = 503
    compare_again()
    assert len(list_discrepancies()) == 1, "nobody could tell"
    nova.status = 0
    with conductor.writing():
        Device.objects.update(state="ready", status="failed", status_reason="it could not be restored")
    compare_again()
    assert "it could not be restored" in Discrepancy.objects.get().said
    with conductor.writing():
        Device.objects.update(status="ok")
        AttachHandle.objects.update(missing_since=LONG_AGO)
    compare_again()
    assert "what it holds is missing from the device" in Discrepancy.objects.get().said
    with conductor.writing():
        AttachHandle.objects.update(missing_since=None)
    compare_again()
    assert list_discrepancies() == []


def test_S1_an_instance_without_its_device_is_not_resolved_by_a_404_of_a_nova_that_has_shown_no_instance_of_ours(
    nova: FakeNova,
) -> None:
    (instance,) = make_bound_cards()
    with conductor.writing():
        Device.objects.update(state="missing", state_reason="its driver did not see it")
    nova.shown[instance] = ("ACTIVE", "cmp1")
    compare_again()
    assert len(list_discrepancies()) == 1
    nova.shown.clear()
    compare_again()
    assert len(list_discrepancies()) == 1, "it may be the Nova of another region"
    NovaEndpoint.objects.create(url=nova.url, proven_at=LONG_AGO)
    compare_again()
    assert list_discrepancies() == []


def test_discrepancies_stay_unchanged_while_placement_is_away() -> None:
    make_bound_cards()
    set_allocations(first_provider())
    compare_again()
    assert len(list_discrepancies()) == 1
    placement_session.away = True
    Tree.objects.update(compare_at=LONG_AGO)
    assert not discrepancies.step()
    assert len(list_discrepancies()) == 1
    placement_session.seen_calls.clear()
    assert not discrepancies.step(), "not before its next time"
    assert placement_session.seen_calls == []


def test_comparing_unchanged_hosts_reads_nothing_and_costs_constant_statements() -> None:
    make_bound_cards(2)
    few = _count_step_statements()
    assert placement_session.seen_calls == []
    with conductor.writing():
        AcceleratorRequest.objects.all().delete()
        DeviceProfile.objects.all().delete()
    placement_session.model.allocated.clear()
    make_bound_cards(8)
    assert _count_step_statements() == few
    assert placement_session.seen_calls == []


def test_a_comparison_reads_only_the_columns_that_it_uses_and_stores_claims_as_one_set() -> None:
    make_bound_cards(2)
    WrittenProvider.objects.update(claims=None)
    statements = _capture_statements()
    assert not WrittenProvider.objects.filter(claims__consumers=None).exists()
    (holdings,) = [text for text in statements if '"accelerators_attachhandle"' in text]
    assert "state_reason" in holdings
    assert not any(column in holdings for column in ("attach_info", '"group"', "num_accelerators", "serial"))
    (claims_update,) = [
        text for text in statements if text.replace('"', "").lstrip().startswith("UPDATE placement_sync_writtenprov")
    ]
    assert "CASE" not in claims_update, "it would have one expression per provider"


def _count_step_statements() -> int:
    """Return how many statements a comparison of all hosts costs."""
    return len(_capture_statements())


def _capture_statements() -> list[str]:
    """Make all hosts due, forget the calls to Placement so far, compare them and return the statements of that."""
    Tree.objects.update(compared_at=None)
    placement_session.seen_calls.clear()
    with CaptureQueriesContext(connection) as asked:
        discrepancies.step()
    return [query["sql"] for query in asked]


LEFT_BEHIND = "99999999-0000-4000-8000-000000000001"


def leave_provider_behind(*traits: str, resource_class: str = "FPGA") -> None:
    """Add a provider below the compute provider of cmp1 that no device here has."""
    inventories = {resource_class: {"total": 1, "reserved": 0}}
    placement_session.model.providers[LEFT_BEHIND] = ObservedProvider(
        LEFT_BEHIND, "cmp1_other", COMPUTE_PROVIDER, 1, inventories, frozenset(traits)
    )


@pytest.mark.slow
def test_a_provider_that_another_installation_left_behind_is_a_discrepancy_until_it_is_deleted(client: Client) -> None:
    make_bound_cards()
    leave_provider_behind("CUSTOM_FPGA_INTEL", "OWNER_CYBORG")
    compare_again()
    (row,) = Discrepancy.objects.all()
    assert (row.kind, row.instance, row.provider_name) == (DiscrepancyKind.FOREIGN, None, "cmp1_other")
    assert f"openstack resource provider delete {LEFT_BEHIND}" in row.said and "offers FPGA" in row.said
    event = Event.objects.get(action="discrepancy.appeared")
    assert (event.host, event.changes["provider"]) == ("cmp1", [None, LEFT_BEHIND])
    client.force_login(User.objects.create(username="olga", is_staff=True, is_superuser=True))
    for path in (f"/{row.pk}/change/", "/"):
        assert "cmp1_other" in client.get(f"/admin/placement_sync/discrepancy{path}").content.decode()
    answer = client.get("/api/discrepancies/?kind=foreign").json()
    assert [(one["provider"], one["instance"]) for one in answer["results"]] == [(LEFT_BEHIND, None)]

    compare_again()
    assert Discrepancy.objects.get().pk == row.pk, "the next look changes nothing"
    del placement_session.model.providers[LEFT_BEHIND]
    compare_again()
    assert list_discrepancies() == []
    assert Event.objects.filter(action="discrepancy.mended").count() == 1


@pytest.mark.slow
def test_a_foreign_provider_counts_only_if_a_request_could_be_scheduled_to_it() -> None:
    make_bound_cards()
    with conductor.writing():
        DeviceProfile.objects.update(groups=[{"resources:FPGA": "1", "trait:CUSTOM_FAST": "required"}])
    leave_provider_behind("CUSTOM_SLOW")
    compare_again()
    assert list_discrepancies() == []
    leave_provider_behind("CUSTOM_FAST", resource_class="VGPU")
    placement_session.model._raise_generation(LEFT_BEHIND)
    compare_again()
    assert list_discrepancies() == []
    leave_provider_behind("CUSTOM_FAST")
    for _ in range(2):
        placement_session.model._raise_generation(LEFT_BEHIND)
    compare_again()
    assert list_discrepancies() == [("foreign", "cmp1_other")]


@pytest.mark.slow
def test_an_unchanged_foreign_provider_costs_no_call() -> None:
    make_bound_cards()
    compare_again()
    placement_session.seen_calls.clear()
    compare_again()
    usual = len(placement_session.seen_calls)
    leave_provider_behind("OWNER_CYBORG")
    compare_again()
    placement_session.seen_calls.clear()
    compare_again()
    assert len(placement_session.seen_calls) == usual


def test_a_failed_bind_on_a_provider_left_behind_shows_the_discrepancy_at_once() -> None:
    make_bound_cards()
    leave_provider_behind("OWNER_CYBORG")
    (request,) = binding.create_requests("one", NOVA)
    with pytest.raises(RefusedError):
        binding.bind_requests([BindSpec(request, "cmp1", LEFT_BEHIND, str(uuid.uuid4()))], NOVA)
    providers.step()
    while discrepancies.step():
        pass
    assert list_discrepancies() == [("foreign", "cmp1_other")]
