"""The job `owners`: end subscriptions whose owner has left, or may not have them any more. Find a new owner's rights.

The owner of a subscription is the person who created it, or to whom it was handed over; the subscription may belong to
the owner or to the project. It needs what is needed to create it: the policy rule `cyborg:subscription:create` in its
project, and for the scope cloud also `cyborg:subscription:elevated`.

Without Keystone these rights come from the owner's groups and API tokens, and `end_lost_by_users` checks them before
messages are written or sent. With Keystone, a login tells the roles of one project, and the job asks for the others
with the service user. No answer of Keystone ends nothing. If Keystone refuses to answer, or cannot know the roles, a
subscription ends when no login has confirmed its owner for CYBORG_SUBSCRIPTION_OWNER_DAYS days.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

from django.contrib.auth import get_user_model
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import DurationField, ExpressionWrapper, F, QuerySet, Value
from django.db.models.functions import Greatest, Least, Now
from django.db.models.signals import post_save, pre_delete
from django.dispatch import receiver

from accelerators import conductor
from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource
from accelerators.runtime import database_clock, jobs
from cyborgweb.auth import keystone, policy, roles
from cyborgweb.auth.login import roles_confirmed
from cyborgweb.auth.token_cache import TokenCheckUnavailableError
from cyborgweb.models import KeystoneUser
from cyborgweb.models.event_types import DeliveryProgress, SubscriptionScope, SubscriptionStanding
from cyborgweb.models.notify import Subscription
from cyborgweb.settings.keys import get_keys

log = logging.getLogger(__name__)

JOB_NAME = "owners"
CHECK_INTERVAL_S, RETRY_S = 900, 60
"""Seconds until Keystone is asked about an owner again, and the fewest until it is asked again after no answer."""
RETRY_PART = 10
"""After no answer, the pause is this part of the time since the owner was confirmed, so that pauses grow."""
MAX_RUN_S, MAX_OWNERS = 20.0, 500
"""Seconds after which a run asks Keystone about no further owner, and the most owners about whom one run asks."""
MAX_FAILURES = 3
"""Failures of Keystone itself in one run, after which it is asked about no others in this run."""
_UNCONFIRMED_FOR = ExpressionWrapper((Now() - F("owner_confirmed_at")) / RETRY_PART, DurationField())
PAUSE = Least(Greatest(_UNCONFIRMED_FOR, Value(timedelta(seconds=RETRY_S))), Value(timedelta(seconds=CHECK_INTERVAL_S)))
NO_OWNER = "It is not known who created it."
FEDERATED = "Keystone learns the roles of its owner, a federated user, only at a login."


def may_own(caller: Caller, project_id: str, scope: str) -> bool:
    """Return whether this caller may have a subscription with this scope in this project. Without Keystone,
    administrators may have them in every project. With Keystone, only roles in the same project count: those are what
    the job asks for.
    """
    if caller.project_id != project_id and not (caller.is_admin and get_keys().auth != "keystone"):
        return False
    in_project = replace(caller, project_id=project_id)
    needed = ["cyborg:subscription:create"]
    needed += ["cyborg:subscription:elevated"] if scope == SubscriptionScope.CLOUD else []
    return all(policy.is_allowed(in_project, rule) for rule in needed)


def run() -> None:
    """Run the job `owners`: check the rights of local users, then ask Keystone about the owners that are due."""
    jobs.clear_tick(JOB_NAME)
    with jobs.try_connection_lock(JOB_NAME) as has_lock:
        if has_lock:
            end_lost_by_users()
            if get_keys().auth == "keystone":
                ask_keystone()


def end_lost_by_users() -> None:
    """End the subscriptions of users that are not active; without Keystone, also those that their owner's groups and
    API tokens do not allow. Costs three statements if there is nothing to end.
    """
    if not policy.has_rules():
        return  # the policy file is broken: nobody's rights are known
    needed = Subscription.objects.exclude(standing=SubscriptionStanding.ENDED).filter(user__isnull=False)
    with_keystone = get_keys().auth == "keystone"
    if with_keystone:
        needed = needed.filter(user__is_active=False)
    needed_by_user: dict[int, set[tuple[str, str]]] = {}
    for user_id, project_id, scope in needed.order_by().values_list("user_id", "project_id", "scope").distinct():
        needed_by_user.setdefault(user_id, set()).add((project_id, scope))
    for user in _load_users(User.objects.filter(pk__in=needed_by_user)):
        callers = [] if with_keystone else _list_local_callers(user)
        for project_id, scope in sorted(needed_by_user[user.pk]):
            if not any(may_own(caller, project_id, scope) for caller in callers):
                rows = Subscription.objects.filter(user=user, project_id=project_id, scope=scope)
                end(rows, _explain_loss(user, project_id, scope), JOB_NAME)


def _explain_loss(user: User, project_id: str, scope: str) -> str:
    """Return why the user may not have subscriptions with this scope in this project."""
    if not user.is_active:
        return f"Its owner {user.get_username()} was deactivated."
    return _explain_missing_right(user.get_username(), project_id, scope)


def _explain_missing_right(name: str, project_id: str, scope: str) -> str:
    """Return that a person of this name lacks the right to subscriptions with this scope in this project."""
    covered = "the whole cloud" if scope == SubscriptionScope.CLOUD else f"the project {project_id}"
    return f"Its owner {name} has lost the right to subscriptions to {covered}."


def _load_users(users: QuerySet[User]) -> Iterable[User]:
    """Load these users with their groups and API tokens, with three statements."""
    for user in users.prefetch_related("groups", "api_tokens"):
        group_names = sorted(group.name for group in user.groups.all())
        vars(user)["group_names"] = group_names  # `roles.get_group_names` reads it
        yield user


def _list_local_callers(user: User) -> list[Caller]:
    """Return a local user as the callers that the user can be: in the console, and with each API token; none if the
    user is not active.
    """
    if not user.is_active:
        return []
    session_caller = roles.get_session_caller(user, {})
    tokens: Any = getattr(user, "api_tokens")  # noqa: B009 - the stubs of Django's user lack it
    by_token = [Caller(one.name, str(user.pk), frozenset(one.roles), one.project_id) for one in tokens.all()]
    return [*([session_caller] if session_caller else []), *by_token]


def end(rows: QuerySet[Subscription], reason: str, actor: str) -> int:
    """End those of the subscriptions that have not ended, give up their waiting messages, and record an event for each.
    Return how many were ended. The rows are locked.
    """
    with conductor.writing():
        locked = rows.exclude(standing=SubscriptionStanding.ENDED).select_for_update(of=("self",)).order_by("pk")
        ended = list(locked)
        for row in ended:
            changes = {"standing": [row.standing, SubscriptionStanding.ENDED.value]}
            row.standing, row.last_error, row.updated_at = SubscriptionStanding.ENDED, reason, database_clock.now()
            row.save(update_fields=["standing", "last_error", "updated_at"])
            waiting = row.deliveries.filter(progress=DeliveryProgress.WAITING)
            waiting.update(progress=DeliveryProgress.GIVEN_UP, last_error=reason)
            subject = (row.uuid, row.name)
            conductor.record_event(
                "subscription.ended", EventSource.SYSTEM, actor, subject=subject, changes=changes, reason=reason
            )
    return len(ended)


@receiver(pre_delete, sender=get_user_model())
def _end_with_user(sender: Any, instance: User, **_: Any) -> None:
    """End the subscriptions of a user that is being deleted, in the transaction of the deletion."""
    end(Subscription.objects.filter(user=instance), f"Its owner {instance.get_username()} was deleted.", "users")


@receiver(roles_confirmed)
def _note_login(sender: Any, caller: Caller, **_: Any) -> None:
    """After Keystone has told a person's roles in one project, confirm the person's subscriptions in this project, and
    end those that these roles do not allow. Subscriptions in other projects stay as they are.
    """
    if policy.has_rules():
        with transaction.atomic():  # if it fails, the login goes on
            _settle_rights(caller, caller.project_id, "Keystone")


@receiver(post_save, sender=KeystoneUser)
def _link_user(sender: Any, instance: KeystoneUser, created: bool, **_: Any) -> None:
    """Give a person's subscriptions the user that was just made for the person, whose end is also theirs."""
    if created:
        Subscription.objects.filter(owner=instance.keystone_id, user=None).update(user=instance.user_id)


