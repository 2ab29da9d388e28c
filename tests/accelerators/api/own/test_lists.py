"""Test every list of /api/: number of statements, pages, filters, orders, chosen fields and ETags."""

from __future__ import annotations

import json
import re
from functools import partial
from urllib.parse import quote, urlencode

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test.utils import CaptureQueriesContext

from accelerators import conductor
from accelerators.domain.states import EventSource
from accelerators.models import Device, Event, Host
from cyborgweb.models import SavedView
from tests.accelerators.api.own.conftest import INSTANCES, Ask, Fill, get_error_message, get_results
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.statements import count_call_statements

pytestmark = pytest.mark.django_db

COLLECTIONS = (
    "hosts",
    "agents",
    "backends",
    "services",
    "devices",
    "deployables",
    "attach_handles",
    "accelerators",
    "requests",
    "profiles",
    "commands",
    "images",
    "events",
    "seals",
    "discrepancies",
    "nova_endpoints",
    "drivers",
    "rollouts",
)
ORDERING_BY_COLLECTION = {
    "hosts": "name",
    "agents": "host",
    "devices": "state",
    "profiles": "name",
    "events": "at",
    "seals": "number",
    "backends": "host",
    "services": "host",
    "drivers": "host",
}
NAMED_BY_UUID = (
    "hosts",
    "devices",
    "deployables",
    "attach_handles",
    "accelerators",
    "attachments",
    "requests",
    "profiles",
    "commands",
    "images",
    "rollouts",
)
FILTERS = [
    ("hosts", "name=cmp1", 1),
    ("hosts", "stale=true", 0),
    ("hosts", "stale=false", 2),
    ("agents", "state=up", 2),
    ("agents", "state=down&host=cmp1", 0),
    ("devices", "host=cmp1", 5),
    ("devices", "state=ready&state=inactive", 15),
    ("devices", "state=ready&type=FPGA&vendor=1af4&driver=pci_driver&status=ok", 2),
    ("devices", "stale=true", 0),
    ("devices", "status=degraded", 0),
    ("devices", "address=0000:01:00.0", 2),
    ("devices", "serial=0000:01:00.0", 0),
    ("backends", "failing=false", 2),
    ("backends", "failing=true", 0),
    ("deployables", "host=cmp0&missing=false", 10),
    ("attach_handles", "held=true", 10),
    ("attach_handles", "held=true&project=p2", 5),
    ("attach_handles", f"instance={INSTANCES[0]}", 1),
    ("attach_handles", "type=PCI&host=cmp1&missing=true", 0),
    ("accelerators", "driver=pci_driver&host=cmp0", 7),
    ("accelerators", f"instance={INSTANCES[1]}&project=p2", 1),
    ("requests", "state=Bound&profile=small&host=cmp1", 3),
    ("profiles", "name=small&used=true", 1),
    ("events", "action=device.found&host=cmp1", 5),
    ("discrepancies", "kind=unattached&host=cmp1", 1),
    ("drivers", "driver=pci_driver&state=ok&drifts=false", 2),
    ("rollouts", "op=install&driver=far_driver&state=running", 1),
    ("events", "actor=cmp1&subject_type=device", 5),
    ("events", "actor=cmp", 0),
    ("events", "since=2100-01-01T00:00:00Z", 0),
    ("events", "until=2100-01-01T00:00:00Z&source=agent&limit=1", 1),
]


@pytest.mark.slow
def test_p3_a_list_takes_at_most_five_statements_at_any_size(ask: Ask, fill: Fill) -> None:
    fill(3)
    ask("/api/hosts/")
    few = count_list_statements(ask)
    fill(40, first=1)
    assert few == count_list_statements(ask, "?limit=500")
    assert max(few.values()) <= 5, few


def count_list_statements(ask: Ask, query: str = "") -> dict[str, int]:
    """Return how many statements each list costs; fail if one of them is empty."""

    def fetch(collection: str) -> None:
        assert get_results(ask(f"/api/{collection}/{query}"))

    return {collection: count_call_statements(partial(fetch, collection)) for collection in COLLECTIONS}


@pytest.mark.slow
def test_an_element_is_the_same_in_its_list_and_in_its_detail(ask: Ask, fill: Fill) -> None:
    fill(2)
    for collection in COLLECTIONS:
        for element in get_results(ask(f"/api/{collection}/")):
            alone = json.loads(ask(element["url"].removeprefix("http://testserver")).content)
            for inner in ("timeline", "steps"):
                alone.pop(inner, None)
            assert alone == element


