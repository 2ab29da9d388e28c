"""Find out what an open page of the console shows, and read a version of all that such pages show.

A page of one row, such as a request, has a subject: it is told to reload itself only if the version of the subject has
changed. All other pages that are no lists show data of many rows: they have collections, whose generations count.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from django.db import connection
from django.db.models import QuerySet

from accelerators.models import AcceleratorRequest, Attachment, Bulk, Command, Device, DeviceProfile, Host, Rollout
from accelerators.runtime.generations import CollectionName
from accelerators.ui.changelist import parse_uuid
from agents.liveness import compute_thresholds

PAGE_PATTERN = re.compile(r"\A/admin/accelerators/([a-z]{1,32})/([0-9a-f-]{1,36})/change/\Z")
MAX_ID_DIGITS = 18
MODELS = {
    "host": Host,
    "device": Device,
    "acceleratorrequest": AcceleratorRequest,
    "command": Command,
    "attachment": Attachment,
    "rollout": Rollout,
    "bulk": Bulk,
    "deviceprofile": DeviceProfile,
}
"""The models whose pages this module knows, by their name in the address."""
CAPACITY: frozenset[CollectionName] = frozenset({"devices", "hosts", "requests"})
COLLECTIONS_BY_PATH: dict[str, frozenset[CollectionName]] = {"/admin/usage/": CAPACITY, "/admin/census/": CAPACITY}
"""The collections of pages that do not show everything."""

NEWEST_EVENT = "(SELECT concat_ws(' ', e.at, e.id) FROM accelerators_event e WHERE {} ORDER BY e.at DESC LIMIT 1)"
DISCREPANCIES = (
    "(SELECT string_agg(concat_ws(' ', x.id, x.updated_at), ' ' ORDER BY x.id) FROM placement_sync_discrepancy x"
    " WHERE {})"
)
INTENTS = (
    "(SELECT string_agg(concat_ws(' ', i.kind, i.attempts, i.last_error), ' ' ORDER BY i.id) FROM accelerators_intent i"
    " WHERE i.key = {})"
)
VERSIONS = {
    "host": f"""
SELECT h.id, hashtextextended(concat_ws(' ', h::text, a::text, l.seen_at >= %(up)s, l.seen_at >= %(down)s,
  (SELECT string_agg(d::text, ' ' ORDER BY d.id) FROM accelerators_device d WHERE d.host_id = h.id),
  {NEWEST_EVENT.format("e.host = h.name")}, {INTENTS.format("h.uuid::text")},
  {DISCREPANCIES.format("x.host_id = h.id")},
  (SELECT string_agg(w::text, ' ' ORDER BY w.id) FROM accelerators_driverwish w WHERE w.host_id = h.id),
  (SELECT string_agg(concat_ws(' ', c.id, c.state), ' ' ORDER BY c.id) FROM accelerators_command c
    WHERE c.host_id = h.id AND (c.ended_at IS NULL OR c.ended_at > now() - interval '1 minute'))), 0)
FROM accelerators_host h LEFT JOIN agents_agent a ON a.host_id = h.id LEFT JOIN agents_lease l ON l.host_id = h.id
WHERE h.id = ANY(%(keys)s)""",
    "acceleratorrequest": f"""
SELECT r.id, hashtextextended(concat_ws(' ', r::text, f.name, t::text, p.name, d.vendor, d.model, d.subsystem,
  d.address, {NEWEST_EVENT.format("e.subject = r.uuid")}, {INTENTS.format("r.uuid::text")},
  {DISCREPANCIES.format("x.instance = r.instance_uuid")},
  (SELECT string_agg(concat_ws(' ', o.id, o.state, o.fault), ' ' ORDER BY o.id) FROM accelerators_acceleratorrequest o
    WHERE o.instance_uuid = r.instance_uuid),
  (SELECT string_agg(concat_ws(' ', c.id, c.state), ' ' ORDER BY c.id) FROM accelerators_command c
    WHERE c.request = r.uuid)), 0)
FROM accelerators_acceleratorrequest r JOIN accelerators_deviceprofile f ON f.id = r.profile_id
LEFT JOIN accelerators_attachhandle t ON t.id = r.attach_handle_id
LEFT JOIN accelerators_deployable p ON p.id = coalesce(t.deployable_id, r.deployable_id)
LEFT JOIN accelerators_device d ON d.id = p.device_id WHERE r.id = ANY(%(keys)s)""",
    "command": f"""
