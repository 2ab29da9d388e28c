"""Who may go on speaking for a host: revocation, bars against clones, new keys. Each is an event and a ring of the hub.

People decide through commands, console and API; the gateway's writer thread calls `bar_clone`, `rotate` and `news`. A
gateway that hears the ring looks at once; one that missed it looks every few seconds, so no decision waits for long.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

from django.db import IntegrityError, connection, transaction
from django.db.models import QuerySet
from django.db.models.functions import Now

from accelerators import conductor
from accelerators.domain.errors import Reason, Refused
from accelerators.domain.states import Source
from accelerators.models import Host
from accelerators.runtime import pubsub
from agents.models import Agent, Bar, JoinToken

TOPIC = "agents"
MAX_REASON = 500
NEWS = """SELECT host_id, public_key, barred, barred_reason, rotate_asked_at IS NOT NULL, connection, epoch, boot_id,
  address
FROM agents_agent WHERE changed_at > now() - make_interval(secs => %s)
"""


@dataclass(frozen=True, slots=True)
class News:
    """An agent whose row changed lately. `number`, `epoch`, `boot_id`, `address` are its newest connection's."""

    host_id: int
    public_key: str
    barred: str
    reason: str
    rotate: bool
    number: int
    epoch: int
    boot_id: str
    address: str


@dataclass(frozen=True, slots=True)
class Connection:
    """One of two that hold the same key."""

    address: str
    boot_id: str
    epoch: int


def news(seconds: float) -> list[News]:
    """Agents whose row changed in the last `seconds` of the database's clock; one statement."""
    with connection.cursor() as cursor:
        cursor.execute(NEWS, [seconds])
        return [News(*row) for row in cursor.fetchall()]


def find(host: str | UUID) -> Agent:
    """The agent of a host, named by its name or uuid. Raises Refused UNKNOWN with how to begin."""
    which = {"host__uuid": host} if isinstance(host, UUID) else {"host__name": host}
    agent = Agent.objects.select_related("host").filter(**which).first()
    if agent is None:
        raise Refused(Reason.UNKNOWN, f"no agent has joined for host {host}: `manage.py agents` lists those that did")
    return agent


def revoke(agent: Agent, by: str, reason: str, source: Source = Source.PERSON) -> bool:
    """End its connections and let it in no more; False when it is revoked already. Only a new join token, and with it
    a new key, brings the host back. What it was acknowledged before is merged."""
    with conductor.writing():
        row = _locked(agent.host_id)
        if row.barred == Bar.REVOKED:
            return False
        _bar(row, Bar.REVOKED, reason or f"by {by}")
        _record(row.host, "agent.revoked", source, by, {"barred": [row.barred or None, "revoked"]}, reason)
    pubsub.ring(TOPIC, str(row.host_id))
    return True


def admit(agent: Agent, by: str, source: Source = Source.PERSON) -> bool:
    """Let an agent in again that was taken for a clone; False when it is not barred.

    Raises Refused CONFLICT for one that was revoked.
    """
    with conductor.writing():
        row = _locked(agent.host_id)
        if row.barred == Bar.REVOKED:
            again = f"make a token with `manage.py join_token {row.host}`"
            raise Refused(Reason.CONFLICT, f"the agent of {row.host} was revoked, and its key stays out: {again}")
        if not row.barred:
            return False
        Agent.objects.filter(pk=row.pk).update(barred="", barred_reason="", changed_at=Now())
        _record(row.host, "agent.admitted", source, by, {"barred": [row.barred, None]}, "")
    pubsub.ring(TOPIC, str(row.host_id))
    return True


