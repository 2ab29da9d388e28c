"""`manage.py configuration_page`: print docs/configuration.md, generated from the classes that read the keys."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from agents.host.settings import AgentSettings
from cyborgweb.settings.keys import Keys
from drivers.configuration import keys_of

HEAD = """\
# Configuration

*Generated from the code by `make docs`.* Every key is an environment variable, or a key of the TOML file that
`CYBORG_CONFIG` names. The environment takes precedence. The start fails with one sentence if a value cannot be used.
"""


def page() -> str:
    """Return the whole page as Markdown: one table of keys for the conductor, one for the agent."""
    return "\n".join([HEAD, "## The conductor\n", _table(Keys), "\n## The agent\n", _table(AgentSettings), ""])


def _table(cls: type) -> str:
    lines = ["| key | default | effect |", "|---|---|---|"]
    lines += [f"| `{key.name}` | {key.shown} | {key.effect} |" for key in keys_of(cls)]
    return "\n".join(lines)


class Command(BaseCommand):
    help = "Print docs/configuration.md, generated from the configuration's code."
    requires_system_checks: list[str] = []

    def handle(self, *args: Any, **options: Any) -> None:
        self.stdout.write(page(), ending="")
