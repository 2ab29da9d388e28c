"""Decide which drivers have to look for devices again, from uevents of the kernel, watched files and a slow timer.

The netlink socket is bound before the drivers look for the first time, so no change during that look is missed. It
needs no privilege and no udevd (pyudev, source 'kernel'). An event only causes a new look: the drivers read the devices
from the host, never from an event.
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
"""Seconds between two checks of the watched files."""
RECEIVE_BUFFER_BYTES = 8 * 1024 * 1024
"""Bytes of buffer to request for the uevent socket: a card with 64 functions sends 200 events of 0.5 KB at once."""
MAX_EVENTS_PER_READ = 256
"""Largest number of events to read in a row before other tasks of the event loop run."""

FileState = tuple[int, int, int] | None
"""Modification time in ns, size and inode of a file; None when it does not exist."""


class ChangeFilter(Protocol):
    """The properties of a driver that decide when it looks for devices again.

    The values are empty until the driver's process has answered, so they are read again at each event.
    """

    @property
    def subsystems(self) -> tuple[str, ...]:
        """Kernel subsystems ('pci', …) whose uevents concern the driver."""

    @property
    def watched(self) -> tuple[str, ...]:
        """Files that concern the driver. They are polled: a new time, size or inode is a change, as is a new path."""


class UeventSource(Protocol):
    """A source of kernel events: `NetlinkUevents` in production, a socket pair in tests."""

    def fileno(self) -> int:
        """Return the file descriptor that is readable while an event waits."""

    def next(self) -> str | None:
        """Read one event and return its subsystem, None when no event waits.

        Raises OSError; with ENOBUFS some events were lost.
        """

    def close(self) -> None:
        """Close the socket."""


class NetlinkUevents:
    """The kernel's uevents, read with pyudev.

    The constructor raises OSError or ImportError when the socket cannot be opened or libudev is missing.
    """

    def __init__(self) -> None:
        import pyudev  # takes 2 MB and needs libudev; `--once` works without it

        self._monitor = pyudev.Monitor.from_netlink(pyudev.Context(), source="kernel")
        try:
            self._monitor.set_receive_buffer_size(RECEIVE_BUFFER_BYTES)
        except OSError as error:  # above the system's limit it needs CAP_NET_ADMIN
            log.debug("the uevent buffer keeps the system's size limit: %s", error)
            _request_receive_buffer(self._monitor.fileno())
        self._monitor.start()

    def fileno(self) -> int:
        """Return the file descriptor of the netlink socket."""
        return int(self._monitor.fileno())

    def next(self) -> str | None:
        """Read one event, as `UeventSource.next` says.

        Events of all subsystems are returned, and the caller filters them: with a filter in libudev, a poll may return
        None although other events wait.
        """
        device: Any = self._monitor.poll(timeout=0)
        return None if device is None else device.subsystem or ""

    def close(self) -> None:
        """Close the socket by deleting libudev's object. Remove the reader from the event loop before this."""
        del self._monitor


def _request_receive_buffer(descriptor: int) -> None:
    """Request the receive buffer without a privilege; the kernel grants as much as the system's limit allows."""
    with socket.socket(fileno=os.dup(descriptor)) as duplicate:
        duplicate.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)


