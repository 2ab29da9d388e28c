"""The job `faults`: after each look at a host, compare what is bound there with what Placement and Nova show.

It finds four kinds of contradiction (`models.DiscrepancyKind`), stores them, and deletes them when they are resolved;
each of these changes records an event. Allocations are read if the provider's generation changed, if a discrepancy is
stored or suspected, and every REREAD_S if something is bound: Placement raises the generation when something is
allocated, but not always when an allocation is deleted. `list_discrepancies_of_devices` and
`list_discrepancies_of_host` return what pages show.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from django.conf import settings
from django.contrib.postgres.fields import ArrayField
from django.db import connection
from django.db.models import Exists, F, Func, JSONField, OuterRef, Q, Subquery, TextField, Value
from django.db.models.fields.json import KT
from django.db.models.functions import Coalesce, Now

from accelerators import conductor
from accelerators.domain.groups import ProfileGroup, first_resource_class
from accelerators.domain.states import DeviceState, EventSource, Health, RequestState
from accelerators.models import AcceleratorRequest, AttachHandle, Deployable, Device, DeviceProfile, Host
from accelerators.runtime import jobs
from drivers.isolation.threads import call_in_parallel, is_ended
from placement_sync.client import (
    PlacementClient,
    PlacementConflictError,
    PlacementRejectedError,
    PlacementUnavailableError,
)
from placement_sync.cloud import get_cloud_session
from placement_sync.jobs.repository import decode_observed
from placement_sync.models import Discrepancy, DiscrepancyKind, Tree, WrittenProvider
from placement_sync.nova import client, endpoints
from placement_sync.reconcile import ObservedProvider

JOB = "faults"
OWNER_TRAIT = "OWNER_CYBORG"
"""The trait of all providers of accelerators of this service, and of other installations of it."""
CONFIRM_AFTER_S = 60.0
"""An allocation for which no request holds a handle is a fault if two comparisons at least this many seconds apart see
it. A claim comes seconds before its bind and may outlive it.
"""
REREAD_S = 1800.0
HOST_BATCH, MAX_NOVA_QUERIES = 16, 64
"""Limits of one step: hosts in a batch, and instances that Nova is asked for."""
READ_DEADLINE_S = 20.0
"""Seconds for reading all allocations of one step. The cluster kills a job after 60 s."""
MAX_SHOWN = 100
"""Largest number of discrepancies that a page shows."""

UPDATE_CLAIMS = """
UPDATE placement_sync_writtenprovider w SET claims = x.claims
FROM jsonb_to_recordset(%(rows)s::jsonb) AS x(uuid uuid, claims jsonb) WHERE w.uuid = x.uuid
"""
"""Store the claims of providers. It is raw SQL because `bulk_update` builds a CASE with a branch per row: for 800
providers this took 308 ms, with this statement 19 ms."""
_HOLDING_COLUMNS = (
    *("uuid", "device_rp_uuid", "instance_uuid", "state", "updated_at", "created_at", "attach_handle__missing_since"),
    *(f"attach_handle__deployable__{name}" for name in ("name", "missing_since")),
    *(
        f"attach_handle__deployable__device__{name}"
        for name in ("host_id", "state", "state_reason", "status", "status_reason")
    ),
)

ConsumerAmounts = dict[str, dict[str, int]]
"""Consumer → resource class → amount."""


class StoredClaims(msgspec.Struct, frozen=True):
    """The allocations of a provider when they were read.

    `loose` maps each consumer for which no request holds a handle to the time when that was first seen.
    """

    generation: int
    read_at: datetime
    consumers: ConsumerAmounts
    loose: dict[str, datetime] = {}


@dataclass(frozen=True)
class ComparedProvider:
    """A provider as Placement showed it at the last look.

    `claims` are the stored allocations, None if they were never read. `device_id` is None if its device was removed.
    `in_use` says that a request is Bound there.
    """

    uuid: str
    host_id: int
    name: str
    generation: int
    claims: StoredClaims | None
    device_id: int | None
    in_use: bool


@dataclass(frozen=True)
class HoldingRequest:
    """A request that holds a handle.

    `is_bound` is False while the request is BindStarted; `changed_at` is the time of its last change. `defect` tells
    what is wrong with the device or handle; it is '' if nothing is.
    """

    request_uuid: str
    host_id: int
    provider_uuid: str
    provider_name: str
    device_id: int
    instance: str
    is_bound: bool
    changed_at: datetime
    defect: str


@dataclass(frozen=True)
class Contradiction:
    """A contradiction that a comparison has found; `explanation` tells a person what is wrong and what to do."""

    kind: DiscrepancyKind
    host_id: int
    device_id: int | None
    provider_uuid: str
    provider_name: str
    instance: str | None
    explanation: str

    @property
    def key(self) -> tuple[str, str, str | None]:
        """Return the identity of the contradiction: kind, provider, instance."""
        return self.kind.value, self.provider_uuid, self.instance


@dataclass(frozen=True)
class DiscrepancySummary:
    """A discrepancy as a page shows it."""

    uuid: str
    kind: DiscrepancyKind
    host: str
    device: int | None
    provider: str
    provider_name: str
    instance: str | None
    since: datetime
    seen_at: datetime
    explanation: str


def list_discrepancies_of_devices(devices: Collection[int]) -> list[DiscrepancySummary]:
    """Return the discrepancies of these devices, the newest first, at most MAX_SHOWN. Costs one statement."""
    return _summarize_discrepancies(Q(device__in=list(devices)))


def list_discrepancies_of_host(host: int) -> list[DiscrepancySummary]:
    """Return the discrepancies of a host, newest first, at most MAX_SHOWN. Costs one statement.

    Those about providers without a device are included.
    """
    return _summarize_discrepancies(Q(host=host))


def _summarize_discrepancies(condition: Q) -> list[DiscrepancySummary]:
    """Return the discrepancies that the condition selects, the newest first, at most MAX_SHOWN. Costs one statement."""
    return [
        DiscrepancySummary(
            str(row.uuid),
            DiscrepancyKind(row.kind),
            row.host.name,
            row.device_id,
            str(row.provider),
            row.provider_name,
            str(row.instance) if row.instance else None,
            row.since,
            row.seen_at,
            row.said,
        )
        for row in Discrepancy.objects.filter(condition).select_related("host")[:MAX_SHOWN]
    ]


def invalidate_claims(hosts: Collection[int]) -> None:
    """Mark the stored allocations of these hosts as outdated, so that the next comparison reads them again."""
    path, no_generation = Value(["generation"], ArrayField(TextField())), Value(-1, JSONField())
    outdated_claims = Func("claims", path, no_generation, function="jsonb_set", output_field=JSONField())
    WrittenProvider.objects.filter(host__in=hosts, claims__isnull=False).update(claims=outdated_claims)


def run() -> None:
    """Run the job `faults`: compare hosts until none is due, or its time slice is over."""
    jobs.run_steps_outside_transaction(JOB, step)


def step() -> bool:
    """Compare one batch of due hosts, and store what was found; return True if there may be more.

    A host is due if it was looked at since its last comparison, or if it must be compared again (`compare_at`). Reads
    allocations from Placement and instances from Nova before the transaction. Does nothing if Placement is switched off
    or no cloud is configured.
    """
    if (cloud := get_cloud_session(settings.KEYS.placement_endpoint)) is None:
        return False
    due = _load_due_hosts()
    if not due:
        return False
    now, looked_at_by_host = due[0][2], {host: looked_at for host, looked_at, _ in due}
    stored = list(Discrepancy.objects.filter(host__in=looked_at_by_host).select_related("host", "device"))
    suspect_uuids = {str(row.provider) for row in stored if row.kind != DiscrepancyKind.WITHOUT_DEVICE}
    providers = _load_providers(looked_at_by_host)
    uuids_to_read = [one.uuid for one in providers if must_read_allocations(one, one.uuid in suspect_uuids, now)]
    read_allocations = _read_allocations(cloud, uuids_to_read)
    unread_uuids = set(uuids_to_read) - read_allocations.keys()
    # Load requests after allocations. Otherwise a request that is released in between would look unclaimed.
    holdings = _load_holdings(looked_at_by_host)
    by_provider: dict[str, list[HoldingRequest]] = {}
    for holding in holdings:
        by_provider.setdefault(holding.provider_uuid, []).append(holding)
    comparisons = [
        (one, *compare_allocations(one, read_allocations.get(one.uuid), by_provider.get(one.uuid, ()), now))
        for one in providers
        if one.uuid not in unread_uuids
    ]
    contradictions, unanswered_instances = _find_without_device(
        [one for one in holdings if one.is_bound and one.defect]
    )
    contradictions += [fault for _, _, faults in comparisons for fault in faults]
    foreign_offers = _find_foreign_offers(looked_at_by_host)  # these change only with the next look at the host
    undecided = [
        row
        for row in stored
        if (
            str(row.instance) in unanswered_instances
            if row.kind == DiscrepancyKind.WITHOUT_DEVICE
            else str(row.provider) in unread_uuids
        )
    ]
    hosts_to_recheck = {fault.host_id for fault in contradictions} | {row.host_id for row in undecided}
    hosts_to_recheck |= {one.host_id for one in providers if one.uuid in unread_uuids}
    hosts_to_recheck |= {one.host_id for one, claims, _ in comparisons if claims and claims.loose}
    with conductor.writing():
        _store_contradictions([*contradictions, *foreign_offers], stored, undecided, now)
        _store_comparisons(comparisons, looked_at_by_host, hosts_to_recheck)
    return len(due) == HOST_BATCH


def must_read_allocations(provider: ComparedProvider, has_discrepancy: bool, now: datetime) -> bool:
    """Return True if the provider's allocations must be read, because the stored ones may be out of date. This is a
    pure function.

    They may be if there are none, if the provider's generation is another one, if a consumer among them holds no
    handle, if a discrepancy about allocations is stored for it, or if they are older than REREAD_S and a request is
    bound there.
    """
    stored_claims = provider.claims
    if (
        stored_claims is None
        or stored_claims.generation != provider.generation
        or stored_claims.loose
        or has_discrepancy
    ):
        return True
    return provider.in_use and now - stored_claims.read_at >= timedelta(seconds=REREAD_S)


def compare_allocations(
    provider: ComparedProvider,
    read_allocations: ConsumerAmounts | None,
    holdings: Sequence[HoldingRequest],
    now: datetime,
) -> tuple[StoredClaims | None, list[Contradiction]]:
    """Compare one provider's allocations with the requests that hold its handles. This is a pure function.

    `read_allocations` were read at `now`; None if the stored ones are still valid. Returns the claims to store, with
    the consumers for which no request holds a handle, and the contradictions. The claims are None if allocations were
    never read; then nothing is compared.
    """
    claims = provider.claims
    if read_allocations is not None:
        claims = StoredClaims(provider.generation, now, read_allocations, claims.loose if claims else {})
    if claims is None:
        return None, []
    holding_instances = {holding.instance for holding in holdings}
    first_seen_loose = {who: claims.loose.get(who, now) for who in claims.consumers if who not in holding_instances}
    contradictions = {
        holding.instance: _build_unclaimed(holding)
        for holding in holdings
        if holding.is_bound and holding.changed_at < claims.read_at and holding.instance not in claims.consumers
    }
    confirm_after = timedelta(seconds=CONFIRM_AFTER_S)
    contradictions |= {
        who: _build_unattached(provider, who, claims.consumers[who])
        for who, since in first_seen_loose.items()
        if now - since >= confirm_after
    }
    return msgspec.structs.replace(claims, loose=first_seen_loose), [*contradictions.values()]


def _build_unclaimed(holding: HoldingRequest) -> Contradiction:
    """Build the contradiction of a bound request whose instance has no allocation of the provider."""
    explanation = (
        f"Instance {holding.instance} holds request {holding.request_uuid} on {holding.provider_name}, but Placement"
        " has no allocation for it there, so Placement may offer the same part to another instance. Shelve and unshelve"
        f" the instance through Nova, which claims and binds it again; or add rp={holding.provider_uuid} to its"
        f" allocations: openstack resource provider allocation show {holding.instance}, then “allocation set”. If the"
        " device was attached to the running instance, detach it and attach it again instead."
    )
    return _build_contradiction(DiscrepancyKind.UNCLAIMED, holding, explanation)


def _build_unattached(provider: ComparedProvider, consumer: str, amounts: Mapping[str, int]) -> Contradiction:
    """Build the contradiction of a consumer with an allocation of a provider on which it holds no handle."""
    amounts_text = ", ".join(f"{amount} {name}" for name, amount in sorted(amounts.items()))
    explanation = (
        f"Instance {consumer} has {amounts_text} of {provider.name} allocated in Placement, but no request is bound"
        " there, so nobody can use that part. If the instance needs no device, or Nova does not know it, release the"
        f" allocation: openstack resource provider allocation unset --provider {provider.uuid} {consumer}."
    )
    return Contradiction(
        DiscrepancyKind.UNATTACHED,
        provider.host_id,
        provider.device_id,
        provider.uuid,
        provider.name,
        consumer,
        explanation,
    )


def _find_without_device(broken_holdings: Sequence[HoldingRequest]) -> tuple[list[Contradiction], set[str]]:
    """Find instances that Nova shows as ACTIVE on their host although the handle that they hold has a defect.

    `broken_holdings` are bound requests with a `defect`. Returns the contradictions, and the instances for which Nova
    gave no answer; 404 is an answer only at a trusted address (`nova.endpoints`). Asks Nova for at most
    MAX_NOVA_QUERIES instances; the others count as not answered. Both are empty if Nova is switched off or no cloud is
    configured.
    """
    if not broken_holdings or (cloud := get_cloud_session(settings.KEYS.nova_endpoint)) is None:
        return [], set()
    instances = sorted({one.instance for one in broken_holdings})
    answers = client.get_servers(cloud, settings.KEYS.nova_endpoint, instances[:MAX_NOVA_QUERIES])
    unanswered_instances = {
        uuid for uuid in instances if isinstance(answers.get(uuid, client.NOT_ASKED), client.NovaUnavailableError)
    }
    if unknown_instances := {uuid for uuid, answer in answers.items() if answer is None}:
        try:
            endpoints.refuse_unless_trusted(endpoints.resolve_url(cloud, settings.KEYS.nova_endpoint))
        except client.NovaUnavailableError:
            unanswered_instances |= unknown_instances
    hosts = Host.objects.in_bulk({one.host_id for one in broken_holdings})
    contradictions = {}
    for holding in broken_holdings:
        server, host = answers.get(holding.instance), hosts[holding.host_id]
        if (
            isinstance(server, client.NovaServer)
            and server.status == "ACTIVE"
            and server.is_on_host(host.name, host.node)
        ):
            explanation = (
                f"Nova shows instance {holding.instance} as ACTIVE on {host.name}, but it cannot use what it holds of"
                f" {holding.provider_name}: {holding.defect}. Repair or reconnect the device and hard-reboot the"
                " instance; or shelve and unshelve the instance through Nova, which gives it another device."
            )
            contradictions[holding.provider_uuid, holding.instance] = _build_contradiction(
                DiscrepancyKind.WITHOUT_DEVICE, holding, explanation
            )
    return [*contradictions.values()], unanswered_instances


def offers_accelerators(provider: ObservedProvider, groups: Iterable[ProfileGroup]) -> bool:
    """Return whether somebody else's provider offers what requests of this service ask for. This is a pure function.

    It does if it has the trait of providers of accelerators, or if it fits one of these groups of device profiles: it
    has the group's resource class and the traits that the group requires.
    """
    if not provider.inventories:
        return False
    return OWNER_TRAIT in provider.traits or any(
        first_resource_class(group) in provider.inventories
        and {
            key.removeprefix("trait:")
            for key, value in group.items()
            if key.startswith("trait:") and value == "required"
        }
        <= provider.traits
        for group in groups
    )


def _find_foreign_offers(hosts: Collection[int]) -> list[Contradiction]:
    """Find providers below these hosts' compute providers that offer accelerators and that no device here has.

    Usually costs one statement, two more if there are providers of others.
    """
    foreign = [
        (host, decode_observed(document))
        for host, documents in Tree.objects.filter(host__in=hosts).exclude(foreign=[]).values_list("host", "foreign")
        for document in documents
    ]
    if not foreign:
        return []
    uuids = [provider.uuid for _, provider in foreign]
    deployables = Deployable.objects.filter(rp_uuid__in=uuids).order_by().values_list("rp_uuid")
    written = WrittenProvider.objects.filter(uuid__in=uuids).values_list("uuid")
    known_uuids = {str(uuid) for (uuid,) in deployables.union(written)}
    groups = [group for profile in DeviceProfile.objects.values_list("groups", flat=True) for group in profile]
    return [
        Contradiction(
            DiscrepancyKind.FOREIGN, host, None, provider.uuid, provider.name, None, _explain_foreign_offer(provider)
        )
        for host, provider in foreign
        if provider.uuid not in known_uuids and offers_accelerators(provider, groups)
    ]


def _explain_foreign_offer(provider: ObservedProvider) -> str:
    """Return what is wrong with a provider that offers accelerators and that no device here has, and what to do."""
    offered = ", ".join(sorted(provider.inventories))
    return (
        f"Provider {provider.name} ({provider.uuid}) offers {offered} below the compute provider of this host, but no"
        " device here has it. Placement can choose it for an instance, and then the bind is answered with 404 and the"
        " boot fails. Another installation may have left it behind, or another service may own it. If nobody uses it:"
        f" openstack resource provider delete {provider.uuid}. If another service owns it, give it traits by which the"
        " device profiles tell it from the devices here, and remove OWNER_CYBORG."
    )


def _build_contradiction(kind: DiscrepancyKind, holding: HoldingRequest, explanation: str) -> Contradiction:
    """Build a contradiction about the instance and the provider of this request."""
    return Contradiction(
        kind,
        holding.host_id,
        holding.device_id,
        holding.provider_uuid,
        holding.provider_name,
        holding.instance,
        explanation,
    )


def _load_due_hosts() -> list[tuple[int, datetime, datetime]]:
    """Return at most HOST_BATCH hosts that must be compared (see `step`), the longest due first. Costs one statement.

    Each is its id, the time of the last look, and the present time of the database.
    """
    is_due = Q(compared_at=None) | Q(looked_at__gt=F("compared_at")) | Q(compare_at__lte=Now())
    due = Tree.objects.filter(is_due).order_by(Coalesce("compare_at", "looked_at"), "host")
    return list(due.values_list("host", "looked_at", Now())[:HOST_BATCH])


def _load_providers(hosts: Collection[int]) -> list[ComparedProvider]:
    """Return the providers of these hosts that Placement showed at the last look. Costs one statement."""
    deployables = Deployable.objects.filter(rp_uuid=OuterRef("uuid"))
    device_id = deployables.order_by(F("missing_since").asc(nulls_first=True)).values("device")[:1]
    bound_requests = AcceleratorRequest.objects.filter(deployable__rp_uuid=OuterRef("uuid"), state=RequestState.BOUND)
    rows = (
        WrittenProvider.objects.filter(host__in=hosts, seen__isnull=False)
        .order_by("uuid")
        .values_list(
            "uuid", "host", KT("seen__name"), "seen__generation", "claims", Subquery(device_id), Exists(bound_requests)
        )
    )
    return [
        ComparedProvider(
            str(uuid), host, name, generation, claims and msgspec.convert(claims, StoredClaims), device, in_use
        )
        for uuid, host, name, generation, claims, device, in_use in rows
    ]


def _load_holdings(hosts: Collection[int]) -> list[HoldingRequest]:
    """Return the requests that hold a handle of these hosts' devices, oldest first. Costs one statement."""
    requests = AcceleratorRequest.objects.filter(
        attach_handle__deployable__device__host__in=hosts,
        state__in=[RequestState.BIND_STARTED, RequestState.BOUND],
        instance_uuid__isnull=False,
        device_rp_uuid__isnull=False,
    )
    holdings = []
    for request in requests.select_related("attach_handle__deployable__device").only(*_HOLDING_COLUMNS).order_by("id"):
        handle = request.attach_handle
        assert handle
        holdings.append(
            HoldingRequest(
                str(request.uuid),
                handle.deployable.device.host_id,
                str(request.device_rp_uuid),
                handle.deployable.name,
                handle.deployable.device_id,
                str(request.instance_uuid),
                request.state == RequestState.BOUND,
                request.updated_at or request.created_at,
                _describe_defect(handle),
            )
        )
    return holdings


