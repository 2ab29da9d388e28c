"""Test that deliveries reach misbehaving receivers at least once, with the same id, and that a subscription that fails
for days is paused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core import mail
from django.db import connection, connections
from django.test.utils import CaptureQueriesContext

from accelerators.models import Event
from accelerators.runtime import database_clock
from cyborgweb.models.notify import Delivery, MailServer, Subscription
from cyborgweb.notify import mail as letters
from cyborgweb.notify import places, sender, subscriptions, webhook
from cyborgweb.notify.mail import MailOutcome
from cyborgweb.notify.webhook import AttemptOutcome
from drivers.isolation.threads import start_in_thread
from tests.cyborgweb.notify.conftest import OLGA, PAST_TIME, Subscribe, make_retries_due
from tests.cyborgweb.notify.receiver import Receiver
from tests.support.webserver import until

pytestmark = pytest.mark.django_db


def create_waiting_deliveries(subscription: Subscription, count: int = 1, **data: Any) -> list[Delivery]:
    """Create this number of waiting deliveries of the subscription, and return them."""
    said = {"request": "r", "profile": "small"} | data
    return [subscription.deliveries.create(kind="request.bound", data=said, event=n) for n in range(count)]


@pytest.mark.slow
def test_a_message_is_retried_with_the_same_id_until_the_receiver_accepts_it(
    subscribe: Subscribe, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "RETRY_DELAYS_S", (3600,) * len(sender.RETRY_DELAYS_S))
    receiver.behaviours = ["500", "hangs", "302", "rubbish", "closes"]
    hook = subscribe("webhook", target=receiver.url)
    (one,) = create_waiting_deliveries(hook)
    for attempts in range(1, 6):
        with monkeypatch.context() as patch:
            if receiver.behaviours[0] == "hangs":
                patch.setattr(webhook, "ATTEMPT_TIMEOUT_S", 0.5)
            sender.run()
        one.refresh_from_db()
        assert (one.progress, one.attempts) == ("waiting", attempts)
        assert one.last_error and one.next_at > datetime.now(UTC)
        hook.refresh_from_db()
        assert hook.failures == attempts and hook.failing_since and hook.last_error == one.last_error
        sender.run()
        assert len(receiver.calls) == attempts, "not before its time"
        make_retries_due()
    sender.run()
    one.refresh_from_db()
    hook.refresh_from_db()
    assert (one.progress, one.attempts, one.last_error) == ("delivered", 6, "")
    assert (hook.failures, hook.failing_since, hook.last_error) == (0, None, "")
    assert receiver.accepted_ids() == [f"msg_{one.message}"]
    assert {headers["webhook-id"] for headers, _ in receiver.calls} == {f"msg_{one.message}"}
    assert len({body for _, body in receiver.calls}) == 1, "the same bytes at every try"
    sender.run()
    assert len(receiver.accepted) == 1


def test_a_webhook_message_is_signed_and_its_secret_appears_nowhere_else(
    subscribe: Subscribe, receiver: Receiver, caplog: pytest.LogCaptureFixture
) -> None:
    hook, secret = subscriptions.create(
        {"name": "n", "kinds": ["request.bound"], "way": "webhook", "target": receiver.url}, OLGA
    )
    create_waiting_deliveries(hook)
    sender.run()
    ((headers, body),) = receiver.accepted
    assert receiver.accepted_bodies()[0] == {
        "type": "request.bound",
        "timestamp": receiver.accepted_bodies()[0]["timestamp"],
        "data": {"request": "r", "profile": "small"},
    }
    wanted = webhook.sign_message(secret, headers["webhook-id"], int(headers["webhook-timestamp"]), body)
    assert headers["webhook-signature"] == wanted
    events = str(list(Event.objects.values()))
    for hidden in (secret, "in-the-url"):
        assert hidden not in events + caplog.text + str(Subscription.objects.values_list("secret", flat=True))
    assert "subscription.created" in events and "127.0.0.1" in events


def test_a_message_is_sent_again_with_the_same_id_if_the_sender_was_killed_after_sending(
    subscribe: Subscribe, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_waiting_deliveries(subscribe("webhook", target=receiver.url))

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sender, "store_outcomes", dies)
        sender.send_webhooks()
    sender.run()
    assert len(receiver.accepted) == 2 and len(set(receiver.accepted_ids())) == 1


def test_the_attempts_to_one_host_are_bounded_and_a_failing_one_gets_a_single_probe(
    subscribe: Subscribe, receiver: Receiver
) -> None:
    for name, count in (("many", 30), ("twin", 2)):
        create_waiting_deliveries(subscribe("webhook", name=name, target=receiver.url), count)
    down = subscribe("webhook", name="down", target=receiver.url.replace("127.0.0.1", "127.0.0.2"))
    create_waiting_deliveries(down, 20)
    sender.send_webhooks()
    assert len(receiver.accepted) == 32
    assert receiver.max_concurrent_calls <= places.MAX_WEBHOOKS_PER_HOST
    tried = down.deliveries.filter(attempts__gt=0).count()
    assert tried <= places.MAX_WEBHOOKS_PER_HOST
    make_retries_due()
    sender.send_webhooks()
    assert sum(down.deliveries.values_list("attempts", flat=True)) == tried + 1


@pytest.fixture
def silent_servers() -> Iterator[list[socket.socket]]:
    """Yield 17 servers that accept connections and never answer. Closing one ends the connections to it."""
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(17)]


@pytest.fixture
def silent_targets(silent_servers: list[socket.socket]) -> list[str]:
    """Return the URLs of the silent servers."""
    return [f"http://127.0.0.1:{server.getsockname()[1]}/" for server in silent_servers]


def subscribe_silent(subscribe: Subscribe, targets: list[str], messages: int) -> list[Subscription]:
    """Create, for each of these targets, a subscription of the project p1 with waiting messages."""
    rows = [subscribe("webhook", name=str(number), target=target) for number, target in enumerate(targets)]
    for row in rows:
        create_waiting_deliveries(row, messages)
    return rows


@pytest.mark.slow
def test_a_project_with_hanging_webhooks_does_not_delay_the_webhooks_of_others(
    subscribe: Subscribe,
    receiver: Receiver,
    silent_servers: list[socket.socket],
    silent_targets: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The hanging attempts end when the other project has got everything. Waiting for their time-out would fail."""
    monkeypatch.setattr(webhook, "ATTEMPT_TIMEOUT_S", 30.0)
    monkeypatch.setattr(sender, "SLOW_ATTEMPT_S", 0.3)
    monkeypatch.setattr(sender, "MAX_RUN_S", 0.1)
    hanging = subscribe_silent(subscribe, silent_targets, 4)
    quick = subscribe("webhook", caller=replace(OLGA, project_id="p2"), name="quick", target=receiver.url)
    count = places.MAX_WEBHOOKS_PER_HOST + 1
    create_waiting_deliveries(quick, count)

    def end_hanging_attempts() -> None:
        try:
            until(lambda: len(receiver.accepted) == count, 8)
        finally:
            for server in silent_servers:
                server.close()

    others_served = start_in_thread(end_hanging_attempts)
    sender.send_webhooks()
    others_served.result()
    assert [row.progress for row in quick.deliveries.all()] == ["delivered"] * count
    assert Subscription.objects.filter(failing_since__isnull=False).exists()
    tried = Delivery.objects.filter(subscription__in=hanging, attempts__gt=0)
    assert 0 < tried.count() <= places.MAX_WEBHOOKS_PER_PROJECT