class ChangeWatcher:
    """Collects changes on the host; `wait_for_changes` returns the names of the drivers that have to look again.

    Uevents within `debounce_s` seconds become one change; every `rescan_s` seconds all drivers have to look.
    """

    def __init__(
        self,
        drivers: Mapping[str, ChangeFilter],
        *,
        debounce_s: float,
        rescan_s: float,
        uevents: Callable[[], UeventSource] = NetlinkUevents,
    ) -> None:
        self._drivers = drivers
        self._debounce_s = debounce_s
        self._rescan_s = rescan_s
        self._open_uevents = uevents
        self._uevents: UeventSource | None = None
        self._file_states: dict[str, FileState] = {}
        self._due_drivers: set[str] = set()
        self._pending_subsystems: set[str] = set()
        self._has_lost_events = False
        self._has_due_drivers = asyncio.Event()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def start(self) -> None:
        """Start to listen, on the running event loop.

        If uevents are not available, log that; the watched files and the slow timer still work.
        """
        try:
            self._uevents = self._open_uevents()
            asyncio.get_running_loop().add_reader(self._uevents.fileno(), self._read_uevents)
        except (OSError, ImportError) as error:
            log.warning(
                "uevents are not available (%s): the drivers look for changes every %g s instead", error, self._rescan_s
            )
        self._set_timer("files", FILE_POLL_S, self._poll_files)
        self._set_timer("rescan", self._rescan_s, self._rescan_all)

    def close(self) -> None:
        """Stop all timers and close the uevent socket. Call it on the event loop on which `start` was called."""
        for timer in self._timers.values():
            timer.cancel()
        if self._uevents is not None:
            asyncio.get_running_loop().remove_reader(self._uevents.fileno())
            self._uevents.close()
            self._uevents = None

    async def wait_for_changes(self) -> frozenset[str]:
        """Wait for a change and return the names of the drivers that have to look again, each name once."""
        await self._has_due_drivers.wait()
        self._has_due_drivers.clear()
        names, self._due_drivers = frozenset(self._due_drivers), set()
        return names

    def _set_timer(self, name: str, seconds: float, callback: Callable[[], None]) -> None:
        """Call `callback` once after `seconds`. `close` cancels the timer that was last set under `name`."""
        self._timers[name] = asyncio.get_running_loop().call_later(seconds, callback)

    def _add_due_drivers(self, names: Iterable[str]) -> None:
        """Note that these drivers have to look again, and wake `wait_for_changes`; do nothing for no names."""
        self._due_drivers.update(names)
        if self._due_drivers:
            self._has_due_drivers.set()

    def _read_uevents(self) -> None:
        """Read the waiting events, at most MAX_EVENTS_PER_READ of them; stop using uevents when the socket fails.

        When events were lost, all drivers have to look again.
        """
        if self._uevents is None:
            return
        try:
            for _ in range(MAX_EVENTS_PER_READ):
                subsystem = self._uevents.next()
                if subsystem is None:
                    return
                self._note_uevent(subsystem)
        except OSError as error:
            if error.errno == errno.ENOBUFS:
                log.info(
                    "some uevents were lost, because they came faster than they were read: every driver looks again"
                )
                self._has_lost_events = True
                self._note_uevent("")
            else:
                asyncio.get_running_loop().remove_reader(self._uevents.fileno())
                self._uevents.close()
                self._uevents = None
                log.warning(
                    "uevents are no longer available (%s): the drivers look for changes every %g s instead",
                    error,
                    self._rescan_s,
                )

    def _note_uevent(self, subsystem: str) -> None:
        """Note the subsystem of an event. The first event of a window starts its timer of `debounce_s` seconds."""
        # The window is fixed and begins with the first event. A device that sends events all the time would postpone a
        # pause after the last event for ever.
        if not self._pending_subsystems:
            self._set_timer("burst", self._debounce_s, self._end_debounce)
        self._pending_subsystems.add(subsystem)

    def _end_debounce(self) -> None:
        """End the window: make those drivers look again whose subsystems had events, or all drivers if events were
        lost."""
        # The drivers' subsystems are read only now. A driver whose subsystems are not known yet has not begun its first
        # look, so that look will see the change.
        subsystems, self._pending_subsystems = self._pending_subsystems, set()
        has_lost_events, self._has_lost_events = self._has_lost_events, False
        self._add_due_drivers(
            name for name, driver in self._drivers.items() if has_lost_events or subsystems & set(driver.subsystems)
        )

    def _poll_files(self) -> None:
        """Compare the watched files with the last check, make the drivers of changed files look again, and set the next
        timer.

        A path that was not watched at the last check counts as changed.
        """
        states = {path: _read_file_state(path) for driver in self._drivers.values() for path in driver.watched}
        changed = {
            path for path, state in states.items() if path not in self._file_states or state != self._file_states[path]
        }
        self._file_states = states
        if changed:
            self._add_due_drivers(name for name, driver in self._drivers.items() if changed & set(driver.watched))
        self._set_timer("files", FILE_POLL_S, self._poll_files)

    def _rescan_all(self) -> None:
        """Make all drivers look again, and set the timer for the next time."""
        self._add_due_drivers(self._drivers)
        self._set_timer("rescan", self._rescan_s, self._rescan_all)


def _read_file_state(path: str) -> FileState:
    """Return modification time, size and inode of a file; None when it does not exist or cannot be examined."""
    try:
        file_status = os.stat(path)
    except OSError:  # a missing file is a state too: creating it is a change
        return None
    return file_status.st_mtime_ns, file_status.st_size, file_status.st_ino
