"""Test that every empty list says what fills it, links there, and tells people without the right who may do it."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from accelerators.models import Bulk
from cyborgweb.auth import roles
from cyborgweb.models import Maintenance
from placement_sync.models import Writer

pytestmark = pytest.mark.django_db
LISTS = [one for one in admin.site._registry if one not in (Maintenance, Writer)]
"""The models with a list; the other two have one row and no list."""
ALWAYS_FILLED = {"user", "group"}
WITHOUT_A_PLACE = {"apitoken"}
"""Lists that only a command fills."""


def open_list(client: Client, model: Any) -> Any:
    """Return the page of the model's list."""
    return client.get(reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"))


def log_in(client: Client, group: str) -> None:
    """Log a new member of the group in."""
    person = User.objects.create(username=group, is_staff=True)
    person.groups.add(roles.get_group(group))
    client.force_login(person)


@pytest.mark.parametrize("model", LISTS, ids=lambda one: one._meta.model_name)
def test_an_empty_list_says_what_fills_it_and_its_links_open(operator: Client, model: Any) -> None:
    page = open_list(operator, model)
    if model._meta.model_name in ALWAYS_FILLED:
        return
    text = page.content.decode()
    hint = page.context["cl"].empty_list_hint()
    assert "Nothing here yet" in text and hint.sentence != "There are none yet."
    assert hint.denial == ""
    assert hint.links or (model._meta.model_name in WITHOUT_A_PLACE and hint.command)
    for shown, address in hint.links:
        assert f'href="{address}">{shown}<' in text
        assert operator.get(address.partition("#")[0]).status_code == 200, address


@pytest.mark.parametrize(
    ("path", "group", "expected"),
    [
        (
            "admissionrule",
            roles.OPERATORS.group,
            "You need the role admin or membership in the group role:administrator",
        ),
        ("bulk", roles.VIEWERS.group, "You need the role admin or membership in the group role:administrator"),
        ("rollout", roles.VIEWERS.group, "the group role:operator"),
        ("attachment", roles.AUDITORS.group, "the group role:operator"),
        ("rollout", roles.OPERATORS.group, ""),
    ],
)
def test_an_empty_list_tells_people_without_the_right_who_may_fill_it(
    client: Client, path: str, group: str, expected: str
) -> None:
    log_in(client, group)
    page = client.get(f"/admin/accelerators/{path}/")
    denial = page.context["cl"].empty_list_hint().denial
    assert expected in denial and bool(denial) is bool(expected)
    assert denial in page.content.decode()


def test_an_empty_list_offers_no_page_that_the_user_may_not_open(client: Client) -> None:
    person = User.objects.create(username="ann", is_staff=True)
    person.user_permissions.add(Permission.objects.get(codename="view_bulk"))
    client.force_login(person)
    assert open_list(client, Bulk).context["cl"].empty_list_hint().links == ()


def test_the_group_that_an_explanation_names_has_the_permission() -> None:
    groups = {role.group: roles.get_group(role.group) for role in roles.ROLES}
    given = {
        name: {f"{app}.{code}" for app, code in group.permissions.values_list("content_type__app_label", "codename")}
        for name, group in groups.items()
    }
    for app, code in Permission.objects.values_list("content_type__app_label", "codename"):
        named = roles.find_role_with_permission(f"{app}.{code}")
        having = [role for role in reversed(roles.ROLES) if f"{app}.{code}" in given[role.group]]
        assert named == having[0], f"{app}.{code}"
