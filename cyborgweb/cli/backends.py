"""Commands for the backends that drivers have found, and for the services that these backends offer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import click

from cyborgweb.cli import names, options
from cyborgweb.cli.following import until_ended
from cyborgweb.cli.options import Asked, pass_asked, verb
from cyborgweb.cli.outcomes import each, finish
from cyborgweb.cli.output import show, show_one
from cyborgweb.cli.problems import CliError, Exit

KINDS = ("pci", "mdev", "accel-class", "firmware", "remote")
SERVICES = ("passthrough", "sriov", "mdev", "program", "firmware", "reset", "health", "stats")
BACKENDS = ("host", "driver", "name", "kind", "devices", "services", "labels", "error")
OFFERS = ("host", "driver", "backend", "service=name", "version", "state", "limits", "reason")
DISCOVERED = ("host", "outcome", "state", "text")


@verb("backend-list", "backend-list --host cmp1.example --kind mdev")
@click.option("--host", help="Only of this host.")
@click.option("--driver", help="Only of this driver.")
@click.option("--kind", type=click.Choice(KINDS), help="Only of this kind.")
@click.option("--name", help="Only with this name.")
@options.limit
@pass_asked
def backend_list(asked: Asked, limit: int, **filters: Any) -> None:
    """List drivers' backends. Each row has the services that the backend offers, or the error that it reports."""
    rows = asked.rows("backends/", limit, **filters)
    show(rows, BACKENDS, asked.output, "No backends. `cyborg discover-services HOST` makes a host's drivers rescan.")


@verb("backend-show", "backend-show gpus --host cmp1.example")
@click.argument("backend")
@click.option("--host", help="On this host; needed if several hosts have a backend of this name.")
@click.option("--driver", help="Of this driver; needed if several drivers have a backend of this name.")
@pass_asked
def backend_show(asked: Asked, backend: str, host: str | None, driver: str | None) -> None:
    """Show a backend, given its name or its id. Its services are shown with their limits."""
    if ":" in backend:
        found = asked.api.get(f"backends/{quote(backend, safe=':')}/")
    else:
        rows = list(asked.api.rows("backends/", 2, **options.said({"name": backend, "host": host, "driver": driver})))
        if not rows:
            raise CliError(
                Exit.NOT_FOUND, f"There is no backend {backend!r}: `cyborg backend-list` lists all backends."
            )
        if len(rows) > 1:
            text = f"Several hosts or drivers have a backend {backend!r}: give --host, and --driver if necessary."
            raise CliError(Exit.NOT_FOUND, text)
        found = rows[0]
    show_one(found, asked.output)


@verb("service-list", "service-list --name sriov --state ready")
@click.option("--host", help="Only of this host.")
@click.option("--driver", help="Only of this driver.")
@click.option("--backend", help="Only of backends with this name.")
@click.option("--name", type=click.Choice(SERVICES), help="Only this service.")
@click.option("--state", type=click.Choice(["ready", "unavailable"]), help="Only in this state.")
@options.limit
@pass_asked
def service_list(asked: Asked, limit: int, **filters: Any) -> None:
    """List the services of backends. Each row has the version and the limits, or why the service is unavailable."""
    show(asked.rows("services/", limit, **filters), OFFERS, asked.output, "No services.")


@verb("discover-services", "discover-services cmp1.example --driver generic_driver")
@click.argument("hosts", nargs=-1)
@click.option("--all-hosts", is_flag=True, help="On every host.")
@click.option("--driver", help="Only this driver, which also ends its quarantine.")
@options.because
@options.waits
@pass_asked
def discover_services(
    asked: Asked, hosts: Sequence[str], all_hosts: bool, driver: str | None, reason: str, wait: bool
) -> None:
    """Make the drivers of hosts rescan now. Afterwards service-list shows what they found."""
    if bool(hosts) == all_hosts:
        raise click.UsageError("Select hosts: name them, or give --all-hosts.")
    if all_hosts:
        hosts = [row["name"] for row in asked.rows("hosts/", options.LIMIT, fields="name")]
    ordered: dict[str, str] = {}

    def act(name: str) -> dict[str, Any]:
        body = {"op": "rescan", "host": names.host(asked.api, name)}
        command = asked.api.post("commands/", body | options.said({"driver": driver, "reason": reason}))
        ordered[name] = command["uuid"]
        return {"host": name, "state": command["state"], "command": command["uuid"]}

    rows = [{"host": row.get("target"), **row} for row in each(hosts, act)]
    if wait:
        ended = until_ended(asked.api, "discover", "cyborg service-list", ordered.values())
        for row in rows:
            if command := ended.get(row.get("command", "")):
                row.update(command_ended(command))
    finish(rows, DISCOVERED, asked.output)


def command_ended(command: dict[str, Any]) -> dict[str, Any]:
    """Return the row fields that tell how a command ended: outcome, exit code, state and text."""
    done = command["state"] == "succeeded"
    outcome = {"outcome": "done" if done else "failed", "code": Exit.DONE if done else Exit.REFUSED}
    return outcome | {"state": command["state"], "text": command["text"]}
