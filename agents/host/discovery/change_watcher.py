"""When to look again: uevents of the kernel, watched files, and a slow timer.

Owned by `main`, read by `report`.

The netlink socket is bound before the first look, so nothing that happens during it is missed; it needs no
privilege and no udevd (pyudev, source 'kernel'). Events only wake: what is there is read by the drivers,
never from an event.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

log = logging.getLogger("cyborg.watch")

FILE_POLL_S = 0.5
RECEIVE_BUFFER = 8 * 1024 * 1024
"""Bytes asked of the kernel: a card with 64 functions sends some 200 events of 0.5 KB, at once."""
SLICE = 256
"""Events taken before others on the loop get their turn."""

State = tuple[int, int, int] | None


class Interested(Protocol):
    """A driver: what wakes it. Known only once its process has answered, so it is read anew each time."""

    @property
    def subsystems(self) -> tuple[str, ...]:
        """Kernel subsystems ('pci', …) whose uevents concern it."""

    @property
    def watched(self) -> tuple[str, ...]:
        """Files that concern it: polled; another time, size or inode is a change, and so is the first sight."""


class Uevents(Protocol):
    """A source of kernel events; the real one is `NetlinkUevents`, a test's is a socket pair."""

    def fileno(self) -> int:
        """Readable when an event waits."""

    def next(self) -> str | None:
        """The subsystem of the next event, None when none waits.

        Raises OSError, ENOBUFS when some were lost.
        """

    def close(self) -> None:
        """Give the socket back."""


class NetlinkUevents:
    """The kernel's own events by pyudev.

    Raises OSError or ImportError when there is no socket or no libudev.
    """

    def __init__(self) -> None:
        import pyudev  # costs 2 MB and needs libudev, which `--once` can do without

        self._monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source="kernel")
        try:
            self._monitor.set_receive_buffer_size(RECEIVE_BUFFER)
        except OSError as error:  # beyond the system's bound only with CAP_NET_ADMIN
            log.debug("the uevent buffer stays at the system's bound: %s", error)
            _enlarge(self._monitor.fileno())
        self._monitor.start()

    def fileno(self) -> int:
        """The netlink socket."""
        return int(self._monitor.fileno())

    def next(self) -> str | None:
        """As `Uevents.next`.

        Filtered by the caller: libudev's own filter ends a poll early with this source.
        """
        device: Any = self._monitor.poll(timeout=0)
        return None if device is None else device.subsystem or ""

    def close(self) -> None:
        """The socket goes with libudev's object; the loop must have let go of it."""
        del self._monitor


def _enlarge(handle: int) -> None:
    with socket.socket(fileno=os.dup(handle)) as same:
        same.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)


class Watch:
    """Collects reasons to look; `changed` hands them out as names of drivers."""

    def __init__(
        self,
        drivers: Mapping[str, Interested],
        *,
        debounce_s: float,
        rescan_s: float,
        uevents: Callable[[], Uevents] = NetlinkUevents,
    ) -> None:
        self._drivers = drivers
        self._debounce_s = debounce_s
        self._rescan_s = rescan_s
        self._open_uevents = uevents
        self._uevents: Uevents | None = None
        self._files: dict[str, State] = {}
        self._due: set[str] = set()
        self._burst: set[str] = set()
        self._lost = False
        self._ready = asyncio.Event()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def start(self) -> None:
        """Begin to listen, on the running loop. Without uevents the slow timer is all there is, and that is said."""
        try:
            self._uevents = self._open_uevents()
            asyncio.get_running_loop().add_reader(self._uevents.fileno(), self._drain)
        except (OSError, ImportError) as error:
            log.warning("no uevents (%s): changes are seen every %g s instead", error, self._rescan_s)
        self._after("files", FILE_POLL_S, self._poll_files)
        self._after("rescan", self._rescan_s, self._rescan)

    def close(self) -> None:
        """Stop listening."""
        for timer in self._timers.values():
            timer.cancel()
        if self._uevents is not None:
            asyncio.get_running_loop().remove_reader(self._uevents.fileno())
            self._uevents.close()
            self._uevents = None

    async def changed(self) -> frozenset[str]:
        """Wait for a reason, then the drivers that have to look again."""
        await self._ready.wait()
        self._ready.clear()
        names, self._due = frozenset(self._due), set()
        return names

    def _after(self, name: str, seconds: float, call: Callable[[], None]) -> None:
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, call)

    def _wake(self, names: Iterable[str]) -> None:
        self._due.update(names)
        if self._due:
            self._ready.set()

    def _drain(self) -> None:
        if self._uevents is None:
            return
        try:
            for _ in range(SLICE):
                subsystem = self._uevents.next()
                if subsystem is None:
                    return
                self._seen(subsystem)
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                log.info("uevents came faster than they were read: every driver looks again")
                self._lost = True
                self._seen("")
            else:
                asyncio.get_running_loop().remove_reader(self._uevents.fileno())
                self._uevents.close()
                self._uevents = None
                log.warning("no more uevents (%s): changes are seen every %g s instead", error, self._rescan_s)

    def _seen(self, subsystem: str) -> None:
        # A fixed window from the first event, not a pause after the last: a device that never rests cannot starve us.
        if not self._burst:
            self._after("burst", self._debounce_s, self._end_of_burst)
        self._burst.add(subsystem)

    def _end_of_burst(self) -> None:
        # Only now is it asked whom it concerns. A driver whose interests are still unknown has not looked either, so it
        # will see what the event was about.
        seen, self._burst = self._burst, set()
        lost, self._lost = self._lost, False
        self._wake(name for name, driver in self._drivers.items() if lost or seen & set(driver.subsystems))

    def _poll_files(self) -> None:
        states = {path: _state(path) for driver in self._drivers.values() for path in driver.watched}
        changed = {path for path, state in states.items() if path not in self._files or state != self._files[path]}
        self._files = states
        if changed:
            self._wake(name for name, driver in self._drivers.items() if changed & set(driver.watched))
        self._after("files", FILE_POLL_S, self._poll_files)

    def _rescan(self) -> None:
        self._wake(self._drivers)
        self._after("rescan", self._rescan_s, self._rescan)


def _state(path: str) -> State:
    try:
        found = os.stat(path)
    except OSError:  # absent is a state like any other
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
