"""`manage.py check --deploy` as an operator runs it, and that what it asks for is so over HTTP."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.test import Client, override_settings

from agents.wire import CHALLENGE_PATH
from cyborgweb import asgi
from cyborgweb.settings import over_tls
from cyborgweb.settings.keys import get_keys
from drivers.configuration import ConfigurationError
from tests.support.webserver import serving

ROOT = Path(__file__).resolve().parents[2]
PUBLIC = "https://accelerators.example"
THROUGH = {"x-forwarded-proto": "https", "host": "accelerators.example"}


def check(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "manage.py", "check", "--deploy", "--fail-level", "WARNING"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


@pytest.mark.system
def test_behind_the_proxy_it_has_no_complaint() -> None:
    done = check(CYBORG_PUBLIC_URL=PUBLIC, CYBORG_ALLOWED_HOSTS="accelerators.example")
    assert done.returncode == 0, done.stderr


@pytest.mark.system
def test_without_it_our_own_words_say_what_to_set() -> None:
    done = check()
    assert done.returncode == 1
    assert "CYBORG_PUBLIC_URL" in done.stderr and "CYBORG_ALLOWED_HOSTS" in done.stderr
    assert "security." not in done.stderr, "two complaints about one thing"


@pytest.mark.parametrize("url", ["http://accelerators.example", "https://", "https://a.example/console"])
def test_an_unusable_address_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CYBORG_PUBLIC_URL", url)
    with pytest.raises(ConfigurationError, match="write https://NAME"):
        get_keys.__wrapped__()


@pytest.fixture
def people() -> Iterator[Client]:
    """A browser, where the key is set."""
    with override_settings(**over_tls.make_tls_settings(PUBLIC)):
        yield Client(enforce_csrf_checks=True)


@pytest.mark.django_db
def test_people_come_over_tls_and_their_cookies_go_no_other_way(people: Client, django_user_model: type) -> None:
    django_user_model.objects.create_superuser("olga", password="a good one indeed")
    for path in ("/admin/login/?next=/admin/", "/admin/", "/help/"):
        sent = people.get(path)
        assert (sent.status_code, sent.headers["Location"]) == (301, PUBLIC + path)
    page = people.get("/admin/login/", headers=THROUGH)
    assert page.status_code == 200
    assert page.headers["Strict-Transport-Security"] == f"max-age={over_tls.HSTS_S}"
    form = {"username": "olga", "password": "a good one indeed", "next": "/admin/"}
    form["csrfmiddlewaretoken"] = page.context["csrf_token"]
    answer = people.post("/admin/login/", form, headers=THROUGH | {"origin": PUBLIC})
    assert answer.status_code == 302, "the login"
    assert {name: cookie["secure"] for name, cookie in people.cookies.items()} == dict.fromkeys(
        ("csrftoken", "sessionid"), True
    )
    evil = people.post("/admin/logout/", headers=THROUGH | {"origin": "https://evil.example"})
    assert evil.status_code == 403


@pytest.mark.django_db
def test_programs_and_probes_are_answered_where_they_ask(people: Client) -> None:
    for path in ("/healthz", "/readyz", "/v2", "/accelerator/v2/", "/api/", "/static/console/page.css"):
        assert people.get(path).status_code in (200, 401), path
    with serving(asgi.http) as port:
        door = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        door.request("GET", CHALLENGE_PATH)
        assert door.getresponse().status == 200
        door.close()


@pytest.mark.django_db
def test_without_the_key_http_goes_on_to_work(client: Client) -> None:
    page = client.get("/admin/login/")
    assert page.status_code == 200 and "Strict-Transport-Security" not in page.headers
    assert not any(cookie["secure"] for cookie in client.cookies.values())
