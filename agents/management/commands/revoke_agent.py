"""`manage.py revoke_agent HOST`: revoke the trust in a host's agent."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from accelerators.domain.errors import RefusedError
from agents import key_revocation


class Command(BaseCommand):
    """`manage.py revoke_agent HOST`: revoke a host's agent."""

    help = (
        "Revoke a host's agent: its connections are closed within seconds, and its key and its open join tokens become "
        "invalid. Reports that were acknowledged before are kept. To let the host join again, make a new join token."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare the host and --reason."""
        parser.add_argument("host", help="the host's name, as `manage.py agents` lists it")
        parser.add_argument("--reason", default="", help="why: shown to the agent, in the console, and in the event")

    def handle(self, *args: Any, **options: Any) -> None:
        """Revoke the host's agent and print the result. Raise CommandError if there is none, or if the reason is too
        long."""
        host, reason = options["host"], options["reason"]
        if len(reason) > key_revocation.MAX_REASON_CHARS:
            raise CommandError(f"--reason may have at most {key_revocation.MAX_REASON_CHARS} characters")
        try:
            is_newly_revoked = key_revocation.revoke_agent(key_revocation.find_agent(host), "command line", reason)
        except RefusedError as refused:
            raise CommandError(refused.text) from None
        self.stdout.write(f"The agent of {host} {'is revoked' if is_newly_revoked else 'was revoked already'}.")
