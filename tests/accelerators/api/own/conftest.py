"""Callers with several roles, and an inventory with held devices."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.http import HttpResponse
from django.test import Client

from accelerators import conductor
from accelerators.api.own.errors import REASONS
from accelerators.commands import command_queue
from accelerators.models import (
    AcceleratorRequest,
    AttachHandle,
    Attachment,
    Bulk,
    BulkItem,
    Device,
    DeviceProfile,
    Host,
    Image,
    Rollout,
    Seal,
)
from cyborgweb.models import ApiToken
from placement_sync.models import Discrepancy, DiscrepancyKind, NovaEndpoint
from tests.support.reports import create_heard_host

Ask = Callable[..., HttpResponse]
Fill = Callable[..., list[Host]]
ROLES_BY_CALLER = {
    "admin": ["admin", "manager", "member", "reader"],
    "manager": ["manager", "member", "reader"],
    "operator": ["accelerator_operator", "member", "reader"],
    "member": ["member", "reader"],
    "reader": ["reader"],
    "nobody": [],
}
INSTANCES = [f"{n:08x}-0000-4000-8000-000000000000" for n in range(64)]


@pytest.fixture
def ask(client: Client, db: None) -> Ask:
    """Return `ask(path, by="admin", project="p1", method="GET", data=None, **headers)`, which sends one request.

    `by` is a key of ROLES_BY_CALLER, or "" for a request without a token.
    """
    user = User.objects.create_user("rita")
    tokens: dict[tuple[str, str], str] = {}

    def call(
        path: str, by: str = "admin", project: str = "p1", method: str = "GET", data: Any = None, **headers: str
    ) -> HttpResponse:
        who = (by, project)
        if by and who not in tokens:
            tokens[who] = ApiToken.create_with_secret(f"{by}-{project}", user, ROLES_BY_CALLER[by], project)
        sent = ({"X-Auth-Token": tokens[who]} if by else {}) | headers
        body = data if isinstance(data, bytes) else b"" if data is None else json.dumps(data).encode()
        kind = headers.get("Content-Type", "application/json")
        return client.generic(method, path, body, content_type=kind, headers=sent)

    return call


@pytest.fixture
def fill(db: None) -> Fill:
    """Return `fill(devices)`, which creates hosts cmp0, cmp1… with ten cards of two handles each, and returns them.

    Every third free handle gets a bound request; the requests belong to p1 and p2 in turn and to INSTANCES. Each host
    has a rescan command and a discrepancy. There are an image, a seal, a rollout, a bulk action and an attachment.
    """

    def make(devices: int, first: int = 0) -> list[Host]:
        hosts = [create_heard_host(f"cmp{first + n}", min(10, devices - 10 * n)) for n in range(-(-devices // 10))]
        with conductor.writing():
            profile, _ = DeviceProfile.objects.get_or_create(
                name="small", defaults={"groups": [{"resources:FPGA": "1"}]}
            )
            Device.objects.filter(address__startswith="0000:01").update(state="ready")
            AcceleratorRequest.objects.bulk_create(
                AcceleratorRequest(
                    project_id=f"p{1 + n % 2}",
                    state="Bound",
                    profile=profile,
                    group={"resources:FPGA": "1"},
                    hostname=handle.deployable.device.host.name,
                    instance_uuid=INSTANCES[n % len(INSTANCES)],
                    deployable_id=handle.deployable_id,
                    attach_handle=handle,
                )
                for n, handle in enumerate(
                    AttachHandle.objects.filter(request__isnull=True)
                    .select_related("deployable__device__host")
                    .order_by("id")[::3]
                )
            )
            Rollout.objects.create(op="install", driver="far_driver", total=0, actor="olga", source="api")
            Attachment.objects.create(instance=INSTANCES[0], project_id="p1", host="cmp0", actor="olga")
            bulk = Bulk.objects.create(action="enable", total=1, actor="olga")
            BulkItem.objects.create(bulk=bulk, target_uuid=uuid.uuid4(), target_name="card", host="cmp0", stood="ready")
            Image.objects.create(name="shell", size=1, sha256="0" * 64, source="upload")
            facts = {"month": "2026-01", "tx": 0, "event": 0, "events": 0, "sealed_at": datetime.now(UTC)}
            Seal.objects.get_or_create(number=1, defaults=facts | {"digest": "0" * 64, "hash": "0" * 64})
            command_queue.place_commands(
                [command_queue.CommandOrder("rescan", host=host.id, actor="olga") for host in hosts]
            )
        seen = dict.fromkeys(("since", "seen_at"), datetime.now(UTC))
        for host in hosts:
            NovaEndpoint.objects.create(url=f"http://nova.{host.name}")
            about = {"host": host, "device": host.devices.first(), "provider_name": host.name, "said": "It is loose."}
            ids = {"provider": uuid.uuid4(), "instance": uuid.uuid4()}
            Discrepancy.objects.create(kind=DiscrepancyKind.UNATTACHED, **about, **ids, **seen)
        return hosts

    return make


def get_results(response: HttpResponse) -> list[dict[str, Any]]:
    """Return the rows of a list; fail unless its status is 200."""
    assert response.status_code == 200, response.content
    return json.loads(response.content)["results"]


def get_error_message(response: HttpResponse, status: int, reason: str = "") -> str:
    """Return the message of an error answer; check its form, its status and, if given, its reason."""
    assert response.status_code == status, response.content
    error = json.loads(response.content)["error"]
    assert list(error) == ["code", "title", "message", "request_id", "reason"]
    assert (error["code"], error["reason"] in REASONS) == (status, True), error
    assert reason in ("", error["reason"]), error
    assert error["request_id"] == response["x-openstack-request-id"]
    return error["message"]
