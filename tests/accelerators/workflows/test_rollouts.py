"""Test rollouts of driver changes to hosts: their pace, failures and cancellation; held devices prevent a change."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError, connection

from accelerators import conductor, safety
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandAnswer
from accelerators.domain import driver_status
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource, RolloutOp
from accelerators.models import Command, Device, DriverWish, Event, Host, HostDriver, Rollout
from accelerators.runtime import jobs
from accelerators.workflows import command_endings, driver_rollouts, retention_sweep
from accelerators.workflows.driver_config import DriverChange, check_driver_change
from accelerators.workflows.driver_rollouts import RolloutPace
from drivers.inventory import DriverReport
from tests.accelerators.api.own.conftest import Fill, fill
from tests.support.holders import answer_each
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("agents_need_not_be_up")]
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")
INSTALL, UPDATE, UNINSTALL = RolloutOp
DRIVER = "test_driver"
UNKNOWN_COMMAND = "00000000-0000-4000-8000-000000000000"
__all__ = ["fill"]


def create_hosts(number: int, *reports: DriverReport) -> list[Host]:
    """Create this number of hosts, each with the same driver reports."""
    made = [get_or_create_host(f"cmp{n}") for n in range(number)]
    for host in made:
        apply_report(host, *reports)
    return made


def start_rollout(op: RolloutOp, on: list[Host], driver: str = DRIVER, reason: str = "", **options: Any) -> Rollout:
    """Start a rollout and run the job until it is idle."""
    change = {name: options.pop(name) for name in ("enabled", "settings") if name in options}
    made = driver_rollouts.start_rollout(
        DriverChange(op, driver, **change),
        on,
        OLGA,
        pace=RolloutPace(**options),
        reason=reason,
        source=EventSource.PERSON,
    )
    return run_rollout(made)


def run_rollout(rollout: Rollout) -> Rollout:
    """Run the rollout job until it is idle, and return the rollout with its new values."""
    while driver_rollouts.advance_oldest_rollout():
        pass
    rollout.refresh_from_db()
    return rollout


def answer_as_agent(
    command: Command | None, outcome: str = "succeeded", text: str = "it runs", **report_values: Any
) -> None:
    """Report the driver's new state if the outcome is a success, and answer the command, as the agent does."""
    assert command is not None
    wish = command.arguments["wish"]
    off = "" if wish["installed"] and wish["enabled"] else "disabled" if wish["installed"] else "absent"
    report_values = {"state": off, "generation": wish["generation"], "version": "7"} | report_values
    host = Host.objects.get(pk=command.host_id)
    if outcome == "succeeded":
        apply_report(host, DriverReport(command.arguments["driver"], **report_values), seq=host.applied_seq + 1)
    command_queue.store_answers([CommandAnswer(command.host_id, command.id, outcome, text)])
    while command_endings.end_answered_commands():
        pass


def list_step_states(rollout: Rollout) -> list[str]:
    return [*rollout.steps.order_by("id").values_list("state", flat=True)]


def get_host_driver(host: Host, driver: str = DRIVER) -> HostDriver:
    return HostDriver.objects.select_related("wish").get(host=host, driver=driver)


@pytest.mark.django_db(transaction=True)
def test_a_configuration_ends_although_the_job_of_the_rollouts_cannot_be_woken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> None:
        raise OperationalError("PostgreSQL is being restarted")

    start_rollout(INSTALL, create_hosts(1, DriverReport(DRIVER, state="absent")))
    command = Command.objects.get()
    told: list[str] = []
    monkeypatch.setattr(jobs, "enqueue_job", fail)
    monkeypatch.setattr(command_queue, "publish_changed_commands", told.extend)
    answer_as_agent(command)
    assert told == [str(command.uuid)], "those who wait for the command are told"


