"""Test the life cycle of devices over /api/: actions on devices, and admission rules."""

from __future__ import annotations

import json
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.http import HttpResponse
from django.test.utils import CaptureQueriesContext

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.states import DeviceState
from accelerators.models import AcceleratorRequest, AdmissionRule, AttachHandle, Device, Event
from accelerators.requests import binding, profiles
from tests.accelerators.api.own.conftest import Ask, Fill, get_error_message, get_results
from tests.accelerators.api.own.test_pages import get_page, list_forms
from tests.accelerators.api.own.test_units import create_bound_request
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db

NOVA = Caller("nova", "n", frozenset({"admin"}), "p1", service=True)
VERBS = ("enable", "drain", "disable", "release", "quarantine", "reinstate", "retire")
FREE_ADDRESS = "0000:02:00.0"
HELD_ADDRESS = "0000:00:00.0"


def device_path(address: str) -> str:
    """Return the path of the device with this PCI address."""
    return f"/api/devices/{Device.objects.get(address=address).uuid}/"


def perform_action(ask: Ask, address: str, verb: str, **body: str) -> dict[str, Any]:
    """Perform an action on the device, with the token of its preview if it needs one, and return the device."""
    response = send_confirmed(ask, f"{device_path(address)}{verb}/", body)
    assert response.status_code == 200, response.content
    return json.loads(response.content)


def send_confirmed(ask: Ask, path: str, body: dict[str, str] | None = None) -> HttpResponse:
    """Send an action, and send it again with the token of its preview if it has to be confirmed; return the answer."""
    response = ask(path, method="POST", data=body or None)
    preview = json.loads(response.content).get("preview")
    return ask(path, method="POST", data=(body or {}) | {"token": preview["token"]}) if preview else response


def test_an_action_returns_the_device_and_records_an_event(ask: Ask, fill: Fill) -> None:
    fill(3)
    device = perform_action(ask, FREE_ADDRESS, "enable", reason="burnt in")
    assert (device["state"], device["state_reason"], device["state_by"]) == ("ready", "burnt in", "admin-p1")
    assert device == json.loads(ask(device_path(FREE_ADDRESS)).content)
    assert device["next_actions"] == ["drain", "disable", "quarantine"]
    event = Event.objects.get(action="device.ready")
    assert (event.source, event.actor, event.reason) == ("api", "admin-p1", "burnt in")
    assert event.request_id.startswith("req-")


@pytest.mark.parametrize("state", DeviceState)
@pytest.mark.slow
def test_next_actions_are_exactly_those_that_do_something(ask: Ask, fill: Fill, state: str) -> None:
    fill(1)
    address = device_path("0000:00:00.0")
    shown = {}
    for verb in (*VERBS, ""):
        with conductor.writing():
            Device.objects.update(state=state, returns_to=None, drain_to=None)
        answered = send_confirmed(ask, f"{address}{verb}/") if verb else ask(address)
        assert answered.status_code in (200, 409), answered.content
        shown[verb] = json.loads(answered.content)
    before = shown.pop("")
    facts = ("state", "returns_to", "draining")
    changing = {v for v, after in shown.items() if "error" not in after and any(after[f] != before[f] for f in facts)}
    assert changing == {*before["next_actions"]}


def test_a_draining_device_shows_its_target_and_the_number_of_requests_left(ask: Ask, fill: Fill) -> None:
    fill(3)
    with conductor.writing():
        Device.objects.update(state="ready")
    device = perform_action(ask, HELD_ADDRESS, "drain", then="retired", reason="worn out")
    assert (device["state"], device["draining"], device["held"]) == ("maintenance", {"to": "retired", "left": 1}, 1)
    assert device["next_actions"] == ["enable", "drain", "quarantine"]
    assert get_results(ask("/api/devices/?fields=draining&draining=true")) == [{"draining": device["draining"]}]
    assert len(get_results(ask("/api/devices/?draining=false"))) == 2
    tag = ask(device_path(HELD_ADDRESS))["ETag"]
    binding.delete_requests([str(AcceleratorRequest.objects.get(deployable__device__uuid=device["uuid"]).uuid)], NOVA)
    assert ask(device_path(HELD_ADDRESS), **{"If-None-Match": tag}).status_code == 200
    assert perform_action(ask, HELD_ADDRESS, "enable")["draining"] is None


