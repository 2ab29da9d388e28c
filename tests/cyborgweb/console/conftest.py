"""An operator of the console, and inventories of a given size."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.auth.models import User
from django.test import Client

from accelerators import conductor
from accelerators.models import AcceleratorRequest, AttachHandle, Device, DeviceProfile, Host
from agents.models import JoinToken
from cyborgweb.models import ApiToken
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