def test_a_rollout_installs_changes_and_uninstalls_a_driver_on_a_host() -> None:
    (host,) = create_hosts(1, DriverReport(DRIVER, state="absent"))
    assert (get_host_driver(host).state, get_host_driver(host).wish, get_host_driver(host).drifts) == (
        "absent",
        None,
        False,
    )
    installing = start_rollout(INSTALL, [host], settings={"rules": [{"vendor": "1af4"}]}, reason="new cards")
    command = Command.objects.get()
    assert (command.op, command.actor, command.reason, command.host) == ("configure", "olga", "new cards", host)
    wish = {"generation": 1, "installed": True, "enabled": True, "settings": {"rules": [{"vendor": "1af4"}]}}
    assert command.arguments == {"driver": DRIVER, "wish": wish}
    assert (installing.state, list_step_states(installing), get_host_driver(host).drifts) == (
        "running",
        ["ordered"],
        True,
    )
    answer_as_agent(command)
    assert (run_rollout(installing).state, list_step_states(installing)) == ("done", ["done"])
    assert (get_host_driver(host).state, get_host_driver(host).drifts, get_host_driver(host).seen["version"]) == (
        "ok",
        False,
        "7",
    )
    disabling = start_rollout(UPDATE, [host], enabled=False)
    answer_as_agent(Command.objects.latest("id"))
    assert run_rollout(disabling).state == "done"
    assert (get_host_driver(host).state, get_host_driver(host).wish.settings) == ("disabled", wish["settings"])
    uninstalling = start_rollout(UNINSTALL, [host])
    answer_as_agent(Command.objects.latest("id"))
    assert (run_rollout(uninstalling).state, get_host_driver(host).state, get_host_driver(host).wish.installed) == (
        "done",
        "absent",
        False,
    )
    assert DriverWish.objects.get().settings is None
    generations = (
        Event.objects.filter(action="driver.wanted").order_by("id").values_list("changes__generation", flat=True)
    )
    assert [*generations] == [[None, 1], [None, 2], [None, 3]]
    rollout_events = Event.objects.filter(subject=installing.uuid).order_by("id").values_list("action", flat=True)
    assert [*rollout_events] == ["rollout.started", "rollout.host_done", "rollout.done"]


def test_a_host_that_already_has_the_wanted_driver_gets_no_command() -> None:
    (host,) = create_hosts(1, DriverReport(DRIVER, state="absent"))
    start_rollout(INSTALL, [host])
    answer_as_agent(Command.objects.get())
    again = start_rollout(INSTALL, [host])
    assert (again.state, list_step_states(again)) == ("done", ["done"])
    assert again.steps.get().text == "test_driver is configured like this already"
    never = start_rollout(UNINSTALL, [host], driver="other_driver")
    assert list_step_states(never) == ["done"]
    assert never.steps.get().text == "other_driver is not installed there"
    assert Command.objects.count() == 1


def test_a_wish_that_the_agent_refused_is_kept_and_shown_as_drift() -> None:
    (host,) = create_hosts(1, make_driver_report(make_card(1)))
    rollout = start_rollout(UPDATE, [host], settings={"rules": 7})
    device = Device.objects.get()
    assert device.busy_with == Command.objects.get().uuid
    answer_as_agent(Command.objects.get(), "refused", "rules: expected a list; nothing was changed")
    device.refresh_from_db()
    assert device.busy_with is None
    run_rollout(rollout)
    assert (rollout.state, rollout.steps.get().state) == ("stopped", "failed")
    assert rollout.steps.get().text == "rules: expected a list; nothing was changed"
    assert (get_host_driver(host).state, get_host_driver(host).drifts) == ("ok", True)
    start_rollout(UPDATE, [host], settings={"rules": 7})
    assert get_host_driver(host).wish.generation == 2, "asked again, it is told again"


def test_a_rollout_orders_at_most_max_parallel_hosts_and_stops_at_a_failure() -> None:
    on = create_hosts(6, DriverReport(DRIVER, state="absent"))
    rollout = start_rollout(INSTALL, on, max_parallel=2)
    assert list_step_states(rollout) == ["ordered"] * 2 + ["waiting"] * 4
    answer_as_agent(rollout.steps.order_by("id")[0].command)
    assert list_step_states(run_rollout(rollout)) == ["done", "ordered", "ordered", "waiting", "waiting", "waiting"]
    answer_as_agent(rollout.steps.order_by("id")[2].command, "failed", "no such package")
    assert list_step_states(run_rollout(rollout)) == ["done", "ordered", "failed", "skipped", "skipped", "skipped"]
    assert (rollout.state, rollout.ended_at) == ("stopped", None), "one is still under way"
    answer_as_agent(rollout.steps.order_by("id")[1].command)
    assert list_step_states(run_rollout(rollout)) == ["done", "done", "failed", "skipped", "skipped", "skipped"]
    assert (rollout.state, rollout.ended_at is None) == ("stopped", False)
    assert rollout.steps.order_by("id")[3].text == "not begun: another host failed"
    assert Command.objects.count() == 3


