"""Test `CYBORG_AUTH=keystone` over HTTP: tokens of users and services, and a failing Keystone, on real sockets."""

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


def get_caller(token: str, service: str = "") -> Caller:
    headers = {"X-Auth-Token": token} | ({"X-Service-Token": service} if service else {})
    return CallerAuthentication().authenticate(Request(RequestFactory().get("/v2/devices", headers=headers)))[0]


def get_devices(client: Client, token: str, service: str = "") -> HttpResponse:
    return client.get("/v2/devices", headers={"X-Auth-Token": token, "X-Service-Token": service})


def test_a_token_gives_the_callers_name_id_roles_project_and_scope(keystone: Keystone) -> None:
    assert get_caller(keystone.token("admin", "member")) == Caller(
        "alice", "u-alice", frozenset({"admin", "member"}), "p1"
    )
    assert get_caller(keystone.token("admin", system=True)).system_scope == "all"
    assert get_caller(keystone.token("admin", domain="d1")).domain_id == "d1"
    assert get_caller(keystone.token(unscoped=True)) == Caller("alice", "u-alice", frozenset(), "")


def test_no_caller_with_a_keystone_token_is_the_local_operator(keystone: Keystone) -> None:
    for token in (keystone.token("admin"), keystone.token("admin", system=True), keystone.token(unscoped=True)):
        assert get_caller(token).is_local is False


def test_a_project_token_is_accepted_and_validated_only_once(client: Client, keystone: Keystone) -> None:
    token = keystone.token("reader")
    assert [get_devices(client, token).status_code for _ in range(3)] == [200] * 3
    assert (keystone.calls["validate"], keystone.calls["log in"]) == (1, 1)
    assert keystone.seen == ["nocatalog=1"]


@pytest.mark.parametrize("token", ["", "nope", "x" * 9000, "a b", "<script>", "ümlaut"])
def test_an_invalid_token_is_answered_401_with_the_address_of_keystone(
    client: Client, keystone: Keystone, token: str
) -> None:
    response = get_devices(client, token)
    assert response.status_code == 401
    assert json.loads(response.content)["error"]["message"] == "The request you have made requires authentication."
    assert response["WWW-Authenticate"] == f'Keystone uri="{keystone.url}/v3"'


def test_the_address_of_keystone_in_a_401_can_be_configured(client: Client) -> None:
    with vouching(CYBORG_WWW_AUTHENTICATE_URI="https://identity.example/v3"):
        assert get_devices(client, "nope")["WWW-Authenticate"] == 'Keystone uri="https://identity.example/v3"'


def test_a_service_token_is_accepted_with_the_service_role_and_refused_otherwise(keystone: Keystone) -> None:
    user, nova = keystone.token("member"), keystone.token("service", project="service")
    assert get_caller(user).service is False
    assert get_caller(user, nova) == Caller("alice", "u-alice", frozenset({"member"}), "p1", service=True)
    for bad in ("nope", keystone.token("admin"), keystone.token("service", lasts_s=-1)):
        with pytest.raises(AuthenticationFailed):
            get_caller(user, bad)
    with pytest.raises(AuthenticationFailed):
        get_caller("nope", nova)


def test_the_roles_of_a_service_token_can_be_configured() -> None:
    with vouching(CYBORG_SERVICE_TOKEN_ROLES="compute,network") as keystone:
        user = keystone.token("member")
        assert get_caller(user, keystone.token("network")).service
        with pytest.raises(AuthenticationFailed):
            get_caller(user, keystone.token("service"))


def test_an_expired_user_token_is_accepted_together_with_a_service_token(keystone: Keystone) -> None:
    ended, nova = keystone.token("member", lasts_s=-5), keystone.token("service")
    with pytest.raises(AuthenticationFailed):
        get_caller(ended)
    assert get_caller(ended, nova).service
    assert keystone.seen == ["nocatalog=1", "nocatalog=1", "nocatalog=1&allow_expired=1"]


def test_the_service_user_logs_in_again_when_its_token_is_no_longer_valid(client: Client, keystone: Keystone) -> None:
    assert get_devices(client, keystone.token("reader")).status_code == 200
    fresh = keystone.token("reader")
    keystone.tokens = {fresh: keystone.tokens[fresh]}
    assert get_devices(client, fresh).status_code == 200
    assert keystone.calls["log in"] == 2


def test_a_revoked_token_is_refused_after_its_cache_entry_is_gone(client: Client, keystone: Keystone) -> None:
    token = keystone.token("reader")
    assert get_devices(client, token).status_code == 200
    del keystone.tokens[token]
    assert get_devices(client, token).status_code == 200
    get_token_cache.cache_clear()
    assert get_devices(client, token).status_code == 401


def test_l3_while_keystone_is_away_cached_tokens_work_and_unknown_ones_get_a_503(
    client: Client, keystone: Keystone, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = keystone.token("reader")
    assert get_devices(client, token).status_code == 200
    monkeypatch.setattr(get_token_cache(), "_monotonic", lambda: float("inf"))  # no cached answer is fresh any more
    keystone.fails_with = 503
    assert get_devices(client, token).status_code == 200
    response = get_devices(client, keystone.token("reader"))
    assert response.status_code == 503
    assert (
        KeystoneUnavailableError.default_detail
        in json.loads(json.loads(response.content)["error_message"])["faultstring"]
    )
    assert client.get("/api/profiles/", headers={"X-Auth-Token": "another"})["Retry-After"] == "5"


@pytest.mark.parametrize("status", [401, 403, 429, 500])
def test_any_failure_of_keystone_is_answered_503_instead_of_401(
    client: Client, keystone: Keystone, status: int
) -> None:
    keystone.fails_with = status
    assert get_devices(client, keystone.token("reader")).status_code == 503


def test_an_unreachable_keystone_is_answered_503_and_logged_in_one_line(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with vouching(OS_AUTH_URL="http://127.0.0.1:1/v3"):
        assert get_devices(client, "some-token").status_code == 503
    lines = [record for record in caplog.records if record.name == "cyborgweb.auth.token_cache"]
    assert len(lines) == 1 and "\n" not in lines[0].getMessage()


def test_a_hanging_keystone_is_answered_503_after_the_timeout(
    client: Client, keystone: Keystone, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cyborgweb.auth.keystone.TIMEOUT_S", 0.1)
    keystone.held = threading.Event()
    assert get_devices(client, keystone.token("reader")).status_code == 503


def test_concurrent_requests_with_one_token_validate_it_once(keystone: Keystone) -> None:
    token, keystone.held = keystone.token("reader"), threading.Event()
    with ThreadPoolExecutor(6) as pool:
        callers = [pool.submit(get_token_cache().find_caller, token) for _ in range(6)]
        until(lambda: keystone.calls["log in"])
        keystone.held.set()
        assert {caller.result(20) for caller in callers} == {Caller("alice", "u-alice", frozenset({"reader"}), "p1")}
    assert keystone.calls["validate"] == 1


def test_without_a_configured_cloud_the_answer_is_503_and_the_log_names_the_setting(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    with vouching(OS_AUTH_URL=""):
        assert get_devices(client, "some-token").status_code == 503
    assert "set CYBORG_CLOUD" in caplog.text


def test_neither_tokens_nor_passwords_are_logged(
    client: Client, keystone: Keystone, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    token = keystone.token("reader")
    for secret in (token, "made-up-token"):
        get_devices(client, secret)
    keystone.fails_with = 500
    get_devices(client, "another-made-up-token")
    assert caplog.records
    for secret in (token, "made-up-token", standin.SERVICE["OS_PASSWORD"]):
        assert secret not in caplog.text
