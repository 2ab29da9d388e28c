"""Test what the console shows to each role where the role may not do something: every refused page, missing button and
missing link has a reason that names a role that would be sufficient, or the state, and every disabled button has a
description for screen readers.

The pages are found in the URL configuration and the admin registry, and the buttons in the pages of all roles, so a new
page or button without a reason fails here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlsplit

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.db import transaction
from django.test import Client
from django.urls import reverse

from cyborgweb.auth import roles
from cyborgweb.auth.policy import IMPLIED_ROLES
from cyborgweb.settings.keys import get_keys
from tests.cyborgweb.auth.test_rights import World, find_buttons
from tests.cyborgweb.console.conftest import Fill, fill_other_lists
from tests.support import addresses

pytestmark = [pytest.mark.django_db, pytest.mark.slow]

PROJECT = "p1"
DETAILS = ("change", "history", "changelist")
"""Ends of the names of pages that show something and change nothing."""


@dataclass(frozen=True)
class Role:
    """A role of the console: its group, and the roles of its session if the login was with Keystone."""

    group: str
    keystone_roles: frozenset[str] = frozenset()

    @property
    def session_roles(self) -> frozenset[str]:
        """Return the roles for the APIs."""
        known = {one.group: one.keystone_roles for one in roles.ROLES}
        return self.keystone_roles or known[self.group]


ROLES = {
    "administrator": Role(roles.ADMINISTRATORS.group),
    "operator": Role(roles.OPERATORS.group),
    "auditor": Role(roles.AUDITORS.group),
    "viewer": Role(roles.VIEWERS.group),
    "project manager": Role(f"project:{PROJECT}", IMPLIED_ROLES["manager"]),
    "member": Role(f"project:{PROJECT}", IMPLIED_ROLES["member"]),
}
"""The roles. The last two log in with Keystone, where `CYBORG_CONSOLE_TENANT_ROLES` names their roles."""


class PageReader(HTMLParser):
    """Reads a page: its text, its buttons that send forms, its links, and its disabled buttons."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.links: set[str] = set()
        self.buttons: set[tuple[str, str]] = set()
        """The buttons of forms that are sent with POST: the path that the form is sent to, and name=value."""
        self.disabled: list[dict[str, str]] = []
        """The attributes of each visible button that is disabled."""
        self.text_by_id: dict[str, str] = {}
        """The text that follows the start of each element with an id."""
        self._last_id = ""
        self._action = ""
        self._is_action = False
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._last_id = given.get("id", "")
        is_button = tag in ("button", "input") and "hidden" not in given
        if is_button and ("disabled" in given or given.get("aria-disabled") == "true"):
            self.disabled.append(given)
        if tag == "form":
            self._action = urlsplit(given.get("action", "")).path or "." if given.get("method") == "post" else ""
        elif tag == "a":
            self.links.add(urlsplit(given.get("href", "")).path)
        elif tag == "button" or (tag == "input" and given.get("type") == "submit"):
            if self._action and "disabled" not in given and "hidden" not in given:
                self.buttons.add((self._action, f"{given.get('name', '')}={given.get('value', '')}"))
        elif tag == "select":
            self._is_action = given.get("name") == "action"
        elif tag == "option" and self._is_action:
            self.buttons.add((self._action, f"option={given.get('value', '')}"))

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._action = ""
        elif tag == "select":
            self._is_action = False

    def handle_data(self, data: str) -> None:
        self.words.append(data)
        if self._last_id:
            self.text_by_id.setdefault(self._last_id, data.strip())

    def find_unexplained_buttons(self) -> list[dict[str, str]]:
        """Return the disabled buttons and inputs that have no description for screen readers: `aria-describedby` with
        the id of an element with text."""
        return [one for one in self.disabled if not self.text_by_id.get(one.get("aria-describedby", ""))]

    @property
    def text(self) -> str:
        """Return the text of the page, with single spaces."""
        return " ".join(" ".join(self.words).split())


def find_named_roles(text: str) -> set[str]:
    """Return the names of the roles that the reasons in a text call sufficient."""
    groups = set(re.findall(r"membership in the group (role:[a-z]+)", text))
    api_roles = set(re.findall(r"You need the role (\w+)", text))
    return {name for name, one in ROLES.items() if one.group in groups or api_roles & one.session_roles}


@dataclass
class People:
    """Clients of the roles. The pages of each are asked for with the configuration with which it logs in."""

    clients: dict[str, Client] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, one in ROLES.items():
            user = User.objects.create(username=name, is_staff=True)
            user.groups.add(roles.get_group(one.group))
            self.clients[name] = client = Client()
            client.force_login(user)
            if one.keystone_roles:
                session = client.session
                session[roles.SESSION_KEY] = {
                    "name": name,
                    "id": str(user.pk),
                    "roles": sorted(one.keystone_roles),
                    "project": PROJECT,
                }
                session.save()

    @contextmanager
    def acting_as(self, name: str) -> Iterator[Client]:
        """Yield the client of a role; inside the block the login of this role is configured."""
        keys = get_keys()
        if ROLES[name].keystone_roles:
            keys = replace(keys, auth="keystone", console_viewer_roles=(), console_tenant_roles=("manager", "member"))
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(roles, "get_keys", lambda: keys)
            yield self.clients[name]


