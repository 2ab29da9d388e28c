"""Test `manage.py check --deploy` as an operator runs it, and that a public URL makes HTTPS mandatory for pages."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from django.test import Client, override_settings

from agents.wire import CHALLENGE_PATH
from cyborgweb import asgi
from cyborgweb.settings import over_tls
from cyborgweb.settings.keys import Keys, get_keys
from drivers.configuration import ConfigurationError, load_configuration
from tests.support.webserver import serving

ROOT = Path(__file__).resolve().parents[3]
PUBLIC_URL = "https://accelerators.example"
PROXY_HEADERS = {"x-forwarded-proto": "https", "host": "accelerators.example"}


def run_deploy_check(**environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "manage.py", "check", "--deploy", "--fail-level", "WARNING"]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)


def read_shipped_environment() -> dict[str, str]:
    """Return the variables of the example file for controllers, as systemd's EnvironmentFile= reads them."""
    lines = (ROOT / "docs/deploy/etc/controller.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.system
def test_the_deploy_check_passes_with_public_url_and_allowed_hosts() -> None:
    done = run_deploy_check(
        CYBORG_PUBLIC_URL=PUBLIC_URL, CYBORG_ALLOWED_HOSTS="accelerators.example", CYBORG_PROXY_ADDRESSES="10.0.0.5"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.system
def test_the_deploy_check_asks_for_the_addresses_of_the_proxies() -> None:
    done = run_deploy_check(CYBORG_PUBLIC_URL=PUBLIC_URL, CYBORG_ALLOWED_HOSTS="accelerators.example")
    assert done.returncode == 1 and "CYBORG_PROXY_ADDRESSES" in done.stderr, done.stderr


@pytest.mark.system
def test_the_deploy_check_is_clean_with_the_shipped_environment_files() -> None:
    done = run_deploy_check(**read_shipped_environment())
    assert done.returncode == 0, done.stderr


def test_the_shipped_environment_file_sets_what_the_deploy_check_asks_for() -> None:
    keys = load_configuration(Keys, read_shipped_environment())
    assert keys.public_url and keys.proxy_addresses and "*" not in keys.allowed_hosts
    assert urlsplit(keys.public_url).hostname in keys.allowed_hosts, "the console would answer 400 at its own address"


@pytest.mark.system
def test_the_deploy_check_names_the_settings_that_are_missing() -> None:
    done = run_deploy_check()
    assert done.returncode == 1
    assert "CYBORG_PUBLIC_URL" in done.stderr and "CYBORG_ALLOWED_HOSTS" in done.stderr
    assert "security." not in done.stderr, "two complaints about one thing"


@pytest.mark.parametrize("url", ["http://accelerators.example", "https://", "https://a.example/console"])
def test_an_unusable_public_url_is_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CYBORG_PUBLIC_URL", url)
    with pytest.raises(ConfigurationError, match="write https://NAME"):
        get_keys.__wrapped__()


@pytest.fixture
def people() -> Iterator[Client]:
    """Return a browser with cookies and CSRF checks, while CYBORG_PUBLIC_URL is set."""
    with override_settings(**over_tls.make_tls_settings(PUBLIC_URL)):
        yield Client(enforce_csrf_checks=True)


@pytest.mark.django_db
def test_pages_are_redirected_to_https_and_cookies_are_secure(people: Client, django_user_model: type) -> None:
    django_user_model.objects.create_superuser("olga", password="a good one indeed")
    for path in ("/admin/login/?next=/admin/", "/admin/", "/help/"):
        sent = people.get(path)
        assert (sent.status_code, sent.headers["Location"]) == (301, PUBLIC_URL + path)
    page = people.get("/admin/login/", headers=PROXY_HEADERS)
    assert page.status_code == 200
    assert page.headers["Strict-Transport-Security"] == f"max-age={over_tls.HSTS_S}"
    form = {"username": "olga", "password": "a good one indeed", "next": "/admin/"}
    form["csrfmiddlewaretoken"] = page.context["csrf_token"]
    answer = people.post("/admin/login/", form, headers=PROXY_HEADERS | {"origin": PUBLIC_URL})
    assert answer.status_code == 302, "the login"
    assert {name: cookie["secure"] for name, cookie in people.cookies.items()} == dict.fromkeys(
        ("csrftoken", "sessionid"), True
    )
    evil = people.post("/admin/logout/", headers=PROXY_HEADERS | {"origin": "https://evil.example"})
    assert evil.status_code == 403


@pytest.mark.django_db
def test_apis_probes_and_static_files_are_not_redirected_to_https(people: Client) -> None:
    for path in ("/healthz", "/readyz", "/v2", "/accelerator/v2/", "/api/", "/static/console/page.css"):
        assert people.get(path).status_code in (200, 401), path
    with serving(asgi.http) as port:
        door = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        door.request("GET", CHALLENGE_PATH)
        assert door.getresponse().status == 200
        door.close()


@pytest.mark.django_db
def test_without_a_public_url_the_login_works_over_http(client: Client) -> None:
    page = client.get("/admin/login/")
    assert page.status_code == 200 and "Strict-Transport-Security" not in page.headers
    assert not any(cookie["secure"] for cookie in client.cookies.values())
