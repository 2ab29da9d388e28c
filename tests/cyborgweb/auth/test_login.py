"""Test the console's login with Keystone: who is let in, the roles, the end of the session; no secret is stored."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.contrib.sessions.models import Session
from django.db import IntegrityError, connection, transaction
from django.http import HttpResponse
from django.test import Client

from accelerators.domain.caller import Caller
from accelerators.models import Event
from cyborgweb.auth import login_throttle, roles
from cyborgweb.auth.keystone import AuthenticatedPerson, get_token_cache
from cyborgweb.auth.login import BACKEND_PATH, INACTIVE_TEXT, REFUSED_TEXT, UNAVAILABLE_TEXT, LoginForm, update_user
from cyborgweb.models import KeystoneUser
from tests.support.keystone import Keystone, vouching
from tests.support.keystone import User as Person
from tests.support.locks import wait_for_a_waiting_lock

pytestmark = pytest.mark.django_db

PASSWORD = "correct horse battery"
ROLES_BY_USER = {"admin": ["admin", "manager", "member", "reader"], "manager": ["manager", "member", "reader"]}


@pytest.fixture
def console(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Apply the two settings that `CYBORG_AUTH=keystone` changes."""
    settings.AUTHENTICATION_BACKENDS = [BACKEND_PATH]
    monkeypatch.setattr(admin.site, "login_form", LoginForm)


@pytest.fixture
def keystone(console: None) -> Iterator[Keystone]:
    with vouching() as known:
        for name in ("admin", "manager", "member", "reader"):
            known.users.append(Person(name, PASSWORD, {"p1": ROLES_BY_USER.get(name, [name])}))
        yield known


def log_in(
    client: Client, name: str, password: str = PASSWORD, project: str = "p1", domain: str = "Default", **more: str
) -> str:
    """Log in and return the error message, or '' on success. `more` are further fields of the form."""
    fields = {"username": name, "password": password, "domain": domain, "project": project, "next": "/admin/"}
    response = client.post("/admin/login/", fields | more)
    return "" if response.status_code == 302 else get_error_message(response)


def get_error_message(response: HttpResponse) -> str:
    (text,) = re.findall(r'<div class="message bad" role="alert"><p>(.*?)</p></div>', response.content.decode(), re.S)
    return str(text)


def get_user(keystone: Keystone, name: str) -> User:
    return KeystoneUser.objects.get(keystone_id=next(u.id for u in keystone.users if u.name == name)).user


def test_the_login_page_with_keystone_asks_for_name_password_project_and_domains(
    client: Client, keystone: Keystone
) -> None:
    page = client.get("/admin/login/").content.decode()
    assert re.findall(r'<input type="(?:text|password)" name="(\w+)"', page) == [
        *("username", "password", "domain", "project", "project_domain")
    ]
    assert 'value="Default"' in page


@pytest.fixture(autouse=True)
def _no_failed_logins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_throttle, "throttle", login_throttle.LoginThrottle())


def test_the_login_page_without_keystone_asks_for_name_and_password(client: Client) -> None:
    User.objects.create_superuser("root", password="a long enough secret")
    page = client.get("/admin/login/").content.decode()
    assert re.findall(r'<input type="(?:text|password)" name="(\w+)"', page) == ["username", "password"]
    assert "Please enter the correct username and password" in get_error_message(
        client.post("/admin/login/", {"username": "root", "password": "wrong"})
    )
    response = client.post("/admin/login/?next=/admin/accelerators/host/", {"username": "root", "password": "wrong"})
    assert 'value="/admin/accelerators/host/"' in response.content.decode()
    inside = client.post("/admin/login/", {"username": "root", "password": "a long enough secret", "next": "/admin/"})
    assert inside["Location"] == "/admin/"