def _describe_defect(handle: AttachHandle) -> str:
    """Return what is wrong with a handle or its device, '' if nothing is."""
    device = handle.deployable.device
    if device.state in (DeviceState.MISSING, DeviceState.FAILED):
        return f"the device is {device.state}: {device.state_reason}"
    if device.status == Health.FAILED:
        return f"the device has failed: {device.status_reason}"
    if handle.deployable.missing_since or handle.missing_since:
        return "what it holds is missing from the device"
    return ""


def _read_allocations(cloud: Any, providers: Sequence[str]) -> dict[str, dict[str, dict[str, int]]]:
    """Return the allocations of these providers, read in parallel: provider → consumer → resource class → amount.

    Providers for which Placement gave no usable answer are left out.

    After one call could not reach Placement, or after READ_DEADLINE_S, the other providers are not read.
    """
    outages: list[Exception] = []

    def read_provider(uuid: str) -> dict[str, dict[str, int]] | None:
        """Return the allocations of one provider, None if Placement gave no usable answer or was found away before."""
        if outages:
            return None
        try:
            allocations = PlacementClient(cloud, settings.KEYS.placement_endpoint).read_allocations(uuid)
            return {str(UUID(consumer)): dict(amounts) for consumer, amounts in allocations.items()}
        except PlacementUnavailableError as error:
            outages.append(error)
        except (PlacementConflictError, PlacementRejectedError, ValueError):
            return None
        return None

    futures = call_in_parallel(read_provider, providers, READ_DEADLINE_S, client.MAX_PARALLEL_CALLS)
    answers = {uuid: future.result() for uuid, future in futures.items() if is_ended(future)}
    return {uuid: found for uuid, found in answers.items() if found is not None}