def test_a_rollout_without_stop_on_failure_continues_with_all_hosts() -> None:
    on = create_hosts(3, DriverReport(DRIVER, state="absent"))
    rollout = start_rollout(INSTALL, on, max_parallel=1, stop_on_failure=False)
    for outcome in ("failed", "succeeded", "refused"):
        answer_as_agent(rollout.steps.get(state="ordered").command, outcome)
        run_rollout(rollout)
    assert (rollout.state, list_step_states(rollout)) == ("done", ["failed", "done", "failed"])


def test_a_cancelled_rollout_skips_the_remaining_hosts() -> None:
    on = create_hosts(3, DriverReport(DRIVER, state="absent"))
    rollout = start_rollout(INSTALL, on, max_parallel=1)
    driver_rollouts.cancel_rollout(rollout, OLGA)
    driver_rollouts.cancel_rollout(rollout, OLGA)
    assert (run_rollout(rollout).state, rollout.ended_at) == ("cancelled", None)
    answer_as_agent(rollout.steps.get(state="ordered").command)
    assert list_step_states(run_rollout(rollout)) == ["done", "skipped", "skipped"]
    assert rollout.ended_at
    assert rollout.steps.order_by("id")[1].text == "not begun: cancelled by olga"
    assert Event.objects.filter(action="rollout.cancelled", subject=rollout.uuid).count() == 2, "asked, and ended"


def test_a_host_whose_agent_does_not_take_the_command_in_time_fails() -> None:
    (host,) = create_hosts(1, DriverReport(DRIVER, state="absent"))
    rollout = start_rollout(INSTALL, [host])
    with conductor.writing():
        past = datetime.now(UTC) - timedelta(seconds=1)
        Command.objects.update(start_by=past, end_by=past)
    command_endings.end_late_commands()
    assert list_step_states(run_rollout(rollout)) == ["failed"]
    assert rollout.steps.get().text == "the agent of cmp0 did not accept it in time"


@pytest.mark.slow
def test_S1_changing_a_driver_whose_devices_are_held_is_refused(fill: Fill) -> None:
    (host,) = fill(10)
    held = Device.objects.filter(deployables__attach_handles__request__isnull=False).first()
    for op, change in ((UNINSTALL, {}), (UPDATE, {"enabled": False}), (UPDATE, {"settings": {}}), (INSTALL, {})):
        with pytest.raises(RefusedError, match=r"is held by request .* of instance .* cannot be") as refused:
            start_rollout(op, [host], driver="pci_driver", **change)
        assert refused.value.reason == RefusalReason.IN_USE
    assert held is not None
    assert not DriverWish.objects.exists()
    assert not Rollout.objects.filter(driver="pci_driver").exists()
    other = create_hosts(1, DriverReport("pci_driver", state="absent"))
    rollout = start_rollout(UNINSTALL, [host, *other], driver="pci_driver")
    assert (rollout.state, list_step_states(rollout)) == ("stopped", ["failed", "skipped"])


def test_S1_changing_a_driver_is_refused_while_a_holder_check_gets_no_answer() -> None:
    (host,) = create_hosts(1, make_driver_report(make_card(1)))
    unknown = safety.HolderCheckResult(unknown="it does not answer")
    with (
        safety.HOLDER_CHECKS.replaced("nova", answer_each(lambda device: unknown)),
        pytest.raises(RefusedError, match=r"unknown whether device .* is held \(nova: it does not answer\)") as refused,
    ):
        start_rollout(UNINSTALL, [host])
    assert refused.value.reason == RefusalReason.UNAVAILABLE


def test_S1_changing_a_driver_is_refused_if_the_holder_checks_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Device] = []
    (host,) = create_hosts(1, make_driver_report(make_card(1), make_card(2)))
    monkeypatch.setattr(safety, "HOLDER_CHECKS_TIMEOUT_S", -1.0)
    with (
        safety.HOLDER_CHECKS.replaced(
            "nova", answer_each(lambda device: asked.append(device) or safety.HolderCheckResult())
        ),
        pytest.raises(RefusedError, match="there was no time left to ask: try again") as refused,
    ):
        start_rollout(UNINSTALL, [host])
    assert (refused.value.reason, asked) == (RefusalReason.UNAVAILABLE, [])
    assert not Rollout.objects.exists()


