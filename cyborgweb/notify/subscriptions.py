"""Create, change, hand over, test and delete subscriptions, replay deliveries, and mark inbox messages as read.

Every change of a subscription and every replay records an event. The functions do not check permissions: the calling
code must do that first.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.db import connection
from django.db.models import Q, QuerySet

from accelerators import conductor
from accelerators.domain import generations
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource
from accelerators.runtime import database_clock, jobs
from accelerators.runtime.after_commit import call_after_commit
from cyborgweb.auth import policy, roles
from cyborgweb.models.event_types import (
    CONFIRMATION_KIND,
    JOB_BY_WAY,
    TEST_KIND,
    DeliveryProgress,
    DeliveryWay,
    NotificationKind,
    SubscriptionScope,
    SubscriptionStanding,
)
from cyborgweb.models.notify import ConfirmationRequest, Delivery, Subscription
from cyborgweb.notify import keyring, mail, owners, webhook
from cyborgweb.settings.keys import get_keys
from cyborgweb.settings.mail_address import MailAddressError, find_plain_form

MAX_SUBSCRIPTIONS = 50
"""Subscriptions that one person may have in a project, or one project for itself."""
MAX_REPLAYED = 1000
MAX_ASKED_OF_ADDRESS, MAX_ASKED_OF_ADDRESS_IN_MONTH, MAX_ASKED_BY_USER = 3, 10, 10
"""Requests to confirm that one address gets from one project in a day, and in 30 days, and that one user can have sent
in a day.
"""
MAX_ASKED_BY_ALL_IN_MONTH = 30
"""Requests to confirm that one address gets from all projects in 30 days."""
RECORDED_FIELDS = ("name", "scope", "kinds", "host", "type", "label", "way", "target", "standing")
SETTABLE_STANDINGS = (SubscriptionStanding.ACTIVE, SubscriptionStanding.OFF)
"""The standings that a person may set."""
HOST_GLOB = re.compile(r"[A-Za-z0-9._*?-]*")
OTHER_PERSONS = "This subscription belongs to another person. You can delete it or hand it over."
NO_MAILS = "This subscription sends no mails to this address, so there is nothing to do."
ENDED = "Its recipient ended it with the link in a mail."
BY_LINK = "with the link in a mail"
_CREATE_LOCK_ID, _ASK_LOCK_ID = 0x73756273, 0x61736B73


def allowed_destinations() -> webhook.AllowedDestinations:
    """Return which destinations the configuration allows for webhooks."""
    keys = settings.KEYS
    return webhook.AllowedDestinations(keys.webhook_allow_http, webhook.parse_networks(keys.webhook_networks))


def filter_for_caller(caller: Caller) -> Q:
    """Return a filter for the subscriptions in the caller's project that belong to the project or to the caller, and
    for the ended ones of its members, if the caller manages the project.

    Without Keystone, everybody in the console without a project's group is in the project `local`, and every viewer has
    the role manager. Its members share no work, so only administrators manage it.
    """
    of_project_or_caller = Q(person="") | Q(person=caller.user_id)
    is_shared_by_strangers = get_keys().auth != "keystone" and caller.project_id == roles.LOCAL_PROJECT
    if policy.is_allowed(caller, "cyborg:subscription:hand_over") and (caller.is_admin or not is_shared_by_strangers):
        of_project_or_caller |= Q(standing=SubscriptionStanding.ENDED)
    return Q(project_id=caller.project_id) & of_project_or_caller


def filter_deliveries_for_caller(caller: Caller) -> Q:
    """Return a filter that leaves out deliveries of other people: of their personal subscriptions, and in their
    inboxes.
    """
    return Q(subscription__person__in=("", caller.user_id), reader__in=("", caller.user_id))


def belongs_to_other_person(row: Subscription, caller: Caller) -> bool:
    """Return whether the subscription is personal, and not the caller's. Such a one can only be handed over or deleted,
    and its webhook's URL is not shown.
    """
    return row.person not in ("", caller.user_id)


def create(
    values: Mapping[str, Any], caller: Caller, source: EventSource = EventSource.API, personal: bool = False
) -> tuple[Subscription, str]:
    """Create a subscription with these field values and record an event.

    Return it with the webhook's secret in plain text ('' for other ways), which cannot be read again later. With
    `personal`, and always for an inbox, it belongs to the caller alone, otherwise to the caller's project. A mail
    address that the same owner has not proven yet gets a request to confirm it. Raises RefusedError INVALID for values
    that do not fit together, CONFLICT if that owner has `MAX_SUBSCRIPTIONS` already, or if too many requests to confirm
    were sent.
    """
    person = caller.user_id if personal or values["way"] == DeliveryWay.INBOX else ""
    owner = {"person": person, "owner": caller.user_id, "user": _owning_user(caller)}
    subscription = Subscription(**values, project_id=caller.project_id, **owner)
    validate_subscription(subscription)
    secret = webhook.generate_secret() if subscription.way == DeliveryWay.WEBHOOK else ""
    subscription.secret = keyring.encrypt_secret(secret) if secret else ""
    subscription.confirmed_at = database_clock.now()
    with conductor.writing():
        _lock_creation()
        _check_count(subscription.project_id, person)
        subscription.save()
        _record_event(
            "created",
            subscription,
            {name: [None, value] for name, value in _recorded_values(subscription).items() if value},
            caller,
            source,
        )
        if subscription.way == DeliveryWay.EMAIL:
            _require_confirmation(subscription, caller, source)
    return subscription, secret


def edit(
    pk: int,
    values: Mapping[str, Any],
    caller: Caller,
    source: EventSource = EventSource.API,
    *,
    generation: int | None = None,
) -> Subscription:
    """Change the fields in `values` of a subscription, record an event, wake its delivery job, and return the row.

    The row is locked meanwhile. A change also resets the failures and the back-off, so a paused subscription that is
    made active starts afresh. Without any change no event is recorded and nothing is reset; a `target` in `values`
    always counts as a change. A caller who changes the target, or any field if the owner is not known, becomes the
    owner. Raises RefusedError NOT_FOUND if the subscription does not exist, CONFLICT if `way` would change, if the
    caller would change the target and may not own it, or if too many requests to confirm an address were sent, INVALID
    if the values do not fit together, WRONG_STATE if it has ended and the caller is not its owner, or may not have it,
    and would change its standing.

    A new mail address that the same owner has not proven yet gets a request to confirm it. Raises
    ChangedMeanwhileError if anything would change, and the generation of the subscription is not `generation`.
    """
    with conductor.writing():
        row = _lock_subscription(pk)
        if "way" in values and values["way"] != row.way:
            raise RefusedError(
                RefusalReason.CONFLICT,
                "A subscription cannot change how it delivers messages: create another subscription.",
            )
        new_standing = values.get("standing", row.standing)
        if row.standing == SubscriptionStanding.ENDED != new_standing and not _is_rightful_owner(row, caller):
            raise RefusedError(
                RefusalReason.WRONG_STATE,
                "This subscription has ended: it can be handed over, deleted, or made active by its owner, if its owner"
                " may have it again.",
            )
        before, target_before = _recorded_values(row), row.target
        if any(getattr(row, name) != value for name, value in values.items()):
            generations.refuse_if_changed(f"The subscription {row.name}", row.generation, generation)
            row.generation += 1
        for name, value in values.items():
            setattr(row, name, value)
        validate_subscription(row, target_before)
        changes = {
            name: [before[name], value] for name, value in _recorded_values(row).items() if before[name] != value
        }
        if changes or before != _recorded_values(row) or "target" in values:
            row.failures, row.failing_since, row.retry_at = 0, None, database_clock.now()
            row.updated_at = database_clock.now()
            if row.standing != SubscriptionStanding.ENDED:
                row.last_error = ""  # otherwise it says why it has ended
            if not row.owner or row.target != target_before:
                _make_owner(row, caller, is_needed=row.target != target_before)
            if _is_rightful_owner(row, caller):
                row.owner_confirmed_at = row.updated_at
            if "scope" in changes:
                row.owner_check_at = row.updated_at
            row.save()
            _record_event("changed", row, changes, caller, source)
            if row.way == DeliveryWay.EMAIL and find_plain_form(row.target) != find_plain_form(target_before):
                _require_confirmation(row, caller, source)
    _enqueue_delivery_jobs(row.way)
    return row


def delete(pk: int, caller: Caller, source: EventSource = EventSource.API, *, generation: int | None = None) -> None:
    """Delete the subscription with its deliveries and record an event. Raises RefusedError NOT_FOUND if it does not
    exist, ChangedMeanwhileError if its generation is not `generation`.
    """
    with conductor.writing():
        row = _lock_subscription(pk)
        generations.refuse_if_changed(f"The subscription {row.name}", row.generation, generation)
        _record_event(
            "deleted",
            row,
            {name: [value, None] for name, value in _recorded_values(row).items() if value},
            caller,
            source,
        )
        row.delete()


def hand_over(
    pk: int,
    new_owner: str,
    reason: str,
    caller: Caller,
    source: EventSource = EventSource.API,
    target: str = "",
    *,
    generation: int | None = None,
) -> Subscription:
    """Give the subscription another owner, record an event, and return it. One that has ended is active again.

    `new_owner` names a person as `owners.find_owner` expects. Call it outside transactions: it may ask Keystone. A
    personal subscription then belongs to the new owner; messages in the inbox of the former owner stay there. A mail
    address that the new owner has not proven gets a request to confirm it. A personal webhook gets another secret, and
    needs a new URL as `target`, because its URL may hold a token of the former owner; other webhooks may get one.

    Raises RefusedError NOT_FOUND if the subscription does not exist, INVALID if the new owner may not have it, or if
    the target is missing or not allowed, UNAVAILABLE if the rights of the new owner cannot be checked, CONFLICT if the
    person is its owner already, or has `MAX_SUBSCRIPTIONS`, or if too many requests to confirm an address were sent;
    ChangedMeanwhileError if its generation is not `generation`.
    """
    row = Subscription.objects.filter(pk=pk).first()
    if row is None:
        raise RefusedError(RefusalReason.NOT_FOUND, "The subscription does not exist any more.")
    checked_scope = row.scope
    person = owners.find_owner(new_owner, row.project_id, checked_scope, caller)
    with conductor.writing():
        _lock_creation()
        row = _lock_subscription(pk)
        generations.refuse_if_changed(f"The subscription {row.name}", row.generation, generation)
        has_ended = row.standing == SubscriptionStanding.ENDED
        if row.scope != checked_scope:
            raise RefusedError(RefusalReason.CONFLICT, "The subscription was changed in this moment: try again.")
        if person.user_id == row.owner and not has_ended:
            raise RefusedError(RefusalReason.CONFLICT, "This person is the owner of this subscription already.")
        if row.personal and person.user_id != row.person:
            _check_count(row.project_id, person.user_id)
        changes = {"owner": [row.owner, person.user_id]}
        destination_before, target_before = row.destination, row.target
        _replace_target(row, person, target)
        if row.destination != destination_before:
            changes["target"] = [destination_before, row.destination]
        row.generation += 1
        row.owner, row.user = person.user_id, _owning_user(person)
        row.person = person.user_id if row.personal else ""
        row.owner_confirmed_at = row.owner_check_at = row.updated_at = row.retry_at = database_clock.now()
        row.owner_doubt = ""
        if has_ended:
            changes["standing"] = [row.standing, SubscriptionStanding.ACTIVE.value]
            row.standing, row.failures, row.failing_since, row.last_error = SubscriptionStanding.ACTIVE, 0, None, ""
        if row.target != target_before:
            validate_subscription(row)
        row.save()
        _record_event("handed_over", row, changes, caller, source, reason)
        if row.way == DeliveryWay.EMAIL:
            _require_confirmation(row, caller, source)
    _enqueue_delivery_jobs(row.way)
    return row


def _replace_target(row: Subscription, person: Caller, target: str) -> None:
    """Set the new target of a webhook that is handed over to this person. If it was another person's, replace its
    secret, too. Raises RefusedError INVALID if the target is needed and missing, or if the subscription is no webhook.
    """
    if target and row.way != DeliveryWay.WEBHOOK:
        raise RefusedError(RefusalReason.INVALID, "Only a webhook can get a new target when it is handed over.")
    if row.way == DeliveryWay.WEBHOOK and belongs_to_other_person(row, person):
        if not target:
            raise RefusedError(
                RefusalReason.INVALID,
                "This webhook is personal, and its URL may hold a token of its former owner: give a new target.",
            )
        row.secret = keyring.encrypt_secret(webhook.generate_secret())
    row.target = target or row.target


def _make_owner(row: Subscription, caller: Caller, is_needed: bool) -> None:
    """Make the caller the owner of the subscription, if the caller may own it. If not, raise RefusedError CONFLICT if
    it `is_needed`.
    """
    if owners.may_own(caller, row.project_id, row.scope):
        row.owner, row.user, row.owner_doubt = caller.user_id, _owning_user(caller), ""
        row.owner_check_at = database_clock.now()
    elif is_needed:
        raise RefusedError(
            RefusalReason.CONFLICT,
            "A person who changes the target becomes the owner, and needs the right to this subscription in the project"
            f" {row.project_id}: use a token of this project.",
        )


def _is_rightful_owner(row: Subscription, caller: Caller) -> bool:
    """Return whether the caller is the subscription's owner, and may have it now."""
    return caller.user_id == row.owner and owners.may_own(caller, row.project_id, row.scope)


