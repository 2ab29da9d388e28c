"""Console lists and pages of drivers and of rollouts.

The list shows the wanted and the reported state of every driver on every host. The page of a driver starts a rollout on
its host, on the hosts whose names match a pattern, or on all hosts; only on those where the driver runs or is wanted,
unless it is to be installed.
`accelerators.workflows.driver_rollouts` performs it.
"""

from __future__ import annotations

import json
from typing import Any

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Case, Count, Q, QuerySet, When
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import Truncator
from unfold.decorators import display

from accelerators.admin import device_actions
from accelerators.commands.command_queue import MAX_REASON
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.domain.generations import ChangedMeanwhileError
from accelerators.domain.setting_edits import PATH_SEPARATOR, SettingEdits
from accelerators.domain.states import (
    DeviceOutcome,
    DriverState,
    EventSource,
    RolloutOp,
    RolloutState,
    RolloutStepState,
)
from accelerators.models import DriverWish, Event, Host, HostDriver, Rollout, RolloutStep
from accelerators.ui import badges, permissions, timeline
from accelerators.ui.changelist import ReadOnlyModelAdmin
from accelerators.ui.conflicts import ComparedSetting, read_generation, render_conflict_page
from accelerators.ui.empty_lists import Source
from accelerators.workflows import backend_sections, driver_rollouts, driver_settings, rollout_previews
from accelerators.workflows.backend_sections import BackendPlace, ChangeContext
from accelerators.workflows.driver_config import DriverChange

MAX_HOST_ROWS = 200
"""Maximum number of hosts that a rollout's page lists, failed ones first. The counts include all hosts."""
PREDICTED_WORDS = {
    DeviceOutcome.MOVED: "will be done",
    DeviceOutcome.UNCHANGED: "already so",
    DeviceOutcome.REFUSED: "refused",
}
"""Words for the predicted outcomes of a draft."""
BUTTON_OPERATIONS = {
    "install": (RolloutOp.INSTALL, None),
    "settings": (RolloutOp.UPDATE, None),
    "enable": (RolloutOp.UPDATE, True),
    "disable": (RolloutOp.UPDATE, False),
    "uninstall": (RolloutOp.UNINSTALL, None),
}


NEW_BACKEND = '{"kind": "pci", "match": [{"vendor": "10de"}]}'
"""The settings that the form of a new backend proposes."""
BACKEND_BUTTONS = ("backend-add", "backend-save", "backend-enable", "backend-disable", "backend-remove")
"""Buttons that change one backend of the driver on its host."""


class DriverStateListFilter(admin.SimpleListFilter):
    """Filter by the driver's state as its agent reported it."""

    title, parameter_name = "seen", "state"

    def lookups(self, request: HttpRequest, model_admin: Any) -> list[tuple[str, str]]:
        """Return the states of `DriverState` as choices."""
        return [(word.value, word.value) for word in DriverState]

    def queryset(self, request: HttpRequest, queryset: QuerySet[HostDriver]) -> QuerySet[HostDriver]:
        """Return the drivers in the chosen `DriverState`; all if no state is chosen."""
        return queryset.filter(state=self.value()) if self.value() else queryset


