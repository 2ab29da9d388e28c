"""Test that a token of an auditor reads, whatever its project is, all rows that the console shows an auditor."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client, RequestFactory

from accelerators import conductor
from accelerators.domain.states import BulkTarget, EventSource
from accelerators.models import AdmissionRule, Attachment, Bulk, BulkItem
from cyborgweb.api.root import COLLECTIONS
from cyborgweb.auth import policy, roles
from cyborgweb.auth.policy import IMPLIED_ROLES, Policy
from cyborgweb.auth.policy_rules import AUDITOR
from cyborgweb.models import ApiToken
from tests.accelerators.api.own.conftest import INSTANCES, Ask, Fill, get_results

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("agents_need_not_be_up")]

LIMITED_IN_THE_CONSOLE = ("subscriptions", "deliveries", "inbox")
"""Lists of which the console shows an auditor only a part, too."""


def ask_as_auditor(path: str, *more_roles: str, method: str = "GET") -> HttpResponse:
    user, _ = User.objects.get_or_create(username="vera")
    named = sorted(IMPLIED_ROLES[AUDITOR].union(more_roles))
    token = ApiToken.create_with_secret("vera", user, named, "elsewhere")
    return Client().generic(method, path, b"{}", "application/json", headers={"X-Auth-Token": token})


def create_other_rows(ask: Ask) -> None:
    """Create rows of the lists that `fill` leaves empty, and bulk actions on objects of the project p1."""
    token = {"host": "cmp77", "address": "https://10.0.0.1:8443"}
    assert ask("/api/join_tokens/", method="POST", data=token).status_code == 201
    with conductor.writing():
        AdmissionRule.objects.create(name="all", action="ready")
        for target, action in ((BulkTarget.ATTACHMENT, "detach"), (BulkTarget.ACCELERATOR, "label")):
            bulk = Bulk.objects.create(action=action, target=target, project_id="p1", total=1, actor="olga")
            BulkItem.objects.create(bulk=bulk, target_uuid=INSTANCES[0], target_name="x", host="cmp0", stood="")
        conductor.record_event("request.bound", EventSource.API, "nova", subject=(None, "x"))


@pytest.mark.slow
@pytest.mark.parametrize("collection", [name for name in COLLECTIONS if name not in LIMITED_IN_THE_CONSOLE])
def test_a_token_of_an_auditor_lists_the_rows_of_all_projects(collection: str, ask: Ask, fill: Fill) -> None:
    fill(4)
    create_other_rows(ask)
    request = RequestFactory().get("/")
    request.user = User.objects.create(username="auditor", is_staff=True)
    request.user.groups.add(roles.get_group(roles.AUDITORS.group))
    shown = admin.site._registry.get(COLLECTIONS[collection].queryset.model)
    assert shown is None or shown.has_view_permission(request), "an auditor sees this list in the console"
    path = f"/api/{collection}/?fields=url&limit=500"
    rows = get_results(ask(path))
    assert rows and get_results(ask_as_auditor(path)) == rows
    assert ask_as_auditor(rows[0]["url"].removeprefix("http://testserver")).status_code == 200


@pytest.mark.parametrize("rules", [(), ("cyborg:attachment:create", "cyborg:attachment:delete")])
def test_an_auditor_whom_the_policy_file_lets_write_changes_no_attachment_of_another_project(
    rules: tuple[str, ...], fill: Fill, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(1)
    (tmp_path / "policy.yaml").write_text("\n".join(f'"{rule}": "role:{AUDITOR}"' for rule in rules))
    rules_in_force = Policy(tmp_path / "policy.yaml", False)
    monkeypatch.setattr(policy, "_get_policy", lambda: rules_in_force)
    row = Attachment.objects.get()
    path = f"/api/attachments/{row.uuid}/"
    assert ask_as_auditor(path).status_code == 200
    refused = ask_as_auditor(f"{path}detach/", method="POST")
    rule = "cyborg:attachment:elevated" if rules else "cyborg:attachment:delete"
    assert refused.status_code == 403 and f"resource: {rule}" in json.loads(refused.content)["error"]["message"]
    assert Attachment.objects.get().state == row.state