def rotate_secret(
    pk: int, caller: Caller, source: EventSource = EventSource.API, *, generation: int | None = None
) -> tuple[Subscription, str]:
    """Give a webhook a new secret, valid from the next attempt on, and record an event. Return the subscription and the
    secret in plain text, which cannot be read again later.

    Raises RefusedError NOT_FOUND if it does not exist, WRONG_STATE if it is no webhook; ChangedMeanwhileError if its
    generation is not `generation`.
    """
    with conductor.writing():
        row = _lock_subscription(pk)
        generations.refuse_if_changed(f"The subscription {row.name}", row.generation, generation)
        if row.way != DeliveryWay.WEBHOOK:
            raise RefusedError(RefusalReason.WRONG_STATE, "Only webhooks have a secret.")
        secret = webhook.generate_secret()
        row.secret, row.updated_at = keyring.encrypt_secret(secret), database_clock.now()
        row.generation += 1
        row.save(update_fields=["secret", "updated_at", "generation"])
        _record_event("rotated", row, {}, caller, source)
    return row, secret


def queue_test_message(pk: int, caller: Caller, source: EventSource = EventSource.API) -> Delivery:
    """Queue a test message for the subscription, record an event, and return its delivery, which will show the outcome.

    The message does not wait for the subscription's back-off. In an inbox it is delivered at once.

    Raises RefusedError NOT_FOUND if the subscription does not exist, WRONG_STATE if it is not active, CONFLICT if a
    test is already waiting.
    """
    with conductor.writing():
        row = _lock_subscription(pk)
        if row.standing != SubscriptionStanding.ACTIVE:
            raise RefusedError(RefusalReason.WRONG_STATE, f"This subscription is {row.standing}: make it active first.")
        if row.is_unconfirmed:
            raise RefusedError(RefusalReason.WRONG_STATE, "The recipient has not confirmed this address yet.")
        waiting = row.deliveries.filter(kind=TEST_KIND, progress=DeliveryProgress.WAITING)
        if waiting.exists():
            raise RefusedError(
                RefusalReason.CONFLICT, "A test message is already under way: look at the subscription's deliveries."
            )
        message_data = {"subscription": str(row.uuid), "name": row.name, "by": caller.name}
        is_inbox = row.way == DeliveryWay.INBOX
        delivery = row.deliveries.create(
            kind=TEST_KIND,
            data=message_data,
            reader=row.person if is_inbox else "",
            progress=DeliveryProgress.DELIVERED if is_inbox else DeliveryProgress.WAITING,
            delivered_at=database_clock.now() if is_inbox else None,
        )
        Subscription.objects.filter(pk=pk).update(retry_at=database_clock.now())
        _record_event("tested", row, {}, caller, source)
    _enqueue_delivery_jobs(row.way)
    return Delivery.objects.select_related("subscription").get(pk=delivery.pk)


