"""Test that the previews of actions on a device which a guest may still use say what the actions then do."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext

from accelerators import conductor
from accelerators.devices import admission_rules, lifecycle, partitioning
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action
from accelerators.domain.states import DrainTarget, EventSource, RolloutOp
from accelerators.models import AttachHandle, Bulk, Device, ReleasedHandle
from accelerators.workflows import bulk_actions, bulk_admission, driver_rollouts
from accelerators.workflows.driver_config import DriverChange
from tests.accelerators.api.own.test_units import build_divisible_card
from tests.support.reports import apply_report, get_or_create_host, make_driver_report

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("agents_need_not_be_up")]
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")
WAITS = "a guest may still use it, because the host has not confirmed that none does"
CHANGE = {"units": 0, "layout": {"vfs": "8"}, "generation": None}


def release_handles(device: Device) -> None:
    """Store that the handles of a device were released, and that its host has not confirmed that they are unused."""
    with conductor.writing():
        for handle in AttachHandle.objects.filter(deployable__device=device):
            ReleasedHandle.objects.create(handle=handle, ask_at=datetime.now(UTC))


@pytest.fixture
def released() -> Device:
    """Return the device of two that was released. Both have to be installed before they are ready."""
    more = {"acts": "health partition reset", "to_install": "bind it"}
    cards = (build_divisible_card(n, 2, **more) for n in (1, 2))
    apply_report(get_or_create_host(), make_driver_report(*cards, driver="generic_driver"))
    release_handles(device := Device.objects.get(address="0000:01:00.0"))
    return device


def draft_on_both(action: str, then: DrainTarget = DrainTarget.MAINTENANCE) -> Bulk:
    arguments = CHANGE if action == "partition" else None
    return bulk_actions.create_draft(action, then, Device.objects.all(), OLGA, arguments=arguments)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("reset", f"{WAITS}: it cannot be reset"),
        ("partition", f"{WAITS}: it cannot be partitioned"),
        (Action.RETIRE, f"{WAITS}: it cannot be retired"),
        (Action.ENABLE, f"{WAITS}: it cannot be installed"),
        (bulk_admission.ADMIT, f"{WAITS}: it cannot be installed"),
        ("health", "the command is sent to its agent"),
        (Action.DISABLE, "is inactive already"),
        (Action.QUARANTINE, "becomes quarantined"),
    ],
)
def test_S1_the_preview_about_a_device_that_a_guest_may_still_use_agrees_with_the_run(
    released: Device, action: str, text: str
) -> None:
    admission_rules.create_rule({"name": "all", "action": "ready"}, OLGA)
    draft = draft_on_both(action)
    forecasts = {item.device_id: one for item, one in bulk_actions.forecast_first_items(draft, 10)}
    assert forecasts[released.pk].text == text
    counted = {one.text: one.number for one in bulk_actions.forecast_bulk(draft)}
    assert counted[text] == (1 if WAITS in text else 2), counted
    single = None
    if action == "partition":
        single, _ = bulk_actions.forecast_unit_change(partitioning.PartitionChange.from_arguments(CHANGE), released)
    elif isinstance(action, Action):
        single = bulk_actions.forecast_device(action, DrainTarget.MAINTENANCE, released)
    assert single is None or single.text == text
    bulk_actions.confirm_draft(draft, "", held_too=True)
    outcomes = {item.device_id: (item.outcome, item.why) for item in draft.items.all()}
    assert {pk: outcome for pk, (outcome, _) in outcomes.items()} == {pk: one.outcome for pk, one in forecasts.items()}
    assert (outcomes[released.pk][1] == "in_use") is (WAITS in text)


def test_the_preview_of_a_drain_to_retired_says_that_it_waits_for_the_host(released: Device) -> None:
    draft = draft_on_both(Action.DRAIN, DrainTarget.RETIRED)
    forecasts = {item.device_id: one.text for item, one in bulk_actions.forecast_first_items(draft, 10)}
    waits = "becomes inactive, drains, and becomes retired when its host confirms that no guest uses it"
    assert forecasts.pop(released.pk) == waits
    assert set(forecasts.values()) == {"becomes retired"}
    bulk_actions.confirm_draft(draft, "", held_too=True)
    released.refresh_from_db()
    assert (released.state, released.drain_to) == ("inactive", "retired")
    assert Device.objects.exclude(pk=released.pk).get().state == "retired"


def test_the_preview_of_a_drain_to_retired_names_both_the_request_and_the_guest_that_it_waits_for() -> None:
    drain = Bulk(action=Action.DRAIN, then=DrainTarget.RETIRED)
    facts = bulk_actions.DeviceFacts(
        state="ready",
        returns_to=None,
        drain_to=None,
        has_to_be_installed=False,
        is_busy=False,
        is_held=True,
        is_released=True,
        is_supported=False,
        was_held=True,
        is_host_removed=False,
    )
    ends = {}
    for held, released in ((True, True), (True, False), (False, True)):
        one = replace(facts, is_held=held, was_held=held, is_released=released)
        text = bulk_actions.predict_outcome(drain, "ready", None, one).text
        ends[held, released] = text.removeprefix("becomes maintenance, drains, and becomes retired when ")
    request, guest = "its last request ends", "its host confirms that no guest uses it"
    assert ends == {(True, True): f"{request} and {guest}", (True, False): request, (False, True): guest}


def test_a_device_at_the_address_of_released_hardware_is_refused_by_the_preview(released: Device) -> None:
    with conductor.writing():
        Device.objects.filter(pk=released.pk).update(address="0000:09:00.0")
        Device.objects.exclude(pk=released.pk).update(address="0000:01:00.0")
    newcomer = Device.objects.exclude(pk=released.pk).get()
    draft = draft_on_both("reset")
    forecasts = {item.device_id: one.text for item, one in bulk_actions.forecast_first_items(draft, 10)}
    assert forecasts[newcomer.pk] == f"{WAITS}: it cannot be reset"
    bulk_actions.confirm_draft(draft, "", held_too=True)
    assert draft.items.get(device=newcomer).why == "in_use"


@pytest.mark.parametrize(("action", "number"), [("ready", 1), ("quarantined", 2)])
def test_a_rule_does_not_count_a_device_to_be_installed_that_a_guest_may_still_use(
    released: Device, action: str, number: int
) -> None:
    values = {"name": "all", "action": action}
    assert admission_rules.forecast_rule(values).total == number
    admission_rules.create_rule(values, OLGA)
    assert admission_rules.query_devices_to_move().count() == number


def test_the_preview_of_a_driver_change_knows_devices_that_a_guest_may_still_use(released: Device) -> None:
    change = DriverChange(RolloutOp.UNINSTALL, "generic_driver")
    hosts = [released.host]
    draft, preview = driver_rollouts.store_draft(change, hosts, OLGA, source=EventSource.PERSON)
    (forecast,) = preview.hosts
    text = f"{WAITS.replace('use it', 'use one of its devices')}: it cannot be uninstalled"
    assert (forecast.outcome, forecast.text) == ("refused", text)
    driver_rollouts.confirm_rollout(draft, "")
    driver_rollouts.run()
    assert "a guest, perhaps" in draft.steps.get().text


def test_retiring_devices_reads_the_requests_that_hold_them_once(released: Device) -> None:
    uuids = [device.uuid for device in Device.objects.all()]
    with CaptureQueriesContext(connection) as captured:
        results = lifecycle.apply_action(Action.RETIRE, uuids, OLGA)
    assert {result.outcome for result in results} == {"moved", "refused"}
    reads = [query["sql"] for query in captured if 'FROM "accelerators_acceleratorrequest"' in query["sql"]]
    assert len(reads) == 1, reads
