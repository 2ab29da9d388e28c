"""Create, change, test and delete subscriptions, replay deliveries, and mark inbox messages as read.

Every change of a subscription and every replay records an event. The functions do not check permissions: the calling
code must do that first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.core.exceptions import ValidationError
from django.core.validators import validate_email
from django.db import connection, transaction
from django.db.models import Q, QuerySet

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import Source
from accelerators.runtime import jobs
from cyborgweb.models.event_types import JOBS, TEST, Kind, Progress, Scope, Standing, Way
from cyborgweb.models.notify import Delivery, Subscription
from cyborgweb.notify import keyring, webhook

MOST = 50
"""Subscriptions that one person may have in a project, or one project for itself."""
MOST_REPLAYED = 1000
FIELDS = ("name", "scope", "kinds", "host", "type", "label", "way", "target", "standing")
BY_HAND = (Standing.ACTIVE, Standing.OFF)
"""The standings that a person may set."""
HOST = re.compile(r"[A-Za-z0-9._*?-]*")
_LOCK = 0x73756273


def allowed() -> webhook.Allowed:
    """Return which destinations the configuration allows for webhooks."""
    keys = settings.KEYS
    return webhook.Allowed(keys.webhook_allow_http, webhook.networks(keys.webhook_networks))


def of(caller: Caller) -> Q:
    """Return a filter for the subscriptions in the caller's project that belong to the project or to the caller."""
    return Q(project_id=caller.project_id) & (Q(person="") | Q(person=caller.user_id))


def create(
    values: Mapping[str, Any], caller: Caller, source: Source = Source.API, personal: bool = False
) -> tuple[Subscription, str]:
    """Create a subscription and record an event. Return it with the webhook's secret in plain text ('' for other ways),
    which cannot be read again later.

    An inbox subscription always belongs to the caller alone. Raises RefusedError INVALID for values that do not fit
    together, CONFLICT if there are `MOST` already.
    """
    person = caller.user_id if personal or values["way"] == Way.INBOX else ""
    made = Subscription(**values, project_id=caller.project_id, person=person, user=_user(caller))
    check(made)
    secret = webhook.new_secret() if made.way == Way.WEBHOOK else ""
    made.secret = keyring.lock(secret) if secret else ""
    with conductor.writing():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        if Subscription.objects.filter(project_id=made.project_id, person=person).count() >= MOST:
            raise RefusedError(
                Reason.CONFLICT,
                f"There are already {MOST} subscriptions, the largest number allowed: delete one first.",
            )
        made.save()
        _record("created", made, {name: [None, value] for name, value in _shown(made).items() if value}, caller, source)
    return made, secret


def edit(pk: int, values: Mapping[str, Any], caller: Caller, source: Source = Source.API) -> Subscription:
    """Change a subscription, record an event, wake its delivery job and return it.

    A change also resets its failures and back-off, so a paused subscription that is made active starts afresh. Raises
    RefusedError UNKNOWN if it does not exist, CONFLICT if `way` would change, INVALID if the values do not fit
    together.
    """
    with conductor.writing():
        row = _locked(pk)
        if "way" in values and values["way"] != row.way:
            raise RefusedError(
                Reason.CONFLICT, "A subscription cannot change how it delivers messages: create another subscription."
            )
        before = _shown(row)
        for name, value in values.items():
            setattr(row, name, value)
        check(row)
        changes = {name: [before[name], value] for name, value in _shown(row).items() if before[name] != value}
        if changes or before != _shown(row) or "target" in values:
            row.failures, row.failing_since, row.last_error, row.retry_at = 0, None, "", datetime.now(UTC)
            row.updated_at = datetime.now(UTC)
            row.save()
            _record("changed", row, changes, caller, source)
    _wake(row.way)
    return row


