"""Test `/v2/device_profiles` over HTTP (contract section 2.2): create, show by uuid or name, list, delete, refuse."""

from __future__ import annotations

import json
import re

import pytest

from accelerators.models import DeviceProfile, Event
from tests.accelerators.api.v2.conftest import Call, get_fault_string

pytestmark = pytest.mark.django_db

PATH = "/v2/device_profiles"
GROUPS = [{"resources:FPGA": "1", "trait:CUSTOM_A": "required", "accel:bitstream_id": "x"}, {"resources:CUSTOM_X": "2"}]
UUID = "604c1d0e-3f10-4d5c-9c6b-6e0f9a3c1b2d"
UNKNOWN_UUID = "00000000-3f10-4d5c-9c6b-6e0f9a3c1b2d"
TIMESTAMP_PATTERN = r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00"


def create_profile(call: Call, name: str, **fields: object) -> dict[str, object]:
    response = call("POST", PATH, [{"name": name, "groups": GROUPS, **fields}])
    assert response.status_code == 201, response.content
    return json.loads(response.content)  # type: ignore[no-any-return]


def test_create_returns_the_unwrapped_profile_with_its_groups_as_sent(call: Call) -> None:
    made = create_profile(call, "fpga", description="d", uuid=UUID)
    assert list(made) == ["uuid", "name", "description", "groups", "created_at", "updated_at", "links"]
    assert (made["uuid"], made["name"], made["description"], made["updated_at"]) == (UUID, "fpga", "d", None)
    assert json.dumps(made["groups"]) == json.dumps(GROUPS)
    assert re.fullmatch(TIMESTAMP_PATTERN, str(made["created_at"]))
    assert made["links"] == [{"href": f"http://testserver/accelerator/v2/device_profiles/{UUID}", "rel": "self"}]
    event = Event.objects.get(action="profile.created")
    assert (str(event.subject), event.subject_name, event.request_id[:4]) == (UUID, "fpga", "req-")
    assert event.changes == {"name": [None, "fpga"], "groups": [None, GROUPS], "description": [None, "d"]}


def test_create_strips_blanks_from_group_keys_and_converts_values_to_strings(call: Call) -> None:
    groups = [{"resources: CUSTOM_X ": 2, "trait:CUSTOM_B": "forbidden", "accel:K": True}]
    body = [{"name": "n", "groups": groups, "unknown": 1, "id": 7, "description": 5}]
    made = json.loads(call("POST", f"{PATH}/ignored", body).content)
    assert json.dumps(made["groups"]) == json.dumps(
        [{"trait:CUSTOM_B": "forbidden", "accel:K": "True", "resources:CUSTOM_X": "2"}]
    )
    assert made["description"] == "5"


def test_show_returns_the_wrapped_profile_with_its_own_field_order_and_timestamps(call: Call) -> None:
    create_profile(call, "fpga", uuid=UUID)
    for key in (UUID, "fpga"):
        body = json.loads(call("GET", f"{PATH}/{key}").content)
        assert list(body) == ["device_profile"]
        one = body["device_profile"]
        assert list(one) == ["name", "description", "uuid", "groups", "created_at", "updated_at", "links"]
        assert re.fullmatch(TIMESTAMP_PATTERN.replace("T", " "), one["created_at"])
        assert (one["updated_at"], one["description"]) == ("None", None)


def test_show_by_name_needs_microversion_2_2(call: Call) -> None:
    create_profile(call, "fpga")
    response = call("GET", f"{PATH}/fpga", version="2.1")
    assert response.status_code == 406
    assert get_fault_string(response) == "Request not acceptable. The minimal required API version should be 2.2"
    assert response["OpenStack-API-Version"] == "accelerator 2.1"


