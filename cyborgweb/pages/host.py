"""The list and page of hosts, with the agent, discrepancies and loads added."""

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
from agents.admin import liveness, seen_at
from agents.models import Agent
from cyborgweb.pages import discrepancies, load
from placement_sync.jobs.discrepancies import at


class HostPage(HostAdmin):
    """Registered in place of the `accelerators` app's own admin."""

    list_display = ("name", "shown_live", "shown_agent", "shown_drivers", "shown_devices", "shown_node", "reported")

    def get_urls(self) -> list[Any]:
        view = self.admin_site.admin_view(self.load_view)
        return [path("<path:object_id>/load/", view, name="accelerators_host_load"), *super().get_urls()]

    def load_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """Show only the loads of the host's devices; the page fetches this part again and again."""
        host = self.get_object(request, object_id)
        if host is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if not self.has_view_permission(request, host):
            raise PermissionDenied
        return TemplateResponse(request, "console/host_load.html", {"load": load.of_host(host)})

    def get_queryset(self, request: HttpRequest) -> QuerySet[Host]:
        return super().get_queryset(request).select_related("agent", "lease")

    @display(description="Agent", ordering="lease__seen_at")
    def shown_agent(self, host: Host) -> SafeString:
        agent = getattr(host, "agent", None)
        return liveness(agent) if agent else badges.mark("not enrolled", "calm")

    def beside(self, host: Host) -> dict[str, Any]:
        agent: Agent | None = getattr(host, "agent", None)
        found = {"agent": agent, "faults": discrepancies.shown(at(host.pk)), "load": load.of_host(host)}
        if agent is None:
            return found
        return found | {
            "agent_liveness": liveness(agent),
            "agent_heard": badges.ago(seen_at(agent)),
            "agent_connected": badges.ago(agent.connected_at),
            "agent_enrolled": badges.ago(agent.enrolled_at),
            "agent_key_since": badges.ago(agent.key_since),
        }
