"""`manage.py driver`: list drivers on hosts, start rollouts and follow them, for people and for scripts (`--json`)."""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError
from django.db.models import QuerySet

from accelerators.domain.errors import RefusedError
from accelerators.domain.states import EventSource, RolloutOp, RolloutStepState
from accelerators.management import shell
from accelerators.models import HostDriver, Rollout, RolloutStep
from accelerators.workflows import driver_rollouts
from accelerators.workflows.driver_config import DriverChange

MAX_ROWS = 50
POLL_INTERVAL_S = 0.25
BAR_WIDTH = 24
MAX_FILE_CHARACTERS = 1_000_000
OPERATION_DESCRIPTIONS = {
    RolloutOp.INSTALL: "Run a driver on hosts with the given settings; its package must be installed there.",
    RolloutOp.UPDATE: "Enable or disable a driver on the hosts that have it, or change its settings.",
    RolloutOp.UNINSTALL: "Stop a driver and delete its settings, even if the host's own configuration names it.",
}
EPILOG = """\
The wanted state of a driver on a host is stored in the database and in the host's journal. It takes precedence over the
host's own CYBORG_ENABLED_DRIVERS and CYBORG_DRIVER_SETTINGS. Which acts are allowed on a host is configured only there.
New settings are tested in a second process of the driver first, so a mistake in them changes nothing. A driver is not
changed while anybody holds one of its devices. The devices of a disabled driver are missing until it runs again.

  manage.py driver list --drifts
  manage.py driver install pci_driver --host cmp1.example --settings-file pci.toml --reason "new GPUs" --wait
  manage.py driver update pci_driver --match 'cmp*' --settings-file pci.toml --max-parallel 10 --wait
  manage.py driver update fake_driver --all --disable --go-on
  manage.py driver rollout                     lists the newest; with a uuid: its hosts, --wait shows its progress
  manage.py driver cancel 3f1c…                starts no further host

Exit status: 0 if the rollout was started (with --wait: no host failed); 1 if it was refused, or if a host failed or was
not started. The last line states the reason.
"""
_parse_uuid = shell.uuid_argument()