def replay_deliveries(deliveries: QuerySet[Delivery], caller: Caller, source: EventSource = EventSource.API) -> int:
    """Queue these messages again with the same ids, and record an event for each subscription. Return how many were
    queued. At most `MAX_REPLAYED` deliveries are considered; the rows are locked.

    Inbox messages, requests to confirm and deliveries that are still waiting are left out. Raises RefusedError
    WRONG_STATE if the subscription of one of the others is not active; then nothing is queued.
    """
    with conductor.writing():
        replayed = deliveries.exclude(subscription__way=DeliveryWay.INBOX).exclude(kind=CONFIRMATION_KIND)
        ids = list(replayed.values_list("pk", flat=True)[:MAX_REPLAYED])
        replayable = Delivery.objects.filter(pk__in=ids, reader="").exclude(progress=DeliveryProgress.WAITING)
        rows = list(replayable.select_related("subscription").select_for_update(of=("self",)).order_by("id"))
        inactive_subscription = next(
            (row.subscription for row in rows if row.subscription.standing != SubscriptionStanding.ACTIVE), None
        )
        if inactive_subscription is not None:
            raise RefusedError(
                RefusalReason.WRONG_STATE,
                f"The subscription {inactive_subscription.name} is {inactive_subscription.standing}:"
                " make it active first.",
            )
        now = database_clock.now()
        Delivery.objects.filter(pk__in=[row.pk for row in rows]).update(
            progress=DeliveryProgress.WAITING, attempts=0, next_at=now, created_at=now, last_error=""
        )
        for subscription in {row.subscription for row in rows}:
            changes = {"replayed": [None, sum(row.subscription == subscription for row in rows)]}
            _record_event("replayed", subscription, changes, caller, source)
    _enqueue_delivery_jobs(*{row.subscription.way for row in rows})
    return len(rows)


