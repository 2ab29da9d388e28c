"""Apply one action to many devices by a single job of the service: preview, confirmation, progress, results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import click

from cyborgweb.cli import completion, names, options
from cyborgweb.cli.confirmation import build_forecast_rows, fetch_confirmed_preview
from cyborgweb.cli.connection import ApiClient
from cyborgweb.cli.exit_codes import ExitCode
from cyborgweb.cli.following import WorkProgress, follow_until_ended
from cyborgweb.cli.options import CliContext, drop_empty, pass_cli_context, verb_command
from cyborgweb.cli.output import OutputOptions, format_row_lines, print_row, print_rows

MAX_DEVICES = 1_000_000
MAX_LISTED_ACTIONS = 50
BULK_COLUMNS = ("uuid", "state", "action", "total", "waiting=counts.waiting", "refused=counts.refused", "by", "reason")
PREVIEW_COLUMNS = ("devices=number", "outcome", "held", "text")
RESULT_COLUMNS = ("uuid=target", "outcome", "state", "host", "device", "text")
OUTCOMES = {"moved": "done", "unchanged": "unchanged", "refused": "refused", "": "waiting"}
"""How an output row names the outcome of the API."""
EXIT_CODE_BY_REASON = {
    "not_found": ExitCode.NOT_FOUND,
    "not_allowed": ExitCode.NOT_ALLOWED,
    "unavailable": ExitCode.AWAY,
    "read_only": ExitCode.AWAY,
}
"""Exit code for each reason why a device was refused; every other reason means `ExitCode.REFUSED`."""


@dataclass(frozen=True)
class Selection:
    """The devices of one action, selected in exactly one way: by name, by filters of the list of devices, or as those
    of another bulk action (`retried`) that failed."""

    devices: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    retried: UUID | None = None

    def __post_init__(self) -> None:
        """Raise UsageError unless exactly one way is given."""
        if sum(map(bool, (self.devices, self.filters, self.retried))) != 1:
            raise click.UsageError("Select devices in one way: name them, or give --filter, or --retry-failed.")

    @property
    def is_one_device(self) -> bool:
        """Whether the user named a single device."""
        return len(self.devices) == 1


@dataclass(frozen=True)
class BulkOptions:
    """How the action is carried out: whether it was confirmed (`yes`), is only previewed, or is followed (`wait`).

    With `always_ask` the user is asked even if the service needs no confirmation.
    """

    yes: bool
    dry_run: bool
    wait: bool
    always_ask: bool = False


def add_selection_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the parameters with which a verb selects devices and confirms and follows its action; return the decorated
    function."""
    for option in reversed(
        (
            click.argument("devices", nargs=-1, callback=options.read_dash, shell_complete=completion.complete_devices),
            click.option(
                "--filter",
                "filters",
                multiple=True,
                metavar="NAME=VALUE",
                help="The devices that a filter of /api/devices/ selects, such as host=cmp1 or state=inactive; can be"
                " repeated. all=true selects every device.",
            ),
            click.option(
                "--retry-failed",
                "retried",
                type=click.UUID,
                metavar="BULK",
                help="The devices that a bulk action of this verb refused or that failed in it.",
            ),
            click.option("--dry-run", is_flag=True, help="Print what would be done, and change nothing."),
            options.yes_option,
            options.reason_option,
            options.wait_option,
        )
    ):
        function = option(function)
    return function


def apply_action_to_many(
    cli_context: CliContext, action: str, selection: Selection, body: Mapping[str, str], how: BulkOptions
) -> list[dict[str, Any]]:
    """Apply an action to many devices as one job, and return an output row for each device.

    The service freezes the set of devices in a preview, which it stores only after the user has confirmed it. If the
    preview says so, because the set is on several hosts or held devices would be changed, the user is asked to type the
    number of devices. With `dry_run` the preview is printed and there are no rows. Without `wait`, there are no rows
    either unless the job has ended already; then the command with which it can be followed is printed. Raises CliError
    if a name is wrong, the request is refused or the user declines, and nothing was changed then; UsageError for
    unusable filters.
    """
    path, request = _build_request(cli_context.api, action, selection, body)
    preview = cli_context.api.preview(path, request, is_kept=how.yes and not how.dry_run)
    if how.dry_run:
        print_rows(build_forecast_rows(preview), PREVIEW_COLUMNS, cli_context.output, "No devices.")
        click.echo(_describe_preview(preview), err=True)
        return []
    if (preview["confirm"] or how.always_ask) and not how.yes:
        for line in format_row_lines(build_forecast_rows(preview), PREVIEW_COLUMNS, OutputOptions()):
            click.echo(line, err=True)
        options.confirm_number(_describe_preview(preview), preview["total"], is_confirmed=False)
    if not how.yes:
        preview = fetch_confirmed_preview(cli_context.api, path, request, preview)
    bulk = cli_context.api.post(path, {**request, "token": preview["token"]})
    if how.wait:
        bulk = follow_bulk_action(cli_context.api, bulk)
    elif bulk["state"] == "running":
        click.echo(f"To follow: {spell_show_command(cli_context.api, bulk)}", err=True)
        return []
    return fetch_result_rows(cli_context.api, bulk["uuid"])


