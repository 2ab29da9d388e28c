"""Commands for the backends of drivers, reported or configured, and for the services that these backends offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import quote

import click

from cyborgweb.cli import completion, names, options
from cyborgweb.cli.conflicts import edit_settings, show_conflict
from cyborgweb.cli.drivers import finish_rollout, parse_set_options, read_driver
from cyborgweb.cli.exit_codes import CliError, ExitCode
from cyborgweb.cli.following import wait_for_commands
from cyborgweb.cli.many_targets import run_for_each, show_and_exit
from cyborgweb.cli.options import CliContext, pass_cli_context, verb_command
from cyborgweb.cli.output import print_row

BACKEND_KINDS = ("pci", "mdev", "accel-class", "firmware", "remote")
BACKEND_STATES = ("answering", "failing", "waiting", "disabled")
DEFAULT_DRIVER = "generic_driver"
SERVICE_NAMES = ("passthrough", "sriov", "mdev", "program", "firmware", "reset", "health", "stats")
BACKEND_COLUMNS = ("host", "driver", "name", "kind", "state", "devices", "services", "labels", "reason")
SERVICE_COLUMNS = ("host", "driver", "backend", "service=name", "version", "state", "limits", "reason")
MAX_HOSTS = 1_000_000
DISCOVER_COLUMNS = ("host", "outcome", "state", "text")


@verb_command("backend-list", "backend-list --host cmp1.example --kind mdev")
@click.option("--host", shell_complete=completion.complete_hosts, help="Only of this host.")
@click.option("--driver", shell_complete=completion.complete_drivers, help="Only of this driver.")
@click.option("--kind", type=click.Choice(BACKEND_KINDS), help="Only of this kind.")
@click.option("--name", help="Only with this name.")
@click.option("--state", type=click.Choice(BACKEND_STATES), help="Only in this state.")
@click.option("--failing/--answering", default=None, help="Only backends that have an error, or only the others.")
@options.saved_view_option
@options.limit_option
@options.watch_option
@pass_cli_context
def backend_list(cli_context: CliContext, limit: int, **filters: Any) -> None:
    """List drivers' backends: those that are reported, and those that are configured and not reported.

    Each row has the services that the backend offers, or the reason why it does not answer.
    """
    cli_context.print_list(
        lambda: cli_context.fetch_rows("backends/", limit, **filters),
        BACKEND_COLUMNS,
        "No backends. `cyborg discover-services HOST` makes a host's drivers rescan.",
    )


@verb_command("backend-show", "backend-show gpus --host cmp1.example")
@click.argument("backend")
@click.option(
    "--host",
    shell_complete=completion.complete_hosts,
    help="On this host; needed if several hosts have a backend of this name.",
)
@click.option(
    "--driver",
    shell_complete=completion.complete_drivers,
    help="Of this driver; needed if several drivers have a backend of this name.",
)
@pass_cli_context
def backend_show(cli_context: CliContext, backend: str, host: str | None, driver: str | None) -> None:
    """Show a backend, given its name or its id. Its services are shown with their limits."""
    if ":" in backend:
        shown_backend = cli_context.api.get(f"backends/{quote(backend, safe=':')}/")
    else:
        rows = list(
            cli_context.api.iterate_rows(
                "backends/", 2, **options.drop_empty({"name": backend, "host": host, "driver": driver})
            )
        )
        if not rows:
            raise CliError(
                ExitCode.NOT_FOUND, f"There is no backend {backend!r}: `cyborg backend-list` lists all backends."
            )
        if len(rows) > 1:
            text = f"Several hosts or drivers have a backend {backend!r}: give --host, and --driver if necessary."
            raise CliError(ExitCode.NOT_FOUND, text)
        shown_backend = rows[0]
    print_row(shown_backend, cli_context.output)


def add_change_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the name of a backend and the options of every change of one, and return the decorated function."""
    for option in reversed(
        (
            click.argument("backend"),
            click.option("--host", required=True, shell_complete=completion.complete_hosts, help="On this host."),
            click.option("--driver", default=DEFAULT_DRIVER, show_default=True, help="Of this driver."),
            options.generation_option,
            options.request_dry_run_option,
            options.reason_option,
            options.wait_option,
        )
    ):
        function = option(function)
    return function


set_option = click.option(
    "--set",
    "values",
    multiple=True,
    metavar="NAME=VALUE",
    callback=parse_set_options,
    help="One setting of the backend, such as limits/max_devices=4; can be repeated.",
)


