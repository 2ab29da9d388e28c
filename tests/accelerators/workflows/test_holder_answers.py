"""Test for every act on a device that holders are asked for before anything is locked, and what an answer is worth.

The holder check of these tests refuses to be asked while a transaction is open (`tests.support.callguard`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from uuid import uuid4

import pytest
from django.db import connection
from django.db.models import F

from accelerators import conductor, outbox, safety
from accelerators.commands import command_queue
from accelerators.devices import lifecycle, partitioning
from accelerators.devices.partitioning import PartitionChange
from accelerators.domain.caller import Caller
from accelerators.domain.device_actions import Action
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import DrainTarget, EventSource, RolloutOp
from accelerators.models import BulkItem, Command, Device, Host, RolloutStep
from accelerators.runtime import database_clock
from accelerators.safety import HolderCheckResult
from accelerators.workflows import bulk_actions, driver_rollouts, retention_sweep
from accelerators.workflows.driver_config import DriverChange
from tests.support.holders import answer_each
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("agents_need_not_be_up")]
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")
LATER = datetime.now(UTC) + timedelta(days=2)
FREE = HolderCheckResult()


def order(op: str, **arguments: object) -> Callable[[Device], object]:
    return lambda device: command_queue.order_device_command(op, device.uuid, OLGA, **arguments)  # type: ignore[arg-type]


def apply(action: Action, drain_to: DrainTarget = DrainTarget.MAINTENANCE) -> Callable[[Device], object]:
    def act(device: Device) -> None:
        lifecycle.apply_action_to_device(action, device.uuid, OLGA, drain_to=drain_to)
        lifecycle.run_drains()

    return act


def run_bulk(
    action: Action | str,
    drain_to: DrainTarget = DrainTarget.MAINTENANCE,
    arguments: Mapping[str, object] | None = None,
) -> Callable[[Device], object]:
    def act(device: Device) -> None:
        devices = Device.objects.filter(pk=device.pk)
        bulk = bulk_actions.create_draft(action, drain_to, devices, OLGA, arguments=arguments)
        bulk_actions.confirm_draft(bulk, "", held_too=True)
        bulk_actions.run()

    return act


def add_units(device: Device) -> None:
    partitioning.partition_device(device.uuid, PartitionChange(3), OLGA)


def run_bulk_by_job(action: Action | str) -> Callable[[Device], object]:
    def act(device: Device) -> None:
        bulk = bulk_actions.create_draft(action, DrainTarget.MAINTENANCE, Device.objects.filter(pk=device.pk), OLGA)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(bulk_actions, "BULK_SLICE_SIZE", 0)  # the set counts as too large to be finished at once
            bulk_actions.confirm_draft(bulk, "", held_too=True)
        bulk_actions.run()

    return act


def change_driver(op: RolloutOp, hosts: int = 1, enabled: bool | None = None) -> Callable[[Device], object]:
    def act(device: Device) -> None:
        others = [get_or_create_host(f"other{number}") for number in range(hosts - 1)]
        change = DriverChange(op, device.driver, enabled)
        driver_rollouts.start_rollout(change, [device.host, *others], OLGA, source=EventSource.API)
        driver_rollouts.run()

    return act


def sweep(device: Device) -> None:
    retention_sweep.remove_missing_devices(LATER)


ACTS = {
    "retire": apply(Action.RETIRE),
    "drain to retire": apply(Action.DRAIN, DrainTarget.RETIRED),
    "retire in bulk": run_bulk(Action.RETIRE),
    "drain to retire in bulk": run_bulk(Action.DRAIN, DrainTarget.RETIRED),
    "retire in bulk by the job": run_bulk_by_job(Action.RETIRE),
    "reset in bulk by the job": run_bulk_by_job("reset"),
    "uninstall": order("uninstall"),
    "reset": order("reset"),
    "reset in bulk": run_bulk("reset"),
    "program": order("program", image=uuid4()),
    "partition": order("partition", layout={"vfs": "4"}),
    "change the layout": lambda device: partitioning.partition_device(
        device.uuid, partitioning.PartitionChange(0, {"vfs": "4"}), OLGA
    ),
    "add units": add_units,
    "add units in bulk": run_bulk("partition", arguments=PartitionChange(3).to_arguments()),
    "uninstall its driver": change_driver(RolloutOp.UNINSTALL),
    "disable its driver": change_driver(RolloutOp.UPDATE, enabled=False),
    "uninstall its driver on several hosts": change_driver(RolloutOp.UNINSTALL, hosts=2),
    "sweep": sweep,
}


FAST = ("retire", "reset in bulk", "add units in bulk", "uninstall its driver", "sweep")
"""Acts that each test tries in the fast lane: one of each kind."""


@pytest.fixture(params=[act if act in FAST else pytest.param(act, marks=pytest.mark.exhaustive) for act in ACTS])
def act(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def device(act: str) -> Device:
    """Return a device that every act is possible on: in maintenance, but missing for the sweep."""
    host = get_or_create_host()
    words = {"acts": "uninstall partition program reset", "changeable": "vfs", "sized_by": "vfs"}
    apply_report(host, make_driver_report(make_card(1, **words)))
    lifecycle.enable_device(Device.objects.get().uuid, OLGA)
    if act == "sweep":
        apply_report(host, make_driver_report(), seq=2)
    elif not act.startswith("drain"):
        lifecycle.disable_device(Device.objects.get().uuid, OLGA)
    with conductor.writing():
        Command.objects.all().delete()
    return Device.objects.select_related("host").get()


def note(asked: list[int], device: Device, result: HolderCheckResult = FREE) -> HolderCheckResult:
    """Add the device to those that were asked about, and return the answer."""
    asked.append(device.pk)
    return result


def is_done() -> bool:
    """Return True if the act was carried out: a command was placed, or the device is retired or gone."""
    is_ordered = Command.objects.exclude(host__name__startswith="other").exists()
    return is_ordered or not Device.objects.exclude(state="retired").exists()


def try_act(act: str, device: Device) -> None:
    with suppress(RefusedError):
        ACTS[act](device)


def test_S1_holders_are_asked_outside_transactions_and_a_free_device_is_acted_on(act: str, device: Device) -> None:
    asked: list[int] = []
    with safety.HOLDER_CHECKS.replaced("nova", answer_each(lambda device: note(asked, device))):
        try_act(act, device)
    assert asked == [device.pk] and is_done()


def test_S1_an_answer_does_not_count_if_the_device_has_changed_since_the_question(act: str, device: Device) -> None:
    def answer(device: Device) -> HolderCheckResult:
        """Answer that nobody holds the device; at this moment somebody changes it."""
        with conductor.writing():
            Device.objects.filter(pk=device.pk).update(generation=F("generation") + 1)
        return FREE

    with safety.HOLDER_CHECKS.replaced("nova", answer_each(answer)):
        try_act(act, device)
        assert not is_done()


@pytest.mark.parametrize("result", [HolderCheckResult(("instance i",)), HolderCheckResult(unknown="no answer")])
def test_S1_no_act_on_a_device_that_is_held_or_may_be_held(act: str, device: Device, result: HolderCheckResult) -> None:
    with safety.HOLDER_CHECKS.replaced("nova", answer_each(lambda device: result)):
        try_act(act, device)
        assert not is_done()


@pytest.mark.parametrize(
    "act",
    ["uninstall its driver on several hosts", "retire in bulk by the job", "reset in bulk by the job"],
    indirect=True,
)
def test_a_job_asks_again_after_a_pause_if_the_device_changed_while_it_asked(
    act: str, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (bulk_actions, driver_rollouts):
        monkeypatch.setattr(module, "HOLDER_CHECK_PAUSE", outbox.build_retry_pause(0.0, 0.0))
    asked: list[int] = []

    def answer(device: Device) -> HolderCheckResult:
        """Answer that nobody holds the device; while the first question is asked, somebody changes it."""
        asked.append(device.pk)
        if len(asked) == 1:
            with conductor.writing():
                Device.objects.filter(pk=device.pk).update(generation=F("generation") + 1)
        return FREE

    with safety.HOLDER_CHECKS.replaced("nova", answer_each(answer)):
        try_act(act, device)
    assert asked == [device.pk, device.pk] and is_done()


@pytest.mark.parametrize(
    ("act", "model", "run"),
    [
        ("uninstall its driver on several hosts", RolloutStep, driver_rollouts.run),
        ("retire in bulk by the job", BulkItem, bulk_actions.run),
        ("reset in bulk by the job", BulkItem, bulk_actions.run),
    ],
    indirect=["act"],
)
def test_a_job_waits_longer_after_each_attempt_and_gives_up_after_the_third(
    act: str, device: Device, model: type[RolloutStep | BulkItem], run: Callable[[], None]
) -> None:
    asked: list[int] = []
    unknown = HolderCheckResult(unknown="no answer")
    with safety.HOLDER_CHECKS.replaced("nova", answer_each(lambda device: note(asked, device, unknown))):
        ACTS[act](device)
        pauses = []
        for attempts in (1, 2):
            run()
            row = model.objects.exclude(next_at=None).get()
            assert (len(asked), row.attempts) == (attempts, attempts)
            assert row.next_at
            pauses.append(round((row.next_at - database_clock.now()).total_seconds()))
            with conductor.writing():
                model.objects.filter(pk=row.pk).update(next_at=database_clock.now())
            run()
    row.refresh_from_db()
    assert (len(asked), pauses) == (3, [12, 24])
    assert "no answer" in row.text and not is_done()
    assert row.state == "failed" if isinstance(row, RolloutStep) else row.why == "unavailable"


@pytest.mark.parametrize("act", ["uninstall its driver on several hosts"], indirect=True)
def test_a_host_whose_order_succeeds_after_an_attempt_without_an_answer_shows_no_error(
    act: str, device: Device
) -> None:
    results = [HolderCheckResult(unknown="no answer"), FREE]
    with safety.HOLDER_CHECKS.replaced("nova", answer_each(lambda _: results.pop(0))):
        ACTS[act](device)
        driver_rollouts.run()
        row = RolloutStep.objects.exclude(next_at=None).get()
        assert "no answer" in row.text
        with conductor.writing():
            RolloutStep.objects.filter(pk=row.pk).update(next_at=database_clock.now())
        driver_rollouts.run()
    row.refresh_from_db()
    assert (row.state, row.text, row.next_at) == ("ordered", "", None)


@pytest.mark.parametrize(
    "act", ["uninstall", "reset", "program", "partition", "change the layout", "uninstall its driver"], indirect=True
)
def test_no_service_is_asked_if_the_command_is_refused_anyway(act: str, device: Device) -> None:
    """The agent of the device's host is away: it takes no commands."""
    with conductor.writing():
        Host.objects.update(stale_since=datetime.now(UTC))
        Device.objects.update(busy_with=uuid4())
    asked: list[int] = []
    with safety.HOLDER_CHECKS.replaced("nova", answer_each(lambda device: note(asked, device))):
        with pytest.raises(RefusedError) as refused:
            ACTS[act](device)
        assert refused.value.reason is RefusalReason.CONFLICT
    assert not asked


