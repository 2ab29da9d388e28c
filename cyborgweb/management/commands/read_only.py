"""`manage.py read_only`: show whether the product is in read-only mode, or switch that mode on or off."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser

from accelerators.domain.errors import RefusedError
from accelerators.domain.states import EventSource
from accelerators.management import shell
from cyborgweb.auth import read_only
from cyborgweb.models import Maintenance

EPILOG = """\
In read-only mode, the console and both APIs show everything and refuse every change with the reason (503, Retry-After),
so Nova cannot bind accelerators. Agents still report, and jobs finish what was begun. Changes that an operator makes
with manage.py at a shell are still possible.

  manage.py read_only                           shows whether it is on, since when, by whom and why, and its generation
  manage.py read_only on --reason "the database moves tonight"
  manage.py read_only off --generation 1795859064000000
"""


class Command(shell.OperatorCommand):
    """Show or switch read-only mode."""

    epilog = EPILOG
    help = "Show whether the product is in read-only mode, or switch that mode on or off."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the wanted state and the reason."""
        parser.add_argument("state", nargs="?", choices=("on", "off"), help="switch read-only mode on or off")
        parser.add_argument(
            "--reason", default="", help="the reason, which is shown with each refusal and with the event"
        )
        parser.add_argument(
            "--generation",
            type=int,
            help="the generation that you saw: nothing is switched if somebody else has switched since; by default the"
            " one that is read now",
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Switch read-only mode if a state is given, and print whether it is on, since when, by whom and why.

        Raises CommandError for an unusable reason, and if the switch has another generation than the one on which the
        change is based.
        """
        current = Maintenance.objects.first()
        if options["state"]:
            seen = options["generation"]
            try:
                current = read_only.switch_read_only(
                    options["state"] == "on",
                    shell.current_operator(),
                    options["reason"],
                    EventSource.SYSTEM,
                    generation=read_only.compute_generation(current) if seen is None else seen,
                )
            except RefusedError as refused:
                raise CommandError(refused.text) from None
        self.stdout.write(
            read_only.describe_maintenance(current)
            if current
            else "The product is not in read-only mode: changes are possible."
        )
        self.stdout.write(f"Generation: {read_only.compute_generation(current)}")
