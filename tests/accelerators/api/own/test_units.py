"""Test creating, listing, deleting and resizing the units of devices over /api/, and concurrent changes of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection
from django.db.models import QuerySet
from django.test.utils import CaptureQueriesContext
from msgspec.structs import replace

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandAnswer
from accelerators.devices import partitioning
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import AcceleratorRequest, AttachHandle, Command, Device, DeviceProfile, Event, Host
from accelerators.workflows import bulk_actions, command_endings
from drivers.inventory import Device as Card
from tests.accelerators.api.own.conftest import INSTANCES, Ask, get_error_message, get_results
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("agents_need_not_be_up")]
UNKNOWN_UUID = "00000000-0000-4000-8000-000000000000"
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")


def build_divisible_card(n: int, number: int, backend: str = "a", **more: Any) -> Card:
    """Return a card whose driver divides it into `number` units, its value of `vfs`; undivided it is one unit."""
    words = {"acts": "partition", "changeable": "bind vfs", "sized_by": "vfs", "backend": backend}
    (part,) = make_card(n, number + 1).deployables
    units_of_it = part.handles[1:] or part.handles
    part = replace(part, handles=units_of_it, num_accelerators=len(units_of_it))
    return make_card(n, deployables=(part,), **words | more)


def report_cards(*cards: Card, seq: int = 1) -> Host:
    host = get_or_create_host()
    apply_report(host, make_driver_report(*cards, driver="generic_driver"), seq=seq)
    return host


def get_device(n: int) -> Device:
    return Device.objects.get(address=f"0000:{n:02x}:00.0")


def post_units(ask: Ask, path: str = "", by: str = "admin", status: int = 202, **data: Any) -> Any:
    response = ask(f"/api/accelerators/{path}", by, method="POST", data=data)
    assert response.status_code == status, response.content
    return json.loads(response.content)["results"] if status == 202 else get_error_message(response, status)


def patch_layout(ask: Ask, row: Device, status: int = 202, by: str = "admin", **data: Any) -> Any:
    present = {"generation": Device.objects.values_list("generation", flat=True).filter(pk=row.pk).first() or 0}
    response = ask(f"/api/devices/{row.uuid}/", by, method="PATCH", data=present | data)
    assert response.status_code == status, response.content
    return json.loads(response.content) if status == 202 else get_error_message(response, status)


def answer_and_settle(command: Command, outcome: str = "succeeded", text: str = "") -> None:
    """Store the agent's answer and end every command that can end."""
    command_queue.store_answers([CommandAnswer(command.host_id, command.id, outcome, text)])
    while command_endings.end_answered_commands():
        pass


def create_bound_request(handle: AttachHandle, project: str = "p1", instance: str = INSTANCES[0]) -> AcceleratorRequest:
    with conductor.writing():
        profile, _ = DeviceProfile.objects.get_or_create(name="small", defaults={"groups": [{"resources:FPGA": "1"}]})
        return AcceleratorRequest.objects.create(
            project_id=project,
            state="Bound",
            profile=profile,
            group={},
            hostname="cmp1",
            instance_uuid=instance,
            deployable_id=handle.deployable_id,
            attach_handle=handle,
        )


def list_ordered_layouts() -> list[dict[str, str]]:
    return [command.arguments["layout"] for command in Command.objects.order_by("id")]


def test_creating_units_orders_a_partition_of_every_device_of_two_backends(ask: Ask) -> None:
    undivided = build_divisible_card(3, 0, "b")
    report_cards(
        build_divisible_card(1, 2),
        build_divisible_card(2, 4),
        undivided,
        build_divisible_card(4, 2, "b", sized_by=""),
        make_card(5),
    )
    targets = [{"host": "cmp1", "backend": "a"}, {"host": "cmp1", "backend": "b"}]
    made = post_units(ask, targets=targets, count=2, layout={"bind": "vfio-pci"}, reason="more guests")
    assert [(row["target"], row["device"], row["refused"], row["reason"]) for row in made] == [
        (targets[0], str(get_device(1).uuid), "", ""),
        (targets[0], str(get_device(2).uuid), "", ""),
        (targets[1], str(get_device(3).uuid), "", ""),
    ]
    assert list_ordered_layouts() == [{"bind": "vfio-pci", "vfs": number} for number in ("4", "6", "2")]
    rows = get_results(ask("/api/commands/?ordering=created"))
    assert [row["uuid"] for row in rows] == [row["command"] for row in made]
    assert {(row["op"], row["reason"], row["by"]) for row in rows} == {("partition", "more guests", "admin-p1")}
    assert Event.objects.filter(action="command.ordered", source="api").count() == 3


