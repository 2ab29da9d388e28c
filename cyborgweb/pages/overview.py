"""The console's first page: what needs an operator, capacity, hosts and agents, pending work, and the latest events.

It costs four statements of its own, and the query to the gateways, whatever the number of rows (promise P3).
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.db import connection
from django.http import HttpRequest
from django.urls import reverse
from django.utils.safestring import SafeString

from accelerators.domain.choices import Tone
from accelerators.domain.states import DeviceState, DeviceType
from accelerators.models import Event
from accelerators.runtime import database_clock, jobs
from accelerators.ui import badges, timeline
from agents import telemetry
from agents.liveness import LIVENESS_STATES, compute_thresholds
from cyborgweb.monitoring import backlog
from cyborgweb.pages import alerts, capacity, first_steps

MAX_EVENTS = 20
MAX_TROUBLES = 50
"""Failing drivers and faults that are listed; their number is always counted in full."""

SELECT_HOSTS_AND_FAILING = """
WITH hosts AS (
  SELECT count(*) AS total, count(h.stale_since) AS stale, count(a.host_id) AS agents,
    EXISTS (SELECT FROM accelerators_deviceprofile) AS has_profiles,
    EXISTS (SELECT FROM accelerators_acceleratorrequest) AS has_requests,
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
gateways is read (promise P3). Plain SQL, because the ORM cannot expand a JSON object into rows.
"""


@dataclass(frozen=True)
class LinkedCount:
    """A number of devices with a link to their list."""

    number: int
    url: str


@dataclass(frozen=True)
class DeviceStateRow:
    """One row of the overview's table of devices: the devices in one state, by type and in total."""

    device_state: str
    state: SafeString
    cells: list[LinkedCount]
    total: LinkedCount


def build_overview_context(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """Add the overview to the index page's context, and return the context. Unfold calls it.

    For a user who may not view devices nothing is queried, and the page has only the sidebar and a sentence.
    """
    context |= {"title": "Overview", "may_view": request.user.has_perm("accelerators.view_device")}
    if context["may_view"]:
        now, current_backlog = database_clock.now(), backlog.read_backlog()
        hosts, troubles = _load_hosts_and_troubles()
        devices, loads = _build_device_table(current_backlog.devices), telemetry.get_last_loads()
        classes, projects = capacity.query_capacity(loads, capacity.BY_RESOURCE_CLASS, capacity.BY_PROJECT)
        system_state = alerts.SystemState(
            hosts,
            Counter({line.device_state: line.total.number for line in devices["lines"]}),
            current_backlog,
            classes,
            troubles["failing_n"],
            troubles["faults_n"],
            now,
        )
        facts = first_steps.SystemFacts(
            bool(hosts["agents"]),
            any(system_state.devices_by_state[state] for state in first_steps.ADMITTED_STATES),
            bool(hosts["has_profiles"]),
            bool(hosts["has_requests"]),
            next((one.name for one in classes if one.name), ""),
        )
        context |= {
            "as_of": now,
            "first_steps": first_steps.list_first_steps(request, facts),
            "hosts": hosts,
            "agents": [(badges.render_choice(state), state, hosts[state]) for state in LIVENESS_STATES],
            "devices": devices,
            "classes": classes,
            "projects": projects,
            "missing_nodes": loads.silent,
            "needs": [(badges.render_badge(need.label, need.tone), need) for need in alerts.list_alerts(system_state)],
            "failures": troubles,
            "waiting": current_backlog,
            "notices": [
                _describe_delay(
                    "Placement",
                    "provider",
                    current_backlog.placement_intents,
                    reverse("admin:placement_sync_tree_changelist"),
                    now,
                ),
                _describe_delay(
                    "Nova", "notice", current_backlog.nova_intents, alerts.list_url("intent", kind="notice"), now
                ),
            ],
            "events": timeline.render_events(Event.objects.all()[:MAX_EVENTS]),
        }
        context["calm"] = not any(need.tone in ("bad", "warn") for _, need in context["needs"])
    return context


def _describe_delay(
    name: str, kind: str, backlog_of_service: backlog.IntentBacklog, url: str, now: datetime
) -> dict[str, Any]:
    """Return what the page shows of Placement or Nova (`name`): the number of changes that wait to be sent, the time of
    the oldest, a link to `url`, and a badge.

    `kind` is the kind of the intents. The badge is `no cloud` if this process has no handler for it; otherwise `in
    step` if nothing waits, `stuck`, `behind` if the oldest waits for more than `alerts.MAX_CLOUD_DELAY`, or `sending`.
    """
    is_late = backlog_of_service.oldest is not None and now - backlog_of_service.oldest > alerts.MAX_CLOUD_DELAY
    delay: tuple[str, Tone] = (
        ("stuck", "bad") if backlog_of_service.stuck else ("behind", "warn") if is_late else ("sending", "busy")
    )
    badge = (
        badges.render_badge(*delay, backlog_of_service.error)
        if backlog_of_service.number
        else badges.render_badge("in step", "good")
    )
    return {
        "name": name,
        "url": url,
        "number": backlog_of_service.number,
        "mark": badge
        if jobs.has_handler(kind)
        else badges.render_badge("no cloud", "calm", "No cloud is configured, so nothing is sent."),
        "oldest": badges.render_relative_time(backlog_of_service.oldest) if backlog_of_service.oldest else "",
    }


def _build_device_table(counted: list[tuple[str, str, int]]) -> dict[str, Any]:
    """Return the table of devices by state and type, with only the states and types that occur, and with totals.

    `counted` holds (state, type, number of devices).
    """
    counts = {(state, kind): number for state, kind, number in counted}
    kinds = [kind.value for kind in DeviceType if any(key[1] == kind for key in counts)]
    states = [state.value for state in DeviceState if any(key[0] == state for key in counts)]

    def build_cell(state: str = "", kind: str = "") -> LinkedCount:
        """Return how many devices have this state and type ('' for any), with a link to their list."""
        filters = {"state__exact": state, "type__exact": kind}
        number = sum(n for (s, k), n in counts.items() if state in ("", s) and kind in ("", k))
        return LinkedCount(number, alerts.list_url("device", **{name: word for name, word in filters.items() if word}))

    lines = [
        DeviceStateRow(
            state, badges.render_device_state(state), [build_cell(state, kind) for kind in kinds], build_cell(state)
        )
        for state in states
    ]
    totals = [build_cell(kind=kind) for kind in kinds]
    return {"kinds": kinds, "lines": lines, "totals": totals, "total": build_cell()}


def _load_hosts_and_troubles() -> tuple[dict[str, int], dict[str, Any]]:
    """Return the numbers of hosts and agents by state, and the troubles: drivers and backends that fail now, and
    hardware that drivers skipped, with the reasons.

    The numbers also have `has_profiles` and `has_requests`: whether device profiles and requests exist.
    The troubles are `failing` and `faults`, at most MAX_TROUBLES of each, and the whole numbers `failing_n` and
    `faults_n`. Costs one statement.
    """
    up, down = compute_thresholds()
    with connection.cursor() as cursor:
        cursor.execute(SELECT_HOSTS_AND_FAILING, {"up": up, "down": down, "most": MAX_TROUBLES})
        records = cursor.fetchall()
    rows = [row[1:] for row in records if row[1] is not None]
    failing = [
        {
            "host": badges.render_page_link("host", host, host),
            "driver": driver,
            "error": error,
            "since": badges.render_relative_time(since),
        }
        for host, driver, error, since, *_ in rows
        if error
    ]
    faults = [
        {"host": badges.render_page_link("host", host, host), "driver": driver, "subject": subject, "reason": reason}
        for host, driver, _, _, said, *_ in rows
        for subject, reason in (json.loads(said) if isinstance(said, str) else said or [])
    ]
    failing_n, faults_n = (int(rows[0][5]), int(rows[0][6] or 0)) if rows else (0, 0)
    troubles = {"failing": failing, "failing_n": failing_n, "faults": faults[:MAX_TROUBLES], "faults_n": faults_n}
    return json.loads(records[0][0]), troubles
