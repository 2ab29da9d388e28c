"""Subscriptions, deliveries and inbox over HTTP: who sees what, what is shown once, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from accelerators.domain.caller import Caller
from accelerators.domain.states import Source
from accelerators.models import Event
from cyborgweb.auth import read_only, roles
from cyborgweb.models.notify import Delivery, Subscription
from cyborgweb.notify import sender, subscriptions
from tests.notify.conftest import OLGA, Subscribe
from tests.notify.receiver import Receiver
from tests.own.conftest import Ask, message, results
from tests.own.conftest import ask as ask  # noqa: PLC0414

pytestmark = pytest.mark.django_db
HOOK = {"name": "hook", "kinds": ["request.bound"], "way": "webhook", "target": "https://hook.example/t0ken"}
INBOX = {"name": "mine", "kinds": ["request.bound", "device.failed"], "way": "inbox"}


def made(ask: Ask, data: dict[str, Any], by: str = "member", project: str = "p1") -> dict[str, Any]:
    """The subscription, as it is answered."""
    response = ask("/api/subscriptions/", by, project, "POST", data)
    assert response.status_code == 201, response.content
    return json.loads(response.content)


def at(row: dict[str, Any]) -> str:
    return row["url"].removeprefix("http://testserver")


def test_the_secret_is_shown_once_and_after_rotate(ask: Ask) -> None:
    hook = made(ask, HOOK)
    assert hook["secret"].startswith("whsec_") and (hook["project"], hook["personal"]) == ("p1", False)
    assert "secret" not in json.loads(ask(at(hook), "member").content)
    assert all("secret" not in row for row in results(ask("/api/subscriptions/", "member")))
    again = json.loads(ask(f"{at(hook)}rotate/", "member", "p1", "POST").content)
    assert again["secret"].startswith("whsec_") and again["secret"] != hook["secret"]
    told = str(list(Event.objects.values()))
    assert "t0ken" not in told and hook["secret"] not in told
    actions = list(Event.objects.order_by("id").values_list("action", flat=True))
    assert actions == ["subscription.created", "subscription.rotated"]
    event = Event.objects.order_by("id").first()
    assert (event.actor, event.changes["target"]) == ("member-p1", [None, "https://hook.example"])


def test_x4_a_project_sees_its_own_and_a_person_theirs(ask: Ask, subscribe: Subscribe) -> None:
    ours, theirs = made(ask, HOOK), made(ask, HOOK, project="p2")
    cloud = made(ask, INBOX | {"scope": "cloud", "host": "gpu-*"}, by="operator")
    other = subscribe(name="olga's")
    assert [row["uuid"] for row in results(ask("/api/subscriptions/", "reader"))] == [ours["uuid"]]
    assert results(ask("/api/subscriptions/", "reader"))[0]["target"] == "https://hook.example"
    for foreign in (at(theirs), at(cloud), f"/api/subscriptions/{other.uuid}/"):
        message(ask(foreign, "member"), 404)
        message(ask(foreign, "member", "p1", "DELETE"), 404)
        message(ask(f"{foreign}test/", "member", "p1", "POST"), 404)
    assert {row["name"] for row in results(ask("/api/subscriptions/", "operator"))} == {"hook", "mine"}
    assert len(results(ask("/api/subscriptions/"))) == 4
    made_for = Subscription.objects.get(uuid=theirs["uuid"])
    foreign = made_for.deliveries.create(kind="request.bound", event=1)
    message(ask(f"/api/deliveries/{foreign.message}/", "member"), 404)
    assert results(ask("/api/deliveries/", "member")) == []
    assert len(results(ask("/api/deliveries/", "member", "p2"))) == 1


@pytest.mark.parametrize(
    ("change", "by", "status", "says"),
    [
        ({}, "reader", 403, "cyborg:subscription:create"),
        ({"scope": "cloud"}, "member", 403, "cyborg:subscription:elevated"),
        ({"scope": "cloud"}, "manager", 403, "cyborg:subscription:elevated"),
        ({"host": "gpu-1"}, "member", 400, "needs the scope cloud"),
        ({"scope": "cloud", "host": "%"}, "operator", 400, "* and ? are wildcards"),
        ({"kinds": []}, "member", 400, "kinds"),
        ({"kinds": ["device.exploded"]}, "member", 400, "kinds"),
        ({"way": "pigeon"}, "member", 400, "way"),
        ({"target": "https://10.0.0.1/"}, "member", 400, "not public"),
        ({"target": "https://[::1]/"}, "member", 400, "not public"),
        ({"target": "ftp://x/"}, "member", 400, "begins with https://"),
        ({"way": "email", "target": "nobody"}, "member", 400, "no e-mail address"),
        ({"way": "inbox"}, "member", 400, "takes no target"),
        ({"standing": "paused"}, "member", 400, "active or off"),
        ({"secret": "mine"}, "member", 400, "cannot be written"),
    ],
)
def test_what_is_refused_says_what_to_do(ask: Ask, change: dict[str, Any], by: str, status: int, says: str) -> None:
    assert says in message(ask("/api/subscriptions/", by, "p1", "POST", HOOK | change), status)
    assert not Subscription.objects.exists()


def test_mail_goes_to_our_own_domain_unless_others_are_named(ask: Ask, settings: Any) -> None:
    letters = HOOK | {"way": "email", "target": "a@elsewhere.org"}
    object.__setattr__(settings.KEYS, "mail_domains", ())
    object.__setattr__(settings.KEYS, "mail_from", "cloud@ours.org")
    assert "at ours.org only" in message(ask("/api/subscriptions/", "member", "p1", "POST", letters), 400)
    made(ask, letters | {"target": "a@Ours.org"})
    object.__setattr__(settings.KEYS, "mail_host", "")
    assert "CYBORG_MAIL_HOST" in message(ask("/api/subscriptions/", "member", "p1", "POST", letters), 400)


def test_there_are_at_most_so_many(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "MOST", 2)
    for _ in range(2):
        made(ask, HOOK)
    assert "delete one first" in message(ask("/api/subscriptions/", "member", "p1", "POST", HOOK), 409)
    made(ask, HOOK, project="p2")
    made(ask, INBOX)


def test_the_test_button_the_delivery_and_the_replay(ask: Ask, receiver: Receiver) -> None:
    hook = made(ask, HOOK | {"target": receiver.url})
    delivery = json.loads(ask(f"{at(hook)}test/", "member", "p1", "POST").content)
    assert (delivery["kind"], delivery["progress"]) == ("subscription.test", "waiting")
    assert "under way" in message(ask(f"{at(hook)}test/", "member", "p1", "POST"), 409)
    sender.run()
    seen = json.loads(ask(at(delivery), "member").content)
    assert (seen["progress"], seen["attempts"]) == ("delivered", 1)
    assert receiver.bodies()[0]["type"] == "subscription.test"
    message(ask(f"{at(delivery)}replay/", "reader", "p1", "POST"), 403)
    assert ask(f"{at(delivery)}replay/", "member", "p1", "POST").status_code == 202
    sender.run()
    assert receiver.ids() == [f"msg_{delivery['uuid']}"] * 2
    off = ask(at(hook), "member", "p1", "PATCH", {"standing": "off"})
    assert json.loads(off.content)["standing"] == "off"
    assert "make it active" in message(ask(f"{at(hook)}test/", "member", "p1", "POST"), 409)
    assert "make it active" in message(ask(f"{at(delivery)}replay/", "member", "p1", "POST"), 409)
    assert "create another" in message(ask(at(hook), "member", "p1", "PATCH", {"way": "inbox"}), 409)
    assert ask(at(hook), "member", "p1", "DELETE").status_code == 204
    assert not Delivery.objects.exists()


def test_what_a_subscription_cannot_become_is_a_conflict(ask: Ask) -> None:
    """The answers that docs/notifications.md lists: the request is well formed, and the subscription is in the way."""
    hook, inbox = made(ask, HOOK), made(ask, INBOX)
    assert "create another" in message(ask(at(hook), "member", "p1", "PATCH", {"way": "inbox"}), 409)
    assert "create another" in message(ask(at(hook), "member", "p1", "PATCH", {"personal": True}), 409)
    assert "Only webhooks" in message(ask(f"{at(inbox)}rotate/", "member", "p1", "POST"), 409)
    assert ask(at(hook), "member", "p1", "PATCH", {"way": "webhook", "personal": False}).status_code == 200


def test_an_inbox_is_its_persons_alone(ask: Ask, subscribe: Subscribe) -> None:
    mine = Subscription.objects.get(uuid=made(ask, INBOX)["uuid"])
    foreign = subscribe().deliveries.create(kind="device.failed", data={}, reader=OLGA.user_id, event=1)
    for number in range(3):
        data = {"name": f"card {number}", "host": "cmp1", "reason": "too hot"}
        mine.deliveries.create(kind="device.failed", data=data, reader=mine.person, event=number)
    rows = results(ask("/api/inbox/", "reader"))
    assert rows[0]["text"] == "Device failed: card 2, on cmp1. too hot."
    assert len(rows) == 3
    message(ask(f"/api/inbox/{foreign.message}/", "admin"), 404)
    one = json.loads(ask(f"{at(rows[0])}read/", "reader", "p1", "POST").content)
    assert one["read_at"]
    assert json.loads(ask("/api/inbox/read_all/", "reader", "p1", "POST").content) == {"read": 2}
    assert Delivery.objects.get(pk=foreign.pk).read_at is None


def test_x4_tokens_of_one_name_share_a_user_and_no_messages(ask: Ask, subscribe: Subscribe) -> None:
    """`ask` makes all its tokens for one user."""
    ours, theirs = (Subscription.objects.get(uuid=made(ask, INBOX, project=of)["uuid"]) for of in ("p1", "p2"))
    cloud = Subscription.objects.get(uuid=made(ask, INBOX | {"scope": "cloud"}, by="operator")["uuid"])
    for row in (ours, theirs, cloud):
        row.deliveries.create(kind="request.bound", reader=row.person, event=1)
    foreign = theirs.deliveries.get()
    inbox = {
        by: [row["subscription"]["uuid"] for row in results(ask("/api/inbox/", by))] for by in ("member", "operator")
    }
    assert inbox == {"member": [str(ours.uuid)], "operator": [str(cloud.uuid), str(ours.uuid)]}
    message(ask(f"/api/inbox/{foreign.message}/", "admin"), 404)
    message(ask(f"/api/inbox/{foreign.message}/read/", "member", "p1", "POST"), 404)
    assert json.loads(ask("/api/inbox/read_all/", "member", "p1", "POST").content) == {"read": 1}
    assert set(Delivery.objects.filter(read_at=None).values_list("pk", flat=True)) == {
        foreign.pk,
        cloud.deliveries.get().pk,
    }


def test_x4_the_consoles_inbox_of_who_sees_one_project_is_that_projects(client: Client, subscribe: Subscribe) -> None:
    user = User.objects.create(username="tina", is_staff=True)
    user.groups.add(roles.group("project:p1"))
    member = Caller("tina", str(user.pk), frozenset({"member"}), "")
    for project in ("p1", "p2"):
        row = subscribe(name=f"of {project}", caller=replace(member, project_id=project), scope="project")
        row.deliveries.create(kind="device.failed", data={"name": f"card {project}"}, reader=row.person, event=1)
    client.force_login(user)
    page = client.get("/admin/inbox/").content.decode()
    assert "card p1" in page and "card p2" not in page
    client.post("/admin/inbox/", {"all": "1"})
    assert client.get("/admin/inbox/unread/").json() == {"unread": 0}
    assert Delivery.objects.get(read_at=None).subscription.project_id == "p2"


def test_an_inbox_is_read_while_everything_is_read_only(ask: Ask) -> None:
    mine = Subscription.objects.get(uuid=made(ask, INBOX)["uuid"])
    for number in range(2):
        mine.deliveries.create(kind="device.failed", reader=mine.person, event=number)
    read_only.switch(True, OLGA, "", Source.PERSON)
    read_only._heard(None)
    try:
        message(ask("/api/subscriptions/", "member", "p1", "POST", INBOX), 503)
        one = results(ask("/api/inbox/", "member"))[0]
        assert ask(f"{at(one)}read/", "member", "p1", "POST").status_code == 200
        assert json.loads(ask("/api/inbox/read_all/", "member", "p1", "POST").content) == {"read": 1}
    finally:
        read_only._heard(None)


def test_p3_lists_take_at_most_five_statements(ask: Ask, subscribe: Subscribe) -> None:
    ask("/api/subscriptions/")
    for _ in range(2):
        hook = subscribe("webhook", target="https://hook.example/")
        for number in range(5):
            hook.deliveries.create(kind="request.bound", event=number, reader=str(User.objects.get().pk))
        for collection in ("subscriptions", "deliveries", "inbox"):
            with CaptureQueriesContext(connection) as captured:
                assert results(ask(f"/api/{collection}/"))
            assert len(captured) <= 5, collection


def test_the_console_subscribes_shows_and_marks_read(client: Client, receiver: Receiver) -> None:
    user = User.objects.create(username="vera", is_staff=True, is_superuser=True)
    client.force_login(user)
    form = {"name": "hot cards", "kinds": ["device.failed"], "way": "inbox", "scope": "cloud", "target": ""}
    wrong = client.post("/admin/cyborgweb/subscription/add/", form | {"target": "x"})
    assert b"The inbox takes no target." in wrong.content
    assert client.post("/admin/cyborgweb/subscription/add/", form).status_code == 302
    mine = Subscription.objects.get()
    assert (mine.person, mine.user) == (str(user.pk), user)
    page = f"/admin/cyborgweb/subscription/{mine.pk}/change/"
    assert client.post(f"/admin/cyborgweb/subscription/{mine.pk}/do/test/").status_code == 302
    assert b"subscription.test" in client.get(page).content
    assert client.get("/admin/inbox/unread/").json() == {"unread": 1}
    assert b"Test: hot cards" in client.get("/admin/inbox/").content
    client.post("/admin/inbox/", {"message": str(Delivery.objects.get().message)})
    assert client.get("/admin/inbox/unread/").json() == {"unread": 0}
    hook = form | {"name": "hook", "way": "webhook", "target": receiver.url}
    added = client.post("/admin/cyborgweb/subscription/add/", hook, follow=True).content.decode()
    assert added.count("whsec_") == 1
    row = Subscription.objects.get(name="hook")
    changed = {**hook, "standing": "off"}
    assert client.post(f"/admin/cyborgweb/subscription/{row.pk}/change/", changed).status_code == 302
    row.refresh_from_db()
    assert (row.standing, row.way) == ("off", "webhook")
    for path in ("subscription/", "delivery/", f"delivery/{Delivery.objects.get().pk}/change/"):
        with CaptureQueriesContext(connection) as captured:
            shown = client.get(f"/admin/cyborgweb/{path}")
        assert shown.status_code == 200 and len(captured) <= 12, path
        assert b"in-the-url" not in shown.content


def test_who_may_not_change_it_neither_sees_nor_guesses_the_url(client: Client, subscribe: Subscribe) -> None:
    hook = subscribe("webhook", caller=replace(OLGA, project_id="local"), scope="project", target=HOOK["target"])
    user = User.objects.create(username="aude", is_staff=True)
    user.groups.add(roles.group(roles.AUDITORS.group))
    page = f"/admin/cyborgweb/subscription/{hook.pk}/change/"
    client.force_login(user)
    shown = client.get(page).content.decode()
    assert "https://hook.example" in shown and "t0ken" not in shown
    for asked in ("target__startswith", "target", "secret__startswith"):
        assert client.get("/admin/cyborgweb/subscription/", {asked: "https://hook.example/t"}).status_code == 400
    for path in ("subscription/?deliveries__subscription__target=x", "delivery/?subscription__target__startswith=h"):
        assert client.get(f"/admin/cyborgweb/{path}").status_code == 400
    client.force_login(User.objects.create(username="vera", is_staff=True, is_superuser=True))
    assert "t0ken" in client.get(page).content.decode()


def test_who_has_no_role_sees_no_other_persons(client: Client, subscribe: Subscribe) -> None:
    other = subscribe()
    client.force_login(User.objects.create(username="tim", is_staff=True))
    assert client.get(f"/admin/cyborgweb/subscription/{other.pk}/change/").status_code == 404
    assert client.get("/admin/cyborgweb/subscription/").status_code == 200
    assert client.post("/admin/cyborgweb/subscription/add/", {}).status_code == 403
    assert client.post(f"/admin/cyborgweb/subscription/{other.pk}/do/test/").status_code in (403, 404)
    assert client.get("/admin/inbox/").status_code == 200
