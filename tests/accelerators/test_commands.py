"""Commands: ordered with what wants them, answered once, settled when the report that shows them is applied."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from accelerators import conductor, safety
from accelerators.commands import placing
from accelerators.commands.placing import Answer, Progress
from accelerators.devices import lifecycle
from accelerators.domain.actions import Action
from accelerators.domain.caller import Caller
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import CommandState, Source
from accelerators.models import Command, Deployable, Device, Event, Host
from accelerators.runtime import pubsub
from accelerators.workflows import command_results, sweep
from tests.accelerators.test_admission import rule
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")
ACTS = "attach detach health install partition program reset uninstall"
STEPS = "four functions are made\nthey are bound to vfio-pci"


def said(command: Command, outcome: str = "succeeded", text: str = "", **values: object) -> bool:
    """The agent of its host answers, and what can be settled is."""
    settled = placing.answer([Answer(command.host_id, command.id, outcome, text, **values)])  # type: ignore[arg-type]
    while command_results.settle():
        pass
    command.refresh_from_db()
    return bool(settled)


def late(**changes: object) -> None:
    """The time of what is open is over."""
    past = datetime.now(UTC) - timedelta(seconds=1)
    with conductor.writing():
        Command.objects.filter(ended_at=None).update(**{"start_by": past, "end_by": past} | changes)
    command_results.expire()


@pytest.fixture
def device(db: None) -> Device:
    """A card that has to be installed, in maintenance."""
    apply(a_host(), answer(card(1, handles=2, to_install=STEPS, acts=ACTS)))
    with conductor.writing():
        Device.objects.update(state="maintenance")
    return Device.objects.get()


def state(device: Device) -> tuple[str, str, str]:
    device.refresh_from_db()
    return device.state, device.state_reason, device.state_by


def test_what_has_to_be_installed_is_ready_when_its_agent_has_done_it(device: Device) -> None:
    assert lifecycle.ask(Action.ENABLE, device.uuid, OLGA, "burnt in").state == "installing"
    command = Command.objects.get()
    assert (command.op, command.state, command.exclusive, command.actor) == ("install", "queued", True, "olga")
    assert command.arguments == {"driver": "test_driver", "key": "pci:0000:01:00.0"}
    device.refresh_from_db()
    assert device.busy_with == command.uuid
    assert lifecycle.ask(Action.ENABLE, device.uuid, OLGA).outcome == "unchanged"
    placing.taken([(command.host_id, command.id)])
    placing.progressed([Progress(command.host_id, command.id, 50, "they are bound")])
    command.refresh_from_db()
    assert (command.state, command.percent, command.progress) == ("started", 50, "they are bound")
    assert command.taken_at and command.started_at
    said(command)
    assert (command.state, command.percent, command.ended_at is None) == ("succeeded", 100, False)
    assert state(device) == ("ready", "burnt in", "olga")
    assert device.busy_with is None
    assert Deployable.objects.get().rp_uuid
    ordered, ended = Event.objects.filter(subject=command.uuid).order_by("id")
    assert (ordered.action, ordered.actor, ordered.reason) == ("command.ordered", "olga", "burnt in")
    assert (ended.action, ended.actor, ended.source) == ("command.succeeded", "olga", "agent")
    assert ended.changes["state"] == ["started", "succeeded"]
    assert ended.changes["seconds"][1] >= 0
    moved = Event.objects.filter(subject=device.uuid).order_by("id").values_list("action", flat=True)
    assert list(moved) == ["device.found", "device.installing", "device.ready"]


@pytest.mark.parametrize("outcome", ["failed", "refused", "unknown"])
def test_a_device_that_could_not_be_installed_says_why_in_its_drivers_words(device: Device, outcome: str) -> None:
    lifecycle.enable(device.uuid, OLGA)
    said(Command.objects.get(), outcome, "pci_driver: asked for 4, got 2")
    assert state(device) == ("failed", "pci_driver: asked for 4, got 2", "cmp1")
    lifecycle.enable(device.uuid, OLGA)
    assert state(device)[0] == "installing"


def test_what_a_person_decides_while_it_installs_stays(device: Device) -> None:
    lifecycle.enable(device.uuid, OLGA)
    lifecycle.disable(device.uuid, OLGA, "not yet")
    with pytest.raises(RefusedError, match="is busy with install") as refused:
        lifecycle.enable(device.uuid, OLGA)
    assert refused.value.reason == Reason.CONFLICT
    said(Command.objects.get())
    assert state(device) == ("maintenance", "not yet", "olga")


def test_an_installation_of_a_device_that_went_missing_counts_when_it_is_back(device: Device) -> None:
    lifecycle.enable(device.uuid, OLGA)
    apply(device.host, answer(), seq=2)
    said(Command.objects.get(), "failed", "it is gone")
    device.refresh_from_db()
    assert (device.state, device.returns_to, device.busy_with) == ("missing", "failed", None)


def test_installed_is_what_a_rule_admits(monkeypatch: pytest.MonkeyPatch) -> None:
    rule("all")
    for n in range(2):
        apply(a_host(f"cmp{n}"), answer(card(1, to_install=STEPS), card(2)))
    assert [*Device.objects.order_by("id").values_list("state", flat=True)] == ["installing", "ready"] * 2
    first = Command.objects.order_by("id")[0]
    assert (first.actor, first.reason, first.device.state_by) == ("all", "admitted by rule all", "rule all")
    assert Event.objects.filter(action="command.ordered", source="rule").count() == 2
    said(first)
    assert state(first.device)[0] == "ready"


def test_a_merge_orders_all_installations_in_one_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    rule("all")
    sent: list[str] = []
    execute = psycopg.Cursor.execute
    monkeypatch.setattr(
        psycopg.Cursor, "execute", lambda self, query, *a, **k: sent.append(str(query)) or execute(self, query, *a, **k)
    )
    for n, cards in ((0, 1), (1, 20)):
        apply(a_host(f"cmp{n}"), answer(*(card(bus, to_install=STEPS) for bus in range(cards))))
    assert Command.objects.count() == 21
    assert sum("INSERT INTO accelerators_command" in query for query in sent) == 2


def test_what_is_held_is_not_installed_anew(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safety, "requests", lambda device: safety.HolderCheck(("request x",)))
    with pytest.raises(RefusedError, match="held by request x: it cannot be installed"):
        lifecycle.enable(device.uuid, OLGA)


def test_after_the_commit_gateways_hear_for_which_host_there_is_a_command(
    device: Device, monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any
) -> None:
    heard: list[str | None] = []
    monkeypatch.setitem(pubsub._subscribers, placing.TOPIC, [heard.append])
    with django_capture_on_commit_callbacks(execute=True):
        placing.ask("health", device.uuid, OLGA)
        assert heard == []
    assert heard == [str(device.host_id)]


def test_a_command_ends_when_its_report_is_applied_and_not_before(device: Device) -> None:
    command = placing.ask("health", device.uuid, OLGA)
    assert said(command, epoch=1, seq=7, hash="h" * 40, detail={"status": "ok"}) is False
    assert (command.outcome, command.state, command.ended_at) == ("succeeded", "queued", None)
    apply(device.host, answer(card(1)), seq=6)
    command_results.settle()
    assert Command.objects.get().ended_at is None
    apply(device.host, answer(card(1)), seq=8)
    command_results.settle()
    command.refresh_from_db()
    assert (command.state, command.detail) == ("succeeded", {"status": "ok"})
    assert said(command, "failed"), "said again: there is nothing left to do"
    assert command.state == "succeeded"


def test_a_report_that_changed_nothing_settles_by_its_hash(device: Device) -> None:
    command = placing.ask("health", device.uuid, OLGA)
    device.host.refresh_from_db()
    said(command, epoch=5, seq=7, hash=device.host.applied_hash)
    assert command.state == "succeeded"


def test_a_command_whose_report_never_comes_ends_with_its_time(device: Device) -> None:
    command = placing.ask("health", device.uuid, OLGA)
    said(command, epoch=5, seq=7, hash="h" * 40)
    late()
    command_results.settle()
    command.refresh_from_db()
    assert command.state == "succeeded"


def test_X1_an_agent_speaks_only_of_its_own_hosts_commands(device: Device) -> None:
    stranger = a_host("cmp2").id
    command = placing.ask("health", device.uuid, OLGA)
    placing.taken([(stranger, command.id)])
    placing.progressed([Progress(stranger, command.id, 99, "mine")])
    placing.answer([Answer(stranger, command.id, "succeeded")])
    command.refresh_from_db()
    assert (command.state, command.percent, command.outcome) == ("queued", 0, "")
    with conductor.writing():
        placing.place([placing.Order("rescan", host=device.host_id, actor="olga")])
    assert placing.still_open([(stranger, command.id)]) == set()
    assert placing.still_open([(device.host_id, command.id)]) == {(device.host_id, command.id)}


def test_not_begun_in_time_is_expired_and_not_answered_in_time_is_unknown(device: Device) -> None:
    lifecycle.enable(device.uuid, OLGA)
    late()
    command = Command.objects.get()
    assert (command.state, command.text) == ("expired", "the agent of cmp1 did not accept it in time")
    assert state(device)[:2] == ("failed", command.text)
    assert device.busy_with is None
    lifecycle.enable(device.uuid, OLGA)
    command = Command.objects.get(ended_at=None)
    placing.taken([(command.host_id, command.id)])
    placing.progressed([Progress(command.host_id, command.id, 10, "functions are made")])
    late(end_by=datetime.now(UTC) + timedelta(hours=1))
    command.refresh_from_db()
    assert command.state == "started", "begun in time"
    late()
    command.refresh_from_db()
    assert command.state == "unknown"
    assert command.text == "the agent of cmp1 has not answered in time; its last progress message: functions are made"
    assert state(device)[:2] == ("failed", command.text)
    assert said(command, "succeeded", "4 functions")
    assert (command.state, "; its agent answered later: succeeded, 4 functions" in command.text) == ("unknown", True)
    assert Event.objects.filter(action="command.answered", subject=command.uuid).count() == 1


@pytest.mark.parametrize(("before", "after"), [("maintenance", "inactive"), ("failed", "inactive")])
def test_what_is_uninstalled_is_inactive(device: Device, before: str, after: str) -> None:
    with conductor.writing():
        Device.objects.update(state=before)
    command = placing.ask("uninstall", device.uuid, OLGA, reason="to be sold")
    with pytest.raises(RefusedError, match="is busy with uninstall"):
        lifecycle.enable(device.uuid, OLGA)
    said(command)
    assert state(device) == (after, "to be sold", "olga")


def test_quarantine_outlives_an_uninstallation(device: Device) -> None:
    lifecycle.ask(Action.QUARANTINE, device.uuid, OLGA, "smoke")
    said(placing.ask("uninstall", device.uuid, OLGA))
    assert state(device) == ("quarantined", "smoke", "olga")


IMAGE = uuid4()


@pytest.mark.parametrize(("op", "more"), [("partition", {"layout": {"vfs": "4"}}), ("program", {"image": IMAGE})])
def test_what_was_interrupted_is_not_offered(device: Device, op: str, more: dict[str, Any]) -> None:
    with conductor.writing():
        Device.objects.update(state="ready")
    command = placing.ask(op, device.uuid, OLGA, **more)
    if op == "program":
        placing.prepared(command.id, {"id": str(IMAGE), "size": 3, "sha256": "a" * 64, "properties": {}})
    said(command, "unknown", "interrupted; outcome unknown")
    assert state(device)[:2] == ("failed", f"{op}: interrupted; outcome unknown")


Ask = Callable[[Device], object]


@pytest.mark.parametrize(
    ("ask", "reason", "text"),
    [
        (lambda d: placing.ask("health", uuid4(), OLGA), Reason.UNKNOWN, "Device not found"),
        (lambda d: placing.ask("attach", d.uuid, OLGA), Reason.INVALID, "these are: uninstall"),
        (lambda d: placing.ask("partition", d.uuid, OLGA), Reason.INVALID, "takes a layout"),
        (lambda d: placing.ask("reset", d.uuid, OLGA, layout={"a": "b"}), Reason.INVALID, "takes a layout"),
        (lambda d: placing.ask("program", d.uuid, OLGA), Reason.INVALID, "takes an image"),
        (lambda d: placing.ask("reset", d.uuid, OLGA, reason="x" * 501), Reason.INVALID, "at most 500"),
        (lambda d: placing.ask("partition", d.uuid, OLGA, layout={"a": "\0"}), Reason.INVALID, "its value at most"),
        (lambda d: placing.ask("partition", d.uuid, OLGA, layout={"x" * 65: ""}), Reason.INVALID, "at most 64 char"),
        (
            lambda d: placing.ask("partition", d.uuid, OLGA, layout={str(n): "" for n in range(65)}),
            Reason.INVALID,
            "at most 64",
        ),
        (
            lambda d: placing.ask("program", d.uuid, OLGA, image=IMAGE, deployable=uuid4()),
            Reason.INVALID,
            "Say which deployable",
        ),
        (lambda d: placing.ask_host("install", d.host.uuid, OLGA), Reason.INVALID, "for hosts are rescan, logs"),
        (lambda d: placing.ask_host("logs", d.host.uuid, OLGA, driver="x"), Reason.INVALID, "Only rescan"),
        (lambda d: placing.ask_host("logs", uuid4(), OLGA), Reason.UNKNOWN, "Host not found"),
    ],
)
def test_asks_that_are_refused(device: Device, ask: Ask, reason: Reason, text: str) -> None:
    with pytest.raises(RefusedError, match=text) as refused:
        ask(device)
    assert refused.value.reason == reason
    assert Command.objects.count() == 0


def test_what_a_devices_state_or_driver_or_another_command_does_not_allow(device: Device) -> None:
    with conductor.writing():
        Device.objects.update(state="ready", acts="health reset uninstall")
    with pytest.raises(RefusedError, match="is ready: uninstall is possible when it is failed, inactive"):
        placing.ask("uninstall", device.uuid, OLGA)
    with pytest.raises(RefusedError, match="test_driver cannot program it"):
        placing.ask("program", device.uuid, OLGA, image=IMAGE)
    placing.ask("reset", device.uuid, OLGA)
    with pytest.raises(RefusedError, match=r"busy with reset \(command "):
        placing.ask("reset", device.uuid, OLGA)
    assert placing.ask("health", device.uuid, OLGA).state == "queued"


def test_S1_nothing_destructive_is_ordered_while_a_witness_does_not_call_it_free(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for testimony, reason in (
        (safety.HolderCheck(("instance i",)), Reason.HELD),
        (safety.HolderCheck(unknown="no answer"), Reason.AWAY),
    ):
        monkeypatch.setitem(safety._witnesses, "placement", lambda device, said=testimony: said)
        for op, more in (
            ("uninstall", {}),
            ("reset", {}),
            ("partition", {"layout": {"a": "b"}}),
            ("program", {"image": IMAGE}),
        ):
            with pytest.raises(RefusedError) as refused:
                placing.ask(op, device.uuid, OLGA, **more)
            assert refused.value.reason == reason
    placing.ask("health", device.uuid, OLGA)


def test_an_image_is_fetched_before_its_host_hears_of_the_command(device: Device) -> None:
    command = placing.ask("program", device.uuid, OLGA, image=IMAGE, source=Source.PERSON)
    assert (command.state, command.arguments["wanted"]) == ("preparing", {"bitstream_id": str(IMAGE)})
    assert command.arguments["deployable"] == "node_0000:01:00.0"
    placing.progressed([Progress(command.host_id, command.id, 50)])
    assert said(command), "its host has never heard of it"
    image = {"id": str(IMAGE), "size": 3, "sha256": "a" * 64, "name": "adder"}
    assert placing.prepared(command.id, image)
    assert not placing.prepared(command.id, image)
    command.refresh_from_db()
    assert (command.state, command.arguments["image"]) == ("queued", image)
    said(command)
    assert Deployable.objects.get().bitstream_id == IMAGE
    said(again := placing.ask("program", device.uuid, OLGA, image=IMAGE))
    placing.unprepared(again.id, "Glance has no such image")
    command_results.settle()
    again.refresh_from_db()
    assert (again.state, again.text) == ("refused", "Glance has no such image")
    assert Deployable.objects.get().bitstream_id == IMAGE, "nothing was touched"
    third = placing.ask("program", device.uuid, OLGA, image=IMAGE)
    placing.prepared(third.id, image)
    said(third, "failed", "the image is not for it")
    assert Deployable.objects.get().bitstream_id is None, "who knows what it holds now"


def test_commands_that_ended_long_ago_are_forgotten_and_open_ones_are_not(device: Device) -> None:
    for _ in range(2):
        said(placing.ask("health", device.uuid, OLGA))
    placing.ask("health", device.uuid, OLGA)
    with conductor.writing():
        Command.objects.filter(id=Command.objects.order_by("id")[0].id).update(
            ended_at=datetime.now(UTC) - timedelta(days=31)
        )
    assert sweep.forget_commands() is False
    assert sorted(Command.objects.values_list("state", flat=True)) == [CommandState.QUEUED, CommandState.SUCCEEDED]


def test_commands_of_a_device_that_is_gone_keep_its_name(device: Device) -> None:
    open_one = placing.ask("health", device.uuid, OLGA)
    apply(device.host, answer(), seq=2)
    later = datetime.now(UTC) + timedelta(days=2)
    sweep.remove_missing(later)
    assert Device.objects.count() == 1, "a command is under way"
    said(open_one, "refused", "no such device")
    sweep.remove_missing(later)
    assert Device.objects.count() == 0
    command = Command.objects.get()
    assert (command.device, command.device_name) == (None, "1044 0000:01:00.0")


def test_a_hosts_agent_looks_again_or_shows_its_log(db: None) -> None:
    host = a_host()
    rescan = placing.ask_host("rescan", host.uuid, OLGA, driver="pci_driver", reason="new card")
    assert (rescan.host_id, rescan.device, rescan.arguments) == (host.id, None, {"driver": "pci_driver"})
    log = placing.ask_host("logs", host.uuid, OLGA)
    said(log, detail={"log": "all is well"})
    assert log.detail == {"log": "all is well"}
    assert Host.objects.get().commands.count() == 2
