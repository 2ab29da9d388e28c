"""Add to the sample what operators have begun in it: an attachment, previews of a bulk action and of a rollout, and a
subscription. Run it in a separate process, after `tests.browser.sample`."""

from __future__ import annotations

import os

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
django.setup()

from django.contrib.auth.models import User  # noqa: E402  (needs Django's registry, like all imports below)

from accelerators import conductor  # noqa: E402
from accelerators.domain.caller import Caller  # noqa: E402
from accelerators.domain.device_actions import Action  # noqa: E402
from accelerators.domain.states import DrainTarget, EventSource, RolloutOp  # noqa: E402
from accelerators.models import Attachment, Device, Host  # noqa: E402
from accelerators.workflows import bulk_actions, driver_rollouts  # noqa: E402
from accelerators.workflows.driver_config import DriverChange  # noqa: E402
from cyborgweb.auth import roles  # noqa: E402
from cyborgweb.models.notify import Subscription  # noqa: E402

INSTANCE = "604c1d0e-3f10-4d5c-9c6b-6e0f9a3c1b2d"


def create_work() -> None:
    """Create the rows, as the administrator; this works once for each product."""
    admin = User.objects.get(username="admin")
    caller = Caller(admin.username, str(admin.pk), frozenset(), "")
    with conductor.writing():
        host = "cmp02.rack3.example.net"
        Attachment.objects.create(instance=INSTANCE, project_id="p1", host=host, actor="admin", state="attached")
    bulk_actions.create_draft(Action.QUARANTINE, DrainTarget.MAINTENANCE, Device.objects.filter(type="GPU"), caller)
    change = DriverChange(RolloutOp.UPDATE, "pci_driver", False, None)
    hosts = list(Host.objects.filter(name__startswith="cmp"))
    driver_rollouts.start_rollout(change, hosts, caller, source=EventSource.PERSON, is_draft=True)
    Subscription.objects.create(
        name="mine",
        project_id=roles.LOCAL_PROJECT,
        person=str(admin.pk),
        user=admin,
        kinds=["device.failed"],
        way="inbox",
    )


if __name__ == "__main__":
    create_work()
