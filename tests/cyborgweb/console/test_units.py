"""Test changing the number of units in the console: of one device, of many devices of several backends, and the
permissions for it."""

from __future__ import annotations

import html
import re

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from accelerators import conductor
from accelerators.models import Bulk, Command, Device, Event
from accelerators.ui import badges
from accelerators.ui.extensions import DENIAL_REASON
from tests.accelerators.api.own.test_units import (
    answer_and_settle,
    build_divisible_card,
    create_bound_request,
    get_device,
    report_cards,
    report_two_hosts,
)

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("agents_need_not_be_up")]

UNITS_URL = "/admin/accelerators/device/units/"


def get_page_text(client: Client, address: str, **fields: object) -> str:
    """Return the text of the page after all redirects, without tags."""
    response = client.post(address, fields, follow=True) if fields else client.get(address, follow=True)
    assert response.status_code == 200
    return html.unescape(re.sub(r"<[^>]*>|\s+", " ", response.content.decode()))


def confirm_newest_draft(client: Client, **fields: object) -> str:
    """Confirm the bulk action that was made last, and return the text of its page."""
    return get_page_text(client, badges.page_url("bulk", Bulk.objects.latest("id").uuid), do="confirm", **fields)


def device_page(row: Device) -> str:
    return reverse("admin:accelerators_device_change", args=[row.pk])


@pytest.mark.slow
def test_a_divisible_device_links_to_the_units_page_and_can_be_divided_there(operator: Client) -> None:
    report_cards(build_divisible_card(1, 2), build_divisible_card(2, 2, sized_by=""))
    assert (
        f'href="{UNITS_URL}?device={get_device(1).uuid}"' in operator.get(device_page(get_device(1))).content.decode()
    )
    assert UNITS_URL not in operator.get(device_page(get_device(2))).content.decode()
    assert "Units now 1044 0000:01:00.0" in re.sub(
        " +", " ", get_page_text(operator, f"{UNITS_URL}?device={get_device(1).uuid}")
    )
    said = {"device": [str(get_device(1).uuid)], "generation": "0", "count": "3", "layout": "bind=x", "reason": "r"}
    shown = get_page_text(operator, UNITS_URL, change="more", **said)
    assert "Add 3 units: 1 device?" in shown and "is divided again with bind=x, vfs=5; it has 2 units now" in shown
    assert not Command.objects.exists()
    confirm_newest_draft(operator, reason="r")
    command = Command.objects.get()
    assert (command.arguments["layout"], command.reason, command.actor) == ({"bind": "x", "vfs": "5"}, "r", "olga")
    assert Event.objects.get(subject=command.uuid).source == "person"
    answer_and_settle(command, "failed")
    refused = get_page_text(operator, UNITS_URL, change="fewer", **said)
    assert "Nothing would be done" in refused and "is at generation 1 now, not 0" in refused
    assert "is at generation 1 now, not 0" in confirm_newest_draft(operator)
    assert "Remove 3 units: 1 device?" in get_page_text(
        operator, badges.page_url("bulk", Bulk.objects.latest("id").uuid), do="again"
    )
    assert Command.objects.count() == 1
    confirm_newest_draft(operator)  # a retry is of the device as it is now, so it is not refused for its generation
    assert "it cannot be changed to -1" in Bulk.objects.latest("id").items.get().text


@pytest.mark.slow
def test_devices_of_several_backends_are_divided_after_a_preview_and_held_ones_refused(operator: Client) -> None:
    report_cards(
        build_divisible_card(1, 4, "a"),
        build_divisible_card(2, 4, "b"),
        build_divisible_card(3, 4, "b"),
        build_divisible_card(4, 0, "b", sized_by=""),
    )
    held = create_bound_request(get_device(3).deployables.get().attach_handles.first())
    chosen = {"action": "change_units", "_selected_action": [one.pk for one in Device.objects.all()]}
    asked = operator.post("/admin/accelerators/device/", chosen, follow=True).content.decode()
    (draft,) = re.findall(r'name="draft" value="([^"]+)"', asked)
    assert "Units of 3 devices" in asked and "bind=…" in asked
    assert "No change is chosen" in get_page_text(operator, badges.page_url("bulk", draft))
    said = get_page_text(operator, UNITS_URL, change="none", draft=draft, reason="new layout")
    assert "Remove all units: 3 devices?" in said and said.count("vfs=0") == 3, "once in sum, and for each device"
    assert str(held.uuid) in said and "is held: it cannot be partitioned" in said
    assert not Command.objects.exists()
    page = badges.page_url("bulk", Bulk.objects.latest("id").uuid)
    assert 'value="new layout"' in operator.get(page).content.decode()
    said = get_page_text(operator, page, do="confirm", reason="new layout")
    assert f"request {held.uuid}" in said and "Retry the 1 failed device" in said
    assert {(one.arguments["layout"]["vfs"], one.reason) for one in Command.objects.all()} == {("0", "new layout")}
    assert Command.objects.count() == 2
    with conductor.writing():
        held.delete()
    said = get_page_text(operator, page, do="again")
    assert "Remove all units: 1 device?" in said
    get_page_text(operator, badges.page_url("bulk", Bulk.objects.first().uuid), do="confirm")
    assert Command.objects.count() == 3