@admin.register(HostDriver)
class DriverAdmin(ReadOnlyModelAdmin):
    """List of every driver on every host, including those that are installed but do not run; and the page of one."""

    list_display = ("shown_driver", "shown_host", "shown_seen", "shown_wanted", "shown_drift", "devices", "said")
    list_display_links = ("shown_driver",)
    list_filter = (DriverStateListFilter, "drifts")
    list_select_related = ("host", "wish__command")
    ordering = ("place",)
    search_fields = ("driver__startswith", "host__name__icontains")
    search_help_text = "driver, host"
    exports = {
        "shown_seen": ("state",),
        "shown_wanted": ("wish__enabled", "wish__generation"),
        "shown_drift": ("drifts",),
        "said": ("seen",),
    }
    empty = "No drivers yet. They appear as soon as the agents of their hosts report."
    sources = (Source("Agents", "agents.agent"),)

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest) -> bool:
        """Return whether the URL may filter by `lookup`: `host__name`, used by the page of a host, and Django's own."""
        return lookup == "host__name" or super().lookup_allowed(lookup, value, request)

    @display(description="Driver", ordering="driver")
    def shown_driver(self, row: HostDriver) -> str:
        """Return the driver's name."""
        return row.driver

    @display(description="Host", ordering="place")
    def shown_host(self, row: HostDriver) -> SafeString:
        """Render the driver's host as a link."""
        return badges.render_page_link("host", row.host_id, row.host.name)

    @display(description="Reported", ordering="state")
    def shown_seen(self, row: HostDriver) -> SafeString:
        """Render the driver's state and version as its agent reported them."""
        return render_reported_state(row)

    @display(description="Wanted")
    def shown_wanted(self, row: HostDriver) -> SafeString:
        """Render the wanted state of the driver and its generation."""
        return render_wanted_state(row)

    @display(description="Drift", ordering="drifts")
    def shown_drift(self, row: HostDriver) -> SafeString | str:
        """Render a badge if the reported state or generation differs from the wanted one; a dash if neither does."""
        return render_drift(row) or badges.DASH

    @display(description="Message")
    def said(self, row: HostDriver) -> str:
        """Return the driver's error, or the result of its last command while it drifts; at most 200 characters.

        A dash if there is neither.
        """
        return Truncator(row.text).chars(200) or badges.DASH

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """GET: show the wanted and the reported state of a driver on a host. POST: start a rollout, or store a draft if
        it has several hosts, and show its page.

        If the rollout is refused, the page is shown again with the reason and the submitted values. Raises Http404 if
        there is no such driver on that host, and PermissionDenied for a user who may not view it or, on POST, may not
        start rollouts.
        """
        row: HostDriver | None = self.get_object(request, object_id)
        if row is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if not self.has_view_permission(request, row):
            raise PermissionDenied
        if request.method == "POST":
            try:
                return HttpResponseRedirect(badges.page_url("rollout", _start_rollout(request, row).uuid))
            except ChangedMeanwhileError as refused:
                return self._show_conflict(request, row, refused)
            except RefusedError as refused:
                messages.error(request, refused.text)
        desired = row.wanted
        settings = json.dumps(desired.settings, indent=2) if desired and desired.settings is not None else ""
        button, refused_settings = request.POST.get("do"), request.POST.get("settings", "")
        refused_backend = request.POST.get("backend", "").strip()
        context = self.admin_site.each_context(request) | {
            "title": str(row),
            "opts": self.opts,
            "row": row,
            "desired": desired,
            "marks": [render_reported_state(row), render_drift(row)],
            "wanted": render_wanted_state(row),
            "settings": refused_settings if button in BUTTON_OPERATIONS else settings,
            "generation": row.wish.generation if row.wish else 0,
            "backends": [
                (
                    name,
                    refused_settings
                    if button == "backend-save" and name == refused_backend
                    else json.dumps(section, indent=2),
                    not isinstance(section, dict) or section.get("enabled", True),
                )
                for name, section in backend_sections.list_sections(row.wish).items()
            ],
            "new_backend": (refused_backend, refused_settings) if button == "backend-add" else ("", NEW_BACKEND),
            "is_checked_here": driver_settings.is_checked_here(row.driver, row.reported),
            "has_backends": row.driver == backend_sections.DEFAULT_DRIVER,
            "reason": request.POST.get("reason", ""),
            "runs": row.state not in ("disabled", "absent"),
            "since": badges.render_relative_time((row.reported or {}).get("since")),
            "max_reason_length": MAX_REASON,
            "parallel": driver_rollouts.DEFAULT_PARALLEL,
            "rollouts": [(rollout, render_rollout_state(rollout)) for rollout in _select_newest_rollouts(row)],
            "events": timeline.render_events(
                Event.objects.filter(subject=row.wish.uuid)[: timeline.MAX_EVENTS] if row.wish else []
            ),
        }
        context |= permissions.build_permission_context(request, permissions.START_ROLLOUT)
        return TemplateResponse(request, "accelerators/admin/driver.html", context)

    def _show_conflict(self, request: HttpRequest, row: HostDriver, refused: ChangedMeanwhileError) -> HttpResponse:
        """Return the page that compares the present wanted configuration with that of the refused request.

        Raises Http404 if nothing is wanted any more, because the host was removed.
        """
        wish = DriverWish.objects.filter(host=row.host_id, driver=row.driver).first()
        if wish is None:
            raise Http404(f"Nothing is wanted of {row} any more.")
        if request.POST["do"] in BACKEND_BUTTONS:
            subject, settings = (wish.uuid, str(row)), [_compare_backend(request, wish)]
            return render_conflict_page(request, self.admin_site, refused, subject, wish.generation, settings)
        op, enabled = BUTTON_OPERATIONS[request.POST["do"]]
        present = _describe_wanted(wish.installed, wish.enabled)
        mine = _describe_wanted(op is not RolloutOp.UNINSTALL, wish.enabled if enabled is None else enabled)
        present_settings = "" if wish.settings is None else json.dumps(wish.settings, indent=2)
        my_settings = _read_settings(request)
        settings = [
            ComparedSetting("State", present, mine),
            ComparedSetting(
                "Settings",
                present_settings,
                present_settings if my_settings is None else json.dumps(my_settings, indent=2),
            ),
        ]
        return render_conflict_page(request, self.admin_site, refused, (wish.uuid, str(row)), wish.generation, settings)


