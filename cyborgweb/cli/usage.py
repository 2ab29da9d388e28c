"""The command usage: how many units are held, free and reserved, and the load of their devices, by group."""

from __future__ import annotations

from typing import Any

import click

from cyborgweb.cli import options
from cyborgweb.cli.options import Asked, pass_asked, verb
from cyborgweb.cli.output import show

BUSY = ("busy=load.utilization_percent_mean", "highest=load.utilization_percent_max", "power=load.power_watts")
"""Load columns that several verbs share: mean utilization and highest utilization in percent, power in watts."""
UNITS = ("total", "held", "free", "reserved", "sampled=load.sampled", *BUSY)


@verb("usage", "usage --by host,type --type GPU")
@click.option("--by", metavar="WHAT[,WHAT]", help="One or two of host, type, resource_class, project.")
@click.option("--host", help="Only of this host.")
@click.option("--type", "kind", help="Only of this type: GPU, FPGA, NIC, …")
@click.option("--resource-class", help="Only of this resource class.")
@options.limit
@pass_asked
def usage(asked: Asked, limit: int, kind: str | None, **filters: Any) -> None:
    """Show how many units are held and the load of their devices. A member sees only what its own project holds."""
    rows = asked.rows("usage/", limit, **filters, type=kind)
    made_by = [f"{name}=group.{name}" for row in rows[:1] for name in row["group"]]
    show(rows, (*made_by, *UNITS), asked.output, "No units.")
