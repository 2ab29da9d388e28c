"""Test events in the console: the search by beginnings of words, which uses indexes, and the page of an event."""

from __future__ import annotations

import json

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from accelerators import conductor
from accelerators.audit import sealing
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller, request_id
from accelerators.domain.device_actions import Action
from accelerators.domain.states import EventSource
from accelerators.models import Device, Event, Seal
from accelerators.models.records import event_has_words
from accelerators.ui.changelist import BoundedPaginator, ReadOnlyModelAdmin
from cyborgweb.models import ApiToken
from tests.cyborgweb.console.conftest import Fill
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db

LIST = reverse("admin:accelerators_event_changelist")


def event_page(event: Event) -> str:
    return reverse("admin:accelerators_event_change", args=[event.pk])


@pytest.fixture
def events(fill: Fill) -> list[Event]:
    """Record events of three actors, besides those of the inventory, and return all."""
    fill(2)
    about = {"subject": (None, "NVIDIA H100 0000:3b:00.0"), "changes": {"state": ["ready", "missing"]}}
    with conductor.writing():
        conductor.record_events(
            [
                conductor.build_event("device.missing", EventSource.PERSON, "Olga", **about),
                conductor.build_event("device.back", EventSource.PERSON, "o'hara\\", **about),
                conductor.build_event("profile.created", EventSource.API, "nova", subject=(None, "small & 'fast':*")),
            ]
        )
    return list(Event.objects.all())


SEARCHES: list[tuple[str, set[str]]] = [
    ("device.m", {"device.missing"}),
    ("missing", {"device.missing"}),
    ("OLG", {"device.missing"}),
    ("0000:3b", {"device.missing", "device.back"}),
    ("h100 back", {"device.back"}),
    ("o'hara\\", {"device.back"}),
    ("small & 'fast", {"profile.created"}),
    ("' | 'nova':* !", set()),
    ("\\", set()),
    ("issing", set()),
    ("x" * 3000, set()),
    ("n o v a " * 40, set()),
    ("actor:Olga", {"device.missing"}),
    ("actor:Olg", set()),
    ("kind:device h100 since:2020-01-01 until:2100-01-01T10:30+02:00", {"device.missing", "device.back"}),
    ("kind:device until:2020-01-01", set()),
    ("action:device.back h100", {"device.back"}),
    ("host:", set()),
]
"""Search terms, and the actions of the events that each of them finds."""


@pytest.mark.slow
def test_search_finds_events_that_contain_a_word_beginning_with_each_typed_word(
    operator: Client, events: list[Event]
) -> None:
    for asked, found in SEARCHES:
        shown = operator.get(LIST, {"q": asked})
        assert shown.status_code == 200, asked
        assert {event.action for event in shown.context["cl"].result_list} == found, asked


@pytest.mark.slow
def test_search_terms_that_the_database_cannot_hold_cause_no_server_error(
    operator: Client, events: list[Event]
) -> None:
    for asked in ("a\0b", "😀" * 300, "since:yesterday", "until:9999-99-99", "actor:a\0b"):
        assert operator.get(LIST, {"q": asked}).status_code in (200, 400), asked


def test_a_search_for_events_uses_indexes_only(operator: Client, events: list[Event]) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute("SET LOCAL enable_indexscan = off")  # else the index of times, if the tables have statistics
    plan = Event.objects.filter(event_has_words("nova", "olga")).explain()
    assert plan.count("Bitmap Index Scan on") == plan.count("Bitmap Heap Scan on") > 1 and "Seq Scan" not in plan
    with CaptureQueriesContext(connection) as captured:
        operator.get(LIST, {"q": "device"})
    listed = next(sql["sql"] for sql in captured if "ORDER BY" in sql["sql"] and "event_words" in sql["sql"])
    assert "'0:00:00'::interval" in listed, "it is sorted: by the index of times a rare word takes reading all events"


def test_events_about_a_type_of_subject_are_found_by_the_index_of_words(operator: Client, events: list[Event]) -> None:
    conductor.record_event("profiles.counted", EventSource.SYSTEM, "new", subject=(None, "p"))
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute("SET LOCAL enable_indexscan = off")  # else the index of times, if the tables have statistics
    for query in ({"about": "profile"}, {"q": "kind:profile"}, {"about": "profile", "source__exact": "api"}):
        with CaptureQueriesContext(connection) as captured:
            found = operator.get(LIST, query).context["cl"]
        assert {event.action for event in found.result_list} == {"profile.created"}
        searches = [one["sql"] for one in captured if "\"subject_type\" = 'profile'" in one["sql"]]
        assert len(searches) >= 2, "they are counted and loaded"
        for search in searches:
            with connection.cursor() as cursor:
                cursor.execute(f"EXPLAIN {search}")
                plan = "\n".join(line for (line,) in cursor.fetchall())
            assert "event_words_idx" in plan and "Seq Scan" not in plan, plan


