"""Console lists of devices, deployables and attach handles, and the page of one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from urllib.parse import urlencode

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Model, Q, QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.admin import (
    agent_actions,
    commands,
    device_actions,
    device_summaries,
    partitioning,
    raw_inventory,
    topology_svg,
)
from accelerators.admin.filters import DeviceFreshnessListFilter, DrainingListFilter, DriverListFilter
from accelerators.devices import lifecycle
from accelerators.domain import offer
from accelerators.domain.uuids import uuid_bounds
from accelerators.models import AttachHandle, Deployable, Device, Event
from accelerators.models.devices import HANDLE_USES, build_name_condition, find_name_conditions
from accelerators.ui import badges, icons, permissions, timeline
from accelerators.ui.changelist import ReadOnlyModelAdmin
from accelerators.ui.devices import MIN_UUID_TEXT, build_name_export
from accelerators.ui.empty_lists import Source
from accelerators.ui.explained_admin import Rights
from accelerators.ui.extensions import build_sections

MAX_HANDLES = 256
"""Maximum number of attach handles on a device's page; held and missing ones come first. The list has them all."""


DEVICE_PARAM = "deployable__device__id__exact"
"""URL parameter that limits the list of attach handles to one device."""
DEPLOYABLE_PARAM = "deployable__id__exact"
"""URL parameter that limits the list of attach handles to one deployable."""


