"""usage: units held, free and out of offer, and how busy their devices are, by groups."""

from __future__ import annotations

from typing import Any

import click

from cyborgweb.cli import options
from cyborgweb.cli.options import Asked, pass_asked, verb
from cyborgweb.cli.output import show

BUSY = ("busy=load.utilization_percent_mean", "highest=load.utilization_percent_max", "power=load.power_watts")
"""Columns of load that several verbs have: percent, percent, watts."""
UNITS = ("total", "held", "free", "reserved", "sampled=load.sampled", *BUSY)


@verb("usage", "usage --by host,type --type GPU")
@click.option("--by", metavar="WHAT[,WHAT]", help="One or two of host, type, resource_class, project.")
@click.option("--host", help="Of this host alone.")
@click.option("--type", "kind", help="Of this type alone: GPU, FPGA, NIC, …")
@click.option("--resource-class", help="Of this resource class alone.")
@options.limit
@pass_asked
def usage(asked: Asked, limit: int, kind: str | None, **filters: Any) -> None:
    """Show what is held and how busy it is. A member sees what its own project holds."""
    rows = asked.rows("usage/", limit, **filters, type=kind)
    made_by = [f"{name}=group.{name}" for row in rows[:1] for name in row["group"]]
    show(rows, (*made_by, *UNITS), asked.output, "No units.")
