"""Console list of bulk actions, and the page of one, which asks for confirmation and shows progress and results.

Devices are selected in the device list (`accelerators.admin.device_actions`), attachments and accelerators in the lists
of attachments and requests; `accelerators.workflows.bulk_actions` performs the action.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import urlencode

from django.contrib import admin, messages
from django.core.exceptions import PermissionDenied
from django.db.models import Case, Model, QuerySet, When
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
from accelerators.domain.states import (
    OPEN_COMMAND_STATES,
    BulkState,
    BulkTarget,
    CommandState,
    DeviceOutcome,
)
from accelerators.models import Bulk, BulkItem, Device
from accelerators.models.attachments import AttachmentState
from accelerators.ui import badges, permissions
from accelerators.ui.changelist import ReadOnlyModelAdmin
from accelerators.ui.empty_lists import Source
from accelerators.ui.export import ExportedValue
from accelerators.workflows import bulk_actions, bulk_commands
from accelerators.workflows.bulk_detachments import DETACH
from drivers.plan import DESTRUCTIVE

MAX_PREVIEW_ROWS, MAX_RESULT_ROWS = 20, 200
"""Number of objects that the page lists before confirmation (MAX_PREVIEW_ROWS) and afterwards (MAX_RESULT_ROWS, refused
ones first). The counts include all devices."""
LIST_BY_TARGET = {
    BulkTarget.DEVICE: "device",
    BulkTarget.ATTACHMENT: "attachment",
    BulkTarget.ACCELERATOR: "acceleratorrequest",
}
"""The model of the list in which the objects of each kind are selected."""
MOVED_PREDICTED = "will be done"
"""Word for the outcome `moved` of an action that nobody has confirmed."""


@admin.register(Bulk)
class BulkAdmin(ReadOnlyModelAdmin):
    """List of bulk actions with their author, progress and outcomes, and the page of one.

    Users who may make bulk actions can view it without Django's view permission.
    """

    list_display = ("shown_state", "what", "shown_progress", "by", "when")
    list_display_links = ("what",)
    list_filter = ("state", "action")
    ordering = ("-id",)
    search_fields = ("uuid__startswith", "actor__startswith", "reason__icontains")
    search_help_text = "uuid, by whom, reason"
    empty = (
        "No bulk actions yet. To make one, select rows in the list of devices, attachments or requests and choose an"
        " action."
    )
    sources = (
        Source("Devices", "accelerators.device", rights=(permissions.UPDATE_DEVICE,)),
        Source("Attachments", "accelerators.attachment", rights=permissions.DETACH),
        Source("Requests", "accelerators.acceleratorrequest", rights=permissions.LABEL),
    )

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return whether the user may view bulk actions: with Django's view permission, or if they may make some.

        While everything is read only, only the view permission counts.
        """
        return super().has_view_permission(request, obj) or _may_make_bulk_actions(request)

    @display(description="State", ordering="state")
    def shown_state(self, bulk: Bulk) -> SafeString:
        """Render the state of the bulk action as a badge; a running dry run is shown as "dry run"."""
        return render_bulk_state(bulk)

    @display(description="What", ordering="action")
    def what(self, bulk: Bulk) -> str:
        """Return the label of the action and its number of objects."""
        return describe_bulk(bulk)

    @display(description="Objects")
    def shown_progress(self, bulk: Bulk) -> SafeString | str:
        """Render a progress bar while the bulk action runs, otherwise its outcomes with their numbers as badges."""
        return (
            render_bulk_progress(bulk)
            if bulk.state == BulkState.RUNNING
            else badges.join_badges(*(mark for mark, _ in count_outcomes(bulk)))
        )

    @display(description="By, and why", ordering="actor")
    def by(self, bulk: Bulk) -> SafeString:
        """Render the name of the author with the reason below."""
        return format_html('{}<span class="reason">{}</span>', bulk.actor, bulk.reason)

    @display(description="When", ordering="-id")
    def when(self, bulk: Bulk) -> SafeString:
        """Render when the bulk action was started or, if it never was, when it was made."""
        return badges.render_relative_time(bulk.started_at or bulk.created_at)

    def get_urls(self) -> list[Any]:
        """Add the URLs of `progress_view` and `rows_view`."""
        progress_view, rows_view = map(self.admin_site.admin_view, (self.progress_view, self.rows_view))
        return [
            path("<int:pk>/now/", progress_view, name="accelerators_bulk_now"),
            path("<int:pk>/rows/", rows_view, name="accelerators_bulk_rows"),
            *super().get_urls(),
        ]

    def progress_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Answer with the part of a bulk action's page that shows its progress; the page polls it until it has ended.

        Answers 404 if there is no such bulk action. Raises PermissionDenied for a user who may not view bulk actions.
        """
        bulk = self._require_view_permission(request, Bulk.objects.filter(pk=pk).first())
        context = build_progress_context(bulk) if bulk else {}
        return TemplateResponse(
            request, "accelerators/admin/bulk_action_progress.html", context, status=200 if bulk else 404
        )

    def rows_view(self, request: HttpRequest, pk: int) -> HttpResponse:
        """Answer with the rows of these objects (`items` in the query) of a bulk action; its page polls it while
        commands are under way, so that each row shows how its command goes on.

        Costs one statement beside those for the bulk action and the user. At most MAX_RESULT_ROWS objects are shown.
        Answers 404 if there is no such bulk action, or if the query names no objects. Raises PermissionDenied for a
        user who may not view bulk actions.
        """
        bulk = self._require_view_permission(request, Bulk.objects.filter(pk=pk).first())
        words = request.GET.get("items", "").split(",")[:MAX_RESULT_ROWS]
        if bulk is None or not all(word.isascii() and word.isdecimal() and len(word) <= 18 for word in words):
            return HttpResponse(status=404)
        keys = [int(word) for word in words]
        items = bulk_actions.annotate_with_commands(bulk.items.filter(pk__in=keys))
        found = {item.pk: item for item in items}
        rows = _render_rows([found[key] for key in dict.fromkeys(keys) if key in found], bulk)
        context = {"rows": rows, "noun": bulk.target, "rows_url": request.get_full_path()}
        return TemplateResponse(request, "accelerators/admin/bulk_action_rows.html", context)

    def _require_view_permission(self, request: HttpRequest, bulk: Bulk | None) -> Bulk | None:
        """Return `bulk`, which may be None, unchanged.

        Raises PermissionDenied for a user who may not view bulk actions.
        """
        if not self.has_view_permission(request):
            raise PermissionDenied
        return bulk

    def change_view(
        self, request: HttpRequest, object_id: str, form_url: str = "", extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """GET: show the confirmation question, the progress or the result.

        POST: confirm the bulk action, start a dry run, cancel it, or make a new draft of the failed objects, then
        redirect. If the POST is refused, the page is shown again with the reason. Raises Http404 if there is no such
        bulk action, and PermissionDenied for a user who may not view it or, on POST, lacks a right of its action.
        """
        bulk = self._require_view_permission(request, self.get_object(request, object_id))
        if bulk is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)
        context, rights = build_progress_context(bulk), device_actions.find_choice_of_bulk(bulk).rights
        if request.method == "POST":
            permissions.require_permission(request, *rights)
            try:
                return self._handle_post(request, bulk)
            except RefusedError as refused:
                messages.error(request, refused.text)
                context["reason"] = request.POST.get("reason", "")
        context |= self.admin_site.each_context(request) | {"title": describe_bulk(bulk), "opts": self.opts}
        context |= permissions.build_permission_context(request, *rights) | {"max_reason_length": lifecycle.MAX_REASON}
        context |= {"known": bulk.action in bulk_actions.KNOWN_ACTIONS, "noun": bulk.target}
        context |= {"mine": bulk_actions.may_confirm(bulk, device_actions.get_caller(request))}
        draft = bulk.state == BulkState.DRAFT
        context |= _build_confirmation_context(bulk) if draft else {}
        context |= _build_result_context(bulk, bool(context["refresh_url"])) if not draft or bulk.ended_at else {}
        return TemplateResponse(request, "accelerators/admin/bulk_action.html", context)

    def _handle_post(self, request: HttpRequest, bulk: Bulk) -> HttpResponse:
        """Perform the verb of a POST: `confirm`, `try` (dry run), `cancel` or `again` (a new draft of failed objects).

        Redirects to the page of the bulk action or, after `again`, of the new draft; an unknown verb does nothing else.
        A repeated `confirm`, `try` or `cancel` has no effect; each `again` makes another draft. Only the author of a
        bulk action may confirm or try it (else PermissionDenied). If the action would change held objects, or reaches
        several hosts, `confirm` does nothing unless the user typed the number of objects. Raises RefusedError INVALID
        for an unusable reason, and for `again` what `create_retry_draft` raises.
        """
        caller, target_url = device_actions.get_caller(request), badges.page_url("bulk", bulk.uuid)
        match request.POST.get("do"):
            case "confirm" | "try" as verb:
                if not bulk_actions.may_confirm(bulk, caller):
                    raise PermissionDenied(f"Only {bulk.actor}, who chose these objects, can confirm the bulk action.")
                has_typed_total = request.POST.get("typed", "").strip() == str(bulk.total)
                preview = bulk_actions.preview_bulk(bulk)
                if verb == "confirm" and not has_typed_total and preview.needs_confirmation:
                    text = f"{describe_reach(bulk, preview)} To confirm, type {bulk.total}. Nothing was done."
                    messages.error(request, text)
                else:
                    bulk_actions.confirm_draft(
                        bulk, request.POST.get("reason", ""), held_too=has_typed_total, dry_run=verb == "try"
                    )
            case "cancel":
                bulk_actions.cancel_bulk(bulk, caller)
            case "again":
                target_url = badges.page_url("bulk", bulk_actions.create_retry_draft(bulk, caller).uuid)
        return HttpResponseRedirect(target_url)


@admin.register(BulkItem)
class BulkItemAdmin(ReadOnlyModelAdmin):
    """List of the objects of a bulk action with the outcome of each; the page of a bulk action links to it."""

    list_display = ("shown_object", "shown_host", "shown_outcome", "shown_state", "shown_stood", "shown_text")
    list_display_links = None
    list_filter = ("outcome", "why")
    list_select_related = ("bulk",)
    ordering = ("id",)
    search_fields = ("target_name__icontains", "host__startswith", "target_uuid__startswith")
    search_help_text = "object, host, uuid"
    exports = {
        "shown_outcome": (
            "outcome",
            ExportedValue("command_state", ("ordered_command",), lambda command: command and command["state"]),
            ExportedValue("command_text", ("ordered_command",), lambda command: command and command["text"]),
        )
    }
    empty = "No objects here. The page of each bulk action links to the list of its objects."
    sources = (Source("Bulk actions", "accelerators.bulk"),)

    def has_view_permission(self, request: HttpRequest, obj: Model | None = None) -> bool:
        """Return the same as `BulkAdmin.has_view_permission`, with the view permission for bulk items."""
        return super().has_view_permission(request, obj) or _may_make_bulk_actions(request)

    def get_queryset(self, request: HttpRequest) -> QuerySet[BulkItem]:
        """Return the objects with the commands that were ordered for them."""
        return bulk_actions.annotate_with_commands(super().get_queryset(request))

    @display(description="Object", ordering="target_name")
    def shown_object(self, item: BulkItem) -> SafeString:
        """Render the object as a link, or the name of a device that does not exist any more.

        The row has no page, so its key for live updates is in an attribute.
        """
        return format_html('<span data-row="{}">{}</span>', item.pk, render_item_object(item, item.bulk))

    @display(description="Host", ordering="host")
    def shown_host(self, item: BulkItem) -> SafeString:
        """Render the object's host as a link; a dash for an object that has none."""
        return badges.render_host_link(item.host)

    @display(description="Outcome", ordering="outcome")
    def shown_outcome(self, item: BulkItem) -> SafeString:
        """Render the outcome of the object, or the state of its command, as a badge; "not done" if the object was not
        processed."""
        return render_item_outcome(item, item.bulk)

    @display(description="State afterwards", ordering="state")
    def shown_state(self, item: BulkItem) -> SafeString | str:
        """Render the state of the object after the action; a dash if none was stored."""
        return render_item_state(item, item.bulk) or badges.DASH

    @display(description="When chosen", ordering="stood")
    def shown_stood(self, item: BulkItem) -> SafeString | str:
        """Return the state, or the label, that the object had when it was chosen; a dash if it had none."""
        return item.stood or badges.DASH

    @display(description="Why", ordering="text")
    def shown_text(self, item: BulkItem) -> SafeString | str:
        """Render the reason of the outcome, or a link to the object's command with its result; a dash if there is
        none."""
        return _render_item_reason(item, item.bulk) or badges.DASH


