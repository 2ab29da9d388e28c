"""Tests of decisions about agents (admit, rotate, revoke, join) at the command line, in the console, over the API."""

from __future__ import annotations

import json
import socket
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import pytest
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from accelerators.models import Event
from agents import credentials
from agents.models import Agent, JoinToken, Lease
from cyborgweb.models import ApiToken
from cyborgweb.server import tls
from cyborgweb.settings.keys import Keys
from tests.support.reports import get_or_create_host

pytestmark = pytest.mark.django_db


def command_output(*args: str) -> str:
    out = StringIO()
    call_command(*args, stdout=out)
    return out.getvalue()


@pytest.fixture
def agents() -> list[Agent]:
    """Create three agents: cmp0 is up, cmp1 never connected, cmp2 is barred as a clone."""
    made = [
        Agent.objects.create(host=get_or_create_host(f"cmp{n}"), public_key=f"key {n}", version="0.1", wire="v1")
        for n in "012"
    ]
    now = datetime.now(UTC)
    Lease.objects.create(host=made[0].host, seen_at=now)
    Agent.objects.filter(pk=made[0].pk).update(connected_at=now)
    Agent.objects.filter(pk=made[2].pk).update(barred="clone", barred_reason="10.0.0.1 and 10.0.0.2 at the same time")
    return made


def test_the_agents_command_prints_a_table_and_with_json_the_facts(agents: list[Agent]) -> None:
    head, *rows = command_output("agents").splitlines()
    assert head.split() == ["host", "state", "version", "wire", "since", "note"]
    assert [row.split()[:4] for row in rows] == [
        ["cmp0", "up", "0.1", "v1"],
        ["cmp1", "down", "0.1", "v1"],
        ["cmp2", "clone", "0.1", "v1"],
    ]
    assert "never" in rows[1]
    assert "10.0.0.2" in rows[2]
    facts = json.loads(command_output("agents", "--json", "--state", "clone"))
    assert [(one["host"], one["state"], one["public_key"]) for one in facts] == [("cmp2", "clone", "key 2")]


def test_the_agents_command_without_agents_explains_how_to_join_one() -> None:
    assert "manage.py join_token HOST" in command_output("agents")


def test_agents_are_rotated_admitted_and_revoked_at_the_command_line_with_events(agents: list[Agent]) -> None:
    JoinToken.objects.create(host_name="cmp0", secret_hash="f" * 64, expires_at=datetime(9999, 1, 1, tzinfo=UTC))
    assert "is asked for a new key" in command_output("agents", "--rotate", "cmp0")
    assert "a new key is asked for" in command_output("agents")
    assert "may connect again" in command_output("agents", "--admit", "cmp2")
    assert "is not barred" in command_output("agents", "--admit", "cmp2")
    assert "is revoked" in command_output("revoke_agent", "cmp0", "--reason", "stolen")
    assert "was revoked already" in command_output("revoke_agent", "cmp0")
    assert JoinToken.objects.get().expires_at < datetime.now(UTC), "nobody comes in with what was made before"
    assert "stolen" in command_output("agents", "--state", "revoked")
    for words in (("--admit", "cmp0"), ("--rotate", "cmp0"), ("--admit", "cmp9")):
        with pytest.raises(CommandError, match=r"join_token cmp0|no agent has joined"):
            command_output("agents", *words)
    with pytest.raises(CommandError, match="at most 500"):
        command_output("revoke_agent", "cmp1", "--reason", "x" * 501)
    actions = Event.objects.filter(actor="command line").order_by("id").values_list("action", flat=True)
    assert list(actions) == ["agent.rotation", "agent.admitted", "agent.revoked"]


def test_the_api_lets_only_an_admin_revoke_an_agent(agents: list[Agent], client: Client) -> None:
    user = User.objects.create_user("rita")
    url = f"/api/agents/{agents[0].host.uuid}/"

    def ask(role: str, **body: str) -> tuple[int, dict[str, str]]:
        token = ApiToken.create_with_secret(role, user, [role], "p1")
        answer = client.post(f"{url}revoke", json.dumps(body), "application/json", headers={"X-Auth-Token": token})
        return answer.status_code, answer.json()

    assert ask("manager")[0] == 403
    status, shown = ask("admin", reason="stolen")
    assert (status, shown["state"], shown["barred_reason"]) == (200, "revoked", "stolen")
    token = ApiToken.create_with_secret("reader", user, ["admin"], "p1")
    listed = client.get("/api/agents/?state=revoked", headers={"X-Auth-Token": token}).json()["results"]
    assert [one["host"]["name"] for one in listed] == ["cmp0"]
    assert Event.objects.get(action="agent.revoked").source == "api"