def test_deleting_units_reduces_their_number_and_never_below_zero(ask: Ask) -> None:
    report_cards(build_divisible_card(1, 3), build_divisible_card(2, 3))
    one, other = ({"device": str(get_device(n).uuid)} for n in (1, 2))
    post_units(ask, "delete/", targets=[one], count=1)
    post_units(ask, "delete/", targets=[other])
    assert [layout["vfs"] for layout in list_ordered_layouts()] == ["2", "0"]
    (refused,) = post_units(ask, "delete/", targets=[one], count=4)
    assert (refused["reason"], refused["command"]) == ("invalid", None)
    assert "is 3; it cannot be changed to" in refused["refused"]


def test_a_refused_target_does_not_stop_the_others(ask: Ask) -> None:
    report_cards(
        build_divisible_card(1, 3),
        build_divisible_card(2, 3),
        build_divisible_card(3, 3),
        build_divisible_card(4, 3, sized_by=""),
    )
    held = create_bound_request(AttachHandle.objects.filter(deployable__device=get_device(1)).last())
    with conductor.writing():
        Device.objects.filter(pk=get_device(2).pk).update(state="retired")
    uuids = [str(get_device(n).uuid) for n in (1, 2, 3, 4)]
    targets = [{"device": uuid} for uuid in (*uuids, UNKNOWN_UUID)] + [{"host": "cmp1", "backend": "z"}]
    made = post_units(ask, "delete/", targets=targets, count=1)
    assert "kind" not in made[0]
    assert [row["reason"] for row in made] == ["in_use", "conflict", "", "invalid", "not_found", "not_found"]
    assert [row["device"] for row in made] == [*uuids, UNKNOWN_UUID, None]
    assert f"request {held.uuid} of instance {INSTANCES[0]}" in made[0]["refused"]
    assert "is retired" in made[1]["refused"] and "does not let the number" in made[3]["refused"]
    assert "backend z" in made[5]["refused"]
    assert Command.objects.get().device == get_device(3)
    (again,) = post_units(ask, targets=[{"device": uuids[2]}], count=1)
    assert again["reason"] == "conflict" and "is busy with partition" in again["refused"]


def report_two_hosts() -> list[dict[str, str]]:
    """Create a divisible card on each of two hosts, and return the targets of a request for both."""
    report_cards(build_divisible_card(1, 2))
    apply_report(get_or_create_host("cmp2"), make_driver_report(build_divisible_card(2, 4), driver="generic_driver"))
    return [{"host": f"cmp{n}", "backend": "a"} for n in (1, 2)]


