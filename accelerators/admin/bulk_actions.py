"""Console list of bulk actions, and the page of one, which asks for confirmation and shows progress and results.

Devices are selected in the device list (`accelerators.admin.device_actions`); `accelerators.workflows.bulk_actions`
performs the action.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Case, Model, When
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import path, reverse
from django.utils.html import format_html
from django.utils.safestring import SafeString
from unfold.decorators import display

from accelerators import safety
from accelerators.admin import device_actions
from accelerators.devices import lifecycle
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import BulkState, Outcome
from accelerators.models import Bulk, BulkItem, Device
from accelerators.ui import badges, permissions
from accelerators.ui.changelist import ReadOnly
from accelerators.workflows import bulk_actions, bulk_commands

FIRST, ROWS = 20, 200
"""Number of devices that the page lists before confirmation (FIRST) and afterwards (ROWS, refused ones first). The
counts include all devices."""
STATES = {"draft": "calm", "running": "busy", "done": "good", "cancelled": "warn"}
OUTCOMES = {"moved": ("done", "good"), "unchanged": ("already so", "calm"), "refused": ("refused", "bad")}
ORDERED = ("ordered", "good")
"""Word and tone of the outcome `moved` if the action orders commands from agents."""
COMING = {"moved": ("will be done", "good"), "unchanged": ("already so", "calm"), "refused": ("refused", "bad")}


@admin.register(Bulk)
class BulkAdmin(ReadOnly):
    """List of bulk actions with their author, progress and outcomes, and the page of one.

    Users who may decide about devices can view it without Django's view permission.
    """

    list_display = ("shown_state", "what", "shown_progress", "by", "when")
    list_display_links = ("what",)
    list_filter = ("state", "action")
    ordering = ("-id",)
    search_fields = ("uuid__startswith", "actor__startswith", "reason__icontains")
    search_help_text = "uuid, by whom, reason"
    empty = "No bulk actions yet. To make one, select devices in the list of devices and choose an action."

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return super().has_view_permission(request, obj) or permissions.may(request)

    @display(description="State", ordering="state")
    def shown_state(self, bulk: Bulk) -> SafeString:
        return state(bulk)

    @display(description="What", ordering="action")
    def what(self, bulk: Bulk) -> str:
        return what(bulk)

    @display(description="Devices")
    def shown_progress(self, bulk: Bulk) -> SafeString | str:
        return bar(bulk) if bulk.state == BulkState.RUNNING else badges.marks(*(mark for mark, _ in counts(bulk)))

    @display(description="By, and why", ordering="actor")
    def by(self, bulk: Bulk) -> SafeString:
        return format_html('{}<span class="reason">{}</span>', bulk.actor, bulk.reason)

    @display(description="When", ordering="-id")
    def when(self, bulk: Bulk) -> SafeString:
        return badges.ago(bulk.started_at or bulk.created_at)

    def get_urls(self) -> list[Any]:
        now = self.admin_site.admin_view(self.now_view)
        return [path("<int:pk>/now/", now, name="accelerators_bulk_now"), *super().get_urls()]

    def now_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Answer with the part of a bulk action's page that shows its progress; the page polls it until it has ended.

        Answers 404 if there is no such bulk action.
        """
        bulk = self._shown(request, Bulk.objects.filter(pk=pk).first())
        context = standing(bulk) if bulk else {}
        return TemplateResponse(request, "accelerators/bulk_now.html", context, status=200 if bulk else 404)

    def _shown(self, request: HttpRequest, bulk: Bulk | None) -> Bulk | None:
        if not self.has_view_permission(request):
            raise PermissionDenied
        return bulk

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """GET: show the confirmation question, the progress or the result.

        POST: confirm it, start a dry run, cancel it, or make a new draft of the refused devices. If the POST is
        refused, the page is shown again with the reason.
        """
        bulk = self._shown(request, self.get_object(request, object_id))
        if bulk is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        context = standing(bulk)
        if request.method == "POST":
            permissions.require(request)
            try:
                return self._posted(request, bulk)
            except RefusedError as refused:
                messages.error(request, refused.text)
                context["reason"] = request.POST.get("reason", "")
        context |= self.admin_site.each_context(request) | {"title": what(bulk), "opts": self.opts}
        context |= permissions.page(request) | {"longest": lifecycle.MAX_REASON}
        context |= {"mine": bulk.actor == device_actions.person(request).name}
        draft = bulk.state == BulkState.DRAFT
        context |= _question(bulk) if draft else {}
        context |= _result(bulk) if not draft or bulk.ended_at else {}
        return TemplateResponse(request, "accelerators/bulk.html", context)

    def _posted(self, request: HttpRequest, bulk: Bulk) -> HttpResponse:
        """Perform the verb of a POST: `confirm`, `try` (dry run), `cancel` or `again` (a new draft of refused devices).

        A repeated `confirm`, `try` or `cancel` has no effect; each `again` makes another draft. Only the author of a
        bulk action may confirm it or try it (else PermissionDenied). If it would touch held devices, `confirm` does
        nothing unless the user typed the number of devices.
        """
        who, page = device_actions.person(request), badges.page("bulk", bulk.uuid)
        match request.POST.get("do"):
            case "confirm" | "try" as verb:
                if bulk.actor != who.name:
                    raise PermissionDenied
                typed = request.POST.get("typed", "").strip() == str(bulk.total)
                if verb == "confirm" and not typed and _touches_held(bulk):
                    messages.error(request, f"Some devices are held. To confirm, type {bulk.total}. Nothing was done.")
                else:
                    bulk_actions.confirm(bulk, request.POST.get("reason", ""), held_too=typed, dry=verb == "try")
            case "cancel":
                bulk_actions.cancel(bulk, who)
            case "again":
                refused = Device.objects.filter(pk__in=bulk.items.filter(outcome=Outcome.REFUSED).values("device"))
                action, then = device_actions.choice_of(bulk).action, device_actions.choice_of(bulk).then
                page = badges.page("bulk", bulk_actions.choose(action, then, refused, who, bulk.selection).uuid)
        return HttpResponseRedirect(page)


