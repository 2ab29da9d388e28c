"""Add to the sample what operators have begun in it: an attachment, a command, previews of a bulk action and of a
rollout, and a subscription with a delivery; and a host with backends, and the state of a host in Placement. Run it in a
separate process, after `tests.browser.sample`."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from uuid import NAMESPACE_OID, uuid5

import django

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
django.setup()

from django.contrib.auth.models import User  # noqa: E402  (needs Django's registry, like all imports below)

from accelerators import conductor  # noqa: E402
from accelerators.commands import command_queue  # noqa: E402
from accelerators.domain.caller import Caller  # noqa: E402
from accelerators.domain.device_actions import Action  # noqa: E402
from accelerators.domain.states import DrainTarget, EventSource, RolloutOp  # noqa: E402
from accelerators.models import Attachment, Device, Event, Host  # noqa: E402
from accelerators.workflows import bulk_actions, driver_rollouts  # noqa: E402
from accelerators.workflows.driver_config import DriverChange  # noqa: E402
from cyborgweb.auth import roles  # noqa: E402
from cyborgweb.models.notify import Delivery, Subscription  # noqa: E402
from drivers.inventory import Backend, Service  # noqa: E402
from placement_sync.models import Discrepancy, NovaEndpoint, Tree  # noqa: E402
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report  # noqa: E402

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
    driver_rollouts.store_draft(change, hosts, caller, source=EventSource.PERSON)
    subscription = Subscription.objects.create(
        name="mine",
        project_id=roles.LOCAL_PROJECT,
        person=str(admin.pk),
        user=admin,
        kinds=["device.failed"],
        way="inbox",
    )
    event = Event.objects.filter(subject_type="device").order_by("id")[0]
    Delivery.objects.create(subscription=subscription, event=event.pk, kind="device.failed")
    device = Device.objects.filter(host=hosts[0], state="ready").order_by("id")[0]
    with conductor.writing():
        command_queue.place_commands([command_queue.CommandOrder("health", device.uuid, actor="admin")])
    create_backends()
    create_placement_rows(hosts[0], device)


def create_backends() -> None:
    """Create a host of which the generic driver has two backends, one of them failing, with services."""
    services = (
        Service("sriov", limits={"total_vfs": "8"}),
        Service("passthrough", state="unavailable", reason="no IOMMU: switch it on in the firmware and for the kernel"),
    )
    backends = (
        Backend("nics", "pci", {"rack": "rack1"}, services=services),
        Backend("gpus", "mdev", error="the kernel has no mediated devices for this card"),
    )
    report = make_driver_report(make_card(1, backend="nics"), driver="generic_driver", backends=backends)
    apply_report(get_or_create_host("nic01.rack1.example.net"), report)


def create_placement_rows(host: Host, device: Device) -> None:
    """Create the state of the host in Placement with a problem, a discrepancy of the device, and an address of Nova."""
    provider = uuid5(NAMESPACE_OID, device.key)
    Tree.objects.create(host=host, root=uuid5(NAMESPACE_OID, host.name), problems=["its provider has two parents"])
    Discrepancy.objects.create(
        kind="unclaimed",
        host=host,
        device=device,
        provider=provider,
        provider_name=f"{host.node}_{device.address}",
        instance=INSTANCE,
        since=datetime.now(UTC),
        seen_at=datetime.now(UTC),
        said="The instance holds the device, and Placement has no allocation for it. Rebuild the allocation.",
    )
    NovaEndpoint.objects.create(url="https://nova.example.net/v2.1", unknown_instances=3)


if __name__ == "__main__":
    create_work()
