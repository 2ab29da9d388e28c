"""Test the load of devices in the console: overview, usage page, census, and the pages of devices and hosts."""

from __future__ import annotations

import time
from collections.abc import Collection

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.db.models.functions import Now
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from accelerators import conductor
from accelerators.models import Device, Host
from agents import telemetry
from agents.models import Agent, Lease
from agents.telemetry import HostLoad, LoadSnapshot
from cyborgweb.pages.load import build_device_load
from tests.cyborgweb.console.conftest import Fill
from tests.support.reports import create_heard_host

pytestmark = pytest.mark.django_db

USAGE_URL, CENSUS_URL = "/admin/usage/", "/admin/census/"
SAMPLE_VALUES = {
    "utilization_percent": 37.5,
    "memory_used_bytes": 3 * 2.0**30,
    "memory_total_bytes": 16 * 2.0**30,
    "temperature_celsius": 61.0,
    "power_watts": 120.0,
}


def test_the_load_of_a_device_whose_host_was_removed_meanwhile_says_so() -> None:
    device = create_heard_host("cmp1", 1).devices.get()
    device.host_id = -1
    assert build_device_load(device)["none"] == "no samples: its host was removed"


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Give the first device of every host SAMPLE_VALUES; a test appends gateways that do not answer to the list."""
    silent: list[str] = []

    def said(hosts: Collection[int] | None, *_: float) -> LoadSnapshot:
        found = Host.objects.all() if hosts is None else Host.objects.filter(pk__in=hosts)
        devices = {host.pk: host.devices.order_by("id").first() for host in found}
        at = time.time() - 2
        return LoadSnapshot(
            {pk: HostLoad(pk, at, {one.key: SAMPLE_VALUES}) for pk, one in devices.items() if one}, tuple(silent)
        )

    monkeypatch.setattr(telemetry, "get_last_loads", lambda hosts=None: said(hosts))
    monkeypatch.setattr(telemetry, "request_periodic_loads", said)
    monkeypatch.setattr(telemetry, "run_load_census", said)
    return silent


def test_the_overview_shows_load_capacity_and_the_projects_that_hold_most(
    operator: Client, fill: Fill, busy: list[str]
) -> None:
    fill(30)
    page = operator.get("/admin/")
    (fpga,) = page.context["classes"]
    assert (fpga.load.mean, fpga.load.sampled, fpga.watts) == (37.5, 3, "360 W")
    assert [(one.name, one.held) for one in page.context["projects"]] == [("p1", 20)]
    text = page.content.decode()
    assert "3 of 30 devices heard" in text and "did not answer" not in text
    busy.append("web-2")
    assert "web-2 did not answer" in operator.get("/admin/").content.decode()


def test_the_usage_page_groups_and_filters_as_chosen(operator: Client, fill: Fill, busy: list[str]) -> None:
    fill(25)
    with CaptureQueriesContext(connection) as captured:
        page = operator.get(USAGE_URL, {"by": "host", "then": "type"})
    assert len(captured) <= 12
    assert [one.names for one in page.context["groups"]] == [(f"cmp{n}.example", "FPGA") for n in range(3)]
    assert "3.0 GiB of 16.0 GiB" in page.content.decode()
    only = operator.get(USAGE_URL, {"by": "host", "host": "cmp2.example"}).context["groups"]
    assert [(one.name, one.total) for one in only] == [("cmp2.example", 10)]
    assert operator.get(USAGE_URL, {"by": "colour", "type": "TOASTER\0"}).status_code == 200


def test_the_census_form_shows_hosts_or_the_reason_of_a_refusal(operator: Client, fill: Fill, busy: list[str]) -> None:
    fill(20)
    Lease.objects.filter(host__name="cmp1.example").delete()
    assert "taken" not in operator.get(CENSUS_URL).context
    page = operator.post(CENSUS_URL, {"profile": "small-0", "count": "1", "hosts": "cmp0.example, cmp1.example"})
    assert [row["row"].host.name for row in page.context["rows"]] == ["cmp0.example", "cmp1.example"]
    text = page.content.decode()
    assert "its agent is down" in text and "38 %" in text
    assert text.count("1 of 10 devices heard") == 1
    devices = Host.objects.get(name="cmp0.example").devices.order_by("id")
    with conductor.writing():
        Device.objects.filter(pk__in=[one.pk for one in devices[1:]]).update(state="retired")
    assert "devices heard" not in operator.post(CENSUS_URL, {"hosts": "cmp0.example"}).content.decode()
    assert "data-page" not in text  # the page must not repeat the census by itself
    for said, why in (
        ({"count": "0"}, "Give the number of further requests"),
        ({"profile": "nope"}, "There is no device profile"),
        ({"hosts": "far"}, "There is no host far."),
        ({"hosts": ", ,"}, "Name a host"),
    ):
        assert why in operator.post(CENSUS_URL, said).content.decode()


def test_one_census_too_many_at_once_is_refused_on_the_page(
    operator: Client, fill: Fill, busy: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(1)
    texts = []

    def another(*_: object) -> LoadSnapshot:
        texts.append(operator.post(CENSUS_URL, {"count": "1"}).content.decode())
        return LoadSnapshot({})

    monkeypatch.setattr(telemetry, "run_load_census", another)
    operator.post(CENSUS_URL, {"count": "1"})
    assert ["2 censuses are under way" in text for text in texts] == [True, False]


def test_pages_of_devices_and_hosts_show_samples_or_why_there_are_none(
    operator: Client, fill: Fill, busy: list[str]
) -> None:
    (host,) = fill(2)
    first, second = host.devices.order_by("id")
    page = operator.get(reverse("admin:accelerators_device_change", args=[first.pk])).content.decode()
    assert "<dt>temperature</dt><dd>61 °C</dd>" in page
    assert f'data-usage="/api/devices/{first.uuid}/usage/"' in page
    page = operator.get(reverse("admin:accelerators_device_change", args=[second.pk])).content.decode()
    assert "no samples: pci_driver reports no load" in page
    address = reverse("admin:accelerators_host_load", args=[host.pk])
    page = operator.get(reverse("admin:accelerators_host_change", args=[host.pk])).content.decode()
    piece = operator.get(address).content.decode()
    assert f'data-live="{address}"' in page and "3.0 GiB of 16.0 GiB" in piece
    assert piece.lstrip().startswith("<section")


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("nothing", "its agent has just connected, or its release"),
        ("away", "web-2 may have them, and does not answer"),
        ("down", "the agent of {} is down: start it"),
        ("barred", "was revoked (by olga): to have it back, make a token"),
        ("none", "no agent has joined for {}: let it join"),
        ("removing", "host {} is being removed: wait until it is gone"),
    ],
)
def test_pages_of_devices_and_hosts_say_why_there_are_no_samples(
    what: str, why: str, operator: Client, fill: Fill, monkeypatch: pytest.MonkeyPatch
) -> None:
    (host,) = fill(1)
    nothing = LoadSnapshot({}, ("web-2",) if what == "away" else ())
    monkeypatch.setattr(telemetry, "get_last_loads", lambda hosts=None: nothing)
    monkeypatch.setattr(telemetry, "request_periodic_loads", lambda *_: nothing)
    if what == "down":
        Lease.objects.all().delete()
    elif what == "barred":
        Agent.objects.update(barred="revoked", barred_reason="by olga")
    elif what == "none":
        Agent.objects.all().delete()
    elif what == "removing":
        Agent.objects.update(barred="revoked", barred_reason="its host is removed")
        with conductor.writing():
            Host.objects.update(removing_since=Now())
    for model, key in (("device", host.devices.get().pk), ("host", host.pk)):
        page = operator.get(reverse(f"admin:accelerators_{model}_change", args=[key])).content.decode()
        assert why.format(host.name) in page, model


def test_usage_and_census_pages_need_the_permission_to_view_devices(client: Client, fill: Fill) -> None:
    client.force_login(User.objects.create(username="guest", is_staff=True))
    fill(1)
    host = Host.objects.get()
    for address in (USAGE_URL, CENSUS_URL, reverse("admin:accelerators_host_load", args=[host.pk])):
        assert client.get(address).status_code == 403
    assert [one["title"] for one in client.get("/admin/").context["sidebar_navigation"][0]["items"]] == ["Overview"]
