"""Commands: the list, the page of one, and what the pages of devices and hosts show of theirs, live while they run."""

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

from accelerators.models import Command, Device, Event, Host
from accelerators.models.commands import OPEN
from accelerators.ui import badges, timeline
from accelerators.ui.changelist import ReadOnly

LATELY = 8
"""So many of the newest are shown on the page of a device or host; the list has them all."""


class Ended(admin.SimpleListFilter):
    """Whether anything is still to be expected of it."""

    title, parameter_name = "progress", "open"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        return [("yes", "under way"), ("no", "ended")]

    def queryset(self, request: HttpRequest, queryset: QuerySet[Command]) -> QuerySet[Command]:
        if self.value() == "yes":
            return queryset.filter(OPEN)
        return queryset.exclude(OPEN) if self.value() == "no" else queryset


class Together(admin.SimpleListFilter):
    """What was ordered by one request of a person, as a bulk action is; there is no choice to be made of it."""

    title, parameter_name = "ordered with request", "together"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        asked = request.GET.get("together", "")
        return [(asked, asked)] if asked else []

    def queryset(self, request: HttpRequest, queryset: QuerySet[Command]) -> QuerySet[Command]:
        return queryset.filter(request_id=self.value()) if self.value() else queryset


@admin.register(Command)
class CommandAdmin(ReadOnly):
    """What agents were told to do, and what became of it."""

    list_display = ("shown_state", "shown_op", "shown_device", "shown_host", "by", "since", "result")
    list_display_links = ("shown_op",)
    list_filter = ("state", Ended, "op", Together)
    list_select_related = ("host", "device")
    ordering = ("-id",)
    search_fields = (
        "uuid__startswith",
        "device_name__icontains",
        "host__name__icontains",
        "op__startswith",
        "actor__startswith",
    )
    search_help_text = "uuid, device, host, what was asked, by whom"
    exports = {
        "shown_state": ("state", "outcome", "text"),
        "by": ("actor", "reason"),
        "since": ("created_at", "ended_at"),
        "result": ("percent", "progress"),
    }
    empty = "No commands yet. The pages of devices and hosts have buttons for what their agents can be asked."

    @display(description="State", ordering="state")
    def shown_state(self, command: Command) -> SafeString:
        return state(command)

    @display(description="What", ordering="op")
    def shown_op(self, command: Command) -> str:
        return command.op

    @display(description="Device", ordering="device_name")
    def shown_device(self, command: Command) -> SafeString | str:
        return device(command)

    @display(description="Host", ordering="host__name")
    def shown_host(self, command: Command) -> SafeString:
        return badges.link("host", command.host_id, command.host.name)

    @display(description="By, and why", ordering="actor")
    def by(self, command: Command) -> SafeString:
        return format_html('{}<span class="reason">{}</span>', command.actor, command.reason)

    @display(description="When", ordering="-id")
    def since(self, command: Command) -> SafeString:
        return when(command)

    @display(description="Result")
    def result(self, command: Command) -> SafeString:
        return result(command)

    def get_urls(self) -> list[Any]:
        one, some = self.admin_site.admin_view(self.now_view), self.admin_site.admin_view(self.lately_view)
        return [
            path("lately/<slug:of>/<int:pk>/", some, name="accelerators_command_lately"),
            path("<int:pk>/now/", one, name="accelerators_command_now"),
            *super().get_urls(),
        ]

    def now_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """How one command stands: a piece of its page, asked for again and again until it has ended."""
        command = self._shown(request, Command.objects.filter(pk=pk)).first()
        context = standing(command) if command else {}
        return TemplateResponse(request, "accelerators/command_now.html", context, status=200 if command else 404)

    def lately_view(self, request: HttpRequest, of: str, pk: int) -> HttpResponse:
        """The newest commands of a device or a host: a piece of their pages, likewise."""
        of = "device" if of == "device" else "host"
        commands = self._shown(request, Command.objects.filter(**{of: pk}))
        return TemplateResponse(request, "accelerators/command_lately.html", lately(commands, of, pk))

    def _shown(self, request: HttpRequest, commands: QuerySet[Command]) -> QuerySet[Command]:
        if not self.has_view_permission(request):
            raise PermissionDenied
        return commands

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """The page of one command: what was asked, by whom and why, how far it is, how it ended."""
        command = self.get_object(request, object_id)
        if command is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if request.method not in ("GET", "HEAD") or not self.has_view_permission(request, command):
            raise PermissionDenied
        context = self.admin_site.each_context(request) | standing(command)
        context |= {
            "title": f"{command.op} {command.device_name or command.host.name}",
            "opts": self.opts,
            "about": device(command),
            "asked": list(_asked(command)),
            "detail": list(_detail(command)),
            "events": timeline.rows(Event.objects.filter(subject=command.uuid)[: timeline.ROWS]),
        }
        return TemplateResponse(request, "accelerators/command.html", context)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Command]:
        """Without what came back: only a command's own page shows it, and a report is long."""
        return super().get_queryset(request).select_related("host", "device").defer("detail")


def state(command: Command) -> SafeString:
    """As a word."""
    return badges.mark(command.state, badges.COMMAND_STATES[command.state], command.text)


