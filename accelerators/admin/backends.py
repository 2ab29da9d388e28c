"""Console lists of the backends of drivers and of the services that they offer."""

from __future__ import annotations

from urllib.parse import urlencode

from django.contrib import admin
from django.http import HttpRequest
from django.urls import reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from unfold.decorators import display

from accelerators.domain.states import BackendState
from accelerators.models import Backend, Service
from accelerators.ui import badges
from accelerators.ui.changelist import ReadOnlyModelAdmin
from accelerators.ui.empty_lists import Source


@admin.register(Backend)
class BackendAdmin(ReadOnlyModelAdmin):
    """List of the backends of drivers, which answer or fail independently of each other, and the page of one.

    Backends that are configured and not reported are in it.
    """

    list_display = (
        *("shown_name", "shown_host", "driver", "kind", "shown_state", "shown_devices", "shown_services", "said"),
    )
    list_filter = ("state", "kind", "driver")
    ordering = ("place",)
    search_fields = ("name__icontains", "host__icontains", "driver__startswith")
    search_help_text = "backend, host, driver"
    fields = (
        "shown_name",
        "shown_host",
        "driver",
        "kind",
        "shown_state",
        "reason",
        "since",
        "shown_devices",
        "labels",
        "shown_services",
    )
    readonly_fields = fields
    exports = {
        "shown_state": ("state",),
        "shown_devices": ("devices",),
        "shown_services": ("services",),
        "said": ("reason",),
    }
    empty = "No backends yet. Configure them on the page of a driver, or start an agent whose driver has some."
    sources = (Source("Drivers", "accelerators.hostdriver"), Source("Agents", "agents.agent"))

    def get_object(self, request: HttpRequest, object_id: str, from_field: str | None = None) -> Backend | None:
        """Return a backend by its id or its key, else None. Other pages link to it by its key."""
        backend: Backend | None = super().get_object(request, object_id, from_field)
        return backend or self.get_queryset(request).filter(key=object_id).first()

    @display(description="Backend", ordering="name")
    def shown_name(self, backend: Backend) -> str:
        """Return the name of the backend."""
        return backend.name

    @display(description="Host", ordering="place")
    def shown_host(self, backend: Backend) -> SafeString:
        """Render the backend's host as a link."""
        return badges.render_page_link("host", backend.host, backend.host)

    @display(description="State", ordering="state")
    def shown_state(self, backend: Backend) -> SafeString:
        """Render the state of the backend as a badge, with the reason on hover."""
        return badges.render_choice(BackendState(backend.state), backend.reason)

    @display(description="Devices", ordering="devices")
    def shown_devices(self, backend: Backend) -> SafeString:
        """Render the number of the backend's devices as a link to their list; a dash if there are none."""
        if not backend.devices:
            return badges.DASH
        place = {"host__name": backend.host, "driver": backend.driver, "backend": backend.name}
        url = f"{reverse('admin:accelerators_device_changelist')}?{urlencode(place)}"
        return format_html('<a href="{}">{}</a>', url, backend.devices)

    @display(description="Services")
    def shown_services(self, backend: Backend) -> SafeString:
        """Render the numbers of ready and of all services as a link to their list; a dash if there are none."""
        if not backend.services:
            return badges.DASH
        ready = sum(service["state"] == "ready" for service in backend.services)
        place = {"host": backend.host, "driver": backend.driver, "backend": backend.name}
        url = f"{reverse('admin:accelerators_service_changelist')}?{urlencode(place)}"
        return format_html('<a href="{}">{} of {} ready</a>', url, ready, len(backend.services))

    @display(description="Message")
    def said(self, backend: Backend) -> str:
        """Return why the backend does not answer, at most 200 characters; a dash if it does."""
        return Truncator(backend.reason).chars(200) or badges.DASH


@admin.register(Service)
class ServiceAdmin(ReadOnlyModelAdmin):
    """List of the services that backends offer, and the page of one."""

    list_display = ("shown_name", "shown_host", "driver", "shown_backend", "shown_state", "version", "reason")
    list_filter = ("name", "state", "driver")
    ordering = ("place",)
    search_fields = ("backend__icontains", "host__icontains", "driver__startswith")
    search_help_text = "backend, host, driver"
    fields = ("shown_name", "shown_host", "driver", "shown_backend", "shown_state", "version", "reason", "limits")
    readonly_fields = fields
    exports = {"shown_state": ("state",), "shown_backend": ("backend",)}
    empty = "No services yet. They appear as soon as an agent reports a driver that has backends."
    sources = (Source("Backends", "accelerators.backend"),)

    @display(description="Service", ordering="name")
    def shown_name(self, service: Service) -> str:
        """Return the name of the service."""
        return service.name

    @display(description="Host", ordering="place")
    def shown_host(self, service: Service) -> SafeString:
        """Render the service's host as a link."""
        return badges.render_page_link("host", service.host, service.host)

    @display(description="Backend", ordering="backend")
    def shown_backend(self, service: Service) -> SafeString:
        """Render the backend that offers the service as a link."""
        return badges.render_page_link("backend", service.backend_key, service.backend)

    @display(description="State", ordering="state")
    def shown_state(self, service: Service) -> SafeString:
        """Render whether the service is ready, with the reason on hover if it is not."""
        return badges.render_badge(service.state, "good" if service.state == "ready" else "calm", service.reason)