@pytest.mark.slow
def test_the_console_lets_only_an_administrator_revoke_admit_and_rotate_agents(
    agents: list[Agent], client: Client
) -> None:
    url = reverse("admin:agents_agent_changelist")
    viewer = User.objects.create(username="vera", is_staff=True)
    viewer.user_permissions.add(Permission.objects.get(codename="view_agent"))

    def act(action: str, *chosen: Agent) -> str:
        picked = [agent.pk for agent in chosen]
        return client.post(url, {"action": action, "_selected_action": picked}, follow=True).content.decode()

    client.force_login(viewer)
    act("revoke", agents[0])
    assert Agent.objects.filter(barred="revoked").count() == 0, "who may only look decides nothing"
    client.force_login(User.objects.create(username="olga", is_staff=True, is_superuser=True))
    assert "2 agents revoked: cmp0, cmp1" in act("revoke", agents[0], agents[1])
    page = act("admit", agents[0], agents[2])
    assert "1 agent admitted: cmp2" in page
    assert "was revoked, and its key stays barred" in page
    assert "1 agent asked for a new key: cmp2" in act("rotate", agents[2])
    assert client.get(url, {"is": "revoked"}).context["cl"].result_count == 2
    assert (
        "revoked in the console"
        in client.get(reverse("admin:agents_agent_change", args=[agents[0].pk])).content.decode()
    )


def test_a_join_token_pins_the_listeners_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = Keys(state_dir=str(tmp_path), agent_listen="127.0.0.1:9443")
    monkeypatch.setattr(tls, "get_keys", lambda: keys)
    joins = [
        credentials.parse_join_string(command_output("join_token", socket.gethostname(), *more).splitlines()[-1])
        for more in (
            (),
            ("--address", "https://acc:1"),
            ("--address", "https://acc:1", "--unpinned"),
            ("--address", "http://acc:1"),
        )
    ]
    pin = tls.read_fingerprint(keys)
    assert [(join.address, join.fingerprint) for join in joins] == [
        ("https://127.0.0.1:9443", pin),
        ("https://acc:1", pin),
        ("https://acc:1", ""),
        ("http://acc:1", ""),
    ]
    monkeypatch.setattr(tls, "get_keys", lambda: Keys(state_dir=str(tmp_path), agent_listen="127.0.0.1:0"))
    with pytest.raises(CommandError, match="--address"):
        command_output("join_token", "cmp1")


@pytest.mark.parametrize("keys", [{}, {"agent_listen": "127.0.0.1:9443"}, {"listen": "[::1]:8080"}])
def test_a_join_token_for_another_host_without_an_address_it_can_reach_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, str]
) -> None:
    monkeypatch.setattr(tls, "get_keys", lambda: Keys(state_dir=str(tmp_path), **keys))  # type: ignore[arg-type]
    with pytest.raises(
        CommandError, match=r"cmp1 cannot reach the only address .* CYBORG_AGENT_LISTEN .* --address https://NAME"
    ):
        command_output("join_token", "cmp1")
    assert not JoinToken.objects.exists()
    for arguments in ((socket.gethostname(),), ("cmp1", "--address", "http://127.0.0.1:1")):
        join = credentials.parse_join_string(command_output("join_token", *arguments).splitlines()[-1])
        assert join.host == arguments[0]


def test_a_join_token_names_the_address_on_which_the_web_process_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "get_keys", lambda: Keys(listen="192.0.2.7:8080"))
    join = credentials.parse_join_string(command_output("join_token", "cmp1").splitlines()[-1])
    assert (join.address, join.fingerprint) == ("http://192.0.2.7:8080", "")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"agent_key": "k"}, "without CYBORG_AGENT_CERT"),
        ({"agent_cert": "/nowhere/c.pem"}, "/nowhere/c.pem cannot be read"),
        ({"agent_cert": __file__}, "holds no certificate"),
    ],
)
def test_an_unusable_agent_certificate_is_refused_with_the_reason(settings: dict[str, str], says: str) -> None:
    with pytest.raises(tls.ConfigurationError, match=says):
        tls.read_fingerprint(Keys(**settings))
