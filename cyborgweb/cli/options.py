"""The parts that all verbs of `cyborg` share: common options, access to the API, and the form of their help.

Connection and output options are accepted both before and after the verb.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import click
from click.core import ParameterSource

from cyborgweb.cli.connection import ApiClient, HttpApiClient
from cyborgweb.cli.exit_codes import CliError, ExitCode
from cyborgweb.cli.logins import LoginOptions
from cyborgweb.cli.output import FORMATS, OutputOptions, print_rows
from cyborgweb.cli.watching import watch_rows

DEFAULT_LIMIT = 10_000
MAX_REASON = 500
MAX_KEY_VALUES = 64
DEFAULT_WATCH_S = 2.0
NOT_CONFIRMED_TEXT = "You did not confirm: nothing was changed."


@dataclass
class CliContext:
    """The connection and output settings of this call, which `pass_cli_context` passes to every verb.

    With a `client` the connection settings are not used.
    """

    login: LoginOptions = field(default_factory=LoginOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    client: ApiClient | None = None
    has_noted_limit: bool = False

    @cached_property
    def api(self) -> ApiClient:
        """The API client; over HTTP it logs in and connects only when its first method is called."""
        return self.client or HttpApiClient(self.login)

    def fetch_rows(self, path: str, limit: int, **filters: Any) -> list[dict[str, Any]]:
        """Return at most `limit` rows of a list; print a note on standard error if there are more.

        Filters that are None or empty are left out.
        """
        found = list(self.api.iterate_rows(path, limit + 1, **drop_empty(filters)))
        if len(found) > limit and not self.has_noted_limit:
            click.echo(f"Only the first {limit} rows are shown. Give a larger --limit to see more.", err=True)
            self.has_noted_limit = True
        return found[:limit]

    def print_list(
        self, fetch: Callable[[], Iterable[Mapping[str, Any]]], columns: Sequence[str], empty_text: str
    ) -> None:
        """Print the rows that `fetch` returns, as `print_rows` does; with --watch again and again, until Ctrl-C."""
        if self.output.watch_s:
            watch_rows(fetch, columns, self.output, empty_text)
        else:
            print_rows(fetch(), columns, self.output, empty_text)


pass_cli_context: Callable[[Callable[..., Any]], Callable[..., Any]] = click.make_pass_decorator(
    CliContext, ensure=True
)


class VerbCommand(click.Command):
    """A command that also accepts the common options after its name.

    Its help shows the output options. The connection options are hidden there, because `cyborg --help` shows them.
    Each line of `example` begins with the verb's name.
    """

    def __init__(self, *args: Any, example: str = "", **options: Any) -> None:
        super().__init__(*args, **options)
        self.example = example
        self.params += [*output_options(), *connection_options(hidden=True)]

    def format_epilog(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the examples, with the verb as the user types it, which differs between `cyborg` and `manage.py`."""
        lines = (line.removeprefix(self.name or "") for line in self.example.splitlines())
        formatter.write_paragraph()
        with formatter.indentation():
            formatter.write_text("\n".join(["\b\nExample:", *(f"  {context.command_path}{line}" for line in lines)]))


generation_option = click.option(
    "--generation",
    type=click.IntRange(0),
    help="Base the change on this generation, not on the one that is read now. Refused if it is not the present one.",
)


def choose_generation(present: Mapping[str, Any], generation: int | None) -> int:
    """Return the generation on which a change is based: `generation`, which the user has named, or that of the row
    `present`, which was read for the change."""
    return int(present["generation"]) if generation is None else generation


