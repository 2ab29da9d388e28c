"""Console list of hosts and the page of one host. `cyborgweb.pages.host` adds what the agents app knows of a host."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import Count, IntegerField, OuterRef, QuerySet, Subquery, Value
from django.db.models.functions import Coalesce
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.admin import agent_actions, commands, device_summaries, topology_svg
from accelerators.devices.lifecycle import MAX_REASON
from accelerators.domain import driver_status
from accelerators.models import Device, Event, Host
from accelerators.ui import badges, permissions, timeline
from accelerators.ui.changelist import ReadOnly

DEVICE_ROWS = 64
"""Maximum number of devices that a host's page draws and lists; the filtered device list has them all."""


class Live(admin.SimpleListFilter):
    """Filter by whether the host's agent is heard of (live) or not (stale)."""

    title, parameter_name = "freshness", "stale"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("yes", "stale"), ("no", "live")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Host]) -> QuerySet[Host]:
        if self.value() not in ("yes", "no"):
            return queryset
        return queryset.filter(stale_since__isnull=self.value() == "no")


@admin.register(Host)
class HostAdmin(ReadOnly):
    """The list of hosts, and the page of one host with the view that its buttons post to."""

    list_display = ("name", "shown_live", "shown_drivers", "shown_devices", "shown_node", "reported")
    list_filter = (Live,)
    ordering = ("name",)
    search_fields = ("uuid__startswith", "name__icontains", "node__icontains")
    search_help_text = "name, node, uuid"
    exports = {"shown_drivers": ("drivers",)}
    empty = (
        "No hosts yet. Make a join token with “manage.py join_token HOST” and start cyborg-agent on that host with it."
    )

    def get_queryset(self, request: HttpRequest) -> QuerySet[Host]:
        counts = Device.objects.filter(host=OuterRef("pk")).order_by().values("host").annotate(n=Count("*")).values("n")
        number = Coalesce(Subquery(counts), Value(0), output_field=IntegerField())
        return super().get_queryset(request).annotate(number_of_devices=number)

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Host | None:
        """Return a host by id, uuid or name, else None. Events name a host by its name."""
        found = super().get_object(request, object_id, from_field)
        return found or self.get_queryset(request).filter(name=object_id).first()

    @display(description="Freshness", ordering="stale_since")
    def shown_live(self, host: Host) -> SafeString:
        return live(host)

    @display(description="Drivers")
    def shown_drivers(self, host: Host) -> SafeString:
        failing = {name: entry["error"] for name, entry in host.drivers.items() if entry.get("error")}
        ailing = {
            f"{name}:{backend}": said["error"]
            for name, entry in host.drivers.items()
            for backend, said in entry.get("backends", {}).items()
            if said["error"] and name not in failing
        }
        asked = [name for name, entry in host.drivers.items() if driver_status.is_on(entry)]
        if not asked:
            return badges.NOTHING
        if failing or ailing:
            why = "; ".join(f"{name}: {error}" for name, error in (failing | ailing).items())
            backends = f"{len(ailing)} backend{'s' if len(ailing) > 1 else ''} failing"
            word = f"{len(failing)} of {len(asked)} failing" if failing else backends
            return badges.mark(word, "bad", why)
        return badges.mark(f"{len(asked)} answering", "good", ", ".join(asked))

    @display(description="Devices", ordering="number_of_devices")
    def shown_devices(self, host: Host) -> SafeString:
        return format_html('<a href="{}">{}</a>', devices_of(host), host.number_of_devices)

    @display(description="Node", ordering="node")
    def shown_node(self, host: Host) -> str:
        return host.node

    @display(description="Last change", ordering="-reported_at")
    def reported(self, host: Host) -> SafeString:
        return badges.ago(host.reported_at)

    def get_urls(self) -> list[Any]:
        order = self.admin_site.admin_view(self.order_view)
        return [path("<path:object_id>/order/", order, name="accelerators_host_order"), *super().get_urls()]

    def order_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Handle POST of the buttons of a host's page, which order commands from its agent."""
        host = self.get_object(request, object_id)
        if host is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        return agent_actions.post(self, request, host)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the page of one host with its drivers, devices, commands and events.

        `extra_context` and `beside` add what other apps know. Raises PermissionDenied for methods other than GET and
        HEAD.
        """
        host = self.get_object(request, object_id)
        if host is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if request.method not in ("GET", "HEAD") or not self.has_view_permission(request, host):
            raise PermissionDenied
        devices = list(host.devices.order_by("numa_node", "address", "key")[:DEVICE_ROWS])
        devices.sort(key=lambda device: device.numa_node < 0)  # unknown NUMA nodes last, as in the picture
        drawn = device_summaries.of(devices)
        context = self.admin_site.each_context(request) | {
            "title": host.name,
            "opts": self.opts,
            "host": host,
            "live": live(host),
            "reported": badges.ago(host.reported_at),
            "drivers": [_driver(name, entry) for name, entry in sorted(host.drivers.items())],
            "unwanted": sorted({device.driver for device in devices} - set(host.drivers)),
            "picture": topology_svg.host(drawn, host.name),
            "legend": topology_svg.legend(drawn),
            "nowhere": sum(card.numa < 0 for card in drawn),
            "bridged": any(card.bridges for card in drawn),
            "devices": [_device(*pair) for pair in zip(devices, drawn, strict=True)],
            "devices_url": devices_of(host),
            "events": timeline.rows(Event.objects.filter(host=host.name)[: timeline.ROWS]),
            "orders": permissions.may(request, permissions.ORDER),
            "longest": MAX_REASON,
        }
        context |= permissions.page(request, permissions.RESCAN) | commands.of(request, host)
        return TemplateResponse(request, "accelerators/host.html", context | self.beside(host) | (extra_context or {}))

    def beside(self, host: Host) -> dict[str, Any]:
        """Return template context that other apps add to the page; subclasses override this method."""
        return {}


def live(host: Host) -> SafeString:
    """Render whether the data of a host is up to date: live, or stale with the time since when on hover."""
    if host.stale_since is None:
        return badges.mark("live", "good")
    return badges.mark(
        "stale", "warn", f"Its agent has not been heard from since {host.stale_since:%Y-%m-%d %H:%M:%S} UTC."
    )


def devices_of(host: Host) -> str:
    """Return the URL of the list of a host's devices."""
    return f"{reverse('admin:accelerators_device_changelist')}?{urlencode({'host__name': host.name})}"


