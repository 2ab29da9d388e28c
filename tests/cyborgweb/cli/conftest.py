"""Fixtures and helpers that run the `cyborg` command against the real service, in an environment of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
from click.testing import CliRunner, Result
from django.contrib.auth.models import User

from cyborgweb.cli.connection import HttpApiClient
from cyborgweb.cli.main import cli
from cyborgweb.http.django_threads import DjangoThreads
from cyborgweb.models import ApiToken
from cyborgweb.settings.keys import Keys
from cyborgweb.wsgi import application
from tests.cyborgweb.cli.terminal import Terminal, run_on_terminal
from tests.support.webserver import serving

Cyborg = Callable[..., Result]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Serve the real service on a free port; yield its base URL."""
    with serving(DjangoThreads(application, Keys(request_threads=2, request_queue=20), long_threads=2)) as port:
        yield f"http://127.0.0.1:{port}"


def run_cyborg(*arguments: str, typed: str = "", **environment: str) -> Result:
    """Run `cyborg` with these arguments, in an environment that has only these variables of ours; return its result.

    `typed` is standard input.
    """
    cleared = {name: "" for name in os.environ if name.startswith(("OS_", "CYBORG_"))}
    return CliRunner().invoke(cli, arguments, input=typed, env=cleared | environment, prog_name="cyborg")


@pytest.fixture
def terminal(url: str, transactional_db: None) -> Terminal:
    """Return a function that runs `cyborg` with the token of an administrator on a terminal: `run_on_terminal`."""
    roles = ["admin", "manager", "member", "reader"]
    token = ApiToken.create_with_secret("terminal", User.objects.create_user("theo"), roles, "p1")
    foreign = ("OS_", "CYBORG_", "LINES", "COLUMNS")
    own_environment = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    environment = own_environment | {"CYBORG_URL": url, "CYBORG_TOKEN": token, "TERM": "xterm"}
    return partial(run_on_terminal, environment)


@pytest.fixture
def cyborg(url: str, transactional_db: None) -> Cyborg:
    """Return a function that runs `cyborg` with a token, such as `cyborg("device-list", "--host", "cmp1",
    role="admin")`."""
    person = User.objects.create_user("rita")

    def call(*words: str, role: str = "admin", **environment: str) -> Result:
        roles = {"admin": ["admin", "manager", "member", "reader"]}.get(role, [role])
        token = ApiToken.create_with_secret(role, person, roles, "p1")
        return run_cyborg(*words, CYBORG_URL=url, CYBORG_TOKEN=token, **environment)

    return call


def assert_refused(result: Result, code: int, *sentences: str) -> None:
    """Assert that `cyborg` ended with this exit code, and that the last line on stderr contains these sentences."""
    assert result.exit_code == code, result.output
    last_line = result.stderr.splitlines()[-1]
    assert all(sentence in last_line for sentence in sentences), last_line


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the methods and paths of all requests that `cyborg` sends."""
    requests: list[str] = []
    send_request = HttpApiClient.send_request

    def send(self: HttpApiClient, method: str, path: str, **request_options: object) -> dict[str, object]:
        requests.append(f"{method} {path}")
        return send_request(self, method, path, **request_options)

    monkeypatch.setattr(HttpApiClient, "send_request", send)
    return requests