@admin.register(Rollout)
class RolloutAdmin(ReadOnlyModelAdmin):
    """List of rollouts with their operation, counts of hosts, author and state; and the page of one."""

    list_display = ("shown_state", "what", "shown_counts", "by", "when")
    list_display_links = ("what",)
    list_filter = ("state", "op")
    ordering = ("-id",)
    search_fields = ("uuid__startswith", "driver__startswith", "actor__startswith", "reason__icontains")
    search_help_text = "uuid, driver, by whom, reason"
    exports = {"shown_state": ("state",), "what": ("op", "driver", "total"), "by": ("actor", "reason")}
    empty = "No rollouts yet. Start one on the page of a driver."
    sources = (Source("Drivers", "accelerators.hostdriver", rights=(permissions.START_ROLLOUT,)),)

    def get_queryset(self, request: HttpRequest) -> QuerySet[Rollout]:
        """Return the rollouts, each annotated with its number of hosts for each state of a step.

        The attributes are named after the states: `waiting_steps`, `done_steps` and so on.
        """
        number = {f"{word}_steps": Count("steps", filter=Q(steps__state=word)) for word in RolloutStepState}
        rows: QuerySet[Rollout] = super().get_queryset(request)
        return rows.annotate(**number)

    @display(description="State", ordering="state")
    def shown_state(self, rollout: Rollout) -> SafeString:
        """Render the rollout's state as a badge."""
        return render_rollout_state(rollout)

    @display(description="What", ordering="driver")
    def what(self, rollout: Rollout) -> str:
        """Return the rollout's operation, driver and number of hosts as text."""
        return str(rollout)

    @display(description="Hosts")
    def shown_counts(self, rollout: Rollout) -> SafeString:
        """Render the numbers of hosts by state of the step as badges."""
        return badges.join_badges(
            *_render_step_counts({word: getattr(rollout, f"{word}_steps") for word in RolloutStepState})
        )

    @display(description="By, and why", ordering="actor")
    def by(self, rollout: Rollout) -> SafeString:
        """Render who started the rollout, with the reason below."""
        return format_html('{}<span class="reason">{}</span>', rollout.actor, rollout.reason)

    @display(description="When", ordering="-id")
    def when(self, rollout: Rollout) -> SafeString:
        """Render when the rollout was started."""
        return badges.render_relative_time(rollout.created_at)

    def get_urls(self) -> list[Any]:
        """Add the URL of `progress_view`."""
        progress_view = self.admin_site.admin_view(self.progress_view)
        return [path("<int:pk>/now/", progress_view, name="accelerators_rollout_now"), *super().get_urls()]

    def progress_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Answer with the part of a rollout's page that shows its progress; the page polls it until the rollout ends.

        Answers 404 if there is no such rollout. Raises PermissionDenied for a user who may not view rollouts.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        rollout = Rollout.objects.filter(pk=pk).first()
        context = build_progress_context(rollout) if rollout else {}
        return TemplateResponse(
            request, "accelerators/admin/rollout_progress.html", context, status=200 if rollout else 404
        )

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """GET: show the preview of a draft, or a rollout's progress, host by host. POST: confirm a draft, cancel a
        rollout, or make a draft for the hosts that have failed, and redirect.

        If the POST is refused, the page is shown again with the reason. Raises Http404 if there is no such rollout, and
        PermissionDenied for a user who may not view it or, on POST, may not start or cancel rollouts.
        """
        rollout: Rollout | None = self.get_object(request, object_id)
        if rollout is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        if not self.has_view_permission(request, rollout):
            raise PermissionDenied
        if request.method == "POST":
            try:
                return _handle_rollout_post(request, rollout)
            except RefusedError as refused:
                messages.error(request, refused.text)
        is_draft = rollout.state == RolloutState.DRAFT
        right = permissions.CANCEL_ROLLOUT if rollout.state == RolloutState.RUNNING else permissions.START_ROLLOUT
        context = self.admin_site.each_context(request) | (
            _build_preview_context(rollout) if is_draft else build_progress_context(rollout)
        )
        context |= {"title": str(rollout), "opts": self.opts} | permissions.build_permission_context(request, right)
        context |= {
            "is_draft": is_draft,
            "mine": driver_rollouts.may_confirm(rollout, device_actions.get_caller(request)),
            "failed_count": driver_rollouts.query_failed_steps(rollout).count() if rollout.ended_at else 0,
            "max_reason_length": MAX_REASON,
            "reason": request.POST.get("reason", rollout.reason),
        }
        context |= {"settings": "" if rollout.settings is None else json.dumps(rollout.settings, indent=2)}
        return TemplateResponse(request, "accelerators/admin/rollout.html", context)


