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
from accelerators.domain.states import DeviceState, DeviceType, Drain
from accelerators.management import following, shell
from accelerators.models import AcceleratorRequest, Device, Event
from accelerators.models import Command as Row
from accelerators.models.commands import OPEN

COLUMNS = ("uuid", "state", "status", "type", "model", "address", "host", "driver")
EVENTS = 10
LOTS = 1000
"""If more devices than these are changed, progress is written to standard error."""
TEACHING = """\
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
_uuid = shell.uuid("; `manage.py device list` shows the uuids")


class Command(shell.Taught):
    teaching = TEACHING
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
        show.add_argument("uuid", metavar="UUID", type=_uuid)
        for action in Action:
            verb = verbs.add_parser(action.value, help=actions.MEANING[action])
            verb.add_argument(
                "uuids", metavar="UUID", nargs="+", type=_uuid_or_dash, help="- reads uuids from standard input"
            )
            verb.add_argument("--reason", default="", help="reason that is shown with the device and its events")
            if action is Action.ENABLE:
                verb.add_argument("--wait", action="store_true", help="wait until the installations have ended")
            if action is Action.DRAIN:
                verb.add_argument("--then", choices=[*Drain], default=Drain.MAINTENANCE, help="state after the drain")
        admit = verbs.add_parser("admit", help="apply the admission rules to devices that are inactive now")
        admit.add_argument("--dry-run", action="store_true", help="only print how many devices each rule would change")
        for verb in verbs.choices.values():
            verb.add_argument("--json", action="store_true", help="write JSON to standard output, for scripts")

    def handle(self, *args: Any, **options: Any) -> None:
        verb = options["verb"]
        handler = getattr(self, f"_{verb}", None) or self._act
        handler(options)

    def _list(self, options: dict[str, Any]) -> None:
        named = {"host": "host__name", "state": "state", "type": "type", "driver": "driver"}
        asked = {column: options[name] for name, column in named.items() if options[name]}
        devices = Device.objects.filter(**asked).select_related("host").order_by("host__name", "id")
        if options["quiet"]:
            for uuid in devices.values_list("uuid", flat=True).iterator():
                self.stdout.write(str(uuid))
            return
        self._print(_rows(devices), COLUMNS, options["json"])

    def _show(self, options: dict[str, Any]) -> None:
        device = Device.objects.select_related("host").filter(uuid=options["uuid"]).first()
        if device is None:
            raise CommandError(f"there is no device {options['uuid']}; `manage.py device list` shows all devices")
        facts = {"uuid": str(device.uuid), "host": device.host.name}
        facts |= {name: value for name, value in model_to_dict(device).items() if name not in ("id", "host")}
        held = AcceleratorRequest.objects.filter(attach_handle__deployable__device=device).count()
        facts |= {"state_since": device.state_since.isoformat(timespec="seconds"), "requests": held}
        facts["possible"] = ", ".join(actions.possible(lifecycle.standing(device, held)))
        events = [
            {
                "at": event.at.isoformat(timespec="seconds"),
                "action": event.action,
                "by": event.actor,
                "why": event.reason,
            }
            for event in Event.objects.filter(subject=device.uuid)[:EVENTS]
        ]
        last = Row.objects.filter(device=device).select_related("host")[:EVENTS]
        if options["json"]:
            told = {"commands": [following.as_json(row) for row in last], "events": events}
            self.stdout.write(json.dumps(facts | told, default=str))
            return
        for name, value in facts.items():
            if value not in ("", None):
                self.stdout.write(f"{name:18} {value}")
        for row in last:
            self.stdout.write(f"{'command':18} {row.uuid} {row.op} {row.state} {row.text or row.progress}".rstrip())
        self.stdout.write("")
        self._print(events, ("at", "action", "by", "why"), False)

    def _act(self, options: dict[str, Any]) -> None:
        uuids = list(dict.fromkeys(_spelled_out(options["uuids"])))
        action, then = Action(options["verb"]), Drain(options.get("then", Drain.MAINTENANCE))
        results: list[lifecycle.Result] = []
        try:
            for part in lifecycle.many(action, uuids, shell.person(), options["reason"], then):
                results += part
                if len(uuids) > LOTS:
                    self.stderr.write(f"{len(results)} of {len(uuids)}")
        except RefusedError as refused:
            raise CommandError(refused.text) from None
        failed = self._installed(results) if options.get("wait") else False
        rows = [asdict(result) | {"uuid": str(result.uuid)} for result in results]
        self._print(rows, ("uuid", "outcome", "state", "name", "host", "text"), options["json"])
        counts = Counter(result.outcome for result in results)
        if not options["json"]:
            self.stderr.write(", ".join(f"{number} {word}" for word, number in counts.items()))
        if counts["refused"] or failed:
            sys.exit(1)

    def _installed(self, results: list[lifecycle.Result]) -> bool:
        """Wait until the devices are installed and update their `results`; return True if an installation failed."""
        found = {result.uuid: n for n, result in enumerate(results) if result.outcome != "refused"}
        installing = Row.objects.filter(OPEN, op="install", device__uuid__in=found)
        ended = following.follow(list(installing.values_list("id", flat=True)), self.stderr)
        texts = {row.device_id: row.text for row in ended}
        for device in Device.objects.filter(pk__in=texts):
            n = found[device.uuid]
            results[n] = replace(results[n], state=device.state, text=texts[device.pk])
        return not all(map(following.succeeded, ended))

    def _admit(self, options: dict[str, Any]) -> None:
        counts = admission_rules.preview()
        if not options["dry_run"]:
            moved = 0
            for number in admission_rules.apply(shell.person()):
                moved += number
                if counts.total() > LOTS:
                    self.stderr.write(f"{moved} of {counts.total()}")
        self._print(
            [{"rule": name, "devices": number} for name, number in counts.items()], ("rule", "devices"), options["json"]
        )

    def _print(self, rows: Iterable[dict[str, Any]], columns: Sequence[str], as_json: bool) -> None:
        if as_json:
            self.stdout.write(json.dumps(list(rows), default=str))
            return
        lines = [columns, *([str(row[name] if row[name] is not None else "") for name in columns] for row in rows)]
        for line in shell.table(lines):
            self.stdout.write(line)


def _rows(devices: QuerySet[Device]) -> Iterator[dict[str, Any]]:
    for device in devices.iterator():
        row = {name: getattr(device, name) for name in COLUMNS}
        drain = f" (drains to {device.drain_to})" if device.drain_to else ""
        yield row | {"uuid": str(device.uuid), "host": device.host.name, "state": device.state + drain}


def _uuid_or_dash(text: str) -> UUID | None:
    return None if text == "-" else _uuid(text)


def _spelled_out(named: Iterable[UUID | None]) -> Iterator[UUID]:
    for uuid in named:
        if uuid is not None:
            yield uuid
            continue
        for line in filter(str.strip, sys.stdin):
            try:
                yield UUID(line.strip())
            except ValueError:
                raise CommandError(f"{line.strip()[:64]!r} on standard input is not a uuid") from None
