"""Translate a command into acts of a driver, and into the entries that the command log keeps of their effects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast, get_args

import msgspec

from agents import wire
from agents.host.execution.plan_runner import HostContext
from agents.host.journal.command_log import ATTACH_PREFIX, AppliedEffect, CommandLog
from drivers.plan import Act, Ask, Image, Lifetime

ACTS: tuple[str, ...] = get_args(Act)
HOST_OPS = ("rescan", "logs", "report", "placement", "configure")
"""Commands that need no driver and no device, but may name a driver."""
SUPPORTED_OPS = (*ACTS, "health", *HOST_OPS)
"""Every command that this release supports."""
MAX_RAW_REPORT = 256 * 1024
"""Largest part of a report to return, in bytes: even when JSON escapes double its size, it fits into a message."""
SLOTS_CLEARED_BY: Mapping[str, tuple[str, ...]] = {
    "install": ("partition",),
    "uninstall": ("install", "partition", "program"),
    "reset": ("program",),
}
"""Act → the slots of the command log that are removed when it has succeeded, because their effect is gone."""


@dataclass(frozen=True)
class ExecutionResult:
    """The result of a command. If `rescan_driver` is set, that driver looks again before the result is sent."""

    outcome: wire.ResultOutcome
    text: str
    detail: dict[str, str] = field(default_factory=dict)
    rescan_driver: str = ""
    report: wire.Report | None = None
    """The report that shows the host after the command, if there is one already."""


def render_last_report(report: wire.Report | None, driver: str) -> ExecutionResult:
    """Return the last report as indented JSON: of one driver, or of all for ''. At most MAX_RAW_REPORT bytes."""
    if report is None:
        return ExecutionResult("failed", "there is no report yet, because the drivers have not answered")
    driver_reports = tuple(one for one in report.all_drivers if driver in ("", one.driver))
    excerpt = wire.Report.from_driver_reports(report.epoch, report.seq, report.hash, driver_reports)
    text = msgspec.json.format(msgspec.json.encode(excerpt), indent=1)
    cut_note = (
        f", of which the first {MAX_RAW_REPORT} are shown: name a driver to see less"
        if len(text) > MAX_RAW_REPORT
        else ""
    )
    shown = text[:MAX_RAW_REPORT].decode(errors="ignore")
    return ExecutionResult(
        "succeeded", f"report {report.epoch}.{report.seq}: {len(text)} bytes{cut_note}", {"report": shown}
    )


def list_acts(command: wire.Command) -> tuple[Act, ...]:
    """Return the acts that the driver has to plan, in order.

    `attach` with an image means program, then attach; PCI handles need no act to be attached, so nothing may be left.
    """
    if command.op != "attach":
        return (cast(Act, command.op),)
    program: tuple[Act, ...] = ("program",) if command.image is not None else ()
    attach: tuple[Act, ...] = ("attach",) if _needs_attach_act(command) else ()
    return program + attach


def is_question(command: wire.Command) -> bool:
    """Return whether the command only asks who uses a function: the detach of a handle that needs no act on the host.

    The settings of a host that limit the acts do not limit it, because it changes nothing.
    """
    return command.op == "detach" and not _needs_attach_act(command)


def build_ask(command: wire.Command, image: Image | None, context: HostContext) -> Ask:
    """Build the Ask that the driver gets for this command; `image` is the local copy of the command's image."""
    device = context.find_device(command.driver, command.key)
    return Ask(
        key=command.key,
        backend=device.backend if device else "",
        address=(device.address or "") if device else "",
        deployable=command.deployable,
        handle=command.handle,
        uuid=command.uuid,
        consumer=command.consumer,
        layout=dict(command.layout),
        first=context.command_log.get_first_values(command.driver, command.key) if command.op == "uninstall" else {},
        image=image,
    )


def get_slot(command: wire.Command) -> str:
    """Return the command log's slot for what this command makes or removes: `attach:UUID`, or the name of the act."""
    return f"{ATTACH_PREFIX}{command.uuid}" if command.op in ("attach", "detach") else command.op


def record_effects(command: wire.Command, ask: Ask, command_log: CommandLog, boot_id: str, lifetime: Lifetime) -> None:
    """Store in the command log what a successful command left on the host, and remove what it ended.

    An image with the `lifetime` flash is not stored: a reboot does not end it. May be repeated. Raises
    sqlite3.OperationalError.
    """
    driver, key = command.driver, command.key
    if command.image is not None:
        command_log.remove_effects(driver, key, "program")
    if command.image is not None and lifetime == "volatile":
        command_log.store_effect(AppliedEffect(driver, key, "program", ask, boot_id))
    if command.op in ("install", "partition") or (command.op == "attach" and _needs_attach_act(command)):
        command_log.store_effect(AppliedEffect(driver, key, get_slot(command), ask, boot_id))
    if command.op == "detach":
        command_log.remove_effects(driver, key, get_slot(command))
    command_log.remove_effects(driver, key, *SLOTS_CLEARED_BY.get(command.op, ()))
    if command.op == "uninstall":
        command_log.delete_first_values(driver, key)


def describe_program(command: wire.Command, boot_id: str, lifetime: Lifetime) -> dict[str, str]:
    """Return the details of a successful command's result: how long the device keeps the command's image, and in which
    boot of the host it was loaded. Empty for a command without an image.
    """
    return {"lifetime": lifetime, "boot_id": boot_id} if command.image is not None else {}


def sanitize_text(text: str) -> str:
    """Replace unprintable characters by spaces and cut to 4096 characters, as messages and the database require."""
    return "".join(char if char.isprintable() else " " for char in text)[:4096]


def _needs_attach_act(command: wire.Command) -> bool:
    """Return whether the handle has to be made on the host. PCI handles have not: libvirt prepares those itself."""
    return command.handle is None or command.handle.attach_type not in ("PCI", "TEST_PCI")
