"""`manage.py rule`: list, create, change and delete admission rules."""

from cyborgweb.management.operator_verbs import VerbsCommand


class Command(VerbsCommand):
    """The verbs for admission rules."""

    noun = "rule"
    help = """List, create, change and delete admission rules.

    The first enabled rule that matches a device decides its state when it is found. Devices that were found before are
    moved by `manage.py device admit`.

    \b
    manage.py rule list
    manage.py rule create hall3 --host 'new-*.hall3.example' --action ready
    manage.py rule set hall3 --disabled
    manage.py rule delete hall3
    """
