"""The job `faults`: after each look at a host, compare what is bound there with what Placement and Nova show.

It finds three kinds of contradiction (`models.DiscrepancyKind`), stores them, and deletes them when they are resolved;
each of these changes records an event. Allocations are read if the provider's generation changed, if a discrepancy is
stored or suspected, and every REREAD_S if something is bound: Placement raises the generation when something is
allocated, but not always when an allocation is deleted. `list_discrepancies_of_devices` and
`list_discrepancies_of_host` return what pages show.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from django.conf import settings
from django.db import connection
from django.db.models import Q

from accelerators import conductor
from accelerators.domain.states import Source
from accelerators.models import Device, Host
from accelerators.runtime import jobs
from placement_sync.client import Placement, PlacementConflictError, PlacementRejectedError, PlacementUnavailableError
from placement_sync.cloud import session
from placement_sync.jobs import discrepancies_sql as sql
from placement_sync.models import Discrepancy, Kind
from placement_sync.nova import client

JOB = "faults"
APART_S = 60.0
"""An allocation for which no request holds a handle is a fault if two comparisons at least this many seconds apart see
it. A claim comes seconds before its bind and may outlive it.
"""
REREAD_S = 1800.0
HOSTS, QUESTIONS, AT_ONCE = 16, 64, 8
"""Limits of one step: hosts in a batch, instances that Nova is asked for, and calls at the same time."""
SHOWN = 100
"""Largest number of discrepancies that a page shows."""

Consumers = Mapping[str, Mapping[str, int]]
"""Consumer → resource class → amount."""


class Claims(msgspec.Struct, frozen=True):
    """The allocations of a provider when they were read.

    `loose` maps each consumer for which no request holds a handle to the time when that was first seen.
    """

    generation: int
    read_at: datetime
    consumers: dict[str, dict[str, int]]
    loose: dict[str, datetime] = {}


@dataclass(frozen=True)
class Provider:
    """A provider as of the last look; the columns of `sql.SELECT_PROVIDERS`. `device_id` is None after removal."""

    uuid: str
    host: int
    name: str
    generation: int
    claims: Claims | None
    device: int | None
    in_use: bool


@dataclass(frozen=True)
class Holding:
    """A request that holds a handle; the columns of `sql.SELECT_HOLDINGS`.

    `defect` tells what is wrong with the device or handle; it is '' if nothing is.
    """

    request: str
    host: int
    provider: str
    provider_name: str
    device: int
    instance: str
    bound: bool
    at: datetime
    broken: str


@dataclass(frozen=True)
class Fault:
    """A contradiction, identified by `key`."""

    kind: Kind
    host: int
    device: int | None
    provider: str
    provider_name: str
    instance: str
    said: str

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the identity of the contradiction: kind, provider, instance."""
        return self.kind.value, self.provider, self.instance


@dataclass(frozen=True)
class Found:
    """A discrepancy as a page shows it."""

    uuid: str
    kind: str
    """The kind in words."""
    host: str
    device: int | None
    provider: str
    provider_name: str
    instance: str
    since: datetime
    seen_at: datetime
    said: str


def of(devices: Collection[int]) -> list[Found]:
    """Return the discrepancies of these devices, the newest first, at most MAX_SHOWN. One statement."""
    return _found(Q(device__in=list(devices)))


def at(host: int) -> list[Found]:
    """Return the discrepancies of a host, including those of removed devices, at most MAX_SHOWN. One statement."""
    return _found(Q(host=host))


def _found(wanted: Q) -> list[Found]:
    return [
        Found(
            str(row.uuid),
            Kind(row.kind).label,
            row.host.name,
            row.device_id,
            str(row.provider),
            row.provider_name,
            str(row.instance),
            row.since,
            row.seen_at,
            row.said,
        )
        for row in Discrepancy.objects.filter(wanted).select_related("host")[:SHOWN]
    ]


def reread(hosts: Collection[int]) -> None:
    """Mark the stored allocations of these hosts as outdated, so that the next comparison reads them again."""
    _execute(sql.REREAD, {"hosts": list(hosts)})


def run() -> None:
    """Run the job."""
    jobs.run_outside_transaction(JOB, step)


