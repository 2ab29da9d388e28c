"""The console's first page: what needs an operator, capacity, hosts and agents, pending work, and the latest events.

It costs four statements of its own, and the query to the gateways, whatever the number of rows (promise P3).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from django.db import connection
from django.http import HttpRequest
from django.urls import reverse
from django.utils.safestring import SafeString

from accelerators.domain.states import DeviceState, DeviceType
from accelerators.models import Event
from accelerators.runtime import jobs
from accelerators.ui import badges, timeline
from agents import telemetry
from agents.admin import TONES
from agents.liveness import limits
from cyborgweb.monitoring import backlog
from cyborgweb.pages import alerts, capacity

EVENTS = 20
TROUBLES = 50
"""Failing drivers and faults that are listed; their number is always counted in full."""

HOSTS_AND_FAILING = """
WITH hosts AS (
  SELECT count(*) AS total, count(h.stale_since) AS stale, count(a.host_id) AS agents,
    count(a.host_id) FILTER (WHERE l.seen_at >= %(up)s) AS up,
    count(a.host_id) FILTER (WHERE l.seen_at < %(up)s AND l.seen_at >= %(down)s) AS late,
    count(a.host_id) FILTER (WHERE l.seen_at < %(down)s OR l.seen_at IS NULL) AS down
  FROM accelerators_host h LEFT JOIN agents_agent a ON a.host_id = h.id LEFT JOIN agents_lease l ON l.host_id = h.id),
said AS (
  SELECT h.name AS host, d.key AS driver, d.value FROM accelerators_host h CROSS JOIN LATERAL jsonb_each(h.drivers) d),
d AS (
  SELECT * FROM said UNION ALL
  SELECT host, driver || ':' || b.key, b.value FROM said CROSS JOIN LATERAL jsonb_each(said.value->'backends') b),
failing AS (
  SELECT d.host, d.driver, d.value->>'error' AS error, d.value->>'since' AS since, d.value->'faults' AS faults,
         count(*) FILTER (WHERE d.value->>'error' <> '') OVER (),
         sum(jsonb_array_length(coalesce(d.value->'faults', '[]'))) OVER ()
  FROM d WHERE d.value->>'error' <> '' OR jsonb_array_length(coalesce(d.value->'faults', '[]')) > 0
  ORDER BY d.value->>'error' = '', d.value->>'since' DESC, d.host LIMIT %(most)s)
SELECT to_json(hosts)::text, failing.* FROM hosts LEFT JOIN failing ON true
ORDER BY failing.error = '', failing.since DESC, failing.host
"""
"""Hosts and failing drivers in one statement, so that the page stays within ten statements also when the list of
gateways is read (promise P3).
"""


@dataclass(frozen=True)
class Cell:
    """A number of devices with a link to their list."""

    number: int
    url: str


@dataclass(frozen=True)
class Line:
    """One row of the table: the devices in one state, by type and in total."""

    word: str
    state: SafeString
    cells: list[Cell]
    total: Cell


def context(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """Add to the index page's context. A user who may not view devices sees only the navigation and a sentence."""
    context |= {"title": "Overview", "may_view": request.user.has_perm("accelerators.view_device")}
    if context["may_view"]:
        now, doing, (hosts, troubles) = datetime.now(UTC), backlog.now(), _hosts_and_troubles()
        devices, loads = _devices(doing.devices), telemetry.last()
        classes, projects = capacity.drawn(loads, capacity.CLASSES, capacity.HOLDERS)
        house = alerts.House(
            hosts,
            Counter({line.word: line.total.number for line in devices["lines"]}),
            doing,
            classes,
            troubles["failing_n"],
            troubles["faults_n"],
            now,
        )
        context |= {
            "as_of": now,
            "hosts": hosts,
            "agents": [(badges.mark(word, tone), word, hosts[word]) for word, tone in TONES.items()],
            "devices": devices,
            "classes": classes,
            "projects": projects,
            "silent": loads.silent,
            "needs": [(badges.mark(need.word, need.tone), need) for need in alerts.needs(house)],
            "troubles": troubles,
            "waiting": doing,
            "told": [
                _told("Placement", "provider", doing.placement, reverse("admin:placement_sync_tree_changelist"), now),
                _told("Nova", "notice", doing.nova, alerts.listed("intent", kind="notice"), now),
            ],
            "events": timeline.rows(Event.objects.all()[:EVENTS]),
        }
        context["calm"] = not any(need.tone in ("bad", "warn") for _, need in context["needs"])
    return context


def _told(name: str, kind: str, told: backlog.Telling, url: str, now: datetime) -> dict[str, Any]:
    """Describe how far Placement or Nova is behind."""
    late = told.oldest is not None and now - told.oldest > alerts.LATE
    tone, word = ("bad", "stuck") if told.stuck else ("warn", "behind") if late else ("busy", "sending")
    mark = badges.mark(word, tone, told.error) if told.number else badges.mark("in step", "good")
    return {
        "name": name,
        "url": url,
        "number": told.number,
        "mark": mark
        if jobs.has_taker(kind)
        else badges.mark("no cloud", "calm", "No cloud is configured, so nothing is sent."),
        "oldest": badges.ago(told.oldest) if told.oldest else "",
    }


def _devices(counted: list[tuple[str, str, int]]) -> dict[str, Any]:
    """Return the table of devices, state by type, with only the types and states that occur."""
    counts = {(state, kind): number for state, kind, number in counted}
    kinds = [kind.value for kind in DeviceType if any(key[1] == kind for key in counts)]
    states = [state.value for state in DeviceState if any(key[0] == state for key in counts)]

    def cell(state: str = "", kind: str = "") -> Cell:
        asked = {"state__exact": state, "type__exact": kind}
        number = sum(n for (s, k), n in counts.items() if state in ("", s) and kind in ("", k))
        return Cell(number, alerts.listed("device", **{name: word for name, word in asked.items() if word}))

    lines = [Line(state, badges.state(state), [cell(state, kind) for kind in kinds], cell(state)) for state in states]
    totals = [cell(kind=kind) for kind in kinds]
    return {"kinds": kinds, "lines": lines, "totals": totals, "total": cell()}


def _hosts_and_troubles() -> tuple[dict[str, int], dict[str, Any]]:
    """Count hosts and agents by state; list the drivers that fail now, and the hardware that drivers skipped, with
    the reason.
    """
    up, down = limits()
    with connection.cursor() as cursor:
        cursor.execute(HOSTS_AND_FAILING, {"up": up, "down": down, "most": TROUBLES})
        found = cursor.fetchall()
    rows = [row[1:] for row in found if row[1] is not None]
    failing = [
        {"host": badges.link("host", host, host), "driver": driver, "error": error, "since": badges.ago(since)}
        for host, driver, error, since, *_ in rows
        if error
    ]
    faults = [
        {"host": badges.link("host", host, host), "driver": driver, "subject": subject, "reason": reason}
        for host, driver, _, _, said, *_ in rows
        for subject, reason in (json.loads(said) if isinstance(said, str) else said or [])
    ]
    failing_n, faults_n = (int(rows[0][5]), int(rows[0][6] or 0)) if rows else (0, 0)
    troubles = {"failing": failing, "failing_n": failing_n, "faults": faults[:TROUBLES], "faults_n": faults_n}
    return json.loads(found[0][0]), troubles
