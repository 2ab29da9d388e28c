"""What agents are asked at the console: buttons, the confirmation, the list, the live pages."""

from __future__ import annotations

import re

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from accelerators import conductor
from accelerators.commands import placing
from accelerators.domain.caller import Caller
from accelerators.models import Command, Device, Event, Host
from accelerators.workflows import command_results
from tests.console.conftest import Fill
from tests.support.reports import answer, apply, card
from tests.support.statements import statements

pytestmark = pytest.mark.django_db

OLGA = Caller("olga", "1", frozenset(), "")
ACTS = "attach detach health partition program reset uninstall"
IMAGE = "11111111-2222-4333-8444-555555555555"


@pytest.fixture
def device(fill: Fill) -> Device:
    """A card whose driver can do everything, and would do two things to install it; the first card is held."""
    (host,) = fill(2)
    able = card(7, acts=ACTS, to_install="bind 0000:07:00.0 to vfio-pci\nmake 4 virtual functions")
    apply(host, answer(card(0, handles=2, acts=ACTS), able, driver="pci_driver"), seq=2)
    return Device.objects.get(address="0000:07:00.0")


def page(row: Device | Host | Command) -> str:
    return reverse(f"admin:accelerators_{row._meta.model_name}_change", args=[row.pk])


def order(row: Device | Host) -> str:
    return reverse(f"admin:accelerators_{row._meta.model_name}_order", args=[row.pk])


def asks(client: Client, row: Device | Host) -> set[str]:
    """By its own buttons."""
    forms = client.get(page(row)).content.decode().split("<form")
    own = "".join(form for form in forms if f'action="{order(row)}"' in form)
    return {*re.findall(r'name="op" value="([a-z]+)"', own)}


def begun(device: Device, percent: int = 40, text: str = "unbinding it") -> Command:
    command = placing.ask("health", device.uuid, OLGA, reason="looks ill")
    placing.progressed([placing.Progress(command.host_id, command.id, percent, text)])
    return command


def ended(command: Command, outcome: str = "succeeded", text: str = "it is well", **detail: str) -> None:
    placing.answer([placing.Answer(command.host_id, command.id, outcome, text, detail)])
    command_results.settle()


def test_the_page_says_what_installing_would_do_before_anybody_enables_it(operator: Client, device: Device) -> None:
    shown = operator.get(page(device)).content.decode()
    assert "What enabling it would do on the host" in shown
    assert "<li>bind 0000:07:00.0 to vfio-pci</li><li>make 4 virtual functions</li>" in shown
    operator.post(reverse("admin:accelerators_device_decide", args=[device.pk]), {"choice": "enable"})
    shown = operator.get(page(device)).content.decode()
    assert "data-live=" in shown and "install</a>" in shown
    assert asks(operator, device) == {"health"}


def test_what_is_harmless_is_ordered_at_once(operator: Client, device: Device) -> None:
    assert asks(operator, device) == {"health", "partition", "program", "reset", "uninstall"}
    answered = operator.post(order(device), {"op": "health", "reason": "looks ill"})
    command = Command.objects.get()
    assert (answered.status_code, answered["Location"]) == (302, page(command))
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
def test_what_is_destructive_asks_once_more(
    operator: Client, device: Device, op: str, said: dict[str, str], asked: dict[str, object]
) -> None:
    first = operator.post(order(device), {"op": op, **said}).content.decode()
    assert "nobody holds it" in first and not Command.objects.exists()
    kept = dict(re.findall(r'type="hidden" name="(op|layout|image|deployable)" value="([^"]+)"', first))
    operator.post(order(device), kept | {"sure": "yes"})
    command = Command.objects.get()
    assert command.op == op and command.arguments.items() >= asked.items()


def test_what_is_destructive_names_who_holds_it(operator: Client, device: Device) -> None:
    held = Device.objects.get(address="0000:00:00.0")
    assert asks(operator, held) == {"health"}
    first = operator.post(order(held), {"op": "reset"}).content.decode()
    assert "is held by request" in first and 'name="sure"' not in first
    answered = operator.post(order(held), {"op": "reset", "sure": "yes"}, follow=True).content.decode()
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
def test_what_makes_no_sense_is_said_on_the_page(
    operator: Client, device: Device, said: dict[str, str], sentence: str
) -> None:
    answered = operator.post(order(device), said, follow=True)
    assert answered.redirect_chain == [(page(device), 302)]
    assert sentence in answered.content.decode() and not Command.objects.exists()