class Command(shell.OperatorCommand):
    epilog = EPILOG
    help = "Show which drivers run on which hosts; install, update and uninstall them, a few hosts at a time."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=argparse.ArgumentParser)
        listing = verbs.add_parser("list", help="list drivers on hosts, with their wanted and reported states")
        listing.add_argument("--host", help="only drivers on the host with this name")
        listing.add_argument("--driver", help="only this driver")
        listing.add_argument(
            "--drifts", action="store_true", help="only drivers whose reported state differs from the wanted state"
        )
        for op, meaning in OPERATION_DESCRIPTIONS.items():
            _add_rollout_arguments(verbs.add_parser(op.value, help=meaning, description=meaning), op)
        show = verbs.add_parser("rollout", help=f"list the newest {MAX_ROWS} rollouts, or the hosts of one")
        show.add_argument("uuid", metavar="UUID", type=_parse_uuid, nargs="?")
        show.add_argument("--wait", action="store_true", help="wait until it has ended; exit with 1 if a host failed")
        cancel = verbs.add_parser("cancel", help="start no further host of a rollout")
        cancel.add_argument("uuid", metavar="UUID", type=_parse_uuid)
        for verb in verbs.choices.values():
            verb.add_argument("--json", action="store_true", help="write JSON to standard output, for scripts")

    def handle(self, *args: Any, **options: Any) -> None:
        verb = options["verb"]
        if verb == "list":
            return self._print_host_drivers(options)
        if verb == "rollout" and not options["uuid"]:
            return self._print_newest_rollouts(options)
        if verb in ("rollout", "cancel"):
            rollout = _get_rollout(options["uuid"])
            if verb == "cancel":
                driver_rollouts.cancel_rollout(rollout, shell.current_operator())
            return self._print_rollout(rollout, options)
        self._print_rollout(self._start_rollout(RolloutOp(verb), options), options)

    def _start_rollout(self, op: RolloutOp, options: dict[str, Any]) -> Rollout:
        settings = _read_settings(options["settings_file"]) if options.get("settings_file") else None
        options_of_selector = {"all": options["all"] or None, "driver": options["running"], "name": options["match"]}
        selector = {name: value for name, value in options_of_selector.items() if value is not None}
        try:
            return driver_rollouts.start_rollout(
                DriverChange(op, options["driver"], options.get("enabled"), settings),
                driver_rollouts.select_hosts(options["host"] or (), selector or None),
                shell.current_operator(),
                pace=driver_rollouts.RolloutPace(options["max_parallel"], not options["go_on"]),
                reason=options["reason"],
                source=EventSource.PERSON,
            )
        except RefusedError as refused:
            raise CommandError(refused.text) from None

    def _print_rollout(self, rollout: Rollout, options: dict[str, Any]) -> None:
        if options.get("wait"):
            self._wait_until_ended(rollout)
        elif options["verb"] in list(OPERATION_DESCRIPTIONS) and not options["json"]:
            started = f"started on {rollout.total} host{'' if rollout.total == 1 else 's'}: {rollout.uuid}"
            self.stdout.write(f"{started}; `manage.py driver rollout {rollout.uuid} --wait` shows its progress")
            return
        rollout.refresh_from_db()
        steps = list(rollout.steps.order_by("id"))
        if options["json"]:
            self.stdout.write(
                json.dumps(_rollout_to_dict(rollout) | {"hosts": [_step_to_dict(one) for one in steps]}, default=str)
            )
        else:
            self._print_table(("host", "state", "text"), [(one.host_name, one.state, one.text) for one in steps])
            self.stdout.write(f"{rollout}: {rollout.state}")
        has_failed = any(one.state == RolloutStepState.FAILED for one in steps) or rollout.state in (
            "stopped",
            "cancelled",
        )
        if options.get("wait") and has_failed:
            sys.exit(1)

    def _wait_until_ended(self, rollout: Rollout) -> None:
        """Write the progress of a rollout to standard error until it has ended.

        Raises CommandError on Ctrl-C; the rollout continues.
        """
        shown_states: dict[int, str] = {}
        terminal = self.stderr.isatty()
        try:
            while True:
                steps = list(rollout.steps.order_by("id"))
                ended_count = sum(one.ended_at is not None for one in steps)
                for step in steps:
                    if shown_states.get(step.pk) != step.state and step.state != RolloutStepState.WAITING:
                        shown_states[step.pk] = step.state
                        line = f"{step.host_name}: {step.state} {step.text}".rstrip()
                        self.stderr.write(f"\r\x1b[K{line}" if terminal else line, str)
                if terminal:
                    bar = "#" * (ended_count * BAR_WIDTH // max(len(steps), 1))
                    self.stderr.write(f"\r\x1b[K{rollout} [{bar:<{BAR_WIDTH}}] {ended_count} of {len(steps)}", str, "")
                    self.stderr.flush()
                rollout.refresh_from_db()
                if rollout.ended_at and ended_count == len(steps):
                    return
                time.sleep(POLL_INTERVAL_S)
        except KeyboardInterrupt:
            text = f"stopped waiting; the rollout continues, see `manage.py driver rollout {rollout.uuid}`"
            raise CommandError(text) from None
        finally:
            if terminal:
                self.stderr.write("", str)

    def _print_host_drivers(self, options: dict[str, Any]) -> None:
        rows: QuerySet[HostDriver] = HostDriver.objects.select_related("host", "wish__command")
        for name, path in (("host", "host__name"), ("driver", "driver")):
            rows = rows.filter(**{path: options[name]}) if options[name] else rows
        rows = rows.filter(drifts=True) if options["drifts"] else rows
        if options["json"]:
            return self.stdout.write(json.dumps([_host_driver_to_dict(row) for row in rows], default=str))
        lines = [
            (
                row.host.name,
                row.driver,
                (row.reported or {}).get("version", ""),
                row.state,
                ("enabled" if row.wanted.enabled else "disabled") if row.wanted else "",
                "drifts" if row.drifts else "",
                str(row.devices),
                row.text,
            )
            for row in rows
        ]
        self._print_table(("host", "driver", "version", "seen", "wanted", "", "devices", "text"), lines)

    def _print_newest_rollouts(self, options: dict[str, Any]) -> None:
        rows = list(Rollout.objects.order_by("-id")[:MAX_ROWS])
        if options["json"]:
            return self.stdout.write(json.dumps([_rollout_to_dict(row) for row in rows], default=str))
        lines = [(str(row.uuid), row.state, str(row), row.actor, row.reason) for row in rows]
        self._print_table(("uuid", "state", "what", "by", "why"), lines)

    def _print_table(self, head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> None:
        for line in shell.format_table([head, *rows]):
            self.stdout.write(line)


def _add_rollout_arguments(verb: argparse.ArgumentParser, op: RolloutOp) -> None:
    verb.add_argument("driver", metavar="DRIVER", help="name of the driver, as in `manage.py driver list`")
    where = verb.add_argument_group("selection of hosts")
    where.add_argument("--host", action="append", metavar="NAME", help="the host with this name; can be repeated")
    where.add_argument("--all", action="store_true", help="every host")
    where.add_argument("--running", metavar="DRIVER", help="hosts on which this driver runs or is wanted")
    where.add_argument("--match", metavar="PATTERN", help="hosts whose names match; * and ? are wildcards")
    if op is not RolloutOp.UNINSTALL:
        verb.add_argument(
            "--settings-file",
            metavar="FILE",
            help="its settings: a .toml file, else JSON; - reads JSON from standard input",
        )
        either = verb.add_mutually_exclusive_group()
        either.add_argument("--enable", dest="enabled", action="store_true", default=None, help="run the driver")
        either.add_argument(
            "--disable", dest="enabled", action="store_false", help="do not run the driver; its settings are kept"
        )
    verb.add_argument(
        "--max-parallel",
        type=int,
        default=driver_rollouts.DEFAULT_PARALLEL,
        help="number of hosts at a time (default: %(default)s)",
    )
    verb.add_argument("--go-on", action="store_true", help="start further hosts even if one has failed")
    verb.add_argument("--reason", default="", help="reason that is shown with the rollout and its events")
    verb.add_argument("--wait", action="store_true", help="wait until it has ended; exit with 1 if a host failed")


def _read_settings(name: str) -> dict[str, Any]:
    """Read driver settings from a TOML or JSON file, or as JSON from standard input (`-`).

    Reads at most MAX_FILE_CHARACTERS characters. Raises CommandError if they cannot be read, cannot be parsed, or are
    not an object.
    """
    try:
        text = sys.stdin.read(MAX_FILE_CHARACTERS) if name == "-" else Path(name).read_text()[:MAX_FILE_CHARACTERS]
        settings = tomllib.loads(text) if name.endswith(".toml") else json.loads(text)
    except OSError as error:
        raise CommandError(f"{name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"{name} is not {'TOML' if name.endswith('.toml') else 'JSON'}: {error}") from None
    if not isinstance(settings, dict):
        raise CommandError(f"{name} contains no object: settings are a JSON object or the content of a TOML file")
    return settings


def _host_driver_to_dict(row: HostDriver) -> dict[str, Any]:
    wish = row.wanted
    wanted = wish and {"enabled": wish.enabled, "settings": wish.settings, "generation": wish.generation}
    seen = row.reported and {name: row.reported[name] for name in ("generation", "version", "state", "error")}
    about = {"host": row.host.name, "driver": row.driver, "drifts": row.drifts, "devices": row.devices}
    return about | {"wanted": wanted, "seen": seen}


def _rollout_to_dict(rollout: Rollout) -> dict[str, Any]:
    names = ("uuid", "op", "driver", "state", "total", "max_parallel", "stop_on_failure", "actor", "reason")
    return {name: getattr(rollout, name) for name in (*names, "created_at", "ended_at")}


def _step_to_dict(step: RolloutStep) -> dict[str, Any]:
    return {"host": step.host_name, "state": step.state, "text": step.text}


def _get_rollout(uuid: UUID) -> Rollout:
    rollout = Rollout.objects.filter(uuid=uuid).first()
    if rollout is None:
        raise CommandError(f"there is no rollout {uuid}; `manage.py driver rollout` shows the newest ones")
    return rollout