@admin.register(BulkItem)
class BulkItemAdmin(ReadOnly):
    """List of the devices of a bulk action with the outcome of each; the page of a bulk action links to it."""

    list_display = ("shown_device", "shown_host", "shown_outcome", "shown_state", "stood", "text")
    list_display_links = None
    list_filter = ("outcome", "why")
    list_select_related = ("bulk",)
    ordering = ("id",)
    search_fields = ("device_name__icontains", "host__startswith", "device_uuid__startswith")
    search_help_text = "device, host, uuid"
    empty = "No devices here. The page of each bulk action links to the list of its devices."

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        return super().has_view_permission(request, obj) or permissions.may(request)

    @display(description="Device", ordering="device_name")
    def shown_device(self, item: BulkItem) -> SafeString | str:
        return device(item)

    @display(description="Host", ordering="host")
    def shown_host(self, item: BulkItem) -> SafeString:
        return badges.link("host", item.host, item.host)

    @display(description="Outcome", ordering="outcome")
    def shown_outcome(self, item: BulkItem) -> SafeString:
        return outcome(item.outcome, item.bulk)

    @display(description="State afterwards", ordering="state")
    def shown_state(self, item: BulkItem) -> SafeString | str:
        return badges.state(item.state) if item.state else badges.NOTHING


def state(bulk: Bulk) -> SafeString:
    """Render the state of a bulk action as a badge; a running dry run is shown as "dry run"."""
    word = "dry run" if bulk.dry and bulk.state == BulkState.RUNNING else bulk.state
    return badges.mark(word, STATES[bulk.state])


def what(bulk: Bulk) -> str:
    """Return the title of a bulk action: the label of its action and its number of devices."""
    return f"{device_actions.choice_of(bulk).label}: {bulk.total} device{'' if bulk.total == 1 else 's'}"


