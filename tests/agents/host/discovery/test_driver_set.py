"""Tests of driver changes while the agent runs: tried before they are stored, refused while in use, kept after kill."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
from pathlib import Path

import pytest

from agents import wire
from agents.host.discovery.driver_set import DriverSet, DriverSettings
from agents.host.journal.journal import JOURNAL_FILE, open_journal
from drivers.inventory import DriverReport
from drivers.isolation.runner import DriverProcess
from tests.agents.host.execution.executor_host import HOST, make_command
from tests.agents.host.fake_gateway import FakeGateway, wait_until
from tests.agents.host.test_main import collect_log_lines, join_token, running_agent

CONSUMER = {"uuid": "0b0f2f24-7a1a-4c64-9c9d-0d1f6a2b3c4d", "consumer": "7d3c6f61-7a1a-4c64-9c9d-0d1f6a2b3c4e"}


class AgentCommander:
    """Sends commands to the agent that is connected to the fake gateway, and waits for each result."""

    def __init__(self, server: FakeGateway) -> None:
        self.server, self.number = server, 0

    async def run_command(self, op: str, key: str = "", **more: object) -> wire.Result:
        self.number += 1
        await self.server.send_to_agent(make_command(self.number, op, key=key, **({"driver": "fake_driver"} | more)))
        await wait_until(lambda: self.server.results and self.server.results[-1].number == self.number)
        return self.server.results[-1]

    async def configure_driver(self, generation: int, driver: str = "fake_driver", **more: object) -> wire.Result:
        return await self.run_command("configure", driver=driver, wish=wire.Wish(generation, **more))  # type: ignore[arg-type]

    def reported_driver(self, name: str = "fake_driver") -> DriverReport:
        return next(one for one in self.server.reports[-1].all_drivers if one.driver == name)


async def check_disabling(commander: AgentCommander) -> None:
    assert (await commander.run_command("rescan")).text == "fake_driver: 3 devices, 0 faults", "after a restart, too"
    assert (await commander.configure_driver(5, enabled=False)).text == "fake_driver is disabled"
    assert (commander.reported_driver().state, commander.reported_driver().devices) == ("disabled", ())
    assert "not enabled on this host" in (await commander.run_command("rescan")).text
    assert (await commander.run_command("rescan", driver="")).text == "no driver runs on this host"


async def check_uninstalling(commander: AgentCommander) -> None:
    assert (await commander.configure_driver(6, installed=False)).text == "fake_driver is uninstalled"
    assert (commander.reported_driver().state, commander.reported_driver().generation) == ("absent", 6)
    assert (await commander.configure_driver(7)).outcome == "succeeded"
    assert len(commander.reported_driver().devices) == 1, "by the host's own file, as no settings were said"


@pytest.mark.system
def test_a_driver_is_reconfigured_disabled_and_uninstalled_and_each_change_survives_kill_9(tmp_path: Path) -> None:
    first, second, broken = (tmp_path / f"{name}.json" for name in ("first", "second", "broken"))
    first.write_text(json.dumps({"handle_type": "MDEV", "handles": 2}))
    second.write_text(json.dumps({"count": 3}))
    broken.write_text("{")
    file = tmp_path / "drivers.toml"
    file.write_text(f'[fake_driver]\ncontrol_file = "{first}"\nacts = ["attach", "detach"]\n')

    async def changed(told: AgentCommander) -> None:
        assert (told.reported_driver().version, told.reported_driver().state, told.reported_driver().generation) == (
            "1",
            "",
            0,
        )
        assert told.reported_driver("pci_driver").state == "absent", "what could be run is told as well"
        asked = [one.driver for one in told.server.reports[-1].drivers]
        assert asked == ["fake_driver"], "but not where an older conductor finds those that answered"
        said = await told.configure_driver(1, settings={"control_file": str(broken)})
        assert said.outcome == "refused"
        assert "the driver fails with these settings, so nothing was changed" in said.text
        assert (len(told.reported_driver().devices), told.reported_driver().generation) == (1, 0)
        device = told.reported_driver().devices[0]
        handle = device.deployables[0].handles[0]
        assert (await told.run_command("attach", device.key, handle=handle, **CONSUMER)).outcome == "succeeded"
        said = await told.configure_driver(2, settings={"control_file": str(second)})
        assert (said.outcome, said.text.endswith("detach it first")) == ("refused", True)
        assert (await told.run_command("detach", device.key, handle=handle, **CONSUMER)).outcome == "succeeded"
        said = await told.configure_driver(3, settings={"control_file": str(second)})
        assert (said.outcome, said.text.split(";")[0]) == ("succeeded", "fake_driver is enabled")
        assert (len(told.reported_driver().devices), told.reported_driver().generation) == (3, 3)
        assert said.seq == told.server.reports[-1].seq, "the report goes before the result"
        key = told.reported_driver().devices[0].key
        assert "do not allow the act 'reset'" in (await told.run_command("reset", key)).text, (
            "what the host's own file says holds"
        )
        assert (
            "only in this host's own CYBORG_DRIVER_SETTINGS"
            in (await told.configure_driver(4, settings={"acts": ["reset"]})).text
        )
        assert "already has the wanted state of generation 3" in (await told.configure_driver(3)).text
        missing = await told.configure_driver(1, "far_driver")
        assert "far_driver is not installed on this host (installed: amd_gpu_driver, fake_driver" in missing.text
        assert "pip install PACKAGE" in missing.text

    async def story() -> None:
        server = FakeGateway()
        async with server.open():
            keys = {"CYBORG_JOIN_TOKEN": join_token(server), "CYBORG_DRIVER_SETTINGS": str(file)}
            told = AgentCommander(server)
            for chapter in (changed, check_disabling, check_uninstalling):
                hellos = len(server.hellos)
                async with running_agent(tmp_path, **keys) as agent:
                    collect_log_lines(agent)
                    await wait_until(lambda hellos=hellos: len(server.hellos) > hellos and server.reports)
                    await chapter(told)
                    agent.send_signal(signal.SIGKILL)
                    await agent.wait()

    asyncio.run(story())


def make_roster(directory: Path) -> DriverSet:
    """Return a driver set that can run the drivers a and b; the host's own configuration enables only a."""
    make = lambda name, settings: DriverProcess(name, "n", settings)  # noqa: E731
    return DriverSet(["a"], {"a": {"x": 1}}, open_journal(directory, HOST).desired_drivers, make, lambda: ("a", "b"))


