"""Test the overview: its numbers equal those of the linked lists, and its statements do not grow with the data."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from accelerators import conductor
from accelerators.models import AcceleratorRequest, Device, DeviceProfile, Event, Host, Intent
from accelerators.runtime import jobs
from agents import telemetry
from agents.models import Lease, Spooled
from cyborgweb.auth import roles
from drivers.inventory import DriverReport, Fault
from tests.cyborgweb.console.conftest import Fill
from tests.support.reports import apply_report, create_heard_host, make_card, make_driver_report

pytestmark = pytest.mark.django_db

INDEX_URL = "/admin/"
STEPS = ("Join a host", "Admit a device", "Make a device profile", "Connect the cloud")


def test_P3_the_overview_takes_at_most_ten_statements_at_any_size(operator: Client, fill: Fill) -> None:
    fill(60)
    # The list of gateways is cached for a while; the number of statements must not depend on earlier tests.
    telemetry.forget_gateways()
    with CaptureQueriesContext(connection) as captured:
        assert operator.get(INDEX_URL).status_code == 200
    assert len(captured) <= 10


@pytest.mark.slow
def test_device_counts_of_the_overview_link_to_lists_of_the_same_size(operator: Client, fill: Fill) -> None:
    fill(23)
    table = operator.get(INDEX_URL).context["devices"]
    cells = [cell for line in table["lines"] for cell in (*line.cells, line.total)] + [*table["totals"], table["total"]]
    assert table["total"].number == Device.objects.count() == 23
    assert {cell.number for cell in cells} >= {3, 20, 23}
    for cell in cells:
        assert operator.get(cell.url).context["cl"].result_count == cell.number


@pytest.mark.slow
def test_agents_are_counted_up_late_or_down_by_the_age_of_their_lease(operator: Client, fill: Fill) -> None:
    hosts = fill(40)
    now = datetime.now(UTC)
    Lease.objects.filter(host=hosts[1]).update(seen_at=now - timedelta(seconds=15))
    Lease.objects.filter(host=hosts[2]).update(seen_at=now - timedelta(seconds=60))
    Lease.objects.filter(host=hosts[3]).delete()
    conductor.set_hosts_stale_since([hosts[2].id], now)
    page = operator.get(INDEX_URL)
    assert {word: number for _, word, number in page.context["agents"]} == {"up": 1, "late": 1, "down": 2}
    assert page.context["hosts"]["stale"] == 1
    for word, number in (("up", 1), ("late", 1), ("down", 2)):
        listed = operator.get(reverse("admin:agents_agent_changelist"), {"is": word})
        assert listed.context["cl"].result_count == number


def test_the_overview_counts_failing_drivers_faults_and_waiting_work(operator: Client, fill: Fill) -> None:
    hosts = fill(20)
    Spooled.objects.create(host=hosts[0], epoch=1, seq=9, payload="{}")
    with conductor.writing():
        Intent.objects.filter(key=str(hosts[0].uuid)).update(attempts=10, last_error="503")
    page = operator.get(INDEX_URL)
    failures, waiting = page.context["failures"], page.context["waiting"]
    assert (failures["failing_n"], failures["faults_n"]) == (2, 0)
    assert failures["failing"][0]["error"] == "it hung for 20 s"
    assert (waiting.spool, waiting.placement_intents.number, waiting.stuck_intents) == (1, Intent.objects.count(), 1)
    assert len(page.context["events"]) == min(20, Event.objects.count())


def test_the_overview_shows_a_fault_with_its_reason(operator: Client, fill: Fill) -> None:
    host = fill(3)[0]
    apply_report(
        host,
        DriverReport("pci_driver", "", (make_card(0),), (Fault("0000:ff:00.0", "no type is known for it"),)),
        seq=3,
    )
    page = operator.get(INDEX_URL)
    assert page.context["failures"]["faults_n"] == 1
    assert "no type is known for it" in page.content.decode()


def list_done_steps(page: Any) -> dict[str, bool]:
    """Return title → whether it is done of each step that an overview shows."""
    return {step.title: step.is_done for step in page.context["first_steps"]}


def test_an_empty_overview_is_a_checklist_that_explains_how_to_join_a_host(operator: Client) -> None:
    assert not Host.objects.exists()
    page = operator.get(INDEX_URL)
    assert "manage.py join_token HOST" in page.content.decode()
    assert "Capacity" not in page.content.decode()
    assert list_done_steps(page) == dict.fromkeys(STEPS, False)
    for step in page.context["first_steps"]:
        assert step.links and step.commands and step.denial == ""
        for _, address in step.links:
            assert operator.get(address.partition("#")[0]).status_code == 200


def test_each_first_step_ticks_itself_and_the_checklist_ends_with_the_last_step_or_the_first_request(
    operator: Client,
) -> None:
    create_heard_host("cmp1", 1)
    assert list_done_steps(operator.get(INDEX_URL)) == dict(zip(STEPS, (True, False, False, False), strict=True))
    with conductor.writing():
        Device.objects.update(state="ready")
    page = operator.get(INDEX_URL)
    assert list_done_steps(page) == dict(zip(STEPS, (True, True, False, False), strict=True))
    assert "Capacity" in page.content.decode()
    assert '[{"resources:FPGA": "1"}]' in page.context["first_steps"][2].commands[0]
    with conductor.writing():
        profile = DeviceProfile.objects.create(name="small", groups=[{"resources:FPGA": "1"}])
    assert list_done_steps(operator.get(INDEX_URL)) == dict(zip(STEPS, (True, True, True, False), strict=True))
    with jobs.JOBS.replaced("placement", jobs.Job("none", intent_kind="provider")):
        assert list_done_steps(operator.get(INDEX_URL)) == {}
    with conductor.writing():
        AcceleratorRequest.objects.create(project_id="p1", state="Initial", profile=profile, group={})
    assert list_done_steps(operator.get(INDEX_URL)) == {}


def test_the_checklist_tells_people_without_the_right_who_may_do_a_step(client: Client) -> None:
    viewer = User.objects.create(username="vera", is_staff=True)
    viewer.groups.add(roles.get_group(roles.VIEWERS.group))
    client.force_login(viewer)
    steps = {step.title: step for step in client.get(INDEX_URL).context["first_steps"]}
    for title in ("Admit a device", "Make a device profile"):
        assert "You need the role admin or membership in the group role:administrator" in steps[title].denial


def test_the_overview_contains_no_inline_scripts_or_styles(operator: Client, fill: Fill) -> None:
    fill(3)
    answered = operator.get(INDEX_URL)
    page = answered.content.decode()
    assert "script-src 'self'" in answered["Content-Security-Policy"]
    assert "<style" not in page and " style=" not in page
    assert "<script>" not in page
    assert "x-cloak" not in page
    assert " onclick" not in page


def test_the_overview_shows_no_numbers_without_the_permission_to_view_devices(client: Client, fill: Fill) -> None:
    guest = User.objects.create(username="guest", is_staff=True)
    client.force_login(guest)
    fill(3)
    page = client.get(INDEX_URL)
    assert "devices" not in page.context
    assert "may log in but not see" in page.content.decode()
    guest.user_permissions.add(Permission.objects.get(codename="view_device"))
    telemetry.forget_gateways()
    with CaptureQueriesContext(connection) as captured:
        assert "devices" in client.get(INDEX_URL).context
    assert len(captured) <= 10
    shown = client.get(INDEX_URL).context["sidebar_navigation"]
    assert [group["items"][0]["title"] for group in shown] == ["Overview", "Devices", "Inbox", "Manual"]


def test_anonymous_visitors_are_redirected_to_the_login(client: Client) -> None:
    answered = client.get(INDEX_URL)
    assert answered.status_code == 302
    assert answered["location"].startswith(reverse("admin:login"))


def test_a_missing_device_is_counted_as_missing(operator: Client, fill: Fill) -> None:
    host = fill(3)[0]
    apply_report(host, make_driver_report(driver="pci_driver"), seq=3)
    lines = operator.get(INDEX_URL).context["devices"]["lines"]
    assert ["missing" in line.state for line in lines] == [True]
