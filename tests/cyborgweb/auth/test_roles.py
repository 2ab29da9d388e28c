"""Test which roles may use the routes of /api/ with which operators run accelerators."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.models import AcceleratorRequest, AttachHandle, Command, DeviceProfile, Event
from cyborgweb.auth.policy import IMPLIED_ROLES, Policy
from cyborgweb.auth.policy_rules import ELEVATED, OPERATOR, OWN_RULES
from cyborgweb.models import ApiToken
from tests.support.reports import create_heard_host

pytestmark = pytest.mark.django_db
Ask = Callable[..., HttpResponse]
ROLES_ASKED = ("admin", OPERATOR, "manager", "member")
UNKNOWN_UUID = "00000000-0000-4000-8000-000000000000"
TARGETS = {"targets": [{"device": UNKNOWN_UUID}], "count": 1}


@pytest.fixture
def ask(client: Client) -> Ask:
    """Return `ask(by, method, path, body)`, which sends a request with a local token of the role `by` in project p1."""
    user = User.objects.create(username="rita")
    tokens = {role: ApiToken.create_with_secret(role, user, sorted(IMPLIED_ROLES[role]), "p1") for role in ROLES_ASKED}

    def call(by: str, method: str, path: str, body: Any = None) -> HttpResponse:
        sent = b"" if body is None else json.dumps(body).encode()
        token = {"X-Auth-Token": tokens[by]}
        return client.generic(method, path, sent, content_type="application/json", headers=token)

    return call


READS = ["backends", "services", "drivers", "rollouts", "devices", "commands", "attach_handles"]
ROUTES = [
    *[("GET", f"/api/{name}/", None, (200, 200, 200, 403)) for name in READS],
    ("GET", f"/api/backends/{UNKNOWN_UUID}:pci_driver:a/", None, (404, 404, 404, 403)),
    ("GET", f"/api/rollouts/{UNKNOWN_UUID}/", None, (404, 404, 404, 403)),
    ("GET", f"/api/attachments/{UNKNOWN_UUID}/", None, (404, 404, 403, 403)),
    ("POST", "/api/commands/", {"op": "rescan", "host": UNKNOWN_UUID}, (400, 400, 403, 403)),
    ("POST", "/api/rollouts/", {}, (400, 400, 403, 403)),
    ("POST", f"/api/rollouts/{UNKNOWN_UUID}/cancel/", {}, (404, 404, 403, 403)),
    ("POST", f"/api/rollouts/{UNKNOWN_UUID}/retry/", {}, (404, 404, 403, 403)),
    ("POST", "/api/bulk_actions/", {"action": "enable", "selector": {"all": True}}, (400, 403, 403, 403)),
    ("POST", "/api/bulk_actions/", {"action": "health", "selector": {"all": True}}, (400, 403, 403, 403)),
    ("POST", "/api/attachments/", {}, (400, 400, 403, 403)),
    ("POST", f"/api/attachments/{UNKNOWN_UUID}/detach/", {}, (404, 404, 403, 403)),
    ("POST", "/api/commands/", {"op": "logs", "host": UNKNOWN_UUID}, (400, 403, 403, 403)),
    ("POST", "/api/commands/", {"op": "reset", "device": UNKNOWN_UUID}, (400, 403, 403, 403)),
    ("POST", f"/api/devices/{UNKNOWN_UUID}/enable/", {}, (404, 403, 403, 403)),
    ("PATCH", f"/api/devices/{UNKNOWN_UUID}/", {"layout": {"vfs": "4"}}, (404, 403, 403, 403)),
    ("POST", "/api/accelerators/", TARGETS, (202, 403, 403, 403)),
    ("POST", "/api/accelerators/delete/", TARGETS, (202, 403, 403, 403)),
    ("GET", "/api/accelerators/", None, (200, 200, 200, 200)),
    ("GET", "/api/accelerators/?attached=false", None, (200, 200, 200, 200)),
    ("GET", f"/api/accelerators/{UNKNOWN_UUID}/", None, (404, 404, 404, 404)),
    ("PATCH", f"/api/accelerators/{UNKNOWN_UUID}/", {"label": "x"}, (404, 404, 404, 404)),
    ("GET", "/api/attachments/", None, (200, 200, 403, 403)),
]


@pytest.mark.slow
def test_each_route_allows_exactly_its_roles_and_a_refusal_names_a_sufficient_role(ask: Ask) -> None:
    for method, path, body, answers in ROUTES:
        responses = [ask(by, method, path, body) for by in ROLES_ASKED]
        assert tuple(response.status_code for response in responses) == answers, (method, path, body)
        sufficient_role = (
            "admin" if answers[1] == 403 else OPERATOR if answers[2] == 403 and method != "GET" else "auditor"
        )
        for response in responses:
            if response.status_code == 403:
                text = json.loads(response.content)["error"]["message"]
                assert text.startswith("Access was denied to the following resource: cyborg:")
                assert text.endswith(f". The role {sufficient_role} would be sufficient."), (method, path)
    assert not Command.objects.exists() and not Event.objects.filter(source="api").exists()


def test_operators_may_order_a_rescan_and_managers_may_not(ask: Ask) -> None:
    host = create_heard_host("cmp1", 1)
    order_data = {"op": "rescan", "host": str(host.uuid), "driver": "pci_driver"}
    assert [ask(by, "POST", "/api/commands/", order_data).status_code for by in ("manager", OPERATOR)] == [403, 201]
    assert Command.objects.get().actor == OPERATOR


def test_a_member_lists_and_labels_only_accelerators_attached_to_its_project(ask: Ask) -> None:
    create_heard_host("cmp1", 2)
    with conductor.writing():
        profile = DeviceProfile.objects.create(name="small", groups=[{"resources:FPGA": "1"}])
        mine, theirs = (
            AcceleratorRequest.objects.create(
                project_id=project,
                state="Bound",
                profile=profile,
                group={},
                deployable_id=handle.deployable_id,
                attach_handle=handle,
            )
            for project, handle in zip(("p1", "p2"), AttachHandle.objects.order_by("id"), strict=False)
        )
    for path in ("/api/accelerators/", "/api/accelerators/?attached=false", "/api/accelerators/?project=p1"):
        rows = json.loads(ask("member", "GET", path).content)["results"]
        assert [(row["uuid"], row["project"]) for row in rows] == [(str(mine.uuid), "p1")]
    for path in ("/api/accelerators/?project=p2", "/api/accelerators/?attached=false&state=free"):
        assert json.loads(ask("member", "GET", path).content)["results"] == []
    own, foreign = (f"/api/accelerators/{one.uuid}/" for one in (mine, theirs))
    labelled = ask("member", "PATCH", own, {"label": "for the press", "generation": 1})
    assert (labelled.status_code, json.loads(labelled.content)["label"]) == (200, "for the press")
    assert [ask("member", method, foreign, {}).status_code for method in ("GET", "PATCH")] == [404, 404]
    assert ask("manager", "PATCH", foreign, {"label": "seen"}).status_code == 403
    assert ask(OPERATOR, "PATCH", foreign, {"label": "seen", "generation": 1}).status_code == 200
    rows = json.loads(ask("manager", "GET", "/api/accelerators/?attached=false").content)["results"]
    assert [row["label"] for row in rows] == ["for the press", "seen", "", ""]


def test_the_elevated_role_can_be_changed_by_one_line_of_the_policy_file(tmp_path: Path) -> None:
    written = tmp_path / "policy.yaml"
    written.write_text('"elevated": "role:cards"\n')
    policy = Policy(written, False)
    operator = Caller("olga", "u1", frozenset({"cards"}), "p1")
    manager = Caller("max", "u2", IMPLIED_ROLES["manager"], "p1")
    rules = [rule.name for rule in OWN_RULES if rule.check == ELEVATED]
    assert "cyborg:attachment:create" in rules and "cyborg:driver:rollout" in rules
    for rule in rules:
        assert policy.allows(operator, rule) and not policy.allows(manager, rule)
    assert not policy.allows(operator, "cyborg:accelerator:create")
