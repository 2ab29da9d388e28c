"""The console page with the switch that makes everything read only."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from accelerators.admin import device_actions
from accelerators.commands.command_queue import MAX_REASON
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import EventSource
from accelerators.ui import badges
from accelerators.ui.changelist import ReadOnlyModelAdmin
from accelerators.ui.conflicts import read_generation
from accelerators.ui.explained_admin import Rights
from accelerators.ui.permissions import Right
from accelerators.ui.refusals import describe_refusal
from cyborgweb.auth import read_only, roles

SWITCH_READ_ONLY = Right("cyborg:maintenance:update", "cyborgweb.change_maintenance")


class MaintenanceAdmin(ReadOnlyModelAdmin):
    """The page of the read-only switch. A person with the right to change it can use it also while it is on."""

    rights: ClassVar[Rights] = {"change": (SWITCH_READ_ONLY,)}
    list_display = ("since", "by", "reason")  # the columns of the export; the list itself is not shown

    def has_change_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return whether the user has the right `SWITCH_READ_ONLY`, also while everything is read only."""
        return roles.has_right(request, SWITCH_READ_ONLY.rule, SWITCH_READ_ONLY.permission)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Redirect to the page of the read-only switch, because there is never more than one row to list."""
        return HttpResponseRedirect(reverse("admin:cyborgweb_maintenance_change", args=[1]))

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """GET: show whether everything is read only, since when, by whom and why. POST: switch it on or off.

        After a POST, redirects to the page; a refusal (an unusable reason, or somebody else has switched since the page
        was shown) becomes a message there. Raises
        PermissionDenied for a person without the view permission, for a POST without the permission to change, and for
        another id than 1.
        """
        if object_id != "1" or not self.has_view_permission(request):
            raise PermissionDenied
        if request.method == "POST":
            if not self.has_change_permission(request):
                raise PermissionDenied
            reason_and_source = request.POST.get("reason", ""), EventSource.PERSON
            caller = device_actions.get_caller(request)
            try:
                generation = read_generation(request)
                read_only.switch_read_only("on" in request.POST, caller, *reason_and_source, generation=generation)
            except RefusedError as refused:
                messages.error(request, describe_refusal(refused))
            return HttpResponseRedirect(request.path)
        active = read_only.get_maintenance()
        context = self.admin_site.each_context(request) | {
            "title": "Maintenance",
            "opts": self.opts,
            "now": active,
            "generation": read_only.compute_generation(active),
            "since": badges.render_relative_time(active.since) if active else "",
            "may_change": self.has_change_permission(request),
            "read_only_reason": self.explain_refusal(request, "change"),
            "max_reason_length": MAX_REASON,
        }
        return TemplateResponse(request, "cyborgweb/admin/read_only.html", context)
