"""The life cycle over our own API: actions on devices, and admission rules."""

from __future__ import annotations

import json
from typing import Any

import pytest

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.states import DeviceState
from accelerators.models import AcceleratorRequest, AdmissionRule, Device, Event
from accelerators.requests import binding
from tests.own.conftest import Ask, Fill, message, results
from tests.own.test_pages import forms, page
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db

NOVA = Caller("nova", "n", frozenset({"admin"}), "p1", service=True)
VERBS = ("enable", "drain", "disable", "release", "quarantine", "reinstate", "retire")
FREE = "0000:02:00.0"
HELD = "0000:00:00.0"


def path(address: str) -> str:
    """Of one of the devices of `fill(3)`."""
    return f"/api/devices/{Device.objects.get(address=address).uuid}/"


def did(ask: Ask, address: str, verb: str, **body: str) -> dict[str, Any]:
    """The device as it is answered."""
    response = ask(f"{path(address)}{verb}/", method="POST", data=body or None)
    assert response.status_code == 200, response.content
    return json.loads(response.content)


def test_an_action_answers_the_device_and_leaves_an_event(ask: Ask, fill: Fill) -> None:
    fill(3)
    device = did(ask, FREE, "enable", reason="burnt in")
    assert (device["state"], device["state_reason"], device["state_by"]) == ("ready", "burnt in", "admin-p1")
    assert device == json.loads(ask(path(FREE)).content)
    assert device["next_actions"] == ["drain", "disable", "quarantine"]
    event = Event.objects.get(action="device.ready")
    assert (event.source, event.actor, event.reason) == ("api", "admin-p1", "burnt in")
    assert event.request_id.startswith("req-")


@pytest.mark.parametrize("state", DeviceState)
def test_next_actions_are_exactly_those_that_do_something(ask: Ask, fill: Fill, state: str) -> None:
    fill(1)
    address = path("0000:00:00.0")
    shown = {}
    for verb in (*VERBS, ""):
        with conductor.writing():
            Device.objects.update(state=state, returns_to=None, drain_to=None)
        answered = ask(address + verb, method="POST" if verb else "GET")
        assert answered.status_code in (200, 409), answered.content
        shown[verb] = json.loads(answered.content)
    before = shown.pop("")
    facts = ("state", "returns_to", "draining")
    changing = {v for v, after in shown.items() if "error" not in after and any(after[f] != before[f] for f in facts)}
    assert changing == {*before["next_actions"]}


def test_a_drain_is_shown_with_what_is_left_of_it(ask: Ask, fill: Fill) -> None:
    fill(3)
    with conductor.writing():
        Device.objects.update(state="ready")
    device = did(ask, HELD, "drain", then="retired", reason="worn out")
    assert (device["state"], device["draining"], device["held"]) == ("maintenance", {"to": "retired", "left": 1}, 1)
    assert device["next_actions"] == ["enable", "drain", "quarantine"]
    assert results(ask("/api/devices/?fields=draining&draining=true")) == [{"draining": device["draining"]}]
    assert len(results(ask("/api/devices/?draining=false"))) == 2
    tag = ask(path(HELD))["ETag"]
    binding.delete_requests([str(AcceleratorRequest.objects.get(deployable__device__uuid=device["uuid"]).uuid)], NOVA)
    assert ask(path(HELD), **{"If-None-Match": tag}).status_code == 200
    assert did(ask, HELD, "enable")["draining"] is None


def test_what_is_held_is_not_retired(ask: Ask, fill: Fill) -> None:
    fill(3)
    assert "retire" not in json.loads(ask(path(HELD)).content)["next_actions"]
    assert "is held by request" in message(ask(f"{path(HELD)}retire/", method="POST"), 409)


@pytest.mark.parametrize(
    ("verb", "body", "status", "says"),
    [
        ("enable", {"reason": "x" * 501}, 400, "reason: Ensure this field has no more than 500 characters."),
        ("enable", {"reason": 7}, 400, "reason: Not a valid string."),
        ("enable", {"state": "ready"}, 400, "state: cannot be written; writable fields: reason."),
        ("enable", ["x"], 400, "Invalid data"),
        ("enable", [], 400, "Invalid data"),
        ("enable", b"null", 400, "No data provided"),
        ("drain", {"then": "ready"}, 400, 'then: "ready" is not a valid choice.'),
        ("release", {}, 409, "is inactive: release is not possible; possible are enable, quarantine, retire."),
        ("explode", {}, 404, "nothing here"),
    ],
)
def test_what_cannot_be_asked(ask: Ask, fill: Fill, verb: str, body: Any, status: int, says: str) -> None:
    fill(3)
    assert says in message(ask(f"{path(FREE)}{verb}/", method="POST", data=body), status)
    assert not Event.objects.filter(source="api").exists()