def resend_confirmation(pk: int, caller: Caller, source: EventSource = EventSource.API) -> Subscription:
    """Send the request to confirm the address again, record an event, and return the subscription.

    Raises RefusedError NOT_FOUND if it does not exist, WRONG_STATE if it is not active or waits for no confirmation,
    CONFLICT if too many requests to confirm were sent.
    """
    with conductor.writing():
        row = _lock_subscription(pk)
        if not row.is_unconfirmed or row.standing != SubscriptionStanding.ACTIVE:
            raise RefusedError(RefusalReason.WRONG_STATE, "This subscription is not waiting for confirmation.")
        _ask_recipient(row, caller, source)
    return row


def confirm_address(uuid: str, address: str) -> str:
    """Let the recipient confirm the address of the subscription with this uuid, and record an event. Return a sentence
    that describes the result to the recipient.
    """
    with conductor.writing():
        row, _ = _lock_mails(uuid, address)
        if row is None or row.standing != SubscriptionStanding.ACTIVE:
            return NO_MAILS
        if row.is_unconfirmed:
            row.confirmed_at = row.retry_at = row.updated_at = database_clock.now()
            row.save(update_fields=["confirmed_at", "retry_at", "updated_at"])
            _give_up_requests(row)
            _record_recipient_event("confirmed", row, {"confirmed": [False, True]})
    _enqueue_delivery_jobs(row.way)
    return f"The address {address} is confirmed. Each mail has a link that ends the mails."


