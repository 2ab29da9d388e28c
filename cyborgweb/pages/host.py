"""The list of hosts, with the agents added, and the part of a host's page that shows its loads."""

from __future__ import annotations

from typing import Any

from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.admin.hosts import HostAdmin
from accelerators.models import Host
from accelerators.ui import badges
from agents.admin import render_liveness_badge
from cyborgweb.pages import load


class HostPage(HostAdmin):
    """The list and the pages of hosts. It is registered in place of the `accelerators` app's own admin."""

    list_display = ("name", "shown_live", "shown_agent", "shown_drivers", "shown_devices", "shown_node", "reported")

    def get_urls(self) -> list[Any]:
        """Return the URL patterns of the hosts' pages, with that of `show_load` added."""
        view = self.admin_site.admin_view(self.show_load)
        return [path("<path:object_id>/load/", view, name="accelerators_host_load"), *super().get_urls()]

    def show_load(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show only the loads of the host's devices, which the host's page fetches again and again.

        Raises PermissionDenied if the user may not view the host; redirects with a message if it does not exist. Asks
        the host's agent to go on sending samples (`load.build_host_load`).
        """
        host = self.get_object(request, object_id)
        if host is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if not self.has_view_permission(request, host):
            raise PermissionDenied
        return TemplateResponse(request, "cyborgweb/pages/host_load.html", {"load": load.build_host_load(host)})

    def get_queryset(self, request: HttpRequest) -> QuerySet[Host]:
        """Return the hosts with their agents and leases, which the list shows."""
        return super().get_queryset(request).select_related("agent", "lease")

    @display(description="Agent", ordering="lease__seen_at")
    def shown_agent(self, host: Host) -> SafeString:
        """Return a badge with the agent's state: up, late, down or why it is barred; `not enrolled` for a host without
        an agent.
        """
        agent = getattr(host, "agent", None)
        return render_liveness_badge(agent) if agent else badges.render_badge("not enrolled", "calm")
