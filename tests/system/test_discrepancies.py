"""Test with a real Placement that discrepancies are found and disappear, and which writes raise a generation."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from keystoneauth1.identity import V3Password
from keystoneauth1.session import Session

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.models import AcceleratorRequest, Deployable, Device, DeviceProfile, Host
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from drivers.inventory import Device as Card
from placement_sync.cloud import SERVICE_SESSION
from placement_sync.jobs import discrepancies, providers
from placement_sync.models import Discrepancy, DiscrepancyKind, Tree, WrittenProvider
from tests.support.nova import FakeNova, running_nova
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.system.keystone import Keystone
from tests.system.placement import Placement

pytestmark = [pytest.mark.system, pytest.mark.django_db]
NOVA = Caller("nova", "u", frozenset({"admin"}), "p1", service=True)
LONG_AGO = "2020-01-01T00:00:00Z"


@pytest.fixture
def host(keystone: Keystone, placement: Placement) -> Iterator[Host]:
    """A host with one ready card of four handles, whose providers are written to Placement and compared once."""
    session = Session(V3Password(**keystone.credentials("admin")))
    name = f"cmp-{uuid.uuid4().hex[:8]}"
    placement.create_compute_provider(name)
    host = get_or_create_host(name)
    apply_report(host, make_driver_report(_with_provider_name(make_card(1, handles=4), name)))
    lifecycle.enable_device(Device.objects.get().uuid, NOVA)
    with conductor.writing():
        DeviceProfile.objects.create(name="one", groups=[{"resources:FPGA": "1"}])
    with SERVICE_SESSION.replaced("keystone", lambda: session):
        compare_again()
        yield host


def _with_provider_name(one: Card, host: str) -> Card:
    """Return the card with its provider named after the host, so that no two tests share a provider."""
    from msgspec.structs import replace

    (part,) = one.deployables
    return replace(one, deployables=(replace(part, name=f"{host}_card"),))


def compare_again() -> None:
    """Age all rows, as if minutes had passed, then read Placement again and compare."""
    with conductor.writing():
        AcceleratorRequest.objects.update(updated_at=LONG_AGO)
    for row in WrittenProvider.objects.exclude(claims=None):
        aged = {"loose": dict.fromkeys(row.claims["loose"], LONG_AGO)}
        WrittenProvider.objects.filter(pk=row.pk).update(claims=row.claims | aged)
    Tree.objects.update(looked_at=LONG_AGO, compared_at=LONG_AGO)
    providers.step()
    discrepancies.step()


def provider_id() -> str:
    return str(Deployable.objects.get().rp_uuid)


def provider_generation(placement: Placement) -> int:
    return int(placement.call("GET", f"/resource_providers/{provider_id()}")["generation"])


def list_discrepancies() -> list[tuple[str, str]]:
    return sorted((row.kind, str(row.instance)) for row in Discrepancy.objects.all())


def bind_request(host: Host, instance: str) -> None:
    (request,) = binding.create_requests("one", NOVA)
    binding.bind_requests([BindSpec(request, host.name, provider_id(), instance)], NOVA)


def test_placement_raises_the_generation_for_an_allocation_but_not_for_its_deletion(
    host: Host, placement: Placement
) -> None:
    """`discrepancies` relies on this. If Placement ever counts deletions, too, its REREAD_S can be removed."""
    before = provider_generation(placement)
    consumer = placement.allocate(provider_id(), 1)
    assert provider_generation(placement) > before
    before = provider_generation(placement)
    placement.release(consumer)
    assert provider_generation(placement) == before


def test_a_bound_request_whose_allocation_was_deleted_is_a_discrepancy_until_restored(
    host: Host, placement: Placement
) -> None:
    instance = placement.allocate(provider_id(), 1)
    bind_request(host, instance)
    compare_again()
    assert list_discrepancies() == []
    kept = placement.call("GET", f"/allocations/{instance}")
    placement.release(instance)
    discrepancies.invalidate_claims([host.pk])
    compare_again()
    assert list_discrepancies() == [(DiscrepancyKind.UNCLAIMED, instance)]
    (shown,) = discrepancies.list_discrepancies_of_devices([Device.objects.get().pk])
    assert instance in shown.explanation
    body = {name: kept[name] for name in ("project_id", "user_id", "consumer_type")}
    allocations = {rp: {"resources": entry["resources"]} for rp, entry in kept["allocations"].items()}
    body |= {"allocations": allocations, "consumer_generation": None}
    placement.call("PUT", f"/allocations/{instance}", body)
    compare_again()
    assert list_discrepancies() == []


def test_an_allocation_without_a_request_becomes_a_discrepancy_until_deleted(host: Host, placement: Placement) -> None:
    stranger = placement.allocate(provider_id(), 2)
    compare_again()
    assert list_discrepancies() == [], "its bind may be on its way"
    compare_again()
    assert list_discrepancies() == [(DiscrepancyKind.UNATTACHED, stranger)]
    assert (
        f"allocation unset --provider {provider_id()} {stranger}"
        in discrepancies.list_discrepancies_of_host(host.pk)[0].explanation
    )
    placement.release(stranger)
    compare_again()
    assert list_discrepancies() == []


@pytest.fixture
def nova(settings: Any) -> Iterator[FakeNova]:
    keys = settings.KEYS
    with running_nova() as one:
        known = {name: getattr(keys, name) for name in keys.__dataclass_fields__}
        settings.KEYS = SimpleNamespace(**known | {"nova_endpoint": one.url})
        yield one


def test_an_active_instance_whose_device_is_missing_is_a_discrepancy(
    host: Host, placement: Placement, nova: FakeNova
) -> None:
    instance = placement.allocate(provider_id(), 1)
    bind_request(host, instance)
    nova.shown[instance] = ("ACTIVE", host.name)
    apply_report(host, make_driver_report(), seq=2)
    compare_again()
    assert list_discrepancies() == [(DiscrepancyKind.WITHOUT_DEVICE, instance)]
    apply_report(host, make_driver_report(_with_provider_name(make_card(1, handles=4), host.name)), seq=3)
    compare_again()
    assert list_discrepancies() == []