def test_retiring_a_held_device_is_refused_and_not_offered(ask: Ask, fill: Fill) -> None:
    fill(3)
    assert "retire" not in json.loads(ask(device_path(HELD_ADDRESS)).content)["next_actions"]
    assert "is held by request" in get_error_message(ask(f"{device_path(HELD_ADDRESS)}retire/", method="POST"), 409)


@pytest.mark.parametrize("verb", ["disable", "drain", "quarantine"])
def test_an_action_on_a_held_device_is_done_only_with_the_token_of_its_preview(ask: Ask, fill: Fill, verb: str) -> None:
    fill(3)
    with conductor.writing():
        Device.objects.update(state="ready")
    path, free_path = f"{device_path(HELD_ADDRESS)}{verb}/", f"{device_path(FREE_ADDRESS)}{verb}/"
    answer = ask(path, method="POST", data={"reason": "x"})
    assert "1 held device" in get_error_message(answer, 409)
    preview = json.loads(answer.content)["preview"]
    request = AcceleratorRequest.objects.get(deployable__device__address=HELD_ADDRESS)
    assert (preview["held"], preview["confirm"], preview["state"]) == (1, True, "ready")
    assert str(request.uuid) in preview["holders"][0]
    shown = ask(path, method="POST", data={"dry_run": True})
    assert shown.status_code == 200 and json.loads(shown.content)["confirm"]
    free = json.loads(ask(free_path, method="POST", data={"dry_run": True}).content)
    assert (free["held"], free["confirm"], free["holders"]) == (0, False, [])
    assert {*Device.objects.values_list("state", flat=True)} == {"ready"} and not Event.objects.filter(source="api")
    token = {"token": preview["token"]}
    for other in (free_path, f"{device_path(HELD_ADDRESS)}retire/"):
        assert "Nothing was done" in get_error_message(ask(other, method="POST", data=token), 409)
    assert "Nothing was done" in get_error_message(ask(path, project="p2", method="POST", data=token), 409)
    assert ask(path, method="POST", data=token | {"reason": "x"}).status_code == 200
    assert ask(free_path, method="POST").status_code == 200
    assert not Device.objects.filter(state="ready", address__in=[HELD_ADDRESS, FREE_ADDRESS]).exists()
    assert "Nothing was done" in get_error_message(ask(path, method="POST", data=token), 409)


def test_the_token_of_a_device_is_stale_when_the_state_has_changed(ask: Ask, fill: Fill) -> None:
    fill(3)
    path = f"{device_path(HELD_ADDRESS)}quarantine/"
    token = json.loads(ask(path, method="POST", data={"dry_run": True}).content)["token"]
    with conductor.writing():
        Device.objects.update(state="maintenance")
    assert "Nothing was done" in get_error_message(ask(path, method="POST", data={"token": token}), 409)
    assert not Device.objects.filter(state="quarantined").exists()


