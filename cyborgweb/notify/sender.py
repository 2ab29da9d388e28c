"""The jobs `deliveries` and `mails`: deliver waiting messages to webhooks and by mail, retry, give up, and pause
subscriptions that have failed for days.

No transaction is open while messages are posted: it would hold up everything that waits for older transactions to end.

Delivery is at least once: if the process is killed after an attempt and before its outcome is committed, the message is
sent again with the same id. The outcome of each mail is committed before the next mail is sent. If the mail server
fails, a circuit breaker (`MailServer`) puts off all mail, and none of it counts as tried.

Webhooks are posted on threads that do not use the database. Projects take turns, and each has a limit of simultaneous
attempts, as have each destination host and all together. No attempt waits for the end of another one. A subscription
whose last attempt failed gets one message at a time, with a growing back-off; one whose receiver is slow pauses for as
long as the attempt took. A project with a slow receiver gets only a share of the places for a time that doubles each
time it is slow again (`SlowProject`, `places`).
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable, Collection, Sequence
from concurrent import futures
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import groupby
from typing import Any

import orjson
from django.conf import settings
from django.db import connection, transaction
from django.db.models import Case, F, QuerySet, TextField, Value, When
from django.db.models.functions import Now

from accelerators import conductor
from accelerators.domain.states import EventSource
from accelerators.runtime import jobs
from cyborgweb.models.event_types import (
    CONFIRMATION_KIND,
    JOB_BY_WAY,
    PAUSED_KIND,
    DeliveryProgress,
    DeliveryWay,
    SubscriptionStanding,
)
from cyborgweb.models.notify import (
    ConfirmationRequest,
    Delivery,
    MailServer,
    SlowProject,
    Subscription,
    add_hardware_name,
)
from cyborgweb.notify import keyring, mail, owners, places, subscriptions, webhook
from cyborgweb.notify.webhook import AttemptOutcome
from cyborgweb.settings.mail_address import MailAddressError

log = logging.getLogger(__name__)

MAX_RUN_S = 10.0
"""Seconds after which no new round of mails begins, and webhooks begin only while a slow one ends. With the last mail,
or the last webhooks, a job ends well below the cluster's time limit of 60 s.
"""
MAX_EXTENSION_S = 25.0
"""Seconds after `MAX_RUN_S` during which webhooks of other projects may begin while a slow attempt ends."""
MAX_MAILS_PER_ROUND, MAX_MESSAGES_PER_MAIL = 20, 100
ROUND_S = 0.2
"""Seconds that a round waits for the attempts in flight. Longer attempts continue during the next rounds."""
SLOW_ATTEMPT_S = 2.0
"""Seconds from which on an attempt counts as slow: its subscription pauses for as long as it took, and its project is
slow for SLOW_S seconds, twice as long each further time, and MAX_SLOW_S at most. After MAX_SLOW_S seconds in which it
was not slow again, it begins with SLOW_S.
"""
SLOW_S, MAX_SLOW_S = 60, 3600
RETRY_DELAYS_S = (5, 30, 120, 600, 1800, 7200, 21_600, 43_200, 86_400)
"""Seconds to wait after the first failed attempt of a message, the second, and so on. The message is given up when the
attempt after the last pause fails.
"""
MAX_BACKOFF_S = 600
"""Longest back-off of a failing subscription in seconds, so that it is probed at least this often."""
MAIL_COLLECT_S = 15
"""Seconds after a mail during which further messages are collected for the next mail."""
MAX_MAIL_ROUND_S = 10
"""Seconds after which no new mail is begun in a round."""
MAIL_SERVER_RETRY_S, MAX_MAIL_SERVER_RETRY_S = 30, 600
"""Seconds during which no mail is tried after the mail server has failed: the first pause, which doubles with each
failure, and the longest.
"""
MAX_SERVER_FAULTS = 3
"""Mails after one another during which the connection was lost, or whose address the mail server's policy refused,
which count as a failure of the mail server.
"""
MAX_REFUSED_MAILS = 5
"""Failed attempts after one another, the last of them refused permanently, after which a subscription is paused."""
MAX_WAIT_S, PAUSE_AFTER_S, RETENTION_S = 3 * 86_400, 3 * 86_400, 30 * 86_400
"""Seconds that a message waits at most, that a subscription may fail before it is paused, and that deliveries are kept.
"""

SELECT_DUE_WEBHOOKS = """
WITH in_flight AS (
  SELECT * FROM unnest(%(deliveries)s::bigint[], %(subscriptions)s::bigint[], %(projects)s::text[], %(hosts)s::text[])
    AS f(delivery, subscription, project_id, host)
), due AS (
  SELECT d.id, d.message::text, d.kind, d.at, d.data::text, d.attempts, s.id AS subscription, s.target, s.secret,
    s.uuid::text AS subscription_uuid, s.project_id, d.next_at, lower(split_part(s.target, '/', 3)) AS host, p.is_slow
  FROM cyborgweb_subscription s CROSS JOIN LATERAL (
    SELECT s.project_id = ANY(%(slow_projects)s::text[]) OR EXISTS (SELECT FROM cyborgweb_slowproject o
      WHERE o.project_id = s.project_id AND o.slow_until > statement_timestamp()) AS is_slow) p CROSS JOIN LATERAL (
    SELECT * FROM cyborgweb_delivery d WHERE d.subscription_id = s.id AND d.progress = 'waiting'
      AND d.next_at <= statement_timestamp() AND NOT EXISTS (SELECT FROM in_flight f WHERE f.delivery = d.id)
    ORDER BY d.next_at, d.id LIMIT greatest(0, CASE WHEN s.failures > 0 OR p.is_slow THEN 1 ELSE %(per_host)s END
      - (SELECT count(*) FROM in_flight f WHERE f.subscription = s.id))) d
  WHERE s.standing = 'active' AND s.way = 'webhook' AND s.retry_at <= statement_timestamp()
    AND NOT EXISTS (SELECT FROM auth_user u WHERE u.id = s.user_id AND NOT u.is_active)
    AND NOT (%(only_idle_projects)s
      AND (p.is_slow OR EXISTS (SELECT FROM in_flight f WHERE f.project_id = s.project_id)))
), in_turn AS (
  SELECT *, row_number() OVER (PARTITION BY project_id, host ORDER BY next_at, id)
    + (SELECT count(*) FROM in_flight f WHERE f.project_id = due.project_id AND f.host = due.host) AS turn FROM due
), at_host AS (
  SELECT *, row_number() OVER (PARTITION BY host, is_slow ORDER BY turn, next_at, id) AS host_place FROM in_turn
), in_project AS (
  SELECT *, row_number() OVER (PARTITION BY project_id ORDER BY turn, next_at, id)
    + (SELECT count(*) FROM in_flight f WHERE f.project_id = at_host.project_id) AS project_place
  FROM at_host WHERE host_place <= %(per_host)s
), in_class AS (
  SELECT *, row_number() OVER (PARTITION BY is_slow ORDER BY project_place, next_at, id) AS class_place
  FROM in_project WHERE project_place <= %(per_project)s
)
SELECT id, message, kind, at, data, attempts, subscription, target, secret, subscription_uuid, project_id, host, is_slow
FROM in_class WHERE class_place <= %(count)s ORDER BY project_place, next_at, id
"""
"""The attempts among which `places.choose_webhooks` chooses, the same number for slow projects and for all others.

