"""The page of usage, `/admin/usage/?by=…`: units and load by host, type, resource class or project. One statement."""

from __future__ import annotations

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse

from accelerators.domain.states import DeviceType
from accelerators.requests.capacity import COLUMNS, Asked
from agents import telemetry
from cyborgweb.pages import capacity

MOST = 200
"""Groups that are shown, the largest first; the API returns all of them."""
LONGEST = 255


def page(request: HttpRequest) -> HttpResponse:
    """Show the groups that the form asks for, as bars."""
    if not request.user.has_perm("accelerators.view_device"):
        raise PermissionDenied
    said = {name: request.GET.get(name, "").replace("\0", "")[:LONGEST] for name in ("by", "then", *COLUMNS)}
    by = list(dict.fromkeys(name for name in (said["by"], said["then"]) if name in COLUMNS)) or ["resource_class"]
    loads = telemetry.last()
    host, kind, resource_class = (said[name] or None for name in ("host", "type", "resource_class"))
    found = capacity.drawn(loads, Asked(by, host, kind, resource_class, order="largest", limit=MOST + 1))[0]
    context = admin.site.each_context(request) | {
        "title": "Usage",
        "by": by,
        "words": [(name, name.replace("_", " ")) for name in COLUMNS],
        "heads": [name.replace("_", " ").capitalize() for name in by],
        "types": [kind.value for kind in DeviceType],
        "said": said,
        "groups": found[:MOST],
        "more": len(found) > MOST,
        "most": MOST,
        "silent": loads.silent,
    }
    return TemplateResponse(request, "console/usage.html", context)