def test_units_on_several_hosts_are_changed_only_with_the_token_of_the_preview(ask: Ask) -> None:
    order = {"targets": report_two_hosts(), "count": 2, "layout": {"bind": "x"}}
    answer = ask("/api/accelerators/", method="POST", data=order)
    assert "2 hosts" in get_error_message(answer, 409, "not_confirmed")
    preview = json.loads(answer.content)["preview"]
    assert (preview["action"], preview["total"], preview["hosts"], preview["confirm"]) == ("partition", 2, 2, True)
    assert sorted(one["text"] for one in preview["forecast"]) == [
        "is divided again with bind=x, vfs=4; it has 2 units now",
        "is divided again with bind=x, vfs=6; it has 4 units now",
    ]
    assert [one["state"] for one in preview["devices"]] == ["inactive, 2 units", "inactive, 4 units"]
    token = {"token": preview["token"]}
    for other in ({"count": 3}, {"layout": {}}, {"targets": order["targets"][:1]}):
        get_error_message(ask("/api/accelerators/", method="POST", data=order | token | other), 409, "stale_preview")
    get_error_message(ask("/api/accelerators/delete/", method="POST", data=order | token), 409, "stale_preview")
    assert not Command.objects.exists()
    answer = json.loads(ask("/api/accelerators/", method="POST", data=order | token | {"reason": "r"}).content)
    assert [row["command"] for row in answer["results"]] == [
        str(uuid) for uuid in Command.objects.order_by("id").values_list("uuid", flat=True)
    ]
    assert {command.reason for command in Command.objects.all()} == {"r"}
    assert list_ordered_layouts() == [{"bind": "x", "vfs": "4"}, {"bind": "x", "vfs": "6"}]
    stored = json.loads(ask(f"/api/bulk_actions/{answer['bulk_action']}/").content)
    assert (stored["action"], stored["state"], stored["arguments"]["units"]) == ("partition", "done", 2)
    assert stored["counts"] == {"moved": 2, "unchanged": 0, "refused": 0, "waiting": 0}


def test_a_device_whose_units_have_changed_since_the_preview_is_refused(ask: Ask) -> None:
    order = {"targets": report_two_hosts()}
    shown = json.loads(ask("/api/accelerators/delete/", method="POST", data=order | {"dry_run": True}).content)
    report_cards(build_divisible_card(1, 3), seq=2)
    answer = ask("/api/accelerators/delete/", method="POST", data=order | {"token": shown["token"]})
    first, second = json.loads(answer.content)["results"]
    assert first["reason"] == "conflict" and "was inactive, 2 units when it was chosen" in first["refused"]
    assert second["command"] and list_ordered_layouts() == [{"vfs": "0"}]


def test_the_preview_of_units_names_what_is_refused_and_changes_nothing(ask: Ask) -> None:
    report_cards(build_divisible_card(1, 3), build_divisible_card(2, 1))
    create_bound_request(AttachHandle.objects.filter(deployable__device=get_device(1)).last())
    order = {"targets": [{"host": "cmp1", "backend": "a"}], "count": 2, "dry_run": True}
    preview = json.loads(ask("/api/accelerators/delete/", method="POST", data=order).content)
    assert sorted((one["outcome"], one["held"], one["text"]) for one in preview["forecast"]) == [
        ("refused", False, "The number of its units is 1; it cannot be changed to -1."),
        ("refused", True, "is held: it cannot be partitioned"),
    ]
    assert not preview["confirm"] and not Command.objects.exists()


def test_a_change_of_one_layout_has_a_preview_whose_token_is_stale_after_a_change(ask: Ask) -> None:
    report_cards(build_divisible_card(1, 2), build_divisible_card(2, 2, changeable="", sized_by=""))
    path, order = f"/api/devices/{get_device(1).uuid}/", {"layout": {"vfs": "8"}}

    def patch(path: str, **order: object) -> Any:
        generation = Device.objects.get(uuid=path.split("/")[-2]).generation
        return ask(path, method="PATCH", data=order | {"generation": generation})

    answer = patch(path, **order, dry_run=True)
    assert answer.status_code == 200, answer.content
    shown = json.loads(answer.content)
    assert [(one["outcome"], one["text"]) for one in shown["forecast"]] == [
        ("moved", "is divided again with vfs=8; it has 2 units now")
    ]
    assert (shown["total"], shown["confirm"], shown["state"]) == (1, False, "inactive, 2 units")
    assert not Command.objects.exists()
    token = {"token": shown["token"]}
    other = f"/api/devices/{get_device(2).uuid}/"
    for refused in (
        patch(path, **token, layout={"vfs": "9"}),
        patch(other, **token, **order),
    ):
        get_error_message(refused, 409, "stale_preview")
    report_cards(build_divisible_card(1, 3), build_divisible_card(2, 2, changeable="", sized_by=""), seq=2)
    get_error_message(patch(path, **order, **token), 409, "stale_preview")
    token = {"token": json.loads(patch(path, **order, dry_run=True).content)["token"]}
    assert patch(path, **order, **token).status_code == 202
    assert list_ordered_layouts() == [{"vfs": "8"}]
    answer_and_settle(Command.objects.get(), "failed")
    for of, layout, text in ((path, {"speed": "9"}, "no setting speed"), (other, {"vfs": "9"}, "does not allow")):
        shown = json.loads(patch(of, layout=layout, dry_run=True).content)
        assert shown["forecast"][0]["outcome"] == "refused" and text in shown["forecast"][0]["text"]