def _may_make_bulk_actions(request: HttpRequest) -> bool:
    """Return whether the user has the right of at least one bulk action; False while everything is read only."""
    rights = {one.rights for one in (*device_actions.LIST_CHOICES, *device_actions.build_target_choices(Bulk()))}
    rights |= {(permissions.ADD_UNITS,), (permissions.REMOVE_UNITS,)}
    return any(permissions.is_allowed(request, *needed) for needed in rights)


def render_bulk_state(bulk: Bulk) -> SafeString:
    """Render the state of a bulk action as a badge; a running dry run is shown as "dry run"."""
    word = "dry run" if bulk.dry and bulk.state == BulkState.RUNNING else bulk.state
    return badges.render_badge(word, BulkState(bulk.state).tone)


def describe_bulk(bulk: Bulk) -> str:
    """Return the title of a bulk action, such as "Enable: 12 devices". Costs no statement."""
    return f"{device_actions.find_choice_of_bulk(bulk).label}: {bulk.count_targets(bulk.total)}"


def render_bulk_progress(bulk: Bulk) -> SafeString:
    """Render a progress bar in percent that says how many of the objects have been processed."""
    return badges.render_progress_bar(
        100 * bulk.finished_count // max(bulk.total, 1), f"{bulk.finished_count} of {bulk.total}"
    )


