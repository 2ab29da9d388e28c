"""The only writer of this room's tables. Every change goes through `with writing():`; a test refuses any other.

Called by `agents.tasks` (reports, leases), `agents.enrolment`, `sweep`, `binding`, `profiles`, `lifecycle`, the admin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime, timedelta
from typing import Any, TypedDict, Unpack
from uuid import UUID

import msgspec
import psycopg
from django.db import connection, transaction
from django.db.models import QuerySet

from accelerators.domain.caller import request_id
from accelerators.domain.states import Source
from accelerators.inventory import merge_sql as sql
from accelerators.models import Device, Host
from accelerators.runtime import jobs

_writing: ContextVar[bool] = ContextVar("writing", default=False)
Subject = tuple[UUID, str]
"""What an event is about: its uuid and its name at that time."""

_encode = msgspec.json.Encoder().encode


@contextmanager
def writing() -> Iterator[None]:
    """A transaction in which rows of `accelerators` may be written. Nests."""
    token = _writing.set(True)
    try:
        with transaction.atomic():
            yield
    finally:
        _writing.reset(token)


def may_write() -> bool:
    """Whether the caller is inside `writing()`."""
    return _writing.get()


def cursor() -> Any:
    """A cursor of Django's whose parameters travel beside the statement, so that a repeated one is planned once.

    Django's own interpolates them on the client. Typed parameters need a cast where PostgreSQL cannot infer the type.
    """
    connection.close_if_health_check_failed()
    connection.ensure_connection()
    own = psycopg.Cursor(connection.connection)
    return connection.make_debug_cursor(own) if connection.queries_logged else connection.make_cursor(own)


def ensure_host(name: str, node: str, actor: str) -> Host:
    """The host called `name`, made with an event when it is new; a changed `node` is taken over, with an event."""
    with writing():
        host, made = Host.objects.select_for_update().get_or_create(name=name, defaults={"node": node})
        if made:
            record("host.added", Source.SYSTEM, actor, host=host, changes={"node": [None, node]})
        elif host.node != node:
            record("host.changed", Source.AGENT, name, host=host, changes={"node": [host.node, node]})
            host.node, host.applied_hash, host.updated_at = node, "", datetime.now(UTC)
            host.save(update_fields=["node", "applied_hash", "updated_at"])
        return host


def locked(wanted: QuerySet[Device]) -> list[Device]:
    """These devices, locked with their hosts as everybody takes both: hosts before devices, each by id."""
    hosts = Host.objects.select_for_update(no_key=True).filter(id__in=wanted.values("host")).order_by("id")
    known = {host.id: host for host in hosts}
    devices = list(wanted.filter(host__in=known).order_by("id").select_for_update(of=("self",)))
    for device in devices:
        device.host = known[device.host_id]
    return devices


def mark_hosts(ids: Iterable[int], since: datetime | None) -> int:
    """Make hosts stale `since` then, or live again (None), with one event for each that changes; returns how many."""
    with writing():
        wanted = Host.objects.select_for_update().filter(id__in=list(ids), stale_since__isnull=since is not None)
        hosts = list(wanted.order_by("id"))  # as every writer of several hosts
        action = "host.stale" if since else "host.live"
        reason = "nothing heard of its agent" if since else "its agent is heard again"
        changes = [{"stale_since": [_iso(host.stale_since), _iso(since)]} for host in hosts]
        record_all(
            [
                event(action, Source.SYSTEM, "leases", host=host, changes=change, reason=reason)
                for host, change in zip(hosts, changes, strict=True)
            ]
        )
        Host.objects.filter(id__in=[host.id for host in hosts]).update(stale_since=since, updated_at=datetime.now(UTC))
        return len(hosts)


def _iso(moment: datetime | None) -> str | None:
    return moment.isoformat(timespec="seconds") if moment else None


class About(TypedDict, total=False):
    """What an event is about: `subject`, else a host, else what is not in the tables (`host_name`); and what of it."""

    host: Host | None
    host_name: str
    subject: Subject | None
    changes: dict[str, Any]
    reason: str


def record(action: str, source: Source, actor: str, **about: Unpack[About]) -> None:
    """Write one event."""
    record_all([event(action, source, actor, **about)])


def event(action: str, source: Source, actor: str, **about: Unpack[About]) -> dict[str, Any]:
    """A row for `record_all`."""
    host = about.get("host")
    name = host.name if host else about.get("host_name", "")[:255]
    subject = about.get("subject") or (host.uuid if host else None, name)
    return {
        "source": source,
        "actor": actor[:255],
        "request_id": request_id.get(),
        "action": action,
        "subject_type": action.split(".", maxsplit=1)[0],
        "subject": subject[0],
        "subject_name": subject[1][:255],
        "host": name,
        "changes": about.get("changes") or {},
        "reason": about.get("reason", "")[:4096],
    }


def record_all(events: list[dict[str, Any]]) -> None:
    """Write many events in one statement: rows of `sql.EVENTS`, where source 'agent' and no request id go unsaid."""
    with writing():
        cursor().execute(sql.EVENTS, [_encode(events).decode()])


def forgot(kind: str, count: int, after: timedelta) -> None:
    """Write the event that rows of old were deleted, if any were: what happened to them is in their own events."""
    if count:
        reason = f"they ended more than {after.days} days ago"
        record(f"{kind}.forgotten", Source.SYSTEM, "sweep", changes={"number": [count, 0]}, reason=reason)


def intend(kind: str, payloads: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise an intent for each key, or renew the one there is: what is to be done outside because of this transaction.

    One statement, and keys in their order: two writers of the same ones do not wait for each other.
    """
    if payloads:
        rows = [{"kind": kind, "key": key, "payload": payload} for key, payload in payloads.items()]
        with writing():
            cursor().execute(sql.INTENTS, [_encode(rows).decode()])
            jobs.wake_for(kind)


def providers_changed(hosts: Iterable[Host]) -> None:
    """Placement is to be told of these hosts' deployables anew; by id, the order in which a merge takes them."""
    intend("provider", {str(host.uuid): {"host": host.name} for host in sorted(hosts, key=lambda host: host.id)})
