"""`CYBORG_AUTH=keystone` over HTTP: tokens of people and services, and a Keystone that fails, on real sockets."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.http import HttpResponse
from django.test import Client, RequestFactory
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from accelerators.domain.caller import Caller
from cyborgweb.auth.authentication import CallerAuthentication, KeystoneUnavailableError
from cyborgweb.auth.keystone import get_token_cache
from tests.support import keystone as standin
from tests.support.keystone import Keystone, vouching
from tests.support.webserver import until

pytestmark = pytest.mark.django_db


@pytest.fixture
def keystone() -> Iterator[Keystone]:
    with vouching() as known:
        yield known


def caller(token: str, service: str = "") -> Caller:
    headers = {"X-Auth-Token": token} | ({"X-Service-Token": service} if service else {})
    return CallerAuthentication().authenticate(Request(RequestFactory().get("/v2/devices", headers=headers)))[0]


def asked(client: Client, token: str, service: str = "") -> HttpResponse:
    return client.get("/v2/devices", headers={"X-Auth-Token": token, "X-Service-Token": service})


def test_a_token_says_who_where_and_as_what(keystone: Keystone) -> None:
    assert caller(keystone.token("admin", "member")) == Caller("alice", "u-alice", frozenset({"admin", "member"}), "p1")
    assert caller(keystone.token("admin", system=True)).system_scope == "all"
    assert caller(keystone.token("admin", domain="d1")).domain_id == "d1"
    assert caller(keystone.token(unscoped=True)) == Caller("alice", "u-alice", frozenset(), "")


def test_a_project_token_gets_in_and_is_validated_once(client: Client, keystone: Keystone) -> None:
    token = keystone.token("reader")
    assert [asked(client, token).status_code for _ in range(3)] == [200] * 3
    assert (keystone.calls["validate"], keystone.calls["log in"]) == (1, 1)
    assert keystone.seen == ["nocatalog=1"]


@pytest.mark.parametrize("token", ["", "nope", "x" * 9000, "a b", "<script>", "ümlaut"])
def test_a_401_says_where_to_get_a_token(client: Client, keystone: Keystone, token: str) -> None:
    response = asked(client, token)
    assert response.status_code == 401
    assert json.loads(response.content)["error"]["message"] == "The request you have made requires authentication."
    assert response["WWW-Authenticate"] == f'Keystone uri="{keystone.url}/v3"'


def test_the_address_in_a_401_can_be_another_one(client: Client) -> None:
    with vouching(CYBORG_WWW_AUTHENTICATE_URI="https://identity.example/v3"):
        assert asked(client, "nope")["WWW-Authenticate"] == 'Keystone uri="https://identity.example/v3"'


def test_a_service_token_counts_if_it_has_the_role_and_is_a_401_otherwise(keystone: Keystone) -> None:
    user, nova = keystone.token("member"), keystone.token("service", project="service")
    assert caller(user).service is False
    assert caller(user, nova) == Caller("alice", "u-alice", frozenset({"member"}), "p1", service=True)
    for bad in ("nope", keystone.token("admin"), keystone.token("service", lasts_s=-1)):
        with pytest.raises(AuthenticationFailed):
            caller(user, bad)
    with pytest.raises(AuthenticationFailed):
        caller("nope", nova)


def test_which_roles_make_a_service_is_configured() -> None:
    with vouching(CYBORG_SERVICE_TOKEN_ROLES="compute,network") as keystone:
        user = keystone.token("member")
        assert caller(user, keystone.token("network")).service
        with pytest.raises(AuthenticationFailed):
            caller(user, keystone.token("service"))


def test_a_service_may_come_with_a_users_ended_token(keystone: Keystone) -> None:
    ended, nova = keystone.token("member", lasts_s=-5), keystone.token("service")
    with pytest.raises(AuthenticationFailed):
        caller(ended)
    assert caller(ended, nova).service
    assert keystone.seen == ["nocatalog=1", "nocatalog=1", "nocatalog=1&allow_expired=1"]


def test_the_service_user_logs_in_again_when_its_own_token_is_gone(client: Client, keystone: Keystone) -> None:
    assert asked(client, keystone.token("reader")).status_code == 200
    fresh = keystone.token("reader")
    keystone.tokens = {fresh: keystone.tokens[fresh]}
    assert asked(client, fresh).status_code == 200
    assert keystone.calls["log in"] == 2


def test_a_revoked_token_is_refused_once_it_is_asked_about_again(client: Client, keystone: Keystone) -> None:
    token = keystone.token("reader")
    assert asked(client, token).status_code == 200
    del keystone.tokens[token]
    assert asked(client, token).status_code == 200
    get_token_cache.cache_clear()
    assert asked(client, token).status_code == 401


def test_l3_with_keystone_away_known_tokens_work_and_unknown_ones_get_a_503(
    client: Client, keystone: Keystone, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = keystone.token("reader")
    assert asked(client, token).status_code == 200
    monkeypatch.setattr(
        get_token_cache(), "_monotonic", lambda: float("inf")
    )  # nothing that is remembered is fresh any more
    keystone.fails_with = 503
    assert asked(client, token).status_code == 200
    response = asked(client, keystone.token("reader"))
    assert response.status_code == 503
    assert (
        KeystoneUnavailableError.default_detail
        in json.loads(json.loads(response.content)["error_message"])["faultstring"]
    )
    assert client.get("/api/profiles/", headers={"X-Auth-Token": "another"})["Retry-After"] == "5"


@pytest.mark.parametrize("status", [401, 403, 429, 500])
def test_whatever_keystone_fails_with_is_no_401_of_ours(client: Client, keystone: Keystone, status: int) -> None:
    keystone.fails_with = status
    assert asked(client, keystone.token("reader")).status_code == 503


def test_keystone_that_is_not_there_is_a_503(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with vouching(OS_AUTH_URL="http://127.0.0.1:1/v3"):
        assert asked(client, "some-token").status_code == 503
    lines = [record for record in caplog.records if record.name == "cyborgweb.auth.token_cache"]
    assert len(lines) == 1 and "\n" not in lines[0].getMessage()


def test_a_keystone_that_hangs_is_a_503_after_the_time_it_may_take(
    client: Client, keystone: Keystone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyborgweb.auth.keystone.TIMEOUT_S", 0.1)
    keystone.held = threading.Event()
    assert asked(client, keystone.token("reader")).status_code == 503


def test_concurrent_requests_with_one_token_are_one_question(keystone: Keystone) -> None:
    token, keystone.held = keystone.token("reader"), threading.Event()
    with ThreadPoolExecutor(6) as pool:
        callers = [pool.submit(get_token_cache().find_caller, token) for _ in range(6)]
        until(lambda: keystone.calls["log in"])
        keystone.held.set()
        assert {caller.result(20) for caller in callers} == {Caller("alice", "u-alice", frozenset({"reader"}), "p1")}
    assert keystone.calls["validate"] == 1


def test_a_cloud_that_is_not_configured_is_a_503_and_a_line_that_says_what_to_set(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with vouching(OS_AUTH_URL=""):
        assert asked(client, "some-token").status_code == 503
    assert "set CYBORG_CLOUD" in caplog.text


def test_neither_tokens_nor_passwords_are_logged(
    client: Client, keystone: Keystone, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    token = keystone.token("reader")
    for secret in (token, "made-up-token"):
        asked(client, secret)
    keystone.fails_with = 500
    asked(client, "another-made-up-token")
    assert caplog.records
    for secret in (token, "made-up-token", standin.SERVICE["OS_PASSWORD"]):
        assert secret not in caplog.text
