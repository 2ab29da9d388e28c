"""Test management commands as an operator uses them: tokens, preparation, configuration; and the health endpoints."""

from __future__ import annotations

import json
import os
import runpy
import socket
import stat
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
from django.conf import settings
from django.contrib.auth import get_user_model
from django.core import management
from django.core.management import CommandError, call_command
from django.db import OperationalError
from django.test import override_settings
from psycopg.errors import AdminShutdown, DeadlockDetected, LockNotAvailable

from accelerators.devices import admission_rules
from accelerators.domain.caller import Caller
from accelerators.models import AdmissionRule
from agents import credentials
from agents.models import JoinToken
from cyborgweb.management.commands import prepare
from cyborgweb.models import ApiToken, hash_token
from cyborgweb.server.supervisor import Supervisor
from cyborgweb.settings import base
from cyborgweb.settings.keys import Keys, parse_listen_address
from drivers.configuration import ConfigurationError, load_configuration

pytestmark = pytest.mark.django_db


def run_manage_command(*arguments: str, **options: object) -> list[str]:
    out = StringIO()
    call_command(*arguments, stdout=out, **options)
    return out.getvalue().splitlines()


def test_api_token_prints_the_token_last_and_stores_only_its_hash() -> None:
    secret = run_manage_command("api_token", "ci")[-1]
    token = ApiToken.objects.get()
    assert token.token_hash == hash_token(secret) and secret not in repr(token.__dict__)
    assert token.roles == ["admin", "manager", "member", "reader"]


@pytest.mark.parametrize(
    ("role", "stored"),
    [
        ("service", ["service"]),
        ("reader", ["reader"]),
        ("manager", ["manager", "member", "reader"]),
        ("accelerator_operator", ["accelerator_operator", "member", "reader"]),
        ("auditor", ["auditor", "reader"]),
    ],
)
def test_a_token_has_its_role_and_those_that_the_role_implies(role: str, stored: list[str]) -> None:
    run_manage_command("api_token", "nova", "--role", role)
    assert ApiToken.objects.get().roles == stored


def test_join_token_prints_one_line_with_host_address_and_secret() -> None:
    join = credentials.parse_join_string(
        run_manage_command("join_token", "cmp1.example", "--address", "https://acc.example:8443")[-1]
    )
    assert (join.host, join.address) == ("cmp1.example", "https://acc.example:8443")
    assert join.secret not in JoinToken.objects.get().secret_hash


@pytest.mark.parametrize("args", [("api_token", ""), ("join_token", ""), ("join_token", "h", "--address", "ftp://x")])
def test_invalid_arguments_are_refused(args: tuple[str, ...]) -> None:
    with pytest.raises(CommandError):
        run_manage_command(*args)


@pytest.mark.system
def test_an_unusable_setting_is_reported_in_one_line_without_a_traceback() -> None:
    done = subprocess.run(
        [sys.executable, "manage.py", "check"],
        capture_output=True,
        text=True,
        check=False,
        cwd=settings.BASE_DIR,
        env=os.environ | {"CYBORG_AUTH": "ldap"},
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "manage.py: CYBORG_AUTH='ldap' is not usable: write local or keystone\n"


@pytest.mark.slow
def test_prepare_creates_the_first_login_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "get_keys", lambda: Keys(state_dir=str(tmp_path)))
    facts = json.loads(run_manage_command("prepare", "--address", "http://127.0.0.1:1")[-1])
    login = tmp_path / "first-login"
    assert stat.S_IMODE(login.stat().st_mode) == 0o600
    assert (facts["login_file"], facts["login_is_new"]) == (str(login), True)
    made = login.read_text()
    again = json.loads(run_manage_command("prepare", "--address", "http://127.0.0.1:1")[-1])
    assert again["login_is_new"] is False and again["login_file"] == str(login) and login.read_text() == made
    assert not AdmissionRule.objects.exists()
    named = "merge leases sweep seals deadlines drains commands images bulks rollouts attachments messages deliveries"
    assert sorted(facts["jobs"]) == sorted([*named.split(), "mails", "owners", "releases", "removals", "verification"])


@pytest.mark.slow
def test_prepare_never_prints_the_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "get_keys", lambda: Keys(state_dir=str(tmp_path)))
    printed = [line for _ in range(2) for line in run_manage_command("prepare")]
    password = (tmp_path / "first-login").read_text().strip().removeprefix("admin / ")
    assert len(password) > 10 and not any(password in line for line in printed)


def test_the_first_password_is_shown_once_on_a_terminal_and_never_in_a_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first-login").write_text("admin / the-password\n")
    facts = {"login": "a login", "login_file": str(tmp_path / "first-login")}
    written = []
    for is_new, opened in [(True, os.openpty()), (False, os.openpty()), (True, os.pipe()), (False, os.pipe())]:
        read_end, write_end = opened
        with socket.socket() as listener, open(write_end, "w") as stderr:
            listener.bind(("127.0.0.1", 0))
            monkeypatch.setattr(sys, "stderr", stderr)
            Supervisor(Keys(state_dir=str(tmp_path)))._print_addresses(listener, None, facts | {"login_is_new": is_new})
            print("the end", file=stderr, flush=True)
            text = ""
            while "the end" not in text:  # a terminal gives a line at a time
                text += os.read(read_end, 4096).decode()
        os.close(read_end)
        assert str(tmp_path / "first-login") in text
        written.append("the-password" in text)
    assert written == [True, False, False, False]


