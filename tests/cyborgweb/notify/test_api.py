"""Test subscriptions, deliveries and the inbox over HTTP: visibility, secrets that are shown once, and refusals."""

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
from accelerators.domain.states import EventSource
from accelerators.models import Event
from cyborgweb.auth import read_only, roles
from cyborgweb.models.notify import Delivery, Subscription
from cyborgweb.notify import sender, subscriptions
from tests.accelerators.api.own.conftest import Ask, get_error_message, get_results
from tests.accelerators.api.own.conftest import ask as ask  # noqa: PLC0414
from tests.cyborgweb.notify.conftest import OLGA, Subscribe
from tests.cyborgweb.notify.receiver import Receiver

pytestmark = pytest.mark.django_db
WEBHOOK_DATA = {"name": "hook", "kinds": ["request.bound"], "way": "webhook", "target": "https://hook.example/t0ken"}
INBOX_DATA = {"name": "mine", "kinds": ["request.bound", "device.failed"], "way": "inbox"}


def create_subscription(ask: Ask, data: dict[str, Any], by: str = "member", project: str = "p1") -> dict[str, Any]:
    """Create a subscription over the API and return the answer."""
    response = ask("/api/subscriptions/", by, project, "POST", data)
    assert response.status_code == 201, response.content
    return json.loads(response.content)


def get_path(row: dict[str, Any]) -> str:
    return row["url"].removeprefix("http://testserver")


def test_the_secret_of_a_webhook_is_shown_only_when_created_or_rotated(ask: Ask) -> None:
    hook = create_subscription(ask, WEBHOOK_DATA)
    assert hook["secret"].startswith("whsec_") and (hook["project"], hook["personal"]) == ("p1", False)
    assert "secret" not in json.loads(ask(get_path(hook), "member").content)
    assert all("secret" not in row for row in get_results(ask("/api/subscriptions/", "member")))
    again = json.loads(ask(f"{get_path(hook)}rotate/", "member", "p1", "POST", {"generation": 1}).content)
    assert again["secret"].startswith("whsec_") and again["secret"] != hook["secret"]
    told = str(list(Event.objects.values()))
    assert "t0ken" not in told and hook["secret"] not in told
    actions = list(Event.objects.order_by("id").values_list("action", flat=True))
    assert actions == ["subscription.created", "subscription.rotated"]
    event = Event.objects.order_by("id").first()
    assert (event.actor, event.changes["target"]) == ("member-p1", [None, "https://hook.example"])


def test_x4_subscriptions_and_deliveries_are_shown_only_to_their_project_or_person(
    ask: Ask, subscribe: Subscribe
) -> None:
    ours, theirs = create_subscription(ask, WEBHOOK_DATA), create_subscription(ask, WEBHOOK_DATA, project="p2")
    cloud = create_subscription(ask, INBOX_DATA | {"scope": "cloud", "host": "gpu-*"}, by="operator")
    other = subscribe(name="olga's")
    assert [row["uuid"] for row in get_results(ask("/api/subscriptions/", "reader"))] == [ours["uuid"]]
    assert get_results(ask("/api/subscriptions/", "reader"))[0]["target"] == "https://hook.example"
    for foreign in (get_path(theirs), get_path(cloud), f"/api/subscriptions/{other.uuid}/"):
        get_error_message(ask(foreign, "member"), 404)
        get_error_message(ask(foreign, "member", "p1", "DELETE"), 404)
        get_error_message(ask(f"{foreign}test/", "member", "p1", "POST"), 404)
    assert {row["name"] for row in get_results(ask("/api/subscriptions/", "operator"))} == {"hook", "mine"}
    assert len(get_results(ask("/api/subscriptions/"))) == 4
    made_for = Subscription.objects.get(uuid=theirs["uuid"])
    foreign = made_for.deliveries.create(kind="request.bound", event=1)
    get_error_message(ask(f"/api/deliveries/{foreign.message}/", "member"), 404)
    assert get_results(ask("/api/deliveries/", "member")) == []
    assert len(get_results(ask("/api/deliveries/", "member", "p2"))) == 1


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
def test_invalid_or_forbidden_subscriptions_are_refused_with_the_remedy(
    ask: Ask, change: dict[str, Any], by: str, status: int, says: str
) -> None:
    assert says in get_error_message(ask("/api/subscriptions/", by, "p1", "POST", WEBHOOK_DATA | change), status)
    assert not Subscription.objects.exists()


def test_mail_addresses_outside_the_own_or_configured_domains_are_refused(ask: Ask, settings: Any) -> None:
    letters = WEBHOOK_DATA | {"way": "email", "target": "a@elsewhere.org"}
    object.__setattr__(settings.KEYS, "mail_domains", ())
    object.__setattr__(settings.KEYS, "mail_from", "cloud@ours.org")
    assert "at ours.org only" in get_error_message(ask("/api/subscriptions/", "member", "p1", "POST", letters), 400)
    create_subscription(ask, letters | {"target": "a@Ours.org"})
    object.__setattr__(settings.KEYS, "mail_host", "")
    assert "CYBORG_MAIL_HOST" in get_error_message(ask("/api/subscriptions/", "member", "p1", "POST", letters), 400)


