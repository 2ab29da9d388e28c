"""Attachments over our own API, in the console and at a shell: asked for, followed, detached; who may, who sees."""

from __future__ import annotations

import json
from collections.abc import Iterator
from io import StringIO
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.management import CommandError, call_command
from django.test import Client

from accelerators.domain import libvirt_xml
from accelerators.domain.libvirt_xml import Handle
from accelerators.models import AcceleratorRequest, Attachment, Device, Event
from tests.own.conftest import Ask, message, results
from tests.placement import attaching as lab
from tests.placement.attaching import VM, Cloud, cards, work

pytestmark = pytest.mark.django_db
NOBODY = "00000000-0000-4000-8000-000000000000"
ELEMENT = (
    '<hostdev mode="subsystem" type="pci" managed="yes"><source>'
    '<address domain="0x0000" bus="0x00" slot="0x00" function="0x0" /></source></hostdev>'
)


@pytest.fixture(autouse=True)
def cloud(settings: Any) -> Iterator[Cloud]:
    with lab.a_cloud(settings) as one:
        cards()
        yield one


def asked(ask: Ask, **said: Any) -> dict[str, Any]:
    """The attachment, as it is answered."""
    response = ask("/api/attachments/", method="POST", data={"instance": VM, "profile": "one"} | said)
    assert response.status_code == 202, response.content
    row = json.loads(response.content)
    assert response["Location"] == row["url"]
    return row


def get(ask: Ask, url: str, by: str = "admin") -> dict[str, Any]:
    response = ask(url.removeprefix("http://testserver"), by)
    assert response.status_code == 200, response.content
    return json.loads(response.content)


def test_it_is_asked_for_followed_and_detached(ask: Ask, cloud: Cloud) -> None:
    row = asked(ask, reason="ticket 4711")
    assert (row["state"], row["by"], row["reason"], row["project"]) == ("asked", "admin-p1", "ticket 4711", "p1")
    assert (row["hotplug"], row["libvirt"], row["waits"]) == ("", [], None)
    work()
    row = get(ask, row["url"])
    assert row["state"] == "attached"
    assert row["requests"] == [str(AcceleratorRequest.objects.get().uuid)]
    assert "stock Nova plugs no accelerator into a running guest" in row["hotplug"]
    assert row["libvirt"] == [ELEMENT]
    assert [step["step"] for step in row["steps"]] == ["asked", "chosen", "claiming", "claimed", "bound"]
    cloud.placement.away = True
    detach = row["url"].removeprefix("http://testserver") + "detach/"
    for _ in range(2):
        response = ask(detach, method="POST", data={"reason": "over"})
        assert (response.status_code, json.loads(response.content)["state"]) == (202, "detaching")
    while lab.attaching.step():
        pass
    assert "nobody is there" in get(ask, row["url"])["waits"]
    cloud.placement.away = False
    work()
    assert (get(ask, row["url"])["state"], cloud.has()) == ("detached", {})


def test_filters_and_what_a_page_costs(ask: Ask, django_assert_num_queries: Any) -> None:
    first = asked(ask)
    second = asked(ask, profile="", device=str(Device.objects.get().uuid))
    work()
    for query, wanted in {
        "": [second, first],
        f"?instance={VM}": [second, first],
        f"?instance={NOBODY}": [],
        "?state=attached&host=cmp1": [second, first],
        "?state=failed": [],
    }.items():
        assert [row["uuid"] for row in results(ask(f"/api/attachments/{query}"))] == [one["uuid"] for one in wanted]
    with django_assert_num_queries(3):
        ask("/api/attachments/")


@pytest.mark.parametrize(
    ("said", "status", "says"),
    [
        ({}, 400, "instance: This field is required."),
        ({"instance": VM}, 400, "Give either a device profile or a device to attach."),
        ({"instance": VM, "profile": "one", "device": NOBODY}, 400, "Give either a device profile"),
        ({"instance": VM, "profile": "none"}, 404, "There is no device profile 'none'."),
        ({"instance": NOBODY, "profile": "one"}, 404, f"Nova has no instance {NOBODY}."),
        ({"instance": VM, "device": NOBODY}, 409, "has no free unit: it must be ready"),
        ({"instance": VM, "profile": "one", "reason": "x" * 501}, 400, "no more than 500 characters"),
        ({"instance": VM, "profile": "one", "state": "attached"}, 400, "state: cannot be written"),
    ],
)
def test_what_cannot_be_asked_for(ask: Ask, said: dict[str, Any], status: int, says: str) -> None:
    assert says in message(ask("/api/attachments/", method="POST", data=said), status)
    assert not Attachment.objects.exists()