def _handle_rollout_post(request: HttpRequest, rollout: Rollout) -> HttpResponse:
    """Perform the verb of a POST: `confirm` a draft, make a draft `again` for the hosts that have failed or were not
    begun, or cancel the rollout; then redirect to its page or to that of the new draft.

    After a cancel, no further host is begun; commands that were placed already go on. Only the person who chose the
    hosts may confirm a draft; for several hosts nothing is done unless their number was typed. Raises PermissionDenied
    for users who may not do this, and RefusedError.
    """
    caller = device_actions.get_caller(request)
    match request.POST.get("do"):
        case "confirm":
            permissions.require_permission(request, permissions.START_ROLLOUT)
            if not driver_rollouts.may_confirm(rollout, caller):
                raise PermissionDenied(f"Only {rollout.actor}, who chose these hosts, can confirm the rollout.")
            if rollout.total > 1 and request.POST.get("typed", "").strip() != str(rollout.total):
                text = f"This reaches {rollout.total} hosts. To confirm, type {rollout.total}. Nothing was done."
                messages.error(request, text)
            else:
                driver_rollouts.confirm_rollout(rollout, request.POST.get("reason", ""))
        case "again":
            permissions.require_permission(request, permissions.START_ROLLOUT)
            rollout = driver_rollouts.create_retry_draft(rollout, caller, EventSource.PERSON).rollout
        case _:
            permissions.require_permission(request, permissions.CANCEL_ROLLOUT)
            driver_rollouts.cancel_rollout(rollout, caller)
    return HttpResponseRedirect(badges.page_url("rollout", rollout.uuid))


