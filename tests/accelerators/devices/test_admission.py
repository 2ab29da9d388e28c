"""Test admission rules: which rule fits, what a merge does with it, and how rules are applied to inactive devices."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerators import conductor
from accelerators.devices import admission_rules, lifecycle
from accelerators.domain.admission import AdmissionFacts, EnabledRule, first_matching_rule
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import AdmissionRule, Deployable, Device, Event, Intent
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


@pytest.mark.django_db
def test_applying_rules_changes_only_inactive_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_rules, "SLICE_SIZE", 2)
    host = get_or_create_host()
    apply_report(
        host, make_driver_report(*(make_card(n) for n in range(6)), *(make_card(n, vendor="10de") for n in range(6, 8)))
    )
    lifecycle.disable_device(Device.objects.first().uuid, OLGA)
    with conductor.writing():
        Device.objects.filter(address="0000:05:00.0").update(state="maintenance")
    create_rule("nvidia", vendor="10de", order=1, action="inactive")
    create_rule("rest")
    assert admission_rules.forecast_rules().by_rule == {"rest": 5}
    assert sum(admission_rules.apply_rules(OLGA)) == 5
    assert admission_rules.forecast_rules().by_rule == {}
    assert Device.objects.filter(state="ready", state_by="rule rest").count() == 5
    event = Event.objects.filter(action="device.ready").first()
    assert (event.source, event.actor) == ("rule", "rest")
    assert event.reason == "admitted by rule rest, applied by olga"
    assert Deployable.objects.filter(rp_uuid__isnull=False).count() == 5


@pytest.mark.django_db
def test_creating_a_rule_beyond_the_maximum_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_rules, "MAX_RULES", 1)
    create_rule("one")
    with pytest.raises(RefusedError, match="There are 1 rules already") as refused:
        create_rule("two")
    assert refused.value.reason == RefusalReason.CONFLICT
