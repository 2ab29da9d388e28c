"""Requests of instances that are no more are given back, and of no others."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
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
from placement_sync.models import Look, Vanished
from placement_sync.nova import deleted_instances
from tests.support.nova import Nova, recording
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db
NOVA = Caller("nova", "u", frozenset({"admin"}), "p1", service=True)
LONG_AGO = "2020-01-01T00:00:00Z"


def cloud() -> Session:
    return Session(Token("http://unused", "token"))


@pytest.fixture
def nova(settings: Any) -> Iterator[Nova]:
    with recording() as one:
        settings.SERVICE_SESSION = "tests.placement.test_watcher.cloud"
        settings.KEYS.nova_endpoint, before = one.url, settings.KEYS.nova_endpoint
        yield one
        settings.KEYS.nova_endpoint = before


@pytest.fixture(autouse=True)
def _keys(settings: Any) -> None:
    keys = settings.KEYS
    settings.KEYS = SimpleNamespace(**{name: getattr(keys, name) for name in keys.__dataclass_fields__})


def bound(count: int) -> list[str]:
    """So many instances that hold a request each."""
    apply(a_host(), answer(card(1, handles=count)))
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


def look() -> None:
    """A minute has passed."""
    Look.objects.all().delete()
    deleted_instances.step()


def held() -> set[str]:
    return {str(one) for one in AcceleratorRequest.objects.values_list("instance_uuid", flat=True)}


def test_two_listings_and_a_404_free_a_request(nova: Nova) -> None:
    gone, *alive = bound(4)
    nova.servers = alive
    look()
    assert held() == {gone, *alive}
    look()
    assert gone in held(), "the two listings were not far enough apart"
    Vanished.objects.update(since=LONG_AGO)
    look()
    assert held() == set(alive)
    assert gone in Event.objects.get(action="instance.vanished").reason
    assert not Vanished.objects.exists()


def test_what_nova_still_knows_is_kept(nova: Nova, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, *rest = bound(3)
    nova.servers = rest
    look()
    Vanished.objects.update(since=LONG_AGO)
    nova.servers = [*rest, hidden]
    monkeypatch.setattr(deleted_instances._NovaQueries, "list_instances", lambda _: set(rest))
    look()
    assert hidden in held()


def test_one_listing_that_has_it_begins_anew(nova: Nova) -> None:
    instances = bound(3)
    nova.servers = instances[1:]
    look()
    Vanished.objects.update(since=LONG_AGO)
    nova.servers = instances
    look()
    assert not Vanished.objects.exists()
    nova.servers = instances[1:]
    look()
    assert held() == set(instances)


@pytest.mark.parametrize("trouble", [503, 403, 404])
def test_a_listing_that_failed_says_nothing(nova: Nova, trouble: int) -> None:
    instances = bound(2)
    nova.status = trouble
    for _ in range(2):
        look()
        Vanished.objects.update(since=LONG_AGO)
    assert held() == set(instances)
    assert not Vanished.objects.exists()


def test_a_listing_with_none_of_many_is_another_clouds(nova: Nova, caplog: pytest.LogCaptureFixture) -> None:
    instances = bound(4)
    nova.servers = [str(uuid.uuid4())]
    for _ in range(2):
        look()
        Vanished.objects.update(since=LONG_AGO)
    assert held() == set(instances)
    assert "has none of the 4 instances" in caplog.text