def test_after_ten_wrong_passwords_the_name_is_refused_for_a_while_from_this_address_only(client: Client) -> None:
    User.objects.create_superuser("root", password="a long enough secret")
    right = {"username": "root", "password": "a long enough secret", "next": "/admin/"}
    for number in range(12):
        text = get_error_message(client.post("/admin/login/", {"username": "Root", "password": f"wrong {number}"}))
        assert (text == login_throttle.THROTTLED_TEXT) == (number >= 10), number
    # A header does not make another address of it, and the right password is not checked either.
    refused = client.post("/admin/login/", right, headers={"x-forwarded-for": "192.0.2.1"})
    assert get_error_message(refused) == login_throttle.THROTTLED_TEXT
    assert client.post("/admin/login/", right, REMOTE_ADDR="192.0.2.1")["Location"] == "/admin/"


@pytest.mark.slow
def test_ten_wrong_passwords_are_not_passed_on_to_keystone_any_more(client: Client, keystone: Keystone) -> None:
    for _ in range(12):
        last = log_in(client, "admin", password="wrong")
    assert (last, keystone.calls["log in"]) == (login_throttle.THROTTLED_TEXT, 10)
    assert log_in(client, "manager") == ""


def test_logins_that_keystone_cannot_check_do_not_count_as_failed(client: Client, keystone: Keystone) -> None:
    keystone.fails_with = 500
    for _ in range(12):
        assert log_in(client, "admin") == UNAVAILABLE_TEXT


def test_a_keystone_admin_becomes_a_superuser_of_the_console(client: Client, keystone: Keystone) -> None:
    assert log_in(client, "admin") == ""
    user = get_user(keystone, "admin")
    assert (user.username, user.is_superuser, user.has_usable_password()) == ("admin@Default", True, False)
    assert [group.name for group in user.groups.all()] == [roles.ADMINISTRATORS.group]
    assert client.get("/admin/").status_code == 200


def test_a_keystone_manager_becomes_a_viewer_of_the_console(client: Client, keystone: Keystone) -> None:
    assert log_in(client, "manager") == ""
    user = get_user(keystone, "manager")
    assert user.is_staff and not user.is_superuser
    assert {permission.split(".")[1].split("_")[0] for permission in user.get_all_permissions()} == {"view"}
    assert user.has_perm("accelerators.view_device") and not user.has_perm("auth.view_user")
    assert client.get("/admin/accelerators/host/").status_code == 200
    assert client.get("/admin/auth/user/").status_code == 403


@pytest.mark.parametrize("name", ["member", "reader"])
def test_other_keystone_roles_are_refused_naming_the_needed_roles_and_create_no_user(
    client: Client, keystone: Keystone, name: str
) -> None:
    told = "The console needs the role admin or manager in the project; you do not have it."
    assert log_in(client, name) == told
    assert not KeystoneUser.objects.exists() and not User.objects.exists()


def test_the_keystone_roles_of_viewers_can_be_configured(client: Client, console: None) -> None:
    with vouching(CYBORG_CONSOLE_VIEWER_ROLES="manager,reader") as keystone:
        keystone.users.append(Person("rita", PASSWORD, {"p1": ["reader"]}))
        assert log_in(client, "rita") == ""
        assert [group.name for group in get_user(keystone, "rita").groups.all()] == [roles.VIEWERS.group]


@pytest.mark.slow
def test_each_keystone_role_is_mapped_to_its_console_group(client: Client, console: None) -> None:
    places = {
        "accelerator_operator": "role:operator",
        "auditor": "role:auditor",
        "manager": "role:viewer",
        "member": "project:p1",
    }
    with vouching(CYBORG_CONSOLE_TENANT_ROLES="member") as keystone:
        for role, place in places.items():
            keystone.users.append(Person(f"one {role}", PASSWORD, {"p1": [role, "reader"]}))
            assert log_in(client, f"one {role}") == ""
            assert [group.name for group in get_user(keystone, f"one {role}").groups.all()] == [place]
            seen = client.get("/admin/accelerators/device/").status_code
            assert seen == (403 if role == "member" else 200)


def test_keystone_roles_are_mapped_again_at_every_login(client: Client, keystone: Keystone) -> None:
    person = next(user for user in keystone.users if user.name == "admin")
    for words, superuser, groups in (
        (ROLES_BY_USER["admin"], True, 1),
        (ROLES_BY_USER["manager"], False, 1),
        (["member"], False, 0),
    ):
        person.roles = {"p1": words}
        assert (log_in(client, "admin") == "") is bool(groups)
        user = get_user(keystone, "admin")
        assert (user.is_superuser, user.is_staff, user.groups.count()) == (superuser, bool(groups), groups)
    assert client.get("/admin/").status_code == 302  # the earlier session has lost its access, too


