"""`manage.py command`: order operations from agents and follow them, for people and for scripts (`--json`, exit
status)."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError
from django.db.models import Q, QuerySet

from accelerators.commands import catalogue, placing
from accelerators.commands.catalogue import ORDERABLE_COMMANDS, OrderableCommand
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import EventSource
from accelerators.management import following, shell
from accelerators.models import Command as Row
from accelerators.models import Host
from accelerators.models.commands import COMMAND_IS_OPEN

MAX_ROWS = 50
EPILOG = """\
The agent of one host executes a command once. The command continues in the background; --wait shows its progress until
it has ended, and then its result. Destructive commands (reset, partition, program, uninstall) are refused while anybody
holds the device. To install a device, use `manage.py device enable`; devices are attached and detached when requests
are bound and unbound.

  manage.py command health 3f1c… --wait
  manage.py command partition 3f1c… --layout vfs=4 --reason "four instances" --wait
  manage.py command program 3f1c… --image 77ab… --wait
  manage.py command rescan cmp1.example --driver pci_driver
  manage.py command logs cmp1.example --wait
  manage.py command report cmp1.example --driver pci_driver --wait
  manage.py command list --host cmp1.example --open

Exit status: 0 if the command was ordered (with --wait: succeeded); 1 if it was refused, failed or expired, or if its
result is unknown. The last line states the reason.
"""
_parse_uuid = shell.uuid_argument()


class Command(shell.OperatorCommand):
    epilog = EPILOG
    help = (
        "Send a command to a host's agent and show its result: health, reset, partition, program, uninstall, rescan, "
        "logs, report."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="OP", parser_class=argparse.ArgumentParser)
        for act in ORDERABLE_COMMANDS.values():
            verb = verbs.add_parser(act.op, help=act.meaning, description=act.meaning)
            if act.target == "device":
                verb.add_argument(
                    "target",
                    metavar="DEVICE",
                    type=_parse_uuid,
                    help="uuid of the device, as in `manage.py device list`",
                )
            else:
                verb.add_argument("target", metavar="HOST", help="name or uuid of the host")
            _add_act_arguments(verb, act)
            verb.add_argument("--reason", default="", help="reason that is shown with the command and its events")
            verb.add_argument("--wait", action="store_true", help="wait until it has ended; exit with 1 if it failed")
        listing = verbs.add_parser("list", help=f"list the newest {MAX_ROWS} commands")
        listing.add_argument("--host", help="only commands of the host with this name")
        listing.add_argument("--device", type=_parse_uuid, help="only commands of this device")
        listing.add_argument("--open", action="store_true", help="only commands that have not ended")
        show = verbs.add_parser("show", help="show the progress and the result of one command")
        show.add_argument("uuid", metavar="UUID", type=_parse_uuid)
        show.add_argument("--wait", action="store_true", help="wait until it has ended; exit with 1 if it failed")
        for verb in verbs.choices.values():
            verb.add_argument("--json", action="store_true", help="write JSON to standard output, for scripts")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["verb"] == "list":
            return self._print_list(options)
        if options["verb"] == "show":
            return self._print_command(_get_command(options["uuid"]), options)
        self._print_command(self._order_command(ORDERABLE_COMMANDS[options["verb"]], options), options)

    def _order_command(self, act: OrderableCommand, options: dict[str, Any]) -> Row:
        caller, reason = shell.current_operator(), options["reason"]
        try:
            if act.target == "host":
                host, driver = _find_host_uuid(options["target"]), options.get("driver", "")
                return placing.order_host_command(
                    act.op, host, caller, driver=driver, reason=reason, source=EventSource.PERSON
                )
            arguments = {name: options[name] for name in ("image", "deployable") if options.get(name)}
            if act.takes == "layout":
                arguments["layout"] = catalogue.parse_layout(options["layout"])
            return placing.order_device_command(
                act.op, options["target"], caller, reason=reason, source=EventSource.PERSON, **arguments
            )
        except RefusedError as refused:
            raise CommandError(refused.text) from None

    def _print_command(self, row: Row, options: dict[str, Any]) -> None:
        if options["wait"]:
            (row,) = following.wait_until_ended([row.pk], self.stderr)
        elif options["verb"] != "show" and not options["json"]:
            self.stdout.write(f"ordered: {row.uuid}; `manage.py command show {row.uuid} --wait` shows its progress")
            return
        if options["json"]:
            self.stdout.write(json.dumps(following.command_to_dict(row), default=str))
        else:
            for line in following.describe_result(row):
                self.stdout.write(line)
        if options["wait"] and not following.has_succeeded(row):
            sys.exit(1)

    def _print_list(self, options: dict[str, Any]) -> None:
        conditions = Q(host__name=options["host"]) if options["host"] else Q()
        conditions &= Q(device__uuid=options["device"]) if options["device"] else Q()
        conditions &= COMMAND_IS_OPEN if options["open"] else Q()
        rows: QuerySet[Row] = Row.objects.filter(conditions).select_related("host").order_by("-id")[:MAX_ROWS]
        if options["json"]:
            self.stdout.write(json.dumps([following.command_to_dict(row) for row in rows], default=str))
            return
        lines = [("uuid", "state", "%", "op", "device", "host", "by", "text")]
        lines += [
            (
                str(row.uuid),
                row.state,
                str(row.percent),
                row.op,
                row.device_name,
                row.host.name,
                row.actor,
                row.text or row.progress,
            )
            for row in rows
        ]
        for line in shell.format_table(lines):
            self.stdout.write(line)


def _add_act_arguments(verb: argparse.ArgumentParser, act: OrderableCommand) -> None:
    match act.takes:
        case "layout":
            verb.add_argument(
                "--layout", metavar="K=V", nargs="+", required=True, help="layout keys of its driver, such as vfs=4"
            )
        case "image":
            verb.add_argument(
                "--image",
                metavar="UUID",
                type=_parse_uuid,
                required=True,
                help="an image that is stored here or in Glance",
            )
            verb.add_argument(
                "--deployable", metavar="UUID", type=_parse_uuid, help="the deployable, if the device has several"
            )
        case "driver":
            verb.add_argument("--driver", default="", help="only this driver; a rescan ends its quarantine")


def _get_command(uuid: UUID) -> Row:
    row = Row.objects.select_related("host").filter(uuid=uuid).first()
    if row is None:
        raise CommandError(f"there is no command {uuid}; `manage.py command list` shows the newest ones")
    return row


def _find_host_uuid(name_or_uuid: str) -> UUID:
    uuid = Host.objects.filter(name=name_or_uuid).values_list("uuid", flat=True).first()
    if uuid:
        return uuid
    try:
        return UUID(name_or_uuid)
    except ValueError:
        raise CommandError(f"there is no host {name_or_uuid[:255]!r}") from None