def _driver(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    error = entry.get("error", "")
    answers = (
        badges.mark("answering", "good")
        if driver_status.is_on(entry)
        else badges.mark(driver_status.state_of(entry), "calm")
    )
    return {
        "name": name,
        "answer": badges.mark("failing", "bad") if error else answers,
        "error": error,
        "since": badges.ago(entry.get("since")),
        "devices": entry.get("devices", 0),
        "faults": entry.get("faults", []),
        "backends": [_backend(*one) for one in sorted(entry.get("backends", {}).items())],
    }


def _backend(name: str, entry: dict[str, Any]) -> dict[str, Any]:
    error = entry["error"]
    return {
        "name": name,
        "kind": entry["kind"],
        "labels": ", ".join(f"{word}: {value}" for word, value in sorted(entry["labels"].items())),
        "answer": badges.mark("failing", "bad") if error else badges.mark("answering", "good"),
        "error": error,
        "since": badges.ago(entry["since"]),
        "services": [_service(service) for service in entry["services"]],
    }


def _service(service: dict[str, Any]) -> SafeString:
    """Render a service's name, with its limits on hover, or the reason if it is not ready."""
    limits = ", ".join(f"{word} {value}" for word, value in service["limits"].items())
    if service["state"] == "ready":
        return badges.mark(service["name"], "good", limits)
    return badges.mark(service["name"], "calm", service["reason"])


def _device(device: Device, card: topology_svg.Card) -> dict[str, Any]:
    return {
        "device": device,
        "state": badges.state(device.state, device.state_reason),
        "stale": badges.stale(device.host.why_stale(device.driver, device.backend)),
        "health": badges.health(device.status, device.status_reason),
        "since": badges.ago(device.state_since),
        "held": card.held,
        "handles": card.counts.total(),
        "units": [(unit, topology_svg.mark(unit.state)) for unit in card.units],
        "hidden": card.hidden.total(),
    }