def _build_preview_context(rollout: Rollout) -> dict[str, Any]:
    """Return the context of a draft's page: what the rollout would do now, with the first MAX_HOST_ROWS hosts."""
    preview = rollout_previews.preview_rollout(rollout)
    return {
        "rollout": rollout,
        "forecast": [
            (badges.render_badge(PREDICTED_WORDS[outcome], outcome.tone), text, is_held, number)
            for outcome, text, is_held, number in preview.group_forecasts()
        ],
        "moved_count": preview.count_hosts(DeviceOutcome.MOVED),
        "held_count": preview.held_count,
        "needs_typed_total": preview.needs_confirmation,
        "preview_rows": [
            (
                one,
                badges.render_host_link(one.host),
                badges.render_badge(PREDICTED_WORDS[one.outcome], one.outcome.tone),
            )
            for one in preview.hosts[:MAX_HOST_ROWS]
        ],
        "left": max(0, len(preview.hosts) - MAX_HOST_ROWS),
    }


def render_reported_state(row: HostDriver) -> SafeString:
    """Render the driver's state and version as its agent reported them, with the error on hover."""
    reported = row.reported or {}
    version = f" {reported['version']}" if reported.get("version") else ""
    return badges.render_badge(f"{row.state}{version}", DriverState(row.state).tone, reported.get("error", ""))


def render_wanted_state(row: HostDriver) -> SafeString:
    """Render the wanted state and its generation, or that nothing is wanted and the host's own file decides."""
    if row.wish is None:
        return format_html('<span class="faint">{}</span>', "nothing is wanted here; its host's own file decides")
    word = _describe_wanted(row.wish.installed, row.wish.enabled)
    return format_html('{} <span class="faint">generation {}</span>', word, row.wish.generation)


def render_drift(row: HostDriver) -> SafeString | str:
    """Render a badge if the reported state or generation differs from the wanted one; else return ''.

    Both generations are shown on hover.
    """
    if not row.drifts or row.wish is None:
        return ""
    applied_generation = (row.reported or {}).get("generation", 0)
    return badges.render_badge(
        "drifts",
        "warn",
        f"Generation {row.wish.generation} is wanted, but the agent has applied generation {applied_generation}.",
    )


def render_rollout_state(rollout: Rollout) -> SafeString:
    """Render the rollout's state as a badge."""
    return badges.render_choice(RolloutState(rollout.state))


def build_progress_context(rollout: Rollout) -> dict[str, Any]:
    """Return the context of `rollout_now.html`: the rollout's progress, counts, and at most MAX_HOST_ROWS hosts.

    Hosts that failed come first, then those that are under way. `piece` is the URL that the page polls, '' once the
    rollout has ended. Costs two statements.
    """
    step_counts = driver_rollouts.count_steps_by_state(rollout)
    finished_count = sum(
        number
        for word, number in step_counts.items()
        if word not in (RolloutStepState.WAITING, RolloutStepState.ORDERED)
    )
    sort_positions = {word: place for place, word in enumerate(("failed", "ordered", "done", "waiting", "skipped"))}
    sort_position = Case(*(When(state=word, then=place) for word, place in sort_positions.items()), default=9)
    steps = list(rollout.steps.select_related("command").order_by(sort_position, "id")[:MAX_HOST_ROWS])
    running = rollout.ended_at is None
    return {
        "rollout": rollout,
        "running": running,
        "is_draft": False,
        "can_cancel": rollout.state == RolloutState.RUNNING and running,
        "state": render_rollout_state(rollout),
        "bar": badges.render_progress_bar(
            100 * finished_count // max(rollout.total, 1), f"{finished_count} of {rollout.total}"
        )
        if running
        else "",
        "counts": _render_step_counts(step_counts),
        "took": badges.format_duration(rollout.created_at, rollout.ended_at),
        "rows": [_build_step_row(step) for step in steps],
        "left": max(0, rollout.total - len(steps)),
        "refresh_url": reverse("admin:accelerators_rollout_now", args=[rollout.pk]) if running else "",
    }