def end_mails(uuid: str, address: str) -> str:
    """Let the recipient end the mails of the subscription with this uuid, and record an event. Return a sentence that
    describes the result to the recipient.

    The subscription is off, its waiting messages are given up, and its address has to be confirmed again: also in the
    other subscriptions of its owner, which would prove the address of a new one.
    """
    with conductor.writing():
        row, others = _lock_mails(uuid, address)
        if row is None or (row.is_unconfirmed and row.standing == SubscriptionStanding.OFF):
            return NO_MAILS
        changes = {
            "standing": [row.standing, SubscriptionStanding.OFF.value],
            "confirmed": [not row.is_unconfirmed, False],
        }
        row.confirmed_at = None
        if row.standing == SubscriptionStanding.ENDED:
            del changes["standing"]  # it stays ended, for the reason that it has
        else:
            row.standing, row.last_error = SubscriptionStanding.OFF, ENDED
        row.updated_at = database_clock.now()
        row.save(update_fields=["standing", "confirmed_at", "last_error", "updated_at"])
        _give_up_waiting(row.deliveries.all(), ENDED)
        _record_recipient_event("ended", row, changes)
        for other in others:
            if not other.is_unconfirmed:
                other.confirmed_at, other.updated_at = None, row.updated_at
                other.save(update_fields=["confirmed_at", "updated_at"])
                _record_recipient_event("unconfirmed", other, {"confirmed": [True, False]})
    return (
        f"No more mails of this subscription are sent to {address}. Its owner can send none to this address before you"
        " confirm it again."
    )