@verb_command("backend-add", 'backend-add gpus --host cmp1.example --kind pci --set \'match=[{"vendor": "10de"}]\'')
@add_change_options
@click.option("--kind", type=click.Choice(BACKEND_KINDS), required=True, help="The kind of the backend.")
@set_option
@pass_cli_context
def backend_add(cli_context: CliContext, kind: str, values: dict[str, Any], **change_options: Any) -> None:
    """Add a backend to a driver of a host; its other backends stay as they are."""
    settings = edit_settings({"kind": kind}, values, ())
    _change_backend(cli_context, "POST", {"settings": settings}, **change_options)


@verb_command("backend-set", "backend-set gpus --host cmp1.example --set limits/max_devices=4 --unset labels")
@add_change_options
@set_option
@click.option("--unset", multiple=True, metavar="NAME", help="Delete one setting of the backend; can be repeated.")
@pass_cli_context
def backend_set(cli_context: CliContext, values: dict[str, Any], unset: Sequence[str], **change_options: Any) -> None:
    """Change single settings of a backend; all others stay."""
    changes = options.drop_empty({"set": values, "unset": [*unset]})
    if not (values or unset):
        raise click.UsageError("Select what to change: give --set or --unset.")
    _change_backend(cli_context, "PATCH", {name: value for name, value in changes.items() if value}, **change_options)


@verb_command("backend-enable", "backend-enable gpus --host cmp1.example")
@add_change_options
@pass_cli_context
def backend_enable(cli_context: CliContext, **change_options: Any) -> None:
    """Enable a backend that is disabled."""
    _change_backend(cli_context, "PATCH", {"enabled": True}, **change_options)


@verb_command("backend-disable", "backend-disable gpus --host cmp1.example --reason 'bad riser'")
@add_change_options
@pass_cli_context
def backend_disable(cli_context: CliContext, **change_options: Any) -> None:
    """Disable a backend. Its settings stay, its devices are missing. Refused while a device of the driver is held."""
    _change_backend(cli_context, "PATCH", {"enabled": False}, **change_options)


@verb_command("backend-remove", "backend-remove gpus --host cmp1.example --yes")
@add_change_options
@options.yes_option
@pass_cli_context
def backend_remove(cli_context: CliContext, yes: bool, **change_options: Any) -> None:
    """Remove a backend with its settings. Refused while a device of the driver is held."""
    question = f"Remove the backend {change_options['backend']} on {change_options['host']}?"
    _change_backend(cli_context, "DELETE", {}, **change_options, question=question, yes=yes)


def _change_backend(
    cli_context: CliContext,
    method: str,
    changes: dict[str, Any],
    backend: str,
    host: str,
    driver: str,
    generation: int | None,
    reason: str,
    wait: bool,
    question: str = "",
    yes: bool = False,
) -> None:
    """Send a change of one backend, and show the result on its host; with `wait`, first follow it to its end.

    It first prints what will change, then asks the `question`, if there is one and `yes` is not set. The change is
    based on the generation of the driver that was read for that, or on `generation`. Raises CliError if the host does
    not exist or the change is refused; if somebody else has changed the driver, both versions are shown. Exits with
    REFUSED if the change has failed.
    """
    host_uuid = names.resolve_host(cli_context.api, host)
    present = read_driver(cli_context.api, host, driver)
    about = options.drop_empty({"reason": reason})
    about["generation"] = options.choose_generation(present, generation)
    path = f"backends/{host_uuid}:{quote(driver)}:{quote(backend)}/"
    with show_conflict(lambda current: _compare_sections(current, backend, method, changes), present):
        if question:
            options.confirm(question, yes)
        if method == "POST":
            body = {"host": host, "driver": driver, "name": backend}
            rollout = cli_context.api.post("backends/", body | changes | about)
        elif method == "PATCH":
            rollout = cli_context.api.patch(path, changes | about)
        else:
            rollout = cli_context.api.send_change("DELETE", path, params=about)
    finish_rollout(cli_context, rollout, f"backend {backend}", wait)


def _get_section(driver: dict[str, Any], backend: str) -> dict[str, Any] | None:
    """Return the settings of a backend in a driver as the API shows it; None if the driver has no such backend."""
    settings = (driver.get("wanted") or {}).get("settings") or {}
    section: dict[str, Any] | None = settings.get("backends", {}).get(backend)
    return section


