"""What an operator decides at the console: buttons of a device's page, actions of the list, admission rules."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from accelerators import conductor, lifecycle
from accelerators.models import AcceleratorRequest, AdmissionRule, Device, Event
from tests.console.conftest import Fill
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db

LIST = "admin:accelerators_device_changelist"


def page(device: Device) -> str:
    return reverse("admin:accelerators_device_change", args=[device.pk])


def decide(device: Device) -> str:
    return reverse("admin:accelerators_device_decide", args=[device.pk])


def buttons(client: Client, device: Device) -> list[str]:
    return re.findall(r'name="choice" value="([a-z-]+)"', client.get(page(device)).content.decode())


def sentence(answered: object) -> str:
    """The one message of the page that was come to."""
    (said,) = re.findall(r'role="status">([^<]+)<', answered.content.decode())  # type: ignore[attr-defined]
    return said


def free() -> Device:
    return Device.objects.get(address="0000:02:00.0", host__name="cmp0.example")


def held() -> Device:
    return Device.objects.get(address="0000:00:00.0", host__name="cmp0.example")


def ready(*devices: Device) -> None:
    with conductor.writing():
        Device.objects.filter(pk__in=[device.pk for device in devices]).update(state="ready")


def test_the_page_offers_what_is_possible_and_does_it(operator: Client, fill: Fill) -> None:
    fill(3)
    assert buttons(operator, free()) == ["enable", "quarantine", "retire"]
    answered = operator.post(decide(free()), {"choice": "enable", "reason": "burnt in"}, follow=True)
    assert answered.redirect_chain == [(page(free()), 302)]
    assert sentence(answered) == "1044 0000:02:00.0 is now ready."
    assert buttons(operator, free()) == ["drain", "disable", "quarantine", "drain-retire"]
    event = Event.objects.get(action="device.ready")
    assert (event.source, event.actor, event.reason) == ("person", "olga", "burnt in")
    assert "burnt in" in answered.content.decode()


def test_a_drain_is_shown_on_the_page_and_in_the_list(operator: Client, fill: Fill) -> None:
    fill(3)
    ready(held())
    answered = operator.post(decide(held()), {"choice": "drain-retire"})
    assert "Drain, then retire: 1044 0000:00:00.0?" in answered.content.decode()
    assert held().state == "ready"
    answered = operator.post(decide(held()), {"choice": "drain-retire", "sure": "yes"}, follow=True)
    assert sentence(answered) == "1044 0000:00:00.0 is now maintenance, draining: 1 request left."
    assert "draining: 1 request left" in operator.get(page(held())).content.decode()
    assert buttons(operator, held()) == ["enable", "drain", "quarantine"]
    found = operator.get(reverse(LIST), {"draining": "yes"})
    assert [*found.context["cl"].result_list] == [held()]
    assert "draining" in found.content.decode()


def test_what_is_refused_is_said_and_changes_nothing(operator: Client, fill: Fill) -> None:
    fill(3)
    with conductor.writing():
        Device.objects.update(state="maintenance")
    assert "retire" not in buttons(operator, held())
    answered = operator.post(decide(held()), {"choice": "retire", "sure": "yes"}, follow=True)
    assert "is held by request" in sentence(answered)
    answered = operator.post(decide(free()), {"choice": "disable", "reason": "x" * 501}, follow=True)
    assert sentence(answered) == "A reason is at most 500 characters of text."
    assert not Device.objects.exclude(state="maintenance").exists()
    assert operator.post(decide(free()), {"choice": "explode"}).status_code == 403
    assert operator.get(decide(free())).status_code == 405


def test_the_list_does_it_to_a_selection_after_asking(operator: Client, fill: Fill) -> None:
    fill(12)
    chosen = [held(), free()]
    with conductor.writing():
        Device.objects.update(state="maintenance")
    keys = [str(device.pk) for device in chosen]
    asked = operator.post(reverse(LIST), {"action": "retire", "_selected_action": keys, "index": "0"})
    text = asked.content.decode()
    assert "Retire: 2 devices?" in text
    sent = dict(re.findall(r'type="hidden" name="(action|select_across)" value="([^"]+)"', text))
    assert re.findall(r'name="_selected_action" value="(\d+)"', text) == keys
    done = operator.post(reverse(LIST), sent | {"_selected_action": keys, "sure": "yes", "reason": "old"})
    assert [outcome for _, outcome in done.context["counts"]] == [1, 1]
    assert "is held by request" in done.content.decode()
    assert [*Device.objects.filter(state="retired", state_reason="old")] == [free()]


def test_all_that_match_a_filter_are_moved_in_slices(
    operator: Client, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "SLICE", 25)
    fill(70)
    listed = f"{reverse(LIST)}?state__exact=inactive"
    sent = {"action": "enable", "select_across": "1", "_selected_action": [str(free().pk)]}
    assert "Enable: 63 devices?" in operator.post(listed, sent).content.decode()
    operator.post(listed, sent | {"sure": "yes"})
    assert Device.objects.filter(state="ready").count() == 70
    monkeypatch.setattr("accelerators.admin.decisions.MOST", 60)
    narrow = operator.post(reverse(LIST), sent | {"sure": "yes", "action": "disable"}, follow=True)
    assert "More than 60 devices are selected: narrow the list by filters first." in narrow.content.decode()
    assert Device.objects.filter(state="ready").count() == 70


def test_who_may_only_look_decides_nothing(client: Client, operator: Client, fill: Fill) -> None:
    fill(3)
    viewer = Client()
    user = User.objects.create(username="vera", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
    viewer.force_login(user)
    assert viewer.get(page(free())).status_code == 200
    assert buttons(viewer, free()) == []
    assert viewer.post(decide(free()), {"choice": "enable"}).status_code == 403
    assert "_selected_action" not in viewer.get(reverse(LIST)).content.decode()
    viewer.post(reverse(LIST), {"action": "enable", "_selected_action": [free().pk], "sure": "yes"})
    assert viewer.post(reverse("admin:accelerators_admissionrule_add"), RULE).status_code == 403
    assert viewer.get(reverse("admin:accelerators_admissionrule_changelist")).status_code == 200
    assert viewer.post(reverse("admin:accelerators_admissionrule_apply")).status_code == 403
    assert free().state == "inactive" and not AdmissionRule.objects.exists()
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.get(username="olga"))
    assert strict.post(decide(free()), {"choice": "enable"}).status_code == 403


RULE = {"name": "fakes", "order": "10", "action": "ready", "driver": "test_*", "enabled": "on"}


def test_rules_are_made_changed_applied_and_deleted(operator: Client) -> None:
    apply(a_host(), answer(*(card(n) for n in range(3))))
    rules = reverse("admin:accelerators_admissionrule_changelist")
    assert "what is found is inactive until somebody enables it" in operator.get(rules).content.decode()
    made = operator.post(reverse("admin:accelerators_admissionrule_add"), RULE)
    assert made.status_code == 302, made.context["adminform"].errors
    rule = AdmissionRule.objects.get()
    there = reverse("admin:accelerators_admissionrule_change", args=[rule.pk])
    assert "driver test_*" in operator.get(rules).content.decode()
    assert operator.post(there, RULE | {"order": "5"}).status_code == 302
    assert operator.post(there, RULE | {"name": "no good"}).status_code == 200
    applying = reverse("admin:accelerators_admissionrule_apply")
    assert "Move 3 devices" in operator.get(applying).content.decode()
    assert Device.objects.filter(state="inactive").count() == 3
    operator.post(applying)
    assert Device.objects.filter(state="ready", state_by="rule fakes").count() == 3
    assert (
        operator.post(reverse("admin:accelerators_admissionrule_delete", args=[rule.pk]), {"post": "yes"}).status_code
        == 302
    )
    told = Event.objects.filter(subject_type="rule").order_by("id").values_list("action", "source", "actor")
    assert [*told] == [(f"rule.{what}", "person", "olga") for what in ("created", "changed", "deleted")]
    assert Event.objects.get(action="rule.changed").changes == {"order": [10, 5]}
    assert not AdmissionRule.objects.exists() and AcceleratorRequest.objects.count() == 0
