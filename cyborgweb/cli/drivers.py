"""Commands that list drivers by host, and that install, update and uninstall drivers on hosts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import click

from cyborgweb.cli import completion, names, options
from cyborgweb.cli.confirmation import order_after_preview
from cyborgweb.cli.conflicts import edit_settings, show_conflict
from cyborgweb.cli.connection import ApiClient
from cyborgweb.cli.exit_codes import ExitCode, to_printable_line
from cyborgweb.cli.following import WorkProgress, follow_until_ended
from cyborgweb.cli.many_targets import exit_unless_done, find_common_code, show_and_exit
from cyborgweb.cli.options import CliContext, pass_cli_context, verb_command
from cyborgweb.cli.output import print_row

DRIVER_STATES = ("ok", "failed", "quarantined", "disabled", "absent")
DRIVER_COLUMNS = (
    "host=host.name",
    "driver",
    "state=seen.state",
    "version",
    "wanted=wanted.enabled",
    "drifts",
    "devices",
    "held",
    "since=seen.since",
    "error=seen.error",
)
ROLLOUT_COLUMNS = ("uuid", "state", "op", "driver", "total", "created_at", "by", "reason")
STEP_COLUMNS = ("host", "state", "text")
FOLLOWED_FIELDS = "uuid,op,driver,state,counts"
"""The fields of a rollout that are read again and again while it is followed; its hosts are not among them."""
MAX_ROLLOUTS = 50
MAX_SETTINGS_BYTES = 65_536


@verb_command("driver-list", "driver-list --driver generic_driver --state failed")
@click.option("--host", shell_complete=completion.complete_hosts, help="Only of this host.")
@click.option("--driver", shell_complete=completion.complete_drivers, help="Only this driver.")
@click.option("--state", type=click.Choice(DRIVER_STATES), help="Only in this state.")
@click.option(
    "--drifts/--as-wanted",
    default=None,
    help="Only drivers whose state differs from the desired state, or only the others.",
)
@options.saved_view_option
@options.limit_option
@options.watch_option
@pass_cli_context
def driver_list(cli_context: CliContext, limit: int, **filters: Any) -> None:
    """List drivers, one row per host and driver. Each row has the observed state and the desired state."""
    cli_context.print_list(lambda: cli_context.fetch_rows("drivers/", limit, **filters), DRIVER_COLUMNS, "No drivers.")


def read_settings_file(context: click.Context, parameter: click.Parameter, path: str | None) -> dict[str, Any] | None:
    """Read the driver settings from a file; `-` is standard input. Return None if the option was not given.

    A name ending in .json or .toml selects that format; anything else, standard input included, is read as YAML. Raises
    BadParameter if the file is unreadable, larger than MAX_SETTINGS_BYTES, or no table that JSON can represent.
    """
    if path is None:
        return None
    try:
        with sys.stdin.buffer if path == "-" else Path(path).open("rb") as file:
            content = file.read(MAX_SETTINGS_BYTES + 1)
        if len(content) > MAX_SETTINGS_BYTES:
            raise click.BadParameter(f"{path} is larger than {MAX_SETTINGS_BYTES} bytes.")
        parsed = _parse_settings(content.decode(), path) or {}
        json.dumps(parsed, allow_nan=False)  # TOML and YAML have dates and numbers that JSON has not
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read: {error.strerror}.") from None
    except (TypeError, ValueError) as error:
        raise click.BadParameter(f"{path} cannot be understood: {error}") from None
    if not isinstance(parsed, dict):
        raise click.BadParameter(f"{path} has no settings: write names with values.")
    return parsed


def _parse_settings(text: str, path: str) -> Any:
    """Parse settings as TOML or JSON if `path` ends so, else as YAML. Raises ValueError if they cannot be parsed."""
    if path.endswith(".toml"):
        import tomllib

        return tomllib.loads(text)
    if path.endswith(".json"):
        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def parse_set_options(
    context: click.Context, parameter: click.Parameter, assignments: tuple[str, ...]
) -> dict[str, Any]:
    """Parse the `name=value` options into a dict; a value that is valid JSON is decoded, any other stays text.

    Raises BadParameter for another form, or for too many options.
    """
    return {
        name: _parse_value(text) for name, text in options.parse_key_values(context, parameter, assignments).items()
    }


def _parse_value(text: str) -> Any:
    """Return the decoded value of a text that is valid JSON, otherwise the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def add_rollout_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument and options of a rollout, and return the decorated function.

    They are driver, hosts, parallelism, what to do after a failure, reason and waiting.
    """
    for option in reversed(
        (
            click.argument("driver", shell_complete=completion.complete_drivers),
            click.option(
                "--host",
                "hosts",
                multiple=True,
                shell_complete=completion.complete_hosts,
                help="On this host; can be repeated.",
            ),
            click.option(
                "--hosts-like", "--match", metavar="GLOB", help="On hosts whose names match, such as 'cmp1*'."
            ),
            click.option("--hosts-with", "--running", metavar="DRIVER", help="On hosts that have this driver."),
            click.option("--all-hosts", "--all", is_flag=True, help="On every host."),
            click.option(
                "--max-parallel",
                type=click.IntRange(1, 100),
                default=5,
                show_default=True,
                help="Largest number of hosts at a time.",
            ),
            click.option(
                "--keep-going", "--go-on", is_flag=True, help="Go on with further hosts after one has failed."
            ),
            options.generation_option,
            options.reason_option,
            options.dry_run_option,
            options.yes_option,
            options.wait_option,
        )
    ):
        function = option(function)
    return function


settings_options = (
    click.option(
        "--settings",
        "--replace-settings",
        "--settings-file",
        "file",
        metavar="FILE",
        callback=read_settings_file,
        help="Replace all settings by those in a .json, .toml or .yaml file; - is standard input.",
    ),
    click.option(
        "--set",
        "values",
        multiple=True,
        metavar="NAME=VALUE",
        callback=parse_set_options,
        help="Change one setting, such as mtu=9000 or backends/gpus/enabled=false; all others stay. Can be repeated.",
    ),
    click.option(
        "--unset", "unset", multiple=True, metavar="NAME", help="Delete one setting; all others stay. Can be repeated."
    ),
)


def add_settings_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that change the settings of a driver, and return the decorated function."""
    for option in reversed(settings_options):
        function = option(function)
    return function


