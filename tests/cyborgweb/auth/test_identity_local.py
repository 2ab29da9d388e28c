"""Test `CYBORG_AUTH=local` over HTTP: API tokens, service tokens, and sessions of the console's users."""

from __future__ import annotations

import getpass
import json
from io import StringIO

import pytest
from django.contrib.auth.models import User
from django.core.handlers.wsgi import WSGIHandler
from django.core.management import CommandError, call_command
from django.test import Client, RequestFactory
from pytest_django import DjangoAssertNumQueries
from rest_framework.exceptions import AuthenticationFailed, PermissionDenied
from rest_framework.request import Request

from accelerators.domain.caller import Caller
from accelerators.models import Event
from cyborgweb.auth.authentication import CallerAuthentication, LocalRequest
from cyborgweb.models import ApiToken

pytestmark = pytest.mark.django_db


@pytest.fixture
def owner() -> User:
    return User.objects.create_user("owner")


def authenticate_request(request: object) -> Caller:
    return CallerAuthentication().authenticate(Request(request))[0]  # type: ignore[arg-type]


def get_caller(token: str, service: str = "") -> Caller:
    headers = {"X-Auth-Token": token} | ({"X-Service-Token": service} if service else {})
    return authenticate_request(RequestFactory().get("/", headers=headers))


def test_a_second_token_with_the_service_role_makes_the_caller_a_service(
    owner: User, django_assert_num_queries: DjangoAssertNumQueries
) -> None:
    member = ApiToken.create_with_secret("ci", owner, ["member"], "p1")
    nova = ApiToken.create_with_secret("nova", owner, ["service"], "service")
    assert get_caller(member) == Caller("ci", str(owner.pk), frozenset({"member"}), "p1")
    with django_assert_num_queries(1):
        assert get_caller(member, nova) == Caller("ci", str(owner.pk), frozenset({"member"}), "p1", service=True)
    assert get_caller(nova, nova).service and not get_caller(nova).service


def test_an_invalid_service_token_is_refused(owner: User) -> None:
    member, admin = (ApiToken.create_with_secret(role, owner, [role], "p1") for role in ("member", "admin"))
    nova = ApiToken.create_with_secret("nova", owner, ["service"], "service")
    for pair in ((member, "nope"), (member, admin), (member, "x" * 9000), ("nope", nova), ("", nova)):
        with pytest.raises(AuthenticationFailed):
            get_caller(*pair)


def test_tokens_of_an_inactive_user_are_refused(owner: User) -> None:
    token = ApiToken.create_with_secret("ci", owner, ["member"], "p1")
    User.objects.update(is_active=False)
    with pytest.raises(AuthenticationFailed):
        get_caller(token)


@pytest.mark.parametrize(
    ("flags", "roles"),
    [
        ({"is_staff": True, "is_superuser": True}, {"admin", "manager", "member", "reader"}),
        ({"is_staff": True}, {"reader"}),
        ({}, None),
    ],
)
def test_a_session_of_staff_may_use_the_apis_with_the_roles_of_the_user(
    client: Client, flags: dict[str, bool], roles: set[str]
) -> None:
    client.force_login(User.objects.create_user("ann", **flags))
    response = client.get("/v2/accelerator_requests")
    assert response.status_code == (401 if roles is None else 200)
    if roles:
        request = RequestFactory().get("/")
        request.user, request.session, request.COOKIES["sessionid"] = User.objects.get(), client.session, "its"
        assert (authenticate_request(request).roles, authenticate_request(request).project_id) == (roles, "local")


def test_a_session_is_ignored_if_a_token_is_sent(client: Client) -> None:
    client.force_login(User.objects.create_superuser("root"))
    for token in ("", "nope"):
        response = client.get("/v2/devices", headers={"X-Auth-Token": token})
        assert response.status_code == 401
        assert json.loads(response.content)["error"]["code"] == 401


def test_unsafe_methods_with_a_session_need_the_csrf_token() -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(User.objects.create_superuser("root"))
    assert client.get("/v2/devices").status_code == 200
    request = RequestFactory(enforce_csrf_checks=True).post("/v2/devices")
    request.user, request.session, request.COOKIES["sessionid"] = User.objects.get(), client.session, "its"
    with pytest.raises(PermissionDenied, match="CSRF"):
        authenticate_request(request)


def test_no_caller_over_http_is_the_local_operator(client: Client, owner: User) -> None:
    token = ApiToken.create_with_secret("admin", owner, ["admin"], "p1")
    service = ApiToken.create_with_secret("nova", owner, ["service"], "service")
    client.force_login(User.objects.create_superuser("root"))
    from_session = RequestFactory().get("/", REMOTE_ADDR="127.0.0.1")
    from_session.user, from_session.session = User.objects.get(username="root"), client.session
    from_session.COOKIES["sessionid"] = "its"
    for caller in (get_caller(token), get_caller(token, service), authenticate_request(from_session)):
        assert caller.is_admin and caller.is_local is False
    assert not issubclass(WSGIHandler.request_class, LocalRequest)
    with pytest.raises(TypeError):
        Caller("ci", "", frozenset(), "", False, "", "", True, True)  # type: ignore[call-arg, misc]


def test_a_password_changed_with_manage_py_records_an_event(owner: User, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter(["one", "another", "12345678", "12345678", "correct horse", "correct horse"])
    monkeypatch.setattr("getpass.getpass", lambda prompt="": next(answers))
    out, error = StringIO(), StringIO()
    call_command("changepassword", "owner", stdout=out, stderr=error)
    owner.refresh_from_db()
    assert owner.check_password("correct horse") and "Password changed successfully" in out.getvalue()
    assert "do not match" in error.getvalue() and "too common" in error.getvalue()
    event = Event.objects.get(action="user.changed")
    assert (event.actor, event.subject_name, event.source) == (getpass.getuser(), "owner", "person")
    assert event.changes == {"password": [None, "another one"]} and "horse" not in str(event.__dict__)


@pytest.mark.parametrize(
    ("name", "answers", "error"),
    [("nobody", [], "does not exist"), ("owner", ["", ""], "aborted"), ("owner", ["a", "b"] * 3, "after 3 attempts")],
)
def test_a_password_that_was_not_changed_with_manage_py_records_nothing(
    name: str, answers: list[str], error: str, owner: User, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter(answers)
    monkeypatch.setattr("getpass.getpass", lambda prompt="": next(given))
    with pytest.raises(CommandError, match=error):
        call_command("changepassword", name, stdout=StringIO(), stderr=StringIO())
    assert not Event.objects.exists() and User.objects.get().password == owner.password