def _settle_rights(caller: Caller, project_id: str, actor: str, ends: bool = True) -> bool:
    """Confirm the caller's subscriptions in this project that these rights allow, and end the others. Return whether
    all are allowed. Without `ends` none is ended.
    """
    rows = Subscription.objects.filter(owner=caller.user_id, project_id=project_id)
    rows = rows.exclude(standing=SubscriptionStanding.ENDED)
    all_allowed = True
    for scope in SubscriptionScope:
        of_scope = rows.filter(scope=scope)
        if may_own(caller, project_id, scope):
            next_check = Now() + timedelta(seconds=CHECK_INTERVAL_S)
            with transaction.atomic():  # in one order, so that this and the storing of outcomes do not deadlock
                confirmed = list(of_scope.select_for_update().order_by("pk").values_list("pk", flat=True))
                Subscription.objects.filter(pk__in=confirmed).update(
                    owner_confirmed_at=Now(), owner_check_at=next_check, owner_doubt=""
                )
        elif of_scope.exists():
            all_allowed = False
            if ends:
                end(of_scope, _explain_missing_right(caller.name, project_id, scope), actor)
    return all_allowed


def ask_keystone() -> None:
    """Ask Keystone about the owners that are due, with no transaction open, and end what they may not have any more.

    The longest due come first. It asks about no further owner after `MAX_RUN_S` seconds, or if Keystone itself has
    failed `MAX_FAILURES` times; the next run goes on. An owner about whom Keystone gives no answer waits, at first for
    `RETRY_S` seconds and later longer, and nothing is ended.
    """
    if not policy.has_rules():
        return
    deadline, failures = time.monotonic() + MAX_RUN_S, 0
    rows = Subscription.objects.exclude(standing=SubscriptionStanding.ENDED)
    due = rows.filter(owner_check_at__lte=Now())
    _doubt(due.filter(owner=""), NO_OWNER)
    owners = due.exclude(owner="").order_by("owner_check_at", "pk").values_list("owner", "project_id")
    is_usable = functools.cache(keystone.is_project_enabled)
    unanswered: set[str] = set()
    for owner, project_id in dict.fromkeys(owners[:MAX_OWNERS]):
        if time.monotonic() > deadline or failures >= MAX_FAILURES:
            return
        if owner in unanswered:
            continue
        try:
            _ask_about(owner, project_id, is_usable)
        except keystone.ListingNotAllowedError as error:
            _doubt(rows.filter(owner=owner, project_id=project_id), str(error))
        except TokenCheckUnavailableError as error:
            log.warning("the owner %s of subscriptions could not be checked: %s", owner, error.reason)
            failures += not isinstance(error, keystone.NoAnswerAboutOneError)
            unanswered.add(owner)
            due.filter(owner=owner).update(owner_check_at=Now() + PAUSE)


