"""Console list of hosts and the page of one host. `cyborgweb.pages.host` adds what the agents app knows of a host."""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import urlencode

from django.conf import settings
from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Count, IntegerField, OuterRef, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.admin import agent_actions, commands, device_actions, device_summaries, topology_svg
from accelerators.devices.lifecycle import MAX_REASON
from accelerators.domain import driver_status
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import EventSource
from accelerators.models import Device, Event, Host
from accelerators.ui import badges, permissions, timeline
from accelerators.ui.changelist import ReadOnlyModelAdmin
from accelerators.ui.empty_lists import JOIN_COMMAND, JOIN_IN_MANUAL, Source
from accelerators.ui.extensions import build_sections
from accelerators.workflows import host_removal

MAX_DEVICE_ROWS = 64
"""Maximum number of devices that a host's page draws and lists; the filtered device list has them all."""


class HostFreshnessListFilter(admin.SimpleListFilter):
    """Filter by whether the host's data is live or stale: the agent of a stale host has not been heard from."""

    title, parameter_name = "freshness", "stale"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the two choices: stale and live."""
        return [("yes", "stale"), ("no", "live")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Host]) -> QuerySet[Host]:
        """Return the stale hosts, the live ones or, if nothing is chosen, all."""
        if self.value() not in ("yes", "no"):
            return queryset
        return queryset.filter(stale_since__isnull=self.value() == "no")


@admin.register(Host)
class HostAdmin(ReadOnlyModelAdmin):
    """The list of hosts, and the page of one host with the view that its buttons post to."""

    list_display: tuple[str, ...] = ("name", "shown_live", "shown_drivers", "shown_devices", "shown_node", "reported")
    list_filter = (HostFreshnessListFilter,)
    ordering = ("name",)
    search_fields = ("uuid__startswith", "name__icontains", "node__icontains")
    indexed_search_fields = ("uuid", "name", "node")
    search_help_text = "name, node, uuid"
    exports = {"shown_drivers": ("drivers",)}
    empty = "No hosts yet. An agent on a compute host joins with a join token. This command prints one:"
    empty_command = JOIN_COMMAND
    sources = (Source("Join tokens", "agents.jointoken"), JOIN_IN_MANUAL)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Host]:
        """Return the hosts, each annotated with `number_of_devices`."""
        devices_per_host = (
            Device.objects.filter(host=OuterRef("pk")).order_by().values("host").annotate(n=Count("*")).values("n")
        )
        device_count = Coalesce(Subquery(devices_per_host), Value(0), output_field=IntegerField())
        rows: QuerySet[Host] = super().get_queryset(request)
        return rows.annotate(number_of_devices=device_count)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Host | None:
        """Return a host by id, uuid or name, else None. Events name a host by its name."""
        host: Host | None = super().get_object(request, object_id, from_field)
        return host or self.get_queryset(request).filter(name=object_id).first()

    @display(description="Freshness", ordering="stale_since")
    def shown_live(self, host: Host) -> SafeString:
        """Render whether the host's data is live or stale."""
        return render_freshness(host)

    @display(description="Drivers")
    def shown_drivers(self, host: Host) -> SafeString:
        """Render a badge with the number of failing drivers, else of failing backends, else of answering drivers.

        Errors, or the names of the answering drivers, are shown on hover. A dash if there are no drivers, or if all are
        disabled or absent and have no error.
        """
        failing_drivers = {name: entry["error"] for name, entry in host.drivers.items() if entry.get("error")}
        failing_backends = {
            f"{name}:{backend}": backend_entry["error"]
            for name, entry in host.drivers.items()
            for backend, backend_entry in entry.get("backends", {}).items()
            if backend_entry["error"] and name not in failing_drivers
        }
        enabled_drivers = [name for name, entry in host.drivers.items() if driver_status.should_list_driver(entry)]
        if not enabled_drivers:
            return badges.DASH
        if failing_drivers or failing_backends:
            errors_text = "; ".join(f"{name}: {error}" for name, error in (failing_drivers | failing_backends).items())
            backends_text = f"{len(failing_backends)} backend{'s' if len(failing_backends) > 1 else ''} failing"
            word = f"{len(failing_drivers)} of {len(enabled_drivers)} failing" if failing_drivers else backends_text
            return badges.render_badge(word, "bad", errors_text)
        return badges.render_badge(f"{len(enabled_drivers)} answering", "good", ", ".join(enabled_drivers))

    @display(description="Devices", ordering="number_of_devices")
    def shown_devices(self, host: Host) -> SafeString:
        """Render the number of the host's devices as a link to their list. The host must come from `get_queryset`."""
        device_count = cast("Any", host).number_of_devices  # annotated by `get_queryset`
        return format_html('<a href="{}">{}</a>', device_list_url(host), device_count)

    @display(description="Node", ordering="node")
    def shown_node(self, host: Host) -> str:
        """Return the host's node name."""
        return str(host.node)

    @display(description="Last change", ordering="-reported_at")
    def reported(self, host: Host) -> SafeString:
        """Render when the host's last report was applied; a dash if never."""
        return badges.render_relative_time(host.reported_at)

    def get_urls(self) -> list[Any]:
        """Add the URLs of `order_view`, `remove_view` and `cancel_removal_view`."""
        order = self.admin_site.admin_view(self.order_view)
        remove = self.admin_site.admin_view(self.remove_view)
        cancel_removal = self.admin_site.admin_view(self.cancel_removal_view)
        return [
            path("<path:object_id>/order/", order, name="accelerators_host_order"),
            path("<path:object_id>/remove/", remove, name="accelerators_host_remove"),
            path("<path:object_id>/cancel-removal/", cancel_removal, name="accelerators_host_cancel_removal"),
            *super().get_urls(),
        ]

    def order_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Handle POST of the buttons of a host's page, which order commands from its agent.

        Raises Http404 if there is no such host.
        """
        host = self.get_object(request, object_id)
        if host is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        return agent_actions.handle_order(self, request, host)

    def remove_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """GET: show what would be deleted with the host. POST with the host's name: begin to remove the host.

        After a POST, redirects to the page of the host; a refusal shows this page again with the reason. Placement and
        Nova are asked once. Raises Http404 if there is no such host, and PermissionDenied for a user who may not remove
        hosts.
        """
        permissions.require_permission(request, permissions.REMOVE_HOST)
        host = self.get_object(request, object_id)
        if host is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        preview = None
        if request.method == "POST":
            typed_name, reason = request.POST.get("name", "").strip(), request.POST.get("reason", "")
            try:
                caller = device_actions.get_caller(request)
                host_removal.order_removal(host.uuid, typed_name, caller, reason, EventSource.PERSON)
                messages.success(request, f"Host {host.name} is being removed.")
                return HttpResponseRedirect(badges.page_url("host", host.pk))
            except RefusedError as refused:
                messages.error(request, refused.text)
                if typed_name == host.name:  # otherwise it was refused before any service was asked
                    preview = host_removal.count_removed_rows(host, refused.text)
        context = self.admin_site.each_context(request) | {
            "title": host.name,
            "opts": self.opts,
            "host": host,
            "preview": preview or host_removal.preview_removal(host),
            "delay_s": settings.KEYS.host_removal_delay_s,
            "max_reason_length": MAX_REASON,
        }
        return TemplateResponse(request, "accelerators/admin/remove_host.html", context)

    def cancel_removal_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Handle POST of the button that cancels the removal of a host, and redirect to the page of the host.

        A host that is gone leads to the list of hosts. Raises PermissionDenied for other methods, and for a user who
        may not remove hosts.
        """
        permissions.require_permission(request, permissions.REMOVE_HOST)
        if request.method != "POST":
            raise PermissionDenied
        host = self.get_object(request, object_id)
        if host is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        try:
            caller, reason = device_actions.get_caller(request), request.POST.get("reason", "")
            host_removal.cancel_removal(host.uuid, caller, reason, EventSource.PERSON)
            messages.success(request, f"The removal of host {host.name} was cancelled.")
        except RefusedError as refused:
            messages.error(request, refused.text)
        return HttpResponseRedirect(badges.page_url("host", host.pk))

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the page of one host with its drivers, devices, commands and events.

        At most MAX_DEVICE_ROWS devices are drawn and listed. Raises Http404 if there is no such host; PermissionDenied
        for a user who may not view it, and for methods other than GET and HEAD.
        """
        host = self.get_object(request, object_id)
        if host is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if request.method not in ("GET", "HEAD") or not self.has_view_permission(request, host):
            raise PermissionDenied
        devices = list(host.devices.order_by("numa_node", "address", "key")[:MAX_DEVICE_ROWS])
        devices.sort(key=lambda device: device.numa_node < 0)  # unknown NUMA nodes last, as in the picture
        cards = device_summaries.load_cards(devices)
        context = self.admin_site.each_context(request) | {
            "title": host.name,
            "opts": self.opts,
            "host": host,
            "live": render_freshness(host),
            "reported": badges.render_relative_time(host.reported_at),
            "drivers": [_build_driver_row(host, name, entry) for name, entry in sorted(host.drivers.items())],
            "unwanted": sorted({device.driver for device in devices} - set(host.drivers)),
            "picture": topology_svg.draw_host(cards, host.name),
            "legend": topology_svg.build_legend(cards),
            "unknown_numa_count": sum(card.numa < 0 for card in cards),
            "bridged": any(card.bridges for card in cards),
            "devices": [_build_device_row(*pair) for pair in zip(devices, cards, strict=True)],
            "devices_url": device_list_url(host),
            "events": timeline.render_events(Event.objects.filter(host=host.name)[: timeline.MAX_EVENTS]),
            "orders": permissions.is_allowed(request, permissions.CREATE_COMMAND),
            "orders_denial": permissions.explain_denial(request, permissions.CREATE_COMMAND),
            "max_reason_length": MAX_REASON,
            "removal_denial": permissions.explain_denial(request, permissions.REMOVE_HOST),
            "removing": badges.render_relative_time(host.removing_since),
            "deleting": badges.render_relative_time(host.deleting_since),
            "removal": host_removal.load_progress(host) if host.removing_since else None,
        }
        context |= permissions.build_permission_context(request, permissions.RESCAN) | commands.load_latest_context(
            request, host
        )
        return TemplateResponse(
            request, "accelerators/admin/host.html", context | build_sections("host", host) | (extra_context or {})
        )


def render_freshness(host: Host) -> SafeString:
    """Render whether the data of a host is up to date: live, or stale with the time since when on hover."""
    if host.stale_since is None:
        return badges.render_badge("live", "good")
    return badges.render_badge(
        "stale", "warn", f"Its agent has not been heard from since {host.stale_since:%Y-%m-%d %H:%M:%S} UTC."
    )


def device_list_url(host: Host) -> str:
    """Return the URL of the list of a host's devices."""
    return f"{reverse('admin:accelerators_device_changelist')}?{urlencode({'host__name': host.name})}"


