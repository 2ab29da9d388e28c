"""Fill a product with a small cloud: seven hosts with two NUMA nodes and cards of every kind (one host has PCI switches
between its GPUs), some faults and some requests; and a user of each role.

Run it in a separate process (`python -m tests.browser.sample`) with the state directory of a running product.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from uuid import NAMESPACE_OID, uuid5

import django
from msgspec.structs import replace

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "cyborgweb.settings.base")
django.setup()

from django.contrib.auth.models import User  # noqa: E402  (needs Django's registry, like all imports below)

from accelerators import conductor  # noqa: E402
from accelerators.models import AcceleratorRequest, AdmissionRule, AttachHandle, Device, DeviceProfile, Host  # noqa: E402
from agents.models import Agent, JoinToken, Lease  # noqa: E402
from cyborgweb.auth import roles  # noqa: E402
from cyborgweb.models import ApiToken  # noqa: E402
from drivers.inventory import (  # noqa: E402
    Attribute,
    DriverReport,
    Fault,
)
from drivers.inventory import Device as Found  # noqa: E402
from tests.browser.people import PASSWORD, PEOPLE, TENANT_PROJECT  # noqa: E402
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report  # noqa: E402

KINDS = (
    (0x17, "GPU", "10de", "NVIDIA A100-PCIE-40GB", 1),
    (0x31, "GPU", "10de", "NVIDIA A100-PCIE-40GB", 1),
    (0x3B, "NIC", "15b3", "BlueField-3", 16),
    (0x5E, "SSD", "144d", "PM1743", 1),
    (0x98, "FPGA", "10ee", "Alveo U250", 2),
    (0xB1, "FPGA", "8086", "Stratix 10", 1),
    (0xCA, "QAT", "8086", "QAT 4xxx", 8),
    (0xE3, "AICHIP", "1ed5", "Ascend 910B", 1),
)
"""Bus, type, vendor, model, number of handles; the first four are at NUMA node 0, the others at node 1."""
CLASSES = {"GPU": "PGPU", "FPGA": "FPGA"}
STATES = ("ready", "ready", "ready", "inactive", "ready", "maintenance", "ready", "failed", "quarantined")
REASONS = {
    "ready": ("admitted by the rule “all of rack 2”", "rule"),
    "inactive": ("found by its driver", "agent"),
    "maintenance": ("firmware update", "olga"),
    "failed": ("install: the bitstream does not match the shell", "agent"),
    "quarantined": ("two ECC errors in a day", "olga"),
}
FAULTS = {
    3: ("degraded", "link at x8 of x16"),
    13: ("failed", "thermal shutdown, slot 4"),
    27: ("unknown", "no sensor"),
}


def make_devices(host: int) -> list[Found]:
    """Return the devices of host number `host`."""
    found = []
    for place, (bus, kind, vendor, model, handles) in enumerate(KINDS):
        status, reason = FAULTS.get(host * len(KINDS) + place, ("ok", ""))
        more = {"numa_node": place // 4, "kernel_driver": "vfio-pci", "status": status, "status_reason": reason}
        [part] = (plain := make_card(bus, handles)).deployables
        part = replace(part, attributes=(Attribute("rc", CLASSES.get(kind, f"CUSTOM_{kind}")),))
        found.append(replace(plain, type=kind, vendor=vendor, model=model, deployables=(part,), **more))
    return found


def make_switched_devices() -> list[Found]:
    """Return devices behind PCI switches: per NUMA node two switches of two GPUs; one of the two has a NIC too."""
    found = []
    for switch, bus in enumerate((0x17, 0x37, 0x97, 0xB7)):
        above = f"0000:{bus - 1:02x}:01.0 0000:{bus:02x}:00.0 0000:{bus + 1:02x}"
        kinds = [("GPU", "10de", "NVIDIA H100 80GB HBM3", 1)] * 2 + [("NIC", "15b3", "ConnectX-7", 8)] * (
            switch % 2 == 0
        )
        for port, (kind, vendor, model, handles) in enumerate(kinds):
            [part] = (plain := make_card(bus + 2 + port, handles)).deployables
            part = replace(part, attributes=(Attribute("rc", CLASSES.get(kind, f"CUSTOM_{kind}")),))
            more = {"numa_node": switch // 2, "kernel_driver": "vfio-pci", "bridges": f"{above}:{port:02x}.0"}
            found.append(replace(plain, type=kind, vendor=vendor, model=model, deployables=(part,), **more))
    return found


def create_sample() -> None:
    """Create the whole sample; this works once for each product."""
    now = datetime.now(UTC)
    for number in range(6):
        host = get_or_create_host(f"cmp{number:02}.rack{number % 3 + 1}.example.net")
        gpus, rest = make_devices(number)[:2], make_devices(number)[2:]
        faults = (Fault("0000:3f:00.0", "class 0x120000 tells no type; state one in the rule"),) if number == 2 else ()
        pci = DriverReport("pci_driver", "", tuple(rest), faults)
        apply_report(host, pci, make_driver_report(*gpus, driver="nvidia_gpu_driver"))
        if number == 3:
            apply_report(
                host,
                pci,
                make_driver_report(driver="nvidia_gpu_driver", error="it hung for 20 s and was killed"),
                seq=2,
            )
        if number == 4:
            apply_report(
                host,
                make_driver_report(*rest[:-1], driver="pci_driver"),
                make_driver_report(*gpus, driver="nvidia_gpu_driver"),
                seq=2,
            )
        Agent.objects.create(
            host=host,
            public_key=f"sample {number}",
            version="0.1.0",
            wire="cyborg.agent.1",
            boot_id=str(uuid5(NAMESPACE_OID, host.name)),
            connected_at=now - timedelta(hours=3),
        )
        Lease.objects.create(host=host, seen_at=now - timedelta(hours=number == 5))
    box = get_or_create_host("hgx01.rack1.example.net")
    apply_report(box, DriverReport("pci_driver", "", tuple(make_switched_devices())))
    set_device_states(now)
    create_requests(box)
    JoinToken.objects.create(
        host_name="cmp99.rack1.example.net",
        secret_hash="a" * 64,
        expires_at=now + timedelta(hours=20),
        created_by="admin",
    )
    create_users()
    ApiToken.create_with_secret("nova", User.objects.get(username="admin"), ["service"], "local")


def create_users() -> None:
    """Create the users of `PEOPLE` in their groups, with `PASSWORD`."""
    for name, group in PEOPLE.items():
        person = User.objects.create_user(name, password=PASSWORD, is_staff=True)
        person.groups.add(roles.get_group(group))


def set_device_states(now: datetime) -> None:
    """Create an admission rule and set states and reasons of the devices."""
    with conductor.writing():
        AdmissionRule.objects.create(name="all of rack 2", driver="pci_driver", action="ready")
        sampled = Device.objects.exclude(state="missing").filter(host__name__regex="^(cmp|hgx)")
        for number, device in enumerate(sampled.order_by("id")):
            state = STATES[number % len(STATES)]
            why, by = REASONS[state]
            since = now - timedelta(minutes=7 * number + 1)
            Device.objects.filter(pk=device.pk).update(state=state, state_reason=why, state_by=by, state_since=since)


def create_requests(box: Host) -> None:
    """Create requests: some Bound, one BindFailed, one Initial."""
    with conductor.writing():
        profile = DeviceProfile.objects.create(
            name="fpga-small", groups=[{"resources:FPGA": "1"}], description="One FPGA"
        )
        group = profile.groups[0]
        handles = AttachHandle.objects.filter(deployable__device__state="ready").select_related(
            "deployable__device__host"
        )
        some = [*handles[:40:3], *handles.filter(deployable__device__host=box)[::3]]
        for number, handle in enumerate(some):
            host: Host = handle.deployable.device.host
            AcceleratorRequest.objects.create(
                project_id="8f1d6c2e5b7a4f0d9c3e1a2b4c5d6e7f",
                state="Bound",
                profile=profile,
                group=group,
                hostname=host.name,
                instance_uuid=uuid5(NAMESPACE_OID, f"instance {number // 2}"),
                deployable=handle.deployable,
                attach_handle=handle,
            )
        fault = "none of the provider's 2 attach handles is free"
        AcceleratorRequest.objects.create(
            project_id=TENANT_PROJECT, state="BindFailed", profile=profile, group=group, fault=fault
        )
        AcceleratorRequest.objects.create(project_id=TENANT_PROJECT, state="Initial", profile=profile, group=group)


if __name__ == "__main__":
    create_sample()
