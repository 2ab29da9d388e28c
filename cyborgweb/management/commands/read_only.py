"""`manage.py read_only`: show whether the product is in read-only mode, or switch that mode on or off."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from accelerators.domain.errors import RefusedError
from accelerators.domain.states import Source
from accelerators.management import shell
from cyborgweb.auth import read_only

TEACHING = """\
While it is on, the console and both APIs show everything and change nothing: whoever tries is told so, with the reason
(503, Retry-After). So Nova binds no accelerators meanwhile. Agents go on reporting, and jobs finish what was begun.
What is done by manage.py at a shell is not held back.

  manage.py read_only                           whether, since when, by whom, why
  manage.py read_only on --reason "the database moves tonight"
  manage.py read_only off
"""


class Command(shell.Taught):
    teaching = TEACHING
    help = "Say, or change, whether everything is read only."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument("state", nargs="?", choices=("on", "off"), help="how it is to be from now on")
        parser.add_argument("--reason", default="", help="why; shown to whoever is refused, and with its event")

    def handle(self, *args: Any, **options: Any) -> None:
        now = read_only.current()
        if options["state"]:
            try:
                now = read_only.switch(options["state"] == "on", shell.person(), options["reason"], Source.SYSTEM)
            except RefusedError as refused:
                raise CommandError(refused.text) from None
        self.stdout.write(read_only.sentence(now) if now else "Everything can be changed by whoever may.")