def count_outcomes(bulk: Bulk) -> list[tuple[SafeString, int]]:
    """Return a badge and a number of objects for each outcome that occurred, and for the objects not processed yet.

    Uses the counts in the row, so it costs no statement.
    """
    numbers = {outcome: getattr(bulk, outcome) for outcome in DeviceOutcome}
    remaining = bulk.total - bulk.finished_count
    return [
        *((_render_outcome(outcome, _get_moved_word(bulk), f"{n} "), n) for outcome, n in numbers.items() if n),
        *([(badges.render_badge(f"{remaining} not done", "calm"), remaining)] if remaining else []),
    ]


def render_item_outcome(item: BulkItem, bulk: Bulk) -> SafeString:
    """Render the outcome of an object as a badge, or the state of the command that was ordered for it.

    `item` is one of `bulk_actions.annotate_with_commands`.
    """
    if not item.outcome:
        return badges.render_badge("not done", "calm")
    if command := _get_ordered_command(item, bulk):
        return badges.render_choice(CommandState(command["state"]))
    return _render_outcome(item.outcome, _get_moved_word(bulk))


def _get_ordered_command(item: BulkItem, bulk: Bulk) -> dict[str, Any] | None:
    """Return what `bulk_actions.annotate_with_commands` has added to an item; None if no command was ordered, or in a
    dry run."""
    ordered: dict[str, Any] | None = item.ordered_command  # type: ignore[attr-defined]  # annotated
    return ordered if bulk_actions.orders_commands(bulk) else None


