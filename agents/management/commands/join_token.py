"""`manage.py join_token HOST`: make the token with which the agent of a compute host joins."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from accelerators.domain.errors import RefusedError
from accelerators.domain.states import EventSource
from agents import join_tokens


class Command(BaseCommand):
    """`manage.py join_token HOST`: create and print a join token."""

    help = (
        "Make a join token; the last line is the token. Set it as CYBORG_JOIN_TOKEN on the host and start cyborg-agent."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the host, --address, --unpinned and --hours."""
        parser.add_argument("host", help="the host's name: its compute provider's name in Placement, usually its FQDN")
        parser.add_argument(
            "--address",
            help="where the agent reaches the conductor (default: the agents' TLS listener, else CYBORG_LISTEN; needed"
            " for another machine if that is a loopback address)",
        )
        parser.add_argument(
            "--unpinned",
            action="store_true",
            help="do not pin a certificate; use this only if the address is https and the host already trusts its "
            "certificate",
        )
        parser.add_argument("--hours", type=int, default=24, help="how long the token is valid (default: 24)")

    def handle(self, *args: Any, **options: Any) -> None:
        """Create a join token and print it as the last line. Raise CommandError for a wrong host name or address."""
        host, hours = options["host"], options["hours"]
        address, unpinned = options["address"] or "", options["unpinned"]
        try:
            issued = join_tokens.issue_join_token(host, address, unpinned, hours, "command line", EventSource.PERSON)
        except RefusedError as refused:
            raise CommandError(refused.text) from None
        pinned = f", pins certificate sha256:{issued.fingerprint}" if issued.fingerprint else ""
        valid = f"valid for {hours} hour{'' if hours == 1 else 's'}"
        self.stdout.write(f"Join token for {host}, {valid}, at {issued.address}{pinned}:")
        self.stdout.write(issued.join_string)
