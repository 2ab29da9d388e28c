"""Test that every refusal of the console names a role that would be sufficient, or says that nobody can do it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client, RequestFactory
from django.urls import reverse

from accelerators.domain.states import EventSource
from accelerators.models import AdmissionRule, Attachment, Device, Host
from accelerators.ui import permissions
from accelerators.ui.explained_admin import ExplainedModelAdmin
from cyborgweb.auth import read_only, roles
from cyborgweb.models import Subscription
from cyborgweb.notify import subscriptions
from cyborgweb.settings.keys import get_keys
from tests.support.reports import create_heard_host

pytestmark = pytest.mark.django_db
PEOPLE = {
    "no group": "",
    "tenant": "project:p1",
    **{role.group: role.group for role in roles.ROLES},
}
"""Name → group of a person who may enter the console."""
NAMED_GROUP = re.compile(r"membership in the group (role:[a-z]+)")


@pytest.fixture
def requests() -> dict[str, Any]:
    """Return a request of each person of PEOPLE and of a superuser, by name."""
    made: dict[str, Any] = {}
    for name, group in [*PEOPLE.items(), ("superuser", "")]:
        user = User.objects.create(username=name, is_staff=True, is_superuser=name == "superuser")
        if group:
            user.groups.add(roles.get_group(group))
        made[name] = RequestFactory().get("/admin/")
        made[name].user, made[name].session = user, {}
    return made


def log_in(client: Client, group: str) -> None:
    """Log a new member of the group in."""
    person = User.objects.create(username="ann", is_staff=True)
    person.groups.add(roles.get_group(group))
    client.force_login(person)


def list_verbs(listing: ExplainedModelAdmin) -> set[str]:
    """Return all verbs of the list: Django's four, and the permissions of its actions."""
    functions = [function for function, *_ in listing._get_base_actions()]
    return {"view", "add", "change", "delete"}.union(*(getattr(one, "allowed_permissions", ()) for one in functions))


def test_every_page_of_the_console_explains_its_refusals() -> None:
    assert [one for one in admin.site._registry.values() if not isinstance(one, ExplainedModelAdmin)] == []


def test_each_explanation_names_a_role_that_is_sufficient_or_says_that_nobody_can(requests: dict[str, Any]) -> None:
    explained = 0
    for model, listing in admin.site._registry.items():
        assert isinstance(listing, ExplainedModelAdmin)
        for verb in list_verbs(listing):
            may = {name: getattr(listing, f"has_{verb}_permission")(request) for name, request in requests.items()}
            for name, request in requests.items():
                sentence = listing.explain_refusal(request, verb)
                assert bool(sentence) is not may[name], (model, verb, name, sentence)
                if not sentence:
                    continue
                explained += 1
                if sentence.startswith("Nobody can"):
                    assert not any(may.values()), (model, verb, sentence)
                else:
                    named = NAMED_GROUP.search(sentence)
                    assert named and may[named[1]], (model, verb, name, sentence)
    assert explained > 150


def test_a_list_explains_each_action_and_the_page_that_are_not_offered(requests: dict[str, Any]) -> None:
    listing: Any = admin.site.get_model_admin(Device)
    assert listing.list_refused_actions(requests["superuser"]) == []
    (entry,) = listing.list_refused_actions(requests[roles.VIEWERS.group])
    assert "uarantine" in entry[0] and "membership in the group role:administrator" in entry[1]
    superuser, nobody = requests["superuser"], requests["no group"]
    for model, one in admin.site._registry.items():
        assert isinstance(one, ExplainedModelAdmin)
        refused = set(one.get_actions(superuser)) - set(one.get_actions(nobody))
        may_not_add = one.has_add_permission(superuser) and not one.has_add_permission(nobody)
        assert bool(one.list_refused_actions(nobody)) is bool(refused or may_not_add), model


@pytest.mark.parametrize(
    ("model", "label"), [(Attachment, "Attach to a running instance"), (AdmissionRule, "Apply the rules to devices")]
)
def test_a_list_explains_its_other_buttons(requests: dict[str, Any], model: Any, label: str) -> None:
    listing: Any = admin.site.get_model_admin(model)
    (entry,) = listing.list_refused_actions(requests[roles.VIEWERS.group])
    assert label in entry[0] and "You need the role" in entry[1]
    assert listing.list_refused_actions(requests["superuser"]) == []


