"""A subscription ends when its owner leaves or loses the right to it, and can be handed over to somebody else."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core import mail
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusedError
from accelerators.models import Event
from accelerators.runtime import database_clock
from accelerators.ui.refusals import CHANGED_MEANWHILE_TEXT
from cyborgweb.auth import policy, roles
from cyborgweb.auth.keystone import AuthenticatedPerson
from cyborgweb.auth.login import update_user
from cyborgweb.models import ApiToken
from cyborgweb.models.event_types import SubscriptionStanding
from cyborgweb.models.notify import Delivery, Subscription
from cyborgweb.notify import fanout, owners, sender, subscriptions
from tests.accelerators.api.own.conftest import Ask, get_error_message, get_results
from tests.accelerators.api.own.conftest import ask as ask  # noqa: PLC0414
from tests.cyborgweb.notify.conftest import OLGA, PAST_TIME, Subscribe
from tests.cyborgweb.notify.receiver import Receiver
from tests.support.keystone import Keystone, vouching
from tests.support.keystone import User as Person

pytestmark = pytest.mark.django_db
MEMBER = ["member", "reader"]


def create_member(name: str = "ann", token_roles: list[str] | None = None, project: str = "p1") -> Caller:
    """Create a user with an API token of this project; return the user as a caller with this token."""
    user, _ = User.objects.get_or_create(username=name)
    ApiToken.create_with_secret(name, user, MEMBER if token_roles is None else token_roles, project)
    return Caller(name, str(user.pk), frozenset(token_roles or MEMBER), project)


def add_message(row: Subscription) -> Delivery:
    """Create a waiting message of this subscription."""
    return row.deliveries.create(kind="request.bound", data={"request": "r"}, event=row.pk)


def run_all_jobs() -> None:
    fanout.run()
    sender.run()
    sender.run_mails()


def get_state(row: Subscription) -> tuple[str, str]:
    """Return the subscription's standing, and the reason that is shown with it."""
    row.refresh_from_db()
    return row.standing, row.last_error


# Without Keystone


@pytest.mark.parametrize(
    ("loses", "reason"),
    [
        ("is deactivated", "Its owner ann was deactivated."),
        ("is deleted", "Its owner ann was deleted."),
        ("loses the token", "Its owner ann has lost the right to subscriptions to the project p1."),
        ("becomes a reader", "Its owner ann has lost the right to subscriptions to the project p1."),
    ],
)
def test_a_subscription_ends_and_sends_nothing_when_its_owner(
    loses: str, reason: str, subscribe: Subscribe, receiver: Receiver
) -> None:
    ann, bob = create_member(), create_member("bob")
    hook = subscribe("webhook", caller=ann, target=receiver.url, scope="project")
    letters = subscribe("email", caller=ann, target="ann@example.org", scope="project")
    inbox = subscribe("inbox", caller=ann, scope="project")
    of_bob = subscribe("webhook", caller=bob, target=receiver.url, scope="project")
    for row in (hook, letters, of_bob):
        add_message(row)
    user = User.objects.filter(username="ann")
    if loses == "is deactivated":
        user.update(is_active=False)
    elif loses == "is deleted":
        user.get().delete()
    elif loses == "loses the token":
        ApiToken.objects.filter(name="ann").delete()
    else:
        ApiToken.objects.filter(name="ann").update(roles=["reader"])
    run_all_jobs()
    assert [get_state(row) for row in (hook, letters, inbox)] == [("ended", reason)] * 3
    assert get_state(of_bob) == ("active", "") and len(receiver.accepted) == 1 and not mail.outbox
    assert set(Delivery.objects.exclude(subscription=of_bob).values_list("progress", "last_error")) == {
        ("given up", reason)
    }
    ended = Event.objects.filter(action="subscription.ended", subject=hook.uuid).get()
    assert (ended.changes, ended.reason) == ({"standing": ["active", "ended"]}, reason)
    run_all_jobs()
    assert Event.objects.filter(action="subscription.ended").count() == 3, "each ends once"


