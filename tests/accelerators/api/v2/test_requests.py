"""Test `/v2/accelerator_requests` over HTTP (contract section 2.3): create, bind, read, unbind, delete; projects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from accelerators import conductor
from accelerators.models import AcceleratorRequest, Command, Device, DeviceProfile, Event
from tests.accelerators.api.v2.conftest import Call, get_fault_string

pytestmark = pytest.mark.django_db

PATH = "/v2/accelerator_requests"
INSTANCE = "0a3f7d1e-5f0c-4b1a-9d44-0d6f4f3b9a10"
UNKNOWN_UUID = "00000000-3f10-4d5c-9c6b-6e0f9a3c1b2d"
REQUEST_KEYS = [
    *("uuid", "state", "device_profile_name", "device_profile_group_id", "hostname", "device_rp_uuid"),
    *("instance_uuid", "project_id", "attach_handle_type", "attach_handle_uuid", "attach_handle_info"),
    *("links", "created_at", "updated_at"),
]
SERVICE_TOKEN_NEEDED = "This operation requires a service token. Use the Compute API to manage instance accelerators."
Offered = Callable[..., str]


@pytest.fixture(autouse=True)
def _profile(db: None) -> None:
    with conductor.writing():
        DeviceProfile.objects.create(name="fpga", groups=[{"resources:FPGA": "1"}])
        DeviceProfile.objects.create(name="pair", groups=[{"resources:FPGA": "1"}, {"resources:FPGA": "1"}])


def create_requests(call: Call, name: str = "fpga", **options: Any) -> list[str]:
    response = call("POST", PATH, {"device_profile_name": name}, **options)
    assert response.status_code == 201, response.content
    return [arq["uuid"] for arq in json.loads(response.content)["arqs"]]


def build_bind_operations(rp: str, instance: str = INSTANCE, host: str = "cmp1") -> list[dict[str, str]]:
    values = {"hostname": host, "device_rp_uuid": rp, "instance_uuid": instance}
    return [{"op": "add", "path": f"/{name}", "value": value} for name, value in values.items()]


UNBIND_OPERATIONS = [{"op": "remove", "path": f"/{name}"} for name in ("hostname", "device_rp_uuid", "instance_uuid")]


def show_request(call: Call, uuid: str, **options: Any) -> dict[str, Any]:
    response = call("GET", f"{PATH}/{uuid}", **options)
    assert response.status_code == 200, response.content
    return json.loads(response.content)  # type: ignore[no-any-return]


def bind_requests(call: Call, rp: str, *uuids: str, instance: str = INSTANCE, **options: Any) -> Any:
    return call("PATCH", PATH, {uuid: build_bind_operations(rp, instance) for uuid in uuids}, service=True, **options)


def test_a_new_request_is_initial_and_belongs_to_the_callers_project(call: Call) -> None:
    response = call("POST", PATH, {"device_profile_name": "fpga", "image_uuid": 1, "device_profile_group_id": None})
    body = json.loads(response.content)
    assert (response.status_code, list(body)) == (201, ["arqs"])
    (arq,) = body["arqs"]
    assert list(arq) == REQUEST_KEYS
    assert (arq["state"], arq["device_profile_name"], arq["device_profile_group_id"]) == ("Initial", "fpga", 0)
    assert (arq["project_id"], arq["attach_handle_type"], arq["attach_handle_info"]) == ("p1", "", {})
    absent = ("hostname", "device_rp_uuid", "instance_uuid", "attach_handle_uuid", "updated_at")
    assert [arq[name] for name in absent] == [None] * 5
    assert re.fullmatch(r"\S+T\S+\+00:00", arq["created_at"])
    assert arq["links"][0]["href"] == f"http://testserver/accelerator/v2/accelerator_requests/{arq['uuid']}"
    assert show_request(call, arq["uuid"]) == arq


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([{"resources:FPGA": "1", "resources:CUSTOM_X": "2"}, {"resources:GPU": "1"}], [0, 0, 0, 1]),
        ([{"resources:FPGA": "2", "trait:CUSTOM_FPGA_XILINX": "required"}], [0, 0, 0, 0]),
        ([{"resources:FPGA": "2", "trait:CUSTOM_FPGA_XILINX": "forbidden"}], [0, 0]),
        ([{"trait:CUSTOM_A": "required"}, {"resources:FPGA": "-3"}], []),
    ],
)
def test_a_profile_makes_as_many_requests_as_its_groups_ask_for(
    call: Call, groups: object, expected: list[int]
) -> None:
    assert call("POST", "/v2/device_profiles", [{"name": "n", "groups": groups}]).status_code == 201
    body = json.loads(call("POST", PATH, {"device_profile_name": "n"}).content)
    assert [arq["device_profile_group_id"] for arq in body["arqs"]] == expected


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ({"device_profile_name": "none"}, 404, "Device Profile not found with name=none"),
        ({"device_profile_name": ""}, 404, "Device Profile not found with name="),
        ({"device_profile_name": "!@#$%\0"}, 404, "Device Profile not found with name=!@#$%"),
        ({}, 400, "DeviceProfile name needed."),
        ({"device_profile_name": 5}, 400, "DeviceProfile name needed."),
        ([], 400, "must be an object"),
        (None, 400, 'Missing argument: "req"'),
    ],
)
def test_invalid_creations_are_refused(call: Call, body: object, status: int, sentence: str) -> None:
    response = call("POST", PATH, body)
    assert response.status_code == status
    assert sentence in get_fault_string(response)


def test_a_request_is_bound_when_202_is_answered_and_unbind_frees_its_handle(call: Call, offered: Offered) -> None:
    rp = offered()
    (uuid,) = create_requests(call)
    response = bind_requests(call, rp, uuid)
    assert (response.status_code, response.content, response.headers.get("Content-Type")) == (202, b"", None)
    arq = show_request(call, uuid)
    assert (arq["state"], arq["hostname"], arq["device_rp_uuid"], arq["instance_uuid"]) == (
        "Bound",
        "cmp1",
        rp,
        INSTANCE,
    )
    assert arq["attach_handle_type"] == "PCI"
    assert arq["attach_handle_info"] == {"bus": "01", "device": "00", "domain": "0000", "function": "0"}
    assert arq["attach_handle_uuid"] and arq["updated_at"]

    assert call("PATCH", f"{PATH}/{uuid}", {uuid: UNBIND_OPERATIONS[:1]}, service=True).status_code == 202
    arq = show_request(call, uuid)
    assert (arq["state"], arq["attach_handle_type"], arq["attach_handle_info"]) == ("Unbound", "", {})
    assert [arq[name] for name in ("hostname", "device_rp_uuid", "instance_uuid", "attach_handle_uuid")] == [None] * 4
    assert bind_requests(call, rp, uuid).status_code == 202
    actions = Event.objects.filter(subject=uuid).order_by("id").values_list("action", flat=True)
    assert list(actions) == ["request.created", "request.bound", "request.unbound", "request.bound"]
    event = Event.objects.filter(subject=uuid, action="request.unbound").get()
    assert event.changes["state"] == ["Bound", "Unbound"]
    assert event.changes["instance_uuid"] == [INSTANCE, None]
    assert event.request_id.startswith("req-")


def test_all_requests_of_a_patch_are_reserved_or_none(call: Call, offered: Offered) -> None:
    rp = offered(handles=1)
    first, second = create_requests(call, "pair")
    response = bind_requests(call, rp, first, second)
    assert response.status_code == 404
    assert get_fault_string(response).startswith("AttachHandle not found Matching deployable_id ")
    for uuid in (first, second):
        assert (show_request(call, uuid)["state"], show_request(call, uuid)["attach_handle_uuid"]) == (
            "BindFailed",
            None,
        )
    assert "all are held" in AcceleratorRequest.objects.get(uuid=first).fault
    assert AcceleratorRequest.objects.filter(attach_handle__isnull=False).count() == 0
    assert call("PATCH", PATH, {first: UNBIND_OPERATIONS, second: UNBIND_OPERATIONS}, service=True).status_code == 202
    assert bind_requests(call, rp, first).status_code == 202


def test_two_requests_at_one_provider_get_two_different_handles(call: Call, offered: Offered) -> None:
    rp = offered(handles=3)
    assert bind_requests(call, rp, *create_requests(call, "pair")).status_code == 202
    held = AcceleratorRequest.objects.filter(state="Bound").values_list("attach_handle", flat=True)
    assert len(set(held)) == 2


@pytest.mark.parametrize("state", ["inactive", "maintenance", "failed", "missing", "quarantined"])
def test_binding_to_a_device_that_is_not_ready_fails(call: Call, offered: Offered, state: str) -> None:
    rp = offered()
    with conductor.writing():
        Device.objects.update(state=state)
    (uuid,) = create_requests(call)
    response = bind_requests(call, rp, uuid)
    assert (response.status_code, f"its device is {state}, not ready" in get_fault_string(response)) == (404, True)
    assert show_request(call, uuid)["state"] == "BindFailed"


def test_bind_and_unbind_need_a_service_token_whatever_the_callers_roles(call: Call, offered: Offered) -> None:
    (uuid,) = create_requests(call)
    for roles in ("admin", "service", "member reader"):
        for operations in (build_bind_operations(offered(n=len(roles))), UNBIND_OPERATIONS):
            response = call("PATCH", PATH, {uuid: operations}, roles=roles)
            assert (response.status_code, get_fault_string(response)) == (403, SERVICE_TOKEN_NEEDED)
    assert show_request(call, uuid)["state"] == "Initial"


def test_a_second_bind_of_an_instance_or_of_a_bound_request_is_refused(call: Call, offered: Offered) -> None:
    rp = offered(handles=2)
    first, second = create_requests(call, "pair")
    assert bind_requests(call, rp, first).status_code == 202
    response = bind_requests(call, rp, second)
    assert (response.status_code, get_fault_string(response)) == (
        400,
        f"Couldn't apply patch. Reason: Instance {INSTANCE} already has accelerator requests. "
        "Cannot bind additional ARQs.",
    )
    response = bind_requests(call, rp, first, instance=str(uuid4()))
    sentence = f"Bad state: Bound for ARQ: {first}. Expected state(s): ['Initial', 'Unbound']"
    assert (response.status_code, get_fault_string(response)) == (500, sentence)


def test_binding_unknown_requests_or_providers_is_answered_404(call: Call, offered: Offered) -> None:
    (uuid,) = create_requests(call)
    for unknown in (UNKNOWN_UUID, "zz", uuid.upper()):
        response = call("PATCH", PATH, {unknown: build_bind_operations(offered(n=len(unknown)))}, service=True)
        assert (response.status_code, get_fault_string(response)) == (404, f"ExtArq not found with uuid={unknown}")
    response = bind_requests(call, UNKNOWN_UUID, uuid)
    sentence = f"Deployable not found with resource provider uuid={UNKNOWN_UUID}"
    assert (response.status_code, get_fault_string(response)) == (404, sentence)
    assert show_request(call, uuid)["state"] == "BindFailed"


def _bind_operations_without(name: str) -> list[dict[str, str]]:
    return [operation for operation in build_bind_operations(UNKNOWN_UUID) if operation["path"] != f"/{name}"]


@pytest.mark.parametrize(
    ("operations", "status", "sentence"),
    [
        ([{"op": "replace", "path": "/hostname", "value": "x"}], 400, "Every op must be add or remove"),
        (build_bind_operations(UNKNOWN_UUID) + UNBIND_OPERATIONS, 400, "Every op must be add or remove"),
        (
            [{"op": "add", "path": "/foo", "value": "x"}],
            400,
            "Couldn't apply patch. Reason: Invalid path in patch /foo",
        ),
        (_bind_operations_without("hostname"), 400, "Couldn't apply patch. Reason: Fields absent in patch hostname"),
        (
            [*_bind_operations_without("hostname"), {"op": "add", "path": "hostname"}],
            400,
            "Fields absent in patch hostname",
        ),
        (build_bind_operations("zz"), 400, "Expected a uuid but received zz."),
        (build_bind_operations(UNKNOWN_UUID, "zz"), 400, "Expected a uuid but received zz."),
        (build_bind_operations(UNKNOWN_UUID, INSTANCE, "x" * 256), 400, "hostname must be a string"),
        (build_bind_operations(UNKNOWN_UUID, INSTANCE, "a\0"), 400, "hostname must be a string"),
        ([], 400, "must be a list of objects with op and path"),
        ("x", 400, "must be a list of objects with op and path"),
        ([{"path": "/hostname"}], 400, "must be a list of objects with op and path"),
        ([{"op": [], "path": "/hostname"}], 400, "Every op must be add or remove"),
        ([{"op": "add", "path": 5}], 400, "must be a list of objects with op and path"),
    ],
)
def test_invalid_patch_operations_are_refused_and_change_nothing(
    call: Call, operations: object, status: int, sentence: str
) -> None:
    (uuid,) = create_requests(call)
    response = call("PATCH", PATH, {uuid: operations}, service=True)
    assert response.status_code == status
    assert sentence in get_fault_string(response)
    assert show_request(call, uuid)["state"] == "Initial"
    assert len(json.loads(call("GET", PATH).content)["arqs"]) == 1


@pytest.mark.parametrize("body", [{}, [], "x", None, b"[{"])
def test_patch_bodies_that_are_no_object_are_refused(call: Call, body: object) -> None:
    assert call("PATCH", PATH, body, service=True).status_code == 400


def test_patching_project_id_needs_microversion_2_1_and_admin(call: Call, offered: Offered) -> None:
    (uuid,) = create_requests(call, roles="member reader", project="p2")
    operations = [*build_bind_operations(offered()), {"op": "add", "path": "/project_id", "value": "p3"}]
    response = call("PATCH", PATH, {uuid: operations}, service=True, version="2.0")
    assert response.status_code == 406
    assert get_fault_string(response) == "Request not acceptable. The minimal required API version should be 2.1"
    response = call("PATCH", PATH, {uuid: operations}, service=True, roles="member", project="p2")
    assert response.status_code == 403
    assert get_fault_string(response) == "Access was denied to the following resource: cyborg:arq:update"
    assert call("PATCH", PATH, {uuid: operations}, service=True).status_code == 202
    assert show_request(call, uuid)["project_id"] == "p3"


def test_X4_requests_of_other_projects_are_answered_404_and_not_listed(call: Call, offered: Offered) -> None:
    (mine,) = create_requests(call, roles="member reader")
    (theirs,) = create_requests(call, roles="member reader", project="p2")
    mate = {"roles": "member reader", "project": "p1"}
    assert [arq["uuid"] for arq in json.loads(call("GET", PATH, **mate).content)["arqs"]] == [mine]
    for method, body in (("GET", None), ("DELETE", None), ("PATCH", {theirs: build_bind_operations(offered(n=1))})):
        response = call(method, f"{PATH}/{theirs}", body, service=True, **mate)
        assert (response.status_code, get_fault_string(response)) == (404, f"ExtArq not found with uuid={theirs}")
        with conductor.writing():
            Device.objects.update(state="ready")
    assert call("DELETE", f"{PATH}?arqs={mine},{theirs}", **mate).status_code == 404
    assert AcceleratorRequest.objects.count() == 2
    assert {arq["uuid"] for arq in json.loads(call("GET", PATH).content)["arqs"]} == {mine, theirs}


LISTS = ["accelerator_requests", "device_profiles", "devices", "deployables", "attributes"]


@pytest.mark.parametrize("collection", LISTS)
def test_a_marker_of_another_projects_request_is_refused_like_an_unknown_one(
    call: Call, offered: Offered, collection: str
) -> None:
    offered()
    (theirs,) = create_requests(call, roles="member reader", project="p2")
    refusals = []
    for uuid in (theirs, UNKNOWN_UUID):
        response = call("GET", f"/v2/{collection}?limit=1&marker={uuid}", roles="member reader", project="p1")
        assert response.status_code == 400, response.content
        refusals.append(response.content.replace(uuid.encode(), b"U"))
    assert refusals[0] == refusals[1]
    (mine,) = create_requests(call, roles="member reader", project="p1")
    own = call("GET", f"{PATH}?marker={mine}", roles="member reader", project="p1")
    assert json.loads(own.content) == {"arqs": []}
    assert call("GET", f"{PATH}?marker={theirs}").status_code == 200, "an administrator sees the requests of all"


def test_requests_can_be_listed_by_instance_and_bind_state_and_paged(call: Call, offered: Offered) -> None:
    def uuids(query: str) -> list[str]:
        response = call("GET", f"{PATH}?{query}")
        assert response.status_code == 200, response.content
        return [arq["uuid"] for arq in json.loads(response.content)["arqs"]]

    first, second = create_requests(call, "pair")
    assert uuids(f"instance={INSTANCE}") == []
    assert uuids(f"instance={INSTANCE}&bind_state=resolved") == uuids("bind_state=resolved") == []
    bind_requests(call, offered(), first)
    assert uuids(f"instance={INSTANCE}") == uuids(f"instance={INSTANCE}&bind_state=resolved") == [first]
    assert uuids("bind_state=resolved") == [first]
    assert uuids("bind_state=") == uuids("") == [first, second]
    assert uuids(f"instance={INSTANCE.upper()}") == []
    assert uuids("limit=1") == [first]
    assert uuids(f"marker={first}&limit=5") == [second]


def test_listing_resolved_requests_of_an_instance_still_being_bound_is_answered_423(
    call: Call, offered: Offered
) -> None:
    rp = offered()
    with conductor.writing():
        profile = DeviceProfile.objects.get(name="fpga")
        profile.groups = [{"resources:FPGA": "1", "accel:function_id": "f"}]
        profile.save()
    (uuid,) = create_requests(call)
    assert bind_requests(call, rp, uuid).status_code == 202
    arq = show_request(call, uuid)
    assert (arq["state"], arq["instance_uuid"], arq["attach_handle_uuid"]) == ("BindStarted", INSTANCE, None)
    response = call("GET", f"{PATH}?bind_state=resolved&instance={INSTANCE}")
    assert (response.status_code, response.content) == (423, b'{"error_message":"null"}')
    assert response["OpenStack-API-Version"] == "accelerator 2.3"
    command = Command.objects.get()
    assert (str(command.request), command.op, command.state) == (uuid, "attach", "preparing")
    assert command.arguments["wanted"] == {"function_id": "f"}
    assert Device.objects.get().busy_with == command.uuid


NO_INSTANCE = (
    "Invalid input for field/attribute instance. Value: '{0}'."
    " unable to convert to uuid. Error: Expected a uuid but received {0}."
)


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("bind_state=unresolved", "Bad state: unresolved for ARQ: None. Expected state(s): ['resolved']"),
        ("instance=nope", NO_INSTANCE.format("nope")),
        ("instance=", NO_INSTANCE.format("")),
        ("arqs=", 'Unknown argument: "arqs"'),
        ("state=Bound", 'Unknown argument: "state"'),
    ],
)
def test_invalid_queries_are_refused(call: Call, query: str, sentence: str) -> None:
    response = call("GET", f"{PATH}?{query}")
    assert (response.status_code, sentence in get_fault_string(response)) == (400, True)


def test_an_instance_that_is_no_uuid_is_named_in_the_refusal_of_a_deletion(call: Call) -> None:
    response = call("DELETE", f"{PATH}?instance=notauuid", service=True)
    assert (response.status_code, get_fault_string(response)) == (400, NO_INSTANCE.format("notauuid"))


def test_unbound_requests_can_be_deleted_by_path_and_by_query(call: Call) -> None:
    for address in ("/{},{}", "?arqs={},{}"):
        pair = create_requests(call, "pair", roles="member")
        response = call("DELETE", PATH + address.format(*pair), roles="member")
        assert (response.status_code, response.content) == (204, b"")
    assert AcceleratorRequest.objects.count() == 0
    assert Event.objects.filter(action="request.deleted").count() == 4


def test_deleting_a_bound_request_needs_a_service_token_and_frees_its_handle(call: Call, offered: Offered) -> None:
    rp = offered()
    (uuid,) = create_requests(call)
    bind_requests(call, rp, uuid)
    for address in (f"/{uuid}", f"?arqs={uuid}"):
        response = call("DELETE", PATH + address)
        sentence = f"ARQ {uuid} is bound to instance {INSTANCE}. Use the Compute API to manage instance accelerators."
        assert (response.status_code, get_fault_string(response)) == (403, sentence)
    response = call("DELETE", f"{PATH}?instance={INSTANCE}")
    assert (response.status_code, get_fault_string(response)) == (403, SERVICE_TOKEN_NEEDED)
    assert call("DELETE", f"{PATH}/{uuid}", service=True).status_code == 204
    (again,) = create_requests(call)
    assert bind_requests(call, rp, again).status_code == 202
    for _ in range(2):
        assert call("DELETE", f"{PATH}?instance={INSTANCE}", service=True).status_code == 204
    assert AcceleratorRequest.objects.count() == 0


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("", 400),
        ("?arqs=", 400),
        (f"?arqs={UNKNOWN_UUID}&instance={INSTANCE}", 400),
        ("?instance=nope", 400),
        ("?value=x", 400),
        (f"?arqs={UNKNOWN_UUID}", 404),
        ("?arqs=zz", 404),
        ("/zz,yy", 404),
    ],
)
def test_invalid_deletions_are_refused_and_delete_nothing(call: Call, address: str, status: int) -> None:
    create_requests(call)
    assert call("DELETE", PATH + address, service=True).status_code == status
    assert AcceleratorRequest.objects.count() == 1


def test_P2_listing_the_requests_of_an_instance_takes_at_most_three_statements(
    call: Call, offered: Offered, django_assert_max_num_queries: Any
) -> None:
    rp = offered(handles=3)
    bind_requests(call, rp, *create_requests(call, "pair"))
    call("GET", PATH)
    with django_assert_max_num_queries(3):
        assert len(json.loads(call("GET", f"{PATH}?instance={INSTANCE}&bind_state=resolved").content)["arqs"]) == 2
