"""Tests of the change watcher, which tells when a driver must look for changes: uevents, watched files and a timer."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from agents.host.discovery.change_watcher import ChangeWatcher, UeventSource


@dataclass
class WatchedDriver:
    """The part of a driver that the change watcher reads."""

    subsystems: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()


DRIVERS = {
    "pci_driver": WatchedDriver(("pci",)),
    "both": WatchedDriver(("pci", "nvme")),
    "fake_driver": WatchedDriver(),
}


class FakeUevents:
    """Source of uevents over a socket pair. A datagram is a subsystem, or `!` and the number of an OSError to raise."""

    def __init__(self) -> None:
        self.reader, self.writer = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.reader.setblocking(False)

    def fileno(self) -> int:
        return self.reader.fileno()

    def next(self) -> str | None:
        try:
            data = self.reader.recv(64).decode()
        except BlockingIOError:
            return None
        if data.startswith("!"):
            raise OSError(int(data[1:]), "lost")
        return data

    def close(self) -> None:
        self.reader.close()
        self.writer.close()

    def send(self, *subsystems: str) -> None:
        for subsystem in subsystems:
            self.writer.send(subsystem.encode())


def make_watch(
    drivers: Mapping[str, WatchedDriver] = DRIVERS, rescan_s: float = 3600, *, uevents: Callable[[], UeventSource]
) -> ChangeWatcher:
    return ChangeWatcher(drivers, debounce_s=0.05, rescan_s=rescan_s, uevents=uevents)


async def wait_for_changes(watch: ChangeWatcher) -> frozenset[str]:
    async with asyncio.timeout(10):
        return await watch.wait_for_changes()


def test_a_burst_of_uevents_wakes_the_drivers_of_its_subsystems_once() -> None:
    async def story() -> None:
        pipe = FakeUevents()
        watch = make_watch(uevents=lambda: pipe)
        watch.start()
        pipe.send(*["net"] * 5, *["nvme"] * 30, "vfio")
        assert await wait_for_changes(watch) == {"both"}
        pipe.send(*["pci"] * 100)
        assert await wait_for_changes(watch) == {"pci_driver", "both"}
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.15):
                await watch.wait_for_changes()
        watch.close()

    asyncio.run(story())


def test_subsystems_that_a_driver_declares_during_the_debounce_count_for_the_uevent() -> None:
    async def story() -> None:
        pipe = FakeUevents()
        drivers = {"late": WatchedDriver(), "other": WatchedDriver(("net",))}
        watch = make_watch(drivers, uevents=lambda: pipe)
        watch.start()
        pipe.send("pci")
        await asyncio.sleep(0)
        drivers["late"].subsystems = ("pci",)
        assert await wait_for_changes(watch) == {"late"}
        watch.close()

    asyncio.run(story())


def test_an_overflow_of_the_uevent_buffer_wakes_all_drivers() -> None:
    async def story() -> None:
        pipe = FakeUevents()
        watch = make_watch(uevents=lambda: pipe)
        watch.start()
        pipe.send(f"!{errno.ENOBUFS}")
        assert await wait_for_changes(watch) == set(DRIVERS)
        pipe.send("pci")
        assert await wait_for_changes(watch) == {"pci_driver", "both"}
        watch.close()

    asyncio.run(story())


def test_without_a_uevent_socket_drivers_rescan_on_the_timer_and_a_warning_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refused() -> UeventSource:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    async def story() -> None:
        watch = make_watch(rescan_s=0.05, uevents=refused)
        watch.start()
        for _ in range(2):
            assert await wait_for_changes(watch) == set(DRIVERS)
        watch.close()

    asyncio.run(story())
    assert [record.getMessage() for record in caplog.records] == [
        "uevents are not available ([Errno 1] Operation not permitted): "
        "the drivers look for changes every 0.05 s instead"
    ]


def test_a_broken_uevent_socket_is_closed_and_drivers_rescan_on_the_timer(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        pipe = FakeUevents()
        watch = make_watch(rescan_s=0.1, uevents=lambda: pipe)
        watch.start()
        pipe.send(f"!{errno.EBADF}")
        assert await wait_for_changes(watch) == set(DRIVERS)
        watch.close()

    asyncio.run(story())
    assert "uevents are no longer available" in caplog.text


@pytest.mark.slow
def test_a_watched_file_wakes_its_driver_when_it_is_created_changed_or_deleted(tmp_path: Path) -> None:
    control = tmp_path / "fake.toml"

    async def story() -> None:
        drivers = {"other": WatchedDriver(), "fake_driver": WatchedDriver()}
        watch = make_watch(drivers, uevents=FakeUevents)
        watch.start()
        drivers["fake_driver"].watched = (str(control),)
        assert await wait_for_changes(watch) == {"fake_driver"}, "it may have changed since the driver read it"
        control.write_text("devices = 2")
        assert await wait_for_changes(watch) == {"fake_driver"}
        control.write_text("devices = 33")
        assert await wait_for_changes(watch) == {"fake_driver"}
        control.unlink()
        assert await wait_for_changes(watch) == {"fake_driver"}
        watch.close()

    asyncio.run(story())


@pytest.mark.skipif(not os.access("/sys/class/mem/null/uevent", os.W_OK), reason="only root may ask for a uevent")
def test_a_uevent_of_the_real_kernel_wakes_its_driver() -> None:
    async def story() -> None:
        watch = ChangeWatcher({"d": WatchedDriver(("mem",))}, debounce_s=0.01, rescan_s=3600)
        watch.start()
        Path("/sys/class/mem/null/uevent").write_text("change")
        assert await wait_for_changes(watch) == {"d"}
        watch.close()

    asyncio.run(story())