@pytest.fixture
def people(operator: Client, fill: Fill) -> People:
    """Return the people of the roles, in a console in which each list has rows."""
    fill_other_lists(fill(13))
    return People()


def list_pages() -> list[str]:
    """Return the address of each page, those of rows with the first row of their list."""
    pages = addresses.list_fixed_pages()
    first = {
        f"{model._meta.app_label}_{model._meta.model_name}": model._default_manager.order_by("pk").first()
        for model in admin.site._registry
    }
    singles = {"cyborgweb_maintenance", "placement_sync_writer"}
    empty = {name for name, row in first.items() if row is None} - singles
    assert not empty, "these lists have no row"
    for model, verb in addresses.list_row_pages():
        pk = 1 if model in singles else first[model].pk
        pages.append(reverse(f"admin:{model}_change", args=[pk]).replace("/change/", f"/{verb}/"))
    return pages


@dataclass(frozen=True)
class Answer:
    """The answer that a role got: the status, and the page as it was read."""

    status: int
    page: PageReader
    html: str


def ask_for_pages(people: People) -> dict[str, dict[str, Answer]]:
    """Return what each role is shown at each page: address → name of the role → answer."""
    shown: dict[str, dict[str, Answer]] = {path: {} for path in list_pages()}
    for name in ROLES:
        with people.acting_as(name) as client:
            for path, answers in shown.items():
                answer = client.get(path)
                html = "" if answer.streaming else answer.content.decode()
                answers[name] = Answer(answer.status_code, PageReader(html), html)
    return shown


def check_refusals(shown: dict[str, dict[str, Answer]]) -> Iterator[str]:
    """Yield a line for each refused page whose reason does not name a role that opens the page, or of which the row
    belongs to another project."""
    for path, answers in shown.items():
        opened = {name for name, one in answers.items() if one.status != 403}
        for name, one in answers.items():
            if one.status == 403 and not is_explained(one.page.text, opened):
                yield f"{path} for {name}: {one.status} {one.page.text[-400:]}"


def is_explained(text: str, able: set[str]) -> bool:
    """Return whether a text names a role of `able`, or says that nobody can do it and `able` is empty."""
    return bool(find_named_roles(text) & able) if able else "Nobody can" in text


def list_controls(path: str, page: PageReader) -> set[str]:
    """Return the buttons of a page that send forms, and the links to pages that change something."""
    verbs = {verb for _, verb in addresses.list_row_pages()} - {*DETAILS} | {"add", "attach", "units", "label"}
    links = {one for one in page.links if one.startswith("/admin/") and one.rstrip("/").rpartition("/")[2] in verbs}
    return links | {f"{action if action != '.' else path} {button}" for action, button in page.buttons}


def test_each_page_opens_or_names_the_role_that_may_open_it(people: People) -> None:
    shown = ask_for_pages(people)
    assert len(shown) > 90
    statuses = {one.status for answers in shown.values() for one in answers.values()}
    assert {200, 403} <= statuses <= {200, 302, 403, 404}, statuses
    problems = list(check_refusals(shown))
    for path, answers in shown.items():
        controls = {name: list_controls(path, one.page) for name, one in answers.items() if one.status == 200}
        for name, own in controls.items():
            for missing in set().union(*controls.values()) - own:
                able = {other for other, theirs in controls.items() if missing in theirs}
                if not is_explained(answers[name].page.text, able):
                    problems.append(f"{path} for {name}: no reason why {missing} is missing")
    assert not problems, "\n".join(problems)


def test_each_disabled_button_has_a_reason_for_screen_readers(people: People) -> None:
    shown = ask_for_pages(people)
    pages = [(path, name, one.page) for path, answers in shown.items() for name, one in answers.items()]
    assert {path for path, _, page in pages if page.disabled} >= {reverse("inbox")}
    assert [(path, name, one) for path, name, page in pages for one in page.find_unexplained_buttons()] == []


def test_each_refused_button_names_the_role_that_may_use_it() -> None:
    people = People()
    world = World(User.objects.get(username="administrator"))
    problems, refused = [], 0
    for action, (_, press) in find_buttons().items():
        answers: dict[str, Any] = {}
        for name in ROLES:
            with transaction.atomic(), people.acting_as(name) as client:
                world.person = User.objects.get(username=name)
                url, fields = press(world)
                answers[name] = client.post(url, fields)
                transaction.set_rollback(True)
        assert {one.status_code for one in answers.values()} <= {200, 302, 403, 404}, action
        able = {name for name, one in answers.items() if one.status_code in (200, 302)}
        reasons = {name: PageReader(one.content.decode()).text for name, one in answers.items() if name not in able}
        for name, text in reasons.items():
            if answers[name].status_code == 403:
                refused += 1
                # A role that may not see the page is told who may see it. This role then is told who may do it.
                seeing = find_named_roles(text) & reasons.keys() if ".view_" in text else set()
                if not any(is_explained(reasons[one], able) for one in {name} | seeing):
                    problems.append(f"{action} for {name}: {text[-300:]}")
    assert refused > 150
    assert not problems, "\n".join(problems)
