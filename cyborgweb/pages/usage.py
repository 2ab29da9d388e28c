"""The page of usage, `/admin/usage/?by=…`: units and load by host, type, resource class or project. Costs one
statement."""

from __future__ import annotations

from django.contrib import admin
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from accelerators.domain.states import DeviceType
from accelerators.requests.capacity import GROUP_COLUMNS, CapacityQuery
from accelerators.ui import permissions
from agents import telemetry
from cyborgweb.pages import capacity

MAX_GROUPS_SHOWN = 200
"""Groups that are shown, the largest first; the API returns all of them."""
MAX_PARAMETER_LENGTH = 255


def show_usage_page(request: HttpRequest) -> HttpResponse:
    """Show groups of units as bars: grouped by `by` and then by `then`, limited to a host, type or resource class.

    These are parameters of the query; an unknown grouping is ignored, and without any the groups are resource classes.
    Raises PermissionDenied for users who may not view devices.
    """
    permissions.require_permission(request, permissions.VIEW_DEVICES)
    form_values = {
        name: request.GET.get(name, "").replace("\0", "")[:MAX_PARAMETER_LENGTH]
        for name in ("by", "then", *GROUP_COLUMNS)
    }
    by = list(dict.fromkeys(name for name in (form_values["by"], form_values["then"]) if name in GROUP_COLUMNS)) or [
        "resource_class"
    ]
    loads = telemetry.get_last_loads()
    host, kind, resource_class = (form_values[name] or None for name in ("host", "type", "resource_class"))
    capacity_groups = capacity.query_capacity(
        loads, CapacityQuery(by, host, kind, resource_class, order="largest", limit=MAX_GROUPS_SHOWN + 1)
    )[0]
    context = admin.site.each_context(request) | {
        "title": "Usage",
        "by": by,
        "grouping_choices": [(name, name.replace("_", " ")) for name in GROUP_COLUMNS],
        "headings": [name.replace("_", " ").capitalize() for name in by],
        "types": [kind.value for kind in DeviceType],
        "form_values": form_values,
        "groups": capacity_groups[:MAX_GROUPS_SHOWN],
        "more": len(capacity_groups) > MAX_GROUPS_SHOWN,
        "max_groups": MAX_GROUPS_SHOWN,
        "missing_nodes": loads.silent,
    }
    return TemplateResponse(request, "cyborgweb/pages/usage.html", context)
