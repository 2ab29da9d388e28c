"""Decide which key may connect for a host: revocation, bars against clones, key rotation.

Each decision is recorded as an event and, except for a completed rotation, announced on `TOPIC`. A gateway that gets
the notification reads the changed rows (`read_agent_changes`) at once. It also reads them every few seconds, so that a
lost notification delays a decision only a little.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from uuid import UUID

from django.db import IntegrityError, transaction
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.db.models.functions import Now

from accelerators import conductor
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource
from accelerators.models import Host
from accelerators.runtime import pubsub
from accelerators.runtime.after_commit import call_after_commit
from agents.models import Agent, BarKind, JoinToken

TOPIC = "agents"
"""Notifications that agent rows have changed; the detail is the host's id."""
MAX_REASON_CHARS = 500


@dataclass(frozen=True, slots=True)
class AgentChange:
    """An agent whose row has changed.

    `barred` is a `BarKind`, '' if the agent may connect; `reason` is that of the bar. `connection_number`, `epoch`,
    `boot_id` and `address` describe its newest connection.
    """

    host_id: int
    public_key: str
    barred: str
    reason: str
    rotation_requested: bool
    connection_number: int
    epoch: int
    boot_id: str
    address: str


@dataclass(frozen=True, slots=True)
class ConnectionIdentity:
    """Identifies a connection when two connections use the same key: the client's address, its boot id ('' if it has
    not sent Hello) and its epoch."""

    address: str
    boot_id: str
    epoch: int


def read_agent_changes(seconds: float) -> list[AgentChange]:
    """Return the agents whose row changed in the last `seconds`, by the database's clock. Costs one statement."""
    changed = Agent.objects.filter(changed_at__gt=Now() - timedelta(seconds=seconds)).order_by()
    rotation_requested = ExpressionWrapper(Q(rotate_asked_at__isnull=False), BooleanField())
    trust_columns = "host", "public_key", "barred", "barred_reason", rotation_requested
    rows = changed.values_list(*trust_columns, "connection", "epoch", "boot_id", "address")
    return [AgentChange(*row) for row in rows]


def find_agent(host: str | UUID) -> Agent:
    """Return the agent of a host, given the host's name or uuid; the row is not locked.

    Raise RefusedError NOT_FOUND if there is none.
    """
    criteria = {"host__uuid": host} if isinstance(host, UUID) else {"host__name": host}
    agent = Agent.objects.select_related("host").filter(**criteria).first()
    if agent is None:
        raise RefusedError(
            RefusalReason.NOT_FOUND, f"no agent has joined for host {host}: `manage.py agents` lists those that did"
        )
    return agent


def revoke_agent(agent: Agent, by: str, reason: str, source: EventSource = EventSource.PERSON) -> bool:
    """Revoke an agent: bar its key, record an event, and notify the gateways, which end its connections.

    Return False, and change nothing, if it is revoked already. Its row is locked and read again; raise RefusedError
    NOT_FOUND if it is gone. The host's open join tokens expire. The host can come back only with a new join token and a
    new key. Reports that were acknowledged before are still merged.
    """
    with conductor.writing():
        row = _lock_agent(agent.host_id)
        if row.barred == BarKind.REVOKED:
            return False
        _bar_agent(row, BarKind.REVOKED, reason or f"by {by}")
        _record_event(row.host, "agent.revoked", source, by, {"barred": [row.barred or None, "revoked"]}, reason)
    pubsub.publish(TOPIC, str(row.host_id))
    return True


def revoke_host(host: Host, by: str, reason: str, source: EventSource) -> None:
    """Revoke the agent of a host that is removed, if it has one, and expire the host's open join tokens.

    No token is made for a host that is being removed (`authentication.create_join_token`), so none outlives the removal
    that calls this after it has marked the host. Call it in a transaction that has not locked the host yet: an
    enrolment locks the tokens before the host.
    """
    agent = Agent.objects.filter(host=host).first()
    if agent is not None:
        revoke_agent(agent, by, reason, source)
    _expire_tokens(JoinToken.objects.filter(host_name=host.name))


def lift_clone_bar(agent: Agent, by: str, source: EventSource = EventSource.PERSON) -> bool:
    """Lift the bar of an agent that was barred as a clone; return False if it is not barred.

    Its row is locked and read again. An event is recorded, and the gateways are notified. Raise RefusedError: CONFLICT
    if it was revoked, NOT_FOUND if it is gone.
    """
    with conductor.writing():
        row = _lock_agent(agent.host_id)
        if row.barred == BarKind.REVOKED:
            remedy = f"make a token with `manage.py join_token {row.host}`"
            raise RefusedError(
                RefusalReason.CONFLICT, f"the agent of {row.host} was revoked, and its key stays barred: {remedy}"
            )
        if not row.barred:
            return False
        Agent.objects.filter(pk=row.pk).update(barred="", barred_reason="", changed_at=Now())
        _record_event(row.host, "agent.admitted", source, by, {"barred": [row.barred, None]}, "")
    pubsub.publish(TOPIC, str(row.host_id))
    return True