def _ask_about(owner: str, project_id: str, is_usable: Callable[[str], bool]) -> None:
    """Ask Keystone about an owner's rights in this project, and store what follows. `is_usable` tells whether a project
    is enabled. Raises ListingNotAllowedError and TokenCheckUnavailableError.
    """
    account = keystone.find_account(owner)
    of_owner = Subscription.objects.filter(owner=owner)
    if account is None:
        end(of_owner, f"Keystone has no user with the id {owner} any more.", "Keystone")
        return
    if not account.is_enabled:
        end(of_owner, f"Its owner {account.name} is disabled in Keystone.", "Keystone")
        return
    caller = Caller(account.name, owner, keystone.list_roles(owner, project_id), project_id)
    if not is_usable(project_id):
        end(of_owner.filter(project_id=project_id), f"The project {project_id} is disabled in Keystone.", "Keystone")
        return
    if not _settle_rights(caller, project_id, "Keystone", ends=not account.is_federated):
        _doubt(of_owner.filter(project_id=project_id, owner_check_at__lte=Now()), FEDERATED)


def _doubt(rows: QuerySet[Subscription], doubt: str) -> None:
    """Store why the rights of the owner of these subscriptions are not known, and log it once. End those that nobody
    has confirmed for CYBORG_SUBSCRIPTION_OWNER_DAYS days.
    """
    rows = rows.exclude(standing=SubscriptionStanding.ENDED)
    days = get_keys().subscription_owner_days
    is_known = Subscription.objects.filter(owner_doubt=doubt).exists()
    unconfirmed = rows.filter(owner_confirmed_at__lt=Now() - timedelta(days=days))
    end(unconfirmed, f"The rights of its owner were not confirmed for {days} days. {doubt}", "Keystone")
    changed = rows.update(owner_doubt=doubt, owner_check_at=Now() + timedelta(seconds=CHECK_INTERVAL_S))
    if changed and not is_known:
        log.warning(
            "The rights of owners of subscriptions are not known: %s They end after %d days without a login.",
            doubt,
            days,
        )


