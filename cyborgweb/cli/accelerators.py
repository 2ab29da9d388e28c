"""Commands for accelerators, the units that an instance can hold: list, create, update and delete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from cyborgweb.cli import names, options
from cyborgweb.cli.backends import command_ended
from cyborgweb.cli.following import until_ended
from cyborgweb.cli.options import Asked, pass_asked, verb
from cyborgweb.cli.outcomes import finish
from cyborgweb.cli.output import show
from cyborgweb.cli.problems import Exit

COLUMNS = (
    "state",
    "unit=handle.info",
    "type=handle.type",
    "host=host.name",
    "driver",
    "backend",
    "device=device.uuid",
    "instance=instance.uuid",
    "label",
)
CHANGED = ("device", "outcome", "state", "target", "text")
CODES = {"unknown": Exit.NOT_FOUND, "away": Exit.AWAY}
MOST_UNITS = 65_535


@verb("accelerator-list", "accelerator-list --driver pci_driver\naccelerator-list --free --host cmp1.example")
@click.option("--driver", help="Only of this driver.")
@click.option("--instance", type=click.UUID, help="Only of this instance.")
@click.option("--host", help="Only of this host.")
@click.option("--backend", help="Only of backends with this name.")
@click.option("--device", help="Only of this device.")
@click.option(
    "--attached", "which", flag_value="attached", default="attached", help="Units that are held; the default."
)
@click.option("--free", "which", flag_value="free", help="Units that nobody holds.")
@click.option("--all", "which", flag_value="all", help="All units.")
@options.limit
@pass_asked
def accelerator_list(asked: Asked, limit: int, which: str, device: str | None, **filters: Any) -> None:
    """List accelerators. Each row is one unit, with the instance that holds it. A project sees only its own units."""
    filters["device"] = names.device(asked.api, device) if device else None
    if which != "attached":
        filters |= {"attached": False} | ({"state": "free"} if which == "free" else {})
    rows = asked.rows("accelerators/", limit, **filters)
    show(rows, COLUMNS, asked.output, "No accelerators.")


def on_targets(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that accelerator-create and accelerator-delete share: targets, count, layout, reason, waiting."""
    for option in reversed(
        (
            click.option("--device", "devices", multiple=True, help="On this device; can be repeated."),
            click.option("--host", "hosts", multiple=True, help="On this host's --backend; can be repeated."),
            click.option(
                "--backend",
                "backends",
                multiple=True,
                help="On all devices of this backend of --host; can be repeated.",
            ),
            click.option(
                "--count",
                type=click.IntRange(1, MOST_UNITS),
                help="Number of units on each device. Without it, one is created, or all are deleted.",
            ),
            click.option(
                "--layout",
                multiple=True,
                metavar="WORD=VALUE",
                callback=options.words,
                help="Settings of the driver in addition to the number, such as type=nvidia-63; can be repeated.",
            ),
            click.option(
                "--generation",
                type=click.IntRange(0),
                help="The device's generation that you saw: refused if it has changed.",
            ),
            options.because,
            options.waits,
        )
    ):
        function = option(function)
    return function


@verb(
    "accelerator-create",
    "accelerator-create --device 3f1c --count 4\naccelerator-create --host cmp1 --host cmp2 --backend nics --count 2",
)
@on_targets
@pass_asked
def accelerator_create(asked: Asked, count: int | None, **how: Any) -> None:
    """Create more units on devices. The driver decides what a unit is, such as a virtual function or a mediated device.

    Each device is changed independently of the others.
    """
    _change(asked, "accelerators/", "create", count or 1, **how)


@verb("accelerator-delete", "accelerator-delete --device 3f1c --count 2\naccelerator-delete --device 3f1c --yes")
@on_targets
@options.yes
@pass_asked
def accelerator_delete(asked: Asked, count: int | None, yes: bool, **how: Any) -> None:
    """Remove units from devices. Without --count all units are removed. Refused while a unit of the device is held."""
    if count is None:
        named = [*how["devices"], *(f"{host} {backend}" for host in how["hosts"] for backend in how["backends"])]
        options.sure(f"Delete all units of {', '.join(named)}?", yes)
    _change(asked, "accelerators/delete/", "delete", count, **how)


@verb("accelerator-update", "accelerator-update 3f1c --layout vfs=8 --generation 41")
@click.argument("device")
@click.option(
    "--layout",
    multiple=True,
    required=True,
    metavar="WORD=VALUE",
    callback=options.words,
    help="Settings of the device's driver, see `changeable` of device-show; can be repeated.",
)
@click.option(
    "--generation", type=click.IntRange(0), help="The device's generation that you saw: refused if it has changed."
)
@options.because
@options.waits
@pass_asked
def accelerator_update(asked: Asked, device: str, wait: bool, **said: Any) -> None:
    """Change the layout of a device. The driver defines the layout's names. Refused while one of its units is held."""
    uuid = names.device(asked.api, device)
    command = asked.api.patch(f"devices/{uuid}/", options.said(said))
    row = {
        "target": device,
        "device": uuid,
        "command": command["uuid"],
        "outcome": "ordered",
        "state": command["state"],
    }
    _ended(asked, "update", [row], wait)


def _change(
    asked: Asked,
    path: str,
    what: str,
    count: int | None,
    devices: Sequence[str],
    hosts: Sequence[str],
    backends: Sequence[str],
    wait: bool,
    **said: Any,
) -> None:
    if bool(hosts) != bool(backends) or not (devices or hosts):
        raise click.UsageError("Select devices: give --device, or --host and --backend.")
    named = {names.device(asked.api, device): device for device in devices}
    targets: list[dict[str, str]] = [{"device": uuid} for uuid in named]
    targets += [{"host": host, "backend": backend} for host in hosts for backend in backends]
    answer = asked.api.post(path, {"targets": targets} | options.said({"count": count, **said}))
    _ended(asked, what, [_row(result, named) for result in answer["results"]], wait)


def _row(result: dict[str, Any], named: dict[str, str]) -> dict[str, Any]:
    """Convert the API's result for one device into an output row: ordered, or refused with the reason and exit code.

    `named` maps device uuids to the names that the user typed, which are shown as the target.
    """
    target = " ".join(named.get(word, word) for word in result["target"].values())
    row = {"target": target, "device": result["device"], "command": result["command"]}
    if result["command"]:
        return row | {"outcome": "ordered", "state": "queued", "text": ""}
    return row | {"outcome": "refused", "text": result["refused"], "code": CODES.get(result["kind"], Exit.REFUSED)}


def _ended(asked: Asked, what: str, rows: list[dict[str, Any]], wait: bool) -> None:
    """With `wait`, follow the ordered commands until they end; then show all rows and exit with their common code."""
    if wait:
        ordered = [row["command"] for row in rows if row["command"]]
        first = next((row["device"] for row in rows if row["command"]), "")
        ended = until_ended(asked.api, what, f"cyborg device-show {first}", ordered)
        for row in rows:
            if command := ended.get(row["command"]):
                row.update(command_ended(command))
    finish(rows, CHANGED, asked.output)
