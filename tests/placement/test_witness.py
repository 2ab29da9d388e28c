"""Placement is asked who has an allocation before a device is retired; nobody to answer counts as held."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from accelerators import lifecycle, safety
from accelerators.caller import Caller
from accelerators.models import Deployable, Device
from accelerators.refusals import Reason, Refused
from placement_sync import witness
from placement_sync.reconcile import Observed
from tests.placement.session import Session
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db
ADMIN = Caller("ops", "u", frozenset({"admin"}), "p")
there = Session()


def cloud() -> Session:
    return there


@pytest.fixture(autouse=True)
def placement(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[Session]:
    there.__init__()  # type: ignore[misc]
    settings.SERVICE_SESSION = "tests.placement.test_witness.cloud"
    monkeypatch.setattr(witness, "_away", (0.0, ""))
    safety.register("placement", witness.allocations)
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


def retire(device: Device) -> Refused | None:
    try:
        lifecycle.ask(lifecycle.Action.RETIRE, device.uuid, ADMIN)
    except Refused as refused:
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


def test_nobody_to_answer_counts_as_held_and_is_not_asked_again_at_once(device: Device, placement: Session) -> None:
    placement.away = True
    for _ in range(3):
        refused = retire(device)
        assert refused
        assert refused.reason == Reason.AWAY
    assert len(placement.seen) == 1
