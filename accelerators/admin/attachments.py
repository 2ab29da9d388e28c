"""Console list of attachments, the page of one with the steps left for a person, and the form for a new one."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Model
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.dateparse import parse_datetime
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.admin import device_actions
from accelerators.devices.lifecycle import MAX_REASON
from accelerators.domain import libvirt_xml
from accelerators.domain.errors import Reason, RefusedError
from accelerators.domain.states import Source
from accelerators.models import Attachment, DeviceProfile, Intent
from accelerators.ui import badges, permissions
from accelerators.ui.changelist import ReadOnly
from accelerators.workflows import attachments

STATES = {
    "asked": "calm",
    "attaching": "busy",
    "attached": "good",
    "undoing": "warn",
    "failed": "bad",
    "detaching": "busy",
    "detached": "calm",
}
PROFILES = 200
"""Maximum number of device profiles that the form offers."""


@admin.register(Attachment)
class AttachmentAdmin(ReadOnly):
    """List of attachments: accelerators that were attached to running instances; and the page of one."""

    list_display = ("shown_uuid", "shown_state", "shown_instance", "what", "host", "by", "when")
    list_filter = ("state",)
    ordering = ("-id",)
    search_fields = ("uuid__startswith", "instance__startswith", "host__icontains", "project_id__startswith")
    search_help_text = "uuid, instance, host, project"
    list_before_template = "accelerators/attach_before.html"
    exports = {"shown_instance": ("instance",), "what": ("profile", "device")}
    empty = "Nothing was attached to a running instance yet. Nova's own requests are listed under Requests."

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return super().has_view_permission(request, obj) or permissions.may(request, permissions.ATTACH)

    @display(description="Attachment", ordering="uuid")
    def shown_uuid(self, row: Attachment) -> SafeString:
        return badges.short(row.uuid)

    @display(description="State", ordering="state")
    def shown_state(self, row: Attachment) -> SafeString:
        return state(row)

    @display(description="Instance", ordering="instance")
    def shown_instance(self, row: Attachment) -> SafeString:
        return badges.short(row.instance)

    @display(description="Profile or device")
    def what(self, row: Attachment) -> SafeString | str:
        return row.profile or badges.short(row.device)

    @display(description="By", ordering="actor")
    def by(self, row: Attachment) -> str:
        return str(row.actor)

    @display(description="When", ordering="-id")
    def when(self, row: Attachment) -> SafeString:
        return badges.ago(row.created_at)

    def get_urls(self) -> list[Any]:
        ask = self.admin_site.admin_view(self.ask_view)
        return [path("attach/", ask, name="accelerators_attachment_attach"), *super().get_urls()]

    def ask_view(self, request: HttpRequest) -> HttpResponse:
        """GET: show the form. POST: start the attachment and redirect to its page; if it is refused, show the form."""
        permissions.require(request, permissions.ATTACH)
        if request.method == "POST":
            try:
                row = _ask(request)
                return HttpResponseRedirect(badges.page("attachment", row.pk))
            except RefusedError as refused:
                messages.error(request, refused.text)
        context = self.admin_site.each_context(request) | {
            "title": "Attach to a running instance",
            "opts": self.opts,
            "profiles": DeviceProfile.objects.order_by("name").values_list("name", flat=True)[:PROFILES],
            "said": {name: request.POST.get(name, request.GET.get(name, "")) for name in ("instance", "profile")}
            | {name: request.POST.get(name, request.GET.get(name, "")) for name in ("device", "reason")},
            "longest": MAX_REASON,
        }
        return TemplateResponse(request, "accelerators/attach.html", context)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """GET: show the attachment's state, its steps so far, and what a person has to do. POST: detach it."""
        row = self.get_object(request, object_id)
        if row is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if not self.has_view_permission(request, row):
            raise PermissionDenied
        if request.method == "POST":
            return self._detach(request, row)
        handles = attachments.handles(row)
        waiting = Intent.objects.filter(kind=attachments.KIND, key=str(row.uuid)).exclude(last_error="").first()
        context = self.admin_site.each_context(request) | {
            "title": f"Attachment {str(row.uuid)[:8]}",
            "opts": self.opts,
            "row": row,
            "state": state(row),
            "created": badges.ago(row.created_at),
            "host": badges.link("host", row.host, row.host),
            "steps": [(badges.ago(parse_datetime(one["at"])), one["step"], one["text"]) for one in row.steps],
            "waiting": waiting,
            "hotplug": libvirt_xml.sentence(handles, row.host),
            "libvirt": libvirt_xml.elements(handles),
            "open": row.state not in attachments.TAKEN_BACK,
            "longest": MAX_REASON,
        }
        context |= permissions.page(request, permissions.DETACH)
        return TemplateResponse(request, "accelerators/attachment.html", context)

    def _detach(self, request: HttpRequest, row: Attachment) -> HttpResponse:
        permissions.require(request, permissions.DETACH)
        try:
            attachments.detach(row.uuid, device_actions.person(request), request.POST.get("reason", ""), Source.PERSON)
        except RefusedError as refused:
            messages.error(request, refused.text)
        return HttpResponseRedirect(badges.page("attachment", row.pk))


def state(row: Attachment) -> SafeString:
    """Render the attachment's state as a badge, with its fault on hover."""
    return badges.mark(row.state, STATES[row.state], row.fault)


def _ask(request: HttpRequest) -> Attachment:
    said = {name: request.POST.get(name, "").strip() for name in ("instance", "profile", "device")}
    try:
        instance, device = UUID(said["instance"]), UUID(said["device"]) if said["device"] else None
    except ValueError:
        raise RefusedError(Reason.INVALID, "Enter the uuids of the instance and of the device.") from None
    more: Any = {"profile": said["profile"], "device": device, "reason": request.POST.get("reason", "")}
    return attachments.ask(instance, device_actions.person(request), source=Source.PERSON, **more)
