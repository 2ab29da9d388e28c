"""Load the desired and the written state of one host, and store the outcome of a synchronization.

It connects the tables with `mapping`, `reconcile` and `apply_writes`, which are free of Django. Reading a host costs
three statements, storing an outcome at most three.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from django.contrib.postgres.expressions import ArraySubquery
from django.db import transaction
from django.db.models import BooleanField, Exists, ExpressionWrapper, F, OuterRef, Q
from django.db.models.functions import JSONObject, Now

from accelerators.domain.offer import is_offered
from accelerators.domain.states import DeviceState, HandleType
from accelerators.models import AttachHandle, Attribute, Deployable, Host, ReleasedHandle
from placement_sync.apply_writes import SyncOutcome
from placement_sync.mapping import DeployableRecord
from placement_sync.models import Tree, WrittenProvider
from placement_sync.reconcile import ObservedProvider, WrittenRecord


def load_deployables(host: Host) -> list[DeployableRecord]:
    """Return the host's deployables that are providers, missing ones last. Costs one statement.

    The total of a missing deployable is 0. Deployables of missing devices come next to last, because the same provider
    may also have a deployable of the card that has replaced theirs.
    A provider exists from the time when its device first left `inactive` (then its id is recorded) until it is removed.
    A host whose removal has begun to delete has none. Device nodes (attach type DEV) are left out: they are not for
    guests, so Nova must never be offered one.
    """
    device_nodes = AttachHandle.objects.filter(deployable=OuterRef("pk"), attach_type=HandleType.DEV)
    attributes = Attribute.objects.filter(deployable=OuterRef("pk")).values(item=JSONObject(key="key", value="value"))
    releases = ReleasedHandle.objects.filter(handle__deployable=OuterRef("pk")).order_by()
    is_device_missing = ExpressionWrapper(Q(device__state=DeviceState.MISSING), BooleanField())
    rows = (
        Deployable.objects.filter(~Exists(device_nodes), device__host=host, rp_uuid__isnull=False)
        .filter(device__host__deleting_since__isnull=True)
        .order_by(F("missing_since").asc(nulls_first=True), is_device_missing, "id")
        .values_list(
            "name",
            "rp_uuid",
            "num_accelerators",
            "missing_since",
            "device__state",
            "device__status",
            ArraySubquery(attributes),
            ArraySubquery(releases.values("pk")),
        )
    )
    return [
        DeployableRecord(
            name,
            str(rp_uuid),
            total if missing_since is None else 0,
            {item["key"]: item["value"] for item in attribute_items},
            is_offered(state, health) and missing_since is None,
            len(released_ids),
        )
        for name, rp_uuid, total, missing_since, state, health, attribute_items, released_ids in rows
    ]


def load_written(host: Host) -> dict[str, WrittenRecord]:
    """Return what was last written to each provider of the host, and how Placement last showed it, by provider uuid.
    Costs one statement.
    """
    return {str(row.uuid): _decode_written(row) for row in WrittenProvider.objects.filter(host=host).defer("claims")}


def load_root_and_foreign(host: Host) -> tuple[str, dict[str, ObservedProvider]]:
    """Return the compute provider's uuid as of the last look ('' if there was none), and the providers of others below
    it. Costs one statement.
    """
    root, foreign = Tree.objects.filter(pk=host.pk).values_list("root", "foreign").first() or (None, [])
    providers = map(decode_observed, foreign)
    return str(root) if root else "", {one.uuid: one for one in providers}


def store_outcome(host: Host, outcome: SyncOutcome) -> None:
    """Store the outcome of a synchronization, and delete the rows of providers that it no longer contains.

    One transaction. The time at which Placement last matched completely stays if the outcome has problems. Stored
    claims stay.
    """
    tree = Tree(host=host, root=outcome.root or None, looked_at=Now(), problems=outcome.problems)
    tree.foreign = [_encode_observed(one) for one in outcome.foreign.values()]
    updated_fields = ["root", "looked_at", "problems", "foreign"]
    if not outcome.problems:
        tree.synced_at = Now()
        updated_fields.append("synced_at")
    written = [_encode_written(host, uuid, entry) for uuid, entry in sorted(outcome.written.items())]
    with transaction.atomic():
        WrittenProvider.objects.filter(host=host).exclude(uuid__in=outcome.written).delete()
        WrittenProvider.objects.bulk_create(
            written,
            update_conflicts=True,
            unique_fields=["uuid"],
            update_fields=["host", "classes", "traits", "seen"],
        )
        Tree.objects.bulk_create(
            [tree],
            update_conflicts=True,
            unique_fields=["host"],
            update_fields=updated_fields,
        )


def _decode_written(row: WrittenProvider) -> WrittenRecord:
    """Convert a row into a WrittenRecord; `seen` is None if Placement has not shown the provider."""
    observed = decode_observed(row.seen) if row.seen else None
    return WrittenRecord(frozenset(row.classes), frozenset(row.traits), observed)


def decode_observed(document: Mapping[str, Any]) -> ObservedProvider:
    """Convert the stored form of a provider."""
    return ObservedProvider(**{**document, "traits": frozenset(document["traits"])})


def _encode_observed(provider: ObservedProvider) -> dict[str, Any]:
    """Convert a provider to its stored form."""
    return {**asdict(provider), "traits": sorted(provider.traits)}


def _encode_written(host: Host, uuid: str, entry: WrittenRecord) -> WrittenProvider:
    """Build the row of a WrittenRecord, without `claims`; nothing is stored."""
    seen = _encode_observed(entry.seen) if entry.seen else None
    return WrittenProvider(uuid=uuid, host=host, classes=sorted(entry.classes), traits=sorted(entry.traits), seen=seen)
