"""`manage.py placement_writer`: show or change who writes to Placement."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from accelerators.domain.errors import RefusedError
from accelerators.management import shell
from accelerators.models import Host
from placement_sync.jobs import writer_election
from placement_sync.models import Writer, WriterChoice

TEACHING = """\
Either the conductor writes to Placement, or the agents write for their own hosts. An agent can write if it is up and
has keystoneauth1 and credentials of its own. The conductor writes for all other hosts; they are listed here with the
reason. The writer can be changed at any time: nothing is written twice, and nothing is left out.

  manage.py placement_writer                    show who writes, since when and why, and the hosts that cannot
  manage.py placement_writer agents             let agents write
  manage.py placement_writer conductor --reason "credentials are being changed"
"""


class Command(shell.OperatorCommand):
    epilog = TEACHING
    help = "Show or change who writes to Placement."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "who", nargs="?", choices=[writer.value for writer in WriterChoice], help="the writer from now on"
        )
        parser.add_argument("--reason", default="", help="why it is changed; shown here and in the event")

    def handle(self, *args: Any, **options: Any) -> None:
        """Change the writer if one is named, and print the current one. Raises CommandError for a refused change."""
        try:
            writer = (
                writer_election.switch_writer(options["who"], "manage.py", options["reason"])
                if options["who"]
                else writer_election.get_writer()
            )
        except RefusedError as refused:
            raise CommandError(refused.text) from None
        self._print_writer(writer)

    def _print_writer(self, writer: Writer) -> None:
        """Print the writer, its epoch, since when and why, and the hosts whose agent cannot write, with the reason."""
        details = (
            f", since {writer.since:%Y-%m-%d %H:%M:%S} UTC, by {writer.by}: {writer.reason}" if writer.epoch else ""
        )
        self.stdout.write(f"{writer.who}, epoch {writer.epoch}{details}".removesuffix(": "))
        unable = writer_election.list_hosts_without_writer(Host.objects.all())
        if not unable:
            self.stdout.write("the agent of every host can write")
            return
        self.stdout.write(f"hosts whose agent cannot write, so the conductor writes: {len(unable)}")
        width = max(len(name) for name, _ in unable)
        for name, why in unable:
            self.stdout.write(f"  {name.ljust(width)}  {why}")
