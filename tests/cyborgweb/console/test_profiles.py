"""Test device profiles in the console: creation, the hosts that fit, and deletion."""

from __future__ import annotations

from uuid import uuid4

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.db.models import Max
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from accelerators import conductor
from accelerators.models import (
    AcceleratorRequest,
    AttachHandle,
    Attribute,
    Deployable,
    Device,
    DeviceProfile,
    Event,
    Host,
)
from accelerators.requests import candidates, fitting_hosts
from cyborgweb.auth import roles
from tests.cyborgweb.console.conftest import Fill
from tests.support.reports import create_heard_host

pytestmark = pytest.mark.django_db

ADD, LIST = "admin:accelerators_deviceprofile_add", "admin:accelerators_deviceprofile_changelist"
FORM = {"name": "small", "description": "one FPGA", "resource_class": ["FPGA"], "amount-0": "1", "do": "create"}


def prepare_ready_host(name: str = "cmp1", devices: int = 2) -> None:
    """Create a host whose devices are ready FPGAs with two units, a provider and the trait CUSTOM_FPGA_INTEL each."""
    host = create_heard_host(name, devices)
    with conductor.writing():
        Device.objects.filter(host=host).update(state="ready")
        for part in Deployable.objects.filter(device__host=host):
            Deployable.objects.filter(pk=part.pk).update(rp_uuid=uuid4())
            Attribute.objects.update_or_create(deployable=part, key="rc", defaults={"value": "FPGA"})
            Attribute.objects.create(deployable=part, key="trait99", value="CUSTOM_FPGA_INTEL")
            Attribute.objects.create(deployable=part, key="trait98", value="HW_GPU_API_VULKAN")


def login_as(group: str) -> Client:
    user = User.objects.create(username=group, is_staff=True)
    user.groups.add(roles.get_group(group))
    client = Client()
    client.force_login(user)
    return client


def test_a_profile_is_created_in_the_console_and_its_page_shows_the_flavor_property_and_the_hosts_that_fit(
    operator: Client,
) -> None:
    prepare_ready_host()
    create_heard_host("cmp2", 1)  # its device is not ready
    form = operator.get(reverse(ADD)).content.decode()
    assert '<option value="FPGA">' in form and "CUSTOM_FPGA_INTEL is required" in form
    assert "HW_GPU_API_VULKAN" not in form, "a profile may only name traits that begin with CUSTOM_"
    created = operator.post(reverse(ADD), FORM | {"required-0": ["CUSTOM_FPGA_INTEL"]}, follow=True)
    page = created.content.decode()
    profile = DeviceProfile.objects.get()
    assert profile.groups == [{"resources:FPGA": "1", "trait:CUSTOM_FPGA_INTEL": "required"}]
    assert (profile.name, profile.description) == ("small", "one FPGA")
    assert "openstack flavor set FLAVOR --property accel:device_profile=small" in page
    assert page.count(">cmp1</a>") == 1 and "<td>4</td>" in page and ">cmp2</a>" not in page
    event = Event.objects.get(action="profile.created")
    assert (event.source, event.actor) == ("person", "olga")


def test_the_form_checks_by_the_rules_of_the_apis_and_keeps_what_was_entered(operator: Client) -> None:
    refused = {
        "Device profile name must be of the form": {"name": "two words"},
        "Unsupported resource class TPU": {"resource_class": ["TPU"]},
        "Resources number x is invalid": {"amount-0": "x"},
        "asks for no accelerator": {"amount-0": "0"},
        "should start with CUSTOM_": {"more-0": "trait:HW_FAST=required"},
        "has no “=”": {"more-0": "accel:bitstream_id"},
        "has more than one value": {"more-0": "resources:FPGA=2"},
        "may ask for at most 256": {"amount-0": "300"},
    }
    for sentence, changed in refused.items():
        page = operator.post(reverse(ADD), FORM | changed).content.decode()
        assert sentence in page and 'value="one FPGA"' in page, sentence
    assert not DeviceProfile.objects.exists()
    operator.post(reverse(ADD), FORM)
    assert "already exists" in operator.post(reverse(ADD), FORM).content.decode()
    assert DeviceProfile.objects.count() == 1


