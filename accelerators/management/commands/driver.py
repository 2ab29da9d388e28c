"""`manage.py driver`: list drivers on hosts, start rollouts and follow them, for people and for scripts (`--json`)."""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from pathlib import Path
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError
from django.db.models import QuerySet

from accelerators.domain.errors import RefusedError
from accelerators.domain.states import RolloutOp, Source, StepState
from accelerators.management import shell
from accelerators.models import HostDriver, Rollout, RolloutStep
from accelerators.workflows import driver_rollouts
from accelerators.workflows.driver_config import Change

ROWS = 50
EVERY_S = 0.25
BAR = 24
MAX_FILE = 1_000_000
OPS = {
    RolloutOp.INSTALL: "Run a driver on hosts from now on, with settings; its package has to be there.",
    RolloutOp.UPDATE: "Enable or disable it where it is installed, or give it other settings.",
    RolloutOp.UNINSTALL: "Run it no more, and forget its settings, also where the host's own configuration names it.",
}
TEACHING = """\
What is wanted of a driver on a host is kept here and in the host's own journal, and goes before what the host's own
CYBORG_ENABLED_DRIVERS and CYBORG_DRIVER_SETTINGS say; which acts are allowed on a host only that host can say. New
settings are tried beside the running driver: a mistake in them changes nothing. A driver is left alone while anybody
holds one of its devices; those of a driver that is turned off are missing until it runs again.

  manage.py driver list --drifts
  manage.py driver install pci_driver --host cmp1.example --settings-file pci.toml --reason "new GPUs" --wait
  manage.py driver update pci_driver --match 'cmp*' --settings-file pci.toml --max-parallel 10 --wait
  manage.py driver update fake_driver --all --disable --go-on
  manage.py driver rollout                     the newest; with a uuid its hosts, --wait follows it
  manage.py driver cancel 3f1c…                no further host is begun

Exit status: 0 begun, with --wait no host failed; 1 refused, or a host failed or was not begun; the last line says why.
"""
_uuid = shell.uuid()