def test_novas_own_are_not_detached(ask: Ask) -> None:
    row = asked(ask)
    work()
    (request,) = get(ask, row["url"])["requests"]
    assert "detach that" in message(ask(f"/api/attachments/{request}/detach/", method="POST"), 409)
    message(ask(f"/api/attachments/{NOBODY}/detach/", method="POST"), 404)


def test_x4_admins_and_the_elevated_do_it_others_do_not(ask: Ask, cloud: Cloud) -> None:
    row = asked(ask)
    there = row["url"].removeprefix("http://testserver")
    for by, status in (("manager", 403), ("member", 403), ("reader", 403), ("", 401)):
        message(ask("/api/attachments/", by, method="POST", data={"instance": VM, "profile": "one"}), status)
        message(ask(f"{there}detach/", by, method="POST"), status)
        message(ask(there, by), status)
    assert [one["uuid"] for one in results(ask("/api/attachments/", "operator", project="p2"))] == [row["uuid"]]
    assert ask(f"{there}detach/", "operator", project="p2", method="POST").status_code == 202


def test_the_console_asks_shows_and_detaches(client: Client) -> None:
    client.force_login(User.objects.create_superuser("rita"))
    page = client.get("/admin/accelerators/attachment/attach/?profile=one").content.decode()
    assert 'value="one"' in page and '<option value="two">' in page
    wrong = client.post("/admin/accelerators/attachment/attach/", {"instance": "x", "profile": "one"})
    assert "Enter the uuids of the instance" in wrong.content.decode()
    made = client.post("/admin/accelerators/attachment/attach/", {"instance": VM, "profile": "one", "reason": "why"})
    row = Attachment.objects.get()
    assert made["Location"] == f"/admin/accelerators/attachment/{row.pk}/change/"
    work()
    page = client.get(made["Location"]).content.decode()
    assert "Left to do by hand" in page and "hostdev" in page and "Detach" in page
    assert str(row.uuid) in client.get("/admin/accelerators/attachment/").content.decode()
    assert client.post(made["Location"], {"reason": "over"}).status_code == 302
    work()
    assert "detached" in client.get(made["Location"]).content.decode()
    assert Event.objects.get(action="attachment.detaching").actor == "rita"
    assert client.get("/admin/accelerators/event/?q=" + str(row.uuid)).status_code == 200
    plain = Client()
    plain.force_login(User.objects.create_user("vera", is_staff=True))
    assert plain.post(made["Location"]).status_code == 403
    assert plain.get("/admin/accelerators/attachment/attach/").status_code == 403


def test_at_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    out = StringIO()

    def said(*words: str) -> str:
        out.truncate(out.seek(0))
        call_command("attachment", *words, stdout=out)
        return out.getvalue()

    assert " asked\n" in said("attach", VM, "--profile", "one", "--reason", "why")
    row = Attachment.objects.get()
    monkeypatch.setattr("time.sleep", lambda _: work())
    assert json.loads(said("show", str(row.uuid), "--json"))["state"] == "asked"
    assert " attached\n" in said("attach", VM, "--device", str(Device.objects.get().uuid), "--wait")
    assert ELEMENT in said("show", str(row.uuid))
    assert len(said("list", "--instance", VM, "--state", "attached").splitlines()) == 3
    assert len(json.loads(said("list", "--json"))) == 2
    assert " detached\n" in said("detach", str(row.uuid), "--wait")
    with pytest.raises(CommandError, match="There is no device profile 'none'"):
        said("attach", VM, "--profile", "none")
    with pytest.raises(CommandError, match="there is no attachment"):
        said("show", NOBODY)


def test_what_libvirt_wants() -> None:
    mdev = Handle(NOBODY, "MDEV", '{"asked_type": "nvidia-223"}')
    node = Handle(NOBODY, "DEV", '{"path": "/dev/accel/accel0"}')
    test = Handle(NOBODY, "TEST_PCI", '{"bus": "00", "device": "1", "domain": "0000", "function": "0"}')
    odd = Handle(NOBODY, "PCI", '{"bus": "\'/>", "device": "00", "domain": "0000", "function": "0"}')
    own = Handle(
        NOBODY, "PCI", '{"bus": "3b", "device": "00", "domain": "0x0000", "function": "1", "managed": "false"}'
    )
    hostile = [Handle(NOBODY, "PCI", info) for info in ("[]", "null", "no JSON", '{"bus": {}}')]
    assert libvirt_xml.elements([node, test, odd, *hostile]) == []
    (first, second) = libvirt_xml.elements([mdev, own])
    assert first == (
        f'<hostdev mode="subsystem" type="mdev" model="vfio-pci"><source><address uuid="{NOBODY}" /></source></hostdev>'
    )
    assert 'managed="no"' in second and 'bus="0x3b"' in second
    assert "there is nothing to plug" in libvirt_xml.sentence([test], "cmp1")
    assert libvirt_xml.sentence([], "cmp1") == ""
