"""Console list of device profiles, the page of one, the form for a new one, and the page that deletes one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.template.response import TemplateResponse
from django.urls import reverse
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.admin import device_actions
from accelerators.domain import groups
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.groups import ProfileGroup
from accelerators.domain.states import EventSource
from accelerators.models import DeviceProfile
from accelerators.requests import fitting_hosts, profiles
from accelerators.ui import badges, permissions
from accelerators.ui.changelist import ReadOnlyModelAdmin
from accelerators.ui.conflicts import read_generation
from accelerators.ui.empty_lists import Source
from accelerators.ui.explained_admin import Rights
from accelerators.ui.refusals import describe_refusal

PROFILE_COMMAND = """openstack accelerator device profile create NAME '[{{"resources:{}": "1"}}]'"""
"""The command that makes a device profile; the resource class has to be filled in."""
FLAVOR_PROPERTY = "accel:device_profile"
"""The property by which a flavor of Nova names a device profile."""


@dataclass(frozen=True)
class GroupInput:
    """The fields of one group of the form as they were entered.

    `more` has other keys and values of the group, one `key=value` per line.
    """

    resource_class: str = ""
    amount: str = "1"
    required: Sequence[str] = ()
    forbidden: Sequence[str] = ()
    more: str = ""

    def build_group(self) -> ProfileGroup:
        """Return the group as a profile has it; it is not checked, except that a key has one value only.

        Raises GroupError for a key with two values and for a line that is not `key=value`.
        """
        pairs = [(f"resources:{self.resource_class}", self.amount)] if self.resource_class else []
        pairs += [(f"trait:{name}", "required") for name in self.required]
        pairs += [(f"trait:{name}", "forbidden") for name in self.forbidden]
        for line in filter(None, map(str.strip, self.more.splitlines())):
            key, separator, value = line.partition("=")
            if not separator:
                raise groups.GroupError(f"Enter other keys as key=value, one on each line: {line[:64]} has no “=”.")
            pairs.append((key.strip(), value.strip()))
        group = dict(pairs)
        if len(group) < len(pairs):
            twice = next(key for key, _ in pairs if sum(key == other for other, _ in pairs) > 1)
            raise groups.GroupError(f"{twice[:64]} has more than one value.")
        return group


@dataclass(frozen=True)
class ProfileInput:
    """The fields of the form as they were entered."""

    name: str = ""
    description: str = ""
    groups: Sequence[GroupInput] = field(default_factory=lambda: [GroupInput()])

    def check(self) -> list[ProfileGroup]:
        """Return the groups as they are stored, by the rules of both APIs; raise RefusedError INVALID otherwise."""
        try:
            groups.check_profile_name(self.name)
            if len(self.name) > groups.MAX_TEXT_LENGTH or len(self.description) > profiles.MAX_DESCRIPTION:
                raise groups.GroupError(f"A name has at most {groups.MAX_TEXT_LENGTH} characters.")
            if "\0" in self.description:
                raise groups.GroupError("The description contains NUL.")
            checked = groups.check_groups([one.build_group() for one in self.groups])
            if not groups.list_requested_groups(checked):
                raise groups.GroupError("Choose a resource class and an amount: the profile asks for no accelerator.")
        except groups.GroupError as error:
            raise RefusedError(RefusalReason.INVALID, str(error)) from None
        return checked


def _read_input(form_data: QueryDict) -> ProfileInput:
    """Return the fields of the posted form.

    The number of groups is that of their resource classes, at most MAX_GROUPS. If the button "Add a group" was
    pressed, there is one group more; if that of a group to be removed was pressed, that one is left out.
    """
    action, _, index = form_data.get("do", "").partition(" ")
    group_inputs = [
        GroupInput(
            resource_class.strip(),
            form_data.get(f"amount-{n}", "").strip(),
            form_data.getlist(f"required-{n}"),
            form_data.getlist(f"forbidden-{n}"),
            form_data.get(f"more-{n}", ""),
        )
        for n, resource_class in enumerate(form_data.getlist("resource_class")[: groups.MAX_GROUPS])
        if not (action == "fewer" and index == str(n))
    ]
    if action == "more" and len(group_inputs) < groups.MAX_GROUPS:
        group_inputs.append(GroupInput())
    return ProfileInput(
        form_data.get("name", "").strip(), form_data.get("description", "").strip(), group_inputs or [GroupInput()]
    )


@admin.register(DeviceProfile)
class DeviceProfileAdmin(ReadOnlyModelAdmin):
    """List of device profiles, which are named lists of request groups; the page of one; its creation and deletion."""

    list_display = ("name", "shown_groups", "description", "created")
    ordering = ("name",)
    search_fields = ("uuid__startswith", "name__icontains", "description__icontains")
    search_help_text = "name, description, uuid"
    exports = {"shown_groups": ("groups",)}
    empty = "No device profiles yet. A flavor names a device profile to give an instance accelerators. This makes one:"
    empty_command = PROFILE_COMMAND.format("PGPU")
    sources = (Source("The manual: offer devices to tenants", manual="first-day/#offer-devices-to-tenants"),)
    rights: ClassVar[Rights] = {
        "add": (permissions.CREATE_PROFILE,),
        "delete": (permissions.DELETE_PROFILE,),
    }

    @display(description="Groups")
    def shown_groups(self, profile: DeviceProfile) -> SafeString:
        """Render each request group on a line of its own, as `key=value` pairs; a dash if there are none."""
        stored_groups = profile.groups if isinstance(profile.groups, list) else []
        if not stored_groups:
            return badges.DASH
        lines = ((", ".join(f"{key}={value}" for key, value in group.items()),) for group in stored_groups)
        return format_html('<span class="lines mono">{}</span>', format_html_join("", "<span>{}</span>", lines))

    @display(description="Created", ordering="-created_at")
    def created(self, profile: DeviceProfile) -> SafeString:
        """Render when the profile was created."""
        return badges.render_relative_time(profile.created_at)

    def add_view(
        self, request: HttpRequest, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """GET: show the form. POST: create the profile and redirect to its page, or show which hosts fit it now.

        The buttons that add and remove a group, and a refusal, show the form again with what was entered. Raises
        PermissionDenied for a user who may not create profiles.
        """
        permissions.require_permission(request, permissions.CREATE_PROFILE)
        entered, fitting = ProfileInput(), None
        if request.method == "POST":
            entered, action = _read_input(request.POST), request.POST.get("do", "")
            try:
                if action in ("create", "check"):
                    checked = entered.check()
                    if action == "create":
                        return self._create(request, entered, checked)
                    fitting = _build_fitting_context(request, checked)
            except RefusedError as refused:
                messages.error(request, refused.text)
        context = self.admin_site.each_context(request) | {
            "title": "Add device profile",
            "opts": self.opts,
            "entered": entered,
            "numbered_groups": list(enumerate(entered.groups)),
            "offered": fitting_hosts.list_offered_names(),
            "fitting": fitting,
            "max_requests": groups.MAX_REQUESTS,
            "may_add_group": len(entered.groups) < groups.MAX_GROUPS,
            "property": f"{FLAVOR_PROPERTY}={entered.name or 'NAME'}",
        }
        return TemplateResponse(request, "accelerators/admin/add_device_profile.html", context)

    def _create(self, request: HttpRequest, entered: ProfileInput, checked: list[ProfileGroup]) -> HttpResponse:
        """Create the profile and redirect to its page. Raises RefusedError CONFLICT if the name is in use."""
        caller, description = device_actions.get_caller(request), entered.description or None
        uuid = profiles.create_profile(entered.name, checked, description, None, caller, EventSource.PERSON)
        messages.success(request, f"Device profile {entered.name} was created.")
        return HttpResponseRedirect(badges.page_url("deviceprofile", uuid))

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the page of one profile: its groups, the property of Nova's flavors, and which hosts fit it now.

        Raises Http404 if there is no such profile; PermissionDenied for a user who may not view profiles, and for
        methods other than GET and HEAD.
        """
        profile: DeviceProfile | None = self.get_object(request, object_id)
        if profile is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if request.method not in ("GET", "HEAD") or not self.has_view_permission(request, profile):
            raise PermissionDenied
        context = self._build_profile_context(request, profile) | {
            "fitting": _build_fitting_context(request, profile.groups),
            "property": f"{FLAVOR_PROPERTY}={profile.name}",
        }
        return TemplateResponse(request, "accelerators/admin/device_profile.html", context)

    def delete_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """GET: ask for a confirmation. POST: delete the profile and redirect to the list.

        If the profile is in use, or was changed since the confirmation was shown, redirects to its page with the
        reason. Raises Http404 if there is no such profile, and PermissionDenied for a user who may not delete profiles.
        """
        permissions.require_permission(request, permissions.DELETE_PROFILE)
        profile: DeviceProfile | None = self.get_object(request, object_id)
        if profile is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if request.method != "POST":
            context = self._build_profile_context(request, profile)
            return TemplateResponse(request, "accelerators/admin/delete_device_profile.html", context)
        try:
            caller, generation = device_actions.get_caller(request), read_generation(request)
            profiles.delete_profile(profile.uuid, caller, EventSource.PERSON, generation=generation)
        except RefusedError as refused:
            messages.error(request, describe_refusal(refused))
            return HttpResponseRedirect(badges.page_url("deviceprofile", profile.pk))
        messages.success(request, f"Device profile {profile.name} was deleted.")
        return HttpResponseRedirect(reverse("admin:accelerators_deviceprofile_changelist"))

    def _build_profile_context(self, request: HttpRequest, profile: DeviceProfile) -> dict[str, Any]:
        """Return the template context that the page of a profile and the page that deletes it share."""
        denial = permissions.explain_denial(request, permissions.DELETE_PROFILE)
        return self.admin_site.each_context(request) | {
            "title": profile.name,
            "opts": self.opts,
            "profile": profile,
            "groups": [sorted(group.items()) for group in profile.groups],
            "created": badges.render_relative_time(profile.created_at),
            "is_used": profile.requests.exists(),
            "may_delete": not denial,
            "read_only_reason": denial,
        }


def _build_fitting_context(request: HttpRequest, checked: Sequence[ProfileGroup]) -> dict[str, Any] | None:
    """Return which hosts fit these groups now, for a template; None for a user who may not view hosts."""
    if not request.user.has_perm("accelerators.view_host"):
        return None
    found = fitting_hosts.find_fitting_hosts(checked)
    return {
        "hosts": [
            (badges.render_page_link("host", name, name), f"{count}{' or more' * (count >= fitting_hosts.MAX_COUNT)}")
            for name, count in found.hosts
        ],
        "count": found.count,
        "hidden": found.count - len(found.hosts),
        "examined": found.examined,
    }
