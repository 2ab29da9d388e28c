"""`manage.py device`: list devices and change their state, for people (tables) and scripts (`--json`, exit status)."""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError
from django.db.models import QuerySet
from django.forms.models import model_to_dict

from accelerators.devices import admission_rules, lifecycle
from accelerators.domain import actions
from accelerators.domain.actions import Action
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import DeviceState, DeviceType, DrainTarget
from accelerators.management import following, shell
from accelerators.models import AcceleratorRequest, Device, Event
from accelerators.models import Command as Row
from accelerators.models.commands import COMMAND_IS_OPEN

COLUMNS = ("uuid", "state", "status", "type", "model", "address", "host", "driver")
MAX_EVENTS = 10
PROGRESS_FROM_DEVICES = 1000
"""If more devices than these are changed, progress is written to standard error."""
EPILOG = """\
A device is inactive when it is found. Enable makes it ready (offered), or installing until its driver has prepared it;
--wait waits for that. Disable puts it in maintenance; bound requests stay bound. Drain takes it out of offer and
records when its last request is gone; with --then retired it is retired at that time. Quarantine is for devices that
cannot be trusted; release ends the quarantine. Retire takes a device out of use for good and is refused while somebody
holds it; reinstate makes a retired device inactive. Admit applies the admission rules to devices that are inactive now.

  manage.py device list --host cmp1.example --state inactive
  manage.py device enable 3f1c… 77ab… --reason "burnt in"
  manage.py device list --host cmp1.example --quiet | manage.py device drain - --then retired --reason "end of lease"

Exit status 1: a device was refused, or (with --wait) could not be installed; the table states the reason. For commands
to the device's agent see `manage.py command --help`.
"""
_parse_uuid = shell.uuid_argument("; `manage.py device list` shows the uuids")


