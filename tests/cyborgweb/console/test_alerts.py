"""Test the alerts of the overview: one sentence for each, the worst first, with a link to the rows concerned."""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from accelerators import conductor, refusal_counts
from accelerators.domain.bind_failures import BindFailure
from accelerators.domain.errors import RefusedError
from accelerators.models import AcceleratorRequest, AttachHandle, Device, DeviceProfile, Intent
from accelerators.requests import binding
from accelerators.runtime import jobs
from cyborgweb.http import refused_clients
from cyborgweb.manual import contents, site
from cyborgweb.monitoring import backlog
from cyborgweb.pages import alerts, capacity
from tests.cyborgweb.console.conftest import Fill
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.requests import NOVA, bind_new_requests, create_profiles

NOW = datetime(2026, 11, 1, tzinfo=UTC)
NOTHING_TO_DO = dict.fromkeys(
    ("spool", "tasks", "binding", "near", "overdue", "commands", "draining", "bulks", "discrepancies", "missing_held"),
    0,
) | {
    "released": 0,
    "unconfirmed": 0,
    "degraded": 0,
    "broken": 0,
    "unknown_to_nova": 0,
    "spool_oldest": None,
    "unsealed_oldest": None,
    "tick_oldest": None,
}


def list_alert_lines(devices: dict[str, int] | None = None, down: int = 0, failing: int = 0, **doing: Any) -> list[str]:
    """Return the alerts of a system state, each as one line."""
    hosts, now = {"down": down}, backlog.Backlog(**(NOTHING_TO_DO | doing))
    state = alerts.SystemState(hosts, Counter(devices or {}), now, [], failing, 0, NOW)
    return [f"{need.tone} {need.label}: {need.link_text} {need.explanation}" for need in alerts.list_alerts(state)]


def test_a_healthy_installation_has_no_alerts() -> None:
    assert list_alert_lines({"ready": 100, "maintenance": 3}) == []


def test_alerts_are_sorted_worst_first_with_pending_decisions_last() -> None:
    found = list_alert_lines(
        {"inactive": 2, "missing": 3, "failed": 1}, down=1, failing=2, missing_held=1, discrepancies=1
    )
    tones = [line.split()[0] for line in found]
    assert tones == ["bad"] * 5 + ["warn", "calm"]
    assert found[0].startswith("bad missing: 1 device still held by instances")
    assert found[5].startswith("warn missing: 2 devices no longer reported")
    assert found[-1].startswith("calm new: 2 devices waiting for a decision")


def test_differences_between_events_and_seals_and_a_refusal_to_seal_are_alerts() -> None:
    audit = backlog.AuditState("the newest seal is forged", NOW - timedelta(minutes=3), NOW, 2, "event 7 was changed")
    assert list_alert_lines(audit=audit) == [
        "bad audit: 2 differences between events and their seals: run manage.py verify_events: event 7 was changed",
        "bad audit: Events are not sealed for 3 min: the newest seal is forged",
    ]
    assert list_alert_lines(audit=backlog.AuditState(verified_at=NOW)) == []


def test_a_restore_is_shown_for_three_days() -> None:
    audit = backlog.AuditState(restored_at=NOW - timedelta(days=2), restore="the database was restored by olga")
    assert list_alert_lines(audit=audit) == [
        "warn audit: A restore is recorded by a seal: the database was restored by olga"
    ]
    old = backlog.AuditState(restored_at=NOW - timedelta(days=4), restore="the database was restored by olga")
    assert list_alert_lines(audit=old) == []


def test_instances_that_an_unproven_nova_does_not_know_are_an_alert_that_says_what_to_do() -> None:
    (line,) = list_alert_lines(unknown_to_nova=3)
    assert line.startswith("bad not proven: Nova answers 404 for 3 instances that hold requests, and for every")
    assert line.endswith("Check the region and CYBORG_NOVA_ENDPOINT, or confirm the address.")


