"""The console page that changes the number of units into which one or many devices are divided.

The page of a device and an action of the device list lead to it. The selected devices may belong to different backends.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from accelerators.admin import device_actions
from accelerators.commands import catalogue
from accelerators.devices import partitioning
from accelerators.devices.lifecycle import MAX_REASON
from accelerators.devices.partitioning import Change, Result, Target
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import Source
from accelerators.models import Device
from accelerators.ui import badges, permissions

SIGNS = {"more": 1, "fewer": -1, "none": 0}


def of_list(admin: Any, request: HttpRequest, queryset: QuerySet[Device]) -> HttpResponse | None:
    """Admin action: show the page for those selected devices whose number of units can be changed.

    If there are none, or more than `partitioning.MOST`, stays on the list with a message.
    """
    devices = list(
        queryset.exclude(sized_by="").select_related("host").order_by("host_id", "key")[: partitioning.MOST + 1]
    )
    if 0 < len(devices) <= partitioning.MOST:
        return _page(admin, request, devices)
    too_many = f"More than {partitioning.MOST} devices are selected. Narrow the list by filters first."
    messages.error(
        request, too_many if devices else "The number of units cannot be changed on any of the selected devices."
    )
    return None


of_list.short_description = "Change the number of units"  # type: ignore[attr-defined]
of_list.allowed_permissions = ("decide",)  # type: ignore[attr-defined]


def of_device(request: HttpRequest, device: Device) -> dict[str, Any]:
    """Return the context with a device's number of units and the URL of this page.

    Empty if the number cannot be changed, or the user may not change it.
    """
    if not (device.sized_by and permissions.may(request, permissions.UNITS)):
        return {}
    return {"units": partitioning.numbers([device])[device.pk], "units_url": f"{_address()}?device={device.uuid}"}


def view(admin: Any, request: HttpRequest) -> HttpResponse:
    """GET: show the devices and the form. POST: order the change and show the result for each device.

    If one device was changed, redirects to its command instead. Raises PermissionDenied for users who may not do this.
    """
    permissions.require(request, permissions.UNITS)
    devices = _chosen(request)
    if not devices:
        messages.error(request, "Select devices on which the number of units can be changed.")
        return HttpResponseRedirect(reverse("admin:accelerators_device_changelist"))
    if request.method != "POST":
        return _page(admin, request, devices)
    try:
        results = partitioning.change(
            [Target(device.uuid) for device in devices],
            _wanted(request, devices),
            device_actions.person(request),
            request.POST.get("reason", ""),
            Source.PERSON,
        )
    except RefusedError as refused:
        messages.error(request, refused.text)
        return _page(admin, request, devices)
    if len(results) == 1 and (command := results[0].command):
        return HttpResponseRedirect(badges.page("command", command.pk))
    return _page(admin, request, devices, results)


def _chosen(request: HttpRequest) -> list[Device]:
    said = request.POST if request.method == "POST" else request.GET
    try:
        uuids = [UUID(text) for text in said.getlist("device")[: partitioning.MOST]]
    except ValueError:
        return []
    found = Device.objects.filter(uuid__in=uuids).exclude(sized_by="")
    return list(found.select_related("host").order_by("host_id", "key"))


def _wanted(request: HttpRequest, devices: list[Device]) -> Change:
    """Return the change that the form asks for. Raises RefusedError INVALID.

    The generation that the form has seen counts only if there is one device.
    """
    sign, count = SIGNS.get(request.POST.get("change", "")), request.POST.get("count", "")
    if sign is None or (sign and not (count.isascii() and count.isdecimal() and len(count) <= 5)):
        raise RefusedError(Reason.INVALID, f"Enter how many units to add or to remove: 1 to {partitioning.MOST_UNITS}.")
    words, seen = request.POST.get("layout", "").split(), request.POST.get("generation", "")
    generation = int(seen) if len(devices) == 1 and seen.isascii() and seen.isdecimal() and len(seen) < 19 else None
    return Change(sign * int(count) if sign else None, catalogue.layout(words) if words else {}, generation)


def _page(admin: Any, request: HttpRequest, devices: list[Device], results: list[Result] | None = None) -> HttpResponse:
    now, became = partitioning.numbers(devices), {result.device: result for result in results or ()}
    rows = [
        {"device": one, "units": now[one.pk], "result": (result := became.get(one.uuid)), "ordered": _ordered(result)}
        for one in devices
    ]
    context = admin.admin_site.each_context(request) | {
        "title": "Units of " + (str(devices[0]) if len(devices) == 1 else f"{len(devices)} devices"),
        "opts": admin.opts,
        "address": _address(),
        "rows": rows,
        "done": results is not None,
        "one": devices[0] if len(devices) == 1 else None,
        "words": sorted({word for one in devices for word in one.changeable.split() if word != one.sized_by}),
        "kept": {name: request.POST.get(name, "") for name in ("count", "layout", "reason")},
        "most": partitioning.MOST_UNITS,
        "longest": MAX_REASON,
    }
    return TemplateResponse(request, "accelerators/units.html", context)


def _ordered(result: Result | None) -> str:
    layout = result.command.arguments["layout"] if result and result.command else {}
    return ", ".join(f"{word}={value}" for word, value in layout.items())


def _address() -> str:
    return reverse("admin:accelerators_device_units")
