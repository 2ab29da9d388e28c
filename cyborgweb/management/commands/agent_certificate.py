"""`manage.py agent_certificate`: show the certificate of the agents' listener, and which agents know its successor."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from accelerators.management import shell
from accelerators.runtime import database_clock
from agents.certificates import AnnouncementError, PinnedCertificates
from agents.gateway.announcements import read_announcements
from agents.models import Agent
from cyborgweb.server import tls
from cyborgweb.settings.keys import get_keys
from drivers.configuration import ConfigurationError

MAX_HOSTS = 50
"""How many hosts without the newest announcement the text output names."""


class Command(BaseCommand):
    """Show the certificate that agents pin, its announced successors, and the agents that do not know the newest."""

    help = (
        "Show the certificate of the agents' TLS listener, the announcements of its successors, and the hosts whose "
        "agents do not know the newest one: those would not come back after a change of the certificate. "
        "docs/agent-certificate.md describes how a certificate is replaced."
    )

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declare --json and --new."""
        parser.add_argument("--json", action="store_true", help="print JSON, with all hosts, for programs")
        parser.add_argument(
            "--new",
            type=Path,
            metavar="FILE",
            help="make a key and a self-signed certificate in a new FILE, and print its fingerprint",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Make a certificate with `--new`, else print what is known. Raise CommandError if a file cannot be used."""
        keys = get_keys()
        try:
            if options["new"]:
                self.stdout.write(f"sha256:{tls.write_new_certificate(options['new'])}")
                return
            if not keys.agent_listen:
                raise CommandError("there is no TLS listener for agents: set CYBORG_AGENT_LISTEN")
            present = tls.read_fingerprint(keys)
            announcements = read_announcements(keys.agent_announcement_key, keys.announcements_path)
        except (ConfigurationError, AnnouncementError) as error:
            raise CommandError(str(error)) from None
        newest = announcements[-1].fingerprint if announcements else ""
        pinning = Agent.objects.filter(barred="").exclude(fingerprint="")
        lacking = pinning.exclude(newest_certificate=newest) if newest else pinning.filter(newest_certificate="")
        hosts = list(lacking.order_by("host__name").values_list("host__name", flat=True))
        problem = _find_problem(PinnedCertificates(present, keys.agent_announcement_key, announcements), newest)
        if options["json"]:
            document = {
                "fingerprint": present,
                "announcement_key": keys.agent_announcement_key,
                "announcements": [
                    {
                        "number": one.number,
                        "replaces": one.replaces,
                        "fingerprint": one.fingerprint,
                        "both_until": datetime.fromtimestamp(one.both_until, UTC).isoformat(),
                    }
                    for one in announcements
                ],
                "problem": problem,
                "agents": pinning.count(),
                "without_newest": hosts,
            }
            self.stdout.write(json.dumps(document, indent=2))
            return
        self.stdout.write(f"Certificate of the agents' listener: sha256:{present}")
        if not keys.agent_announcement_key:
            self.stdout.write("No announcement key is set (CYBORG_AGENT_ANNOUNCEMENT_KEY): it cannot be replaced.")
            return
        rows = [
            (str(one.number), one.replaces[:16], one.fingerprint[:16], f"{_format_time(one.both_until)} UTC")
            for one in announcements
        ]
        for line in shell.format_table([("number", "replaces", "by", "both until"), *rows]) if rows else ():
            self.stdout.write(line)
        if problem:
            self.stdout.write(f"Attention: {problem}")
        total = pinning.count()
        known = f"accept the certificate of announcement {announcements[-1].number}" if newest else "know the key"
        self.stdout.write(f"{total - len(hosts)} of {total} agents that pin a certificate {known}.")
        for host in hosts[:MAX_HOSTS]:
            self.stdout.write(f"  not {host}")
        if len(hosts) > MAX_HOSTS:
            self.stdout.write(f"  and {len(hosts) - MAX_HOSTS} more: see --json")


def _find_problem(present: PinnedCertificates, newest: str) -> str:
    """Return why agents that have the present certificate would not follow the announcements; '' if they would.

    `newest` is the certificate of the last announcement, '' if there is none.
    """
    if newest and present.newest != newest:
        return (
            "the announcements do not lead from the present certificate to that of the last one: agents will not follow"
            " them. Add the missing lines, or sign an announcement that replaces the present certificate"
        )
    if present.first not in present.list_accepted(database_clock.timestamp()):
        return "the time of the present certificate is over: agents refuse it. Install the announced one now"
    return ""


def _format_time(moment: int) -> str:
    """Return a time in seconds since 1970 as text, to the minute, in UTC."""
    return f"{datetime.fromtimestamp(moment, UTC):%Y-%m-%d %H:%M}"
