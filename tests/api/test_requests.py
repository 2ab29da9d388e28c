"""`/v2/accelerator_requests` over HTTP (contract section 2.3): create, bind, read, unbind, delete; whose they are."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any
from uuid import uuid4

import pytest

from accelerators import conductor
from accelerators.models import AcceleratorRequest, Command, Device, DeviceProfile, Event
from tests.api.conftest import Call, reason

pytestmark = pytest.mark.django_db

PATH = "/v2/accelerator_requests"
INSTANCE = "0a3f7d1e-5f0c-4b1a-9d44-0d6f4f3b9a10"
NOWHERE = "00000000-3f10-4d5c-9c6b-6e0f9a3c1b2d"
KEYS = [
    *("uuid", "state", "device_profile_name", "device_profile_group_id", "hostname", "device_rp_uuid"),
    *("instance_uuid", "project_id", "attach_handle_type", "attach_handle_uuid", "attach_handle_info"),
    *("links", "created_at", "updated_at"),
]
SERVICE = "This operation requires a service token. Use the Compute API to manage instance accelerators."
Offered = Callable[..., str]


@pytest.fixture(autouse=True)
def _profile(db: None) -> None:
    with conductor.writing():
        DeviceProfile.objects.create(name="fpga", groups=[{"resources:FPGA": "1"}])
        DeviceProfile.objects.create(name="pair", groups=[{"resources:FPGA": "1"}, {"resources:FPGA": "1"}])


def create(call: Call, name: str = "fpga", **options: Any) -> list[str]:
    response = call("POST", PATH, {"device_profile_name": name}, **options)
    assert response.status_code == 201, response.content
    return [arq["uuid"] for arq in json.loads(response.content)["arqs"]]


def binding(rp: str, instance: str = INSTANCE, host: str = "cmp1") -> list[dict[str, str]]:
    values = {"hostname": host, "device_rp_uuid": rp, "instance_uuid": instance}
    return [{"op": "add", "path": f"/{name}", "value": value} for name, value in values.items()]


UNBINDING = [{"op": "remove", "path": f"/{name}"} for name in ("hostname", "device_rp_uuid", "instance_uuid")]


def show(call: Call, uuid: str, **options: Any) -> dict[str, Any]:
    response = call("GET", f"{PATH}/{uuid}", **options)
    assert response.status_code == 200, response.content
    return json.loads(response.content)  # type: ignore[no-any-return]


def bind(call: Call, rp: str, *uuids: str, instance: str = INSTANCE, **options: Any) -> Any:
    return call("PATCH", PATH, {uuid: binding(rp, instance) for uuid in uuids}, service=True, **options)


def test_a_new_request_is_initial_and_its_projects(call: Call) -> None:
    response = call("POST", PATH, {"device_profile_name": "fpga", "image_uuid": 1, "device_profile_group_id": None})
    body = json.loads(response.content)
    assert (response.status_code, list(body)) == (201, ["arqs"])
    (arq,) = body["arqs"]
    assert list(arq) == KEYS
    assert (arq["state"], arq["device_profile_name"], arq["device_profile_group_id"]) == ("Initial", "fpga", 0)
    assert (arq["project_id"], arq["attach_handle_type"], arq["attach_handle_info"]) == ("p1", "", {})
    absent = ("hostname", "device_rp_uuid", "instance_uuid", "attach_handle_uuid", "updated_at")
    assert [arq[name] for name in absent] == [None] * 5
    assert re.fullmatch(r"\S+T\S+\+00:00", arq["created_at"])
    assert arq["links"][0]["href"] == f"http://testserver/accelerator/v2/accelerator_requests/{arq['uuid']}"
    assert show(call, arq["uuid"]) == arq


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ([{"resources:FPGA": "1", "resources:CUSTOM_X": "2"}, {"resources:GPU": "1"}], [0, 0, 0, 1]),
        ([{"resources:FPGA": "2", "trait:CUSTOM_FPGA_XILINX": "required"}], [0, 0, 0, 0]),
        ([{"resources:FPGA": "2", "trait:CUSTOM_FPGA_XILINX": "forbidden"}], [0, 0]),
        ([{"trait:CUSTOM_A": "required"}, {"resources:FPGA": "-3"}], []),
    ],
)
def test_as_many_requests_as_the_groups_amount_to(call: Call, groups: object, expected: list[int]) -> None:
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
def test_creations_that_are_refused(call: Call, body: object, status: int, sentence: str) -> None:
    response = call("POST", PATH, body)
    assert response.status_code == status
    assert sentence in reason(response)


def test_a_bind_is_bound_before_the_202_and_an_unbind_gives_back(call: Call, offered: Offered) -> None:
    rp = offered()
    (uuid,) = create(call)
    response = bind(call, rp, uuid)
    assert (response.status_code, response.content, response.headers.get("Content-Type")) == (202, b"", None)
    arq = show(call, uuid)
    assert (arq["state"], arq["hostname"], arq["device_rp_uuid"], arq["instance_uuid"]) == (
        "Bound",
        "cmp1",
        rp,
        INSTANCE,
    )
    assert arq["attach_handle_type"] == "PCI"
    assert arq["attach_handle_info"] == {"bus": "01", "device": "00", "domain": "0000", "function": "0"}
    assert arq["attach_handle_uuid"] and arq["updated_at"]

    assert call("PATCH", f"{PATH}/{uuid}", {uuid: UNBINDING[:1]}, service=True).status_code == 202
    arq = show(call, uuid)
    assert (arq["state"], arq["attach_handle_type"], arq["attach_handle_info"]) == ("Unbound", "", {})
    assert [arq[name] for name in ("hostname", "device_rp_uuid", "instance_uuid", "attach_handle_uuid")] == [None] * 4
    assert bind(call, rp, uuid).status_code == 202
    actions = Event.objects.filter(subject=uuid).order_by("id").values_list("action", flat=True)
    assert list(actions) == ["request.created", "request.bound", "request.unbound", "request.bound"]
    event = Event.objects.filter(subject=uuid, action="request.unbound").get()
    assert event.changes["state"] == ["Bound", "Unbound"]
    assert event.changes["instance_uuid"] == [INSTANCE, None]
    assert event.request_id.startswith("req-")


def test_all_of_a_patch_are_reserved_or_none(call: Call, offered: Offered) -> None:
    rp = offered(handles=1)
    first, second = create(call, "pair")
    response = bind(call, rp, first, second)
    assert response.status_code == 404
    assert reason(response).startswith("AttachHandle not found Matching deployable_id ")
    for uuid in (first, second):
        assert (show(call, uuid)["state"], show(call, uuid)["attach_handle_uuid"]) == ("BindFailed", None)
    assert "all are held" in AcceleratorRequest.objects.get(uuid=first).fault
    assert AcceleratorRequest.objects.filter(attach_handle__isnull=False).count() == 0
    assert call("PATCH", PATH, {first: UNBINDING, second: UNBINDING}, service=True).status_code == 202
    assert bind(call, rp, first).status_code == 202


def test_two_handles_of_one_provider_are_two(call: Call, offered: Offered) -> None:
    rp = offered(handles=3)
    assert bind(call, rp, *create(call, "pair")).status_code == 202
    held = AcceleratorRequest.objects.filter(state="Bound").values_list("attach_handle", flat=True)
    assert len(set(held)) == 2


@pytest.mark.parametrize("state", ["inactive", "maintenance", "failed", "missing", "quarantined"])
def test_a_device_that_is_not_ready_is_not_bound(call: Call, offered: Offered, state: str) -> None:
    rp = offered()
    with conductor.writing():
        Device.objects.update(state=state)
    (uuid,) = create(call)
    response = bind(call, rp, uuid)
    assert (response.status_code, f"its device is {state}, not ready" in reason(response)) == (404, True)
    assert show(call, uuid)["state"] == "BindFailed"


def test_a_bind_needs_a_service_token_whoever_asks(call: Call, offered: Offered) -> None:
    (uuid,) = create(call)
    for roles in ("admin", "service", "member reader"):
        for operations in (binding(offered(n=len(roles))), UNBINDING):
            response = call("PATCH", PATH, {uuid: operations}, roles=roles)
            assert (response.status_code, reason(response)) == (403, SERVICE)
    assert show(call, uuid)["state"] == "Initial"


def test_an_instance_is_bound_once(call: Call, offered: Offered) -> None:
    rp = offered(handles=2)
    first, second = create(call, "pair")
    assert bind(call, rp, first).status_code == 202
    response = bind(call, rp, second)
    assert (response.status_code, reason(response)) == (
        400,
        f"Couldn't apply patch. Reason: Instance {INSTANCE} already has accelerator requests. "
        "Cannot bind additional ARQs.",
    )
    response = bind(call, rp, first, instance=str(uuid4()))
    sentence = f"Bad state: Bound for ARQ: {first}. Expected state(s): ['Initial', 'Unbound']"
    assert (response.status_code, reason(response)) == (500, sentence)


def test_unknown_providers_and_requests(call: Call, offered: Offered) -> None:
    (uuid,) = create(call)
    for unknown in (NOWHERE, "zz", uuid.upper()):
        response = call("PATCH", PATH, {unknown: binding(offered(n=len(unknown)))}, service=True)
        assert (response.status_code, reason(response)) == (404, f"ExtArq not found with uuid={unknown}")
    response = bind(call, NOWHERE, uuid)
    sentence = f"Deployable not found with resource provider uuid={NOWHERE}"
    assert (response.status_code, reason(response)) == (404, sentence)
    assert show(call, uuid)["state"] == "BindFailed"


def _without(name: str) -> list[dict[str, str]]:
    return [operation for operation in binding(NOWHERE) if operation["path"] != f"/{name}"]


@pytest.mark.parametrize(
    ("operations", "status", "sentence"),
    [
        ([{"op": "replace", "path": "/hostname", "value": "x"}], 400, "Every op must be add or remove"),
        (binding(NOWHERE) + UNBINDING, 400, "Every op must be add or remove"),
        (
            [{"op": "add", "path": "/foo", "value": "x"}],
            400,
            "Couldn't apply patch. Reason: Invalid path in patch /foo",
        ),
        (_without("hostname"), 400, "Couldn't apply patch. Reason: Fields absent in patch hostname"),
        ([*_without("hostname"), {"op": "add", "path": "hostname"}], 400, "Fields absent in patch hostname"),
        (binding("zz"), 400, "Expected a uuid but received zz."),
        (binding(NOWHERE, "zz"), 400, "Expected a uuid but received zz."),
        (binding(NOWHERE, INSTANCE, "x" * 256), 400, "hostname must be a string"),
        (binding(NOWHERE, INSTANCE, "a\0"), 400, "hostname must be a string"),
        ([], 400, "must be a list of objects with op and path"),
        ("x", 400, "must be a list of objects with op and path"),
        ([{"path": "/hostname"}], 400, "must be a list of objects with op and path"),
        ([{"op": [], "path": "/hostname"}], 400, "Every op must be add or remove"),
        ([{"op": "add", "path": 5}], 400, "must be a list of objects with op and path"),
    ],
)
def test_operations_that_are_refused_change_nothing(call: Call, operations: object, status: int, sentence: str) -> None:
    (uuid,) = create(call)
    response = call("PATCH", PATH, {uuid: operations}, service=True)
    assert response.status_code == status
    assert sentence in reason(response)
    assert show(call, uuid)["state"] == "Initial"
    assert len(json.loads(call("GET", PATH).content)["arqs"]) == 1


@pytest.mark.parametrize("body", [{}, [], "x", None, b"[{"])
def test_patches_that_are_no_map(call: Call, body: object) -> None:
    assert call("PATCH", PATH, body, service=True).status_code == 400


def test_project_id_is_for_admins_since_2_1(call: Call, offered: Offered) -> None:
    (uuid,) = create(call, roles="member reader", project="p2")
    operations = [*binding(offered()), {"op": "add", "path": "/project_id", "value": "p3"}]
    response = call("PATCH", PATH, {uuid: operations}, service=True, version="2.0")
    assert response.status_code == 406
    assert reason(response) == "Request not acceptable. The minimal required API version should be 2.1"
    response = call("PATCH", PATH, {uuid: operations}, service=True, roles="member", project="p2")
    assert response.status_code == 403
    assert reason(response) == "Access was denied to the following resource: cyborg:arq:update"
    assert call("PATCH", PATH, {uuid: operations}, service=True).status_code == 202
    assert show(call, uuid)["project_id"] == "p3"


def test_X4_other_projects_requests_are_not_there(call: Call, offered: Offered) -> None:
    (mine,) = create(call, roles="member reader")
    (theirs,) = create(call, roles="member reader", project="p2")
    mate = {"roles": "member reader", "project": "p1"}
    assert [arq["uuid"] for arq in json.loads(call("GET", PATH, **mate).content)["arqs"]] == [mine]
    for method, body in (("GET", None), ("DELETE", None), ("PATCH", {theirs: binding(offered(n=1))})):
        response = call(method, f"{PATH}/{theirs}", body, service=True, **mate)
        assert (response.status_code, reason(response)) == (404, f"ExtArq not found with uuid={theirs}")
        with conductor.writing():
            Device.objects.update(state="ready")
    assert call("DELETE", f"{PATH}?arqs={mine},{theirs}", **mate).status_code == 404
    assert AcceleratorRequest.objects.count() == 2
    assert {arq["uuid"] for arq in json.loads(call("GET", PATH).content)["arqs"]} == {mine, theirs}


def test_reading_an_instances_requests(call: Call, offered: Offered) -> None:
    def uuids(query: str) -> list[str]:
        response = call("GET", f"{PATH}?{query}")
        assert response.status_code == 200, response.content
        return [arq["uuid"] for arq in json.loads(response.content)["arqs"]]

    first, second = create(call, "pair")
    assert uuids(f"instance={INSTANCE}") == []
    assert uuids(f"instance={INSTANCE}&bind_state=resolved") == uuids("bind_state=resolved") == []
    bind(call, offered(), first)
    assert uuids(f"instance={INSTANCE}") == uuids(f"instance={INSTANCE}&bind_state=resolved") == [first]
    assert uuids("bind_state=resolved") == [first]
    assert uuids("bind_state=") == uuids("") == [first, second]
    assert uuids(f"instance={INSTANCE.upper()}") == []
    assert uuids("limit=1") == [first]
    assert uuids(f"marker={first}&limit=5") == [second]


def test_an_instance_that_is_still_being_bound_is_locked(call: Call, offered: Offered) -> None:
    rp = offered()
    with conductor.writing():
        profile = DeviceProfile.objects.get(name="fpga")
        profile.groups = [{"resources:FPGA": "1", "accel:function_id": "f"}]
        profile.save()
    (uuid,) = create(call)
    assert bind(call, rp, uuid).status_code == 202
    arq = show(call, uuid)
    assert (arq["state"], arq["instance_uuid"], arq["attach_handle_uuid"]) == ("BindStarted", INSTANCE, None)
    response = call("GET", f"{PATH}?bind_state=resolved&instance={INSTANCE}")
    assert (response.status_code, response.content) == (423, b'{"error_message":"null"}')
    assert response["OpenStack-API-Version"] == "accelerator 2.3"
    command = Command.objects.get()
    assert (str(command.request), command.op, command.state) == (uuid, "attach", "preparing")
    assert command.arguments["wanted"] == {"function_id": "f"}
    assert Device.objects.get().busy_with == command.uuid


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("bind_state=unresolved", "Bad state: unresolved for ARQ: None. Expected state(s): ['resolved']"),
        ("instance=nope", "Expected a uuid but received nope."),
        ("instance=", "Expected a uuid"),
        ("arqs=", 'Unknown argument: "arqs"'),
        ("state=Bound", 'Unknown argument: "state"'),
    ],
)
def test_queries_that_are_refused(call: Call, query: str, sentence: str) -> None:
    response = call("GET", f"{PATH}?{query}")
    assert (response.status_code, sentence in reason(response)) == (400, True)


def test_deleting_unbound_requests_in_both_forms(call: Call) -> None:
    for address in ("/{},{}", "?arqs={},{}"):
        pair = create(call, "pair", roles="member")
        response = call("DELETE", PATH + address.format(*pair), roles="member")
        assert (response.status_code, response.content) == (204, b"")
    assert AcceleratorRequest.objects.count() == 0
    assert Event.objects.filter(action="request.deleted").count() == 4


def test_deleting_what_is_bound_needs_a_service_token_and_frees_the_handle(call: Call, offered: Offered) -> None:
    rp = offered()
    (uuid,) = create(call)
    bind(call, rp, uuid)
    for address in (f"/{uuid}", f"?arqs={uuid}"):
        response = call("DELETE", PATH + address)
        sentence = f"ARQ {uuid} is bound to instance {INSTANCE}. Use the Compute API to manage instance accelerators."
        assert (response.status_code, reason(response)) == (403, sentence)
    response = call("DELETE", f"{PATH}?instance={INSTANCE}")
    assert (response.status_code, reason(response)) == (403, SERVICE)
    assert call("DELETE", f"{PATH}/{uuid}", service=True).status_code == 204
    (again,) = create(call)
    assert bind(call, rp, again).status_code == 202
    for _ in range(2):
        assert call("DELETE", f"{PATH}?instance={INSTANCE}", service=True).status_code == 204
    assert AcceleratorRequest.objects.count() == 0


@pytest.mark.parametrize(
    ("address", "status"),
    [
        ("", 400),
        ("?arqs=", 400),
        (f"?arqs={NOWHERE}&instance={INSTANCE}", 400),
        ("?instance=nope", 400),
        ("?value=x", 400),
        (f"?arqs={NOWHERE}", 404),
        ("?arqs=zz", 404),
        ("/zz,yy", 404),
    ],
)
def test_deletions_that_are_refused_delete_nothing(call: Call, address: str, status: int) -> None:
    create(call)
    assert call("DELETE", PATH + address, service=True).status_code == status
    assert AcceleratorRequest.objects.count() == 1


def test_P2_an_instances_requests_cost_three_statements_at_most(
    call: Call, offered: Offered, django_assert_max_num_queries: Any
) -> None:
    rp = offered(handles=3)
    bind(call, rp, *create(call, "pair"))
    call("GET", PATH)
    with django_assert_max_num_queries(3):
        assert len(json.loads(call("GET", f"{PATH}?instance={INSTANCE}&bind_state=resolved").content)["arqs"]) == 2
