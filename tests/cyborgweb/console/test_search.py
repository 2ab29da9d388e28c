"""Test the search box: one hit opens its page, several are listed by kind; it uses indexes and respects permissions."""

from __future__ import annotations

import re
from html import unescape
from uuid import uuid4

import pytest
from django.apps import apps
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.db.models import F
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from accelerators import conductor
from accelerators.domain.uuids import uuid_bounds
from accelerators.models import AcceleratorRequest, AttachHandle, Device, DeviceProfile, Host
from accelerators.ui.changelist import BoundedPaginator
from accelerators.ui.extensions import SEARCH_PROVIDERS, SearchProvider
from agents.models import Agent
from tests.cyborgweb.console.conftest import Fill
from tests.support.reports import apply_report, create_heard_host, get_or_create_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db

MAX_STATEMENTS = 8


def row_page(row: object) -> str:
    return reverse(f"admin:accelerators_{row._meta.model_name}_change", args=[row.pk])


@pytest.fixture
def known(fill: Fill) -> dict[str, object]:
    """Return search terms, each with the row that it must find."""
    host = fill(13)[0]
    apply_report(get_or_create_host("lonely"), make_driver_report(make_card(0x3B, key="serial:XFL1A2", vendor="1ed5")))
    instance = uuid4()
    device = Device.objects.get(key="serial:XFL1A2")
    request = AcceleratorRequest.objects.order_by("id").first()
    with conductor.writing():
        AcceleratorRequest.objects.filter(pk=request.pk).update(instance_uuid=instance)
    handle = AttachHandle.objects.get(deployable__device=device)
    terms = {str(row.uuid): row for row in (host, device, device.deployables.get(), handle, request)}
    return terms | {
        str(device.uuid)[:13]: device,
        str(instance): request,
        "cmp0.example": host,
        "XFL1A2": device,
        "small-0": DeviceProfile.objects.get(),
    }


def test_an_exact_hit_opens_its_page_in_at_most_eight_statements(operator: Client, known: dict[str, object]) -> None:
    for term, row in known.items():
        with CaptureQueriesContext(connection) as captured:
            answered = operator.get(reverse("find"), {"q": f" {term} "})
        assert (term, answered.status_code, answered.get("location")) == (term, 302, row_page(row))
        assert len(captured) <= MAX_STATEMENTS


def test_rows_of_a_model_that_another_package_registers_are_found(operator: Client, known: dict[str, object]) -> None:
    agent = Agent.objects.create(host=Host.objects.get(name="lonely"), public_key="key-of-lonely", boot_id="b")
    provider = SearchProvider(Agent, ("public_key",), F("public_key"), F("host__name"))
    assert operator.get(reverse("find"), {"q": "key-of"}).status_code == 200
    with SEARCH_PROVIDERS.replaced("agents.agent", provider):
        answered = operator.get(reverse("find"), {"q": "key-of"})
    assert (answered.status_code, answered["location"]) == (302, reverse("admin:agents_agent_change", args=[agent.pk]))


def test_several_hits_are_listed_by_kind(operator: Client, known: dict[str, object]) -> None:
    found = operator.get(reverse("find"), {"q": "3b:00.0"})
    assert [group["title"] for group in found.context["groups"]] == ["devices", "attach handles"]
    shown = operator.get(reverse("find"), {"q": "0000:02:00.0"}).content.decode()
    assert "cmp0.example" in shown
    hosts = operator.get(reverse("find"), {"q": "cmp"}).context["groups"]
    assert [hit["shown"] for hit in hosts[0]["hits"]] == ["cmp0.example", "cmp1.example"]
    assert "Nothing is called" in operator.get(reverse("find"), {"q": "<script>"}).content.decode()


def test_any_search_term_is_answered_without_an_error(operator: Client, known: dict[str, object]) -> None:
    for term in ("", "\0", "%", "a" * 999, "'; --", "0000:zz", "_", "f" * 33):
        assert operator.get(reverse("find"), {"q": term}).status_code == 200, term


def test_search_finds_only_rows_that_the_user_may_view(
    client: Client, operator: Client, known: dict[str, object]
) -> None:
    host = next(row for row in known.values() if isinstance(row, Host))
    user = User.objects.create(username="viewer", is_staff=True)
    user.user_permissions.add(Permission.objects.get(codename="view_device"))
    client.force_login(user)
    assert client.get(reverse("find"), {"q": host.name}).context["groups"] == []
    assert client.get(reverse("find"), {"q": "XFL1A2"}).status_code == 302


@pytest.mark.slow
def test_search_uses_indexes_only(operator: Client, known: dict[str, object]) -> None:
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
    for term in (*known, "cmp", "3b:00", "3b:00.0", "02ab"):
        with CaptureQueriesContext(connection) as captured:
            operator.get(reverse("find"), {"q": term})
        (asked,) = [one["sql"] for one in captured if "UNION ALL" in one["sql"] or "serial:" in one["sql"]]
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN {asked}")
            plan = [line for (line,) in cursor.fetchall()]
        filtered = [line for line in plan if "Seq Scan" in line]
        assert not filtered, (term, plan)