@pytest.mark.django_db(transaction=True)
def test_clients_that_were_refused_lately_are_named_with_a_link_to_their_events() -> None:
    assert backlog.read_backlog().refused_clients == ""
    refusal_counts.forget()
    for client in ["address 192.0.2.7"] * 23 + ["project p1"] * 2 + [f"address 198.51.100.{n}" for n in range(20)]:
        refused_clients.note_refused_client(client)
    refusal_counts.record()
    named = backlog.read_backlog().refused_clients
    assert named.startswith("address 192.0.2.7 (23 times), project p1 (2 times), address ")
    assert named.count("times") == refused_clients.MAX_NAMED
    (line,) = list_alert_lines(refused_clients=named)
    assert line.startswith("warn busy: Clients were refused") and line.endswith(named)


def test_quarantined_devices_raise_a_warning() -> None:
    assert list_alert_lines({"quarantined": 2}) == [
        "warn quarantined: 2 devices quarantined: read the reason, then release or retire."
    ]


def test_a_late_intent_is_shown_with_its_error_and_a_stuck_one_takes_precedence() -> None:
    late = backlog.IntentBacklog(3, 0, NOW - timedelta(minutes=4), "503 from Placement")
    # Without a configured cloud nothing processes these intents.
    assert list_alert_lines(intents={"provider": late}) == []
    with jobs.JOBS.replaced("placement", jobs.Job("none", intent_kind="provider")):
        assert list_alert_lines(intents={"provider": late}) == [
            "warn behind: Placement is behind by 4 min, 3 changes waiting: 503 from Placement"
        ]
    stuck = backlog.IntentBacklog(3, 1, NOW, "x" * 300)
    (line,) = list_alert_lines(intents={"provider": stuck})
    assert line.startswith("bad stuck: 1 intent failed ten times or more: xxx") and line.endswith("x…")


def test_a_mail_server_that_fails_raises_an_alert_with_its_error() -> None:
    (line,) = list_alert_lines(mail_error="The mail server did not answer in time.")
    assert line.startswith("warn mail: The mail server sends no mail now") and line.endswith("did not answer in time.")


def test_late_binds_waiting_reports_and_sleeping_workers_raise_alerts() -> None:
    assert [line.split(":")[0] for line in list_alert_lines(near=3, overdue=1)] == ["bad stuck", "warn late"]
    old = NOW - timedelta(seconds=40)
    assert [line.split(":")[0] for line in list_alert_lines(spool=2, spool_oldest=old, tick_oldest=old)] == [
        "bad waiting",
        "bad asleep",
    ]
    assert list_alert_lines(spool=2, spool_oldest=NOW, tick_oldest=NOW, binding=5) == []


@pytest.mark.django_db
def test_capacity_counts_held_free_and_out_of_offer_by_class() -> None:
    apply_report(get_or_create_host(), make_driver_report(*(make_card(n, handles=4) for n in range(3))))
    with conductor.writing():
        Device.objects.filter(address__in=["0000:00:00.0", "0000:01:00.0"]).update(state="ready")
        profile = DeviceProfile.objects.create(name="p", groups=[])
        for handle in AttachHandle.objects.order_by("id")[:3]:
            AcceleratorRequest.objects.create(
                project_id="p",
                state="Bound",
                profile=profile,
                group={},
                deployable=handle.deployable,
                attach_handle=handle,
            )
    ((one,),) = capacity.query_capacity(None, capacity.BY_RESOURCE_CLASS)
    assert (one.name, one.total, one.held, one.free, one.reserved) == ("FPGA", 12, 3, 5, 4)
    assert 'class="free" width="66.67"' in one.bar and 'class="held" width="25.00"' in one.bar
    with conductor.writing():
        Device.objects.filter(address="0000:02:00.0").update(state="retired")
    assert capacity.query_capacity(None, capacity.BY_RESOURCE_CLASS)[0][0].total == 8


