"""Console lists of devices, deployables and attach handles, and the page of one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Count, Model, QuerySet
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
from accelerators.models import AttachHandle, Deployable, Device, Event
from accelerators.ui import badges, permissions, timeline
from accelerators.ui.changelist import ReadOnlyModelAdmin
from accelerators.ui.extensions import build_sections

MAX_HANDLES = 256
"""Maximum number of attach handles on a device's page; held and missing ones come first. The list has them all."""


DEVICE_PARAM = "deployable__device__id__exact"
"""URL parameter that limits the list of attach handles to one device."""


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
    search_help_text = "uuid, PCI address, host, model, serial"
    exports = {
        "shown_state": ("state", "state_reason", "drain_to"),
        "shown_health": ("status", "status_reason"),
        "shown_model": ("model", "vendor"),
        "shown_address": ("address", "key"),
    }
    empty = "No devices yet. They appear as soon as an agent on a compute host reports what its drivers found."

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        return lookup == "host__name" or super().lookup_allowed(lookup, value, request)

    @display(description="State", ordering="state")
    def shown_state(self, device: Device) -> SafeString:
        return badges.join_badges(
            badges.render_device_state(device.state, device.state_reason),
            badges.render_drain_badge(device.drain_to),
            badges.render_stale_badge(device.host.stale_reason(device.driver, device.backend)),
        )

    @display(description="Health", ordering="status")
    def shown_health(self, device: Device) -> SafeString:
        return badges.render_health(device.status, device.status_reason)

    @display(description="Model", ordering="model")
    def shown_model(self, device: Device) -> SafeString:
        return format_html('{} <span class="faint">{}</span>', device.model, device.vendor)

    @display(description="Address", ordering="address")
    def shown_address(self, device: Device) -> SafeString:
        return badges.render_identifier(device.address or device.key)

    @display(description="Host", ordering="host__name")
    def shown_host(self, device: Device) -> SafeString:
        return badges.render_page_link("host", device.host_id, device.host.name)

    @display(description="Since", ordering="-state_since")
    def since(self, device: Device) -> SafeString:
        return badges.render_relative_time(device.state_since)

    def has_decide_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may run actions of this list that require the permission `decide`; Django asks it."""
        return permissions.is_allowed(request)

    def get_urls(self) -> list[Any]:
        decide, order = (self.admin_site.admin_view(view) for view in (self.decide_view, self.order_view))
        return [
            path("units/", self.admin_site.admin_view(self.units_view), name="accelerators_device_units"),
            path("<path:object_id>/decide/", decide, name="accelerators_device_decide"),
            path("<path:object_id>/order/", order, name="accelerators_device_order"),
            *super().get_urls(),
        ]

    def decide_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Handle POST of the buttons of a device's page that change its state."""
        return self._forward_post(device_actions.handle_state_change, request, object_id)

    def order_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Handle POST of the buttons of a device's page that order a command from its agent."""
        return self._forward_post(agent_actions.handle_order, request, object_id)

    def units_view(self, request: HttpRequest) -> HttpResponse:
        """Show and handle the page that changes the number of units of one or many devices."""
        return partitioning.handle_units_page(self, request)

    def _forward_post(self, handler: Callable[..., HttpResponse], request: HttpRequest, object_id: str) -> HttpResponse:
        device: Device | None = self.get_object(request, object_id)
        if device is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        return handler(self, request, device)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the page of one device: its hardware, its state with the reason, its holders, commands and events.

        Raises PermissionDenied for methods other than GET and HEAD.
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
            permissions.build_permission_context(request),
        )
        context = self.admin_site.each_context(request) | {
            "title": device.model,
            "opts": self.opts,
            "device": device,
            "state": badges.render_device_state(device.state),
            "health": badges.render_health(device.status),
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
            "held": held_count,
            "total": card.handle_counts.total(),
            "draining": badges.render_drain_badge(device.drain_to, held_count),
            "choices": device_actions.list_available_choices(device, held_count) if permission_context["may"] else [],
            "impossible": device_actions.explain_unavailable_choices(device, held_count)
            if permission_context["may"]
            else [],
            "to_install": device.to_install.splitlines(),
            "acts": orderable_commands,
            "images": agent_actions.select_images(orderable_commands),
            "longest": lifecycle.MAX_REASON,
            "signals": raw_inventory.load_last_signals(request, device),
            "stored": raw_inventory.dump_inventory(device, deployables),
            "events": timeline.render_events(events),
        }
        context |= (
            permission_context
            | commands.load_latest_context(request, device)
            | partitioning.build_units_context(request, device)
        )
        return TemplateResponse(request, "accelerators/device.html", context | build_sections("device", device))

    def get_queryset(self, request: HttpRequest) -> QuerySet[Device]:
        return super().get_queryset(request).select_related("host")


