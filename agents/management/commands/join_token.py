"""`manage.py join_token HOST`: what an operator pastes on a compute host."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from agents import enrolment


class Command(BaseCommand):
    help = "Make a join token: on the host, set it as CYBORG_JOIN_TOKEN and start cyborg-agent. Last line: the token."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("host", help="the host's name: its compute provider's name in Placement, usually its FQDN")
        parser.add_argument("--address", default="http://127.0.0.1:8000", help="where the agent reaches the conductor")
        parser.add_argument("--hours", type=int, default=24, help="how long the token is valid (default: 24)")

    def handle(self, *args: Any, **options: Any) -> None:
        if not 0 < len(options["host"]) <= 255:
            raise CommandError("HOST is 1 to 255 characters")
        if not options["address"].startswith(("http://", "https://")):
            raise CommandError("--address begins with http:// or https://")
        token = enrolment.make_token(
            options["host"], address=options["address"], hours=options["hours"], created_by="command line"
        )
        self.stdout.write(f"Join token for {options['host']}, valid for {options['hours']} hours:")
        self.stdout.write(token)
