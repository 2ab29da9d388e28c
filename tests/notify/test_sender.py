"""Deliveries reach receivers that misbehave, at least once, with one id; what fails for days is paused."""

from __future__ import annotations

import threading
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core import mail
from django.core.mail import EmailMessage
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext

from accelerators.models import Event
from cyborgweb.models.notify import Delivery, Subscription
from cyborgweb.notify import mail as letters
from cyborgweb.notify import sender, subscriptions, webhook
from cyborgweb.notify.webhook import AttemptOutcome
from tests.notify.conftest import LONG_AGO, OLGA, Subscribe, due_now
from tests.notify.receiver import Receiver

pytestmark = pytest.mark.django_db


def waiting(subscription: Subscription, count: int = 1, **data: Any) -> list[Delivery]:
    """So many messages for it."""
    said = {"request": "r", "profile": "small"} | data
    return [subscription.deliveries.create(kind="request.bound", data=said, event=n) for n in range(count)]


def test_a_receiver_that_does_everything_wrong_gets_it_in_the_end_once_with_one_id(
    subscribe: Subscribe, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "ATTEMPT_TIMEOUT_S", 0.3)
    receiver.moods = ["500", "hangs", "302", "rubbish", "closes"]
    hook = subscribe("webhook", target=receiver.url)
    (one,) = waiting(hook)
    for attempts in range(1, 6):
        sender.run()
        one.refresh_from_db()
        assert (one.progress, one.attempts) == ("waiting", attempts)
        assert one.last_error and one.next_at > datetime.now(UTC)
        hook.refresh_from_db()
        assert hook.failures == attempts and hook.failing_since and hook.last_error == one.last_error
        sender.run()
        assert len(receiver.calls) == attempts, "not before its time"
        due_now()
    sender.run()
    one.refresh_from_db()
    hook.refresh_from_db()
    assert (one.progress, one.attempts, one.last_error) == ("delivered", 6, "")
    assert (hook.failures, hook.failing_since, hook.last_error) == (0, None, "")
    assert receiver.ids() == [f"msg_{one.message}"]
    assert {headers["webhook-id"] for headers, _ in receiver.calls} == {f"msg_{one.message}"}
    assert len({body for _, body in receiver.calls}) == 1, "the same bytes at every try"
    sender.run()
    assert len(receiver.got) == 1