@admin.register(Device)
class DeviceAdmin(ReadOnlyModelAdmin):
    """The list of devices, and the page of one device with the views that its buttons post to."""

    list_display = (
        "shown_state",
        "shown_health",
        "type",
        "shown_model",
        "shown_address",
        "shown_host",
        "driver",
        "since",
    )
    list_display_links = ("shown_model",)
    list_filter = ("state", "status", "type", DeviceFreshnessListFilter, DrainingListFilter, DriverListFilter)
    actions = (*device_actions.iterate_list_actions(), partitioning.change_units)
    list_select_related = ("host",)
    ordering = ("host_id", "key")
    search_fields = (
        "uuid__startswith",
        "address__icontains",
        "host__name__icontains",
        "model__icontains",
        "key__icontains",
    )
    indexed_search_fields = ("uuid", "address", "key", "host__name")
    search_help_text = "uuid, PCI address, host, model, name of the hardware, serial"
    exports = {
        "shown_state": ("state", "state_reason", "drain_to"),
        "shown_health": ("status", "status_reason"),
        "shown_model": (build_name_export("name"), "model", "vendor", "subsystem"),
        "shown_address": ("address", "key"),
    }
    empty = "No devices yet. They appear as soon as an agent on a compute host reports what its drivers found."
    rights: ClassVar[Rights] = {
        "decide": (permissions.UPDATE_DEVICE,),
        "order": (permissions.CREATE_COMMAND,),
        "units": (permissions.ADD_UNITS,),
    }
    sources = (Source("Hosts", "accelerators.host"), Source("Agents", "agents.agent"))

    def search_indexes(self, request: HttpRequest, words: Sequence[str]) -> dict[str, Q | None]:
        """Search as usual, and also for hardware if a word is a few hexadecimal digits: an A100 is hardware, even if
        the uuid of some device begins with `a100`. Costs one statement, and one for hardware.
        """
        conditions = super().search_indexes(request, words)
        short_words = [
            word
            for word, condition in conditions.items()
            if condition is not None and len(word) < MIN_UUID_TEXT and uuid_bounds(word)
        ]
        for word, by_name in find_name_conditions(short_words).items():
            conditions[word] = (conditions[word] or Q()) | by_name
        return conditions

    def search_other_words(self, request: HttpRequest, queryset: QuerySet[Device], words: str) -> QuerySet[Device]:
        """Search as usual, and for hardware whose name contains all these words."""
        return super().search_other_words(request, queryset, words) | queryset.filter(build_name_condition(words))

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Return whether the URL may filter by `lookup`: `host__name`, used by the page of a host, and Django's own."""
        return lookup == "host__name" or super().lookup_allowed(lookup, value, request)

    @display(description="State", ordering="state")
    def shown_state(self, device: Device) -> SafeString:
        """Render badges of the device's state, its drain and whether its data is stale, with the reasons on hover."""
        return badges.join_badges(
            badges.render_device_state(device.state, device.state_reason),
            badges.render_drain_badge(device.drain_to),
            badges.render_stale_badge(device.host.stale_reason(device.driver, device.backend)),
        )

    @display(description="Health", ordering="status")
    def shown_health(self, device: Device) -> SafeString:
        """Render the device's health as a badge, with the reason on hover."""
        return badges.render_health(device.status, device.status_reason)

    @display(description="Model", ordering="model")
    def shown_model(self, device: Device) -> SafeString:
        """Render the icon of the device's type and the name of its hardware, then the ids that its driver reports."""
        name = device.hardware_name
        ids = "" if name.full == device.model else f"{device.vendor}:{device.model}"
        icon = icons.render_type_icon(device.type)
        return format_html('{}{} <span class="faint">{}</span>', icon, name.full, ids or device.vendor)

    @display(description="Address", ordering="address")
    def shown_address(self, device: Device) -> SafeString:
        """Render the device's PCI address or, if it has none, its key."""
        return badges.render_identifier(device.address or device.key)

    @display(description="Host", ordering="host__name")
    def shown_host(self, device: Device) -> SafeString:
        """Render the device's host as a link."""
        return badges.render_page_link("host", device.host_id, device.host.name)

    @display(description="Since", ordering="-state_since")
    def since(self, device: Device) -> SafeString:
        """Render since when the device has its state."""
        return badges.render_relative_time(device.state_since)

    def has_decide_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may change the state of devices; Django asks this for the permission `decide`.

        The rule `cyborg:device:update` or Django's permission `accelerators.change_device` allows it, but not while
        everything is read only.
        """
        return permissions.is_allowed(request, permissions.UPDATE_DEVICE)

    def has_order_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may order commands from agents; Django asks this for the permission `order`."""
        return permissions.is_allowed(request, permissions.CREATE_COMMAND)

    def has_units_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may change the number of units of devices; Django asks this for `units`."""
        return partitioning.may_change_units(request)

    def get_urls(self) -> list[Any]:
        """Add the URLs of `units_view`, `decide_view` and `order_view`."""
        decide, order = (self.admin_site.admin_view(view) for view in (self.decide_view, self.order_view))
        return [
            path("units/", self.admin_site.admin_view(self.units_view), name="accelerators_device_units"),
            path("<path:object_id>/decide/", decide, name="accelerators_device_decide"),
            path("<path:object_id>/order/", order, name="accelerators_device_order"),
            *super().get_urls(),
        ]

    def decide_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Handle POST of the buttons that change the device's state. Raises Http404 if there is no such device."""
        return self._forward_post(device_actions.handle_state_change, request, object_id)

    def order_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Handle POST of the buttons that order a command from its agent. Raises Http404 if there is no such device."""
        return self._forward_post(agent_actions.handle_order, request, object_id)

    def units_view(self, request: HttpRequest) -> HttpResponse:
        """Show and handle the page that changes the number of units of devices, by `partitioning.handle_units_page`."""
        return partitioning.handle_units_page(self, request)

    def _forward_post(self, handler: Callable[..., HttpResponse], request: HttpRequest, object_id: str) -> HttpResponse:
        """Load the device and return the answer of `handler`. Raises Http404 if there is no such device."""
        device: Device | None = self.get_object(request, object_id)
        if device is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        return handler(self, request, device)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the page of one device: its hardware, its state with the reason, its holders, commands and events.

        Raises Http404 if there is no such device; PermissionDenied for a user who may not view it, and for methods
        other than GET and HEAD.
        """
        device: Device | None = self.get_object(request, object_id)
        if device is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if request.method not in ("GET", "HEAD") or not self.has_view_permission(request, device):
            raise PermissionDenied
        events = Event.objects.filter(subject=device.uuid)[: timeline.MAX_EVENTS]
        (card,) = device_summaries.load_cards([device], MAX_HANDLES)
        held_count = card.held_count
        orderable_commands = agent_actions.list_available_commands(request, device, held_count)
        deployables, permission_context = (
            _build_deployable_rows(device, card),
            permissions.build_permission_context(request, permissions.UPDATE_DEVICE),
        )
        context = self.admin_site.each_context(request) | {
            "title": device.hardware_name.full,
            "icon": icons.render_type_icon(device.type),
            "opts": self.opts,
            "device": device,
            "state": badges.render_device_state(device.state),
            "health": badges.render_health(device.status),
            "withheld": offer.describe_withheld_health(device.status),
            "stale": badges.render_stale_badge(stale_reason := device.host.stale_reason(device.driver, device.backend)),
            "why_stale": stale_reason,
            "state_since": badges.render_relative_time(device.state_since),
            "status_since": badges.render_relative_time(device.status_since),
            "reported": badges.render_relative_time(device.host.reported_at),
            "picture": topology_svg.draw_device(card),
            "legend": topology_svg.build_legend([card]),
            "deployables": deployables,
            "hidden": card.hidden_counts.total(),
            "handles_url": handle_list_url(device),
            "backend": badges.render_backend_link(device.host, device.driver, device.backend) if device.backend else "",
            "held": held_count,
            "total": card.handle_counts.total(),
            "draining": badges.render_drain_badge(device.drain_to, held_count),
            "choices": device_actions.list_available_choices(device, held_count)
            if permission_context["may_change"]
            else [],
            "unavailable_actions": device_actions.explain_unavailable_choices(device, held_count)
            if permission_context["may_change"]
            else [],
            "to_install": device.to_install.splitlines(),
            "orderable_commands": orderable_commands,
            "images": agent_actions.select_images(orderable_commands),
            "max_reason_length": lifecycle.MAX_REASON,
            "last_check": raw_inventory.load_last_signals(request, device),
            "stored": raw_inventory.dump_inventory(device, deployables),
            "events": timeline.render_events(events),
        }
        context |= (
            permission_context
            | commands.load_latest_context(request, device)
            | partitioning.build_units_context(request, device)
        )
        return TemplateResponse(request, "accelerators/admin/device.html", context | build_sections("device", device))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Device]:
        """Return the devices that this user may see, with their hosts loaded."""
        return super().get_queryset(request).select_related("host")


