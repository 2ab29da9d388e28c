"""The command usage: how many units are held, free and reserved, and the load of their devices, by group."""

from __future__ import annotations

from typing import Any

import click

from cyborgweb.cli import completion, options
from cyborgweb.cli.options import CliContext, pass_cli_context, verb_command
from cyborgweb.cli.output import print_rows

LOAD_COLUMNS = ("busy=load.utilization_percent_mean", "highest=load.utilization_percent_max", "power=load.power_watts")
"""Load columns that several verbs share: mean utilization and highest utilization in percent, power in watts."""
UNIT_COLUMNS = ("total", "held", "free", "reserved", "sampled=load.sampled", *LOAD_COLUMNS)


@verb_command("usage", "usage --by host,type --type GPU")
@click.option(
    "--by",
    metavar="WHAT[,WHAT]",
    help="One or two of host, type, resource_class, project. By default resource_class, or project for members.",
)
@click.option("--host", shell_complete=completion.complete_hosts, help="Only of this host.")
@click.option("--type", "kind", help="Only of this type: GPU, FPGA, NIC, …")
@click.option("--resource-class", help="Only of this resource class.")
@options.limit_option
@pass_cli_context
def show_usage(cli_context: CliContext, limit: int, kind: str | None, **filters: Any) -> None:
    """Show how many units are held and the load of their devices. A member sees only what its own project holds."""
    rows = cli_context.fetch_rows("usage/", limit, **filters, type=kind)
    group_columns = [f"{name}=group.{name}" for row in rows[:1] for name in row["group"]]
    print_rows(rows, (*group_columns, *UNIT_COLUMNS), cli_context.output, "No units.")