def test_a_held_device_is_refused_in_the_preview_of_its_layout(ask: Ask) -> None:
    report_cards(build_divisible_card(1, 2))
    create_bound_request(AttachHandle.objects.last())
    device = get_device(1)
    path, order = f"/api/devices/{device.uuid}/", {"layout": {"vfs": "8"}, "generation": device.generation}
    shown = json.loads(ask(path, method="PATCH", data=order | {"dry_run": True}).content)
    assert [(one["outcome"], one["held"]) for one in shown["forecast"]] == [("refused", True)]
    get_error_message(ask(path, method="PATCH", data=order | {"token": shown["token"]}), 409, "in_use")
    assert not Command.objects.exists()


def report_many_cards(number: int, host: str = "cmp1") -> None:
    cards = [build_divisible_card(n, 2) for n in range(number)]
    apply_report(get_or_create_host(host), make_driver_report(*cards, driver="generic_driver"))


@pytest.mark.slow
def test_the_preview_of_a_change_of_units_costs_as_many_statements_for_many_devices(ask: Ask) -> None:
    report_many_cards(20)
    report_many_cards(255, "cmp2")
    numbers = []
    for hosts in (["cmp1"], ["cmp2"], ["cmp1", "cmp2"]):
        order = {"targets": [{"host": host, "backend": "a"} for host in hosts], "count": 1, "dry_run": True}
        with CaptureQueriesContext(connection) as run:
            shown = json.loads(ask("/api/accelerators/", method="POST", data=order).content)
        numbers.append(len(run))
    assert shown["total"] == 275 and shown["counts"]["moved"] == 275
    assert len(set(numbers[1:])) == 1 and abs(numbers[0] - numbers[1]) <= 1 and numbers[1] <= 30, numbers


@pytest.mark.slow
def test_a_change_of_many_units_works_in_slices_of_bounded_cost_and_answers_with_its_bulk_action(ask: Ask) -> None:
    report_many_cards(45)
    report_many_cards(255, "cmp2")
    order: dict[str, Any] = {"selector": {"all": True}, "count": 1}
    order["token"] = json.loads(ask("/api/accelerators/", method="POST", data=order).content)["preview"]["token"]
    answer = ask("/api/accelerators/", method="POST", data=order)
    assert answer.status_code == 202, answer.content
    started = json.loads(answer.content)
    assert started["results"] == []
    statements, placed = [], []
    while True:
        with CaptureQueriesContext(connection) as run:
            went_on = bulk_actions.process_next_slice()
        if not went_on:
            break
        statements.append(len(run))
        placed.append(Command.objects.count())
    assert placed == [100, 200, 300]
    assert max(statements) <= 35 and max(statements) - min(statements) <= 5, statements
    stored = json.loads(ask(f"/api/bulk_actions/{started['bulk_action']}/").content)
    assert (stored["state"], stored["counts"]["moved"]) == ("done", 300)


def test_a_selector_of_units_leaves_out_devices_that_cannot_be_divided(ask: Ask) -> None:
    report_cards(build_divisible_card(1, 2), build_divisible_card(2, 2, sized_by=""))
    order = {"selector": {"all": True}, "count": 1}
    shown = json.loads(ask("/api/accelerators/", method="POST", data=order | {"dry_run": True}).content)
    assert [one["device"] for one in shown["devices"]] == [str(get_device(1).uuid)]
    order["selector"] = {"host": "cmp9"}
    get_error_message(ask("/api/accelerators/", method="POST", data=order), 404, "not_found")


