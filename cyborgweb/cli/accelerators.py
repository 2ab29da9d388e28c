"""Commands for accelerators, the units that an instance can hold: list, create, update and delete."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any
from uuid import UUID

import click

from cyborgweb.cli import bulk, completion, names, options
from cyborgweb.cli.backends import describe_ended_command
from cyborgweb.cli.confirmation import order_after_preview
from cyborgweb.cli.conflicts import change_based_on
from cyborgweb.cli.connection import ApiClient
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
CHANGE_COLUMNS = ("device", "outcome", "state", "target", "text")
MAX_UNITS = 65_535
PARTITION = "partition"
"""The bulk action that changes the units or the layout of devices."""


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
@click.option("--free", "which", flag_value="free", help="Units that are free. --all shows the released ones, too.")
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
            click.option(
                "--filter",
                "filters",
                multiple=True,
                metavar="NAME=VALUE",
                help="On the devices that a filter of /api/devices/ selects, such as host=cmp1, and whose number of"
                " units can be chosen; can be repeated. all=true selects every device.",
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
    "accelerator-create --device 3f1c --count 4\naccelerator-create cmp1/nics cmp2/nics --count 2\n"
    "accelerator-create --filter driver=pci_driver --filter state=ready --dry-run",
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


@verb_command(
    "accelerator-update",
    "accelerator-update 3f1c --layout vfs=8 --generation 41\n"
    "accelerator-update --host cmp1 --backend nics --layout mtu=9000\n"
    "accelerator-update --filter host=cmp1 --filter state=inactive --layout mtu=9000 --dry-run",
)
@bulk.add_device_options
@click.option(
    "--host",
    "hosts",
    multiple=True,
    shell_complete=completion.complete_hosts,
    help="All devices of this host; can be repeated.",
)
@click.option(
    "--backend", "backends", multiple=True, help="Of --host, only the devices of this backend; can be repeated."
)
@options.layout_option()
@options.generation_option
@pass_cli_context
def accelerator_update(
    cli_context: CliContext,
    named: Sequence[str],
    hosts: Sequence[str],
    backends: Sequence[str],
    filters: Sequence[str],
    retried: UUID | None,
    layout: dict[str, str],
    generation: int | None,
    dry_run: bool,
    yes: bool,
    reason: str,
    wait: bool,
) -> None:
    """Change the layout of devices. The driver defines the layout's keys. A device is refused while one of its units is
    held, and if it has changed meanwhile.

    Name devices, or write - to read their names from standard input. Several devices are changed by one job of the
    service; you are asked to type their number first if they are on several hosts. --host and a filter leave out
    devices whose layout cannot be changed. --generation is only for a single device that is named.
    """
    if backends and not hosts:
        raise click.UsageError("--backend selects devices of --host: give both.")
    selection = bulk.Selection(bulk.DEVICES, (*named,), (*filters,), retried, hosts=(*hosts,))
    if bool(layout) == bool(retried):
        raise click.UsageError("Give --layout, unless you give --retry-failed, which sets the same layout again.")
    _refuse_generation_of_many(selection.kind, selection.is_one_object, generation)
    body: dict[str, Any] = options.drop_empty({"reason": reason})
    how = {"yes": yes, "dry_run": dry_run}
    if retried:
        return _retry_failed(cli_context, "update", retried, body, wait, **how)
    uuid_by_name = {name: names.resolve_device(cli_context.api, name) for name in named}
    body |= {"layout": layout}
    if not selection.is_one_object:
        name_by_uuid = {uuid: name for name, uuid in uuid_by_name.items()}
        uuids = dict.fromkeys((*name_by_uuid, *_find_devices_of_hosts(cli_context.api, hosts, backends)))
        body |= {"selector": bulk.parse_filters(filters)} if filters else {"devices": [*uuids]}
        question = "Change the layout of these devices?"
        body |= {"action": PARTITION}
        return _change_many(cli_context, "update", "bulk_actions/", body, question, name_by_uuid, wait, **how)
    ((device, uuid),) = uuid_by_name.items()
    present = cli_context.api.get(f"devices/{uuid}/", fields="generation")
    body |= {"generation": options.choose_generation(present, generation)}
    command = order_after_preview(
        cli_context,
        f"devices/{uuid}/",
        body,
        f"Change the layout of {device}?",
        bulk.DEVICES.plural,
        method="PATCH",
        yes=yes,
        dry_run=dry_run,
    )
    if command is None:
        return
    row = {
        "target": device,
        "device": uuid,
        "command": command["uuid"],
        "outcome": "ordered",
        "state": command["state"],
    }
    _wait_and_finish(cli_context, "update", [row], wait)


def _find_devices_of_hosts(api: ApiClient, hosts: Sequence[str], backends: Sequence[str]) -> list[str]:
    """Return the uuids of the devices of these hosts, or of these backends of theirs, whose layout can be changed.

    Retired and missing devices are left out. Costs a request for each page of devices. Raises CliError if a host, or a
    backend of it, has no such device.
    """
    uuids: list[str] = []
    for host, backend in product(hosts, backends or ("",)):
        query = options.drop_empty({"host": host, "backend": backend}) | {"fields": "uuid,state,changeable"}
        rows = api.iterate_rows("devices/", bulk.MAX_OBJECTS, **query)
        found = [row["uuid"] for row in rows if row["changeable"] and row["state"] not in ("retired", "missing")]
        if not found:
            place = f"backend {backend} of host {host}" if backend else f"host {host}"
            text = f"There is no device of {place} whose layout can be changed."
            raise CliError(ExitCode.NOT_FOUND, text)
        uuids += found
    return uuids


@verb_command(
    "accelerator-label",
    "accelerator-label 6a0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b --label training\n"
    "accelerator-label --filter instance=6a0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b --label ''",
)
@bulk.selection_options(bulk.ACCELERATORS, "host=cmp1 or driver=pci_driver")
@click.option("--label", help="The label; an empty one removes the labels.")
@options.generation_option
@pass_cli_context
def accelerator_label(
    cli_context: CliContext,
    named: Sequence[str],
    filters: Sequence[str],
    retried: UUID | None,
    label: str | None,
    generation: int | None,
    dry_run: bool,
    yes: bool,
    reason: str,
    wait: bool,
) -> None:
    """Set the label of accelerators that are held. Name them by uuid, or write - to read uuids from standard input.

    The uuid is that of the request that holds the accelerator: `accelerator-list -c uuid,unit,host,instance.uuid`
    lists it.

    Several are labelled by one job of the service; you are asked to type their number first if they are on several
    hosts. Members of a project label those of their project. An accelerator whose label changes after the preview is
    refused. --generation is only for a single accelerator that is named.
    """
    selection = bulk.Selection(bulk.ACCELERATORS, (*named,), (*filters,), retried)
    if (label is None) != bool(retried):
        raise click.UsageError("Give --label, unless you give --retry-failed, which sets the same label again.")
    _refuse_generation_of_many(selection.kind, selection.is_one_object, generation)
    body = options.drop_empty({"reason": reason}) | ({} if label is None else {"label": label})
    if selection.is_one_object and not dry_run:
        (uuid,) = selection.kind.resolve(cli_context.api, named)
        row = _label_one(cli_context, uuid, body, generation)
        return show_and_exit([row], selection.kind.columns, cli_context.output)
    rows = bulk.apply_action_to_many(cli_context, "label", selection, body, bulk.BulkOptions(yes, dry_run, wait))
    if rows:
        show_and_exit(rows, selection.kind.columns, cli_context.output)


def _label_one(cli_context: CliContext, uuid: str, body: dict[str, Any], generation: int | None) -> dict[str, Any]:
    """Set the label of one accelerator, print before what will change, and return its output row.

    The change is based on `generation`, or on the one that is read now. Raises CliError, also if it has another one;
    then the difference is printed.
    """
    path = f"accelerators/{uuid}/"
    present = cli_context.api.get(path)
    with change_based_on(present, {"label": body["label"]}, generation) as based_on:
        shown = cli_context.api.patch(path, body | based_on)
    is_unchanged = shown["generation"] == present["generation"]
    return {
        "target": uuid,
        "outcome": "unchanged" if is_unchanged else "done",
        "host": shown["host"]["name"],
        "name": f"{shown['device']['name']} of instance {shown['instance']['uuid'] or 'none'}",
        "text": "has this label already" if is_unchanged else "",
    }


def _refuse_generation_of_many(kind: bulk.ObjectKind, is_one_object: bool, generation: int | None) -> None:
    """Raise UsageError if there is a generation and the user has not named a single object."""
    if generation is not None and not is_one_object:
        raise click.UsageError(f"--generation is only for a single {kind.noun} that is named.")


def _change_units(
    cli_context: CliContext,
    path: str,
    action: str,
    count: int | None,
    targets: Sequence[str],
    devices: Sequence[str],
    hosts: Sequence[str],
    backends: Sequence[str],
    filters: Sequence[str],
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
    `always_ask`. Raises UsageError if devices are not selected in exactly one way, or --host or --backend is given
    alone; CliError if a device is not found or the whole request is refused. Exits with the rows' common code if that
    is not DONE.
    """
    how = {"yes": yes, "dry_run": dry_run, "always_ask": always_ask}
    body: dict[str, Any] = options.drop_empty({"reason": reason})
    are_named = bool(targets or devices or hosts or backends)
    if sum((are_named, bool(filters), bool(retried))) > 1:
        raise click.UsageError("Select devices in one way: name them, or give --filter, or --retry-failed.")
    if retried:
        return _retry_failed(cli_context, action, retried, body, wait, **how)
    if not filters and (bool(hosts) != bool(backends) or not are_named):
        raise click.UsageError("Select devices: name them, or give --device, or --host and --backend, or --filter.")
    devices = (*devices, *(target for target in targets if "/" not in target))
    host_backends = [target.rpartition("/")[::2] for target in targets if "/" in target]
    host_backends += [(host, backend) for host in hosts for backend in backends]
    name_by_uuid = {names.resolve_device(cli_context.api, device): device for device in devices}
    named_targets = [{"device": uuid} for uuid in name_by_uuid]
    named_targets += [{"host": host, "backend": backend} for host, backend in host_backends]
    body |= {"selector": bulk.parse_filters(filters)} if filters else {"targets": named_targets}
    body |= options.drop_empty({"count": count, **changes})
    spelled = ", ".join((*devices, *(f"{host} {backend}" for host, backend in host_backends), *filters))
    units = "all units" if count is None else f"{count} unit{'' if count == 1 else 's'}"
    question = f"{action.capitalize()} {units} of {spelled}?"
    _change_many(cli_context, action, path, body, question, name_by_uuid, wait, **how)


