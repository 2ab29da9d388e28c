"""Console list of commands, the page of one, and the latest commands on the pages of devices and hosts.

Pages that show a running command refresh that part until it has ended.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators.domain.states import CommandState
from accelerators.models import Command, Device, Event, Host
from accelerators.models.commands import COMMAND_IS_OPEN
from accelerators.ui import badges, permissions, timeline
from accelerators.ui.changelist import ReadOnlyModelAdmin
from accelerators.ui.devices import build_name_export
from accelerators.ui.empty_lists import Source

MAX_LATEST = 8
"""Number of commands that the page of a device or host shows, the newest ones; the list has them all."""


class CommandProgressListFilter(admin.SimpleListFilter):
    """Filter by whether the command is still open or has ended."""

    title, parameter_name = "progress", "open"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the two choices: under way and ended."""
        return [("yes", "under way"), ("no", "ended")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Command]) -> QuerySet[Command]:
        """Return the open commands, the ended ones or, if nothing is chosen, all."""
        if self.value() == "yes":
            return queryset.filter(COMMAND_IS_OPEN)
        return queryset.exclude(COMMAND_IS_OPEN) if self.value() == "no" else queryset


class RequestIdListFilter(admin.SimpleListFilter):
    """Filter by the request id under which commands were ordered, for example all commands of one bulk action.

    The value comes from a link only; the sidebar has no values to choose from.
    """

    title, parameter_name = "ordered with request", "together"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the request id in the URL as the only choice; none if the URL has none."""
        request_id = request.GET.get("together", "")
        return [(request_id, request_id)] if request_id else []

    def queryset(self, request: HttpRequest, queryset: QuerySet[Command]) -> QuerySet[Command]:
        """Return the commands that were ordered with the request id in the URL; all if there is none."""
        return queryset.filter(request_id=self.value()) if self.value() else queryset


@admin.register(Command)
class CommandAdmin(ReadOnlyModelAdmin):
    """List of commands to agents with their results, and the page of one."""

    list_display = ("shown_state", "shown_op", "shown_device", "shown_host", "by", "since", "result")
    list_display_links = ("shown_op",)
    list_filter = ("state", CommandProgressListFilter, "op", RequestIdListFilter)
    list_select_related = ("host", "device")
    ordering = ("-id",)
    search_fields = (
        "uuid__startswith",
        "device_name__icontains",
        "host__name__icontains",
        "op__startswith",
        "actor__startswith",
    )
    search_help_text = "uuid, device, host, operation, by whom"
    exports = {
        "shown_state": ("state", "outcome", "text"),
        "shown_device": ("device__uuid", "device_name", build_name_export("hardware", "device__")),
        "by": ("actor", "reason"),
        "since": ("created_at", "ended_at"),
        "result": ("percent", "progress"),
    }
    empty = "No commands yet. The pages of devices and hosts have buttons that order commands from their agents."
    sources = (
        Source("Devices", "accelerators.device", rights=(permissions.CREATE_COMMAND,)),
        Source("Hosts", "accelerators.host", rights=(permissions.RESCAN,)),
    )

    @display(description="State", ordering="state")
    def shown_state(self, command: Command) -> SafeString:
        """Render the command's state as a badge, with its result text on hover."""
        return render_command_state(command)

    @display(description="Operation", ordering="op")
    def shown_op(self, command: Command) -> str:
        """Return the command's operation, such as `reset`."""
        return command.op

    @display(description="Device", ordering="device_name")
    def shown_device(self, command: Command) -> SafeString | str:
        """Render the command's device as a link; its last name if it was deleted; a dash for a command to a host."""
        return render_command_device(command)

    @display(description="Host", ordering="host__name")
    def shown_host(self, command: Command) -> SafeString:
        """Render the command's host as a link."""
        return badges.render_page_link("host", command.host_id, command.host.name)

    @display(description="By, and why", ordering="actor")
    def by(self, command: Command) -> SafeString:
        """Render who ordered the command, with the reason below."""
        return format_html('{}<span class="reason">{}</span>', command.actor, command.reason)

    @display(description="When", ordering="-id")
    def since(self, command: Command) -> SafeString:
        """Render when the command was ordered and, if it has ended, how long it took."""
        return render_order_time(command)

    @display(description="Result")
    def result(self, command: Command) -> SafeString:
        """Render the command's result, or its progress while it is open."""
        return render_command_result(command)

    def get_urls(self) -> list[Any]:
        """Add the URLs of `latest_commands_view` and `progress_view`."""
        progress_view, latest_view = (
            self.admin_site.admin_view(self.progress_view),
            self.admin_site.admin_view(self.latest_commands_view),
        )
        return [
            path("lately/<slug:owner_type>/<int:pk>/", latest_view, name="accelerators_command_lately"),
            path("<int:pk>/now/", progress_view, name="accelerators_command_now"),
            *super().get_urls(),
        ]

    def progress_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Answer with the part of a command's page that shows its progress; the page polls it until the command ends.

        Answers 404 if there is no such command. Raises PermissionDenied for a user who may not view commands.
        """
        command = self._require_view_permission(request, Command.objects.filter(pk=pk)).first()
        context = build_progress_context(command) if command else {}
        return TemplateResponse(
            request, "accelerators/admin/command_progress.html", context, status=200 if command else 404
        )

    def latest_commands_view(self, request: HttpRequest, owner_type: str, pk: int) -> HttpResponse:
        """Answer with the part of a device's or host's page that lists its newest commands; polled while one runs.

        `pk` is the id of the device if `owner_type` is "device", else of the host. The list is empty if there is none
        with this id. Raises PermissionDenied for a user who may not view commands.
        """
        owner_type = "device" if owner_type == "device" else "host"
        commands = self._require_view_permission(request, Command.objects.filter(**{owner_type: pk}))
        return TemplateResponse(
            request, "accelerators/admin/recent_commands.html", build_latest_context(commands, owner_type, pk)
        )

    def _require_view_permission(self, request: HttpRequest, commands: QuerySet[Command]) -> QuerySet[Command]:
        """Return `commands` unchanged. Raises PermissionDenied for a user who may not view commands."""
        if not self.has_view_permission(request):
            raise PermissionDenied
        return commands

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the page of one command: what was ordered, by whom and why, its progress, result and events.

        Raises Http404 if there is no such command; PermissionDenied for a user who may not view it, and for methods
        other than GET and HEAD.
        """
        command: Command | None = self.get_object(request, object_id)
        if command is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if request.method not in ("GET", "HEAD") or not self.has_view_permission(request, command):
            raise PermissionDenied
        context = self.admin_site.each_context(request) | build_progress_context(command)
        context |= {
            "title": f"{command.op} {command.device_name or command.host.name}",
            "opts": self.opts,
            "about": render_command_device(command),
            "arguments": list(_list_arguments(command)),
            "detail": list(_iterate_details(command)),
            "events": timeline.render_events(Event.objects.filter(subject=command.uuid)[: timeline.MAX_EVENTS]),
        }
        return TemplateResponse(request, "accelerators/admin/command.html", context)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Command]:
        """Return the commands with host and device, but without `detail`, which is loaded only when a page reads it.

        `detail` can be as long as a report and is shown only on a command's page.
        """
        return super().get_queryset(request).select_related("host", "device").defer("detail")


