"""What Placement, Nova and the hardware contradict is found, shown with an event, and gone when it is mended."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.models import AcceleratorRequest, Deployable, Device, DeviceProfile, Event
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from placement_sync.jobs import discrepancies, providers
from placement_sync.models import Discrepancy, DiscrepancyKind, Tree, WrittenProvider
from placement_sync.reconcile import ObservedProvider
from tests.placement.session import Session
from tests.support.nova import Nova, recording
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db
NOVA = Caller("nova", "u", frozenset({"admin"}), "p1", service=True)
ROOT = "11111111-1111-1111-1111-111111111111"
LONG_AGO = "2020-01-01T00:00:00Z"
there = Session()


class Both(Session):
    """Placement's model for Placement, a recording Nova for Nova."""

    def request(self, url: str, method: str, **values: Any) -> Any:
        if values["endpoint_filter"]["service_type"] == "placement":
            return there.request(url, method, values.get("json"), values.get("headers"))
        from keystoneauth1.session import Session as Real
        from keystoneauth1.token_endpoint import Token

        return Real(Token("http://unused", "token")).request(url, method, **values)


def cloud() -> Session:
    return Both()


@pytest.fixture(autouse=True)
def nova(settings: Any) -> Iterator[Nova]:
    there.__init__()  # type: ignore[misc]
    there.model.providers[ROOT] = ObservedProvider(ROOT, "cmp1", "", 0)
    settings.SERVICE_SESSION = "tests.placement.test_faults.cloud"
    keys = settings.KEYS
    with recording() as one:
        known = {name: getattr(keys, name) for name in keys.__dataclass_fields__}
        settings.KEYS = SimpleNamespace(**known | {"nova_endpoint": one.url})
        yield one


def bound(cards: int = 1) -> list[str]:
    """So many cards on cmp1, each held by an instance that Placement knows of; all looked at, all compared."""
    apply(a_host(), answer(*(card(n, handles=2) for n in range(cards))))
    for device in Device.objects.values_list("uuid", flat=True):
        lifecycle.enable_device(device, NOVA)
    with conductor.writing():
        DeviceProfile.objects.create(name="one", groups=[{"resources:FPGA": "1"}])
    instances = []
    for provider in Deployable.objects.order_by("id").values_list("rp_uuid", flat=True):
        instances.append(str(uuid.uuid4()))
        (request,) = binding.create_requests("one", NOVA)
        binding.bind_requests([BindSpec(request, "cmp1", str(provider), instances[-1])], NOVA)
        allocate(str(provider), instances[-1])
    look()
    assert shown() == []
    return instances


def look() -> None:
    """A minute or more has passed, Placement is looked at again, and compared."""
    with conductor.writing():
        AcceleratorRequest.objects.update(updated_at=LONG_AGO)
    Tree.objects.update(looked_at=LONG_AGO, compared_at=LONG_AGO)
    providers.step()
    while discrepancies.step():
        pass


def shown() -> list[tuple[str, str]]:
    return sorted(Discrepancy.objects.values_list("kind", "provider_name"))


def provider() -> str:
    return str(Deployable.objects.order_by("id").first().rp_uuid)


def a_minute_passes() -> None:
    """As far as the second look is concerned."""
    for row in WrittenProvider.objects.exclude(claims=None):
        loose = dict.fromkeys(row.claims["loose"], LONG_AGO)
        WrittenProvider.objects.filter(pk=row.pk).update(claims=row.claims | {"loose": loose})
    Tree.objects.update(compare_at=LONG_AGO)


def allocate(provider: str, *consumers: str) -> None:
    """These have one each; the generation moves, as a real Placement's does when an allocation is written."""
    there.model.allocated[provider, "FPGA"] = dict.fromkeys(consumers, 1)
    if provider in there.model.providers:
        there.model._next(provider)


def test_a_bound_request_without_an_allocation_is_unclaimed_until_it_has_one() -> None:
    (instance,) = bound()
    allocate(provider())
    look()
    (row,) = Discrepancy.objects.all()
    assert (row.kind, str(row.instance), row.device) == (DiscrepancyKind.UNCLAIMED, instance, Device.objects.get())
    assert instance in row.said
    assert "Shelve and unshelve" in row.said
    (found,) = discrepancies.list_discrepancies_of_devices([row.device_id])
    assert (found.kind, found.host, found.instance) == ("attached but unclaimed", "cmp1", instance)
    assert discrepancies.list_discrepancies_of_host(row.host_id) == [found]
    event = Event.objects.get(action="discrepancy.appeared")
    assert (event.subject, event.host, event.changes["instance"]) == (row.device.uuid, "cmp1", [None, instance])

    allocate(provider(), instance)
    Tree.objects.update(compare_at=LONG_AGO)
    discrepancies.step()
    assert shown() == []
    assert Event.objects.get(action="discrepancy.mended").changes["discrepancy"] == ["attached but unclaimed", None]