def device(command: Command) -> SafeString | str:
    """Its device: a link while there is one, its name as it was when it is gone."""
    if command.device_id:
        return badges.link("device", command.device_id, command.device_name)
    return command.device_name or badges.NOTHING


def when(command: Command) -> SafeString:
    """Since when, and how long it took."""
    took = format_html(' <span class="faint">took {}</span>', badges.lasted(command.created_at, command.ended_at))
    return format_html("{}{}", badges.ago(command.created_at), took if command.ended_at else "")


def result(command: Command) -> SafeString:
    """The sentence it ended with; until then, how far it is."""
    if command.ended_at:
        return format_html('<span class="reason">{}</span>', command.text or command.outcome)
    if command.started_at or command.percent:
        return badges.progress(command.percent, command.progress)
    return format_html('<span class="reason">{}</span>', command.progress or waits(command))


def waits(command: Command) -> str:
    """What it waits for, in words."""
    if command.answered_at:
        return "waits until the host's report is applied"
    return {
        "preparing": "waits for its image",
        "queued": f"waits for the agent of {command.host.name}",
        "taken": "the agent has it",
    }.get(command.state, "")


def standing(command: Command) -> dict[str, Any]:
    """For `command_now.html`: its stages, each with its time, and how far it is."""
    stages = [
        ("ordered", command.created_at, "" if command.answered_at or command.taken_at else waits(command)),
        ("taken by the agent", command.taken_at, f"by {command.start_by:%H:%M:%S} UTC, else it expires"),
        ("begun", command.started_at, ""),
        ("answered", command.answered_at, f"by {command.end_by:%H:%M:%S} UTC, else its outcome is unknown"),
        ("ended", command.ended_at, ""),
    ]
    reached = [at is not None for _, at, _ in stages]
    next_one = reached.index(False) if False in reached else len(stages)
    return {
        "command": command,
        "state": state(command),
        "took": badges.lasted(command.created_at, command.ended_at),
        "bar": badges.progress(command.percent, command.progress)
        if command.started_at and not command.ended_at
        else "",
        "waits": "" if command.ended_at else waits(command),
        "stages": [
            {
                "name": name,
                "at": badges.ago(at) if at else "",
                "glyph": badges.GLYPHS["good" if at else "busy" if n == next_one else "calm"],
                "note": "" if at or n != next_one or command.ended_at else note,
            }
            for n, (name, at, note) in enumerate(stages)
            if at or not command.ended_at
        ],
        "open": command.pk,
        "piece": "" if command.ended_at else reverse("admin:accelerators_command_now", args=[command.pk]),
    }


def lately(commands: QuerySet[Command], of: str, pk: int) -> dict[str, Any]:
    """For `command_lately.html`: the newest of them. One statement."""
    newest = list(commands.select_related("host").defer("detail").order_by("-id")[:LATELY])
    rows = [
        {
            "command": one,
            "state": state(one),
            "device": "" if of == "device" else device(one),
            "when": when(one),
            "result": result(one),
        }
        for one in newest
    ]
    under_way = [str(one.pk) for one in newest if one.ended_at is None]
    asked = {f"{of}__id__exact": pk}
    return {
        "commands": rows,
        "of": of,
        "open": " ".join(under_way),
        "piece": reverse("admin:accelerators_command_lately", args=[of, pk]) if under_way else "",
        "all_commands": f"{reverse('admin:accelerators_command_changelist')}?{urlencode(asked)}",
    }


def of(request: HttpRequest, about: Device | Host) -> dict[str, Any]:
    """What the page of a device or host shows of its commands, to whom may view them."""
    if not request.user.has_perm("accelerators.view_command"):
        return {"commands": None}
    of = "device" if isinstance(about, Device) else "host"
    return lately(Command.objects.filter(**{of: about.pk}), of, about.pk)


def _asked(command: Command) -> Iterator[tuple[str, Any]]:
    """What was asked beside its name, as pairs."""
    said = command.arguments
    pairs = {name: said.get(name) for name in ("driver", "deployable", "uuid", "consumer")}
    pairs |= said.get("layout", {})
    pairs |= {name.replace("_", " "): value for name, value in said.get("wanted", {}).items()}
    pairs |= {name: json.dumps(value) for name, value in said.get("wish", {}).items()}
    image = said.get("image") or {}
    pairs |= {"image": image.get("id"), "image's name": image.get("name"), "image's sha256": image.get("sha256")}
    return ((name, value) for name, value in pairs.items() if value)


def _detail(command: Command) -> Iterator[dict[str, Any]]:
    """What came back beside the sentence: a list of objects as a table, text of several lines as it is, words."""
    for name, value in sorted(command.detail.items()):
        rows = _rows(value)
        columns = list(dict.fromkeys(column for row in rows or () for column in row))
        cells = [[row.get(column, "") for column in columns] for row in rows or ()]
        if rows if rows is not None else value:
            yield {"name": name, "value": value, "columns": columns, "rows": cells, "long": "\n" in value}


def _rows(value: str) -> list[dict[str, Any]] | None:
    """Of a list of objects, as drivers say signals and samples."""
    try:
        found = json.loads(value) if value.startswith("[") else None
    except ValueError:
        return None
    return found if isinstance(found, list) and all(isinstance(row, dict) for row in found) else None
