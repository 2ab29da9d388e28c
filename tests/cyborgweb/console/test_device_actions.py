"""Test operators' decisions in the console: actions on a device, and admission rules."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from accelerators import conductor
from accelerators.models import AcceleratorRequest, AdmissionRule, Device, Event
from tests.cyborgweb.console.conftest import Fill
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db

LIST = "admin:accelerators_device_changelist"


def device_page(device: Device) -> str:
    return reverse("admin:accelerators_device_change", args=[device.pk])


def action_url(device: Device) -> str:
    return reverse("admin:accelerators_device_decide", args=[device.pk])


def list_action_buttons(client: Client, device: Device) -> list[str]:
    return re.findall(r'name="choice" value="([a-z-]+)"', client.get(device_page(device)).content.decode())


def get_message(response: object) -> str:
    """Return the only message on the page."""
    (said,) = re.findall(r'<p class="message[^"]*" role="(?:status|alert)"[^>]*>([^<]+)<', response.content.decode())  # type: ignore[attr-defined]
    return said


def get_free_device() -> Device:
    return Device.objects.get(address="0000:02:00.0", host__name="cmp0.example")


def get_held_device() -> Device:
    return Device.objects.get(address="0000:00:00.0", host__name="cmp0.example")


CONFIRMED = {"sure": "yes", "typed": "0000:00:00.0"}


def make_ready(*devices: Device) -> None:
    with conductor.writing():
        Device.objects.filter(pk__in=[device.pk for device in devices]).update(state="ready")


def test_the_page_of_a_device_offers_its_possible_actions_and_performs_them(operator: Client, fill: Fill) -> None:
    fill(3)
    assert list_action_buttons(operator, get_free_device()) == ["enable", "quarantine", "retire"]
    answered = operator.post(action_url(get_free_device()), {"choice": "enable", "reason": "burnt in"}, follow=True)
    assert answered.redirect_chain == [(device_page(get_free_device()), 302)]
    assert get_message(answered) == "1044 0000:02:00.0 is now ready."
    assert list_action_buttons(operator, get_free_device()) == ["drain", "disable", "quarantine", "drain-retire"]
    event = Event.objects.get(action="device.ready")
    assert (event.source, event.actor, event.reason) == ("person", "olga", "burnt in")
    assert "burnt in" in answered.content.decode()


@pytest.mark.slow
def test_a_drain_needs_the_typed_address_and_is_shown_on_the_page_and_in_the_list(operator: Client, fill: Fill) -> None:
    fill(3)
    make_ready(get_held_device())
    answered = operator.post(action_url(get_held_device()), {"choice": "drain-retire"})
    assert "Drain, then retire: 1044 0000:00:00.0?" in answered.content.decode()
    assert "request" in answered.content.decode() and "Type <code>0000:00:00.0</code>" in answered.content.decode()
    for typed in ("", "0000:01:00.0"):
        wrong = operator.post(action_url(get_held_device()), {"choice": "drain-retire", "sure": "yes", "typed": typed})
        assert "The text does not match. Nothing was done." in wrong.content.decode()
    assert get_held_device().state == "ready"
    answered = operator.post(action_url(get_held_device()), CONFIRMED | {"choice": "drain-retire"}, follow=True)
    assert get_message(answered) == "1044 0000:00:00.0 is now maintenance, draining: 1 request left."
    assert "draining: 1 request left" in operator.get(device_page(get_held_device())).content.decode()
    assert list_action_buttons(operator, get_held_device()) == ["enable", "drain", "quarantine"]
    found = operator.get(reverse(LIST), {"draining": "yes"})
    assert [*found.context["cl"].result_list] == [get_held_device()]
    assert "draining" in found.content.decode()


@pytest.mark.slow
def test_a_refused_action_shows_the_reason_and_changes_nothing(operator: Client, fill: Fill) -> None:
    fill(3)
    with conductor.writing():
        Device.objects.update(state="maintenance")
    assert "retire" not in list_action_buttons(operator, get_held_device())
    answered = operator.post(action_url(get_held_device()), CONFIRMED | {"choice": "retire"}, follow=True)
    assert "is held by request" in get_message(answered)
    answered = operator.post(action_url(get_free_device()), {"choice": "disable", "reason": "x" * 501}, follow=True)
    assert get_message(answered) == "A reason is at most 500 characters of text."
    assert not Device.objects.exclude(state="maintenance").exists()
    assert operator.post(action_url(get_free_device()), {"choice": "explode"}).status_code == 403
    assert operator.get(action_url(get_free_device())).status_code == 405


@pytest.mark.slow
def test_an_action_on_a_device_that_changed_since_the_page_was_shown_is_refused(operator: Client, fill: Fill) -> None:
    fill(3)
    shown = operator.get(device_page(get_free_device())).content.decode()
    (seen,) = re.findall(r'name="seen" value="([^"]+)"', shown)
    assert seen == "inactive"
    operator.post(
        action_url(get_free_device()), {"choice": "quarantine", "reason": "smells", "seen": seen}, follow=True
    )
    answered = operator.post(action_url(get_free_device()), {"choice": "enable", "seen": seen}, follow=True)
    assert "was inactive when this was decided; it is quarantined now, since" in get_message(answered)
    assert "by olga: smells. Look at it again." in get_message(answered)
    assert (
        answered.redirect_chain == [(device_page(get_free_device()), 302)] and get_free_device().state == "quarantined"
    )
    answered = operator.post(action_url(get_free_device()), {"choice": "quarantine", "seen": seen}, follow=True)
    assert get_message(answered) == "1044 0000:02:00.0 is already quarantined."


@pytest.mark.slow
def test_viewers_see_devices_and_rules_but_cannot_change_them(client: Client, operator: Client, fill: Fill) -> None:
    fill(3)
    viewer = Client()
    user = User.objects.create(username="vera", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
    viewer.force_login(user)
    assert viewer.get(device_page(get_free_device())).status_code == 200
    assert list_action_buttons(viewer, get_free_device()) == []
    assert viewer.post(action_url(get_free_device()), {"choice": "enable"}).status_code == 403
    assert "_selected_action" not in viewer.get(reverse(LIST)).content.decode()
    viewer.post(reverse(LIST), {"action": "enable", "_selected_action": [get_free_device().pk], "sure": "yes"})
    assert viewer.post(reverse("admin:accelerators_admissionrule_add"), RULE).status_code == 403
    assert viewer.get(reverse("admin:accelerators_admissionrule_changelist")).status_code == 200
    assert viewer.post(reverse("admin:accelerators_admissionrule_apply")).status_code == 403
    assert get_free_device().state == "inactive" and not AdmissionRule.objects.exists()
    strict = Client(enforce_csrf_checks=True)
    strict.force_login(User.objects.get(username="olga"))
    assert strict.post(action_url(get_free_device()), {"choice": "enable"}).status_code == 403


RULE = {"name": "fakes", "order": "10", "action": "ready", "driver": "test_*", "enabled": "on"}


def test_rules_are_applied_to_several_hosts_only_after_the_number_was_typed(operator: Client) -> None:
    for name in ("cmp1", "cmp2"):
        apply_report(get_or_create_host(name), make_driver_report(make_card(1)))
    operator.post(reverse("admin:accelerators_admissionrule_add"), RULE)
    applying = reverse("admin:accelerators_admissionrule_apply")
    draft_url = operator.post(applying).headers["Location"]
    assert "becomes ready by rule fakes" in operator.get(draft_url).content.decode()
    for typed in ({}, {"typed": "1"}):
        refused = operator.post(draft_url, {"do": "confirm"} | typed, follow=True)
        assert "The devices are on 2 hosts. To confirm, type 2." in refused.content.decode()
    assert Device.objects.filter(state="inactive").count() == 2
    operator.post(draft_url, {"do": "confirm", "typed": "2"})
    assert Device.objects.filter(state="ready").count() == 2


@pytest.mark.slow
def test_admission_rules_are_created_changed_applied_and_deleted_in_the_console(operator: Client) -> None:
    apply_report(get_or_create_host(), make_driver_report(*(make_card(n) for n in range(3))))
    rules = reverse("admin:accelerators_admissionrule_changelist")
    assert "new devices are inactive until somebody enables them" in operator.get(rules).content.decode()
    made = operator.post(reverse("admin:accelerators_admissionrule_add"), RULE)
    assert made.status_code == 302, made.context["adminform"].errors
    rule = AdmissionRule.objects.get()
    rule_url = reverse("admin:accelerators_admissionrule_change", args=[rule.pk])
    assert "driver test_*" in operator.get(rules).content.decode()
    assert operator.post(rule_url, RULE | {"order": "5", "generation": "1"}).status_code == 302
    assert operator.post(rule_url, RULE | {"name": "no good"}).status_code == 200
    applying = reverse("admin:accelerators_admissionrule_apply")
    assert operator.get(applying).status_code == 405
    draft_url = operator.post(applying).headers["Location"]
    assert "Apply the admission rules: 3 devices" in operator.get(draft_url).content.decode()
    assert Device.objects.filter(state="inactive").count() == 3
    operator.post(draft_url, {"do": "confirm"})
    applied_again = operator.post(applying, follow=True).content.decode()
    assert "The enabled rules would change no device that is inactive now." in applied_again
    assert Device.objects.filter(state="ready", state_by="rule fakes").count() == 3
    assert (
        operator.post(
            reverse("admin:accelerators_admissionrule_delete", args=[rule.pk]), {"post": "yes", "generation": "2"}
        ).status_code
        == 302
    )
    rule_events = Event.objects.filter(subject_type="rule").order_by("id").values_list("action", "source", "actor")
    assert [*rule_events] == [(f"rule.{what}", "person", "olga") for what in ("created", "changed", "deleted")]
    assert Event.objects.get(action="rule.changed").changes == {"order": [10, 5]}
    assert not AdmissionRule.objects.exists() and AcceleratorRequest.objects.count() == 0
