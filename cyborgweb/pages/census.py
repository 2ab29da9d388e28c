"""The page of the load census, `/admin/census/`: which hosts can take more requests of a profile, the least busy first.

The question is sent by POST, so that a page that updates itself does not ask all agents again and again.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.models import DeviceProfile
from accelerators.ui import badges, permissions
from cyborgweb.pages import capacity
from cyborgweb.telemetry import census

MAX_PROFILE_NAMES = 500
"""Profile names that the form suggests; others can be typed."""
MAX_ROWS = 200
MAX_HOSTS_LENGTH = 100_000
"""Longest list of hosts that is accepted, in characters."""


def show_census(request: HttpRequest) -> HttpResponse:
    """Show the form and, after a POST, what the hosts answered or why the question was refused.

    A POST blocks until the hosts have answered, for a few seconds at most. Raises PermissionDenied for users who
    may not view devices.
    """
    permissions.require_permission(request, permissions.VIEW_DEVICES)
    form_values = {name: request.POST.get(name, "").strip() for name in ("profile", "count", "hosts")}
    context = admin.site.each_context(request) | {
        "title": "Load census",
        "form_values": {**form_values, "count": form_values["count"] or "1"},
        "max_requests": census.MAX_REQUEST_COUNT,
        "profiles": DeviceProfile.objects.order_by("name").values_list("name", flat=True)[:MAX_PROFILE_NAMES],
    }
    if request.method == "POST":
        try:
            context |= _build_result_context(census.take_census(_build_question(form_values)))
        except RefusedError as refused:
            context["refused"] = refused.text
    return TemplateResponse(request, "cyborgweb/pages/census.html", context)


def _build_question(form_values: dict[str, str]) -> census.CensusQuestion:
    """Build the question from the form's fields `profile`, `count` and `hosts` (names with commas or blanks between
    them; '' for all). Raises RefusedError INVALID for values that cannot be used.
    """
    count = form_values["count"] or "1"
    if not (count.isascii() and count.isdecimal() and len(count) <= 3 and 1 <= int(count) <= census.MAX_REQUEST_COUNT):
        raise RefusedError(
            RefusalReason.INVALID,
            f"Give the number of further requests that must fit: 1 to {census.MAX_REQUEST_COUNT}.",
        )
    names = (
        tuple(dict.fromkeys(form_values["hosts"].replace(",", " ").split()))
        if len(form_values["hosts"]) <= MAX_HOSTS_LENGTH
        else ()
    )
    if (
        len(form_values["hosts"]) > MAX_HOSTS_LENGTH
        or len(names) > census.MAX_NAMED_HOSTS
        or any("\0" in text for text in form_values.values())
    ):
        raise RefusedError(RefusalReason.INVALID, f"Name at most {census.MAX_NAMED_HOSTS} hosts, or none to ask all.")
    if form_values["hosts"] and not names:
        raise RefusedError(RefusalReason.INVALID, "Name a host, or leave the field empty to ask all.")
    return census.CensusQuestion(names or None, form_values["profile"], int(count))


def _build_result_context(result: census.Census) -> dict[str, Any]:
    """Return what the template shows of a census: at most MAX_ROWS of all hosts, at most MAX_ROWS of those that did not
    answer, and how many of each are not shown.
    """
    rows = [
        {
            "host": badges.render_page_link("host", row.host.pk, row.host.name),
            "row": row,
            "mark": badges.render_badge("fits", "good") if row.fits else badges.render_badge("does not fit", "calm"),
            "bar": capacity.render_load_bar(row.load) if row.load else "",
            "memory": capacity.format_memory(row.load) if row.load else "",
            "watts": capacity.format_power(row.load) if row.load else "",
        }
        for row in result.rows[:MAX_ROWS]
    ]
    missing = [(badges.render_page_link("host", host.pk, host.name), why) for host, why in result.missing[:MAX_ROWS]]
    return {
        "census": result,
        "number_asked": len(result.rows),
        "rows": rows,
        "missing": missing,
        "rows_hidden": max(0, len(result.rows) - MAX_ROWS),
        "missing_hidden": max(0, len(result.missing) - MAX_ROWS),
    }