def test_the_layout_of_several_devices_is_changed_by_a_bulk_action_that_leaves_out_those_without_settings(
    ask: Ask,
) -> None:
    report_two_hosts()
    fixed = build_divisible_card(3, 2, changeable="", sized_by="")
    apply_report(get_or_create_host("cmp3"), make_driver_report(fixed, driver="generic_driver"))
    path, order = "/api/bulk_actions/", {"action": "partition", "layout": {"vfs": "8"}, "selector": {"all": True}}
    assert "cyborg:device:update" in get_error_message(ask(path, "manager", method="POST", data=order), 403)
    answer = ask(path, method="POST", data=order)
    get_error_message(answer, 409, "not_confirmed")
    preview = json.loads(answer.content)["preview"]
    assert (preview["total"], preview["hosts"]) == (2, 2)
    assert sorted(one["text"] for one in preview["forecast"]) == [
        "is divided again with vfs=8; it has 2 units now",
        "is divided again with vfs=8; it has 4 units now",
    ]
    token = {"token": preview["token"]}
    other = order | token | {"layout": {"vfs": "9"}}
    get_error_message(ask(path, method="POST", data=other), 409, "stale_preview")
    report_cards(build_divisible_card(1, 3), seq=2)
    started = json.loads(ask(path, method="POST", data=order | token).content)
    assert started["arguments"] == {"units": 0, "layout": {"vfs": "8"}, "generation": None}
    results = get_results(ask(f"/api/bulk_results/?bulk_action={started['uuid']}"))
    assert [(row["outcome"], row["reason"]) for row in results] == [("refused", "conflict"), ("moved", "")]
    assert list_ordered_layouts() == [{"vfs": "8"}]
    retry = f"{path}{started['uuid']}/retry/"
    assert "cyborg:device:update" in get_error_message(ask(retry, "manager", method="POST", data={}), 403)
    assert ask(retry, method="POST", data={}).status_code == 202
    assert list_ordered_layouts() == [{"vfs": "8"}] * 2
    order["selector"] = {"host": "cmp3"}
    assert "layout can be changed" in get_error_message(ask(path, method="POST", data=order), 404, "not_found")