def test_list_filters_by_comma_separated_names_and_pages(call: Call) -> None:
    uuids = [create_profile(call, name)["uuid"] for name in ("a", "b", "c")]

    def names(query: str) -> list[str]:
        body = json.loads(call("GET", f"{PATH}{query}", roles="").content)
        assert list(body) == ["device_profiles"]
        return [profile["name"] for profile in body["device_profiles"]]

    assert names("") == ["a", "b", "c"]
    assert names("?name=c,a,none") == ["a", "c"]
    assert names("?name=") == names("?name=A") == []
    assert names("?limit=2") == ["a", "b"]
    assert names(f"?marker={uuids[1]}") == ["c"]


@pytest.mark.parametrize("query", ["?uuid=1", "?sort=x", "?limit=-1", f"?marker={UNKNOWN_UUID}"])
def test_unknown_or_invalid_query_arguments_of_the_list_are_refused(call: Call, query: str) -> None:
    assert call("GET", PATH + query).status_code == 400


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    [
        ([], 400, "Only one device profile allowed per POST request for now."),
        ([{}, {}], 400, "Only one device profile allowed per POST request for now."),
        ({"name": "n", "groups": GROUPS}, 400, "Only one device profile allowed per POST request for now."),
        ({"a": 1}, 400, "Only one device profile allowed"),
        (None, 400, 'Missing argument: "req_devprof_list"'),
        (b"{", 400, "Request is not in valid JSON format"),
        ([{"name": "", "groups": GROUPS}], 500, "DeviceProfile name needed."),
        ([{"groups": GROUPS}], 400, "DeviceProfile name needed."),
        ([{"name": 5, "groups": GROUPS}], 400, "DeviceProfile name needed."),
        ([{"name": "x" * 256, "groups": GROUPS}], 500, "at most 255"),
        ([{"name": "a b", "groups": GROUPS}], 400, "Device profile name must be of the form ^[a-zA-Z0-9-_]+$"),
        ([{"name": "a\n", "groups": GROUPS}], 400, "Device profile name must be"),
        ([{"name": "n"}], 400, "DeviceProfile needs groups field."),
        ([{"name": "n", "groups": []}], 400, "DeviceProfile needs groups field."),
        (["x"], 400, "must be an object"),
        ([{"name": "n", "groups": "x"}], 400, "a list of objects"),
        ([{"name": "n", "groups": ["x"]}], 400, "a list of objects"),
        ([{"name": "n", "groups": [{"resources1:FPGA": "1"}]}], 400, "Device profile group keys must be of the form"),
        ([{"name": "n", "groups": [{"trait:HW_X": "required"}]}], 400, "Unsupported trait name format HW_X, should"),
        ([{"name": "n", "groups": [{"trait:CUSTOM_A": "yes"}]}], 400, "Unsupported trait value yes, the value must"),
        ([{"name": "n", "groups": [{"resources:VCPU": "1"}]}], 400, "Unsupported resource class VCPU"),
        ([{"name": "n", "groups": [{"resources:FPGA": "x"}]}], 400, "Resources number x is invalid"),
        ([{"name": "n", "groups": [{"resources:FPGA": 1.5}]}], 400, "Resources number 1.5 is invalid"),
        ([{"name": "n", "groups": [{"resources:FPGA": None}]}], 400, "must be a string"),
        ([{"name": "n", "groups": [{"resources:FPGA": "100000000"}]}], 400, "at most 256 accelerators"),
        ([{"name": "n", "groups": [{"accel:k": "a\0b"}]}], 400, "NUL"),
        ([{"name": "n", "groups": GROUPS, "description": "a\0b"}], 400, "NUL"),
        ([{"name": "n", "groups": GROUPS, "uuid": "zz"}], 400, "Expected a uuid but received zz."),
    ],
)
def test_invalid_profiles_are_refused_in_one_sentence_and_not_stored(
    call: Call, body: object, status: int, sentence: str
) -> None:
    response = call("POST", PATH, body)
    assert (response.status_code, DeviceProfile.objects.count()) == (status, 0)
    assert sentence in get_fault_string(response)
    assert "\n" not in get_fault_string(response).replace("a\n", "")
    assert json.loads(call("GET", PATH).content) == {"device_profiles": []}