def render_command_state(command: Command) -> SafeString:
    """Render the command's state as a badge, with its result text on hover."""
    return badges.render_choice(CommandState(command.state), command.text)


def render_command_device(command: Command) -> SafeString | str:
    """Render the command's device as a link; if it was deleted, its last name; a dash for a command to a host."""
    if command.device_id:
        return badges.render_page_link("device", command.device_id, command.device_name)
    return command.device_name or badges.DASH


def render_order_time(command: Command) -> SafeString:
    """Render when the command was ordered and, if it has ended, how long it took."""
    duration = format_html(
        ' <span class="faint">took {}</span>', badges.format_duration(command.created_at, command.ended_at)
    )
    return format_html("{}{}", badges.render_relative_time(command.created_at), duration if command.ended_at else "")


def render_command_result(command: Command) -> SafeString:
    """Render the command's result text, or its outcome if there is none; until it ends, its progress.

    The progress is a bar in percent as soon as the agent has started. Before, it is the stored progress text or, if
    there is none, what the command waits for.
    """
    if command.ended_at:
        return format_html('<span class="reason">{}</span>', command.text or command.outcome)
    if command.started_at or command.percent:
        return badges.render_progress_bar(command.percent, command.progress)
    return format_html('<span class="reason">{}</span>', command.progress or describe_waiting(command))


def describe_waiting(command: Command) -> str:
    """Return in words what an open command waits for; '' while the agent executes it."""
    if command.answered_at:
        return "it waits until the host's report is applied"
    return {
        "preparing": "it waits for its image",
        "queued": f"it waits for the agent of {command.host.name}",
        "taken": "the agent has received it",
    }.get(command.state, "")


