"""Test the pages of a host, a device and a request: contents, links, and statements."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from uuid import uuid4

import pytest
from django.db.models import Model
from django.test import Client
from msgspec.structs import replace

from accelerators import conductor
from accelerators.admin import device_summaries
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandAnswer
from accelerators.domain.states import EventSource
from accelerators.models import (
    AcceleratorRequest,
    AttachHandle,
    Command,
    Deployable,
    Device,
    Host,
    Intent,
    ReleasedHandle,
)
from accelerators.ui import badges
from accelerators.workflows import command_endings
from agents.models import Agent
from placement_sync.models import Discrepancy, DiscrepancyKind
from tests.support.reports import apply_report, create_heard_host, get_or_create_host, make_card, make_driver_report
from tests.support.requests import NOVA, bind_new_requests, create_profiles, offer_devices
from tests.support.statements import count_statements

pytestmark = pytest.mark.django_db
OTHER_HANDLE_INFO = '{"bus": "02", "device": "00", "domain": "0000", "function": "%x"}'


def row_page(row: Model) -> str:
    return badges.page_url(row._meta.model_name, row.pk)  # type: ignore[arg-type]


def get_page(client: Client, row: Model) -> str:
    return client.get(row_page(row)).content.decode()


def create_ready_host(handles: int = 4, devices: int = 2) -> Host:
    """Create a host whose cards are ready providers, on two NUMA nodes in turn."""
    host = create_heard_host("cmp1", 0)
    found = [make_card(bus + 1, handles=handles, numa_node=bus % 2) for bus in range(devices)]
    apply_report(host, make_driver_report(*found, driver="pci_driver"), seq=2)
    offer_devices()
    create_profiles(small={})
    return Host.objects.get()


def create_bound_requests(bus: int = 1, times: int = 1) -> AcceleratorRequest:
    """Bind this many requests to a card, each for an instance of its own; return the last one."""
    provider = str(Deployable.objects.get(device__address=f"0000:{bus:02x}:00.0").rp_uuid)
    for _ in range(times):
        (request,) = bind_new_requests("small", provider)
    return request


def create_discrepancy(device: Device, instance: object) -> None:
    now = datetime.now(UTC)
    Discrepancy.objects.create(
        kind=DiscrepancyKind.WITHOUT_DEVICE,
        host=device.host,
        device=device,
        provider=uuid4(),
        provider_name="p",
        instance=instance,
        since=now,
        seen_at=now,
        said=f"Instance {instance} lacks its device: put it back.",
    )


def test_handles_are_shown_free_held_being_bound_reserved_missing_or_missing_and_held() -> None:
    host = create_ready_host()
    second = host.devices.get(address="0000:02:00.0")
    create_bound_requests(1, 2)
    with conductor.writing():
        AttachHandle.objects.filter(deployable__device=second).update(attach_type="MDEV")
    create_bound_requests(2)
    reduced_card = replace(make_card(1, handles=1), numa_node=0)
    apply_report(
        host, make_driver_report(reduced_card, make_card(2, handles=4, numa_node=1), driver="pci_driver"), seq=3
    )
    with conductor.writing():
        AttachHandle.objects.filter(deployable__device=second).order_by("-id").update(attach_type="MDEV")

    def states() -> list[list[str]]:
        return [[unit.state for unit in one.cells] for one in device_summaries.load_cards(host.devices.order_by("key"))]

    assert states()[0] == ["held", "missing and held", "missing", "missing"]
    assert states()[1][:2] == ["being bound", "free"]
    with conductor.writing():
        Device.objects.filter(pk=second.pk).update(state="maintenance")
    assert states()[1][:2] == ["being bound", "reserved"]
    with conductor.writing():
        Device.objects.filter(pk=second.pk).update(state="missing", returns_to="maintenance")
    assert set(states()[1]) == {"missing and held", "missing"}


def test_of_many_handles_held_ones_are_shown_first_and_all_are_counted() -> None:
    host = create_ready_host(handles=8, devices=1)
    create_bound_requests()
    with conductor.writing():
        handle = AttachHandle.objects.order_by("id").last()
        AcceleratorRequest.objects.update(attach_handle=handle)
    (shown,) = device_summaries.load_cards(list(host.devices.all()), 3)
    assert [unit.state for unit in shown.cells] == ["free", "free", "held"]
    assert (shown.held_count, shown.handle_counts.total(), shown.hidden_counts.total()) == (1, 8, 5)


def test_the_page_of_a_host_shows_the_same_holders_in_picture_and_table(operator: Client) -> None:
    host, request = create_ready_host(), None
    request = create_bound_requests()
    page = get_page(operator, host)
    assert "NUMA node 0" in page
    assert page.count(f"instance {request.instance_uuid}") == 1, "in the picture"
    link = f"/admin/accelerators/acceleratorrequest/?q={request.instance_uuid}"
    assert f'<a href="{link}">{request.instance_uuid}</a></td>' in page, "and in the table"
    assert page.count(f'href="{row_page(request)}"') == 2
    for device in host.devices.all():
        assert page.count(f'href="{row_page(device)}"') >= 2
    assert "1 of 4 held" in page
    assert Agent.objects.get().public_key in page
    assert not re.search(r"<(?!html)[^>]*\sstyle=|<style|\son\w+=", page)


def test_the_page_of_a_host_names_a_driver_that_is_no_longer_asked(operator: Client) -> None:
    host = create_ready_host()
    with conductor.writing():
        Host.objects.update(drivers={})
    apply_report(host, make_driver_report(driver="other_driver"), seq=4)
    assert "The driver pci_driver does not run on cmp1 any more" in get_page(operator, host)


@pytest.mark.parametrize("devices", [1, 6])
def test_P3_the_host_page_costs_at_most_twelve_statements(operator: Client, devices: int) -> None:
    host = create_ready_host(handles=80 if devices > 1 else 1, devices=devices)
    create_discrepancy(host.devices.all()[0], uuid4())
    assert count_statements(operator, row_page(host), enough=12) <= 12


def test_a_host_without_devices_and_agent_has_a_page(operator: Client) -> None:
    page = get_page(operator, get_or_create_host("cmp9"))
    assert "Its drivers found no devices." in page
    assert '<svg class="picture' not in page


def test_the_page_of_a_device_shows_holders_discrepancies_and_stored_data(operator: Client) -> None:
    device = create_ready_host().devices.order_by("key")[0]
    request = create_bound_requests()
    create_discrepancy(device, request.instance_uuid)
    page = get_page(operator, device)
    assert f"{request.instance_uuid}: lacks" not in page
    assert f"Instance {request.instance_uuid} lacks its device" in page
    assert f'href="{row_page(request)}"' in page
    assert f"?q={request.instance_uuid}" in page
    found = json.loads(operator.get(row_page(device)).context["stored"])
    assert (found["address"], len(found["deployables"][0]["handles"])) == ("0000:01:00.0", 4)
    listed = operator.get(operator.get(row_page(device)).context["handles_url"])
    assert listed.context["cl"].result_count == 4


def test_the_page_of_a_device_shows_the_signals_of_the_latest_health_check(operator: Client) -> None:
    device = create_ready_host().devices.order_by("key")[0]
    with conductor.writing():
        Device.objects.update(acts="health")
    for limit in ("80", "90"):
        command = command_queue.order_device_command("health", device.uuid, NOVA)
        detail = {"signals": json.dumps([{"name": "temperature", "value": "71", "unit": "°C", "limit": limit}])}
        command_queue.store_answers([CommandAnswer(command.host_id, command.pk, "succeeded", "ok", detail)])
        command_endings.end_answered_commands()
    page = get_page(operator, device)
    assert "<td>temperature</td><td>71 °C</td><td>90</td>" in page
    assert "<td>80</td>" not in page


def test_malformed_signals_of_a_driver_do_not_break_the_page_of_the_device(operator: Client) -> None:
    device = create_ready_host().devices.order_by("key")[0]
    with conductor.writing():
        Device.objects.update(acts="health")
    for said in ("[1, 2]", "{", '{"a": 1}'):
        command = command_queue.order_device_command("health", device.uuid, NOVA)
        command_queue.store_answers([CommandAnswer(command.host_id, command.pk, "succeeded", "", {"signals": said})])
        command_endings.end_answered_commands()
        assert operator.get(row_page(device)).status_code == 200


@pytest.mark.parametrize("handles", [1, 300])
def test_P3_the_device_page_costs_at_most_twelve_statements(operator: Client, handles: int) -> None:
    device = create_ready_host(handles=handles, devices=1).devices.get()
    create_bound_requests()
    create_discrepancy(device, uuid4())
    with conductor.writing():
        Device.objects.update(acts="health program")
    assert count_statements(operator, row_page(device), enough=12) <= 12
    page = operator.get(row_page(device)).context
    assert (page["held"], page["total"], page["hidden"]) == (1, handles, max(0, handles - 256))


def test_the_page_of_a_request_shows_the_steps_of_its_bind_with_durations(operator: Client) -> None:
    create_ready_host()
    with conductor.writing():
        AttachHandle.objects.update(attach_type="MDEV")
    request = create_bound_requests()

    def words() -> list[str]:
        return [step.entry.word for step in operator.get(row_page(request)).context["steps"]]

    assert words() == ["requested", "bind started"]
    assert "unless its host answers" in get_page(operator, request)
    command = Command.objects.get(op="attach")
    with conductor.writing():
        Command.objects.update(taken_at=datetime.now(UTC), started_at=datetime.now(UTC))
    command_queue.store_answers([CommandAnswer(command.host_id, command.pk, "succeeded", "the mdev is there")])
    with conductor.writing():  # PostgreSQL's now() stands still within the test's transaction
        Command.objects.update(answered_at=datetime.now(UTC))
    command_endings.end_answered_commands()
    assert words() == ["requested", "bind started", "attach: taken", "attach: started", "attach: succeeded", "bound"]
    page = operator.get(row_page(request))
    assert re.fullmatch(r"bound after (\d+ ms|[\d.]+ s)", page.context["took"])
    assert row_page(command) in page.content.decode()
    assert row_page(Device.objects.get(address="0000:01:00.0")) in page.content.decode()
    assert row_page(AttachHandle.objects.get(request=request)) in page.content.decode()


def test_the_reason_of_a_failed_bind_is_shown_beside_its_state_and_in_its_steps(operator: Client) -> None:
    create_ready_host()
    request = create_bound_requests(times=4)
    with pytest.raises(Exception, match="all are held"):
        create_bound_requests()
    failed = AcceleratorRequest.objects.exclude(pk=request.pk).get(state="BindFailed")
    assert get_page(operator, failed).count("all are held") >= 2


def record_request_events(request: AcceleratorRequest, *actions: str, reason: str = "") -> None:
    about: conductor.EventDetails = {
        "subject": (request.uuid, ""),
        "changes": {"notice": [None, "completed"]},
        "reason": reason,
    }
    conductor.record_events(
        [conductor.build_event(f"request.{one}", EventSource.SYSTEM, "nova", **about) for one in actions]
    )


def test_the_page_of_a_request_shows_novas_answers_and_the_waiting_notice(operator: Client) -> None:
    create_ready_host()
    request = create_bound_requests()
    assert "CYBORG_NOVA_ENDPOINT" in get_page(operator, request)
    record_request_events(request, "notice_refused", reason="Nova was told completed: Nova answered 403")
    with conductor.writing():
        waits = Intent(kind="notice", key=str(request.uuid), payload={"completed": True}, attempts=3)
        waits.last_error = "Nova answered 503"
        waits.save()
    page = get_page(operator, request)
    assert "Nova answered 403" in page
    assert "tried 3 times, last answer: Nova answered 503" in page
    record_request_events(request, "notified", reason="Nova was told completed: 200 taken")
    with conductor.writing():
        Intent.objects.all().delete()
    shown = operator.get(row_page(request)).context["notices"]
    assert [one.answer for one in shown] == ["Nova answered 403", "200 taken"]


def test_P3_the_request_page_costs_at_most_ten_statements(operator: Client) -> None:
    create_ready_host(handles=12, devices=1)
    request = create_bound_requests(times=10)
    with conductor.writing():
        AcceleratorRequest.objects.update(instance_uuid=request.instance_uuid)
    record_request_events(request, *["notified"] * 150)
    create_discrepancy(Device.objects.get(), request.instance_uuid)
    assert count_statements(operator, row_page(request), enough=10) <= 10
    page = operator.get(row_page(request))
    assert len(page.context["siblings"]) == 9
    assert "lacks its device" in page.content.decode()


@pytest.mark.slow
def test_pages_of_unknown_rows_cause_no_server_error(operator: Client) -> None:
    for model in ("host", "device", "acceleratorrequest"):
        for key in ("0", "999999999999999999999", "x'y", "00000000-0000-4000-8000-000000000000", "%00"):
            answered = operator.get(f"/admin/accelerators/{model}/{key}/change/")
            assert answered.status_code in (302, 400, 404), (model, key)


def test_a_handle_that_waits_for_its_host_is_shown_as_released_with_the_reason(operator: Client) -> None:
    apply_report(get_or_create_host(), make_driver_report(make_card(1, handles=2)))
    handle = AttachHandle.objects.order_by("id").first()
    assert handle
    with conductor.writing():
        ReleasedHandle.objects.create(
            handle=handle, instance=uuid4(), ask_at=datetime.now(UTC), answer="a guest has it"
        )
    page = get_page(operator, Device.objects.get())
    assert 'class="cell released"' in page
    assert '<span class="mark warn" title="instance ' in page and "(a guest has it)" in page
    found = operator.get("/admin/accelerators/attachhandle/?use=released").context["cl"].result_list
    assert [one.pk for one in found] == [handle.pk]
