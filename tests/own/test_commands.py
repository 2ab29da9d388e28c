"""Commands over our own API: ordered, listed, followed."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from accelerators import conductor
from accelerators.api.own.commands import MAX_WAITERS, _waiter_slots
from accelerators.commands import placing, programming
from accelerators.models import Command, Device, Event, Host
from accelerators.workflows import command_results
from tests.own.conftest import Ask, Fill, message, results
from tests.own.test_pages import forms, page
from tests.support.reports import answer, apply, card

pytestmark = pytest.mark.django_db

ACTS = "attach detach health partition program reset uninstall"
NOBODY = "00000000-0000-4000-8000-000000000000"


@pytest.fixture
def device(fill: Fill) -> Device:
    """A free card whose driver can do everything; the first card is held."""
    (host,) = fill(2)
    able = card(7, acts=ACTS, to_install="make 4 virtual functions")
    apply(host, answer(card(0, handles=2, acts=ACTS), able, driver="pci_driver"), seq=2)
    with conductor.writing():
        Command.objects.all().delete()
    return Device.objects.get(address="0000:07:00.0")


def ordered(ask: Ask, **said: Any) -> dict[str, Any]:
    """The command, as it is answered."""
    response = ask("/api/commands/", method="POST", data=said)
    assert response.status_code == 201, response.content
    command = json.loads(response.content)
    assert response["Location"] == command["url"]
    return command


def get(ask: Ask, url: str) -> Any:
    response = ask(url.removeprefix("http://testserver"))
    assert response.status_code == 200, response.content
    return json.loads(response.content)


def test_a_command_is_ordered_and_followed_to_its_end(ask: Ask, device: Device) -> None:
    command = ordered(ask, op="partition", device=str(device.uuid), layout={"vfs": "4"}, reason="four")
    assert (command["op"], command["state"], command["by"], command["reason"]) == (
        "partition",
        "queued",
        "admin-p1",
        "four",
    )
    assert (command["layout"], command["image"], command["driver"]) == ({"vfs": "4"}, None, "pci_driver")
    assert command["device"]["address"] == "0000:07:00.0" and command["host"]["name"] == "cmp0"
    shown = get(ask, f"/api/devices/{device.uuid}/")
    assert shown["busy_with"] == command["url"]
    assert (shown["to_install"], shown["acts"]) == (["make 4 virtual functions"], ACTS.split())
    assert get(ask, shown["commands"])["results"] == [get(ask, command["url"])] == [command]
    row = Command.objects.get()
    tag = ask("/api/commands/")["ETag"]
    assert ask("/api/commands/", **{"If-None-Match": tag}).status_code == 304
    placing.store_progress([placing.CommandProgress(row.host_id, row.id, 50, "making them")])
    assert ask("/api/commands/", **{"If-None-Match": tag}).status_code == 200
    followed = get(ask, command["url"])
    assert (followed["state"], followed["percent"], followed["progress"]) == ("started", 50, "making them")
    placing.store_answers([placing.CommandAnswer(row.host_id, row.id, "failed", "no memory for them", {"left": "2"})])
    command_results.end_answered_commands()
    followed = get(ask, command["url"])
    assert (followed["state"], followed["text"], followed["detail"]) == ("failed", "no memory for them", {"left": "2"})
    assert followed["ended_at"] and get(ask, f"/api/devices/{device.uuid}/")["busy_with"] is None
    actions = Event.objects.filter(subject=command["uuid"]).order_by("id").values_list("action", "source")
    assert actions[0] == ("command.ordered", "api") and actions[1][0] == "command.failed"


def test_an_image_is_shown_before_it_is_here(ask: Ask, device: Device) -> None:
    command = ordered(ask, op="program", device=str(device.uuid), image=NOBODY)
    assert (command["state"], command["image"]) == ("preparing", NOBODY)


def test_hosts_are_asked_by_their_uuid(ask: Ask, device: Device) -> None:
    host = str(device.host.uuid)
    assert ordered(ask, op="rescan", host=host, driver="slow_driver")["driver"] == "slow_driver"
    logs = ordered(ask, op="logs", host=host)
    assert (logs["device"], logs["device_name"], logs["host"]["uuid"]) == (None, "", host)


def test_filters(ask: Ask, device: Device) -> None:
    first = ordered(ask, op="health", device=str(device.uuid))
    ordered(ask, op="logs", host=str(device.host.uuid))
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
        f"?request={NOBODY}": [],
    }.items():
        assert [row["op"] for row in results(ask(f"/api/commands/{query}"))] == ops, query


@pytest.mark.parametrize(
    ("said", "status", "says"),
    [
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
        ({"op": "reset", "device": "DEVICE", "image": NOBODY}, 400, "image: the command reset does not accept it."),
        ({"op": "health", "device": NOBODY}, 400, "device: Device not found"),
        ({"op": "logs", "host": NOBODY}, 400, "host: Host not found"),
        ({"op": "health", "device": 7}, 400, "device: Must be a valid UUID."),
        ({"op": "partition", "device": "DEVICE"}, 400, "takes a layout"),
        ({"op": "partition", "device": "DEVICE", "layout": {"vfs": 4}}, 400, "layout.vfs: Not a valid string."),
        ({"op": "program", "device": "DEVICE"}, 400, "takes an image"),
        ({"op": "health", "device": "DEVICE", "reason": "x" * 501}, 400, "no more than 500 characters"),
        ({"op": "health", "device": "DEVICE", "state": "ended"}, 400, "state: cannot be written"),
        ({"op": "reset", "device": "HELD"}, 409, "is held by request"),
    ],
)
def test_what_cannot_be_ordered(ask: Ask, device: Device, said: dict[str, Any], status: int, says: str) -> None:
    held = Device.objects.get(address="0000:00:00.0")
    names = {"DEVICE": str(device.uuid), "HOST": str(device.host.uuid), "HELD": str(held.uuid)}
    sent = {key: names.get(value, value) if isinstance(value, str) else value for key, value in said.items()}
    assert says in message(ask("/api/commands/", method="POST", data=sent), status)
    assert not Command.objects.exists()


def test_admins_order_managers_look_others_do_not(ask: Ask, device: Device) -> None:
    said = {"op": "health", "device": str(device.uuid)}
    for by, status in (("manager", 403), ("member", 403), ("", 401)):
        message(ask("/api/commands/", by, method="POST", data=said), status)
    command = ordered(ask, **said)
    there = command["url"].removeprefix("http://testserver")
    for path in ("/api/commands/", there):
        assert [ask(path, by).status_code for by in ("manager", "member", "")] == [200, 403, 401]
    message(ask(there, method="PATCH", data={}), 405)
    assert forms(page(ask, "/api/commands/")) == {("POST", "/api/commands/")}
    assert forms(page(ask, "/api/commands/", "manager")) == set()


def test_what_becomes_of_its_device_is_not_what_becomes_of_it(ask: Ask, device: Device) -> None:
    command = ordered(ask, op="health", device=str(device.uuid))
    with conductor.writing():
        Command.objects.update(device=None)
        Host.objects.update(node="x")
    shown = get(ask, command["url"])
    assert (shown["device"], shown["device_name"]) == (None, "1044 0000:07:00.0")


def test_the_end_can_be_waited_for(ask: Ask, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ordered(ask, op="health", device=str(device.uuid))
    row = Command.objects.get()

    class Agent:
        """Who waits for news lets the agent end it."""

        def wait(self, seconds: float) -> None:
            placing.store_answers([placing.CommandAnswer(row.host_id, row.id, "succeeded", "it is well")])
            command_results.end_answered_commands()

        clear = set = lambda self: None

    monkeypatch.setattr(programming, "threading", SimpleNamespace(Event=Agent))
    for _ in range(MAX_WAITERS):
        assert _waiter_slots.acquire(blocking=False)
    assert get(ask, f"{command['url']}?wait=30")["state"] == "queued"
    for _ in range(MAX_WAITERS):
        _waiter_slots.release()
    assert get(ask, f"{command['url']}?wait=30&fields=state") == {"state": "succeeded"}
    for text in ("-1", "31", "x", "1.5", "%C2%B2", "001"):
        assert "wait: say a number" in message(ask(f"/api/commands/{row.uuid}/?wait={text}"), 400)
    message(ask(f"/api/commands/{NOBODY}/?wait=30"), 404)
    assert "wait: unknown parameter" in message(ask(f"/api/devices/{device.uuid}/?wait=1"), 400)