def test_enabling_a_disabled_driver_is_refused_while_its_device_is_busy_with_a_command() -> None:
    (host,) = create_hosts(1, make_driver_report(make_card(1)))
    start_rollout(UPDATE, [host], enabled=False)
    answer_as_agent(Command.objects.get())
    with conductor.writing():
        Device.objects.update(busy_with=UNKNOWN_COMMAND)
    with pytest.raises(RefusedError, match=f"is busy .command {UNKNOWN_COMMAND}.") as refused:
        start_rollout(UPDATE, [host], enabled=True)
    assert refused.value.reason == RefusalReason.CONFLICT
    assert str(Device.objects.get().busy_with) == UNKNOWN_COMMAND


def test_a_step_whose_command_was_deleted_fails_and_does_not_block_later_rollouts() -> None:
    (host,) = create_hosts(1, DriverReport(DRIVER, state="absent"))
    rollout = start_rollout(INSTALL, [host])
    with conductor.writing(), connection.cursor() as cursor:
        cursor.execute("DELETE FROM accelerators_command")
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
    assert list_step_states(run_rollout(rollout)) == ["failed"]
    assert rollout.steps.get().text == "its command no longer exists"
    assert start_rollout(UPDATE, [host], settings={"a": 1}).state == "running"


def test_a_device_is_busy_and_its_driver_is_locked_while_the_driver_is_being_changed() -> None:
    (host,) = create_hosts(1, make_driver_report(make_card(1, acts="reset")))
    device = Device.objects.get()
    start_rollout(UPDATE, [host], settings={"a": 1})
    with pytest.raises(RefusedError, match="is busy with configure"):
        command_queue.order_device_command("reset", device.uuid, OLGA)
    with pytest.raises(RefusedError, match="is being changed"):
        start_rollout(UPDATE, [host], settings={"a": 2})
    answer_as_agent(Command.objects.get(), "failed")
    assert start_rollout(UPDATE, [host], settings={"a": 2}).state == "running"


def test_devices_of_a_disabled_driver_are_missing_and_return_when_it_is_enabled() -> None:
    (host,) = create_hosts(1, make_driver_report(make_card(1)))
    with conductor.writing():
        Device.objects.update(state="ready")
    start_rollout(UPDATE, [host], enabled=False)
    answer_as_agent(Command.objects.get())
    device = Device.objects.select_related("host").get()
    assert (device.state, device.returns_to) == ("missing", "ready")
    assert device.state_reason == "test_driver is disabled on its host"
    assert device.host.stale_reason(DRIVER) == ""
    assert not retention_sweep._query_removable_devices(datetime.now(UTC) + timedelta(days=99)), (
        "however long it is off"
    )
    start_rollout(UPDATE, [host], enabled=True)
    command = Command.objects.latest("id")
    answer_as_agent(command, devices=(make_card(1),))
    device.refresh_from_db()
    assert device.state == "ready"
    start_rollout(UNINSTALL, [host])
    answer_as_agent(Command.objects.latest("id"))
    assert [*retention_sweep._query_removable_devices(datetime.now(UTC) + timedelta(days=1))] == [device], (
        "for good: it goes some day"
    )
    with conductor.writing():
        Host.objects.update(drivers={DRIVER: {"error": ""}})
    assert retention_sweep._query_removable_devices(datetime.now(UTC) + timedelta(days=1)), (
        "older agents do not say how a driver stands"
    )


def test_devices_of_a_driver_that_only_the_hosts_file_disables_are_kept_as_stale() -> None:
    (host,) = create_hosts(1, make_driver_report(make_card(1)))
    apply_report(host, DriverReport(DRIVER, state="absent"), seq=2)
    device = Device.objects.select_related("host").get()
    assert device.state == "inactive"
    assert device.host.stale_reason(DRIVER) == "test_driver: no longer enabled on this host"
    assert get_host_driver(host).state == "absent"


