"""Apply one action to many devices, attachments or accelerators by a single job of the service: preview, confirmation,
progress, results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import click

from cyborgweb.cli import completion, names, options
from cyborgweb.cli.confirmation import FORECAST_COLUMNS, build_forecast_rows, choose_draft_storage
from cyborgweb.cli.connection import ApiClient
from cyborgweb.cli.exit_codes import ExitCode
from cyborgweb.cli.following import WorkProgress, follow_until_ended
from cyborgweb.cli.options import CliContext, drop_empty, pass_cli_context, verb_command
from cyborgweb.cli.output import OutputOptions, format_row_lines, print_row, print_rows

MAX_OBJECTS = 1_000_000
MAX_LISTED_ACTIONS = 50
MAX_POLLED_OBJECTS = 20
"""If more objects are followed, one list is read to find those that still change, not each of them."""
BULK_COLUMNS = (
    "uuid",
    "state",
    "action",
    "target",
    "total",
    "waiting=counts.waiting",
    "refused=counts.refused",
    "by",
    "reason",
)
OUTCOMES = {"moved": "done", "unchanged": "unchanged", "refused": "refused", "": "waiting"}
"""How an output row names the outcome of the API."""
EXIT_CODE_BY_REASON = {
    "not_found": ExitCode.NOT_FOUND,
    "not_allowed": ExitCode.NOT_ALLOWED,
    "unavailable": ExitCode.AWAY,
    "read_only": ExitCode.AWAY,
}
"""Exit code for each reason why an object was refused; every other reason means `ExitCode.REFUSED`."""


@dataclass(frozen=True)
class ObjectKind:
    """A kind of objects of bulk actions.

    `noun` is the word of the API for one object. `resolve` returns the uuids of the objects that a user named, and
    raises UsageError or CliError for a wrong name.
    """

    noun: str
    resolve: Callable[[ApiClient, Iterable[str]], list[str]]

    @property
    def plural(self) -> str:
        """The word for several objects, which is also the name of their collection in the API, and of the field of a
        body that names them."""
        return f"{self.noun}s"


DEVICES = ObjectKind("device", names.resolve_devices)
ATTACHMENTS = ObjectKind("attachment", names.resolve_uuids)
ACCELERATORS = ObjectKind("accelerator", names.resolve_uuids)


@dataclass(frozen=True)
class Selection:
    """The objects of one action, selected in exactly one way: by name, by filters of their list, or as those of another
    bulk action (`retried`) that failed. If they `may_be_left_out`, the service chooses them."""

    kind: ObjectKind
    named: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    retried: UUID | None = None
    may_be_left_out: bool = False

    def __post_init__(self) -> None:
        """Raise UsageError unless exactly one way is given, or none if the objects `may_be_left_out`."""
        number_of_ways = sum(map(bool, (self.named, self.filters, self.retried)))
        if number_of_ways > 1 or (number_of_ways == 0 and not self.may_be_left_out):
            text = f"Select {self.kind.plural} in one way: name them, or give --filter, or --retry-failed."
            raise click.UsageError(text)

    @property
    def is_one_object(self) -> bool:
        """Whether the user named a single object."""
        return len(self.named) == 1


@dataclass(frozen=True)
class BulkOptions:
    """How the action is carried out: whether it was confirmed (`yes`), is only previewed, or is followed (`wait`).

    With `always_ask` the user is asked even if the service needs no confirmation. The question ends with `advice`.
    """

    yes: bool
    dry_run: bool
    wait: bool
    always_ask: bool = False
    advice: str = ""


def selection_options(
    kind: ObjectKind, filter_examples: str, complete: Callable[..., Any] | None = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the parameters with which a verb selects objects, and confirms and follows its
    action.

    `filter_examples` are shown in the help of --filter; `complete` completes the names of objects in a shell.
    """
    parameters = (
        click.argument(
            "named", nargs=-1, metavar=f"[{kind.noun.upper()}]...", callback=options.read_dash, shell_complete=complete
        ),
        click.option(
            "--filter",
            "filters",
            multiple=True,
            metavar="NAME=VALUE",
            help=f"The {kind.plural} that a filter of /api/{kind.plural}/ selects, such as {filter_examples}; can be"
            f" repeated. all=true selects every {kind.noun}.",
        ),
        click.option(
            "--retry-failed",
            "retried",
            type=click.UUID,
            metavar="BULK",
            help=f"The {kind.plural} that a bulk action of this verb refused or that failed in it.",
        ),
        click.option("--dry-run", is_flag=True, help="Print what would be done, and change nothing."),
        options.yes_option,
        options.reason_option,
        options.wait_option,
    )

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        """Add the parameters to a function, in their order."""
        for parameter in reversed(parameters):
            function = parameter(function)
        return function

    return decorate