def find_owner(named: str, project_id: str, scope: str, caller: Caller) -> Caller:
    """Return the person to whom `caller` hands over a subscription with this scope in this project.

    `named` is an id, or without Keystone also a user's name, which comes first. Callers of the same project who name
    themselves need nothing but the rights that they have now; without Keystone, also administrators of another project.
    Others are looked up in the database, or by a request to Keystone: call it outside transactions.
    Raises RefusedError INVALID if there is no such person, or if the person may not have the subscription, UNAVAILABLE
    if Keystone does not tell.
    """
    with_keystone = get_keys().auth == "keystone"
    if with_keystone:
        is_known = named == caller.user_id and project_id == caller.project_id
        found = [caller] if is_known else _find_in_keystone(named, project_id)
    else:
        users = User.objects.filter(username=named)
        if not users.exists() and named.isdecimal() and len(named) < 10:
            users = User.objects.filter(pk=int(named))
        found = [one for user in _load_users(users) for one in _list_local_callers(user)]
        if named == caller.user_id and not users.exists():
            found = [caller]
    for one in found:
        if may_own(one, project_id, scope):
            return replace(one, project_id=project_id)
    raise RefusedError(
        RefusalReason.INVALID,
        f"There is no active user {named} who may have this subscription: the new owner must be allowed to create it in"
        f" the project {project_id}{' for the whole cloud' if scope == SubscriptionScope.CLOUD else ''}."
        + (" Roles in other projects, also admin, do not count." if with_keystone else ""),
    )


def _find_in_keystone(user_id: str, project_id: str) -> list[Caller]:
    """Return the person with this id in Keystone, with the roles in this project; none if there is no such person, or
    the account is disabled. Raises RefusedError UNAVAILABLE if Keystone does not tell.
    """
    try:
        account = keystone.find_account(user_id)
        if account is None or not account.is_enabled:
            return []
        if not keystone.is_project_enabled(project_id):
            return []
        return [Caller(account.name, user_id, keystone.list_roles(user_id, project_id), project_id)]
    except (keystone.ListingNotAllowedError, TokenCheckUnavailableError) as error:
        raise RefusedError(
            RefusalReason.UNAVAILABLE,
            f"The rights of the new owner cannot be checked: {error} The new owner can take the subscription over with"
            f" a token of the project {project_id}, if that is a manager of the project or an administrator.",
        ) from None
