"""Translate a command into acts of a driver, and into the entries that the command log keeps of their effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast, get_args

import msgspec

from agents import wire
from agents.host.execution.plan_runner import Site
from agents.host.journal.command_log import ATTACH, Applied, Ledger
from drivers.plan import Act, Ask, Image

ACTS: tuple[str, ...] = get_args(Act)
OF_HOST = ("rescan", "logs", "report", "placement", "configure")
"""Commands that need no driver and no device, but may name a driver."""
OPS = (*ACTS, "health", *OF_HOST)
"""Every command that this release supports."""
RAW = 256 * 1024
"""Largest part of a report to return, in bytes: even when JSON escapes double its size, it fits into a message."""
FORGOTTEN: Mapping[str, tuple[str, ...]] = {
    "install": ("partition",),
    "uninstall": ("install", "partition", "program"),
    "reset": ("program",),
}
"""Act → the slots of the command log that are removed when it has succeeded, because their effect is gone."""


@dataclass(frozen=True)
class Answer:
    """How a command ended. If `rescan_driver` is set, that driver looks again before the result is sent."""

    outcome: wire.Outcome
    text: str
    detail: dict[str, str] = field(default_factory=dict)
    look: str = ""
    report: wire.Report | None = None
    """The report that shows the host after the command, if there is one already."""


def raw(report: wire.Report | None, driver: str) -> Answer:
    """Return the last report as indented JSON: of one driver, or of all for ''. At most MAX_RAW_REPORT bytes."""
    if report is None:
        return Answer("failed", "there is no report yet, because the drivers have not answered")
    told = tuple(one for one in report.told if driver in ("", one.driver))
    part = wire.Report.of(report.epoch, report.seq, report.hash, told)
    text = msgspec.json.format(msgspec.json.encode(part), indent=1)
    cut = f", of which the first {RAW} are shown: name a driver to see less" if len(text) > RAW else ""
    shown = text[:RAW].decode(errors="ignore")
    return Answer("succeeded", f"report {report.epoch}.{report.seq}: {len(text)} bytes{cut}", {"report": shown})


def acts_of(command: wire.Command) -> tuple[Act, ...]:
    """Return the acts that the driver has to plan, in order.

    `attach` with an image means program, then attach; PCI handles need no act to be attached, so nothing may be left.
    """
    if command.op != "attach":
        return (cast(Act, command.op),)
    program: tuple[Act, ...] = ("program",) if command.image is not None else ()
    attach: tuple[Act, ...] = ("attach",) if _is_made(command) else ()
    return program + attach


def ask_of(command: wire.Command, image: Image | None, site: Site) -> Ask:
    """Build the Ask that the driver gets for this command; `image` is the local copy of the command's image."""
    device = site.device(command.driver, command.key)
    return Ask(
        key=command.key,
        backend=device.backend if device else "",
        deployable=command.deployable,
        handle=command.handle,
        uuid=command.uuid,
        consumer=command.consumer,
        layout=dict(command.layout),
        first=site.ledger.first(command.driver, command.key) if command.op == "uninstall" else {},
        image=image,
    )


def slot_of(command: wire.Command) -> str:
    """Return the command log's slot for what this command makes or removes."""
    return f"{ATTACH}{command.uuid}" if command.op in ("attach", "detach") else command.op


def settle(command: wire.Command, ask: Ask, ledger: Ledger, boot: str) -> None:
    """Store in the command log what a successful command left on the host, and remove what it ended.

    May be repeated. Raises sqlite3.OperationalError.
    """
    driver, key = command.driver, command.key
    if command.image is not None:
        ledger.apply(Applied(driver, key, "program", ask, boot))
    if command.op in ("install", "partition") or (command.op == "attach" and _is_made(command)):
        ledger.apply(Applied(driver, key, slot_of(command), ask, boot))
    if command.op == "detach":
        ledger.remove(driver, key, slot_of(command))
    ledger.remove(driver, key, *FORGOTTEN.get(command.op, ()))
    if command.op == "uninstall":
        ledger.forget_first(driver, key)


def sentence(text: str) -> str:
    """Replace unprintable characters by spaces and cut to 4096 characters, as messages and the database require."""
    return "".join(char if char.isprintable() else " " for char in text)[:4096]


def _is_made(command: wire.Command) -> bool:
    """Return whether the handle has to be made on the host. PCI handles have not: libvirt prepares those itself."""
    return command.handle is None or command.handle.attach_type not in ("PCI", "TEST_PCI")