@verb_command("install-driver", "install-driver generic_driver --hosts-like 'gpu*' --settings-file generic.toml")
@add_rollout_options
@add_settings_options
@click.option("--enable/--disable", "enabled", default=True, help="Whether the driver runs; by default it does.")
@pass_cli_context
def install_driver(
    cli_context: CliContext,
    file: dict[str, Any] | None,
    values: dict[str, Any],
    unset: tuple[str, ...],
    enabled: bool,
    **rollout_options: Any,
) -> None:
    """Install a driver on hosts. Its package must be installed there; the answer names hosts where it is missing."""
    changes = {"enabled": enabled} | _build_settings_fields(file, values, unset)
    _start_rollout(cli_context, "install", changes, **rollout_options)


@verb_command("update-driver", "update-driver pci_driver --host cmp1.example --disable --reason 'bad firmware'")
@add_rollout_options
@add_settings_options
@click.option("--enable/--disable", "enabled", default=None, help="Whether the driver runs.")
@pass_cli_context
def update_driver(
    cli_context: CliContext,
    file: dict[str, Any] | None,
    values: dict[str, Any],
    unset: tuple[str, ...],
    enabled: bool | None,
    **rollout_options: Any,
) -> None:
    """Enable, disable or configure a driver on hosts. Refused on hosts where its devices are held.

    --set and --unset change single settings; a settings file replaces all of them. On a single host the difference is
    shown first; if somebody changes the driver meanwhile, nothing is changed, and both versions are shown.
    """
    changes = _build_settings_fields(file, values, unset)
    changes |= {} if enabled is None else {"enabled": enabled}
    if not changes:
        raise click.UsageError("Select what to change: give --enable, --disable, --settings-file, --set or --unset.")
    _start_rollout(cli_context, "update", changes, **rollout_options)


@verb_command("uninstall-driver", "uninstall-driver fake_driver --all-hosts --yes")
@add_rollout_options
@pass_cli_context
def uninstall_driver(cli_context: CliContext, **rollout_options: Any) -> None:
    """Uninstall a driver from hosts. Refused on hosts where its devices are held."""
    _start_rollout(cli_context, "uninstall", {}, **rollout_options)


