"""What a command of the wire means on this host: which acts, asked how, leaving what behind. Used by `executor` and
`recovery`.
"""

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
OPS = (*ACTS, "health", *OF_HOST)
"""Every command that this release takes."""
RAW = 256 * 1024
"""Bytes of a report that are shown: twice as many in JSON still fit into a message."""
FORGOTTEN: Mapping[str, tuple[str, ...]] = {
    "install": ("partition",),
    "uninstall": ("install", "partition", "program"),
    "reset": ("program",),
}
"""Act → what is not so any more when it is done."""


@dataclass(frozen=True)
class Answer:
    """How a command ended. Its driver looks again before it is told, if `look` names it."""

    outcome: wire.Outcome
    text: str
    detail: dict[str, str] = field(default_factory=dict)
    look: str = ""
    report: wire.Report | None = None
    """What shows the host as it is since then, when that is known already."""


def raw(report: wire.Report | None, driver: str) -> Answer:
    """What was reported last, of one driver or of all, as JSON for people; of more than RAW bytes the first."""
    if report is None:
        return Answer("failed", "nothing was reported yet: the drivers have not answered")
    told = tuple(one for one in report.told if driver in ("", one.driver))
    part = wire.Report.of(report.epoch, report.seq, report.hash, told)
    text = msgspec.json.format(msgspec.json.encode(part), indent=1)
    cut = f", the first {RAW} are shown: name a driver to see less" if len(text) > RAW else ""
    shown = text[:RAW].decode(errors="ignore")
    return Answer("succeeded", f"report {report.epoch}.{report.seq}: {len(text)} bytes{cut}", {"report": shown})


def acts_of(command: wire.Command) -> tuple[Act, ...]:
    """What the driver is asked for: an attachment with an image programs first, and PCI handles need nothing more."""
    if command.op != "attach":
        return (cast(Act, command.op),)
    program: tuple[Act, ...] = ("program",) if command.image is not None else ()
    attach: tuple[Act, ...] = ("attach",) if _is_made(command) else ()
    return program + attach


def ask_of(command: wire.Command, image: Image | None, site: Site) -> Ask:
    """The command as its driver is asked."""
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
    """Where the ledger keeps what this command makes or takes away."""
    return f"{ATTACH}{command.uuid}" if command.op in ("attach", "detach") else command.op


def settle(command: wire.Command, ask: Ask, ledger: Ledger, boot: str) -> None:
    """Note what a successful act left on the host. Raises sqlite3.OperationalError; may be repeated."""
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
    """Text as the wire and the database take it."""
    return "".join(char if char.isprintable() else " " for char in text)[:4096]


def _is_made(command: wire.Command) -> bool:
    """Whether its handle is something that has to be made on the host (libvirt does what PCI ones need)."""
    return command.handle is None or command.handle.attach_type not in ("PCI", "TEST_PCI")