def _build_deployable_rows(device: Device, card: topology_svg.DeviceCard) -> list[dict[str, Any]]:
    """Return one dict for each deployable of a device, with its attributes and its handles. Costs two statements.

    Only those handles are included that have a cell in `card`; the counts `handles` and `held` include all.
    """
    counted = device.deployables.annotate(handles=Count("attach_handles"), held=Count("attach_handles__request"))
    deployables = counted.order_by("id").prefetch_related("attributes")
    return [
        {
            "deployable": deployable,
            "attributes": deployable.attributes.all(),
            "units": [
                {
                    "unit": cell,
                    "state": topology_svg.render_handle_state(cell),
                    "instance_url": badges.request_list_url(cell.instance),
                }
                for cell in card.cells
                if cell.deployable_id == deployable.pk
            ],
            "held": deployable.held,
            "handles": deployable.handles,
            "missing_since": badges.render_relative_time(deployable.missing_since) if deployable.missing_since else "",
        }
        for deployable in deployables
    ]


def handle_list_url(device: Device) -> str:
    """Return the URL of the list of a device's attach handles."""
    return f"{reverse('admin:accelerators_attachhandle_changelist')}?{urlencode({DEVICE_PARAM: device.pk})}"


def get_holder(handle: AttachHandle) -> Model | None:
    """Return the request that holds a handle, None if no request holds it.

    Costs one statement unless `request` was loaded with select_related.
    """
    return getattr(handle, "request", None)


class PresenceListFilter(admin.SimpleListFilter):
    """Filter by whether the object is present or missing, that is, absent from its driver's last answer."""

    title, parameter_name = "presence", "presence"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the two choices: present and missing."""
        return [("present", "present"), ("missing", "missing")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Return the present objects (without `missing_since`), the missing ones or, if nothing is chosen, all."""
        return queryset.filter(missing_since__isnull=self.value() == "present") if self.value() else queryset


