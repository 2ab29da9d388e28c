"""Test join tokens in the console and the API, and the decisions about agents in the API."""

from __future__ import annotations

import html
import json
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from accelerators.models import Event, Host
from agents import authentication, liveness
from agents.credentials import Credential, parse_join_string
from agents.gateway.leases import mark_stale_hosts
from agents.models import Agent, JoinToken, Lease
from cyborgweb.auth import roles
from cyborgweb.models import ApiToken
from tests.support.reports import get_or_create_host

pytestmark = pytest.mark.django_db
ADD = "admin:agents_jointoken_add"
FORM = {"host": "cmp1", "hours": "2", "address": "https://10.0.0.1:8443"}


@pytest.fixture
def operator(client: Client) -> Client:
    client.force_login(User.objects.create(username="olga", is_staff=True, is_superuser=True))
    return client


@pytest.fixture
def ask(client: Client) -> Any:
    """Return `ask(method, path, body=None, *roles)`, which calls the API with a token; as an admin without roles."""
    user = User.objects.create(username="ann")

    def ask(method: str, path: str, body: Any = None, *granted: str) -> Any:
        token = ApiToken.create_with_secret(f"t{ApiToken.objects.count()}", user, [*granted] or ["admin"], "p1")
        return client.generic(
            method,
            path,
            "" if body is None else json.dumps(body),
            "application/json",
            headers={"X-Auth-Token": token},
        )

    return ask


def test_a_token_is_made_in_the_console_shown_once_and_lets_the_host_join(operator: Client) -> None:
    assert 'name="host"' in operator.get(reverse(ADD)).content.decode()
    made = operator.post(reverse(ADD), FORM)
    assert "no-store" in made["Cache-Control"]
    (shown,) = re.findall(r"CYBORG_JOIN_TOKEN=(\S+) cyborg-agent", html.unescape(made.content.decode()))
    content = parse_join_string(shown)
    assert (content.host, content.address) == ("cmp1", "https://10.0.0.1:8443")
    row = JoinToken.objects.get()
    assert row.created_by == "olga"
    for url in (reverse("admin:agents_jointoken_changelist"), reverse("admin:agents_jointoken_change", args=[row.pk])):
        assert shown not in operator.get(url).content.decode()
    event = Event.objects.get(action="agent.invited")
    assert (event.source, event.actor, event.host) == ("person", "olga", "cmp1")
    credential = Credential("cmp1", "cmp1", 1, "n", "k1", "s", content.secret)
    assert authentication.identify_or_enrol(credential, None).host == "cmp1"


def test_a_host_that_has_just_joined_is_up_before_its_first_heartbeat_and_becomes_stale_without_one(
    operator: Client,
) -> None:
    def join(key: str) -> Agent:
        """Let the host join with this key, without a connection or a heartbeat afterwards."""
        token = authentication.create_join_token("cmp1", address="http://127.0.0.1", hours=1, created_by="olga")
        secret = parse_join_string(token).secret
        authentication.identify_or_enrol(Credential("cmp1", "cmp1", 1, "n", key, "s", secret), None)
        return Agent.objects.get(public_key=key)

    assert liveness.get_agent_state(join("k1")) == "up"
    assert Agent.objects.filter(liveness.build_state_condition("up")).exists()
    page = operator.get(reverse("admin:agents_agent_changelist"), {"is": "up"}).content.decode()
    assert ">cmp1</a>" in page and "never heard" not in page
    silent_since = datetime.now(UTC) - liveness.get_down_after() - timedelta(seconds=1)
    Lease.objects.update(seen_at=silent_since, epoch=7)
    assert liveness.get_agent_state(Agent.objects.get()) == "down"
    mark_stale_hosts()
    assert Host.objects.get().stale_since, "it has never sent a heartbeat"
    assert liveness.get_agent_state(join("k2")) == "up"
    assert Lease.objects.get().epoch == 7, "the highest epoch is kept"
    later = datetime.now(UTC) + timedelta(seconds=1)
    Lease.objects.update(seen_at=later)
    join("k3")
    assert Lease.objects.get().seen_at == later, "a lease that another transaction has renewed does not move backwards"


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"host": ""}, "must have 1 to 255 characters"),
        ({"address": "10.0.0.1"}, "must begin with http"),
        ({"hours": "0"}, "valid for 1 to"),
        ({"hours": "many"}, "valid for 1 to"),
        ({"address": "", "host": "far.example"}, "cannot reach the only address"),
    ],
)
def test_a_wrong_token_is_refused_and_what_was_entered_stays(
    operator: Client, changed: dict[str, str], sentence: str
) -> None:
    page = operator.post(reverse(ADD), FORM | changed).content.decode()
    assert sentence in page and 'name="host"' in page
    assert not JoinToken.objects.exists()


