"""The console list of the addresses of Nova, with the actions that confirm one and withdraw that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from uuid import UUID

from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.admin import device_actions
from accelerators.devices.lifecycle import MAX_REASON
from accelerators.domain.choices import Tone
from accelerators.domain.errors import RefusedError
from accelerators.models import AcceleratorRequest
from accelerators.ui import badges, permissions
from accelerators.ui.changelist import ReadOnlyModelAdmin
from accelerators.ui.empty_lists import CLOUD_IN_MANUAL
from accelerators.ui.explained_admin import Rights
from accelerators.ui.permissions import Right
from placement_sync.models import NovaEndpoint
from placement_sync.nova import endpoints

CONFIRM_NOVA = Right("cyborg:nova_endpoint:update", "placement_sync.change_novaendpoint")


@admin.register(NovaEndpoint)
class NovaEndpointAdmin(ReadOnlyModelAdmin):
    """List and pages of the addresses at which Nova was asked about instances that hold requests."""

    actions = ("confirm", "withdraw")
    list_before_template = "placement_sync/admin/nova_header.html"
    list_display = ("url", "shown_trust", "unknown_instances", "shown_proven", "shown_confirmed", "confirmed_by")
    ordering = ("id",)
    search_fields = ("url__icontains",)
    search_help_text = "address"
    fields = ("url", "shown_trust", "unknown_instances", "shown_proven", "shown_confirmed", "confirmed_by", "reason")
    readonly_fields = fields
    exports = {"shown_trust": ("proven_at", "confirmed_at")}
    empty = "Nova was not asked about instances yet. That needs a cloud."
    rights: ClassVar[Rights] = {"decide": (CONFIRM_NOVA,)}
    sources = (CLOUD_IN_MANUAL,)

    @display(description="Trusted", ordering="proven_at")
    def shown_trust(self, endpoint: NovaEndpoint) -> SafeString:
        """Render whether the address is proven or confirmed, or why its answer 404 is not believed, as a badge."""
        if endpoint.proven_at:
            return badges.render_badge("proven", "good", "It has shown an instance that held a request here.")
        if endpoint.confirmed_at:
            return badges.render_badge("confirmed", "good", "An administrator has confirmed it.")
        tone: Tone = "bad" if endpoint.unknown_instances else "calm"
        return badges.render_badge("not trusted", tone, "It has never shown an instance that held a request here.")

    @display(description="Proven", ordering="-proven_at")
    def shown_proven(self, endpoint: NovaEndpoint) -> SafeString:
        """Render when the address first showed an instance that held a request; a dash if never."""
        return badges.render_relative_time(endpoint.proven_at)

    @display(description="Confirmed", ordering="-confirmed_at")
    def shown_confirmed(self, endpoint: NovaEndpoint) -> SafeString:
        """Render when an administrator confirmed the address; a dash if nobody did."""
        return badges.render_relative_time(endpoint.confirmed_at)

    def has_decide_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may confirm an address; Django asks this for the permission `decide`.

        The rule `cyborg:nova_endpoint:update` or Django's permission `placement_sync.change_novaendpoint` allows it,
        but not while everything is read only.
        """
        return permissions.is_allowed(request, CONFIRM_NOVA)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list, and above it what it means and, to a user who may not decide, which role is needed."""
        context = permissions.build_permission_context(request, CONFIRM_NOVA)
        return super().changelist_view(request, context | (extra_context or {}))

    @admin.action(description="Confirm", permissions=["decide"])
    def confirm(self, request: HttpRequest, selected: QuerySet[NovaEndpoint]) -> HttpResponse | None:
        """Trust the answer 404 of the selected addresses from now on, after a page that asks for confirmation."""
        return self._decide(
            request,
            selected,
            endpoints.confirm_endpoint,
            "Confirm",
            "Confirm only if this is the Nova of this cloud, and the instances are really deleted. From then on,"
            " requests of instances that it does not know are deleted, and their devices are given to others. You can"
            " withdraw the confirmation, but requests that were deleted meanwhile stay deleted.",
            "Confirmed: {}. From now on, requests of instances that it does not know are deleted"
            " (in about two minutes).",
        )

    @admin.action(description="Withdraw the confirmation", permissions=["decide"])
    def withdraw(self, request: HttpRequest, selected: QuerySet[NovaEndpoint]) -> HttpResponse | None:
        """Do not trust the selected addresses any more, after a page that asks for confirmation."""
        return self._decide(
            request,
            selected,
            endpoints.withdraw_confirmation,
            "Withdraw",
            "Its answer 404 is then not believed until it has shown an instance that holds a request. Requests that"
            " were deleted meanwhile stay deleted. An address that is proven stays trusted.",
            "Withdrawn: {}. Its answer 404 is not believed any more.",
        )

    def _decide(
        self,
        request: HttpRequest,
        selected: QuerySet[NovaEndpoint],
        decide: Callable[[UUID, str, str], bool],
        label: str,
        consequence: str,
        outcome: str,
    ) -> HttpResponse | None:
        """Answer with the page that asks for confirmation; once that is given, decide and say what changed.

        Refusals become messages.
        """
        rows = list(selected)
        if "sure" not in request.POST:
            holding = AcceleratorRequest.objects.filter(instance_uuid__isnull=False).order_by()
            context = self.admin_site.each_context(request) | {
                "title": f"{label}: {', '.join(row.url for row in rows)}?",
                "opts": self.opts,
                "action": request.POST["action"],
                "label": label,
                "rows": rows,
                "holding": holding.values("instance_uuid").distinct().count(),
                "consequence": consequence,
                "max_reason_length": MAX_REASON,
            }
            return TemplateResponse(request, "placement_sync/admin/decide_nova.html", context)
        for row in rows:
            try:
                changed = decide(row.uuid, device_actions.get_caller(request).name, request.POST.get("reason", ""))
            except RefusedError as refused:
                self.message_user(request, refused.text, messages.ERROR)
            else:
                row.refresh_from_db()
                trust = "trusted" if row.is_trusted else "not confirmed"
                unchanged = f"Nothing changed: {row.url} is already {trust}."
                self.message_user(request, outcome.format(row.url) if changed else unchanged)
        return None
