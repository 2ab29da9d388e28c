"""Commands for accelerators, the units that an instance can hold: list, create, update and delete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from cyborgweb.cli import completion, names, options
from cyborgweb.cli.backends import describe_ended_command
from cyborgweb.cli.exit_codes import ExitCode
from cyborgweb.cli.following import wait_for_commands
from cyborgweb.cli.many_targets import show_and_exit
from cyborgweb.cli.options import CliContext, pass_cli_context, verb_command

LIST_COLUMNS = (
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
CHANGE_COLUMNS = ("device", "outcome", "state", "target", "text")
EXIT_CODE_BY_REASON = {"not_found": ExitCode.NOT_FOUND, "unavailable": ExitCode.AWAY}
MAX_UNITS = 65_535


@verb_command("accelerator-list", "accelerator-list --driver pci_driver\naccelerator-list --free --host cmp1.example")
@click.option("--driver", shell_complete=completion.complete_drivers, help="Only of this driver.")
@click.option("--instance", type=click.UUID, help="Only of this instance.")
@click.option("--host", shell_complete=completion.complete_hosts, help="Only of this host.")
@click.option("--backend", help="Only of backends with this name.")
@click.option("--device", shell_complete=completion.complete_devices, help="Only of this device.")
@click.option(
    "--attached",
    "which",
    flag_value="attached",
    default="attached",
    help="Units that are held; the default of cyborg.",
)
@click.option("--free", "which", flag_value="free", help="Units that nobody holds.")
@click.option("--all", "which", flag_value="all", help="All units; the default of manage.py.")
@options.limit_option
@options.watch_option
@pass_cli_context
def accelerator_list(cli_context: CliContext, limit: int, which: str, device: str | None, **filters: Any) -> None:
    """List accelerators. Each row is one unit, with the instance that holds it.

    In cyborg, members of a project see only the units that their project holds.
    """
    filters["device"] = names.resolve_device(cli_context.api, device) if device else None
    if which != "attached":
        filters |= {"attached": False} | ({"state": "free"} if which == "free" else {})
    cli_context.print_list(
        lambda: cli_context.fetch_rows("accelerators/", limit, **filters), LIST_COLUMNS, "No accelerators."
    )


generation_option = click.option(
    "--generation", type=click.IntRange(0), help="The device's generation that you saw: refused if it has changed."
)


def add_target_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the parameters that accelerator-create and accelerator-delete share, and return the decorated function.

    They are the targets (the devices that arguments and options name), layout, generation, reason and waiting.
    """
    for option in reversed(
        (
            click.argument(
                "targets", nargs=-1, metavar="[DEVICE|HOST/BACKEND]...", shell_complete=completion.complete_devices
            ),
            click.option(
                "--device",
                "devices",
                multiple=True,
                shell_complete=completion.complete_devices,
                help="On this device; can be repeated.",
            ),
            click.option(
                "--host",
                "hosts",
                multiple=True,
                shell_complete=completion.complete_hosts,
                help="On this host's --backend; can be repeated.",
            ),
            click.option(
                "--backend",
                "backends",
                multiple=True,
                help="On all devices of this backend of --host; can be repeated.",
            ),
            options.layout_option(
                help="Settings of the driver in addition to the number, such as bind=vfio-pci; can be repeated."
            ),
            generation_option,
            options.reason_option,
            options.wait_option,
        )
    ):
        function = option(function)
    return function


@verb_command(
    "accelerator-create",
    "accelerator-create --device 3f1c --count 4\naccelerator-create cmp1/nics cmp2/nics --count 2",
)
@add_target_options
@click.option(
    "--count",
    type=click.IntRange(1, MAX_UNITS),
    default=1,
    show_default=True,
    help="Number of units to add to each device.",
)
@pass_cli_context
def accelerator_create(cli_context: CliContext, count: int, **target_options: Any) -> None:
    """Create more units on devices. The driver decides what a unit is, such as a virtual function or a mediated device.

    Each device is changed independently of the others.
    """
    _change_units(cli_context, "accelerators/", "create", count, **target_options)