def test_only_people_with_the_right_make_tokens(client: Client) -> None:
    user = User.objects.create(username="vera", is_staff=True)
    user.groups.add(roles.get_group(roles.VIEWERS.group))
    client.force_login(user)
    refused = client.post(reverse(ADD), FORM)
    assert refused.status_code == 403 and "You need the role admin" in refused.content.decode()
    assert not JoinToken.objects.exists()


def test_a_withdrawn_token_is_deleted_with_an_event(operator: Client) -> None:
    operator.post(reverse(ADD), FORM)
    url = reverse("admin:agents_jointoken_delete", args=[JoinToken.objects.get().pk])
    assert operator.post(url, {"post": "yes"}).status_code == 302
    assert not JoinToken.objects.exists()
    assert Event.objects.get(action="agent.uninvited").actor == "olga"


def test_the_api_makes_lists_and_withdraws_tokens_and_shows_the_secret_once(ask: Any) -> None:
    made = ask("POST", "/api/join_tokens/", {"host": "cmp1", "address": "https://10.0.0.1:8443"})
    assert made.status_code == 201 and made["Cache-Control"] == "no-store"
    body = made.json()
    assert parse_join_string(body["token"]).host == body["host"] == "cmp1"
    listed = ask("GET", "/api/join_tokens/?host=cmp1&used=false", None, "manager")
    (row,) = listed.json()["results"]
    assert row["id"] == body["id"] and row["created_by"] == "t0"
    assert not {"token", "secret_hash"} & row.keys() and JoinToken.objects.get().secret_hash not in str(listed.content)
    assert ask("GET", f"/api/join_tokens/{body['id']}/").json()["host"] == "cmp1"
    assert ask("POST", "/api/join_tokens/", {"host": "cmp1"}, "manager").status_code == 403
    assert ask("POST", "/api/join_tokens/", {"host": "cmp1", "address": "ftp://x"}).status_code == 400
    assert ask("DELETE", f"/api/join_tokens/{body['id']}/", None, "manager").status_code == 403
    assert ask("DELETE", f"/api/join_tokens/{body['id']}/").status_code == 204
    assert not JoinToken.objects.exists()
    assert list(Event.objects.filter(host="cmp1").order_by("id").values_list("action", "source")) == [
        ("agent.invited", "api"),
        ("agent.uninvited", "api"),
    ]


def test_the_api_admits_an_agent_and_asks_it_for_a_new_key(ask: Any) -> None:
    host = get_or_create_host("cmp1")
    Agent.objects.create(host=host, public_key="k1", barred="clone", barred_reason="two of them")
    path = f"/api/agents/{host.uuid}/"
    assert ask("POST", f"{path}rotate/", {}).status_code == 409, "it is barred"
    assert ask("POST", f"{path}admit/", {}, "manager").status_code == 403
    assert ask("POST", f"{path}admit/", {}).json()["barred_reason"] == ""
    assert ask("POST", f"{path}rotate/", {}).status_code == 200
    agent = Agent.objects.get()
    assert agent.barred == "" and agent.rotate_asked_at
    assert list(Event.objects.filter(action__startswith="agent.").values_list("source", flat=True)) == ["api", "api"]
    ask("POST", f"{path}revoke/", {})
    assert ask("POST", f"{path}admit/", {}).status_code == 409, "a revoked agent needs a new join token"
