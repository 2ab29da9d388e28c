"""Test attachments over /api/, in the console and with the management command: order, progress, detach, permissions."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError
from django.test import Client
from django.urls import reverse

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.commands.command_queue import CommandOrder
from accelerators.domain import libvirt_xml
from accelerators.domain.libvirt_xml import HeldHandle
from accelerators.models import AcceleratorRequest, Attachment, Device, Event
from accelerators.workflows import attachment_orders
from tests.accelerators.api.own.conftest import Ask, get_error_message, get_results
from tests.accelerators.api.own.test_lifecycle import send_confirmed
from tests.placement_sync import attaching as lab
from tests.placement_sync.attaching import INSTANCE, FakeCloud, make_ready_cards, run_steps
from tests.support.clocks import replace_sleep
from tests.support.manage import run_verb

pytestmark = pytest.mark.django_db
UNKNOWN_UUID = "00000000-0000-4000-8000-000000000000"
LIBVIRT_ELEMENT = (
    '<hostdev mode="subsystem" type="pci" managed="yes"><source>'
    '<address domain="0x0000" bus="0x00" slot="0x00" function="0x0" /></source></hostdev>'
)


@pytest.fixture(autouse=True)
def cloud(settings: Any) -> Iterator[FakeCloud]:
    with lab.configured_cloud(settings) as one:
        make_ready_cards()
        yield one


def request_attachment(ask: Ask, **data: Any) -> dict[str, Any]:
    """Order an attachment and return it as the API answered."""
    response = ask("/api/attachments/", method="POST", data={"instance": INSTANCE, "profile": "one"} | data)
    assert response.status_code == 202, response.content
    row = json.loads(response.content)
    assert response["Location"] == row["url"]
    return row


def get_json(ask: Ask, url: str, by: str = "admin") -> dict[str, Any]:
    response = ask(url.removeprefix("http://testserver"), by)
    assert response.status_code == 200, response.content
    return json.loads(response.content)


def test_the_page_of_an_attachment_and_the_exports_name_the_hardware(
    ask: Ask, settings: Any, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device.objects.order_by("id")[0]
    monkeypatch.setattr(settings.KEYS, "hardware_names", (f"{device.vendor}:{device.model}=Big card",))
    order = {"instance": INSTANCE, "device": str(device.uuid)}
    assert ask("/api/attachments/", method="POST", data=order).status_code == 202
    run_steps()
    with conductor.writing():
        command_queue.place_commands([CommandOrder(op="health", device=device.uuid)])
    client.force_login(User.objects.create(username="olga", is_staff=True, is_superuser=True))
    address = reverse("admin:accelerators_attachment_change", args=[Attachment.objects.get().pk])
    page = client.get(address).content.decode()
    assert "one unit of Big card" in page
    assert f'<p class="after">Big card</p><pre class="mono wrapped">{html.escape(LIBVIRT_ELEMENT)}' in page
    columns = {"attachment": "device_name", "acceleratorrequest": "device_name", "command": "hardware"}
    for listed, column in columns.items():
        answer: Any = client.get(reverse(f"admin:accelerators_{listed}_export", args=["json"]))
        assert [one[column] for one in json.loads(b"".join(answer.streaming_content))] == ["Big card"], listed


@pytest.mark.slow
def test_an_attachment_is_requested_followed_and_detached(ask: Ask, cloud: FakeCloud) -> None:
    row = request_attachment(ask, reason="ticket 4711")
    assert (row["state"], row["by"], row["reason"], row["project"]) == ("asked", "admin-p1", "ticket 4711", "p1")
    assert (row["hotplug"], row["libvirt"], row["waits"]) == ("", [], None)
    run_steps()
    row = get_json(ask, row["url"])
    assert row["state"] == "attached"
    assert row["requests"] == [str(AcceleratorRequest.objects.get().uuid)]
    assert "stock Nova plugs no accelerator into a running guest" in row["hotplug"]
    assert row["libvirt"] == [LIBVIRT_ELEMENT]
    assert [step["step"] for step in row["steps"]] == ["asked", "chosen", "claiming", "claimed", "bound"]
    cloud.placement.away = True
    detach = row["url"].removeprefix("http://testserver") + "detach/"
    for _ in range(2):
        response = send_confirmed(ask, detach, {"reason": "over"})
        assert (response.status_code, json.loads(response.content)["state"]) == (202, "detaching")
    while lab.attaching.step():
        pass
    assert "nobody is there" in get_json(ask, row["url"])["waits"]
    cloud.placement.away = False
    run_steps()
    assert (get_json(ask, row["url"])["state"], cloud.device_allocations()) == ("detached", {})


@pytest.mark.slow
def test_an_attachment_that_holds_units_is_detached_only_with_the_token_of_its_preview(ask: Ask) -> None:
    row, other = request_attachment(ask), request_attachment(ask)
    path, other_path = (one["url"].removeprefix("http://testserver") + "detach/" for one in (row, other))
    shown = json.loads(ask(path, method="POST", data={"dry_run": True}).content)
    assert (shown["confirm"], shown["held"], shown["requests"]) == (False, 0, [])
    stale = {"token": shown["token"]}
    run_steps()
    assert "Nothing was done" in get_error_message(ask(path, method="POST", data=stale), 409, "stale_preview")
    answer = ask(path, method="POST", data={"reason": "over"})
    assert "1 held device" in get_error_message(answer, 409, "not_confirmed")
    preview = json.loads(answer.content)["preview"]
    assert (preview["attachment"], preview["instance"], preview["state"]) == (row["uuid"], INSTANCE, "attached")
    assert preview["requests"] == get_json(ask, row["url"])["requests"] and preview["confirm"]
    assert {*Attachment.objects.values_list("state", flat=True)} == {"attached"}
    token = {"token": preview["token"]}
    for wrong in (ask(other_path, method="POST", data=token), ask(path, "operator", method="POST", data=token)):
        get_error_message(wrong, 409, "stale_preview")
    answer = ask(path, method="POST", data=token | {"reason": "over"})
    assert (answer.status_code, json.loads(answer.content)["state"]) == (202, "detaching")
    assert json.loads(ask(path, method="POST", data={"dry_run": True}).content)["forecast"][0]["outcome"] == "unchanged"


def test_an_attachment_that_gets_units_after_the_forecast_is_answered_with_a_new_preview(
    ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = request_attachment(ask)["url"].removeprefix("http://testserver") + "detach/"
    order_detachment = attachment_orders.order_detachment

    def attach_first(*arguments: Any, **options: Any) -> Attachment:
        """Let the job attach the units, as it may do at any time, and order the detachment."""
        monkeypatch.undo()
        run_steps()
        return order_detachment(*arguments, **options)

    monkeypatch.setattr(attachment_orders, "order_detachment", attach_first)
    answer = ask(path, method="POST")
    get_error_message(answer, 409, "not_confirmed")
    assert json.loads(answer.content)["preview"]["state"] == Attachment.objects.get().state == "attached"


@pytest.mark.slow
def test_the_console_detaches_nothing_that_has_changed_since_it_was_shown(ask: Ask, client: Client) -> None:
    client.force_login(User.objects.create_superuser("nils"))
    request_attachment(ask)
    row = Attachment.objects.get()
    path = f"/admin/accelerators/attachment/{row.pk}/detach/"
    seen = get_hidden_value(client.get(path).content.decode(), "seen")
    run_steps()
    confirmed = {"sure": "yes", "typed": INSTANCE[:8]}
    assert "Look at it again" in client.post(path, confirmed | {"seen": seen}, follow=True).content.decode()
    assert Attachment.objects.get().state == "attached"
    seen = get_hidden_value(client.get(path).content.decode(), "seen")
    client.post(path, confirmed | {"seen": seen})
    assert Attachment.objects.get().state == "detaching"


def get_hidden_value(page: str, name: str) -> str:
    """Return the value of the hidden field of a page."""
    (value,) = re.findall(rf'type="hidden" name="{name}" value="([^"]*)"', page)
    return html.unescape(value)


@pytest.mark.slow
def test_attachments_are_filtered_and_a_page_takes_three_statements(ask: Ask, django_assert_num_queries: Any) -> None:
    first = request_attachment(ask)
    second = request_attachment(ask, profile="", device=str(Device.objects.get().uuid))
    run_steps()
    for query, wanted in {
        "": [second, first],
        f"?instance={INSTANCE}": [second, first],
        f"?instance={UNKNOWN_UUID}": [],
        "?state=attached&host=cmp1": [second, first],
        "?state=failed": [],
    }.items():
        assert [row["uuid"] for row in get_results(ask(f"/api/attachments/{query}"))] == [one["uuid"] for one in wanted]
    with django_assert_num_queries(3):
        ask("/api/attachments/")


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({}, 400, "instance: This field is required."),
    ({"instance": INSTANCE}, 400, "Give either a device profile or a device to attach."),
    ({"instance": INSTANCE, "profile": "one", "device": UNKNOWN_UUID}, 400, "Give either a device profile"),
    ({"instance": INSTANCE, "profile": "none"}, 404, "There is no device profile 'none'."),
    ({"instance": UNKNOWN_UUID, "profile": "one"}, 404, f"Nova has no instance {UNKNOWN_UUID}."),
    ({"instance": INSTANCE, "device": UNKNOWN_UUID}, 409, "has no free unit: it must be ready"),
    ({"instance": INSTANCE, "profile": "one", "reason": "x" * 501}, 400, "no more than 500 characters"),
    ({"instance": INSTANCE, "profile": "one", "state": "attached"}, 400, "state: cannot be written"),
]
"""Attachments that are refused, each with the status and a part of the message."""


def test_invalid_attachments_are_refused(ask: Ask) -> None:
    for said, status, says in REFUSED:
        assert says in get_error_message(ask("/api/attachments/", method="POST", data=said), status)
        assert not Attachment.objects.exists(), said


def test_a_request_of_an_attachment_cannot_be_detached_by_itself(ask: Ask) -> None:
    row = request_attachment(ask)
    run_steps()
    (request,) = get_json(ask, row["url"])["requests"]
    assert "detach that" in get_error_message(ask(f"/api/attachments/{request}/detach/", method="POST"), 409)
    get_error_message(ask(f"/api/attachments/{UNKNOWN_UUID}/detach/", method="POST"), 404)


def test_x4_only_admins_and_operators_may_attach_and_detach(ask: Ask, cloud: FakeCloud) -> None:
    row = request_attachment(ask)
    attachment_path = row["url"].removeprefix("http://testserver")
    for by, status in (("manager", 403), ("member", 403), ("reader", 403), ("", 401)):
        get_error_message(
            ask("/api/attachments/", by, method="POST", data={"instance": INSTANCE, "profile": "one"}), status
        )
        get_error_message(ask(f"{attachment_path}detach/", by, method="POST"), status)
        get_error_message(ask(attachment_path, by), status)
    assert [one["uuid"] for one in get_results(ask("/api/attachments/", "operator", project="p2"))] == [row["uuid"]]
    assert ask(f"{attachment_path}detach/", "operator", project="p2", method="POST").status_code == 202


@pytest.mark.slow
def test_attachments_are_requested_shown_and_detached_in_the_console(client: Client) -> None:
    client.force_login(User.objects.create_superuser("rita"))
    page = client.get("/admin/accelerators/attachment/attach/?profile=one").content.decode()
    assert 'value="one"' in page and '<option value="two">' in page
    wrong = client.post("/admin/accelerators/attachment/attach/", {"instance": "x", "profile": "one"})
    assert "Enter the uuids of the instance" in wrong.content.decode()
    made = client.post(
        "/admin/accelerators/attachment/attach/", {"instance": INSTANCE, "profile": "one", "reason": "why"}
    )
    row = Attachment.objects.get()
    assert made["Location"] == f"/admin/accelerators/attachment/{row.pk}/change/"
    run_steps()
    page = client.get(made["Location"]).content.decode()
    assert "Left to do by hand" in page and "hostdev" in page and "Detach" in page
    assert str(row.uuid) in client.get("/admin/accelerators/attachment/").content.decode()
    confirm_path = f"/admin/accelerators/attachment/{row.pk}/detach/"
    assert confirm_path in page
    page = client.get(confirm_path).content.decode()
    request, device = AcceleratorRequest.objects.get(), Device.objects.get()
    assert INSTANCE in page and str(request.uuid) in page and f"/device/{device.pk}/change/" in page
    for unconfirmed in ({}, {"typed": INSTANCE[:8]}, {"sure": "yes"}, {"sure": "yes", "typed": "bbbbbbbb"}):
        assert client.post(confirm_path, unconfirmed | {"reason": "over"}).status_code == 200
    assert client.post(made["Location"], {"reason": "over", "sure": "yes", "typed": INSTANCE[:8]}).status_code == 403
    assert Attachment.objects.get().state == "attached"
    confirmed = client.post(confirm_path, {"sure": "yes", "typed": INSTANCE[:8], "reason": "over"})
    assert confirmed["Location"] == made["Location"]
    assert "There is nothing to detach" in client.get(confirm_path).content.decode()
    run_steps()
    assert "detached" in client.get(made["Location"]).content.decode()
    assert Event.objects.get(action="attachment.detaching").actor == "rita"
    assert client.get("/admin/accelerators/event/?q=" + str(row.uuid)).status_code == 200
    plain = Client()
    plain.force_login(User.objects.create_user("vera", is_staff=True))
    assert plain.post(confirm_path, {"sure": "yes"}).status_code == plain.get(confirm_path).status_code == 403
    assert plain.get("/admin/accelerators/attachment/attach/").status_code == 403


def test_an_attachment_that_holds_nothing_is_undone_after_a_second_step_without_a_typed_text(
    client: Client, ask: Ask
) -> None:
    client.force_login(User.objects.create_superuser("nina"))
    request_attachment(ask)
    row = Attachment.objects.get()
    path = f"/admin/accelerators/attachment/{row.pk}/detach/"
    page = client.get(path).content.decode()
    assert "holds no unit yet" in page and 'name="typed"' not in page
    assert client.post(path, {"sure": "yes"}).status_code == 302
    row.refresh_from_db()
    assert row.state == "undoing"


@pytest.mark.slow
def test_the_attachment_command_attaches_shows_lists_and_detaches(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*words: str) -> str:
        return " ".join(run_verb("attachment", *words)[1].split())

    assert " state asked " in said("attach", INSTANCE, "--profile", "one", "--reason", "why")
    row = Attachment.objects.get()
    replace_sleep(monkeypatch, lambda _: run_steps())
    assert json.loads(said("show", str(row.uuid), "--json"))["state"] == "asked"
    assert " state attached " in said("attach", INSTANCE, "--device", str(Device.objects.get().uuid), "--wait")
    assert LIBVIRT_ELEMENT in said("show", str(row.uuid))
    assert len(json.loads(said("list", "--instance", INSTANCE, "--state", "attached", "--json"))) == 2
    assert len(json.loads(said("list", "--json"))) == 2
    assert " done detached" in said("detach", str(row.uuid), "--wait")
    with pytest.raises(CommandError, match="There is no device profile 'none'"):
        said("attach", INSTANCE, "--profile", "none")
    with pytest.raises(CommandError, match="nothing here"):
        said("show", UNKNOWN_UUID)


def test_libvirt_xml_is_made_for_pci_and_mdev_handles_only() -> None:
    mdev = HeldHandle(UNKNOWN_UUID, "MDEV", '{"asked_type": "nvidia-223"}')
    node = HeldHandle(UNKNOWN_UUID, "DEV", '{"path": "/dev/accel/accel0"}')
    test = HeldHandle(UNKNOWN_UUID, "TEST_PCI", '{"bus": "00", "device": "1", "domain": "0000", "function": "0"}')
    odd = HeldHandle(UNKNOWN_UUID, "PCI", '{"bus": "\'/>", "device": "00", "domain": "0000", "function": "0"}')
    own = HeldHandle(
        UNKNOWN_UUID, "PCI", '{"bus": "3b", "device": "00", "domain": "0x0000", "function": "1", "managed": "false"}'
    )
    hostile = [HeldHandle(UNKNOWN_UUID, "PCI", info) for info in ("[]", "null", "no JSON", '{"bus": {}}')]
    assert libvirt_xml.render_hostdev_elements([node, test, odd, *hostile]) == []
    (first, second) = libvirt_xml.render_hostdev_elements([mdev, own])
    assert first == (
        '<hostdev mode="subsystem" type="mdev" model="vfio-pci">'
        f'<source><address uuid="{UNKNOWN_UUID}" /></source></hostdev>'
    )
    assert 'managed="no"' in second and 'bus="0x3b"' in second
    assert "there is nothing to plug" in libvirt_xml.describe_plugging([test], "cmp1")
    assert libvirt_xml.describe_plugging([], "cmp1") == ""