def _get_moved_word(bulk: Bulk) -> str:
    """Return the word for the outcome `moved`: `ordered` if the work goes on after the bulk action, because it orders
    commands from agents or detachments, else `done`."""
    return "ordered" if bulk.action in (*bulk_commands.BULK_OPS, DETACH) else "done"


def _render_outcome(outcome_name: str, moved_word: str, number: str = "") -> SafeString:
    """Render an outcome as a badge, with `number` before it; `moved_word` is the word for the outcome `moved`."""
    outcome = DeviceOutcome(outcome_name)
    word = {DeviceOutcome.MOVED: moved_word, DeviceOutcome.UNCHANGED: "already so"}.get(outcome, outcome.label)
    return badges.render_badge(f"{number}{word}", outcome.tone)


def render_item_object(item: BulkItem, bulk: Bulk) -> SafeString | str:
    """Render the object of an item as a link; of a device that does not exist any more, and of an object of a kind that
    this release does not know, the name."""
    if bulk.target == BulkTarget.DEVICE:
        return badges.render_page_link("device", item.device_id, item.target_name) if item.device_id else str(item)
    if bulk.target in LIST_BY_TARGET:
        return badges.render_page_link(LIST_BY_TARGET[BulkTarget(bulk.target)], item.target_uuid, item.target_name)
    return str(item)


def render_item_state(item: BulkItem, bulk: Bulk) -> SafeString | str:
    """Render the state of an item's object after the action; '' if none was stored."""
    if not item.state:
        return ""
    if bulk.target == BulkTarget.DEVICE:
        return badges.render_device_state(item.state)
    if bulk.target == BulkTarget.ATTACHMENT:
        return badges.render_choice(AttachmentState(item.state))
    return str(item.state)


