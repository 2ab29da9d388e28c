"""Write access to the tables of `accelerators`, and helpers that record events and raise intents.

Every change of these tables must happen inside `with writing():`; a test fails if any code writes outside it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime, timedelta
from typing import Any, TypedDict, Unpack
from uuid import UUID

import msgspec
import psycopg
from django.db import connection, transaction
from django.db.models import QuerySet
from django.db.models.functions import Now

from accelerators import conductor_sql as sql
from accelerators.domain.caller import request_id
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import EventSource
from accelerators.models import Device, Host
from accelerators.runtime import database_clock, jobs, pubsub
from accelerators.runtime.after_commit import call_after_commit

REPORTS_TOPIC = "reports"
"""Notifications that the report of a host is needed again; the detail is the host's id."""

_writing: ContextVar[bool] = ContextVar("writing", default=False)
_write_check: ContextVar[Callable[[], None] | None] = ContextVar("write_check", default=None)
EventSubject = tuple[UUID | None, str]
"""The object that an event describes: its uuid, None if it has none, and its name when the event was recorded."""

_encode_json = msgspec.json.Encoder().encode


@contextmanager
def writing() -> Iterator[None]:
    """Open a transaction in which rows of `accelerators` may be written.

    An exception rolls it back. Blocks may be nested: an inner block is a savepoint of the outer one's transaction.
    The outermost block first calls the check of `checking_writes`, if there is one, and raises what it raises.
    """
    check = None if _writing.get() else _write_check.get()
    token = _writing.set(True)
    try:
        with transaction.atomic():
            if check:
                check()
            yield
    finally:
        _writing.reset(token)


@contextmanager
def checking_writes(check: Callable[[], None]) -> Iterator[None]:
    """Call `check` in the transaction of each outermost `writing()` in the `with` block. It refuses the write by an
    exception."""
    token = _write_check.set(check)
    try:
        yield
    finally:
        _write_check.reset(token)


def may_write() -> bool:
    """Return True if the caller is inside `writing()`."""
    return _writing.get()


def open_cursor() -> Any:
    """Return a cursor on Django's connection that binds parameters on the server.

    A repeated statement is then planned only once; Django's default cursor inserts parameters into the SQL text on the
    client. A parameter needs an explicit cast where PostgreSQL cannot infer its type.
    """
    connection.close_if_health_check_failed()
    connection.ensure_connection()
    raw_cursor: Any = psycopg.Cursor(connection.connection)  # Django wraps it; the stubs say that it takes wrapped ones
    return connection.make_debug_cursor(raw_cursor) if connection.queries_logged else connection.make_cursor(raw_cursor)


def ensure_host(name: str, node: str, actor: str) -> Host:
    """Return the host `name`, locked (FOR NO KEY UPDATE); create it if it is new, and store `node` if it has changed.

    Each of the two changes records an event: the actor of the creation is `actor`, that of a changed `node` is the
    host. After a change of `node`, the next report of the host is compared in full (`forget_applied_report`). The lock
    ends with the caller's transaction. Raises RefusedError CONFLICT, and writes nothing, if another host has this node:
    the names of resource providers begin with it, so it belongs to one host.
    """
    with writing():
        if owner := Host.objects.filter(node=node).exclude(name=name).values_list("name", flat=True).first():
            raise RefusedError(
                RefusalReason.CONFLICT,
                f"the node name {node!r} belongs to host {owner}: give {name} a node name of its own "
                "(CYBORG_HOST_NODE) and restart its agent",
            )
        locked = Host.objects.select_for_update(no_key=True)
        host, created = locked.get_or_create(name=name, defaults={"node": node})
        if created:
            record_event("host.added", EventSource.SYSTEM, actor, host=host, changes={"node": [None, node]})
        elif host.node != node:
            record_event("host.changed", EventSource.AGENT, name, host=host, changes={"node": [host.node, node]})
            host.node, host.updated_at = node, database_clock.now()
            forget_applied_report(host, "node", "updated_at")
        return host


def forget_applied_report(host: Host, *changed_fields: str) -> None:
    """Clear the host's `applied_hash`, because the stored rows are no longer what its last report left.

    Its next report is then compared in full, even if it is equal to the last one. After the commit the gateways are
    notified; the one to which the host's agent is connected asks it for its report again. The fields in
    `changed_fields` are saved with the same statement. The host must be locked.
    """
    host.applied_hash = ""
    host.save(update_fields=["applied_hash", *changed_fields])
    call_after_commit(pubsub.publish, REPORTS_TOPIC)


def lock_devices(selected: QuerySet[Device], *, to_delete: bool = False) -> list[Device]:
    """Lock the selected devices and their hosts (FOR NO KEY UPDATE) until the transaction ends.

    A bind does not wait for this lock: it skips the device, and is retried. An insert of a row that refers to the
    device or its host does not wait, but an exclusive command does, because it makes the device busy. With `to_delete`,
    the devices are locked FOR UPDATE, and inserts of rows that refer to them wait, too.
    Returns the devices ordered by id, with `host` filled in; waits for locks of others. Call it in a transaction. All
    code must take these locks in the same order to avoid deadlocks: hosts before devices, each ordered by id.
    """
    hosts = Host.objects.select_for_update(no_key=True).filter(id__in=selected.values("host")).order_by("id")
    hosts_by_id = {host.id: host for host in hosts}
    of_hosts = selected.filter(host__in=hosts_by_id).order_by("id")
    devices = list(of_hosts.select_for_update(of=("self",), no_key=not to_delete))
    for device in devices:
        device.host = hosts_by_id[device.host_id]
    return devices


