"""List the commands that people can order from an agent, each with a description.

The console, our own API and `manage.py command` offer this list; `accelerators.commands.placing` places a command and
makes the final decision whether it is possible. `install`, `attach` and `detach` are not listed: devices are installed
when they are enabled, and attached and detached when requests are bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from accelerators.commands.placing import ASKED, EXCLUSIVE
from accelerators.domain.errors import Reason, RefusedError
from accelerators.models import Device
from drivers.plan import DESTRUCTIVE


@dataclass(frozen=True)
class Act:
    """A command that people can order: its target (`of`), its meaning, and the argument that it takes."""

    op: str
    of: Literal["device", "host"]
    meaning: str
    takes: Literal["", "layout", "image", "driver"] = ""

    @property
    def danger(self) -> bool:
        """Return True if the command is refused while anybody holds the device."""
        return self.op in DESTRUCTIVE


ACTS = {
    act.op: act
    for act in (
        Act("health", "device", "Ask the driver how the device is, and why it thinks so."),
        Act("reset", "device", "Reset the hardware; what it was programmed with may be gone."),
        Act("partition", "device", "Cut it into other parts, as the driver's layout words say.", "layout"),
        Act("program", "device", "Load an image into it; what it was programmed with is gone.", "image"),
        Act("uninstall", "device", "Take back what installing it did to the host; it is inactive then."),
        Act("rescan", "host", "Have its drivers look again now; a driver in quarantine is let out.", "driver"),
        Act("logs", "host", "Fetch the last lines of the agent's own log."),
        Act("report", "host", "Fetch what its agent reported last, as it is; of all its drivers, or of one.", "driver"),
    )
}
OF_DEVICE = tuple(act.op for act in ACTS.values() if act.of == "device")
OF_HOST = tuple(act.op for act in ACTS.values() if act.of == "host")


def possible(device: Device, held: int) -> Iterator[Act]:
    """Yield the commands that are possible for a device now; `held` is the number of our requests that hold it.

    Holders that only other witnesses know (Placement, Nova) and the agent's connection are not checked here.
    """
    words = device.acts.split()
    for op in OF_DEVICE:
        blocked = (device.busy_with and op in EXCLUSIVE) or (held and op in DESTRUCTIVE)
        if op in words and device.state in ASKED[op] and not blocked:
            yield ACTS[op]


def layout(words: Iterable[str]) -> dict[str, str]:
    """Parse layout words such as `vfs=4` into a dict. Raise RefusedError INVALID if there are none or one is
    incomplete."""
    pairs = [word.partition("=") for word in words]
    if not pairs or not all(key and value for key, _, value in pairs):
        raise RefusedError(Reason.INVALID, "Say into which parts: words of the driver such as vfs=4.")
    return {key: value for key, _, value in pairs}