add_device_options = selection_options(DEVICES, "host=cmp1 or state=inactive", completion.complete_devices)


def apply_action_to_many(
    cli_context: CliContext, action: str, selection: Selection, body: Mapping[str, str], how: BulkOptions
) -> list[dict[str, Any]]:
    """Apply an action to many objects as one job, and return an output row for each object.

    The service freezes the set of objects in a preview, and stores it only if it will be confirmed. If the preview says
    so, because the set is on several hosts or held objects would be changed, the user is asked to type the number of
    objects. With `dry_run` the preview is printed and there are no rows. Without `wait`, there are no rows either
    unless the job has ended already; then the command with which it can be followed is printed. Raises CliError if a
    name is wrong, the request is refused or the user declines, and nothing was changed then; UsageError for unusable
    filters.
    """
    kind = selection.kind
    path, request = _build_request(cli_context.api, action, selection, body)
    columns = (f"{kind.plural}=number", *FORECAST_COLUMNS[1:])
    preview = cli_context.api.preview(
        path, request, store_draft=choose_draft_storage(how.yes, how.dry_run, how.always_ask)
    )
    if how.dry_run:
        print_rows(build_forecast_rows(preview), columns, cli_context.output, f"No {kind.plural}.")
        click.echo(_describe_preview(kind, preview), err=True)
        return []
    if (preview["confirm"] or how.always_ask) and not how.yes:
        for line in format_row_lines(build_forecast_rows(preview), columns, OutputOptions()):
            click.echo(line, err=True)
        question = f"{_describe_preview(kind, preview)} {how.advice}".rstrip()
        options.confirm_number(question, preview["total"], is_confirmed=False)
    bulk = cli_context.api.post(path, request | ({"token": preview["token"]} if preview["token"] else {}))
    if how.wait:
        bulk = follow_bulk_action(cli_context.api, bulk)
    elif bulk["state"] == "running":
        click.echo(f"To follow: {spell_show_command(cli_context.api, bulk)}", err=True)
        return []
    return fetch_result_rows(cli_context.api, kind, bulk["uuid"])