def step() -> bool:
    """Compare one batch of hosts that were looked at since their last comparison; return True if there may be more."""
    if (cloud := session(settings.KEYS.placement_endpoint)) is None:
        return False
    due = _rows(sql.DUE, {"count": HOSTS})
    if not due:
        return False
    now, looked = due[0][2], {host: looked_at for host, looked_at, _ in due}
    rows = list(Discrepancy.objects.filter(host__in=looked).select_related("host", "device"))
    suspects = {str(row.provider) for row in rows if row.kind != Kind.WITHOUT_DEVICE}
    providers = [_provider(*row) for row in _rows(sql.PROVIDERS, {"hosts": list(looked)})]
    wanted = [one.uuid for one in providers if wants_reading(one, one.uuid in suspects, now)]
    read = _read(cloud, wanted)
    unread = set(wanted) - read.keys()
    # Load requests after allocations. Otherwise a request that is released in between would look unclaimed.
    holdings = [Holding(*row) for row in _rows(sql.HOLDINGS, {"hosts": list(looked)})]
    by_provider: dict[str, list[Holding]] = {}
    for holding in holdings:
        by_provider.setdefault(holding.provider, []).append(holding)
    judged = [
        (one, *compare(one, read.get(one.uuid), by_provider.get(one.uuid, ()), now))
        for one in providers
        if one.uuid not in unread
    ]
    found, unclear = _without_device([one for one in holdings if one.bound and one.broken])
    found += [fault for _, _, faults in judged for fault in faults]
    kept = [
        row
        for row in rows
        if (str(row.instance) in unclear if row.kind == Kind.WITHOUT_DEVICE else str(row.provider) in unread)
    ]
    restless = {fault.host for fault in found} | {row.host_id for row in kept}
    restless |= {one.host for one in providers if one.uuid in unread}
    restless |= {one.host for one, claims, _ in judged if claims and claims.loose}
    with conductor.writing():
        _settle(found, rows, kept, now)
        _remember(judged, looked, restless)
    return len(due) == HOSTS


def wants_reading(one: Provider, suspect: bool, now: datetime) -> bool:
    """Whether the provider's allocations must be read again, because the stored ones may be out of date."""
    known = one.claims
    if known is None or known.generation != one.generation or known.loose or suspect:
        return True
    return one.in_use and now - known.read_at >= timedelta(seconds=REREAD_S)


def compare(
    one: Provider, read: Consumers | None, holdings: Sequence[Holding], now: datetime
) -> tuple[Claims | None, list[Fault]]:
    """Compare one provider's allocations with the requests that hold its handles. Pure.

    `read_allocations` were read at `now`; None if the stored ones are still valid. Returns the claims to store and the
    contradictions.
    """
    known = one.claims
    if read is not None:
        known = Claims(one.generation, now, read, known.loose if known else {})
    if known is None:
        return None, []
    attached = {holding.instance for holding in holdings}
    loose = {who: known.loose.get(who, now) for who in known.consumers if who not in attached}
    faults = {
        holding.instance: _unclaimed(holding)
        for holding in holdings
        if holding.bound and holding.at < known.read_at and holding.instance not in known.consumers
    }
    apart = timedelta(seconds=APART_S)
    faults |= {who: _unattached(one, who, known.consumers[who]) for who, since in loose.items() if now - since >= apart}
    return msgspec.structs.replace(known, loose=loose), [*faults.values()]


def _unclaimed(one: Holding) -> Fault:
    said = (
        f"Instance {one.instance} holds request {one.request} on {one.provider_name}, but Placement has no allocation"
        " for it there, so Placement may offer the same part to another instance. Shelve and unshelve the instance"
        f" through Nova, which claims and binds it again; or add rp={one.provider} to its allocations: openstack"
        f" resource provider allocation show {one.instance}, then “allocation set”. If the device was attached to the"
        " running instance, detach it and attach it again instead."
    )
    return _fault(Kind.UNCLAIMED, one, said)


def _unattached(one: Provider, who: str, amounts: Mapping[str, int]) -> Fault:
    what = ", ".join(f"{amount} {name}" for name, amount in sorted(amounts.items()))
    said = (
        f"Instance {who} has {what} of {one.name} allocated in Placement, but no request is bound there, so nobody can"
        " use that part. If the instance needs no device, or Nova does not know it, release the allocation: openstack"
        f" resource provider allocation unset --provider {one.uuid} {who}."
    )
    return Fault(Kind.UNATTACHED, one.host, one.device, one.uuid, one.name, who, said)


def _without_device(broken: Sequence[Holding]) -> tuple[list[Fault], set[str]]:
    """Find instances that Nova shows as ACTIVE on their host although what they hold is broken.

    Returns the contradictions, and the instances for which Nova gave no answer. Asks Nova for at most MAX_NOVA_QUERIES
    instances.
    """
    if not broken or (cloud := session(settings.KEYS.nova_endpoint)) is None:
        return [], set()
    asked = sorted({one.instance for one in broken})
    answers = client.servers(cloud, settings.KEYS.nova_endpoint, asked[:QUESTIONS])
    unclear = {uuid for uuid in asked if isinstance(answers.get(uuid, client.UNASKED), client.NovaUnavailableError)}
    hosts = Host.objects.in_bulk({one.host for one in broken})
    found = {}
    for one in broken:
        server, host = answers.get(one.instance), hosts[one.host]
        if isinstance(server, client.Server) and server.status == "ACTIVE" and server.on(host.name, host.node):
            said = (
                f"Nova shows instance {one.instance} as ACTIVE on {host.name}, but it cannot use what it holds of"
                f" {one.provider_name}: {one.broken}. Repair or reconnect the device and hard-reboot the instance; or"
                " shelve and unshelve the instance through Nova, which gives it another device."
            )
            found[one.provider, one.instance] = _fault(Kind.WITHOUT_DEVICE, one, said)
    return [*found.values()], unclear


