"""Commands for devices (list, show, ready, maintain, drain, retire), and agent-list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click

from cyborgweb.cli import names, options
from cyborgweb.cli.following import Progress, follow
from cyborgweb.cli.options import Asked, pass_asked, verb
from cyborgweb.cli.outcomes import each, finish
from cyborgweb.cli.output import show, show_one
from cyborgweb.cli.problems import Exit

STATES = ("inactive", "installing", "ready", "maintenance", "failed", "quarantined", "missing", "retired")
COLUMNS = ("uuid", "state", "status", "type", "model", "address", "host=host.name", "driver", "backend", "held")
DECIDED = ("uuid=target", "outcome", "state", "host", "address", "text")
AGENTS = ("host=host.name", "state", "seen_at", "version", "address", "barred_reason")
HEARD = ("up", "late", "down", "revoked", "clone")


@verb("device-list", "device-list --host cmp1.example --state inactive")
@click.option("--host", help="Only of this host.")
@click.option("--state", type=click.Choice(STATES), multiple=True, help="In this state; can be repeated.")
@click.option("--type", "kind", help="Only of this type: GPU, FPGA, NIC, …")
@click.option("--vendor", help="Only of this vendor.")
@click.option("--driver", help="Only of this driver.")
@click.option(
    "--draining/--not-draining",
    default=None,
    help="Only devices that wait for their last request to end, or only the others.",
)
@click.option(
    "--stale/--fresh", default=None, help="Only devices whose host or driver does not report, or only the others."
)
@options.limit
@pass_asked
def device_list(asked: Asked, limit: int, kind: str | None, **filters: Any) -> None:
    """List devices. Each row is one card, with its state and the number of its units that are held."""
    rows = asked.rows("devices/", limit, **filters, type=kind)
    show(rows, COLUMNS, asked.output, "No devices.")


@verb("device-show", "device-show 3f1c\ndevice-show cmp1.example/0000:3b:00.0")
@click.argument("device")
@pass_asked
def device_show(asked: Asked, device: str) -> None:
    """Show a device. Includes its state with the reason, time and person, and the actions that are possible."""
    show_one(asked.api.get(f"devices/{names.device(asked.api, device)}/"), asked.output)


@verb("device-ready", 'device-ready 3f1c 77ab --reason "burnt in"')
@click.argument("devices", nargs=-1, required=True)
@options.because
@options.waits
@pass_asked
def device_ready(asked: Asked, devices: Sequence[str], reason: str, wait: bool) -> None:
    """Offer devices to instances. A device that must be installed on its host first is followed until that ends."""
    rows = _asked_of(asked, devices, "enable", {"reason": reason})
    if wait:
        _installed(asked, [row for row in rows if row.get("state") == "installing"])
    finish(rows, DECIDED, asked.output)


@verb("device-maintain", 'device-maintain 3f1c --reason "new firmware"')
@click.argument("devices", nargs=-1, required=True)
@options.because
@pass_asked
def device_maintain(asked: Asked, devices: Sequence[str], reason: str) -> None:
    """Stop offering devices. Instances keep the units that they hold."""
    finish(_asked_of(asked, devices, "disable", {"reason": reason}), DECIDED, asked.output)


@verb("device-drain", 'device-drain 3f1c --then retired --reason "end of lease"')
@click.argument("devices", nargs=-1, required=True)
@click.option(
    "--then",
    type=click.Choice(["maintenance", "retired"]),
    default="maintenance",
    help="The state that they get when they are free.",
)
@options.because
@pass_asked
def device_drain(asked: Asked, devices: Sequence[str], then: str, reason: str) -> None:
    """Stop offering devices, and change their state when they are free. Nobody is evicted.

    The command returns at once and shows how many requests still hold each device. The state given in --then applies
    when the last of them ends.
    """
    rows = _asked_of(asked, devices, "drain", {"reason": reason, "then": then})
    finish(rows, DECIDED, asked.output)


@verb("device-retire", 'device-retire 3f1c --yes --reason "broken fan"')
@click.argument("devices", nargs=-1, required=True)
@options.because
@options.yes
@pass_asked
def device_retire(asked: Asked, devices: Sequence[str], reason: str, yes: bool) -> None:
    """Take devices out of use permanently. Refused while a device is offered, or while a request holds it."""
    options.sure(f"Retire {', '.join(devices)} permanently?", yes)
    finish(_asked_of(asked, devices, "retire", {"reason": reason}), DECIDED, asked.output)


@verb("agent-list", "agent-list --state down")
@click.option("--host", help="Only of this host.")
@click.option("--state", type=click.Choice(HEARD), help="Only in this state.")
@click.option("--version", help="Only with this version.")
@options.limit
@pass_asked
def agent_list(asked: Asked, limit: int, **filters: Any) -> None:
    """List agents. Each row has the host, the agent's state, when it was last seen, and its version."""
    show(asked.rows("agents/", limit, **filters), AGENTS, asked.output, "No agents.")


def _asked_of(asked: Asked, devices: Sequence[str], action: str, body: dict[str, str]) -> list[dict[str, Any]]:
    def act(text: str) -> dict[str, Any]:
        shown = asked.api.post(f"devices/{names.device(asked.api, text)}/{action}/", options.said(body))
        return _row(shown)

    return each(devices, act)


def _row(shown: dict[str, Any]) -> dict[str, Any]:
    """Convert a device of the API into an output row; its text names the requests still draining, or why it failed."""
    draining = shown["draining"]
    left = ""
    if draining:
        held = "1 request holds it" if draining["left"] == 1 else f"{draining['left']} requests hold it"
        left = f"{held}; then it becomes {draining['to']}"
    where = {"host": shown["host"]["name"], "address": shown["address"], "state": shown["state"]}
    return (
        {"target": shown["uuid"]}
        | where
        | {"text": left or (shown["state_reason"] if shown["state"] == "failed" else "")}
    )


def _installed(asked: Asked, rows: list[dict[str, Any]]) -> None:
    """Wait until no device of `rows` is `installing`; update each row in place.

    A device that is then not `ready` counts as failed. Raises CliError as `follow`.
    """
    if not rows:
        return
    busy = [*rows]

    def look() -> Progress:
        percent, said = 0, ""
        for row in [*busy]:
            shown = asked.api.get(f"devices/{row['target']}/")
            if shown["state"] != "installing":
                row.update(_row(shown))
                row.update({} if shown["state"] == "ready" else {"outcome": "failed", "code": Exit.REFUSED})
                busy.remove(row)
            elif shown["busy_with"]:
                command = asked.api.get(f"commands/{shown['busy_with'].rstrip('/').rpartition('/')[2]}/")
                percent, said = percent + command["percent"], command["progress"] or command["state"]
        ended = len(rows) - len(busy)
        return Progress((100 * ended + percent) / len(rows), said or f"{ended} of {len(rows)}", not busy)

    follow("install", f"cyborg device-show {rows[0]['target']}", look)