def verb_command(
    name: str, example: str, help_text: str | None = None
) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a function a verb. The help text is by default the function's docstring.

    Each line of `example` is shown in the help as a command line.
    """
    return click.command(name, cls=VerbCommand, example=example, help=help_text)


def connection_options(hidden: bool = False) -> list[click.Parameter]:
    """Return the connection options: server address, authentication, TLS, timeout. They store what they are given in
    `CliContext.login`.

    With `hidden` they are left out of the help and read no environment variables, because the visible options of the
    group already do.
    """

    def build_option(name: str, text: str, **options: Any) -> click.Option:
        """Return an option that stores its value in the field of `CliContext.login` with the same name."""
        field_name = name.removeprefix("--").replace("-", "_")
        variable = field_name.upper() if field_name == "os_cloud" else f"CYBORG_{field_name.upper()}"
        return click.Option(
            [name],
            help=text,
            hidden=hidden,
            expose_value=False,
            callback=_store_in_context("login", field_name),
            envvar=None if hidden else variable,
            show_envvar=not hidden,
            **options,
        )

    return [
        build_option("--url", "Address of the service, https://HOST[:PORT].", metavar="URL"),
        build_option("--token", "A token. Other users of this machine can see it here, so prefer the variable."),
        build_option("--token-file", "File whose last line is a token.", metavar="FILE"),
        build_option("--os-cloud", "Log in with this cloud of clouds.yaml; without it, with the OS_… variables."),
        build_option("--cacert", "File with the certificate authorities to trust.", metavar="FILE"),
        build_option("--insecure", "Do not verify the server's certificate.", is_flag=True),
        build_option("--timeout", "Seconds to wait for an answer; 30 by default.", type=click.FloatRange(0.1, 3600)),
    ]


def output_options() -> list[click.Parameter]:
    """Return the options --format, --json and --columns, which store what they are given in `CliContext.output`."""
    return [
        click.Option(
            ["--format", "-f"],
            type=click.Choice(FORMATS),
            expose_value=False,
            callback=_store_in_context("output", "format"),
            help="The default is table. json and yaml print whole rows, table and csv the columns.",
        ),
        click.Option(
            ["--json"],
            is_flag=True,
            expose_value=False,
            callback=_store_in_context("output", "format", lambda _: "json"),
            help="The same as --format json.",
        ),
        click.Option(
            ["--columns", "-c"],
            metavar="NAME,…",
            expose_value=False,
            callback=_store_in_context("output", "columns", lambda text: tuple(filter(None, text.split(",")))),
            help="These columns, or any field of the API's rows, such as host.name.",
        ),
    ]


def _store_in_context(
    settings_field: str, field_name: str, convert: Callable[[Any], Any] = lambda value: value
) -> Callable[..., Any]:
    """Return an option callback that stores a non-empty value in the field `field_name` of `CliContext.login` or
    `CliContext.output`.

    Login fields that were set on the command line are also noted in `LoginOptions.from_command_line`.
    """

    def store(context: click.Context, parameter: click.Parameter, value: Any) -> None:
        """Store the option's converted value in the CliContext; do nothing if it is empty."""
        if not value:
            return
        cli_context = context.ensure_object(CliContext)
        setattr(getattr(cli_context, settings_field), field_name, convert(value))
        if (
            settings_field == "login"
            and context.get_parameter_source(parameter.name or "") is ParameterSource.COMMANDLINE
        ):
            cli_context.login.from_command_line.add(field_name)

    return store


limit_option = click.option(
    "--limit",
    type=click.IntRange(1, 1_000_000),
    default=DEFAULT_LIMIT,
    show_default=True,
    help="Largest number of rows.",
)
saved_view_option = click.option(
    "--saved-view", metavar="NAME", help="Only rows that this saved view of the console shows."
)
watch_option = click.option(
    "--watch",
    is_flag=False,
    flag_value=DEFAULT_WATCH_S,
    type=click.FloatRange(0.5, 3600),
    metavar="[SECONDS]",
    expose_value=False,
    callback=_store_in_context("output", "watch_s"),
    help=f"Refresh the list every SECONDS ({DEFAULT_WATCH_S:g} by default) until Ctrl-C: in place on a terminal, else"
    " by printing the rows that are new or have changed.",
)
wait_option = click.option(
    "--wait/--no-wait", default=True, show_default=True, help="Wait until the work has ended, or return at once."
)
follow_option = click.option(
    "--wait", is_flag=True, help="Wait until it has ended. The exit code is then 1 if it failed."
)
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation. manage.py never asks.")

dry_run_option = click.option("--dry-run", is_flag=True, help="Only show what would be done. Nothing is changed.")


