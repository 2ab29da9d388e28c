"""Every list and every page: shown with rows, at constant cost, found by what people paste, written by nobody."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.db import connection
from django.test import Client
from django.urls import reverse

from accelerators import conductor
from accelerators.models import AcceleratorRequest, AttachHandle, Deployable, Device, DeviceProfile, Event, Host, Intent
from accelerators.ui.changelist import BoundedPaginator
from agents.models import Agent, JoinToken
from cyborgweb.models import ApiToken
from tests.console.conftest import Fill
from tests.support.reports import a_host, answer, apply, card
from tests.support.statements import statements

pytestmark = pytest.mark.django_db

INVENTORY = [Host, Device, Deployable, AttachHandle, AcceleratorRequest, DeviceProfile, Event, Intent, Agent]
SHOWN = [*INVENTORY, JoinToken, ApiToken]
LIST_BUDGET = 12


def url(model: type, page: str, *args: object) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}", args=args)


@pytest.mark.parametrize("model", SHOWN, ids=lambda model: model.__name__)
def test_every_list_and_page_answers_with_rows(model: type, operator: Client, fill: Fill) -> None:
    fill(3)
    answered = operator.get(url(model, "changelist"))
    assert answered.status_code == 200
    assert answered.context["cl"].result_list
    for row in answered.context["cl"].result_list:
        assert operator.get(url(model, "change", row.pk)).status_code == 200


def test_P3_lists_cost_the_same_at_any_size(operator: Client, fill: Fill) -> None:
    fill(3)
    small = {model: statements(operator, url(model, "changelist")) for model in SHOWN}
    fill(57, first=1)  # two pages
    large = {model: statements(operator, url(model, "changelist")) for model in SHOWN}
    assert large == small
    assert max(large.values()) <= LIST_BUDGET


def test_P3_pages_of_a_device_and_of_a_host_cost_the_same_at_any_size(operator: Client, fill: Fill) -> None:
    small = fill(3)[0]
    wide = a_host("wide")
    apply(wide, answer(*(card(n, handles=8) for n in range(200))))
    for model, pages in ((Host, (small, wide)), (Device, (small.devices.first(), wide.devices.first()))):
        for row in pages:
            assert statements(operator, url(model, "change", row.pk)) <= LIST_BUDGET


@pytest.mark.parametrize(
    "term", ["0000:02:00.0", "02:00", "uuid", "cmp0.exa", "1044 0000:02:00.0"], ids=lambda term: term.replace(":", "-")
)
def test_devices_are_found_by_what_people_paste(term: str, operator: Client, fill: Fill) -> None:
    fill(13)
    wanted = Device.objects.get(address="0000:02:00.0", host__name="cmp0.example")
    asked = str(wanted.uuid)[:13] if term == "uuid" else term
    found = operator.get(url(Device, "changelist"), {"q": asked}).context["cl"].result_list
    assert wanted in found
    assert len(found) < 13


def test_events_and_handles_are_found_by_uuid(operator: Client, fill: Fill) -> None:
    fill(3)
    device = Device.objects.first()
    found = operator.get(url(Event, "changelist"), {"q": str(device.uuid)}).context["cl"].result_list
    assert [event.subject for event in found] == [device.uuid]
    handle = AttachHandle.objects.first()
    assert list(
        operator.get(url(AttachHandle, "changelist"), {"q": str(handle.uuid)[:9]}).context["cl"].result_list
    ) == [handle]


def test_filters_find_stale_devices_and_are_shown_as_chips(operator: Client, fill: Fill) -> None:
    first, second = fill(13)
    conductor.set_hosts_stale_since([second.id], since=datetime.now(UTC))
    with conductor.writing():
        Device.objects.filter(host=first, address="0000:05:00.0").update(driver="slow_driver")
    asked = operator.get(url(Device, "changelist"), {"stale": "yes"})
    assert {device.host_id for device in asked.context["cl"].result_list} == {first.id, second.id}
    assert asked.context["cl"].result_count == 4
    page = asked.content.decode()
    assert "it hung for 20 s" in page
    assert f"the agent of {second.name} has sent no heartbeat" in page
    assert [chip["value"] for chip in asked.context["cl"].applied_filters()] == ["stale"]
    assert operator.get(url(Device, "changelist"), {"stale": "no"}).context["cl"].result_count == 9


def test_handles_are_filtered_by_who_holds_them(operator: Client, fill: Fill) -> None:
    fill(3)
    held = AttachHandle.objects.filter(request__isnull=False).count()
    for use, number in (("held", held), ("free", AttachHandle.objects.count() - held)):
        assert operator.get(url(AttachHandle, "changelist"), {"use": use}).context["cl"].result_count == number
    assert operator.get(url(Deployable, "changelist"), {"presence": "missing"}).context["cl"].result_count == 0


def test_the_pages_of_devices_and_hosts_answer_to_uuid_and_name(operator: Client, fill: Fill) -> None:
    host = fill(3)[0]
    device = Device.objects.first()
    page = operator.get(url(Device, "change", device.uuid)).content.decode()
    request = AttachHandle.objects.filter(deployable__device=device, request__isnull=False).first().request
    for fact in (device.state_reason, device.address, str(request.uuid), "CUSTOM_TEST", "device.found"):
        assert fact in page
    page = operator.get(url(Host, "change", host.name)).content.decode()
    for fact in ("slow_driver", "it hung for 20 s", "0000:02:00.0", "device.found", "b1"):
        assert fact in page


def test_what_agents_say_is_text_not_markup(operator: Client) -> None:
    host = a_host()
    evil = "<script>alert(1)</script>"
    apply(host, answer(card(1, model=evil, status="failed", status_reason=evil)), answer(driver="bad", error=evil))
    device = Device.objects.get()
    paths = [
        url(Device, "changelist"),
        url(Device, "change", device.pk),
        url(Host, "change", host.pk),
        url(Event, "changelist"),
    ]
    for path in [*paths, url(Host, "changelist"), reverse("admin:index")]:
        assert evil not in operator.get(path).content.decode()


@pytest.mark.parametrize("model", INVENTORY, ids=lambda model: model.__name__)
def test_nothing_of_the_inventory_can_be_written(model: type, operator: Client, fill: Fill) -> None:
    fill(3)
    row = model.objects.first()
    assert operator.post(url(model, "add"), {}).status_code == 403
    assert operator.post(url(model, "change", row.pk), {"state": "ready"}).status_code == 403
    assert operator.post(url(model, "delete", row.pk), {"post": "yes"}).status_code == 403
    operator.post(url(model, "changelist"), {"action": "delete_selected", "_selected_action": [row.pk], "post": "yes"})
    assert model.objects.filter(pk=row.pk).exists()


@pytest.mark.parametrize("model", [JoinToken, ApiToken], ids=lambda model: model.__name__)
def test_tokens_show_no_hash_and_can_only_be_withdrawn(model: type, operator: Client, fill: Fill) -> None:
    fill(3)
    row = model.objects.first()
    digest = row.secret_hash if model is JoinToken else row.token_hash
    for path in (url(model, "changelist"), url(model, "change", row.pk)):
        assert digest not in operator.get(path).content.decode()
    assert operator.post(url(model, "add"), {}).status_code == 403
    assert operator.post(url(model, "change", row.pk), {}).status_code == 403
    assert operator.post(url(model, "delete", row.pk), {"post": "yes"}).status_code == 302
    assert not model.objects.filter(pk=row.pk).exists()


@pytest.mark.parametrize("model", SHOWN, ids=lambda model: model.__name__)
def test_the_anonymous_are_sent_to_the_login(model: type, client: Client) -> None:
    answered = client.get(url(model, "changelist"))
    assert answered.status_code == 302
    assert answered["location"].startswith(reverse("admin:login"))


def test_long_lists_of_events_are_estimated_and_short_ones_counted(
    operator: Client, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(13)
    exact = Event.objects.count()
    assert BoundedPaginator(Event.objects.all(), 50).count == exact
    monkeypatch.setattr(BoundedPaginator, "EXACT", 5)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE accelerators_event")
    assert BoundedPaginator(Event.objects.all(), 50).count >= 5
    page = operator.get(url(Event, "changelist"))
    assert "about " in page.content.decode()
    assert page.context["cl"].result_list
    assert BoundedPaginator(Event.objects.filter(source="agent"), 50).count == 5


def test_users_and_groups_are_shown_and_can_be_made(operator: Client) -> None:
    assert operator.get(reverse("admin:auth_user_changelist")).status_code == 200
    assert operator.get(reverse("admin:auth_user_add")).status_code == 200
    assert operator.get(reverse("admin:auth_group_add")).status_code == 200