def test_a_device_that_is_taken_after_the_forecast_is_answered_with_a_new_preview(
    ask: Ask, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(3)
    with conductor.writing():
        Device.objects.update(state="ready")
    apply_action = lifecycle.apply_action_to_device

    def take_device_first(*arguments: Any) -> Any:
        """Let a request take the device, as a bind of another process may do, and apply the action."""
        monkeypatch.undo()
        create_bound_request(AttachHandle.objects.filter(deployable__device__address=FREE_ADDRESS)[0])
        return apply_action(*arguments)

    monkeypatch.setattr(lifecycle, "apply_action_to_device", take_device_first)
    path = f"{device_path(FREE_ADDRESS)}disable/"
    answer = ask(path, method="POST")
    assert "1 held device" in get_error_message(answer, 409, "not_confirmed")
    assert Device.objects.get(address=FREE_ADDRESS).state == "ready"
    token = json.loads(answer.content)["preview"]["token"]
    assert json.loads(ask(path, method="POST", data={"token": token}).content)["state"] == "maintenance"


@pytest.mark.parametrize(
    ("verb", "body", "status", "says"),
    [
        ("enable", {"reason": "x" * 501}, 400, "reason: Ensure this field has no more than 500 characters."),
        ("enable", {"reason": 7}, 400, "reason: Not a valid string."),
        ("enable", {"state": "ready"}, 400, "state: cannot be written; writable fields: dry_run, token, reason."),
        ("enable", ["x"], 400, "Invalid data"),
        ("enable", [], 400, "Invalid data"),
        ("enable", b"null", 400, "No data provided"),
        ("drain", {"then": "ready"}, 400, 'then: "ready" is not a valid choice.'),
        ("release", {}, 409, "is inactive: release is not possible; possible are enable, quarantine, retire."),
        ("explode", {}, 404, "nothing here"),
    ],
)
def test_invalid_actions_are_refused_and_record_no_event(
    ask: Ask, fill: Fill, verb: str, body: Any, status: int, says: str
) -> None:
    fill(3)
    assert says in get_error_message(ask(f"{device_path(FREE_ADDRESS)}{verb}/", method="POST", data=body), status)
    assert not Event.objects.filter(source="api").exists()


def test_only_admins_may_perform_device_actions(ask: Ask, fill: Fill) -> None:
    fill(3)
    for verb in VERBS:
        assert "cyborg:device:update" in get_error_message(
            ask(f"{device_path(FREE_ADDRESS)}{verb}/", "manager", method="POST"), 403
        )
        get_error_message(ask(f"{device_path(FREE_ADDRESS)}{verb}/", by="", method="POST"), 401)
    get_error_message(ask(f"{device_path(FREE_ADDRESS)}enable/"), 405)
    get_error_message(ask("/api/devices/00000000-0000-4000-8000-000000000000/enable/", method="POST"), 404)
    possible = {("POST", f"{device_path(FREE_ADDRESS)}{verb}/") for verb in ("enable", "quarantine", "retire")}
    assert list_forms(get_page(ask, device_path(FREE_ADDRESS))) == possible | {("PATCH", device_path(FREE_ADDRESS))}
    assert list_forms(get_page(ask, device_path(FREE_ADDRESS), "manager")) == set()


RULE = {"name": "fakes", "driver": "fake_*", "action": "ready", "order": 10}


def test_a_rule_is_created_changed_and_deleted_with_events(ask: Ask) -> None:
    with CaptureQueriesContext(connection) as captured:
        response = ask("/api/rules/", method="POST", data=RULE)
    assert response.status_code == 201, response.content
    read = [query for query in captured if query["sql"].startswith('SELECT "accelerators_admissionrule"')]
    assert len(read) == 1, "by the forecast, not to show the row"
    rule = json.loads(response.content)
    assert json.loads(ask(rule["url"].removeprefix("http://testserver")).content) == rule
    assert (rule["order"], rule["host"], rule["enabled"]) == (10, "", True)
    rule_path = rule["url"].removeprefix("http://testserver")
    changed = json.loads(
        ask(rule_path, method="PATCH", data={"enabled": False, "name": "fakes", "generation": 1}).content
    )
    assert (changed["enabled"], changed["name"]) == (False, "fakes")
    assert [row["name"] for row in get_results(ask("/api/rules/", "manager"))] == ["fakes"]
    assert get_results(ask("/api/rules/?enabled=true&action=ready")) == []
    assert json.loads(ask(rule_path).content) == changed
    assert ask(f"{rule_path}?generation=2", method="DELETE").status_code == 204
    assert ask(rule_path).status_code == 404
    rule_events = Event.objects.filter(subject=rule["uuid"]).order_by("id").values_list("action", "actor")
    assert [*rule_events] == [("rule.created", "admin-p1"), ("rule.changed", "admin-p1"), ("rule.deleted", "admin-p1")]
    assert Event.objects.get(action="rule.changed").changes == {"enabled": [True, False]}


def test_a_rule_that_would_move_devices_is_stored_only_with_the_token_of_its_preview(ask: Ask) -> None:
    for name in ("cmp1", "cmp2"):
        apply_report(get_or_create_host(name), make_driver_report(make_card(1), make_card(2), driver="fake_driver"))
    one_host = json.loads(ask("/api/rules/", method="POST", data=RULE | {"host": "cmp1", "dry_run": True}).content)
    assert (one_host["total"], one_host["hosts"], one_host["confirm"]) == (2, 1, True)
    refused = ask("/api/rules/", method="POST", data=RULE | {"host": "cmp1"})
    assert "1 host." in get_error_message(refused, 409, "not_confirmed")
    nowhere = json.loads(ask("/api/rules/", method="POST", data=RULE | {"host": "cmp9", "dry_run": True}).content)
    assert (nowhere["total"], nowhere["confirm"]) == (0, False)
    answer = ask("/api/rules/", method="POST", data=RULE)
    assert "2 hosts" in get_error_message(answer, 409, "not_confirmed")
    preview = json.loads(answer.content)["preview"]
    assert (preview["total"], preview["forecast"][0]["text"]) == (4, "becomes ready")
    assert preview["first_hosts"] == [{"host": "cmp1", "devices": 2}, {"host": "cmp2", "devices": 2}]
    token = {"token": preview["token"]}
    for other in ({"driver": ""}, {"action": "quarantined"}):
        get_error_message(ask("/api/rules/", method="POST", data=RULE | other | token), 409, "stale_preview")
    assert not AdmissionRule.objects.exists()
    created = ask("/api/rules/", method="POST", data=RULE | token)
    assert created.status_code == 201, created.content
    rule_path = json.loads(created.content)["url"].removeprefix("http://testserver")
    assert ask(rule_path, method="PATCH", data={"name": "same", "generation": 1}).status_code == 200, (
        "it reaches nothing new"
    )
    answer = ask(rule_path, method="PATCH", data={"action": "quarantined", "generation": 2})
    get_error_message(answer, 409, "not_confirmed")
    apply_report(get_or_create_host("cmp3"), make_driver_report(make_card(1), driver="other_driver"))
    token = {"token": json.loads(answer.content)["preview"]["token"]}
    assert ask(rule_path, method="PATCH", data={"action": "quarantined", "generation": 2} | token).status_code == 200
    assert AdmissionRule.objects.get().action == "quarantined"
    assert {*Device.objects.values_list("state", flat=True)} == {"inactive"}


def test_a_row_that_was_deleted_after_its_creation_is_answered_with_404(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiles, "create_profile", lambda *_: uuid4())
    profile = {"name": "p", "groups": [{"resources:FPGA": "1"}]}
    get_error_message(ask("/api/profiles/", method="POST", data=profile), 404)


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
def test_invalid_rules_are_refused(ask: Ask, changes: dict[str, Any], says: str) -> None:
    assert says in get_error_message(ask("/api/rules/", method="POST", data=RULE | changes), 400)
    assert not AdmissionRule.objects.exists()


def test_only_admins_write_rules_and_duplicate_names_are_refused(ask: Ask) -> None:
    rule_path = json.loads(ask("/api/rules/", method="POST", data=RULE).content)["url"].removeprefix(
        "http://testserver"
    )
    assert "already exists" in get_error_message(ask("/api/rules/", method="POST", data=RULE), 409)
    for method, on, verb in (
        ("POST", "/api/rules/", "create"),
        ("PATCH", rule_path, "update"),
        ("DELETE", rule_path, "delete"),
    ):
        assert f"cyborg:rule:{verb}" in get_error_message(ask(on, "manager", method=method, data=RULE), 403)
    get_error_message(ask("/api/rules/", "member"), 403)


def test_a_rule_created_over_the_api_admits_devices_found_later(ask: Ask) -> None:
    ask("/api/rules/", method="POST", data=RULE)
    apply_report(
        get_or_create_host(),
        make_driver_report(make_card(1), driver="fake_driver"),
        make_driver_report(make_card(2), driver="other"),
    )
    assert dict(Device.objects.values_list("driver", "state")) == {"fake_driver": "ready", "other": "inactive"}
