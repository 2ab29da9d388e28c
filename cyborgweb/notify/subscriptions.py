"""Subscriptions: made, changed, tried, deleted; each with an event. Deliveries tried again, messages marked read.

Called by `notify.api`, `notify.admin` and the inbox. Whoever calls has asked whether the caller may.
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
"""Subscriptions that one person, or one project, may have."""
MOST_REPLAYED = 1000
FIELDS = ("name", "scope", "kinds", "host", "type", "label", "way", "target", "standing")
BY_HAND = (Standing.ACTIVE, Standing.OFF)
"""What a person may say of how it stands."""
HOST = re.compile(r"[A-Za-z0-9._*?-]*")
_LOCK = 0x73756273


def allowed() -> webhook.Allowed:
    """What the configuration lets webhooks reach."""
    keys = settings.KEYS
    return webhook.Allowed(keys.webhook_allow_http, webhook.networks(keys.webhook_networks))


def of(caller: Caller) -> Q:
    """For queries of subscriptions: those that are the caller's, or the caller's project's."""
    return Q(project_id=caller.project_id) & (Q(person="") | Q(person=caller.user_id))


def create(
    values: Mapping[str, Any], caller: Caller, source: Source = Source.API, personal: bool = False
) -> tuple[Subscription, str]:
    """Store one of checked values; with a webhook's secret, which is told nowhere else. Raises RefusedError."""
    person = caller.user_id if personal or values["way"] == Way.INBOX else ""
    made = Subscription(**values, project_id=caller.project_id, person=person, user=_user(caller))
    check(made)
    secret = webhook.new_secret() if made.way == Way.WEBHOOK else ""
    made.secret = keyring.lock(secret) if secret else ""
    with conductor.writing():
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
        if Subscription.objects.filter(project_id=made.project_id, person=person).count() >= MOST:
            raise RefusedError(Reason.CONFLICT, f"There are {MOST} subscriptions already: delete one first.")
        made.save()
        _record("created", made, {name: [None, value] for name, value in _shown(made).items() if value}, caller, source)
    return made, secret


def edit(pk: int, values: Mapping[str, Any], caller: Caller, source: Source = Source.API) -> Subscription:
    """Change one; one that was paused and is said to be active begins anew. Raises RefusedError."""
    with conductor.writing():
        row = _locked(pk)
        if "way" in values and values["way"] != row.way:
            raise RefusedError(Reason.CONFLICT, "How it tells you stays as it is: make another subscription.")
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
    """Remove it, with its deliveries. Raises RefusedError UNKNOWN."""
    with conductor.writing():
        row = _locked(pk)
        _record("deleted", row, {name: [value, None] for name, value in _shown(row).items() if value}, caller, source)
        row.delete()


def rotate(pk: int, caller: Caller, source: Source = Source.API) -> tuple[Subscription, str]:
    """Another secret, from the next try on. Raises RefusedError."""
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
    """Write a message that says that it is a test; its delivery shows what came of it. Raises RefusedError."""
    with conductor.writing():
        row = _locked(pk)
        if row.standing != Standing.ACTIVE:
            raise RefusedError(Reason.STATE, f"This subscription is {row.standing}: make it active first.")
        waiting = row.deliveries.filter(kind=TEST, progress=Progress.WAITING)
        if waiting.exists():
            raise RefusedError(Reason.CONFLICT, "A test of it is under way: look at its deliveries.")
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
    """Bring these to their destination again, with the same ids; how many. Messages in an inbox are there already."""
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
    """What is in somebody's inbox."""
    return Delivery.objects.filter(reader=person).exclude(reader="")


def inbox_in_project(caller: Caller, elevated: bool) -> QuerySet[Delivery]:
    """Of the caller's inbox what belongs to the caller's project: tokens of several projects may have one user. Of all
    of the cloud for whom the rule `cyborg:subscription:elevated` lets."""
    rows = inbox(caller.user_id).filter(subscription__project_id=caller.project_id)
    return rows if elevated else rows.filter(subscription__scope=Scope.PROJECT)


def read(rows: QuerySet[Delivery], messages: Iterable[Any] | None = None) -> int:
    """Mark these messages of an inbox read, or all; how many were not."""
    rows = rows.filter(read_at__isnull=True)
    if messages is not None:
        rows = rows.filter(message__in=list(messages))
    return rows.update(read_at=datetime.now(UTC))


def check(row: Subscription) -> None:
    """Raises RefusedError INVALID for what makes no sense together."""
    if not row.kinds or set(row.kinds) - set(Kind):
        raise RefusedError(Reason.INVALID, f"Say what you want to be told of: one or more of {', '.join(Kind)}.")
    if row.host and (row.scope != Scope.CLOUD or not HOST.fullmatch(row.host)):
        raise RefusedError(
            Reason.INVALID, "A host is a name, with * and ? for what differs, and needs the scope cloud."
        )
    if row.way == Way.INBOX and row.target:
        raise RefusedError(Reason.INVALID, "The inbox needs no target.")
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
        raise RefusedError(Reason.INVALID, "The target is no e-mail address.") from None
    domains = keys.mail_domains or (keys.mail_from.rpartition("@")[2],)
    if "*" not in domains and address.rpartition("@")[2].lower() not in {domain.lower() for domain in domains}:
        raise RefusedError(Reason.INVALID, f"Mail is sent to addresses at {', '.join(domains)} only.")


def _shown(row: Subscription) -> dict[str, Any]:
    """For events: of a URL only where it leads, as it may hold a token."""
    told = {name: getattr(row, name) for name in FIELDS} | {"kinds": ", ".join(row.kinds)}
    return told | {"target": row.destination if row.way != Way.INBOX else ""}


def _locked(pk: int) -> Subscription:
    found = Subscription.objects.select_for_update().filter(pk=pk).first()
    if found is None:
        raise RefusedError(Reason.UNKNOWN, "The subscription is not there any more.")
    return found


def _user(caller: Caller) -> User | None:
    """With which the subscription ends; None for who is known to Keystone alone."""
    if settings.WITH_KEYSTONE:
        return User.objects.filter(keystone__keystone_id=caller.user_id).first()
    return User.objects.filter(pk=int(caller.user_id)).first() if caller.user_id.isdecimal() else None


def _record(what: str, row: Subscription, changes: dict[str, Any], caller: Caller, source: Source) -> None:
    about = (row.uuid, row.name)
    conductor.record(f"subscription.{what}", source, caller.name, subject=about, changes=changes)


def _wake(*ways: str) -> None:
    for job in [JOBS[way] for way in ways if way in JOBS]:
        transaction.on_commit(partial(jobs.kick, job), robust=True)