@verb_command("rollout-show", "rollout-show 5d0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b --wait")
@click.argument("rollout", type=click.UUID, required=False)
@options.follow_option
@options.watch_option
@pass_cli_context
def rollout_show(cli_context: CliContext, rollout: UUID | None, wait: bool) -> None:
    """Show a rollout, which installs, updates or uninstalls a driver on its hosts; without a uuid list the newest.

    --wait exits with the same code as the verb that began the rollout: 0 if all hosts are done, 6 if only some are.
    """
    if rollout is None:
        return cli_context.print_list(
            lambda: cli_context.api.iterate_rows("rollouts/", MAX_ROLLOUTS), ROLLOUT_COLUMNS, "No rollouts."
        )
    if wait:
        shown = cli_context.api.get(f"rollouts/{rollout}/", fields=FOLLOWED_FIELDS)
        _follow_rollout(cli_context, shown, f"{shown['op']} {shown['driver']}")
    shown = cli_context.api.get(f"rollouts/{rollout}/")
    print_row(shown, cli_context.output)
    if wait:
        exit_unless_done(find_common_code(_build_step_rows(shown)))


@verb_command("rollout-cancel", "rollout-cancel 5d0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b")
@click.argument("rollout", type=click.UUID)
@options.request_dry_run_option
@pass_cli_context
def rollout_cancel(cli_context: CliContext, rollout: UUID) -> None:
    """Cancel a rollout. Hosts where the change has begun finish it; no further host is changed."""
    print_row(cli_context.api.post(f"rollouts/{rollout}/cancel/", {}), cli_context.output)


@verb_command("rollout-retry", "rollout-retry 5d0c1d0e-0a53-4a0c-8f0e-1c2d3e4f5a6b --reason 'network repaired'")
@click.argument("rollout", type=click.UUID)
@options.reason_option
@options.dry_run_option
@options.yes_option
@options.wait_option
@pass_cli_context
def rollout_retry(cli_context: CliContext, rollout: UUID, reason: str, dry_run: bool, yes: bool, wait: bool) -> None:
    """Start a new rollout of the same change on the hosts where it has failed, or was not begun."""
    body = {"reason": reason} if reason else {}
    path, question = f"rollouts/{rollout}/retry/", "Retry on these hosts?"
    started = order_after_preview(
        cli_context, path, body, question, "hosts", yes=yes, dry_run=dry_run, stores_draft=True
    )
    if started is not None:
        finish_rollout(cli_context, started, f"{started['op']} {started['driver']}", wait)


def _build_settings_fields(file: dict[str, Any] | None, values: dict[str, Any], unset: Sequence[str]) -> dict[str, Any]:
    """Return the fields of a request that change settings: `settings` if a file was given, where `values` override it,
    otherwise `edits`; {} if nothing was given.

    Raises UsageError if both a file and settings to delete were given.
    """
    if file is not None:
        if unset:
            raise click.UsageError("A settings file replaces all settings: leave --unset out.")
        return {"settings": file | values}
    edits = options.drop_empty({"set": values, "unset": [*unset]})
    return {"edits": edits} if edits.get("set") or edits.get("unset") else {}


def read_driver(api: ApiClient, host: str, driver: str) -> dict[str, Any]:
    """Return a driver on a host as the API shows it; without a wanted state and with the generation 0 if the host has
    no such driver."""
    for row in api.iterate_rows("drivers/", 1, host=host, driver=driver):
        return row
    return {"wanted": None, "generation": 0}


def _preview_wanted(current: dict[str, Any], op: str, changes: dict[str, Any]) -> dict[str, Any] | None:
    """Return the wanted configuration that a request leads to, from the present one; None if it uninstalls the
    driver."""
    if op == "uninstall":
        return None
    wanted = dict(current.get("wanted") or {})
    edits = changes.get("edits", {})
    settings = edit_settings(wanted.get("settings") or {}, edits.get("set", {}), edits.get("unset", ()))
    return wanted | {"settings": changes.get("settings", settings)} | {k: changes[k] for k in changes if k == "enabled"}


