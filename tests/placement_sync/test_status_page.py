"""Test the console page about a host in Placement, the list of discrepancies, and the API of discrepancies."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
from django.urls import reverse

from accelerators import conductor
from accelerators.devices import lifecycle
from accelerators.domain.caller import Caller
from accelerators.models import Device, Host, Intent
from cyborgweb.models import ApiToken
from placement_sync.jobs import providers
from placement_sync.models import Discrepancy, DiscrepancyKind
from tests.placement_sync.session import (
    COMPUTE_PROVIDER,
    placement_session,
)
from tests.support.reports import apply_report, get_or_create_host, make_card, make_driver_report
from tests.support.statements import count_statements

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("placement")]
ADMIN = Caller("ops", "u", frozenset({"admin"}), "p")


@pytest.fixture
def operator(client: Client) -> Client:
    client.force_login(User.objects.create(username="olga", is_staff=True, is_superuser=True))
    return client


def make_ready_host(cards: int = 1) -> Host:
    host = get_or_create_host()
    apply_report(host, make_driver_report(*(make_card(n, handles=4) for n in range(cards))))
    for device in Device.objects.values_list("uuid", flat=True):
        lifecycle.enable_device(device, ADMIN)
    return host


def get_host_page(operator: Client, host: Host) -> str:
    answered = operator.get(reverse("admin:placement_sync_tree_change", args=[host.uuid]))
    assert answered.status_code == 200
    return answered.content.decode()


def post_host_action(operator: Client, host: Host, op: str) -> Any:
    return operator.post(reverse("admin:placement_sync_tree_ask", args=[host.pk]), {"op": op})


def test_the_host_page_shows_the_desired_beside_the_observed_provider(operator: Client) -> None:
    host = make_ready_host()
    told = get_host_page(operator, host)
    for fact in ("behind", "FPGA 4, 0 reserved", "was not seen in Placement yet", "a new provider", "Nova makes it"):
        assert fact in told
    providers.step()
    told = get_host_page(operator, host)
    for fact in ("in step", COMPUTE_PROVIDER, "generation 2", "CUSTOM_TEST", "Placement is up to date", "by</dt>"):
        assert fact in told
    assert "</span>differs" not in told
    lifecycle.disable_device(Device.objects.get().uuid, ADMIN)
    assert "reserved 0 → 4" in get_host_page(operator, host)


def test_a_host_without_compute_provider_is_shown_as_waiting_on_page_and_list(operator: Client) -> None:
    host = make_ready_host()
    placement_session.model.providers.clear()
    providers.step()
    told = get_host_page(operator, host)
    assert "waiting for compute provider cmp1" in told
    listed = operator.get(reverse("admin:placement_sync_tree_changelist")).content.decode()
    assert reverse("admin:placement_sync_tree_change", args=[host.uuid]) in listed
    assert "waiting for compute provider cmp1" in listed


def test_a_comparison_shows_the_same_as_the_dry_run_command_and_writes_nothing(operator: Client) -> None:
    host = make_ready_host()
    out = StringIO()
    call_command("placement_sync", dry_run=True, host=["cmp1"], stdout=out)
    lines = out.getvalue().splitlines()[1:-1]
    told = post_host_action(operator, host, "compare").content.decode()
    assert all(line.strip() in told for line in lines)
    assert placement_session.model.writes == 0
    providers.step()
    assert "nothing would be written" in post_host_action(operator, host, "compare").content.decode()
    placement_session.away = True
    assert "! GET /resource_providers: nobody is there" in post_host_action(operator, host, "compare").content.decode()


def test_retry_makes_the_intent_due_at_once(operator: Client) -> None:
    host = make_ready_host()
    placement_session.away = True
    providers.step()
    placement_session.away = False
    with conductor.writing():
        Intent.objects.update(next_at="2100-01-01T00:00:00Z")
    providers.step()
    assert len(placement_session.model.providers) == 1
    assert post_host_action(operator, host, "retry").status_code == 302
    providers.step()
    assert len(placement_session.model.providers) == 2


def test_a_user_without_permission_can_neither_see_nor_compare_nor_retry(client: Client) -> None:
    host = make_ready_host()
    client.force_login(User.objects.create(username="vera", is_staff=True))
    assert client.get(reverse("admin:placement_sync_tree_change", args=[host.pk])).status_code == 403
    for op in ("compare", "retry"):
        assert post_host_action(client, host, op).status_code == 403
    assert placement_session.seen_calls == []


@pytest.mark.slow
def test_crafted_ids_are_redirected_or_refused(operator: Client) -> None:
    make_ready_host()
    for crafted in ("0", "-1", "9" * 40, "nobody", "%00", "11111111-1111-1111-1111-111111111111", "1e3"):
        for name in ("tree_change", "tree_ask", "discrepancy_change"):
            url = reverse(f"admin:placement_sync_{name}", args=[crafted])
            assert operator.get(url).status_code in (302, 403, 404), url
            assert operator.post(url).status_code in (302, 403, 404), url


def test_the_host_page_costs_the_same_statements_at_any_number_of_devices(operator: Client) -> None:
    host = make_ready_host(2)
    providers.step()
    page = reverse("admin:placement_sync_tree_change", args=[host.uuid])
    few = count_statements(operator, page)
    make_ready_host(12)
    providers.step()
    assert count_statements(operator, page, enough=few) == few <= 12


def make_discrepancy(host: Host) -> Discrepancy:
    now, instance = datetime.now(UTC), uuid.uuid4()
    return Discrepancy.objects.create(
        kind=DiscrepancyKind.UNCLAIMED,
        host=host,
        device=Device.objects.first(),
        provider=uuid.uuid4(),
        provider_name="cmp1_0000:00:00.0",
        instance=instance,
        since=now,
        seen_at=now,
        said=f"Instance {instance} has lost its claim: <shelve it>.",
    )


@pytest.mark.slow
def test_a_discrepancy_is_listed_searchable_and_shown_on_its_host_page(operator: Client) -> None:
    listing = reverse("admin:placement_sync_discrepancy_changelist")
    assert "agree with what is bound" in operator.get(listing).content.decode()
    host = make_ready_host()
    row = make_discrepancy(host)
    for query in ("", f"?q={str(row.instance)[:9]}", "?q=cmp1", "?kind__exact=unclaimed"):
        told = operator.get(listing + query).content.decode()
        for fact in ("attached but unclaimed", str(row.instance), "lost its claim: &lt;shelve it&gt;", "cmp1"):
            assert fact in told, query
    assert (
        str(row.instance)
        in operator.get(reverse("admin:placement_sync_discrepancy_change", args=[row.uuid])).content.decode()
    )
    assert "lost its claim" in get_host_page(operator, host)


def test_the_api_lists_discrepancies_for_an_admin_and_refuses_a_reader(client: Client) -> None:
    row = make_discrepancy(make_ready_host())
    user = User.objects.create(username="rita")
    admin, reader = (
        {"X-Auth-Token": ApiToken.create_with_secret(name, user, roles, "p1")}
        for name, roles in (("a", ["admin", "manager", "member", "reader"]), ("r", ["reader"]))
    )
    assert client.get("/api/discrepancies/", headers=reader).status_code == 403
    for query, count in (("", 1), ("?kind=unattached", 0), (f"?instance={row.instance}&host=cmp1", 1)):
        found = json.loads(client.get(f"/api/discrepancies/{query}", headers=admin).content)["results"]
        assert len(found) == count, query
    one = json.loads(client.get(f"/api/discrepancies/{row.uuid}/", headers=admin).content)
    assert (one["kind"], one["host"]["name"], one["instance"]) == ("unclaimed", "cmp1", str(row.instance))
    assert one["device"]["address"] == "0000:00:00.0"
    assert client.get("/api/discrepancies/?kind=nonsense", headers=admin).status_code == 400
