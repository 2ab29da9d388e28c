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
A unit is what one instance gets: a virtual function, a mediated device, a part of a card. Their number is changed by
dividing the device anew, which is refused while anybody holds one of its units. DEVICE is a uuid; HOST/BACKEND stands
for all devices of that backend of which the number can be chosen (`manage.py device list` and the console name them).

  manage.py accelerator list --host cmp1.example --free
  manage.py accelerator create cmp1.example/nics cmp2.example/nics --count 4 --reason "more guests" --wait
  manage.py accelerator delete 3f1c… --count 1
  manage.py accelerator delete 3f1c…               (all of them)
  manage.py accelerator update 3f1c… --layout bind=vfio-pci --generation 7 --wait

Exit status: 0 everything was ordered, with --wait everything succeeded; 1 something was refused, or failed.
"""
_uuid = shell.uuid(", and no HOST/BACKEND either")


class Command(shell.Taught):
    teaching = TEACHING
    help = "List accelerators, make more of them or fewer: list, create, delete, update."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=argparse.ArgumentParser)
        listing = verbs.add_parser("list", help=f"the first {ROWS} units, and who has them")
        listing.add_argument("--host", help="of this host alone, by name")
        listing.add_argument("--driver", help="of this driver alone")
        listing.add_argument("--backend", help="of backends of this name alone")
        which = listing.add_mutually_exclusive_group()
        which.add_argument("--free", action="store_true", help="those alone that nobody has")
        which.add_argument("--attached", action="store_true", help="those alone that somebody has")
        for name, about in (("create", "more units of each device"), ("delete", "fewer units of each, or none")):
            verb = verbs.add_parser(name, help=about, description=about)
            verb.add_argument("targets", metavar="DEVICE|HOST/BACKEND", nargs="+", type=_target)
            verb.add_argument(
                "--count", metavar="N", type=int, required=name == "create", help="so many of each device"
            )
            verb.add_argument("--layout", metavar="K=V", nargs="+", default=[], help="other words of the driver")
            _orders(verb)
        update = verbs.add_parser("update", help="divide one device as its driver's words say")
        update.add_argument("target", metavar="DEVICE", type=_uuid)
        update.add_argument("--layout", metavar="K=V", nargs="+", required=True, help="words of its driver: vfs=4")
        _orders(update)
        for verb in verbs.choices.values():
            verb.add_argument("--json", action="store_true", help="for scripts: JSON on standard output")

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
    """Order the requested change, and return one result per device. Raises RefusedError, and CommandError for a count
    below 1."""
    who, reason = shell.person(), options["reason"]
    layout = catalogue.layout(options["layout"]) if options["layout"] else {}
    if options["verb"] == "update":
        one = options["target"]
        command = partitioning.update(one, layout, who, options["generation"], reason, Source.PERSON)
        return [Result(Target(one), one, command)]
    count, sign = options["count"], 1 if options["verb"] == "create" else -1
    if count is not None and count < 1:
        raise CommandError("--count is 1 or more")
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
    return f"ordered: {command.uuid}; `manage.py command show {command.uuid} --wait` follows it"


def _orders(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--generation", metavar="N", type=int, help="the device's, as you saw it; refused when it changed"
    )
    verb.add_argument("--reason", default="", help="shown with the commands and their events")
    verb.add_argument("--wait", action="store_true", help="until all have ended; the exit status is their success")


def _target(text: str) -> Target:
    host, slash, backend = text.strip().rpartition("/")
    if slash and host and backend:
        return Target(host=host, backend=backend)
    return Target(_uuid(text))
