"""`manage.py device`: list devices and change their state."""

from cyborgweb.management.operator_verbs import VerbsCommand


class Command(VerbsCommand):
    """The verbs for devices."""

    noun = "device"
    help = """List devices, show one, or change their state.

    A device is inactive when it is found. Enable makes it ready (offered), or installing until its driver has prepared
    it. Disable puts it in maintenance; bound requests stay bound. Drain takes it out of offer; when its last request
    ends, the drain ends, and the device is in maintenance or retired. Quarantine is for devices that cannot be trusted;
    release ends it. Retire takes a device out of use for good and is refused while somebody holds it; reinstate makes a
    retired device inactive.

    \b
    manage.py device list --host cmp1.example --state inactive
    manage.py device enable 3f1c 77ab --reason "burnt in" --wait
    manage.py device list --host cmp1.example --quiet | manage.py device drain - --then retired
    """
