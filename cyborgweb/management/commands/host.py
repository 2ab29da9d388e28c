"""`manage.py host`: remove a decommissioned host, or cancel its removal."""

from cyborgweb.management.operator_verbs import VerbsCommand


class Command(VerbsCommand):
    """The verbs for hosts."""

    noun = "host"
    help = """Remove a decommissioned host, or cancel its removal.

    \b
    manage.py host remove cmp9.example --dry-run
    manage.py host remove cmp9.example --reason decommissioned
    manage.py host cancel-removal cmp9.example
    """
