"""Test commands in the console: buttons, confirmation, list, live pages, and permissions."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from accelerators import conductor
from accelerators.commands import command_queue
from accelerators.domain.caller import Caller, request_id
from accelerators.models import AcceleratorRequest, Command, Device, Event, Host
from accelerators.workflows import command_endings
from tests.cyborgweb.console.conftest import Fill
from tests.support.holders import slow_holder_checks
from tests.support.reports import apply_report, make_card, make_driver_report
from tests.support.statements import count_statements

pytestmark = pytest.mark.django_db

OLGA = Caller("olga", "1", frozenset(), "")
ACTS = "attach detach health partition program reset uninstall"
IMAGE = "11111111-2222-4333-8444-555555555555"


@pytest.fixture
def device(fill: Fill) -> Device:
    """Return a card whose driver supports all commands and has two installation steps; the first card is held."""
    (host,) = fill(2)
    able = make_card(7, acts=ACTS, to_install="bind 0000:07:00.0 to vfio-pci\nmake 4 virtual functions")
    apply_report(host, make_driver_report(make_card(0, handles=2, acts=ACTS), able, driver="pci_driver"), seq=2)
    return Device.objects.get(address="0000:07:00.0")


def change_page(row: Device | Host | Command) -> str:
    return reverse(f"admin:accelerators_{row._meta.model_name}_change", args=[row.pk])


def order_url(row: Device | Host) -> str:
    return reverse(f"admin:accelerators_{row._meta.model_name}_order", args=[row.pk])


def list_command_buttons(client: Client, row: Device | Host) -> set[str]:
    """Return the commands that the row's page offers with buttons of its own."""
    forms = client.get(change_page(row)).content.decode().split("<form")
    own = "".join(form for form in forms if f'action="{order_url(row)}"' in form)
    return {*re.findall(r'name="op" value="([a-z]+)"', own)}


def start_command(device: Device, percent: int = 40, text: str = "unbinding it") -> Command:
    command = command_queue.order_device_command("health", device.uuid, OLGA, reason="looks ill")
    command_queue.store_progress([command_queue.CommandProgress(command.host_id, command.id, percent, text)])
    return command


def answer_and_settle(command: Command, outcome: str = "succeeded", text: str = "it is well", **detail: str) -> None:
    command_queue.store_answers([command_queue.CommandAnswer(command.host_id, command.id, outcome, text, detail)])
    command_endings.end_answered_commands()


def test_the_page_of_a_device_shows_its_installation_steps_before_it_is_enabled(
    operator: Client, device: Device
) -> None:
    shown = operator.get(change_page(device)).content.decode()
    assert "What enabling it would do on the host" in shown
    assert "<li>bind 0000:07:00.0 to vfio-pci</li><li>make 4 virtual functions</li>" in shown
    operator.post(reverse("admin:accelerators_device_decide", args=[device.pk]), {"choice": "enable"})
    shown = operator.get(change_page(device)).content.decode()
    assert "data-live=" in shown and "install</a>" in shown
    assert list_command_buttons(operator, device) == {"health"}


def test_a_harmless_command_is_ordered_without_confirmation(operator: Client, device: Device) -> None:
    assert list_command_buttons(operator, device) == {"health", "partition", "program", "reset", "uninstall"}
    answered = operator.post(order_url(device), {"op": "health", "reason": "looks ill"})
    command = Command.objects.get()
    assert (answered.status_code, answered["Location"]) == (302, change_page(command))
    assert (command.op, command.actor, command.reason) == ("health", "olga", "looks ill")
    assert Event.objects.get(action="command.ordered").source == "person"


@pytest.mark.parametrize(
    ("op", "said", "asked"),
    [
        ("partition", {"layout": " vfs=4  size=2 "}, {"layout": {"vfs": "4", "size": "2"}}),
        ("program", {"image": IMAGE, "deployable": ""}, {"wanted": {"bitstream_id": IMAGE}}),
        ("reset", {}, {}),
        ("uninstall", {}, {}),
    ],
)
def test_a_destructive_command_needs_confirmation(
    operator: Client, device: Device, op: str, said: dict[str, str], asked: dict[str, object]
) -> None:
    confirmation = operator.post(order_url(device), {"op": op, **said}).content.decode()
    assert "nobody holds it" in confirmation and not Command.objects.exists()
    hidden_fields = dict(re.findall(r'type="hidden" name="(op|layout|image|deployable)" value="([^"]+)"', confirmation))
    operator.post(order_url(device), hidden_fields | {"sure": "yes"})
    command = Command.objects.get()
    assert command.op == op and command.arguments.items() >= asked.items()


def declare_reset_of_the_bus(device: Device) -> None:
    """Store that a reset by the driver of this device affects all devices of the host."""
    with conductor.writing():
        host = Host.objects.get(pk=device.host_id)
        host.drivers[device.driver]["declares"] = {"affects": {"reset": "host"}, "handle_types": ["PCI"]}
        host.save(update_fields=["drivers"])


