"""What all verbs of `cyborg` share: common options, access to the API, and the form of their help.

Connection and output options are accepted both before and after the verb.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import click
from click.core import ParameterSource

from cyborgweb.cli.connection import ApiClient
from cyborgweb.cli.logins import LoginOptions
from cyborgweb.cli.output import FORMATS, OutputOptions

DEFAULT_LIMIT = 10_000
MAX_REASON = 500
MAX_KEY_VALUES = 64


@dataclass
class CliContext:
    """The connection and output settings of this call, which `pass_cli_context` passes to every verb."""

    login: LoginOptions = field(default_factory=LoginOptions)
    output: OutputOptions = field(default_factory=OutputOptions)

    @cached_property
    def api(self) -> ApiClient:
        """The API client; it logs in and connects only when its first method is called."""
        return ApiClient(self.login)

    def fetch_rows(self, path: str, limit: int, **filters: Any) -> list[dict[str, Any]]:
        """Return at most `limit` rows of a list; print a note on standard error if there are more.

        Filters that are None or empty are left out.
        """
        found = list(self.api.iterate_rows(path, limit + 1, **drop_empty(filters)))
        if len(found) > limit:
            click.echo(f"Only the first {limit} rows are shown. Give a larger --limit to see more.", err=True)
        return found[:limit]


pass_cli_context: Callable[[Callable[..., Any]], Callable[..., Any]] = click.make_pass_decorator(
    CliContext, ensure=True
)


class VerbCommand(click.Command):
    """A command that also accepts the common options after its name.

    Its help shows the output options. The connection options are hidden there, because `cyborg --help` shows them.
    """

    def __init__(self, *args: Any, example: str = "", **options: Any) -> None:
        example_lines = "\n".join(f"  cyborg {line}" for line in example.splitlines())
        super().__init__(*args, **options)
        self.epilog = f"\b\nExample:\n{example_lines}"
        self.params += [*output_options(), *connection_options(hidden=True)]


def verb_command(name: str, example: str) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a function a verb. The function's docstring is the help text.

    Each line of `example` is shown in the help as a command line, after the word `cyborg`.
    """
    return click.command(name, cls=VerbCommand, example=example)


def connection_options(hidden: bool = False) -> list[click.Parameter]:
    """Return the connection options: server address, authentication, TLS, timeout.

    With `hidden` they are left out of the help and read no environment variables, because the visible options of the
    group already do.
    """

    def build_option(name: str, text: str, **options: Any) -> click.Option:
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
    """Return the output options --format and --columns."""
    return [
        click.Option(
            ["--format", "-f"],
            type=click.Choice(FORMATS),
            expose_value=False,
            callback=_store_in_context("output", "format"),
            help="The default is table. json and yaml print whole rows, table and csv the columns.",
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
wait_option = click.option(
    "--wait/--no-wait", default=True, help="Wait until the work has ended (the default), or only order it."
)
yes_option = click.option("--yes", "-y", is_flag=True, help="Do not ask for confirmation.")


def validate_reason(context: click.Context, parameter: click.Parameter, value: str) -> str:
    """Return the reason unchanged. Raises BadParameter if it is longer than MAX_REASON, the service's limit."""
    if len(value) > MAX_REASON:
        raise click.BadParameter(f"The reason has at most {MAX_REASON} characters.")
    return value


reason_option = click.option(
    "--reason", default="", callback=validate_reason, help="The reason, which is shown with the change and its events."
)


def drop_empty(values: dict[str, Any]) -> dict[str, Any]:
    """Return `values` without the options that were not given (None or empty)."""
    return {name: value for name, value in values.items() if value not in (None, "", (), {})}


def parse_key_values(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> dict[str, str]:
    """Parse options of the form WORD=VALUE, such as `vfs=4`, into a dict. Raises BadParameter."""
    pairs = [text.partition("=") for text in value]
    if len(pairs) > MAX_KEY_VALUES or not all(word and mark and said for word, mark, said in pairs):
        raise click.BadParameter(f"Write WORD=VALUE, such as vfs=4; at most {MAX_KEY_VALUES} times.")
    return {word: said for word, _, said in pairs}


def confirm(question: str, is_confirmed: bool) -> None:
    """Ask the user to confirm, unless `is_confirmed` (the option --yes) is set.

    Raises click.Abort if the user declines, UsageError if standard input is not a terminal.
    """
    if is_confirmed:
        return
    if not sys.stdin.isatty():
        raise click.UsageError("There is no terminal on which to confirm this: give --yes.")
    click.confirm(question, abort=True, err=True)
