"""Test that recipients confirm mail addresses, and end mails, with signed links and without a login."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from email.message import EmailMessage
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core import signing
from django.test import Client
from django.utils import timezone

from accelerators.domain.errors import RefusedError
from accelerators.models import Event
from accelerators.runtime import database_clock
from cyborgweb.auth import read_only
from cyborgweb.models.notify import ConfirmationRequest, Delivery, Subscription
from cyborgweb.notify import mail_links, sender, subscriptions
from tests.accelerators.api.own.conftest import Ask, get_error_message, get_results
from tests.accelerators.api.own.conftest import ask as ask  # noqa: PLC0414
from tests.cyborgweb.notify.conftest import OLGA, Subscribe, make_retries_due
from tests.cyborgweb.notify.test_mail import smtp as smtp  # noqa: PLC0414
from tests.support.smtp import SmtpServer

pytestmark = pytest.mark.django_db
BASE = "https://accelerators.example"
MAILS: dict[str, Any] = {
    "name": "letters",
    "kinds": ["request.bound"],
    "way": "email",
    "target": "colleague@example.org",
}


def create_mails(target: str = "colleague@example.org") -> Subscription:
    return subscriptions.create(MAILS | {"target": target}, OLGA)[0]


def find_link(letter: EmailMessage, action: str) -> str:
    """Return the path of the link in the text of a mail."""
    (link,) = re.findall(rf"{BASE}(/mail/{action}/\S+)", letter.get_content())
    return str(link)


@pytest.fixture
def anonymous() -> Iterator[Client]:
    """Yield a client without a session, for which CSRF tokens are enforced."""
    yield Client(enforce_csrf_checks=True)


def test_a_colleague_gets_no_messages_before_confirming_by_a_button(smtp: SmtpServer, anonymous: Client) -> None:
    row = create_mails()
    row.deliveries.create(kind="request.bound", event=1)
    with pytest.raises(RefusedError, match="not confirmed this address"):
        subscriptions.queue_test_message(row.pk, OLGA)
    sender.run_mails()
    sender.run_mails()
    (letter,) = smtp.accepted
    assert letter["Subject"] == "[Accelerators] Confirm this address" and "olga wants" in letter.get_content()
    link = find_link(letter, "confirm")
    shown = anonymous.get(link, HTTP_HOST="attacker.example")
    assert b"colleague@example.org" in shown.content and b"attacker.example" not in shown.content
    assert "no-cache" in shown["Cache-Control"]
    row.refresh_from_db()
    assert row.is_unconfirmed, "programs that scan mails follow links"
    assert b"is confirmed" in anonymous.post(link).content
    row.refresh_from_db()
    assert not row.is_unconfirmed and anonymous.post(link).status_code == 200
    sender.run_mails()
    assert [str(one["Subject"]) for one in smtp.accepted[1:]] == ["[Accelerators] Accelerator ready."]
    event = Event.objects.get(action="subscription.confirmed")
    assert (event.actor, event.changes) == ("colleague@example.org", {"confirmed": [False, True]})


def test_every_mail_has_a_link_that_ends_it_and_only_a_new_confirmation_resumes_it(
    smtp: SmtpServer, anonymous: Client, subscribe: Subscribe
) -> None:
    row, other = subscribe("email", target="colleague@example.org"), subscribe("email", target="b@example.org")
    for one in (row, other):
        one.deliveries.create(kind="request.bound", event=1)
    sender.run_mails()
    letter = next(one for one in smtp.accepted if one["To"] == row.target)
    link = find_link(letter, "end")
    assert letter["List-Unsubscribe"].strip() == f"<{BASE}{link}>"
    assert letter["List-Unsubscribe-Post"] == "List-Unsubscribe=One-Click"
    assert b"End these mails" in anonymous.get(link).content
    row.refresh_from_db()
    assert row.standing == "active"
    row.deliveries.create(kind="request.bound", event=2)
    one_click = anonymous.post(link, "List-Unsubscribe=One-Click", content_type="application/x-www-form-urlencoded")
    assert b"No more mails" in one_click.content
    row.refresh_from_db()
    other.refresh_from_db()
    assert (row.standing, row.is_unconfirmed, other.standing) == ("off", True, "active")
    assert "Its recipient ended it" in row.last_error
    assert row.deliveries.get(event=2).progress == "given up"
    assert Event.objects.get(action="subscription.ended").actor == "colleague@example.org"
    row = subscriptions.edit(row.pk, {"standing": "active"}, OLGA)
    assert row.is_unconfirmed
    with pytest.raises(RefusedError):
        subscriptions.queue_test_message(row.pk, OLGA)
    subscriptions.resend_confirmation(row.pk, OLGA)


def test_the_owner_cannot_undo_the_end_of_mails_with_another_subscription_to_the_same_address(
    anonymous: Client, subscribe: Subscribe
) -> None:
    row, silent = subscribe("email", target="victim@example.org"), subscribe("email", target="victim@example.org")
    Subscription.objects.filter(pk=silent.pk).update(target="victim@Example.ORG")
    elsewhere = subscribe("email", target="victim@example.org", personal=True)
    other = subscribe("email", target="other@example.org")
    link = mail_links.build_link(mail_links.LinkAction.END, str(row.uuid), row.target).removeprefix(BASE)
    assert b"before you confirm it again" in anonymous.post(link).content
    assert create_mails("victim@example.org").is_unconfirmed
    assert subscriptions.edit(other.pk, {"target": "victim@example.org"}, OLGA).is_unconfirmed
    silent.refresh_from_db()
    elsewhere.refresh_from_db()
    assert (silent.standing, silent.is_unconfirmed, elsewhere.is_unconfirmed) == ("active", True, False)
    event = Event.objects.get(action="subscription.unconfirmed")
    assert (event.actor, event.changes) == ("victim@Example.ORG", {"confirmed": [True, False]})


def test_a_request_to_confirm_waits_while_the_sending_process_lacks_the_public_address(
    smtp: SmtpServer, settings: Any
) -> None:
    row, keys = create_mails(), settings.KEYS
    settings.KEYS = replace(keys, public_url="")
    sender.run_mails()
    row.refresh_from_db()
    assert not smtp.accepted and "CYBORG_PUBLIC_URL" in row.last_error
    assert row.deliveries.get().progress == "waiting"
    make_retries_due()
    settings.KEYS = keys
    sender.run_mails()
    assert find_link(smtp.accepted[0], "confirm")


def test_an_address_that_the_former_release_stored_with_capitals_works_with_links_and_edits(
    smtp: SmtpServer, anonymous: Client, subscribe: Subscribe
) -> None:
    row = subscribe("email", target="ops@example.com")
    Subscription.objects.filter(pk=row.pk).update(target="ops@Example.COM")
    assert not create_mails("ops@example.com").is_unconfirmed, "the owner has proven it"
    for target in ("ops@Example.COM", "ops@EXAMPLE.com"):
        assert not subscriptions.edit(row.pk, {"name": target, "target": target}, OLGA).is_unconfirmed
        Subscription.objects.filter(pk=row.pk).update(target="ops@Example.COM")
    assert not ConfirmationRequest.objects.exists()
    row.deliveries.create(kind="request.bound", event=1)
    sender.run_mails()
    assert b"No more mails" in anonymous.post(find_link(smtp.accepted[0], "end")).content
    row.refresh_from_db()
    assert (row.standing, row.is_unconfirmed) == ("off", True)


def test_a_link_serves_one_purpose_one_address_and_expires(
    anonymous: Client, monkeypatch: pytest.MonkeyPatch, settings: Any
) -> None:
    row = create_mails()
    uuid = str(row.uuid)
    confirm, end = (
        mail_links.build_link(action, uuid, row.target).removeprefix(BASE) for action in mail_links.LinkAction
    )
    for forged in (
        end.replace("/end/", "/confirm/"),
        confirm.replace("/confirm/", "/end/"),
        confirm[:-3] + "x/",
        "/mail/confirm/" + signing.dumps([uuid, row.target]) + "/",
    ):
        assert anonymous.get(forged).status_code == anonymous.post(forged).status_code == 404
    later = database_clock.timestamp() + mail_links.CONFIRM_MAX_AGE_S + 60
    with monkeypatch.context() as patch:
        patch.setattr(database_clock, "estimate_timestamp", lambda: later)
        assert anonymous.post(confirm).status_code == 404
        assert anonymous.get(end).status_code == 200, "the link that ends the mails does not expire"
    assert anonymous.put(confirm).status_code == 405
    subscriptions.edit(row.pk, {"target": "somebody-else@example.org"}, OLGA)
    assert b"nothing to do" in anonymous.post(confirm).content and b"nothing to do" in anonymous.post(end).content
    row.refresh_from_db()
    assert (row.is_unconfirmed, row.standing) == (True, "active")
    settings.KEYS = replace(settings.KEYS, public_url="")
    with pytest.raises(RefusedError, match="CYBORG_PUBLIC_URL"):
        create_mails("third@example.org")
    assert not Subscription.objects.filter(target="third@example.org").exists()


def test_while_everything_is_read_only_mails_can_be_ended_but_not_confirmed(
    anonymous: Client, subscribe: Subscribe
) -> None:
    row, new = subscribe("email", target="colleague@example.org"), create_mails("new@example.org")
    end = mail_links.build_link(mail_links.LinkAction.END, str(row.uuid), row.target).removeprefix(BASE)
    confirm = mail_links.build_link(mail_links.LinkAction.CONFIRM, str(new.uuid), new.target).removeprefix(BASE)
    read_only.switch_read_only(True, OLGA, "the secret reason", subscriptions.EventSource.PERSON)
    read_only._drop_cached(None)
    try:
        answer = anonymous.post(confirm)
        assert (answer.status_code, answer["Retry-After"]) == (503, "30") and b"Try again later" in answer.content
        assert b"olga" not in answer.content and b"secret reason" not in answer.content
        assert b"No more mails" in anonymous.post(end).content
    finally:
        read_only._drop_cached(None)
    row.refresh_from_db()
    new.refresh_from_db()
    assert (row.standing, new.is_unconfirmed) == ("off", True)


@pytest.mark.slow
def test_requests_to_confirm_are_limited_by_mailbox_and_by_user() -> None:
    row = create_mails("victim@example.org")
    subscriptions.delete(row.pk, OLGA)
    create_mails("Victim+gpu@example.org")
    row = create_mails("victim+2@example.org")
    for refused in (
        lambda: create_mails("victim+3@example.org"),
        lambda: subscriptions.resend_confirmation(row.pk, OLGA),
        lambda: subscriptions.edit(row.pk, {"target": "VICTIM@example.org"}, OLGA),
    ):
        with pytest.raises(RefusedError, match="3 requests to confirm in 1 day"):
            refused()
    assert Subscription.objects.count() == 2 and Delivery.objects.filter(kind="subscription.confirmation").count() == 2
    a_day_ago = datetime.now(UTC) - timedelta(days=1, minutes=1)
    for _ in range(2):
        ConfirmationRequest.objects.update(asked_at=a_day_ago)
        for _ in range(3):
            subscriptions.resend_confirmation(row.pk, OLGA)
    ConfirmationRequest.objects.update(asked_at=a_day_ago)
    subscriptions.resend_confirmation(row.pk, OLGA)
    with pytest.raises(RefusedError, match="10 requests to confirm in 30 days"):
        subscriptions.resend_confirmation(row.pk, OLGA)
    assert row.deliveries.filter(progress="waiting").count() == 1, "a newer request replaces the older one"
    for number in range(9):
        create_mails(f"n{number}@example.org")
    with pytest.raises(RefusedError, match="your requests is 10"):
        create_mails("n10@example.org")


def test_one_project_cannot_use_up_the_requests_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        create_mails(f"victim+{number}@example.org")
    with pytest.raises(RefusedError, match="3 requests to confirm in 1 day"):
        create_mails("victim@example.org")
    members = [replace(OLGA, user_id=str(number), project_id=f"p{number}") for number in (2, 3)]
    subscriptions.create(MAILS | {"target": "victim@example.org"}, members[0])
    monkeypatch.setattr(subscriptions, "MAX_ASKED_BY_ALL_IN_MONTH", 4)
    with pytest.raises(RefusedError, match="4 requests to confirm in 30 days"):
        subscriptions.create(MAILS | {"target": "victim@example.org"}, members[1])


def test_an_address_that_the_owner_has_proven_is_not_confirmed_again(subscribe: Subscribe) -> None:
    subscribe("email", target="me@example.org")
    assert not create_mails("me@example.org").is_unconfirmed
    assert subscriptions.create(MAILS | {"target": "me@example.org"}, OLGA, personal=True)[0].is_unconfirmed
    row = create_mails("other@example.org")
    row = subscriptions.edit(row.pk, {"target": "me@example.org"}, OLGA)
    assert not row.is_unconfirmed
    assert row.deliveries.get(kind="subscription.confirmation").progress == "given up"
    assert subscriptions.edit(row.pk, {"target": "third@example.org"}, OLGA).is_unconfirmed


@pytest.mark.slow
def test_the_request_to_confirm_can_be_sent_again_but_not_replayed(ask: Ask, client: Client) -> None:
    response = ask("/api/subscriptions/", "member", "p1", "POST", MAILS)
    row = response.json()
    assert row["confirmed_at"] is None and row["target"] == "colleague@example.org"
    path = row["url"].removeprefix("http://testserver")
    assert "not confirmed" in get_error_message(ask(f"{path}test/", "member", "p1", "POST"), 409)
    get_error_message(ask(f"{path}resend/", "reader", "p1", "POST"), 403)
    get_error_message(ask(f"{path}resend/", "member", "p2", "POST"), 404)
    assert ask(f"{path}resend/", "member", "p1", "POST").status_code == 202
    Delivery.objects.update(progress="given up")
    assert subscriptions.replay_deliveries(Delivery.objects.all(), OLGA) == 0
    assert get_results(ask("/api/subscriptions/", "member"))[0]["confirmed_at"] is None
    stored = Subscription.objects.get()
    client.force_login(User.objects.create(username="vera", is_staff=True, is_superuser=True))
    page = f"/admin/cyborgweb/subscription/{stored.pk}/change/"
    for address in (page, "/admin/cyborgweb/subscription/"):
        assert "waiting for confirmation" in client.get(address).content.decode()
    assert "Send the confirmation again" in client.get(page).content.decode()
    answer = client.post(f"/admin/cyborgweb/subscription/{stored.pk}/do/resend/", follow=True)
    assert "is being sent again" in answer.content.decode()
    refused = client.post(f"/admin/cyborgweb/subscription/{stored.pk}/do/resend/", follow=True)
    assert "3 requests to confirm in 1 day" in refused.content.decode()
    Subscription.objects.update(confirmed_at=timezone.now())
    assert "Send a test message" in client.get(page).content.decode()
    assert "not waiting for confirmation" in get_error_message(ask(f"{path}resend/", "member", "p1", "POST"), 409)