def test_the_confirmation_lists_the_other_devices_that_a_command_affects(operator: Client, device: Device) -> None:
    held = Device.objects.get(address="0000:00:00.0")
    assert "also affected" not in operator.post(order_url(device), {"op": "reset"}).content.decode()
    declare_reset_of_the_bus(device)
    confirmation = operator.post(order_url(device), {"op": "reset"}).content.decode()
    assert "also affected" in confirmation and change_page(held) in confirmation
    assert "is held by request" in confirmation and 'name="sure"' not in confirmation
    assert "also affected" not in operator.post(order_url(device), {"op": "uninstall"}).content.decode()
    page = operator.get(reverse("admin:accelerators_hostdriver_changelist")).content.decode()
    (link,) = set(re.findall(r'href="(/admin/accelerators/hostdriver/[^"]+change/)"[^>]*>pci_driver<', page))
    shown = operator.get(link).content.decode()
    assert "affects all devices of the host" in shown and "Handle types" in shown


def test_the_confirmation_appears_in_time_if_the_holder_checks_of_many_affected_devices_are_slow(
    operator: Client, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    declare_reset_of_the_bus(device)
    with conductor.writing():  # a held device would be named without asking anybody
        AcceleratorRequest.objects.all().delete()
    with slow_holder_checks(monkeypatch) as asked:
        confirmation = operator.post(order_url(device), {"op": "reset"}).content.decode()
    assert asked == [device] and 'name="sure"' not in confirmation


def test_a_destructive_command_on_a_held_device_is_refused_naming_the_holder(operator: Client, device: Device) -> None:
    held = Device.objects.get(address="0000:00:00.0")
    assert list_command_buttons(operator, held) == {"health"}
    first = operator.post(order_url(held), {"op": "reset"}).content.decode()
    assert "is held by request" in first and 'name="sure"' not in first
    answered = operator.post(order_url(held), {"op": "reset", "sure": "yes"}, follow=True).content.decode()
    assert "is held by request" in answered and not Command.objects.exists()


@pytest.mark.parametrize(
    ("said", "sentence"),
    [
        ({"op": "partition"}, "words of the driver such as vfs=4"),
        ({"op": "partition", "layout": "vfs"}, "words of the driver such as vfs=4"),
        ({"op": "program", "image": "shell.bit"}, "Enter the uuid of an image"),
        ({"op": "health", "reason": "x" * 501}, "at most 500 characters"),
    ],
)
def test_an_invalid_command_is_refused_on_the_page_of_the_device(
    operator: Client, device: Device, said: dict[str, str], sentence: str
) -> None:
    answered = operator.post(order_url(device), said, follow=True)
    assert answered.redirect_chain == [(change_page(device), 302)]
    assert sentence in answered.content.decode() and not Command.objects.exists()


@pytest.mark.slow
def test_hosts_offer_rescan_logs_and_report_and_rescan_of_one_failing_driver(operator: Client, fill: Fill) -> None:
    (host,) = fill(2)
    shown = operator.get(change_page(host)).content.decode()
    assert list_command_buttons(operator, host) == {"rescan", "logs", "report"}
    assert 'name="driver" value="slow_driver"' in shown and "it hung for 20 s" in shown
    operator.post(order_url(host), {"op": "rescan", "driver": "slow_driver"})
    operator.post(order_url(host), {"op": "logs"})
    asked = operator.get(change_page(host.devices.get(address="0000:01:00.0"))).content.decode()
    assert f'action="{order_url(host)}"' in asked and 'value="report"' in asked
    operator.post(order_url(host), {"op": "report", "driver": "pci_driver"})
    assert [*Command.objects.order_by("id").values_list("op", "arguments__driver")] == [
        ("rescan", "slow_driver"),
        ("logs", None),
        ("report", "pci_driver"),
    ]
    shown = operator.get(change_page(host)).content.decode()
    assert "rescan</a>" in shown and "data-live=" in shown
    fetched = Command.objects.get(op="report")
    answer_and_settle(fetched, report='{\n "drivers": []\n}')
    assert (
        '<pre class="log" tabindex="0">{\n &quot;drivers&quot;: []'
        in operator.get(change_page(fetched)).content.decode()
    )


def test_the_page_of_a_command_shows_its_progress_live_and_then_its_result(operator: Client, device: Device) -> None:
    command = start_command(device)
    shown = operator.get(change_page(command)).content.decode()
    for fact in ("40 %", "unbinding it", "looks ill", "olga", "started", "command.ordered", str(command.uuid)):
        assert fact in shown
    (live,) = re.findall(r'data-live="([^"]+)"', shown)
    piece = operator.get(live).content.decode()
    assert (
        piece.startswith(f'<div data-live="{live}" data-open="{command.pk}">')
        and '<progress max="100" value="40">' in piece
    )
    signals = '[{"name":"fan","value":"3000"},{"name":"temperature","value":"91","unit":"°C"}]'
    answer_and_settle(
        command, text="too hot", status="failed", samples="[]", signals=signals, log="one <b>line</b>\nanother"
    )
    piece = operator.get(live).content.decode()
    assert piece.startswith("<div>") and "too hot" in piece
    shown = operator.get(change_page(command)).content.decode()
    assert "data-live" not in shown
    assert "<td>fan</td><td>3000</td><td></td></tr><tr><td>temperature</td><td>91</td><td>°C</td>" in shown
    assert "<dt>Status</dt><dd>failed</dd>" in shown and "Samples" not in shown
    assert "one &lt;b&gt;line&lt;/b&gt;\nanother</pre>" in shown
    assert "command.succeeded" in shown


@pytest.mark.slow
def test_the_list_of_commands_shows_outcomes_and_can_be_filtered(operator: Client, device: Device) -> None:
    answer_and_settle(start_command(device), "failed", "no sensor answers")
    start_command(device)
    listed = reverse("admin:accelerators_command_changelist")
    shown = operator.get(listed).content.decode()
    for fact in ("no sensor answers", 'value="40"', "unbinding it", "looks ill", "cmp0.example", "took"):
        assert fact in shown
    for asked, number in (({"open": "yes"}, 1), ({"open": "no"}, 1), ({"op": "health"}, 2), ({"q": "0000:07"}, 2)):
        assert operator.get(listed, asked).context["cl"].result_count == number
    of_device = re.findall(r'<h2 id="commands"><a href="([^"]+)"', operator.get(change_page(device)).content.decode())
    assert operator.get(of_device[0]).context["cl"].result_count == 2


def test_the_commands_that_were_ordered_together_are_found_by_an_index(operator: Client, device: Device) -> None:
    token = request_id.set("req-bulk-17")
    try:
        ordered = command_queue.order_device_command("health", device.uuid, OLGA)
    finally:
        request_id.reset(token)
    start_command(device)
    with connection.cursor() as cursor:
        cursor.execute("SET LOCAL enable_seqscan = off")
        cursor.execute("SET LOCAL enable_indexscan = off")  # else the primary key, because the table is small
    with CaptureQueriesContext(connection) as captured:
        found = operator.get(reverse("admin:accelerators_command_changelist"), {"together": "req-bulk-17"}).context[
            "cl"
        ]
    assert list(found.result_list) == [ordered]
    searches = [one["sql"] for one in captured if "\"request_id\" = 'req-bulk-17'" in one["sql"]]
    assert len(searches) == 2, "they are counted and loaded"
    for search in searches:
        with connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN {search}")
            plan = "\n".join(line for (line,) in cursor.fetchall())
        assert "Bitmap Index Scan on command_request_id" in plan, plan


@pytest.mark.slow
def test_viewers_see_commands_but_cannot_order_any(operator: Client, device: Device) -> None:
    command = start_command(device)
    viewer, user = Client(), User.objects.create(username="vera", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=["view_device", "view_host"]))
    viewer.force_login(user)
    for path in (reverse("admin:accelerators_command_now", args=[command.pk]), change_page(command)):
        assert viewer.get(path).status_code == 403
    assert "data-live" not in viewer.get(change_page(device)).content.decode()
    user.user_permissions.add(Permission.objects.get(codename="view_command"))
    viewer.force_login(User.objects.get(pk=user.pk))
    assert viewer.get(change_page(command)).status_code == 200
    assert "data-live" in viewer.get(change_page(device)).content.decode()
    for row, op in ((device, "health"), (device.host, "logs")):
        assert list_command_buttons(viewer, row) == set()
        assert viewer.post(order_url(row), {"op": op}).status_code == 403
    assert operator.post(order_url(device), {"op": "logs"}).status_code == 403
    assert operator.post(order_url(device), {"op": "attach"}).status_code == 403
    assert operator.get(order_url(device)).status_code == 405
    assert Command.objects.count() == 1


@pytest.mark.slow
def test_P3_pages_take_the_same_statements_at_any_number_of_commands(operator: Client, device: Device) -> None:
    first = start_command(device)
    paths = [
        *(change_page(row) for row in (device, device.host, first)),
        reverse("admin:accelerators_command_changelist"),
        reverse("admin:accelerators_command_lately", args=["host", device.host_id]),
        reverse("admin:accelerators_command_now", args=[first.pk]),
    ]
    few = {path: count_statements(operator, path) for path in paths}
    with conductor.writing():
        for _ in range(12):
            start_command(device)
    assert {path: count_statements(operator, path, enough=few[path]) for path in paths} == few
    assert max(few.values()) <= 12 and max(few[path] for path in paths[4:]) <= 4, few