def test_groups_are_added_and_removed_and_the_form_shows_what_fits_before_it_creates_anything(operator: Client) -> None:
    prepare_ready_host(devices=3)
    page = operator.post(reverse(ADD), FORM | {"do": "more"}).content.decode()
    assert page.count('name="resource_class"') == 2 and 'value="FPGA" maxlength' in page
    two = FORM | {"resource_class": ["FPGA", "FPGA"], "amount-1": "1"}
    page = operator.post(reverse(ADD), two | {"do": "fewer 0"}).content.decode()
    assert page.count('name="resource_class"') == 1
    page = operator.post(reverse(ADD), two | {"do": "check"}).content.decode()
    assert "Hosts that fit now" in page and ">cmp1</a>" in page and "<td>3</td>" in page
    page = operator.post(reverse(ADD), FORM | {"amount-0": "9", "do": "check"}).content.decode()
    assert "No host could serve an instance" in page and "1 host has ready devices of these resource classes" in page
    assert not DeviceProfile.objects.exists()


@pytest.mark.slow
def test_hosts_that_are_counted_together_can_serve_as_many_instances_as_if_each_were_counted_alone() -> None:
    amounts = ((), (1,), (4,), (1, 1, 2), (2, 2, 2), (7, 1), (1,) * 30)
    for number, devices in enumerate((*amounts, *amounts[3:])):
        host = create_heard_host(f"cmp{number}", len(devices))
        with conductor.writing():
            Device.objects.filter(host=host).update(state="ready")
            parts = Deployable.objects.filter(device__host=host).order_by("id")
            for place, (part, amount) in enumerate(zip(parts, devices, strict=True)):
                Deployable.objects.filter(pk=part.pk).update(rp_uuid=uuid4(), num_accelerators=amount)
                part.attach_handles.all().delete()
                AttachHandle.objects.bulk_create(
                    AttachHandle(deployable=part, attach_type="PCI", attach_info=f"{unit}") for unit in range(amount)
                )
                words = {"rc": "GPU" if place % 4 == 3 else "FPGA", "trait7": "CUSTOM_A" if place % 2 else "CUSTOM_B"}
                for key, value in words.items():
                    Attribute.objects.update_or_create(deployable=part, key=key, defaults={"value": value})
    wanted: list[list[dict[str, str]]] = [
        [{"resources:FPGA": "1"}],
        [{"resources:FPGA": "2", "trait:CUSTOM_A": "required"}],
        [{"resources:FPGA": "1", "trait:CUSTOM_A": "forbidden"}, {"resources:FPGA": "1"}],
        [{"resources:FPGA": "1"}, {"resources:FPGA": "1"}, {"resources:GPU": "1", "trait:CUSTOM_A": "required"}],
    ]
    found_counts = set()
    for one in wanted:
        alone = {
            host.name: candidates.count_possible_choices(one, candidates.find_candidates(host), fitting_hosts.MAX_COUNT)
            for host in Host.objects.all()
        }
        assert dict(fitting_hosts.find_fitting_hosts(one).hosts) == {name: n for name, n in alone.items() if n}
        found_counts |= {*alone.values()}
    assert {0, 1, 2, 4, fitting_hosts.MAX_COUNT} <= found_counts