def find_open_mark(client: Client, address: str) -> list[str]:
    """Return the value of the live part of a page; when it changes, the browser reads the whole page again."""
    return re.findall(r'data-open="([^"]*)"', client.get(address).content.decode())


@pytest.mark.parametrize("number", [1, 5])
def test_the_rows_of_a_bulk_action_are_read_again_in_place_while_its_commands_go_on(
    operator: Client, number: int
) -> None:
    report_cards(*(build_divisible_card(n, 2) for n in range(1, number + 1)))
    uuids = [str(uuid) for uuid in Device.objects.values_list("uuid", flat=True)]
    get_page_text(operator, UNITS_URL, change="more", count="1", device=uuids)
    confirm_newest_draft(operator)
    bulk = Bulk.objects.get()
    page, rows_url = badges.page_url("bulk", bulk.uuid), reverse("admin:accelerators_bulk_rows", args=[bulk.pk])

    def find_rows_address() -> str:
        found = re.search(rf'data-live="({rows_url}[^"]*)"', operator.get(page).content.decode())
        return found[1] if found else ""

    polled = find_rows_address()
    assert polled.count(",") == number - 1
    before = operator.get(polled)
    assert before.content.decode().count("queued") == number and polled in before.content.decode()
    first = Command.objects.order_by("id")[0]
    answer_and_settle(first, "failed", "no room")
    with CaptureQueriesContext(connection) as run:
        now = operator.get(polled)
    assert sum("accelerators_bulkitem" in one["sql"] for one in run) == 1
    assert len(run) <= 4, "the session, the user, the bulk action, and one for the rows"
    assert ("no room" in now.content.decode(), now.content.decode().count("queued")) == (True, number - 1)
    for command in Command.objects.order_by("id")[1:]:
        answer_and_settle(command)
    assert not find_rows_address()
    for wrong in ("", "?items=", "?items=x", f"?items={'9' * 19}"):
        assert operator.get(rows_url + wrong).status_code == 404
    other = reverse("admin:accelerators_bulk_rows", args=[bulk.pk + 1])
    assert operator.get(f"{other}?items=1").status_code == 404
    assert "<tr><td>" not in operator.get(f"{rows_url}?items=0").content.decode()


def test_the_page_of_a_change_of_units_shows_how_the_command_of_each_device_ended(operator: Client) -> None:
    report_cards(*(build_divisible_card(n, 2) for n in range(1, 4)))
    uuids = [str(uuid) for uuid in Device.objects.values_list("uuid", flat=True)]
    get_page_text(operator, UNITS_URL, change="more", count="1", device=uuids)
    said = confirm_newest_draft(operator)
    bulk = Bulk.objects.get()
    page, polled = badges.page_url("bulk", bulk.uuid), reverse("admin:accelerators_bulk_now", args=[bulk.pk])
    assert "3 queued" in said and "have not ended yet" in said
    assert f'data-live="{polled}"' in operator.get(page).content.decode()
    first, second, third = Command.objects.order_by("id")
    answer_and_settle(first)
    assert find_open_mark(operator, polled) == find_open_mark(operator, page) == ["done"]
    answer_and_settle(second, "failed", "no room")
    counted = get_page_text(operator, polled).partition("Commands:")[2]
    assert re.findall(r"\d \w+", counted) == ["1 queued", "1 succeeded", "1 failed"]
    assert find_open_mark(operator, polled) == ["done"], "the whole page is not read again for each command"
    answer_and_settle(third)
    assert find_open_mark(operator, polled) == [], "the page is read again when the last command has ended"
    with CaptureQueriesContext(connection) as run:
        response = operator.get(page)
    assert len(run) <= 12 and "data-live" not in response.content.decode()
    said = get_page_text(operator, page)
    assert "2 succeeded" in said and "1 failed" in said and "have not ended yet" not in said
    assert "Retry the 1 failed device" in said
    rows = [
        (re.sub("<[^>]*>", "", outcome), re.sub("<[^>]*>", " ", text))
        for *_, outcome, _, text in response.context["rows"]
    ]
    assert "failed" in rows[0][0] and "no room" in rows[0][1], "what has failed comes first"
    assert ["succeeded" in outcome for outcome, _ in rows] == [False, True, True]
    items = reverse("admin:accelerators_bulkitem_changelist")
    listed = get_page_text(operator, items)
    assert listed.count("succeeded") == 2 and "no room" in listed
    exported = operator.get(reverse("admin:accelerators_bulkitem_export", args=["csv"]))
    text = b"".join(exported.streaming_content).decode()  # type: ignore[attr-defined]
    assert text.count('"succeeded"') == 4 and '"moved","failed","no room"' in text