Plain SQL, for the same reasons as SELECT_DUE_MAILS. What is in flight counts as the first of its project: who has much
in flight comes later.
"""
UPSERT_SLOW_PROJECTS = """
INSERT INTO cyborgweb_slowproject AS p (project_id, times, slow_until)
SELECT u.id, 1, statement_timestamp() + make_interval(secs => %(slow_s)s) FROM unnest(%(projects)s::text[]) AS u(id)
ON CONFLICT (project_id) DO UPDATE SET
  times = CASE WHEN p.slow_until > statement_timestamp() THEN p.times
    WHEN p.slow_until > statement_timestamp() - make_interval(secs => %(max_slow_s)s) THEN p.times + 1 ELSE 1 END,
  slow_until = CASE WHEN p.slow_until > statement_timestamp()
    THEN greatest(p.slow_until, statement_timestamp() + make_interval(secs => %(slow_s)s))
    WHEN p.slow_until > statement_timestamp() - make_interval(secs => %(max_slow_s)s)
    THEN statement_timestamp() + make_interval(secs => least(%(max_slow_s)s, %(slow_s)s * 2 ^ least(p.times, 16)))
    ELSE statement_timestamp() + make_interval(secs => %(slow_s)s) END
"""
"""Plain SQL, because the ORM's upsert cannot compute from the stored row. Attempts that end while the project is slow
already make it slow for SLOW_S seconds more, and do not double the time.
"""
SELECT_DUE_MAILS = """
SELECT d.id, d.message::text, d.kind, d.at, d.data::text, d.attempts, s.id, s.target, s.secret, s.uuid::text,
  s.project_id, '', false
