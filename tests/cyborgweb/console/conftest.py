"""An operator of the console, and inventories of a given size."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.contrib.auth.models import Group, User
from django.test import Client

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.devices import admission_rules
from accelerators.domain.caller import Caller
from accelerators.domain.states import DrainTarget, EventSource
from accelerators.models import AcceleratorRequest, AttachHandle, Attachment, Device, DeviceProfile, Event, Host
from accelerators.models.drivers import RolloutOp
from accelerators.workflows import bulk_actions, driver_config, driver_rollouts
from agents.models import JoinToken
from cyborgweb.models import ApiToken, Delivery, Subscription
from placement_sync.models import Discrepancy, NovaEndpoint, Tree
from tests.support.reports import create_heard_host

Fill = Callable[..., list[Host]]


@pytest.fixture
def operator(client: Client) -> Client:
    """Return the client of a superuser. It has no password, because hashing one would take most of a test's time."""
    client.force_login(User.objects.create(username="olga", is_staff=True, is_superuser=True))
    return client


@pytest.fixture
def fill() -> Fill:
    """Return `fill(devices, first=0)`, which creates hosts with ten devices each, numbered from `first`.

    Every agent has a current lease, every third handle is held, devices at bus 1 are ready, and one of the two drivers
    of each host fails.
    """
    return _create_hosts_with_devices


def _create_hosts_with_devices(devices: int, first: int = 0) -> list[Host]:
    hosts = [create_heard_host(f"cmp{first + n}.example", min(10, devices - 10 * n)) for n in range(-(-devices // 10))]
    with conductor.writing():
        profile = DeviceProfile.objects.create(name=f"small-{first}", groups=[{"resources:FPGA": "1"}])
        Device.objects.filter(address__startswith="0000:01").update(state="ready")
        AcceleratorRequest.objects.bulk_create(
            AcceleratorRequest(
                project_id="p1",
                state="Bound",
                profile=profile,
                group={},
                deployable_id=handle.deployable_id,
                attach_handle=handle,
            )
            for handle in AttachHandle.objects.filter(request__isnull=True).order_by("id")[::3]
        )
    JoinToken.objects.create(
        host_name="cmp99", secret_hash=f"{first:x}".rjust(64, "f"), expires_at=datetime.now(UTC) + timedelta(hours=1)
    )
    ApiToken.create_with_secret(f"nova-{first}", User.objects.get(), ["service"], "p1")
    return hosts


def fill_other_lists(hosts: list[Host]) -> None:
    """Create a row of each list that `fill` leaves empty, except that of maintenance.

    Two hosts are needed, because a rollout to one host orders its command at once.
    """
    caller = Caller("olga", "u1", frozenset({"admin"}), "p1")
    device = Device.objects.order_by("id")[0]
    bulk_actions.create_draft("maintenance", DrainTarget.MAINTENANCE, Device.objects.all(), caller, "all of them")
    change = driver_config.DriverChange(RolloutOp.INSTALL, "pci_driver")
    driver_rollouts.start_rollout(change, hosts, caller, reason="ticket 4711", source=EventSource.API)
    admission_rules.create_rule({"name": "all of rack 2", "driver": "pci_driver", "action": "ready"}, caller)
    with conductor.writing():
        command_queue.place_commands([command_queue.CommandOrder("health", device.uuid, actor="olga")])
        conductor.raise_intents("provider", {str(hosts[0].uuid): {}})
        attached = Attachment.objects.create(instance=uuid4(), project_id="p1", host=hosts[0].name, actor="olga")
        about: dict[str, Any] = {"subject": (attached.uuid, str(attached)), "changes": {"state": [None, "asked"]}}
        conductor.record_event("attachment.asked", EventSource.API, "olga", **about)
    Tree.objects.create(host=hosts[0], root=uuid4(), problems=["its provider has two parents"])
    contradiction = {"provider": uuid4(), "provider_name": "cmp1_0000:01:00.0", "instance": uuid4()}
    seen = {"since": datetime.now(UTC), "seen_at": datetime.now(UTC)}
    Discrepancy.objects.create(kind="unclaimed", host=hosts[0], device=device, said="why", **contradiction, **seen)
    NovaEndpoint.objects.create(url="http://nova")
    Group.objects.create(name="operators")
    wanted = {"name": "mine", "kinds": ["device.found"], "scope": "cloud", "way": "inbox"}
    subscription = Subscription.objects.create(**wanted, project_id="p1", person="u1", user=User.objects.get())
    Delivery.objects.create(subscription=subscription, event=Event.objects.order_by("id")[0].pk, kind="device.found")
