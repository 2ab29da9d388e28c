"""`manage.py configuration_page`: print docs/configuration.md, generated from the classes that read the keys."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from agents.host.settings import AgentSettings
from cyborgweb.settings.keys import Keys
from drivers.configuration import list_keys

PAGE_HEAD = """\
# Configuration

*Generated from the code by `make docs`.* Every key is an environment variable, or a key of the TOML file that
`CYBORG_CONFIG` names. The environment takes precedence. The start fails with one sentence if a value cannot be used.
"""


def render_configuration_page() -> str:
    """Return the page `docs/configuration.md`: one table of keys for the conductor, and one for the agent."""
    return "\n".join(
        [
            PAGE_HEAD,
            "## The conductor\n",
            _render_key_table(Keys),
            "\n## The agent\n",
            _render_key_table(AgentSettings),
            "",
        ]
    )


def _render_key_table(cls: type) -> str:
    """Return a Markdown table of the keys of a configuration class: name, default and effect."""
    lines = ["| key | default | effect |", "|---|---|---|"]
    lines += [f"| `{key.name}` | {key.default_text} | {key.effect} |" for key in list_keys(cls)]
    return "\n".join(lines)


class Command(BaseCommand):
    """Print docs/configuration.md."""

    help = "Print docs/configuration.md, generated from the configuration's code."
    requires_system_checks: list[str] = []

    def handle(self, *args: Any, **options: Any) -> None:
        """Print the page on standard output."""
        self.stdout.write(render_configuration_page(), ending="")
