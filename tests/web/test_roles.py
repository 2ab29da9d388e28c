"""Callers at the routes with which accelerators are run: administrators, the elevated, managers, members."""

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
from tests.support.reports import a_heard_host

pytestmark = pytest.mark.django_db
Ask = Callable[..., HttpResponse]
WHO = ("admin", OPERATOR, "manager", "member")
NOBODY = "00000000-0000-4000-8000-000000000000"
TARGETS = {"targets": [{"device": NOBODY}], "count": 1}


@pytest.fixture
def ask(client: Client) -> Ask:
    """`ask(by, method, path, body)`, with a token of our own table in project p1."""
    user = User.objects.create(username="rita")
    tokens = {role: ApiToken.create_with_secret(role, user, sorted(IMPLIED_ROLES[role]), "p1") for role in WHO}

    def call(by: str, method: str, path: str, body: Any = None) -> HttpResponse:
        sent = b"" if body is None else json.dumps(body).encode()
        token = {"X-Auth-Token": tokens[by]}
        return client.generic(method, path, sent, content_type="application/json", headers=token)

    return call


READS = ["backends", "services", "drivers", "rollouts", "devices", "commands", "attach_handles"]
ROUTES = [
    *[("GET", f"/api/{name}/", None, (200, 200, 200, 403)) for name in READS],
    ("GET", f"/api/backends/{NOBODY}:pci_driver:a/", None, (404, 404, 404, 403)),
    ("GET", f"/api/rollouts/{NOBODY}/", None, (404, 404, 404, 403)),
    ("GET", f"/api/attachments/{NOBODY}/", None, (404, 404, 403, 403)),
    ("POST", "/api/commands/", {"op": "rescan", "host": NOBODY}, (400, 400, 403, 403)),
    ("POST", "/api/rollouts/", {}, (400, 400, 403, 403)),
    ("POST", f"/api/rollouts/{NOBODY}/cancel/", {}, (404, 404, 403, 403)),
    ("POST", "/api/attachments/", {}, (400, 400, 403, 403)),
    ("POST", f"/api/attachments/{NOBODY}/detach/", {}, (404, 404, 403, 403)),
    ("POST", "/api/commands/", {"op": "logs", "host": NOBODY}, (400, 403, 403, 403)),
    ("POST", "/api/commands/", {"op": "reset", "device": NOBODY}, (400, 403, 403, 403)),
    ("POST", f"/api/devices/{NOBODY}/enable/", {}, (404, 403, 403, 403)),
    ("PATCH", f"/api/devices/{NOBODY}/", {"layout": {"vfs": "4"}}, (404, 403, 403, 403)),
    ("POST", "/api/accelerators/", TARGETS, (202, 403, 403, 403)),
    ("POST", "/api/accelerators/delete/", TARGETS, (202, 403, 403, 403)),
    ("GET", "/api/accelerators/", None, (200, 200, 200, 200)),
    ("GET", "/api/accelerators/?attached=false", None, (200, 200, 200, 200)),
    ("GET", f"/api/accelerators/{NOBODY}/", None, (404, 404, 404, 404)),
    ("PATCH", f"/api/accelerators/{NOBODY}/", {"label": "x"}, (404, 404, 404, 404)),
    ("GET", "/api/attachments/", None, (200, 200, 403, 403)),
]


def test_who_may_do_what_and_a_refusal_says_who_may(ask: Ask) -> None:
    for method, path, body, answers in ROUTES:
        said = [ask(by, method, path, body) for by in WHO]
        assert tuple(response.status_code for response in said) == answers, (method, path, body)
        would_do = "admin" if answers[1] == 403 else OPERATOR if answers[2] == 403 else "manager"
        for response in said:
            if response.status_code == 403:
                text = json.loads(response.content)["error"]["message"]
                assert text.startswith("Access was denied to the following resource: cyborg:")
                assert text.endswith(f". The role {would_do} would be sufficient."), (method, path)
    assert not Command.objects.exists() and not Event.objects.filter(source="api").exists()


def test_the_elevated_have_a_host_looked_at_again(ask: Ask) -> None:
    host = a_heard_host("cmp1", 1)
    said = {"op": "rescan", "host": str(host.uuid), "driver": "pci_driver"}
    assert [ask(by, "POST", "/api/commands/", said).status_code for by in ("manager", OPERATOR)] == [403, 201]
    assert Command.objects.get().actor == OPERATOR


def test_a_member_lists_and_labels_what_its_project_has_attached_and_nothing_else(ask: Ask) -> None:
    a_heard_host("cmp1", 2)
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
    labelled = ask("member", "PATCH", own, {"label": "for the press"})
    assert (labelled.status_code, json.loads(labelled.content)["label"]) == (200, "for the press")
    assert [ask("member", method, foreign, {}).status_code for method in ("GET", "PATCH")] == [404, 404]
    assert ask("manager", "PATCH", foreign, {"label": "seen"}).status_code == 200
    rows = json.loads(ask("manager", "GET", "/api/accelerators/?attached=false").content)["results"]
    assert [row["label"] for row in rows] == ["for the press", "seen", "", ""]


def test_who_is_elevated_is_one_line_of_the_policy_file(tmp_path: Path) -> None:
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
