"""Apply one action to many devices, attachments or accelerators by a single job of the service: preview, confirmation,
progress, results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any
from uuid import UUID

import click

from cyborgweb.cli import completion, names, options
from cyborgweb.cli.confirmation import FORECAST_COLUMNS, build_forecast_rows, choose_draft_storage
from cyborgweb.cli.connection import ApiClient
from cyborgweb.cli.exit_codes import ExitCode
from cyborgweb.cli.following import WorkProgress, follow_until_ended
from cyborgweb.cli.many_targets import exit_unless_done, find_common_code
from cyborgweb.cli.options import CliContext, drop_empty, pass_cli_context, verb_command
from cyborgweb.cli.output import OutputOptions, format_row_lines, print_row, print_rows

MAX_OBJECTS = 1_000_000
DEFAULT_SHOWN_ROWS = 100
"""How many bulk actions, or objects that were refused or have failed, `bulk-show` shows without --limit."""
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
ENDED_STATES = ("done", "cancelled")
OUTCOMES = {"moved": "done", "unchanged": "unchanged", "refused": "refused", "": "waiting"}
"""How an output row names the outcome of the API."""
NOT_BEGUN_TEXT = "It was not changed: the bulk action was cancelled."
"""The text of an object that waits still when the bulk action has ended."""
EXIT_CODE_BY_REASON = {
    "not_found": ExitCode.NOT_FOUND,
    "not_allowed": ExitCode.NOT_ALLOWED,
    "unavailable": ExitCode.AWAY,
    "read_only": ExitCode.AWAY,
}
"""Exit code for each reason why an object was refused; every other reason means `ExitCode.REFUSED`."""


def describe_device(shown: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of an output row that show what a device of the API is now, after it was installed.

    The text says how many requests the drain still waits for, or why the device failed; otherwise it is ''.
    """
    draining, text = shown["draining"], ""
    if draining:
        held = "1 request holds it" if draining["left"] == 1 else f"{draining['left']} requests hold it"
        text = f"{held}; then it becomes {draining['to']}"
    elif shown["state"] == "failed":
        text = shown["state_reason"]
    return {"state": shown["state"], "text": text}


def describe_installed_device(shown: dict[str, Any]) -> dict[str, Any]:
    """Do the same as `describe_device`; the outcome of a device that was installed and is not ready is `failed`."""
    failed = {} if shown["state"] in ("ready", "installing") else {"outcome": "failed", "code": ExitCode.REFUSED}
    return describe_device(shown) | failed


def describe_attachment(shown: dict[str, Any]) -> dict[str, Any]:
    """Return the columns of an output row that show what an attachment of the API is now."""
    return {"state": shown["state"], "host": shown["host"], "text": shown["fault"]}


@dataclass(frozen=True)
class ObjectKind:
    """A kind of objects of bulk actions.

    `noun` is the word of the API for one object. `columns` are those of a table of results. `resolve` returns the uuids
    of the objects that a user named, and raises UsageError or CliError for a wrong name. Objects in one of
    `changing_states` go on changing after a bulk action; `describe` returns the columns of an output row that show such
    an object as the API shows it now.
    """

    noun: str
    columns: tuple[str, ...]
    resolve: Callable[[ApiClient, Iterable[str]], list[str]]
    changing_states: tuple[str, ...] = ()
    describe: Callable[[dict[str, Any]], dict[str, Any]] = dict

    @property
    def plural(self) -> str:
        """The word for several objects, which is also the name of their collection in the API, and of the field of a
        body that names them."""
        return f"{self.noun}s"


DEVICES = ObjectKind(
    "device",
    ("uuid=target", "outcome", "state", "host", "device", "text"),
    names.resolve_devices,
    ("installing",),
    describe_installed_device,
)
ATTACHMENTS = ObjectKind(
    "attachment",
    ("attachment=target", "outcome", "state", "host", "text"),
    names.resolve_uuids,
    ("undoing", "detaching"),
    describe_attachment,
)
ACCELERATORS = ObjectKind("accelerator", ("accelerator=target", "outcome", "host", "name", "text"), names.resolve_uuids)
KIND_BY_ACTION = {"enable": DEVICES, "admit": DEVICES, "detach": ATTACHMENTS}
"""The kind of the objects of each action after which its objects go on changing."""
KIND_BY_TARGET = {kind.noun: kind for kind in (DEVICES, ATTACHMENTS, ACCELERATORS)}
"""The kind of the objects of a bulk action, by the field `target` of the API."""