FROM (
  SELECT s.*, f.next_at, row_number() OVER (PARTITION BY s.project_id ORDER BY f.next_at, s.id) AS turn
  FROM cyborgweb_subscription s CROSS JOIN LATERAL (
    SELECT d.next_at FROM cyborgweb_delivery d WHERE d.subscription_id = s.id AND d.progress = 'waiting'
      AND d.next_at <= statement_timestamp() AND (s.confirmed_at IS NOT NULL OR d.kind = 'subscription.confirmation')
      ORDER BY d.next_at LIMIT 1) f
  WHERE s.standing = 'active' AND s.way = 'email' AND s.retry_at <= statement_timestamp()
    AND NOT EXISTS (SELECT FROM auth_user u WHERE u.id = s.user_id AND NOT u.is_active)
  ORDER BY turn, f.next_at, s.id LIMIT %(mails)s
) s CROSS JOIN LATERAL (
  SELECT * FROM cyborgweb_delivery d WHERE d.subscription_id = s.id AND d.progress = 'waiting'
    AND d.next_at <= statement_timestamp() AND (s.confirmed_at IS NOT NULL OR d.kind = 'subscription.confirmation')
  ORDER BY d.next_at, d.id LIMIT %(digest)s) d
ORDER BY s.turn, s.next_at, s.id, d.next_at, d.id
"""
"""Plain SQL, because the ORM has no lateral join: each subscription has a limit of its own. Projects take turns."""
UPDATE_DELIVERIES = """
UPDATE cyborgweb_delivery d SET attempts = d.attempts + 1, last_error = x.error,
  progress = CASE WHEN x.error = '' THEN 'delivered' WHEN x.pause IS NULL THEN 'given up' ELSE 'waiting' END,
  delivered_at = CASE WHEN x.error = '' THEN statement_timestamp() END,
  next_at = statement_timestamp() + make_interval(secs => coalesce(x.pause, 0))
FROM jsonb_to_recordset(%s::jsonb) AS x(id bigint, error text, pause float8)
WHERE d.id = x.id AND d.progress = 'waiting'
"""
"""Plain SQL, because each row gets values of its own, and a round of mails has 2000 rows: `bulk_update` would write a
CASE with a branch for each.
"""
UPDATE_SUBSCRIPTIONS = """
UPDATE cyborgweb_subscription s SET failing_since = CASE WHEN x.error <> '' THEN coalesce(s.failing_since,
    statement_timestamp()) END, last_error = x.error,
  failures = CASE WHEN x.error = '' THEN 0 WHEN s.failures > 0 AND s.retry_at > statement_timestamp() THEN s.failures
    ELSE s.failures + 1 END,
  retry_at = CASE WHEN x.error = '' THEN statement_timestamp() + make_interval(secs => x.pause)
    WHEN s.failures > 0 AND s.retry_at > statement_timestamp() THEN s.retry_at
    ELSE statement_timestamp() + make_interval(secs => least(%s, 5 * 6 ^ least(s.failures, 8))) END
