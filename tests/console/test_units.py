"""How many units devices are divided into, at the console: of one device, of many across backends, by whom."""

from __future__ import annotations

import html
import re

import pytest
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse

from accelerators.models import Command, Device, Event
from tests.own.test_units import device, divisible, hold, reported

pytestmark = pytest.mark.django_db

UNITS = "/admin/accelerators/device/units/"


def page(client: Client, address: str, **posted: object) -> str:
    """What is shown in the end, tags left out."""
    response = client.post(address, posted, follow=True) if posted else client.get(address, follow=True)
    assert response.status_code == 200
    return html.unescape(re.sub(r"<[^>]*>|\s+", " ", response.content.decode()))


def of(one: Device) -> str:
    return reverse("admin:accelerators_device_change", args=[one.pk])


def test_a_device_leads_to_the_page_on_which_it_is_divided(operator: Client) -> None:
    reported(divisible(1, 2), divisible(2, 2, sized_by=""))
    assert f'href="{UNITS}?device={device(1).uuid}"' in operator.get(of(device(1))).content.decode()
    assert UNITS not in operator.get(of(device(2))).content.decode()
    assert "Units now 1044 0000:01:00.0" in re.sub(" +", " ", page(operator, f"{UNITS}?device={device(1).uuid}"))
    said = {"device": [str(device(1).uuid)], "generation": "0", "count": "3", "layout": "bind=x", "reason": "r"}
    assert "partition 1044 0000:01:00.0" in page(operator, UNITS, change="more", **said)
    command = Command.objects.get()
    assert (command.arguments["layout"], command.reason, command.actor) == ({"bind": "x", "vfs": "5"}, "r", "olga")
    assert Event.objects.get(subject=command.uuid).source == "person"
    refused = page(operator, UNITS, change="fewer", **said)
    assert "refused" in refused and "is at generation 1 now, not 0" in refused


def test_many_devices_of_several_backends_are_divided_at_once(operator: Client) -> None:
    reported(divisible(1, 4, "a"), divisible(2, 4, "b"), divisible(3, 4, "b"), divisible(4, 0, "b", sized_by=""))
    held = hold(device(3).deployables.get().attach_handles.first())
    chosen = {"action": "of_list", "_selected_action": [one.pk for one in Device.objects.all()]}
    asked = operator.post("/admin/accelerators/device/", chosen).content.decode()
    uuids = re.findall(r'name="device" value="([^"]+)"', asked)
    assert uuids == [str(device(n).uuid) for n in (1, 2, 3)] and "bind=…" in asked
    said = page(operator, UNITS, change="none", device=uuids)
    assert said.count("vfs=0") == 2 and f"request {held.uuid}" in said
    assert Command.objects.count() == 2


SENSELESS = (
    ({"change": "more", "count": "0"}, "The number of units must be 1 to"),
    ({"change": "more", "count": "x"}, "Enter how many units to add or to remove"),
    ({"change": "double", "count": "1"}, "Enter how many units to add or to remove"),
    ({"change": "more", "count": "1", "layout": "nonsense"}, "words of the driver"),
    ({"change": "more", "count": "1", "reason": "x" * 501}, "A reason is at most"),
    ({"change": "more", "count": "1", "device": ["x"]}, "Select devices"),
)


def test_what_makes_no_sense_is_said_and_orders_nothing(operator: Client) -> None:
    reported(divisible(1, 2))
    for said, says in SENSELESS:
        assert says in page(operator, UNITS, **{"device": [str(device(1).uuid)]} | said)
    assert not Command.objects.exists()


def test_who_may_only_look_changes_nothing(client: Client) -> None:
    reported(divisible(1, 2))
    looker = User.objects.create(username="lou", is_staff=True)
    looker.user_permissions.set(Permission.objects.filter(codename__startswith="view_"))
    client.force_login(looker)
    assert UNITS not in client.get(of(device(1))).content.decode()
    said = {"device": [str(device(1).uuid)], "change": "more", "count": "1"}
    assert [client.post(UNITS, said).status_code, client.get(UNITS).status_code] == [403, 403]
    assert not Command.objects.exists()


def test_many_take_as_few_statements_as_one(operator: Client) -> None:
    reported(*(divisible(n, 4) for n in range(1, 41)))
    uuids = [str(uuid) for uuid in Device.objects.values_list("uuid", flat=True)]
    counts = []
    for chosen in (uuids[:1], uuids):
        with CaptureQueriesContext(
            connection,
        ) as run:
            operator.get(UNITS, {"device": chosen})
        counts.append(len(run))
    assert counts[0] == counts[1] <= 10