def set_hosts_stale_since(host_ids: Iterable[int], since: datetime | None) -> int:
    """Mark hosts as stale since `since`, or as live again if it is None. Return how many hosts changed.

    Hosts that already are in the wanted state are not touched. Each changed host gets one event.
    """
    with writing():
        changed_hosts = Host.objects.filter(id__in=list(host_ids), stale_since__isnull=since is not None)
        # Every writer that locks several hosts does it in this order.
        hosts = list(changed_hosts.order_by("id").select_for_update(no_key=True))
        action = "host.stale" if since else "host.live"
        reason = "its agent sends no heartbeats" if since else "its agent sends heartbeats again"
        changes = [{"stale_since": [_to_iso(host.stale_since), _to_iso(since)]} for host in hosts]
        record_events(
            [
                build_event(action, EventSource.SYSTEM, "leases", host=host, changes=change, reason=reason)
                for host, change in zip(hosts, changes, strict=True)
            ]
        )
        Host.objects.filter(id__in=[host.id for host in hosts]).update(stale_since=since, updated_at=Now())
        return len(hosts)


def _to_iso(moment: datetime | None) -> str | None:
    """Return the moment in ISO 8601, to the second; None stays None."""
    return moment.isoformat(timespec="seconds") if moment else None


class EventDetails(TypedDict, total=False):
    """Optional fields of an event.

    The subject of the event is `subject` if given, else `host`, else `host_name`, which names a host without a row.
    `changes` maps each field to [before, after].
    """

    host: Host | None
    host_name: str
    subject: EventSubject | None
    changes: dict[str, Any]
    reason: str


def record_event(action: str, source: EventSource, actor: str, **details: Unpack[EventDetails]) -> None:
    """Write one event. See `EventDetails` for the optional fields."""
    record_events([build_event(action, source, actor, **details)])


def build_event(action: str, source: EventSource, actor: str, **details: Unpack[EventDetails]) -> dict[str, Any]:
    """Build an event row for `record_events`. Texts that are too long are cut; nothing is written."""
    host = details.get("host")
    host_name = host.name if host else details.get("host_name", "")[:255]
    subject = details.get("subject") or (host.uuid if host else None, host_name)
    return {
        "source": source,
        "actor": actor[:255],
        "request_id": request_id.get(),
        "action": action,
        "subject": subject[0],
        "subject_name": subject[1][:255],
        "host": host_name,
        "changes": details.get("changes") or {},
        "reason": details.get("reason", "")[:4096],
    }


def record_events(events: list[dict[str, Any]]) -> None:
    """Write many events, which `build_event` builds, in one statement."""
    with writing():
        open_cursor().execute(sql.INSERT_EVENTS, [_encode_json(events).decode()])


def record_purge(kind: str, count: int, retention: timedelta, *, verb: str = "ended") -> None:
    """Record one event with the number of deleted old rows of `kind`; do nothing if `count` is 0.

    The rows need no event each, because their own events already tell what happened to them. `verb` completes the
    event's reason: the rows `verb` (for example “ended”) longer ago than `retention`.
    """
    if count:
        days = retention.days
        reason = f"they {verb} more than {days} {'day' if days == 1 else 'days'} ago"
        record_event(f"{kind}.forgotten", EventSource.SYSTEM, "sweep", changes={"number": [count, 0]}, reason=reason)


def raise_intents(kind: str, payloads: Mapping[str, Mapping[str, Any]], *, keep_existing: bool = False) -> None:
    """Raise one intent per key, or renew the existing one; after the commit, wake the job that handles `kind`.

    An intent is work to be done outside the database because of this transaction. A renewed intent gets the new payload
    and is due at once; its number of failures stays. With `keep_existing`, an existing intent is not renewed: it keeps
    its payload and the time when it is due. Costs one statement. Rows are written in the order of `payloads`: callers
    that raise the same keys must use the same order, or they can deadlock.
    """
    if payloads:
        statement = sql.INSERT_MISSING_INTENTS if keep_existing else sql.UPSERT_INTENTS
        rows = [{"kind": kind, "key": key, "payload": payload} for key, payload in payloads.items()]
        with writing():
            open_cursor().execute(statement, [_encode_json(rows).decode()])
            jobs.enqueue_handler_after_commit(kind)


def raise_provider_intents(hosts: Iterable[Host], *, keep_existing: bool = False) -> None:
    """Raise a `provider` intent for each host, so that its deployables are synchronised with Placement again.

    The intents are written in the order of host ids, as a merge writes them, so that the two cannot deadlock.
    `keep_existing` is that of `raise_intents`.
    """
    payloads = {str(host.uuid): {"host": host.name} for host in sorted(hosts, key=lambda host: host.id)}
    raise_intents("provider", payloads, keep_existing=keep_existing)