def _render_item_reason(item: BulkItem, bulk: Bulk) -> SafeString | str:
    """Return the reason of an item's outcome; for an ordered command a link to it with its result, or '' in a dry run.

    A dry run takes its commands back, and commands are deleted after some time: then there is nothing to link to.
    """
    if bulk.action not in bulk_commands.BULK_OPS or item.outcome != DeviceOutcome.MOVED:
        return item.text
    command = _get_ordered_command(item, bulk)
    if command is None:
        return "" if bulk.dry else item.text
    link = badges.render_page_link("command", command["id"], item.text)
    result = command["text"] if command["text"] != command["state"] else ""
    return format_html('{}<span class="reason">{}</span>', link, result) if result else link


def command_list_url(bulk: Bulk) -> str:
    """Return the URL of the list of the commands that a bulk action ordered."""
    list_query = {"together": bulk.request_id, "op": bulk.action}
    return f"{reverse('admin:accelerators_command_changelist')}?{urlencode(list_query)}"


def build_progress_context(bulk: Bulk) -> dict[str, Any]:
    """Return the context of `bulk_action_progress.html`: state, progress, counts, commands by state, and duration.

    `refresh_url` is the URL that the page polls; it is '' if neither the bulk action nor one of its commands is under
    way. The whole page is read again only then, and when the state of the bulk action changes, because it costs more;
    its rows are read by `BulkAdmin.rows_view`.
    Costs one statement if the action orders commands, else none.
    """
    running = bulk.state == BulkState.RUNNING
    command_counts = bulk_actions.count_commands(bulk) if bulk.moved else {}
    open_commands = sum(number for state, number in command_counts.items() if state in OPEN_COMMAND_STATES)
    return {
        "bulk": bulk,
        "running": running,
        "state": render_bulk_state(bulk),
        "bar": render_bulk_progress(bulk) if running else "",
        "counts": [mark for mark, _ in count_outcomes(bulk)] if bulk.started_at else [],
        "command_counts": [
            badges.render_badge(f"{command_counts[state]} {state.label}", state.tone)
            for state in CommandState
            if state in command_counts
        ],
        "open_commands": open_commands,
        "took": badges.format_duration(bulk.started_at, None if running else bulk.ended_at) if bulk.started_at else "",
        "refresh_url": reverse("admin:accelerators_bulk_now", args=[bulk.pk]) if running or open_commands else "",
    }


def describe_reach(bulk: Bulk, preview: bulk_actions.BulkPreview) -> str:
    """Return a sentence that says why a bulk action needs a separate confirmation; '' if it needs none."""
    if preview.held_count:
        hold_text = "are held" if bulk.target == BulkTarget.DEVICE else "hold units"
        return f"Some {bulk.target}s {hold_text}."
    return f"The {bulk.target}s are on {preview.host_count} hosts." if preview.host_count > 1 else ""


def get_list_url(bulk: Bulk) -> str:
    """Return the URL of the list from which the objects of a bulk action were selected, with its filters."""
    listed = LIST_BY_TARGET.get(BulkTarget(bulk.target)) if bulk.target in LIST_BY_TARGET else "bulk"
    return f"{reverse(f'admin:accelerators_{listed}_changelist')}?{bulk.selection}"


