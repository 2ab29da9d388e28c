"""Commands that list drivers by host, and that install, update and uninstall drivers on hosts."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from cyborgweb.cli import names, options
from cyborgweb.cli.following import Progress, follow
from cyborgweb.cli.options import Asked, pass_asked, verb
from cyborgweb.cli.outcomes import finish
from cyborgweb.cli.output import show
from cyborgweb.cli.problems import Exit

STATES = ("ok", "failed", "quarantined", "disabled", "absent")
COLUMNS = (
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
PLACES = ("host", "state", "text")
MAX_SETTINGS = 65_536


@verb("driver-list", "driver-list --driver generic_driver --state failed")
@click.option("--host", help="Only of this host.")
@click.option("--driver", help="Only this driver.")
@click.option("--state", type=click.Choice(STATES), help="Only in this state.")
@click.option(
    "--drifts/--as-wanted",
    default=None,
    help="Only drivers whose state differs from the desired state, or only the others.",
)
@options.limit
@pass_asked
def driver_list(asked: Asked, limit: int, **filters: Any) -> None:
    """List drivers, one row per host and driver. Each row has the observed state and the desired state."""
    show(asked.rows("drivers/", limit, **filters), COLUMNS, asked.output, "No drivers.")


def settings(context: click.Context, parameter: click.Parameter, path: str | None) -> dict[str, Any] | None:
    """Read the driver settings from a file; `-` is standard input. Raises BadParameter.

    A name ending in .json or .toml selects that format; anything else, standard input included, is read as YAML.
    """
    if path is None:
        return None
    try:
        with sys.stdin.buffer if path == "-" else Path(path).open("rb") as file:
            content = file.read(MAX_SETTINGS + 1)
        if len(content) > MAX_SETTINGS:
            raise click.BadParameter(f"{path} is larger than {MAX_SETTINGS} bytes.")
        found = _parsed(content.decode(), path) or {}
    except OSError as error:
        raise click.BadParameter(f"{path} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise click.BadParameter(f"{path} cannot be understood: {error}") from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{path} has no settings: write names with values.")
    return found


def _parsed(text: str, path: str) -> Any:
    """Parse settings as TOML, JSON or YAML, chosen by the ending of `path`. Raises ValueError."""
    if path.endswith(".toml"):
        import tomllib

        return tomllib.loads(text)
    if path.endswith(".json"):
        return json.loads(text)
    import yaml  # type: ignore[import-untyped]

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _set(context: click.Context, parameter: click.Parameter, said: tuple[str, ...]) -> dict[str, Any]:
    """Parse the `name=value` options; a value that is valid JSON is decoded, any other stays text."""
    return {name: _value(text) for name, text in options.words(context, parameter, said).items()}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def rolled_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the argument and options of a rollout: driver, hosts, parallelism, what to do after a failure, reason."""
    for option in reversed(
        (
            click.argument("driver"),
            click.option("--host", "hosts", multiple=True, help="On this host; can be repeated."),
            click.option("--hosts-like", metavar="GLOB", help="On hosts whose names match, such as 'cmp1*'."),
            click.option("--hosts-with", metavar="DRIVER", help="On hosts that have this driver."),
            click.option("--all-hosts", is_flag=True, help="On every host."),
            click.option(
                "--max-parallel",
                type=click.IntRange(1, 100),
                default=5,
                show_default=True,
                help="Largest number of hosts at a time.",
            ),
            click.option("--keep-going", is_flag=True, help="Go on with further hosts after one has failed."),
            options.because,
            options.waits,
        )
    ):
        function = option(function)
    return function


with_settings = (
    click.option(
        "--settings",
        "file",
        metavar="FILE",
        callback=settings,
        help="All settings of the driver: a .json, .toml or .yaml file; - is standard input.",
    ),
    click.option(
        "--set",
        "values",
        multiple=True,
        metavar="NAME=VALUE",
        callback=_set,
        help="One setting of the driver; settings that are not given are deleted.",
    ),
)


