"""`manage.py accelerator`: list the units that instances can get, change their number, and label them."""

from cyborgweb.management.operator_verbs import VerbsCommand


class Command(VerbsCommand):
    """The verbs for accelerators."""

    noun = "accelerator"
    help = """List accelerators, change their number, or label those that are held.

    A unit is what one instance gets: a virtual function, a mediated device, a part of a card, or a whole card. To
    change the number of units, the device is partitioned again; this is refused while anybody holds one of its units.
    HOST/BACKEND stands for all devices of that backend whose number of units can be chosen.

    \b
    manage.py accelerator list --host cmp1.example --free
    manage.py accelerator create cmp1.example/nics cmp2.example/nics --count 4 --wait
    manage.py accelerator delete 3f1c --count 1
    manage.py accelerator label --filter host=cmp1.example --label training
    """