def delete(pk: int, caller: Caller, source: Source = Source.API) -> None:
    """Delete the subscription with its deliveries and record an event. Raises RefusedError UNKNOWN if it does not
    exist.
    """
    with conductor.writing():
        row = _locked(pk)
        _record("deleted", row, {name: [value, None] for name, value in _shown(row).items() if value}, caller, source)
        row.delete()


def rotate(pk: int, caller: Caller, source: Source = Source.API) -> tuple[Subscription, str]:
    """Give a webhook a new secret, valid from the next attempt on. Return the subscription and the secret in plain
    text.

    Raises RefusedError UNKNOWN if it does not exist, STATE if it is no webhook.
    """
    with conductor.writing():
        row = _locked(pk)
        if row.way != Way.WEBHOOK:
            raise RefusedError(Reason.STATE, "Only webhooks have a secret.")
        secret = webhook.new_secret()
        row.secret, row.updated_at = keyring.lock(secret), datetime.now(UTC)
        row.save(update_fields=["secret", "updated_at"])
        _record("rotated", row, {}, caller, source)
    return row, secret


def test(pk: int, caller: Caller, source: Source = Source.API) -> Delivery:
    """Queue a test message for the subscription and return its delivery, which will show the outcome.

    Raises RefusedError UNKNOWN if the subscription does not exist, STATE if it is not active, CONFLICT if a test is
    already waiting.
    """
    with conductor.writing():
        row = _locked(pk)
        if row.standing != Standing.ACTIVE:
            raise RefusedError(Reason.STATE, f"This subscription is {row.standing}: make it active first.")
        waiting = row.deliveries.filter(kind=TEST, progress=Progress.WAITING)
        if waiting.exists():
            raise RefusedError(
                Reason.CONFLICT, "A test message is already under way: look at the subscription's deliveries."
            )
        told = {"subscription": str(row.uuid), "name": row.name, "by": caller.name}
        inbox = row.way == Way.INBOX
        made = row.deliveries.create(
            kind=TEST,
            data=told,
            reader=row.person if inbox else "",
            progress=Progress.DELIVERED if inbox else Progress.WAITING,
            delivered_at=datetime.now(UTC) if inbox else None,
        )
        Subscription.objects.filter(pk=pk).update(retry_at=datetime.now(UTC))
        _record("tested", row, {}, caller, source)
    _wake(row.way)
    return Delivery.objects.select_related("subscription").get(pk=made.pk)


def replay(wanted: QuerySet[Delivery], caller: Caller, source: Source = Source.API) -> int:
    """Deliver these messages again with the same ids; return how many were queued, at most `MOST_REPLAYED`.

    Inbox messages and deliveries that are still waiting are left out. Raises RefusedError STATE if a subscription of
    these is not active; then nothing is queued.
    """
    with conductor.writing():
        ids = list(wanted.exclude(subscription__way=Way.INBOX).values_list("pk", flat=True)[:MOST_REPLAYED])
        again = Delivery.objects.filter(pk__in=ids, reader="").exclude(progress=Progress.WAITING)
        rows = list(again.select_related("subscription").select_for_update(of=("self",)).order_by("id"))
        off = next((row.subscription for row in rows if row.subscription.standing != Standing.ACTIVE), None)
        if off is not None:
            raise RefusedError(Reason.STATE, f"The subscription {off.name} is {off.standing}: make it active first.")
        now = datetime.now(UTC)
        Delivery.objects.filter(pk__in=[row.pk for row in rows]).update(
            progress=Progress.WAITING, attempts=0, next_at=now, created_at=now, last_error=""
        )
        for subscription in {row.subscription for row in rows}:
            changes = {"replayed": [None, sum(row.subscription == subscription for row in rows)]}
            _record("replayed", subscription, changes, caller, source)
    _wake(*{row.subscription.way for row in rows})
    return len(rows)


def inbox(person: str) -> QuerySet[Delivery]:
    """Return the deliveries in this person's inbox, of all projects."""
    return Delivery.objects.filter(reader=person).exclude(reader="")


