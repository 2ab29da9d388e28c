"""Test every list and page of the console: rows, constant numbers of statements, search, filters, and no writes."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from accelerators import conductor
from accelerators.models import AcceleratorRequest, AttachHandle, Deployable, Device, DeviceProfile, Event, Host, Intent
from accelerators.ui.changelist import BoundedPaginator
from agents.models import Agent, JoinToken
from cyborgweb.models import ApiToken
from tests.cyborgweb.console.conftest import Fill
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.statements import count_statements

pytestmark = pytest.mark.django_db

INVENTORY_MODELS = [Host, Device, Deployable, AttachHandle, AcceleratorRequest, Event, Intent, Agent]
SHOWN_MODELS = [*INVENTORY_MODELS, DeviceProfile, JoinToken, ApiToken]
LIST_BUDGET = 12


def admin_url(model: type, page: str, *args: object) -> str:
    return reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_{page}", args=args)


@pytest.mark.slow
def test_every_list_has_rows_and_each_row_has_a_page(operator: Client, fill: Fill) -> None:
    fill(2)
    for model in SHOWN_MODELS:
        answered = operator.get(admin_url(model, "changelist"))
        assert answered.status_code == 200, model
        assert answered.context["cl"].result_list, model
        for row in answered.context["cl"].result_list:
            assert operator.get(admin_url(model, "change", row.pk)).status_code == 200, model


@pytest.mark.slow
def test_P3_lists_take_the_same_statements_at_any_size(operator: Client, fill: Fill) -> None:
    fill(3)
    small = {model: count_statements(operator, admin_url(model, "changelist")) for model in SHOWN_MODELS}
    fill(57, first=1)  # two pages
    large = {model: count_statements(operator, admin_url(model, "changelist"), small[model]) for model in SHOWN_MODELS}
    assert large == small
    assert max(large.values()) <= LIST_BUDGET


@pytest.mark.slow
def test_P3_pages_of_devices_and_hosts_take_at_most_twelve_statements_at_any_size(operator: Client, fill: Fill) -> None:
    small = fill(3)[0]
    wide = get_or_create_host("wide")
    apply_report(wide, make_driver_report(*(make_card(n, handles=8) for n in range(200))))
    for model, pages in ((Host, (small, wide)), (Device, (small.devices.first(), wide.devices.first()))):
        for row in pages:
            assert count_statements(operator, admin_url(model, "change", row.pk), LIST_BUDGET) <= LIST_BUDGET


@pytest.mark.parametrize(
    "term", ["0000:02:00.0", "02:00", "uuid", "cmp0.exa", "1044 0000:02:00.0"], ids=lambda term: term.replace(":", "-")
)
def test_devices_are_found_by_parts_of_address_uuid_host_and_name(term: str, operator: Client, fill: Fill) -> None:
    fill(13)
    wanted = Device.objects.get(address="0000:02:00.0", host__name="cmp0.example")
    asked = str(wanted.uuid)[:13] if term == "uuid" else term
    found = operator.get(admin_url(Device, "changelist"), {"q": asked}).context["cl"].result_list
    assert wanted in found
    assert len(found) < 13


@pytest.mark.parametrize(
    ("term", "found"),
    [
        ('"rack two"', {"shelf of rack two"}),
        ("rack two", {"shelf of rack two", "two racks"}),
        ('two "of rack"', {"shelf of rack two"}),
    ],
)
def test_a_phrase_in_quotation_marks_is_searched_as_a_whole(term: str, found: set[str], operator: Client) -> None:
    cards = [make_card(n, model=model) for n, model in enumerate(("shelf of rack two", "two racks", "shelf one"))]
    apply_report(get_or_create_host(), make_driver_report(*cards))
    listed = operator.get(admin_url(Device, "changelist"), {"q": term}).context["cl"].result_list
    assert {device.model for device in listed} == found


@pytest.mark.parametrize("model", [Device, Deployable, AttachHandle])
def test_searches_by_uuid_address_and_host_read_no_whole_table(model: type, operator: Client, fill: Fill) -> None:
    fill(13)
    device = Device.objects.get(address="0000:02:00.0", host__name="cmp0.example")
    row = {Device: device, Deployable: device.deployables.first()}.get(model) or AttachHandle.objects.first()
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
    for term in (str(row.uuid)[:9], "02:00.0", "cmp0.exa"):
        with CaptureQueriesContext(connection) as captured:
            found = operator.get(admin_url(model, "changelist"), {"q": term}).context["cl"]
        assert found.result_count and found.result_count < model.objects.count(), term
        searches = [one["sql"] for one in captured if f'FROM "{model._meta.db_table}"' in one["sql"]]
        assert searches and not any("UPPER(" in one for one in searches), searches
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN {searches[0]}")
            plan = "\n".join(line for (line,) in cursor.fetchall())
        assert "Seq Scan" not in plan, (term, plan)


def test_a_serial_number_is_found_by_its_beginning_and_otherwise_by_a_part(operator: Client) -> None:
    cards = make_card(1, key="serial:AB12XY"), make_card(2, key="serial:XY3"), make_card(3)
    apply_report(get_or_create_host(), make_driver_report(*cards))
    for term, keys in (("AB12", ["serial:AB12XY"]), ("XY", ["serial:XY3"]), ("12X", ["serial:AB12XY"])):
        found = operator.get(admin_url(Device, "changelist"), {"q": term}).context["cl"].result_list
        assert [device.key for device in found] == keys, term


def test_events_and_handles_are_found_by_uuid(operator: Client, fill: Fill) -> None:
    fill(3)
    device = Device.objects.first()
    found = operator.get(admin_url(Event, "changelist"), {"q": str(device.uuid)}).context["cl"].result_list
    assert [event.subject for event in found] == [device.uuid]
    handle = AttachHandle.objects.first()
    assert list(
        operator.get(admin_url(AttachHandle, "changelist"), {"q": str(handle.uuid)[:9]}).context["cl"].result_list
    ) == [handle]


def test_stale_devices_can_be_filtered_and_filters_are_shown_as_chips(operator: Client, fill: Fill) -> None:
    first, second = fill(13)
    conductor.set_hosts_stale_since([second.id], since=datetime.now(UTC))
    with conductor.writing():
        Device.objects.filter(host=first, address="0000:05:00.0").update(driver="slow_driver")
    asked = operator.get(admin_url(Device, "changelist"), {"stale": "yes"})
    assert {device.host_id for device in asked.context["cl"].result_list} == {first.id, second.id}
    assert asked.context["cl"].result_count == 4
    page = asked.content.decode()
    assert "it hung for 20 s" in page
    assert f"the agent of {second.name} has sent no heartbeat" in page
    assert [chip["value"] for chip in asked.context["cl"].applied_filters()] == ["stale"]
    assert operator.get(admin_url(Device, "changelist"), {"stale": "no"}).context["cl"].result_count == 9


def test_handles_can_be_filtered_by_held_and_free(operator: Client, fill: Fill) -> None:
    fill(3)
    held = AttachHandle.objects.filter(request__isnull=False).count()
    for use, number in (("held", held), ("free", AttachHandle.objects.count() - held)):
        assert operator.get(admin_url(AttachHandle, "changelist"), {"use": use}).context["cl"].result_count == number
    assert operator.get(admin_url(Deployable, "changelist"), {"presence": "missing"}).context["cl"].result_count == 0


def test_pages_of_devices_and_hosts_can_be_opened_by_uuid_and_by_name(operator: Client, fill: Fill) -> None:
    host = fill(3)[0]
    device = Device.objects.first()
    page = operator.get(admin_url(Device, "change", device.uuid)).content.decode()
    request = AttachHandle.objects.filter(deployable__device=device, request__isnull=False).first().request
    for fact in (device.state_reason, device.address, str(request.uuid), "CUSTOM_TEST", "device.found"):
        assert fact in page
    page = operator.get(admin_url(Host, "change", host.name)).content.decode()
    for fact in ("slow_driver", "it hung for 20 s", "0000:02:00.0", "device.found", "b1"):
        assert fact in page


@pytest.mark.slow
def test_texts_from_agents_are_escaped_on_every_page(operator: Client) -> None:
    host = get_or_create_host()
    evil = "<script>alert(1)</script>"
    apply_report(
        host,
        make_driver_report(make_card(1, model=evil, status="failed", status_reason=evil)),
        make_driver_report(driver="bad", error=evil),
    )
    device = Device.objects.get()
    paths = [
        admin_url(Device, "changelist"),
        admin_url(Device, "change", device.pk),
        admin_url(Host, "change", host.pk),
        admin_url(Event, "changelist"),
    ]
    for path in [*paths, admin_url(Host, "changelist"), reverse("admin:index")]:
        assert evil not in operator.get(path).content.decode()


@pytest.mark.slow
def test_nothing_of_the_inventory_can_be_written(operator: Client, fill: Fill) -> None:
    fill(3)
    for model in INVENTORY_MODELS:
        row = model.objects.first()
        assert operator.post(admin_url(model, "add"), {}).status_code == 403, model
        assert operator.post(admin_url(model, "change", row.pk), {"state": "ready"}).status_code == 403, model
        assert operator.post(admin_url(model, "delete", row.pk), {"post": "yes"}).status_code == 403, model
        operator.post(
            admin_url(model, "changelist"), {"action": "delete_selected", "_selected_action": [row.pk], "post": "yes"}
        )
        assert model.objects.filter(pk=row.pk).exists(), model


@pytest.mark.parametrize("model", [JoinToken, ApiToken], ids=lambda model: model.__name__)
def test_tokens_show_no_hash_and_cannot_be_changed(model: type, operator: Client, fill: Fill) -> None:
    fill(3)
    row = model.objects.first()
    digest = row.secret_hash if model is JoinToken else row.token_hash
    for path in (admin_url(model, "changelist"), admin_url(model, "change", row.pk)):
        assert digest not in operator.get(path).content.decode()
    if model is ApiToken:
        assert operator.post(admin_url(model, "add"), {}).status_code == 403
    assert operator.post(admin_url(model, "change", row.pk), {}).status_code == 403
    assert operator.post(admin_url(model, "delete", row.pk), {"post": "yes"}).status_code == 302
    assert not model.objects.filter(pk=row.pk).exists()


@pytest.mark.parametrize("model", SHOWN_MODELS, ids=lambda model: model.__name__)
def test_anonymous_visitors_are_redirected_to_the_login(model: type, client: Client) -> None:
    answered = client.get(admin_url(model, "changelist"))
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
    page = operator.get(admin_url(Event, "changelist"))
    assert "about " in page.content.decode()
    assert page.context["cl"].result_list
    assert BoundedPaginator(Event.objects.filter(source="agent"), 50).count == 5


def test_users_and_groups_have_lists_and_add_forms(operator: Client) -> None:
    assert operator.get(reverse("admin:auth_user_changelist")).status_code == 200
    assert operator.get(reverse("admin:auth_user_add")).status_code == 200
    assert operator.get(reverse("admin:auth_group_add")).status_code == 200
