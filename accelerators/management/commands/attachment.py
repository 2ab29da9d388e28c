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
from accelerators.domain.states import EventSource
from accelerators.management import shell
from accelerators.models import Attachment
from accelerators.models.attachments import ENDED_ATTACHMENT_STATES, AttachmentState
from accelerators.workflows import attachments

MAX_ROWS = 50
POLL_INTERVAL_S = 0.25
EPILOG = """\
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
_parse_uuid = shell.uuid_argument()


class Command(shell.OperatorCommand):
    epilog = EPILOG
    help = "Attach accelerators to running instances, detach them, and show the progress: attach, detach, list, show."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB", parser_class=argparse.ArgumentParser)
        attach = verbs.add_parser(
            "attach", help="attach the accelerators of a profile, or one unit of a device, to an instance"
        )
        attach.add_argument("uuid", metavar="INSTANCE", type=_parse_uuid)
        what = attach.add_mutually_exclusive_group(required=True)
        what.add_argument("--profile", default="", help="a device profile, by name or uuid")
        what.add_argument("--device", type=_parse_uuid, help="uuid of a device of which one unit is attached")
        detach = verbs.add_parser("detach", help="detach an attachment, in any state")
        detach.add_argument("uuid", metavar="ATTACHMENT", type=_parse_uuid)
        for verb in (attach, detach):
            verb.add_argument("--reason", default="", help="reason that is shown with the attachment and its events")
            verb.add_argument("--wait", action="store_true", help="wait until it has ended; exit with 1 if it failed")
        listing = verbs.add_parser("list", help=f"list the newest {MAX_ROWS} attachments")
        listing.add_argument("--instance", type=_parse_uuid, help="only attachments of this instance")
        listing.add_argument("--state", choices=[*AttachmentState], help="only attachments in this state")
        show = verbs.add_parser(
            "show", help="show the progress and the result of one attachment, and what is left to do by hand"
        )
        show.add_argument("uuid", metavar="ATTACHMENT", type=_parse_uuid)
        for verb in verbs.choices.values():
            verb.add_argument("--json", action="store_true", help="write JSON to standard output, for scripts")

    def handle(self, *args: Any, **options: Any) -> None:
        if options["verb"] == "list":
            return self._print_list(options)
        if options["verb"] == "show":
            return self._print_attachment(_get_attachment(options["uuid"]), options)
        wanted = AttachmentState.ATTACHED if options["verb"] == "attach" else AttachmentState.DETACHED
        row = self._request_change(options)
        if options["wait"]:
            row = _wait_until_attached_or_ended(row)
        self._print_attachment(row, options)
        if options["wait"] and row.state != wanted:
            sys.exit(1)

    def _request_change(self, options: dict[str, Any]) -> Attachment:
        caller, uuid, reason = shell.current_operator(), options["uuid"], options["reason"]
        try:
            if options["verb"] == "detach":
                return attachments.order_detachment(uuid, caller, reason, EventSource.PERSON)
            source_of_units = {"profile": options["profile"], "device": options["device"]}
            return attachments.order_attachment(
                uuid, caller, reason=reason, source=EventSource.PERSON, **source_of_units
            )
        except RefusedError as refused:
            raise CommandError(refused.text) from None

    def _print_attachment(self, row: Attachment, options: dict[str, Any]) -> None:
        if options["json"]:
            self.stdout.write(json.dumps(_attachment_to_dict(row), default=str))
        else:
            for line in _describe_attachment(row):
                self.stdout.write(line)

    def _print_list(self, options: dict[str, Any]) -> None:
        conditions = {name: options[name] for name in ("instance", "state") if options[name]}
        rows = list(Attachment.objects.filter(**conditions)[:MAX_ROWS])
        attachments.load_handles(rows)
        if options["json"]:
            self.stdout.write(json.dumps([_attachment_to_dict(row) for row in rows], default=str))
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
        for line in shell.format_table(lines):
            self.stdout.write(line)


def _wait_until_attached_or_ended(row: Attachment) -> Attachment:
    """Wait until the attachment is attached or has ended, and return it.

    Raises CommandError on Ctrl-C; the attachment continues in the background.
    """
    try:
        while row.state not in (AttachmentState.ATTACHED, *ENDED_ATTACHMENT_STATES):
            time.sleep(POLL_INTERVAL_S)
            row = _get_attachment(row.uuid)
    except KeyboardInterrupt:
        raise CommandError(
            f"stopped waiting; the attachment continues, see `manage.py attachment show {row.uuid}`"
        ) from None
    return row


def _attachment_to_dict(row: Attachment) -> dict[str, Any]:
    names = ("uuid", "instance", "project_id", "host", "profile", "device", "state", "fault", "steps", "requests")
    handles = attachments.get_handles(row)
    more = {
        "hotplug": libvirt_xml.describe_plugging(handles, row.host),
        "libvirt": libvirt_xml.render_hostdev_elements(handles),
    }
    return {name: getattr(row, name) for name in (*names, "actor", "reason", "created_at")} | more


def _describe_attachment(row: Attachment) -> Iterator[str]:
    yield f"{row.uuid} {row.state}" + (f": {row.fault}" if row.fault else "")
    for step in row.steps:
        yield f"  {step['at']}  {step['step']:<10} {step['text']}".rstrip()
    handles = attachments.get_handles(row)
    if instructions := libvirt_xml.describe_plugging(handles, row.host):
        yield instructions
    yield from libvirt_xml.render_hostdev_elements(handles)


def _get_attachment(uuid: UUID) -> Attachment:
    row = Attachment.objects.filter(uuid=uuid).first()
    if row is None:
        raise CommandError(f"there is no attachment {uuid}; `manage.py attachment list` shows the newest ones")
    return row
