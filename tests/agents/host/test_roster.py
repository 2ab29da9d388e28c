"""Drivers changed while the agent runs: tried before they are trusted, left alone while used, remembered."""

from __future__ import annotations

import asyncio
import json
import signal
import sqlite3
from pathlib import Path

import pytest

from agents import wire
from agents.host.discovery.driver_set import DriverSet
from agents.host.journal.journal import JOURNAL_FILE, open_journal
from drivers.inventory import DriverReport
from drivers.isolation.runner import DriverProcess
from tests.agents.host.standin import StandIn, until
from tests.agents.host.test_main import daemon, lines_of, token
from tests.agents.host.workshop import HOST, command

CONSUMER = {"uuid": "0b0f2f24-7a1a-4c64-9c9d-0d1f6a2b3c4d", "consumer": "7d3c6f61-7a1a-4c64-9c9d-0d1f6a2b3c4e"}


class Told:
    """Orders to the one agent of a stand-in, in turn."""

    def __init__(self, server: StandIn) -> None:
        self.server, self.number = server, 0

    async def order(self, op: str, key: str = "", **more: object) -> wire.Result:
        self.number += 1
        await self.server.order(command(self.number, op, key=key, **({"driver": "fake_driver"} | more)))
        await until(lambda: self.server.results and self.server.results[-1].number == self.number)
        return self.server.results[-1]

    async def wish(self, generation: int, driver: str = "fake_driver", **more: object) -> wire.Result:
        return await self.order("configure", driver=driver, wish=wire.Wish(generation, **more))  # type: ignore[arg-type]

    def driver(self, name: str = "fake_driver") -> DriverReport:
        return next(one for one in self.server.reports[-1].all_drivers if one.driver == name)


async def turned_off(told: Told) -> None:
    assert (await told.order("rescan")).text == "fake_driver: 3 devices, 0 faults", "after a restart, too"
    assert (await told.wish(5, enabled=False)).text == "fake_driver is disabled"
    assert (told.driver().state, told.driver().devices) == ("disabled", ())
    assert "not enabled on this host" in (await told.order("rescan")).text
    assert (await told.order("rescan", driver="")).text == "no driver runs on this host"


async def uninstalled(told: Told) -> None:
    assert (await told.wish(6, installed=False)).text == "fake_driver is uninstalled"
    assert (told.driver().state, told.driver().generation) == ("absent", 6)
    assert (await told.wish(7)).outcome == "succeeded"
    assert len(told.driver().devices) == 1, "by the host's own file, as no settings were said"


@pytest.mark.system
def test_a_driver_is_tried_changed_turned_off_and_stays_so(tmp_path: Path) -> None:
    first, second, broken = (tmp_path / f"{name}.json" for name in ("first", "second", "broken"))
    first.write_text(json.dumps({"handle_type": "MDEV", "handles": 2}))
    second.write_text(json.dumps({"count": 3}))
    broken.write_text("{")
    file = tmp_path / "drivers.toml"
    file.write_text(f'[fake_driver]\ncontrol_file = "{first}"\nacts = ["attach", "detach"]\n')

    async def changed(told: Told) -> None:
        assert (told.driver().version, told.driver().state, told.driver().generation) == ("1", "", 0)
        assert told.driver("pci_driver").state == "absent", "what could be run is told as well"
        asked = [one.driver for one in told.server.reports[-1].drivers]
        assert asked == ["fake_driver"], "but not where an older conductor finds those that answered"
        said = await told.wish(1, settings={"control_file": str(broken)})
        assert said.outcome == "refused"
        assert "the driver fails with these settings, so nothing was changed" in said.text
        assert (len(told.driver().devices), told.driver().generation) == (1, 0)
        device = told.driver().devices[0]
        handle = device.deployables[0].handles[0]
        assert (await told.order("attach", device.key, handle=handle, **CONSUMER)).outcome == "succeeded"
        said = await told.wish(2, settings={"control_file": str(second)})
        assert (said.outcome, said.text.endswith("detach it first")) == ("refused", True)
        assert (await told.order("detach", device.key, handle=handle, **CONSUMER)).outcome == "succeeded"
        said = await told.wish(3, settings={"control_file": str(second)})
        assert (said.outcome, said.text.split(";")[0]) == ("succeeded", "fake_driver is enabled")
        assert (len(told.driver().devices), told.driver().generation) == (3, 3)
        assert said.seq == told.server.reports[-1].seq, "the report goes before the result"
        key = told.driver().devices[0].key
        assert "do not allow the act 'reset'" in (await told.order("reset", key)).text, (
            "what the host's own file says holds"
        )
        assert (
            "only in this host's own CYBORG_DRIVER_SETTINGS" in (await told.wish(4, settings={"acts": ["reset"]})).text
        )
        assert "already has the wanted state of generation 3" in (await told.wish(3)).text
        missing = await told.wish(1, "far_driver")
        assert "far_driver is not installed on this host (installed: fake_driver)" in missing.text
        assert "pip install PACKAGE" in missing.text

    async def story() -> None:
        server = StandIn()
        async with server.open():
            keys = {"CYBORG_JOIN_TOKEN": token(server), "CYBORG_DRIVER_SETTINGS": str(file)}
            told = Told(server)
            for chapter in (changed, turned_off, uninstalled):
                hellos = len(server.hellos)
                async with daemon(tmp_path, **keys) as agent:
                    lines_of(agent)
                    await until(lambda hellos=hellos: len(server.hellos) > hellos and server.reports)
                    await chapter(told)
                    agent.send_signal(signal.SIGKILL)
                    await agent.wait()

    asyncio.run(story())


def roster(directory: Path) -> DriverSet:
    """One that may run two drivers, of which its host's own configuration names the first."""
    make = lambda name, settings: DriverProcess(name, "n", settings)  # noqa: E731
    return DriverSet(["a"], {"a": {"x": 1}}, open_journal(directory, HOST).desired_drivers, make, lambda: ("a", "b"))


def test_how_an_interrupted_change_ended_is_what_the_journal_says(tmp_path: Path) -> None:
    open_journal(tmp_path, HOST).desired_drivers.store_wish("b", wire.Wish(2))
    asked = [command(n, "configure", driver="b", wish=wire.Wish(n)) for n in (2, 3)]
    assert [roster(tmp_path).determine_configure_result(one)[0] for one in asked] == ["succeeded", "refused"]
    assert [*roster(tmp_path).running] == ["a", "b"]


def test_a_driver_that_is_wanted_and_whose_package_is_gone_is_told_as_failing(tmp_path: Path) -> None:
    open_journal(tmp_path, HOST).desired_drivers.store_wish("gone", wire.Wish(1))
    (a, gone, b) = roster(tmp_path).complete_reports(
        [DriverReport("a"), DriverReport("gone", "there is no driver 'gone'")]
    )
    assert (a.state, gone.error, gone.generation) == ("", "there is no driver 'gone'", 1)
    assert (b.driver, b.state) == ("b", "absent")


def test_a_journal_from_before_there_were_wishes_and_one_that_holds_rubbish(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    open_journal(tmp_path, HOST).close()
    with sqlite3.connect(tmp_path / JOURNAL_FILE) as connection:
        connection.execute("DROP TABLE wish")
    journal = open_journal(tmp_path, HOST)
    assert journal.desired_drivers.list_drivers() == ()
    with sqlite3.connect(tmp_path / JOURNAL_FILE) as connection:
        connection.execute("INSERT INTO wish VALUES ('a', '[]')")
    assert open_journal(tmp_path, HOST).desired_drivers.get_wish("a") is None
    assert "cannot be read" in caplog.text
