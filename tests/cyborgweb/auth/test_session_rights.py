"""Test that a session of the console has the rights of its console role through every API, and that a write reaches
only rows of the projects that its caller may change."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client

from accelerators import conductor
from accelerators.models import AcceleratorRequest, AttachHandle, DeviceProfile, Event
from cyborgweb.api.root import COLLECTIONS
from cyborgweb.auth import roles
from cyborgweb.auth.login import BACKEND_PATH, LoginForm
from cyborgweb.auth.policy import IMPLIED_ROLES
from cyborgweb.auth.policy_rules import AUDITOR, OPERATOR
from cyborgweb.models import ApiToken
from tests.support.keystone import User as Person
from tests.support.keystone import vouching
from tests.support.reports import create_heard_host

pytestmark = pytest.mark.django_db

READ_ONLY_GROUPS = ("role:operator", "role:auditor", "role:viewer", "project:local", "project:p1")
"""The console roles that may not make or delete requests."""
PASSWORD = "correct horse battery"
EnterConsole = Callable[[str], Client]


@pytest.fixture
def enter() -> EnterConsole:
    """Return a function that makes a user in the group of this name and returns its logged-in client."""

    def log_in(group: str) -> Client:
        user = User.objects.create(username=group, is_staff=True)
        user.groups.add(roles.get_group(group))
        client = Client()
        client.force_login(user)
        return client

    return log_in


@pytest.fixture
def profile() -> DeviceProfile:
    with conductor.writing():
        return DeviceProfile.objects.create(name="small", groups=[{"resources:FPGA": "1"}])


def create_request(profile: DeviceProfile, project: str, **columns: Any) -> AcceleratorRequest:
    with conductor.writing():
        return AcceleratorRequest.objects.create(
            **{"project_id": project, "state": "Initial", "profile": profile, "group": {}} | columns
        )


def create_holding_requests(profile: DeviceProfile, *projects: str) -> list[AcceleratorRequest]:
    """Return one Bound request of each of these projects, each with a unit of its own."""
    create_heard_host("cmp1", len(projects))
    return [
        create_request(profile, project, state="Bound", deployable_id=handle.deployable_id, attach_handle=handle)
        for project, handle in zip(projects, AttachHandle.objects.order_by("id"), strict=False)
    ]


def write_through_v2(client: Client, request: AcceleratorRequest) -> dict[str, int]:
    """Make, change and delete requests through v2 as an API client; return the status of each."""
    body = json.dumps({"device_profile_name": "small"})
    patch = json.dumps({str(request.uuid): [{"op": "remove", "path": "/hostname"}]})
    answers = {
        "make": client.post("/v2/accelerator_requests", body, "application/json"),
        "change": client.patch("/v2/accelerator_requests", patch, "application/json"),
        "delete": client.delete(f"/v2/accelerator_requests?arqs={request.uuid}"),
    }
    return {name: answer.status_code for name, answer in answers.items()}


@pytest.mark.parametrize("group", READ_ONLY_GROUPS)
def test_no_read_only_console_role_writes_requests_through_v2(
    enter: EnterConsole, profile: DeviceProfile, group: str
) -> None:
    project = group.removeprefix("project:") if group.startswith("project:") else roles.LOCAL_PROJECT
    request, client = create_request(profile, project), enter(group)
    shown = client.get(f"/v2/accelerator_requests/{request.uuid}")
    assert shown.status_code == 200, "the role reads the requests of its project"
    assert write_through_v2(client, request) == {"make": 403, "change": 403, "delete": 403}
    assert [one.uuid for one in AcceleratorRequest.objects.all()] == [request.uuid]
    refusal = client.delete(f"/v2/accelerator_requests?arqs={request.uuid}").content.decode()
    assert "Access was denied to the following resource: cyborg:arq:delete" in refusal


def test_a_viewer_cannot_delete_a_request_between_novas_create_and_bind(
    client: Client, enter: EnterConsole, profile: DeviceProfile
) -> None:
    nova = ApiToken.create_with_secret("nova", User.objects.create(username="nova"), ["member"], roles.LOCAL_PROJECT)
    body = json.dumps({"device_profile_name": "small"})
    made = client.post("/v2/accelerator_requests", body, "application/json", headers={"X-Auth-Token": nova})
    (uuid,) = (one["uuid"] for one in json.loads(made.content)["arqs"])
    assert enter("role:viewer").delete(f"/v2/accelerator_requests?arqs={uuid}").status_code == 403
    assert AcceleratorRequest.objects.filter(uuid=uuid).exists()


def test_an_administrators_session_still_makes_and_deletes_requests(
    enter: EnterConsole, profile: DeviceProfile
) -> None:
    client, request = enter("role:administrator"), create_request(profile, roles.LOCAL_PROJECT)
    # To change a request needs a service token in addition, which no session has.
    assert write_through_v2(client, request) == {"make": 201, "change": 403, "delete": 204}


@pytest.mark.parametrize("role", ["member", "manager", AUDITOR, OPERATOR])
def test_no_keystone_session_without_the_role_admin_writes_requests_through_v2(
    client: Client, profile: DeviceProfile, settings: Any, monkeypatch: pytest.MonkeyPatch, role: str
) -> None:
    settings.AUTHENTICATION_BACKENDS = [BACKEND_PATH]
    monkeypatch.setattr(admin.site, "login_form", LoginForm)
    request = create_request(profile, "p1")
    with vouching(CYBORG_CONSOLE_TENANT_ROLES="member") as keystone:
        keystone.users.append(Person("ann", PASSWORD, {"p1": sorted(IMPLIED_ROLES[role])}))
        fields = {"username": "ann", "password": PASSWORD, "domain": "Default", "project": "p1", "next": "/admin/"}
        assert client.post("/admin/login/", fields).status_code == 302
        assert client.get(f"/v2/accelerator_requests/{request.uuid}").status_code == 200
        assert write_through_v2(client, request) == {"make": 403, "change": 403, "delete": 403}


def test_a_tenants_session_does_not_see_the_inventory_through_v2(enter: EnterConsole) -> None:
    create_heard_host("cmp1", 1)
    paths = ("/v2/devices", "/v2/deployables", "/v2/attributes", "/api/devices/")
    tenant, viewer = enter("project:p1"), enter("role:viewer")
    assert [tenant.get(path).status_code for path in paths] == [403] * 4
    assert [viewer.get(path).status_code for path in paths] == [200] * 4
    assert tenant.get("/v2/device_profiles").status_code == 200


def ask_with_role(role: str) -> Callable[..., HttpResponse]:
    """Return `ask(method, path, body)`, which sends a request with a token of exactly the roles that `role` implies."""
    user, _ = User.objects.get_or_create(username="owner of tokens")
    token = ApiToken.create_with_secret(role, user, sorted(IMPLIED_ROLES.get(role, {role})), "p1")

    def call(method: str, path: str, body: Any = None) -> HttpResponse:
        sent = b"" if body is None else json.dumps(body).encode()
        return Client().generic(method, path, sent, content_type="application/json", headers={"X-Auth-Token": token})

    return call


def test_a_token_of_an_auditor_changes_nothing_and_tokens_of_readers_keep_upstreams_rights(
    profile: DeviceProfile,
) -> None:
    body = {"device_profile_name": "small"}
    by_role = {
        role: ask_with_role(role)("POST", "/v2/accelerator_requests", body).status_code
        for role in (AUDITOR, "reader", "member", "no usual role")
    }
    assert by_role == {AUDITOR: 403, "reader": 201, "member": 201, "no usual role": 201}
    request = AcceleratorRequest.objects.first()
    assert request is not None
    path = f"/v2/accelerator_requests?arqs={request.uuid}"
    assert [ask_with_role(role)("DELETE", path).status_code for role in (AUDITOR, "service")] == [403, 204]


def test_a_manager_labels_only_accelerators_of_its_own_project(profile: DeviceProfile) -> None:
    own, foreign = (f"/api/accelerators/{one.uuid}/" for one in create_holding_requests(profile, "p1", "p2"))
    manager = ask_with_role("manager")
    assert manager("PATCH", own, {"label": "ours", "generation": 1}).status_code == 200
    assert manager("GET", foreign).status_code == 200, "a manager sees the accelerators of every project"
    refused = manager("PATCH", foreign, {"label": "taken"})
    assert refused.status_code == 403
    text = json.loads(refused.content)["error"]["message"]
    assert text.startswith("Access was denied to the following resource: cyborg:accelerator:update_elevated")
    assert text.endswith(f"The role {OPERATOR} would be sufficient.")
    assert sorted(AcceleratorRequest.objects.values_list("project_id", "label")) == [("p1", "ours"), ("p2", "")]
    assert Event.objects.filter(action="request.labelled").count() == 1
    for seen, role in enumerate((OPERATOR, "admin"), start=1):
        body = {"label": f"by {role}", "generation": seen}
        assert ask_with_role(role)("PATCH", foreign, body).status_code == 200
    assert ask_with_role("member")("PATCH", foreign, {"label": "taken"}).status_code == 404


def test_a_viewers_session_labels_nothing_and_an_operators_session_does(
    enter: EnterConsole, profile: DeviceProfile
) -> None:
    (held,) = create_holding_requests(profile, roles.LOCAL_PROJECT)
    path, body = f"/api/accelerators/{held.uuid}/", json.dumps({"label": "x", "generation": 1})
    statuses = {
        group: enter(group).patch(path, body, "application/json").status_code
        for group in ("role:viewer", "role:auditor", "project:local", "role:operator", "role:administrator")
    }
    assert statuses == {
        "role:viewer": 403,
        "role:auditor": 403,
        "project:local": 403,
        "role:operator": 200,
        "role:administrator": 200,
    }


def test_every_collection_with_rows_of_projects_and_a_write_is_known_here() -> None:
    """A new collection needs a test that a write on another project's row is refused. The others have this test in
    `test_attachments.py` (attachments), `test_bulk_targets.py` (bulk actions) and `test_api.py` (subscriptions,
    deliveries, inbox)."""
    project_fields = {"project_id", "request", "subscription"}
    writing = {
        name
        for name, view in COLLECTIONS.items()
        if {field.name for field in view.queryset.model._meta.get_fields()} & project_fields
        and (view.member_actions or any(hasattr(view, method) for method in ("partial_update", "destroy")))
    }
    assert writing == {"accelerators", "attachments", "bulk_actions", "subscriptions", "deliveries", "inbox"}