def test_a_deleted_allocation_moves_no_generation_and_is_found_all_the_same() -> None:
    bound()
    there.model.allocated.clear()
    look()
    assert shown() == []
    discrepancies.invalidate_claims(Tree.objects.values_list("pk", flat=True))
    look()
    assert [kind for kind, _ in shown()] == ["unclaimed"]


def test_what_is_in_use_is_read_anew_once_in_a_while() -> None:
    bound()
    row = WrittenProvider.objects.get()
    WrittenProvider.objects.update(claims=row.claims | {"read_at": LONG_AGO})
    there.model.allocated.clear()
    look()
    assert "allocations" in " ".join(there.seen[-3:])
    with conductor.writing():
        AcceleratorRequest.objects.update(state="Unbound", attach_handle=None)
    row = WrittenProvider.objects.get()
    Discrepancy.objects.all().delete()
    WrittenProvider.objects.update(claims=row.claims | {"read_at": LONG_AGO})
    there.seen.clear()
    look()
    assert not [call for call in there.seen if "allocations" in call]


def test_a_claim_without_a_request_is_a_fault_at_the_second_look() -> None:
    (instance,) = bound()
    stranger = str(uuid.uuid4())
    allocate(provider(), instance, stranger)
    look()
    assert shown() == []
    a_minute_passes()
    discrepancies.step()
    (row,) = Discrepancy.objects.all()
    assert (row.kind, str(row.instance)) == (DiscrepancyKind.UNATTACHED, stranger)
    assert f"allocation unset --provider {provider()} {stranger}" in row.said
    del there.model.allocated[provider(), "FPGA"][stranger]
    Tree.objects.update(compare_at=LONG_AGO)
    discrepancies.step()
    assert shown() == []
    assert Tree.objects.get().compare_at is None


def test_a_claim_that_is_bound_meanwhile_is_none() -> None:
    (instance,) = bound()
    late = str(uuid.uuid4())
    allocate(provider(), instance, late)
    look()
    (request,) = binding.create_requests("one", NOVA)
    binding.bind_requests([BindSpec(request, "cmp1", provider(), late)], NOVA)
    a_minute_passes()
    discrepancies.step()
    assert shown() == []


def test_an_instance_that_runs_without_its_device(nova: Nova) -> None:
    (instance,) = bound()
    with conductor.writing():
        Device.objects.update(state="missing", state_reason="its driver did not see it")
    look()
    assert shown() == [], "Nova has no such instance"
    for status, place in (("SHUTOFF", "cmp1"), ("ACTIVE", "elsewhere")):
        nova.shown[instance] = (status, place)
        look()
        assert shown() == []
    nova.shown[instance] = ("ACTIVE", "cmp1")
    look()
    (row,) = Discrepancy.objects.all()
    assert (row.kind, str(row.instance)) == (DiscrepancyKind.WITHOUT_DEVICE, instance)
    assert "the device is missing: its driver did not see it" in row.said
    nova.status = 503
    look()
    assert len(shown()) == 1, "nobody could tell"
    nova.status = 0
    with conductor.writing():
        Device.objects.update(state="ready", status="failed", status_reason="it could not be restored")
    look()
    assert "it could not be restored" in Discrepancy.objects.get().said
    with conductor.writing():
        Device.objects.update(status="ok")
    look()
    assert shown() == []


def test_while_placement_is_away_nothing_appears_and_nothing_goes() -> None:
    bound()
    allocate(provider())
    look()
    assert len(shown()) == 1
    there.away = True
    Tree.objects.update(compare_at=LONG_AGO)
    assert not discrepancies.step()
    assert len(shown()) == 1
    there.seen.clear()
    assert not discrepancies.step(), "not before its next time"
    assert there.seen == []


def test_an_unmoved_host_costs_no_reading_and_a_batch_costs_the_same_statements_at_any_size() -> None:
    bound(2)
    few = _statements()
    assert there.seen == []
    with conductor.writing():
        AcceleratorRequest.objects.all().delete()
        DeviceProfile.objects.all().delete()
    there.model.allocated.clear()
    bound(8)
    assert _statements() == few
    assert there.seen == []


def _statements() -> int:
    Tree.objects.update(compared_at=None)
    there.seen.clear()
    with CaptureQueriesContext(connection) as asked:
        discrepancies.step()
    return len(asked)