def _build_driver_row(host: Host, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the row of one driver of a host's page: its answer as a badge, error, faults and backends.

    `entry` is the driver's value in `Host.drivers`.
    """
    error = entry.get("error", "")
    answer_badge = (
        badges.render_badge("answering", "good")
        if driver_status.should_list_driver(entry)
        else badges.render_badge(driver_status.driver_state_of(entry), "calm")
    )
    return {
        "name": name,
        "answer": badges.render_badge("failing", "bad") if error else answer_badge,
        "error": error,
        "since": badges.render_relative_time(entry.get("since")),
        "devices": entry.get("devices", 0),
        "faults": entry.get("faults", []),
        "backends": [_build_backend_row(host, name, *one) for one in sorted(entry.get("backends", {}).items())],
    }


def _build_backend_row(host: Host, driver: str, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """Return the row of one backend of a driver: a link to it, its answer as a badge, error, labels and services."""
    error = entry["error"]
    return {
        "link": badges.render_backend_link(host, driver, name),
        "kind": entry["kind"],
        "labels": ", ".join(f"{word}: {value}" for word, value in sorted(entry["labels"].items())),
        "answer": badges.render_badge("failing", "bad") if error else badges.render_badge("answering", "good"),
        "error": error,
        "since": badges.render_relative_time(entry["since"]),
        "services": [_render_service(service) for service in entry["services"]],
    }


def _render_service(service: dict[str, Any]) -> SafeString:
    """Render a service's name, with its limits on hover, or the reason if it is not ready."""
    limits = ", ".join(f"{word} {value}" for word, value in service["limits"].items())
    if service["state"] == "ready":
        return badges.render_badge(service["name"], "good", limits)
    return badges.render_badge(service["name"], "calm", service["reason"])


def _build_device_row(device: Device, card: topology_svg.DeviceCard) -> dict[str, Any]:
    """Return the row of one device of a host's page: its badges, its counts of handles, and the handles of `card`."""
    return {
        "device": device,
        "state": badges.render_device_state(device.state, device.state_reason),
        "stale": badges.render_stale_badge(device.host.stale_reason(device.driver, device.backend)),
        "health": badges.render_health(device.status, device.status_reason),
        "since": badges.render_relative_time(device.state_since),
        "held": card.held_count,
        "handles": card.handle_counts.total(),
        "units": [(unit, topology_svg.render_handle_state(unit)) for unit in card.cells],
        "hidden": card.hidden_counts.total(),
    }