def test_with_keystone_no_group_is_said_to_give_a_role(
    requests: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    request = requests[roles.VIEWERS.group]
    request.session[roles.SESSION_KEY] = {"name": "ann", "id": "u1", "roles": ["member"], "project": "p1"}
    assert "or membership in the group" in permissions.explain_denial(request, permissions.RESCAN)
    keys = replace(get_keys(), auth="keystone", console_viewer_roles=())
    monkeypatch.setattr(roles, "get_keys", lambda: keys)
    assert permissions.explain_denial(request, permissions.RESCAN) == (
        "You need the role accelerator_operator. Your roles: member. An administrator of Keystone can give it to you;"
        " then log in again."
    )
    sentence = permissions.explain_denial(requests["tenant"], permissions.VIEW_DEVICES)
    assert "group role:viewer" in sentence and "leads to this group" not in sentence


def test_an_administrator_sees_why_the_subscription_of_another_person_cannot_be_changed(client: Client) -> None:
    owner = User.objects.create(username="olga", is_staff=True)
    wanted = {"name": "hers", "kinds": ["device.found"], "way": "inbox", "project_id": roles.LOCAL_PROJECT}
    row = Subscription.objects.create(**wanted, person=str(owner.pk), user=owner)
    log_in(client, roles.ADMINISTRATORS.group)
    page = client.get(reverse("admin:cyborgweb_subscription_change", args=[row.pk])).content.decode()
    assert subscriptions.OTHER_PERSONS in page
    refused = client.post(reverse("admin:cyborgweb_subscription_do", args=[row.pk, "test"]))
    assert refused.status_code == 403 and subscriptions.OTHER_PERSONS in refused.content.decode()


@pytest.mark.parametrize(
    ("group", "name", "expected"),
    [
        ("role:viewer", "auth_user_changelist", "membership in the group role:auditor"),
        ("role:viewer", "auth_user_add", "membership in the group role:administrator"),
        ("project:p1", "accelerators_device_changelist", "membership in the group role:viewer"),
        ("project:p1", "usage", "membership in the group role:viewer"),
        ("role:operator", "accelerators_admissionrule_add", "membership in the group role:administrator"),
        ("role:administrator", "accelerators_device_add", "Nobody can add devices in the console."),
        ("role:administrator", "cyborgweb_apitoken_add", "Nobody can add API tokens in the console."),
        ("project:p1", "accelerators_device_export", "membership in the group role:viewer"),
    ],
)
def test_a_refused_page_names_the_role_that_would_open_it(client: Client, group: str, name: str, expected: str) -> None:
    log_in(client, group)
    arguments = ["csv"] if name.endswith("export") else []
    answer = client.get(reverse(name if name == "usage" else f"admin:{name}", args=arguments))
    assert answer.status_code == 403
    assert expected in answer.context["sentence"] and expected in answer.content.decode()


def test_a_page_that_may_be_seen_says_why_it_may_not_be_changed(client: Client) -> None:
    log_in(client, roles.VIEWERS.group)
    page = client.get(reverse("admin:placement_sync_writer_change", args=[1])).content.decode()
    assert "Why can’t I change anything here?" in page and "membership in the group role:administrator" in page


def test_the_page_of_a_host_says_who_may_order_commands_and_that_they_need_an_agent(client: Client) -> None:
    log_in(client, roles.OPERATORS.group)
    host = create_heard_host("cmp1", 1)
    page = client.get(reverse("admin:accelerators_host_change", args=[host.pk])).content.decode()
    assert "Fetch its log, ask for the raw report" in page and "group role:administrator" in page
    host.agent.delete()
    page = client.get(reverse("admin:accelerators_host_change", args=[host.pk])).content.decode()
    assert "No command can be ordered, because no agent has joined for this host." in page


def test_while_everything_is_read_only_views_stay_open_and_refused_changes_say_so(
    requests: dict[str, Any], client: Client
) -> None:
    hosts: Any = admin.site.get_model_admin(Host)
    devices: Any = admin.site.get_model_admin(Device)
    caller = roles.get_caller(requests["superuser"])
    assert caller
    read_only.switch_read_only(True, caller, "a backup", EventSource.PERSON)
    read_only._drop_cached(None)  # nothing is notified before the test's transaction commits
    assert "role:viewer" in hosts.explain_refusal(requests["tenant"], "view")
    assert hosts.explain_refusal(requests["superuser"], "view") == ""
    assert "read only" in devices.explain_refusal(requests["superuser"], "decide").lower()
    read_only.switch_read_only(False, caller, "", EventSource.PERSON)
    read_only._drop_cached(None)