def test_a_search_for_a_devices_address_serial_or_uuid_finds_its_events(operator: Client) -> None:
    cards = [make_card(0x3B, key="serial:XFL1A2"), make_card(0x5E, key="serial:XFL1B7")]
    apply_report(get_or_create_host("cmp1"), make_driver_report(*cards))
    device = Device.objects.get(key="serial:XFL1A2")
    searches = ["XFL1A2", "XFL1A", "0000:3b:00.0", "3b:00", "3B:00.0", str(device.uuid)[:8], str(device.uuid)[:13]]
    for term in (*searches, f"device.found {device.uuid.hex[:9]}", "cmp1 XFL1A2 3b:00.0"):
        with CaptureQueriesContext(connection) as captured:
            shown = operator.get(LIST, {"q": term})
        assert {event.subject for event in shown.context["cl"].result_list} == {device.uuid}, term
        assert len(captured) <= 12, term
    assert operator.get(LIST, {"q": "XFL1"}).context["cl"].result_count == 2
    assert operator.get(LIST, {"q": "XFL1A2 5e:00.0"}).context["cl"].result_count == 0


def test_a_search_for_the_beginning_of_many_serial_numbers_asks_for_more_of_it(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerators.admin.events_and_intents.MAX_LISTED_KEYS", 1)
    cards = [make_card(0x3B, key="serial:XFL1A2"), make_card(0x5E, key="serial:XFL1B7")]
    apply_report(get_or_create_host("cmp1"), make_driver_report(*cards))
    page = operator.get(LIST, {"q": "XFL1"})
    assert page.context["cl"].result_count == 0 and "More than 1 devices have" in page.content.decode()
    page = operator.get(LIST, {"q": "XFL1A"})
    assert page.context["cl"].result_count == 1 and "More than" not in page.content.decode()


@pytest.mark.parametrize("read", [3, 4, 9, 1000])
@pytest.mark.slow
def test_pages_of_a_frequent_word_are_the_newest_matches_wherever_they_lie(
    read: int, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("accelerators.ui.first_events.MAX_READ_EVENTS", read)
    monkeypatch.setattr(BoundedPaginator, "EXACT", 6)
    monkeypatch.setattr(ReadOnlyModelAdmin, "list_per_page", 3)
    monkeypatch.setattr(ReadOnlyModelAdmin, "list_max_show_all", 3)
    actors = ["old"] * 9 + ["rare", "other"] * 8 + ["other"] * 5 + ["new"] * 8 + ["other"] * 2
    with conductor.writing():
        for actor in actors:
            conductor.record_event("profile.created", EventSource.API, actor, subject=(None, "p"))
    for word in ("old", "rare", "new", "profile.created"):
        expected = [event.pk for event in Event.objects.filter(event_has_words(word))]
        assert len(expected) >= 8
        for number in (1, 2):
            page = operator.get(LIST, {"q": word, "p": number}).context["cl"]
            assert page.paginator.estimated
            assert [event.pk for event in page.result_list] == expected[3 * number - 3 : 3 * number], (word, number)
        behind = operator.get(LIST, {"q": word, "after": expected[1]}).context["cl"]
        assert [event.pk for event in behind.result_list] == expected[2:5], word


@pytest.mark.parametrize("query", [{"q": "device.found"}, {"about": "device"}, {"source__exact": "agent"}])
def test_a_search_for_a_word_of_old_events_only_does_not_read_the_newer_ones(
    query: dict[str, str], operator: Client, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_reads_of_events(monkeypatch)
    for _ in range(3):
        conductor.record_event("profile.deleted", EventSource.API, "nova", subject=(None, "p"))
    with CaptureQueriesContext(connection) as captured:
        assert operator.get(LIST, query).context["cl"].result_list
    assert len(find_limited_reads(captured)) == 2, "from the beginning of the list, then from the newest match"
    assert len(captured) <= 12


def test_a_search_for_a_frequent_word_before_a_time_reads_a_limited_number_of_events_from_there(
    operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit_reads_of_events(monkeypatch)
    for number in range(10):
        conductor.record_event("profile.created", EventSource.API, "ann", subject=(None, str(number)))
    until = Event.objects.get(subject_name="5").at.isoformat()
    for word in ("profile.created", "kind:profile", "actor:ann"):
        with CaptureQueriesContext(connection) as captured:
            (found,) = operator.get(LIST, {"q": f"{word} until:{until}"}).context["cl"].result_list
        assert found.subject_name == "4", word
        assert len(find_limited_reads(captured)) == 1, word


def limit_reads_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a page show one event, and read at most 3 events one by one for it."""
    monkeypatch.setattr("accelerators.ui.first_events.MAX_READ_EVENTS", 3)
    monkeypatch.setattr(BoundedPaginator, "EXACT", 1)
    monkeypatch.setattr(ReadOnlyModelAdmin, "list_per_page", 1)


def find_limited_reads(captured: CaptureQueriesContext) -> list[str]:
    """Return the statements that read events in the order of time; fail if one has no limit, or if one sorts all
    matches."""
    conditions = "words", "\"source\" = 'agent'"
    in_order = [
        one["sql"]
        for one in captured
        if 'BY "accelerators_event"."at" DESC' in one["sql"] and any(word in one["sql"] for word in conditions)
    ]
    assert all('"at" >= ' in sql for sql in in_order), "each reads a limited number of events"
    assert not any("'0:00:00'::interval" in one["sql"] and "ORDER BY" in one["sql"] for one in captured), (
        "nothing is sorted"
    )
    return in_order


def test_the_page_of_an_event_shows_changes_actor_and_events_of_the_same_request(operator: Client, fill: Fill) -> None:
    fill(3)
    first, second = Device.objects.filter(state="inactive")
    token = request_id.set("req-7c1f")
    try:
        for device in (first, second):
            lifecycle.apply_action_to_device(
                Action.ENABLE, device.uuid, Caller("vera", "2", frozenset(), ""), "burnt in"
            )
    finally:
        request_id.reset(token)
    event = Event.objects.filter(action="device.ready", subject=first.uuid).get()
    asked = operator.get(event_page(event))
    shown = asked.content.decode()
    for fact in ("burnt in", "vera", "req-7c1f", f"?q={first.uuid}", "0000:", '<th scope="col">Before</th>'):
        assert fact in shown
    assert ("state", "inactive", "ready") in asked.context["changed"]
    assert len(asked.context["same_request_events"]) == 1 and len(asked.context["same_subject_events"]) == 1
    assert operator.get(f"{LIST}?q=req-7c").context["cl"].result_count == 2
    assert operator.post(event_page(event)).status_code == 403
    assert operator.get(event_page(Event(pk=10**17))).status_code == 404


def test_texts_of_an_event_are_escaped_on_its_page(operator: Client, events: list[Event]) -> None:
    evil = "<script>alert(1)</script>"
    with conductor.writing():
        said = {evil: [evil, {"nested": evil}], "odd": 7}
        conductor.record_event("device.changed", EventSource.API, evil, subject=(None, evil), changes=said, reason=evil)
    shown = operator.get(event_page(Event.objects.get(reason=evil))).content.decode()
    assert evil not in shown and json.dumps(evil)[1:-1] not in shown


@pytest.mark.django_db(transaction=True)
def test_the_page_of_an_event_shows_its_seal(operator: Client, fill: Fill) -> None:
    fill(1)
    event = Event.objects.get(action="device.found")
    assert "not yet" in operator.get(event_page(event)).content.decode()
    sealing.seal_oldest_events()
    seal = Seal.objects.get()
    assert f"in №{seal.number}" in (shown := operator.get(event_page(event)).content.decode()) and seal.hash in shown
    assert "signed with the key" in shown and seal.key in shown


def test_a_change_of_ones_own_password_is_an_event_and_a_refused_one_is_not(client: Client) -> None:
    client.force_login(User.objects.create_user("vera", password="Xu7-secret-x", is_staff=True))
    anew = {"old_password": "wrong", "new_password1": "Yu8-secret-y", "new_password2": "Yu8-secret-y"}
    assert client.post("/admin/password_change/", anew).status_code == 200
    assert not Event.objects.exists()
    assert client.post("/admin/password_change/", anew | {"old_password": "Xu7-secret-x"}).status_code == 302
    assert User.objects.get().check_password("Yu8-secret-y")
    event = Event.objects.get()
    assert (event.action, event.actor, event.subject_name) == ("user.changed", "vera", "vera")
    assert event.changes == {"password": [None, "another one"]}


def test_changes_of_users_and_tokens_are_recorded_as_events_without_secrets(operator: Client) -> None:
    add = {"username": "vera", "password1": "Xu7-secret-x", "password2": "Xu7-secret-x", "usable_password": "true"}
    assert operator.post(reverse("admin:auth_user_add"), add).status_code == 302
    vera = User.objects.get(username="vera")
    address, at = reverse("admin:auth_user_change", args=[vera.pk]), "1979-01-01"
    about = {"username": "vera", "is_active": "on", "is_staff": "on", "date_joined_0": at, "date_joined_1": "10:00"}
    assert operator.post(address, about).status_code == 302
    anew = {"password1": "Yu8-secret-y", "password2": "Yu8-secret-y", "usable_password": "true"}
    assert operator.post(reverse("admin:auth_user_password_change", args=[vera.pk]), anew).status_code == 302
    assert operator.post(reverse("admin:auth_user_delete", args=[vera.pk]), {"post": "yes"}).status_code == 302
    ApiToken.create_with_secret("nova", User.objects.get(), ["service"], "p1")
    token = reverse("admin:cyborgweb_apitoken_delete", args=[ApiToken.objects.get().pk])
    assert operator.post(token, {"post": "yes"}).status_code == 302
    recorded_events = list(Event.objects.filter(actor="olga").order_by("id"))
    actions = ["user.created", "user.changed", "user.changed", "user.deleted", "token.deleted"]
    assert [event.action for event in recorded_events] == actions and {event.source for event in recorded_events} == {
        "person"
    }
    assert recorded_events[1].changes["is_staff"] == [False, True] and recorded_events[2].changes == {
        "password": [None, "another one"]
    }
    assert "secret" not in str([event.changes for event in recorded_events])