def _build_step_row(step: RolloutStep) -> dict[str, Any]:
    """Return the row of one host of a rollout: its link (its name if it was deleted), state, text and command."""
    host = badges.render_page_link("host", step.host_id, step.host_name) if step.host_id else step.host_name
    command = badges.render_page_link("command", step.command_id, "command") if step.command_id else badges.DASH
    return {
        "host": host,
        "state": badges.render_choice(RolloutStepState(step.state)),
        "text": step.text,
        "command": command,
    }


def _render_step_counts(step_counts: Any) -> list[SafeString]:
    """Render a badge for each state of a step that occurs, with its number of hosts.

    `step_counts` maps every state to its number.
    """
    return [
        badges.render_badge(f"{step_counts[state]} {state.label}", state.tone)
        for state in RolloutStepState
        if step_counts[state]
    ]


def _select_newest_rollouts(row: HostDriver) -> QuerySet[Rollout]:
    """Query the five newest rollouts of this driver that include this host."""
    return Rollout.objects.filter(driver=row.driver, steps__host=row.host_id).order_by("-id")[:5]


def _describe_wanted(is_installed: bool, is_enabled: bool) -> str:
    """Return the wanted state of a driver as a word."""
    return "uninstalled" if not is_installed else "enabled" if is_enabled else "disabled"


def _change_backend(request: HttpRequest, row: HostDriver) -> Rollout:
    """Start the rollout that a button of a backend asks for, and return it.

    Raises RefusedError as `_read_section` and `backend_sections` do.
    """
    place = BackendPlace(row.host, row.driver, request.POST.get("backend", "").strip())
    context = ChangeContext(
        device_actions.get_caller(request),
        EventSource.PERSON,
        request.POST.get("reason", ""),
        read_generation(request),
    )
    match request.POST["do"]:
        case "backend-add":
            return backend_sections.add_backend(place, _read_section(request), context)
        case "backend-save":
            settings = _read_section(request)
            present = backend_sections.list_sections(row.wish).get(place.name, {})
            edits = SettingEdits(settings, [name for name in present if name not in settings])
            return backend_sections.change_backend(place, edits, context)
        case "backend-remove":
            return backend_sections.remove_backend(place, context)
        case button:
            edits = SettingEdits({"enabled": button == "backend-enable"})
            return backend_sections.change_backend(place, edits, context)


def _compare_backend(request: HttpRequest, wish: DriverWish) -> ComparedSetting:
    """Compare the present settings of a backend with those of the refused request."""
    name, button = request.POST.get("backend", "").strip(), request.POST["do"]
    present = backend_sections.list_sections(wish).get(name)
    mine: dict[str, Any] | None = dict(present or {}) | {"enabled": button == "backend-enable"}
    if button in ("backend-add", "backend-save"):
        mine = _read_settings(request)
    elif button == "backend-remove":
        mine = None
    texts = ("" if one is None else json.dumps(one, indent=2) for one in (present, mine))
    return ComparedSetting(f"Backend {name}", *texts)


def _read_section(request: HttpRequest) -> dict[str, Any]:
    """Return the settings of a backend that the form replaces.

    Raises RefusedError INVALID if there are none, as `_read_settings` does, and for a name with a PATH_SEPARATOR.
    """
    settings = _read_settings(request)
    if not settings:
        raise RefusedError(RefusalReason.INVALID, "Enter the settings of the backend. Nothing was done.")
    if any(PATH_SEPARATOR in name for name in settings):
        text = f"The name of a setting must not contain {PATH_SEPARATOR}. Nothing was done."
        raise RefusedError(RefusalReason.INVALID, text)
    return settings