def test_the_result_of_an_interrupted_driver_change_follows_from_the_journal(tmp_path: Path) -> None:
    open_journal(tmp_path, HOST).desired_drivers.store_desired_state("b", wire.Wish(2))
    asked = [make_command(n, "configure", driver="b", wish=wire.Wish(n)) for n in (2, 3)]
    assert [make_roster(tmp_path).determine_configure_result(one)[0] for one in asked] == ["succeeded", "refused"]
    assert [*make_roster(tmp_path).running] == ["a", "b"]


def test_a_desired_state_without_settings_keeps_those_of_the_hosts_own_file(tmp_path: Path) -> None:
    open_journal(tmp_path, HOST).desired_drivers.store_desired_state("a", wire.Wish(2))
    started: list[tuple[str, object]] = []

    def start(name: str, settings: DriverSettings) -> DriverProcess:
        started.append((name, settings))
        return DriverProcess(name, "n", settings)

    DriverSet(["a"], {"a": {"x": 1}}, open_journal(tmp_path, HOST).desired_drivers, start, lambda: ("a",))
    assert started == [("a", {"x": 1})]


def test_a_wanted_driver_without_its_package_is_reported_as_failing(tmp_path: Path) -> None:
    open_journal(tmp_path, HOST).desired_drivers.store_desired_state("gone", wire.Wish(1))
    (a, gone, b) = make_roster(tmp_path).complete_reports(
        [DriverReport("a"), DriverReport("gone", "there is no driver 'gone'")]
    )
    assert (a.state, gone.error, gone.generation) == ("", "there is no driver 'gone'", 1)
    assert (b.driver, b.state) == ("b", "absent")


def test_a_journal_without_desired_states_opens_and_an_unreadable_one_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_journal(tmp_path, HOST).close()
    with sqlite3.connect(tmp_path / JOURNAL_FILE) as connection:
        connection.execute("DROP TABLE wish")
    journal = open_journal(tmp_path, HOST)
    assert journal.desired_drivers.list_drivers() == ()
    with sqlite3.connect(tmp_path / JOURNAL_FILE) as connection:
        connection.execute("INSERT INTO wish VALUES ('a', '[]')")
    assert open_journal(tmp_path, HOST).desired_drivers.get_desired_state("a") is None
    assert "cannot be read" in caplog.text