@admin.register(Deployable)
class DeployableAdmin(ReadOnlyModelAdmin):
    """List of deployables: the parts of devices that are resource providers."""

    list_display = (
        "name",
        "shown_num_accelerators",
        "shown_device",
        "shown_host",
        "shown_rp_uuid",
        "shown_missing",
    )
    list_filter = ("device__type", "device__state", PresenceListFilter)
    list_select_related = ("device__host",)
    ordering = ("id",)
    search_fields = ("uuid__startswith", "rp_uuid__startswith", "name__icontains", "device__host__name__icontains")
    indexed_search_fields = ("uuid", "rp_uuid", "device__address", "device__host__name")
    search_help_text = "uuid, provider uuid, name, PCI address, host"
    fields = (
        "name",
        "uuid",
        "shown_device",
        "shown_host",
        "shown_handles",
        "whole_rp_uuid",
        "driver_name",
        "bitstream_id",
        "shown_bitstream_in_flash",
        "shown_missing",
    )
    readonly_fields = fields
    exports = {
        "shown_num_accelerators": ("num_accelerators",),
        "shown_device": ("device__uuid", build_name_export("device_name", "device__"), "device__model"),
        "shown_rp_uuid": ("rp_uuid",),
    }
    empty = "No deployables yet. Each device that an agent reports brings its own."
    sources = (Source("Devices", "accelerators.device"),)

    @display(description="Units", ordering="num_accelerators")
    def shown_num_accelerators(self, deployable: Deployable) -> int:
        """Return the number of the deployable's units."""
        return deployable.num_accelerators

    @display(description="Provider", ordering="rp_uuid")
    def shown_rp_uuid(self, deployable: Deployable) -> SafeString:
        """Render the shortened uuid of the deployable's provider in Placement; a dash if it was not created yet."""
        return badges.render_short_uuid(deployable.rp_uuid)

    @display(description="Provider")
    def whole_rp_uuid(self, deployable: Deployable) -> SafeString:
        """Render the uuid of the deployable's provider in Placement; a dash if it was not created yet."""
        return badges.render_identifier(deployable.rp_uuid)

    @display(description="Bitstream in flash")
    def shown_bitstream_in_flash(self, deployable: Deployable) -> str:
        """Return whether the deployable keeps its bitstream in flash memory: yes or no."""
        return "yes" if deployable.bitstream_in_flash else "no"

    @display(description="Attach handles")
    def shown_handles(self, deployable: Deployable) -> SafeString:
        """Render how many of the deployable's handles are held as a link to their list. Costs a statement."""
        counts = deployable.attach_handles.aggregate(all=Count("pk"), held=Count("request"))
        url = f"{reverse('admin:accelerators_attachhandle_changelist')}?{urlencode({DEPLOYABLE_PARAM: deployable.pk})}"
        return format_html('<a href="{}">{} of {} held</a>', url, counts["held"], counts["all"])

    @display(description="Device", ordering="device__model")
    def shown_device(self, deployable: Deployable) -> SafeString:
        """Render the deployable's device as a link."""
        return badges.render_page_link("device", deployable.device_id, deployable.device)

    @display(description="Host", ordering="device__host__name")
    def shown_host(self, deployable: Deployable) -> SafeString:
        """Render the device's host as a link."""
        return badges.render_page_link("host", deployable.device.host_id, deployable.device.host.name)

    @display(description="Presence", ordering="missing_since")
    def shown_missing(self, deployable: Deployable) -> SafeString:
        """Render whether the driver's report contains the deployable: present, or missing with the time on hover."""
        return render_presence(deployable.missing_since)


