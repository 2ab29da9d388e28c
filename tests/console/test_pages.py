"""The pages of one host, one device, one request: what they say, what they link to, what they cost."""

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
from accelerators.commands import placing
from accelerators.commands.placing import Answer
from accelerators.domain.caller import Caller
from accelerators.domain.states import Source
from accelerators.models import (
    AcceleratorRequest,
    AttachHandle,
    Command,
    Deployable,
    Device,
    DeviceProfile,
    Host,
    Intent,
)
from accelerators.requests import binding
from accelerators.ui import badges
from accelerators.workflows import command_results
from agents.models import Agent
from placement_sync.models import Discrepancy, Kind
from tests.support.reports import a_heard_host, a_host, answer, apply, card
from tests.support.statements import statements

pytestmark = pytest.mark.django_db
NOVA = Caller("nova", "n", frozenset({"member"}), "p1", service=True)
OTHER = '{"bus": "02", "device": "00", "domain": "0000", "function": "%x"}'


def url(row: Model) -> str:
    return badges.page(row._meta.model_name, row.pk)  # type: ignore[arg-type]


def text(client: Client, row: Model) -> str:
    return client.get(url(row)).content.decode()


def a_box(handles: int = 4, devices: int = 2) -> Host:
    """A host whose cards are all ready, on two NUMA nodes, each a provider."""
    host = a_heard_host("cmp1", 0)
    found = [card(bus + 1, handles=handles, numa_node=bus % 2) for bus in range(devices)]
    apply(host, answer(*found, driver="pci_driver"), seq=2)
    with conductor.writing():
        Device.objects.update(state="ready")
        for deployable in Deployable.objects.all():
            Deployable.objects.filter(pk=deployable.pk).update(rp_uuid=uuid4())
        DeviceProfile.objects.get_or_create(name="small", defaults={"groups": [{"resources:FPGA": "1"}]})
    return Host.objects.get()


def bound(bus: int = 1, times: int = 1) -> AcceleratorRequest:
    """Requests for instances of their own on a card; the last one."""
    provider = str(Deployable.objects.get(device__address=f"0000:{bus:02x}:00.0").rp_uuid)
    for _ in range(times):
        (uuid,) = binding.create("small", NOVA)
        binding.bind([binding.Bind(uuid, "cmp1", provider, str(uuid4()))], NOVA)
    return AcceleratorRequest.objects.get(uuid=uuid)


def a_fault(device: Device, instance: object) -> None:
    now = datetime.now(UTC)
    Discrepancy.objects.create(
        kind=Kind.WITHOUT_DEVICE,
        host=device.host,
        device=device,
        provider=uuid4(),
        provider_name="p",
        instance=instance,
        since=now,
        seen_at=now,
        said=f"Instance {instance} lacks its device: put it back.",
    )


def test_handles_are_free_held_being_bound_reserved_missing_or_lost() -> None:
    host = a_box()
    second = host.devices.get(address="0000:02:00.0")
    bound(1, 2)
    with conductor.writing():
        AttachHandle.objects.filter(deployable__device=second).update(attach_type="MDEV")
    bound(2)
    left = replace(card(1, handles=1), numa_node=0)
    apply(host, answer(left, card(2, handles=4, numa_node=1), driver="pci_driver"), seq=3)
    with conductor.writing():
        AttachHandle.objects.filter(deployable__device=second).order_by("-id").update(attach_type="MDEV")

    def states() -> list[list[str]]:
        return [[unit.state for unit in one.units] for one in device_summaries.of(host.devices.order_by("key"))]

    assert states()[0] == ["held", "missing and held", "missing", "missing"]
    assert states()[1][:2] == ["being bound", "free"]
    with conductor.writing():
        Device.objects.filter(pk=second.pk).update(state="maintenance")
    assert states()[1][:2] == ["being bound", "reserved"]
    with conductor.writing():
        Device.objects.filter(pk=second.pk).update(state="missing", returns_to="maintenance")
    assert set(states()[1]) == {"missing and held", "missing"}


