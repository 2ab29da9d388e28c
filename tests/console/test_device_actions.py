"""What an operator decides at the console: buttons of a device's page, actions of the list, admission rules."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from accelerators import conductor
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
    (said,) = re.findall(r'<p class="message[^"]*" role="status">([^<]+)<', answered.content.decode())  # type: ignore[attr-defined]
    return said


def free() -> Device:
    return Device.objects.get(address="0000:02:00.0", host__name="cmp0.example")


def held() -> Device:
    return Device.objects.get(address="0000:00:00.0", host__name="cmp0.example")


SURE = {"sure": "yes", "typed": "0000:00:00.0"}


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
    assert "request" in answered.content.decode() and "Type <code>0000:00:00.0</code>" in answered.content.decode()
    for typed in ("", "0000:01:00.0"):
        wrong = operator.post(decide(held()), {"choice": "drain-retire", "sure": "yes", "typed": typed})
        assert "The text does not match. Nothing was done." in wrong.content.decode()
    assert held().state == "ready"
    answered = operator.post(decide(held()), SURE | {"choice": "drain-retire"}, follow=True)
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
    answered = operator.post(decide(held()), SURE | {"choice": "retire"}, follow=True)
    assert "is held by request" in sentence(answered)
    answered = operator.post(decide(free()), {"choice": "disable", "reason": "x" * 501}, follow=True)
    assert sentence(answered) == "A reason is at most 500 characters of text."
    assert not Device.objects.exclude(state="maintenance").exists()
    assert operator.post(decide(free()), {"choice": "explode"}).status_code == 403
    assert operator.get(decide(free())).status_code == 405


def test_a_device_that_changed_since_the_page_was_shown_is_shown_anew(operator: Client, fill: Fill) -> None:
    fill(3)
    shown = operator.get(page(free())).content.decode()
    (seen,) = re.findall(r'name="seen" value="([^"]+)"', shown)
    assert seen == "inactive"
    operator.post(decide(free()), {"choice": "quarantine", "reason": "smells", "seen": seen}, follow=True)
    answered = operator.post(decide(free()), {"choice": "enable", "seen": seen}, follow=True)
    assert "was inactive when this was decided; it is quarantined now, since" in sentence(answered)
    assert "by olga: smells. Look at it again." in sentence(answered)
    assert answered.redirect_chain == [(page(free()), 302)] and free().state == "quarantined"
    answered = operator.post(decide(free()), {"choice": "quarantine", "seen": seen}, follow=True)
    assert sentence(answered) == "1044 0000:02:00.0 is already quarantined."


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
    assert "new devices are inactive until somebody enables them" in operator.get(rules).content.decode()
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
