"""The jobs `deliveries` and `mails`: deliver waiting messages to webhooks and by mail, retry, give up, and pause
subscriptions that have failed for days.

No transaction is open while messages are posted: it would hold up everything that waits for older transactions to end.

Delivery is at least once: if the process is killed after an attempt and before its outcome is committed, the message is
sent again with the same id. At most `PER_DESTINATION` simultaneous attempts go to one host and `BATCH` in all, on
threads that do not use the database. A subscription whose last attempt failed gets one message at a time, with a
growing back-off.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import orjson
from django.db import connection, transaction

from accelerators import conductor
from accelerators.domain.states import Source
from accelerators.runtime import jobs
from cyborgweb.models.event_types import JOBS, PAUSED, Progress, Standing, Way
from cyborgweb.models.notify import Delivery, Subscription
from cyborgweb.notify import keyring, mail, subscriptions, webhook
from cyborgweb.notify.webhook import Outcome

SLICE_S = 10.0
"""Seconds after which no new round begins. With `MAIL_S` and one last mail, a job ends well below the cluster's time
limit of 60 s.
"""
BATCH, PER_DESTINATION, MAILS, DIGEST = 64, 4, 20, 100
"""Attempts per webhook round, attempts per round to one host, mails per round, messages per mail."""
PAUSES_S = (5, 30, 120, 600, 1800, 7200, 21_600, 43_200, 86_400)
"""Seconds to wait after the first failed attempt of a message, the second, and so on. The message is given up when the
attempt after the last pause fails.
"""
LONGEST_PROBE_S = 600
"""Longest back-off of a failing subscription in seconds, so that it is probed at least this often."""
MAIL_PAUSE_S = 15
"""Seconds after a mail during which further messages are collected for the next mail."""
MAIL_S = 10
"""Seconds after which no new mail is begun in a round."""
AWAY_S = 30
"""Seconds during which no mail is tried for anybody after the mail server was unavailable."""
GIVEN_UP_S, PAUSED_S, KEPT_S = 3 * 86_400, 3 * 86_400, 30 * 86_400
"""Seconds that a message waits at most, that a subscription may fail before it is paused, and that deliveries are kept.
"""

DUE = """
SELECT * FROM (
  SELECT d.id, d.message::text, d.kind, d.at, d.data::text, d.attempts, s.id AS subscription, s.target, s.secret,
    row_number() OVER (PARTITION BY split_part(s.target, '/', 3) ORDER BY d.next_at, d.id) AS place, d.next_at
  FROM cyborgweb_subscription s CROSS JOIN LATERAL (
    SELECT * FROM cyborgweb_delivery d WHERE d.subscription_id = s.id AND d.progress = 'waiting'
      AND d.next_at <= statement_timestamp() ORDER BY d.next_at, d.id
    LIMIT CASE WHEN s.way = 'email' THEN %(digest)s WHEN s.failures > 0 THEN 1 ELSE %(most)s END) d
  WHERE s.standing = 'active' AND s.way = %(way)s AND s.retry_at <= statement_timestamp()
) x WHERE x.place <= %(most)s OR %(way)s = 'email' ORDER BY x.next_at, x.id LIMIT %(batch)s
"""
SETTLED = """
UPDATE cyborgweb_delivery d SET attempts = d.attempts + 1, last_error = x.error,
  progress = CASE WHEN x.error = '' THEN 'delivered' WHEN x.pause IS NULL THEN 'given up' ELSE 'waiting' END,
  delivered_at = CASE WHEN x.error = '' THEN statement_timestamp() END,
  next_at = statement_timestamp() + make_interval(secs => coalesce(x.pause, 0))
FROM jsonb_to_recordset(%s::jsonb) AS x(id bigint, error text, pause float8)
WHERE d.id = x.id AND d.progress = 'waiting'
"""
FARED = """
UPDATE cyborgweb_subscription s SET failures = CASE WHEN x.error = '' THEN 0 ELSE s.failures + 1 END,
  failing_since = CASE WHEN x.error <> '' THEN coalesce(s.failing_since, statement_timestamp()) END,
  last_error = x.error, retry_at = statement_timestamp() + make_interval(secs => CASE WHEN x.error = '' THEN x.pause
    ELSE least(%s, 5 * 6 ^ least(s.failures, 8)) END)
