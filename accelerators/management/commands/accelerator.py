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
from accelerators.devices.partitioning import PartitionChange, PartitionResult, PartitionTarget
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import EventSource
from accelerators.management import following, shell
from accelerators.models import AttachHandle
from accelerators.models import Command as Row

MAX_ROWS = 1000
EPILOG = """\
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
_parse_device_uuid = shell.uuid_argument(" and not HOST/BACKEND")


class Command(shell.OperatorCommand):
    epilog = EPILOG
    help = "List accelerators, or change their number: list, create, delete, update."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=argparse.ArgumentParser)
        listing = verbs.add_parser("list", help=f"list the first {MAX_ROWS} units and the instances that hold them")
        listing.add_argument("--host", help="only units of the host with this name")
        listing.add_argument("--driver", help="only units of this driver")
        listing.add_argument("--backend", help="only units of backends with this name")
        which = listing.add_mutually_exclusive_group()
        which.add_argument("--free", action="store_true", help="only units that nobody holds")
        which.add_argument("--attached", action="store_true", help="only units that an instance holds")
        for name, about in (("create", "add units to each device"), ("delete", "remove units from each device")):
            verb = verbs.add_parser(name, help=about, description=about)
            verb.add_argument("targets", metavar="DEVICE|HOST/BACKEND", nargs="+", type=_parse_target)
            verb.add_argument(
                "--count",
                metavar="N",
                type=int,
                required=name == "create",
                help="units to add to or remove from each device",
            )
            verb.add_argument("--layout", metavar="K=V", nargs="+", default=[], help="more layout keys of the driver")
            _add_order_arguments(verb)
        update = verbs.add_parser("update", help="partition one device with the given layout")
        update.add_argument("target", metavar="DEVICE", type=_parse_device_uuid)
        update.add_argument(
            "--layout", metavar="K=V", nargs="+", required=True, help="layout keys of its driver, such as vfs=4"
        )
        _add_order_arguments(update)
        for verb in verbs.choices.values():
            verb.add_argument("--json", action="store_true", help="write JSON to standard output, for scripts")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["verb"] == "list":
            return self._print_units(options)
        try:
            self._print_results(_order_change(options), options)
        except RefusedError as refused:
            raise CommandError(refused.text) from None

    def _print_results(self, results: Sequence[PartitionResult], options: dict[str, Any]) -> None:
        commands: dict[int, Row] = {result.command.pk: result.command for result in results if result.command}
        if options["wait"] and commands:
            commands = {row.pk: row for row in following.wait_until_ended([*commands], self.stderr)}
        results_and_commands = [(result, commands[result.command.pk] if result.command else None) for result in results]
        if options["json"]:
            self.stdout.write(json.dumps([_result_to_dict(*one) for one in results_and_commands], default=str))
        else:
            for result, command in results_and_commands:
                self.stdout.write(_describe_result(result, command, options["wait"]))
        if not all(
            command and (not options["wait"] or following.has_succeeded(command)) for _, command in results_and_commands
        ):
            sys.exit(1)

    def _print_units(self, options: dict[str, Any]) -> None:
        conditions = Q(request__isnull=False) | Q(missing_since__isnull=True, deployable__missing_since__isnull=True)
        for name, path in (("host", "host__name"), ("driver", "driver"), ("backend", "backend")):
            conditions &= Q(**{f"deployable__device__{path}": options[name]}) if options[name] else Q()
        if options["free"] or options["attached"]:
            conditions &= Q(request__isnull=options["free"])
        handles = (
            AttachHandle.objects.filter(conditions).select_related("request", "deployable__device__host").order_by("id")
        )
        rows = [_unit_row(handle) for handle in handles[:MAX_ROWS]]
        if options["json"]:
            self.stdout.write(json.dumps(rows, default=str))
            return
        lines = [tuple(UNIT_COLUMNS), *(tuple(str(value or "–") for value in row.values()) for row in rows)]
        for line in shell.format_table(lines):
            self.stdout.write(line)


UNIT_COLUMNS = ("state", "host", "driver", "backend", "device", "handle", "instance", "project", "label")


def _unit_row(handle: AttachHandle) -> dict[str, Any]:
    device, request = handle.deployable.device, getattr(handle, "request", None)
    where = (device.host.name, device.driver, device.backend, device.uuid, handle.attach_info)
    who = (request.instance_uuid, request.project_id, request.label) if request else (None, None, None)
    return dict(zip(UNIT_COLUMNS, (request.state if request else "free", *where, *who), strict=True))


def _order_change(options: dict[str, Any]) -> list[PartitionResult]:
    """Order the requested change, and return one result per device.

    Raises RefusedError, and CommandError for a count below 1.
    """
    caller, reason = shell.current_operator(), options["reason"]
    layout = catalogue.parse_layout(options["layout"]) if options["layout"] else {}
    if options["verb"] == "update":
        device_uuid = options["target"]
        command = partitioning.update_layout(
            device_uuid, layout, caller, options["generation"], reason, EventSource.PERSON
        )
        return [PartitionResult(PartitionTarget(device_uuid), device_uuid, command)]
    count, sign = options["count"], 1 if options["verb"] == "create" else -1
    if count is not None and count < 1:
        raise CommandError("--count must be 1 or more")
    wanted = PartitionChange(count and sign * count, layout, options["generation"])
    return partitioning.partition_devices(options["targets"], wanted, caller, reason, EventSource.PERSON)


def _result_to_dict(result: PartitionResult, command: Row | None) -> dict[str, Any]:
    about = {"device": result.device, "refused": result.refused, "kind": result.kind}
    return about | {"command": following.command_to_dict(command) if command else None}


def _describe_result(result: PartitionResult, command: Row | None, waited: bool) -> str:
    if command is None:
        return f"refused: {result.refused}"
    if waited:
        return f"{command.device_name} on {command.host.name}: {next(following.describe_result(command))}"
    return f"ordered: {command.uuid}; `manage.py command show {command.uuid} --wait` shows its progress"


def _add_order_arguments(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--generation", metavar="N", type=int, help="generation of the device; refused if it has changed")
    verb.add_argument("--reason", default="", help="reason that is shown with the commands and their events")
    verb.add_argument(
        "--wait", action="store_true", help="wait until all commands have ended; exit with 1 if one failed"
    )


def _parse_target(text: str) -> PartitionTarget:
    host, slash, backend = text.strip().rpartition("/")
    if slash and host and backend:
        return PartitionTarget(host=host, backend=backend)
    return PartitionTarget(_parse_device_uuid(text))
