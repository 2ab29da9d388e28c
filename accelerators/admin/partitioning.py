"""The console page that changes the number of units into which one or many devices are divided.

The page of a device and an action of the device list lead to it. The selected devices may belong to different backends.
The list's selection is stored as a draft without a change. The form makes a draft with the change, and the page of that
bulk action shows what would be done and asks for confirmation.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode
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
from accelerators.domain.states import BulkState, DrainTarget
from accelerators.models import Bulk, Device
from accelerators.ui import badges, permissions
from accelerators.ui.conflicts import find_generation
from accelerators.workflows import bulk_actions, bulk_commands

CHANGE_SIGNS = {"more": 1, "fewer": -1, "none": 0}
NO_CHANGE = PartitionChange(0)
"""The change of a draft whose devices are chosen, while the number of units is not; confirming it changes nothing."""
MAX_NAMED_DEVICES, MAX_SHOWN_DEVICES = 256, 20
"""The maximum numbers of devices that a form can name, and that the page shows."""


@dataclass(frozen=True)
class ChosenDevices:
    """The devices whose number of units is to be changed; `draft` is the draft that has them, None if the URL or the
    form names them."""

    devices: QuerySet[Device]
    draft: Bulk | None


def change_units(admin: Any, request: HttpRequest, queryset: QuerySet[Device]) -> HttpResponse | None:
    """Admin action: store those selected devices whose number of units can be changed as a draft, and redirect to the
    page that asks for the change.

    If there are none, or too many, returns None and adds a message: the list is shown again. No device is changed here.
    """
    divisible = queryset.exclude(sized_by="")
    if not divisible.exists():
        messages.error(request, "The number of units cannot be changed on any of the selected devices.")
        return None
    try:
        return HttpResponseRedirect(_page_url(draft=_create_draft(request, divisible, NO_CHANGE).uuid))
    except RefusedError as refused:
        messages.error(request, refused.text)
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
    return {"units": partitioning.count_units([device])[device.pk], "units_url": _page_url(device=device.uuid)}


def handle_units_page(admin: Any, request: HttpRequest) -> HttpResponse:
    """GET: show the devices and the form. POST: store the change as a draft, and redirect to the page that confirms it.

    Redirects to the list of devices if no valid device is chosen. If the change is refused, the page is shown with the
    reason. Raises PermissionDenied for users without the right that this needs: `permissions.ADD_UNITS` to add units,
    `permissions.REMOVE_UNITS` to remove some or all, one of them to see the page.
    """
    right = permissions.ADD_UNITS if request.POST.get("change") == "more" else permissions.REMOVE_UNITS
    if request.method == "POST" or not may_change_units(request):
        permissions.require_permission(request, right)
    chosen = _find_chosen_devices(request)
    if not chosen.devices.exists():
        messages.error(request, "Select devices on which the number of units can be changed.")
        return HttpResponseRedirect(reverse("admin:accelerators_device_changelist"))
    if request.method != "POST":
        return _render_page(admin, request, chosen)
    try:
        change, reason = _parse_change(request, chosen.devices), request.POST.get("reason", "")
        partitioning.check_change(change, reason)
        selection = chosen.draft.selection if chosen.draft else ""
        draft = _create_draft(request, chosen.devices, change, selection, reason)
    except RefusedError as refused:
        messages.error(request, refused.text)
        return _render_page(admin, request, chosen)
    return HttpResponseRedirect(badges.page_url("bulk", draft.uuid))


def _create_draft(
    request: HttpRequest, devices: QuerySet[Device], change: PartitionChange, selection: str = "", reason: str = ""
) -> Bulk:
    """Store a change of these devices as a draft, and return it. Raises RefusedError as `create_draft` does."""
    return bulk_actions.create_draft(
        bulk_commands.PARTITION,
        DrainTarget.MAINTENANCE,
        devices,
        device_actions.get_caller(request),
        selection or request.GET.urlencode(),
        arguments=change.to_arguments(),
        reason=reason,
    )


def _find_chosen_devices(request: HttpRequest) -> ChosenDevices:
    """Return the devices of the user's draft, or those that the form or the URL names, whose number of units can be
    changed.

    Reads at most MAX_NAMED_DEVICES uuids. There are none if a uuid is not valid, or if the draft is another user's.
    """
    form_values = request.POST if request.method == "POST" else request.GET
    divisible = Device.objects.exclude(sized_by="").order_by("host_id", "key")
    try:
        uuids = [UUID(text) for text in form_values.getlist("device")[:MAX_NAMED_DEVICES]]
        draft_uuid = UUID(form_values["draft"]) if form_values.get("draft") else None
    except ValueError:
        return ChosenDevices(Device.objects.none(), None)
    if draft_uuid is None:
        return ChosenDevices(divisible.filter(uuid__in=uuids), None)
    draft = Bulk.objects.filter(uuid=draft_uuid, action=bulk_commands.PARTITION, state=BulkState.DRAFT).first()
    if draft is None or not bulk_actions.may_confirm(draft, device_actions.get_caller(request)):
        return ChosenDevices(Device.objects.none(), None)
    return ChosenDevices(divisible.filter(pk__in=draft.items.values("device")), draft)


def _parse_change(request: HttpRequest, devices: QuerySet[Device]) -> PartitionChange:
    """Return the change that the form asks for. Raises RefusedError INVALID for a wrong count or layout.

    The generation with which the form was rendered is used only for exactly one device.
    """
    sign, count = CHANGE_SIGNS.get(request.POST.get("change", "")), request.POST.get("count", "")
    if sign is None or (sign and not (count.isascii() and count.isdecimal() and len(count) <= 5 and int(count))):
        raise RefusedError(
            RefusalReason.INVALID, f"Enter how many units to add or to remove: 1 to {partitioning.MAX_UNITS}."
        )
    layout_words = request.POST.get("layout", "").split()
    generation = find_generation(request)
    if generation is not None and devices.count() != 1:
        generation = None
    return PartitionChange(
        sign * int(count) if sign else None, catalogue.parse_layout(layout_words) if layout_words else {}, generation
    )


def _render_page(admin: Any, request: HttpRequest, chosen: ChosenDevices) -> HttpResponse:
    """Render the page with the first MAX_SHOWN_DEVICES devices and their present numbers of units."""
    total = chosen.devices.count()
    shown = list(chosen.devices.select_related("host")[:MAX_SHOWN_DEVICES])
    unit_counts = partitioning.count_units(shown)
    settings = chosen.devices.order_by().values_list("changeable", "sized_by").distinct()
    context = admin.admin_site.each_context(request) | {
        "title": "Units of " + (str(shown[0]) if total == 1 else f"{total} devices"),
        "opts": admin.opts,
        "address": _page_url(),
        "rows": [{"device": device, "units": unit_counts[device.pk]} for device in shown],
        "total": total,
        "draft": chosen.draft,
        "uuids": [] if chosen.draft else [str(uuid) for uuid in chosen.devices.values_list("uuid", flat=True)],
        "single_device": shown[0] if total == 1 else None,
        "layout_keys": sorted({word for words, number in settings for word in words.split() if word != number}),
        "may_add": permissions.is_allowed(request, permissions.ADD_UNITS),
        "may_remove": permissions.is_allowed(request, permissions.REMOVE_UNITS),
        "form_values": {name: request.POST.get(name, "") for name in ("count", "layout", "reason")},
        "max_units": partitioning.MAX_UNITS,
        "max_reason_length": MAX_REASON,
    }
    return TemplateResponse(request, "accelerators/admin/partition_device.html", context)


def _page_url(**query: object) -> str:
    """Return the URL of the page that changes the number of units, with the query."""
    address = reverse("admin:accelerators_device_units")
    return f"{address}?{urlencode(query)}" if query else address
