"""Test `manage.py seed`: the rows keep all constraints, the events can be sealed, and real hosts are protected."""

from __future__ import annotations

from collections import Counter
from io import StringIO

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client
from django.urls import reverse

from accelerators.audit import verification
from accelerators.domain.provider_ids import compute_provider_uuid
from accelerators.models import AttachHandle, Attribute, Backend, Deployable, Device, Event, Host, ProviderOwner, Seal
from accelerators.requests.fitting_hosts import find_fitting_hosts
from tests.support.reports import create_heard_host
from tests.support.seals import create_seals

pytestmark = pytest.mark.django_db(transaction=True)


def run_seed(**options: object) -> str:
    """Run `manage.py seed` with small numbers and return its output."""
    out = StringIO()
    call_command("seed", stdout=out, **({"hosts": 3, "devices": 100, "events": 250} | options))
    return out.getvalue()


def test_seeded_devices_have_the_rows_that_a_report_would_create() -> None:
    assert "3 hosts from seed-00001.example on, 100 devices and 250 events were inserted." in run_seed()
    assert [host.name for host in Host.objects.all()] == [f"seed-0000{n}.example" for n in (1, 2, 3)]
    counts = [model.objects.count() for model in (Device, Deployable, Attribute, AttachHandle, Event)]
    assert counts == [100, 100, 300, 100, 252]
    for host in Host.objects.all():
        assert host.drivers["generic_driver"]["devices"] == host.devices.count() in (33, 34)
    assert Backend.objects.count() == 6
    assert {device.key.partition(":")[0] for device in Device.objects.all()} == {"pci", "serial"}
    event = Event.objects.filter(action="device.maintenance").order_by("-id").first()
    assert event and Device.objects.get(uuid=event.subject).host.name == event.host


def test_the_devices_that_left_inactive_have_providers_as_on_a_running_site_so_that_ready_ones_fit_a_profile() -> None:
    run_seed()
    for deployable in Deployable.objects.select_related("device"):
        computed = compute_provider_uuid(deployable.name)
        assert deployable.rp_uuid == (None if deployable.device.state == "inactive" else computed)
        assert ProviderOwner.objects.get(provider=computed).host_id == deployable.device.host_id
    found = find_fitting_hosts([{"resources:FPGA": "1", "trait:CUSTOM_PCI_PRODUCT_ID_5000": "required"}])
    ready = Device.objects.filter(type="FPGA", state="ready").exclude(status="failed")
    assert {name: count for name, count in found.hosts} == Counter(ready.values_list("host__name", flat=True))


def test_without_providers_no_deployable_has_a_provider_id_and_no_device_fits_a_profile() -> None:
    run_seed(without_providers=True)
    assert not Deployable.objects.filter(rp_uuid__isnull=False).exists()
    assert find_fitting_hosts([{"resources:FPGA": "1"}]).hosts == []


def test_a_second_call_continues_the_numbers_of_the_hosts() -> None:
    run_seed()
    assert "from seed-00004.example on" in run_seed()
    assert (Host.objects.count(), Device.objects.count(), Event.objects.count()) == (6, 200, 504)


def test_seeded_events_are_sealed_and_verified_like_others() -> None:
    run_seed()
    create_seals()
    assert sum(seal.events for seal in Seal.objects.all()) == 252
    found = verification.verify_seals()
    assert (found.findings, found.unsealed) == ([], 0)


def test_a_database_with_real_hosts_is_seeded_only_if_told() -> None:
    create_heard_host("cmp1", 2)
    with pytest.raises(CommandError, match=r"has 1 real host.*--beside-real-hosts"):
        run_seed()
    assert Device.objects.count() == 2
    run_seed(beside_real_hosts=True)
    assert Device.objects.count() == 102


@pytest.mark.parametrize("numbers", [{"hosts": 0}, {"devices": 0}, {"events": -1}, {"hosts": 1, "devices": 5000}])
def test_numbers_that_do_not_fit_each_other_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(CommandError, match=r"at least one host|at most 4096 devices"):
        run_seed(**numbers)
    assert not Host.objects.exists()


@pytest.mark.slow
def test_the_pages_of_seeded_rows_can_be_opened(admin_client: Client) -> None:
    run_seed()
    for model in (Host, Device, Event):
        name = f"admin:accelerators_{model._meta.model_name}"
        assert admin_client.get(reverse(f"{name}_changelist")).status_code == 200
        assert admin_client.get(reverse(f"{name}_change", args=[model.objects.first().pk])).status_code == 200