@pytest.mark.slow
def test_all_hosts_are_examined_with_two_statements_and_the_first_ones_are_listed_with_the_number_of_all(
    operator: Client,
) -> None:
    def find(amount: int) -> fitting_hosts.FittingHosts:
        with CaptureQueriesContext(connection) as captured:
            found = fitting_hosts.find_fitting_hosts([{"resources:FPGA": str(amount)}])
        assert len(captured) == 2
        return found

    prepare_ready_host("cmp-0000", 1)
    assert find(1) == fitting_hosts.FittingHosts([("cmp-0000", 2)], 1, 1)
    for number in range(1, 120):
        prepare_ready_host(f"cmp-{number:04}", 1)
    with conductor.writing():  # only the last ten hosts can still give two units of one card
        full = AttachHandle.objects.filter(deployable__device__host__name__lt="cmp-0110")
        full.filter(pk__in=full.values("deployable").annotate(last=Max("pk")).values("last").order_by()).delete()
    assert find(2) == fitting_hosts.FittingHosts([(f"cmp-{number:04}", 1) for number in range(110, 120)], 10, 120)
    one_unit, two_units = [f"cmp-{number:04}" for number in range(110)], [f"cmp-{n:04}" for n in range(110, 120)]
    assert find(1) == fitting_hosts.FittingHosts([(name, 1) for name in one_unit[:50]], 120, 120)
    with conductor.writing():
        AttachHandle.objects.filter(deployable__device__host__name__range=("cmp-0010", "cmp-0109")).delete()
    listed = [(name, 1) for name in one_unit[:10]] + [(name, 2) for name in two_units]
    assert find(1) == fitting_hosts.FittingHosts(listed, 20, 120)
    page = operator.post(reverse(ADD), FORM | {"amount-0": "1", "do": "check"}).content.decode()
    assert "20 hosts can serve an instance with this profile now." in page and "are listed" not in page
    with conductor.writing():
        for host in Host.objects.filter(name__range=("cmp-0010", "cmp-0109")):
            AttachHandle.objects.create(deployable=host.devices.get().deployables.get(), attach_type="PCI")
    page = operator.post(reverse(ADD), FORM | {"amount-0": "1", "do": "check"}).content.decode()
    assert "120 hosts can serve an instance with this profile now. The first 50 by name are listed." in page
    assert page.count(">cmp-00") == 50
    page = operator.post(reverse(ADD), FORM | {"amount-0": "3", "do": "check"}).content.decode()
    assert "120 hosts have ready devices of these resource classes" in page


def test_a_free_profile_is_deleted_after_a_confirmation_and_a_used_one_is_kept(operator: Client, fill: Fill) -> None:
    fill(3)
    used = DeviceProfile.objects.get(name="small-0")
    assert AcceleratorRequest.objects.filter(profile=used).exists()
    with conductor.writing():
        free = DeviceProfile.objects.create(name="free", groups=[{"resources:GPU": "1"}])
    for profile, sentence in ((free, "Device profile free was deleted."), (used, "is used by accelerator requests")):
        url = reverse("admin:accelerators_deviceprofile_delete", args=[profile.pk])
        assert f"Delete device profile {profile.name}?" in operator.get(url).content.decode()
        assert sentence in operator.post(url, {"generation": profile.generation}, follow=True).content.decode()
    assert list(DeviceProfile.objects.all()) == [used]
    assert Event.objects.get(action="profile.deleted").actor == "olga"


@pytest.mark.slow
def test_only_people_with_the_right_create_and_delete_profiles_and_the_refusal_names_the_role(fill: Fill) -> None:
    administrator, viewer, tenant = map(login_as, (roles.ADMINISTRATORS.group, roles.VIEWERS.group, "project:p1"))
    prepare_ready_host()
    assert administrator.get(reverse(ADD)).status_code == 200
    with conductor.writing():
        profile = DeviceProfile.objects.create(name="free", groups=[{"resources:FPGA": "1"}])
    page, deletion = (
        reverse(f"admin:accelerators_deviceprofile_{verb}", args=[profile.pk]) for verb in ("change", "delete")
    )
    for client in (viewer, tenant):
        refused = client.post(reverse(ADD), FORM)
        assert refused.status_code == 403 and "You need the role admin" in refused.content.decode()
        assert client.post(deletion).status_code == 403
        assert "You need the role admin" in client.get(page).content.decode()
    assert "Hosts that fit now" in viewer.get(page).content.decode()
    assert "Hosts that fit now" not in tenant.get(page).content.decode(), "a tenant sees no hosts"
    assert DeviceProfile.objects.count() == 1


def test_the_page_and_the_form_cost_a_constant_number_of_statements(
    operator: Client, django_assert_max_num_queries: object
) -> None:
    with conductor.writing():
        profile = DeviceProfile.objects.create(name="free", groups=[{"resources:FPGA": "1"}])
    url = reverse("admin:accelerators_deviceprofile_change", args=[profile.pk])
    for hosts in (1, 4):
        prepare_ready_host(f"cmp{hosts}", hosts)
        with django_assert_max_num_queries(12):  # type: ignore[operator]
            operator.get(url)
        with django_assert_max_num_queries(12):  # type: ignore[operator]
            operator.post(reverse(ADD), FORM | {"do": "check"})
