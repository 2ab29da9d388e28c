"""Test writes over /api/: device profiles, until they are used, and the labels of accelerators."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from typing import Any

import pytest

from accelerators import conductor
from accelerators.api.own.instances import INSTANCE_STATES, InstanceKey, InstanceState
from accelerators.domain.caller import Caller
from accelerators.models import AcceleratorRequest, DeviceProfile, Event
from accelerators.requests import binding
from tests.accelerators.api.own.conftest import Ask, Fill, get_error_message, get_results

pytestmark = pytest.mark.django_db

SMALL_PROFILE = {"name": "small", "groups": [{"resources:FPGA": "1", "trait:CUSTOM_X": "required"}]}


def create_profile(ask: Ask, **changes: Any) -> dict[str, Any]:
    """Create a device profile as an admin and return it."""
    response = ask("/api/profiles/", method="POST", data=SMALL_PROFILE | changes)
    assert response.status_code == 201, response.content
    return json.loads(response.content)


def test_a_profile_is_created_edited_and_deleted_with_events(ask: Ask) -> None:
    profile = create_profile(ask, description="one")
    assert (profile["name"], profile["groups"], profile["used"]) == ("small", SMALL_PROFILE["groups"], False)
    path = profile["url"].removeprefix("http://testserver")
    changed = json.loads(
        ask(path, method="PATCH", data={"groups": [{"resources:GPU": "2"}], "name": "big", "generation": 1}).content
    )
    assert (changed["name"], changed["groups"], changed["description"]) == ("big", [{"resources:GPU": "2"}], "one")
    assert changed["updated_at"]
    assert [row["name"] for row in get_results(ask("/api/profiles/", "reader"))] == ["big"]
    assert ask(f"{path}?generation=2", method="DELETE").status_code == 204
    get_error_message(ask(path), 404)
    actions = [e["action"] for e in get_results(ask(f"/api/events/?subject={profile['uuid']}"))]
    assert actions == ["profile.deleted", "profile.changed", "profile.created"]
    gone = Event.objects.get(action="profile.deleted").changes
    assert gone == {"name": ["big", None], "groups": [[{"resources:GPU": "2"}], None]}
    event = Event.objects.get(action="profile.changed")
    assert event.actor == "admin-p1"
    assert event.changes["name"] == ["small", "big"]
    assert event.request_id.startswith("req-")


def test_editing_or_deleting_a_profile_in_use_is_refused(ask: Ask, fill: Fill) -> None:
    fill(1)
    (profile,) = get_results(ask("/api/profiles/?used=true"))
    path = profile["url"].removeprefix("http://testserver")
    assert "make another one instead" in get_error_message(
        ask(path, method="PATCH", data={"description": "x", "generation": 1}), 409
    )
    assert "delete those first" in get_error_message(ask(f"{path}?generation=1", method="DELETE"), 409, "in_use")


def test_a_duplicate_profile_name_is_refused(ask: Ask) -> None:
    create_profile(ask)
    other = create_profile(ask, name="other")
    assert "already exists" in get_error_message(ask("/api/profiles/", method="POST", data=SMALL_PROFILE), 409)
    path = other["url"].removeprefix("http://testserver")
    assert "already exists" in get_error_message(
        ask(path, method="PATCH", data={"name": "small", "generation": 1}), 409, "conflict"
    )


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": ""}, "name: This field may not be blank."),
        ({"name": "a b"}, "name: Say letters, digits, - and _ only."),
        ({"name": "a" * 256}, "name: Ensure this field has no more than 255 characters."),
        ({"name": None}, "name: This field may not be null."),
        ({"groups": []}, "groups: This list may not be empty."),
        ({"groups": "x"}, "groups: The groups of a device profile are a list of objects."),
        ({"groups": [{"resources:FPGA": 1}]}, "groups: Say a list of objects whose values are strings."),
        ({"name": 7}, "name: Not a valid string."),
        ({"groups": [{"resources:PIGS": "1"}]}, "groups: Unsupported resource class PIGS"),
        ({"description": "a\0"}, "description: Null characters are not allowed."),
        ({"uuid": "x"}, "uuid: cannot be written; writable fields: name, description, groups."),
        ({"generation": 1}, "generation: cannot be written"),
    ],
)
def test_invalid_profiles_are_refused_and_not_stored(ask: Ask, changes: dict[str, Any], says: str) -> None:
    assert says in get_error_message(ask("/api/profiles/", method="POST", data=SMALL_PROFILE | changes), 400)
    assert not DeviceProfile.objects.exists()


def test_a_profile_that_asks_for_more_than_256_accelerators_is_refused(ask: Ask) -> None:
    greedy = SMALL_PROFILE | {"groups": [{"resources:FPGA": "200"}, {"resources:GPU": "57"}]}
    assert "at most 256 accelerators" in get_error_message(ask("/api/profiles/", method="POST", data=greedy), 409)


def test_only_admins_write_profiles(ask: Ask) -> None:
    path = create_profile(ask)["url"].removeprefix("http://testserver")
    for method, verb in (("POST", "create"), ("PATCH", "update"), ("DELETE", "delete")):
        where = "/api/profiles/" if method == "POST" else path
        denied = get_error_message(ask(where, "manager", method=method, data=SMALL_PROFILE), 403)
        assert denied.endswith(f"cyborg:device_profile:{verb}. The role admin would be sufficient.")


def test_accelerators_on_several_hosts_are_labelled_only_with_the_token_of_the_preview(ask: Ask, fill: Fill) -> None:
    fill(4)
    with conductor.writing():
        first = AcceleratorRequest.objects.filter(project_id="p1").earliest("id")
        AcceleratorRequest.objects.filter(pk=first.pk).update(hostname="cmp2")
    uuids = [str(uuid) for uuid in AcceleratorRequest.objects.order_by("id").values_list("uuid", flat=True)]
    assert len(uuids) >= 2
    order, path = {"accelerators": uuids, "label": "training"}, "/api/accelerators/label/"
    answer = ask(path, method="POST", data=order)
    assert "2 hosts" in get_error_message(answer, 409, "not_confirmed")
    preview = json.loads(answer.content)["preview"]
    assert preview["forecast"] == [
        {"outcome": "moved", "number": len(uuids), "held": False, "text": "gets the label 'training'"}
    ]
    assert not AcceleratorRequest.objects.exclude(label="").exists()
    token = {"token": preview["token"]}
    get_error_message(ask(path, method="POST", data=order | token | {"label": "x"}), 409, "stale_preview")
    results = json.loads(ask(path, method="POST", data=order | token).content)["results"]
    assert [(one["accelerator"], one["outcome"]) for one in results] == [(uuid, "moved") for uuid in uuids]
    assert {*AcceleratorRequest.objects.values_list("label", flat=True)} == {"training"}
    assert Event.objects.filter(action="request.labelled").count() == len(uuids)
    get_error_message(ask(path, method="POST", data=order | token), 409, "stale_preview")


def test_labelling_several_accelerators_refuses_those_of_other_projects_only(ask: Ask, fill: Fill) -> None:
    fill(4)
    own, foreign = (AcceleratorRequest.objects.filter(project_id=project).first() for project in ("p1", "p2"))
    order = {"accelerators": [str(own.uuid), str(foreign.uuid)], "label": "mine"}
    path = "/api/accelerators/label/"
    get_error_message(ask(path, "reader", method="POST", data=order), 403)
    for by, reason in (("manager", "not_allowed"), ("member", "not_found")):
        results = json.loads(ask(path, by, method="POST", data=order | {"label": by}).content)["results"]
        assert [(one["outcome"], one["reason"]) for one in results] == [("moved", ""), ("refused", reason)]
    assert [AcceleratorRequest.objects.get(pk=one.pk).label for one in (own, foreign)] == ["member", ""]
    for bad in ({"accelerators": []}, {"label": "a" * 256}, {"accelerators": ["x"]}):
        get_error_message(ask(path, method="POST", data=order | bad), 400)


def test_a_member_can_label_accelerators_of_its_own_project_only(ask: Ask, fill: Fill) -> None:
    fill(4)
    own, foreign = (AcceleratorRequest.objects.filter(project_id=project).first() for project in ("p1", "p2"))
    path = f"/api/accelerators/{own.uuid}/"
    labelled = json.loads(ask(path, "member", method="PATCH", data={"label": "training", "generation": 1}).content)
    assert (labelled["label"], labelled["generation"]) == ("training", 2)
    assert labelled == json.loads(ask(path, "member").content)
    assert json.loads(ask(f"/api/requests/{own.uuid}/", "member").content)["label"] == "training"
    again = ask(path, "member", method="PATCH", data={"label": "training", "generation": 1})
    assert again.json() == labelled, "what is so already needs no change"
    event = Event.objects.get(subject=own.uuid)
    assert (event.action, event.actor, event.changes) == ("request.labelled", "member-p1", {"label": ["", "training"]})
    get_error_message(ask(f"/api/accelerators/{foreign.uuid}/", "member", method="PATCH", data={"label": "mine"}), 404)
    get_error_message(ask(path, "reader", method="PATCH", data={"label": "x"}), 403)
    refused = ask(f"/api/accelerators/{foreign.uuid}/", "manager", method="PATCH", data={"label": "x"})
    assert "cyborg:accelerator:update_elevated" in get_error_message(refused, 403)
    assert not AcceleratorRequest.objects.get(uuid=foreign.uuid).label
    for bad in ({"label": "a" * 256}, {"label": None}, {"label": "\0"}, {"state": "Unbound"}, {"label": ["x"]}):
        get_error_message(ask(path, "member", method="PATCH", data=bad), 400)
    for fields, status, says in (({}, 428, "Send the generation"), ({"generation": 1}, 409, "generation 2 now, not 1")):
        refused = ask(path, "member", method="PATCH", data={"label": "mine"} | fields)
        assert says in get_error_message(refused, status) and refused.json()["current"] == labelled
    assert AcceleratorRequest.objects.get(uuid=own.uuid).label == "training"


@pytest.mark.parametrize("end_request", [binding.unbind_requests, binding.delete_requests])
def test_an_accelerator_that_is_given_back_while_it_is_labelled_is_not_found(
    ask: Ask, fill: Fill, end_request: Callable[[list[str], Caller], None]
) -> None:
    fill(4)
    (uuid,) = AcceleratorRequest.objects.filter(project_id="p1").values_list("uuid", flat=True)[:1]
    nova = Caller("nova", "n", frozenset({"admin"}), "p1", service=True)

    def end_meanwhile(instances: Collection[InstanceKey]) -> dict[str, InstanceState]:
        """Answer for Nova, which ends the request after the view has read it."""
        end_request([str(uuid)], nova)
        return {}

    with INSTANCE_STATES.replaced("nova", end_meanwhile):
        answer = ask(f"/api/accelerators/{uuid}/", method="PATCH", data={"label": "late", "generation": 1})
    assert f"no held accelerator {uuid}" in get_error_message(answer, 404, "not_found")
    assert not AcceleratorRequest.objects.filter(label="late").exists()