REFUSALS = {
    "its driver cannot do it": lambda: Device.objects.update(acts="health"),
    "a command works on the device": lambda: Device.objects.update(busy_with=uuid4()),
    "the state does not allow it": lambda: Device.objects.update(state="ready"),
}


@pytest.mark.parametrize(
    ("act", "condition"),
    [
        ("retire", "the state does not allow it"),
        ("retire in bulk", "the state does not allow it"),
        ("retire in bulk by the job", "the state does not allow it"),
        ("add units", "its driver cannot do it"),
        ("add units", "a command works on the device"),
        ("reset in bulk", "its driver cannot do it"),
        ("reset in bulk", "a command works on the device"),
        ("reset in bulk by the job", "its driver cannot do it"),
    ],
    indirect=["act"],
)
def test_no_service_is_asked_about_a_device_that_our_own_database_refuses(
    act: str, device: Device, condition: str
) -> None:
    with conductor.writing():
        REFUSALS[condition]()
    asked: list[int] = []
    with safety.HOLDER_CHECKS.replaced("nova", answer_each(lambda device: note(asked, device))):
        try_act(act, device)
        assert not asked and not is_done()


@pytest.mark.parametrize("act", ["retire in bulk", "drain to retire in bulk", "reset in bulk"], indirect=True)
def test_no_service_is_asked_about_a_device_that_has_changed_since_it_was_chosen(act: str, device: Device) -> None:
    action = {"retire in bulk": Action.RETIRE, "drain to retire in bulk": Action.DRAIN, "reset in bulk": "reset"}[act]
    bulk = bulk_actions.create_draft(action, DrainTarget.RETIRED, Device.objects.filter(pk=device.pk), OLGA)
    with conductor.writing():
        Device.objects.update(state="failed")
    asked: list[int] = []
    with safety.HOLDER_CHECKS.replaced("nova", answer_each(lambda device: note(asked, device))):
        bulk_actions.confirm_draft(bulk, "", held_too=True)
    bulk.refresh_from_db()
    assert (asked, bulk.refused) == ([], 1)