def find_mailbox(address: str) -> str:
    """Return the mailbox to which mail to this address goes: in lower case, and without the part after `+`."""
    local_part, _, domain = address.lower().rpartition("@")
    return f"{local_part.partition('+')[0]}@{domain}"


def _require_confirmation(row: Subscription, caller: Caller, source: EventSource) -> None:
    """Ask the recipient to confirm the new address, unless it is proven: the recipient has confirmed it in another
    subscription of the same owner. Call it inside `conductor.writing()`. Raises RefusedError as `_ask_recipient` does.
    """
    owned = Subscription.objects.filter(way=DeliveryWay.EMAIL, project_id=row.project_id, person=row.person)
    owned = owned.exclude(standing=SubscriptionStanding.ENDED)
    proven = owned.filter(confirmed_at__isnull=False).exclude(pk=row.pk).values_list("target", flat=True)
    if row.target not in map(find_plain_form, proven):
        _ask_recipient(row, caller, source)
        return
    row.confirmed_at = database_clock.now()
    row.save(update_fields=["confirmed_at"])
    _give_up_requests(row)


def _ask_recipient(row: Subscription, caller: Caller, source: EventSource) -> None:
    """Queue a request to confirm the address of the subscription, and record an event. Call it inside `writing()`.

    Until the recipient confirms, no other mail is sent. Raises RefusedError INVALID if CYBORG_PUBLIC_URL is not set,
    CONFLICT if this address got, or this user has sent, too many requests.
    """
    if not settings.KEYS.public_url:
        raise RefusedError(
            RefusalReason.INVALID,
            "The recipient has to confirm this address, and the link for it needs CYBORG_PUBLIC_URL: set that first.",
        )
    with connection.cursor() as cursor:  # the lock serializes requests, so that the limits hold
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_ASK_LOCK_ID])
    mailbox, now = find_mailbox(row.target), database_clock.now()
    of_address = ConfirmationRequest.objects.filter(address=mailbox)
    by_project = of_address.filter(project_id=row.project_id)
    by_user = ConfirmationRequest.objects.filter(asked_by=caller.user_id)
    for requests, days, limit, limited in (
        (by_project, 1, MAX_ASKED_OF_ADDRESS, "this address"),
        (by_project, 30, MAX_ASKED_OF_ADDRESS_IN_MONTH, "this address"),
        (of_address, 30, MAX_ASKED_BY_ALL_IN_MONTH, "this address"),
        (by_user, 1, MAX_ASKED_BY_USER, "your requests"),
    ):
        if requests.filter(asked_at__gt=now - timedelta(days=days)).count() >= limit:
            raise RefusedError(
                RefusalReason.CONFLICT,
                f"The limit for {limited} is {limit} requests to confirm in {days} day{'s'[: days > 1]}: try later.",
            )
    ConfirmationRequest.objects.create(
        address=mailbox, project_id=row.project_id, asked_by=caller.user_id, asked_at=now
    )
    _give_up_requests(row)
    row.confirmed_at, row.retry_at = None, now
    row.save(update_fields=["confirmed_at", "retry_at"])
    row.deliveries.create(kind=CONFIRMATION_KIND, data={"name": row.name, "by": caller.name})
    _record_event("asked", row, {}, caller, source)
    _enqueue_delivery_jobs(row.way)


