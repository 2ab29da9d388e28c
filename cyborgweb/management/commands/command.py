"""`manage.py command`: order operations from agents, and follow them."""

from cyborgweb.management.operator_verbs import VerbsCommand


class Command(VerbsCommand):
    """The verbs for commands to agents."""

    noun = "command"
    help = """Send a command to a host's agent and show its result.

    The agent executes a command at most once. The command continues in the background; --wait shows its progress until
    it has ended, and then its result. Destructive commands (reset, partition, program, uninstall) are refused while
    anybody holds the device. To install a device, use `manage.py device enable`; devices are attached and detached when
    requests are bound and unbound.

    \b
    manage.py command health 3f1c --wait
    manage.py command partition 3f1c --layout vfs=4 --reason "four instances" --wait
    manage.py command rescan cmp1.example --driver pci_driver
    manage.py command list --host cmp1.example --open
    """
