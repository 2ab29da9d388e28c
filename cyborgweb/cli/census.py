"""The command load-census: ask hosts for their current load, and find those with room for more requests."""

from __future__ import annotations

import sys
from typing import Any

import click

from cyborgweb.cli import completion
from cyborgweb.cli.exit_codes import ExitCode, to_printable_line
from cyborgweb.cli.options import CliContext, drop_empty, pass_cli_context, verb_command
from cyborgweb.cli.output import print_row, print_rows
from cyborgweb.cli.usage import LOAD_COLUMNS

CENSUS_COLUMNS = ("host=host.name", "fits", "free", "room", "heard", *LOAD_COLUMNS, "reason=why")
MAX_MISSING_NAMED = 10
"""How many of the hosts that did not answer are named on standard error; JSON and YAML output names all of them."""


def _split_host_names(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Split a comma-separated option into names; return () if the option was left out. Raises BadParameter."""
    names = tuple(name for name in (value or "").split(",") if name)
    if value is not None and not names:
        raise click.BadParameter("Name at least one host, or leave the option out.")
    return names


@verb_command("load-census", "load-census --profile gpu-small --count 4")
@click.option(
    "--profile",
    shell_complete=completion.complete_profiles,
    help="Look for room for requests of this device profile; without it, for any free unit.",
)
@click.option(
    "--count",
    "--before",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Number of further requests that must fit.",
)
@click.option("--hosts", metavar="NAME,…", callback=_split_host_names, help="Only these hosts.")
@click.option("--within", "within_s", type=click.FloatRange(0.1, 10), help="Seconds to wait for answers; 2 by default.")
@pass_cli_context
def load_census(cli_context: CliContext, **question: Any) -> None:
    """Ask hosts for their current load. Hosts with room come first, the least busy first.

    The exit code is 1 if no host has room.
    """
    census = cli_context.api.post("census/", drop_empty(question))
    if cli_context.output.format in ("json", "yaml") and not cli_context.output.columns:
        print_row(census, cli_context.output)
    else:
        print_rows(
            [{**row, "heard": _describe_sampled(row["load"])} for row in census["hosts"]],
            CENSUS_COLUMNS,
            cli_context.output,
            "No hosts.",
        )
        _report_missing_hosts(census)
    if not census["fitting"]:
        sys.exit(ExitCode.REFUSED)


def _describe_sampled(load: dict[str, Any] | None) -> str:
    """Return "N of M" when only N of the host's M devices have sent samples; "" when all have, or load is unknown."""
    return f"{load['sampled']} of {load['devices']}" if load and load["sampled"] < load["devices"] else ""


def _report_missing_hosts(census: dict[str, Any]) -> None:
    """Print on standard error which hosts did not answer and why, and how many were left out because there are too
    many.

    At most MAX_MISSING_NAMED hosts are named; the others are counted.
    """
    missing = census["missing"]
    for host in missing[:MAX_MISSING_NAMED]:
        click.echo(to_printable_line(f"{host['host']} did not answer: {host['why']}"), err=True)
    if len(missing) > MAX_MISSING_NAMED:
        click.echo(
            f"{len(missing) - MAX_MISSING_NAMED} more did not answer. --format json lists all of them.", err=True
        )
    if census["left_out"]:
        click.echo(
            f"Further hosts that were not asked: {census['left_out']}. Name the hosts to ask with --hosts.", err=True
        )