def test_of_many_handles_those_that_matter_are_shown_and_all_are_counted() -> None:
    host = a_box(handles=8, devices=1)
    bound()
    with conductor.writing():
        handle = AttachHandle.objects.order_by("id").last()
        AcceleratorRequest.objects.update(attach_handle=handle)
    (shown,) = device_summaries.of(list(host.devices.all()), 3)
    assert [unit.state for unit in shown.units] == ["free", "free", "held"]
    assert (shown.held, shown.counts.total(), shown.hidden.total()) == (1, 8, 5)


def test_the_host_is_a_picture_and_the_table_says_the_same(operator: Client) -> None:
    host, request = a_box(), None
    request = bound()
    page = text(operator, host)
    assert "NUMA node 0" in page
    assert page.count(f"instance {request.instance_uuid}") == 1, "in the picture"
    assert f'<td class="mono">{request.instance_uuid}</td>' in page, "and in the table"
    assert page.count(f'href="{url(request)}"') == 2
    for device in host.devices.all():
        assert page.count(f'href="{url(device)}"') >= 2
    assert "1 of 4 held" in page
    assert Agent.objects.get().public_key in page
    assert not re.search(r"<(?!html)[^>]*\sstyle=|<style|\son\w+=", page)


def test_a_driver_that_is_not_asked_any_more_is_said(operator: Client) -> None:
    host = a_box()
    with conductor.writing():
        Host.objects.update(drivers={})
    apply(host, answer(driver="other_driver"), seq=4)
    assert "The driver pci_driver does not run on cmp1 any more" in text(operator, host)


@pytest.mark.parametrize("devices", [1, 6])
def test_P3_the_host_page_costs_at_most_twelve_statements(operator: Client, devices: int) -> None:
    host = a_box(handles=80 if devices > 1 else 1, devices=devices)
    a_fault(host.devices.all()[0], uuid4())
    assert statements(operator, url(host)) <= 12


def test_a_host_without_devices_and_agent_has_a_page(operator: Client) -> None:
    page = text(operator, a_host("cmp9"))
    assert "Its drivers found no devices." in page
    assert '<svg class="picture' not in page


def test_the_device_says_who_holds_it_what_is_wrong_and_what_is_stored(operator: Client) -> None:
    device = a_box().devices.order_by("key")[0]
    request = bound()
    a_fault(device, request.instance_uuid)
    page = text(operator, device)
    assert f"{request.instance_uuid}: lacks" not in page
    assert f"Instance {request.instance_uuid} lacks its device" in page
    assert f'href="{url(request)}"' in page
    assert f"?q={request.instance_uuid}" in page
    found = json.loads(operator.get(url(device)).context["stored"])
    assert (found["address"], len(found["deployables"][0]["handles"])) == ("0000:01:00.0", 4)
    listed = operator.get(operator.get(url(device)).context["handles_url"])
    assert listed.context["cl"].result_count == 4


def test_the_device_shows_what_its_driver_answered_last(operator: Client) -> None:
    device = a_box().devices.order_by("key")[0]
    with conductor.writing():
        Device.objects.update(acts="health")
    for limit in ("80", "90"):
        command = placing.ask("health", device.uuid, NOVA)
        detail = {"signals": json.dumps([{"name": "temperature", "value": "71", "unit": "°C", "limit": limit}])}
        placing.answer([Answer(command.host_id, command.pk, "succeeded", "ok", detail)])
        command_results.settle()
    page = text(operator, device)
    assert "<td>temperature</td><td>71 °C</td><td>90</td>" in page
    assert "<td>80</td>" not in page


def test_what_a_driver_answers_in_other_shapes_is_not_shown_and_breaks_nothing(operator: Client) -> None:
    device = a_box().devices.order_by("key")[0]
    with conductor.writing():
        Device.objects.update(acts="health")
    for said in ("[1, 2]", "{", '{"a": 1}'):
        command = placing.ask("health", device.uuid, NOVA)
        placing.answer([Answer(command.host_id, command.pk, "succeeded", "", {"signals": said})])
        command_results.settle()
        assert operator.get(url(device)).status_code == 200


