"""Test that handles of the type `DEV` (device nodes) are shown, but never offered to Nova or bound."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import AcceleratorRequest, AttachHandle, Deployable, Device, DeviceProfile
from accelerators.requests import binding
from accelerators.requests.binding import BindSpec
from cyborgweb.models import ApiToken
from drivers.inventory import AttachHandle as Handle
from drivers.inventory import Attribute
from drivers.inventory import Deployable as Part
from placement_sync.jobs import repository
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db
ADMIN = Caller("ops", "u", frozenset({"admin"}), "p")
NODE_PART = Part(
    "cmp1_0000:01:00.0", 1, (), (Handle("DEV", '{"path": "/dev/accel/accel0", "permissions": "rw"}'),), "1DA3"
)


@pytest.fixture
def node() -> AttachHandle:
    """Return the handle of a ready accelerator that is a device node; an ordinary ready card exists beside it."""
    apply_report(get_or_create_host(), make_driver_report(make_card(1, deployables=(NODE_PART,)), make_card(2)))
    for device in Device.objects.all():
        lifecycle.enable_device(device.uuid, ADMIN)
    return AttachHandle.objects.get(attach_type="DEV")


def test_a_deployable_with_device_nodes_is_not_written_to_placement(node: AttachHandle) -> None:
    (part,) = repository.load_deployables(get_or_create_host())
    assert part.name == "cmp1_0000:02:00.0" and part.total == 1


def test_a_bind_to_a_device_node_is_refused(node: AttachHandle) -> None:
    with conductor.writing():
        DeviceProfile.objects.create(name="fpga", groups=[{"resources:FPGA": "1"}])
    (request,) = binding.create_requests("fpga", ADMIN)
    provider = Deployable.objects.get(pk=node.deployable_id).rp_uuid
    with pytest.raises(RefusedError, match="device nodes") as caught:
        binding.bind_requests([BindSpec(request, "cmp1", str(provider), str(uuid4()), None)], ADMIN)
    assert caught.value.reason == RefusalReason.NONE_FREE
    assert AcceleratorRequest.objects.get().attach_handle is None


def test_a_device_node_is_shown_as_not_offered_in_console_and_api(node: AttachHandle, client: Client) -> None:
    client.force_login(user := User.objects.create(username="olga", is_staff=True, is_superuser=True))
    device = reverse("admin:accelerators_device_change", args=[node.deployable.device_id])
    listed = reverse("admin:accelerators_attachhandle_changelist")
    for page in (client.get(device).content.decode(), client.get(listed).content.decode()):
        assert "/dev/accel/accel0" in page and "not offered to Nova" in page
    token = ApiToken.create_with_secret("t", user, ["admin"], "p")
    rows = client.get("/api/attach_handles/?fields=type,not_offered", headers={"X-Auth-Token": token}).json()["results"]
    assert {row["type"]: row["not_offered"].partition(":")[0] for row in rows} == {
        "DEV": "not offered to Nova",
        "PCI": "",
    }


def test_a_card_that_becomes_a_device_node_is_removed_from_placement(node: AttachHandle) -> None:
    attributes = (Attribute("rc", "FPGA"),)
    apply_report(
        get_or_create_host(),
        make_driver_report(
            make_card(1, deployables=(NODE_PART,)), make_card(2, deployables=(device_node_part("02", attributes),))
        ),
        seq=2,
    )
    assert repository.load_deployables(get_or_create_host()) == []


def device_node_part(bus: str, attributes: tuple[Attribute, ...]) -> Part:
    """Return the deployable at this bus number as a device node."""
    return Part(f"cmp1_0000:{bus}:00.0", 1, attributes, (Handle("DEV", '{"path": "/dev/accel/accel1"}'),), "test")