def test_projects_take_turns_for_webhooks_and_those_in_flight_take_places(
    subscribe: Subscribe, silent_targets: list[str]
) -> None:
    subscribe_silent(subscribe, silent_targets, 4)
    shared = silent_targets[0].replace("http:", "HTTP:")
    for project in ("p2", "p3"):
        other = subscribe("webhook", caller=replace(OLGA, project_id=project), name=project, target=shared)
        create_waiting_deliveries(other, 2)
    first = sender.fetch_due_webhooks()
    assert {one.project_id for one in first[:3]} == {"p1", "p2", "p3"}
    mine = [one for one in first if one.project_id == "p1"]
    assert len(mine) == len({one.subscription for one in mine}) == places.MAX_WEBHOOKS_PER_PROJECT
    assert sum(one.host == first[0].host for one in first) <= places.MAX_WEBHOOKS_PER_HOST
    next_ones = sender.fetch_due_webhooks(first)
    assert not {one.id for one in first} & {one.id for one in next_ones}
    assert "p1" not in {one.project_id for one in next_ones}
    assert sender.fetch_due_webhooks(mine[1:])[0].project_id in ("p2", "p3"), "who has much in flight comes later"
    assert {one.project_id for one in sender.fetch_due_webhooks(mine[1:2], only_idle_projects=True)} == {"p2", "p3"}


def test_attempts_that_fail_at_the_same_time_count_as_one_failure(
    subscribe: Subscribe, silent_targets: list[str]
) -> None:
    (down,) = subscribe_silent(subscribe, silent_targets[:1], 4)
    for one in sender.fetch_due_webhooks():
        sender.store_outcomes([one], [AttemptOutcome("down")], 0)
    down.refresh_from_db()
    assert set(down.deliveries.values_list("attempts", flat=True)) == {1}
    assert down.failures == 1 and down.retry_at < database_clock.now() + timedelta(seconds=30)
    make_retries_due()
    (probe,) = sender.fetch_due_webhooks()
    assert sender.fetch_due_webhooks([probe]) == []
    sender.store_outcomes([probe], [AttemptOutcome("down")], 0)
    down.refresh_from_db()
    assert down.failures == 2


