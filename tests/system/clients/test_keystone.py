"""Tests of the real Keystone that the other system tests use."""

from __future__ import annotations

import concurrent.futures
import json
import os
import shutil
import subprocess
import sys

import pytest
import requests

from tests.support.webserver import until
from tests.system import environments, processes
from tests.system.keystone import USERS, Keystone

pytestmark = pytest.mark.system


def describe_token(keystone: Keystone, token: str) -> requests.Response:
    """Return Keystone's answer when the service user validates the token."""
    headers = {"X-Auth-Token": keystone.token("service"), "X-Subject-Token": token}
    return requests.get(f"{keystone.url}/auth/tokens", headers=headers, timeout=30)


def test_every_user_has_its_role_and_project(keystone: Keystone) -> None:
    for user, (project, role) in USERS.items():
        token = describe_token(keystone, keystone.token(user)).json()["token"]
        assert token["project"]["name"] == project
        assert role in {one["name"] for one in token["roles"]}
        assert len(keystone.token(user)) < 512
    assert {one["name"] for one in describe_token(keystone, keystone.token("reader")).json()["token"]["roles"]} == {
        "reader"
    }


def test_tokens_can_be_unscoped_or_scoped_to_system_or_domain(keystone: Keystone) -> None:
    assert "project" not in describe_token(keystone, keystone.token("member", unscoped=True)).json()["token"]
    assert describe_token(keystone, keystone.token("admin", system=True)).json()["token"]["system"] == {"all": True}
    assert describe_token(keystone, keystone.token("admin", domain=True)).json()["token"]["domain"]["id"] == "default"


def test_a_revoked_token_is_refused_and_others_are_not(keystone: Keystone) -> None:
    token, other = keystone.token("member"), keystone.token("member")
    keystone.revoke(token)
    assert describe_token(keystone, token).status_code == 404
    assert describe_token(keystone, other).status_code == 200


def test_the_catalogue_has_the_url_at_which_a_service_was_published_last(keystone: Keystone) -> None:
    for url in ("http://127.0.0.1:9/somewhere", "http://127.0.0.1:7/elsewhere"):
        keystone.publish("tested", url)
        catalogue = describe_token(keystone, keystone.token("reader")).json()["token"]["catalog"]
        (service,) = [one for one in catalogue if one["type"] == "tested"]
        assert {one["url"] for one in service["endpoints"]} == {url} and len(service["endpoints"]) == 3
    assert set(json.loads(keystone.clouds())["clouds"]) == {*USERS, "system-admin"}


def test_keystone_restarts_at_its_address_and_accepts_earlier_tokens(keystone: Keystone) -> None:
    token, url = keystone.token("member"), keystone.url
    keystone.stop()
    with pytest.raises(requests.ConnectionError):
        requests.get(url, timeout=30)
    assert keystone.start().url == url
    assert describe_token(keystone, token).ok


def test_keystone_serves_eight_clients_at_once(keystone: Keystone) -> None:
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda n: describe_token(keystone, keystone.token("member")).ok, range(32)))


def test_keystone_ends_with_the_killed_test_that_started_it(keystone: Keystone) -> None:
    code = (
        "import sys\nfrom tests.system.keystone import running\n"
        "with running() as one:\n    print(one.process.pid, one.folder, flush=True)\n    sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=environments.ROOT,
        env=os.environ,
    ) as parent:
        assert parent.stdout
        pid, _, folder = parent.stdout.readline().decode().strip().partition(" ")
        child = processes.find_process(int(pid))
        assert child and child.alive()
        parent.kill()
        until(lambda: not child.alive(), 10)
        shutil.rmtree(folder)
