"""The jobs `deliveries` and `mails`: bring what waits to webhooks and by mail, try again, give up, pause what fails for
days. While they post, no transaction is open: it would hold up all that waits for older ones to end.

At least once: whoever is killed after a try and before its outcome is committed tries again, with the same id. At most
`PER_DESTINATION` tries at once go to one host, `BATCH` in all, on threads that know no database. A subscription whose
last try failed is probed with one message at a time, at growing pauses.
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
"""No further round is begun after so long: with `MAIL_S` and a last letter a job ends well below the cluster's 60 s."""
BATCH, PER_DESTINATION, MAILS, DIGEST = 64, 4, 20, 100
"""Tries in one round, of those to one host, mails in one round, messages in one mail."""
PAUSES_S = (5, 30, 120, 600, 1800, 7200, 21_600, 43_200, 86_400)
"""After the first failed try of a message, the second, …; after the last one it is given up."""
LONGEST_PROBE_S = 600
"""A failing subscription is probed so often at least, whatever waits."""
MAIL_PAUSE_S = 15
"""What comes within so long after a mail is one mail."""
MAIL_S = 10
"""No further mail is begun in a round after so long."""
AWAY_S = 30
"""So long nobody's mail is tried after the server was away."""
GIVEN_UP_S, PAUSED_S, KEPT_S = 3 * 86_400, 3 * 86_400, 30 * 86_400
"""So long a message waits at most, a subscription may fail before it is paused, and deliveries are kept."""

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
    """A delivery whose time has come."""

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
        """What the receiver gets: the same bytes at every try."""
        return orjson.dumps({"type": self.kind, "timestamp": self.at, "data": self.data})


def run() -> None:
    """The job `deliveries`."""
    _rounds(JOBS[Way.WEBHOOK], step)


def run_mails() -> None:
    """The job `mails`."""
    _rounds(JOBS[Way.EMAIL], mail_step)


def step() -> bool:
    """One round of webhooks; True when there may be more."""
    tidy()
    hooks = due(Way.WEBHOOK, BATCH)
    settle(hooks, _posted(hooks), 0)
    return bool(hooks)


def mail_step() -> bool:
    """One round of mails; True when there may be more."""
    tried, outcomes, away = _mailed(due(Way.EMAIL, MAILS * DIGEST))
    settle(tried, outcomes, MAIL_PAUSE_S)
    if away:
        with connection.cursor() as cursor:
            cursor.execute(PUT_OFF, [AWAY_S])
    return bool(tried) and not away


def _rounds(job: str, step: Callable[[], bool]) -> None:
    """As `ticks.run`, without its transaction. Who finds the lock taken leaves what there is to its holder, or to the
    clock: a worker that waited here would be missed elsewhere."""
    jobs.take_up(job)
    end = time.monotonic() + SLICE_S
    with jobs.alone(job) as mine:
        while more := mine and step():
            if time.monotonic() > end:
                break
    if more:
        jobs.kick(job)


def due(way: str, count: int) -> list[Due]:
    """At most `count`, the longest waiting first; fairly shared among destinations."""
    asked = {"way": way, "batch": count, "most": PER_DESTINATION, "digest": DIGEST}
    with connection.cursor() as cursor:
        cursor.execute(DUE, asked)
        return [Due(*row[:4], json.loads(row[4]), *row[5:9]) for row in cursor.fetchall()]


def settle(tried: list[Due], outcomes: list[Outcome], pause_s: float) -> None:
    """Write what came of them. A subscription fares well when one of its tries did."""
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
        # In the order in which who deletes a subscription locks it and what is left of its deliveries.
        cursor.execute(FARED, [LONGEST_PROBE_S, orjson.dumps(shown).decode(), PAUSED_S])
        fares = dict(cursor.fetchall())
        cursor.execute(SETTLED, [orjson.dumps(rows).decode()])
        for id, for_long in fares.items():
            outcome = fared[id]
            if outcome.gone:
                _stop(id, Standing.GONE, "Its destination answered 410 Gone.")
            elif for_long:
                _stop(id, Standing.PAUSED, f"It failed for {PAUSED_S // 86_400} days; the last time: {outcome.error}")


def tidy() -> None:
    """Give up what waited for too long, and forget what is old."""
    with connection.cursor() as cursor:
        too_long = "created_at < statement_timestamp() - make_interval(secs => %s)"
        cursor.execute(ENDED + too_long, ["It waited for too long.", GIVEN_UP_S])
        cursor.execute(OLD, [KEPT_S])


def _stop(id: int, standing: Standing, reason: str) -> None:
    """Nothing is brought there any more until somebody resumes it; whoever it belongs to is told."""
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
    """Those of which a mail was tried, what came of each, and whether the server is away: then one is tried."""
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