@pytest.mark.parametrize("cause", [DeadlockDetected, LockNotAvailable])
def test_prepare_retries_a_migration_that_cannot_get_its_locks(
    monkeypatch: pytest.MonkeyPatch, cause: type[Exception]
) -> None:
    failures = [cause("first"), cause("second")]

    def migrate(*_: object, **__: object) -> None:
        if failures:
            raise OperationalError("no lock") from failures.pop()

    monkeypatch.setattr(prepare, "call_command", migrate)
    monkeypatch.setattr(prepare, "MIGRATION_RETRY_S", 0.0)
    prepare._migrate_database()
    assert not failures


@pytest.mark.parametrize(
    ("command", "cause", "is_sentence"),
    [("migrate", LockNotAvailable, True), ("migrate", AdminShutdown, False), ("backup", LockNotAvailable, False)],
)
def test_a_migration_that_cannot_get_its_locks_ends_with_a_sentence_instead_of_a_traceback(
    monkeypatch: pytest.MonkeyPatch, command: str, cause: type[Exception], is_sentence: bool
) -> None:
    def execute(words: list[str]) -> None:
        raise OperationalError("canceling statement due to lock timeout") from cause("in PostgreSQL")

    monkeypatch.setattr(management, "execute_from_command_line", execute)
    monkeypatch.setattr(sys, "argv", ["manage.py", command])
    with pytest.raises(SystemExit if is_sentence else OperationalError) as raised:
        runpy.run_path(str(settings.BASE_DIR / "manage.py"), run_name="__main__")
    assert ("`manage.py prepare`, which tries for a minute" in str(raised.value)) == is_sentence


def test_prepare_creates_the_sample_rule_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "get_keys", lambda: Keys(state_dir=str(tmp_path)))
    words = ("prepare", "--address", "http://127.0.0.1:1")
    run_manage_command(*words, "--sample-rules")
    rule = AdmissionRule.objects.get()
    assert (rule.driver, rule.action) == ("fake_driver", "ready")
    admission_rules.delete_rule(rule.uuid, Caller("olga", "", frozenset(), ""))
    prepare._create_sample_rule()
    assert not AdmissionRule.objects.exists()


def test_the_environment_takes_precedence_over_the_configuration_file(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('CYBORG_LISTEN = "0.0.0.0:80"\nCYBORG_BEAT_S = 3\n')
    keys = load_configuration(Keys, {"CYBORG_CONFIG": str(file), "CYBORG_LISTEN": "[::1]:0"})
    assert (keys.listen, keys.beat_s) == ("[::1]:0", 3.0)
    assert parse_listen_address(keys.listen) == ("::1", 0)


@pytest.mark.parametrize(
    "environ", [{"CYBORG_BEAT_S": "soon"}, {"CYBORG_CONFIG": "/nowhere"}, {"CYBORG_REQUEST_THREADS": "many"}]
)
def test_unusable_configuration_names_the_key(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(environ))):
        load_configuration(Keys, environ)


@pytest.mark.parametrize("listen", ["8000", "host:port", ":1", "1.2.3.4:70000"])
def test_an_unusable_listen_address_is_refused_with_the_expected_form(listen: str) -> None:
    with pytest.raises(ConfigurationError, match="ADDRESS:PORT"):
        parse_listen_address(listen)


@override_settings(DEBUG=False)
def test_health_endpoints_need_no_token_and_answer_with_a_request_id(client) -> None:  # type: ignore[no-untyped-def]
    for path in ("/healthz", "/readyz"):
        answer = client.get(path)
        assert answer.status_code == 200 and answer["x-openstack-request-id"].startswith("req-")


def test_the_first_login_gets_the_password_of_a_file_that_a_killed_start_left(tmp_path: Path) -> None:
    path = tmp_path / "first-login"
    path.write_text("admin / left-by-a-killed-start\n")
    assert prepare._create_first_login(path)
    assert get_user_model().objects.get(username="admin").check_password("left-by-a-killed-start")
    assert not prepare._create_first_login(path)
    assert path.read_text() == "admin / left-by-a-killed-start\n" and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_empty_login_file_gets_a_new_password(tmp_path: Path) -> None:
    path = tmp_path / "first-login"
    path.touch(mode=0o600)
    assert prepare._create_first_login(path)
    login = path.read_text().strip()
    assert len(login) > len("admin / ")
    assert get_user_model().objects.get(username="admin").check_password(login.removeprefix("admin / "))


def test_an_empty_secret_key_file_gets_a_key_that_later_starts_keep(tmp_path: Path) -> None:
    (tmp_path / "secret-key").touch()
    settings_keys = Keys(state_dir=str(tmp_path))
    key = base._load_secret_key(settings_keys)
    assert len(key) > 40 and base._load_secret_key(settings_keys) == key