@pytest.mark.slow
def test_every_change_of_a_persons_rights_by_a_login_is_an_event(client: Client, keystone: Keystone) -> None:
    person = next(user for user in keystone.users if user.name == "manager")
    for words in (["manager"], ["manager"], ROLES_BY_USER["admin"], ["member"]):
        person.roles = {"p1": words}
        log_in(client, "manager")
    recorded = Event.objects.filter(action__startswith="user.").order_by("id")
    assert {(one.subject_name, one.actor, one.source) for one in recorded} == {
        ("manager@Default", "Keystone", "system")
    }
    viewers, administrators = [roles.VIEWERS.group], [roles.ADMINISTRATORS.group]
    assert [(one.action, one.changes) for one in recorded] == [
        (
            "user.created",
            {
                "username": [None, "manager@Default"],
                "is_staff": [None, True],
                "is_superuser": [None, False],
                "groups": [None, viewers],
            },
        ),
        ("user.changed", {"is_superuser": [False, True], "groups": [viewers, administrators]}),
        (
            "user.changed",
            {"is_staff": [True, False], "is_superuser": [True, False], "groups": [administrators, []]},
        ),
    ]


def test_a_person_of_one_domain_enters_with_a_project_of_another(client: Client, keystone: Keystone) -> None:
    keystone.users.append(Person("lena", PASSWORD, {"p1": ["manager"]}, domain="people", project_domain="projects"))
    assert log_in(client, "lena", domain="people") == REFUSED_TEXT
    assert log_in(client, "lena", domain="people", project_domain="people") == REFUSED_TEXT
    assert log_in(client, "lena", domain="people", project_domain="projects") == ""
    assert get_user(keystone, "lena").username == "lena@people"
    assert client.get("/admin/accelerators/host/").status_code == 200


WRONG_FIELDS = {
    "password": {"password": "wrong"},
    "name": {"name": "nobody"},
    "project": {"project": "p2"},
    "domain": {"domain": "other"},
}


@pytest.mark.parametrize("wrong", WRONG_FIELDS.values(), ids=WRONG_FIELDS.keys())
def test_a_wrong_name_password_project_or_domain_gives_the_same_message(
    client: Client, keystone: Keystone, wrong: dict[str, str]
) -> None:
    assert log_in(client, **({"name": "admin"} | wrong)) == REFUSED_TEXT
    assert not User.objects.exists()


@pytest.mark.parametrize("field", ["name", "password", "domain", "project"])
def test_overlong_login_fields_are_refused_without_asking_keystone(
    client: Client, keystone: Keystone, field: str
) -> None:
    client.post("/admin/login/", {"username": "admin", "password": PASSWORD, "domain": "Default", "project": "p1"})
    before = keystone.calls["log in"]
    fields = {"name": "admin", "password": PASSWORD, "domain": "Default", "project": "p1"} | {field: "x" * 300}
    fields["username"] = fields.pop("name")
    response = client.post("/admin/login/", fields)
    assert response.status_code == 200 and "at most" in response.content.decode()
    assert keystone.calls["log in"] == before


@pytest.mark.parametrize("status", [500, 403])
def test_the_login_page_says_that_keystone_is_unavailable(client: Client, keystone: Keystone, status: int) -> None:
    keystone.fails_with = status
    assert log_in(client, "admin") == UNAVAILABLE_TEXT


