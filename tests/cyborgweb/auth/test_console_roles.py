"""Test the roles of the console: the pages, actions and refusals of each; and read-only mode."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
from django.contrib.auth.models import Group, Permission, User
from django.core.management import CommandError, call_command
from django.test import Client

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.states import EventSource
from accelerators.models import AcceleratorRequest, Device, DeviceProfile, Event
from accelerators.ui.refusals import CHANGED_MEANWHILE_TEXT
from cyborgweb.auth import read_only, roles
from cyborgweb.models import ApiToken
from tests.support.reports import create_heard_host

pytestmark = pytest.mark.django_db
ADMIN = Caller("ada", "1", frozenset(), "")
LogInAs = Callable[[str], Client]


@pytest.fixture
def enter() -> LogInAs:
    """Return a function that creates a user in the group of this name and returns its logged-in client."""

    def come(group: str) -> Client:
        user = User.objects.create(username=group, is_staff=True, is_superuser=group == "role:administrator")
        user.groups.add(roles.get_group(group))
        client = Client()
        client.force_login(user)
        return client

    return come


@pytest.fixture
def device() -> Device:
    create_heard_host("cmp1", 1)
    return Device.objects.get()


def device_page(device: Device) -> str:
    return f"/admin/accelerators/device/{device.pk}/change/"


@pytest.mark.slow
def test_each_role_sees_only_its_actions_and_why_others_are_missing(enter: LogInAs, device: Device) -> None:
    shown = {role.group: enter(role.group).get(device_page(device)).content.decode() for role in roles.ROLES}
    assert ['value="disable"' in page or 'value="enable"' in page for page in shown.values()] == [
        True,
        False,
        False,
        False,
    ]
    why = "You need the role admin or membership in the group role:administrator. Your roles: auditor, reader."
    assert why in shown["role:auditor"]
    assert "Why can’t I change anything here?" in shown["role:operator"]
    assert "Why can’t I do anything else?" in shown["role:administrator"]


@pytest.mark.slow
def test_operators_may_rescan_hosts_but_not_read_logs_and_viewers_neither(enter: LogInAs, device: Device) -> None:
    host = f"/admin/accelerators/host/{device.host_id}/"
    operator, viewer = enter("role:operator"), enter("role:viewer")
    assert ['value="rescan"' in one.get(f"{host}change/").content.decode() for one in (operator, viewer)] == [
        True,
        False,
    ]
    assert 'value="logs"' not in operator.get(f"{host}change/").content.decode()
    assert operator.post(f"{host}order/", {"op": "rescan"}).status_code == 302
    for client, op, role in ((viewer, "rescan", "accelerator_operator"), (operator, "logs", "admin")):
        refused = client.post(f"{host}order/", {"op": op})
        assert refused.status_code == 403
        assert f"You need the role {role}" in refused.content.decode()
    assert operator.get("/admin/accelerators/attachment/attach/").status_code == 200


@pytest.mark.slow
def test_auditors_see_users_and_tokens_and_viewers_do_not(enter: LogInAs) -> None:
    pages = "/admin/auth/user/", "/admin/cyborgweb/apitoken/", "/admin/accelerators/event/"
    auditor, viewer = enter("role:auditor"), enter("role:viewer")
    assert [auditor.get(page).status_code for page in pages] == [200, 200, 200]
    assert [viewer.get(page).status_code for page in pages] == [403, 403, 200]


@pytest.mark.slow
def test_a_tenant_sees_only_requests_of_its_own_project_on_every_page(enter: LogInAs, device: Device) -> None:
    with conductor.writing():
        profile = DeviceProfile.objects.create(name="small", groups=[{"resources:FPGA": "1"}])
        mine, theirs = (
            AcceleratorRequest.objects.create(project_id=project, state="Initial", profile=profile, group={})
            for project in ("p1", "p2")
        )
    tenant, listed = enter("project:p1"), "/admin/accelerators/acceleratorrequest/"
    assert tenant.get("/admin/").status_code == 200
    for path in (listed, f"{listed}export.json", f"{listed}?q={str(theirs.uuid)[:8]}"):
        page = b"".join(tenant.get(path)).decode()
        assert str(theirs.uuid) not in page
    assert str(mine.uuid) in b"".join(tenant.get(f"{listed}export.json")).decode()
    assert tenant.get(f"{listed}{mine.pk}/change/").status_code == 200
    assert tenant.get(f"{listed}{theirs.pk}/change/").status_code == 404
    assert f"{theirs.pk}/change" not in tenant.get(f"/admin/find/?q={theirs.uuid}").content.decode()
    assert tenant.get("/admin/accelerators/device/").status_code == 403
    rows = tenant.get("/api/requests/").json()["results"]
    assert [row["uuid"] for row in rows] == [str(mine.uuid)]


def test_a_new_project_group_gets_its_permissions_and_other_groups_give_no_role(enter: LogInAs) -> None:
    Group.objects.create(name="operators")
    User.objects.create(username="max").groups.add(Group.objects.get(name="operators"))
    assert roles.get_keystone_roles(User.objects.get(username="max")) == {"reader"}
    admin = enter("role:administrator")
    admin.post("/admin/auth/group/add/", {"name": "project:p9"})
    given = Group.objects.get(name="project:p9").permissions.values_list("codename", flat=True)
    assert set(given) == {"view_acceleratorrequest", "view_deviceprofile"}
    Group.objects.create(name="project:")
    User.objects.get(username="max").groups.set([Group.objects.get(name="project:")])
    assert roles.get_only_project(User.objects.get(username="max")) == ""
    assert not User.objects.get(username="max").has_perm("accelerators.view_acceleratorrequest")


def test_a_django_permission_suffices_to_perform_device_actions(device: Device, client: Client) -> None:
    rudi = User.objects.create(username="rudi", is_staff=True)
    rudi.user_permissions.set(Permission.objects.filter(codename__in=["view_device", "change_device"]))
    client.force_login(rudi)
    decided = client.post(f"/admin/accelerators/device/{device.pk}/decide/", {"choice": "quarantine"})
    assert decided.status_code == 302
    device.refresh_from_db()
    assert device.state == "quarantined"


@pytest.mark.django_db(transaction=True)
@pytest.mark.slow
def test_read_only_mode_refuses_changes_in_console_and_apis_with_the_reason(enter: LogInAs, device: Device) -> None:
    ada = enter("role:administrator")
    token = {
        "X-Auth-Token": ApiToken.create_with_secret(
            "t", User.objects.get(), sorted(roles.ADMINISTRATORS.keystone_roles), "p1"
        )
    }
    switch = "/admin/cyborgweb/maintenance/1/change/"
    ada.post(switch, {"on": "yes", "reason": "the database moves", "generation": "0"})
    because = "by role:administrator: the database moves. Try again later."
    for path, body in (
        (f"/admin/accelerators/device/{device.pk}/decide/", {"choice": "quarantine"}),
        (f"/api/devices/{device.uuid}/quarantine/", {}),
        (f"/v2/devices/{device.uuid}/disable", {}),
    ):
        asked = (
            ada.post(path, body)
            if path.startswith("/admin/")
            else Client().post(path, json.dumps(body), content_type="application/json", headers=token)
        )
        assert (asked.status_code, asked["Retry-After"]) == (503, "30"), path
        assert because in asked.content.decode(), path
        if path.startswith("/api/"):
            assert json.loads(asked.content)["error"]["reason"] == "read_only"
    assert because in ada.get("/admin/").content.decode()
    assert Client().get("/v2/devices", headers=token).status_code == 200
    assert Client().post("/api/census/", "{}", content_type="application/json", headers=token).status_code == 200
    for outdated, says in (
        ({}, "does not say which version"),
        ({"generation": "0"}, CHANGED_MEANWHILE_TEXT),
    ):
        said = ada.post(switch, {"off": "yes"} | outdated, follow=True).content.decode()
        assert says in said and "send generation" not in said
        assert read_only.get_maintenance() is not None
    seen = re.findall(r'name="generation" value="(\d+)"', ada.get(switch).content.decode())
    ada.post(switch, {"off": "yes", "generation": seen[0]})
    assert ada.post(f"/admin/accelerators/device/{device.pk}/decide/", {"choice": "quarantine"}).status_code == 302
    maintenance_events = (
        Event.objects.filter(action__startswith="maintenance.").order_by("id").values_list("action", "actor", "reason")
    )
    assert list(maintenance_events) == [
        ("maintenance.begun", "role:administrator", "the database moves"),
        ("maintenance.ended", "role:administrator", ""),
    ]


def test_operators_cannot_switch_read_only_mode(enter: LogInAs) -> None:
    answered = enter("role:operator").post("/admin/cyborgweb/maintenance/1/change/", {"on": "yes"})
    assert answered.status_code == 403
    assert read_only.get_maintenance() is None


@pytest.mark.django_db(transaction=True)
def test_the_read_only_command_shows_and_switches_the_mode(capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> str:
        call_command("read_only", *arguments)
        return capsys.readouterr().out

    assert said() == "The product is not in read-only mode: changes are possible.\nGeneration: 0\n"
    shown = said("on", "--reason", "upgrade", "--generation", "0")
    assert ": upgrade. Try again later." in shown and said() == shown
    generation = shown.splitlines()[1].removeprefix("Generation: ")
    for outdated in ("0", str(int(generation) - 1)):
        with pytest.raises(CommandError, match=f"is at generation {generation} now, not {outdated}"):
            said("off", "--generation", outdated)
    assert "changes are possible" in said("off", "--generation", generation)
    assert ": again." in said("on", "--reason", "again")
    assert "changes are possible" in said("off")
    with pytest.raises(CommandError, match="at most"):
        said("on", "--reason", "x" * 5000)


def test_a_process_without_notification_learns_of_read_only_mode_after_the_cache_expires(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(read_only, "_cached", None)  # the test begins without a cached answer
    assert read_only.get_maintenance() is None
    monkeypatch.setattr(read_only, "_notify_processes", lambda: None)
    read_only.switch_read_only(True, ADMIN, "", EventSource.PERSON)
    monkeypatch.setattr(read_only.time, "monotonic", lambda: float("inf"))
    assert read_only.get_maintenance() is not None
