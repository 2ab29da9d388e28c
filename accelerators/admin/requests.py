"""Console list of accelerator requests, and the page of one."""

from __future__ import annotations

from typing import Any, ClassVar

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import path
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.admin import labels, request_timeline
from accelerators.domain.states import RequestState
from accelerators.models import AcceleratorRequest, Command, Event
from accelerators.ui import badges, permissions
from accelerators.ui.changelist import ReadOnlyModelAdmin
from accelerators.ui.devices import build_name_export
from accelerators.ui.empty_lists import Source
from accelerators.ui.explained_admin import Rights
from accelerators.ui.extensions import build_sections

MAX_SIBLINGS = 20
"""Maximum number of other requests of the same instance on a request's page."""


@admin.register(AcceleratorRequest)
class AcceleratorRequestAdmin(ReadOnlyModelAdmin):
    """List of accelerator requests with project, instance, state and held handle, and the page of one."""

    list_display = (
        "shown_uuid",
        "shown_state",
        "shown_profile",
        "shown_instance",
        "project",
        "shown_hostname",
        "handle",
        "created",
    )
    project_field = "project_id"
    list_filter = ("state",)
    list_select_related = ("profile", "attach_handle__deployable")
    ordering = ("-id",)
    search_fields = (
        "uuid__startswith",
        "instance_uuid__startswith",
        "hostname__icontains",
        "project_id__startswith",
        "profile__name__icontains",
    )
    search_help_text = "uuid, instance uuid, project, host, profile"
    exports = {
        "shown_state": ("state", "fault"),
        "shown_hostname": ("hostname",),
        "handle": (
            "attach_handle__attach_info",
            "attach_handle__deployable__device__uuid",
            build_name_export("device_name", "attach_handle__deployable__device__"),
        ),
    }
    empty = "No requests yet. Nova makes one for each accelerator of an instance when a flavor names a device profile."
    sources = (Source("Device profiles", "accelerators.deviceprofile"),)
    actions = (labels.label_accelerators,)
    rights: ClassVar[Rights] = {"label": permissions.LABEL}

    def has_label_permission(self, request: HttpRequest) -> bool:
        """Return whether the user may label accelerators; Django asks this for the permission `label`."""
        return permissions.is_allowed(request, *permissions.LABEL)

    def get_urls(self) -> list[Any]:
        """Add the URL of `label_view`."""
        label_view = self.admin_site.admin_view(self.label_view)
        return [path("label/", label_view, name="accelerators_acceleratorrequest_label"), *super().get_urls()]

    def label_view(self, request: HttpRequest) -> HttpResponse:
        """Handle the page that labels accelerators (`accelerators.admin.labels`)."""
        return labels.handle_label_page(self, request)

    def get_queryset(self, request: HttpRequest) -> QuerySet[AcceleratorRequest]:
        """Return the requests that this user may see, with profile, held handle and its deployable loaded."""
        return super().get_queryset(request).select_related("profile", "attach_handle__deployable")

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the page of one request: owner, handle, the steps of its bind with durations, and the notices to Nova.

        Other requests of the same instance are listed, too. Raises Http404 if there is no such request, or if this user
        may not see its project; PermissionDenied for a user who may not view requests, and for methods other than GET
        and HEAD.
        """
        arq: AcceleratorRequest | None = self.get_object(request, object_id)
        if arq is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if request.method not in ("GET", "HEAD") or not self.has_view_permission(request, arq):
            raise PermissionDenied
        may_view_commands = request.user.has_perm("accelerators.view_command")  # their texts name other instances
        events = list(Event.objects.filter(subject=arq.uuid)[: request_timeline.MAX_EVENTS])
        visible_commands = Command.objects.all() if may_view_commands else Command.objects.none()
        commands = visible_commands.filter(request=arq.uuid).select_related("host").order_by("-id")
        siblings = self.get_queryset(request).filter(instance_uuid=arq.instance_uuid).exclude(pk=arq.pk)
        steps = request_timeline.build_timeline(events, commands[: request_timeline.MAX_COMMANDS])
        context = self.admin_site.each_context(request) | {
            "title": f"Request {str(arq.uuid)[:8]}",
            "opts": self.opts,
            "arq": arq,
            "state": render_request_state(arq),
            "created": badges.render_relative_time(arq.created_at),
            "deadline": badges.render_relative_time(arq.deadline) if arq.state == "BindStarted" else "",
            "host": badges.render_host_link(arq.hostname),
            "holds": badges.describe_handle(arq.attach_handle.attach_info) if arq.attach_handle else "",
            "group": sorted(arq.group.items()),
            "steps": steps,
            "took": request_timeline.describe_bind_duration(steps),
            "notices": request_timeline.list_notices(arq, events),
            "untold": request_timeline.explain_missing_notices(arq),
            "siblings": [(sibling, render_request_state(sibling)) for sibling in siblings.order_by("id")[:MAX_SIBLINGS]]
            if arq.instance_uuid
            else [],
        }
        return TemplateResponse(request, "accelerators/admin/request.html", context | build_sections("request", arq))

    @display(description="Request", ordering="uuid")
    def shown_uuid(self, request: AcceleratorRequest) -> SafeString:
        """Render the first eight characters of the request's uuid."""
        return badges.render_short_uuid(request.uuid)

    @display(description="State", ordering="state")
    def shown_state(self, request: AcceleratorRequest) -> SafeString:
        """Render the request's state as a badge, with its fault on hover."""
        return render_request_state(request)

    @display(description="Profile", ordering="profile__name")
    def shown_profile(self, request: AcceleratorRequest) -> SafeString:
        """Render the request's device profile as a link."""
        return badges.render_page_link("deviceprofile", request.profile_id, request.profile.name)

    @display(description="Instance", ordering="instance_uuid")
    def shown_instance(self, request: AcceleratorRequest) -> SafeString:
        """Render the shortened uuid of the request's instance as a link to its requests; a dash if it has none."""
        return badges.render_instance_link(request.instance_uuid)

    @display(description="Project", ordering="project_id")
    def project(self, request: AcceleratorRequest) -> SafeString:
        """Render the shortened id of the project that owns the request."""
        return badges.render_short_uuid(request.project_id)

    @display(description="Host", ordering="hostname")
    def shown_hostname(self, request: AcceleratorRequest) -> SafeString:
        """Render the request's host as a link; a dash until it has one."""
        return badges.render_host_link(request.hostname)

    @display(description="Holds")
    def handle(self, request: AcceleratorRequest) -> SafeString:
        """Render the handle that the request holds as a link to its device; a dash if it holds none."""
        attach_handle = request.attach_handle
        return (
            badges.render_page_link(
                "device", attach_handle.deployable.device_id, badges.describe_handle(attach_handle.attach_info)
            )
            if attach_handle
            else badges.DASH
        )

    @display(description="Created", ordering="-created_at")
    def created(self, request: AcceleratorRequest) -> SafeString:
        """Render when the request was created."""
        return badges.render_relative_time(request.created_at)


def render_request_state(request: AcceleratorRequest) -> SafeString:
    """Render the request's state as a badge, with its fault on hover."""
    return badges.render_choice(RequestState(request.state), request.fault)
