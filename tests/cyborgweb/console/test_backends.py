"""Test that the page of a host shows the state of each backend of its drivers, and its services."""

from __future__ import annotations

import html
import re

import pytest
from django.test import Client
from django.urls import reverse

from accelerators import conductor
from accelerators.models import Backend as StoredBackend
from accelerators.models import DriverWish
from accelerators.models import Service as StoredService
from accelerators.ui import badges
from drivers.inventory import Backend, Service
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db
READY_SERVICE = Service("sriov", limits={"total_vfs": "8"})
UNAVAILABLE_SERVICE = Service("passthrough", state="unavailable", reason="no IOMMU: switch it on")


def test_the_page_of_a_host_shows_its_backends_and_their_services(operator: Client) -> None:
    host = get_or_create_host()
    backends = (
        Backend("nics", "pci", {"rack": "r1"}, services=(READY_SERVICE, UNAVAILABLE_SERVICE)),
        Backend("gpus", "mdev", error="the kernel holds <it>"),
    )
    apply_report(
        host,
        make_driver_report(make_card(1, backend="nics"), driver="generic_driver", backends=backends),
        make_driver_report(driver="other"),
    )
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


def test_a_device_whose_backend_alone_failed_is_found_as_stale_and_not_as_live(operator: Client) -> None:
    host = get_or_create_host()
    cards = make_card(1, backend="nics"), make_card(2, backend="gpus")
    works, failed = Backend("nics", "pci"), Backend("gpus", "mdev", error="the kernel holds it")
    for seq, gpus in enumerate((Backend("gpus", "mdev"), failed), 1):
        report = make_driver_report(*cards[: 3 - seq], driver="generic_driver", backends=(works, gpus))
        apply_report(host, report, seq=seq)
    found = {
        answer: [
            device.backend
            for device in operator.get(reverse("admin:accelerators_device_changelist"), {"stale": answer})
            .context["cl"]
            .result_list
        ]
        for answer in ("yes", "no")
    }
    assert found == {"yes": ["gpus"], "no": ["nics"]}


def test_the_pages_of_a_service_a_backend_a_device_and_a_host_link_to_each_other(operator: Client) -> None:
    backends = (Backend("nics", "pci", services=(READY_SERVICE, UNAVAILABLE_SERVICE)), Backend("disks", "pci"))
    for name in ("cmp1", "cmp10"):
        report = make_driver_report(make_card(1, backend="nics"), driver="generic_driver", backends=backends)
        apply_report(get_or_create_host(name), report)
    host = get_or_create_host("cmp1")
    device, service = host.devices.get(), StoredService.objects.get(host="cmp1", name="sriov")
    links = {
        re.search(r'<a href="([^"]+)">nics</a>', operator.get(page).content.decode())[1]  # type: ignore[index]
        for page in (
            badges.page_url("service", service.pk),
            reverse("admin:accelerators_service_changelist", query={"host": "cmp1"}),
            badges.page_url("device", device.pk),
            badges.page_url("host", host.pk),
        )
    }
    (link,) = links
    backend = operator.get(link)
    assert backend.context["original"] == StoredBackend.objects.get(host="cmp1", name="nics")
    lists = re.findall(r'<a href="([^"]+)">(1|1 of 2 ready)</a>', backend.content.decode())
    listed = [list(operator.get(html.unescape(url)).context["cl"].result_list) for url, _ in lists]
    assert listed == [[device], list(StoredService.objects.filter(host="cmp1", backend="nics").order_by("place"))]
    empty = operator.get(badges.page_url("backend", StoredBackend.objects.get(host="cmp1", name="disks").key))
    assert "of 0 ready" not in empty.content.decode()


@pytest.mark.slow
def test_the_lists_of_backends_and_services_show_and_filter_those_of_all_hosts(operator: Client) -> None:
    works = Backend("nics", "pci", {"rack": "r1"}, services=(READY_SERVICE, UNAVAILABLE_SERVICE))
    failed = Backend("gpus", "mdev", error="the kernel holds it")
    for name in ("cmp1", "cmp2"):
        report = make_driver_report(make_card(1, backend="nics"), driver="generic_driver", backends=(works, failed))
        apply_report(get_or_create_host(name), report)
    wanted = {"backends": {"nics": {"kind": "pci"}, "disks": {"kind": "pci", "enabled": False}}}
    with conductor.writing():
        DriverWish.objects.create(host=get_or_create_host("cmp2"), driver="generic_driver", settings=wanted)
    backends, services = (reverse(f"admin:accelerators_{name}_changelist") for name in ("backend", "service"))
    found = {
        state: [str(row) for row in operator.get(backends, {"state": state, "q": "cmp2"}).context["cl"].result_list]
        for state in ("failing", "answering", "disabled", "waiting")
    }
    assert found == {
        "failing": ["generic_driver:gpus"],
        "answering": ["generic_driver:nics"],
        "disabled": ["generic_driver:disks"],
        "waiting": [],
    }
    assert "It is disabled in its settings." in operator.get(backends).content.decode()
    page = operator.get(backends).content.decode()
    assert "1 of 2 ready" in page and page.count("the kernel holds it") >= 2
    listed = operator.get(services, {"q": "cmp2", "backend": "nics"})
    assert [row.name for row in listed.context["cl"].result_list] == ["passthrough", "sriov"]
    for row in (*operator.get(backends).context["cl"].result_list, *listed.context["cl"].result_list):
        name = type(row).__name__.lower()
        assert operator.get(reverse(f"admin:accelerators_{name}_change", args=[row.pk])).status_code == 200