def test_a_subscription_to_the_whole_cloud_ends_with_the_group_that_allows_it(subscribe: Subscribe) -> None:
    user = User.objects.create(username="oscar", is_staff=True)
    user.groups.add(roles.get_group(roles.OPERATORS.group))
    oscar = Caller("oscar", str(user.pk), roles.OPERATORS.keystone_roles, roles.LOCAL_PROJECT)
    rows = [subscribe(caller=oscar, scope=scope, name=scope) for scope in ("cloud", "project")]
    fanout.run()
    assert [get_state(row)[0] for row in rows] == ["active", "active"]
    user.groups.set([roles.get_group(roles.VIEWERS.group)])  # a viewer may subscribe to the project's events
    fanout.run()
    reason = "Its owner oscar has lost the right to subscriptions to the whole cloud."
    assert [get_state(row) for row in rows] == [("ended", reason), ("active", "")]


def test_a_superuser_and_an_owner_without_a_user_keep_their_subscriptions(subscribe: Subscribe) -> None:
    root = User.objects.create(username="root", is_staff=True, is_superuser=True)
    rows = [subscribe(caller=Caller("root", str(root.pk), frozenset({"admin"}), "p9")), subscribe()]
    fanout.run()
    assert [get_state(row)[0] for row in rows] == ["active", "active"]