@dataclass(frozen=True)
class Selection:
    """The objects of one action, selected in exactly one way: by name, by filters of their list, as those of another
    bulk action (`retried`) that failed, or as those of `hosts`, which is None for a verb without --host. If they
    `may_be_left_out`, the service chooses them."""

    kind: ObjectKind
    named: tuple[str, ...] = ()
    filters: tuple[str, ...] = ()
    retried: UUID | None = None
    may_be_left_out: bool = False
    hosts: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Raise UsageError unless exactly one way is given, or none if the objects `may_be_left_out`."""
        number_of_ways = sum(map(bool, (self.named, self.filters, self.retried, self.hosts)))
        if number_of_ways > 1 or (number_of_ways == 0 and not self.may_be_left_out):
            host_way = "" if self.hosts is None else "--host, or "
            text = f"Select {self.kind.plural} in one way: name them, or give {host_way}--filter, or --retry-failed."
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
    return fetch_result_rows(cli_context.api, kind, bulk)


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


def follow_bulk_action(api: ApiClient, bulk: dict[str, Any], title: str = "") -> dict[str, Any]:
    """Follow a bulk action until it and the work that it has ordered have ended, and return it.

    This work is the commands of its devices, the installation of its devices, or the detachment of its attachments. A
    service of an older release does not count the commands, which are not followed then. `title` names the bulk action
    for the user; by default its action. Raises CliError as `follow_until_ended` does.
    """
    current = bulk

    def poll() -> WorkProgress:
        """Fetch the bulk action again and return its progress."""
        nonlocal current
        current = api.get(f"bulk_actions/{bulk['uuid']}/")
        return _compute_progress(api, current)

    if bulk["state"] == "running" or bulk.get("commands") is not None or bulk["action"] in KIND_BY_ACTION:
        follow_until_ended(title or bulk["action"], spell_show_command(api, bulk), poll)
    return current


def _compute_progress(api: ApiClient, bulk: Mapping[str, Any]) -> WorkProgress:
    """Return the progress of a bulk action and of the work that it has ordered, by the number of objects that are
    done."""
    open_work, failed_count = _count_open_work(api, bulk), _count_failed(bulk)
    done_count = bulk["total"] - bulk["counts"]["waiting"] - open_work
    text = f"{done_count} of {_count(bulk['total'], bulk['target'])}"
    text += f", {failed_count} refused{'' if bulk.get('commands') is None else ' or failed'}" if failed_count else ""
    has_ended = bulk["state"] != "running" and not open_work
    return WorkProgress(100 * done_count / max(1, bulk["total"]), text, has_ended)


def _count_open_work(api: ApiClient, bulk: Mapping[str, Any]) -> int:
    """Return the number of objects of a bulk action on which the work that it has ordered goes on.

    The service counts commands. Other work is looked for when the bulk action has ended, in the list of the objects
    that are still changing.
    """
    if bulk.get("commands") is not None:
        return int(bulk["commands"]["open"])
    kind = _find_changing_kind(bulk)
    return sum(1 for _ in _fetch_objects(api, kind, bulk, kind.changing_states, fields="uuid")) if kind else 0


def _find_changing_kind(bulk: Mapping[str, Any]) -> ObjectKind | None:
    """Return the kind of the objects of a bulk action that has ended, if its objects go on changing; otherwise None."""
    kind = KIND_BY_ACTION.get(bulk["action"])
    return kind if bulk["state"] in ENDED_STATES else None


def _fetch_objects(
    api: ApiClient, kind: ObjectKind, bulk: Mapping[str, Any], states: Collection[str], **query: str
) -> Iterator[dict[str, Any]]:
    """Fetch the objects of a bulk action that are in one of these states now, page after page; all of them without
    states."""
    return api.iterate_rows(
        f"{kind.plural}/", MAX_OBJECTS, bulk_action=bulk["uuid"], **({"state": [*states]} if states else {}), **query
    )


def _count_failed(bulk: Mapping[str, Any]) -> int:
    """Return the number of objects of a bulk action that were refused, or whose command has ended without success."""
    commands: Mapping[str, int] = bulk.get("commands") or {}
    refused_count: int = bulk["counts"]["refused"]
    return refused_count + sum(number for state, number in commands.items() if state not in ("open", "succeeded"))


def find_exit_code(bulk: Mapping[str, Any], failed_rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the exit code of a bulk action that was followed to its end, as of the rows of all its objects.

    `failed_rows` are those of all objects that were refused or have failed. Objects that wait still were not begun
    because the bulk action was cancelled, or is a draft; they count as refused.
    """
    codes = {row["code"] for row in failed_rows} | ({ExitCode.REFUSED} if bulk["counts"]["waiting"] else set())
    if len(failed_rows) + bulk["counts"]["waiting"] < bulk["total"]:
        codes.add(ExitCode.DONE)
    return find_common_code({"code": code} for code in codes)


