"""`manage.py seal_events`: seal events now, show the key that signs seals, or change it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError

from accelerators.audit import key_change, retention, sealing, signing, status
from accelerators.management import shell
from accelerators.runtime import jobs

EPILOG = """\
The cluster `work` seals events by itself once a minute. Run this command from a timer instead, as another user or on
another machine, if no process that serves requests or runs jobs shall be able to read the key. Set
CYBORG_AUDIT_KEY_FILE to `off` for those processes, and to the file of the key for this command.

  manage.py seal_events                         seals all events that can be sealed, and drops months by retention
  manage.py seal_events --show-key              prints the public key, for verify_events --trust-key
  manage.py seal_events --new-key /etc/accelerators/audit-key-2027.pem --reason "yearly change"
  manage.py seal_events --begin-again --reason "the key was lost with its disk"
  manage.py seal_events --restored --reason "restored from the backup of noon"

After --new-key, move the new file to the place that CYBORG_AUDIT_KEY_FILE names, on every node that seals. Nothing is
sealed until then; no event is lost. Exit code 1: nothing could be sealed, and the message says why.
"""


class Command(shell.OperatorCommand):
    """The management command `seal_events`."""

    epilog = EPILOG
    help = "Seal events now, or show or change the key that signs seals."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options `--show-key`, `--new-key`, `--begin-again` and `--reason`."""
        group = parser.add_mutually_exclusive_group()
        group.add_argument("--show-key", action="store_true", help="only print the public key")
        group.add_argument("--new-key", type=Path, metavar="FILE", help="let the key in FILE sign from now on")
        group.add_argument("--begin-again", action="store_true", help="go on after a lost key or strange seals")
        group.add_argument("--restored", action="store_true", help="record that the database was restored")
        parser.add_argument("--reason", default="", help="why the key changes, or what was restored; it is recorded")

    def handle(self, *args: Any, **options: Any) -> None:
        """Do what the options say. Raises CommandError if this process has no key, or has one that may not sign, or if
        the job runs at the same time."""
        try:
            if options["show_key"]:
                self._show_key()
                return
            with jobs.try_connection_lock(sealing.SEALS_JOB) as acquired:
                if not acquired:
                    raise CommandError("the job `seals` runs at this moment: try again")
                if options["restored"]:
                    self._record_restore(options["reason"])
                elif options["new_key"] or options["begin_again"]:
                    self._change_key(options["new_key"], options["reason"])
                else:
                    self._seal()
        except signing.AuditKeyError as error:
            raise CommandError(str(error)) from None

    def _seal(self) -> None:
        """Seal all events that can be sealed, drop months by retention, and print the newest seal.

        Orders no task, as the job does after a while: the clusters may have another secret key than this process.
        """
        if settings.KEYS.audit_key_path is None:
            raise CommandError("CYBORG_AUDIT_KEY_FILE is off: name the file of the key for this command")
        try:
            while retention.seal_or_drop():
                pass
        except signing.AuditKeyError as error:
            status.store_refusal(str(error))
            raise
        status.store_refusal("")
        last = sealing.get_newest_seal()
        self.stdout.write(f"newest seal: {last.number} {last.hash} {last.key}" if last.number else "no event to seal")

    def _show_key(self) -> None:
        """Print the public key of CYBORG_AUDIT_KEY_FILE."""
        if settings.KEYS.audit_key_path is None:
            raise CommandError("CYBORG_AUDIT_KEY_FILE is off")
        self.stdout.write(signing.get_public_key(signing.load_key(settings.KEYS.audit_key_path)))

    def _record_restore(self, reason: str) -> None:
        """Append the seal that records that the database was restored, and print its number."""
        if not reason.strip():
            raise CommandError("--reason: say what was restored")
        if seal := sealing.record_restore(shell.current_operator().name, reason.strip()[: key_change.MAX_REASON]):
            self.stdout.write(f"seal №{seal.number} records the restore")
        else:
            self.stdout.write("no event is sealed yet")

    def _change_key(self, new_path: Path | None, reason: str) -> None:
        """Replace the key by that in `new_path`, or begin again with that of CYBORG_AUDIT_KEY_FILE if it is None."""
        if not reason.strip():
            raise CommandError("--reason: say why the key changes")
        operator = shell.current_operator().name
        if new_path:
            seal = key_change.replace_key(new_path.absolute(), operator, reason)
            self.stdout.write(
                f"seal №{seal.number}: the next one must be signed with the key in {new_path}: move that file to"
                f" {settings.KEYS.audit_key_path}"
            )
        else:
            seal = key_change.begin_again(operator, reason)
            self.stdout.write(
                f"seal №{seal.number}: trust begins again with the key {seal.key}; verify_events fails until it is"
                " given --trust-key with this key and the first one"
            )