def test_a_broken_policy_file_ends_nothing(
    subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    row = subscribe(caller=create_member(), scope="project")
    (tmp_path / "policy.yaml").write_text("- no rules")
    broken = policy.Policy(tmp_path / "policy.yaml", False)
    monkeypatch.setattr(policy, "_get_policy", lambda: broken)
    fanout.run()
    assert get_state(row)[0] == "active"
    (tmp_path / "policy.yaml").write_text('"cyborg:subscription:create": "role:admin"')
    broken._next_check_at = 0
    fanout.run()
    assert get_state(row)[0] == "ended"


def test_the_rights_of_owners_cost_the_same_statements_for_many_of_them(subscribe: Subscribe) -> None:
    counts = []
    for count in (1, 20):
        for number in range(count):
            subscribe(caller=create_member(f"{count}-{number}"), scope="project")
        with CaptureQueriesContext(connection) as captured:
            owners.end_lost_by_users()
        counts.append(len(captured))
    assert counts[0] == counts[1] <= 4


# With Keystone


@pytest.fixture
def keystone() -> Iterator[Keystone]:
    with vouching(CYBORG_SUBSCRIPTION_OWNER_DAYS="30") as known:
        known.users.append(Person("ann", "secret", {"p1": MEMBER, "p2": MEMBER}, id="u-ann"))
        yield known


ANN = Caller("ann", "u-ann", frozenset(MEMBER), "p1")


def check_owners() -> None:
    """Run the job now, as if nobody had been checked for long."""
    Subscription.objects.update(owner_check_at=PAST_TIME)
    owners.run()


@pytest.mark.parametrize(
    ("loses", "reason"),
    [
        ("leaves", "Keystone has no user with the id u-ann any more."),
        ("is disabled", "Its owner ann is disabled in Keystone."),
        ("has no role", "Its owner ann has lost the right to subscriptions to the project p1."),
        ("loses the whole project", "Its owner ann has lost the right to subscriptions to the project p1."),
        ("becomes a reader", "Its owner ann has lost the right to subscriptions to the project p1."),
    ],
)
def test_with_keystone_a_subscription_ends_when_its_owner(
    loses: str, reason: str, keystone: Keystone, subscribe: Subscribe
) -> None:
    row = subscribe("webhook", caller=ANN, target="https://hook.example/", scope="project")
    other = subscribe(caller=replace(ANN, project_id="p2"), scope="project")
    check_owners()
    assert [get_state(one)[0] for one in (row, other)] == ["active", "active"]
    ann = keystone.users[-1]
    if loses == "leaves":
        keystone.users.pop()
    elif loses == "is disabled":
        ann.enabled = False
    elif loses == "loses the whole project":
        keystone.deleted_projects.add("p1")
    else:
        ann.roles = {"p2": MEMBER} | ({"p1": ["reader"]} if loses == "becomes a reader" else {})
    check_owners()
    assert get_state(row) == ("ended", reason)
    leaves_all = loses in ("leaves", "is disabled")
    assert get_state(other)[0] == ("ended" if leaves_all else "active"), (
        "the roles of one project say nothing of others"
    )
    event = Event.objects.filter(action="subscription.ended", subject=row.uuid).get()
    assert (event.actor, event.reason) == ("Keystone", reason)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_keystone_that_gives_no_answer_ends_nothing_and_is_asked_again_later(
    status: int, keystone: Keystone, subscribe: Subscribe
) -> None:
    row = subscribe(caller=ANN, scope="project")
    Subscription.objects.update(owner_confirmed_at=PAST_TIME)
    keystone.users.pop()
    owners.keystone.service_session().get_token()  # so that the login works
    keystone.fails_with = status
    check_owners()
    assert get_state(row)[0] == "active" and keystone.calls["list"] == 1
    assert row.owner_check_at > database_clock.now() and not row.owner_doubt
    owners.run()
    assert keystone.calls["list"] == 1, "not before its time"


def test_an_owner_about_whom_keystone_gives_no_answer_does_not_hide_the_others(
    keystone: Keystone, subscribe: Subscribe
) -> None:
    unknown = subscribe(caller=replace(ANN, user_id="u-unknown"), scope="project")
    gone = subscribe(caller=replace(ANN, user_id="u-gone"), scope="project")
    keystone.failing_users.add("u-unknown")
    check_owners()
    assert [get_state(row)[0] for row in (unknown, gone)] == ["active", "ended"]


def test_another_keystone_that_knows_nobody_ends_nothing(keystone: Keystone, subscribe: Subscribe) -> None:
    row = subscribe(caller=ANN, scope="project")
    owners.keystone.service_session().get_token()
    keystone.users.clear()
    keystone.users.append(Person("stranger", "secret", {}))
    check_owners()
    assert get_state(row)[0] == "active"


@pytest.mark.parametrize("obstacle", ["may not list", "federated"])
def test_unknown_rights_are_shown_and_end_a_subscription_only_when_no_login_confirmed_them_for_long(
    obstacle: str, keystone: Keystone, subscribe: Subscribe, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [subscribe(caller=ANN, scope="project", name=str(number)) for number in range(2)]
    keystone.may_list = obstacle != "may not list"
    keystone.users[-1].federated = obstacle == "federated"
    doubt = "read users and role assignments (403)" if obstacle == "may not list" else owners.FEDERATED
    with caplog.at_level(logging.WARNING, "cyborgweb.notify.owners"):
        check_owners()
        check_owners()
    assert [record.levelname for record in caplog.records] == ["WARNING"], "it is logged once"
    assert doubt in caplog.text
    assert {get_state(row)[0] for row in rows} == {"active"} and all(doubt in row.owner_doubt for row in rows)
    Subscription.objects.update(owner_confirmed_at=database_clock.now() - timedelta(days=31))
    update_user(AuthenticatedPerson(ANN, "Default"))  # ann logs in
    check_owners()
    assert {get_state(row)[0] for row in rows} == {"active"}
    Subscription.objects.filter(pk=rows[0].pk).update(owner_confirmed_at=database_clock.now() - timedelta(days=31))
    check_owners()
    assert [get_state(row)[0] for row in rows] == ["ended", "active"]
    assert "not confirmed for 30 days" in get_state(rows[0])[1] and doubt in rows[0].last_error


def test_a_login_confirms_or_ends_subscriptions_in_its_own_project_only(
    keystone: Keystone, subscribe: Subscribe
) -> None:
    rows = [subscribe(caller=replace(ANN, project_id=project), scope="project") for project in ("p1", "p2")]
    update_user(AuthenticatedPerson(replace(ANN, roles=frozenset({"reader"})), "Default"))
    reason = "Its owner ann has lost the right to subscriptions to the project p1."
    assert [get_state(row) for row in rows] == [("ended", reason), ("active", "")]


def test_a_subscription_without_a_known_owner_ends_after_the_same_time(
    keystone: Keystone, subscribe: Subscribe
) -> None:
    row = subscribe("webhook", caller=ANN, target="https://hook.example/", scope="project")
    Subscription.objects.update(owner="")
    check_owners()
    assert get_state(row)[0] == "active" and row.owner_doubt == owners.NO_OWNER
    subscriptions.edit(row.pk, {"name": "renamed"}, ANN)
    row.refresh_from_db()
    assert row.owner == "u-ann", "whoever changes it becomes its owner"
    Subscription.objects.update(owner="", owner_confirmed_at=PAST_TIME)
    check_owners()
    assert get_state(row)[0] == "ended"


def test_a_disabled_project_or_domain_ends_its_subscriptions(keystone: Keystone, subscribe: Subscribe) -> None:
    rows = [subscribe(caller=replace(ANN, project_id=project), scope="project") for project in ("p1", "p2")]
    keystone.disabled.add("p1")
    check_owners()
    reason = "The project p1 is disabled in Keystone."
    assert [get_state(row) for row in rows] == [("ended", reason), ("active", "")]
    keystone.disabled = {"default"}
    check_owners()
    assert get_state(rows[1]) == ("ended", "The project p2 is disabled in Keystone.")


def test_owners_without_an_answer_wait_longer_each_time_and_the_others_do_not_wait(
    keystone: Keystone, subscribe: Subscribe
) -> None:
    for number in range(4):
        subscribe(caller=replace(ANN, user_id=f"u-unknown{number}"), scope="project")
        keystone.failing_users.add(f"u-unknown{number}")
    gone = subscribe(caller=replace(ANN, user_id="u-gone"), scope="project")
    check_owners()
    assert get_state(gone)[0] == "ended"
    pauses = []
    for minutes in (0, 60, 600):
        Subscription.objects.update(owner_confirmed_at=database_clock.now() - timedelta(minutes=minutes))
        check_owners()
        row = Subscription.objects.exclude(pk=gone.pk).first()
        assert row
        pauses.append(round((row.owner_check_at - database_clock.now()).total_seconds(), -1))
    assert pauses == [60, 360, 900]


def test_a_keystone_that_is_down_is_asked_three_times_and_the_other_owners_stay_due(
    keystone: Keystone, subscribe: Subscribe
) -> None:
    for number in range(5):
        subscribe(caller=replace(ANN, user_id=f"u-{number}"), scope="project")
    owners.keystone.service_session().get_token()
    keystone.fails_with = 503
    check_owners()
    assert keystone.calls["list"] == 3
    assert Subscription.objects.filter(owner_check_at=PAST_TIME).count() == 2
    owners.run()
    assert keystone.calls["list"] == 5, "the others come first"


def test_a_user_made_at_a_first_login_is_linked_to_the_subscriptions_that_the_person_has(
    keystone: Keystone, subscribe: Subscribe
) -> None:
    row = subscribe(caller=ANN, scope="project")
    assert row.user is None
    user = update_user(AuthenticatedPerson(replace(ANN, roles=frozenset({"admin", *MEMBER})), "Default"))
    user.is_active = False
    user.save()
    owners.run()
    assert get_state(row) == ("ended", "Its owner ann@Default was deactivated.")


def test_the_migration_links_subscriptions_that_are_older_than_their_owners_user(
    keystone: Keystone, subscribe: Subscribe
) -> None:
    row, other = subscribe(caller=ANN, scope="project"), subscribe(caller=replace(ANN, user_id="u-bob"))
    user = update_user(AuthenticatedPerson(replace(ANN, roles=frozenset({"admin", *MEMBER})), "Default"))
    Subscription.objects.update(user=None)
    with connection.cursor() as cursor:
        cursor.execute(import_module("cyborgweb.migrations.0004_subscription_owners").LINK_USERS)
    assert dict(Subscription.objects.values_list("pk", "user")) == {row.pk: user.pk, other.pk: None}


def test_a_login_succeeds_if_the_subscriptions_cannot_be_confirmed(
    keystone: Keystone, subscribe: Subscribe, caplog: pytest.LogCaptureFixture
) -> None:
    row = subscribe(caller=ANN, scope="project")
    with connection.cursor() as cursor:
        cursor.execute(
            "CREATE FUNCTION pg_temp.refuse() RETURNS trigger LANGUAGE plpgsql AS"
            " $$ BEGIN IF new.owner_confirmed_at <> old.owner_confirmed_at THEN RAISE 'the table is broken'; END IF;"
            " RETURN new; END $$;"
            "CREATE TRIGGER refuse BEFORE UPDATE ON cyborgweb_subscription FOR EACH ROW"
            " EXECUTE FUNCTION pg_temp.refuse()"
        )
    Subscription.objects.update(name="same")
    user = update_user(AuthenticatedPerson(replace(ANN, roles=frozenset({"admin", *MEMBER})), "Default"))
    assert user.is_active and "the table is broken" in caplog.text
    assert get_state(row)[0] == "active"


def test_a_login_succeeds_if_the_subscriptions_cannot_be_read(keystone: Keystone) -> None:
    auditor = AuthenticatedPerson(replace(ANN, roles=frozenset({policy.AUDITOR, "reader"})), "Default")
    update_user(auditor)
    with connection.cursor() as cursor:
        cursor.execute("ALTER TABLE cyborgweb_subscription RENAME COLUMN owner TO former_owner")
    assert update_user(auditor).is_active


def test_a_service_user_with_a_token_for_a_domain_ends_nothing(
    keystone: Keystone, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = subscribe(caller=ANN, scope="project")
    for name in ("OS_PROJECT_NAME", "OS_PROJECT_DOMAIN_NAME"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("OS_DOMAIN_NAME", "Default")
    owners.keystone.service_session.cache_clear()
    keystone.users[-1].roles = {}  # Keystone answers with an empty list
    check_owners()
    assert get_state(row)[0] == "active" and "its token is for a domain" in row.owner_doubt


# Handing over


def test_with_keystone_an_administrator_needs_a_role_in_the_project_to_take_a_subscription_over(
    keystone: Keystone, subscribe: Subscribe
) -> None:
    row = subscribe("webhook", caller=ANN, target="https://hook.example/", scope="project")
    admin = Caller("root", "u-root", frozenset({"admin", *MEMBER}), "p9")
    keystone.users.append(Person("root", "", {"p9": ["admin", *MEMBER]}, id="u-root"))
    with pytest.raises(RefusedError, match="Roles in other projects, also admin, do not count"):
        subscriptions.hand_over(row.pk, "u-root", "", admin)
    with pytest.raises(RefusedError, match="use a token of this project"):
        subscriptions.edit(row.pk, {"target": "https://root.example/"}, admin)
    Subscription.objects.update(owner="")
    subscriptions.edit(row.pk, {"name": "renamed"}, admin)
    row.refresh_from_db()
    assert (row.name, row.owner) == ("renamed", ""), "the owner stays unknown"
    keystone.users[-1].roles["p1"] = MEMBER
    subscriptions.hand_over(row.pk, "u-root", "", admin)
    check_owners()
    row.refresh_from_db()
    assert (row.owner, row.standing) == ("u-root", "active")


def test_only_its_owner_with_the_right_can_make_an_ended_subscription_active_again(subscribe: Subscribe) -> None:
    ann, bob = create_member(), create_member("bob")
    hook = subscribe("webhook", caller=ann, target="https://hook.example/", scope="project")
    owners.end(Subscription.objects.all(), "Because.", "tests")
    for standing, caller in (
        *(("active", bob), ("off", bob), ("active", replace(ann, roles=frozenset({"reader"})))),
        *(("off", OLGA), ("active", OLGA)),
    ):
        with pytest.raises(RefusedError, match="has ended"):
            subscriptions.edit(hook.pk, {"standing": standing}, caller)
    assert get_state(hook) == ("ended", "Because.")
    subscriptions.edit(hook.pk, {"standing": "active"}, ann)
    assert get_state(hook) == ("active", "")


def test_a_recipient_who_ends_the_mails_of_an_ended_subscription_leaves_it_ended(subscribe: Subscribe) -> None:
    row = subscribe("email", caller=create_member(), target="ann@example.org", scope="project")
    owners.end(Subscription.objects.all(), "Because.", "tests")
    subscriptions.end_mails(str(row.uuid), "ann@example.org")
    assert get_state(row) == ("ended", "Because.") and row.confirmed_at is None


@pytest.mark.slow
def test_a_manager_sees_ended_subscriptions_of_members_and_hands_them_over(ask: Ask) -> None:
    ann, bob = create_member(), create_member("bob")
    reader = create_member("rolf", ["reader"])
    values = {"name": "mine", "kinds": ["request.bound"], "way": "webhook", "target": "https://hook.example/t0ken"}
    row, _ = subscriptions.create(values, ann, personal=True)
    path = f"/api/subscriptions/{row.uuid}/"
    assert ask(path, "manager").status_code == 404, "a manager does not see what a member has"
    User.objects.filter(username="ann").update(is_active=False)
    owners.run()
    assert ask(path, "member").status_code == 404
    assert ask(path, "manager", "p2").status_code == 404
    (shown,) = get_results(ask("/api/subscriptions/?standing=ended", "manager"))
    assert (shown["standing"], shown["last_error"], shown["owner"]) == (
        *("ended", "Its owner ann was deactivated."),
        ann.user_id,
    )
    assert shown["target"] == "https://hook.example", "the URL holds a token"
    for verb, values in (("rotate/", {}), ("test/", {}), ("resend/", {}), ("", {"name": "yours", "generation": 1})):
        method = "POST" if verb else "PATCH"
        for who in ("manager", "admin"):
            answer = ask(f"{path}{verb}", who, "p1", method, values)
            assert "belongs to another person" in get_error_message(answer, 403), verb
    hand_over = f"{path}hand_over/"
    assert ask(hand_over, "member", "p1", "POST", {"owner": "bob"}).status_code == 403
    for wrong in ("nobody", "ann", reader.user_id, "99999999999999999999"):
        answer = ask(hand_over, "manager", "p1", "POST", {"owner": wrong, "generation": row.generation})
        assert "no active user" in get_error_message(answer, 400, "invalid")
    row.refresh_from_db()
    body = {"owner": "bob", "reason": "Ann left.", "generation": row.generation}
    assert "give a new target" in get_error_message(ask(hand_over, "manager", "p1", "POST", body), 400, "invalid")
    refused = ask(hand_over, "manager", "p1", "POST", body | {"target": "ftp://x/"})
    assert get_error_message(refused, 400, "invalid")
    former_secret = row.secret
    answer = ask(hand_over, "manager", "p1", "POST", body | {"target": "https://bob.example/his"})
    assert answer.status_code == 200 and answer.json()["target"] == "https://bob.example", answer.content
    row.refresh_from_db()
    assert (row.standing, row.person, row.owner, row.user_id) == ("active", bob.user_id, bob.user_id, int(bob.user_id))
    event = Event.objects.get(action="subscription.handed_over")
    assert (event.actor, event.reason, event.request_id != "") == ("manager-p1", "Ann left.", True)
    assert event.changes == {
        "owner": [ann.user_id, bob.user_id],
        "standing": ["ended", "active"],
        "target": ["https://hook.example", "https://bob.example"],
    }
    assert row.target == "https://bob.example/his" and row.secret != former_secret
    assert ask(path, "manager").status_code == 404, "it is another member's now"
    again = ask(hand_over, "admin", "p1", "POST", {"owner": "bob", "generation": row.generation})
    assert "is the owner" in get_error_message(again, 409, "conflict")
    owners.run()
    assert get_state(row)[0] == "active"


def test_a_manager_deletes_an_ended_subscription_of_a_member_but_does_not_read_its_messages(ask: Ask) -> None:
    ann = create_member()
    values = {"name": "mine", "kinds": ["request.bound"]}
    inbox, _ = subscriptions.create(values | {"way": "inbox"}, ann)
    hook, _ = subscriptions.create(values | {"way": "webhook", "target": "https://hook.example/"}, ann, personal=True)
    inbox.deliveries.create(kind="request.bound", data={}, reader=ann.user_id, progress="delivered")
    add_message(hook)
    owners.end(Subscription.objects.all(), "Because.", "tests")
    assert get_results(ask("/api/deliveries/", "manager")) == []
    subscriptions.hand_over(inbox.pk, str(User.objects.get(username="rita").pk), "", OLGA)
    assert get_results(ask("/api/deliveries/", "manager")) == [], "messages in the inbox of the former owner stay there"
    assert ask(f"/api/subscriptions/{hook.uuid}/?generation=1", "manager", "p1", "DELETE").status_code == 204
    assert not Subscription.objects.filter(pk=hook.pk).exists()


@pytest.mark.slow
def test_a_viewer_does_not_see_ended_personal_subscriptions_of_others_in_the_local_project(client: Client) -> None:
    root, viewer = User.objects.create_superuser("root"), User.objects.create(username="vera", is_staff=True)
    viewer.groups.add(roles.get_group(roles.VIEWERS.group))
    caller = roles.get_session_caller(root, {})
    assert caller
    values = {"name": "of-root", "kinds": ["request.bound"], "way": "webhook", "target": "https://hook.example/t0ken"}
    row, _ = subscriptions.create(values, caller, personal=True)
    owners.end(Subscription.objects.all(), "Because.", "tests")
    other = User.objects.create_superuser("other")
    for user, is_shown in ((viewer, False), (other, True)):
        client.force_login(user)
        page = client.get("/admin/cyborgweb/subscription/").content.decode()
        assert ("of-root" in page) == is_shown
        page = client.get(f"/admin/cyborgweb/subscription/{row.pk}/change/").content.decode()
        assert ("https://hook.example" in page) == is_shown and "t0ken" not in page
        client.post(f"/admin/cyborgweb/subscription/{row.pk}/do/rotate/")
    assert not Event.objects.filter(action="subscription.rotated").exists()


def test_a_person_who_changes_the_target_becomes_the_owner_and_loses_it_with_the_right(subscribe: Subscribe) -> None:
    ann, bob = create_member(), create_member("bob")
    row = subscribe("webhook", caller=ann, target="https://ann.example/", scope="project")
    subscriptions.edit(row.pk, {"name": "renamed", "target": "https://ann.example/"}, bob)
    row.refresh_from_db()
    assert row.owner == ann.user_id, "the target is the same"
    subscriptions.edit(row.pk, {"target": "https://bob.example/"}, bob)
    row.refresh_from_db()
    assert (row.owner, row.user_id, row.person) == (bob.user_id, int(bob.user_id), "")
    User.objects.filter(username="bob").update(is_active=False)
    owners.run()
    assert get_state(row) == ("ended", "Its owner bob was deactivated.")


def test_the_reason_of_an_end_stays_when_the_subscription_is_renamed(subscribe: Subscribe) -> None:
    ann, bob = create_member(), create_member("bob")
    row = subscribe("webhook", caller=ann, target="https://hook.example/", scope="project")
    owners.end(Subscription.objects.all(), "Because.", "tests")
    subscriptions.edit(row.pk, {"name": "renamed"}, bob)
    assert get_state(row) == ("ended", "Because.")


def test_a_change_of_the_scope_lets_the_owner_be_checked_again_now(subscribe: Subscribe) -> None:
    row = subscribe("webhook", target="https://hook.example/", scope="project")
    Subscription.objects.update(owner_check_at=database_clock.now() + timedelta(hours=1))
    subscriptions.edit(row.pk, {"scope": "cloud"}, create_member())
    row.refresh_from_db()
    assert row.owner_check_at <= database_clock.now()


def test_a_name_that_is_also_an_id_means_the_user_with_this_name(subscribe: Subscribe) -> None:
    ann = create_member()
    named = create_member(ann.user_id)  # the name of this user is the id of ann
    row = subscribe("webhook", target="https://hook.example/", scope="project")
    subscriptions.hand_over(row.pk, ann.user_id, "", OLGA)
    row.refresh_from_db()
    assert row.owner == named.user_id


def test_a_subscription_that_is_handed_over_counts_for_its_new_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    ann, bob = create_member(), create_member("bob")
    monkeypatch.setattr(subscriptions, "MAX_SUBSCRIPTIONS", 1)
    values = {"name": "mine", "kinds": ["request.bound"], "way": "inbox"}
    row, _ = subscriptions.create(values, ann)
    subscriptions.create(values, bob)
    with pytest.raises(RefusedError, match="already 1 subscriptions"):
        subscriptions.hand_over(row.pk, "bob", "", OLGA)


def test_an_address_is_confirmed_anew_when_its_subscription_is_handed_over(subscribe: Subscribe) -> None:
    ann = create_member()
    create_member("bob")
    for personal in (True, False):
        row = subscribe("email", caller=ann, target="ann@example.org", scope="project", personal=personal)
        add_message(row)
        subscriptions.hand_over(row.pk, "bob", "", OLGA)
        row.refresh_from_db()
        assert row.is_unconfirmed
        sender.run_mails()
        (letter,) = mail.outbox
        assert "Confirm this address" in letter.subject
        mail.outbox.clear()
        Subscription.objects.all().delete()


def test_with_keystone_the_new_owners_rights_are_asked_of_keystone(keystone: Keystone, subscribe: Subscribe) -> None:
    row = subscribe("webhook", caller=ANN, target="https://hook.example/", scope="project")
    mary = Caller("mary", "u-mary", frozenset({"manager", "member", "reader"}), "p1")
    keystone.users += [Person("bob", "", {"p1": MEMBER}, id="u-bob"), Person("eve", "", {"p2": MEMBER}, id="u-eve")]
    for stranger in ("u-eve", "u-none", "bob"):
        with pytest.raises(RefusedError, match="no active user"):
            subscriptions.hand_over(row.pk, stranger, "", mary)
    subscriptions.hand_over(row.pk, "u-bob", "", mary)
    row.refresh_from_db()
    assert (row.owner, row.person) == ("u-bob", "")
    keystone.may_list = False
    with pytest.raises(RefusedError, match="cannot be checked") as refused:
        subscriptions.hand_over(row.pk, "u-ann", "", mary)
    assert refused.value.reason == "unavailable"
    subscriptions.hand_over(row.pk, "u-mary", "", mary)  # to herself, whose rights are known
    row.refresh_from_db()
    assert row.owner == "u-mary"


@pytest.mark.slow
def test_an_administrator_hands_over_in_the_console_and_sees_why_it_ended(client: Client, subscribe: Subscribe) -> None:
    ann = create_member()
    create_member("bob")
    row = subscribe("webhook", caller=ann, target="https://hook.example/t0ken", scope="project", personal=True)
    User.objects.filter(username="ann").update(is_active=False)
    owners.run()
    client.force_login(User.objects.create_superuser("root"))
    page = client.get(f"/admin/cyborgweb/subscription/{row.pk}/change/").content.decode()
    assert "Its owner ann was deactivated." in page and "Hand over" in page and "t0ken" not in page
    rotated = client.post(f"/admin/cyborgweb/subscription/{row.pk}/do/rotate/")
    assert rotated.status_code == 403
    url = f"/admin/cyborgweb/subscription/{row.pk}/do/hand_over/"
    row.refresh_from_db()
    seen = {"generation": row.generation}
    for generation, says in (
        ({}, "does not say which version"),
        ({"generation": 1000}, CHANGED_MEANWHILE_TEXT),
    ):
        assert says in client.post(url, {"owner": "bob"} | generation, follow=True).content.decode()
    refused = client.post(url, {"owner": "carl"} | seen, follow=True).content.decode()
    assert "There is no active user carl" in refused
    values = {"owner": "bob", "reason": "left", "target": "https://bob.example/"} | seen
    assert "is handed over to bob" in client.post(url, values, follow=True).content.decode()
    assert get_state(row)[0] == SubscriptionStanding.ACTIVE
    assert json.dumps(Event.objects.get(action="subscription.handed_over").reason) == '"left"'