@pytest.mark.slow
def test_pages_cover_each_list_once_in_both_directions(ask: Ask, fill: Fill) -> None:
    fill(6)
    for collection in COLLECTIONS:
        ordering = ORDERING_BY_COLLECTION.get(collection, "-created")
        for sign in ("", "-"):
            _assert_pages_cover_the_list(
                ask, f"/api/{collection}/?fields=url&ordering={(sign + ordering).removeprefix('--')}"
            )


def _assert_pages_cover_the_list(ask: Ask, query: str) -> None:
    whole = [e["url"] for e in get_results(ask(f"{query}&limit=500"))]
    forth, pages = [], 0
    path = f"{query}&limit=3"
    while path:
        page = json.loads(ask(path).content)
        pages, last, path = pages + 1, page, page["next"]
        forth += [e["url"] for e in page["results"]]
    assert forth == whole
    assert pages == -(-len(whole) // 3)
    back, page = [[e["url"] for e in last["results"]]], last
    while page["previous"]:
        page = json.loads(ask(page["previous"]).content)
        back.insert(0, [e["url"] for e in page["results"]])
    assert [url for urls in back for url in urls] == whole


@pytest.mark.parametrize("read", [3, 1000])
@pytest.mark.slow
def test_pages_of_events_with_frequent_words_cover_the_list_and_read_a_limited_number_of_events(
    read: int, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerators.ui.first_events.MAX_READ_EVENTS", read)
    actors = ["old"] * 5 + ["rare", "other"] * 4 + ["other"] * 5 + ["new"] * 4
    for actor in actors:
        conductor.record_event("profile.created", EventSource.API, actor, subject=(None, "p"))
    conductor.record_event("profile.deleted", EventSource.API, "new", subject=(None, "p"))
    conductor.record_event("profiles.counted", EventSource.SYSTEM, "new", subject=(None, "p"))
    counts = {"actor=rare&action=profile.created": 4, "actor=old": 5, "action=profile.created": 22}
    counts |= {"subject_type=profile": 23, "subject_type=profiles": 1}
    assert not get_results(ask("/api/events/?subject_type=profil")) + get_results(ask("/api/events/?subject_type=p+x"))
    for query, count in counts.items():
        for ordering in ("at", "-at"):
            path = f"/api/events/?fields=url&{query}&ordering={ordering}"
            assert len(get_results(ask(path))) == count
            _assert_pages_cover_the_list(ask, path)
    with CaptureQueriesContext(connection) as captured:
        assert get_results(ask("/api/events/?actor=rare&action=profile.created&limit=3"))
    in_order = [one["sql"] for one in captured if 'ORDER BY "accelerators_event"."at" DESC' in one["sql"]]
    assert in_order and all('"at" >= (COALESCE((SELECT' in one for one in in_order), in_order
    assert all(word in in_order[0] for word in ("@@", f"OFFSET {read - 1}")) and len(captured) <= 5
    assert ask(f"/api/events/?action={'x' * 4000}&request_id={'y' * 4000}").status_code == 200
    assert ask(f"/api/events/?subject_type={'x' * 4000}").status_code == 200
    with CaptureQueriesContext(connection) as captured:
        assert get_results(ask("/api/events/?subject_type=profile&limit=3"))
    in_order = [one["sql"] for one in captured if 'ORDER BY "accelerators_event"."at" DESC' in one["sql"]]
    assert in_order and all('"at" >= (COALESCE((SELECT' in one for one in in_order), in_order
    assert len(captured) <= 5


def test_a_page_of_events_with_a_time_limit_reads_a_limited_number_of_events_from_there(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerators.ui.first_events.MAX_READ_EVENTS", 3)
    for number in range(20):
        conductor.record_event("profile.created", EventSource.API, "ann", subject=(None, str(number)))
    events = list(Event.objects.filter(action="profile.created").order_by("at"))
    until, since = (quote(events[number].at.isoformat()) for number in (10, 9))
    first_by_limit = {
        f"until={until}&ordering=-at": 9,
        f"since={quote(events[2].at.isoformat())}&until={until}&ordering=-at": 9,
        f"since={since}&ordering=at": 9,
        f"since={since}&until={quote(events[15].at.isoformat())}&ordering=at": 9,
    }
    in_view = urlencode({"q": f"profile.created until:{events[10].at.isoformat()}"})
    SavedView.objects.create(
        user=User.objects.get(username="rita"), of="accelerators.event", name="before", query=in_view
    )
    first_by_limit["saved_view=before"] = 9
    for limit, first in first_by_limit.items():
        for word in ("subject_type=profile", "actor=ann", "action=profile.created"):
            with CaptureQueriesContext(connection) as captured:
                rows = get_results(ask(f"/api/events/?{word}&{limit}&limit=1"))
            assert [row["subject_name"] for row in rows] == [str(first)], (word, limit)
            statements = [one["sql"] for one in captured if 'FROM "accelerators_event"' in one["sql"]]
            assert len(statements) == 1 and "OFFSET 2" in statements[0], (word, limit, statements)
            assert "'0:00:00'::interval" not in statements[0]


def test_a_cursor_pages_through_many_rows_with_equal_sort_values(ask: Ask) -> None:
    apply_report(get_or_create_host(), make_driver_report(*(make_card(n) for n in range(30))))
    seen, path = [], "/api/devices/?limit=4&ordering=state"
    while path:
        page = json.loads(ask(path).content)
        seen += [device["uuid"] for device in page["results"]]
        path = page["next"]
    assert len(seen) == len(set(seen)) == 30


@pytest.mark.slow
def test_filters_select_the_expected_number_of_rows(ask: Ask, fill: Fill) -> None:
    fill(15)
    for collection, query, number in FILTERS:
        assert len(get_results(ask(f"/api/{collection}/?{query}"))) == number, (collection, query)


@pytest.mark.slow
def test_rows_are_found_by_the_beginning_of_their_uuid(ask: Ask, fill: Fill) -> None:
    fill(2)
    for collection in NAMED_BY_UUID:
        uuid = get_results(ask(f"/api/{collection}/"))[0]["uuid"]
        for prefix in (uuid, uuid[:13].upper(), uuid[:6], uuid.replace("-", "")[:10]):
            found = get_results(ask(f"/api/{collection}/?uuid_prefix={prefix}&fields=uuid"))
            assert {"uuid": uuid} in found and all(row["uuid"].startswith(uuid[:6]) for row in found)
        other = f"{(int(uuid[:8], 16) + 1) % 2**32:08x}"
        assert {"uuid": uuid} not in get_results(ask(f"/api/{collection}/?uuid_prefix={other}&fields=uuid"))


def test_the_beginning_of_a_uuid_is_found_by_the_index_of_the_uuids(ask: Ask, fill: Fill) -> None:
    fill(1)
    with CaptureQueriesContext(connection) as captured:
        get_results(ask("/api/devices/?uuid_prefix=3f1c"))
    (asked,) = [one["sql"] for one in captured if 'FROM "accelerators_device"' in one["sql"] and "3f1c" in one["sql"]]
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute(f"EXPLAIN {asked.replace('ORDER BY', 'ORDER BY 1 + ')}")
        plan = "\n".join(line for (line,) in cursor.fetchall())
    assert re.search("Index Cond: .*uuid >= '3f1c0000-0000-.*uuid <= '3f1cffff-ffff-", plan), plan


def test_devices_are_found_by_serial_number_and_by_health(ask: Ask) -> None:
    cards = make_card(1, key="serial:S7"), make_card(2, status="failed", status_reason="too hot")
    apply_report(get_or_create_host(), make_driver_report(*cards, make_card(3, status="degraded")))
    found = {
        query: get_results(ask(f"/api/devices/?{query}&fields=address"))
        for query in ("serial=S7", "status=failed", "status=failed&status=degraded")
    }
    assert [[row["address"] for row in rows] for rows in found.values()] == [
        ["0000:01:00.0"],
        ["0000:02:00.0"],
        ["0000:02:00.0", "0000:03:00.0"],
    ]


@pytest.mark.parametrize(
    ("path", "says"),
    [
        (
            "hosts/?nmae=cmp1",
            "nmae: unknown parameter; known are cursor, fields, limit, name, name_prefix, ordering, saved_view, stale,"
            " uuid_prefix.",
        ),
        ("devices/?state=enabled", "state: Select a valid choice. enabled is not one of the available choices."),
        ("deployables/?device=nope", "device: Enter a valid UUID."),
        ("devices/?state=", "state: say a value, or leave it out."),
        ("devices/?stale=null", "stale: say true or false."),
        ("devices/?uuid_prefix=abc", "uuid_prefix: say the beginning of a uuid, at least 4 hexadecimal digits."),
        ("hosts/?ordering=", "ordering: say one of name, created; a leading - reverses the order."),
        ("hosts/?limit=", "limit: say a number from 1 to 500."),
        ("hosts/?limit=0", "limit: say a number from 1 to 500."),
        ("hosts/?limit=501", "limit: say a number from 1 to 500."),
        ("hosts/?limit=%C2%B2", "limit: say a number from 1 to 500."),
        ("hosts/?ordering=node", "ordering: say one of name, created; a leading - reverses the order."),
        ("hosts/?fields=uuid,secret", "fields: there is no field secret; known are uuid, url, name"),
        ("hosts/?name=%00", "name: Null characters are not allowed."),
    ],
)
def test_invalid_query_parameters_are_refused_naming_the_valid_ones(ask: Ask, path: str, says: str) -> None:
    assert says in get_error_message(ask(f"/api/{path}"), 400)


def test_a_cursor_of_another_list_or_order_is_refused(ask: Ask, fill: Fill) -> None:
    fill(20)
    cursor = json.loads(ask("/api/devices/?limit=3").content)["next"].partition("cursor=")[2].partition("&")[0]
    for path in (
        f"/api/devices/?limit=3&ordering=state&cursor={cursor}",
        "/api/hosts/?cursor=x",
        "/api/hosts/?cursor=%00",
    ):
        assert "cursor: it does not belong to this list in this order" in get_error_message(ask(path), 404)


def test_only_the_chosen_fields_are_returned(ask: Ask, fill: Fill) -> None:
    fill(2)
    uuid = Device.objects.first().uuid
    assert get_results(ask("/api/devices/?fields=uuid,state&limit=1")) == [{"uuid": str(uuid), "state": "inactive"}]
    assert json.loads(ask(f"/api/devices/{uuid}?fields=type").content) == {"type": "FPGA"}


def test_an_etag_stays_valid_until_its_collection_is_written(ask: Ask, fill: Fill) -> None:
    fill(3)
    first = ask("/api/devices/")
    tag = first["ETag"]
    assert tag.startswith('W/"devices-')
    assert first["Cache-Control"] == "private, no-cache"
    same = ask("/api/devices/", **{"If-None-Match": f'"other", {tag}'})
    assert (same.status_code, same.content, same["ETag"]) == (304, b"", tag)
    for other in ("/api/devices/?limit=1", "/api/devices/?fields=uuid", "/api/deployables/"):
        assert ask(other, **{"If-None-Match": tag}).status_code == 200
    assert ask("/api/devices/", by="manager", **{"If-None-Match": tag}).status_code == 200
    with conductor.writing():
        Host.objects.update(stale_since="2026-01-01T00:00:00Z")
    changed = ask("/api/devices/", **{"If-None-Match": tag})
    assert changed.status_code == 200
    assert "the agent of cmp0 has sent no heartbeat" in get_results(changed)[0]["stale"]
    for nonsense in ("state=x", "limit=x", "ordering=x"):
        get_error_message(ask(f"/api/devices/?{nonsense}", **{"If-None-Match": "*"}), 400)


def test_a_list_without_a_generation_gets_an_etag_of_its_content(ask: Ask, fill: Fill) -> None:
    fill(1)
    tag = ask("/api/agents/")["ETag"]
    assert ask("/api/agents/", **{"If-None-Match": tag}).status_code == 304
    from agents.models import Lease

    Lease.objects.update(seen_at="2026-01-01T00:00:00Z")
    assert get_results(ask("/api/agents/", **{"If-None-Match": tag}))[0]["state"] == "down"


@pytest.mark.parametrize(
    "moment", ["0001-01-01T00:00:00%2B14:00", "9999-12-31T23:59:59-14:00", "0747-07-19T16:04:39-22:39"]
)
def test_extreme_timestamps_in_filters_cause_no_server_error(ask: Ask, moment: str) -> None:
    for name in ("since", "until"):
        assert ask(f"/api/events/?{name}={moment}").status_code in (200, 400)


def test_head_is_a_get_without_a_body(ask: Ask, fill: Fill) -> None:
    fill(1)
    head, get = ask("/api/devices/", method="HEAD"), ask("/api/devices/")
    assert (head.status_code, head.content, head["ETag"]) == (200, b"", get["ETag"])
