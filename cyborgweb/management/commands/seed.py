"""`manage.py seed`: fill a database with devices and events, to try the product at a large size."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from typing import Any

import click
from django.core.management.base import CommandError

from accelerators.inventory import seed
from accelerators.management import shell

EPILOG = """\
Use a database for trials only: the seeded devices appear in every list, and events cannot be deleted.

  manage.py seed                                          1 000 hosts, 100 000 devices, 1 000 000 events
  manage.py seed --hosts 20 --devices 2000 --events 20000

The hosts are named seed-00001.example and so on; they have no agents. A second call adds more hosts.

Two thirds of the devices have a serial number, and four fifths a resource provider; three fifths are ready. Nothing is
written to Placement. If a cloud is configured, the job `placement` looks for the compute providers of the seeded hosts
there again and again; give --without-providers to prevent this. Then the devices fit no device profile.
"""


class Command(shell.OperatorCommand):
    """Insert hosts, devices and events for trials."""

    epilog = EPILOG
    help = "Fill a database for trials with hosts, devices and events."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add the numbers of rows, --without-providers and --beside-real-hosts."""
        parser.add_argument("--hosts", type=int, default=1_000, help="number of hosts; 1000 by default")
        parser.add_argument("--devices", type=int, default=100_000, help="number of devices; 100 000 by default")
        parser.add_argument("--events", type=int, default=1_000_000, help="number of events; 1 000 000 by default")
        parser.add_argument(
            "--without-providers", action="store_true", help="record no ids of resource providers for the devices"
        )
        parser.add_argument(
            "--beside-real-hosts", action="store_true", help="seed a database that has hosts which were not seeded"
        )

    def handle(
        self,
        *args: Any,
        hosts: int,
        devices: int,
        events: int,
        beside_real_hosts: bool = False,
        without_providers: bool = False,
        **options: Any,
    ) -> None:
        """Insert the rows with a progress bar on standard error, and print what was inserted.

        Raises CommandError for numbers that do not fit each other, and for a database with real hosts.
        """
        with click.progressbar(length=devices + events, label="seed", file=sys.stderr) as bar:
            try:
                first_host = seed.insert_rows(
                    hosts,
                    devices,
                    events,
                    bar.update,
                    actor=shell.current_operator().name,
                    beside_real_hosts=beside_real_hosts,
                    with_providers=not without_providers,
                )
            except seed.RealHostsError as error:
                raise CommandError(f"{error} --beside-real-hosts seeds it nevertheless.") from None
            except seed.SeedError as error:
                raise CommandError(str(error)) from None
        self.stdout.write(f"{hosts} hosts from {first_host} on, {devices} devices and {events} events were inserted.")