def test_what_is_sent_says_what_happened_and_nothing_of_the_secret(
    subscribe: Subscribe, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    hook, secret = subscriptions.create(
        {"name": "n", "kinds": ["request.bound"], "way": "webhook", "target": receiver.url}, OLGA
    )
    waiting(hook)
    sender.run()
    ((headers, body),) = receiver.got
    assert receiver.bodies()[0] == {
        "type": "request.bound",
        "timestamp": receiver.bodies()[0]["timestamp"],
        "data": {"request": "r", "profile": "small"},
    }
    wanted = webhook.sign_message(secret, headers["webhook-id"], int(headers["webhook-timestamp"]), body)
    assert headers["webhook-signature"] == wanted
    events = str(list(Event.objects.values()))
    for hidden in (secret, "in-the-url"):
        assert hidden not in events + caplog.text + str(Subscription.objects.values_list("secret", flat=True))
    assert "subscription.created" in events and "127.0.0.1" in events


def test_killed_after_the_try_it_is_tried_again_with_the_same_id(
    subscribe: Subscribe, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting(subscribe("webhook", target=receiver.url))

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sender, "store_outcomes", dies)
        sender.send_webhooks()
    sender.run()
    assert len(receiver.got) == 2 and len(set(receiver.ids())) == 1


def test_one_destination_that_hangs_keeps_nobody_waiting(
    subscribe: Subscribe, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "ATTEMPT_TIMEOUT_S", 0.5)
    slow = subscribe("webhook", name="slow", target=receiver.url.replace("127.0.0.1", "127.0.0.2"))
    twin = subscribe("webhook", name="twin", target=receiver.url)
    many, few = waiting(subscribe("webhook", target=receiver.url), 30), waiting(twin, 2)
    stuck = waiting(slow, 100)
    sender.send_webhooks()
    arrived = Delivery.objects.filter(progress="delivered")
    assert arrived.filter(pk__in=[row.pk for row in many + few]).count() == sender.MAX_ATTEMPTS_PER_HOST
    assert receiver.most_at_once <= sender.MAX_ATTEMPTS_PER_HOST
    assert Delivery.objects.filter(pk__in=[row.pk for row in stuck], attempts=0).count() == 96
    sender.run()
    assert len(receiver.got) == 32
    due_now()
    sender.send_webhooks()
    tried = Delivery.objects.filter(pk__in=[row.pk for row in stuck], attempts__gt=0)
    assert tried.count() <= sender.MAX_ATTEMPTS_PER_HOST + 1, "what fails is probed with one message"


def test_what_is_never_taken_is_given_up_and_shown_and_can_be_replayed(
    subscribe: Subscribe, receiver: Receiver
) -> None:
    receiver.moods = ["500"] * 20
    (one,) = waiting(subscribe("webhook", target=receiver.url))
    for _ in range(len(sender.RETRY_DELAYS_S) + 1):
        due_now()
        sender.run()
    one.refresh_from_db()
    assert (one.progress, one.attempts, one.last_error) == ("given up", 10, "The receiver answered 500.")
    receiver.moods.clear()
    assert subscriptions.replay_deliveries(Delivery.objects.all(), OLGA) == 1
    assert subscriptions.replay_deliveries(Delivery.objects.all(), OLGA) == 0, "it waits already"
    due_now()
    sender.run()
    assert receiver.ids() == [f"msg_{one.message}"]
    assert Event.objects.filter(action="subscription.replayed").count() == 1


def test_what_fails_for_days_is_paused_and_gone_is_gone_and_its_owner_is_told(
    subscribe: Subscribe, receiver: Receiver
) -> None:
    hook = subscribe("webhook", target=receiver.url, personal=True)
    waiting(hook, 3)
    receiver.moods = ["500"] * 3
    sender.run()
    long_ago = datetime.now(UTC) - timedelta(seconds=sender.PAUSE_AFTER_S + 60)
    Subscription.objects.update(failing_since=long_ago)
    receiver.moods = ["500"]
    due_now()
    sender.run()
    hook.refresh_from_db()
    assert hook.standing == "paused"
    assert set(hook.deliveries.exclude(kind="subscription.paused").values_list("progress", flat=True)) == {"given up"}
    assert "failed for 3 days" in hook.deliveries.get(kind="subscription.paused", reader=OLGA.user_id).data["reason"]
    assert Event.objects.get(action="subscription.paused").reason
    hook = subscriptions.edit(hook.pk, {"standing": "active"}, OLGA)
    assert (hook.failures, hook.failing_since) == (0, None)
    receiver.moods = ["410"]
    subscriptions.queue_test_message(hook.pk, OLGA)
    sender.run()
    hook.refresh_from_db()
    assert hook.standing == "gone"
    assert hook.deliveries.get(kind="subscription.test").progress == "given up"


def test_what_waits_for_days_is_given_up_and_what_is_old_is_forgotten(subscribe: Subscribe) -> None:
    off = subscribe("webhook", target="https://example.org/", standing="off")
    old, late, new = waiting(off, 3)
    Delivery.objects.filter(pk=old.pk).update(created_at=LONG_AGO)
    Delivery.objects.filter(pk=late.pk).update(created_at=datetime.now(UTC) - timedelta(seconds=sender.MAX_WAIT_S + 9))
    sender.run()
    assert dict(Delivery.objects.values_list("pk", "progress")) == {late.pk: "given up", new.pk: "waiting"}


def test_mail_is_plain_and_what_comes_together_is_one(subscribe: Subscribe) -> None:
    letters = subscribe("email", target="olga@example.org")
    waiting(letters, 1, host="cmp1\r\nBcc: x@y")
    sender.run_mails()
    waiting_more = [letters.deliveries.create(kind="device.failed", data={"name": f"card {n}"}) for n in range(5)]
    sender.run_mails()
    assert len(mail.outbox) == 1, "not before its time"
    due_now()
    sender.run_mails()
    first, second = mail.outbox
    assert first.subject.startswith("[Accelerators] Accelerator ready: r") and "Bcc" not in first.extra_headers
    assert second.subject == "[Accelerators] 5 messages" and second.to == ["olga@example.org"]
    assert second.body.count("Device failed: card") == len(waiting_more)
    assert not Delivery.objects.filter(progress="waiting").exists()


def test_while_the_mail_server_is_away_nothing_is_lost(
    subscribe: Subscribe, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", 1
    for number in range(3):
        waiting(subscribe("email", name=str(number), target=f"p{number}@example.org"))
    assert not sender.send_mails()
    sender.run_mails()
    assert list(Delivery.objects.order_by("id").values_list("attempts", flat=True)) == [1, 0, 0]
    assert not sender.fetch_due_deliveries("email", 9), "nobody finds out again at once"
    assert "cannot be reached" in Delivery.objects.order_by("id")[0].last_error


def test_a_slow_mail_server_ends_a_round_early(subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "MAX_MAIL_ROUND_S", -1)
    for number in range(3):
        waiting(subscribe("email", name=str(number), target=f"p{number}@example.org"))
    assert sender.send_mails()
    assert len(mail.outbox) == Delivery.objects.filter(progress="delivered").count() == 1
    sender.run_mails()
    assert len(mail.outbox) == 3


def test_a_letter_is_bounded_as_a_whole(subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(EmailMessage, "send", lambda self: released.wait(30))
    monkeypatch.setattr(letters, "MAIL_TIMEOUT_S", 0.05)
    waiting(subscribe("email", target="olga@example.org"))
    sender.run_mails()
    released.set()
    one = Delivery.objects.get()
    assert (one.attempts, one.last_error) == (1, "The mail server did not answer in time.")


def test_a_mail_that_cannot_be_made_is_not_hidden(subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmailMessage, "send", lambda self: {}["a fault of ours"])
    waiting(subscribe("email", target="olga@example.org"))
    with pytest.raises(KeyError, match="a fault of ours"):
        sender.run_mails()


OPEN = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'
  AND xact_start IS NOT NULL AND pid <> pg_backend_pid()
"""


@pytest.mark.django_db(transaction=True)
def test_while_it_posts_and_mails_no_transaction_is_open_and_nobody_else_does_it(
    subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def look() -> None:
        """On the thread that posts: another connection, and the job comes once more."""
        with closing(connections.create_connection("default")) as other, other.cursor() as cursor:
            cursor.execute(OPEN)
            seen.append(cursor.fetchone()[0])
        try:
            sender.run()
            sender.run_mails()
        finally:
            connection.close()

    def post(*_: Any) -> AttemptOutcome:
        look()
        return AttemptOutcome()

    monkeypatch.setattr(webhook, "post_message", post)
    monkeypatch.setattr(EmailMessage, "send", lambda self: look())
    waiting(subscribe("webhook", target="https://hook.example/"))
    waiting(subscribe("email", target="olga@example.org"))
    sender.run()
    sender.run_mails()
    assert seen == [0, 0]
    assert set(Delivery.objects.values_list("progress", "attempts")) == {("delivered", 1)}


def test_a_secret_of_another_key_is_said(subscribe: Subscribe, receiver: Receiver, settings: Any) -> None:
    (one,) = waiting(subscribe("webhook", target=receiver.url))
    settings.SECRET_KEY = "another"
    sender.run()
    one.refresh_from_db()
    assert "rotate it" in one.last_error and not receiver.calls


def test_statements_of_a_round_do_not_grow(subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhook, "post_message", lambda *_: AttemptOutcome())
    counts = []
    for count in (1, 20):
        for number in range(count):
            waiting(subscribe("webhook", caller=OLGA, name=f"{count}-{number}", target=f"https://h{number}.org/"))
            Subscription.objects.update(project_id=f"{count}{number}")
        with CaptureQueriesContext(connection) as captured:
            sender.send_webhooks()
        counts.append(len(captured))
    assert counts[0] == counts[1] <= 8