def test_duplicate_names_and_uuids_are_refused(call: Call) -> None:
    create_profile(call, "n", uuid=UUID)
    again = call("POST", PATH, [{"name": "n", "groups": GROUPS}])
    assert (again.status_code, get_fault_string(again)) == (409, "A device_profile with name n already exists.")
    again = call("POST", PATH, [{"name": "other", "groups": GROUPS, "uuid": UUID}])
    assert (again.status_code, get_fault_string(again)) == (500, f"DeviceProfile with uuid {UUID} already exists.")


def test_bodies_that_are_not_json_or_exceed_one_mebibyte_are_refused(call: Call) -> None:
    body = [{"name": "n", "groups": GROUPS}]
    assert call("POST", PATH, body, content_type="application/json; charset=utf-8").status_code == 201
    refused = call("POST", PATH, body, content_type="text/plain")
    assert (refused.status_code, get_fault_string(refused)) == (415, "Unknown mimetype: text/plain")
    assert call("POST", PATH, b" " * 1_048_577).status_code == 413


@pytest.mark.parametrize(
    "address", [f"/{UUID}", "/fpga", "/a,fpga", "?value=a,fpga", f"?value={UUID}", "?value=fpga"], ids=str
)
def test_profiles_can_be_deleted_in_every_form_of_address(call: Call, address: str) -> None:
    create_profile(call, "a")
    create_profile(call, "fpga", uuid=UUID)
    response = call("DELETE", f"{PATH}{address}", version="2.0")
    assert (response.status_code, response.content, response.headers.get("Content-Type")) == (204, b"", None)
    assert not DeviceProfile.objects.filter(name="fpga").exists()
    assert DeviceProfile.objects.filter(name="a").exists() is ("a," not in address)


@pytest.mark.parametrize(
    ("address", "status", "sentence"),
    [
        ("", 400, 'Missing argument: "value"'),
        ("/", 400, 'Missing argument: "value"'),
        ("?value=", 404, "Device Profile not found with name="),
        ("?name=a", 400, 'Unknown argument: "name"'),
        (f"/{UNKNOWN_UUID}", 404, f"Device Profile not found with uuid={UNKNOWN_UUID}"),
        ("/a,none,b", 404, "Device Profile not found with name=none"),
        (f"/{UUID.upper()}", 404, "Device Profile not found with uuid="),
    ],
)
def test_invalid_deletions_are_refused_and_delete_nothing_else(
    call: Call, address: str, status: int, sentence: str
) -> None:
    create_profile(call, "a", uuid=UUID)
    create_profile(call, "b")
    response = call("DELETE", f"{PATH}{address}")
    assert response.status_code == status
    assert sentence in get_fault_string(response)
    assert DeviceProfile.objects.filter(name="b").exists()


def test_deleting_a_profile_in_use_is_refused(call: Call) -> None:
    create_profile(call, "fpga")
    call("POST", "/v2/accelerator_requests", {"device_profile_name": "fpga"})
    response = call("DELETE", f"{PATH}/fpga")
    assert (response.status_code, "used by accelerator requests" in get_fault_string(response)) == (409, True)


@pytest.mark.parametrize(("method", "status"), [("PATCH", 404), ("PUT", 405), ("HEAD", 405), ("OPTIONS", 405)])
def test_unsupported_methods_of_the_collection_are_refused(call: Call, method: str, status: int) -> None:
    response = call(method, PATH)
    assert response.status_code == status
    assert response.headers.get("Allow") == (None if status == 404 else "DELETE, GET, POST")


@pytest.mark.parametrize("roles", ["member reader", "manager member reader", "service", ""])
def test_only_admins_may_create_and_delete_profiles(call: Call, roles: str) -> None:
    response = call("POST", PATH, b"{", roles=roles)
    assert response.status_code == 403
    assert get_fault_string(response) == "Access was denied to the following resource: cyborg:device_profile:create"
    assert call("DELETE", f"{PATH}/none", roles=roles).status_code == 403