def ask_rotation(agent: Agent, by: str, source: Source = Source.PERSON) -> None:
    """Have it make a new key as soon as it is connected. Raises Refused CONFLICT while it is barred."""
    with conductor.writing():
        row = _locked(agent.host_id)
        if row.barred:
            again = f"make a token with `manage.py join_token {row.host}`"
            raise Refused(Reason.CONFLICT, f"the agent of {row.host} may not connect ({row.barred}): {again}")
        Agent.objects.filter(pk=row.pk).update(rotate_asked_at=Now(), changed_at=Now())
        _record(row.host, "agent.rotation", source, by, {}, "a new key was asked for")
    pubsub.ring(TOPIC, str(row.host_id))


def rotate(host_id: int, old: str, new: str) -> None:
    """Take over a key that its agent has proved to hold, in one transaction; said again, it is done already.

    Raises Refused CONFLICT when `old` is not the host's key (any more), or `new` is another's.
    """
    with conductor.writing():
        row = _locked(host_id)
        if row.public_key == new and not row.barred:
            return
        if row.public_key != old or row.barred:
            raise Refused(Reason.CONFLICT, "this key may not name its successor any more")
        try:
            with transaction.atomic():
                Agent.objects.filter(pk=row.pk).update(
                    public_key=new, key_since=Now(), rotate_asked_at=None, changed_at=Now()
                )
        except IntegrityError:
            raise Refused(Reason.CONFLICT, "the new key is in use by another host") from None
        _expire(JoinToken.objects.filter(host_name=row.host.name, public_key=old))
        _record(row.host, "agent.rotated", Source.AGENT, row.host.name, {"public_key": [old, new]}, "asked for")


def bar_clone(host_id: int, key: str, first: Connection, second: Connection) -> None:
    """Two live connections hold one key: neither is let in until a person decides. Once; later calls change nothing."""
    with conductor.writing():
        row = _locked(host_id)
        if row.public_key != key or row.barred:
            return
        reason = both(first, second)
        _bar(row, Bar.CLONE, reason)
        changes = {
            "barred": [None, "clone"],
            "address": [first.address, second.address],
            "boot_id": [first.boot_id, second.boot_id],
            "epoch": [first.epoch, second.epoch],
        }
        _record(row.host, "agent.clone", Source.SYSTEM, "gateway", changes, reason)
    pubsub.ring(TOPIC, str(host_id))


def both(first: Connection, second: Connection) -> str:
    """Who the two are."""
    return f"{first.address} and {second.address} at the same time"


def why(barred: str, reason: str, host: str) -> str:
    """One sentence for a barred agent, with what lifts the bar."""
    token = f"make a token with `manage.py join_token {host}`"
    if barred == Bar.CLONE:
        decide = f"see which is right, then {token}, or run `manage.py agents --admit {host}`"
        return f"two machines hold the key of {host} ({reason}): {decide}"
    return f"the agent of {host} was revoked ({reason}): to have it back, {token}"


def _locked(host_id: int) -> Agent:
    """The host's agent as it is now, and its open tokens with it: nobody joins meanwhile. Tokens go first, as there."""
    host = Host.objects.filter(pk=host_id).first()
    list(JoinToken.objects.select_for_update().filter(host_name=host and host.name, expires_at__gt=datetime.now(UTC)))
    row = Agent.objects.select_for_update(of=("self",)).select_related("host").filter(host_id=host_id).first()
    if row is None:
        raise Refused(Reason.UNKNOWN, f"no agent has joined for host {host or host_id}")
    return row


def _bar(row: Agent, bar: Bar, reason: str) -> None:
    Agent.objects.filter(pk=row.pk).update(
        barred=bar, barred_reason=reason[:MAX_REASON], rotate_asked_at=None, changed_at=Now()
    )
    _expire(JoinToken.objects.filter(host_name=row.host.name))


def _expire(tokens: QuerySet[JoinToken]) -> None:
    tokens.filter(expires_at__gt=datetime.now(UTC)).update(expires_at=datetime.now(UTC))


def _record(host: Host, action: str, source: Source, by: str, changes: dict[str, object], reason: str) -> None:
    conductor.record(action, source, by, host=host, changes=changes, reason=reason)