class Command(shell.Taught):
    teaching = TEACHING
    help = "Show which drivers run on which hosts; install, update and uninstall them, a few hosts at a time."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=argparse.ArgumentParser)
        listing = verbs.add_parser("list", help="drivers on hosts: wanted beside seen")
        listing.add_argument("--host", help="on this host alone, by name")
        listing.add_argument("--driver", help="this driver alone")
        listing.add_argument("--drifts", action="store_true", help="those alone that are not as they are wanted")
        for op, meaning in OPS.items():
            _asks(verbs.add_parser(op.value, help=meaning, description=meaning), op)
        show = verbs.add_parser("rollout", help=f"the newest {ROWS} rollouts, or the hosts of one")
        show.add_argument("uuid", metavar="UUID", type=_uuid, nargs="?")
        show.add_argument("--wait", action="store_true", help="until it has ended; the exit status is its success")
        cancel = verbs.add_parser("cancel", help="begin no further host of a rollout")
        cancel.add_argument("uuid", metavar="UUID", type=_uuid)
        for verb in verbs.choices.values():
            verb.add_argument("--json", action="store_true", help="for scripts: JSON on standard output")

    def handle(self, *args: Any, **options: Any) -> None:
        verb = options["verb"]
        if verb == "list":
            return self._list(options)
        if verb == "rollout" and not options["uuid"]:
            return self._newest(options)
        if verb in ("rollout", "cancel"):
            rollout = _one(options["uuid"])
            if verb == "cancel":
                driver_rollouts.cancel(rollout, shell.person())
            return self._tell(rollout, options)
        self._tell(self._begin(RolloutOp(verb), options), options)

    def _begin(self, op: RolloutOp, options: dict[str, Any]) -> Rollout:
        settings = _settings(options["settings_file"]) if options.get("settings_file") else None
        chosen = {"all": options["all"] or None, "driver": options["running"], "name": options["match"]}
        selector = {name: value for name, value in chosen.items() if value is not None}
        try:
            return driver_rollouts.start(
                Change(op, options["driver"], options.get("enabled"), settings),
                driver_rollouts.choose(options["host"] or (), selector or None),
                shell.person(),
                pace=driver_rollouts.Pace(options["max_parallel"], not options["go_on"]),
                reason=options["reason"],
                source=Source.PERSON,
            )
        except RefusedError as refused:
            raise CommandError(refused.text) from None

    def _tell(self, rollout: Rollout, options: dict[str, Any]) -> None:
        if options.get("wait"):
            self._follow(rollout)
        elif options["verb"] in list(OPS) and not options["json"]:
            begun = f"begun on {rollout.total} host{'' if rollout.total == 1 else 's'}: {rollout.uuid}"
            self.stdout.write(f"{begun}; `manage.py driver rollout {rollout.uuid} --wait` follows it")
            return
        rollout.refresh_from_db()
        steps = list(rollout.steps.order_by("id"))
        if options["json"]:
            self.stdout.write(json.dumps(_as_json(rollout) | {"hosts": [_step(one) for one in steps]}, default=str))
        else:
            self._table(("host", "state", "said"), [(one.host_name, one.state, one.text) for one in steps])
            self.stdout.write(f"{rollout}: {rollout.state}")
        lost = any(one.state == StepState.FAILED for one in steps) or rollout.state in ("stopped", "cancelled")
        if options.get("wait") and lost:
            sys.exit(1)

    def _follow(self, rollout: Rollout) -> None:
        """Write the progress of a rollout to standard error until it has ended.

        Raises CommandError on Ctrl-C; the rollout goes on.
        """
        told: dict[int, str] = {}
        terminal = self.stderr.isatty()
        try:
            while True:
                steps = list(rollout.steps.order_by("id"))
                over = sum(one.ended_at is not None for one in steps)
                for one in steps:
                    if told.get(one.pk) != one.state and one.state != StepState.WAITING:
                        told[one.pk] = one.state
                        line = f"{one.host_name}: {one.state} {one.text}".rstrip()
                        self.stderr.write(f"\r\x1b[K{line}" if terminal else line, str)
                if terminal:
                    bar = "#" * (over * BAR // max(len(steps), 1))
                    self.stderr.write(f"\r\x1b[K{rollout} [{bar:<{BAR}}] {over} of {len(steps)}", str, "")
                    self.stderr.flush()
                rollout.refresh_from_db()
                if rollout.ended_at and over == len(steps):
                    return
                time.sleep(EVERY_S)
        except KeyboardInterrupt:
            text = f"not waited for any longer; it goes on: `manage.py driver rollout {rollout.uuid}`"
            raise CommandError(text) from None
        finally:
            if terminal:
                self.stderr.write("", str)

    def _list(self, options: dict[str, Any]) -> None:
        rows: QuerySet[HostDriver] = HostDriver.objects.select_related("host", "wish__command")
        for name, path in (("host", "host__name"), ("driver", "driver")):
            rows = rows.filter(**{path: options[name]}) if options[name] else rows
        rows = rows.filter(drifts=True) if options["drifts"] else rows
        if options["json"]:
            return self.stdout.write(json.dumps([_driver(row) for row in rows], default=str))
        lines = [
            (
                row.host.name,
                row.driver,
                (row.said or {}).get("version", ""),
                row.state,
                ("enabled" if row.wanted.enabled else "disabled") if row.wanted else "",
                "drifts" if row.drifts else "",
                str(row.devices),
                row.text,
            )
            for row in rows
        ]
        self._table(("host", "driver", "version", "seen", "wanted", "", "devices", "said"), lines)

    def _newest(self, options: dict[str, Any]) -> None:
        rows = list(Rollout.objects.order_by("-id")[:ROWS])
        if options["json"]:
            return self.stdout.write(json.dumps([_as_json(row) for row in rows], default=str))
        lines = [(str(row.uuid), row.state, str(row), row.actor, row.reason) for row in rows]
        self._table(("uuid", "state", "what", "by", "why"), lines)

    def _table(self, head: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
        for line in shell.table([head, *rows]):
            self.stdout.write(line)


def _asks(verb: argparse.ArgumentParser, op: RolloutOp) -> None:
    verb.add_argument("driver", metavar="DRIVER", help="its name, as `manage.py driver list` says")
    where = verb.add_argument_group("on which hosts")
    where.add_argument("--host", action="append", metavar="NAME", help="this one; may be said several times")
    where.add_argument("--all", action="store_true", help="every host")
    where.add_argument("--running", metavar="DRIVER", help="hosts where this driver runs, or is wanted")
    where.add_argument("--match", metavar="PATTERN", help="hosts whose name fits; * and ? stand for what differs")
    if op is not RolloutOp.UNINSTALL:
        verb.add_argument(
            "--settings-file", metavar="FILE", help="its settings: JSON, or TOML in a file called so; - reads"
        )
        either = verb.add_mutually_exclusive_group()
        either.add_argument("--enable", dest="enabled", action="store_true", default=None, help="it is to run")
        either.add_argument("--disable", dest="enabled", action="store_false", help="it is not to run; settings stay")
    verb.add_argument(
        "--max-parallel", type=int, default=driver_rollouts.PARALLEL, help="hosts at a time (%(default)s)"
    )
    verb.add_argument("--go-on", action="store_true", help="begin further hosts although one has failed")
    verb.add_argument("--reason", default="", help="shown with it and its events")
    verb.add_argument("--wait", action="store_true", help="until it has ended; the exit status is its success")


def _settings(name: str) -> dict[str, Any]:
    """Read driver settings from a TOML or JSON file, or as JSON from standard input (`-`).

    Reads at most MAX_FILE characters. Raises CommandError if they cannot be read, cannot be parsed, or are not an
    object.
    """
    try:
        text = sys.stdin.read(MAX_FILE) if name == "-" else Path(name).read_text()[:MAX_FILE]
        said = tomllib.loads(text) if name.endswith(".toml") else json.loads(text)
    except OSError as error:
        raise CommandError(f"{name} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise CommandError(f"{name} is not {'TOML' if name.endswith('.toml') else 'JSON'}: {error}") from None
    if not isinstance(said, dict):
        raise CommandError(f"{name} holds no object: settings are one, as the driver's table in a TOML file is")
    return said


def _driver(row: HostDriver) -> dict[str, Any]:
    wish = row.wanted
    wanted = wish and {"enabled": wish.enabled, "settings": wish.settings, "generation": wish.generation}
    seen = row.said and {name: row.said[name] for name in ("generation", "version", "state", "error")}
    about = {"host": row.host.name, "driver": row.driver, "drifts": row.drifts, "devices": row.devices}
    return about | {"wanted": wanted, "seen": seen}


def _as_json(rollout: Rollout) -> dict[str, Any]:
    names = ("uuid", "op", "driver", "state", "total", "max_parallel", "stop_on_failure", "actor", "reason")
    return {name: getattr(rollout, name) for name in (*names, "created_at", "ended_at")}


def _step(one: RolloutStep) -> dict[str, Any]:
    return {"host": one.host_name, "state": one.state, "text": one.text}


def _one(uuid: UUID) -> Rollout:
    found = Rollout.objects.filter(uuid=uuid).first()
    if found is None:
        raise CommandError(f"there is no rollout {uuid}; `manage.py driver rollout` shows the newest")
    return found
