"""`manage.py driver`: list drivers on hosts, and install, update and uninstall them."""

from cyborgweb.management.operator_verbs import VerbsCommand


class Command(VerbsCommand):
    """The verbs for drivers."""

    noun = "driver"
    help = """Show which drivers run on which hosts; install, update and uninstall them, a few hosts at a time.

    The desired state of a driver on a host takes precedence over the host's own CYBORG_ENABLED_DRIVERS and
    CYBORG_DRIVER_SETTINGS. Which actions are allowed on a host is set only in that host's own settings file (`acts`).
    New settings are tested in a second process of the driver first, so a mistake in them changes nothing. A driver is
    not changed while anybody holds one of its devices. The devices of a disabled driver are missing until it runs
    again.

    \b
    manage.py driver list --drifts
    manage.py driver install pci_driver --host cmp1.example --settings-file pci.toml --wait
    manage.py driver update pci_driver --match 'cmp*' --settings-file pci.toml --max-parallel 10 --wait
    manage.py driver rollout
    """
