"""Units of devices over our own API: made, listed, divided otherwise, taken away; who changes what somebody changed."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from django.db import connection
from msgspec.structs import replace

from accelerators import conductor
from accelerators.commands import placing
from accelerators.commands.placing import CommandAnswer
from accelerators.devices import partitioning
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import AcceleratorRequest, AttachHandle, Command, Device, DeviceProfile, Event, Host
from accelerators.workflows import command_results
from drivers.inventory import Device as Card
from tests.own.conftest import INSTANCES, Ask, message, results
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db
NOBODY = "00000000-0000-4000-8000-000000000000"
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")


def divisible(n: int, number: int, backend: str = "a", **more: Any) -> Card:
    """A card that its driver divides into so many as `vfs` says; undivided it is its own only unit."""
    words = {"acts": "partition", "changeable": "bind vfs", "sized_by": "vfs", "backend": backend}
    (part,) = card(n, number + 1).deployables
    units_of_it = part.handles[1:] or part.handles
    part = replace(part, handles=units_of_it, num_accelerators=len(units_of_it))
    return card(n, deployables=(part,), **words | more)


def reported(*cards: Card, seq: int = 1) -> Host:
    host = a_host()
    apply(host, answer(*cards, driver="generic_driver"), seq=seq)
    return host


def device(n: int) -> Device:
    return Device.objects.get(address=f"0000:{n:02x}:00.0")


def post(ask: Ask, path: str = "", by: str = "admin", status: int = 202, **said: Any) -> Any:
    response = ask(f"/api/accelerators/{path}", by, method="POST", data=said)
    assert response.status_code == status, response.content
    return json.loads(response.content)["results"] if status == 202 else message(response, status)


def patch(ask: Ask, one: Device, status: int = 202, by: str = "admin", **said: Any) -> Any:
    response = ask(f"/api/devices/{one.uuid}/", by, method="PATCH", data=said)
    assert response.status_code == status, response.content
    return json.loads(response.content) if status == 202 else message(response, status)


def ended(command: Command, outcome: str = "succeeded", text: str = "") -> None:
    """Its agent answers, after a report that is applied."""
    placing.store_answers([CommandAnswer(command.host_id, command.id, outcome, text)])
    while command_results.end_answered_commands():
        pass


def hold(handle: AttachHandle, project: str = "p1", instance: str = INSTANCES[0]) -> AcceleratorRequest:
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


def layouts() -> list[dict[str, str]]:
    return [command.arguments["layout"] for command in Command.objects.order_by("id")]


def test_units_are_made_on_every_device_of_two_backends(ask: Ask) -> None:
    undivided = divisible(3, 0, "b")
    reported(divisible(1, 2), divisible(2, 4), undivided, divisible(4, 2, "b", sized_by=""), card(5))
    targets = [{"host": "cmp1", "backend": "a"}, {"host": "cmp1", "backend": "b"}]
    made = post(ask, targets=targets, count=2, layout={"bind": "vfio-pci"}, reason="more guests")
    assert [(row["target"], row["device"], row["refused"], row["kind"]) for row in made] == [
        (targets[0], str(device(1).uuid), "", ""),
        (targets[0], str(device(2).uuid), "", ""),
        (targets[1], str(device(3).uuid), "", ""),
    ]
    assert layouts() == [{"bind": "vfio-pci", "vfs": number} for number in ("4", "6", "2")]
    rows = results(ask("/api/commands/?ordering=created"))
    assert [row["uuid"] for row in rows] == [row["command"] for row in made]
    assert {(row["op"], row["reason"], row["by"]) for row in rows} == {("partition", "more guests", "admin-p1")}
    assert Event.objects.filter(action="command.ordered", source="api").count() == 3


def test_fewer_or_none_are_left_and_never_fewer_than_none(ask: Ask) -> None:
    reported(divisible(1, 3), divisible(2, 3))
    one, other = ({"device": str(device(n).uuid)} for n in (1, 2))
    post(ask, "delete/", targets=[one], count=1)
    post(ask, "delete/", targets=[other])
    assert [layout["vfs"] for layout in layouts()] == ["2", "0"]
    (refused,) = post(ask, "delete/", targets=[one], count=4)
    assert (refused["kind"], refused["command"]) == ("invalid", None)
    assert "is 3; it cannot be changed to" in refused["refused"]


def test_one_that_is_refused_stops_no_other(ask: Ask) -> None:
    reported(divisible(1, 3), divisible(2, 3), divisible(3, 3), divisible(4, 3, sized_by=""))
    held = hold(AttachHandle.objects.filter(deployable__device=device(1)).last())
    with conductor.writing():
        Device.objects.filter(pk=device(2).pk).update(state="retired")
    uuids = [str(device(n).uuid) for n in (1, 2, 3, 4)]
    targets = [{"device": uuid} for uuid in (*uuids, NOBODY)] + [{"host": "cmp1", "backend": "z"}]
    made = post(ask, "delete/", targets=targets, count=1)
    assert [row["kind"] for row in made] == ["held", "conflict", "", "invalid", "unknown", "unknown"]
    assert [row["device"] for row in made] == [*uuids, NOBODY, None]
    assert f"request {held.uuid} of instance {INSTANCES[0]}" in made[0]["refused"]
    assert "is retired" in made[1]["refused"] and "does not let the number" in made[3]["refused"]
    assert "backend z" in made[5]["refused"]
    assert Command.objects.get().device == device(3)
    (again,) = post(ask, targets=[{"device": uuids[2]}], count=1)
    assert again["kind"] == "conflict" and "is busy with partition" in again["refused"]


def test_a_device_that_is_named_twice_is_ordered_once(ask: Ask) -> None:
    reported(divisible(1, 2))
    uuid = str(device(1).uuid)
    twice = [{"device": uuid}, {"host": "cmp1", "backend": "a"}, {"device": uuid}]
    assert [row["kind"] for row in post(ask, targets=twice, count=1)] == [""]


BAD = [
    ({"count": 1}, "targets: This field is required"),
    ({"targets": [], "count": 1}, "targets"),
    ({"targets": [{}], "count": 1}, "Say a device, or a host and a backend."),
    ({"targets": [{"device": NOBODY, "host": "cmp1"}], "count": 1}, "Say a device, or a host and a backend."),
    ({"targets": [{"host": "cmp1"}], "count": 1}, "Say a device, or a host and a backend."),
    ({"targets": [{"device": "x"}], "count": 1}, "targets.0.device: Must be a valid UUID"),
    ({"targets": [{"rack": "7"}], "count": 1}, "rack: cannot be written"),
    ({"targets": [{"device": NOBODY}]}, "count: This field is required"),
    ({"targets": [{"device": NOBODY}], "count": 0}, "count"),
    ({"targets": [{"device": NOBODY}], "count": "2"}, "count"),
    ({"targets": [{"device": NOBODY}], "count": 1, "reason": "x" * 501}, "reason"),
    ({"targets": [{"device": NOBODY}] * 257, "count": 1}, "no more than 256"),
    ({"targets": [{"host": "cmp1", "backend": "a"}], "count": 1, "generation": 1}, "the targets are 2 devices"),
    ({"targets": [{"device": NOBODY}], "count": 1, "layout": {"vfs": 4}}, "layout.vfs"),
]


def test_what_makes_no_sense_orders_nothing(ask: Ask) -> None:
    reported(divisible(1, 2), divisible(2, 2))
    for said, says in BAD:
        assert says in post(ask, status=400, **said)
    assert not Command.objects.exists()


def test_only_the_words_that_a_driver_takes_are_passed_on(ask: Ask) -> None:
    reported(divisible(1, 2), divisible(2, 2, changeable="", sized_by=""))
    target = [{"device": str(device(1).uuid)}]
    for said, says in (({"speed": "9"}, "generic_driver takes bind, vfs"), ({"vfs": "9"}, "is computed from")):
        (refused,) = post(ask, targets=target, count=1, layout=said)
        assert refused["kind"] == "invalid" and says in refused["refused"]
    assert "has no word speed; " in patch(ask, device(1), 400, layout={"speed": "9"})
    assert "does not allow its layout to be changed" in patch(ask, device(2), 400, layout={"vfs": "1"})
    assert "layout: This" in patch(ask, device(1), 400, layout={})
    patch(ask, Device(uuid=NOBODY), 404, layout={"vfs": "1"})
    assert not Command.objects.exists()


def test_who_changes_what_somebody_has_changed_is_told_what_it_is_now(ask: Ask) -> None:
    reported(divisible(1, 2))
    one = device(1)
    shown = json.loads(ask(f"/api/devices/{one.uuid}/").content)
    assert (shown["generation"], shown["sized_by"], shown["changeable"], shown["backend"]) == (
        0,
        "vfs",
        ["bind", "vfs"],
        "a",
    )
    command = patch(ask, one, layout={"vfs": "4"}, generation=0, reason="four")
    assert (command["op"], command["layout"], command["reason"]) == ("partition", {"vfs": "4"}, "four")
    target = [{"device": str(one.uuid)}]
    for refused in (
        patch(ask, one, 409, layout={"vfs": "3"}, generation=0),
        post(ask, status=409, targets=target, count=1, generation=0),
        post(ask, "delete/", status=409, targets=target, generation=0),
    ):
        assert "is at generation 1 now, not 0" in refused and refused.endswith("then send generation 1.")
    assert "is busy with partition" in post(ask, status=409, targets=target, count=1, generation=1)
    reported(divisible(1, 4), seq=2)
    ended(Command.objects.get())
    assert device(1).generation == 2, "its handles changed"
    reported(divisible(1, 4, status="degraded"), seq=3)
    assert device(1).generation == 2, "they did not"
    post(ask, "delete/", targets=target, count=1, generation=2)
    assert layouts()[1] == {"vfs": "3"}


def test_a_unit_that_is_made_is_listed_when_its_command_is_done_and_not_later(ask: Ask) -> None:
    reported(divisible(1, 1, "a"), divisible(2, 1, "b"))
    targets = [{"host": "cmp1", "backend": name} for name in ("a", "b")]
    post(ask, targets=targets, count=2)
    first, second = Command.objects.order_by("id")
    reported(divisible(1, 3, "a"), divisible(2, 1, "b"), seq=2)
    ended(first)
    ended(second, "failed", "0000:02:00.0 can have at most 1 virtual functions, not 3: change vfs")
    rows = results(ask("/api/commands/?ordering=created"))
    assert [row["state"] for row in rows] == ["succeeded", "failed"] and "at most 1" in rows[1]["text"]
    listed = results(ask("/api/accelerators/?attached=false"))
    assert sorted((row["backend"], row["state"], row["driver"]) for row in listed) == [
        *[("a", "free", "generic_driver")] * 3,
        ("b", "free", "generic_driver"),
    ]


def test_free_and_held_units_are_listed_together_for_who_runs_them(ask: Ask) -> None:
    reported(divisible(1, 3, "a"), divisible(2, 2, "b"))
    first, second, *_ = AttachHandle.objects.order_by("attach_info")
    mine, theirs = hold(first), hold(second, "p2", INSTANCES[1])
    free = results(ask("/api/accelerators/?attached=false&backend=a&state=free", "manager"))
    assert [row["handle"]["info"]["function"] for row in free] == ["3"]
    row = free[0]
    assert [row[name] for name in ("uuid", "url", "request", "project", "profile", "since")] == [None] * 6
    assert (row["label"], row["instance"]) == ("", {"uuid": None, "state": "", "name": ""})
    assert row["device"]["uuid"] == str(device(1).uuid) and row["host"]["name"] == "cmp1"
    held = [str(mine.uuid), str(theirs.uuid)]
    everything = results(ask("/api/accelerators/?attached=false"))
    assert sorted(str(row["uuid"]) for row in everything) == sorted([*held, *["None"] * 3])
    for query in (
        "",
        "?attached=true",
        "?attached=false&state=Bound",
        "?attached=false&driver=generic_driver&state=Bound",
    ):
        assert {row["uuid"] for row in results(ask(f"/api/accelerators/{query}"))} == {*held}
    assert results(ask("/api/accelerators/?state=free")) == []
    for query in ("", "?attached=false", "?attached=false&state=free&state=Bound"):
        assert [row["uuid"] for row in results(ask(f"/api/accelerators/{query}", "member"))] == held[:1]
    reported(divisible(1, 3, "a"), divisible(2, 0, "b"), seq=2)
    assert len(results(ask("/api/accelerators/?attached=false&backend=b"))) == 1, "two are gone, the card is left"


def test_pages_of_free_units_follow_each_other_in_few_statements(ask: Ask, django_assert_max_num_queries: Any) -> None:
    reported(*(divisible(n, 4) for n in range(1, 6)))
    hold(AttachHandle.objects.order_by("attach_info")[7])
    seen: list[dict[str, Any]] = []
    address = "/api/accelerators/?attached=false&limit=6"
    while address:
        with django_assert_max_num_queries(5):
            response = ask(address)
        seen += results(response)
        address = (json.loads(response.content)["next"] or "").removeprefix("http://testserver")
    assert len({row["handle"]["uuid"] for row in seen}) == len(seen) == 20
    assert sum(row["state"] == "free" for row in seen) == 19


@pytest.mark.django_db(transaction=True)
def test_of_two_operators_at_once_exactly_one_wins(ask: Ask) -> None:
    reported(divisible(1, 2))
    target, start = partitioning.PartitionTarget(device(1).uuid), threading.Barrier(2)

    def more(_: int) -> partitioning.PartitionResult:
        start.wait(30)
        try:
            (result,) = partitioning.partition_devices([target], partitioning.PartitionChange(2, generation=0), OLGA)
            return result
        finally:
            connection.close()

    with ThreadPoolExecutor(2) as threads:
        won, lost = sorted(threads.map(more, range(2)), key=lambda result: result.command is None)
    assert won.command == Command.objects.get() and won.command.arguments["layout"] == {"vfs": "4"}
    assert lost.reason is RefusalReason.CONFLICT and "is at generation 1 now, not 0" in lost.refused
    with pytest.raises(RefusedError, match="generation 1 now, not 0"):
        partitioning.update_layout(device(1).uuid, {"vfs": "8"}, OLGA, generation=0)