def _build_request(
    api: ApiClient, action: str, selection: Selection, body: Mapping[str, str]
) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of the request for a bulk action. Raises UsageError and CliError."""
    if selection.retried:
        retried = api.get(f"bulk_actions/{selection.retried}/", fields="action")
        if retried["action"] != action:
            raise click.UsageError(f"{selection.retried} has the action {retried['action']}, not {action}.")
        return f"bulk_actions/{selection.retried}/retry/", drop_empty({"reason": body.get("reason")})
    request: dict[str, Any] = {"action": action} | drop_empty(dict(body))
    if selection.filters:
        return "bulk_actions/", request | {"selector": parse_filters(selection.filters)}
    return "bulk_actions/", request | {"devices": names.resolve_devices(api, selection.devices)}


def parse_filters(texts: Sequence[str]) -> dict[str, Any]:
    """Parse filters of the form NAME=VALUE into a selector of the API; the values of a repeated name become a list.

    Raises UsageError for another form.
    """
    values_by_name: dict[str, list[str]] = {}
    for text in texts:
        name, mark, value = text.partition("=")
        if not (name and mark and value):
            raise click.UsageError(f"--filter {text!r}: write NAME=VALUE, such as host=cmp1.")
        values_by_name.setdefault(name, []).append(value)
    if values_by_name == {"all": ["true"]}:
        return {"all": True}
    return {name: values if len(values) > 1 else values[0] for name, values in values_by_name.items()}


def _describe_preview(preview: Mapping[str, Any]) -> str:
    """Return one sentence: how many devices and hosts an action reaches, and how many held devices it changes."""
    return (
        f"This applies {preview['action']} to {_count(preview['total'], 'device')} on"
        f" {_count(preview['hosts'], 'host')}; {_count(preview['held'], 'held device')} would be changed."
    )


def _count(number: int, noun: str) -> str:
    """Return a number with its noun, such as "2 hosts"."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def spell_show_command(api: ApiClient, bulk: Mapping[str, Any]) -> str:
    """Return the command line that follows a bulk action."""
    return f"{api.spell_verb('bulk-show')} {bulk['uuid']} --wait"


def follow_bulk_action(api: ApiClient, bulk: dict[str, Any]) -> dict[str, Any]:
    """Follow a bulk action until it no longer runs, and return it. Raises CliError as `follow_until_ended` does."""
    current = bulk

    def poll() -> WorkProgress:
        """Fetch the bulk action again and return its progress, by the number of devices that are done."""
        nonlocal current
        current = api.get(f"bulk_actions/{bulk['uuid']}/")
        done_count = current["total"] - current["counts"]["waiting"]
        refused_count = current["counts"]["refused"]
        text = f"{done_count} of {current['total']} devices" + (f", {refused_count} refused" if refused_count else "")
        return WorkProgress(100 * done_count / max(1, current["total"]), text, current["state"] != "running")

    if bulk["state"] == "running":
        follow_until_ended(bulk["action"], spell_show_command(api, bulk), poll)
    return current


def fetch_result_rows(api: ApiClient, uuid: str) -> list[dict[str, Any]]:
    """Fetch the result of each device of a bulk action, as an output row."""
    return [_build_result_row(result) for result in api.iterate_rows("bulk_results/", MAX_DEVICES, bulk_action=uuid)]


def _build_result_row(result: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the API's result of one device into an output row with its exit code."""
    code = EXIT_CODE_BY_REASON.get(result["reason"], ExitCode.REFUSED)
    return {
        "target": result["device"],
        "outcome": OUTCOMES[result["outcome"]],
        "state": result["state"],
        "host": result["host"],
        "device": result["name"],
        "text": result["text"],
        "reason": result["reason"],
        "code": code if result["outcome"] == "refused" else ExitCode.DONE,
    }


@verb_command("bulk-show", "bulk-show 5d0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b --wait")
@click.argument("bulk", type=click.UUID, required=False)
@options.follow_option
@options.watch_option
@pass_cli_context
def bulk_show(cli_context: CliContext, bulk: UUID | None, wait: bool) -> None:
    """Show a bulk action, which changes many devices; without a uuid list the newest.

    The result of each device is in the list that `results` names; device-… --retry-failed repeats those that failed.
    """
    if bulk is None:
        return cli_context.print_list(
            lambda: cli_context.api.iterate_rows("bulk_actions/", MAX_LISTED_ACTIONS), BULK_COLUMNS, "No bulk actions."
        )
    shown = cli_context.api.get(f"bulk_actions/{bulk}/")
    if wait:
        shown = follow_bulk_action(cli_context.api, shown)
    print_row(shown, cli_context.output)
    if wait and (shown["counts"]["refused"] or shown["state"] != "done"):
        sys.exit(ExitCode.REFUSED)


@verb_command("bulk-cancel", "bulk-cancel 5d0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b")
@click.argument("bulk", type=click.UUID)
@options.request_dry_run_option
@pass_cli_context
def bulk_cancel(cli_context: CliContext, bulk: UUID) -> None:
    """Cancel a bulk action. Devices that were changed stay changed; no further device is begun."""
    print_row(cli_context.api.post(f"bulk_actions/{bulk}/cancel/", {}), cli_context.output)