def bar(bulk: Bulk) -> SafeString:
    """Render a progress bar with the number of devices that are processed, of all devices."""
    return badges.progress(100 * bulk.worked // max(bulk.total, 1), f"{bulk.worked} of {bulk.total}")


def counts(bulk: Bulk) -> list[tuple[SafeString, int]]:
    """Return a badge and a number for each outcome that occurred, and for the devices that are not processed."""
    words = OUTCOMES | ({"moved": ORDERED} if bulk.action in bulk_commands.OPS else {})
    told = [
        (badges.mark(f"{getattr(bulk, word)} {said}", tone), getattr(bulk, word))
        for word, (said, tone) in words.items()
    ]
    left = bulk.total - bulk.worked
    return [*((mark, n) for mark, n in told if n), *([(badges.mark(f"{left} not done", "calm"), left)] if left else [])]


def outcome(word: str, bulk: Bulk) -> SafeString:
    """Render the outcome of one device as a badge; an empty `word` means that it was not processed."""
    if word == Outcome.MOVED and bulk.action in bulk_commands.OPS:
        return badges.mark(*ORDERED)
    return badges.mark(*OUTCOMES[word]) if word else badges.mark("not done", "calm")


def device(item: BulkItem) -> SafeString | str:
    """Render the device of an item: as a link if it still exists, else its name."""
    return badges.link("device", item.device_id, item.device_name) if item.device_id else item.device_name


def _why(item: BulkItem, bulk: Bulk) -> SafeString | str:
    """Return the reason of an item's outcome; for an ordered command a link to it, or '' in a dry run.

    A dry run takes its commands back, so there is nothing to link to.
    """
    if bulk.action not in bulk_commands.OPS or item.outcome != Outcome.MOVED:
        return item.text
    return "" if bulk.dry else badges.link("command", item.text.removeprefix("command "), item.text)


def commands_of(bulk: Bulk) -> str:
    """Return the URL of the list of the commands that a bulk action ordered."""
    asked = {"together": bulk.request_id, "op": bulk.action}
    return f"{reverse('admin:accelerators_command_changelist')}?{urlencode(asked)}"


def standing(bulk: Bulk) -> dict[str, Any]:
    """Return the context of `bulk_now.html`: state, progress, counts and duration."""
    running = bulk.state == BulkState.RUNNING
    return {
        "bulk": bulk,
        "running": running,
        "state": state(bulk),
        "bar": bar(bulk) if running else "",
        "counts": [mark for mark, _ in counts(bulk)] if bulk.started_at else [],
        "took": badges.lasted(bulk.started_at, None if running else bulk.ended_at) if bulk.started_at else "",
        "piece": reverse("admin:accelerators_bulk_now", args=[bulk.pk]) if running else "",
    }


def _touches_held(bulk: Bulk) -> bool:
    return any(one.held and one.outcome == Outcome.MOVED for one in bulk_actions.forecast(bulk))


def _question(bulk: Bulk) -> dict[str, Any]:
    """Return the context of the confirmation: predicted outcomes, holders, and the first devices of the set.

    Costs at most four statements.
    """
    told = bulk_actions.forecast(bulk)
    held = [item for item, _ in bulk_actions.first(bulk, FIRST, held=True)] if any(one.held for one in told) else []
    holds = {
        pk: (request, instance)
        for pk, request, instance in safety.holding([i.device_id for i in held], "uuid", "instance_uuid")
    }
    return {
        "choice": device_actions.choice_of(bulk),
        "forecast": [(badges.mark(*COMING[one.outcome]), one) for one in told],
        "going": sum(one.number for one in told if one.outcome == Outcome.MOVED),
        "holders": [(device(item), item.host, *holds[item.device_id]) for item in held if item.device_id in holds],
        "held": sum(one.number for one in told if one.held),
        "typed": any(one.held and one.outcome == Outcome.MOVED for one in told),
        "first": [
            (device(item), item.host, item.stood, badges.mark(*COMING[one.outcome]), one.text)
            for item, one in bulk_actions.first(bulk, FIRST)
        ],
        "back": f"{reverse('admin:accelerators_device_changelist')}?{bulk.selection}",
    }


def _result(bulk: Bulk) -> dict[str, Any]:
    """Return the context of the result: at most ROWS devices with their outcomes, refused ones first; one statement."""
    refused_first = Case(When(outcome=Outcome.REFUSED, then=0), default=1)
    order = list(bulk.items.exclude(outcome="").order_by(refused_first, "id")[:ROWS])
    listed = reverse("admin:accelerators_bulkitem_changelist")
    return {
        "rows": [
            (device(i), i.host, outcome(i.outcome, bulk), i.state and badges.state(i.state), _why(i, bulk))
            for i in order
        ],
        "left": max(0, bulk.worked - len(order)),
        "commands_url": commands_of(bulk) if bulk.action in bulk_commands.OPS and bulk.moved and not bulk.dry else "",
        "all_items": f"{listed}?{urlencode({'bulk__id__exact': bulk.pk})}",
    }