def _store_contradictions(
    contradictions: Iterable[Contradiction],
    stored: Sequence[Discrepancy],
    undecided: Sequence[Discrepancy],
    now: datetime,
) -> None:
    """Store the contradictions: insert new ones, update known ones, delete those that are resolved; record events.

    `stored` are all present rows of the compared hosts. Those in `undecided` are not deleted, because it is unknown
    whether they are resolved. Call it inside `conductor.writing()`.
    """
    contradiction_by_key = {fault.key: fault for fault in contradictions}
    stored_by_key = {_build_key(row): row for row in stored}
    new = [fault for key, fault in contradiction_by_key.items() if key not in stored_by_key]
    still_present = [row for key, row in stored_by_key.items() if key in contradiction_by_key]
    resolved = [row for key, row in stored_by_key.items() if key not in contradiction_by_key and row not in undecided]
    for row in still_present:
        row.seen_at, row.said = now, contradiction_by_key[_build_key(row)].explanation
    Discrepancy.objects.bulk_update(still_present, ["seen_at", "said"])
    Discrepancy.objects.filter(pk__in=[row.pk for row in resolved]).delete()
    created = Discrepancy.objects.bulk_create(_build_row(fault, now) for fault in new)
    hosts = Host.objects.in_bulk({row.host_id for row in created}) if created else {}
    devices = Device.objects.in_bulk({row.device_id for row in created if row.device_id}) if created else {}
    for row in created:
        row.host, row.device = hosts[row.host_id], devices.get(row.device_id)
    event_arguments = [("appeared", row, [None, row.label]) for row in created]
    event_arguments += [("mended", row, [row.label, None]) for row in resolved]
    if event_arguments:
        conductor.record_events([_build_event(*one) for one in event_arguments])