def _retry_failed(
    cli_context: CliContext, action: str, uuid: UUID, body: dict[str, Any], wait: bool, **how: Any
) -> None:
    """Repeat a bulk action of the verb `action` for the devices that failed; show and follow it as `_change_many` does.

    Raises UsageError if another verb has started the bulk action.
    """
    path, verb = f"bulk_actions/{uuid}/", cli_context.api.spell_verb(f"accelerator-{action}")
    retried = cli_context.api.get(path, fields="action,arguments")
    if _find_action(retried) != action:
        raise click.UsageError(f"{uuid} is not a bulk action of `{verb}`.")
    question = "Repeat the change for the devices that failed?"
    _change_many(cli_context, action, f"{path}retry/", body, question, {}, wait, **how)


def _find_action(bulk_action: dict[str, Any]) -> str:
    """Return which verb for many devices starts such a bulk action: create, delete or update; '' if it is another
    verb."""
    if bulk_action["action"] != PARTITION:
        return ""
    units = bulk_action["arguments"]["units"]
    return "update" if units == 0 else "create" if units and units > 0 else "delete"


def _change_many(
    cli_context: CliContext,
    action: str,
    path: str,
    body: dict[str, Any],
    question: str,
    name_by_uuid: dict[str, str],
    wait: bool,
    **how: Any,
) -> None:
    """Send a change of devices, whose preview is shown and confirmed as `order_after_preview` does with `how`; then
    show a row for each device, with `wait` when the commands have ended.

    `name_by_uuid` is as for `_build_result_row`. Raises CliError and UsageError. Exits with the rows' common code if
    that is not DONE.
    """
    answer = order_after_preview(cli_context, path, body, question, bulk.DEVICES.plural, stores_draft=True, **how)
    if answer is None:
        return
    is_bulk_action = "uuid" in answer  # otherwise it has the results of the devices
    results = [] if is_bulk_action else answer["results"]
    if uuid := answer["uuid"] if is_bulk_action else answer.get("bulk_action"):
        return _follow_bulk_action(cli_context, action, uuid, results, name_by_uuid, wait)
    _wait_and_finish(cli_context, action, [_build_result_row(result, name_by_uuid) for result in results], wait)


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

    While it waits, it reads the bulk action only, whatever the number of devices; the result of each device is read
    once, page after page, when all have ended. `answers` are the results with which the request was answered, and
    `name_by_uuid` is as for `_build_result_row`.
    """
    api = cli_context.api
    bulk_action = api.get(f"bulk_actions/{uuid}/")
    if wait:
        bulk_action = bulk.follow_bulk_action(api, bulk_action, action)
    elif bulk_action["state"] == "running":
        click.echo(f"To follow: {bulk.spell_show_command(api, bulk_action)}", err=True)
        return
    target_by_device = {one["device"]: one["target"] for one in answers if one["device"]}
    rows, shown_devices = [], set()
    for one in api.iterate_rows("bulk_results/", bulk.MAX_OBJECTS, bulk_action=uuid):
        shown_devices.add(one["device"])
        target = target_by_device.get(one["device"], {"device": one["device"]})
        text = one["text"] if one["outcome"] else bulk.NOT_BEGUN_TEXT
        result = {"target": target, "device": one["device"], "command": one["command"]}
        row = _build_result_row(result | {"refused": text, "reason": one["reason"]}, name_by_uuid)
        if wait and one["command"] and one.get("command_state"):
            row |= describe_ended_command({"state": one["command_state"], "text": one["command_text"]})
        rows.append(row)
    rows = [_build_result_row(one, name_by_uuid) for one in answers if one["device"] not in shown_devices] + rows
    # A service of an older release does not count the commands: then each of them is followed.
    _wait_and_finish(cli_context, action, rows, wait and bulk_action.get("commands") is None)


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
        "code": bulk.EXIT_CODE_BY_REASON.get(result["reason"], ExitCode.REFUSED),
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