def test_the_beginning_of_a_uuid_is_converted_to_a_range_of_uuids() -> None:
    first, last = uuid_bounds("1F2E-")
    assert str(first) == "1f2e0000-0000-0000-0000-000000000000"
    assert str(last) == "1f2effff-ffff-ffff-ffff-ffffffffffff"
    whole = uuid4()
    assert uuid_bounds(str(whole)) == (whole, whole)
    assert [uuid_bounds(term) for term in ("abc", "xyz0", "f" * 33, "")] == [None] * 4


@pytest.fixture
def similar(operator: Client) -> list[Host]:
    """Return hosts of which one has a name that is the beginning of the others'; each has two devices and events."""
    return [create_heard_host(name, 2) for name in ("cmp1", "cmp10", "cmp11")]


def list_hosts(answer: object) -> set[str]:
    """Return the names of the hosts that the rows of a list belong to."""
    rows = answer.context["cl"].result_list
    return {row.name if isinstance(row, Host) else name_of_host(row) for row in rows}


def name_of_host(row: object) -> str:
    """Return the name of the host of a device, a part of a device or an event."""
    for field in ("deployable", "device"):
        row = getattr(row, field, row)
    return str(row.host)


@pytest.mark.parametrize("model", ["host", "device", "deployable", "attachhandle", "event"])
def test_an_exact_host_name_lists_this_host_only_and_leads_to_those_that_begin_with_it(
    model: str, operator: Client, similar: list[Host]
) -> None:
    listed = reverse(f"admin:accelerators_{model}_changelist")
    with CaptureQueriesContext(connection) as captured:
        exact = operator.get(listed, {"q": "cmp1", "p": "1"})
    assert list_hosts(exact) == {"cmp1"} and len(captured) <= 12
    link = re.search('href="([^"]*)">Show also what begins with it', exact.content.decode())
    assert list_hosts(operator.get(f"{listed}{unescape(link[1])}")) == {"cmp1", "cmp10", "cmp11"}
    for query, found in (
        ("cmp10", {"cmp10"}),
        ("cmp", {"cmp1", "cmp10", "cmp11"}),
        ("cmp1*", {"cmp1", "cmp10", "cmp11"}),
    ):
        answer = operator.get(listed, {"q": query})
        assert list_hosts(answer) == found and "Show also" not in answer.content.decode(), query


@pytest.mark.parametrize("model", ["host", "device", "deployable", "attachhandle", "event"])
def test_a_search_for_many_words_costs_at_most_twelve_statements(
    model: str, operator: Client, similar: list[Host], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedPaginator, "EXACT", 1)
    monkeypatch.setattr("accelerators.ui.first_events.MAX_READ_EVENTS", 3)
    listed = reverse(f"admin:accelerators_{model}_changelist")
    uuids = [str(device.uuid)[:4] for device in Device.objects.all()[:3]]
    words = ["cmp", "cmp1", "cmp1*", "c", "cm"]
    for terms in (words, [*words, *uuids], ["cmp1*", "0000:", "pci:0", "1ed5", "nowhere", "no", "wh", "xyz"]):
        for page in ({}, {"after": str(apps.get_model("accelerators", model).objects.order_by("-pk")[0].pk)}):
            with CaptureQueriesContext(connection) as captured:
                shown = operator.get(listed, {"q": " ".join(terms)} | page)
            assert shown.status_code == 200
            assert len(captured) <= 12, (terms, page, [one["sql"][:150] for one in captured])
    assert list_hosts(operator.get(listed, {"q": "cmp cmp1 c cm"})) == {"cmp1"}


def test_an_exact_serial_number_lists_its_device_only(operator: Client) -> None:
    cards = [make_card(0x3B, key="serial:SN1"), make_card(0x5E, key="serial:SN10")]
    apply_report(get_or_create_host("cmp1"), make_driver_report(*cards))
    devices = reverse("admin:accelerators_device_changelist")
    for query, count in (("SN1", 1), ("SN10", 1), ("SN1*", 2), ("SN", 2), ("3b:00.0", 1), ("cmp1 SN1", 1)):
        assert operator.get(devices, {"q": query}).context["cl"].result_count == count, query


def test_the_search_page_opens_an_exact_host_and_leads_to_those_that_begin_with_its_name(
    operator: Client, similar: list[Host]
) -> None:
    answered = operator.get(reverse("find"), {"q": "cmp1"}, follow=True)
    assert answered.redirect_chain == [(row_page(similar[0]), 302)]
    link = re.search('href="([^"]*)">Show also what begins with it', answered.content.decode())
    group = operator.get(unescape(link[1])).context["groups"][0]
    assert [hit["shown"] for hit in group["hits"]] == ["cmp1", "cmp10", "cmp11"]
    assert list_hosts(operator.get(group["all"])) == {"cmp1", "cmp10", "cmp11"}
    assert "Show also" not in operator.get(reverse("find"), {"q": "cmp10"}, follow=True).content.decode()