@verb("install-driver", "install-driver generic_driver --hosts-like 'gpu*' --settings generic.toml")
@rolled_out
@with_settings[0]
@with_settings[1]
@pass_asked
def install_driver(asked: Asked, file: dict[str, Any] | None, values: dict[str, Any], **how: Any) -> None:
    """Install a driver on hosts. Its package must be installed there; the answer names hosts where it is missing."""
    _roll_out(asked, "install", {"enabled": True} | _settings(file, values), **how)


@verb("update-driver", "update-driver pci_driver --host cmp1.example --disable --reason 'bad firmware'")
@rolled_out
@with_settings[0]
@with_settings[1]
@click.option("--enable/--disable", "enabled", default=None, help="Whether the driver runs.")
@pass_asked
def update_driver(
    asked: Asked, file: dict[str, Any] | None, values: dict[str, Any], enabled: bool | None, **how: Any
) -> None:
    """Enable, disable or configure a driver on hosts. Refused on hosts where its devices are held."""
    changes = _settings(file, values) | ({} if enabled is None else {"enabled": enabled})
    if not changes:
        raise click.UsageError("Select what to change: give --enable, --disable, --settings or --set.")
    _roll_out(asked, "update", changes, **how)


@verb("uninstall-driver", "uninstall-driver fake_driver --all-hosts --yes")
@rolled_out
@options.yes
@pass_asked
def uninstall_driver(asked: Asked, yes: bool, **how: Any) -> None:
    """Uninstall a driver from hosts. Refused on hosts where its devices are held."""
    options.sure(f"Uninstall {how['driver']} on {_named(how)}?", yes)
    _roll_out(asked, "uninstall", {}, **how)


def _settings(file: dict[str, Any] | None, values: dict[str, Any]) -> dict[str, Any]:
    return {"settings": (file or {}) | values} if file is not None or values else {}


def _named(how: dict[str, Any]) -> str:
    """Describe the selected hosts in words, for the question before uninstalling."""
    like = f" like {how['hosts_like']}" if how["hosts_like"] else ""
    having = f" with {how['hosts_with']}" if how["hosts_with"] else ""
    return ", ".join(how["hosts"]) or (f"hosts{like}{having}" if like or having else "all hosts")


def _roll_out(
    asked: Asked,
    op: str,
    changes: dict[str, Any],
    driver: str,
    hosts: Sequence[str],
    hosts_like: str | None,
    hosts_with: str | None,
    all_hosts: bool,
    max_parallel: int,
    keep_going: bool,
    reason: str,
    wait: bool,
) -> None:
    chosen = {"name": hosts_like, "driver": hosts_with, "all": all_hosts or None}
    selector = {name: value for name, value in chosen.items() if value}
    if bool(hosts) == bool(selector) or (all_hosts and len(selector) > 1):
        raise click.UsageError("Select hosts: give --host, or --hosts-like and --hosts-with, or --all-hosts.")
    for host in hosts:
        names.host(asked.api, host)
    body = {"op": op, "driver": driver, "max_parallel": max_parallel, "stop_on_failure": not keep_going}
    where: dict[str, Any] = {"hosts": [*hosts]} if hosts else {"selector": selector}
    rollout = asked.api.post("rollouts/", body | changes | where | ({"reason": reason} if reason else {}))
    if wait:
        rollout = _followed(asked, rollout, f"{op} {driver}")
    failed = {"failed": Exit.REFUSED, "skipped": Exit.REFUSED}
    finish([{**step, "code": failed.get(step["state"], Exit.DONE)} for step in rollout["steps"]], PLACES, asked.output)


def _followed(asked: Asked, rollout: dict[str, Any], what: str) -> dict[str, Any]:
    """Follow a rollout until it has ended and no host is at work any more; return it as it is then."""
    now = rollout

    def look() -> Progress:
        nonlocal now
        now = asked.api.get(f"rollouts/{rollout['uuid']}/")
        states = [step["state"] for step in now["steps"]]
        open_ = states.count("waiting") + states.count("ordered")
        bad = states.count("failed")
        text = f"{len(states) - open_} of {len(states)} hosts" + (f", {bad} failed" if bad else "")
        ended = now["state"] != "running" and "ordered" not in states
        return Progress(100 * (len(states) - open_) / max(1, len(states)), text, ended)

    follow(what, f"cyborg driver-list --driver {rollout['driver']}, or {rollout['url']}", look)
    return now