def test_only_admins_decide(ask: Ask, fill: Fill) -> None:
    fill(3)
    for verb in VERBS:
        assert "cyborg:device:update" in message(ask(f"{path(FREE)}{verb}/", "manager", method="POST"), 403)
        message(ask(f"{path(FREE)}{verb}/", by="", method="POST"), 401)
    message(ask(f"{path(FREE)}enable/"), 405)
    message(ask("/api/devices/00000000-0000-4000-8000-000000000000/enable/", method="POST"), 404)
    possible = {("POST", f"{path(FREE)}{verb}/") for verb in ("enable", "quarantine", "retire")}
    assert forms(page(ask, path(FREE))) == possible | {("PATCH", path(FREE))}
    assert forms(page(ask, path(FREE), "manager")) == set()


RULE = {"name": "fakes", "driver": "fake_*", "action": "ready", "order": 10}


def test_a_rule_is_made_changed_and_deleted(ask: Ask) -> None:
    response = ask("/api/rules/", method="POST", data=RULE)
    assert response.status_code == 201, response.content
    rule = json.loads(response.content)
    assert (rule["order"], rule["host"], rule["enabled"]) == (10, "", True)
    there = rule["url"].removeprefix("http://testserver")
    changed = json.loads(ask(there, method="PATCH", data={"enabled": False, "name": "fakes"}).content)
    assert (changed["enabled"], changed["name"]) == (False, "fakes")
    assert [row["name"] for row in results(ask("/api/rules/", "manager"))] == ["fakes"]
    assert results(ask("/api/rules/?enabled=true&action=ready")) == []
    assert json.loads(ask(there).content) == changed
    assert ask(there, method="DELETE").status_code == 204
    assert ask(there).status_code == 404
    told = Event.objects.filter(subject=rule["uuid"]).order_by("id").values_list("action", "actor")
    assert [*told] == [("rule.created", "admin-p1"), ("rule.changed", "admin-p1"), ("rule.deleted", "admin-p1")]
    assert Event.objects.get(action="rule.changed").changes == {"enabled": [True, False]}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "a b"}, "name: Say letters"),
        ({"action": "retired"}, 'action: "retired" is not a valid choice.'),
        ({"order": "1"}, "order: A valid integer is required."),
        ({"enabled": "yes"}, "enabled: Must be a valid boolean."),
        ({"order": -1}, "order: Ensure this value is greater than or equal to 0."),
        ({"type": "TOASTER"}, 'type: "TOASTER" is not a valid choice.'),
        ({"host": "h" * 256}, "host: Ensure this field has no more than 255 characters."),
        ({"vendor": None}, "vendor: This field may not be null."),
        ({"product": "x"}, "product: cannot be written"),
    ],
)
def test_a_rule_that_makes_no_sense(ask: Ask, changes: dict[str, Any], says: str) -> None:
    assert says in message(ask("/api/rules/", method="POST", data=RULE | changes), 400)
    assert not AdmissionRule.objects.exists()


def test_only_admins_write_rules_and_a_name_is_taken_once(ask: Ask) -> None:
    there = json.loads(ask("/api/rules/", method="POST", data=RULE).content)["url"].removeprefix("http://testserver")
    assert "already exists" in message(ask("/api/rules/", method="POST", data=RULE), 409)
    for method, on, verb in (
        ("POST", "/api/rules/", "create"),
        ("PATCH", there, "update"),
        ("DELETE", there, "delete"),
    ):
        assert f"cyborg:rule:{verb}" in message(ask(on, "manager", method=method, data=RULE), 403)
    message(ask("/api/rules/", "member"), 403)


def test_a_rule_made_here_admits_what_is_found_next(ask: Ask) -> None:
    ask("/api/rules/", method="POST", data=RULE)
    apply(a_host(), answer(card(1), driver="fake_driver"), answer(card(2), driver="other"))
    assert dict(Device.objects.values_list("driver", "state")) == {"fake_driver": "ready", "other": "inactive"}
