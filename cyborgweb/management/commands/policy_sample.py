"""`manage.py policy_sample`: print a sample `policy.yaml` with every policy rule and its default, commented out."""

from __future__ import annotations

import textwrap
from typing import Any

from django.core.management.base import BaseCommand

from cyborgweb.auth.policy_rules import BUILDING_BLOCKS, OWN_RULES, UPSTREAM_RULES, PolicyRule

SAMPLE_HEAD = """\
Policy rules of the accelerator service, each with its default. To change a rule, copy it into the file that
CYBORG_POLICY_FILE names (by default policy.yaml in the state directory) and remove the "#". Changes of the file apply
within a second. A file that cannot be parsed changes nothing, and the log says what is wrong with it.

Tokens that have no project, such as those of a domain or of the system, are refused before any rule is checked. The
owner of a request, and the service token for binding, are checked in addition to the rule, whatever the rule says.

"Legacy" is a second rule beside a default. Callers that satisfy it are allowed as well, until
CYBORG_ENFORCE_NEW_DEFAULTS is on.

"Console session" names a rule that somebody who uses an API with a session of the console, instead of a token, must
satisfy as well: the console's roles see and do the same through the APIs as on its pages."""
RULES_BY_TITLE = {
    "Building blocks, for use in other rules": BUILDING_BLOCKS,
    "The Accelerator API, /v2": UPSTREAM_RULES,
    "Our own API, /api": OWN_RULES,
}


def render_policy_sample() -> str:
    """Return a sample policy file: an introduction and all rules with their defaults, every line commented out."""
    parts = [[f"# {title}", *map(_render_rule, rules)] for title, rules in RULES_BY_TITLE.items()]
    return "\n\n".join([_comment_out(SAMPLE_HEAD), *(entry for part in parts for entry in part)]) + "\n"


def _render_rule(rule: PolicyRule) -> str:
    """Return the commented lines of one rule: description, operations, legacy rule if any, name and default."""
    lines = [_comment_out(line) for line in (rule.description, *rule.operations)]
    if rule.legacy:
        lines.append(f"# Legacy: {rule.legacy}")
    if rule.session_rule:
        lines.append(f"# Console session: {rule.session_rule} is needed as well.")
    return "\n".join([*lines, f'#"{rule.name}": "{rule.check}"'])


def _comment_out(text: str) -> str:
    """Return the text with `# ` before each line, or `#` before an empty one."""
    return textwrap.indent(text, "# ", lambda _: True).replace("# \n", "#\n")


class Command(BaseCommand):
    """Print a sample policy.yaml, which changes no rule."""

    help = "Print a policy.yaml with every rule and its default, all of them commented out."
    requires_system_checks: list[str] = []

    def handle(self, *args: Any, **options: Any) -> None:
        """Print the sample file on standard output."""
        self.stdout.write(render_policy_sample(), ending="")
