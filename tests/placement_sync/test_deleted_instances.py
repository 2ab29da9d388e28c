"""Test that requests of instances that Nova has deleted are freed, and that all other requests are kept."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest
from keystoneauth1.session import Session
from keystoneauth1.token_endpoint import Token

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.models import AcceleratorRequest, Deployable, Device, DeviceProfile, Event
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from placement_sync.cloud import SERVICE_SESSION
from placement_sync.models import Look, Vanished
from placement_sync.nova import deleted_instances
from tests.support.nova import FakeNova, running_nova
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db
NOVA = Caller("nova", "u", frozenset({"admin"}), "p1", service=True)
LONG_AGO = "2020-01-01T00:00:00Z"


@pytest.fixture
def nova(settings: Any) -> Iterator[FakeNova]:
    session = Session(Token("http://unused", "token"))
    with running_nova() as one, SERVICE_SESSION.replaced("keystone", lambda: session):
        settings.KEYS.nova_endpoint, before = one.url, settings.KEYS.nova_endpoint
        yield one
        settings.KEYS.nova_endpoint = before


@pytest.fixture(autouse=True)
def _keys(settings: Any) -> None:
    keys = settings.KEYS
    settings.KEYS = SimpleNamespace(**{name: getattr(keys, name) for name in keys.__dataclass_fields__})


def bind_instances(count: int) -> list[str]:
    """Create `count` instances with one bound request each and return their ids."""
    apply_report(get_or_create_host(), make_driver_report(make_card(1, handles=count)))
    lifecycle.enable_device(Device.objects.get().uuid, NOVA)
    with conductor.writing():
        DeviceProfile.objects.create(name="one", groups=[{"resources:FPGA": "1"}])
    provider = str(Deployable.objects.get().rp_uuid)
    instances = [str(uuid.uuid4()) for _ in range(count)]
    for instance in instances:
        (request,) = binding.create_requests("one", NOVA)
        binding.bind_requests([BindSpec(request, "cmp1", provider, instance)], NOVA)
    with conductor.writing():
        AcceleratorRequest.objects.update(updated_at=LONG_AGO)
    return instances


def run_job_after_a_minute() -> None:
    """Run the job as if a minute had passed since its last run."""
    Look.objects.all().delete()
    deleted_instances.step()


def instances_with_requests() -> set[str]:
    return {str(one) for one in AcceleratorRequest.objects.values_list("instance_uuid", flat=True)}


def test_a_request_is_freed_after_its_instance_was_absent_from_two_listings_and_gave_404(nova: FakeNova) -> None:
    gone, *alive = bind_instances(4)
    nova.servers = alive
    run_job_after_a_minute()
    assert instances_with_requests() == {gone, *alive}
    run_job_after_a_minute()
    assert gone in instances_with_requests(), "the two listings were not far enough apart"
    Vanished.objects.update(since=LONG_AGO)
    run_job_after_a_minute()
    assert instances_with_requests() == set(alive)
    assert gone in Event.objects.get(action="instance.vanished").reason
    assert not Vanished.objects.exists()


def test_an_instance_whose_request_changed_within_a_minute_is_not_compared(nova: FakeNova) -> None:
    fresh, *alive = bind_instances(3)
    with conductor.writing():
        AcceleratorRequest.objects.filter(instance_uuid=fresh).update(updated_at=datetime.now(UTC))
    nova.servers = alive
    run_job_after_a_minute()
    assert not Vanished.objects.exists()


def test_a_request_is_kept_when_nova_still_shows_its_unlisted_instance(
    nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, *rest = bind_instances(3)
    nova.servers = rest
    run_job_after_a_minute()
    Vanished.objects.update(since=LONG_AGO)
    nova.servers = [*rest, hidden]
    monkeypatch.setattr(deleted_instances._NovaQueries, "list_instances", lambda _: set(rest))
    run_job_after_a_minute()
    assert hidden in instances_with_requests()


def test_an_instance_that_is_listed_again_is_no_longer_suspected(nova: FakeNova) -> None:
    instances = bind_instances(3)
    nova.servers = instances[1:]
    run_job_after_a_minute()
    Vanished.objects.update(since=LONG_AGO)
    nova.servers = instances
    run_job_after_a_minute()
    assert not Vanished.objects.exists()
    nova.servers = instances[1:]
    run_job_after_a_minute()
    assert instances_with_requests() == set(instances)


@pytest.mark.parametrize("trouble", [503, 403, 404])
def test_a_failed_listing_frees_no_request(nova: FakeNova, trouble: int) -> None:
    instances = bind_instances(2)
    nova.status = trouble
    for _ in range(2):
        run_job_after_a_minute()
        Vanished.objects.update(since=LONG_AGO)
    assert instances_with_requests() == set(instances)
    assert not Vanished.objects.exists()


def test_an_answer_that_is_no_listing_frees_no_request_and_warns(
    nova: FakeNova, caplog: pytest.LogCaptureFixture
) -> None:
    instances = bind_instances(2)
    nova.rubbish = True
    for _ in range(2):
        run_job_after_a_minute()
        Vanished.objects.update(since=LONG_AGO)
    assert instances_with_requests() == set(instances)
    assert "GET /servers: the answer is not a list of servers" in caplog.text


def test_a_listing_without_any_of_our_instances_frees_nothing_and_warns(
    nova: FakeNova, caplog: pytest.LogCaptureFixture
) -> None:
    instances = bind_instances(4)
    nova.servers = [str(uuid.uuid4())]
    for _ in range(2):
        run_job_after_a_minute()
        Vanished.objects.update(since=LONG_AGO)
    assert instances_with_requests() == set(instances)
    assert "has none of the 4 instances" in caplog.text
