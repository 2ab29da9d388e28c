"""Test that the jobs recover when the worker is killed, or a service fails, at any call that they make."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import transaction
from keystoneauth1.session import Session as KeystoneSession
from keystoneauth1.token_endpoint import Token

from accelerators import conductor, outbox
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.provider_ids import compute_provider_uuid
from accelerators.models import AcceleratorRequest, Attribute, Device, DeviceProfile, Event, Host, Intent
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from accelerators.workflows import retention_sweep
from placement_sync.cloud import SERVICE_SESSION
from placement_sync.jobs import providers
from placement_sync.models import Look, Vanished
from placement_sync.nova import deleted_instances, notices_job
from placement_sync.reconcile import ObservedProvider
from tests.placement_sync.failing_session import KilledError, Trouble, TroubledSession
from tests.placement_sync.model import PlacementModel
from tests.placement_sync.session import PlacementModelSession
from tests.support.callguard import open_transaction_of_test
from tests.support.nova import FakeNova, running_nova
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db
NOVA_CALLER = Caller("nova", "u", frozenset({"admin"}), "p1", service=True)
ROOTS = {"cmp1": "11111111-1111-1111-1111-111111111111", "cmp2": "22222222-2222-2222-2222-222222222222"}
LONG_AGO = "2020-01-01T00:00:00Z"
troubled_session = TroubledSession(None)


@pytest.fixture(autouse=True)
def _cloud(settings: Any) -> Iterator[None]:
    keys = settings.KEYS
    settings.KEYS = SimpleNamespace(**{name: getattr(keys, name) for name in keys.__dataclass_fields__})
    with SERVICE_SESSION.replaced("keystone", lambda: troubled_session):
        yield


@pytest.fixture
def nova(settings: Any) -> Iterator[FakeNova]:
    with running_nova() as one:
        settings.KEYS.nova_endpoint = one.url
        yield one


def at_every_call(
    job: Callable[[], None], session: Callable[[], Any], troubles: Iterable[Trouble] = Trouble
) -> Iterator[str]:
    """Run `job` with each trouble at its first call, at its second, and so on, each time from the same rows.

    Yields a description after each run, with the trouble over; the caller checks that the job recovers. The rows are
    rolled back afterwards.
    """
    for trouble in troubles:
        reached, number = True, 0
        while reached:
            number += 1
            with open_transaction_of_test():
                troubled_session.__init__(session(), number, trouble)  # type: ignore[misc]
                try:
                    job()
                except KilledError:
                    assert trouble is Trouble.KILLED
                reached = troubled_session.calls >= number
                troubled_session.trouble_at = 0
                troubled_session.dead = False
                if reached:
                    yield f"{trouble}, call {number}"
                transaction.set_rollback(True)
        assert number > 1


def make_intents_due() -> None:
    with conductor.writing():
        Intent.objects.update(next_at=LONG_AGO)


def placement_model() -> PlacementModel:
    model: PlacementModel = troubled_session.session.model
    return model


def placement_content() -> dict[str, Any]:
    """Return the providers in Placement without their generations."""
    return {
        one.uuid: (one.name, one.parent, one.inventories, one.traits) for one in placement_model().providers.values()
    }


def make_ready_cards(host: str, *cards: int) -> None:
    """Create a host with ready cards of these numbers."""
    apply_report(get_or_create_host(host), make_driver_report(*(make_card(n, handles=2) for n in cards)))
    for device in Device.objects.filter(state="inactive"):
        lifecycle.enable_device(device.uuid, NOVA_CALLER)


def name_of(n: int) -> str:
    """Return the name of the provider of card `n`; the cards 4 and 5 are on the host cmp2."""
    return f"{'cmp2' if n in (4, 5) else 'cmp1'}_0000:{n:02x}:00.0"


def uuid_of(n: int) -> str:
    return str(compute_provider_uuid(name_of(n)))


def change_attributes(n: int, **attributes: str) -> None:
    """Change attributes of card `n`, as if its driver now reported it so."""
    with conductor.writing():
        for key, value in attributes.items():
            Attribute.objects.filter(deployable__name=name_of(n), key=key).update(value=value)


def make_pending_changes() -> None:
    """Prepare a state in which every kind of difference has to be written at once.

    There is a new provider, a provider that moved from cmp1 to cmp2, one with other traits, one with another resource
    class, one whose device was removed, and one whose device was removed although it has allocations.
    """
    troubled_session.session = PlacementModelSession()
    for name, root in ROOTS.items():
        placement_model().providers[root] = ObservedProvider(root, name, "", 0)
    make_ready_cards("cmp1", 0, 1, 2, 3)
    providers.step()
    placement_model().allocated |= {(uuid_of(2), "FPGA"): {"vm-2": 1}, (uuid_of(3), "FPGA"): {"vm-3": 2}}
    apply_report(
        get_or_create_host("cmp1"), make_driver_report(make_card(0, handles=2), make_card(3, handles=2)), seq=2
    )
    assert not retention_sweep.remove_missing_devices(datetime.now(UTC) + timedelta(days=2))
    change_attributes(0, trait0="CUSTOM_OTHER")
    change_attributes(3, rc="PGPU")
    placement_model().providers[uuid_of(5)] = ObservedProvider(uuid_of(5), name_of(5), ROOTS["cmp1"], 4)
    make_ready_cards("cmp2", 4, 5)
    raise_all_intents()


def raise_all_intents() -> None:
    conductor.raise_provider_intents(Host.objects.all())


def run_until_in_step() -> None:
    """Run the job until no intent is due."""
    make_intents_due()
    while providers.step():
        pass


@pytest.mark.exhaustive
def test_placement_converges_when_the_worker_is_killed_or_unanswered_at_any_call() -> None:
    make_pending_changes()
    before = troubled_session.session
    with open_transaction_of_test():
        troubled_session.session = copy.deepcopy(before)
        run_until_in_step()
        wanted, held = placement_content(), placement_model().allocated
        transaction.set_rollback(True)
    assert set(wanted) == {*map(uuid_of, (0, 2, 3, 4, 5)), *ROOTS.values()}
    for where in at_every_call(providers.run, lambda: copy.deepcopy(before), (Trouble.KILLED, Trouble.LOST)):
        run_until_in_step()
        assert not Intent.objects.filter(kind="provider"), where
        assert (placement_content(), placement_model().allocated) == (wanted, held), where
        _check_nothing_more_is_written(where)
        _check_written_values_are_ours(where)


def _check_nothing_more_is_written(where: str) -> None:
    before, writes = copy.deepcopy(placement_model().providers), placement_model().writes
    raise_all_intents()
    providers.step()
    assert (placement_model().providers, placement_model().writes) == (before, writes), where


def _check_written_values_are_ours(where: str) -> None:
    """Check that values written by the killed worker count as ours: they go once they are no longer desired."""
    change_attributes(4, trait0="CUSTOM_LATER", rc="PGPU")
    raise_all_intents()
    providers.step()
    now = placement_model().providers[uuid_of(4)]
    assert (set(now.inventories), now.traits) == ({"PGPU"}, {"CUSTOM_LATER"}), where


def raise_notices(nova: FakeNova) -> dict[str, str]:
    """Raise notices for three instances, and return the status that Nova must receive for each request.

    Nova answers 200 for the first, 422 for the second (it has no host) and 404 for the third (it is deleted).
    """
    wanted: dict[str, str] = {}
    for code, status in ((200, "completed"), (422, "failed"), (404, "completed")):
        instance, requests = str(uuid.uuid4()), [str(uuid.uuid4()) for _ in range(2)]
        nova.known[instance] = code
        payload = {"instance": instance, "completed": status == "completed", "host": "cmp1"}
        conductor.raise_intents("notice", dict.fromkeys(requests, payload))
        wanted |= dict.fromkeys(requests, status)
    return wanted


@pytest.mark.exhaustive
def test_nova_is_notified_of_each_request_at_least_once_whatever_call_fails(nova: FakeNova) -> None:
    wanted = raise_notices(nova)
    for where in at_every_call(notices_job.run, keystone):
        make_intents_due()
        notices_job.run()
        heard = {request: set(statuses) for request, statuses in nova.received_statuses().items()}
        assert heard == {request: {status} for request, status in wanted.items()}, where
        assert not outbox.load_due_intents("notice", 1), where
        events = Event.objects.filter(action="request.notified").values_list("subject", flat=True)
        assert sorted(map(str, events)) == sorted(wanted), where
        calls = len(nova.calls)
        notices_job.run()
        assert len(nova.calls) == calls, where
        nova.calls.clear()


def keystone() -> KeystoneSession:
    return KeystoneSession(Token("http://unused", "token"))


@pytest.mark.exhaustive
def test_requests_of_a_deleted_instance_are_freed_once_whatever_call_fails(nova: FakeNova) -> None:
    gone, *alive = bind_instances(3)
    nova.servers, nova.page = alive, 1
    troubled_session.session = keystone()
    deleted_instances.run()
    Vanished.objects.update(since=LONG_AGO)
    Look.objects.all().delete()
    for where in at_every_call(deleted_instances.run, keystone):
        Look.objects.all().delete()
        Vanished.objects.update(since=LONG_AGO)
        deleted_instances.run()
        held = {str(one) for one in AcceleratorRequest.objects.values_list("instance_uuid", flat=True)}
        assert held == set(alive), where
        assert gone in Event.objects.get(action="instance.vanished").reason, where
        assert not Vanished.objects.exists(), where


def bind_instances(count: int) -> list[str]:
    """Create `count` instances that hold a handle of one card each, and return their ids."""
    make_ready_cards("cmp1", *range(count))
    with conductor.writing():
        DeviceProfile.objects.create(name="one", groups=[{"resources:FPGA": "1"}])
    instances = [str(uuid.uuid4()) for _ in range(count)]
    for number, instance in enumerate(instances):
        (request,) = binding.create_requests("one", NOVA_CALLER)
        binding.bind_requests([BindSpec(request, "cmp1", uuid_of(number), instance)], NOVA_CALLER)
    with conductor.writing():
        AcceleratorRequest.objects.update(updated_at=LONG_AGO)
    return instances