def _fault(kind: Kind, one: Holding, said: str) -> Fault:
    return Fault(kind, one.host, one.device, one.provider, one.provider_name, one.instance, said)


def _provider(uuid: str, host: int, name: str, generation: int, claims: str | None, device: int, use: bool) -> Provider:
    known = msgspec.json.decode(claims, type=Claims) if claims else None
    return Provider(uuid, host, name, generation, known, device, use)


def _read(cloud: Any, providers: Sequence[str]) -> dict[str, dict[str, dict[str, int]]]:
    """Read the allocations of these providers in parallel; leave out those that Placement did not answer.

    After one call could not reach Placement, the other providers are not read.
    """
    away: list[Exception] = []

    def one(uuid: str) -> dict[str, dict[str, int]] | None:
        if away:
            return None
        try:
            found = Placement(cloud, settings.KEYS.placement_endpoint).allocations(uuid)
            return {str(UUID(consumer)): dict(amounts) for consumer, amounts in found.items()}
        except PlacementUnavailableError as error:
            away.append(error)
        except (PlacementConflictError, PlacementRejectedError, ValueError):
            return None
        return None

    if not providers:
        return {}
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="faults") as threads:
        answers = zip(providers, threads.map(one, providers), strict=True)
        return {uuid: found for uuid, found in answers if found is not None}


def _settle(found: Iterable[Fault], rows: Sequence[Discrepancy], kept: Sequence[Discrepancy], now: datetime) -> None:
    """Store the contradictions: insert new ones, update known ones, delete those that are resolved; record events.

    The rows in `undecided` are not deleted, because it is unknown whether they are resolved.
    """
    faults = {fault.key: fault for fault in found}
    here = {(row.kind, str(row.provider), str(row.instance)): row for row in rows}
    new = [fault for key, fault in faults.items() if key not in here]
    seen = [row for key, row in here.items() if key in faults]
    gone = [row for key, row in here.items() if key not in faults and row not in kept]
    for row in seen:
        row.seen_at, row.said = now, faults[row.kind, str(row.provider), str(row.instance)].said
    Discrepancy.objects.bulk_update(seen, ["seen_at", "said"])
    Discrepancy.objects.filter(pk__in=[row.pk for row in gone]).delete()
    made = Discrepancy.objects.bulk_create(_row(fault, now) for fault in new)
    hosts = Host.objects.in_bulk({row.host_id for row in made}) if made else {}
    devices = Device.objects.in_bulk({row.device_id for row in made if row.device_id}) if made else {}
    for row in made:
        row.host, row.device = hosts[row.host_id], devices.get(row.device_id)
    told = [("appeared", row, [None, row.label]) for row in made]
    told += [("mended", row, [row.label, None]) for row in gone]
    if told:
        conductor.record_all([_event(*one) for one in told])


def _row(fault: Fault, now: datetime) -> Discrepancy:
    return Discrepancy(
        kind=fault.kind,
        host_id=fault.host,
        device_id=fault.device,
        provider=fault.provider,
        provider_name=fault.provider_name,
        instance=fault.instance,
        since=now,
        seen_at=now,
        said=fault.said,
    )


def _event(verb: str, row: Discrepancy, change: list[str | None]) -> dict[str, Any]:
    """Return the event of a discrepancy.

    Its subject is the device, if there is one, so that the device's time line shows it.
    """
    subject = (row.device.uuid, str(row.device)) if row.device else None
    changes = {"discrepancy": change, "instance": [None, str(row.instance)][:: 1 if verb == "appeared" else -1]}
    reason = row.said if verb == "appeared" else ""
    return conductor.event(
        f"discrepancy.{verb}", Source.SYSTEM, JOB, host=row.host, subject=subject, changes=changes, reason=reason
    )


def _remember(
    judged: Iterable[tuple[Provider, Claims | None, list[Fault]]], looked: Mapping[int, datetime], restless: set[int]
) -> None:
    """Store the changed claims and mark the hosts as compared.

    Those in `hosts_to_recheck` are compared again after CONFIRM_AFTER_S.
    """
    changed = [{"uuid": one.uuid, "claims": claims} for one, claims, _ in judged if claims and claims != one.claims]
    if changed:
        _execute(sql.CLAIMS, {"rows": msgspec.json.encode(changed).decode()})
    hosts = [{"host": host, "looked_at": looked[host], "again": host in restless} for host in sorted(looked)]
    _execute(sql.COMPARED, {"rows": msgspec.json.encode(hosts).decode(), "again_s": APART_S})


def _rows(statement: str, values: Mapping[str, Any]) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
        return cursor.fetchall()


def _execute(statement: str, values: Mapping[str, Any]) -> None:
    with connection.cursor() as cursor:
        cursor.execute(statement, values)