def test_a_project_cannot_create_more_subscriptions_than_the_maximum(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subscriptions, "MAX_SUBSCRIPTIONS", 2)
    for _ in range(2):
        create_subscription(ask, WEBHOOK_DATA)
    assert "delete one first" in get_error_message(
        ask("/api/subscriptions/", "member", "p1", "POST", WEBHOOK_DATA), 409
    )
    create_subscription(ask, WEBHOOK_DATA, project="p2")
    create_subscription(ask, INBOX_DATA)


def test_a_test_message_is_delivered_can_be_replayed_and_is_refused_when_off(ask: Ask, receiver: Receiver) -> None:
    hook = create_subscription(ask, WEBHOOK_DATA | {"target": receiver.url})
    delivery = json.loads(ask(f"{get_path(hook)}test/", "member", "p1", "POST").content)
    assert (delivery["kind"], delivery["progress"]) == ("subscription.test", "waiting")
    assert "under way" in get_error_message(ask(f"{get_path(hook)}test/", "member", "p1", "POST"), 409)
    sender.run()
    seen = json.loads(ask(get_path(delivery), "member").content)
    assert (seen["progress"], seen["attempts"]) == ("delivered", 1)
    assert receiver.accepted_bodies()[0]["type"] == "subscription.test"
    get_error_message(ask(f"{get_path(delivery)}replay/", "reader", "p1", "POST"), 403)
    assert ask(f"{get_path(delivery)}replay/", "member", "p1", "POST").status_code == 202
    sender.run()
    assert receiver.accepted_ids() == [f"msg_{delivery['uuid']}"] * 2
    off = ask(get_path(hook), "member", "p1", "PATCH", {"standing": "off", "generation": 1})
    assert json.loads(off.content)["standing"] == "off"
    assert "make it active" in get_error_message(ask(f"{get_path(hook)}test/", "member", "p1", "POST"), 409)
    assert "make it active" in get_error_message(ask(f"{get_path(delivery)}replay/", "member", "p1", "POST"), 409)
    assert "create another" in get_error_message(
        ask(get_path(hook), "member", "p1", "PATCH", {"way": "inbox", "generation": 1}), 409
    )
    assert ask(f"{get_path(hook)}?generation=2", "member", "p1", "DELETE").status_code == 204
    assert not Delivery.objects.exists()


def test_changing_the_way_or_owner_of_a_subscription_is_answered_409(ask: Ask) -> None:
    """docs/notifications.md lists these answers: the request is well formed, but contradicts the subscription."""
    hook, inbox = create_subscription(ask, WEBHOOK_DATA), create_subscription(ask, INBOX_DATA)
    assert "create another" in get_error_message(
        ask(get_path(hook), "member", "p1", "PATCH", {"way": "inbox", "generation": 1}), 409
    )
    assert "create another" in get_error_message(
        ask(get_path(hook), "member", "p1", "PATCH", {"personal": True, "generation": 1}), 409
    )
    assert "Only webhooks" in get_error_message(
        ask(f"{get_path(inbox)}rotate/", "member", "p1", "POST", {"generation": 1}), 409
    )
    assert (
        ask(get_path(hook), "member", "p1", "PATCH", {"way": "webhook", "personal": False, "generation": 1}).status_code
        == 200
    )


def test_an_inbox_shows_messages_only_to_its_person(ask: Ask, subscribe: Subscribe) -> None:
    mine = Subscription.objects.get(uuid=create_subscription(ask, INBOX_DATA)["uuid"])
    foreign = subscribe().deliveries.create(kind="device.failed", data={}, reader=OLGA.user_id, event=1)
    for number in range(3):
        data = {"name": f"card {number}", "host": "cmp1", "reason": "too hot"}
        mine.deliveries.create(kind="device.failed", data=data, reader=mine.person, event=number)
    rows = get_results(ask("/api/inbox/", "reader"))
    assert rows[0]["text"] == "Device failed: card 2, on cmp1. too hot."
    assert len(rows) == 3
    get_error_message(ask(f"/api/inbox/{foreign.message}/", "admin"), 404)
    one = json.loads(ask(f"{get_path(rows[0])}read/", "reader", "p1", "POST").content)
    assert one["read_at"]
    assert json.loads(ask("/api/inbox/read_all/", "reader", "p1", "POST").content) == {"read": 2}
    assert Delivery.objects.get(pk=foreign.pk).read_at is None


