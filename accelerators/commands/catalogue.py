"""List the commands that people can order from an agent, each with a description.

The console, our own API and the command lines offer this list; `accelerators.commands.command_queue` places a command
and makes the final decision whether it is possible. `install`, `attach` and `detach` are not listed: devices are
installed when they are enabled, and attached and detached when requests are bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from accelerators.commands.command_queue import ALLOWED_STATES, EXCLUSIVE_OPS
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import Device
from drivers.plan import DESTRUCTIVE


@dataclass(frozen=True)
class OrderableCommand:
    """A command that people can order: its target, its meaning, and the argument that it takes ('' for none)."""

    op: str
    target: Literal["device", "host"]
    meaning: str
    takes: Literal["", "layout", "image", "driver"] = ""

    @property
    def danger(self) -> bool:
        """Return True if the command is refused while anybody holds the device."""
        return self.op in DESTRUCTIVE


ORDERABLE_COMMANDS = {
    act.op: act
    for act in (
        OrderableCommand("health", "device", "Ask the driver for the device's health and for the reasons."),
        OrderableCommand("reset", "device", "Reset the hardware. Its programmed image may be lost."),
        OrderableCommand(
            "partition", "device", "Divide the device as given in words of the driver's layout.", "layout"
        ),
        OrderableCommand(
            "program", "device", "Program the device with an image, which replaces its present one.", "image"
        ),
        OrderableCommand(
            "uninstall", "device", "Undo what installing the device changed on the host. The device becomes inactive."
        ),
        OrderableCommand(
            "rescan", "host", "Make the drivers look for devices now. This ends a driver's quarantine.", "driver"
        ),
        OrderableCommand("logs", "host", "Fetch the last lines of the agent's own log."),
        OrderableCommand(
            "report", "host", "Fetch the agent's last report unchanged, for all drivers or for one.", "driver"
        ),
    )
}
ORDERABLE_DEVICE_OPS = tuple(act.op for act in ORDERABLE_COMMANDS.values() if act.target == "device")
ORDERABLE_HOST_OPS = tuple(act.op for act in ORDERABLE_COMMANDS.values() if act.target == "host")


def list_possible_commands(device: Device, held: int) -> Iterator[OrderableCommand]:
    """Yield the commands that are possible for a device now; `held` is the number of our requests that hold it.

    Holders that only other holder checks find (Placement, Nova) and the agent's connection are not checked here.
    """
    supported_ops = device.acts.split()
    for op in ORDERABLE_DEVICE_OPS:
        is_blocked = (device.busy_with and op in EXCLUSIVE_OPS) or (held and op in DESTRUCTIVE)
        if op in supported_ops and device.state in ALLOWED_STATES[op] and not is_blocked:
            yield ORDERABLE_COMMANDS[op]


def parse_layout(words: Iterable[str]) -> dict[str, str]:
    """Parse settings of a layout, such as `vfs=4`, into a dict from key to value; of equal keys the last one counts.

    Raises RefusedError INVALID if `words` is empty, or if one of them lacks the key or the value.
    """
    pairs = [word.partition("=") for word in words]
    if not pairs or not all(key and value for key, _, value in pairs):
        raise RefusedError(RefusalReason.INVALID, "Give the layout in words of the driver such as vfs=4.")
    return {key: value for key, _, value in pairs}
