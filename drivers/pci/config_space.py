"""Read the configuration space of PCI functions, without waiting for a function that does not answer.

A read waits in the kernel while the function is being reset (pci_wait_cfg in drivers/pci/access.c) or powered on
(pci_config_pm_runtime_get in drivers/pci/pci.c), and may do so for ever if the hardware is broken. Each read therefore
has a thread, so that one function delays neither the others nor the driver.
"""

from __future__ import annotations

import threading
import time

from drivers.errors import Failed, Timeout
from drivers.isolation.thread_call import ThreadCall
from drivers.machine import Machine

READ_S = 2.0
"""Seconds for reading the configuration space of a function, which usually takes milliseconds. If other functions are
late at that time, it is divided by their number plus one, so that many dead functions together do not take much longer
than one."""
LONGEST_RESET_S = 120.0
"""Seconds after which a read that has not returned is not explained by a reset any more: the kernel waits up to 60 s
for a function that was reset (PCIE_RESET_READY_POLL_MS in drivers/pci/pci.c), also once for each method that it
tries."""

_late_reads: dict[str, ThreadCall[bytes]] = {}
"""The reads that have not returned in time, by the function's directory in sysfs."""
_late_since: dict[str, float] = {}
"""The same → the time of the monotonic clock at which the read was late."""
_lock = threading.Lock()
"""Held during a read: a function has at most one thread, also if several backends read it."""


def read_config_space(machine: Machine, path: str, count: int) -> bytes:
    """Return the first `count` bytes of a function's configuration space, or all if there are fewer.

    `path` is the function's directory in sysfs. Raises Timeout if the read does not return within READ_S and, without
    waiting, as long as an earlier read of this function has not returned; and the errors of `Machine.read_start`. The
    text of Timeout changes only when `is_stuck` does.
    """
    with _lock:
        for late in [late for late, call in _late_reads.items() if not call.is_alive()]:
            del _late_reads[late], _late_since[late]
        if path not in _late_reads:
            call = ThreadCall("config", lambda: machine.read_start(f"{path}/config", count))
            try:
                call.start()
            except RuntimeError as error:
                raise Failed(f"no thread can be started: {error}") from None
            if call.has_ended_within(READ_S / (1 + len(_late_reads))):
                return call.get_result()
            _late_reads[path], _late_since[path] = call, time.monotonic()
    if is_stuck(path):
        raise Timeout(
            f"reading its configuration space has not returned for {LONGEST_RESET_S:g} s: power the host off and on, or"
            " replace the card"
        )
    raise Timeout(
        "reading its configuration space does not return: it is being reset or powered on, or it is dead. Wait"
        f" {LONGEST_RESET_S:g} s; if it is not back then, power the host off and on, or replace the card"
    )


def is_stuck(path: str) -> bool:
    """Return whether a read of the function has been waiting for longer than a reset can take."""
    return time.monotonic() - _late_since.get(path, float("inf")) >= LONGEST_RESET_S