@pytest.mark.django_db
@pytest.mark.slow
def test_the_overview_lists_alerts_whose_links_open_lists_with_rows(operator: Client, fill: Fill) -> None:
    fill(30)
    with conductor.writing():
        Device.objects.filter(address="0000:02:00.0").update(state="failed")
        Device.objects.filter(address="0000:03:00.0").update(state="quarantined")
        Device.objects.filter(address="0000:00:00.0").update(state="missing", status="failed")
        Intent.objects.update(attempts=10, last_error="503")
        AcceleratorRequest.objects.filter(state="Bound").update(state="BindStarted", deadline=NOW)
    with CaptureQueriesContext(connection) as captured:
        page = operator.get("/admin/")
    assert len(captured) <= 10
    needs = {need.label: need for _, need in page.context["needs"]}
    assert {
        "missing",
        "failed",
        "broken",
        "quarantined",
        "failing",
        "stuck",
        "new",
    } <= needs.keys() and not page.context["calm"]
    for need in needs.values():
        if need.url.startswith("/"):
            assert operator.get(need.url).status_code == 200, need.url
            if need.url.startswith("/admin/accelerators/device/") and need.label != "full":
                assert operator.get(need.url).context["cl"].result_count >= int(need.link_text.split()[0])


@pytest.mark.django_db
def test_binds_that_fail_repeatedly_for_one_reason_on_a_host_are_an_alert_with_advice() -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1, handles=1)))
    create_profiles(plain={})
    left_behind = str(uuid4())
    for number in range(1, 4):
        with pytest.raises(RefusedError):
            bind_new_requests("plain", left_behind)
        assert len(backlog.read_backlog().failed_binds) == (number == 3), "one or two failures are not shown"
    (line,) = list_alert_lines(failed_binds=backlog.read_backlog().failed_binds)
    assert line.startswith(
        "bad binds: 3 binds failed on cmp1 within 15 minutes (unknown_provider), the last (instance "
    )
    assert (
        f", host cmp1, provider {left_behind}) because: Deployable not found with resource provider uuid={left_behind}."
        " Placement offers a provider that no device has: the list of contradictions"
    ) in line


def refuse_unknown_requests(number: int, instance: str, provider: str) -> None:
    """Bind requests that do not exist, and record the refusals as another process would do."""
    refusal_counts.forget()
    for _ in range(number):
        with pytest.raises(RefusedError):
            binding.bind_requests([binding.BindSpec(str(uuid4()), "cmp1", provider, instance)], NOVA)
    refusal_counts.record()


@pytest.mark.django_db
def test_binds_that_are_refused_repeatedly_without_a_change_are_an_alert_with_the_newest_bind_and_advice(
    operator: Client,
) -> None:
    first, second, provider = str(uuid4()), str(uuid4()), str(uuid4())
    refuse_unknown_requests(1, first, provider)
    assert backlog.read_backlog().failed_binds == [], "a single refusal is not shown"
    refuse_unknown_requests(4, second, provider)
    (found,) = backlog.read_backlog().failed_binds
    assert (found.failure, found.is_refused, found.number, found.instance) == ("unknown_request", True, 5, second)
    (line,) = list_alert_lines(failed_binds=[found])
    assert line.startswith(
        "bad binds: 5 binds were refused without a change within 15 minutes (unknown_request), the last (instance"
        f" {second}, host cmp1, provider {provider}) because: ExtArq not found with uuid="
    )
    assert line.endswith("find the request id in the client's log.")
    page = operator.get("/admin/")
    (need,) = (need for _, need in page.context["needs"] if need.label == "binds")
    assert 'href="/help/troubleshooting/#binds-fail-or-are-refused">What to do</a>' in page.content.decode()
    events = operator.get(need.url).content.decode()
    assert events.count("ExtArq not found with uuid=") == 2


def test_the_manual_has_the_part_to_which_alerts_about_binds_lead_and_explains_each_reason() -> None:
    name, _, anchor = alerts.BINDS_PLACE.partition(".md#")
    assert anchor in [section.anchor for section in site.render_body(name, site.SERVED_EDITION).sections]
    rows = (contents.DOCS_FOLDER / f"{name}.md").read_text()
    assert [failure for failure in BindFailure if f"| `{failure.value}` |" not in rows] == []
