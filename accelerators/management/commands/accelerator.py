"""`manage.py accelerator`: list the units that instances can get, and change their number by partitioning devices."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from django.core.management.base import CommandError
from django.db.models import Q

from accelerators.commands import catalogue
from accelerators.devices import partitioning
from accelerators.devices.partitioning import Change, Result, Target
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import Source
from accelerators.management import following, shell
from accelerators.models import AttachHandle
from accelerators.models import Command as Row

ROWS = 1000
TEACHING = """\
A unit is what one instance gets: a virtual function, a mediated device, or a part of a card. To change the number of
units, the device is partitioned again; this is refused while anybody holds one of its units. DEVICE is a uuid;
HOST/BACKEND stands for all devices of that backend whose number of units can be chosen (`manage.py device list` and the
console show them).

  manage.py accelerator list --host cmp1.example --free
  manage.py accelerator create cmp1.example/nics cmp2.example/nics --count 4 --reason "more guests" --wait
  manage.py accelerator delete 3f1c… --count 1
  manage.py accelerator delete 3f1c…               (all of them)
  manage.py accelerator update 3f1c… --layout bind=vfio-pci --generation 7 --wait

Exit status: 0 if everything was ordered (with --wait: succeeded); 1 if something was refused or failed.
"""
_uuid = shell.uuid(" and not HOST/BACKEND")


class Command(shell.Taught):
    teaching = TEACHING
    help = "List accelerators, or change their number: list, create, delete, update."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=argparse.ArgumentParser)
        listing = verbs.add_parser("list", help=f"list the first {ROWS} units and the instances that hold them")
        listing.add_argument("--host", help="only units of the host with this name")
        listing.add_argument("--driver", help="only units of this driver")
        listing.add_argument("--backend", help="only units of backends with this name")
        which = listing.add_mutually_exclusive_group()
        which.add_argument("--free", action="store_true", help="only units that nobody holds")
        which.add_argument("--attached", action="store_true", help="only units that an instance holds")
        for name, about in (("create", "add units to each device"), ("delete", "remove units from each device")):
            verb = verbs.add_parser(name, help=about, description=about)
            verb.add_argument("targets", metavar="DEVICE|HOST/BACKEND", nargs="+", type=_target)
            verb.add_argument(
                "--count",
                metavar="N",
                type=int,
                required=name == "create",
                help="units to add to or remove from each device",
            )
            verb.add_argument("--layout", metavar="K=V", nargs="+", default=[], help="more layout keys of the driver")
            _orders(verb)
        update = verbs.add_parser("update", help="partition one device with the given layout")
        update.add_argument("target", metavar="DEVICE", type=_uuid)
        update.add_argument(
            "--layout", metavar="K=V", nargs="+", required=True, help="layout keys of its driver, such as vfs=4"
        )
        _orders(update)
        for verb in verbs.choices.values():
            verb.add_argument("--json", action="store_true", help="write JSON to standard output, for scripts")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["verb"] == "list":
            return self._list(options)
        try:
            self._tell(_ordered(options), options)
        except RefusedError as refused:
            raise CommandError(refused.text) from None

    def _tell(self, results: Sequence[Result], options: dict[str, Any]) -> None:
        made: dict[int, Row] = {result.command.pk: result.command for result in results if result.command}
        if options["wait"] and made:
            made = {row.pk: row for row in following.follow([*made], self.stderr)}
        shown = [(result, made[result.command.pk] if result.command else None) for result in results]
        if options["json"]:
            self.stdout.write(json.dumps([_as_json(*one) for one in shown], default=str))
        else:
            for result, command in shown:
                self.stdout.write(_line(result, command, options["wait"]))
        if not all(command and (not options["wait"] or following.succeeded(command)) for _, command in shown):
            sys.exit(1)

    def _list(self, options: dict[str, Any]) -> None:
        asked = Q(request__isnull=False) | Q(missing_since__isnull=True, deployable__missing_since__isnull=True)
        for name, path in (("host", "host__name"), ("driver", "driver"), ("backend", "backend")):
            asked &= Q(**{f"deployable__device__{path}": options[name]}) if options[name] else Q()
        if options["free"] or options["attached"]:
            asked &= Q(request__isnull=options["free"])
        found = AttachHandle.objects.filter(asked).select_related("request", "deployable__device__host").order_by("id")
        rows = [_unit(handle) for handle in found[:ROWS]]
        if options["json"]:
            self.stdout.write(json.dumps(rows, default=str))
            return
        lines = [tuple(UNIT), *(tuple(str(value or "–") for value in row.values()) for row in rows)]
        for line in shell.table(lines):
            self.stdout.write(line)


UNIT = ("state", "host", "driver", "backend", "device", "handle", "instance", "project", "label")


def _unit(handle: AttachHandle) -> dict[str, Any]:
    device, held = handle.deployable.device, getattr(handle, "request", None)
    where = (device.host.name, device.driver, device.backend, device.uuid, handle.attach_info)
    who = (held.instance_uuid, held.project_id, held.label) if held else (None, None, None)
    return dict(zip(UNIT, (held.state if held else "free", *where, *who), strict=True))


def _ordered(options: dict[str, Any]) -> list[Result]:
    """Order the requested change, and return one result per device.

    Raises RefusedError, and CommandError for a count below 1.
    """
    who, reason = shell.person(), options["reason"]
    layout = catalogue.layout(options["layout"]) if options["layout"] else {}
    if options["verb"] == "update":
        one = options["target"]
        command = partitioning.update(one, layout, who, options["generation"], reason, Source.PERSON)
        return [Result(Target(one), one, command)]
    count, sign = options["count"], 1 if options["verb"] == "create" else -1
    if count is not None and count < 1:
        raise CommandError("--count must be 1 or more")
    wanted = Change(count and sign * count, layout, options["generation"])
    return partitioning.change(options["targets"], wanted, who, reason, Source.PERSON)


def _as_json(result: Result, command: Row | None) -> dict[str, Any]:
    about = {"device": result.device, "refused": result.refused, "kind": result.reason.value if result.reason else ""}
    return about | {"command": following.as_json(command) if command else None}


def _line(result: Result, command: Row | None, waited: bool) -> str:
    if command is None:
        return f"refused: {result.refused}"
    if waited:
        return f"{command.device_name} on {command.host.name}: {next(following.told(command))}"
    return f"ordered: {command.uuid}; `manage.py command show {command.uuid} --wait` shows its progress"


def _orders(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--generation", metavar="N", type=int, help="generation of the device; refused if it has changed")
    verb.add_argument("--reason", default="", help="reason that is shown with the commands and their events")
    verb.add_argument(
        "--wait", action="store_true", help="wait until all commands have ended; exit with 1 if one failed"
    )


def _target(text: str) -> Target:
    host, slash, backend = text.strip().rpartition("/")
    if slash and host and backend:
        return Target(host=host, backend=backend)
    return Target(_uuid(text))