@pytest.mark.parametrize("handles", [1, 300])
def test_P3_the_device_page_costs_at_most_twelve_statements(operator: Client, handles: int) -> None:
    device = a_box(handles=handles, devices=1).devices.get()
    bound()
    a_fault(device, uuid4())
    with conductor.writing():
        Device.objects.update(acts="health program")
    assert statements(operator, url(device)) <= 12
    page = operator.get(url(device)).context
    assert (page["held"], page["total"], page["hidden"]) == (1, handles, max(0, handles - 256))


def test_the_course_of_a_bind_is_told_with_its_durations(operator: Client) -> None:
    a_box()
    with conductor.writing():
        AttachHandle.objects.update(attach_type="MDEV")
    request = bound()

    def words() -> list[str]:
        return [step.what.word for step in operator.get(url(request)).context["steps"]]

    assert words() == ["requested", "bind started"]
    assert "unless its host answers" in text(operator, request)
    command = Command.objects.get(op="attach")
    with conductor.writing():
        Command.objects.update(taken_at=datetime.now(UTC), started_at=datetime.now(UTC))
    placing.answer([Answer(command.host_id, command.pk, "succeeded", "the mdev is there")])
    with conductor.writing():  # a test is one transaction, and in one all is answered at its begin
        Command.objects.update(answered_at=datetime.now(UTC))
    command_results.settle()
    assert words() == ["requested", "bind started", "attach: taken", "attach: started", "attach: succeeded", "bound"]
    page = operator.get(url(request))
    assert re.fullmatch(r"bound after (\d+ ms|[\d.]+ s)", page.context["took"])
    assert url(command) in page.content.decode()
    assert url(Device.objects.get(address="0000:01:00.0")) in page.content.decode()
    assert url(AttachHandle.objects.get(request=request)) in page.content.decode()


def test_why_a_bind_failed_stands_beside_its_state_and_in_its_course(operator: Client) -> None:
    a_box()
    request = bound(times=4)
    with pytest.raises(Exception, match="all are held"):
        bound()
    failed = AcceleratorRequest.objects.exclude(pk=request.pk).get(state="BindFailed")
    assert text(operator, failed).count("all are held") >= 2


def told(request: AcceleratorRequest, *actions: str, said: str = "") -> None:
    about: conductor.About = {"subject": (request.uuid, ""), "changes": {"notice": [None, "completed"]}, "reason": said}
    conductor.record_all([conductor.event(f"request.{one}", Source.SYSTEM, "nova", **about) for one in actions])


def test_each_answer_of_nova_is_told_and_what_still_waits(operator: Client) -> None:
    a_box()
    request = bound()
    assert "CYBORG_NOVA_ENDPOINT" in text(operator, request)
    told(request, "notice_refused", said="Nova was told completed: Nova answered 403")
    with conductor.writing():
        waits = Intent(kind="notice", key=str(request.uuid), payload={"completed": True}, attempts=3)
        waits.last_error = "Nova answered 503"
        waits.save()
    page = text(operator, request)
    assert "Nova answered 403" in page
    assert "tried 3 times, last answer: Nova answered 503" in page
    told(request, "notified", said="Nova was told completed: 200 taken")
    with conductor.writing():
        Intent.objects.all().delete()
    shown = operator.get(url(request)).context["told"]
    assert [one.said for one in shown] == ["Nova answered 403", "200 taken"]


def test_P3_the_request_page_costs_at_most_ten_statements(operator: Client) -> None:
    a_box(handles=12, devices=1)
    request = bound(times=10)
    with conductor.writing():
        AcceleratorRequest.objects.update(instance_uuid=request.instance_uuid)
    told(request, *["notified"] * 150)
    a_fault(Device.objects.get(), request.instance_uuid)
    assert statements(operator, url(request)) <= 10
    page = operator.get(url(request))
    assert len(page.context["siblings"]) == 9
    assert "lacks its device" in page.content.decode()


@pytest.mark.parametrize("model", ["host", "device", "acceleratorrequest"])
@pytest.mark.parametrize("key", ["0", "999999999999999999999", "x'y", "00000000-0000-4000-8000-000000000000", "%00"])
def test_a_page_that_is_not_there_leads_back_and_never_fails(operator: Client, model: str, key: str) -> None:
    assert operator.get(f"/admin/accelerators/{model}/{key}/change/").status_code in (302, 400, 404)