@verb_command(
    "accelerator-delete", "accelerator-delete --device 3f1c --count 2\naccelerator-delete --device 3f1c --yes"
)
@add_target_options
@click.option(
    "--count",
    type=click.IntRange(1, MAX_UNITS),
    help="Number of units to remove from each device; all by default.",
)
@options.yes_option
@pass_cli_context
def accelerator_delete(cli_context: CliContext, count: int | None, yes: bool, **target_options: Any) -> None:
    """Remove units from devices. Without --count all units are removed. Refused while a unit of the device is held."""
    if count is None:
        target_names = [
            *target_options["targets"],
            *target_options["devices"],
            *(f"{host} {backend}" for host in target_options["hosts"] for backend in target_options["backends"]),
        ]
        options.confirm(f"Delete all units of {', '.join(target_names)}?", yes)
    _change_units(cli_context, "accelerators/delete/", "delete", count, **target_options)


@verb_command("accelerator-update", "accelerator-update 3f1c --layout vfs=8 --generation 41")
@click.argument("device", shell_complete=completion.complete_devices)
@options.layout_option(required=True)
@generation_option
@options.reason_option
@options.wait_option
@pass_cli_context
def accelerator_update(cli_context: CliContext, device: str, wait: bool, **changes: Any) -> None:
    """Change the layout of a device. The driver defines the layout's keys. Refused while one of its units is held."""
    uuid = names.resolve_device(cli_context.api, device)
    command = cli_context.api.patch(f"devices/{uuid}/", options.drop_empty(changes))
    row = {
        "target": device,
        "device": uuid,
        "command": command["uuid"],
        "outcome": "ordered",
        "state": command["state"],
    }
    _wait_and_finish(cli_context, "update", [row], wait)


def _change_units(
    cli_context: CliContext,
    path: str,
    action: str,
    count: int | None,
    targets: Sequence[str],
    devices: Sequence[str],
    hosts: Sequence[str],
    backends: Sequence[str],
    wait: bool,
    **changes: Any,
) -> None:
    """Order a change of the number of units of each selected device, and show one row for each device.

    `path` is the API's path; `count` None removes all units; with `wait`, the changes are followed until they end.
    Raises UsageError if no devices are selected, or --host or --backend is given alone; CliError if a device is not
    found or the whole request is refused. Exits with the rows' common code if that is not DONE.
    """
    if bool(hosts) != bool(backends) or not (targets or devices or hosts):
        raise click.UsageError("Select devices: name them, or give --device, or --host and --backend.")
    devices = (*devices, *(target for target in targets if "/" not in target))
    host_backends = [target.rpartition("/")[::2] for target in targets if "/" in target]
    host_backends += [(host, backend) for host in hosts for backend in backends]
    name_by_uuid = {names.resolve_device(cli_context.api, device): device for device in devices}
    body: dict[str, Any] = {"targets": [{"device": uuid} for uuid in name_by_uuid]}
    body["targets"] += [{"host": host, "backend": backend} for host, backend in host_backends]
    answer = cli_context.api.post(path, body | options.drop_empty({"count": count, **changes}))
    _wait_and_finish(
        cli_context, action, [_build_result_row(result, name_by_uuid) for result in answer["results"]], wait
    )


def _build_result_row(result: dict[str, Any], name_by_uuid: dict[str, str]) -> dict[str, Any]:
    """Convert the API's result for one device into an output row: ordered, or refused with the reason and exit code.

    `name_by_uuid` maps device uuids to the names that the user typed, which are shown as the target.
    """
    target = " ".join(name_by_uuid.get(word, word) for word in result["target"].values())
    row = {"target": target, "device": result["device"], "command": result["command"]}
    if result["command"]:
        return row | {"outcome": "ordered", "state": "queued", "text": ""}
    return row | {
        "outcome": "refused",
        "text": result["refused"],
        "reason": result["reason"],
        "code": EXIT_CODE_BY_REASON.get(result["reason"], ExitCode.REFUSED),
    }


def _wait_and_finish(cli_context: CliContext, action: str, rows: list[dict[str, Any]], wait: bool) -> None:
    """With `wait`, follow the ordered commands until they end; then show all rows and exit with their common code.

    Raises CliError in the same cases as `follow_until_ended`. Returns if the common code is DONE.
    """
    if wait:
        ordered = [row["command"] for row in rows if row["command"]]
        first_device = next((row["device"] for row in rows if row["command"]), "")
        later = f"{cli_context.api.spell_verb('device-show')} {first_device}"
        if len(ordered) > 1:
            later = f"{cli_context.api.spell_verb('command-list')} --open"
        ended_commands = wait_for_commands(cli_context.api, action, later, ordered)
        for row in rows:
            if command := ended_commands.get(row["command"]):
                row.update(describe_ended_command(command))
    show_and_exit(rows, CHANGE_COLUMNS, cli_context.output)
