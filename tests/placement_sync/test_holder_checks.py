"""Test the checks before a device is retired: Placement must have no allocation, and Nova no instance that may use it.

Nova is asked about instances that had the device through a request of ours. If a service cannot be asked, retiring is
refused.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import keystoneauth1.session
import pytest
from keystoneauth1.token_endpoint import Token

from accelerators import conductor, safety
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import Attachment, Deployable, Device, DeviceProfile, Event
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from placement_sync.cloud import SERVICE_SESSION
from placement_sync.jobs import holder_checks
from placement_sync.models import NovaEndpoint
from placement_sync.reconcile import ObservedProvider
from tests.placement_sync.session import PlacementModelSession, placement_session, using_placement_model
from tests.support.nova import FakeNova, running_nova
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db
ADMIN = Caller("ops", "u", frozenset({"admin"}), "p", service=True)
EARLIER = "2026-01-01T00:00:00Z"


def real_session() -> keystoneauth1.session.Session:
    return keystoneauth1.session.Session(Token("http://unused", "token"))


@pytest.fixture(autouse=True)
def placement(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlacementModelSession]:
    monkeypatch.setattr(holder_checks, "_outages", {})
    with safety.HOLDER_CHECKS.replaced("placement", holder_checks.PLACEMENT_CHECK), using_placement_model() as session:
        yield session


@pytest.fixture
def device() -> Device:
    """Return a device in maintenance, which could be retired; its provider is in Placement."""
    apply_report(get_or_create_host(), make_driver_report(make_card(1)))
    device = Device.objects.get()
    lifecycle.enable_device(device.uuid, ADMIN)
    lifecycle.disable_device(device.uuid, ADMIN)
    provider = str(Deployable.objects.get().rp_uuid)
    placement_session.model.providers[provider] = ObservedProvider(provider, "cmp1_0000:01:00.0", "", 0)
    return device


def try_to_retire(device: Device) -> RefusedError | None:
    try:
        lifecycle.apply_action_to_device(lifecycle.Action.RETIRE, device.uuid, ADMIN)
    except RefusedError as refused:
        return refused
    return None


def test_a_device_with_an_allocation_cannot_be_retired_until_it_is_deleted(
    device: Device, placement: PlacementModelSession
) -> None:
    provider = str(Deployable.objects.get().rp_uuid)
    placement.model.allocated[provider, "FPGA"] = {"vm-1": 1}
    refused = try_to_retire(device)
    assert refused
    assert (refused.reason, "Placement's consumer vm-1" in refused.text) == (RefusalReason.IN_USE, True)
    placement.model.allocated.clear()
    assert try_to_retire(device) is None
    assert Device.objects.get().state == "retired"


def test_an_empty_answer_of_placement_counts_as_unavailable(device: Device, placement: PlacementModelSession) -> None:
    placement.empty = True
    refused = try_to_retire(device)
    assert refused
    assert (refused.reason, "the answer is empty" in refused.text) == (RefusalReason.UNAVAILABLE, True)


def test_retiring_is_refused_while_placement_is_away_with_one_call_only(
    device: Device, placement: PlacementModelSession
) -> None:
    placement.away = True
    for _ in range(3):
        refused = try_to_retire(device)
        assert refused
        assert refused.reason == RefusalReason.UNAVAILABLE
    assert len(placement.seen_calls) == 1


@pytest.fixture
def nova(settings: Any, placement: PlacementModelSession, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNova]:
    """Run a fake Nova that has shown an instance of ours before, and make the holder check of Nova the only one."""
    keys = settings.KEYS
    monkeypatch.setattr(holder_checks, "_unknown_instances", set())
    with (
        safety.HOLDER_CHECKS.replaced("placement", None),
        safety.HOLDER_CHECKS.replaced("nova", holder_checks.NOVA_CHECK),
        SERVICE_SESSION.replaced("keystone", real_session),
        running_nova() as one,
    ):
        known = {name: getattr(keys, name) for name in keys.__dataclass_fields__}
        settings.KEYS = SimpleNamespace(**known | {"nova_endpoint": one.url})
        NovaEndpoint.objects.create(url=one.url, proven_at=EARLIER)
        yield one


def ask_nova(device: Device) -> safety.HolderCheckResult:
    questions = holder_checks.load_former_holders([device])
    return holder_checks.ask_nova(questions, 2.0).get(device.pk, holder_checks.NO_HOLDERS)


def make_former_instance(device: Device, give_back: Any = binding.delete_requests) -> str:
    """Return an instance that had the device and whose request was then given back by `give_back`."""
    lifecycle.enable_device(device.uuid, ADMIN)
    instance = str(uuid.uuid4())
    with conductor.writing():
        DeviceProfile.objects.get_or_create(name="one", defaults={"groups": [{"resources:FPGA": "1"}]})
    (request,) = binding.create_requests("one", ADMIN)
    binding.bind_requests([BindSpec(request, "cmp1", str(Deployable.objects.get().rp_uuid), instance)], ADMIN)
    give_back([request], ADMIN)
    lifecycle.disable_device(device.uuid, ADMIN)
    return instance


@pytest.mark.parametrize("give_back", [binding.unbind_requests, binding.delete_requests])
def test_an_active_instance_that_had_the_device_prevents_retiring(
    device: Device, nova: FakeNova, give_back: Any
) -> None:
    instance = make_former_instance(device, give_back)
    nova.shown[instance] = ("ACTIVE", "cmp1")
    refused = try_to_retire(device)
    assert refused
    assert refused.reason is RefusalReason.IN_USE
    assert f"instance {instance} (ACTIVE on cmp1), which may still use it, according to Nova" in refused.text


@pytest.mark.parametrize(
    ("columns", "free"),
    [
        ({"attached_at": EARLIER}, False),
        ({"attached_at": EARLIER, "ended_at": EARLIER}, True),
        ({"ended_at": EARLIER, "fault": "none was free"}, True),
        ({"attached_at": EARLIER, "ended_at": EARLIER, "fault": "its requests were deleted or unbound"}, False),
    ],
)
def test_a_device_attached_to_a_running_instance_is_free_only_after_a_regular_detach(
    device: Device, nova: FakeNova, columns: dict[str, str], free: bool
) -> None:
    """Nova did not plug in the device itself, so only a regular detachment proves that the guest no longer has it.

    If only the requests were deleted or unbound, the guest may still use the device.
    """
    instance = make_former_instance(device)
    nova.shown[instance] = ("ACTIVE", "cmp1")
    request = Event.objects.get(action="request.deleted").subject
    said = {"instance": instance, "project_id": "p1", "host": "cmp1", "actor": "olga"}
    with conductor.writing():
        Attachment.objects.create(**said, **columns, requests=[request])
    assert (try_to_retire(device) is None) == free


def test_a_detachment_of_other_requests_of_the_instance_does_not_free_a_device(device: Device, nova: FakeNova) -> None:
    instance = make_former_instance(device)
    nova.shown[instance] = ("ACTIVE", "cmp1")
    with conductor.writing():
        Attachment.objects.create(
            instance=instance, project_id="p1", host="cmp1", actor="olga", ended_at=EARLIER, requests=[uuid.uuid4()]
        )
    assert try_to_retire(device)


@pytest.mark.parametrize("shown", [("SHELVED_OFFLOADED", ""), ("DELETED", "cmp1"), ("ACTIVE", "cmp2"), None])
def test_an_instance_that_ended_or_moved_does_not_prevent_retiring(
    device: Device, nova: FakeNova, shown: tuple[str, str] | None
) -> None:
    instance = make_former_instance(device)
    if shown:
        nova.shown[instance] = shown
    assert try_to_retire(device) is None


def test_nova_is_asked_once_about_an_instance_that_it_does_not_know(device: Device, nova: FakeNova) -> None:
    make_former_instance(device)
    assert ask_nova(device) == holder_checks.NO_HOLDERS
    assert len(nova.asked) == 1
    assert ask_nova(device) == holder_checks.NO_HOLDERS
    assert len(nova.asked) == 1, "what Nova does not know it never will"


def test_S1_retiring_is_refused_while_nova_answers_404_at_an_address_that_has_shown_no_instance_of_ours(
    device: Device, nova: FakeNova
) -> None:
    """A Nova of another region does not know the instance that still uses the device."""
    instance = make_former_instance(device)
    NovaEndpoint.objects.update(proven_at=None)
    refused = try_to_retire(device)
    assert refused
    assert refused.reason is RefusalReason.UNAVAILABLE
    assert f"Nova at {nova.url} answered 404" in refused.text
    assert "Check the region and CYBORG_NOVA_ENDPOINT, or confirm the address" in refused.text
    nova.shown[instance] = ("ACTIVE", "cmp1")
    refused = try_to_retire(device)
    assert refused
    assert refused.reason is RefusalReason.IN_USE, "what such an address shows counts"
    nova.shown.clear()
    NovaEndpoint.objects.update(confirmed_at=EARLIER)
    assert try_to_retire(device) is None, "it is asked again at once"


def test_an_instance_that_the_holder_check_is_shown_proves_the_address(device: Device, nova: FakeNova) -> None:
    """The job `instances` may never have asked, because no instance holds a request now."""
    NovaEndpoint.objects.all().delete()
    make_former_instance(device)
    nova.shown[make_former_instance(device)] = ("ACTIVE", "cmp2")
    assert ask_nova(device) == holder_checks.NO_HOLDERS
    assert NovaEndpoint.objects.get().proven_at


def test_S1_what_an_address_did_not_know_before_it_was_distrusted_is_asked_for_again(
    device: Device, nova: FakeNova
) -> None:
    """Another Nova stood behind the address for a minute."""
    nova.shown[make_former_instance(device)] = ("ACTIVE", "cmp1")
    shown, nova.shown = nova.shown, {}
    assert ask_nova(device) == holder_checks.NO_HOLDERS
    NovaEndpoint.objects.update(proven_at=None)
    assert ask_nova(device).unknown
    nova.shown = shown
    NovaEndpoint.objects.update(proven_at="2026-01-02T00:00:00Z")
    assert ask_nova(device).holders


def test_S1_what_one_address_of_nova_does_not_know_another_is_asked_for(
    device: Device, nova: FakeNova, settings: Any
) -> None:
    instance = make_former_instance(device)
    assert ask_nova(device) == holder_checks.NO_HOLDERS
    with running_nova() as other:
        settings.KEYS.nova_endpoint = other.url
        other.shown[instance] = ("ACTIVE", "cmp1")
        assert ask_nova(device).holders


@pytest.mark.slow
def test_retiring_is_refused_while_nova_is_away_or_unclear(device: Device, nova: FakeNova) -> None:
    instance = make_former_instance(device)
    nova.status = 503
    refused = try_to_retire(device)
    assert refused
    assert (refused.reason, "Nova answered 503" in refused.text) == (RefusalReason.UNAVAILABLE, True)
    nova.status = 0
    nova.shown[instance] = ("ACTIVE", "")
    nova.rubbish = True
    holder_checks._outages.clear()
    refused = try_to_retire(device)
    assert refused
    assert (refused.reason, "does not describe a server" in refused.text) == (RefusalReason.UNAVAILABLE, True)
    nova.rubbish = False
    apply_report(device.host, make_driver_report(make_card(1), make_card(2)), seq=2)
    assert ask_nova(Device.objects.latest("id")) == holder_checks.NO_HOLDERS, (
        "no instance has had it: Nova is not asked"
    )
    refused = try_to_retire(device)
    assert refused
    assert refused.reason is RefusalReason.UNAVAILABLE, "for ten seconds it is not asked again"
    holder_checks._outages.clear()
    refused = try_to_retire(device)
    assert refused
    assert refused.reason is RefusalReason.IN_USE, "a Nova that does not tell hosts counts against the act"


def test_a_nova_that_hangs_is_not_asked_again_after_the_first_calls(
    nova: FakeNova, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holder_checks, "CALL_TIMEOUT_S", 0.2)
    nova.read_slow_s = 0.5
    former_holders = tuple((str(uuid.uuid4()), datetime.now(UTC)) for _ in range(80))
    questions = {1: holder_checks.NovaQuestion(("cmp1",), former_holders)}
    assert holder_checks.ask_nova(questions, 1.0)[1].unknown
    nova.read_slow_s = 0.0
    assert holder_checks.ask_nova(questions, 5.0)[1].unknown, "the outage is recorded: nothing is asked"


@pytest.mark.slow
def test_placement_is_asked_about_many_devices_at_once_within_one_deadline(
    placement: PlacementModelSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = placement.request

    def answer_slowly(*arguments: Any, **options: Any) -> Any:
        time.sleep(0.1)
        return answer(*arguments, **options)

    monkeypatch.setattr(placement, "request", answer_slowly)
    questions = {number: (str(uuid.uuid4()), str(uuid.uuid4())) for number in range(200)}
    began = time.monotonic()
    answers = holder_checks.ask_placement(questions, 0.5)
    assert time.monotonic() - began < 2.0, "one after the other they would take 40 s"
    assert 1 <= len(answers) < 200 and set(answers.values()) == {holder_checks.NO_HOLDERS}
    assert holder_checks.ask_placement({1: questions[1]}, 2.0), "a lack of time is no outage"


def test_a_call_with_little_time_left_is_not_made_and_a_shortened_one_is_no_outage(
    device: Device, placement: PlacementModelSession
) -> None:
    questions = holder_checks.load_providers([device])
    placement.away = True
    assert holder_checks.ask_placement(questions, 0.01) == {} and not placement.seen_calls
    assert holder_checks.ask_placement(questions, 1.0)[device.pk].unknown
    placement.away = False
    assert holder_checks.ask_placement(questions, 5.0)[device.pk] == holder_checks.NO_HOLDERS


@pytest.mark.slow
def test_nova_is_not_asked_with_little_time_left_and_a_shortened_call_is_no_outage(
    device: Device, nova: FakeNova
) -> None:
    make_former_instance(device)
    questions = holder_checks.load_former_holders([device])
    assert holder_checks.ask_nova(questions, 0.01) == {} and not nova.asked
    nova.read_slow_s = 1.0
    assert holder_checks.ask_nova(questions, 0.8)[device.pk].unknown
    nova.read_slow_s = 0.0
    assert holder_checks.ask_nova(questions, 5.0)[device.pk] == holder_checks.NO_HOLDERS


def test_S1_the_answer_of_nova_does_not_count_if_the_device_was_bound_and_released_meanwhile(
    device: Device, nova: FakeNova
) -> None:
    make_former_instance(device)
    answers = safety.ask_holders([Device.objects.get()])
    locked = [Device.objects.get()]
    safety.find_holders(locked, answers).refuse_unless_free(locked[0], "retired")
    instance = make_former_instance(device)
    nova.shown[instance] = ("ACTIVE", "cmp1")
    locked = [Device.objects.get()]
    with pytest.raises(RefusedError, match="It is unknown whether") as refused:
        safety.find_holders(locked, answers).refuse_unless_free(locked[0], "retired")
    assert refused.value.reason is RefusalReason.UNAVAILABLE