def iterate_failed_rows(api: ApiClient, bulk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Fetch the results of the objects of a bulk action that were refused, or that have failed since, as output rows.

    Costs one request for each page of them, and one for each page of the devices whose installation has failed.
    """
    kind = KIND_BY_TARGET[bulk["target"]]
    shown_by_uuid: dict[str, dict[str, Any]] | None = None
    for result in api.iterate_rows("bulk_results/", MAX_OBJECTS, bulk_action=bulk["uuid"], failed="true"):
        row = _build_result_row(kind, result)
        if result["outcome"] != "refused":
            row |= {"outcome": "failed", "code": ExitCode.REFUSED}
            if result["command_state"]:
                row |= {"state": result["command_state"], "text": result["command_text"]}
            else:
                if shown_by_uuid is None:
                    shown_by_uuid = {shown["uuid"]: shown for shown in _fetch_objects(api, kind, bulk, ("failed",))}
                row |= kind.describe(shown_by_uuid[row["target"]]) if row["target"] in shown_by_uuid else {}
        yield row


def fetch_result_rows(api: ApiClient, kind: ObjectKind, bulk: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Fetch the result of each object of a bulk action, as an output row. It shows the present state of an object that
    went on changing after the bulk action.

    Costs one request for each page of the results, and one for each page of the objects if any has gone on changing.
    """
    results = api.iterate_rows("bulk_results/", MAX_OBJECTS, bulk_action=bulk["uuid"])
    rows = [_build_result_row(kind, result) for result in results]
    if any(row["state"] in kind.changing_states for row in rows):
        present = {shown["uuid"]: shown for shown in _fetch_objects(api, kind, bulk, ())}
        for row in rows:
            if row["state"] in kind.changing_states and (shown := present.get(row["target"])):
                row.update(kind.describe(shown))
    return rows


def _build_result_row(kind: ObjectKind, result: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the API's result of one object of a bulk action that has ended into an output row with its exit code."""
    code = EXIT_CODE_BY_REASON.get(result["reason"], ExitCode.REFUSED)
    is_waiting = not result["outcome"]
    return {
        "target": result["target"],
        "outcome": OUTCOMES[result["outcome"]],
        "state": result["state"],
        "host": result["host"],
        "device" if kind is DEVICES else "name": result["name"],
        "text": NOT_BEGUN_TEXT if is_waiting else result["text"],
        "reason": result["reason"],
        "code": code if is_waiting or result["outcome"] == "refused" else ExitCode.DONE,
    }


@verb_command("bulk-show", "bulk-show 5d0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b --wait")
@click.argument("bulk", type=click.UUID, required=False)
@options.follow_option
@click.option(
    "--limit",
    type=click.IntRange(1, MAX_OBJECTS),
    default=DEFAULT_SHOWN_ROWS,
    show_default=True,
    help="Largest number of objects that were refused or have failed or, without a uuid, of bulk actions.",
)
@options.watch_option
@pass_cli_context
def bulk_show(cli_context: CliContext, bulk: UUID | None, wait: bool, limit: int) -> None:
    """Show a bulk action, which changes many devices, attachments or accelerators; without a uuid list the newest.

    --wait also waits for the commands, installations and detachments that it has ordered, and exits with the same code
    as the verb that began the bulk action: 0 if all objects are done, 6 if only some are. The objects that were refused
    or have failed are shown, as many as --limit says, in JSON and YAML as the field `failed`. The field `results` is
    the URL of the list with the result of each object. The verb that began the bulk action repeats it with
    --retry-failed for the objects that failed.
    """
    if bulk is None:
        return cli_context.print_list(
            lambda: cli_context.api.iterate_rows("bulk_actions/", limit), BULK_COLUMNS, "No bulk actions."
        )
    shown = cli_context.api.get(f"bulk_actions/{bulk}/")
    if wait:
        shown = follow_bulk_action(cli_context.api, shown)
    # The exit code needs all of them, the output only the first.
    failed_rows = list(islice(iterate_failed_rows(cli_context.api, shown), None if wait else limit + 1))
    _print_bulk_action(shown, failed_rows, limit, cli_context.output)
    if wait:
        exit_unless_done(find_exit_code(shown, failed_rows))


def _print_bulk_action(
    bulk: Mapping[str, Any], failed_rows: Sequence[dict[str, Any]], limit: int, output: OutputOptions
) -> None:
    """Print a bulk action with the first of its objects that were refused or have failed, at most `limit`.

    As a table these are rows below the bulk action; otherwise, and with chosen columns, they are its field `failed`. If
    there are more, standard error says so.
    """
    failed = [{name: row[name] for name in row if name != "code"} for row in failed_rows[:limit]]
    if output.format == "table" and not output.columns:
        print_row(bulk, output)
        print_rows(failed, KIND_BY_TARGET[bulk["target"]].columns, output)
    else:
        print_row({**bulk, "failed": failed}, output)
    if len(failed_rows) > limit:
        text = f"Only the first {limit} {bulk['target']}s that were refused or have failed are shown."
        click.echo(f"{text} A larger --limit shows more; all are listed at {bulk['results']}&failed=true", err=True)


@verb_command("bulk-cancel", "bulk-cancel 5d0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b")
@click.argument("bulk", type=click.UUID)
@options.request_dry_run_option
@pass_cli_context
def bulk_cancel(cli_context: CliContext, bulk: UUID) -> None:
    """Cancel a bulk action. Objects that were changed stay changed; no further object is begun."""
    print_row(cli_context.api.post(f"bulk_actions/{bulk}/cancel/", {}), cli_context.output)
