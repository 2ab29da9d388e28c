"""The console page that changes the number of units into which one or many devices are divided.

One device is changed at once. For several, the page of a bulk action asks for confirmation.
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
from accelerators.devices.partitioning import PartitionChange
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import DrainTarget, EventSource
from accelerators.models import Device
from accelerators.ui import badges, permissions
from accelerators.workflows import bulk_actions, bulk_commands

CHANGE_SIGNS = {"more": 1, "fewer": -1, "none": 0}


def change_units(admin: Any, request: HttpRequest, queryset: QuerySet[Device]) -> HttpResponse | None:
    """Admin action: show the page for those selected devices whose number of units can be changed.

    If there are none, or more than `partitioning.MAX_DEVICES`, returns None and adds a message: the list is shown
    again. Nothing is changed here.
    """
    devices = list(
        queryset.exclude(sized_by="").select_related("host").order_by("host_id", "key")[: partitioning.MAX_DEVICES + 1]
    )
    if 0 < len(devices) <= partitioning.MAX_DEVICES:
        return _render_page(admin, request, devices)
    too_many = f"More than {partitioning.MAX_DEVICES} devices are selected. Narrow the list by filters first."
    messages.error(
        request, too_many if devices else "The number of units cannot be changed on any of the selected devices."
    )
    return None


change_units.short_description = "Change the number of units"  # type: ignore[attr-defined]
change_units.allowed_permissions = ("units",)  # type: ignore[attr-defined]


def may_change_units(request: HttpRequest) -> bool:
    """Return whether the user may add units or remove them; False while everything is read only."""
    return any(permissions.is_allowed(request, right) for right in (permissions.ADD_UNITS, permissions.REMOVE_UNITS))


def build_units_context(request: HttpRequest, device: Device) -> dict[str, Any]:
    """Return the template context with a device's number of units and the URL of the page that changes it.

    Empty if the device does not let its number of units be chosen, or if the user may not change it. Costs one
    statement.
    """
    if not (device.sized_by and may_change_units(request)):
        return {}
    return {"units": partitioning.count_units([device])[device.pk], "units_url": f"{_page_url()}?device={device.uuid}"}


def handle_units_page(admin: Any, request: HttpRequest) -> HttpResponse:
    """GET: show the devices and the form. POST: order the change of one device and redirect to its command, or store
    the change of several as a draft and redirect to the page that confirms it.

    Redirects to the list of devices if no valid device is chosen. If the change is refused, the page is shown with the
    reason. Raises PermissionDenied for
    users without the right that this needs: `permissions.ADD_UNITS` to add units, `permissions.REMOVE_UNITS` to remove
    some or all, one of them to see the page.
    """
    right = permissions.ADD_UNITS if request.POST.get("change") == "more" else permissions.REMOVE_UNITS
    if request.method == "POST" or not may_change_units(request):
        permissions.require_permission(request, right)
    devices = _load_chosen_devices(request)
    if not devices:
        messages.error(request, "Select devices on which the number of units can be changed.")
        return HttpResponseRedirect(reverse("admin:accelerators_device_changelist"))
    if request.method != "POST":
        return _render_page(admin, request, devices)
    try:
        return HttpResponseRedirect(_start_change(request, devices))
    except RefusedError as refused:
        messages.error(request, refused.text)
        return _render_page(admin, request, devices)


def _start_change(request: HttpRequest, devices: list[Device]) -> str:
    """Order the change of one device, or store the change of several as a draft. Returns the URL of the page to open:
    that of the command or of the draft. Raises RefusedError."""
    change, caller = _parse_change(request, devices), device_actions.get_caller(request)
    reason = request.POST.get("reason", "")
    if len(devices) == 1:
        command = partitioning.partition_device(devices[0].uuid, change, caller, reason, EventSource.PERSON)
        return badges.page_url("command", command.pk)
    partitioning.check_change(change, reason)
    chosen = Device.objects.filter(pk__in=[device.pk for device in devices])
    bulk = bulk_actions.create_draft(
        bulk_commands.PARTITION,
        DrainTarget.MAINTENANCE,
        chosen,
        caller,
        arguments=change.to_arguments(),
        reason=reason,
    )
    return badges.page_url("bulk", bulk.uuid)


def _load_chosen_devices(request: HttpRequest) -> list[Device]:
    """Return the devices that the form or the URL names and whose number of units can be changed, with their hosts.

    Reads at most `partitioning.MAX_DEVICES` uuids. Returns [] if one of them is not a uuid. Costs one statement and
    takes no locks.
    """
    form_values = request.POST if request.method == "POST" else request.GET
    try:
        uuids = [UUID(text) for text in form_values.getlist("device")[: partitioning.MAX_DEVICES]]
    except ValueError:
        return []
    devices = Device.objects.filter(uuid__in=uuids).exclude(sized_by="")
    return list(devices.select_related("host").order_by("host_id", "key"))


def _parse_change(request: HttpRequest, devices: list[Device]) -> PartitionChange:
    """Return the change that the form asks for. Raises RefusedError INVALID for a wrong count or layout.

    The generation with which the form was rendered is used only for exactly one device.
    """
    sign, count = CHANGE_SIGNS.get(request.POST.get("change", "")), request.POST.get("count", "")
    if sign is None or (sign and not (count.isascii() and count.isdecimal() and len(count) <= 5)):
        raise RefusedError(
            RefusalReason.INVALID, f"Enter how many units to add or to remove: 1 to {partitioning.MAX_UNITS}."
        )
    layout_words, seen_generation = request.POST.get("layout", "").split(), request.POST.get("generation", "")
    generation = (
        int(seen_generation)
        if len(devices) == 1 and seen_generation.isascii() and seen_generation.isdecimal() and len(seen_generation) < 19
        else None
    )
    return PartitionChange(
        sign * int(count) if sign else None, catalogue.parse_layout(layout_words) if layout_words else {}, generation
    )


def _render_page(admin: Any, request: HttpRequest, devices: list[Device]) -> HttpResponse:
    """Render the page with the devices and their present numbers of units. Costs one statement."""
    unit_counts = partitioning.count_units(devices)
    rows = [{"device": device, "units": unit_counts[device.pk]} for device in devices]
    context = admin.admin_site.each_context(request) | {
        "title": "Units of " + (str(devices[0]) if len(devices) == 1 else f"{len(devices)} devices"),
        "opts": admin.opts,
        "address": _page_url(),
        "rows": rows,
        "single_device": devices[0] if len(devices) == 1 else None,
        "layout_keys": sorted({word for one in devices for word in one.changeable.split() if word != one.sized_by}),
        "may_add": permissions.is_allowed(request, permissions.ADD_UNITS),
        "may_remove": permissions.is_allowed(request, permissions.REMOVE_UNITS),
        "form_values": {name: request.POST.get(name, "") for name in ("count", "layout", "reason")},
        "max_units": partitioning.MAX_UNITS,
        "max_reason_length": MAX_REASON,
    }
    return TemplateResponse(request, "accelerators/admin/partition_device.html", context)


def _page_url() -> str:
    """Return the URL of the page that changes the number of units."""
    return reverse("admin:accelerators_device_units")
