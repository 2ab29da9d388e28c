"""`manage.py nova`: show which addresses of Nova are trusted, confirm one, and withdraw that."""

from cyborgweb.management.operator_verbs import VerbsCommand


class Command(VerbsCommand):
    """The verbs for addresses of Nova."""

    noun = "nova"
    help = """Show which addresses of Nova are trusted, confirm one, and withdraw that.

    Nova's answer 404 for an instance is believed only if the address has shown an instance that held a request here:
    the Nova of another region answers 404 for every instance. Confirm an address only if it is the Nova of this cloud,
    and the instances are really deleted; their requests are then deleted, and their devices are given to others.

    \b
    manage.py nova list
    manage.py nova confirm UUID --reason "all instances were deleted before the upgrade"
    manage.py nova withdraw UUID --reason "it is the Nova of another region"
    """