FROM jsonb_to_recordset(%s::jsonb) AS x(id bigint, error text, pause float8) WHERE s.id = x.id AND s.standing = 'active'
RETURNING s.id, s.failing_since < statement_timestamp() - make_interval(secs => %s)
"""
PUT_OFF = """
UPDATE cyborgweb_subscription SET retry_at = greatest(retry_at, statement_timestamp() + make_interval(secs => %s))
WHERE way = 'email' AND standing = 'active'
"""
ENDED = """
UPDATE cyborgweb_delivery SET progress = 'given up', last_error = coalesce(nullif(last_error, ''), %s)
WHERE progress = 'waiting' AND
"""
OLD = """
DELETE FROM cyborgweb_delivery WHERE id IN (SELECT id FROM cyborgweb_delivery
  WHERE created_at < statement_timestamp() - make_interval(secs => %s) ORDER BY created_at LIMIT 1000)
"""


@dataclass(frozen=True)
class Due:
    """A delivery that is due for its next attempt, with what is needed to send it."""

    id: int
    message: str
    kind: str
    at: Any
    data: dict[str, Any]
    attempts: int
    subscription: int
    target: str
    secret: str

    def body(self) -> bytes:
        """Return the JSON body for the receiver: the same bytes at every attempt."""
        return orjson.dumps({"type": self.kind, "timestamp": self.at, "data": self.data})


def run() -> None:
    """Run the job `deliveries`: rounds of webhooks."""
    _rounds(JOBS[Way.WEBHOOK], step)


def run_mails() -> None:
    """Run the job `mails`: rounds of mails."""
    _rounds(JOBS[Way.EMAIL], mail_step)


def step() -> bool:
    """Clean up with `tidy`, send one round of webhooks and store the outcomes. Return True if there may be more."""
    tidy()
    hooks = due(Way.WEBHOOK, BATCH)
    settle(hooks, _posted(hooks), 0)
    return bool(hooks)


def mail_step() -> bool:
    """Send one round of mails and store the outcomes. Return True if there may be more.

    If the mail server is unavailable, all mail is put off by `AWAY_S`.
    """
    tried, outcomes, away = _mailed(due(Way.EMAIL, MAILS * DIGEST))
    settle(tried, outcomes, MAIL_PAUSE_S)
    if away:
        with connection.cursor() as cursor:
            cursor.execute(PUT_OFF, [AWAY_S])
    return bool(tried) and not away


def _rounds(job: str, step: Callable[[], bool]) -> None:
    """Call `step` until it returns False or `SLICE_S` has passed; then wake the job again if there is more.

    Unlike `jobs.run` it opens no transaction. If another process holds the job's lock it returns at once and leaves the
    work to that process or to the clock, because a worker that waited here would be missing elsewhere.
    """
    jobs.take_up(job)
    end = time.monotonic() + SLICE_S
    with jobs.alone(job) as mine:
        while more := mine and step():
            if time.monotonic() > end:
                break
    if more:
        jobs.kick(job)


def due(way: str, count: int) -> list[Due]:
    """Return at most `count` due deliveries, longest waiting first; webhooks are shared fairly among destinations."""
    asked = {"way": way, "batch": count, "most": PER_DESTINATION, "digest": DIGEST}
    with connection.cursor() as cursor:
        cursor.execute(DUE, asked)
        return [Due(*row[:4], json.loads(row[4]), *row[5:9]) for row in cursor.fetchall()]


def settle(tried: list[Due], outcomes: list[Outcome], pause_s: float) -> None:
    """Store the outcomes of these attempts in one transaction: the deliveries' progress, and the subscriptions'
    failures and next attempt.

    A subscription counts as working if one of its attempts succeeded; it may get its next message after `pause_s`
    seconds. It is stopped if its destination answered 410, or if it has failed for `PAUSED_S`.
    """
    if not tried:
        return
    rows, fared = [], {}
    for one, outcome in zip(tried, outcomes, strict=True):
        last = outcome.gone or one.attempts >= len(PAUSES_S)
        pause = None if last else PAUSES_S[one.attempts] * random.uniform(0.9, 1.1)
        rows.append({"id": one.id, "error": outcome.error[:1000], "pause": pause})
        if fared.get(one.subscription, Outcome("-")).error:
            fared[one.subscription] = outcome
    shown = [{"id": id, "error": outcome.error[:1000], "pause": pause_s} for id, outcome in sorted(fared.items())]
    with transaction.atomic(), connection.cursor() as cursor:
        # Subscriptions before deliveries: deleting a subscription locks the rows in the same order.
        cursor.execute(FARED, [LONGEST_PROBE_S, orjson.dumps(shown).decode(), PAUSED_S])
        fares = dict(cursor.fetchall())
        cursor.execute(SETTLED, [orjson.dumps(rows).decode()])
        for id, for_long in fares.items():
            outcome = fared[id]
            if outcome.gone:
                _stop(id, Standing.GONE, "Its destination answered 410 Gone.")
            elif for_long:
                _stop(
                    id,
                    Standing.PAUSED,
                    f"Its destination failed for {PAUSED_S // 86_400} days. The last error: {outcome.error}",
                )


def tidy() -> None:
    """Give up deliveries that have waited for `GIVEN_UP_S`, and delete at most 1000 that are older than `KEPT_S`."""
    with connection.cursor() as cursor:
        too_long = "created_at < statement_timestamp() - make_interval(secs => %s)"
        cursor.execute(ENDED + too_long, [f"It waited for more than {GIVEN_UP_S // 86_400} days.", GIVEN_UP_S])
        cursor.execute(OLD, [KEPT_S])


def _stop(id: int, standing: Standing, reason: str) -> None:
    """Set the subscription to `standing`, give up its waiting deliveries, record an event, and tell its owner in the
    inbox. Nothing is delivered until somebody makes it active again.
    """
    with conductor.writing():
        row = Subscription.objects.get(pk=id)
        Subscription.objects.filter(pk=id).update(standing=standing)
        with connection.cursor() as cursor:
            cursor.execute(ENDED + "subscription_id = %s", [reason, id])
        changes = {"standing": [row.standing, standing]}
        about = (row.uuid, row.name)
        action = f"subscription.{standing}"
        conductor.record(action, Source.SYSTEM, JOBS[row.way], subject=about, changes=changes, reason=reason)
        if row.person:
            told = {"subscription": str(row.uuid), "name": row.name, "reason": reason}
            Delivery.objects.create(
                subscription=row, kind=PAUSED, data=told, progress=Progress.DELIVERED, reader=row.person
            )


def _posted(hooks: list[Due]) -> list[Outcome]:
    if not hooks:
        return []
    allowed = subscriptions.allowed()
    secrets = [_unlocked(one.secret) for one in hooks]
    with ThreadPoolExecutor(len(hooks), thread_name_prefix="webhook") as threads:
        return list(threads.map(lambda one, secret: _post(one, secret, allowed), hooks, secrets))


def _unlocked(stored: str) -> str | keyring.DecryptionError:
    try:
        return keyring.unlock(stored)
    except keyring.DecryptionError as error:
        return error


def _post(one: Due, secret: str | keyring.DecryptionError, allowed: webhook.Allowed) -> Outcome:
    if isinstance(secret, keyring.DecryptionError):
        return Outcome(str(secret))
    body, now = one.body(), int(time.time())
    headers = {
        "Content-Type": "application/json",
        "User-Agent": "cyborgweb",
        "webhook-id": f"msg_{one.message}",
        "webhook-timestamp": str(now),
        "webhook-signature": webhook.signature(secret, f"msg_{one.message}", now, body),
    }
    return webhook.post(one.target, headers, body, allowed)


def _mailed(letters: Iterable[Due]) -> tuple[list[Due], list[Outcome], bool]:
    """Send one mail per subscription, for at most `MAILS` subscriptions and `MAIL_S` seconds. Return the deliveries
    that were tried, their outcomes, and whether the mail server is unavailable; it stops at the first mail that
    finds it so.
    """
    of: dict[int, list[Due]] = {}
    end = time.monotonic() + MAIL_S
    for one in letters:
        of.setdefault(one.subscription, []).append(one)
    tried: list[Due] = []
    outcomes: list[Outcome] = []
    away = False
    for rows in list(of.values())[:MAILS]:
        outcome, away = mail.send(rows[0].target, [(row.at, row.kind, row.data) for row in rows], rows[0].message)
        tried += rows
        outcomes += [outcome] * len(rows)
        if away or time.monotonic() > end:
            break
    return tried, outcomes, away