def test_a_slow_receiver_pauses_for_as_long_as_its_attempt_took(
    subscribe: Subscribe, silent_targets: list[str]
) -> None:
    slow, quick = subscribe_silent(subscribe, silent_targets[:2], 2)
    due = [next(one for one in sender.fetch_due_webhooks() if one.subscription == row.pk) for row in (slow, quick)]
    sender.store_outcomes(due, [AttemptOutcome(seconds=8), AttemptOutcome(seconds=0.5)], 0)
    assert [one.subscription for one in sender.fetch_due_webhooks()] == [quick.pk]
    slow.refresh_from_db()
    assert slow.failures == 0 and slow.retry_at > database_clock.now() + timedelta(seconds=4)


def test_a_message_that_is_never_accepted_is_given_up_and_can_be_replayed(
    subscribe: Subscribe, receiver: Receiver
) -> None:
    receiver.behaviours = ["500"] * 20
    (one,) = create_waiting_deliveries(subscribe("webhook", target=receiver.url))
    for _ in range(len(sender.RETRY_DELAYS_S) + 1):
        make_retries_due()
        sender.run()
    one.refresh_from_db()
    assert (one.progress, one.attempts, one.last_error) == ("given up", 10, "The receiver answered 500.")
    receiver.behaviours.clear()
    assert subscriptions.replay_deliveries(Delivery.objects.all(), OLGA) == 1
    assert subscriptions.replay_deliveries(Delivery.objects.all(), OLGA) == 0, "it waits already"
    make_retries_due()
    sender.run()
    assert receiver.accepted_ids() == [f"msg_{one.message}"]
    assert Event.objects.filter(action="subscription.replayed").count() == 1


def test_a_subscription_failing_for_days_is_paused_and_one_answered_410_is_gone(
    subscribe: Subscribe, receiver: Receiver
) -> None:
    hook = subscribe("webhook", target=receiver.url, personal=True)
    create_waiting_deliveries(hook, 3)
    receiver.behaviours = ["500"] * 3
    sender.run()
    long_ago = datetime.now(UTC) - timedelta(seconds=sender.PAUSE_AFTER_S + 60)
    Subscription.objects.update(failing_since=long_ago)
    receiver.behaviours = ["500"]
    make_retries_due()
    sender.run()
    hook.refresh_from_db()
    assert hook.standing == "paused"
    assert set(hook.deliveries.exclude(kind="subscription.paused").values_list("progress", flat=True)) == {"given up"}
    assert "failed for 3 days" in hook.deliveries.get(kind="subscription.paused", reader=OLGA.user_id).data["reason"]
    assert Event.objects.get(action="subscription.paused").reason
    hook = subscriptions.edit(hook.pk, {"standing": "active"}, OLGA)
    assert (hook.failures, hook.failing_since) == (0, None)
    receiver.behaviours = ["410"]
    subscriptions.queue_test_message(hook.pk, OLGA)
    sender.run()
    hook.refresh_from_db()
    assert hook.standing == "gone"
    assert hook.deliveries.get(kind="subscription.test").progress == "given up"


def test_deliveries_waiting_for_days_are_given_up_and_old_ones_are_deleted(subscribe: Subscribe) -> None:
    off = subscribe("webhook", target="https://example.org/", standing="off")
    old, late, tried, new = create_waiting_deliveries(off, 4)
    Delivery.objects.filter(pk=old.pk).update(created_at=PAST_TIME)
    days_ago = datetime.now(UTC) - timedelta(seconds=sender.MAX_WAIT_S + 9)
    Delivery.objects.filter(pk__in=[late.pk, tried.pk]).update(created_at=days_ago)
    Delivery.objects.filter(pk=tried.pk).update(last_error="refused")
    sender.run()
    assert {pk: rest for pk, *rest in Delivery.objects.values_list("pk", "progress", "last_error")} == {
        late.pk: ["given up", "It waited for more than 3 days."],
        tried.pk: ["given up", "refused"],
        new.pk: ["waiting", ""],
    }