SELECT c.id, hashtextextended(concat_ws(' ', c.updated_at, c.state, c.percent, c.progress, c.taken_at, c.started_at,
  c.answered_at, c.outcome, c.text, c.ended_at, c.device_id, h.name, {NEWEST_EVENT.format("e.subject = c.uuid")}), 0)
FROM accelerators_command c JOIN accelerators_host h ON h.id = c.host_id WHERE c.id = ANY(%(keys)s)""",
    "attachment": f"""
SELECT a.id, hashtextextended(concat_ws(' ', a::text, {INTENTS.format("a.uuid::text")},
  (SELECT string_agg(concat_ws(' ', r.id, r.state, t.attach_type, t.attach_info), ' ' ORDER BY r.id)
    FROM accelerators_acceleratorrequest r LEFT JOIN accelerators_attachhandle t ON t.id = r.attach_handle_id
    WHERE r.uuid = ANY(a.requests))), 0)
FROM accelerators_attachment a WHERE a.id = ANY(%(keys)s)""",
    "rollout": """
SELECT o.id, hashtextextended(concat_ws(' ', o::text, (SELECT string_agg(s::text, ' ' ORDER BY s.state) FROM (
  SELECT state, count(*), sum(attempts), max(ended_at) FROM accelerators_rolloutstep WHERE rollout_id = o.id
  GROUP BY state) s)), 0)
FROM accelerators_rollout o WHERE o.id = ANY(%(keys)s)""",
    "bulk": """
SELECT b.id, hashtextextended(concat_ws(' ', b::text, (SELECT string_agg(s::text, ' ' ORDER BY s::text) FROM (
  SELECT outcome, state, count(*), sum(attempts) FROM accelerators_bulkitem WHERE bulk_id = b.id
  GROUP BY outcome, state) s)), 0)
FROM accelerators_bulk b WHERE b.id = ANY(%(keys)s)""",
}
"""Kind of subject → statement that reads the versions of subjects.

Plain SQL, because PostgreSQL hashes the rows of several tables and sends only the hashes. Every change of the inventory
has an event, so the newest event of a host stands for units, attributes and requests."""


@dataclass(frozen=True)
class PageSubject:
    """The row that a page shows: a kind of VERSIONS, and its primary key."""

    kind: str
    key: int


@dataclass(frozen=True)
class PageContent:
    """What a page shows: one row (`subject`), or the collections whose changes it shows.

    Without both it shows everything.
    """

    subject: PageSubject | None = None
    collections: frozenset[CollectionName] | None = None


EVERYTHING = PageContent()


def find_page_content(path: str) -> PageContent:
    """Return what the page at this path shows.

    The page of a device shows its host. The page of a profile shows which hosts fit it, and that of a draft what would
    happen now, so they have no subject. Costs at most one statement.
    """
    if path in COLLECTIONS_BY_PATH:
        return PageContent(collections=COLLECTIONS_BY_PATH[path])
    match = PAGE_PATTERN.match(path)
    model = MODELS.get(match[1]) if match else None
    if match is None or model is None:
        return EVERYTHING
    if model is DeviceProfile:
        return PageContent(collections=CAPACITY | {"profiles"})
    uuid = parse_uuid(match[2])
    if uuid is None and not (match[2].isdecimal() and len(match[2]) <= MAX_ID_DIGITS):
        return EVERYTHING
    rows: QuerySet[Any] = model._default_manager.filter(**({"pk": int(match[2])} if uuid is None else {"uuid": uuid}))
    if model in (Bulk, Rollout):
        rows = rows.exclude(state="draft")
    key = rows.values_list("host_id" if model is Device else "pk", flat=True).first()
    return PageContent(PageSubject("host" if model is Device else match[1], key)) if key is not None else EVERYTHING


def load_versions(subjects: Collection[PageSubject]) -> dict[PageSubject, int]:
    """Return subject → hash, which changes when something changes that the subject's page shows.

    Subjects that do not exist are left out. Costs one statement for each kind of subject.
    """
    keys_by_kind = defaultdict[str, list[int]](list)
    for subject in subjects:
        keys_by_kind[subject.kind].append(subject.key)
    up, down = compute_thresholds()
    versions: dict[PageSubject, int] = {}
    with connection.cursor() as cursor:
        for kind, keys in keys_by_kind.items():
            cursor.execute(VERSIONS[kind], {"keys": keys} | ({"up": up, "down": down} if kind == "host" else {}))
            versions |= {PageSubject(kind, key): version for key, version in cursor.fetchall()}
    return versions