def inbox_in_project(caller: Caller, elevated: bool) -> QuerySet[Delivery]:
    """Return the caller's inbox messages of the caller's project, because one user may have tokens of several projects.
    Messages of subscriptions to the whole cloud are included only if `elevated`, which is the rule
    `cyborg:subscription:elevated`.
    """
    rows = inbox(caller.user_id).filter(subscription__project_id=caller.project_id)
    return rows if elevated else rows.filter(subscription__scope=Scope.PROJECT)


def read(rows: QuerySet[Delivery], messages: Iterable[Any] | None = None) -> int:
    """Mark these messages of an inbox as read, or all of them if `messages` is None. Return how many were unread."""
    rows = rows.filter(read_at__isnull=True)
    if messages is not None:
        rows = rows.filter(message__in=list(messages))
    return rows.update(read_at=datetime.now(UTC))


def check(row: Subscription) -> None:
    """Check that the fields of a subscription fit together. Raises RefusedError INVALID with the reason."""
    if not row.kinds or set(row.kinds) - set(Kind):
        raise RefusedError(
            Reason.INVALID, f"Select the kinds of messages that you want: one or more of {', '.join(Kind)}."
        )
    if row.host and (row.scope != Scope.CLOUD or not HOST.fullmatch(row.host)):
        raise RefusedError(
            Reason.INVALID, "A host is a name, in which * and ? are wildcards, and needs the scope cloud."
        )
    if row.way == Way.INBOX and row.target:
        raise RefusedError(Reason.INVALID, "The inbox takes no target.")
    if row.way == Way.WEBHOOK:
        try:
            webhook.where(row.target, allowed())
        except webhook.WebhookUrlError as refused:
            raise RefusedError(Reason.INVALID, str(refused)) from None
    if row.way == Way.EMAIL:
        _check_address(row.target)


def _check_address(address: str) -> None:
    keys = settings.KEYS
    if not keys.mail_host:
        raise RefusedError(Reason.INVALID, "This installation sends no mail: CYBORG_MAIL_HOST is not set.")
    try:
        validate_email(address)
    except ValidationError:
        raise RefusedError(Reason.INVALID, "The target is no e-mail address: write NAME@DOMAIN.") from None
    domains = keys.mail_domains or (keys.mail_from.rpartition("@")[2],)
    if "*" not in domains and address.rpartition("@")[2].lower() not in {domain.lower() for domain in domains}:
        raise RefusedError(Reason.INVALID, f"Mail can be sent to addresses at {', '.join(domains)} only.")


def _shown(row: Subscription) -> dict[str, Any]:
    """Return the fields as events record them. A URL may hold a token, so only its destination is included."""
    told = {name: getattr(row, name) for name in FIELDS} | {"kinds": ", ".join(row.kinds)}
    return told | {"target": row.destination if row.way != Way.INBOX else ""}


def _locked(pk: int) -> Subscription:
    found = Subscription.objects.select_for_update().filter(pk=pk).first()
    if found is None:
        raise RefusedError(Reason.UNKNOWN, "The subscription does not exist any more.")
    return found


def _user(caller: Caller) -> User | None:
    """Return the Django user whose deletion deletes the subscription too, or None for a caller that is known to
    Keystone alone.
    """
    if settings.WITH_KEYSTONE:
        return User.objects.filter(keystone__keystone_id=caller.user_id).first()
    return User.objects.filter(pk=int(caller.user_id)).first() if caller.user_id.isdecimal() else None


def _record(what: str, row: Subscription, changes: dict[str, Any], caller: Caller, source: Source) -> None:
    about = (row.uuid, row.name)
    conductor.record(f"subscription.{what}", source, caller.name, subject=about, changes=changes)


def _wake(*ways: str) -> None:
    for job in [JOBS[way] for way in ways if way in JOBS]:
        transaction.on_commit(partial(jobs.kick, job), robust=True)
