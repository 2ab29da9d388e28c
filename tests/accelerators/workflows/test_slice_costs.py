"""Test that a slice of a bulk action costs as many statements for many devices as for few, also if they are held."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from accelerators import conductor
from accelerators.devices import admission_rules
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action
from accelerators.domain.states import DrainTarget
from accelerators.models import AcceleratorRequest, AttachHandle, Device, DeviceProfile
from accelerators.workflows import bulk_actions, bulk_admission
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.statements import count_call_statements

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("agents_need_not_be_up")]
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")
MAX_STATEMENTS = 36
SIZES = (3, 3, 30)
"""The numbers of devices of three bulk actions; the first one fills caches."""


def hold_devices() -> None:
    """Bind a request to each device; each has one handle."""
    with conductor.writing():
        profile = DeviceProfile.objects.create(name="small", groups=[{"resources:FPGA": "1"}])
        for handle in AttachHandle.objects.all():
            values = {"project_id": "p1", "state": "Bound", "profile": profile, "group": {}, "hostname": "cmp1"}
            AcceleratorRequest.objects.create(
                **values, deployable_id=handle.deployable_id, attach_handle=handle, instance_uuid=handle.uuid
            )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "state", "held", "held_too", "outcome"),
    [
        (Action.DISABLE, "ready", "before", True, "moved"),
        (Action.DISABLE, "ready", "before", False, "refused"),
        (Action.DISABLE, "ready", "after", True, "refused"),
        (Action.DRAIN, "ready", "before", True, "moved"),
        (Action.RETIRE, "maintenance", "before", True, "refused"),
        (Action.ENABLE, "inactive", "before", True, "refused"),
        (Action.ENABLE, "inactive", "", True, "moved"),
        (bulk_admission.ADMIT, "inactive", "before", True, "refused"),
        (bulk_admission.ADMIT, "inactive", "", True, "moved"),
        ("reset", "ready", "before", True, "refused"),
        ("health", "ready", "before", True, "moved"),
    ],
)
def test_a_slice_of_held_devices_costs_as_many_statements_for_many_as_for_few(
    monkeypatch: pytest.MonkeyPatch, action: str, state: str, held: str, held_too: bool, outcome: str
) -> None:
    cards = (make_card(n, acts="health reset", to_install="bind it") for n in range(sum(SIZES)))
    apply_report(get_or_create_host(), make_driver_report(*cards))
    with conductor.writing():
        Device.objects.update(state=state)
    admission_rules.create_rule({"name": "all", "action": "ready"}, OLGA)
    ids = list(Device.objects.order_by("id").values_list("id", flat=True))
    if held == "before":
        hold_devices()
    chosen = [ids[:3], ids[3:6], ids[6:]]
    drafts = [
        bulk_actions.create_draft(action, DrainTarget.MAINTENANCE, Device.objects.filter(pk__in=one), OLGA)
        for one in chosen
    ]
    if held == "after":
        hold_devices()
    process_slice, counts = bulk_actions._process_slice, list[int]()

    def count_statements(*words: Any, **more: Any) -> None:
        counts.append(count_call_statements(partial(process_slice, *words, **more)))

    monkeypatch.setattr(bulk_actions, "_process_slice", count_statements)
    for draft in drafts:
        assert bulk_actions.confirm_draft(draft, "", held_too=held_too)
    _, few, many = counts
    assert {item.outcome for draft in drafts for item in draft.items.all()} == {outcome}
    assert few == many <= MAX_STATEMENTS