def test_any_exception_while_posting_is_settled_with_its_own_message(
    subscribe: Subscribe, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = socket.getaddrinfo

    def fail_for_one(host: str, *rest: Any, **options: Any) -> Any:
        if host == "odd.example":
            raise RuntimeError
        return look_up(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", fail_for_one)
    (odd,) = create_waiting_deliveries(subscribe("webhook", name="odd", target="https://odd.example/"))
    create_waiting_deliveries(subscribe("webhook", name="fine", target=receiver.url))
    sender.run()
    odd.refresh_from_db()
    assert (odd.progress, odd.attempts) == ("waiting", 1)
    assert odd.last_error == "This was not sent because of an error in the product: RuntimeError."
    assert len(receiver.accepted) == 1


def test_several_waiting_mails_are_sent_as_one_and_headers_cannot_be_injected(subscribe: Subscribe) -> None:
    letters = subscribe("email", target="olga@example.org")
    create_waiting_deliveries(letters, 1, host="cmp1\r\nBcc: x@y")
    sender.run_mails()
    waiting_more = [letters.deliveries.create(kind="device.failed", data={"name": f"card {n}"}) for n in range(5)]
    sender.run_mails()
    assert len(mail.outbox) == 1, "not before its time"
    make_retries_due()
    sender.run_mails()
    first, second = mail.outbox
    assert first.subject.startswith("[Accelerators] Accelerator ready: r") and "Bcc" not in first.extra_headers
    assert second.subject == "[Accelerators] 5 messages" and second.to == ["olga@example.org"]
    assert second.body.count("Device failed: card") == len(waiting_more)
    assert not Delivery.objects.filter(progress="waiting").exists()


def test_mails_wait_while_the_mail_server_is_unreachable(subscribe: Subscribe, settings: Any) -> None:
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    settings.EMAIL_HOST, settings.EMAIL_PORT = "127.0.0.1", 1
    for number in range(3):
        create_waiting_deliveries(subscribe("email", name=str(number), target=f"p{number}@example.org"))
    assert not sender.send_mails()
    sender.run_mails()
    assert list(Delivery.objects.values_list("attempts", flat=True)) == [0, 0, 0]
    server = MailServer.objects.get()
    assert server.failures == 1, "nobody finds out again at once"
    assert "cannot be reached" in server.last_error


def test_a_round_of_mails_ends_early_if_the_mail_server_is_slow(
    subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "MAX_MAIL_ROUND_S", -1)
    for number in range(3):
        create_waiting_deliveries(subscribe("email", name=str(number), target=f"p{number}@example.org"))
    assert sender.send_mails()
    assert len(mail.outbox) == Delivery.objects.filter(progress="delivered").count() == 1
    sender.run_mails()
    assert len(mail.outbox) == 3


COUNT_OPEN_TRANSACTIONS_SQL = """
SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'
  AND xact_start IS NOT NULL AND pid <> pg_backend_pid()
"""


@pytest.mark.django_db(transaction=True)
def test_no_transaction_is_open_while_sending_and_a_second_sender_sends_nothing(
    subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def look() -> None:
        """Count open transactions on another connection, then run both jobs once more in the thread that sends."""
        with closing(connections.create_connection("default")) as other, other.cursor() as cursor:
            cursor.execute(COUNT_OPEN_TRANSACTIONS_SQL)
            seen.append(cursor.fetchone()[0])
        try:
            sender.run()
            sender.run_mails()
        finally:
            connection.close()

    def post(*_: Any, **__: Any) -> AttemptOutcome:
        look()
        return AttemptOutcome()

    monkeypatch.setattr(webhook, "post_message", post)

    def send_mail(*_: Any) -> MailOutcome:
        start_in_thread(look).result(30)
        return MailOutcome()

    monkeypatch.setattr(letters, "send_mail", send_mail)
    create_waiting_deliveries(subscribe("webhook", target="https://hook.example/"))
    create_waiting_deliveries(subscribe("email", target="olga@example.org"))
    sender.run()
    sender.run_mails()
    assert seen == [0, 0]
    assert set(Delivery.objects.values_list("progress", "attempts")) == {("delivered", 1)}


def test_a_secret_encrypted_with_another_key_is_reported_and_nothing_is_sent(
    subscribe: Subscribe, receiver: Receiver, settings: Any
) -> None:
    (one,) = create_waiting_deliveries(subscribe("webhook", target=receiver.url))
    settings.SECRET_KEY = "another"
    sender.run()
    one.refresh_from_db()
    assert "rotate it" in one.last_error and not receiver.calls


def test_a_round_of_sending_takes_the_same_statements_for_many_subscriptions(
    subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhook, "post_message", lambda *_, **__: AttemptOutcome())
    monkeypatch.setattr(sender, "ROUND_S", 30)
    counts = []
    for count in (1, 20):
        for number in range(count):
            caller = replace(OLGA, project_id=f"{count}-{number}")
            create_waiting_deliveries(
                subscribe("webhook", caller=caller, name=f"{count}-{number}", target=f"https://h{number}.org/")
            )
        with CaptureQueriesContext(connection) as captured:
            sender.send_webhooks()
        counts.append(len(captured))
    assert counts[0] == counts[1] <= 10