def test_the_devices_of_backends_are_read_only_as_far_as_a_change_may_reach(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    report_cards(*(build_divisible_card(n, 2) for n in range(1, 6)))
    read_rows: list[Any] = []
    iterator = QuerySet.iterator

    def iterate(rows: QuerySet[Any], *args: Any, **options: Any) -> Iterator[Any]:
        for row in iterator(rows, *args, **options):
            read_rows.append(row)
            yield row

    monkeypatch.setattr(QuerySet, "iterator", iterate)
    monkeypatch.setattr(partitioning, "MAX_DEVICES", 2)
    refused = post_units(ask, targets=[{"host": "cmp1", "backend": "a"}], count=1, status=400)
    assert "Name 1 to 2 devices" in refused and len(read_rows) == 3


@pytest.mark.slow
def test_a_change_of_units_that_failed_is_retried_for_the_failed_devices(ask: Ask) -> None:
    report_cards(build_divisible_card(1, 1), build_divisible_card(2, 1))
    order = {"targets": [{"host": "cmp1", "backend": "a"}], "count": 2}
    bulk = json.loads(ask("/api/accelerators/", method="POST", data=order).content)["bulk_action"]
    first, second = Command.objects.order_by("id")
    answer_and_settle(second, "failed", "no room")
    answer = ask(f"/api/bulk_actions/{bulk}/retry/", "manager", method="POST", data={})
    get_error_message(answer, 403)
    answer = ask(f"/api/bulk_actions/{bulk}/retry/", method="POST", data={})
    assert (answer.status_code, json.loads(answer.content)["total"]) == (202, 1), answer.content
    assert Command.objects.order_by("id")[2].arguments["layout"] == {"vfs": "3"}
    assert Command.objects.filter(device=first.device).count() == 1


def test_a_change_of_many_units_shows_the_result_of_each_command_and_their_numbers(ask: Ask) -> None:
    report_cards(*(build_divisible_card(n, 1) for n in range(1, 6)))
    held = create_bound_request(get_device(5).deployables.get().attach_handles.first())
    order = {"targets": [{"host": "cmp1", "backend": "a"}], "count": 2}
    answer = ask("/api/accelerators/", method="POST", data=order)
    path = f"/api/bulk_actions/{json.loads(answer.content)['bulk_action']}/"
    first, second, third, _ = Command.objects.order_by("id")
    none_ended = {"open": 4, "succeeded": 0, "failed": 0, "refused": 0, "expired": 0, "unknown": 0}
    assert json.loads(ask(path).content)["commands"] == none_ended
    answer_and_settle(first)
    answer_and_settle(second, "failed", "no room")
    answer_and_settle(third, "refused", "in use by a guest")
    assert json.loads(ask(path).content)["commands"] == none_ended | {
        **{"open": 1, "succeeded": 1, "failed": 1, "refused": 1}
    }
    assert get_results(ask("/api/bulk_actions/"))[0]["commands"] is None
    rows = get_results(ask(f"/api/bulk_results/?bulk_action={path.split('/')[-2]}"))
    assert [(row["outcome"], row["command_state"], row["command_text"]) for row in rows] == [
        ("moved", "succeeded", "succeeded"),
        ("moved", "failed", "no room"),
        ("moved", "refused", "in use by a guest"),
        ("moved", "queued", ""),
        ("refused", None, None),
    ]
    assert str(held.uuid) in rows[4]["text"] and rows[4]["command"] is None
    retried = json.loads(ask(f"{path}retry/", method="POST", data={}).content)
    assert retried["total"] == 3, "those whose command was not successful, and the one that was refused"


def test_a_device_that_is_named_twice_is_ordered_once(ask: Ask) -> None:
    report_cards(build_divisible_card(1, 2))
    uuid = str(get_device(1).uuid)
    twice = [{"device": uuid}, {"host": "cmp1", "backend": "a"}, {"device": uuid}]
    assert [row["reason"] for row in post_units(ask, targets=twice, count=1)] == [""]


INVALID_REQUESTS = [
    ({"count": 1}, "Say either targets, at least one, or a selector."),
    ({"targets": [], "count": 1}, "Say either targets, at least one, or a selector."),
    ({"targets": [{"device": UNKNOWN_UUID}], "selector": {"all": True}, "count": 1}, "Say either targets"),
    ({"selector": {"rack": "7"}, "count": 1}, "rack: unknown filter"),
    ({"targets": [{}], "count": 1}, "Say a device, or a host and a backend."),
    ({"targets": [{"device": UNKNOWN_UUID, "host": "cmp1"}], "count": 1}, "Say a device, or a host and a backend."),
    ({"targets": [{"host": "cmp1"}], "count": 1}, "Say a device, or a host and a backend."),
    ({"targets": [{"device": "x"}], "count": 1}, "targets.0.device: Must be a valid UUID"),
    ({"targets": [{"rack": "7"}], "count": 1}, "rack: cannot be written"),
    ({"targets": [{"device": UNKNOWN_UUID}]}, "count: This field is required"),
    ({"targets": [{"device": UNKNOWN_UUID}], "count": 0}, "count"),
    ({"targets": [{"device": UNKNOWN_UUID}], "count": "2"}, "count"),
    ({"targets": [{"device": UNKNOWN_UUID}], "count": 1, "reason": "x" * 501}, "reason"),
    ({"targets": [{"device": UNKNOWN_UUID}] * 20_001, "count": 1}, "no more than 20000"),
    ({"targets": [{"host": "cmp1", "backend": "a"}], "count": 1, "generation": 1}, "the targets are 2 devices"),
    ({"targets": [{"device": UNKNOWN_UUID}], "count": 1, "layout": {"vfs": 4}}, "layout.vfs"),
]


def test_invalid_unit_requests_are_refused_and_order_nothing(ask: Ask) -> None:
    report_cards(build_divisible_card(1, 2), build_divisible_card(2, 2))
    for said, says in INVALID_REQUESTS:
        assert says in post_units(ask, status=400, **said)
    assert not Command.objects.exists()


def test_layout_keys_that_the_driver_does_not_accept_are_refused(ask: Ask) -> None:
    report_cards(build_divisible_card(1, 2), build_divisible_card(2, 2, changeable="", sized_by=""))
    target = [{"device": str(get_device(1).uuid)}]
    for said, says in (({"speed": "9"}, "generic_driver takes bind, vfs"), ({"vfs": "9"}, "is computed from")):
        (refused,) = post_units(ask, targets=target, count=1, layout=said)
        assert refused["reason"] == "invalid" and says in refused["refused"]
    assert "has no setting speed; " in patch_layout(ask, get_device(1), 400, layout={"speed": "9"})
    assert "does not allow the layout of its devices to be changed" in patch_layout(
        ask, get_device(2), 400, layout={"vfs": "1"}
    )
    assert "layout: This" in patch_layout(ask, get_device(1), 400, layout={})
    patch_layout(ask, Device(uuid=UNKNOWN_UUID), 404, layout={"vfs": "1"})
    assert not Command.objects.exists()


def test_a_change_with_an_outdated_generation_is_refused_naming_the_current_one(ask: Ask) -> None:
    report_cards(build_divisible_card(1, 2))
    one = get_device(1)
    shown = json.loads(ask(f"/api/devices/{one.uuid}/").content)
    assert (shown["generation"], shown["sized_by"], shown["changeable"], shown["backend"]) == (
        0,
        "vfs",
        ["bind", "vfs"],
        "a",
    )
    command = patch_layout(ask, one, layout={"vfs": "4"}, generation=0, reason="four")
    assert (command["op"], command["layout"], command["reason"]) == ("partition", {"vfs": "4"}, "four")
    target = [{"device": str(one.uuid)}]
    for refused in (
        patch_layout(ask, one, 409, layout={"vfs": "3"}, generation=0),
        post_units(ask, status=409, targets=target, count=1, generation=0),
        post_units(ask, "delete/", status=409, targets=target, generation=0),
    ):
        assert "is at generation 1 now, not 0" in refused and refused.endswith("then send generation 1.")
    assert "is busy with partition" in post_units(ask, status=409, targets=target, count=1, generation=1)
    report_cards(build_divisible_card(1, 4), seq=2)
    answer_and_settle(Command.objects.get())
    assert get_device(1).generation == 2, "its handles changed"
    report_cards(build_divisible_card(1, 4, status="degraded"), seq=3)
    assert get_device(1).generation == 2, "they did not"
    post_units(ask, "delete/", targets=target, count=1, generation=2)
    assert list_ordered_layouts()[1] == {"vfs": "3"}


def test_new_units_are_listed_as_soon_as_their_command_has_succeeded(ask: Ask) -> None:
    report_cards(build_divisible_card(1, 1, "a"), build_divisible_card(2, 1, "b"))
    targets = [{"host": "cmp1", "backend": name} for name in ("a", "b")]
    post_units(ask, targets=targets, count=2)
    first, second = Command.objects.order_by("id")
    report_cards(build_divisible_card(1, 3, "a"), build_divisible_card(2, 1, "b"), seq=2)
    answer_and_settle(first)
    answer_and_settle(second, "failed", "0000:02:00.0 can have at most 1 virtual functions, not 3: change vfs")
    rows = get_results(ask("/api/commands/?ordering=created"))
    assert [row["state"] for row in rows] == ["succeeded", "failed"] and "at most 1" in rows[1]["text"]
    listed = get_results(ask("/api/accelerators/?attached=false"))
    assert sorted((row["backend"], row["state"], row["driver"]) for row in listed) == [
        *[("a", "free", "generic_driver")] * 3,
        ("b", "free", "generic_driver"),
    ]


def test_free_units_are_listed_to_operators_only_and_held_ones_to_their_project(ask: Ask) -> None:
    report_cards(build_divisible_card(1, 3, "a"), build_divisible_card(2, 2, "b"))
    first, second, *_ = AttachHandle.objects.order_by("attach_info")
    mine, theirs = create_bound_request(first), create_bound_request(second, "p2", INSTANCES[1])
    free = get_results(ask("/api/accelerators/?attached=false&backend=a&state=free", "manager"))
    assert [row["handle"]["info"]["function"] for row in free] == ["3"]
    row = free[0]
    assert [row[name] for name in ("uuid", "url", "request", "project", "profile", "since")] == [None] * 6
    assert (row["label"], row["instance"]) == ("", {"uuid": None, "state": "", "name": ""})
    assert row["device"]["uuid"] == str(get_device(1).uuid) and row["host"]["name"] == "cmp1"
    held = [str(mine.uuid), str(theirs.uuid)]
    everything = get_results(ask("/api/accelerators/?attached=false"))
    assert sorted(str(row["uuid"]) for row in everything) == sorted([*held, *["None"] * 3])
    for query in (
        "",
        "?attached=true",
        "?attached=false&state=Bound",
        "?attached=false&driver=generic_driver&state=Bound",
    ):
        assert {row["uuid"] for row in get_results(ask(f"/api/accelerators/{query}"))} == {*held}
    assert get_results(ask("/api/accelerators/?state=free")) == []
    for query in ("", "?attached=false", "?attached=false&state=free&state=Bound"):
        assert [row["uuid"] for row in get_results(ask(f"/api/accelerators/{query}", "member"))] == held[:1]
    report_cards(build_divisible_card(1, 3, "a"), build_divisible_card(2, 0, "b"), seq=2)
    assert len(get_results(ask("/api/accelerators/?attached=false&backend=b"))) == 1, "two are gone, the card is left"


def test_pages_of_free_units_cover_all_units_in_at_most_five_statements_each(
    ask: Ask, django_assert_max_num_queries: Any
) -> None:
    report_cards(*(build_divisible_card(n, 4) for n in range(1, 6)))
    create_bound_request(AttachHandle.objects.order_by("attach_info")[7])
    seen: list[dict[str, Any]] = []
    address = "/api/accelerators/?attached=false&limit=6"
    while address:
        with django_assert_max_num_queries(5):
            response = ask(address)
        seen += get_results(response)
        address = (json.loads(response.content)["next"] or "").removeprefix("http://testserver")
    assert len({row["handle"]["uuid"] for row in seen}) == len(seen) == 20
    assert sum(row["state"] == "free" for row in seen) == 19


@pytest.mark.django_db(transaction=True)
def test_of_two_concurrent_changes_of_units_exactly_one_succeeds(ask: Ask) -> None:
    report_cards(build_divisible_card(1, 2))
    uuid, start = get_device(1).uuid, threading.Barrier(2)

    def more(_: int) -> Command | RefusedError:
        start.wait(30)
        try:
            return partitioning.partition_device(uuid, partitioning.PartitionChange(2, generation=0), OLGA)
        except RefusedError as refused:
            return refused
        finally:
            connection.close()

    with ThreadPoolExecutor(2) as threads:
        won, lost = sorted(threads.map(more, range(2)), key=lambda result: isinstance(result, RefusedError))
    assert isinstance(won, Command) and won == Command.objects.get() and won.arguments["layout"] == {"vfs": "4"}
    assert isinstance(lost, RefusedError) and lost.reason is RefusalReason.CONFLICT
    assert "is at generation 1 now, not 0" in lost.text
    with pytest.raises(RefusedError, match="generation 1 now, not 0"):
        partitioning.partition_device(
            get_device(1).uuid, partitioning.PartitionChange(0, {"vfs": "8"}, generation=0), OLGA
        )
