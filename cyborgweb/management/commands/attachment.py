"""`manage.py attachment`: attach accelerators to running instances, and detach them."""

from cyborgweb.management.operator_verbs import VerbsCommand


class Command(VerbsCommand):
    """The verbs for attachments."""

    noun = "attachment"
    help = """Attach accelerators to running instances, detach them, and show the progress.

    Attach claims free accelerators on the instance's host in Placement, adds them to the instance's allocation, and
    binds them, as Nova does at boot. Stock Nova plugs nothing into a running guest: show prints what is left to do by
    hand, with the XML for libvirt. Detach releases everything; remove the accelerators from the guest first. An
    attachment that fails is undone completely.

    \b
    manage.py attachment attach INSTANCE --profile fpga-one --reason "ticket 4711" --wait
    manage.py attachment list --instance INSTANCE
    manage.py attachment detach ATTACHMENT --wait
    manage.py attachment detach --filter host=cmp1.example --dry-run
    """