def _give_up_requests(row: Subscription) -> None:
    """Give up the requests to confirm that are still waiting: a newer one, or the confirmation, replaces them."""
    _give_up_waiting(row.deliveries.filter(kind=CONFIRMATION_KIND), "It is not needed any more.")


def _give_up_waiting(deliveries: QuerySet[Delivery], reason: str) -> None:
    """Give up those of the deliveries that are waiting, and store why."""
    waiting = deliveries.filter(progress=DeliveryProgress.WAITING)
    waiting.update(progress=DeliveryProgress.GIVEN_UP, last_error=reason)


def _lock_mails(uuid: str, address: str) -> tuple[Subscription | None, list[Subscription]]:
    """Lock the mail subscription with this uuid and the others of its owner. Return it, and those of the others that
    have the same address. Instead of the first return None if it sends no mail to this address any more.

    `address` is in its plain form. The rows are locked in one order, so that links that are used at the same time cause
    no deadlock.
    """
    mails = Subscription.objects.filter(way=DeliveryWay.EMAIL)
    owner = mails.filter(uuid=uuid).values("project_id", "person").first() or {"pk": None}
    owned = mails.filter(**owner).select_for_update().order_by("pk")
    rows = [one for one in owned if find_plain_form(one.target) == address]
    row = next((one for one in rows if str(one.uuid) == uuid), None)
    return row, [one for one in rows if one is not row]


def _record_recipient_event(action: str, row: Subscription, changes: dict[str, Any]) -> None:
    """Record an event of the recipient, who has no account. Call it inside `conductor.writing()`."""
    subject = (row.uuid, row.name)
    conductor.record_event(
        f"subscription.{action}", EventSource.PERSON, row.target, subject=subject, changes=changes, reason=BY_LINK
    )


def inbox_of_person(person: str) -> QuerySet[Delivery]:
    """Return the deliveries in this person's inbox, of all projects; none for the id ''."""
    return Delivery.objects.filter(reader=person).exclude(reader="")


def inbox_in_project(caller: Caller, elevated: bool) -> QuerySet[Delivery]:
    """Return the caller's inbox messages that belong to subscriptions in the caller's project, because one user may
    have tokens of several projects.

    Messages of subscriptions to the whole cloud are included only if `elevated`: the rule
    `cyborg:subscription:elevated` must allow the caller.
    """
    rows = inbox_of_person(caller.user_id).filter(subscription__project_id=caller.project_id)
    return rows if elevated else rows.filter(subscription__scope=SubscriptionScope.PROJECT)


def mark_as_read(rows: QuerySet[Delivery], messages: Iterable[Any] | None = None) -> int:
    """Mark those of the inbox messages `rows` as read whose ids are in `messages`; all of them if it is None.

    Return how many of them were unread before. No event is recorded.
    """
    rows = rows.filter(read_at__isnull=True)
    if messages is not None:
        rows = rows.filter(message__in=list(messages))
    return rows.update(read_at=database_clock.now())


