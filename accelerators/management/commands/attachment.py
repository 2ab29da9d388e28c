"""`manage.py attachment`: attach accelerators to running instances, detach them, and list or show attachments."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

from django.core.management.base import CommandError

from accelerators.domain import libvirt_xml
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import Source
from accelerators.management import shell
from accelerators.models import Attachment
from accelerators.models.attachments import ENDED, AttachmentState
from accelerators.workflows import attachments

ROWS = 50
EVERY_S = 0.25
TEACHING = """\
Attach claims free accelerators on the instance's host in Placement, adds them to the instance's allocation, and binds
them, as Nova does at boot. Stock Nova plugs nothing into a running guest: `show` prints what is left to do by hand,
with the XML for libvirt. Detach releases everything; remove the accelerators from the guest first. An attachment that
fails is undone completely.

  manage.py attachment attach 5e1f… --profile fpga-one --reason "ticket 4711" --wait
  manage.py attachment attach 5e1f… --device 3f1c…
  manage.py attachment list --instance 5e1f…
  manage.py attachment detach 9b02… --wait

Exit status: 0 if the request was accepted (with --wait: attached or detached); 1 if it was refused or failed. The last
line states the reason.
"""
_uuid = shell.uuid()


class Command(shell.Taught):
    teaching = TEACHING
    help = "Attach accelerators to running instances, detach them, and show the progress: attach, detach, list, show."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=argparse.ArgumentParser)
        attach = verbs.add_parser(
            "attach", help="attach the accelerators of a profile, or one unit of a device, to an instance"
        )
        attach.add_argument("uuid", metavar="INSTANCE", type=_uuid)
        what = attach.add_mutually_exclusive_group(required=True)
        what.add_argument("--profile", default="", help="a device profile, by name or uuid")
        what.add_argument("--device", type=_uuid, help="uuid of a device of which one unit is attached")
        detach = verbs.add_parser("detach", help="detach an attachment, in any state")
        detach.add_argument("uuid", metavar="ATTACHMENT", type=_uuid)
        for verb in (attach, detach):
            verb.add_argument("--reason", default="", help="reason that is shown with the attachment and its events")
            verb.add_argument("--wait", action="store_true", help="wait until it has ended; exit with 1 if it failed")
        listing = verbs.add_parser("list", help=f"list the newest {ROWS} attachments")
        listing.add_argument("--instance", type=_uuid, help="only attachments of this instance")
        listing.add_argument("--state", choices=[*AttachmentState], help="only attachments in this state")
        show = verbs.add_parser(
            "show", help="show the progress and the result of one attachment, and what is left to do by hand"
        )
        show.add_argument("uuid", metavar="ATTACHMENT", type=_uuid)
        for verb in verbs.choices.values():
            verb.add_argument("--json", action="store_true", help="write JSON to standard output, for scripts")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["verb"] == "list":
            return self._list(options)
        if options["verb"] == "show":
            return self._tell(_one(options["uuid"]), options)
        wanted = AttachmentState.ATTACHED if options["verb"] == "attach" else AttachmentState.DETACHED
        row = self._ask(options)
        if options["wait"]:
            row = _until_ended(row)
        self._tell(row, options)
        if options["wait"] and row.state != wanted:
            sys.exit(1)

    def _ask(self, options: dict[str, Any]) -> Attachment:
        who, uuid, reason = shell.person(), options["uuid"], options["reason"]
        try:
            if options["verb"] == "detach":
                return attachments.detach(uuid, who, reason, Source.PERSON)
            what = {"profile": options["profile"], "device": options["device"]}
            return attachments.ask(uuid, who, reason=reason, source=Source.PERSON, **what)
        except RefusedError as refused:
            raise CommandError(refused.text) from None

    def _tell(self, row: Attachment, options: dict[str, Any]) -> None:
        if options["json"]:
            self.stdout.write(json.dumps(_facts(row), default=str))
        else:
            for line in _told(row):
                self.stdout.write(line)

    def _list(self, options: dict[str, Any]) -> None:
        asked = {name: options[name] for name in ("instance", "state") if options[name]}
        rows = list(Attachment.objects.filter(**asked)[:ROWS])
        attachments.with_handles(rows)
        if options["json"]:
            self.stdout.write(json.dumps([_facts(row) for row in rows], default=str))
            return
        lines = [("uuid", "state", "instance", "what", "host", "by", "why")]
        lines += [
            (
                str(row.uuid),
                row.state,
                str(row.instance),
                row.profile or str(row.device),
                row.host,
                row.actor,
                row.fault,
            )
            for row in rows
        ]
        for line in shell.table(lines):
            self.stdout.write(line)


def _until_ended(row: Attachment) -> Attachment:
    """Wait until the attachment is attached or has ended, and return it.

    Raises CommandError on Ctrl-C; the attachment continues in the background.
    """
    try:
        while row.state not in (AttachmentState.ATTACHED, *ENDED):
            time.sleep(EVERY_S)
            row = _one(row.uuid)
    except KeyboardInterrupt:
        raise CommandError(
            f"stopped waiting; the attachment continues, see `manage.py attachment show {row.uuid}`"
        ) from None
    return row


def _facts(row: Attachment) -> dict[str, Any]:
    names = ("uuid", "instance", "project_id", "host", "profile", "device", "state", "fault", "steps", "requests")
    held = attachments.handles(row)
    more = {"hotplug": libvirt_xml.sentence(held, row.host), "libvirt": libvirt_xml.elements(held)}
    return {name: getattr(row, name) for name in (*names, "actor", "reason", "created_at")} | more


def _told(row: Attachment) -> Iterator[str]:
    yield f"{row.uuid} {row.state}" + (f": {row.fault}" if row.fault else "")
    for one in row.steps:
        yield f"  {one['at']}  {one['step']:<10} {one['text']}".rstrip()
    held = attachments.handles(row)
    if said := libvirt_xml.sentence(held, row.host):
        yield said
    yield from libvirt_xml.elements(held)


def _one(uuid: UUID) -> Attachment:
    row = Attachment.objects.filter(uuid=uuid).first()
    if row is None:
        raise CommandError(f"there is no attachment {uuid}; `manage.py attachment list` shows the newest ones")
    return row
