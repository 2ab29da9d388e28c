"""Test saved views of a list, private and shared, and the columns that a user chooses."""

from __future__ import annotations

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from accelerators import conductor
from accelerators.domain.states import EventSource
from accelerators.models import Device
from accelerators.ui.changelist import ConsoleModelAdmin
from cyborgweb.api.root import COLLECTIONS
from cyborgweb.auth import roles
from cyborgweb.models import ApiToken, SavedView
from tests.cyborgweb.console.conftest import Fill

pytestmark = pytest.mark.django_db

DEVICES = reverse("admin:accelerators_device_changelist")
SAVE_URL = reverse("list_keep", args=["accelerators.device"])


@pytest.fixture
def viewer(operator: Client, fill: Fill) -> Client:
    """Return the client of a second user, who may view devices, of which there are three."""
    fill(3)
    user = User.objects.create(username="vera", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_device"))
    client = Client()
    client.force_login(user)
    return client


def list_view_names(client: Client) -> list[str]:
    return [view.name for view in client.get(DEVICES).context["cl"].saved_views()]


def list_columns(client: Client, **query: str) -> list[str]:
    return [name for name in client.get(DEVICES, query).context["cl"].list_display if name != "action_checkbox"]


@pytest.mark.slow
def test_a_view_is_saved_shown_and_deleted_by_its_owner(operator: Client, viewer: Client) -> None:
    query = "q=cmp0&state__exact=ready"
    answered = operator.post(SAVE_URL, {"name": "  what is ready ", "query": query})
    assert (answered.status_code, answered["location"]) == (302, f"{DEVICES}?{query}")
    operator.post(SAVE_URL, {"name": "for all", "query": "stale=yes", "shared": "on"})
    assert list_view_names(operator) == ["for all", "what is ready"]
    assert list_view_names(viewer) == ["for all"]
    page = operator.get(DEVICES).content.decode()
    assert 'href="?q=cmp0&amp;state__exact=ready"' in page
    shared = SavedView.objects.get(name="for all")
    viewer.post(SAVE_URL, {"delete": shared.pk})
    assert list_view_names(viewer) == ["for all"]
    operator.post(SAVE_URL, {"delete": shared.pk})
    assert list_view_names(viewer) == []


@pytest.mark.slow
def test_nobody_deletes_the_private_view_of_another_user(operator: Client, viewer: Client) -> None:
    operator.post(SAVE_URL, {"name": "of the operator", "query": ""})
    viewer.post(SAVE_URL, {"name": "of the viewer", "query": ""})
    for client, name in ((viewer, "of the operator"), (operator, "of the viewer")):
        page = client.post(SAVE_URL, {"delete": SavedView.objects.get(name=name).pk}, follow=True)
        assert "or you may not delete it" in page.content.decode()
    assert SavedView.objects.count() == 2


@pytest.mark.slow
def test_the_own_views_and_columns_are_shown_however_many_views_others_share(operator: Client, viewer: Client) -> None:
    other = User.objects.create(username="other")
    views = (
        SavedView(user=other, of="accelerators.device", name=f"a{number}", shared=True) for number in range(21 * 50)
    )
    SavedView.objects.bulk_create(views)
    viewer.post(SAVE_URL, {"name": "z", "query": ""})
    viewer.post(SAVE_URL, {"columns": ["model"]})
    names = list_view_names(viewer)
    assert (names[:2], len(names), list_columns(viewer)) == (["z", "a0"], 50, ["shown_model"])


def test_users_of_one_project_see_only_their_own_saved_views(operator: Client) -> None:
    requests = reverse("admin:accelerators_acceleratorrequest_changelist")
    keep = reverse("list_keep", args=["accelerators.acceleratorrequest"])
    tenant = Client()
    user = User.objects.create(username="tina", is_staff=True)
    user.groups.add(roles.get_group("project:p1"))
    tenant.force_login(user)
    operator.post(keep, {"name": "bank's", "query": "q=bank", "shared": "on"})
    tenant.post(keep, {"name": "mine", "query": "q=a"})
    page = tenant.get(requests)
    assert [view.name for view in page.context["cl"].saved_views()] == ["mine"]
    assert b"bank" not in page.content


def test_saving_a_view_again_replaces_it_and_views_beyond_the_maximum_are_refused(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    for query in ("stale=yes", "stale=no"):
        operator.post(SAVE_URL, {"name": "mine", "query": query})
    assert SavedView.objects.get().query == "stale=no"
    monkeypatch.setattr("cyborgweb.pages.saved_views.MAX_VIEWS", 1)
    for name in ("second", "", "x" * 65, "\0"):
        operator.post(SAVE_URL, {"name": name, "query": ""})
    assert SavedView.objects.count() == 1


@pytest.mark.slow
def test_columns_are_chosen_by_url_or_saved_for_the_user(operator: Client, viewer: Client) -> None:
    every = list_columns(operator)
    assert list_columns(operator, columns="type,state") == ["type", "shown_state"]
    operator.post(SAVE_URL, {"columns": ["model", "state"], "query": "o=3&q=cmp0"})
    assert list_columns(operator) == ["shown_model", "shown_state"]
    assert list_columns(viewer) == every
    assert operator.get(DEVICES).context["cl"].shareable_query() == "columns=model%2Cstate"
    operator.post(SAVE_URL, {"reset": "yes", "query": ""})
    assert list_columns(operator) == every


def test_invalid_columns_lists_and_missing_permissions_are_refused(operator: Client, viewer: Client) -> None:
    assert operator.get(DEVICES, {"columns": "state,nonsense"}).status_code == 400
    assert operator.post(SAVE_URL, {"columns": ["nonsense"]}).status_code == 400
    assert operator.post(SAVE_URL, {}).status_code == 400
    assert operator.get(SAVE_URL).status_code == 405
    assert operator.post(reverse("list_keep", args=["no.list"]), {"name": "x"}).status_code == 404
    assert viewer.post(reverse("list_keep", args=["accelerators.host"]), {"name": "x"}).status_code == 403
    for key in ("", "x", "9" * 30):
        assert operator.post(SAVE_URL, {"delete": key}).status_code == 302


def test_a_list_offers_export_links_column_choices_and_the_search_box(operator: Client, fill: Fill) -> None:
    fill(3)
    page = operator.get(DEVICES, {"stale": "no", "p": "1"}).content.decode()
    assert 'href="export.csv?stale=no"' in page
    assert 'name="columns" value="model" checked' in page
    assert 'action="/admin/find/"' in page


def get_addresses(token: str, view: str, collection: str = "devices", status: int = 200) -> list[str]:
    """Return the addresses, or the names of hosts, that /api lists for a saved view; check the status."""
    answer = Client().get(f"/api/{collection}/", {"saved_view": view}, headers={"X-Auth-Token": token})
    assert answer.status_code == status, answer.content
    return [row.get("address") or row["name"] for row in answer.json().get("results", ())]


def test_the_api_lists_the_rows_of_a_saved_view_by_its_name(operator: Client, viewer: Client) -> None:
    owner, other = User.objects.get(pk=operator.session["_auth_user_id"]), User.objects.get(username="vera")
    roles_of_admin, roles_of_manager = ["admin", "member", "reader"], ["manager", "member", "reader"]
    own_token = ApiToken.create_with_secret("own", owner, roles_of_manager, "p1")
    admin_token = ApiToken.create_with_secret("admin", other, roles_of_admin, "p1")
    manager_token = ApiToken.create_with_secret("manager", other, roles_of_manager, "p1")
    address = Device.objects.order_by("key")[1].address
    operator.post(SAVE_URL, {"name": "one card", "query": f"q={address}&o=2&columns=model"})
    operator.post(SAVE_URL, {"name": "none", "query": "state__exact=retired", "shared": "on"})
    assert get_addresses(own_token, "one card") == [address]
    assert get_addresses(own_token, "none") == []
    get_addresses(admin_token, "one card", status=400)
    assert get_addresses(admin_token, "none") == []
    get_addresses(manager_token, "none", status=400)
    get_addresses(own_token, "one card", "hosts", status=400)
    viewer.post(SAVE_URL, {"name": "one card", "query": "state__exact=inactive", "shared": "on"})
    assert get_addresses(own_token, "one card") == [address], "the caller's own view comes first"
    assert get_addresses(admin_token, "one card") == [
        device.address for device in Device.objects.filter(state="inactive")
    ]


def test_a_changed_saved_view_has_another_etag_and_an_unusable_one_is_refused(operator: Client, fill: Fill) -> None:
    fill(3)
    owner = User.objects.get(pk=operator.session["_auth_user_id"])
    token = {"X-Auth-Token": ApiToken.create_with_secret("own", owner, ["admin"], "p1")}
    ask = lambda **headers: Client().get("/api/devices/?saved_view=mine", headers=token | headers)  # noqa: E731
    operator.post(SAVE_URL, {"name": "mine", "query": "state__exact=inactive"})
    tag = ask()["ETag"]
    assert ask(**{"If-None-Match": tag}).status_code == 304
    operator.post(SAVE_URL, {"name": "mine", "query": "state__exact=retired"})
    assert ask(**{"If-None-Match": tag}).json()["results"] == []
    for unusable in ("colour__exact=red", "state__exact=%00"):
        operator.post(SAVE_URL, {"name": "mine", "query": unusable})
        assert "the list cannot show it any more" in ask().json()["error"]["message"]


LISTED_ELSEWHERE = {"inbox"}
"""Collections whose model has a list in the console that shows other rows."""


def test_every_collection_that_the_console_lists_has_saved_views(operator: Client) -> None:
    owner = User.objects.get(pk=operator.session["_auth_user_id"])
    token = {"X-Auth-Token": ApiToken.create_with_secret("own", owner, ["admin"], "p1")}
    checked = set()
    for name, view in COLLECTIONS.items():
        model = view.queryset.model
        if name in LISTED_ELSEWHERE or not isinstance(admin.site._registry.get(model), ConsoleModelAdmin):
            continue
        checked.add(name)
        operator.post(reverse("list_keep", args=[model._meta.label_lower]), {"name": "none", "query": "q=no-such-row"})
        answer = Client().get(f"/api/{name}/", {"saved_view": "none"}, headers=token)
        assert (answer.status_code, answer.json().get("results")) == (200, []), (name, answer.content)
        answer = Client().get(f"/api/{name}/", {"saved_view": "another"}, headers=token)
        assert answer.status_code == 400 and "you have no saved view" in answer.json()["error"]["message"], name
    assert {"hosts", "devices", "requests", "events", "commands", "attachments", "agents", "rollouts"} < checked


def test_the_api_lists_the_events_of_a_saved_view(operator: Client, fill: Fill) -> None:
    fill(3)
    owner = User.objects.get(pk=operator.session["_auth_user_id"])
    token = {"X-Auth-Token": ApiToken.create_with_secret("own", owner, ["admin"], "p1")}
    device = Device.objects.first()
    with conductor.writing():
        conductor.record_event("device.missing", EventSource.PERSON, "olga", subject=(device.uuid, "H100"))
        conductor.record_event("device.back", EventSource.PERSON, "vera", subject=(device.uuid, "H100"))
    for query, filters, expected in (
        ("q=actor:olga&about=device", {}, ["device.missing"]),
        (f"q={str(device.uuid)[:9]}&last=hour", {}, ["device.back", "device.missing", "device.found"]),
        (f"q={str(device.uuid)[:9]}", {"actor": "vera"}, ["device.back"]),
        (f"q={str(device.uuid)[:9]} device b h100 ve cmp0 back", {"actor": "vera"}, []),
    ):
        operator.post(reverse("list_keep", args=["accelerators.event"]), {"name": "mine", "query": query})
        with CaptureQueriesContext(connection) as captured:
            answer = Client().get("/api/events/", {"saved_view": "mine"} | filters, headers=token)
        assert [row["action"] for row in answer.json()["results"]] == expected, query
        assert not any("IN (SELECT" in one["sql"] for one in captured), "its conditions are those of the query itself"
        assert len(captured) <= 5, query
