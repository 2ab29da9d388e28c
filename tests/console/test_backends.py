"""The page of a host says how each backend of its drivers is, and what can be done with it."""

from __future__ import annotations

import pytest
from django.test import Client
from django.urls import reverse

from drivers.inventory import Backend, Service
from tests.support.reports import a_host, answer, apply, card

pytestmark = pytest.mark.django_db
READY = Service("sriov", limits={"total_vfs": "8"})
AWAY = Service("passthrough", state="unavailable", reason="no IOMMU: switch it on")


def test_backends_and_their_services_stand_on_the_hosts_page(operator: Client) -> None:
    host = a_host()
    backends = (
        Backend("nics", "pci", {"rack": "r1"}, services=(READY, AWAY)),
        Backend("gpus", "mdev", error="the kernel holds <it>"),
    )
    apply(host, answer(card(1, backend="nics"), driver="generic_driver", backends=backends), answer(driver="other"))
    page = operator.get(reverse("admin:accelerators_host_change", args=[host.pk])).content.decode()
    for fact in (
        "Backends of generic_driver",
        "rack: r1",
        "the kernel holds &lt;it&gt;",
        'title="total_vfs 8"',
        'title="no IOMMU: switch it on"',
    ):
        assert fact in page
    assert "Backends of other" not in page
    listed = operator.get(reverse("admin:accelerators_host_changelist")).content.decode()
    assert "1 backend failing" in listed
    overview = operator.get(reverse("admin:index")).content.decode()
    assert "generic_driver:gpus" in overview and "1 driver" in overview