def test_x4_tokens_of_one_user_in_different_projects_see_only_their_own_messages(
    ask: Ask, subscribe: Subscribe
) -> None:
    """`ask` makes all its tokens for one user."""
    ours, theirs = (
        Subscription.objects.get(uuid=create_subscription(ask, INBOX_DATA, project=of)["uuid"]) for of in ("p1", "p2")
    )
    cloud = Subscription.objects.get(
        uuid=create_subscription(ask, INBOX_DATA | {"scope": "cloud"}, by="operator")["uuid"]
    )
    for row in (ours, theirs, cloud):
        row.deliveries.create(kind="request.bound", reader=row.person, event=1)
    foreign = theirs.deliveries.get()
    inbox = {
        by: [row["subscription"]["uuid"] for row in get_results(ask("/api/inbox/", by))]
        for by in ("member", "operator")
    }
    assert inbox == {"member": [str(ours.uuid)], "operator": [str(cloud.uuid), str(ours.uuid)]}
    get_error_message(ask(f"/api/inbox/{foreign.message}/", "admin"), 404)
    get_error_message(ask(f"/api/inbox/{foreign.message}/read/", "member", "p1", "POST"), 404)
    assert json.loads(ask("/api/inbox/read_all/", "member", "p1", "POST").content) == {"read": 1}
    assert set(Delivery.objects.filter(read_at=None).values_list("pk", flat=True)) == {
        foreign.pk,
        cloud.deliveries.get().pk,
    }


def test_x4_the_console_inbox_of_a_tenant_shows_only_messages_of_its_project(
    client: Client, subscribe: Subscribe
) -> None:
    user = User.objects.create(username="tina", is_staff=True)
    user.groups.add(roles.get_group("project:p1"))
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


def test_inbox_messages_can_be_marked_read_in_read_only_mode(ask: Ask) -> None:
    mine = Subscription.objects.get(uuid=create_subscription(ask, INBOX_DATA)["uuid"])
    for number in range(2):
        mine.deliveries.create(kind="device.failed", reader=mine.person, event=number)
    read_only.switch_read_only(True, OLGA, "", EventSource.PERSON)
    read_only._drop_cached(None)
    try:
        get_error_message(ask("/api/subscriptions/", "member", "p1", "POST", INBOX_DATA), 503)
        one = get_results(ask("/api/inbox/", "member"))[0]
        assert ask(f"{get_path(one)}read/", "member", "p1", "POST").status_code == 200
        assert json.loads(ask("/api/inbox/read_all/", "member", "p1", "POST").content) == {"read": 1}
    finally:
        read_only._drop_cached(None)


def test_p3_lists_of_notifications_take_at_most_five_statements(ask: Ask, subscribe: Subscribe) -> None:
    ask("/api/subscriptions/")
    for _ in range(2):
        hook = subscribe("webhook", target="https://hook.example/")
        for number in range(5):
            hook.deliveries.create(kind="request.bound", event=number, reader=str(User.objects.get().pk))
        for collection in ("subscriptions", "deliveries", "inbox"):
            with CaptureQueriesContext(connection) as captured:
                assert get_results(ask(f"/api/{collection}/"))
            assert len(captured) <= 5, collection


@pytest.mark.slow
def test_subscriptions_and_the_inbox_are_managed_in_the_console(client: Client, receiver: Receiver) -> None:
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
    changed = {**hook, "standing": "off", "generation": "1"}
    assert client.post(f"/admin/cyborgweb/subscription/{row.pk}/change/", changed).status_code == 302
    row.refresh_from_db()
    assert (row.standing, row.way) == ("off", "webhook")
    for path in ("subscription/", "delivery/", f"delivery/{Delivery.objects.get().pk}/change/"):
        with CaptureQueriesContext(connection) as captured:
            shown = client.get(f"/admin/cyborgweb/{path}")
        assert shown.status_code == 200 and len(captured) <= 12, path
        assert b"in-the-url" not in shown.content


def test_a_subscription_is_deleted_in_the_console_with_its_deliveries(client: Client, subscribe: Subscribe) -> None:
    client.force_login(User.objects.create(username="vera", is_staff=True, is_superuser=True))
    hook = subscribe("webhook", target="https://hook.example/")
    hook.deliveries.create(kind="request.bound", event=1, reader="1")
    address = f"/admin/cyborgweb/subscription/{hook.pk}/delete/?generation={hook.generation}"
    assert 'name="post" value="yes"' in client.get(address).content.decode()
    assert client.post(address, {"post": "yes"}).status_code == 302
    assert not Subscription.objects.exists() and not Delivery.objects.exists()


@pytest.mark.slow
def test_auditors_neither_see_nor_can_filter_by_the_url_of_a_webhook(client: Client, subscribe: Subscribe) -> None:
    hook = subscribe(
        "webhook", caller=replace(OLGA, project_id="local"), scope="project", target=WEBHOOK_DATA["target"]
    )
    user = User.objects.create(username="aude", is_staff=True)
    user.groups.add(roles.get_group(roles.AUDITORS.group))
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


def test_staff_without_a_role_see_no_subscriptions_of_others(client: Client, subscribe: Subscribe) -> None:
    other = subscribe()
    client.force_login(User.objects.create(username="tim", is_staff=True))
    assert client.get(f"/admin/cyborgweb/subscription/{other.pk}/change/").status_code == 404
    assert client.get("/admin/cyborgweb/subscription/").status_code == 200
    assert client.post("/admin/cyborgweb/subscription/add/", {}).status_code == 403
    assert client.post(f"/admin/cyborgweb/subscription/{other.pk}/do/test/").status_code in (403, 404)
    assert client.get("/admin/inbox/").status_code == 200
