"""Test admission rules: which rule fits, what a merge does with it, and how rules are applied to inactive devices."""

from __future__ import annotations

from collections import Counter

import pytest
from django.db import connection
from django.db.models import QuerySet
from django.test.utils import CaptureQueriesContext
from django.utils import timezone
from hypothesis import given
from hypothesis import strategies as st

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.devices import admission_rules, lifecycle
from accelerators.domain.admission import AdmissionFacts, EnabledRule, first_matching_rule
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action, LifecycleState
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import DeviceState, DrainTarget
from accelerators.models import AdmissionRule, AttachHandle, Bulk, Deployable, Device, Event, Host, Intent
from accelerators.workflows import bulk_actions, bulk_admission
from tests.accelerators.api.own.test_units import create_bound_request
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")
CARD_FACTS = AdmissionFacts("cmp1.example", "pci_driver", "10de", "A100 80GB", "GPU")


@pytest.mark.parametrize(
    ("patterns", "fits"),
    [
        ({}, True),
        ({"host": "cmp1.example"}, True),
        ({"host": "cmp?.*"}, True),
        ({"host": "cmp1"}, False),
        ({"vendor": "10DE", "model": "a100*"}, True),
        ({"vendor": "8086"}, False),
        ({"driver": "pci_driver", "type": "GPU"}, True),
        ({"driver": "pci_driver", "type": "FPGA"}, False),
        ({"model": "A100"}, False),
        ({"model": "*[!]"}, False),
    ],
)
def test_a_rule_fits_if_all_its_patterns_match(patterns: dict[str, str], fits: bool) -> None:
    assert EnabledRule("r", "ready", **patterns).matches(CARD_FACTS) is fits
    assert EnabledRule("r", "ready").matches(CARD_FACTS), "a pattern that is left out fits everything"


short_texts = st.text(max_size=12)


@given(
    st.builds(AdmissionFacts, short_texts, short_texts, short_texts, short_texts, short_texts),
    st.lists(st.builds(EnabledRule, short_texts, short_texts, host=short_texts)),
)
def test_the_first_rule_that_fits_decides(device: AdmissionFacts, tried: list[EnabledRule]) -> None:
    decided = first_matching_rule(tried, device)
    before = tried[: tried.index(decided)] if decided else tried
    assert decided is None or decided.matches(device)
    assert not any(rule.matches(device) for rule in before)


@given(st.text(max_size=255), st.text(alphabet="a*?[]!-", max_size=255))
def test_matching_never_raises_whatever_the_pattern_and_text(text: str, pattern: str) -> None:
    EnabledRule("r", "ready", model=pattern).matches(CARD_FACTS._replace(model=text))


def create_rule(name: str, **values: object) -> AdmissionRule:
    return admission_rules.create_rule({"name": name, "action": "ready"} | values, OLGA)


@pytest.mark.django_db
def test_a_new_device_is_admitted_by_the_first_enabled_rule_that_fits() -> None:
    create_rule("late", order=20, action="quarantined")
    create_rule("no-two", order=5, model="10?4", host="cmp2", action="inactive")
    create_rule("off", order=1, enabled=False, action="quarantined")
    create_rule("one", order=10, host="cmp1", action="ready")
    for n in (1, 2, 3):
        apply_report(get_or_create_host(f"cmp{n}"), make_driver_report(make_card(n)))
    found = Device.objects.order_by("id").values_list("state", "state_by")
    assert [*found] == [("ready", "rule one"), ("inactive", "rule no-two"), ("quarantined", "rule late")]
    assert {*Deployable.objects.filter(rp_uuid=None).values_list("device__state", flat=True)} == {"inactive"}
    decided = Event.objects.filter(source="rule").order_by("id").values_list("action", "actor", "changes", "host")
    assert [*decided] == [
        ("device.ready", "one", {"state": ["inactive", "ready"]}, "cmp1"),
        ("device.inactive", "no-two", {}, "cmp2"),
        ("device.quarantined", "late", {"state": ["inactive", "quarantined"]}, "cmp3"),
    ]
    assert "admitted by rule one" in Device.objects.get(state="ready").state_reason
    assert Intent.objects.filter(kind="provider").count() == 3


@pytest.mark.django_db
def test_rules_decide_about_new_devices_but_not_about_changed_or_returned_ones() -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1)))
    create_rule("all")
    apply_report(host, make_driver_report(make_card(1, status="degraded"), make_card(2)), seq=2)
    assert [*Device.objects.order_by("id").values_list("state", flat=True)] == ["inactive", "ready"]
    lifecycle.disable_device(Device.objects.get(address="0000:02:00.0").uuid, OLGA)
    apply_report(host, make_driver_report(), seq=3)
    apply_report(host, make_driver_report(make_card(1), make_card(2)), seq=4)
    assert [*Device.objects.order_by("id").values_list("state", flat=True)] == ["inactive", "maintenance"]