FROM jsonb_to_recordset(%s::jsonb) AS x(id bigint, error text, pause float8) WHERE s.id = x.id AND s.standing = 'active'
RETURNING s.id, s.failing_since < statement_timestamp() - make_interval(secs => %s), s.failures
"""
"""Plain SQL, because the ORM's updates return no columns. During the back-off, attempts that began before it do not
count as further failures.
"""


@dataclass(frozen=True)
class DueDelivery:
    """A delivery that is due for its next attempt, with what is needed to send it.

    `message` is the message's id, `at` the time of the event, and `attempts` the number of attempts before this one.
    `subscription` is the subscription's primary key; `secret` is its secret as it is stored, encrypted ('' for mail).
    `host` is the webhook's destination, with its port if the URL names one ('' for mail); `is_slow` says whether a
    webhook of the project was slow lately.
    """

    id: int
    message: str
    kind: str
    at: Any
    data: dict[str, Any]
    attempts: int
    subscription: int
    target: str
    secret: str
    subscription_uuid: str
    project_id: str
    host: str
    is_slow: bool

    def build_body(self) -> bytes:
        """Return the JSON body of the webhook's request.

        Every attempt has the same bytes, unless the configured name of the device's hardware has changed meanwhile.
        """
        return orjson.dumps({"type": self.kind, "timestamp": self.at, "data": add_hardware_name(self.data)})


def run() -> None:
    """Run the job `deliveries`: `send_webhooks` until nothing is due, for about `MAX_RUN_S` seconds at most, and then
    for as long as the last attempts take. If there is more then, wake the job again.
    """
    _run_rounds(JOB_BY_WAY[DeliveryWay.WEBHOOK], send_webhooks)


def run_mails() -> None:
    """Run the job `mails`: rounds of `send_mails` until nothing is due, for about `MAX_RUN_S` seconds at most."""
    _run_rounds(JOB_BY_WAY[DeliveryWay.EMAIL], send_mails)


def send_webhooks() -> bool:
    """Clean up with `give_up_and_delete_old`, post due webhooks in rounds, and store the outcomes. Return True if there
    may be more. No rows are locked while it posts.

    Each round begins the attempts that `fetch_due_webhooks` allows, and stores the outcomes of those that have ended.
    After `MAX_RUN_S` seconds attempts begin only while it has to wait for a slow one, for `MAX_EXTENSION_S` seconds at
    most, and only of projects that are neither slow nor have another one in flight. It returns when nothing is due and
    in flight, or when the last attempt has ended.
    """
    give_up_and_delete_old()
    end = time.monotonic() + MAX_RUN_S
    allowed = subscriptions.allowed_destinations()
    in_flight: dict[futures.Future[AttemptOutcome], DueDelivery] = {}
    begun_at: dict[int, float] = {}
    with futures.ThreadPoolExecutor(places.MAX_WEBHOOKS, thread_name_prefix="webhook") as threads:
        while True:
            now = time.monotonic()
            slow_projects = {one.project_id for one in in_flight.values() if now - begun_at[one.id] >= SLOW_ATTEMPT_S}
            if now <= end or (slow_projects and now <= end + MAX_EXTENSION_S):
                for delivery in fetch_due_webhooks(in_flight.values(), slow_projects, only_idle_projects=now > end):
                    secret = _decrypt_secret(delivery.secret)
                    begun_at[delivery.id] = time.monotonic()
                    in_flight[threads.submit(_post_delivery, delivery, secret, allowed)] = delivery
            if not in_flight:
                return now > end
            ended = list(futures.wait(in_flight, ROUND_S).done)
            store_outcomes([in_flight.pop(one) for one in ended], [one.result() for one in ended], 0)


def send_mails() -> bool:
    """Send one mail for each of at most MAX_MAILS_PER_ROUND subscriptions, for about `MAX_MAIL_ROUND_S` seconds at
    most. Return True if there may be more. The outcome of each mail is committed before the next one is sent.

    If the mail server fails, return False, and try no mail for a time (`_count_mail_server_failure`). No rows are
    locked while it sends.
    """
    mails = [] if _is_breaker_open() else fetch_due_mails(MAX_MAILS_PER_ROUND)
    end = time.monotonic() + MAX_MAIL_ROUND_S
    for deliveries in mails:
        try:
            outcome = _send_mail(deliveries)
        except mail.MailServerError as error:
            _count_mail_server_failure(str(error), 1)
            return False
        store_outcomes(deliveries, [outcome] * len(deliveries), MAIL_COLLECT_S)
        if not outcome.is_server_fault:
            MailServer.objects.filter(failures__gt=0).update(failures=0, last_error="")
        elif _count_mail_server_failure(outcome.error, MAX_SERVER_FAULTS):
            return False
        if time.monotonic() > end:
            break
    return bool(mails)


def _is_breaker_open() -> bool:
    """Return whether the mail server has failed, and must not be tried yet."""
    return MailServer.objects.filter(retry_at__gt=Now()).exists()


def _count_mail_server_failure(error: str, threshold: int) -> bool:
    """Count a failure of the mail server, and return whether the circuit breaker is open now: there were `threshold`
    failures after one another.

    No mail is tried then for MAIL_SERVER_RETRY_S seconds, and for twice as long after each further failure, up to
    MAX_MAIL_SERVER_RETRY_S. The next mail after that is the probe.
    """
    server, _ = MailServer.objects.get_or_create(pk=1)
    further_failures = server.failures + 1 - threshold
    must_open = further_failures >= 0
    pause_s = min(MAIL_SERVER_RETRY_S * 2 ** min(further_failures, 16), MAX_MAIL_SERVER_RETRY_S) if must_open else 0
    retry_at = Now() + timedelta(seconds=pause_s)
    MailServer.objects.filter(pk=1).update(failures=server.failures + 1, last_error=error[:1000], retry_at=retry_at)
    return must_open


def _run_rounds(job: str, step: Callable[[], bool]) -> None:
    """Call `step` until it returns False or `MAX_RUN_S` has passed; then wake the job again if there is more. Before,
    end the subscriptions whose owner may not have them any more.

    Unlike `jobs.run_steps` it opens no transaction. If another process holds the job's lock, it returns at once without
    waiting, so that this worker is free for other jobs; the work is done by that process, or at the next periodic run.
    """
    jobs.clear_tick(job)
    owners.end_lost_by_users()
    end = time.monotonic() + MAX_RUN_S
    with jobs.try_connection_lock(job) as has_lock:
        while more := has_lock and step():
            if time.monotonic() > end:
                break
    if more:
        jobs.enqueue_job(job)


def fetch_due_webhooks(
    in_flight: Collection[DueDelivery] = (), slow_projects: Collection[str] = (), only_idle_projects: bool = False
) -> list[DueDelivery]:
    """Read the due deliveries to active webhooks that may begin now, besides those `in_flight`. Locks no rows.

    Projects take turns, and `places.choose_webhooks` limits how many begin. A failing subscription, and each one of a
    slow project, has at most one in flight. `slow_projects` are slow besides those that the database knows. With
    `only_idle_projects`, slow projects and those with deliveries in flight are left out. The caller must hold the lock
    of the job, otherwise two processes may send the same message.
    """
    parameters: dict[str, Any] = {
        "slow_projects": list(slow_projects),
        "deliveries": [one.id for one in in_flight],
        "subscriptions": [one.subscription for one in in_flight],
        "projects": [one.project_id for one in in_flight],
        "hosts": [one.host for one in in_flight],
        "only_idle_projects": only_idle_projects,
        "per_host": places.MAX_WEBHOOKS_PER_HOST,
        "per_project": places.MAX_WEBHOOKS_PER_PROJECT,
        "count": places.MAX_WEBHOOKS,
    }
    taken = [replace(one, is_slow=one.is_slow or one.project_id in slow_projects) for one in in_flight]
    return places.choose_webhooks(_fetch(SELECT_DUE_WEBHOOKS, parameters), taken)


def fetch_due_mails(count: int) -> list[list[DueDelivery]]:
    """Read the due deliveries of at most `count` active mail subscriptions, and return a list for each: the messages of
    its next mail, at most MAX_MESSAGES_PER_MAIL. Projects take turns. Locks no rows.

    The caller must hold the lock of the job, otherwise two processes may send the same message.
    """
    due = _fetch(SELECT_DUE_MAILS, {"mails": count, "digest": MAX_MESSAGES_PER_MAIL})
    return [list(deliveries) for _, deliveries in groupby(due, key=lambda one: one.subscription)]


def _fetch(statement: str, parameters: dict[str, Any]) -> list[DueDelivery]:
    """Execute one of the two SELECT statements and return its rows."""
    with connection.cursor() as cursor:
        cursor.execute(statement, parameters)
        return [
            DueDelivery(id, message, kind, at, json.loads(data), *rest)
            for id, message, kind, at, data, *rest in cursor.fetchall()
        ]


def store_outcomes(tried: Sequence[DueDelivery], outcomes: Sequence[AttemptOutcome], pause_s: float) -> None:
    """Store the outcomes of these attempts in one transaction: the deliveries' progress, and the subscriptions'
    failures and next attempt.

    `outcomes` are in the order of `tried`. A subscription counts as working if one of its attempts succeeded; it may
    get its next message after `pause_s` seconds, or after as many seconds as a slow attempt took. If all failed, its
    next attempt waits for its back-off. The project of a slow attempt is slow for a time.

    A subscription is stopped if its destination answered 410, if it has failed for `PAUSE_AFTER_S` seconds, or if the
    last of MAX_REFUSED_MAILS failed attempts was refused permanently.
    """
    if not tried:
        return
    rows: list[dict[str, Any]] = []
    outcome_by_subscription: dict[int, AttemptOutcome] = {}
    for delivery, outcome in zip(tried, outcomes, strict=True):
        is_last_attempt = outcome.is_gone or outcome.is_permanent or delivery.attempts >= len(RETRY_DELAYS_S)
        pause = None if is_last_attempt else RETRY_DELAYS_S[delivery.attempts] * random.uniform(0.9, 1.1)
        rows.append({"id": delivery.id, "error": outcome.error[:1000], "pause": pause})
        if outcome_by_subscription.get(delivery.subscription, AttemptOutcome("-")).error:
            outcome_by_subscription[delivery.subscription] = outcome
    subscription_rows = [
        {
            "id": id,
            "error": outcome.error[:1000],
            "pause": outcome.seconds if outcome.seconds >= SLOW_ATTEMPT_S else pause_s,
        }
        for id, outcome in sorted(outcome_by_subscription.items())
    ]
    with transaction.atomic(), connection.cursor() as cursor:
        # Subscriptions before deliveries: deleting a subscription locks the rows in the same order.
        if slow_projects := {
            one.project_id for one, r in zip(tried, outcomes, strict=True) if r.seconds >= SLOW_ATTEMPT_S
        }:
            times: dict[str, Any] = {"slow_s": SLOW_S, "max_slow_s": MAX_SLOW_S, "projects": sorted(slow_projects)}
            cursor.execute(UPSERT_SLOW_PROJECTS, times)
        cursor.execute(UPDATE_SUBSCRIPTIONS, [MAX_BACKOFF_S, orjson.dumps(subscription_rows).decode(), PAUSE_AFTER_S])
        standings = cursor.fetchall()
        cursor.execute(UPDATE_DELIVERIES, [orjson.dumps(rows).decode()])
        for id, has_failed_for_days, failures in standings:
            outcome = outcome_by_subscription[id]
            if outcome.is_gone:
                _stop_subscription(id, SubscriptionStanding.GONE, "Its destination answered 410 Gone.")
            elif outcome.is_permanent and failures >= MAX_REFUSED_MAILS:
                reason = f"Its mails were refused {failures} times. The last error: {outcome.error}"
                _stop_subscription(id, SubscriptionStanding.PAUSED, reason)
            elif has_failed_for_days:
                _stop_subscription(
                    id,
                    SubscriptionStanding.PAUSED,
                    f"Its destination failed for {PAUSE_AFTER_S // 86_400} days. The last error: {outcome.error}",
                )


def give_up_and_delete_old() -> None:
    """Give up deliveries that have waited for `MAX_WAIT_S` seconds, and delete the oldest ones, at most 1000, that are
    older than `RETENTION_S` seconds.
    """
    waited_too_long = Delivery.objects.filter(created_at__lt=Now() - timedelta(seconds=MAX_WAIT_S))
    _give_up(waited_too_long, f"It waited for more than {MAX_WAIT_S // 86_400} days.")
    old = Delivery.objects.filter(created_at__lt=Now() - timedelta(seconds=RETENTION_S)).order_by("created_at")
    Delivery.objects.filter(pk__in=old.values("pk")[:1000]).delete()
    ConfirmationRequest.objects.filter(asked_at__lt=Now() - timedelta(seconds=RETENTION_S)).delete()
    SlowProject.objects.filter(slow_until__lt=Now() - timedelta(seconds=MAX_SLOW_S)).delete()


def _give_up(deliveries: QuerySet[Delivery], reason: str) -> None:
    """Give up those of the deliveries that are waiting. The error of the last attempt is kept; without one, `reason` is
    stored.
    """
    last_error = Case(When(last_error="", then=Value(reason)), default=F("last_error"), output_field=TextField())
    waiting = deliveries.filter(progress=DeliveryProgress.WAITING)
    waiting.update(progress=DeliveryProgress.GIVEN_UP, last_error=last_error)


def _stop_subscription(id: int, standing: SubscriptionStanding, reason: str) -> None:
    """Set the subscription to `standing`, give up its waiting deliveries, and record an event.

    If the subscription belongs to a person, a message with the reason is put into that person's inbox. Nothing else is
    delivered for the subscription until somebody makes it active again.
    """
    with conductor.writing():
        row = Subscription.objects.get(pk=id)
        Subscription.objects.filter(pk=id).update(standing=standing)
        _give_up(row.deliveries.all(), reason)
        changes = {"standing": [row.standing, standing]}
        subject = (row.uuid, row.name)
        action = f"subscription.{standing}"
        conductor.record_event(
            action, EventSource.SYSTEM, JOB_BY_WAY[row.way], subject=subject, changes=changes, reason=reason
        )
        if row.person:
            message_data = {"subscription": str(row.uuid), "name": row.name, "reason": reason}
            Delivery.objects.create(
                subscription=row,
                kind=PAUSED_KIND,
                data=message_data,
                progress=DeliveryProgress.DELIVERED,
                reader=row.person,
            )


def _decrypt_secret(stored: str) -> str | keyring.DecryptionError:
    """Return the decrypted secret. If it was encrypted with another key, return the error instead of raising it, so
    that only this delivery fails.
    """
    try:
        return keyring.decrypt_secret(stored)
    except keyring.DecryptionError as error:
        return error


def _post_delivery(
    delivery: DueDelivery, secret: str | keyring.DecryptionError, allowed: webhook.AllowedDestinations
) -> AttemptOutcome:
    """Sign the delivery with its subscription's secret and post it. Return the outcome, and how long it took; a secret
    that could not be decrypted is a failed attempt, too.
    """
    if isinstance(secret, keyring.DecryptionError):
        return AttemptOutcome(str(secret))
    body, now = delivery.build_body(), int(time.time())
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "cyborgweb",
        "webhook-id": f"msg_{delivery.message}",
        "webhook-timestamp": str(now),
        "webhook-signature": webhook.sign_message(secret, f"msg_{delivery.message}", now, body),
    }
    begun_at = time.monotonic()
    try:
        outcome = webhook.post_message(delivery.target, headers, body, allowed, project=delivery.project_id)
    except Exception as error:  # an error of one attempt must not stop the others
        log.exception("a webhook could not be posted")
        outcome = AttemptOutcome(f"This was not sent because of an error in the product: {type(error).__name__}.")
    return replace(outcome, seconds=time.monotonic() - begun_at)


def _send_mail(deliveries: list[DueDelivery]) -> mail.MailOutcome:
    """Send these messages of one subscription as one mail. Return the outcome; an address that is not accepted any more
    is a permanent refusal. A request to confirm is not sent without its link. Raises MailServerError if the mail server
    sends no mail for anybody now.
    """
    messages = [(one.at, one.kind, add_hardware_name(one.data)) for one in deliveries]
    try:
        to = mail.check_mail_address(deliveries[0].target)
    except MailAddressError as error:
        return mail.MailOutcome(str(error), is_permanent=True)
    first = deliveries[0]
    if first.kind == CONFIRMATION_KIND:
        if not settings.KEYS.public_url:
            return mail.MailOutcome("CYBORG_PUBLIC_URL, with which the link begins, is not set for the cluster work.")
        letter = mail.build_confirmation(to, first.data["by"], first.message, first.subscription_uuid)
    else:
        letter = mail.build_mail(to, messages, first.message, first.subscription_uuid)
    return mail.send_mail(letter)
