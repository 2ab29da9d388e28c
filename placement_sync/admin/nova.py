"""The console list of the addresses of Nova, with the action that confirms one."""

from __future__ import annotations

from django.contrib import admin
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.admin import device_actions
from accelerators.domain.choices import Tone
from accelerators.ui import badges, permissions
from accelerators.ui.changelist import ReadOnlyModelAdmin
from placement_sync.models import NovaEndpoint
from placement_sync.nova import endpoints


@admin.register(NovaEndpoint)
class NovaEndpointAdmin(ReadOnlyModelAdmin):
    """List and pages of the addresses at which Nova was asked about instances that hold requests."""

    actions = ("confirm",)
    list_display = ("url", "shown_trust", "unknown_instances", "shown_proven", "shown_confirmed", "confirmed_by")
    ordering = ("id",)
    search_fields = ("url__icontains",)
    search_help_text = "address"
    fields = ("url", "shown_trust", "unknown_instances", "shown_proven", "shown_confirmed", "confirmed_by", "reason")
    readonly_fields = fields
    exports = {"shown_trust": ("proven_at", "confirmed_at")}
    empty = "Nova was not asked about instances yet. Configure a cloud (docs/configuration.md)."

    @display(description="404 is believed", ordering="proven_at")
    def shown_trust(self, endpoint: NovaEndpoint) -> SafeString:
        """Render whether the address is proven or confirmed, or why its answer 404 is not believed, as a badge."""
        if endpoint.proven_at:
            return badges.render_badge("proven", "good", "It has shown an instance that held a request here.")
        if endpoint.confirmed_at:
            return badges.render_badge("confirmed", "good", "An administrator has confirmed it.")
        tone: Tone = "bad" if endpoint.unknown_instances else "calm"
        return badges.render_badge("not proven", tone, "It has never shown an instance that held a request here.")

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
        return permissions.is_allowed(request, permissions.CONFIRM_NOVA, "placement_sync.change_novaendpoint")

    @admin.action(
        description="Confirm: it is the Nova of this cloud; free the requests of instances that it does not know",
        permissions=["decide"],
    )
    def confirm(self, request: HttpRequest, selected: QuerySet[NovaEndpoint]) -> None:
        """Trust the answer 404 of the selected addresses from now on, and say which ones in a message."""
        rows = list(selected)
        for row in rows:
            endpoints.confirm_endpoint(row.uuid, device_actions.get_caller(request).name, "confirmed in the console")
        self.message_user(request, f"Confirmed: {', '.join(row.url for row in rows)}. The next answers 404 count.")
