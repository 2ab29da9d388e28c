"""Test lists that are longer than their pages, exact links from other pages, and short links to devices."""

from __future__ import annotations

import re
from html import unescape
from uuid import UUID

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from accelerators import conductor
from accelerators.models import Command, Deployable, Device, Event, Host
from accelerators.ui import changelist
from accelerators.ui.changelist import BoundedPaginator, ConsoleModelAdmin
from tests.cyborgweb.console.conftest import Fill
from tests.support.reports import create_heard_host

pytestmark = pytest.mark.django_db

DEVICES = "/admin/accelerators/device/"


@pytest.fixture
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let lists have two pages of three rows."""
    monkeypatch.setattr(BoundedPaginator, "EXACT", 6)
    monkeypatch.setattr(changelist, "MAX_SELECTABLE_ROWS", 6)
    monkeypatch.setattr(ConsoleModelAdmin, "list_per_page", 3)
    monkeypatch.setattr(ConsoleModelAdmin, "list_max_show_all", 3)


def list_keys(operator: Client, url: str) -> list[int]:
    """Return the keys of all rows of a list, page after page, as the links of the pages lead."""
    keys: list[int] = []
    while url:
        page = operator.get(url)
        assert page.status_code == 200, (url, page.content[:300])
        change_list = page.context["cl"]
        keys += [row.pk for row in change_list.result_list]
        if change_list.page_num < change_list.paginator.num_pages:
            url = url.partition("?")[0] + change_list.get_query_string({"p": change_list.page_num + 1})
        else:
            link = re.search('rel="next" href="([^"]*)"', page.content.decode())
            url = url.partition("?")[0] + unescape(link[1]) if link else ""
    return keys


@pytest.mark.parametrize("model", [Host, Device, Deployable, Event, Command])
@pytest.mark.slow
def test_lists_continue_after_their_last_page(model: type, operator: Client, fill: Fill, short_pages: None) -> None:
    fill(23)
    url = reverse(f"admin:accelerators_{model._meta.model_name}_changelist")
    keys = list_keys(operator, url)
    assert len(keys) == len(set(keys)) == model.objects.count()
    assert keys[:3] == [row.pk for row in operator.get(url).context["cl"].result_list]


@pytest.mark.parametrize("column", range(1, 9))
@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.slow
def test_lists_continue_in_every_order_with_equal_and_empty_values(
    column: int, sign: str, operator: Client, fill: Fill, short_pages: None
) -> None:
    fill(13)
    with conductor.writing():
        Device.objects.filter(address__startswith="0000:02").update(address=None)
        Device.objects.filter(address__startswith="0000:03").update(state="ready")
    change_list = operator.get(DEVICES, {"o": f"{sign}{column}"}).context["cl"]
    expected = list(change_list.queryset.values_list("pk", flat=True))
    assert list_keys(operator, f"{DEVICES}?o={sign}{column}") == expected


@pytest.mark.slow
def test_a_continued_list_links_to_its_first_page_and_loses_its_place_with_another_filter(
    operator: Client, fill: Fill, short_pages: None
) -> None:
    fill(13)
    key = Device.objects.order_by("host_id", "key")[5].pk
    page = operator.get(DEVICES, {"after": key})
    assert page.context["cl"].result_count == 6 and "First page" in page.content.decode()
    assert page.context["cl"].get_query_string({"o": "2"}) == "?o=2"
    assert page.context["cl"].get_query_string({"p": 2}) == f"?after={key}&p=2"
    for wrong in ("x", "0", "99999999", "-1", "²"):
        assert operator.get(DEVICES, {"after": wrong}).status_code == 400, wrong


@pytest.mark.slow
def test_select_all_says_how_many_rows_match(operator: Client, fill: Fill, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(60)
    monkeypatch.setattr(BoundedPaginator, "EXACT", 50)
    for query in ("", "?state__exact=inactive"):
        page = operator.get(f"{DEVICES}{query}")
        wanted = page.context["cl"].queryset.count()
        assert wanted > 50
        assert re.search(rf"Select all {wanted} devices", page.content.decode()), query


def test_links_of_a_host_show_this_host_only(operator: Client) -> None:
    hosts = [create_heard_host(name, 1) for name in ("cmp1", "cmp10")]
    page = operator.get(reverse("admin:accelerators_host_change", args=[hosts[0].pk])).content.decode()
    links = {unescape(one) for one in re.findall(r'href="(/admin/[^"]*\?[^"]*cmp1)"', page)}
    assert {link.partition("?")[0].split("/")[-2] for link in links} >= {"device", "hostdriver", "event"}
    for link in links:
        answer = operator.get(link)
        assert answer.context["cl"].result_count, link
        assert "cmp10" not in {str(getattr(row, "host", "")) for row in answer.context["cl"].result_list}, link
        assert [chip["value"] for chip in answer.context["cl"].applied_filters()] == ["cmp1"], link


def test_a_short_link_leads_to_the_device_or_to_the_devices_that_match(operator: Client, fill: Fill) -> None:
    fill(13)
    first, second, third = Device.objects.order_by("id")[:3]
    with conductor.writing():
        for device, uuid in ((first, "abcd1111"), (second, "abcd2222"), (third, "12345678")):
            Device.objects.filter(pk=device.pk).update(uuid=UUID(f"{uuid}-0000-4000-8000-000000000000"))
    page = reverse("admin:accelerators_device_change", args=[first.pk])
    for prefix in ("abcd1", "ABCD1111", "abcd1111-0000", "abcd1111-0000-4000-8000-000000000000"):
        assert operator.get(f"/d/{prefix}")["location"] == page
    assert operator.get("/d/abcd")["location"] == f"{DEVICES}?q=abcd"
    assert operator.get(operator.get("/d/abcd")["location"]).context["cl"].result_count == 2
    for unknown in ("abcd3", "abc", "zzzz"):
        assert operator.get(f"/d/{unknown}").status_code == 404, unknown
    assert "/d/abcd1111" in operator.get(page).content.decode()


def test_a_short_link_needs_the_permission_of_the_device_page(client: Client) -> None:
    create_heard_host("cmp1", 1)
    link = f"/d/{str(Device.objects.get().uuid)[:8]}"
    assert client.get(link)["location"].startswith(reverse("admin:login"))
    client.force_login(User.objects.create_user("nobody", is_staff=True))
    assert client.get(link).status_code == 403