def validate_subscription(row: Subscription, stored_target: str | None = None) -> None:
    """Raise RefusedError INVALID, with the reason, if the fields of a subscription do not fit together.

    Checked are the kinds, the host filter, and whether the target fits the way and is allowed. No name is looked up. A
    mail address is brought into its plain form. A target that is stored already is checked only if the subscription is
    active, so that one which is not allowed any more can be switched off.
    """
    if not row.kinds or set(row.kinds) - set(NotificationKind):
        raise RefusedError(
            RefusalReason.INVALID,
            f"Select the kinds of messages that you want: one or more of {', '.join(NotificationKind)}.",
        )
    if row.host and (row.scope != SubscriptionScope.CLOUD or not HOST_GLOB.fullmatch(row.host)):
        raise RefusedError(
            RefusalReason.INVALID, "A host is a name, in which * and ? are wildcards, and needs the scope cloud."
        )
    if row.way == DeliveryWay.INBOX and row.target:
        raise RefusedError(RefusalReason.INVALID, "The inbox takes no target.")
    if row.target == stored_target and row.standing != SubscriptionStanding.ACTIVE:
        return
    if row.way == DeliveryWay.WEBHOOK:
        try:
            webhook.parse_webhook_url(row.target, allowed_destinations())
        except webhook.WebhookUrlError as refused:
            raise RefusedError(RefusalReason.INVALID, str(refused)) from None
    if row.way == DeliveryWay.EMAIL:
        row.target = _check_mail_target(row.target)


def _check_mail_target(address: str) -> str:
    """Return the address in its plain form. Raises RefusedError INVALID, with the reason, if this installation sends no
    mail, if `address` is no address that we accept, or if mail may not be sent to its domain.
    """
    if not settings.KEYS.mail_host:
        raise RefusedError(RefusalReason.INVALID, "This installation sends no mail: CYBORG_MAIL_HOST is not set.")
    try:
        return mail.check_mail_address(address)
    except MailAddressError as error:
        raise RefusedError(RefusalReason.INVALID, str(error)) from None


def _lock_creation() -> None:
    """Serialize this transaction with others that create or hand over subscriptions, so that the limit holds."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_advisory_xact_lock(%s)", [_CREATE_LOCK_ID])


def _check_count(project_id: str, person: str) -> None:
    """Raise RefusedError CONFLICT if the person, or the project if it is '', has `MAX_SUBSCRIPTIONS` in the project."""
    if Subscription.objects.filter(project_id=project_id, person=person).count() >= MAX_SUBSCRIPTIONS:
        raise RefusedError(
            RefusalReason.CONFLICT,
            f"There are already {MAX_SUBSCRIPTIONS} subscriptions, the largest number allowed: delete one first.",
        )


def _recorded_values(row: Subscription) -> dict[str, Any]:
    """Return the fields of RECORDED_FIELDS as events record them. A webhook's URL may hold a token, so it is shortened
    to `Subscription.destination`.
    """
    values = {name: getattr(row, name) for name in RECORDED_FIELDS} | {"kinds": ", ".join(row.kinds)}
    return values | {"target": row.destination if row.way != DeliveryWay.INBOX else ""}


def _lock_subscription(pk: int) -> Subscription:
    """Lock a subscription's row and return it. Raises RefusedError NOT_FOUND if it does not exist any more."""
    subscription = Subscription.objects.select_for_update().filter(pk=pk).first()
    if subscription is None:
        raise RefusedError(RefusalReason.NOT_FOUND, "The subscription does not exist any more.")
    return subscription


def _owning_user(caller: Caller) -> User | None:
    """Return the caller's Django user, whose deletion ends the subscription; None if there is none, for example for a
    caller that is known to Keystone alone.
    """
    if get_keys().auth == "keystone":
        return User.objects.filter(keystone__keystone_id=caller.user_id).first()
    return User.objects.filter(pk=int(caller.user_id)).first() if caller.user_id.isdecimal() else None


def _record_event(
    action: str, row: Subscription, changes: dict[str, Any], caller: Caller, source: EventSource, reason: str = ""
) -> None:
    """Record the event `subscription.<action>` of the caller. Call it inside `conductor.writing()`."""
    subject = (row.uuid, row.name)
    conductor.record_event(
        f"subscription.{action}", source, caller.name, subject=subject, changes=changes, reason=reason
    )


def _enqueue_delivery_jobs(*ways: str) -> None:
    """After the commit, wake the job that delivers messages in each of these ways. The inbox has no job."""
    for job in [JOB_BY_WAY[way] for way in ways if way in JOB_BY_WAY]:
        call_after_commit(jobs.enqueue_job, job)