@pytest.mark.parametrize("act", ["partition"], indirect=True)
@pytest.mark.parametrize(
    ("change", "text"),
    [(PartitionChange(-1), "cannot be changed to -1"), (PartitionChange(3, {"wings": "2"}), "has no setting wings")],
)
def test_no_service_is_asked_about_units_that_a_device_cannot_have(
    act: str, device: Device, change: PartitionChange, text: str
) -> None:
    asked: list[int] = []
    with safety.HOLDER_CHECKS.replaced("nova", answer_each(lambda device: note(asked, device))):
        with pytest.raises(RefusedError, match=text):
            partitioning.partition_device(device.uuid, change, OLGA)
        with pytest.raises(RefusedError, match="A reason is at most"):
            partitioning.partition_device(
                device.uuid, partitioning.PartitionChange(0, {"vfs": "4"}), OLGA, reason="x" * 5000
            )
        with pytest.raises(RefusedError, match="its value at most"):
            partitioning.partition_device(device.uuid, partitioning.PartitionChange(0, {"vfs": "4" * 5000}), OLGA)
    assert not asked


@pytest.mark.parametrize("act", ["uninstall its driver"], indirect=True)
def test_no_service_is_asked_if_another_change_of_the_driver_is_under_way(act: str, device: Device) -> None:
    with safety.HOLDER_CHECKS.replaced("nova", None):
        ACTS["disable its driver"](device)
        with conductor.writing():
            Device.objects.update(busy_with=None)
    asked: list[int] = []
    with (
        safety.HOLDER_CHECKS.replaced("nova", answer_each(lambda device: note(asked, device))),
        pytest.raises(RefusedError, match="is being changed"),
    ):
        ACTS[act](device)
    assert not asked


def run_once_and_disconnect() -> bool:
    """Run one step of the job `bulks` on a connection of its own; return whether there was anything to do."""
    try:
        return bulk_actions.process_next_slice()
    finally:
        connection.close()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("act", ["retire in bulk"], indirect=True)
def test_a_small_bulk_action_is_finished_by_the_caller_alone(act: str, device: Device) -> None:
    """The job runs while the caller asks the services; it must not ask about the same devices."""
    asked: list[int] = []
    with ThreadPoolExecutor(1) as other_process:

        def answer(device: Device) -> HolderCheckResult:
            asked.append(device.pk)
            if len(asked) == 1:
                assert other_process.submit(run_once_and_disconnect).result(30) is False
            return FREE

        with safety.HOLDER_CHECKS.replaced("nova", answer_each(answer)):
            bulk = bulk_actions.create_draft(Action.RETIRE, DrainTarget.MAINTENANCE, Device.objects.all(), OLGA)
            bulk_actions.confirm_draft(bulk, "", held_too=True)
    bulk.refresh_from_db()
    assert (bulk.state, asked) == ("done", [device.pk])
