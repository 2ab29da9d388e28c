"""Commands for accelerators, the units that an instance can hold: list, create, update and delete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from uuid import UUID

import click

from cyborgweb.cli import bulk, completion, names, options
from cyborgweb.cli.backends import describe_ended_command
from cyborgweb.cli.confirmation import order_after_preview
from cyborgweb.cli.exit_codes import CliError, ExitCode
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
    "hardware=device.name",
    "instance=instance.uuid",
    "label",
)
LABEL_COLUMNS = ("accelerator", "outcome", "host", "text")
MAX_LABELLED = 1000
CHANGE_COLUMNS = ("device", "outcome", "state", "target", "text")
EXIT_CODE_BY_REASON = {
    "not_found": ExitCode.NOT_FOUND,
    "not_allowed": ExitCode.NOT_ALLOWED,
    "unavailable": ExitCode.AWAY,
}
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
@options.saved_view_option
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
    empty_text = "No accelerators."
    if which == "attached":
        empty_text = "No accelerators are held. --all lists those that are free, too."
    cli_context.print_list(lambda: cli_context.fetch_rows("accelerators/", limit, **filters), LIST_COLUMNS, empty_text)


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
            click.option(
                "--retry-failed",
                "retried",
                type=click.UUID,
                metavar="BULK",
                help="On the devices that a bulk action of this verb refused or that failed in it.",
            ),
            options.dry_run_option,
            options.yes_option,
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

    Each device is changed independently of the others. Several devices are changed by one job of the service; you are
    asked to type their number first if they are on several hosts.
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
@pass_cli_context
def accelerator_delete(cli_context: CliContext, count: int | None, **target_options: Any) -> None:
    """Remove units from devices. Without --count all units are removed. Refused while a unit of the device is held.

    Several devices are changed by one job of the service; you are asked to type their number first if they are on
    several hosts, or if all units are removed.
    """
    always_ask = count is None and not target_options["retried"]
    _change_units(cli_context, "accelerators/delete/", "delete", count, always_ask=always_ask, **target_options)


@verb_command("accelerator-update", "accelerator-update 3f1c --layout vfs=8 --generation 41")
@click.argument("device", shell_complete=completion.complete_devices)
@options.layout_option(required=True)
@options.generation_option
@options.reason_option
@options.wait_option
@options.request_dry_run_option
@pass_cli_context
def accelerator_update(
    cli_context: CliContext, device: str, wait: bool, layout: dict[str, str], generation: int | None, reason: str
) -> None:
    """Change the layout of a device. The driver defines the layout's keys. Refused while one of its units is held.

    If the device changes meanwhile, its layout stays as it is.
    """
    uuid = names.resolve_device(cli_context.api, device)
    present = cli_context.api.get(f"devices/{uuid}/", fields="generation")
    body = {"layout": layout, "generation": options.choose_generation(present, generation)}
    command = cli_context.api.patch(f"devices/{uuid}/", body | options.drop_empty({"reason": reason}))
    row = {
        "target": device,
        "device": uuid,
        "command": command["uuid"],
        "outcome": "ordered",
        "state": command["state"],
    }
    _wait_and_finish(cli_context, "update", [row], wait)


@verb_command(
    "accelerator-label",
    "accelerator-label 6a0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b --label training\n"
    "accelerator-label --filter instance=6a0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b --label ''",
)
@click.argument("accelerators", nargs=-1, callback=options.read_dash)
@click.option(
    "--filter",
    "filters",
    multiple=True,
    metavar="NAME=VALUE",
    help="The accelerators that a filter of /api/accelerators/ selects, such as host=cmp1; can be repeated.",
)
@click.option("--label", required=True, help="The label; an empty one removes the labels.")
@options.dry_run_option
@options.yes_option
@pass_cli_context
def accelerator_label(
    cli_context: CliContext,
    accelerators: Sequence[str],
    filters: Sequence[str],
    label: str,
    dry_run: bool,
    yes: bool,
) -> None:
    """Set the label of accelerators that are held. Name them by uuid, or write - to read names from standard input.

    You are asked to type their number first if they are on several hosts.
    """
    if bool(accelerators) == bool(filters):
        raise click.UsageError("Select accelerators in one way: name them, or give --filter.")
    uuids = list(accelerators)
    if filters:
        rows = cli_context.fetch_rows("accelerators/", MAX_LABELLED, **bulk.parse_filters(filters))
        uuids = [row["uuid"] for row in rows if row["uuid"]]
        if not uuids:
            raise CliError(ExitCode.NOT_FOUND, "No accelerator that is held matches these filters.")
    answer = order_after_preview(
        cli_context,
        "accelerators/label/",
        {"accelerators": uuids, "label": label},
        f"Set the label {label!r}?",
        "accelerators",
        yes=yes,
        dry_run=dry_run,
    )
    if answer is not None:
        rows = [{**one, "target": one["accelerator"], "code": _find_exit_code(one)} for one in answer["results"]]
        show_and_exit(rows, LABEL_COLUMNS, cli_context.output)


def _find_exit_code(result: dict[str, Any]) -> ExitCode:
    """Return the exit code for the result of one accelerator."""
    refused = EXIT_CODE_BY_REASON.get(result["reason"], ExitCode.REFUSED)
    return refused if result["outcome"] == "refused" else ExitCode.DONE


def _change_units(
    cli_context: CliContext,
    path: str,
    action: str,
    count: int | None,
    targets: Sequence[str],
    devices: Sequence[str],
    hosts: Sequence[str],
    backends: Sequence[str],
    retried: UUID | None,
    dry_run: bool,
    yes: bool,
    reason: str,
    wait: bool,
    always_ask: bool = False,
    **changes: Any,
) -> None:
    """Order a change of the number of units of each selected device, and show one row for each device.

    `path` is the API's path; `count` None removes all units; with `wait`, the changes are followed until they end. With
    `dry_run` only the preview is printed. The user must type the number of devices if the preview says so, or with
    `always_ask`. Raises UsageError if no devices are selected, or --host or --backend is given alone; CliError if a
    device is not found or the whole request is refused. Exits with the rows' common code if that is not DONE.
    """
    how: dict[str, Any] = {"yes": yes, "dry_run": dry_run, "always_ask": always_ask}
    body: dict[str, Any] = options.drop_empty({"reason": reason})
    if retried:
        if targets or devices or hosts:
            raise click.UsageError("Select devices in one way: name them, or give --retry-failed.")
        question = "Repeat the change of units for the devices that failed?"
        bulk_action = order_after_preview(
            cli_context, f"bulk_actions/{retried}/retry/", body, question, "devices", **how
        )
        if bulk_action is not None:
            _follow_bulk_action(cli_context, action, bulk_action["uuid"], [], {}, wait)
        return
    if bool(hosts) != bool(backends) or not (targets or devices or hosts):
        raise click.UsageError("Select devices: name them, or give --device, or --host and --backend.")
    devices = (*devices, *(target for target in targets if "/" not in target))
    host_backends = [target.rpartition("/")[::2] for target in targets if "/" in target]
    host_backends += [(host, backend) for host in hosts for backend in backends]
    name_by_uuid = {names.resolve_device(cli_context.api, device): device for device in devices}
    named_targets = [{"device": uuid} for uuid in name_by_uuid]
    named_targets += [{"host": host, "backend": backend} for host, backend in host_backends]
    body |= {"targets": named_targets} | options.drop_empty({"count": count, **changes})
    spelled = ", ".join((*devices, *(f"{host} {backend}" for host, backend in host_backends)))
    units = "all units" if count is None else f"{count} unit{'' if count == 1 else 's'}"
    answer = order_after_preview(
        cli_context, path, body, f"{action.capitalize()} {units} of {spelled}?", "devices", **how
    )
    if answer is None:
        return
    if bulk_action_uuid := answer.get("bulk_action"):
        return _follow_bulk_action(cli_context, action, bulk_action_uuid, answer["results"], name_by_uuid, wait)
    _wait_and_finish(
        cli_context, action, [_build_result_row(result, name_by_uuid) for result in answer["results"]], wait
    )


def _follow_bulk_action(
    cli_context: CliContext,
    action: str,
    uuid: str,
    answers: Sequence[dict[str, Any]],
    name_by_uuid: dict[str, str],
    wait: bool,
) -> None:
    """With `wait`, follow a bulk action and its commands until they end; then show a row for each device, and exit with
    the rows' common code. Without `wait`, a bulk action that still runs is named on standard error.

    `answers` are the results with which the request was answered, and `name_by_uuid` is as for
    `_build_result_row`.
    """
    api = cli_context.api
    bulk_action = api.get(f"bulk_actions/{uuid}/")
    if wait:
        bulk_action = bulk.follow_bulk_action(api, bulk_action)
    elif bulk_action["state"] == "running":
        click.echo(f"To follow: {bulk.spell_show_command(api, bulk_action)}", err=True)
        return
    stored = {one["device"]: one for one in api.iterate_rows("bulk_results/", bulk.MAX_DEVICES, bulk_action=uuid)}
    targets = {one["device"]: one for one in answers if one["device"] in stored}
    results = [one for one in answers if one["device"] not in stored]
    for device, one in stored.items():
        target = targets[device]["target"] if device in targets else {"device": device}
        result = {"target": target, "device": device, "command": one["command"]}
        text = one["text"] if one["outcome"] else "It was not changed: the bulk action was cancelled."
        results.append(result | {"refused": text, "reason": one["reason"]})
    _wait_and_finish(cli_context, action, [_build_result_row(one, name_by_uuid) for one in results], wait)


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
