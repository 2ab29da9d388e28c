"""Test bulk actions over /api/: preview, token, results, cancellation and the retry of failed devices."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from django.http import HttpResponse

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.states import DrainTarget
from accelerators.models import AcceleratorRequest, Bulk, Command, Device, Event
from accelerators.workflows import bulk_actions, confirmations
from tests.accelerators.api.own.conftest import Ask, Fill, get_error_message, get_results

pytestmark = pytest.mark.django_db(transaction=True)
PATH = "/api/bulk_actions/"


def post(ask: Ask, path: str = PATH, by: str = "admin", **fields: Any) -> HttpResponse:
    return ask(path, by, method="POST", data=fields)


def get_body(response: HttpResponse, status: int = 202) -> dict[str, Any]:
    assert response.status_code == status, response.content
    return json.loads(response.content)


def get_preview(response: HttpResponse) -> dict[str, Any]:
    """Return the preview of an answer that refuses a request without a token."""
    body = get_body(response, 409)
    assert body["error"]["reason"] == "not_confirmed"
    return body["preview"]


def run_job() -> None:
    while bulk_actions.process_next_slice():
        pass


def set_states(state: str) -> None:
    with conductor.writing():
        Device.objects.update(state=state)


def get_free_uuids() -> list[str]:
    """Return the uuids of the devices that no request holds."""
    held = AcceleratorRequest.objects.values("attach_handle__deployable__device")
    return [str(one.uuid) for one in Device.objects.exclude(pk__in=held)]


def test_free_devices_of_one_host_are_changed_at_once(ask: Ask, fill: Fill) -> None:
    fill(10)
    set_states("inactive")
    uuids = get_free_uuids()
    made = get_body(post(ask, action="quarantine", devices=uuids, reason="smoke"))
    assert (made["state"], made["total"], made["counts"]["moved"], made["by"]) == (
        *("done", len(uuids), len(uuids)),
        "admin-p1",
    )
    assert {str(one.uuid) for one in Device.objects.filter(state="quarantined")} == set(uuids)
    rows = get_results(ask(made["results"].removeprefix("http://testserver")))
    assert {row["device"] for row in rows} == set(uuids)
    assert {(row["was"], row["outcome"], row["state"], row["reason"]) for row in rows} == {
        ("inactive", "moved", "quarantined", "")
    }
    event = Event.objects.filter(action="bulk.confirmed").get()
    assert (event.source, event.actor, event.reason) == ("api", "admin-p1", "smoke")
    assert set(Event.objects.filter(action="device.quarantined").values_list("source", flat=True)) == {"api"}


@pytest.mark.parametrize("storage", ["always", "when_needed", "never", None])
@pytest.mark.parametrize("is_needed", [True, False])
def test_the_draft_of_a_preview_is_stored_as_the_request_asks(
    ask: Ask, fill: Fill, storage: str | None, is_needed: bool
) -> None:
    fill(20)
    set_states("inactive")
    chosen = {"selector": {"state": ["inactive"]}} if is_needed else {"devices": get_free_uuids()[:1]}
    order = {"action": "quarantine", **chosen}
    wanted = {} if storage is None else {"store_draft": storage}
    stored_before, events_before = Bulk.objects.count(), Event.objects.count()
    preview = get_body(post(ask, **order, dry_run=True, **wanted), 200)
    is_stored = storage in ("always", None) or (storage == "when_needed" and is_needed)
    assert preview["confirm"] is is_needed
    assert Bulk.objects.count() - stored_before == (1 if is_stored else 0)
    assert bool(preview["token"]) == bool(preview["expires_at"]) == is_stored
    if is_stored:
        get_body(post(ask, **order, token=preview["token"]))
    else:
        assert preview["token"] is None and Event.objects.count() == events_before
    text = get_error_message(post(ask, **order, store_draft="never"), 400)
    assert "give it only with dry_run" in text


@pytest.mark.slow
def test_devices_of_several_hosts_are_changed_only_with_the_token_of_the_preview(ask: Ask, fill: Fill) -> None:
    fill(20)
    set_states("inactive")
    order = {"action": "quarantine", "selector": {"state": ["inactive"]}}
    preview = get_preview(post(ask, **order))
    assert not Device.objects.filter(state="quarantined").exists()
    assert (preview["total"], preview["hosts"], preview["confirm"], preview["counts"]["moved"]) == (20, 2, True, 20)
    assert len(preview["devices"]) == 20 and {one["outcome"] for one in preview["devices"]} == {"moved"}
    assert sum(one["number"] for one in preview["forecast"] if one["held"]) == preview["held"] > 0
    dry = get_body(post(ask, **order, dry_run=True), 200)
    assert dry | {"token": "", "expires_at": ""} == preview | {"token": "", "expires_at": ""}
    assert not Device.objects.filter(state="quarantined").exists()
    made = get_body(post(ask, **order, token=preview["token"]))
    run_job()
    assert Device.objects.filter(state="quarantined").count() == 20
    assert get_body(ask(made["url"]), 200)["counts"] == {"moved": 20, "unchanged": 0, "refused": 0, "waiting": 0}
    get_error_message(post(ask, **order, token=preview["token"]), 409, "stale_preview")


def test_a_request_whose_draft_is_replaced_by_parallel_requests_says_that_it_started_nothing(
    ask: Ask, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(10)
    set_states("inactive")
    forecast = bulk_actions.preview_bulk

    def preview_while_others_ask(draft: Bulk) -> bulk_actions.BulkPreview:
        """Preview the draft; meanwhile the same caller makes as many drafts as are kept."""
        preview, caller = forecast(draft), Caller(draft.actor, draft.caller_id, frozenset(), "")
        for _ in range(bulk_actions.MAX_DRAFTS):
            bulk_actions.create_draft("retire", DrainTarget.MAINTENANCE, Device.objects.all(), caller)
        return preview

    monkeypatch.setattr(bulk_actions, "preview_bulk", preview_while_others_ask)
    answer = post(ask, action="quarantine", devices=get_free_uuids())
    assert "started nothing" in get_error_message(answer, 409, "conflict")
    assert not Device.objects.exclude(state="inactive").exists()


def test_free_devices_of_two_hosts_need_the_token_too(ask: Ask, fill: Fill) -> None:
    fill(20)
    set_states("inactive")
    preview = get_preview(post(ask, action="quarantine", devices=get_free_uuids()))
    assert (preview["hosts"], preview["held"]) == (2, 0)
    assert not Device.objects.filter(state="quarantined").exists()


def test_one_held_device_needs_the_token_and_a_free_one_does_not(ask: Ask, fill: Fill) -> None:
    fill(10)
    set_states("ready")
    free, held = get_free_uuids()[0], str(AcceleratorRequest.objects.all()[0].attach_handle.deployable.device.uuid)
    assert get_body(post(ask, action="disable", devices=[free]))["counts"]["moved"] == 1
    preview = get_preview(post(ask, action="disable", devices=[held]))
    assert (preview["hosts"], preview["held"], Device.objects.get(uuid=held).state) == (1, 1, "ready")
    assert get_body(post(ask, action="disable", devices=[held], token=preview["token"]))["counts"]["moved"] == 1
    assert Device.objects.get(uuid=held).state == "maintenance"


def test_a_token_confirms_only_its_own_preview(ask: Ask, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(20)
    set_states("inactive")
    uuids = [str(one.uuid) for one in Device.objects.all()]
    order = {"action": "quarantine", "devices": uuids}
    token = get_body(post(ask, **order, dry_run=True), 200)["token"]
    for other in (
        {"action": "retire"},
        {"devices": uuids[:-1]},
        {"token": token[:-1] + ("a" if token[-1] != "a" else "b")},
        {"token": "no token"},
    ):
        get_error_message(post(ask, **(order | {"token": token} | other)), 409, "stale_preview")
    answer = ask(PATH, "admin", project="p2", method="POST", data=order | {"token": token})
    get_error_message(answer, 409, "stale_preview")
    with monkeypatch.context() as patch:
        patch.setattr(confirmations, "TOKEN_LIFETIME", timedelta(seconds=-1))
        get_error_message(post(ask, **order, token=token), 409, "stale_preview")
    assert not Device.objects.exclude(state="inactive").exists()
    assert not Bulk.objects.exclude(state="draft").exists()
    get_body(post(ask, action="quarantine", devices=uuids[::-1], token=token))  # the order of devices means nothing


@pytest.mark.slow
def test_what_changed_since_the_preview_is_refused_and_can_be_retried(ask: Ask, fill: Fill) -> None:
    fill(20)
    set_states("ready")
    order = {"action": "quarantine", "selector": {"all": True}}
    preview = get_body(post(ask, **order, dry_run=True), 200)
    free = get_free_uuids()
    with conductor.writing():
        request = AcceleratorRequest.objects.all()[0]
        handle = Device.objects.get(uuid=free[0]).deployables.get().attach_handles.all()[0]
        AcceleratorRequest.objects.create(
            project_id="p1",
            state="Bound",
            profile=request.profile,
            group=request.group,
            hostname=request.hostname,
            deployable_id=handle.deployable_id,
            attach_handle=handle,
        )
        Device.objects.filter(uuid=free[1]).update(state="maintenance")
    assert get_body(post(ask, **order, dry_run=True), 200)["held"] == preview["held"] + 1
    made = get_body(post(ask, **order, token=preview["token"]))
    run_job()
    refused = get_results(ask(f"/api/bulk_results/?bulk_action={made['uuid']}&outcome=refused"))
    assert {(row["device"], row["reason"]) for row in refused} == {(free[0], "in_use"), (free[1], "conflict")}
    assert get_results(ask(f"/api/bulk_results/?bulk_action={made['uuid']}&failed=true")) == refused
    others = get_results(ask(f"/api/bulk_results/?bulk_action={made['uuid']}&failed=false"))
    assert {row["outcome"] for row in others} == {"moved"}
    assert Device.objects.get(uuid=free[0]).state == "ready"
    assert "was free when this was decided" in next(row["text"] for row in refused if row["reason"] == "in_use")
    with conductor.writing():
        Device.objects.filter(uuid=free[1]).update(state="ready")
    again = get_preview(post(ask, f"{PATH}{made['uuid']}/retry/"))
    assert (again["total"], again["held"], again["counts"]["moved"]) == (2, 1, 2)
    retried = get_body(post(ask, f"{PATH}{made['uuid']}/retry/", token=again["token"], reason="once more"))
    assert (retried["counts"]["moved"], retried["reason"]) == (2, "once more")
    assert get_error_message(post(ask, f"{PATH}{retried['uuid']}/retry/"), 400).startswith("No device")


def test_a_retry_orders_the_commands_again_that_have_failed(ask: Ask, fill: Fill) -> None:
    fill(10)
    set_states("ready")
    with conductor.writing():
        Device.objects.update(acts="health reset")
    uuids = [str(one.uuid) for one in Device.objects.order_by("id")[:3]]
    made = get_body(post(ask, action="health", devices=uuids))
    assert made["counts"]["moved"] == 3
    commands = Command.objects.filter(op="health").order_by("id")
    with conductor.writing():
        for command, state in zip(commands, ("succeeded", "failed", "expired"), strict=True):
            Command.objects.filter(pk=command.pk).update(state=state, ended_at=command.created_at)
    assert get_error_message(post(ask, f"{PATH}{made['uuid']}/retry/", by="operator"), 403)
    retried = get_body(post(ask, f"{PATH}{made['uuid']}/retry/"))
    rows = get_results(ask(f"/api/bulk_results/?bulk_action={retried['uuid']}"))
    assert [row["device"] for row in rows] == uuids[1:]


def test_a_large_set_is_cancelled_before_the_next_slice(ask: Ask, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk_actions, "BULK_SLICE_SIZE", 5)
    fill(20)
    set_states("inactive")
    order = {"action": "quarantine", "selector": {"type": "FPGA"}}
    token = get_body(post(ask, **order, dry_run=True), 200)["token"]
    made = get_body(post(ask, **order, token=token))
    assert (made["state"], made["counts"]["waiting"]) == ("running", 20)
    get_error_message(post(ask, f"{PATH}{made['uuid']}/retry/"), 409, "conflict")
    bulk_actions.process_next_slice()
    cancelled = get_body(post(ask, f"{PATH}{made['uuid']}/cancel/"))
    run_job()
    assert (cancelled["state"], cancelled["counts"]["moved"]) == ("cancelled", 5)
    assert Device.objects.filter(state="quarantined").count() == 5
    assert get_results(ask(f"{PATH}?state=cancelled"))[0]["uuid"] == made["uuid"]


def test_commands_and_states_have_rights_of_their_own(ask: Ask, fill: Fill) -> None:
    fill(1)
    uuids = [str(Device.objects.get().uuid)]
    for by in ("operator", "manager", "member"):
        for action, rule in (("disable", "cyborg:device:update"), ("health", "cyborg:command:create")):
            assert rule in get_error_message(post(ask, by=by, action=action, devices=uuids, dry_run=True), 403)
    assert not Bulk.objects.exclude(actor="olga").exists()


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"action": "explode", "selector": {"all": True}}, "not a valid choice"),
        ({"action": "disable"}, "Say either devices"),
        ({"action": "disable", "devices": []}, "Say either devices"),
        ({"action": "disable", "devices": ["00000000-0000-4000-8000-000000000000"]}, "There is no device"),
        ({"action": "disable", "selector": {}}, "selector: Say"),
        ({"action": "disable", "selector": {"all": True, "host": "cmp0"}}, "unknown filter"),
        ({"action": "disable", "selector": {"colour": "red"}}, "colour: unknown filter; known are"),
        ({"action": "disable", "selector": {"saved_view": "mine"}}, "saved_view: unknown filter; known are"),
        ({"action": "disable", "selector": {"state": "red"}}, "state: "),
        ({"action": "disable", "selector": {"host": ""}}, "host: say a text"),
        ({"action": "disable", "selector": {"host": 1}}, "host: say a text"),
        ({"action": "disable", "selector": {"host": ["cmp0", "cmp1"]}}, "host: it takes one value, not a list"),
        ({"action": "disable", "selector": {"host": "nowhere"}}, "No device is chosen"),
        ({"action": "disable", "then": "retired", "selector": {"all": True}}, "only drain accepts it"),
        ({"action": "disable", "selector": {"all": True}, "dry_run": True, "token": "x"}, "leave it out"),
    ],
)
def test_wrong_bodies_are_refused_with_what_is_wrong(ask: Ask, fill: Fill, fields: dict[str, Any], says: str) -> None:
    fill(1)
    assert says in get_error_message(post(ask, **fields), 400, "invalid")
    assert not Bulk.objects.exclude(actor="olga").exists()
