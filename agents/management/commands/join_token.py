"""`manage.py join_token HOST`: make the token with which the agent of a compute host joins."""

from __future__ import annotations

import argparse
import ipaddress
import os
import socket
from typing import Any
from urllib.parse import urlsplit

from django.core.management.base import BaseCommand, CommandError

from agents import authentication
from agents.host.settings import AgentSettings, determine_host_names
from drivers.configuration import ConfigurationError, load_configuration


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
        if not 0 < len(options["host"]) <= 255:
            raise CommandError("HOST must have 1 to 255 characters")
        requested_address = options["address"] or ""
        if requested_address and not requested_address.startswith(("http://", "https://")):
            raise CommandError("--address must begin with http:// or https://")
        try:
            address, fingerprint = authentication.CONDUCTOR_ADDRESS.only()(requested_address, options["unpinned"])
            if not requested_address and _is_loopback(address) and not _is_this_machine(options["host"]):
                raise ConfigurationError(
                    f"{options['host']} cannot reach the only address that is configured here, {address}: set"
                    " CYBORG_AGENT_LISTEN to an address that other machines reach"
                )
        except ConfigurationError as error:
            raise CommandError(
                f"{error}; or give the address at which agents reach the conductor with --address https://NAME:PORT"
            ) from None
        token = authentication.create_join_token(
            options["host"],
            address=address,
            hours=options["hours"],
            created_by="command line",
            fingerprint=fingerprint,
        )
        pinned = f", pins certificate sha256:{fingerprint}" if fingerprint else ""
        valid = f"valid for {options['hours']} hour{'' if options['hours'] == 1 else 's'}"
        self.stdout.write(f"Join token for {options['host']}, {valid}, at {address}{pinned}:")
        self.stdout.write(token)


def _is_loopback(address: str) -> bool:
    """Return whether only this machine can reach this URL."""
    name = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def _is_this_machine(host: str) -> bool:
    """Return whether `host` is the name of this machine, as its own agent or the operating system knows it.

    Raises ConfigurationError if the settings for an agent of this machine are not usable.
    """
    names = determine_host_names(load_configuration(AgentSettings, os.environ), None)
    return host in (*names, socket.getfqdn(), socket.gethostname(), "localhost")
