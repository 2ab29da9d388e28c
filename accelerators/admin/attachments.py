"""Console list of attachments, the page of one with the steps left for a person, and the form for a new one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar
from uuid import UUID

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Model, OuterRef, QuerySet, Subquery
from django.db.models.functions import Coalesce, JSONObject
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.dateparse import parse_datetime
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.admin import device_actions
from accelerators.devices.lifecycle import MAX_REASON
from accelerators.domain import libvirt_xml
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.states import DrainTarget, EventSource
from accelerators.models import AcceleratorRequest, Attachment, Device, DeviceProfile, Intent
from accelerators.models.attachments import AttachmentState
from accelerators.ui import badges, permissions
from accelerators.ui.changelist import ReadOnlyModelAdmin
from accelerators.ui.devices import build_name_export_by_uuid
from accelerators.ui.empty_lists import Source
from accelerators.ui.explained_admin import Rights
from accelerators.ui.permissions import Right
from accelerators.workflows import attachment_orders, bulk_actions, bulk_detachments

MAX_PROFILES = 200
"""Maximum number of device profiles that the form offers."""
DETACH_TEXT = (
    "The requests above hold units for the instance. They are deleted, and their claim is removed from Placement."
    " Remove the devices from the guest first: a PCI function is free when its host confirms that no guest uses it."
)
UNDO_TEXT = "The attachment holds no unit yet. Its claim and its requests are taken back, and it ends as failed."


def detach_attachments(admin: Any, request: HttpRequest, queryset: QuerySet[Attachment]) -> HttpResponse | None:
    """Admin action: store the selected attachments as a draft bulk action and redirect to its page.

    That page predicts the result and asks for confirmation; until then no attachment is changed. If the draft is
    refused, the list is shown again with the reason.
    """
    caller, selection = device_actions.get_caller(request), request.GET.urlencode()
    try:
        bulk = bulk_actions.create_draft(bulk_detachments.DETACH, DrainTarget.MAINTENANCE, queryset, caller, selection)
    except RefusedError as refused:
        messages.error(request, refused.text)
        return None
    return HttpResponseRedirect(badges.page_url("bulk", bulk.uuid))


detach_attachments.short_description = "Detach"  # type: ignore[attr-defined]
detach_attachments.allowed_permissions = ("detach",)  # type: ignore[attr-defined]


@admin.register(Attachment)
class AttachmentAdmin(ReadOnlyModelAdmin):
    """List of attachments: accelerators that were attached to running instances; and the page of one."""

    list_display = ("shown_uuid", "shown_state", "shown_instance", "what", "shown_host", "by", "when")
    list_filter = ("state",)
    ordering = ("-id",)
    search_fields = ("uuid__startswith", "instance__startswith", "host__icontains", "project_id__startswith")
    search_help_text = "uuid, instance, host, project"
    list_before_template = "accelerators/admin/attachments_header.html"
    exports = {
        "shown_instance": ("instance",),
        "what": ("profile", "device", build_name_export_by_uuid("device_name", "device")),
    }
    empty = "Nothing was attached to a running instance yet. Nova's own requests are listed under Requests."
    sources = (
        Source("Attach to a running instance", "accelerators.attachment", "attach", rights=permissions.ATTACH),
        Source("Requests", "accelerators.acceleratorrequest"),
    )

    actions = (detach_attachments,)
    rights: ClassVar[Rights] = {"detach": permissions.DETACH}
    list_buttons: ClassVar[Mapping[str, tuple[Right, ...]]] = {"Attach to a running instance": permissions.ATTACH}

    def has_detach_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may detach attachments; Django asks this for the permission `detach`."""
        return permissions.is_allowed(request, *permissions.DETACH)

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return whether the user may view attachments: with Django's view permission, or if they may attach.

        `permissions.ATTACH` are the rights to attach. While everything is read only, only the view permission counts.
        """
        return super().has_view_permission(request, obj) or permissions.is_allowed(request, *permissions.ATTACH)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Attachment]:
        """Return the attachments, each annotated with the keys by which `render_attached` makes links.

        `profile_key` is that of its device profile, and `device_place` has that of its device with the device's
        address. They are None if nothing of this kind was named, or if it was deleted.
        """
        place = JSONObject(pk="pk", address=Coalesce("address", "key"))
        devices = Device.objects.filter(uuid=OuterRef("device")).values_list(place)
        profiles = DeviceProfile.objects.filter(name=OuterRef("profile")).values("pk")
        rows: QuerySet[Attachment] = super().get_queryset(request)
        return rows.annotate(profile_key=Subquery(profiles), device_place=Subquery(devices))

    @display(description="Attachment", ordering="uuid")
    def shown_uuid(self, row: Attachment) -> SafeString:
        """Render the first eight characters of the attachment's uuid."""
        return badges.render_short_uuid(row.uuid)

    @display(description="State", ordering="state")
    def shown_state(self, row: Attachment) -> SafeString:
        """Render the attachment's state as a badge, with its fault on hover."""
        return render_attachment_state(row)

    @display(description="Instance", ordering="instance")
    def shown_instance(self, row: Attachment) -> SafeString:
        """Render the shortened uuid of the instance as a link to its requests."""
        return badges.render_instance_link(row.instance)

    @display(description="Profile or device")
    def what(self, row: Attachment) -> SafeString | str:
        """Render the attached device profile or, if a device was named instead, the device, as a link."""
        return render_attached(row)

    @display(description="Host", ordering="host")
    def shown_host(self, row: Attachment) -> SafeString:
        """Render the host on which the instance runs as a link."""
        return badges.render_host_link(row.host)

    @display(description="By", ordering="actor")
    def by(self, row: Attachment) -> str:
        """Return the name of the caller who ordered the attachment."""
        return str(row.actor)

    @display(description="When", ordering="-id")
    def when(self, row: Attachment) -> SafeString:
        """Render when the attachment was ordered."""
        return badges.render_relative_time(row.created_at)

    def changelist_view(self, request: HttpRequest, extra_context: dict[str, Any] | None = None) -> HttpResponse:
        """Show the list, with a link to `attach_view` for a user who may attach."""
        context = {"may_attach": permissions.is_allowed(request, *permissions.ATTACH)}
        return super().changelist_view(request, context | (extra_context or {}))

    def get_urls(self) -> list[Any]:
        """Add the URLs of `attach_view` and `detach_view`."""
        attach_view = self.admin_site.admin_view(self.attach_view)
        detach_view = self.admin_site.admin_view(self.detach_view)
        return [
            path("attach/", attach_view, name="accelerators_attachment_attach"),
            path("<path:object_id>/detach/", detach_view, name="accelerators_attachment_detach"),
            *super().get_urls(),
        ]

    def attach_view(self, request: HttpRequest) -> HttpResponse:
        """GET: show the form. POST: order the attachment and redirect to its page.

        The job `attachments` attaches the devices later. If the order is refused, the form is shown again with the
        reason. Raises PermissionDenied for a user who may not attach.
        """
        permissions.require_permission(request, *permissions.ATTACH)
        if request.method == "POST":
            try:
                row = _start_attachment(request)
                return HttpResponseRedirect(badges.page_url("attachment", row.pk))
            except RefusedError as refused:
                messages.error(request, refused.text)
        context = self.admin_site.each_context(request) | {
            "title": "Attach to a running instance",
            "opts": self.opts,
            "profiles": DeviceProfile.objects.order_by("name").values_list("name", flat=True)[:MAX_PROFILES],
            "form_values": {name: request.POST.get(name, request.GET.get(name, "")) for name in ("instance", "profile")}
            | {name: request.POST.get(name, request.GET.get(name, "")) for name in ("device", "reason")},
            "max_reason_length": MAX_REASON,
        }
        return TemplateResponse(request, "accelerators/admin/attach_form.html", context)

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the attachment's state, its steps so far, and what a person has to do.

        Raises Http404 if there is no such attachment; PermissionDenied for a user who may not view it, and for methods
        other than GET and HEAD.
        """
        row: Attachment | None = self.get_object(request, object_id)
        if row is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if request.method not in ("GET", "HEAD") or not self.has_view_permission(request, row):
            raise PermissionDenied
        handles = attachment_orders.get_handles(row)
        waiting_intent = (
            Intent.objects.filter(kind=attachment_orders.ATTACHMENT_INTENT, key=str(row.uuid))
            .exclude(last_error="")
            .first()
        )
        context = self.admin_site.each_context(request) | {
            "title": f"Attachment {str(row.uuid)[:8]}",
            "opts": self.opts,
            "row": row,
            "attached": render_attached(row),
            "instance": badges.render_instance_link(row.instance, is_whole=True),
            "state": render_attachment_state(row),
            "created": badges.render_relative_time(row.created_at),
            "host": badges.render_host_link(row.host),
            "steps": [
                (badges.render_relative_time(parse_datetime(step["at"])), step["step"], step["text"])
                for step in row.steps
            ],
            "waiting": waiting_intent,
            "hotplug": libvirt_xml.describe_plugging(handles, row.host),
            "device": Device.objects.filter(uuid=row.device).first() if row.device else None,
            "libvirt": [
                (handle.hardware, element)
                for handle in handles
                for element in libvirt_xml.render_hostdev_elements([handle])
            ],
            "open": row.state not in attachment_orders.REVERTING_OR_ENDED,
        }
        context |= permissions.build_permission_context(request, *permissions.DETACH)
        return TemplateResponse(request, "accelerators/admin/attachment.html", context)

    def detach_view(self, request: HttpRequest, object_id: str) -> HttpResponse:
        """GET: show which instance and requests a detachment concerns. POST: order it, if it was confirmed.

        It is confirmed with `sure` and, while requests hold units, with the start of the instance's uuid. Otherwise
        the page is shown again. An attachment that is not as the user has seen it (`seen`) is left as it is. Raises
        Http404 if there is no such attachment, and PermissionDenied for a user who may not detach it.
        """
        permissions.require_permission(request, *permissions.DETACH)
        row: Attachment | None = self.get_object(request, object_id)
        if row is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        holds, confirmation_text, error = _list_holds(row), str(row.instance)[:8], ""
        seen = attachment_orders.forecast_detachment(row).as_text
        if request.method == "POST" and "sure" in request.POST:
            reason = request.POST.get("reason", "")
            if holds and request.POST.get("typed", "").strip() != confirmation_text:
                error = "The text does not match. Nothing was done."
            else:
                caller = device_actions.get_caller(request)
                try:
                    attachment_orders.order_detachment(
                        row.uuid, caller, reason, EventSource.PERSON, seen=request.POST.get("seen", "") or seen
                    )
                except RefusedError as refused:
                    messages.error(request, refused.text)
                return HttpResponseRedirect(badges.page_url("attachment", row.pk))
        context = self.admin_site.each_context(request) | {
            "title": f"Detach {str(row.uuid)[:8]}",
            "opts": self.opts,
            "row": row,
            "attached": render_attached(row),
            "instance": badges.render_instance_link(row.instance, is_whole=True),
            "state": render_attachment_state(row),
            "host": badges.render_host_link(row.host),
            "holds": holds,
            "seen": seen,
            "consequence": DETACH_TEXT if holds else UNDO_TEXT,
            "confirmation_text": confirmation_text,
            "error": error,
            "reason": request.POST.get("reason", ""),
            "open": row.state not in attachment_orders.REVERTING_OR_ENDED,
            "max_reason_length": MAX_REASON,
        }
        return TemplateResponse(request, "accelerators/admin/confirm_detach.html", context)


def render_attached(row: Any) -> SafeString | str:
    """Render what was attached as a link: the device profile by its name, or the device by its address.

    `row` is an Attachment from `AttachmentAdmin.get_queryset`. Of a deleted profile the name is shown, and of a deleted
    device the shortened uuid.
    """
    if row.profile:
        return (
            badges.render_page_link("deviceprofile", row.profile_key, row.profile) if row.profile_key else row.profile
        )
    if row.device_place:
        address = badges.render_identifier(row.device_place["address"])
        return badges.render_page_link("device", row.device_place["pk"], address)
    return badges.render_short_uuid(row.device)


def _list_holds(row: Attachment) -> list[tuple[SafeString, SafeString, str]]:
    """Return each request of the attachment that holds a unit, and its device, as links, and the unit."""
    requests = AcceleratorRequest.objects.filter(uuid__in=row.requests, attach_handle__isnull=False)
    holds = []
    for one in requests.select_related("attach_handle__deployable__device").order_by("id"):
        handle = one.attach_handle
        assert handle is not None, "the query selects requests with a handle"
        device = handle.deployable.device
        link = badges.render_page_link("device", device.pk, device)
        holds.append(
            (
                badges.render_page_link("acceleratorrequest", one.pk, one.uuid),
                link,
                badges.describe_handle(handle.attach_info),
            )
        )
    return holds


def render_attachment_state(row: Attachment) -> SafeString:
    """Render the attachment's state as a badge, with its fault on hover."""
    return badges.render_choice(AttachmentState(row.state), row.fault)


def _start_attachment(request: HttpRequest) -> Attachment:
    """Order the attachment that the form asks for, and return its row; the job `attachments` does the work later.

    Raises RefusedError: INVALID if the instance or the device is not a uuid, and whatever `order_attachment` refuses.
    """
    form_values = {name: request.POST.get(name, "").strip() for name in ("instance", "profile", "device")}
    try:
        instance, device = UUID(form_values["instance"]), UUID(form_values["device"]) if form_values["device"] else None
    except ValueError:
        raise RefusedError(RefusalReason.INVALID, "Enter the uuids of the instance and of the device.") from None
    options: Any = {"profile": form_values["profile"], "device": device, "reason": request.POST.get("reason", "")}
    return attachment_orders.order_attachment(
        instance, device_actions.get_caller(request), source=EventSource.PERSON, **options
    )