def _stop_before_changes(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    """Let the API client end the command before its first change, if the option was given."""
    if value:
        context.ensure_object(CliContext).api.is_dry_run = True


request_dry_run_option = click.option(
    "--dry-run",
    is_flag=True,
    expose_value=False,
    callback=_stop_before_changes,
    help="Only print the request that would be sent. Nothing is changed, and the service is not asked whether it would"
    " refuse.",
)
"""The option of the verbs for whose changes the service has no preview."""


def validate_reason(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Return the reason unchanged. Raises BadParameter if it is longer than MAX_REASON, the service's limit."""
    if len(value) > MAX_REASON:
        raise click.BadParameter(f"The reason has at most {MAX_REASON} characters.")
    return value


reason_option = click.option(
    "--reason", default="", callback=validate_reason, help="The reason, which is shown with the change and its events."
)
command_reason_option = click.option(
    "--reason", default="", callback=validate_reason, help="The reason, which is shown with the command and its events."
)


def read_dash(context: click.Context, parameter: click.Parameter, words: tuple[str, ...]) -> tuple[str, ...]:
    """Return the words of an argument without repetitions. The word `-` is replaced by the words on standard input,
    which is read to its end, but not while a shell completes the command line.
    """
    if context.resilient_parsing:
        return words
    return tuple(dict.fromkeys(one for word in words for one in (sys.stdin.read().split() if word == "-" else [word])))


def drop_empty(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` without those that are None, '', () or {}; False and 0 stay."""
    return {name: value for name, value in values.items() if value not in (None, "", (), {})}


def parse_key_values(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> dict[str, str]:
    """Parse options of the form KEY=VALUE, such as `vfs=4`, into a dict; the last value of a key wins.

    Raises BadParameter for another form or an empty value, and for more than MAX_KEY_VALUES options.
    """
    pairs = [text.partition("=") for text in value]
    if len(pairs) > MAX_KEY_VALUES or not all(key and mark and setting for key, mark, setting in pairs):
        raise click.BadParameter(f"Write KEY=VALUE, such as vfs=4; at most {MAX_KEY_VALUES} times.")
    return {key: setting for key, _, setting in pairs}


def layout_option(**attributes: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return the decorator for the option --layout, which is parsed into a dict; `attributes` are passed to click."""
    attributes.setdefault(
        "help", "Settings of the device's driver; the field `changeable` of a device lists them; can be repeated."
    )
    return click.option("--layout", multiple=True, metavar="KEY=VALUE", callback=parse_key_values, **attributes)


def confirm(question: str, is_confirmed: bool) -> None:
    """Ask the user to confirm, unless `is_confirmed` (the option --yes) is set.

    Raises CliError if the user declines, UsageError if standard input is not a terminal, and click.Abort if the user
    interrupts the question.
    """
    if is_confirmed or _is_dry_run():
        return
    _require_terminal()
    if not click.confirm(question, err=True):
        raise CliError(ExitCode.REFUSED, NOT_CONFIRMED_TEXT)


def confirm_number(question: str, number: int, is_confirmed: bool, noun: str = "") -> None:
    """Ask the user to type `number`, unless `is_confirmed` (the option --yes) is set. Anything else declines.

    `noun` says in the plural what is counted. Raises the same errors as `confirm`.
    """
    if is_confirmed or _is_dry_run():
        return
    _require_terminal()
    wanted = f"type {number}, the number of {noun}" if noun else f"type the number {number}"
    if click.prompt(f"{question} To confirm, {wanted}", default="", show_default=False, err=True) != str(number):
        raise CliError(ExitCode.REFUSED, NOT_CONFIRMED_TEXT)


def _is_dry_run() -> bool:
    """Return whether the command ends before its first change, so that nothing has to be confirmed."""
    context = click.get_current_context(silent=True)
    cli_context = context.find_object(CliContext) if context else None
    return bool(cli_context and cli_context.api.is_dry_run)


def can_be_confirmed(is_confirmed: bool) -> bool:
    """Return whether a question can be answered: by the option --yes, which sets `is_confirmed`, or on a terminal."""
    return is_confirmed or sys.stdin.isatty()


def _require_terminal() -> None:
    """Raise UsageError if there is no terminal on which a question could be answered."""
    if not can_be_confirmed(is_confirmed=False):
        raise click.UsageError("There is no terminal on which to confirm this: give --yes.")


def confirm_name(question: str, name: str, is_confirmed: bool) -> None:
    """Ask the user to type `name` as a confirmation, unless `is_confirmed` (the option --yes) is set.

    Raises CliError if the user types something else, UsageError if standard input is not a terminal.
    """
    if is_confirmed or _is_dry_run():
        return
    _require_terminal()
    if click.prompt(f"{question} To confirm, type its name", default="", show_default=False, err=True) != name:
        raise CliError(ExitCode.REFUSED, NOT_CONFIRMED_TEXT)