class HandleUseListFilter(admin.SimpleListFilter):
    """Filter by whether a request holds the handle, or it waits for its host after its request has ended."""

    title, parameter_name = "use", "use"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the names of HANDLE_USES."""
        return [(use, use) for use in HANDLE_USES]

    def queryset(self, request: HttpRequest, queryset: QuerySet[AttachHandle]) -> QuerySet[AttachHandle]:
        """Return the handles with the chosen use, or all if none of HANDLE_USES is chosen."""
        return queryset.filter(HANDLE_USES.get(self.value() or "", Q()))


@admin.register(AttachHandle)
class AttachHandleAdmin(ReadOnlyModelAdmin):
    """List of attach handles, the assignable units, with the request, instance and project that hold each."""

    list_display = (
        "shown_name",
        "attach_type",
        "shown_holder",
        "instance",
        "project",
        "shown_device",
        "shown_host",
        "shown_missing",
    )
    list_filter = ("attach_type", HandleUseListFilter, PresenceListFilter)
    list_select_related = ("request", "release", "deployable__device__host")
    ordering = ("id",)
    search_fields = (
        "uuid__startswith",
        "request__instance_uuid__startswith",
        "deployable__name__icontains",
        "deployable__device__host__name__icontains",
    )
    indexed_search_fields = (
        "uuid",
        "request__instance_uuid",
        "deployable__device__address",
        "deployable__device__host__name",
    )
    search_help_text = "uuid, instance uuid, PCI address, host"
    fields = (
        "uuid",
        "attach_type",
        "attach_info",
        "shown_holder",
        "whole_instance",
        "whole_project",
        "shown_device",
        "shown_host",
        "shown_missing",
    )
    readonly_fields = fields
    exports = {
        "shown_holder": ("request__uuid",),
        "instance": ("request__instance_uuid",),
        "project": ("request__project_id",),
        "shown_device": (
            "deployable__device__uuid",
            build_name_export("deployable_device_name", "deployable__device__"),
            "deployable__device__model",
        ),
        "shown_host": ("deployable__device__host__name",),
    }
    empty = "No attach handles yet. Each deployable that an agent reports brings its own."
    sources = (Source("Devices", "accelerators.device"),)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Return whether the URL may filter by `lookup`: DEVICE_PARAM, which selects one device, and Django's own."""
        return lookup == DEVICE_PARAM or super().lookup_allowed(lookup, value, request)

    @display(description="Handle", ordering="attach_info")
    def shown_name(self, handle: AttachHandle) -> SafeString:
        """Render the handle's readable name, with the JSON of its attach info on hover."""
        return format_html(
            '<span class="mono" title="{}">{}</span>', handle.attach_info, badges.describe_handle(handle.attach_info)
        )

    @display(description="Held by")
    def shown_holder(self, handle: AttachHandle) -> SafeString:
        """Render the request that holds the handle as a link.

        Without a holder, render the badge "free", or "not offered" with the reason if the handle is not offered to
        Nova.
        """
        request = get_holder(handle)
        if handle.reason_not_offered and not request:
            return badges.render_badge("not offered", "calm", handle.reason_not_offered)
        return (
            badges.render_page_link("acceleratorrequest", request.pk, str(request)[:8])
            if request
            else badges.render_badge("free", "calm")
        )

    @display(description="Instance")
    def instance(self, handle: AttachHandle) -> SafeString:
        """Render the shortened uuid of the holder's instance as a link to its requests; a dash if there is none."""
        return badges.render_instance_link(getattr(get_holder(handle), "instance_uuid", None))

    @display(description="Project")
    def project(self, handle: AttachHandle) -> SafeString:
        """Render the shortened id of the holder's project; a dash if no request holds the handle."""
        return badges.render_short_uuid(getattr(get_holder(handle), "project_id", None))

    @display(description="Instance")
    def whole_instance(self, handle: AttachHandle) -> SafeString:
        """Render the uuid of the holder's instance as a link to its requests; a dash if there is none."""
        return badges.render_instance_link(getattr(get_holder(handle), "instance_uuid", None), is_whole=True)

    @display(description="Project")
    def whole_project(self, handle: AttachHandle) -> SafeString:
        """Render the id of the holder's project; a dash if no request holds the handle."""
        return badges.render_identifier(getattr(get_holder(handle), "project_id", None))

    @display(description="Device")
    def shown_device(self, handle: AttachHandle) -> SafeString:
        """Render the handle's device as a link."""
        return badges.render_page_link("device", handle.deployable.device_id, handle.deployable.device)

    @display(description="Host")
    def shown_host(self, handle: AttachHandle) -> SafeString:
        """Render the device's host as a link."""
        device = handle.deployable.device
        return badges.render_page_link("host", device.host_id, device.host.name)

    @display(description="Presence", ordering="missing_since")
    def shown_missing(self, handle: AttachHandle) -> SafeString:
        """Render whether the driver's report contains the handle: present, or missing with the time on hover."""
        return render_presence(handle.missing_since)


def render_presence(missing_since: Any) -> SafeString:
    """Render a badge: present, or missing from the driver's report, with the time since when on hover."""
    if missing_since is None:
        return badges.render_badge("present", "good")
    return badges.render_badge("missing", "warn", f"since {missing_since:%Y-%m-%d %H:%M:%S} UTC")
