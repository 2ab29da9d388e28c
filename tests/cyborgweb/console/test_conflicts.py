"""Test that a change in the console that is based on an older version shows both versions, and can be applied then."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client, RequestFactory
from django.urls import reverse

from accelerators import conductor
from accelerators.devices import admission_rules
from accelerators.domain.caller import Caller
from accelerators.models import AdmissionRule, Command, DeviceProfile, DriverWish, HostDriver, Rollout
from accelerators.requests import profiles
from cyborgweb.models.notify import Subscription
from cyborgweb.notify import subscriptions
from drivers.generic.driver import GenericDriver
from drivers.inventory import DriverReport
from tests.accelerators.workflows.test_rollouts import INSTALL, UPDATE, answer_as_agent, run_rollout, start_rollout
from tests.support.reports import apply_report, get_or_create_host

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("agents_need_not_be_up")]
THEO = Caller("theo", "t", frozenset({"admin"}), "p1")
HIDDEN_INPUT = re.compile(r'<input type="hidden" name="([^"]+)" value="([^"]*)">')
ROW = re.compile(
    r'<tr><th scope="row">(.*?)</th><td><pre>(.*?)</pre></td><td><pre>(.*?)</pre></td><td>(.*?)</td></tr>', re.S
)


def get_generation(client: Client, address: str) -> str:
    """Return the generation with which the forms of a page are shown."""
    (generation,) = {*re.findall(r'name="generation" value="(\d+)"', client.get(address).content.decode())}
    return str(generation)


def read_conflict(response: HttpResponse) -> tuple[dict[str, tuple[str, str]], dict[str, Any]]:
    """Return the settings that differ, with both values, and the fields that the button sends."""
    assert response.status_code == 409, response.content
    page = response.content.decode()
    rows = {name: (present, mine) for name, present, mine, mark in ROW.findall(page) if "differs" in mark}
    fields: dict[str, Any] = {}
    for name, value in HIDDEN_INPUT.findall(page):
        fields.setdefault(name, []).append(html.unescape(value))
    return {html.unescape(name): tuple(map(html.unescape, pair)) for name, pair in rows.items()}, fields


@pytest.mark.slow
def test_a_changed_rule_shows_both_versions_and_mine_can_be_applied_after_all(client: Client) -> None:
    client.force_login(User.objects.create_superuser("olga"))
    rule = admission_rules.create_rule({"name": "gpus", "action": "ready", "vendor": "10de"}, THEO)
    address = reverse("admin:accelerators_admissionrule_change", args=[rule.pk])
    form = {"name": "gpus", "order": "7", "action": "ready", "vendor": "10de", "enabled": "on"}
    seen = get_generation(client, address)
    admission_rules.edit_rule(rule.uuid, {"action": "quarantined"}, THEO)

    response = client.post(address, form | {"generation": seen})
    differing, fields = read_conflict(response)
    assert differing == {"Order": ("100", "7"), "Action": ("quarantined", "ready")}
    assert "theo made the last change" in response.content.decode()
    rule.refresh_from_db()
    assert (rule.order, rule.action, rule.generation) == (100, "quarantined", 2), "nothing was changed"

    admission_rules.edit_rule(rule.uuid, {"order": 8}, THEO)
    differing, fields = read_conflict(client.post(address, fields))
    assert differing["Order"] == ("8", "7"), "another change meanwhile shows the page again"
    assert client.post(address, fields).status_code == 302
    rule.refresh_from_db()
    assert (rule.order, rule.action, rule.generation) == (7, "ready", 4)
    assert get_generation(client, address) == "4"


def test_a_form_with_a_mistake_keeps_the_generation_with_which_it_was_shown(client: Client) -> None:
    client.force_login(User.objects.create_superuser("olga"))
    rule = admission_rules.create_rule({"name": "gpus", "action": "ready"}, THEO)
    address = reverse("admin:accelerators_admissionrule_change", args=[rule.pk])
    admission_rules.edit_rule(rule.uuid, {"order": 8}, THEO)
    page = client.post(address, {"name": "a b", "order": "7", "action": "ready", "generation": "1"}).content.decode()
    assert 'name="generation" value="1"' in page
    assert AdmissionRule.objects.get().order == 8


def test_a_form_without_a_generation_changes_nothing_and_says_why(client: Client) -> None:
    client.force_login(User.objects.create_superuser("olga"))
    rule = admission_rules.create_rule({"name": "gpus", "action": "ready"}, THEO)
    for page, fields in (
        ("change", {"name": "gpus", "order": "7", "action": "ready"}),
        ("delete", {"post": "yes"}),
    ):
        address = reverse(f"admin:accelerators_admissionrule_{page}", args=[rule.pk])
        answer = client.post(address, fields, follow=True).content.decode()
        assert "does not say which version it shows. Nothing was changed" in answer
    assert AdmissionRule.objects.get().order == 100


def test_no_list_deletes_several_rows_at_once(rf: RequestFactory) -> None:
    request = rf.get("/")
    request.user = User.objects.create_superuser("olga")
    offered = {name for model_admin in admin.site._registry.values() for name in model_admin.get_actions(request)}
    assert "revoke" in offered and "delete_selected" not in offered, "such an action would carry no generations"


@pytest.mark.slow
def test_a_changed_subscription_shows_both_versions(client: Client) -> None:
    olga = User.objects.create_superuser("olga")
    client.force_login(olga)
    form = {"name": "mine", "kinds": ["request.bound"], "way": "inbox", "scope": "project"}
    assert client.post(reverse("admin:cyborgweb_subscription_add"), form).status_code == 302
    row = Subscription.objects.get()
    address = reverse("admin:cyborgweb_subscription_change", args=[row.pk])
    seen = get_generation(client, address)
    subscriptions.edit(row.pk, {"kinds": ["device.failed"]}, Caller("olga", row.owner, frozenset(), row.project_id))
    change = {"name": "other", "kinds": ["request.bound"], "scope": "project", "standing": "active"}
    differing, fields = read_conflict(client.post(address, change | {"generation": seen}))
    assert differing == {"Name": ("mine", "other"), "Kinds": ("device.failed", "request.bound")}
    assert client.post(address, fields).status_code == 302
    row.refresh_from_db()
    assert (row.name, row.kinds, row.generation) == ("other", ["request.bound"], 3)


@pytest.mark.slow
def test_a_changed_driver_shows_both_versions_and_mine_can_be_applied_after_all(operator: Client) -> None:
    host = get_or_create_host("cmp0")
    apply_report(host, DriverReport("pci_driver", state="absent"))

    def change_as_somebody_else(op: Any, settings: Any) -> None:
        start_rollout(op, [host], "pci_driver", settings=settings)
        answer_as_agent(Command.objects.latest("id"))
        run_rollout(Rollout.objects.latest("id"))

    change_as_somebody_else(INSTALL, {"mtu": 1500})
    address = reverse("admin:accelerators_hostdriver_change", args=[HostDriver.objects.get(driver="pci_driver").pk])
    seen = get_generation(operator, address)
    change_as_somebody_else(UPDATE, {"mtu": 9000})

    mine = {"do": "settings", "where": "this", "settings": '{"mtu": 1}', "generation": seen}
    differing, fields = read_conflict(operator.post(address, mine))
    assert differing == {"Settings": ('{\n  "mtu": 9000\n}', '{\n  "mtu": 1\n}')}
    assert DriverWish.objects.get().settings == {"mtu": 9000}
    disabling, _ = read_conflict(operator.post(address, {"do": "disable", "where": "this", "generation": seen}))
    assert disabling == {"State": ("enabled", "disabled")}
    assert operator.post(address, fields).status_code == 302
    assert DriverWish.objects.get().settings == {"mtu": 1}


@pytest.mark.slow
def test_backends_are_added_changed_disabled_and_removed_on_the_page_of_their_driver(operator: Client) -> None:
    host = get_or_create_host("cmp0")
    apply_report(host, DriverReport("generic_driver", state="absent"))
    nics = {"kind": "pci", "match": [{"class": "02*"}]}
    plain = {"kind": "pci", "match": [{"vendor": "10de"}]}
    gpus = plain | {"limits": {"max_devices": 4}}

    def end_rollout() -> None:
        answer_as_agent(Command.objects.latest("id"), version=GenericDriver.version)
        run_rollout(Rollout.objects.latest("id"))

    start_rollout(INSTALL, [host], "generic_driver", settings={"backends": {"gpus": gpus}})
    end_rollout()
    address = reverse("admin:accelerators_hostdriver_change", args=[HostDriver.objects.get().pk])

    def press(button: str, backend: str, **fields: str) -> dict[str, Any]:
        generation = re.findall(r'name="generation" value="(\d+)"', operator.get(address).content.decode())[0]
        fields |= {"do": button, "backend": backend, "generation": generation}
        assert operator.post(address, fields).status_code == 302
        end_rollout()
        return dict(DriverWish.objects.get().settings["backends"])

    assert press("backend-add", "nics", settings=json.dumps(nics)) == {"gpus": gpus, "nics": nics}
    assert press("backend-disable", "gpus") == {"gpus": gpus | {"enabled": False}, "nics": nics}
    shown = operator.get(address).content.decode()
    assert "Enable gpus" in shown and "Disable nics" in shown
    assert press("backend-save", "gpus", settings=json.dumps(plain)) == {"gpus": plain, "nics": nics}
    differing, _ = read_conflict(operator.post(address, {"do": "backend-remove", "backend": "nics", "generation": "2"}))
    assert differing == {"Backend nics": (json.dumps(nics, indent=2), "–")}
    assert press("backend-remove", "nics") == {"gpus": plain}
    for button, field, settings, says in (
        ("backend-add", "new-settings", '{"kind": "pci"}', "exists already"),
        ("backend-save", "backend-1", "", "Enter the settings"),
        ("backend-save", "backend-1", '{"labels": {}}', "Say the kind"),
        ("backend-save", "backend-1", '{"kind": "pci", "a/b": 1}', "must not contain /"),
        (
            "backend-save",
            "backend-1",
            '{"kind": "pci", "colour": "red"}',
            "backend gpus of generic_driver is not usable",
        ),
        ("settings", "settings", '{"backends": {"gpus": {"kind": "gpu"}}}', "kind is one of pci, mdev"),
    ):
        (seen, *_) = re.findall(r'name="generation" value="(\d+)"', operator.get(address).content.decode())
        fields = {"do": button, "backend": "gpus", "settings": settings, "generation": seen}
        page = operator.post(address, fields).content.decode()
        texts = dict(re.findall(r'<textarea id="(.*?)" name="settings"[^>]*>(.*?)</textarea>', page, re.S))
        assert says in page and [name for name in texts if html.unescape(texts[name]) == settings] == [field]
    assert DriverWish.objects.get().settings == {"backends": {"gpus": plain}}
    with conductor.writing():
        DriverWish.objects.all().delete()
    gone = operator.post(address, {"do": "backend-disable", "backend": "gpus", "generation": "2"})
    assert gone.status_code == 404


@pytest.mark.slow
def test_a_rule_profile_or_subscription_that_was_changed_since_the_confirmation_was_shown_is_not_deleted(
    client: Client,
) -> None:
    client.force_login(User.objects.create_superuser("olga"))
    form = {"name": "mine", "kinds": ["request.bound"], "way": "inbox", "scope": "project"}
    assert client.post(reverse("admin:cyborgweb_subscription_add"), form).status_code == 302
    mine = Subscription.objects.get()
    rule = admission_rules.create_rule({"name": "gpus", "action": "ready"}, THEO)
    profiles.create_profile("one", [{"resources:PGPU": "1"}], None, None, THEO)
    profile = DeviceProfile.objects.get()
    olga = Caller("olga", mine.owner, frozenset(), mine.project_id)
    rows: list[tuple[str, Any, Callable[[str], object]]] = [
        ("cyborgweb_subscription", mine, lambda name: subscriptions.edit(mine.pk, {"name": name}, olga)),
        ("accelerators_admissionrule", rule, lambda name: admission_rules.edit_rule(rule.uuid, {"name": name}, THEO)),
        ("accelerators_deviceprofile", profile, lambda name: profiles.edit_profile(profile.uuid, {"name": name}, THEO)),
    ]
    for page, row, rename in rows:
        address = reverse(f"admin:{page}_delete", args=[row.pk])

        def confirm(address: str = address) -> tuple[str, dict[str, Any]]:
            """Open the page that asks for a confirmation; return where its form goes, and what it sends."""
            shown = client.get(address, follow=True)
            path = shown.redirect_chain[-1][0] if shown.redirect_chain else address
            fields = dict(HIDDEN_INPUT.findall(shown.content.decode()))
            return path, {"post": "yes"} | {name: fields[name] for name in fields if name == "generation"}

        outdated = confirm()
        rename("renamed")
        refused = client.post(*outdated, follow=True)
        assert refused.redirect_chain[-1][0] == reverse(f"admin:{page}_change", args=[row.pk]), page
        assert type(row).objects.filter(pk=row.pk).exists(), page
        assert client.post(*confirm()).status_code == 302
        assert not type(row).objects.filter(pk=row.pk).exists(), page


def test_the_deletion_of_a_rule_that_is_gone_is_answered_not_found(client: Client) -> None:
    client.force_login(User.objects.create_superuser("olga"))
    rule = admission_rules.create_rule({"name": "gpus", "action": "ready"}, THEO)
    address = reverse("admin:accelerators_admissionrule_delete", args=[rule.pk])
    admission_rules.delete_rule(rule.uuid, THEO)
    assert client.post(f"{address}?generation=1", {"post": "yes"}).status_code == 404
