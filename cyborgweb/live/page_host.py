"""Find the host that an open page of the console shows, and read a version of all that such pages show of a host."""

from __future__ import annotations

import re
from collections.abc import Collection

from django.db import connection

from accelerators.models import Device, Host
from accelerators.ui.changelist import parse_uuid
from agents.liveness import compute_thresholds

PAGE_PATTERN = re.compile(r"\A/admin/accelerators/(host|device)/([0-9a-f-]{1,36})/change/\Z")
MAX_ID_DIGITS = 18
SELECT_VERSIONS = """
SELECT h.id, hashtextextended(concat_ws(' ', h::text, a::text, l.seen_at >= %(up)s, l.seen_at >= %(down)s,
  (SELECT string_agg(d::text, ' ' ORDER BY d.id) FROM accelerators_device d WHERE d.host_id = h.id),
  (SELECT concat_ws(' ', e.at, e.id) FROM accelerators_event e WHERE e.host = h.name ORDER BY e.at DESC LIMIT 1),
  (SELECT string_agg(concat_ws(' ', i.kind, i.attempts), ' ' ORDER BY i.id) FROM accelerators_intent i
    WHERE i.key = h.uuid::text),
  (SELECT string_agg(concat_ws(' ', c.id, c.state), ' ' ORDER BY c.id) FROM accelerators_command c
    WHERE c.host_id = h.id AND (c.ended_at IS NULL OR c.ended_at > now() - interval '1 minute'))), 0)
FROM accelerators_host h LEFT JOIN agents_agent a ON a.host_id = h.id LEFT JOIN agents_lease l ON l.host_id = h.id
WHERE h.id = ANY(%(hosts)s)
"""
"""Plain SQL, because PostgreSQL hashes the rows of several tables and sends only the hashes. Every change of the
inventory has an event, so the newest event of the host stands for units, attributes and requests."""


def find_host_id(path: str) -> int | None:
    """Return the primary key of the host that a page shows, alone or with one of its devices.

    Returns None for every other page, and if there is no such row. Costs at most one statement.
    """
    match = PAGE_PATTERN.match(path)
    if match is None:
        return None
    model, text = match.groups()
    uuid = parse_uuid(text)
    if uuid is None and not (text.isdecimal() and len(text) <= MAX_ID_DIGITS):
        return None
    condition = {"pk": int(text)} if uuid is None else {"uuid": uuid}
    if model == "host":
        return Host.objects.filter(**condition).values_list("pk", flat=True).first()
    return Device.objects.filter(**condition).values_list("host_id", flat=True).first()


def load_host_versions(hosts: Collection[int]) -> dict[int, int]:
    """Return host → hash, which changes when something changes that the host's page or a device's page shows.

    Hosts that do not exist are left out. Costs one statement, or none without hosts.
    """
    if not hosts:
        return {}
    up, down = compute_thresholds()
    with connection.cursor() as cursor:
        cursor.execute(SELECT_VERSIONS, {"up": up, "down": down, "hosts": list(hosts)})
        return dict(cursor.fetchall())