class Command(shell.OperatorCommand):
    epilog = EPILOG
    help = (
        "List devices, show one, or change their state: enable, drain, disable, quarantine, release, retire, reinstate."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=argparse.ArgumentParser)
        listing = verbs.add_parser("list", help="list devices, ordered by host")
        listing.add_argument("--host", help="only devices of this host")
        listing.add_argument("--state", choices=[*DeviceState], help="only devices in this state")
        listing.add_argument("--type", choices=[*DeviceType], help="only devices of this type")
        listing.add_argument("--driver", help="only devices of this driver")
        listing.add_argument(
            "--quiet", action="store_true", help="print only uuids, one per line, as input for another command"
        )
        show = verbs.add_parser(
            "show", help="show one device, the reason for its state, and its latest commands and events"
        )
        show.add_argument("uuid", metavar="UUID", type=_parse_uuid)
        for action in Action:
            verb = verbs.add_parser(action.value, help=actions.ACTION_DESCRIPTIONS[action])
            verb.add_argument(
                "uuids", metavar="UUID", nargs="+", type=_parse_uuid_or_dash, help="- reads uuids from standard input"
            )
            verb.add_argument("--reason", default="", help="reason that is shown with the device and its events")
            if action is Action.ENABLE:
                verb.add_argument("--wait", action="store_true", help="wait until the installations have ended")
            if action is Action.DRAIN:
                verb.add_argument(
                    "--then", choices=[*DrainTarget], default=DrainTarget.MAINTENANCE, help="state after the drain"
                )
        admit = verbs.add_parser("admit", help="apply the admission rules to devices that are inactive now")
        admit.add_argument("--dry-run", action="store_true", help="only print how many devices each rule would change")
        for verb in verbs.choices.values():
            verb.add_argument("--json", action="store_true", help="write JSON to standard output, for scripts")

    def handle(self, *args: Any, **options: Any) -> None:
        verb = options["verb"]
        handler = getattr(self, f"_{verb}", None) or self._apply_action
        handler(options)

    def _list(self, options: dict[str, Any]) -> None:
        filters = {"host": "host__name", "state": "state", "type": "type", "driver": "driver"}
        conditions = {column: options[name] for name, column in filters.items() if options[name]}
        devices = Device.objects.filter(**conditions).select_related("host").order_by("host__name", "id")
        if options["quiet"]:
            for uuid in devices.values_list("uuid", flat=True).iterator():
                self.stdout.write(str(uuid))
            return
        self._print_rows(_device_rows(devices), COLUMNS, options["json"])

    def _show(self, options: dict[str, Any]) -> None:
        device = Device.objects.select_related("host").filter(uuid=options["uuid"]).first()
        if device is None:
            raise CommandError(f"there is no device {options['uuid']}; `manage.py device list` shows all devices")
        facts: dict[str, Any] = {"uuid": str(device.uuid), "host": device.host.name}
        facts |= {name: value for name, value in model_to_dict(device).items() if name not in ("id", "host")}
        request_count = AcceleratorRequest.objects.filter(attach_handle__deployable__device=device).count()
        facts |= {"state_since": device.state_since.isoformat(timespec="seconds"), "requests": request_count}
        facts["possible"] = ", ".join(actions.possible_actions(lifecycle.build_standing(device, request_count)))
        events = [
            {
                "at": event.at.isoformat(timespec="seconds"),
                "action": event.action,
                "by": event.actor,
                "why": event.reason,
            }
            for event in Event.objects.filter(subject=device.uuid)[:MAX_EVENTS]
        ]
        commands = Row.objects.filter(device=device).select_related("host")[:MAX_EVENTS]
        if options["json"]:
            lists = {"commands": [following.command_to_dict(row) for row in commands], "events": events}
            self.stdout.write(json.dumps(facts | lists, default=str))
            return
        for name, value in facts.items():
            if value not in ("", None):
                self.stdout.write(f"{name:18} {value}")
        for row in commands:
            self.stdout.write(f"{'command':18} {row.uuid} {row.op} {row.state} {row.text or row.progress}".rstrip())
        self.stdout.write("")
        self._print_rows(events, ("at", "action", "by", "why"), False)

    def _apply_action(self, options: dict[str, Any]) -> None:
        uuids = list(dict.fromkeys(_expand_dash(options["uuids"])))
        action, drain_to = Action(options["verb"]), DrainTarget(options.get("then", DrainTarget.MAINTENANCE))
        results: list[lifecycle.ActionResult] = []
        try:
            for some_results in lifecycle.apply_action_in_slices(
                action, uuids, shell.current_operator(), options["reason"], drain_to
            ):
                results += some_results
                if len(uuids) > PROGRESS_FROM_DEVICES:
                    self.stderr.write(f"{len(results)} of {len(uuids)}")
        except RefusedError as refused:
            raise CommandError(refused.text) from None
        failed = self._wait_for_installs(results) if options.get("wait") else False
        rows = [asdict(result) | {"uuid": str(result.uuid)} for result in results]
        self._print_rows(rows, ("uuid", "outcome", "state", "name", "host", "text"), options["json"])
        counts = Counter(result.outcome for result in results)
        if not options["json"]:
            self.stderr.write(", ".join(f"{number} {word}" for word, number in counts.items()))
        if counts["refused"] or failed:
            sys.exit(1)

    def _wait_for_installs(self, results: list[lifecycle.ActionResult]) -> bool:
        """Wait until the devices are installed and update their `results`; return True if an installation failed."""
        index_of_device = {result.uuid: n for n, result in enumerate(results) if result.outcome != "refused"}
        installing = Row.objects.filter(COMMAND_IS_OPEN, op="install", device__uuid__in=index_of_device)
        ended = following.wait_until_ended(list(installing.values_list("id", flat=True)), self.stderr)
        texts = {row.device_id: row.text for row in ended if row.device_id is not None}
        for device in Device.objects.filter(pk__in=texts):
            n = index_of_device[device.uuid]
            results[n] = replace(results[n], state=device.state, text=texts[device.pk])
        return not all(map(following.has_succeeded, ended))

    def _admit(self, options: dict[str, Any]) -> None:
        counts = admission_rules.count_matching_devices()
        if not options["dry_run"]:
            moved = 0
            for number in admission_rules.apply_rules(shell.current_operator()):
                moved += number
                if counts.total() > PROGRESS_FROM_DEVICES:
                    self.stderr.write(f"{moved} of {counts.total()}")
        self._print_rows(
            [{"rule": name, "devices": number} for name, number in counts.items()], ("rule", "devices"), options["json"]
        )

    def _print_rows(self, rows: Iterable[dict[str, Any]], columns: Sequence[str], as_json: bool) -> None:
        if as_json:
            self.stdout.write(json.dumps(list(rows), default=str))
            return
        lines = [columns, *([str(row[name] if row[name] is not None else "") for name in columns] for row in rows)]
        for line in shell.format_table(lines):
            self.stdout.write(line)


def _device_rows(devices: QuerySet[Device]) -> Iterator[dict[str, Any]]:
    for device in devices.iterator():
        row = {name: getattr(device, name) for name in COLUMNS}
        drain = f" (drains to {device.drain_to})" if device.drain_to else ""
        yield row | {"uuid": str(device.uuid), "host": device.host.name, "state": device.state + drain}


def _parse_uuid_or_dash(text: str) -> UUID | None:
    return None if text == "-" else _parse_uuid(text)


def _expand_dash(uuids: Iterable[UUID | None]) -> Iterator[UUID]:
    for uuid in uuids:
        if uuid is not None:
            yield uuid
            continue
        for line in filter(str.strip, sys.stdin):
            try:
                yield UUID(line.strip())
            except ValueError:
                raise CommandError(f"{line.strip()[:64]!r} on standard input is not a uuid") from None
