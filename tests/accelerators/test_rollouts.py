"""Drivers on hosts: wanted, told once, brought to many hosts with care; never taken from under a request."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection

from accelerators import conductor, safety
from accelerators.commands import placing
from accelerators.commands.placing import Answer
from accelerators.domain import driver_status
from accelerators.domain.caller import Caller
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import RolloutOp, Source
from accelerators.models import Command, Device, DriverWish, Event, Host, HostDriver, Rollout
from accelerators.workflows import command_results, driver_config, driver_rollouts, sweep
from accelerators.workflows.driver_config import Change, check
from accelerators.workflows.driver_rollouts import Pace
from drivers.inventory import DriverReport
from tests.own.conftest import Fill, fill
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db
OLGA = Caller("olga", "u", frozenset({"admin"}), "p1")
INSTALL, UPDATE, UNINSTALL = RolloutOp
DRIVER = "test_driver"
NOBODY = "00000000-0000-4000-8000-000000000000"
__all__ = ["fill"]


def hosts(number: int, *said: DriverReport) -> list[Host]:
    """So many of them, each with the same drivers."""
    made = [a_host(f"cmp{n}") for n in range(number)]
    for host in made:
        apply(host, *said)
    return made


def begin(op: RolloutOp, on: list[Host], driver: str = DRIVER, reason: str = "", **asked: Any) -> Rollout:
    """Start it and let the job do what it can."""
    change = {name: asked.pop(name) for name in ("enabled", "settings") if name in asked}
    made = driver_rollouts.start(
        Change(op, driver, **change), on, OLGA, pace=Pace(**asked), reason=reason, source=Source.PERSON
    )
    return work(made)


def work(rollout: Rollout) -> Rollout:
    """The job, until it has nothing left to do."""
    while driver_rollouts.step():
        pass
    rollout.refresh_from_db()
    return rollout


def said(command: Command | None, outcome: str = "succeeded", text: str = "it runs", **stands: Any) -> None:
    """The agent reports how its driver stands, and answers."""
    assert command is not None
    wish = command.arguments["wish"]
    off = "" if wish["installed"] and wish["enabled"] else "disabled" if wish["installed"] else "absent"
    stands = {"state": off, "generation": wish["generation"], "version": "7"} | stands
    host = Host.objects.get(pk=command.host_id)
    if outcome == "succeeded":
        apply(host, DriverReport(command.arguments["driver"], **stands), seq=host.applied_seq + 1)
    placing.answer([Answer(command.host_id, command.id, outcome, text)])
    while command_results.settle():
        pass


def states(rollout: Rollout) -> list[str]:
    return [*rollout.steps.order_by("id").values_list("state", flat=True)]


def row(host: Host, driver: str = DRIVER) -> HostDriver:
    return HostDriver.objects.select_related("wish").get(host=host, driver=driver)


def test_a_driver_is_installed_changed_and_uninstalled_on_one_host() -> None:
    (host,) = hosts(1, DriverReport(DRIVER, state="absent"))
    assert (row(host).state, row(host).wish, row(host).drifts) == ("absent", None, False)
    installing = begin(INSTALL, [host], settings={"rules": [{"vendor": "1af4"}]}, reason="new cards")
    command = Command.objects.get()
    assert (command.op, command.actor, command.reason, command.host) == ("configure", "olga", "new cards", host)
    wish = {"generation": 1, "installed": True, "enabled": True, "settings": {"rules": [{"vendor": "1af4"}]}}
    assert command.arguments == {"driver": DRIVER, "wish": wish}
    assert (installing.state, states(installing), row(host).drifts) == ("running", ["ordered"], True)
    said(command)
    assert (work(installing).state, states(installing)) == ("done", ["done"])
    assert (row(host).state, row(host).drifts, row(host).seen["version"]) == ("ok", False, "7")
    off = begin(UPDATE, [host], enabled=False)
    said(Command.objects.latest("id"))
    assert work(off).state == "done"
    assert (row(host).state, row(host).wish.settings) == ("disabled", wish["settings"])
    gone = begin(UNINSTALL, [host])
    said(Command.objects.latest("id"))
    assert (work(gone).state, row(host).state, row(host).wish.installed) == ("done", "absent", False)
    assert DriverWish.objects.get().settings is None
    told = Event.objects.filter(action="driver.wanted").order_by("id").values_list("changes__generation", flat=True)
    assert [*told] == [[None, 1], [None, 2], [None, 3]]
    ended = Event.objects.filter(subject=installing.uuid).order_by("id").values_list("action", flat=True)
    assert [*ended] == ["rollout.started", "rollout.host_done", "rollout.done"]


def test_what_is_so_already_is_not_told_again() -> None:
    (host,) = hosts(1, DriverReport(DRIVER, state="absent"))
    begin(INSTALL, [host])
    said(Command.objects.get())
    again = begin(INSTALL, [host])
    assert (again.state, states(again)) == ("done", ["done"])
    assert again.steps.get().text == "test_driver is configured like this already"
    never = begin(UNINSTALL, [host], driver="other_driver")
    assert states(never) == ["done"]
    assert never.steps.get().text == "other_driver is not installed there"
    assert Command.objects.count() == 1


def test_a_wish_that_the_agent_refused_stays_and_is_shown_as_not_so() -> None:
    (host,) = hosts(1, answer(card(1)))
    rollout = begin(UPDATE, [host], settings={"rules": 7})
    device = Device.objects.get()
    assert device.busy_with == Command.objects.get().uuid
    said(Command.objects.get(), "refused", "rules: expected a list; nothing was changed")
    device.refresh_from_db()
    assert device.busy_with is None
    work(rollout)
    assert (rollout.state, rollout.steps.get().state) == ("stopped", "failed")
    assert rollout.steps.get().text == "rules: expected a list; nothing was changed"
    assert (row(host).state, row(host).drifts) == ("ok", True)
    begin(UPDATE, [host], settings={"rules": 7})
    assert row(host).wish.generation == 2, "asked again, it is told again"


def test_max_parallel_and_stop_on_failure() -> None:
    on = hosts(6, DriverReport(DRIVER, state="absent"))
    rollout = begin(INSTALL, on, max_parallel=2)
    assert states(rollout) == ["ordered"] * 2 + ["waiting"] * 4
    said(rollout.steps.order_by("id")[0].command)
    assert states(work(rollout)) == ["done", "ordered", "ordered", "waiting", "waiting", "waiting"]
    said(rollout.steps.order_by("id")[2].command, "failed", "no such package")
    assert states(work(rollout)) == ["done", "ordered", "failed", "skipped", "skipped", "skipped"]
    assert (rollout.state, rollout.ended_at) == ("stopped", None), "one is still under way"
    said(rollout.steps.order_by("id")[1].command)
    assert states(work(rollout)) == ["done", "done", "failed", "skipped", "skipped", "skipped"]
    assert (rollout.state, rollout.ended_at is None) == ("stopped", False)
    assert rollout.steps.order_by("id")[3].text == "not begun: another host failed"
    assert Command.objects.count() == 3


def test_a_rollout_that_does_not_stop_goes_through_all() -> None:
    on = hosts(3, DriverReport(DRIVER, state="absent"))
    rollout = begin(INSTALL, on, max_parallel=1, stop_on_failure=False)
    for outcome in ("failed", "succeeded", "refused"):
        said(rollout.steps.get(state="ordered").command, outcome)
        work(rollout)
    assert (rollout.state, states(rollout)) == ("done", ["failed", "done", "failed"])


def test_cancelled_the_rest_is_not_begun() -> None:
    on = hosts(3, DriverReport(DRIVER, state="absent"))
    rollout = begin(INSTALL, on, max_parallel=1)
    driver_rollouts.cancel(rollout, OLGA)
    driver_rollouts.cancel(rollout, OLGA)
    assert (work(rollout).state, rollout.ended_at) == ("cancelled", None)
    said(rollout.steps.get(state="ordered").command)
    assert states(work(rollout)) == ["done", "skipped", "skipped"]
    assert rollout.ended_at
    assert rollout.steps.order_by("id")[1].text == "not begun: cancelled by olga"
    assert Event.objects.filter(action="rollout.cancelled", subject=rollout.uuid).count() == 2, "asked, and ended"


def test_a_host_whose_agent_does_not_come_fails_with_that_reason() -> None:
    (host,) = hosts(1, DriverReport(DRIVER, state="absent"))
    rollout = begin(INSTALL, [host])
    with conductor.writing():
        past = datetime.now(UTC) - timedelta(seconds=1)
        Command.objects.update(start_by=past, end_by=past)
    command_results.expire()
    assert states(work(rollout)) == ["failed"]
    assert rollout.steps.get().text == "the agent of cmp0 did not accept it in time"


def test_S1_a_driver_whose_devices_are_held_is_left_alone(fill: Fill) -> None:
    (host,) = fill(10)
    held = Device.objects.filter(deployables__attach_handles__request__isnull=False).first()
    for op, change in ((UNINSTALL, {}), (UPDATE, {"enabled": False}), (UPDATE, {"settings": {}}), (INSTALL, {})):
        with pytest.raises(RefusedError, match=r"is held by request .* of instance .* cannot be") as refused:
            begin(op, [host], driver="pci_driver", **change)
        assert refused.value.reason == Reason.HELD
    assert held is not None
    assert not DriverWish.objects.exists()
    assert not Rollout.objects.filter(driver="pci_driver").exists()
    other = hosts(1, DriverReport("pci_driver", state="absent"))
    rollout = begin(UNINSTALL, [host, *other], driver="pci_driver")
    assert (rollout.state, states(rollout)) == ("stopped", ["failed", "skipped"])


def test_S1_a_driver_is_left_alone_while_a_witness_cannot_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    (host,) = hosts(1, answer(card(1)))
    monkeypatch.setitem(safety._witnesses, "nova", lambda device: safety.HolderCheck(unknown="it does not answer"))
    with pytest.raises(
        RefusedError, match=r"unknown whether device .* is held \(nova: it does not answer\)"
    ) as refused:
        begin(UNINSTALL, [host])
    assert refused.value.reason == Reason.AWAY


def test_S1_many_devices_are_asked_about_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Device] = []
    monkeypatch.setitem(safety._witnesses, "nova", lambda device: asked.append(device) or safety.HolderCheck())
    (host,) = hosts(1, answer(card(1), card(2)))
    monkeypatch.setattr(driver_config, "PATIENCE_S", -1.0)
    with pytest.raises(RefusedError, match="took too long: try again") as refused:
        begin(UNINSTALL, [host])
    assert (refused.value.reason, asked) == (Reason.AWAY, [])
    assert not Rollout.objects.exists()


def test_a_device_of_a_driver_that_is_off_stays_busy_with_its_own_command() -> None:
    (host,) = hosts(1, answer(card(1)))
    begin(UPDATE, [host], enabled=False)
    said(Command.objects.get())
    with conductor.writing():
        Device.objects.update(busy_with=NOBODY)
    with pytest.raises(RefusedError, match=f"is busy .command {NOBODY}.") as refused:
        begin(UPDATE, [host], enabled=True)
    assert refused.value.reason == Reason.CONFLICT
    assert str(Device.objects.get().busy_with) == NOBODY


def test_a_command_that_an_older_release_forgot_is_in_nobodys_way() -> None:
    (host,) = hosts(1, DriverReport(DRIVER, state="absent"))
    rollout = begin(INSTALL, [host])
    with conductor.writing(), connection.cursor() as cursor:
        cursor.execute("DELETE FROM accelerators_command")
        cursor.execute("SET CONSTRAINTS ALL IMMEDIATE")
    assert states(work(rollout)) == ["failed"]
    assert rollout.steps.get().text == "its command no longer exists"
    assert begin(UPDATE, [host], settings={"a": 1}).state == "running"


def test_nothing_is_bound_to_a_device_while_its_driver_is_changed() -> None:
    (host,) = hosts(1, answer(card(1, acts="reset")))
    device = Device.objects.get()
    begin(UPDATE, [host], settings={"a": 1})
    with pytest.raises(RefusedError, match="is busy with configure"):
        placing.ask("reset", device.uuid, OLGA)
    with pytest.raises(RefusedError, match="is being changed"):
        begin(UPDATE, [host], settings={"a": 2})
    said(Command.objects.get(), "failed")
    assert begin(UPDATE, [host], settings={"a": 2}).state == "running"


def test_devices_of_a_driver_that_was_turned_off_are_missing_and_come_back() -> None:
    (host,) = hosts(1, answer(card(1)))
    with conductor.writing():
        Device.objects.update(state="ready")
    begin(UPDATE, [host], enabled=False)
    said(Command.objects.get())
    device = Device.objects.select_related("host").get()
    assert (device.state, device.returns_to) == ("missing", "ready")
    assert device.state_reason == "test_driver is disabled on its host"
    assert device.host.why_stale(DRIVER) == ""
    assert not sweep._removable(datetime.now(UTC) + timedelta(days=99)), "however long it is off"
    begin(UPDATE, [host], enabled=True)
    command = Command.objects.latest("id")
    said(command, devices=(card(1),))
    device.refresh_from_db()
    assert device.state == "ready"
    begin(UNINSTALL, [host])
    said(Command.objects.latest("id"))
    assert [*sweep._removable(datetime.now(UTC) + timedelta(days=1))] == [device], "for good: it goes some day"
    with conductor.writing():
        Host.objects.update(drivers={DRIVER: {"error": ""}})
    assert sweep._removable(datetime.now(UTC) + timedelta(days=1)), "older agents do not say how a driver stands"


def test_what_only_the_hosts_own_file_leaves_out_keeps_its_devices() -> None:
    (host,) = hosts(1, answer(card(1)))
    apply(host, DriverReport(DRIVER, state="absent"), seq=2)
    device = Device.objects.select_related("host").get()
    assert device.state == "inactive"
    assert device.host.why_stale(DRIVER) == "test_driver: no longer enabled on this host"
    assert row(host).state == "absent"


def test_how_a_driver_stands_is_kept_beside_its_answer() -> None:
    (host,) = hosts(1, DriverReport(DRIVER, "it broke 5 times", state="quarantined", version="3", generation=4))
    (entry,) = Host.objects.get(pk=host.pk).drivers.values()
    assert {name: entry[name] for name in ("error", "state", "version", "generation")} == {
        "error": "it broke 5 times",
        "state": "quarantined",
        "version": "3",
        "generation": 4,
    }
    assert driver_status.state_of({"error": "x"}) == "failed"
    assert driver_status.state_of({"error": ""}) == "ok"
    rollout = begin(UPDATE, [host], enabled=True)
    assert Command.objects.get().arguments["wish"]["generation"] == 5, "above what the agent has, whoever said it"
    assert states(rollout) == ["ordered"]


Bad = tuple[Change, str]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (Change(INSTALL, "no driver"), "Give the driver's name"),
        (Change(UNINSTALL, "d", enabled=True), "takes neither"),
        (Change(UPDATE, "d"), "Say what to change"),
        (Change(INSTALL, "d", settings={"acts": []}), "on the host itself"),
        (
            Change(INSTALL, "d", settings={"rules": [{"db_password": "x"}]}),
            r"settings.rules\[0\].db_password looks like",
        ),
        (Change(INSTALL, "d", settings={"API-key": "x"}), "looks like a secret"),
        (Change(INSTALL, "d", settings={"a": "\0"}), "cannot be stored"),
        (Change(INSTALL, "d", settings={"a": float("inf")}), "out of range"),
        (Change(INSTALL, "d", settings={"a": [[[[[[[[[1]]]]]]]]]}), "nested at most 8"),
        (Change(INSTALL, "d", settings={"a": "x" * 65_536}), "at most 65536 bytes"),
        (Change(INSTALL, "d", settings={"token": "x" * 65_536}), "at most 65536 bytes"),
        (Change(INSTALL, "d", settings={"a": "\ud800"}), "cannot be stored"),
        (Change(INSTALL, "d", settings={"a": datetime.now(UTC)}), "JSON has no datetime"),
        (Change(INSTALL, "d", settings={"a": 1 << 20_000}), "numbers must fit into 64 bits"),
    ],
)
def test_what_makes_no_sense(change: Change, says: str) -> None:
    with pytest.raises(RefusedError, match=says) as refused:
        check(change)
    assert refused.value.reason == Reason.INVALID


Choice = Callable[[], list[Host]]


def test_hosts_are_chosen_by_name_pattern_and_driver() -> None:
    one, two, three = hosts(3, DriverReport(DRIVER, state="absent"))
    apply(two, answer(card(1)), seq=2)
    begin(INSTALL, [three], driver="far_driver")
    assert driver_rollouts.choose(["cmp2", "cmp0"]) == [one, three]
    assert driver_rollouts.choose(selector={"all": True}) == [one, two, three]
    assert driver_rollouts.choose(selector={"name": "*[12]"}) == [two, three]
    assert driver_rollouts.choose(selector={"driver": DRIVER}) == [two]
    assert driver_rollouts.choose(selector={"driver": "far_driver", "name": "cmp*"}) == [three]
    for names, selector in (([], None), (["cmp0"], {"all": True}), (["nope"], None), ([], {"name": "x*"})):
        with pytest.raises(RefusedError) as refused:
            driver_rollouts.choose(names, selector)
        assert refused.value.reason == Reason.INVALID
    for selector in ({"all": False}, {"name": 7}, {"driver": ""}, {"zone": "a"}):
        with pytest.raises(RefusedError, match="A selector is"):
            driver_rollouts.choose(selector=selector)


def test_old_ones_are_forgotten() -> None:
    (host,) = hosts(1, DriverReport(DRIVER, state="absent"))
    begin(UNINSTALL, [host])
    assert not driver_rollouts.forget()
    assert driver_rollouts.forget(datetime.now(UTC) + driver_rollouts.REMEMBERED + timedelta(days=1))
    assert not Rollout.objects.exists()