def _build_request(
    api: ApiClient, action: str, selection: Selection, body: Mapping[str, str]
) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of the request for a bulk action. Raises UsageError and CliError."""
    if selection.retried:
        retried = api.get(f"bulk_actions/{selection.retried}/", fields="action")
        if retried["action"] != action:
            raise click.UsageError(f"{selection.retried} has the action {retried['action']}, not {action}.")
        return f"bulk_actions/{selection.retried}/retry/", drop_empty({"reason": body.get("reason")})
    request: dict[str, Any] = {"action": action, **body}
    if selection.filters:
        return "bulk_actions/", request | {"selector": parse_filters(selection.filters)}
    if selection.named:
        request[selection.kind.plural] = selection.kind.resolve(api, selection.named)
    return "bulk_actions/", request


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


def _describe_preview(kind: ObjectKind, preview: Mapping[str, Any]) -> str:
    """Return one sentence: how many objects and hosts an action reaches, and how many held devices it changes or, for
    other objects, of how many instances they are and how many held units are given back."""
    reach = (
        f"This applies {preview['action']} to {_count(preview['total'], kind.noun)} on"
        f" {_count(preview['hosts'], 'host')}"
    )
    if kind is DEVICES:
        return f"{reach}; {_count(preview['held'], 'held device')} would be changed."
    given_back = f"; {_count(preview['units'], 'held unit')} would be given back" if kind is ATTACHMENTS else ""
    return f"{reach}, of {_count(preview['instances'], 'instance')}{given_back}."


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
        """Fetch the bulk action again and return its progress, by the number of objects that are done."""
        nonlocal current
        current = api.get(f"bulk_actions/{bulk['uuid']}/")
        done_count = current["total"] - current["counts"]["waiting"]
        refused_count = current["counts"]["refused"]
        text = f"{done_count} of {_count(current['total'], current['target'])}"
        text += f", {refused_count} refused" if refused_count else ""
        return WorkProgress(100 * done_count / max(1, current["total"]), text, current["state"] != "running")

    if bulk["state"] == "running":
        follow_until_ended(bulk["action"], spell_show_command(api, bulk), poll)
    return current


def fetch_result_rows(api: ApiClient, kind: ObjectKind, uuid: str) -> list[dict[str, Any]]:
    """Fetch the result of each object of a bulk action, as an output row."""
    results = api.iterate_rows("bulk_results/", MAX_OBJECTS, bulk_action=uuid)
    return [_build_result_row(kind, result) for result in results]


def _build_result_row(kind: ObjectKind, result: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the API's result of one object into an output row with its exit code."""
    code = EXIT_CODE_BY_REASON.get(result["reason"], ExitCode.REFUSED)
    return {
        "target": result["target"],
        "outcome": OUTCOMES[result["outcome"]],
        "state": result["state"],
        "host": result["host"],
        "device" if kind is DEVICES else "name": result["name"],
        "text": result["text"],
        "reason": result["reason"],
        "code": code if result["outcome"] == "refused" else ExitCode.DONE,
    }


def follow_rows(
    api: ApiClient,
    kind: ObjectKind,
    title: str,
    rows: Iterable[dict[str, Any]],
    changing_states: Collection[str],
    end_row: Callable[[dict[str, Any], dict[str, Any]], None],
    get_progress: Callable[[dict[str, Any]], tuple[float, str]],
) -> None:
    """Follow the objects of output rows whose state is one of `changing_states`, until no object has such a state.

    `end_row` gets the row of an object that has ended and the object as the API shows it; `get_progress` returns the
    percentage and the text of one that has not. Raises CliError in the same cases as `follow_until_ended`.
    """
    changing = [row for row in rows if row.get("state") in changing_states]
    open_rows = [*changing]
    if not changing:
        return

    def poll() -> WorkProgress:
        """Fetch the objects that still change and return the progress of all; the row of each that has ended is
        updated."""
        percent, progress_text, still_changing = 0.0, "", set()
        if len(open_rows) > MAX_POLLED_OBJECTS:
            listed = api.iterate_rows(f"{kind.plural}/", MAX_OBJECTS, state=[*changing_states], fields="uuid")
            still_changing = {one["uuid"] for one in listed}
        for row in [*open_rows]:
            if row["target"] in still_changing:
                continue
            shown = api.get(f"{kind.plural}/{row['target']}/")
            if shown["state"] in changing_states:
                one_percent, one_text = get_progress(shown)
                percent, progress_text = percent + one_percent, one_text or progress_text
            else:
                end_row(row, shown)
                open_rows.remove(row)
        ended_count = len(changing) - len(open_rows)
        return WorkProgress(
            (100 * ended_count + percent) / len(changing),
            progress_text or f"{ended_count} of {len(changing)}",
            not open_rows,
        )

    follow_until_ended(title, f"{api.spell_verb(f'{kind.noun}-show')} {changing[0]['target']}", poll)


@verb_command("bulk-show", "bulk-show 5d0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b --wait")
@click.argument("bulk", type=click.UUID, required=False)
@options.follow_option
@options.watch_option
@pass_cli_context
def bulk_show(cli_context: CliContext, bulk: UUID | None, wait: bool) -> None:
    """Show a bulk action, which changes many devices, attachments or accelerators; without a uuid list the newest.

    The result of each object is in the list that `results` names. The verb that began the bulk action repeats it with
    --retry-failed for the objects that failed.
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
    """Cancel a bulk action. Objects that were changed stay changed; no further object is begun."""
    print_row(cli_context.api.post(f"bulk_actions/{bulk}/cancel/", {}), cli_context.output)