def draft_admission(devices: QuerySet[Device] | None = None) -> Bulk:
    """Store a draft that applies the present rules to these devices, or to all."""
    chosen = Device.objects.all() if devices is None else devices
    return bulk_actions.create_draft(bulk_admission.ADMIT, DrainTarget.MAINTENANCE, chosen, OLGA)


def describe_forecast(draft: Bulk) -> set[tuple[str, int, str]]:
    """Return the outcome, the number of devices and the text of each forecast."""
    forecasts = {(one.outcome.value, one.number, one.text) for one in bulk_actions.preview_bulk(draft).forecasts}
    first = Counter((one.outcome.value, one.text) for _, one in bulk_actions.forecast_first_items(draft, 100))
    assert {(outcome, number, text) for (outcome, text), number in first.items()} == forecasts
    return forecasts


@pytest.mark.django_db
def test_applying_rules_changes_only_inactive_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_actions, "BULK_SLICE_SIZE", 4)
    host = get_or_create_host()
    apply_report(
        host, make_driver_report(*(make_card(n) for n in range(6)), *(make_card(n, vendor="10de") for n in range(6, 8)))
    )
    lifecycle.disable_device(Device.objects.first().uuid, OLGA)
    with conductor.writing():
        Device.objects.filter(address="0000:05:00.0").update(state="maintenance")
    create_rule("nvidia", vendor="10de", order=1, action="inactive")
    create_rule("rest")
    assert admission_rules.query_devices_to_move().count() == 5
    draft = draft_admission()
    assert describe_forecast(draft) == {
        ("moved", 5, "becomes ready by rule rest"),
        ("unchanged", 2, "no rule makes it ready or quarantined"),
        ("unchanged", 1, "is maintenance: rules decide about inactive devices only"),
    }
    assert bulk_actions.confirm_draft(draft, "hall 3", held_too=False)
    while bulk_actions.process_next_slice():
        pass
    draft.refresh_from_db()
    assert (draft.state, draft.moved, draft.unchanged, draft.refused) == ("done", 5, 3, 0)
    assert Device.objects.filter(state="ready", state_by="rule rest").count() == 5
    event = Event.objects.filter(action="device.ready").first()
    assert (event.source, event.actor) == ("rule", "rest")
    assert event.reason == "admitted by rule rest, applied by olga: hall 3"
    assert Deployable.objects.filter(rp_uuid__isnull=False).count() == 5


@pytest.mark.django_db
def test_a_device_about_which_the_rules_decide_otherwise_since_the_preview_is_refused_and_retried() -> None:
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1), make_card(2, vendor="10de"), make_card(3, vendor="10de")))
    create_rule("rest", order=5)
    draft = draft_admission()
    create_rule("nvidia", vendor="10de", order=1, action="quarantined")
    lifecycle.apply_action(Action.QUARANTINE, [Device.objects.get(address="0000:03:00.0").uuid], OLGA)
    assert describe_forecast(draft) == {
        ("moved", 1, "becomes ready by rule rest"),
        ("refused", 1, "the rules have changed since it was chosen"),
        ("refused", 1, "was inactive when it was chosen, is quarantined now"),
    }
    bulk_actions.confirm_draft(draft, "", held_too=True)
    draft.refresh_from_db()
    assert (draft.state, draft.moved, draft.refused) == ("done", 1, 2)
    assert [*Device.objects.order_by("address").values_list("state", flat=True)] == ["ready", "inactive", "quarantined"]
    again = bulk_actions.create_retry_draft(draft, OLGA)
    bulk_actions.confirm_draft(again, "", held_too=False)
    assert Device.objects.get(address="0000:02:00.0").state_by == "rule nvidia"


@pytest.mark.django_db
def test_applying_rules_refuses_devices_that_are_gone_busy_or_whose_host_is_removed() -> None:
    hosts = [get_or_create_host(name) for name in ("cmp1", "cmp2")]
    for host in hosts:
        apply_report(host, make_driver_report(make_card(1), make_card(2, acts="health")))
    create_rule("rest")
    draft = draft_admission()
    gone, busy = Device.objects.filter(host=hosts[0]).order_by("id")
    with conductor.writing():
        command = command_queue.order_device_command("health", busy.uuid, OLGA)
        Device.objects.filter(pk=busy.pk).update(busy_with=command.uuid)
        Host.objects.filter(pk=hosts[1].pk).update(removing_since=timezone.now())
        AttachHandle.objects.filter(deployable__device=gone).delete()
        Deployable.objects.filter(device=gone).delete()
        gone.delete()
    assert describe_forecast(draft) == {
        ("refused", 1, "does not exist any more"),
        ("refused", 1, "is busy with a command"),
        ("refused", 2, "its host is being removed"),
    }
    assert not admission_rules.query_devices_to_move().exists()
    bulk_actions.confirm_draft(draft, "", held_too=True)
    results = draft.items.order_by("id").values_list("outcome", "why", "text")
    assert results[0][:2] == ("refused", "not_found")
    assert [*results[1:]] == [
        ("refused", "conflict", "is busy with a command"),
        *[("refused", "conflict", "its host is being removed")] * 2,
    ]
    assert set(Device.objects.values_list("state", flat=True)) == {"inactive"}


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({"is_held": True}, "in_use"),
        ({"is_busy": True}, "conflict"),
        ({"is_released": True}, None),
        ({"is_held": True, "is_host_removed": True}, "conflict"),
        ({}, None),
    ],
)
def test_the_decision_about_a_device_has_the_reason_code_of_a_refusal(
    facts: dict[str, bool], reason: str | None
) -> None:
    rules = (EnabledRule("rest", "ready"),)
    state = LifecycleState(DeviceState.INACTIVE)
    decision = bulk_admission.decide_admission(
        *(rules, rules, AdmissionFacts("cmp1", "fake", "", "", "GPU"), state.as_text, state),
        **({"is_busy": False, "is_held": False, "is_released": False, "is_host_removed": False} | facts),
    )
    assert decision.reason == reason
    assert decision.outcome == ("refused" if reason else "moved")


