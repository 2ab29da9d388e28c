"""Test enabling and disabling devices, operators' attributes and programming over v2 (contract 2.4 to 2.6)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from uuid import NAMESPACE_DNS, UUID, uuid3, uuid4

import msgspec
import pytest

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.models import Command, Deployable, Device, Event, Intent
from accelerators.workflows import command_endings
from drivers.inventory import Deployable as Part
from tests.accelerators.api.v2.conftest import Call, get_fault_string
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db

UNKNOWN_UUID = "00000000-3f10-4d5c-9c6b-6e0f9a3c1b2d"
Offered = Callable[..., str]


@pytest.fixture
def device(db: None) -> Device:
    apply_report(get_or_create_host(), make_driver_report(make_card(1)))
    return Device.objects.get()


def get_status(call: Call, device: Device) -> str:
    found = json.loads(call("GET", f"/v2/devices/{device.uuid}").content)["status"]
    assert isinstance(found, str)
    return found


def test_a_device_that_leaves_inactive_gets_provider_ids_and_keeps_recorded_ones(call: Call, device: Device) -> None:
    name = "cmp1_0000:01:00.0"
    assert Deployable.objects.get().rp_uuid is None
    call("POST", f"/v2/devices/{device.uuid}/enable")
    (shown,) = json.loads(call("GET", "/v2/deployables").content)["deployables"]
    assert shown["rp_uuid"] == str(uuid3(NAMESPACE_DNS, name))
    adopted = str(uuid4())
    with conductor.writing():
        Deployable.objects.update(rp_uuid=adopted)
    second = Part("cmp1_second", 1, (), (), "test")
    grown = make_card(1)
    apply_report(
        device.host, make_driver_report(msgspec.structs.replace(grown, deployables=(*grown.deployables, second))), seq=2
    )
    call("POST", f"/v2/devices/{device.uuid}/disable")
    found = dict(Deployable.objects.values_list("name", "rp_uuid"))
    assert found == {name: UUID(adopted), "cmp1_second": uuid3(NAMESPACE_DNS, "cmp1_second")}


def test_enable_and_disable_answer_204_also_when_repeated_and_record_events(call: Call, device: Device) -> None:
    for action, expected in (("enable", "enabled"), ("enable", "enabled"), ("disable", "maintaining")) * 2:
        response = call("POST", f"/v2/devices/{device.uuid}/{action}", b"not looked at", content_type="text/plain")
        assert (response.status_code, response.content, response.headers.get("Content-Type")) == (204, b"", None)
        assert get_status(call, device) == expected
    device.refresh_from_db()
    assert (device.state, device.state_reason, device.state_by) == (
        "maintenance",
        "disabled",
        "admin member reader of p1",
    )
    moves = (
        Event.objects.filter(subject=device.uuid, source="api").order_by("id").values_list("changes__state", flat=True)
    )
    enabled, disabled = ["maintenance", "ready"], ["ready", "maintenance"]
    assert list(moves) == [["inactive", "ready"], disabled, enabled, disabled]
    assert Intent.objects.filter(kind="provider", key=str(device.host.uuid)).exists()


@pytest.mark.parametrize(
    ("before", "action", "code", "after"),
    [
        ("failed", "enable", 204, "ready"),
        ("installing", "enable", 204, "installing"),
        ("installing", "disable", 204, "maintenance"),
        ("inactive", "disable", 204, "inactive"),
        ("quarantined", "enable", 409, "quarantined"),
        ("retired", "disable", 204, "retired"),
        ("missing", "enable", 409, "missing"),
    ],
)
def test_enable_and_disable_from_other_states_move_the_device_or_answer_409(
    call: Call, device: Device, before: str, action: str, code: int, after: str
) -> None:
    with conductor.writing():
        Device.objects.update(state=before)
    assert call("POST", f"/v2/devices/{device.uuid}/{action}").status_code == code
    device.refresh_from_db()
    assert device.state == after


def test_a_device_that_needs_installation_is_shown_enabled_after_the_installation(call: Call) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1, to_install="four functions are made")))
    device = Device.objects.get()
    for _ in range(2):
        assert call("POST", f"/v2/devices/{device.uuid}/enable").status_code == 204
        assert get_status(call, device) == "maintaining"
    command = Command.objects.get()
    assert (command.op, command.actor, command.reason) == ("install", "admin member reader of p1", "enabled")
    command_queue.store_answers([command_queue.CommandAnswer(command.host_id, command.id, "succeeded")])
    command_endings.end_answered_commands()
    assert get_status(call, device) == "enabled"
    call("POST", f"/v2/devices/{device.uuid}/disable")
    assert call("POST", f"/v2/devices/{device.uuid}/enable").status_code == 204
    call("POST", f"/v2/devices/{device.uuid}/disable")
    response = call("POST", f"/v2/devices/{device.uuid}/enable")
    assert (response.status_code, "is busy with install" in get_fault_string(response)) == (409, True)


def test_actions_on_unknown_devices_and_without_a_uuid_are_refused(call: Call) -> None:
    for name in (UNKNOWN_UUID, "nope"):
        response = call("POST", f"/v2/devices/{name}/enable")
        assert (response.status_code, get_fault_string(response)) == (404, f"Device not found with uuid={name}")
    for action in ("enable", "disable"):
        response = call("POST", f"/v2/devices/{action}")
        assert (response.status_code, get_fault_string(response)) == (400, 'Missing argument: "uuid"')
        response = call("GET", f"/v2/devices/{action}")
        assert (response.status_code, get_fault_string(response)) == (404, f"Device not found with uuid={action}")
    assert call("POST", f"/v2/devices/{UNKNOWN_UUID}").status_code == 405


def test_disabling_a_device_keeps_bound_requests_and_refuses_new_binds(call: Call, offered: Offered) -> None:
    rp, path = offered(handles=2), "/v2/accelerator_requests"
    call("POST", "/v2/device_profiles", [{"name": "n", "groups": [{"resources:FPGA": "1"}]}])
    bound, late = (
        json.loads(call("POST", path, {"device_profile_name": "n"}).content)["arqs"][0]["uuid"] for _ in range(2)
    )

    def bind(uuid: str) -> int:
        values = {"hostname": "cmp1", "device_rp_uuid": rp, "instance_uuid": uuid}
        operations = [{"op": "add", "path": f"/{name}", "value": value} for name, value in values.items()]
        return call("PATCH", path, {uuid: operations}, service=True).status_code

    assert bind(bound) == 202
    assert call("POST", f"/v2/devices/{Device.objects.get().uuid}/disable").status_code == 204
    assert json.loads(call("GET", f"{path}/{bound}").content)["state"] == "Bound"
    assert bind(late) == 404


@pytest.mark.parametrize("wrapped", [False, True])
def test_an_operators_attribute_is_created_shown_and_deleted(call: Call, device: Device, wrapped: bool) -> None:
    part = Deployable.objects.get()
    asked: dict[str, Any] = {"deployable_id": str(part.id), "key": "trait9", "value": "CUSTOM_MINE", "extra": 1}
    response = call("POST", "/v2/attributes", {"attribute": asked} if wrapped else asked)
    made = json.loads(response.content)
    assert (response.status_code, list(made)) == (
        201,
        ["uuid", "deployable_id", "key", "value", "created_at", "updated_at", "links"],
    )
    assert (made["deployable_id"], made["key"], made["value"], made["updated_at"]) == (
        part.id,
        "trait9",
        "CUSTOM_MINE",
        None,
    )
    assert made["links"][0]["href"] == f"http://testserver/accelerator/v2/attributes/{made['uuid']}"
    assert json.loads(call("GET", f"/v2/attributes/{made['uuid']}").content) == made
    assert call("DELETE", f"/v2/attributes/{made['uuid']}").status_code == 204
    assert call("GET", f"/v2/attributes/{made['uuid']}").status_code == 404


def test_attributes_are_listed_by_deployable_and_key(call: Call) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1), make_card(2)))
    first, second = Deployable.objects.order_by("id")

    def keys(query: str) -> list[tuple[int, str]]:
        body = json.loads(call("GET", f"/v2/attributes{query}").content)
        return [(a["deployable_id"], a["key"]) for a in body["attributes"]]

    everything = [(first.id, "rc"), (first.id, "trait0"), (second.id, "rc"), (second.id, "trait0")]
    assert keys("") == keys("?deployable_id=0") == everything
    assert keys(f"?deployable_id={second.id}") == everything[2:]
    assert keys(f"?deployable_id={second.id}&key=rc&limit=5") == [(second.id, "rc")]


@pytest.mark.parametrize(
    ("method", "address", "body", "status"),
    [
        ("POST", "", {}, 400),
        ("POST", "", [], 400),
        ("POST", "", {"deployable_id": "x", "key": "k", "value": "v"}, 400),
        ("POST", "", {"deployable_id": 1, "key": None, "value": "v"}, 400),
        ("POST", "", {"deployable_id": 1, "key": "k", "value": 5}, 400),
        ("POST", "", {"deployable_id": 1, "key": "k", "value": "a\0"}, 400),
        ("POST", "", {"deployable_id": 999999, "key": "k", "value": "v"}, 404),
        ("POST", "", {"deployable_id": 10**30, "key": "k", "value": "v"}, 400),
        ("GET", "?deployable_id=x", None, 400),
        ("GET", "?value=x", None, 400),
        ("GET", "/nope", None, 400),
        ("GET", f"/{UNKNOWN_UUID}", None, 404),
        ("DELETE", "", None, 400),
        ("DELETE", "/nope", None, 404),
        ("DELETE", f"/{UNKNOWN_UUID}", None, 404),
        ("PATCH", "", None, 404),
        ("PATCH", f"/{UNKNOWN_UUID}", None, 405),
    ],
)
def test_invalid_attribute_requests_are_refused(
    call: Call, method: str, address: str, body: object, status: int
) -> None:
    assert call(method, f"/v2/attributes{address}", body).status_code == status


def build_program_body(path: str = "/program", op: str = "replace", value: object = None) -> list[dict[str, object]]:
    return [{"path": path, "op": op, "value": value or [{"image_uuid": UNKNOWN_UUID}]}]


def test_S1_programming_a_held_device_is_refused_naming_the_request(call: Call, offered: Offered) -> None:
    rp, path = offered(acts="program"), "/v2/accelerator_requests"
    call("POST", "/v2/device_profiles", [{"name": "n", "groups": [{"resources:FPGA": "1"}]}])
    (arq,) = json.loads(call("POST", path, {"device_profile_name": "n"}).content)["arqs"]
    values = {"hostname": "cmp1", "device_rp_uuid": rp, "instance_uuid": UNKNOWN_UUID}
    operations = [{"op": "add", "path": f"/{name}", "value": value} for name, value in values.items()]
    assert call("PATCH", path, {arq["uuid"]: operations}, service=True).status_code == 202
    response = call("PATCH", f"/v2/deployables/{Deployable.objects.get().uuid}/program", build_program_body())
    assert (response.status_code, arq["uuid"] in get_fault_string(response)) == (409, True)


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({}, 400, "Invalid input for field/attribute program_info"),
        ([], 400, "Invalid input for field/attribute program_info"),
        (build_program_body(path="program"), 400, "Invalid input for field/attribute path"),
        (build_program_body(op="test"), 400, "Invalid input for field/attribute op"),
        (build_program_body(path="/name"), 400, "'/name' is an internal attribute and can not be updated"),
        (build_program_body(value=[{"image_uuid": "zz"}]), 400, "Expected a uuid but received zz."),
        (build_program_body(value=["x"]), 400, "Invalid input for field/attribute value"),
        (None, 400, 'Missing argument: "program_info"'),
        (build_program_body(), 404, f"Deployable not found with uuid={UNKNOWN_UUID}"),
    ],
)
def test_invalid_program_requests_are_refused_with_upstreams_sentences(
    call: Call, body: object, status: int, sentence: str
) -> None:
    response = call("PATCH", f"/v2/deployables/{UNKNOWN_UUID}/program", body)
    assert (response.status_code, sentence in get_fault_string(response)) == (status, True), get_fault_string(response)


@pytest.mark.parametrize("roles", ["member reader", "manager member reader", "service", ""])
def test_only_admins_may_enable_disable_program_and_write_attributes(call: Call, device: Device, roles: str) -> None:
    for method, path in (
        ("POST", f"/v2/devices/{device.uuid}/enable"),
        ("POST", "/v2/devices/nope/disable"),
        ("POST", "/v2/attributes"),
        ("DELETE", "/v2/attributes/nope"),
        ("PATCH", "/v2/deployables/nope/program"),
    ):
        response = call(method, path, b"{", roles=roles)
        assert (response.status_code, "Access was denied" in get_fault_string(response)) == (403, True), path
