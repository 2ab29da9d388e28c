"""Test the cells of lists: an empty one shows a dash, and what has a page is a link to it."""

from __future__ import annotations

import re
from uuid import UUID, uuid4

import pytest
from django.contrib import admin
from django.contrib.auth.models import User
from django.db.models import Model
from django.test import Client
from django.urls import reverse
from django.utils.html import strip_tags

from accelerators import conductor
from accelerators.models import (
    AcceleratorRequest,
    Attachment,
    Bulk,
    BulkItem,
    Deployable,
    Device,
    DeviceProfile,
)
from accelerators.ui import badges
from agents.models import Agent, JoinToken
from cyborgweb.auth import roles
from cyborgweb.models import ApiToken, Maintenance
from placement_sync.models import Writer
from tests.cyborgweb.console.conftest import Fill, fill_other_lists
from tests.support.reports import apply_report, get_or_create_host, make_driver_report

pytestmark = pytest.mark.django_db

WITHOUT_LIST = (Maintenance, Writer)
INSTANCE = UUID("604c1d0e-3f10-4d5c-9c6b-6e0f9a3c1b2d")
CELL = re.compile(r'<t[dh] class="[^"]*\bfield-(\w+)[^>]*>(.*?)</t[dh]>', re.DOTALL)


def read_cells(client: Client, model: type[Model]) -> list[tuple[str, str]]:
    """Return the cells of the model's list, each with the name of its column."""
    page = client.get(reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"))
    assert page.status_code == 200, model
    return CELL.findall(page.content.decode())


def read_column(client: Client, model: type[Model], column: str) -> list[str]:
    """Return the HTML of the cells in one column of the model's list."""
    return [html for name, html in read_cells(client, model) if name == column]


@pytest.mark.slow
def test_an_empty_cell_of_a_list_shows_the_same_dash_everywhere(operator: Client, fill: Fill) -> None:
    hosts = fill(11)
    fill_other_lists(hosts)
    apply_report(get_or_create_host("cmp9"), make_driver_report(driver="pci_driver"))
    with conductor.writing():
        DeviceProfile.objects.create(name="plain", groups=[])
        AcceleratorRequest.objects.create(
            project_id="p1", profile=DeviceProfile.objects.earliest("pk"), group={}, state="Initial"
        )
        BulkItem.objects.create(bulk=Bulk.objects.earliest("pk"), target_uuid=uuid4(), target_name="gone")
        Agent.objects.update(version="", wire="")
    models = [model for model in admin.site._registry if model not in WITHOUT_LIST]
    cells = {model: read_cells(operator, model) for model in models}
    wrong = {
        f"{model._meta.label} {column}": html
        for model, found in cells.items()
        for column, html in found
        if strip_tags(html).strip() in ("", "-") or (strip_tags(html).strip() == "–" and badges.DASH not in html)
    }
    assert wrong == {}
    assert sum(badges.DASH in html for found in cells.values() for _, html in found) > 10


def create_attachment(**values: object) -> None:
    with conductor.writing():
        Attachment.objects.create(
            **{"instance": INSTANCE, "project_id": "p1", "host": "cmp0.example", "actor": "olga"} | values
        )


def test_an_attachment_links_to_its_host_instance_profile_and_device(operator: Client, fill: Fill) -> None:
    fill(1)
    device, profile = Device.objects.get(), DeviceProfile.objects.get()
    create_attachment(device=device.uuid)
    create_attachment(profile=profile.name)
    assert read_column(operator, Attachment, "shown_host") == [badges.render_host_link("cmp0.example")] * 2
    assert read_column(operator, Attachment, "shown_instance") == [badges.render_instance_link(INSTANCE)] * 2
    by_profile, by_device = read_column(operator, Attachment, "what")
    assert by_profile == badges.render_page_link("deviceprofile", profile.pk, profile.name)
    assert badges.page_url("device", device.pk) in by_device and str(device.address) in by_device
    for link in re.findall(r'href="([^"]+)"', by_profile + by_device):
        assert operator.get(link).status_code == 200
    for row in Attachment.objects.all():
        page = operator.get(badges.page_url("attachment", row.pk)).content.decode()
        assert badges.page_url("deviceprofile", profile.pk) in page or badges.page_url("device", device.pk) in page


def test_an_attachment_of_what_was_deleted_shows_its_name_without_a_link(operator: Client) -> None:
    create_attachment(device=INSTANCE)
    create_attachment(profile="gone")
    assert [strip_tags(html) for html in read_column(operator, Attachment, "what")] == ["gone", str(INSTANCE)[:8]]
    assert "<a" not in "".join(read_column(operator, Attachment, "what"))


def test_a_request_links_to_its_host_and_instance(operator: Client, fill: Fill) -> None:
    fill(1)
    with conductor.writing():
        AcceleratorRequest.objects.update(hostname="cmp0.example", instance_uuid=INSTANCE)
    assert set(read_column(operator, AcceleratorRequest, "shown_hostname")) == {badges.render_host_link("cmp0.example")}
    (instance,) = set(read_column(operator, AcceleratorRequest, "shown_instance"))
    (url,) = re.findall(r'href="([^"]+)"', instance)
    assert operator.get(url).context["cl"].result_count == AcceleratorRequest.objects.count()


def test_an_object_of_a_bulk_action_without_a_host_shows_a_dash(operator: Client) -> None:
    with conductor.writing():
        bulk = Bulk.objects.create(action="label", target="accelerator", total=1, actor="olga")
        BulkItem.objects.create(bulk=bulk, target_uuid=uuid4(), target_name="one")
    assert read_column(operator, BulkItem, "shown_host") == [badges.DASH]
    assert badges.DASH in operator.get(badges.page_url("bulk", bulk.pk)).content.decode()


def test_a_deployable_names_its_units_and_provider(operator: Client, fill: Fill) -> None:
    fill(1)
    provider = uuid4()
    with conductor.writing():
        Deployable.objects.update(rp_uuid=provider)
    assert strip_tags(read_column(operator, Deployable, "shown_rp_uuid")[0]) == str(provider)[:8]
    exported = operator.get(reverse("admin:accelerators_deployable_export", args=["csv"]))
    text = b"".join(exported).decode()  # type: ignore[call-overload]
    assert str(provider) in text and '"rp_uuid"' in text and '"num_accelerators"' in text


def test_groups_say_what_their_members_may_do_and_users_their_groups(operator: Client) -> None:
    viewer = User.objects.create(username="vera", is_staff=True)
    viewer.groups.add(roles.get_group("role:viewer"), roles.get_group("project:p9"))
    group = viewer.groups.get(name="role:viewer")
    assert "project:p9, role:viewer" in read_column(operator, User, "shown_groups")
    assert set(read_column(operator, type(group), "shown_meaning")) >= {
        "sees all hosts and projects",
        "sees the requests of the project p9, and device profiles",
    }
    (url,) = {
        link
        for html in read_column(operator, type(group), "shown_users")
        for link in re.findall(r'href="([^"]+)"', html)
        if link.endswith(f"={group.pk}")
    }
    assert [user.username for user in operator.get(url).context["cl"].result_list] == ["vera"]
    exported = b"".join(operator.get(reverse("admin:auth_user_export", args=["csv"]))).decode()  # type: ignore[call-overload]
    assert '"project:p9, role:viewer"' in exported


def test_a_token_links_to_its_owner(operator: Client) -> None:
    owner = User.objects.get()
    ApiToken.create_with_secret("nova", owner, ["service"], "p1")
    (shown,) = read_column(operator, ApiToken, "shown_user")
    assert f'href="{reverse("admin:auth_user_change", args=[owner.pk])}"' in shown


def test_a_time_on_a_single_page_is_in_utc_with_seconds(operator: Client, fill: Fill) -> None:
    fill(1)
    token = JoinToken.objects.get()
    page = operator.get(reverse("admin:agents_jointoken_change", args=[token.pk])).content.decode()
    assert f"{token.expires_at:%Y-%m-%d %H:%M:%S} UTC" in page


def test_the_form_of_a_user_explains_who_may_log_in_and_names_permissions_shortly(operator: Client) -> None:
    page = operator.get(reverse("admin:auth_user_change", args=[User.objects.get().pk])).content.decode()
    assert "Whether the user may log in to the console." in page and "Designates" not in page
    assert ">Can change device<" in page


def test_rows_without_a_page_have_the_key_for_live_updates(operator: Client) -> None:
    with conductor.writing():
        bulk = Bulk.objects.create(action="label", target="accelerator", total=1, actor="olga")
        item = BulkItem.objects.create(bulk=bulk, target_uuid=uuid4(), target_name="one", host="cmp1")
    assert f'data-row="{item.pk}"' in read_column(operator, BulkItem, "shown_object")[0]