def test_hosts_are_asked_too_and_a_failing_driver_alone(operator: Client, fill: Fill) -> None:
    (host,) = fill(2)
    shown = operator.get(page(host)).content.decode()
    assert asks(operator, host) == {"rescan", "logs", "report"}
    assert 'name="driver" value="slow_driver"' in shown and "it hung for 20 s" in shown
    operator.post(order(host), {"op": "rescan", "driver": "slow_driver"})
    operator.post(order(host), {"op": "logs"})
    asked = operator.get(page(host.devices.get(address="0000:01:00.0"))).content.decode()
    assert f'action="{order(host)}"' in asked and 'value="report"' in asked
    operator.post(order(host), {"op": "report", "driver": "pci_driver"})
    assert [*Command.objects.order_by("id").values_list("op", "arguments__driver")] == [
        ("rescan", "slow_driver"),
        ("logs", None),
        ("report", "pci_driver"),
    ]
    shown = operator.get(page(host)).content.decode()
    assert "rescan</a>" in shown and "data-live=" in shown
    fetched = Command.objects.get(op="report")
    ended(fetched, report='{\n "drivers": []\n}')
    assert '<pre class="log" tabindex="0">{\n &quot;drivers&quot;: []' in operator.get(page(fetched)).content.decode()


def test_a_command_is_followed_to_its_end(operator: Client, device: Device) -> None:
    command = begun(device)
    shown = operator.get(page(command)).content.decode()
    for fact in ("40 %", "unbinding it", "looks ill", "olga", "started", "command.ordered", str(command.uuid)):
        assert fact in shown
    (live,) = re.findall(r'data-live="([^"]+)"', shown)
    piece = operator.get(live).content.decode()
    assert (
        piece.startswith(f'<div data-live="{live}" data-open="{command.pk}">')
        and '<progress max="100" value="40">' in piece
    )
    signals = '[{"name":"fan","value":"3000"},{"name":"temperature","value":"91","unit":"°C"}]'
    ended(command, text="too hot", status="failed", samples="[]", signals=signals, log="one <b>line</b>\nanother")
    piece = operator.get(live).content.decode()
    assert piece.startswith("<div>") and "too hot" in piece
    shown = operator.get(page(command)).content.decode()
    assert "data-live" not in shown
    assert "<td>fan</td><td>3000</td><td></td></tr><tr><td>temperature</td><td>91</td><td>°C</td>" in shown
    assert "<dt>Status</dt><dd>failed</dd>" in shown and "Samples" not in shown
    assert "one &lt;b&gt;line&lt;/b&gt;\nanother</pre>" in shown
    assert "command.succeeded" in shown


def test_the_list_tells_what_became_of_them(operator: Client, device: Device) -> None:
    ended(begun(device), "failed", "no sensor answers")
    begun(device)
    listed = reverse("admin:accelerators_command_changelist")
    shown = operator.get(listed).content.decode()
    for fact in ("no sensor answers", 'value="40"', "unbinding it", "looks ill", "cmp0.example", "took"):
        assert fact in shown
    for asked, number in (({"open": "yes"}, 1), ({"open": "no"}, 1), ({"op": "health"}, 2), ({"q": "0000:07"}, 2)):
        assert operator.get(listed, asked).context["cl"].result_count == number
    of_device = re.findall(r'<h2 id="commands"><a href="([^"]+)"', operator.get(page(device)).content.decode())
    assert operator.get(of_device[0]).context["cl"].result_count == 2


def test_who_may_only_look_asks_nothing(operator: Client, device: Device) -> None:
    command = begun(device)
    viewer, user = Client(), User.objects.create(username="vera", is_staff=True)
    user.user_permissions.set(Permission.objects.filter(codename__in=["view_device", "view_host"]))
    viewer.force_login(user)
    for path in (reverse("admin:accelerators_command_now", args=[command.pk]), page(command)):
        assert viewer.get(path).status_code == 403
    assert "data-live" not in viewer.get(page(device)).content.decode()
    user.user_permissions.add(Permission.objects.get(codename="view_command"))
    viewer.force_login(User.objects.get(pk=user.pk))
    assert viewer.get(page(command)).status_code == 200
    assert "data-live" in viewer.get(page(device)).content.decode()
    for row, op in ((device, "health"), (device.host, "logs")):
        assert asks(viewer, row) == set()
        assert viewer.post(order(row), {"op": op}).status_code == 403
    assert operator.post(order(device), {"op": "logs"}).status_code == 403
    assert operator.post(order(device), {"op": "attach"}).status_code == 403
    assert operator.get(order(device)).status_code == 405
    assert Command.objects.count() == 1


def test_P3_pages_and_pieces_cost_the_same_at_any_number_of_commands(operator: Client, device: Device) -> None:
    first = begun(device)
    paths = [
        *(page(row) for row in (device, device.host, first)),
        reverse("admin:accelerators_command_changelist"),
        reverse("admin:accelerators_command_lately", args=["host", device.host_id]),
        reverse("admin:accelerators_command_now", args=[first.pk]),
    ]
    few = {path: statements(operator, path) for path in paths}
    with conductor.writing():
        for _ in range(12):
            begun(device)
    assert {path: statements(operator, path) for path in paths} == few
    assert max(few.values()) <= 12 and max(few[path] for path in paths[4:]) <= 4, few