def _read_settings(request: HttpRequest) -> dict[str, Any] | None:
    """Return the settings that the form replaces, None if its button replaces none or the field is empty.

    Raises RefusedError INVALID if they are not a JSON object.
    """
    settings_text = request.POST.get("settings", "").strip()
    if request.POST["do"] not in ("install", "settings", "backend-add", "backend-save") or not settings_text:
        return None
    try:
        settings = json.loads(settings_text)
    except ValueError as error:
        text = f"The settings are not valid JSON: {error}. Nothing was done."
        raise RefusedError(RefusalReason.INVALID, text) from None
    if not isinstance(settings, dict):
        raise RefusedError(RefusalReason.INVALID, "The settings must be a JSON object. Nothing was done.")
    return settings


def _start_rollout(request: HttpRequest, row: HostDriver) -> Rollout:
    """Start the rollout that a button of a driver's page asks for, and return it; for several hosts, store a draft.

    It is for the driver's host or, if the form says so, for the hosts whose names match its pattern, or for all hosts.
    If the driver is not to be installed, only hosts where it runs or is wanted are meant. A `max_parallel` that is no
    number of at most three digits becomes DEFAULT_PARALLEL. Raises RefusedError INVALID if the settings are not a JSON
    object, and whatever `driver_rollouts` refuses; raises PermissionDenied for users who may not start rollouts, and
    for unknown buttons.
    """
    permissions.require_permission(request, permissions.START_ROLLOUT)
    if request.POST.get("do") in BACKEND_BUTTONS:
        return _change_backend(request, row)
    if request.POST.get("do") not in BUTTON_OPERATIONS:
        raise PermissionDenied("This page has no such button. Go back and try again.")
    op, enabled = BUTTON_OPERATIONS[request.POST["do"]]
    settings = _read_settings(request)
    hosts = _select_chosen_hosts(request, row, op)
    max_parallel_text = request.POST.get("max_parallel", "")
    max_parallel = (
        int(max_parallel_text)
        if max_parallel_text.isdecimal() and len(max_parallel_text) < 4
        else driver_rollouts.DEFAULT_PARALLEL
    )
    arguments = DriverChange(op, row.driver, enabled, settings), hosts, device_actions.get_caller(request)
    options: driver_rollouts.RolloutOptions = {
        "pace": driver_rollouts.RolloutPace(max_parallel, "go_on" not in request.POST),
        "reason": request.POST.get("reason", ""),
        "source": EventSource.PERSON,
        "generation": None if request.POST.get("where") in ("all", "named") else read_generation(request),
    }
    if len(hosts) > 1:
        return driver_rollouts.store_draft(*arguments, **options).rollout
    return driver_rollouts.start_rollout(*arguments, **options)


def _select_chosen_hosts(request: HttpRequest, row: HostDriver, op: RolloutOp) -> list[Host]:
    """Return the hosts that the form of a driver's page chooses: all, those whose names match its pattern, or this one.

    Raises RefusedError INVALID if the pattern is empty or matches no host.
    """
    selector: dict[str, Any] = {} if op is RolloutOp.INSTALL else {"driver": row.driver}
    match request.POST.get("where"):
        case "all":
            return driver_rollouts.select_hosts(selector=selector or {"all": True})
        case "named":
            pattern = request.POST.get("pattern", "").strip()
            if not pattern:
                text = "Enter the names of the hosts, for example cmp1*. Nothing was done."
                raise RefusedError(RefusalReason.INVALID, text)
            return driver_rollouts.select_hosts(selector=selector | {"name": pattern})
        case _:
            return [row.host]
