"""Load what is desired and what was written for one host, and store the outcome of a synchronization.

It connects the tables with the pure code in `mapping` and `sync`. Reading a host costs three statements, storing an
outcome at most four.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import msgspec
from django.db import connection, transaction

from accelerators.models import Host
from placement_sync.mapping import DeployableRecord
from placement_sync.models import Tree
from placement_sync.reconcile import ObservedProvider, WrittenRecord
from placement_sync.sync import SyncOutcome

SELECT_DEPLOYABLES = """
SELECT p.name, coalesce(p.rp_uuid::text, ''), CASE WHEN p.missing_since IS NULL THEN p.num_accelerators ELSE 0 END,
  coalesce((SELECT json_object_agg(a.key, a.value) FROM accelerators_attribute a WHERE a.deployable_id = p.id), '{}'),
  d.state = 'ready' AND p.missing_since IS NULL
FROM accelerators_deployable p JOIN accelerators_device d ON d.id = p.device_id
WHERE d.host_id = %s AND p.rp_uuid IS NOT NULL
  AND NOT EXISTS (SELECT FROM accelerators_attachhandle t WHERE t.deployable_id = p.id AND t.attach_type = 'DEV')
ORDER BY p.missing_since NULLS FIRST, p.id
"""
"""The deployables of a host that are providers.

A provider exists from the time when its device first left `inactive` (then its id is recorded) until it is removed.
Device nodes (attach type DEV) are left out: they are not for guests, so Nova must never be offered one.
"""
SELECT_WRITTEN = (
    "SELECT uuid::text, classes::json, traits::json, seen::json FROM placement_sync_writtenprovider WHERE host_id = %s"
)
UPSERT_WRITTEN = """
INSERT INTO placement_sync_writtenprovider AS t (uuid, host_id, classes, traits, seen)
SELECT x.uuid, %s, x.classes, x.traits, x.seen
FROM jsonb_to_recordset(%s::jsonb) AS x(uuid uuid, classes jsonb, traits jsonb, seen jsonb)
ON CONFLICT (uuid) DO UPDATE SET host_id = excluded.host_id, classes = excluded.classes, traits = excluded.traits,
  seen = excluded.seen
"""
DELETE_OTHER_WRITTEN = "DELETE FROM placement_sync_writtenprovider WHERE host_id = %s AND NOT uuid = ANY(%s::uuid[])"
UPSERT_TREE = """
INSERT INTO placement_sync_tree AS t (host_id, root, looked_at, synced_at, problems)
VALUES (%(host)s, %(root)s, now(), now(), %(problems)s::jsonb)
ON CONFLICT (host_id) DO UPDATE SET root = excluded.root, looked_at = now(), synced_at = now(),
  problems = excluded.problems
"""


def load_deployables(host: Host) -> list[DeployableRecord]:
    """Return the host's deployables that are providers. One statement."""
    with connection.cursor() as cursor:
        cursor.execute(SELECT_DEPLOYABLES, [host.pk])
        return [DeployableRecord(*row) for row in cursor.fetchall()]


def load_written(host: Host) -> dict[str, WrittenRecord]:
    """Return what was last written to each provider of the host, by provider uuid. One statement."""
    with connection.cursor() as cursor:
        cursor.execute(SELECT_WRITTEN, [host.pk])
        return {uuid: _decode_written(*row) for uuid, *row in cursor.fetchall()}


def load_root(host: Host) -> str:
    """Return the compute provider's uuid as of the last look, or '' if there was none. One statement."""
    uuid = Tree.objects.filter(pk=host.pk).values_list("root", flat=True).first()
    return str(uuid) if uuid else ""


def store_outcome(host: Host, outcome: SyncOutcome) -> None:
    """Store the outcome of a synchronization, and delete the rows of providers that it no longer contains.

    One transaction.
    """
    rows = [_encode_written(uuid, entry) for uuid, entry in sorted(outcome.written.items())]
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(DELETE_OTHER_WRITTEN, [host.pk, sorted(outcome.written)])
        if rows:
            cursor.execute(UPSERT_WRITTEN, [host.pk, msgspec.json.encode(rows).decode()])
        problems = msgspec.json.encode(outcome.problems).decode()
        cursor.execute(UPSERT_TREE, {"host": host.pk, "root": outcome.root or None, "problems": problems})


def _decode_written(classes: list[str], traits: list[str], seen: Mapping[str, Any] | None) -> WrittenRecord:
    observed = ObservedProvider(**{**seen, "traits": frozenset(seen["traits"])}) if seen else None
    return WrittenRecord(frozenset(classes), frozenset(traits), observed)


def _encode_written(uuid: str, entry: WrittenRecord) -> dict[str, Any]:
    seen = {**asdict(entry.seen), "traits": sorted(entry.seen.traits)} if entry.seen else None
    return {"uuid": uuid, "classes": sorted(entry.classes), "traits": sorted(entry.traits), "seen": seen}