def _start_rollout(
    cli_context: CliContext,
    op: str,
    changes: dict[str, Any],
    driver: str,
    hosts: Sequence[str],
    hosts_like: str | None,
    hosts_with: str | None,
    all_hosts: bool,
    max_parallel: int,
    keep_going: bool,
    generation: int | None,
    reason: str,
    dry_run: bool,
    yes: bool,
    wait: bool,
) -> None:
    """Start a rollout and show the state of each of its hosts; with `wait`, first follow it until it has ended.

    If it reaches several hosts or uninstalls the driver, the user must confirm its preview, unless `yes` is set. With
    `dry_run` only the preview is shown. For a single host, what will change is printed first, and the change is based
    on the generation that was read for that, or on `generation`.

    `changes` are the request's fields for this `op`. Raises UsageError unless the hosts are selected in exactly one
    way: by `hosts`, by `hosts_like` and `hosts_with` (one or both), or by `all_hosts`; CliError if a host in `hosts`
    does not exist or the rollout is refused. Exits with REFUSED if all hosts have failed or were skipped, with PARTIAL
    if some have.
    """
    criteria = {"name": hosts_like, "driver": hosts_with, "all": all_hosts or None}
    selector = {name: value for name, value in criteria.items() if value}
    if bool(hosts) == bool(selector) or (all_hosts and len(selector) > 1):
        raise click.UsageError("Select hosts: give --host, or --hosts-like and --hosts-with, or --all-hosts.")
    for host in hosts:
        names.resolve_host(cli_context.api, host)
    body = {"op": op, "driver": driver, "max_parallel": max_parallel, "stop_on_failure": not keep_going}
    target: dict[str, Any] = {"hosts": [*hosts]} if hosts else {"selector": selector}
    body |= changes | target | ({"reason": reason} if reason else {})
    rollout: dict[str, Any] | None
    present = read_driver(cli_context.api, hosts[0], driver) if len(hosts) == 1 else None
    if present:
        body["generation"] = options.choose_generation(present, generation)
    elif generation is not None:
        body["generation"] = generation
    with show_conflict(lambda current: (current.get("wanted"), _preview_wanted(current, op, changes)), present):
        if len(hosts) == 1 and not dry_run and (op != "uninstall" or yes):
            rollout = cli_context.api.post("rollouts/", body)
        else:
            rollout = order_after_preview(
                cli_context,
                "rollouts/",
                body,
                f"{op.capitalize()} {driver} on {', '.join(hosts) or 'these hosts'}?",
                "hosts",
                yes=yes,
                dry_run=dry_run,
                always_ask=op == "uninstall",
                stores_draft=True,
            )
    if rollout is not None:
        finish_rollout(cli_context, rollout, f"{op} {driver}", wait)


def finish_rollout(cli_context: CliContext, rollout: dict[str, Any], title: str, wait: bool) -> None:
    """Show the state of each host of a rollout that was started; with `wait`, first follow it until it has ended.

    Exits as `show_and_exit` does.
    """
    if wait:
        _follow_rollout(cli_context, rollout, title)
        rollout = cli_context.api.get(f"rollouts/{rollout['uuid']}/")
    else:
        command = cli_context.api.spell_verb("rollout-show")
        click.echo(f"To follow the rollout: {command} {rollout['uuid']} --wait", err=True)
    show_and_exit(_build_step_rows(rollout), STEP_COLUMNS, cli_context.output)


def _build_step_rows(rollout: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the hosts of a rollout as output rows with their exit codes. A host that waits while the rollout does not
    run, as in a draft, counts as skipped."""
    failed_states = ("failed", "skipped", *(() if rollout["state"] == "running" else ("waiting",)))
    return [
        {**step, "code": ExitCode.REFUSED if step["state"] in failed_states else ExitCode.DONE}
        for step in rollout["steps"]
    ]


def _follow_rollout(cli_context: CliContext, rollout: dict[str, Any], title: str) -> None:
    """Follow a rollout until it has ended and no host changes its driver any more.

    Each poll reads the number of hosts in each state. The hosts themselves are read only after further hosts have
    failed, and only those that failed; each is named once on standard error. Raises CliError in the same cases as
    `follow_until_ended`.
    """
    path = f"rollouts/{rollout['uuid']}/"
    named_hosts: set[str] = set()

    def poll() -> WorkProgress:
        """Fetch the counts again, name the hosts that have failed since, and return the progress by hosts done."""
        current = cli_context.api.get(path, fields=FOLLOWED_FIELDS)
        counts, total = current["counts"], sum(current["counts"].values())
        if counts["failed"] > len(named_hosts):
            failed_steps = cli_context.api.get(path, fields="steps", step_state="failed")["steps"]
            for step in failed_steps:
                if step["host"] not in named_hosts:
                    click.echo(to_printable_line(f"{step['host']} failed: {step['text']}"), err=True)
            named_hosts.update(step["host"] for step in failed_steps)
        done_count = total - counts["waiting"] - counts["ordered"]
        text = f"{done_count} of {total} hosts" + (f", {counts['failed']} failed" if counts["failed"] else "")
        has_ended = current["state"] != "running" and not counts["ordered"]
        return WorkProgress(100 * done_count / max(1, total), text, has_ended)

    follow_until_ended(title, f"{cli_context.api.spell_verb('rollout-show')} {rollout['uuid']} --wait", poll)