def build_progress_context(command: Command) -> dict[str, Any]:
    """Return the context of `command_now.html`: the command's stages with their times, and its progress.

    Stages that were not reached are left out once the command has ended. `piece` is the URL that the page polls, ''
    once it has ended. Costs no statement except for loading the host.
    """
    stages = [
        ("ordered", command.created_at, "" if command.answered_at or command.taken_at else describe_waiting(command)),
        ("taken by the agent", command.taken_at, f"must happen by {command.start_by:%H:%M:%S} UTC, else it expires"),
        ("started", command.started_at, ""),
        ("answered", command.answered_at, f"must happen by {command.end_by:%H:%M:%S} UTC, else its outcome is unknown"),
        ("ended", command.ended_at, ""),
    ]
    reached = [at is not None for _, at, _ in stages]
    next_stage = reached.index(False) if False in reached else len(stages)
    return {
        "command": command,
        "state": render_command_state(command),
        "took": badges.format_duration(command.created_at, command.ended_at),
        "bar": badges.render_progress_bar(command.percent, command.progress)
        if command.started_at and not command.ended_at
        else "",
        "wait_reason": "" if command.ended_at else describe_waiting(command),
        "stages": [
            {
                "name": name,
                "at": badges.render_relative_time(at) if at else "",
                "glyph": badges.GLYPHS["good" if at else "busy" if n == next_stage else "calm"],
                "note": "" if at or n != next_stage or command.ended_at else note,
            }
            for n, (name, at, note) in enumerate(stages)
            if at or not command.ended_at
        ],
        "open": command.pk,
        "refresh_url": "" if command.ended_at else reverse("admin:accelerators_command_now", args=[command.pk]),
    }


def build_latest_context(commands: QuerySet[Command], owner_type: str, pk: int) -> dict[str, Any]:
    """Return the context of `command_lately.html` with the MAX_LATEST newest of `commands`; costs one statement.

    `owner_type` is "device" or "host", and `pk` is the id of that device or host, whose page shows the commands.
    """
    newest = list(commands.select_related("host").defer("detail").order_by("-id")[:MAX_LATEST])
    rows = [
        {
            "command": command,
            "state": render_command_state(command),
            "device": "" if owner_type == "device" else render_command_device(command),
            "when": render_order_time(command),
            "result": render_command_result(command),
        }
        for command in newest
    ]
    open_ids = [str(one.pk) for one in newest if one.ended_at is None]
    list_query = {f"{owner_type}__id__exact": pk}
    return {
        "commands": rows,
        "of": owner_type,
        "open": " ".join(open_ids),
        "refresh_url": reverse("admin:accelerators_command_lately", args=[owner_type, pk]) if open_ids else "",
        "all_commands": f"{reverse('admin:accelerators_command_changelist')}?{urlencode(list_query)}",
    }


def load_latest_context(request: HttpRequest, owner: Device | Host) -> dict[str, Any]:
    """Return the context with the latest commands of a device or host.

    `commands` is None if the user may not view commands. Costs one statement.
    """
    if not request.user.has_perm("accelerators.view_command"):
        return {"commands": None}
    owner_type = "device" if isinstance(owner, Device) else "host"
    return build_latest_context(Command.objects.filter(**{owner_type: owner.pk}), owner_type, owner.pk)


def _list_arguments(command: Command) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of the command that its page shows, as pairs of name and value; empty ones are left out."""
    arguments = command.arguments
    pairs = {name: arguments.get(name) for name in ("driver", "deployable", "uuid", "consumer")}
    pairs |= arguments.get("layout", {})
    pairs |= {name.replace("_", " "): value for name, value in arguments.get("wanted", {}).items()}
    pairs |= {name: json.dumps(value) for name, value in arguments.get("wish", {}).items()}
    image = arguments.get("image") or {}
    pairs |= {"image": image.get("id"), "image's name": image.get("name"), "image's sha256": image.get("sha256")}
    return ((name, value) for name, value in pairs.items() if value)


def _iterate_details(command: Command) -> Iterator[dict[str, Any]]:
    """Yield the details of the command's result by name, one dict per detail, for the template.

    A JSON list of objects has `columns` and `rows` and becomes a table; text of several lines has `long` set. Empty
    details are left out.
    """
    for name, value in sorted(command.detail.items()):
        rows = _parse_object_list(value)
        columns = list(dict.fromkeys(column for row in rows or () for column in row))
        cells = [[row.get(column, "") for column in columns] for row in rows or ()]
        if rows if rows is not None else value:
            yield {"name": name, "value": value, "columns": columns, "rows": cells, "long": "\n" in value}


def _parse_object_list(value: str) -> list[dict[str, Any]] | None:
    """Parse a JSON list of objects, the form in which drivers return signals and samples; None for other text."""
    try:
        parsed = json.loads(value) if value.startswith("[") else None
    except ValueError:
        return None
    return parsed if isinstance(parsed, list) and all(isinstance(row, dict) for row in parsed) else None