def _build_key(row: Discrepancy) -> tuple[str, str, str | None]:
    """Return the identity of the contradiction that this row stores (`Contradiction.key`)."""
    return row.kind, str(row.provider), str(row.instance) if row.instance else None


def _build_row(fault: Contradiction, now: datetime) -> Discrepancy:
    """Build the row of a contradiction that is seen for the first time; nothing is stored."""
    return Discrepancy(
        kind=fault.kind,
        host_id=fault.host_id,
        device_id=fault.device_id,
        provider=fault.provider_uuid,
        provider_name=fault.provider_name,
        instance=fault.instance,
        since=now,
        seen_at=now,
        said=fault.explanation,
    )


def _build_event(verb: str, row: Discrepancy, change: list[str | None]) -> dict[str, Any]:
    """Return the event `discrepancy.appeared` or `discrepancy.mended` (`verb`); nothing is written.

    `change` holds the discrepancy's label before and after, None for no discrepancy. The subject is the device, if
    there is one, so that the device's time line shows the event.
    """
    subject = (row.device.uuid, str(row.device)) if row.device else None
    concerned = ("instance", str(row.instance)) if row.instance else ("provider", str(row.provider))
    changes = {"discrepancy": change, concerned[0]: [None, concerned[1]][:: 1 if verb == "appeared" else -1]}
    reason = row.said if verb == "appeared" else ""
    return conductor.build_event(
        f"discrepancy.{verb}", EventSource.SYSTEM, JOB, host=row.host, subject=subject, changes=changes, reason=reason
    )


def _store_comparisons(
    comparisons: Iterable[tuple[ComparedProvider, StoredClaims | None, list[Contradiction]]],
    looked_at_by_host: Mapping[int, datetime],
    hosts_to_recheck: set[int],
) -> None:
    """Store the changed claims and mark the hosts as compared. Call it inside `conductor.writing()`.

    Hosts in `hosts_to_recheck` are compared again after CONFIRM_AFTER_S, even if nobody looks at them before.
    """
    changed_claims = [
        {"uuid": provider.uuid, "claims": claims}
        for provider, claims, _ in comparisons
        if claims and claims != provider.claims
    ]
    if changed_claims:
        with connection.cursor() as cursor:
            cursor.execute(UPDATE_CLAIMS, {"rows": msgspec.json.encode(changed_claims).decode()})
    recheck_at = Now() + timedelta(seconds=CONFIRM_AFTER_S)
    trees = [
        Tree(host_id=host, compared_at=looked_at, compare_at=recheck_at if host in hosts_to_recheck else None)
        for host, looked_at in looked_at_by_host.items()
    ]
    Tree.objects.bulk_update(trees, ["compared_at", "compare_at"])