def test_users_are_identified_by_their_keystone_id_and_not_by_name(client: Client, keystone: Keystone) -> None:
    elsewhere = Person("admin", PASSWORD, {"p1": ["manager"]}, domain="other", project_domain="other")
    keystone.users.append(elsewhere)
    assert log_in(client, "admin") == "" and log_in(Client(), "admin", domain="other") == ""
    first = get_user(keystone, "admin")
    assert KeystoneUser.objects.get(keystone_id=elsewhere.id).user.username == "admin@other" and first.is_superuser
    # A user that is deleted and created again under the same name is another user, without the first one's rights.
    keystone.users = [Person("admin", PASSWORD, {"p1": ["manager"]}, id="f" * 32)]
    assert log_in(Client(), "admin") == ""
    assert KeystoneUser.objects.get(keystone_id="f" * 32).user.username == "admin@Default ffffffff"
    first.refresh_from_db()
    assert first.is_superuser and KeystoneUser.objects.count() == 3


@pytest.mark.django_db(transaction=True)
def test_two_persons_with_one_name_who_log_in_at_the_same_time_get_two_users() -> None:
    first, second = (
        AuthenticatedPerson(Caller("anna", character * 32, frozenset({"admin"}), "p1"), "Default") for character in "ab"
    )
    names: list[str] = []

    def log_in_too() -> None:
        try:
            names.append(update_user(second).username)
        except IntegrityError as error:
            names.append(str(error))
        finally:
            connection.close()

    thread = threading.Thread(target=log_in_too, daemon=True)
    with transaction.atomic():
        assert update_user(first).username == "anna@Default"
        thread.start()
        wait_for_a_waiting_lock()
    thread.join(10)
    assert names == ["anna@Default bbbbbbbb"]


def test_a_user_deactivated_in_the_console_cannot_log_in(client: Client, keystone: Keystone) -> None:
    assert log_in(client, "admin") == ""
    User.objects.update(is_active=False)
    assert log_in(client, "admin") == INACTIVE_TEXT and client.get("/admin/").status_code == 302


def test_a_session_without_roles_or_without_staff_status_gives_no_caller(client: Client, keystone: Keystone) -> None:
    assert log_in(client, "admin") == ""
    user, session = User.objects.get(), dict(client.session)
    assert roles.get_session_caller(user, session)
    assert roles.get_session_caller(user, {}) is None
    user.is_staff = False
    assert roles.get_session_caller(user, session) is None


def test_a_session_expires_after_the_configured_hours_and_contains_no_secret(client: Client, console: None) -> None:
    with vouching(CYBORG_CONSOLE_SESSION_H="2") as keystone:
        keystone.users.append(Person("admin", PASSWORD, {"p1": ["admin"]}))
        before = datetime.now(UTC)
        assert log_in(client, "admin") == ""
        session = Session.objects.get()
        assert before + timedelta(hours=2) <= session.expire_date <= datetime.now(UTC) + timedelta(hours=2)
        held = session.get_decoded()
        assert held[roles.SESSION_KEY] == {
            "name": "admin",
            "id": keystone.users[-1].id,
            "project": "p1",
            "roles": ["admin"],
        }
        assert PASSWORD not in str(held) and not any(token in str(held) for token in keystone.tokens)
        Session.objects.update(expire_date=before)
        assert client.get("/admin/").status_code == 302


def test_neither_passwords_nor_tokens_are_logged_or_stored(
    client: Client, keystone: Keystone, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    assert log_in(client, "admin") == "" and log_in(client, "admin", password=PASSWORD + "!") == REFUSED_TEXT
    assert caplog.records and keystone.tokens, "there is something to look for, and a text to look in"
    assert PASSWORD not in caplog.text and not any(token in caplog.text for token in keystone.tokens)
    assert not get_token_cache()._valid and not get_token_cache()._unknown
    assert PASSWORD not in str(list(User.objects.values()))


def test_a_local_password_cannot_be_used_when_keystone_is_configured(client: Client, keystone: Keystone) -> None:
    User.objects.create_superuser("root", password="a long enough secret")
    assert log_in(client, "root", "a long enough secret") == REFUSED_TEXT
    assert not client.login(username="root", password="a long enough secret")


def test_a_keystone_session_may_use_the_apis_with_the_roles_of_the_login(client: Client, keystone: Keystone) -> None:
    assert client.get("/v2/devices").status_code == 401
    assert log_in(client, "manager") == ""
    assert client.get("/v2/devices").status_code == 200
    assert client.get("/v2/devices", headers={"X-Auth-Token": "nope"}).status_code == 401