def _preview_section(section: dict[str, Any] | None, method: str, changes: dict[str, Any]) -> dict[str, Any] | None:
    """Return the settings of a backend after a change with this HTTP method, None if it is removed."""
    if method == "DELETE":
        return None
    if method == "POST":
        return dict(changes["settings"])
    enabled = {"enabled": changes["enabled"]} if "enabled" in changes else {}
    return edit_settings(section or {}, changes.get("set", {}) | enabled, changes.get("unset", ()))


def _compare_sections(driver: dict[str, Any], backend: str, method: str, changes: dict[str, Any]) -> tuple[Any, Any]:
    """Return the present settings of a backend, and those that the refused change would lead to."""
    section = _get_section(driver, backend)
    return section, _preview_section(section, method, changes)


@verb_command("service-list", "service-list --name sriov --state ready")
@click.option("--host", shell_complete=completion.complete_hosts, help="Only of this host.")
@click.option("--driver", shell_complete=completion.complete_drivers, help="Only of this driver.")
@click.option("--backend", help="Only of backends with this name.")
@click.option("--name", type=click.Choice(SERVICE_NAMES), help="Only this service.")
@click.option("--state", type=click.Choice(["ready", "unavailable"]), help="Only in this state.")
@options.saved_view_option
@options.limit_option
@options.watch_option
@pass_cli_context
def service_list(cli_context: CliContext, limit: int, **filters: Any) -> None:
    """List the services of backends. Each row has the version and the limits, or why the service is unavailable."""
    cli_context.print_list(
        lambda: cli_context.fetch_rows("services/", limit, **filters), SERVICE_COLUMNS, "No services."
    )


@verb_command("discover-services", "discover-services cmp1.example --driver generic_driver")
@click.argument("hosts", nargs=-1, shell_complete=completion.complete_hosts)
@click.option("--all-hosts", is_flag=True, help="On every host; the same as no HOSTS.")
@click.option(
    "--driver",
    shell_complete=completion.complete_drivers,
    help="Only this driver. A rescan also ends the quarantine of the drivers that it asks.",
)
@options.yes_option
@options.command_reason_option
@options.wait_option
@options.request_dry_run_option
@pass_cli_context
def discover_services(
    cli_context: CliContext,
    hosts: Sequence[str],
    all_hosts: bool,
    driver: str | None,
    yes: bool,
    reason: str,
    wait: bool,
) -> None:
    """Make drivers look for devices now: like host-rescan, for several hosts.

    Without HOSTS, every host that you may see is asked, after a confirmation. Afterwards service-list shows what they
    found.
    """
    if hosts and all_hosts:
        raise click.UsageError("Name hosts, or give --all-hosts, not both.")
    uuid_by_host: dict[str, str] = {}
    if not hosts:
        all_rows = cli_context.fetch_rows("hosts/", MAX_HOSTS, fields="name,uuid")
        uuid_by_host = {row["name"]: row["uuid"] for row in all_rows}
        hosts = [*uuid_by_host]
        if hosts:
            options.confirm_number(f"The drivers of all {len(hosts)} hosts will look for devices.", len(hosts), yes)
    command_by_host: dict[str, str] = {}

    def order_rescan(name: str) -> dict[str, Any]:
        """Order a rescan of the host's drivers and return the row to show. Raises CliError."""
        body = {"op": "rescan", "host": uuid_by_host.get(name) or names.resolve_host(cli_context.api, name)}
        command = cli_context.api.post("commands/", body | options.drop_empty({"driver": driver, "reason": reason}))
        command_by_host[name] = command["uuid"]
        return {"host": name, "state": command["state"], "command": command["uuid"]}

    rows = [{"host": row.get("target"), **row} for row in run_for_each(hosts, order_rescan)]
    if wait:
        later = f"{cli_context.api.spell_verb('command-list')} --open"
        ended_commands = wait_for_commands(cli_context.api, "discover", later, command_by_host.values())
        for row in rows:
            if command := ended_commands.get(row.get("command", "")):
                row.update(describe_ended_command(command))
    show_and_exit(rows, DISCOVER_COLUMNS, cli_context.output)


def describe_ended_command(command: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with which an ended command updates its output row: outcome, exit code, state and text.

    Every state but `succeeded` counts as failed, with the code REFUSED.
    """
    has_succeeded = command["state"] == "succeeded"
    outcome = {
        "outcome": "done" if has_succeeded else "failed",
        "code": ExitCode.DONE if has_succeeded else ExitCode.REFUSED,
    }
    return outcome | {"state": command["state"], "text": command["text"]}
