"""Test commands over /api/: order, list, follow to the end, permissions and refusals."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from accelerators import conductor
from accelerators.api.own.commands import MAX_WAITERS, _waiter_slots
from accelerators.commands import command_queue, programming
from accelerators.models import Command, Device, Event, Host
from accelerators.workflows import command_endings
from tests.accelerators.api.own.conftest import Ask, Fill, get_error_message, get_results
from tests.accelerators.api.own.test_pages import get_page, list_forms
from tests.support.reports import apply_report, make_card, make_driver_report

pytestmark = pytest.mark.django_db

ACTS = "attach detach health partition program reset uninstall"
UNKNOWN_UUID = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def device(fill: Fill) -> Device:
    """Return a free card whose driver supports all commands; the first card of its host is held."""
    (host,) = fill(2)
    able = make_card(7, acts=ACTS, to_install="make 4 virtual functions")
    apply_report(host, make_driver_report(make_card(0, handles=2, acts=ACTS), able, driver="pci_driver"), seq=2)
    with conductor.writing():
        Command.objects.all().delete()
    return Device.objects.get(address="0000:07:00.0")


def order_command(ask: Ask, **data: Any) -> dict[str, Any]:
    """Order a command and return it as the API answered."""
    response = ask("/api/commands/", method="POST", data=data)
    assert response.status_code == 201, response.content
    command = json.loads(response.content)
    assert response["Location"] == command["url"]
    return command


def get_json(ask: Ask, url: str) -> Any:
    response = ask(url.removeprefix("http://testserver"))
    assert response.status_code == 200, response.content
    return json.loads(response.content)


def test_a_command_is_ordered_and_followed_to_its_end(ask: Ask, device: Device) -> None:
    command = order_command(ask, op="partition", device=str(device.uuid), layout={"vfs": "4"}, reason="four")
    assert (command["op"], command["state"], command["by"], command["reason"]) == (
        "partition",
        "queued",
        "admin-p1",
        "four",
    )
    assert (command["layout"], command["image"], command["driver"]) == ({"vfs": "4"}, None, "pci_driver")
    assert command["device"]["address"] == "0000:07:00.0" and command["host"]["name"] == "cmp0"
    shown = get_json(ask, f"/api/devices/{device.uuid}/")
    assert shown["busy_with"] == command["url"]
    assert (shown["to_install"], shown["acts"]) == (["make 4 virtual functions"], ACTS.split())
    assert get_json(ask, shown["commands"])["results"] == [get_json(ask, command["url"])] == [command]
    row = Command.objects.get()
    tag = ask("/api/commands/")["ETag"]
    assert ask("/api/commands/", **{"If-None-Match": tag}).status_code == 304
    command_queue.store_progress([command_queue.CommandProgress(row.host_id, row.id, 50, "making them")])
    assert ask("/api/commands/", **{"If-None-Match": tag}).status_code == 200
    followed = get_json(ask, command["url"])
    assert (followed["state"], followed["percent"], followed["progress"]) == ("started", 50, "making them")
    command_queue.store_answers(
        [command_queue.CommandAnswer(row.host_id, row.id, "failed", "no memory for them", {"left": "2"})]
    )
    command_endings.end_answered_commands()
    followed = get_json(ask, command["url"])
    assert (followed["state"], followed["text"], followed["detail"]) == ("failed", "no memory for them", {"left": "2"})
    assert followed["ended_at"] and get_json(ask, f"/api/devices/{device.uuid}/")["busy_with"] is None
    actions = Event.objects.filter(subject=command["uuid"]).order_by("id").values_list("action", "source")
    assert actions[0] == ("command.ordered", "api") and actions[1][0] == "command.failed"


def test_a_program_command_shows_its_image_before_it_is_downloaded(ask: Ask, device: Device) -> None:
    command = order_command(ask, op="program", device=str(device.uuid), image=UNKNOWN_UUID)
    assert (command["state"], command["image"]) == ("preparing", UNKNOWN_UUID)


def test_rescan_and_logs_are_ordered_by_the_hosts_uuid(ask: Ask, device: Device) -> None:
    host = str(device.host.uuid)
    assert order_command(ask, op="rescan", host=host, driver="slow_driver")["driver"] == "slow_driver"
    logs = order_command(ask, op="logs", host=host)
    assert (logs["device"], logs["device_name"], logs["host"]["uuid"]) == (None, "", host)


def test_commands_can_be_filtered_and_ordered(ask: Ask, device: Device) -> None:
    first = order_command(ask, op="health", device=str(device.uuid))
    order_command(ask, op="logs", host=str(device.host.uuid))
    with conductor.writing():
        Command.objects.filter(uuid=first["uuid"]).update(state="succeeded", ended_at="2026-01-01T00:00:00Z")
    for query, ops in {
        "": ["logs", "health"],
        "?ordering=created": ["health", "logs"],
        "?host=cmp0": ["logs", "health"],
        f"?device={device.uuid}": ["health"],
        "?state=queued&state=taken": ["logs"],
        "?op=health&op=reset": ["health"],
        "?ended=true": ["health"],
        "?ended=false": ["logs"],
        f"?request={UNKNOWN_UUID}": [],
    }.items():
        assert [row["op"] for row in get_results(ask(f"/api/commands/{query}"))] == ops, query


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "op: This field is required."),
    ({"op": "explode", "host": "HOST"}, 400, 'op: "explode" is not a valid choice.'),
    ({"op": "attach", "device": "DEVICE"}, 400, "op: Say one of health, reset"),
    ({"op": "health"}, 400, "op: Say one of health, reset"),
    ({"op": "health", "device": "DEVICE", "host": "HOST"}, 400, "op: Say one of health, reset"),
    ({"op": "logs", "device": "DEVICE"}, 400, "op: Say one of health, reset"),
    ({"op": "logs", "host": "HOST", "driver": "pci_driver"}, 400, "driver: the command logs does not accept it."),
    (
        {"op": "health", "device": "DEVICE", "layout": {"vfs": "4"}},
        400,
        "layout: the command health does not accept it.",
    ),
    (
        {"op": "reset", "device": "DEVICE", "image": UNKNOWN_UUID},
        400,
        "image: the command reset does not accept it.",
    ),
    ({"op": "health", "device": UNKNOWN_UUID}, 400, "device: Device not found"),
    ({"op": "logs", "host": UNKNOWN_UUID}, 400, "host: Host not found"),
    ({"op": "health", "device": 7}, 400, "device: Must be a valid UUID."),
    ({"op": "partition", "device": "DEVICE"}, 400, "takes a layout"),
    ({"op": "partition", "device": "DEVICE", "layout": {"vfs": 4}}, 400, "layout.vfs: Not a valid string."),
    ({"op": "program", "device": "DEVICE"}, 400, "takes an image"),
    ({"op": "health", "device": "DEVICE", "reason": "x" * 501}, 400, "no more than 500 characters"),
    ({"op": "health", "device": "DEVICE", "state": "ended"}, 400, "state: cannot be written"),
    ({"op": "reset", "device": "HELD"}, 409, "is held by request"),
]
"""Commands that are refused, each with the status and a part of the message."""


def test_invalid_commands_are_refused_and_not_stored(ask: Ask, device: Device) -> None:
    held = Device.objects.get(address="0000:00:00.0")
    names = {"DEVICE": str(device.uuid), "HOST": str(device.host.uuid), "HELD": str(held.uuid)}
    for said, status, says in REFUSED:
        sent = {key: names.get(value, value) if isinstance(value, str) else value for key, value in said.items()}
        assert says in get_error_message(ask("/api/commands/", method="POST", data=sent), status)
        assert not Command.objects.exists(), said


def test_admins_may_order_commands_managers_may_read_them_others_neither(ask: Ask, device: Device) -> None:
    order_data = {"op": "health", "device": str(device.uuid)}
    for by, status in (("manager", 403), ("member", 403), ("", 401)):
        get_error_message(ask("/api/commands/", by, method="POST", data=order_data), status)
    command = order_command(ask, **order_data)
    command_path = command["url"].removeprefix("http://testserver")
    for path in ("/api/commands/", command_path):
        assert [ask(path, by).status_code for by in ("manager", "member", "")] == [200, 403, 401]
    get_error_message(ask(command_path, method="PATCH", data={}), 405)
    assert list_forms(get_page(ask, "/api/commands/")) == {("POST", "/api/commands/")}
    assert list_forms(get_page(ask, "/api/commands/", "manager")) == set()


def test_a_command_keeps_the_device_name_after_the_device_is_removed(ask: Ask, device: Device) -> None:
    command = order_command(ask, op="health", device=str(device.uuid))
    with conductor.writing():
        Command.objects.update(device=None)
        Host.objects.update(node="x")
    shown = get_json(ask, command["url"])
    assert (shown["device"], shown["device_name"]) == (None, "1044 0000:07:00.0")


def test_everybody_who_waits_for_a_command_looks_again_when_notifications_may_have_been_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, other = threading.Event(), threading.Event()
    monkeypatch.setattr(programming, "_waiters", {"a": [one], "b": [other]})
    programming._wake_waiters("a")
    assert one.is_set() and not other.is_set()
    one.clear()
    programming._wake_waiters(None)
    assert one.is_set() and other.is_set()


def test_get_with_wait_returns_when_the_command_ends(ask: Ask, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    command = order_command(ask, op="health", device=str(device.uuid))
    row = Command.objects.get()

    class Agent:
        """Stands for the module's Event; its `wait` lets the agent end the command at once."""

        def wait(self, seconds: float) -> None:
            command_queue.store_answers([command_queue.CommandAnswer(row.host_id, row.id, "succeeded", "it is well")])
            command_endings.end_answered_commands()

        clear = set = lambda self: None

    monkeypatch.setattr(programming, "threading", SimpleNamespace(Event=Agent))
    for _ in range(MAX_WAITERS):
        assert _waiter_slots.acquire(blocking=False)
    assert get_json(ask, f"{command['url']}?wait=30")["state"] == "queued"
    for _ in range(MAX_WAITERS):
        _waiter_slots.release()
    assert get_json(ask, f"{command['url']}?wait=30&fields=state") == {"state": "succeeded"}
    for text in ("-1", "31", "x", "1.5", "%C2%B2", "001"):
        assert "wait: say a number" in get_error_message(ask(f"/api/commands/{row.uuid}/?wait={text}"), 400)
    get_error_message(ask(f"/api/commands/{UNKNOWN_UUID}/?wait=30"), 404)
    assert "wait: unknown parameter" in get_error_message(ask(f"/api/devices/{device.uuid}/?wait=1"), 400)
