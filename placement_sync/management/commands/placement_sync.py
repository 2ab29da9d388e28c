"""`manage.py placement_sync`: synchronize hosts with Placement now, or show what would be written."""

from __future__ import annotations

import math
import sys
from typing import Any

from django.conf import settings
from django.core.management.base import CommandError, CommandParser

from accelerators.management import shell
from accelerators.models import Host
from placement_sync.admin import describe
from placement_sync.apply_writes import SyncOutcome
from placement_sync.cloud import get_cloud_session
from placement_sync.jobs import discrepancies, providers, repository

HOST_BATCH = 32
TEACHING = """\
Placement is updated automatically: a change on a host is written at once, and every few minutes all hosts are compared.
This command does the same now, for one host or for all, and shows what was different.

  manage.py placement_sync --dry-run            show what would be written, but write nothing
  manage.py placement_sync --host cmp1.example  one host only

+ is new in Placement, - is removed, ~ is changed, ! could not be done.
Exit code 1: something could not be done for at least one host.
"""


class Command(shell.OperatorCommand):
    epilog = TEACHING
    help = "Write the hosts' providers to Placement now, and show what was different."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("--host", action="append", default=[], help="only this host; may be repeated")
        parser.add_argument("--dry-run", action="store_true", help="show what would be written, but write nothing")

    def handle(self, *args: Any, **options: Any) -> None:
        """Synchronize the hosts in batches, print what was different, and exit with 1 if a host is not in step.

        Raises CommandError if no cloud is configured, Placement is switched off, or a named host does not exist.
        """
        cloud = get_cloud_session(settings.KEYS.placement_endpoint)
        if cloud is None:
            raise CommandError("no cloud is configured, or CYBORG_PLACEMENT_ENDPOINT is off: see docs/configuration.md")
        hosts = list(Host.objects.filter(name__in=options["host"]) if options["host"] else Host.objects.all())
        if unknown := set(options["host"]) - {host.name for host in hosts}:
            raise CommandError(f"no such host: {', '.join(sorted(unknown))}")
        writes = out_of_step = 0
        for start in range(0, len(hosts), HOST_BATCH):
            part = hosts[start : start + HOST_BATCH]
            for host, ended in zip(part, providers.sync_hosts(cloud, part, options["dry_run"], math.inf), strict=True):
                write_count, is_in_step = self._print_and_store_result(host, ended, options["dry_run"])
                writes, out_of_step = writes + write_count, out_of_step + (not is_in_step)
            self._print_progress(start + len(part), len(hosts))
        verb = "to be written" if options["dry_run"] else "written"
        self.stdout.write(
            f"{len(hosts)} host{'' if len(hosts) == 1 else 's'}, {writes} {verb}"
            + (f", {out_of_step} not in step" if out_of_step else "")
        )
        if out_of_step:
            sys.exit(1)

    def _print_and_store_result(self, host: Host, ended: providers.SyncResult, dry_run: bool) -> tuple[int, bool]:
        """Print the result of one host and store it unless `dry_run`.

        Return the number of writes, and whether it is in step.
        """
        if lines := describe.describe_result(ended):
            self.stdout.write("\n  ".join([host.name, *lines]))
        if not isinstance(ended, SyncOutcome):
            return 0, False
        if not dry_run:
            repository.store_outcome(host, ended)
            discrepancies.invalidate_claims([host.pk])
        return len(ended.writes), not ended.problems

    def _print_progress(self, done: int, total: int) -> None:
        """Draw a progress bar on standard error, if that is a terminal and there is more than one batch."""
        if sys.stderr.isatty() and total > HOST_BATCH:
            filled = 40 * done // total
            end = "\n" if done == total else ""
            sys.stderr.write(f"\r[{'█' * filled}{' ' * (40 - filled)}] {done}/{total} hosts{end}")
            sys.stderr.flush()