def request_key_rotation(agent: Agent, by: str, source: EventSource = EventSource.PERSON) -> bool:
    """Ask an agent for a new key, now or when it connects next; the request is stored until the agent has sent a key.

    Return False, and change nothing, if it has been asked already. Its row is locked and read again. An event is
    recorded, and the gateways are notified. Raise RefusedError: CONFLICT while it is barred, NOT_FOUND if it is gone.
    """
    with conductor.writing():
        row = _lock_agent(agent.host_id)
        if row.barred:
            remedy = f"make a token with `manage.py join_token {row.host}`"
            raise RefusedError(
                RefusalReason.CONFLICT, f"the agent of {row.host} may not connect ({row.barred}): {remedy}"
            )
        if row.rotate_asked_at is not None:
            return False
        Agent.objects.filter(pk=row.pk).update(rotate_asked_at=Now(), changed_at=Now())
        _record_event(row.host, "agent.rotation", source, by, {}, "a new key was asked for")
    pubsub.publish(TOPIC, str(row.host_id))
    return True


def replace_key(host_id: int, old_key: str, new_key: str) -> None:
    """Replace a host's key `old_key` by `new_key`, in one transaction; do nothing if that is done already.

    The caller must have checked the agent's proof that it has both keys. The agent's row is locked. Tokens bound to the
    old key expire, and an event is recorded. Raise RefusedError: CONFLICT if `old_key` is not the host's key any more,
    if the agent is barred, or if another host uses `new_key`; NOT_FOUND if the host has no agent.
    """
    with conductor.writing():
        row = _lock_agent(host_id)
        if row.public_key == new_key and not row.barred:
            return
        if row.public_key != old_key or row.barred:
            raise RefusedError(RefusalReason.CONFLICT, "this key is barred or replaced and cannot be rotated")
        try:
            with transaction.atomic():
                Agent.objects.filter(pk=row.pk).update(
                    public_key=new_key, key_since=Now(), rotate_asked_at=None, changed_at=Now()
                )
        except IntegrityError:
            raise RefusedError(RefusalReason.CONFLICT, "the new key is in use by another host") from None
        _expire_tokens(JoinToken.objects.filter(host_name=row.host.name, public_key=old_key))
        _record_event(
            row.host, "agent.rotated", EventSource.AGENT, row.host.name, {"public_key": [old_key, new_key]}, "asked for"
        )


def bar_cloned_key(host_id: int, key: str, first: ConnectionIdentity, second: ConnectionIdentity) -> None:
    """Bar a key that two live connections use, until a person decides. Do nothing if it is barred or replaced.

    The agent's row is locked. All join tokens of the host expire, an event is recorded, and the gateways are notified.
    Raise RefusedError NOT_FOUND if the host has no agent.
    """
    with conductor.writing():
        row = _lock_agent(host_id)
        if row.public_key != key or row.barred:
            return
        reason = describe_both(first, second)
        _bar_agent(row, BarKind.CLONE, reason)
        changes = {
            "barred": [None, "clone"],
            "address": [first.address, second.address],
            "boot_id": [first.boot_id, second.boot_id],
            "epoch": [first.epoch, second.epoch],
        }
        _record_event(row.host, "agent.clone", EventSource.SYSTEM, "gateway", changes, reason)
        call_after_commit(pubsub.publish, TOPIC, str(host_id))  # a failure of it must not have the bar repeated


def describe_both(first: ConnectionIdentity, second: ConnectionIdentity) -> str:
    """Return the reason why an agent is barred as a clone: a text with the addresses of the two connections."""
    return f"{first.address} and {second.address} at the same time"


def explain_bar(barred: str, reason: str, host: str) -> str:
    """Return the sentence for a barred agent: why it is barred, and how an operator lets the host join again.

    `barred` is a `BarKind`, `reason` the stored reason of the bar. If `host` is '', the sentence does not name
    it.
    """
    argument = host or "HOST"
    make_token = f"make a token with `manage.py join_token {argument}`"
    if barred == BarKind.CLONE:
        remedy = f"find out which one is right, then {make_token}, or run `manage.py agents --admit {argument}`"
        return f"two machines use {f'the key of {host}' if host else 'its key'} ({reason}): {remedy}"
    return f"{f'the agent of {host}' if host else 'its agent'} was revoked ({reason}): to have it back, {make_token}"


def _lock_agent(host_id: int) -> Agent:
    """Lock the host's open join tokens and its agent, and return the agent; raise RefusedError NOT_FOUND if there is
    none.

    The tokens are locked so that nobody joins meanwhile. They are locked first, in the same order as at an enrolment.
    """
    host = Host.objects.filter(pk=host_id).first()
    list(JoinToken.objects.select_for_update().filter(host_name=host and host.name, expires_at__gt=Now()))
    row = Agent.objects.select_for_update(of=("self",)).select_related("host").filter(host_id=host_id).first()
    if row is None:
        raise RefusedError(RefusalReason.NOT_FOUND, f"no agent has joined for host {host or host_id}")
    return row


def _bar_agent(row: Agent, kind: BarKind, reason: str) -> None:
    """Bar an agent whose row the caller has locked, and expire all join tokens of its host. A requested new key is
    cancelled."""
    Agent.objects.filter(pk=row.pk).update(
        barred=kind, barred_reason=reason[:MAX_REASON_CHARS], rotate_asked_at=None, changed_at=Now()
    )
    _expire_tokens(JoinToken.objects.filter(host_name=row.host.name))


def _expire_tokens(tokens: QuerySet[JoinToken]) -> None:
    """Set the expiry of these tokens to now, except for tokens that have expired already."""
    tokens.filter(expires_at__gt=Now()).update(expires_at=Now())


def _record_event(
    host: Host, action: str, source: EventSource, by: str, changes: dict[str, object], reason: str
) -> None:
    """Record an event about a host's agent, done by `by`."""
    conductor.record_event(action, source, by, host=host, changes=changes, reason=reason)