def _build_confirmation_context(bulk: Bulk) -> dict[str, Any]:
    """Return the context of the confirmation: predicted outcomes, holders, and the first objects of the set.

    At most MAX_PREVIEW_ROWS objects are listed, as many held devices, and as many of those that are not in the set, but
    that a destructive command affects, too. Costs a constant number of statements, and locks nothing.
    """
    preview = bulk_actions.preview_bulk(bulk)
    predictions = preview.forecasts
    held_items = (
        [
            item
            for item, _ in bulk_actions.forecast_first_items(bulk, MAX_PREVIEW_ROWS, True, preview.unreachable_agents)
        ]
        if bulk.target == BulkTarget.DEVICE and any(one.held for one in predictions)
        else []
    )
    holders_by_device = {
        pk: (request, badges.render_instance_link(instance, is_whole=True))
        for pk, request, instance in safety.query_requests_of_devices(
            [item.device_id for item in held_items if item.device_id is not None], "uuid", "instance_uuid"
        )
    }
    affected = (
        safety.find_affected_outside(Device.objects.filter(pk__in=bulk.items.values("device")), bulk.action)
        if bulk.target == BulkTarget.DEVICE and bulk.action in DESTRUCTIVE
        else []
    )
    return {
        "choice": device_actions.find_choice_of_bulk(bulk),
        "affected": [
            (badges.render_page_link("device", one.pk, str(one)), badges.render_host_link(one.host.name), one.state)
            for one in affected
        ][:MAX_PREVIEW_ROWS],
        "affected_number": len(affected),
        "forecast": [(_render_outcome(prediction.outcome, MOVED_PREDICTED), prediction) for prediction in predictions],
        "moved_count": preview.count_objects(DeviceOutcome.MOVED),
        "host_count": preview.host_count,
        "holders": [
            (
                render_item_object(item, bulk),
                badges.render_host_link(item.host),
                *holders_by_device[item.device_id],
            )
            for item in held_items
            if item.device_id in holders_by_device
        ],
        "held": sum(one.number for one in predictions if one.held),
        "needs_typed_total": preview.needs_confirmation,
        "reach": describe_reach(bulk, preview),
        "instance_reach": preview.reach,
        "first": [
            (
                render_item_object(item, bulk),
                badges.render_host_link(item.host),
                item.stood or badges.DASH,
                _render_outcome(one.outcome, MOVED_PREDICTED),
                one.text or badges.DASH,
            )
            for item, one in bulk_actions.forecast_first_items(
                bulk, MAX_PREVIEW_ROWS, unreachable_agents=preview.unreachable_agents
            )
        ],
        "back": get_list_url(bulk),
    }


def _render_rows(items: Sequence[BulkItem], bulk: Bulk) -> list[tuple[SafeString | str, ...]]:
    """Return the cells of these items of `bulk_actions.annotate_with_commands`: object, host, outcome, state and
    reason. Costs no statement."""
    return [
        (
            render_item_object(item, bulk),
            badges.render_host_link(item.host),
            render_item_outcome(item, bulk),
            render_item_state(item, bulk) or badges.DASH,
            _render_item_reason(item, bulk) or badges.DASH,
        )
        for item in items
    ]


def _build_rows_url(items: Sequence[BulkItem], bulk: Bulk) -> str:
    """Return the URL of the rows of these items, which the page polls."""
    address = reverse("admin:accelerators_bulk_rows", args=[bulk.pk])
    return f"{address}?items={','.join(str(item.pk) for item in items)}"


def _build_result_context(bulk: Bulk, is_under_way: bool) -> dict[str, Any]:
    """Return the context of the result: at most MAX_RESULT_ROWS processed objects with their outcomes.

    Refused objects come first, then those whose command or installation has failed. The page polls the rows while the
    bulk action or one of its commands `is_under_way`. Costs four statements.
    """
    processed = bulk_actions.annotate_with_commands(bulk.items.exclude(outcome=""))
    failed = bulk_actions.query_failed_items(bulk)
    refused_first = Case(When(outcome=DeviceOutcome.REFUSED, then=0), default=1)
    failed_ids = list(failed.order_by(refused_first, "id").values_list("pk", flat=True)[:MAX_RESULT_ROWS])
    items = list(processed.filter(pk__in=failed_ids).order_by(refused_first, "id"))
    items += processed.exclude(pk__in=failed_ids).order_by("id")[: MAX_RESULT_ROWS - len(items)]
    list_url = reverse("admin:accelerators_bulkitem_changelist")
    return {
        "rows": _render_rows(items, bulk),
        "rows_url": _build_rows_url(items, bulk) if is_under_way and bulk_actions.orders_commands(bulk) else "",
        "left": max(0, bulk.finished_count - len(items)),
        "failed_count": bulk_actions.query_failed_objects(bulk).count()
        if bulk.action in bulk_actions.KNOWN_ACTIONS
        else 0,
        "chosen_from": get_list_url(bulk),
        "detaching_url": f"{reverse('admin:accelerators_attachment_changelist')}?state__exact=detaching"
        if bulk.action == DETACH and bulk.moved and not bulk.dry
        else "",
        "commands_url": command_list_url(bulk)
        if bulk.action in bulk_commands.BULK_OPS and bulk.moved and not bulk.dry
        else "",
        "all_items": f"{list_url}?{urlencode({'bulk__id__exact': bulk.pk})}",
    }
