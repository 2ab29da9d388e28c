"""Test that what a project reads about its failed bind names nobody else's request, instance or unit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.test import Client

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandAnswer
from accelerators.domain.caller import Caller
from accelerators.models import (
    AcceleratorRequest,
    AttachHandle,
    Command,
    Device,
    Event,
    Intent,
    ReleasedHandle,
)
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from accelerators.workflows import command_endings
from cyborgweb.auth import roles
from cyborgweb.models import ApiToken
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.requests import create_profiles, offer_devices

pytestmark = pytest.mark.django_db
THEIRS = Caller("nova", "n", frozenset({"member"}), "p2", service=True)
PROVIDER, INSTANCE, FOREIGN_INSTANCE, IMAGE = (str(uuid4()) for _ in range(4))


@pytest.fixture(autouse=True)
def _ready_card() -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1, handles=3)))
    offer_devices(PROVIDER)
    create_profiles(plain={}, bits={"accel:bitstream_id": IMAGE})


class Tenant:
    """A member of project p1, with a token and with a session of the console."""

    def __init__(self) -> None:
        user = User.objects.create(username="tina", is_staff=True)
        user.groups.add(roles.get_group("project:p1"))
        self.token = ApiToken.create_with_secret("tina", user, ["member", "reader"], "p1")
        self.service = ApiToken.create_with_secret("nova", user, ["service"], "services")
        self.browser = Client()
        self.browser.force_login(user)

    def send(self, method: str, path: str, body: object = None) -> str:
        headers = {"X-Auth-Token": self.token, "X-Service-Token": self.service}
        sent = b"" if body is None else json.dumps(body).encode()
        return Client().generic(method, path, sent, "application/json", headers=headers).content.decode()

    def create_and_bind(self, profile: str) -> tuple[AcceleratorRequest, str]:
        """Make a request and bind it; return it and the answer of the bind."""
        made = json.loads(self.send("POST", "/v2/accelerator_requests", {"device_profile_name": profile}))
        (uuid,) = (arq["uuid"] for arq in made["arqs"])
        values = {"hostname": "cmp1", "device_rp_uuid": PROVIDER, "instance_uuid": INSTANCE}
        operations = [{"op": "add", "path": f"/{name}", "value": value} for name, value in values.items()]
        answer = self.send("PATCH", "/v2/accelerator_requests", {uuid: operations})
        return AcceleratorRequest.objects.get(uuid=uuid), answer

    def read_everything(self, request: AcceleratorRequest) -> Iterator[str]:
        """Yield everything that shows the request: both APIs, its events, and the pages of the console."""
        yield self.send("GET", "/v2/accelerator_requests")
        for path in (f"requests/{request.uuid}/", "requests/", "accelerators/", f"events/?subject={request.uuid}"):
            yield self.send("GET", f"/api/{path}")
        for path in ("", f"{request.pk}/change/"):
            page = self.browser.get(f"/admin/accelerators/acceleratorrequest/{path}")
            assert page.status_code == 200
            yield page.content.decode()


@pytest.fixture
def tenant() -> Tenant:
    return Tenant()


def hold_by_another_project() -> tuple[str, str]:
    """Bind a request of project p2; return its uuid and that of its handle."""
    (uuid,) = binding.create_requests("plain", THEIRS)
    binding.bind_requests([BindSpec(uuid, "cmp1", PROVIDER, FOREIGN_INSTANCE)], THEIRS)
    return uuid, str(AcceleratorRequest.objects.get(uuid=uuid).attach_handle.uuid)


def check_that_nothing_foreign_is_shown(
    tenant: Tenant, request: AcceleratorRequest, answer: str, says: str, *foreign: str
) -> None:
    """Check that the request failed, that the tenant reads the reason, and reads none of the foreign identifiers."""
    request.refresh_from_db()
    assert request.state == "BindFailed" and says in request.fault
    reasons = Event.objects.filter(subject=request.uuid).values_list("reason", flat=True)
    shown = [answer, *tenant.read_everything(request), *reasons]
    assert any(says in text for text in shown[1:])
    for text in shown:
        assert not [one for one in (FOREIGN_INSTANCE, *foreign) if one in text], text


def test_a_device_that_another_projects_request_holds_does_not_name_it(
    tenant: Tenant, caplog: pytest.LogCaptureFixture, django_capture_on_commit_callbacks: Any
) -> None:
    with conductor.writing():
        AttachHandle.objects.update(attach_type="PCI")
    theirs, handle = hold_by_another_project()
    with django_capture_on_commit_callbacks(execute=True):
        request, answer = tenant.create_and_bind("bits")
    assert "its device is held by request [hidden]" in answer
    check_that_nothing_foreign_is_shown(tenant, request, answer, "its device is held by request", theirs, handle)
    logged = [one.getMessage() for one in caplog.records if one.name == "accelerators.requests.binding"]
    assert [str(request.uuid) in text and f"held by request {theirs}:" in text for text in logged] == [True], (
        "operators read the whole text in the log"
    )


def test_a_released_unit_of_another_project_does_not_name_its_instance(tenant: Tenant) -> None:
    with conductor.writing():
        AttachHandle.objects.update(attach_type="PCI")
    theirs, handle = hold_by_another_project()
    binding.unbind_requests([theirs], THEIRS)
    with conductor.writing():
        ReleasedHandle.objects.create(
            handle=AttachHandle.objects.get(uuid=handle),
            instance=FOREIGN_INSTANCE,
            ask_at=datetime.now(UTC),
            answer=f"guest instance-0000002a has the function of {FOREIGN_INSTANCE} open",
        )
    request, answer = tenant.create_and_bind("bits")
    assert "instance [hidden] had it" in answer and "instance-0000002a" not in request.fault
    check_that_nothing_foreign_is_shown(tenant, request, answer, "cannot be programmed", theirs, handle)


def test_an_agents_refusal_does_not_name_who_else_has_the_device(tenant: Tenant) -> None:
    theirs, handle = str(uuid4()), str(uuid4())
    with conductor.writing():
        AttachHandle.objects.update(attach_type="MDEV")
    request, answer = tenant.create_and_bind("bits")
    command = Command.objects.get(op="attach")
    command_queue.mark_image_ready(command.id, {"id": IMAGE, "size": 3, "sha256": "a" * 64, "properties": {}})
    text = f"image {IMAGE}: its handle {handle} is attached to {FOREIGN_INSTANCE}: detach it first ({theirs})"
    command_queue.store_answers([CommandAnswer(command.host_id, command.id, "refused", text)])
    command_endings.end_answered_commands()
    says = f"image {IMAGE}: its handle [hidden] is attached to [hidden]: detach it first"
    check_that_nothing_foreign_is_shown(tenant, request, answer, says, theirs, handle)
    command.refresh_from_db()
    assert command.text == text, "operators read the whole answer with the command"


def test_an_error_of_placement_does_not_name_another_consumer(tenant: Tenant) -> None:
    with conductor.writing():
        AttachHandle.objects.update(attach_type="MDEV")
    request, answer = tenant.create_and_bind("bits")
    text = f"409: consumer {FOREIGN_INSTANCE} has an allocation on {PROVIDER}"
    host = str(Device.objects.get().host.uuid)
    with conductor.writing():
        Intent.objects.update_or_create(kind="provider", key=host, defaults={"last_error": text})
        Intent.objects.create(kind=binding.PROGRAMMED_INTENT, key=str(request.uuid), payload={"host": host})
        AcceleratorRequest.objects.update(deadline=datetime.now(UTC) - timedelta(seconds=1))
    binding.fail_overdue_binds()
    says = f"409: consumer [hidden] has an allocation on {PROVIDER}"
    check_that_nothing_foreign_is_shown(tenant, request, answer, says)