@pytest.mark.django_db
def test_a_held_inactive_device_is_refused_by_the_preview_and_the_run_and_is_not_chosen_by_the_rules() -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1), make_card(2)))
    held = Device.objects.get(address="0000:01:00.0")
    handle = AttachHandle.objects.get(deployable__device=held)
    create_bound_request(handle)
    forecast = admission_rules.forecast_rule({"name": "rest", "action": "ready"})
    create_rule("rest")
    draft = draft_admission()
    text = "is held by a request: rules change only devices that nobody holds"
    assert describe_forecast(draft) == {("moved", 1, "becomes ready by rule rest"), ("refused", 1, text)}
    assert not bulk_actions.preview_bulk(draft).needs_confirmation
    bulk_actions.confirm_draft(draft, "", held_too=True)
    told = draft.items.order_by("target_name").values_list("outcome", "why", "text")
    assert [*told] == [("refused", "in_use", text), ("moved", "", "")]
    assert [*Device.objects.order_by("address").values_list("state", flat=True)] == ["inactive", "ready"]
    assert forecast.total == 1 and not admission_rules.query_devices_to_move().exists()


def find_device_at_held_address() -> Device:
    """Return a device at the PCI address of another one, which is missing and which a request holds."""
    host = get_or_create_host()
    apply_report(host, make_driver_report(make_card(1, key="serial:1af4:00a0:0")))
    create_bound_request(AttachHandle.objects.get())
    apply_report(host, make_driver_report(make_card(1, key="serial:1af4:00b0:0"), make_card(2)), seq=2)
    return Device.objects.get(key="serial:1af4:00b0:0")


@pytest.mark.django_db
def test_a_device_whose_hardware_is_held_through_another_device_is_refused_by_the_preview_as_by_the_run() -> None:
    newcomer = find_device_at_held_address()
    with conductor.writing():
        Device.objects.filter(pk=newcomer.pk).update(state="inactive")
    assert admission_rules.forecast_rule({"name": "rest", "action": "ready"}).total == 1
    create_rule("rest")
    assert newcomer not in admission_rules.query_devices_to_move()
    draft = draft_admission(Device.objects.exclude(state="missing"))
    text = "is held by a request: rules change only devices that nobody holds"
    with CaptureQueriesContext(connection) as captured:
        bulk_actions.forecast_bulk(draft)
    assert len(captured) == 3, "one for the devices, one for the rules, one for the hosts where devices are installed"
    assert describe_forecast(draft) == {("moved", 1, "becomes ready by rule rest"), ("refused", 1, text)}
    bulk_actions.confirm_draft(draft, "", held_too=True)
    assert draft.items.get(device=newcomer).text == text and draft.items.get(device=newcomer).why == "in_use"


@pytest.mark.django_db
@pytest.mark.parametrize(
    ("action", "state", "text"),
    [
        (Action.RETIRE, "maintenance", "is held: it cannot be retired"),
        (Action.REINSTATE, "retired", "its host is being removed"),
    ],
)
def test_the_forecast_of_other_actions_knows_held_hardware_and_removed_hosts(
    action: Action, state: str, text: str
) -> None:
    newcomer = find_device_at_held_address()
    with conductor.writing():
        Device.objects.filter(pk=newcomer.pk).update(state=state)
        if action is Action.REINSTATE:
            Host.objects.update(removing_since=timezone.now())
    chosen = Device.objects.filter(pk=newcomer.pk)
    draft = bulk_actions.create_draft(action, DrainTarget.MAINTENANCE, chosen, OLGA)
    assert describe_forecast(draft) == {("refused", 1, text)}
    assert bulk_actions.forecast_device(action, DrainTarget.MAINTENANCE, chosen.get()).text == text
    bulk_actions.confirm_draft(draft, "", held_too=True)
    assert draft.items.get().outcome == "refused"


@pytest.mark.django_db
def test_creating_a_rule_beyond_the_maximum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_rules, "MAX_RULES", 1)
    create_rule("one")
    with pytest.raises(RefusedError, match="There are 1 rules already") as refused:
        create_rule("two")
    assert refused.value.reason == RefusalReason.CONFLICT