def _build_deployable_rows(device: Device, card: topology_svg.DeviceCard) -> list[dict[str, Any]]:
    """Return a device's deployables with their attributes and those handles that are shown. Costs two statements."""
    counted = device.deployables.annotate(handles=Count("attach_handles"), held=Count("attach_handles__request"))
    deployables = counted.order_by("id").prefetch_related("attributes")
    return [
        {
            "deployable": deployable,
            "attributes": deployable.attributes.all(),
            "units": [
                {
                    "unit": cell,
                    "state": topology_svg.render_handle_state(cell.state),
                    "instance_url": request_list_url(cell.instance),
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


def request_list_url(instance: str) -> str:
    """Return the URL of the list of an instance's requests; '' if `instance` is empty."""
    url = reverse("admin:accelerators_acceleratorrequest_changelist")
    return f"{url}?{urlencode({'q': instance})}" if instance else ""


def get_holder(handle: AttachHandle) -> Model | None:
    """Return the request that holds a handle, None if it is free."""
    return getattr(handle, "request", None)


class PresenceListFilter(admin.SimpleListFilter):
    """Filter by whether the driver's last report still contains the object."""

    title, parameter_name = "presence", "presence"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("present", "present"), ("missing", "missing")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        return queryset.filter(missing_since__isnull=self.value() == "present") if self.value() else queryset


@admin.register(Deployable)
class DeployableAdmin(ReadOnlyModelAdmin):
    """List of deployables: the parts of devices that are resource providers."""

    list_display = ("name", "num_accelerators", "shown_device", "shown_host", "rp_uuid", "shown_missing")
    list_filter = ("device__type", "device__state", PresenceListFilter)
    list_select_related = ("device__host",)
    ordering = ("id",)
    search_fields = ("uuid__startswith", "rp_uuid__startswith", "name__icontains", "device__host__name__icontains")
    search_help_text = "uuid, provider uuid, name, PCI address, host"
    exports = {"shown_device": ("device__uuid", "device__model")}
    empty = "No deployables yet. Each device that an agent reports brings its own."

    @display(description="Device", ordering="device__model")
    def shown_device(self, deployable: Deployable) -> SafeString:
        return badges.render_page_link("device", deployable.device_id, deployable.device)

    @display(description="Host", ordering="device__host__name")
    def shown_host(self, deployable: Deployable) -> SafeString:
        return badges.render_page_link("host", deployable.device.host_id, deployable.device.host.name)

    @display(description="Presence", ordering="missing_since")
    def shown_missing(self, deployable: Deployable) -> SafeString:
        return render_presence(deployable.missing_since)


class HandleUseListFilter(admin.SimpleListFilter):
    """Filter by whether a request holds the handle."""

    title, parameter_name = "use", "use"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("held", "held"), ("free", "free")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[AttachHandle]) -> QuerySet[AttachHandle]:
        return queryset.filter(request__isnull=self.value() == "free") if self.value() else queryset


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
    list_select_related = ("request", "deployable__device__host")
    ordering = ("id",)
    search_fields = (
        "uuid__startswith",
        "request__instance_uuid__startswith",
        "deployable__name__icontains",
        "deployable__device__host__name__icontains",
    )
    search_help_text = "uuid, instance uuid, PCI address, host"
    fields = (
        "uuid",
        "attach_type",
        "attach_info",
        "shown_holder",
        "instance",
        "project",
        "shown_device",
        "shown_host",
        "shown_missing",
    )
    readonly_fields = fields
    exports = {
        "shown_holder": ("request__uuid",),
        "instance": ("request__instance_uuid",),
        "project": ("request__project_id",),
        "shown_device": ("deployable__device__uuid", "deployable__device__model"),
        "shown_host": ("deployable__device__host__name",),
    }
    empty = "No attach handles yet. Each deployable that an agent reports brings its own."

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        return lookup == DEVICE_PARAM or super().lookup_allowed(lookup, value, request)

    @display(description="Handle", ordering="attach_info")
    def shown_name(self, handle: AttachHandle) -> SafeString:
        return format_html(
            '<span class="mono" title="{}">{}</span>', handle.attach_info, badges.describe_handle(handle.attach_info)
        )

    @display(description="Held by")
    def shown_holder(self, handle: AttachHandle) -> SafeString:
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
        return badges.render_short_uuid(getattr(get_holder(handle), "instance_uuid", None))

    @display(description="Project")
    def project(self, handle: AttachHandle) -> SafeString:
        return badges.render_short_uuid(getattr(get_holder(handle), "project_id", None))

    @display(description="Device")
    def shown_device(self, handle: AttachHandle) -> SafeString:
        return badges.render_page_link("device", handle.deployable.device_id, handle.deployable.device)

    @display(description="Host")
    def shown_host(self, handle: AttachHandle) -> SafeString:
        device = handle.deployable.device
        return badges.render_page_link("host", device.host_id, device.host.name)

    @display(description="Presence", ordering="missing_since")
    def shown_missing(self, handle: AttachHandle) -> SafeString:
        return render_presence(handle.missing_since)


def render_presence(missing_since: Any) -> SafeString:
    """Render a badge: present, or missing from the driver's report, with the time since when on hover."""
    if missing_since is None:
        return badges.render_badge("present", "good")
    return badges.render_badge("missing", "warn", f"since {missing_since:%Y-%m-%d %H:%M:%S} UTC")
