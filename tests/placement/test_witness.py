"""Before a device is retired Placement is asked who has an allocation, and Nova whether those who had the device from
us live on; nobody to answer counts as held."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import keystoneauth1.session
import pytest
from keystoneauth1.token_endpoint import Token

from accelerators import conductor, safety
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.errors import Reason, RefusedError
from accelerators.models import Attachment, Deployable, Device, DeviceProfile, Event
from accelerators.requests import binding
from accelerators.requests.binding import Bind
from placement_sync.jobs import holder_checks
from placement_sync.reconcile import Observed
from tests.placement.session import Session
from tests.support.nova import Nova, recording
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db
ADMIN = Caller("ops", "u", frozenset({"admin"}), "p", service=True)
there = Session()
THEN = "2026-01-01T00:00:00Z"


def cloud() -> Session:
    return there


def real_session() -> keystoneauth1.session.Session:
    return keystoneauth1.session.Session(Token("http://unused", "token"))


@pytest.fixture(autouse=True)
def placement(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    there.__init__()  # type: ignore[misc]
    settings.SERVICE_SESSION = "tests.placement.test_witness.cloud"
    monkeypatch.setattr(holder_checks, "_away", {})
    safety.register("placement", holder_checks.allocations)
    yield there
    del safety._witnesses["placement"]


@pytest.fixture
def device() -> Device:
    """In maintenance, so that it could be retired; its provider is in Placement."""
    apply(a_host(), answer(card(1)))
    device = Device.objects.get()
    lifecycle.enable(device.uuid, ADMIN)
    lifecycle.disable(device.uuid, ADMIN)
    provider = str(Deployable.objects.get().rp_uuid)
    there.model.providers[provider] = Observed(provider, "node_0000:01:00.0", "", 0)
    return device


def retire(device: Device) -> RefusedError | None:
    try:
        lifecycle.ask(lifecycle.Action.RETIRE, device.uuid, ADMIN)
    except RefusedError as refused:
        return refused
    return None


def test_an_allocation_holds_a_device_and_its_end_frees_it(device: Device, placement: Session) -> None:
    provider = str(Deployable.objects.get().rp_uuid)
    placement.model.allocated[provider, "FPGA"] = {"vm-1": 1}
    refused = retire(device)
    assert refused
    assert (refused.reason, "Placement's consumer vm-1" in refused.text) == (Reason.HELD, True)
    placement.model.allocated.clear()
    assert retire(device) is None
    assert Device.objects.get().state == "retired"


def test_an_empty_answer_is_not_taken_for_nobody(device: Device, placement: Session) -> None:
    placement.empty = True
    refused = retire(device)
    assert refused
    assert (refused.reason, "the answer is empty" in refused.text) == (Reason.AWAY, True)


def test_nobody_to_answer_counts_as_held_and_is_not_asked_again_at_once(device: Device, placement: Session) -> None:
    placement.away = True
    for _ in range(3):
        refused = retire(device)
        assert refused
        assert refused.reason == Reason.AWAY
    assert len(placement.seen) == 1


@pytest.fixture
def nova(settings: Any, placement: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nova]:
    """Nova alone is asked, through HTTP."""
    keys = settings.KEYS
    settings.SERVICE_SESSION = "tests.placement.test_witness.real_session"
    monkeypatch.setitem(safety._witnesses, "placement", lambda _: holder_checks.NOBODY)
    monkeypatch.setattr(holder_checks, "_gone", set())
    with recording() as one:
        known = {name: getattr(keys, name) for name in keys.__dataclass_fields__}
        settings.KEYS = SimpleNamespace(**known | {"nova_endpoint": one.url})
        safety.register("nova", holder_checks.instances)
        yield one
        del safety._witnesses["nova"]


def had(device: Device, give_back: Any = binding.delete) -> str:
    """An instance that had the device, and whose request was then unbound or deleted by hand."""
    lifecycle.enable(device.uuid, ADMIN)
    instance = str(uuid.uuid4())
    with conductor.writing():
        DeviceProfile.objects.get_or_create(name="one", defaults={"groups": [{"resources:FPGA": "1"}]})
    (request,) = binding.create("one", ADMIN)
    binding.bind([Bind(request, "cmp1", str(Deployable.objects.get().rp_uuid), instance)], ADMIN)
    give_back([request], ADMIN)
    lifecycle.disable(device.uuid, ADMIN)
    return instance


@pytest.mark.parametrize("give_back", [binding.unbind, binding.delete])
def test_an_instance_that_lives_on_with_the_device_holds_it(device: Device, nova: Nova, give_back: Any) -> None:
    instance = had(device, give_back)
    nova.shown[instance] = ("ACTIVE", "cmp1")
    refused = retire(device)
    assert refused
    assert refused.reason is Reason.HELD
    assert f"instance {instance} (ACTIVE on cmp1), which may still use it, according to Nova" in refused.text


@pytest.mark.parametrize(
    ("columns", "free"),
    [
        ({"attached_at": THEN}, False),
        ({"attached_at": THEN, "ended_at": THEN}, True),
        ({"ended_at": THEN, "fault": "none was free"}, True),
        ({"attached_at": THEN, "ended_at": THEN, "fault": "its requests were deleted or unbound"}, False),
    ],
)
def test_what_was_attached_while_it_ran_is_free_when_it_is_detached(
    device: Device, nova: Nova, columns: dict[str, str], free: bool
) -> None:
    """Nova did not plug it; who detaches it has taken it out of the guest, but not who takes its requests away."""
    instance = had(device)
    nova.shown[instance] = ("ACTIVE", "cmp1")
    request = Event.objects.get(action="request.deleted").subject
    said = {"instance": instance, "project_id": "p1", "host": "cmp1", "actor": "olga"}
    with conductor.writing():
        Attachment.objects.create(**said, **columns, requests=[request])
    assert (retire(device) is None) == free


@pytest.mark.parametrize("shown", [("SHELVED_OFFLOADED", ""), ("DELETED", "cmp1"), ("ACTIVE", "cmp2"), None])
def test_one_that_ended_or_went_elsewhere_does_not(device: Device, nova: Nova, shown: tuple[str, str] | None) -> None:
    instance = had(device)
    if shown:
        nova.shown[instance] = shown
    assert retire(device) is None


def test_nova_is_asked_of_nobody_in_vain(device: Device, nova: Nova) -> None:
    had(device)
    assert holder_checks.instances(device) == holder_checks.NOBODY
    assert len(nova.asked) == 1
    assert holder_checks.instances(device) == holder_checks.NOBODY
    assert len(nova.asked) == 1, "what Nova does not know it never will"


def test_while_nova_is_away_nobody_knows(device: Device, nova: Nova) -> None:
    instance = had(device)
    nova.status = 503
    refused = retire(device)
    assert refused
    assert (refused.reason, "Nova answered 503" in refused.text) == (Reason.AWAY, True)
    nova.status = 0
    nova.shown[instance] = ("ACTIVE", "")
    nova.rubbish = True
    holder_checks._away.clear()
    refused = retire(device)
    assert refused
    assert (refused.reason, "does not describe a server" in refused.text) == (Reason.AWAY, True)
    nova.rubbish = False
    apply(device.host, answer(card(1), card(2)), seq=2)
    assert holder_checks.instances(Device.objects.latest("id")) == holder_checks.NOBODY, (
        "no instance has had it: Nova is not asked"
    )
    refused = retire(device)
    assert refused
    assert refused.reason is Reason.AWAY, "for ten seconds it is not asked again"
    holder_checks._away.clear()
    refused = retire(device)
    assert refused
    assert refused.reason is Reason.HELD, "a Nova that does not tell hosts counts against the act"
