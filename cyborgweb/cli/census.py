"""The command load-census: ask hosts for their current load, and find those with room for more requests."""

from __future__ import annotations

import sys
from typing import Any

import click

from cyborgweb.cli.options import Asked, pass_asked, said, verb
from cyborgweb.cli.output import show, show_one
from cyborgweb.cli.problems import Exit, printable
from cyborgweb.cli.usage import BUSY

COLUMNS = ("host=host.name", "fits", "free", "room", "heard", *BUSY, "reason=why")
SHOWN = 10
"""How many of the hosts that did not answer are named on standard error; JSON and YAML output names all of them."""


def _names(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Split a comma-separated option into names; return () if the option was left out. Raises BadParameter."""
    names = tuple(name for name in (value or "").split(",") if name)
    if value is not None and not names:
        raise click.BadParameter("Name at least one host, or leave the option out.")
    return names


@verb("load-census", "load-census --profile gpu-small --count 4")
@click.option("--profile", help="Search room for requests of this device profile; without it, for any unit.")
@click.option(
    "--count",
    "--before",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="Number of further requests that must fit.",
)
@click.option("--hosts", metavar="NAME,…", callback=_names, help="Only these hosts.")
@click.option("--within", "within_s", type=click.FloatRange(0.1, 10), help="Seconds to wait for answers; 2 by default.")
@pass_asked
def load_census(asked: Asked, **question: Any) -> None:
    """Ask hosts for their current load. Hosts with room come first, the least busy first.

    The exit code is 1 if no host has room.
    """
    found = asked.api.post("census/", said(question))
    if asked.output.format in ("json", "yaml") and not asked.output.columns:
        show_one(found, asked.output)
    else:
        show([{**row, "heard": _heard(row["load"])} for row in found["hosts"]], COLUMNS, asked.output, "No hosts.")
        _tell(found)
    if not found["fitting"]:
        sys.exit(Exit.REFUSED)


def _heard(load: dict[str, Any] | None) -> str:
    """Return "N of M" when only N of the host's M devices have sent samples; "" when all have, or load is unknown."""
    return f"{load['sampled']} of {load['devices']}" if load and load["sampled"] < load["devices"] else ""


def _tell(found: dict[str, Any]) -> None:
    missing = found["missing"]
    for one in missing[:SHOWN]:
        click.echo(printable(f"{one['host']} did not answer: {one['why']}"), err=True)
    if len(missing) > SHOWN:
        click.echo(f"{len(missing) - SHOWN} more did not answer. --format json lists all of them.", err=True)
    if found["left_out"]:
        click.echo(
            f"Further hosts that were not asked: {found['left_out']}. Name the hosts to ask with --hosts.", err=True
        )
