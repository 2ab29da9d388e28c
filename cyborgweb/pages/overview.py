"""The console's first page: what there is, who is heard, what fails, what waits, what happened last.

Called by unfold for the admin's index. At most seven statements of its own, whatever the number of rows (promise P3).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlencode

from django.db import connection
from django.db.models import Count, Min, Q
from django.http import HttpRequest
from django.urls import reverse
from django.utils.safestring import SafeString

from accelerators.admin import marks, timeline
from accelerators.admin.records import STUCK_AFTER
from accelerators.models import Device, Event, Host, Intent
from accelerators.states import DeviceState, DeviceType
from agents.admin import TONES, where
from agents.models import Spooled

EVENTS = 20
TROUBLES = 50
"""So many failing drivers are listed; their number is always whole."""

FAILING = """
SELECT h.name, d.key, d.value->>'error', d.value->>'since', d.value->'faults',
       count(*) FILTER (WHERE d.value->>'error' <> '') OVER (),
       sum(jsonb_array_length(coalesce(d.value->'faults', '[]'))) OVER ()
FROM accelerators_host h CROSS JOIN LATERAL jsonb_each(h.drivers) d
WHERE d.value->>'error' <> '' OR jsonb_array_length(coalesce(d.value->'faults', '[]')) > 0
ORDER BY d.value->>'error' = '', d.value->>'since' DESC, h.name LIMIT %s
"""


@dataclass(frozen=True)
class Cell:
    """A count that leads to the devices it counts."""

    number: int
    url: str


@dataclass(frozen=True)
class Line:
    """One state's counts, by type and in all."""

    state: SafeString
    cells: list[Cell]
    total: Cell


def context(request: HttpRequest, context: dict[str, Any]) -> dict[str, Any]:
    """The index page's context; who may not view devices sees the navigation and a sentence."""
    context |= {"title": "Overview", "may_view": request.user.has_perm("accelerators.view_device")}
    if context["may_view"]:
        hosts = _hosts()
        context |= {
            "as_of": datetime.now(UTC),
            "hosts": hosts,
            "agents": [(marks.mark(word, tone), word, hosts[word]) for word, tone in TONES.items()],
            "devices": _devices(),
            "troubles": _troubles(),
            "waiting": _waiting(),
            "events": timeline.rows(Event.objects.all()[:EVENTS]),
        }
    return context


def _hosts() -> dict[str, int]:
    """Hosts and agents in one statement."""
    enrolled = Q(agent__isnull=False)
    return Host.objects.aggregate(
        total=Count("pk"),
        stale=Count("pk", filter=Q(stale_since__isnull=False)),
        agents=Count("pk", filter=enrolled),
        **{word: Count("pk", filter=enrolled & where(word, "lease__seen_at")) for word in TONES},
    )


def _devices() -> dict[str, Any]:
    """State × type; columns are the types there are, rows the states there are."""
    counted = Device.objects.order_by().values_list("state", "type").annotate(n=Count("*"))
    counts = {(state, kind): number for state, kind, number in counted}
    kinds = [kind.value for kind in DeviceType if any(key[1] == kind for key in counts)]
    states = [state.value for state in DeviceState if any(key[0] == state for key in counts)]

    def cell(state: str = "", kind: str = "") -> Cell:
        asked = {"state__exact": state, "type__exact": kind}
        number = sum(n for (s, k), n in counts.items() if state in ("", s) and kind in ("", k))
        return Cell(number, _list("device", **{name: word for name, word in asked.items() if word}))

    lines = [Line(marks.state(state), [cell(state, kind) for kind in kinds], cell(state)) for state in states]
    return {"kinds": kinds, "lines": lines, "totals": [cell(kind=kind) for kind in kinds], "total": cell()}


def _troubles() -> dict[str, Any]:
    """Drivers that fail now, and what drivers could not take for a device."""
    with connection.cursor() as cursor:
        cursor.execute(FAILING, [TROUBLES])
        rows = cursor.fetchall()
    failing = [
        {"host": marks.link("host", host, host), "driver": driver, "error": error, "since": marks.ago(since)}
        for host, driver, error, since, *_ in rows
        if error
    ]
    faults = [
        {"host": marks.link("host", host, host), "driver": driver, "subject": subject, "reason": reason}
        for host, driver, _, _, said, *_ in rows
        for subject, reason in (json.loads(said) if isinstance(said, str) else said or [])
    ]
    failing_n, faults_n = (int(rows[0][5]), int(rows[0][6] or 0)) if rows else (0, 0)
    return {"failing": failing, "failing_n": failing_n, "faults": faults[:TROUBLES], "faults_n": faults_n}


def _waiting() -> dict[str, Any]:
    """What is on its way: reports not merged, intents not told."""
    spool = Spooled.objects.aggregate(n=Count("pk"), oldest=Min("received_at"))
    intents = Intent.objects.aggregate(
        n=Count("pk"), stuck=Count("pk", filter=Q(attempts__gte=STUCK_AFTER)), oldest=Min("created_at")
    )
    return {
        "spool": spool["n"],
        "spool_oldest": marks.ago(spool["oldest"]),
        "intents": intents["n"],
        "intents_oldest": marks.ago(intents["oldest"]),
        "stuck": intents["stuck"],
    }


def _list(model: str, **asked: str) -> str:
    url = reverse(f"admin:accelerators_{model}_changelist")
    return f"{url}?{urlencode(asked)}" if asked else url
