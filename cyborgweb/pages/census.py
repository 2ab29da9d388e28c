"""The page of the load census, `/admin/census/`: which hosts have room for more requests of a profile, the least
busy first.

The question is sent by POST, so that a page that updates itself does not ask all agents again and again.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from accelerators.domain.errors import Reason, RefusedError
from accelerators.models import DeviceProfile
from accelerators.ui import badges
from cyborgweb.pages import capacity
from cyborgweb.telemetry import census

PROFILES = 500
"""Profile names that the form suggests; others can be typed."""
ROWS = 200
LONGEST = 100_000
"""Longest list of hosts that is accepted, in characters."""


def page(request: HttpRequest) -> HttpResponse:
    """Show the form and, after a POST, what the hosts answered or why the question was refused."""
    if not request.user.has_perm("accelerators.view_device"):
        raise PermissionDenied
    said = {name: request.POST.get(name, "").strip() for name in ("profile", "count", "hosts")}
    context = admin.site.each_context(request) | {
        "title": "Load census",
        "said": {**said, "count": said["count"] or "1"},
        "most": census.MOST,
        "profiles": DeviceProfile.objects.order_by("name").values_list("name", flat=True)[:PROFILES],
    }
    if request.method == "POST":
        try:
            context |= _answer(census.take(_question(said)))
        except RefusedError as refused:
            context["refused"] = refused.text
    return TemplateResponse(request, "console/census.html", context)


def _question(said: dict[str, str]) -> census.Question:
    """Build the question from the form. Raises RefusedError INVALID for values that cannot be used."""
    count = said["count"] or "1"
    if not (count.isascii() and count.isdecimal() and len(count) <= 3 and 1 <= int(count) <= census.MOST):
        raise RefusedError(Reason.INVALID, f"Give the number of further requests that must fit: 1 to {census.MOST}.")
    names = tuple(dict.fromkeys(said["hosts"].replace(",", " ").split())) if len(said["hosts"]) <= LONGEST else ()
    if len(said["hosts"]) > LONGEST or len(names) > census.MOST_NAMED or any("\0" in text for text in said.values()):
        raise RefusedError(Reason.INVALID, f"Name at most {census.MOST_NAMED} hosts, or none to ask all.")
    if said["hosts"] and not names:
        raise RefusedError(Reason.INVALID, "Name a host, or leave the field empty to ask all.")
    return census.Question(names or None, said["profile"], int(count))


def _answer(taken: census.Census) -> dict[str, Any]:
    rows = [
        {
            "host": badges.link("host", row.host.pk, row.host.name),
            "row": row,
            "mark": badges.mark("fits", "good") if row.fits else badges.mark("does not fit", "calm"),
            "bar": capacity.busy(row.load) if row.load else "",
            "memory": capacity.memory(row.load) if row.load else "",
            "watts": capacity.watts(row.load) if row.load else "",
        }
        for row in taken.rows[:ROWS]
    ]
    missing = [(badges.link("host", host.pk, host.name), why) for host, why in taken.missing[:ROWS]]
    return {
        "taken": taken,
        "asked": len(taken.rows),
        "rows": rows,
        "missing": missing,
        "hidden": max(0, len(taken.rows) - ROWS),
        "silent_hidden": max(0, len(taken.missing) - ROWS),
    }