def test_a_drivers_state_version_and_generation_are_stored_with_its_error() -> None:
    (host,) = create_hosts(1, DriverReport(DRIVER, "it broke 5 times", state="quarantined", version="3", generation=4))
    (entry,) = Host.objects.get(pk=host.pk).drivers.values()
    assert {name: entry[name] for name in ("error", "state", "version", "generation")} == {
        "error": "it broke 5 times",
        "state": "quarantined",
        "version": "3",
        "generation": 4,
    }
    assert driver_status.driver_state_of({"error": "x"}) == "failed"
    assert driver_status.driver_state_of({"error": ""}) == "ok"
    rollout = start_rollout(UPDATE, [host], enabled=True)
    assert Command.objects.get().arguments["wish"]["generation"] == 5, "above what the agent has, whoever said it"
    assert list_step_states(rollout) == ["ordered"]


RefusedChange = tuple[DriverChange, str]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (DriverChange(INSTALL, "no driver"), "Give the driver's name"),
        (DriverChange(UNINSTALL, "d", enabled=True), "takes neither"),
        (DriverChange(UPDATE, "d"), "Say what to change"),
        (DriverChange(INSTALL, "d", settings={"acts": []}), "on the host itself"),
        (
            DriverChange(INSTALL, "d", settings={"rules": [{"db_password": "x"}]}),
            r"settings.rules\[0\].db_password looks like",
        ),
        (DriverChange(INSTALL, "d", settings={"API-key": "x"}), "looks like a secret"),
        (DriverChange(INSTALL, "d", settings={"a": "\0"}), "cannot be stored"),
        (DriverChange(INSTALL, "d", settings={"a": float("inf")}), "out of range"),
        (DriverChange(INSTALL, "d", settings={"a": [[[[[[[[[1]]]]]]]]]}), "nested at most 8"),
        (DriverChange(INSTALL, "d", settings={"a": "x" * 65_536}), "at most 65536 bytes"),
        (DriverChange(INSTALL, "d", settings={"token": "x" * 65_536}), "at most 65536 bytes"),
        (DriverChange(INSTALL, "d", settings={"a": "\ud800"}), "cannot be stored"),
        (DriverChange(INSTALL, "d", settings={"a": datetime.now(UTC)}), "JSON has no datetime"),
        (DriverChange(INSTALL, "d", settings={"a": 1 << 20_000}), "numbers must fit into 64 bits"),
    ],
)
def test_invalid_driver_changes_are_refused_with_a_message(change: DriverChange, says: str) -> None:
    with pytest.raises(RefusedError, match=says) as refused:
        check_driver_change(change)
    assert refused.value.reason == RefusalReason.INVALID


def test_hosts_are_chosen_by_name_pattern_and_driver() -> None:
    one, two, three = create_hosts(3, DriverReport(DRIVER, state="absent"))
    apply_report(two, make_driver_report(make_card(1)), seq=2)
    start_rollout(INSTALL, [three], driver="far_driver")
    assert driver_rollouts.select_hosts(["cmp2", "cmp0"]) == [one, three]
    assert driver_rollouts.select_hosts(selector={"all": True}) == [one, two, three]
    assert driver_rollouts.select_hosts(selector={"name": "*[12]"}) == [two, three]
    assert driver_rollouts.select_hosts(selector={"driver": DRIVER}) == [two]
    assert driver_rollouts.select_hosts(selector={"driver": "far_driver", "name": "cmp*"}) == [three]
    for names, selector in (([], None), (["cmp0"], {"all": True}), (["nope"], None), ([], {"name": "x*"})):
        with pytest.raises(RefusedError) as refused:
            driver_rollouts.select_hosts(names, selector)
        assert refused.value.reason == RefusalReason.INVALID
    for selector in ({"all": False}, {"name": 7}, {"driver": ""}, {"zone": "a"}):
        with pytest.raises(RefusedError, match="A selector is"):
            driver_rollouts.select_hosts(selector=selector)


def test_old_rollouts_are_deleted() -> None:
    (host,) = create_hosts(1, DriverReport(DRIVER, state="absent"))
    start_rollout(UNINSTALL, [host])
    assert not driver_rollouts.delete_oldest_ended_rollout()
    assert driver_rollouts.delete_oldest_ended_rollout(
        datetime.now(UTC) + driver_rollouts.ROLLOUT_RETENTION + timedelta(days=1)
    )
    assert not Rollout.objects.exists()
