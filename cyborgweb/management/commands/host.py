"""`manage.py host`: remove a decommissioned host."""

from cyborgweb.management.operator_verbs import VerbsCommand


class Command(VerbsCommand):
    """The verbs for hosts."""

    noun = "host"
    help = """Remove a decommissioned host.

    \b
    manage.py host remove cmp9.example --dry-run
    manage.py host remove cmp9.example --reason decommissioned
    """
