"""Commands that order an operation of a device or a host from the host's agent, and that list and show operations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from uuid import UUID

import click

from cyborgweb.cli import completion, names, options
from cyborgweb.cli.exit_codes import ExitCode
from cyborgweb.cli.following import wait_for_commands
from cyborgweb.cli.options import CliContext, drop_empty, pass_cli_context, verb_command
from cyborgweb.cli.output import print_row

COMMAND_COLUMNS = ("uuid", "state", "percent", "op", "device=device_name", "host=host.name", "by", "text")
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
RESULT_FIELDS = ("uuid", "op", "state", "percent", "progress", "text")
MAX_COMMANDS = 50


@verb_command("command-list", "command-list --host cmp1.example --open")
@click.option("--host", shell_complete=completion.complete_hosts, help="Only of this host.")
@click.option("--device", shell_complete=completion.complete_devices, help="Only of this device.")
@click.option("--open/--ended", "is_open", default=None, help="Only commands that have not ended, or only the others.")
@options.saved_view_option
@click.option(
    "--limit",
    "max_rows",
    type=click.IntRange(1),
    default=MAX_COMMANDS,
    show_default=True,
    help="Largest number of rows.",
)
@options.watch_option
@pass_cli_context
def command_list(
    cli_context: CliContext, device: str | None, is_open: bool | None, max_rows: int, **filters: Any
) -> None:
    """List commands to agents, the newest first."""
    uuid = names.resolve_device(cli_context.api, device) if device else None
    filters = drop_empty(filters | {"device": uuid}) | ({} if is_open is None else {"ended": not is_open})
    cli_context.print_list(
        lambda: cli_context.api.iterate_rows("commands/", max_rows, **filters), COMMAND_COLUMNS, "No commands."
    )


@verb_command("command-show", "command-show 0e8f9e63-1b5a-4738-9fb6-eff9659e382f --wait")
@click.argument("command", type=click.UUID)
@options.follow_option
@pass_cli_context
def command_show(cli_context: CliContext, command: UUID, wait: bool) -> None:
    """Show the progress and the result of a command to an agent."""
    _wait_and_print(cli_context, cli_context.api.get(f"commands/{command}/"), wait)


def _make_order_verb(name: str, text: str, example: str, *parameters: Decorator) -> click.Command:
    """Return the verb that orders an operation; its `name` is `device-OP` or `host-OP`, and `text` its help.

    `example` is what a user writes after the name. `parameters` are the options that the operation takes, named like
    the fields of the API.
    """
    target_kind, _, op = name.partition("-")
    resolve_target = names.resolve_device if target_kind == "device" else names.resolve_host

    @options.request_dry_run_option
    @options.command_reason_option
    @options.wait_option
    @pass_cli_context
    def order(cli_context: CliContext, wait: bool, **values: Any) -> None:
        """Order the operation `op` and print the command; with `wait`, follow it first. Raises CliError."""
        uuid = resolve_target(cli_context.api, values.pop(target_kind))
        body = {name: str(value) if isinstance(value, UUID) else value for name, value in drop_empty(values).items()}
        command = cli_context.api.post("commands/", {"op": op, target_kind: uuid} | body)
        _wait_and_print(cli_context, command, wait)

    completer = completion.complete_devices if target_kind == "device" else completion.complete_hosts
    decorators: tuple[Decorator, ...] = (click.argument(target_kind, shell_complete=completer), *parameters)
    decorated: Callable[..., Any] = order
    for decorator in reversed(decorators):
        decorated = decorator(decorated)
    return verb_command(name, f"{name} {example}", text)(decorated)


_driver_option = click.option("--driver", shell_complete=completion.complete_drivers, help="Only this driver.")

ORDER_VERBS = {
    verb.name or "": verb
    for verb in (
        _make_order_verb("device-health", "Ask the driver for a device's health and for the reasons.", "3f1c"),
        _make_order_verb("device-reset", "Reset the hardware. Its programmed image may be lost.", "3f1c"),
        _make_order_verb(
            "device-partition",
            "Divide a device into units. The driver defines the layout's keys.",
            '3f1c --layout vfs=4 --reason "four instances"',
            options.layout_option(required=True),
        ),
        _make_order_verb(
            "device-program",
            "Program a device with an image, which replaces its present one.",
            "3f1c --image 77ab0d1e-0a53-4a0c-8f0e-1c2d3e4f5a6b",
            click.option("--image", type=click.UUID, required=True, help="An image that is stored here or in Glance."),
            click.option("--deployable", type=click.UUID, help="Which deployable, if the device has several."),
        ),
        _make_order_verb(
            "device-uninstall",
            "Undo what installing a device changed on its host. The device becomes inactive.",
            "3f1c",
        ),
        _make_order_verb(
            "host-rescan",
            "Make a host's drivers look for devices now. This also ends the quarantine of the drivers that it asks.",
            "cmp1.example --driver pci_driver",
            _driver_option,
        ),
        _make_order_verb("host-logs", "Fetch the last lines of the log of a host's agent.", "cmp1.example"),
        _make_order_verb(
            "host-report",
            "Fetch the last report of a host's agent unchanged, for all drivers or for one.",
            "cmp1.example --driver pci_driver",
            _driver_option,
        ),
    )
}


def _wait_and_print(cli_context: CliContext, command: dict[str, Any], wait: bool) -> None:
    """With `wait`, follow the command until it ends; print it, and exit with REFUSED if it ended without success."""
    if wait:
        later = f"{cli_context.api.spell_verb('command-show')} {command['uuid']} --wait"
        title = f"{command['op']} {command['device_name'] or command['host']['name']}"
        command = wait_for_commands(cli_context.api, title, later, [command["uuid"]])[command["uuid"]]
    if cli_context.output.format == "table" and not cli_context.output.columns:
        print_row({name: command[name] for name in RESULT_FIELDS} | (command["detail"] or {}), cli_context.output)
    else:
        print_row(command, cli_context.output)
    if wait and command["state"] != "succeeded":
        sys.exit(ExitCode.REFUSED)