@pytest.mark.slow
def test_units_on_several_hosts_are_changed_only_after_their_number_was_typed(operator: Client) -> None:
    report_two_hosts()
    uuids = [str(uuid) for uuid in Device.objects.values_list("uuid", flat=True)]
    assert "The devices are on 2 hosts." in get_page_text(operator, UNITS_URL, change="more", count="1", device=uuids)
    page = badges.page_url("bulk", Bulk.objects.get().uuid)
    assert "Nothing was done" in get_page_text(operator, page, do="confirm")
    assert not Command.objects.exists()
    get_page_text(operator, page, do="confirm", typed="2")
    assert sorted(command.arguments["layout"]["vfs"] for command in Command.objects.all()) == ["3", "5"]


INVALID_CHANGES = (
    ({"change": "more", "count": "0", "layout": "bind=x"}, "Enter how many units to add or to remove"),
    ({"change": "more", "count": "x"}, "Enter how many units to add or to remove"),
    ({"change": "double", "count": "1"}, "Enter how many units to add or to remove"),
    ({"change": "more", "count": "1", "layout": "nonsense"}, "words of the driver"),
    ({"change": "more", "count": "1", "reason": "x" * 501}, "A reason is at most"),
    ({"change": "more", "count": "1", "device": ["x"]}, "Select devices"),
)


def test_invalid_changes_of_units_are_refused_and_order_nothing(operator: Client) -> None:
    report_cards(build_divisible_card(1, 2))
    for said, says in INVALID_CHANGES:
        assert says in get_page_text(operator, UNITS_URL, **{"device": [str(get_device(1).uuid)]} | said)
    assert not Command.objects.exists()


def test_a_selection_of_devices_can_be_changed_only_by_whoever_made_it(operator: Client, client: Client) -> None:
    report_cards(build_divisible_card(1, 2))
    chosen = {"action": "change_units", "_selected_action": [get_device(1).pk]}
    page = operator.post("/admin/accelerators/device/", chosen).headers["Location"]
    assert "Units of 1044" in get_page_text(operator, page)
    client.force_login(User.objects.create_superuser("otto"))
    assert "Select devices on which the number of units can be changed." in get_page_text(client, page)


def test_viewers_cannot_change_units(client: Client) -> None:
    report_cards(build_divisible_card(1, 2))
    looker = User.objects.create(username="lou", is_staff=True)
    looker.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
    client.force_login(looker)
    assert UNITS_URL not in client.get(device_page(get_device(1))).content.decode()
    said = {"device": [str(get_device(1).uuid)], "change": "more", "count": "1"}
    assert [client.post(UNITS_URL, said).status_code, client.get(UNITS_URL).status_code] == [403, 403]
    assert not Command.objects.exists()


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [("cyborg:accelerator:create", ["more"]), ("cyborg:accelerator:delete", ["fewer", "none"]), ("", [])],
)
def test_adding_and_removing_units_need_the_same_rules_as_in_the_api(
    operator: Client, rule: str, allowed: list[str]
) -> None:
    report_cards(*(build_divisible_card(n, 4) for n in range(1, 4)))
    chosen = {"action": "change_units", "_selected_action": [get_device(1).pk]}
    with DENIAL_REASON.replaced("roles", lambda request, asked, permission: "" if asked == rule else "not you"):
        page = operator.get(UNITS_URL, {"device": str(get_device(1).uuid)})
        assert re.findall(r'name="change" value="(\w+)"', page.content.decode()) == allowed
        assert page.status_code == (200 if rule else 403)
        by_action = operator.post("/admin/accelerators/device/", chosen, follow=True).content.decode()
        assert re.findall(r'name="change" value="(\w+)"', by_action) == allowed
        for number, change in enumerate(("more", "fewer", "none"), 1):
            said = {"device": [str(get_device(number).uuid)], "change": change, "count": "1"}
            assert operator.post(UNITS_URL, said).status_code == (302 if change in allowed else 403)
        drafts = Bulk.objects.exclude(arguments__units=0)
        for draft in drafts:
            operator.post(badges.page_url("bulk", draft.uuid), {"do": "confirm"})
    assert Command.objects.count() == len(drafts) == len(allowed)


def test_the_units_page_takes_the_same_statements_for_many_devices(operator: Client) -> None:
    report_cards(*(build_divisible_card(n, 4) for n in range(1, 41)))
    uuids = [str(uuid) for uuid in Device.objects.values_list("uuid", flat=True)]
    counts = []
    for chosen in (uuids[:1], uuids):
        with CaptureQueriesContext(
            connection,
        ) as run:
            operator.get(UNITS_URL, {"device": chosen})
        counts.append(len(run))
    assert counts[0] == counts[1] <= 10
