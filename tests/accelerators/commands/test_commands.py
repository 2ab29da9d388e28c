"""Test commands: orders, refusals, answers, and that a command ends only when its report has been applied."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import psycopg
import pytest

from accelerators import conductor, safety
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandAnswer, CommandProgress
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import CommandState, EventSource
from accelerators.models import Command, Deployable, Device, Event, Host
from accelerators.runtime import pubsub
from accelerators.workflows import command_endings, retention_sweep
from tests.accelerators.devices.test_admission import create_rule
from tests.support.holders import answer_each
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")
ACTS = "attach detach health install partition program reset uninstall"
INSTALL_STEPS = "four functions are made\nthey are bound to vfio-pci"


def answer_and_settle(command: Command, outcome: str = "succeeded", text: str = "", **values: object) -> bool:
    """Store the answer of the agent and end every command that can end; return True if a command could end at once."""
    settled = command_queue.store_answers([CommandAnswer(command.host_id, command.id, outcome, text, **values)])  # type: ignore[arg-type]
    while command_endings.end_answered_commands():
        pass
    command.refresh_from_db()
    return bool(settled)


def expire_open_commands(**changes: object) -> None:
    """Let the time limits of all open commands pass; `changes` replace limits."""
    past = datetime.now(UTC) - timedelta(seconds=1)
    with conductor.writing():
        Command.objects.filter(ended_at=None).update(**{"start_by": past, "end_by": past} | changes)
    command_endings.end_late_commands()


@pytest.fixture
def device(db: None) -> Device:
    """Return a card in maintenance that has to be installed."""
    apply_report(get_or_create_host(), make_driver_report(make_card(1, handles=2, to_install=INSTALL_STEPS, acts=ACTS)))
    with conductor.writing():
        Device.objects.update(state="maintenance")
    return Device.objects.get()


def get_device_state(device: Device) -> tuple[str, str, str]:
    device.refresh_from_db()
    return device.state, device.state_reason, device.state_by


def test_enabling_a_device_orders_its_installation_and_success_makes_it_ready(device: Device) -> None:
    assert lifecycle.apply_action_to_device(Action.ENABLE, device.uuid, OLGA, "burnt in").state == "installing"
    command = Command.objects.get()
    assert (command.op, command.state, command.exclusive, command.actor) == ("install", "queued", True, "olga")
    assert command.arguments == {"driver": "test_driver", "key": "pci:0000:01:00.0"}
    device.refresh_from_db()
    assert device.busy_with == command.uuid
    assert lifecycle.apply_action_to_device(Action.ENABLE, device.uuid, OLGA).outcome == "unchanged"
    command_queue.mark_commands_taken([(command.host_id, command.id)])
    command_queue.store_progress([CommandProgress(command.host_id, command.id, 50, "they are bound")])
    command.refresh_from_db()
    assert (command.state, command.percent, command.progress) == ("started", 50, "they are bound")
    assert command.taken_at and command.started_at
    answer_and_settle(command)
    assert (command.state, command.percent, command.ended_at is None) == ("succeeded", 100, False)
    assert get_device_state(device) == ("ready", "burnt in", "olga")
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
def test_a_device_whose_installation_failed_has_the_drivers_reason(device: Device, outcome: str) -> None:
    lifecycle.enable_device(device.uuid, OLGA)
    answer_and_settle(Command.objects.get(), outcome, "pci_driver: asked for 4, got 2")
    assert get_device_state(device) == ("failed", "pci_driver: asked for 4, got 2", "cmp1")
    lifecycle.enable_device(device.uuid, OLGA)
    assert get_device_state(device)[0] == "installing"


def test_a_device_disabled_during_its_installation_stays_in_maintenance(device: Device) -> None:
    lifecycle.enable_device(device.uuid, OLGA)
    lifecycle.disable_device(device.uuid, OLGA, "not yet")
    with pytest.raises(RefusedError, match="is busy with install") as refused:
        lifecycle.enable_device(device.uuid, OLGA)
    assert refused.value.reason == RefusalReason.CONFLICT
    answer_and_settle(Command.objects.get())
    assert get_device_state(device) == ("maintenance", "not yet", "olga")


def test_a_missing_device_returns_to_the_outcome_of_its_installation(device: Device) -> None:
    lifecycle.enable_device(device.uuid, OLGA)
    apply_report(device.host, make_driver_report(), seq=2)
    answer_and_settle(Command.objects.get(), "failed", "it is gone")
    device.refresh_from_db()
    assert (device.state, device.returns_to, device.busy_with) == ("missing", "failed", None)


def test_a_rule_that_admits_a_device_orders_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    create_rule("all")
    for n in range(2):
        apply_report(
            get_or_create_host(f"cmp{n}"), make_driver_report(make_card(1, to_install=INSTALL_STEPS), make_card(2))
        )
    assert [*Device.objects.order_by("id").values_list("state", flat=True)] == ["installing", "ready"] * 2
    first = Command.objects.order_by("id")[0]
    assert (first.actor, first.reason, first.device.state_by) == ("all", "admitted by rule all", "rule all")
    assert Event.objects.filter(action="command.ordered", source="rule").count() == 2
    answer_and_settle(first)
    assert get_device_state(first.device)[0] == "ready"


def test_a_merge_inserts_all_installations_with_one_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    create_rule("all")
    sent: list[str] = []
    execute = psycopg.Cursor.execute
    monkeypatch.setattr(
        psycopg.Cursor, "execute", lambda self, query, *a, **k: sent.append(str(query)) or execute(self, query, *a, **k)
    )
    for n, cards in ((0, 1), (1, 20)):
        apply_report(
            get_or_create_host(f"cmp{n}"),
            make_driver_report(*(make_card(bus, to_install=INSTALL_STEPS) for bus in range(cards))),
        )
    assert Command.objects.count() == 21
    assert sum("INSERT INTO accelerators_command" in query for query in sent) == 2


def test_installing_a_held_device_is_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    held = safety.DeviceHolders({device.pk: {"requests": safety.HolderCheckResult(("request x",))}})
    monkeypatch.setattr(safety, "find_known_holders", lambda devices, requests: held)
    with pytest.raises(RefusedError, match="held by request x: it cannot be installed"):
        lifecycle.enable_device(device.uuid, OLGA)


def test_gateways_are_notified_of_the_commands_host_only_after_commit(
    device: Device, monkeypatch: pytest.MonkeyPatch, django_capture_on_commit_callbacks: Any
) -> None:
    heard: list[str | None] = []
    monkeypatch.setitem(pubsub._subscribers, command_queue.COMMANDS_TOPIC, [heard.append])
    with django_capture_on_commit_callbacks(execute=True):
        command_queue.order_device_command("health", device.uuid, OLGA)
        assert heard == []
    assert heard == [str(device.host_id)]


def test_an_answered_command_ends_only_when_its_report_has_been_applied(device: Device) -> None:
    command = command_queue.order_device_command("health", device.uuid, OLGA)
    assert answer_and_settle(command, epoch=1, seq=7, hash="h" * 40, detail={"status": "ok"}) is False
    assert (command.outcome, command.state, command.ended_at) == ("succeeded", "queued", None)
    apply_report(device.host, make_driver_report(make_card(1)), seq=6)
    command_endings.end_answered_commands()
    assert Command.objects.get().ended_at is None
    apply_report(device.host, make_driver_report(make_card(1)), seq=8)
    command_endings.end_answered_commands()
    command.refresh_from_db()
    assert (command.state, command.detail) == ("succeeded", {"status": "ok"})
    assert answer_and_settle(command, "failed"), "said again: there is nothing left to do"
    assert command.state == "succeeded"


def test_a_command_is_settled_at_once_if_its_report_has_the_applied_hash(device: Device) -> None:
    command = command_queue.order_device_command("health", device.uuid, OLGA)
    device.host.refresh_from_db()
    answer_and_settle(command, epoch=5, seq=7, hash=device.host.applied_hash)
    assert command.state == "succeeded"


def test_an_answered_command_whose_report_never_arrives_ends_when_its_time_is_over(device: Device) -> None:
    command = command_queue.order_device_command("health", device.uuid, OLGA)
    answer_and_settle(command, epoch=5, seq=7, hash="h" * 40)
    expire_open_commands()
    command_endings.end_answered_commands()
    command.refresh_from_db()
    assert command.state == "succeeded"


def test_X1_an_agent_cannot_answer_commands_of_another_host(device: Device) -> None:
    stranger = get_or_create_host("cmp2").id
    command = command_queue.order_device_command("health", device.uuid, OLGA)
    command_queue.mark_commands_taken([(stranger, command.id)])
    command_queue.store_progress([CommandProgress(stranger, command.id, 99, "mine")])
    command_queue.store_answers([CommandAnswer(stranger, command.id, "succeeded")])
    command.refresh_from_db()
    assert (command.state, command.percent, command.outcome) == ("queued", 0, "")
    with conductor.writing():
        command_queue.place_commands([command_queue.CommandOrder("rescan", host=device.host_id, actor="olga")])
    assert command_queue.select_open_commands([(stranger, command.id)]) == set()
    assert command_queue.select_open_commands([(device.host_id, command.id)]) == {(device.host_id, command.id)}


def test_a_command_not_started_in_time_expires_and_one_not_answered_in_time_is_unknown(device: Device) -> None:
    lifecycle.enable_device(device.uuid, OLGA)
    expire_open_commands()
    command = Command.objects.get()
    assert (command.state, command.text) == ("expired", "the agent of cmp1 did not accept it in time")
    assert get_device_state(device)[:2] == ("failed", command.text)
    assert device.busy_with is None
    lifecycle.enable_device(device.uuid, OLGA)
    command = Command.objects.get(ended_at=None)
    command_queue.mark_commands_taken([(command.host_id, command.id)])
    command_queue.store_progress([CommandProgress(command.host_id, command.id, 10, "functions are made")])
    expire_open_commands(end_by=datetime.now(UTC) + timedelta(hours=1))
    command.refresh_from_db()
    assert command.state == "started", "begun in time"
    expire_open_commands()
    command.refresh_from_db()
    assert command.state == "unknown"
    assert command.text == "the agent of cmp1 has not answered in time; its last progress message: functions are made"
    assert get_device_state(device)[:2] == ("failed", command.text)
    assert answer_and_settle(command, "succeeded", "4 functions")
    assert (command.state, "; its agent answered later: succeeded, 4 functions" in command.text) == ("unknown", True)
    assert Event.objects.filter(action="command.answered", subject=command.uuid).count() == 1


@pytest.mark.parametrize(("before", "after"), [("maintenance", "inactive"), ("failed", "inactive")])
def test_an_uninstalled_device_becomes_inactive(device: Device, before: str, after: str) -> None:
    with conductor.writing():
        Device.objects.update(state=before)
    command = command_queue.order_device_command("uninstall", device.uuid, OLGA, reason="to be sold")
    with pytest.raises(RefusedError, match="is busy with uninstall"):
        lifecycle.enable_device(device.uuid, OLGA)
    answer_and_settle(command)
    assert get_device_state(device) == (after, "to be sold", "olga")


def test_a_quarantined_device_stays_quarantined_after_uninstall(device: Device) -> None:
    lifecycle.apply_action_to_device(Action.QUARANTINE, device.uuid, OLGA, "smoke")
    answer_and_settle(command_queue.order_device_command("uninstall", device.uuid, OLGA))
    assert get_device_state(device) == ("quarantined", "smoke", "olga")


@pytest.mark.parametrize(("outcome", "state"), [("failed", "failed"), ("unknown", "failed"), ("refused", "ready")])
def test_a_device_whose_reset_failed_is_failed_until_somebody_enables_it(
    device: Device, outcome: str, state: str
) -> None:
    with conductor.writing():
        Device.objects.update(state="ready", to_install="")
    answer_and_settle(command_queue.order_device_command("reset", device.uuid, OLGA), outcome, "it is not ready")
    assert get_device_state(device)[0] == state
    assert (device.state_reason == "reset: it is not ready") == (state == "failed")
    assert device.busy_with is None
    lifecycle.enable_device(device.uuid, OLGA)
    assert get_device_state(device)[0] == "ready"


IMAGE = uuid4()


@pytest.mark.parametrize(("op", "more"), [("partition", {"layout": {"vfs": "4"}}), ("program", {"image": IMAGE})])
def test_a_device_whose_partition_or_program_has_an_unknown_outcome_is_failed(
    device: Device, op: str, more: dict[str, Any]
) -> None:
    with conductor.writing():
        Device.objects.update(state="ready")
    command = command_queue.order_device_command(op, device.uuid, OLGA, **more)
    if op == "program":
        command_queue.mark_image_ready(command.id, {"id": str(IMAGE), "size": 3, "sha256": "a" * 64, "properties": {}})
    answer_and_settle(command, "unknown", "interrupted; outcome unknown")
    assert get_device_state(device)[:2] == ("failed", f"{op}: interrupted; outcome unknown")


AskForCommand = Callable[[Device], object]


@pytest.mark.parametrize(
    ("ask", "reason", "text"),
    [
        (
            lambda d: command_queue.order_device_command("health", uuid4(), OLGA),
            RefusalReason.NOT_FOUND,
            "Device not found",
        ),
        (
            lambda d: command_queue.order_device_command("attach", d.uuid, OLGA),
            RefusalReason.INVALID,
            "these are: uninstall",
        ),
        (
            lambda d: command_queue.order_device_command("partition", d.uuid, OLGA),
            RefusalReason.INVALID,
            "takes a layout",
        ),
        (
            lambda d: command_queue.order_device_command("reset", d.uuid, OLGA, layout={"a": "b"}),
            RefusalReason.INVALID,
            "takes a layout",
        ),
        (
            lambda d: command_queue.order_device_command("program", d.uuid, OLGA),
            RefusalReason.INVALID,
            "takes an image",
        ),
        (
            lambda d: command_queue.order_device_command("reset", d.uuid, OLGA, reason="x" * 501),
            RefusalReason.INVALID,
            "at most 500",
        ),
        (
            lambda d: command_queue.order_device_command("partition", d.uuid, OLGA, layout={"a": "\0"}),
            RefusalReason.INVALID,
            "its value at most",
        ),
        (
            lambda d: command_queue.order_device_command("partition", d.uuid, OLGA, layout={"x" * 65: ""}),
            RefusalReason.INVALID,
            "at most 64 char",
        ),
        (
            lambda d: command_queue.order_device_command(
                "partition", d.uuid, OLGA, layout={str(n): "" for n in range(65)}
            ),
            RefusalReason.INVALID,
            "at most 64",
        ),
        (
            lambda d: command_queue.order_device_command("program", d.uuid, OLGA, image=IMAGE, deployable=uuid4()),
            RefusalReason.INVALID,
            "Say which deployable",
        ),
        (
            lambda d: command_queue.order_host_command("install", d.host.uuid, OLGA),
            RefusalReason.INVALID,
            "for hosts are rescan, logs",
        ),
        (
            lambda d: command_queue.order_host_command("logs", d.host.uuid, OLGA, driver="x"),
            RefusalReason.INVALID,
            "Only rescan",
        ),
        (lambda d: command_queue.order_host_command("logs", uuid4(), OLGA), RefusalReason.NOT_FOUND, "Host not found"),
    ],
)
def test_invalid_commands_are_refused_with_reason_and_text(
    device: Device, ask: AskForCommand, reason: RefusalReason, text: str
) -> None:
    with pytest.raises(RefusedError, match=text) as refused:
        ask(device)
    assert refused.value.reason == reason
    assert Command.objects.count() == 0


def test_commands_that_state_driver_or_a_running_command_forbid_are_refused(device: Device) -> None:
    with conductor.writing():
        Device.objects.update(state="ready", acts="health reset uninstall")
    with pytest.raises(RefusedError, match="is ready: uninstall is possible when it is failed, inactive"):
        command_queue.order_device_command("uninstall", device.uuid, OLGA)
    with pytest.raises(RefusedError, match="test_driver cannot program it"):
        command_queue.order_device_command("program", device.uuid, OLGA, image=IMAGE)
    command_queue.order_device_command("reset", device.uuid, OLGA)
    with pytest.raises(RefusedError, match=r"busy with reset \(command "):
        command_queue.order_device_command("reset", device.uuid, OLGA)
    assert command_queue.order_device_command("health", device.uuid, OLGA).state == "queued"


def test_S1_destructive_commands_are_refused_while_held_or_while_holders_are_unknown(device: Device) -> None:
    for result, reason in (
        (safety.HolderCheckResult(("instance i",)), RefusalReason.IN_USE),
        (safety.HolderCheckResult(unknown="no answer"), RefusalReason.UNAVAILABLE),
    ):
        with safety.HOLDER_CHECKS.replaced("placement", answer_each(lambda device, answer=result: answer)):
            for op, more in (
                ("uninstall", {}),
                ("reset", {}),
                ("partition", {"layout": {"a": "b"}}),
                ("program", {"image": IMAGE}),
            ):
                with pytest.raises(RefusedError) as refused:
                    command_queue.order_device_command(op, device.uuid, OLGA, **more)
                assert refused.value.reason == reason
                assert not result.holders or f"it cannot be {op}" in refused.value.text
    command_queue.order_device_command("health", device.uuid, OLGA)


def test_an_image_is_fetched_before_its_host_hears_of_the_command(device: Device) -> None:
    command = command_queue.order_device_command("program", device.uuid, OLGA, image=IMAGE, source=EventSource.PERSON)
    assert (command.state, command.arguments["wanted"]) == ("preparing", {"bitstream_id": str(IMAGE)})
    assert command.arguments["deployable"] == "cmp1_0000:01:00.0"
    command_queue.store_progress([CommandProgress(command.host_id, command.id, 50)])
    assert answer_and_settle(command), "its host has never heard of it"
    image = {"id": str(IMAGE), "size": 3, "sha256": "a" * 64, "name": "adder"}
    assert command_queue.mark_image_ready(command.id, image)
    assert not command_queue.mark_image_ready(command.id, image)
    command.refresh_from_db()
    assert (command.state, command.arguments["image"]) == ("queued", image)
    answer_and_settle(command)
    assert Deployable.objects.get().bitstream_id == IMAGE
    answer_and_settle(again := command_queue.order_device_command("program", device.uuid, OLGA, image=IMAGE))
    command_queue.mark_image_failed(again.id, "Glance has no \0such image")
    command_endings.end_answered_commands()
    again.refresh_from_db()
    assert (again.state, again.text) == ("refused", "Glance has no such image")
    assert Deployable.objects.get().bitstream_id == IMAGE, "nothing was touched"
    third = command_queue.order_device_command("program", device.uuid, OLGA, image=IMAGE)
    command_queue.mark_image_ready(third.id, image)
    answer_and_settle(third, "failed", "the image is not for it")
    assert Deployable.objects.get().bitstream_id is None, "who knows what it holds now"


def test_commands_that_ended_long_ago_are_deleted_and_open_ones_stay(device: Device) -> None:
    for _ in range(2):
        answer_and_settle(command_queue.order_device_command("health", device.uuid, OLGA))
    command_queue.order_device_command("health", device.uuid, OLGA)
    with conductor.writing():
        Command.objects.filter(id=Command.objects.order_by("id")[0].id).update(
            ended_at=datetime.now(UTC) - timedelta(days=31)
        )
    assert retention_sweep.delete_old_commands() is False
    assert sorted(Command.objects.values_list("state", flat=True)) == [CommandState.QUEUED, CommandState.SUCCEEDED]


def test_commands_of_a_removed_device_keep_its_name(device: Device) -> None:
    open_one = command_queue.order_device_command("health", device.uuid, OLGA)
    apply_report(device.host, make_driver_report(), seq=2)
    later = datetime.now(UTC) + timedelta(days=2)
    retention_sweep.remove_missing_devices(later)
    assert Device.objects.count() == 1, "a command is under way"
    answer_and_settle(open_one, "refused", "no such device")
    retention_sweep.remove_missing_devices(later)
    assert Device.objects.count() == 0
    command = Command.objects.get()
    assert (command.device, command.device_name) == (None, "1044 0000:01:00.0")


def test_rescan_and_logs_can_be_ordered_for_a_host(db: None) -> None:
    host = get_or_create_host()
    rescan = command_queue.order_host_command("rescan", host.uuid, OLGA, driver="pci_driver", reason="new card")
    assert (rescan.host_id, rescan.device, rescan.arguments) == (host.id, None, {"driver": "pci_driver"})
    log = command_queue.order_host_command("logs", host.uuid, OLGA)
    answer_and_settle(log, detail={"log": "all is well"})
    assert log.detail == {"log": "all is well"}
    assert Host.objects.get().commands.count() == 2
