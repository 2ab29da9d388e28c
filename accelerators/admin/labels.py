"""The console page that asks for the label of several accelerators. The list of requests leads to it.

The selected accelerators are stored as a draft; its page, to which this one leads, asks for confirmation.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from accelerators.admin import device_actions
from accelerators.devices.lifecycle import MAX_REASON
from accelerators.domain.errors import RefusedError
from accelerators.domain.states import BulkState, DrainTarget
from accelerators.models import AcceleratorRequest, Bulk
from accelerators.ui import badges, permissions
from accelerators.workflows import bulk_actions, bulk_labels

MAX_LABEL = 255
MAX_SHOWN = 20
"""Number of accelerators that the page lists."""


def label_accelerators(admin: Any, request: HttpRequest, queryset: QuerySet[AcceleratorRequest]) -> HttpResponse | None:
    """Admin action: store those selected requests that hold an accelerator as a draft, and redirect to the page that
    asks for the label.

    If there are none, or too many, returns None and adds a message: the list is shown again. No label is changed here.
    """
    held = queryset.filter(attach_handle__isnull=False).select_related(None)
    caller, selection = device_actions.get_caller(request), request.GET.urlencode()
    arguments = bulk_labels.build_arguments("")
    try:
        draft = bulk_actions.create_draft(
            bulk_labels.LABEL, DrainTarget.MAINTENANCE, held, caller, selection, arguments=arguments
        )
    except RefusedError as refused:
        messages.error(request, refused.text)
        return None
    return HttpResponseRedirect(f"{reverse('admin:accelerators_acceleratorrequest_label')}?draft={draft.uuid}")


label_accelerators.short_description = "Set the label"  # type: ignore[attr-defined]
label_accelerators.allowed_permissions = ("label",)  # type: ignore[attr-defined]


def handle_label_page(admin: Any, request: HttpRequest) -> HttpResponse:
    """GET: ask for the label of the accelerators of a draft. POST: store it with the draft, and redirect to the page
    that asks for confirmation.

    Redirects to the list if there is no such draft, and shows the page again with the reason of a refusal. Raises
    PermissionDenied for users without the rights `permissions.LABEL`, and for another user than the one who selected
    the accelerators.
    """
    permissions.require_permission(request, *permissions.LABEL)
    draft = _find_draft(request.GET.get("draft", ""))
    if draft is None:
        messages.error(request, "Select requests that hold an accelerator.")
        return HttpResponseRedirect(reverse("admin:accelerators_acceleratorrequest_changelist"))
    if not bulk_actions.may_confirm(draft, device_actions.get_caller(request)):
        raise PermissionDenied(f"Only {draft.actor}, who selected these accelerators, can set their label.")
    if request.method == "POST":
        label = request.POST.get("label", "").strip()[:MAX_LABEL].replace("\0", "")
        try:
            bulk_actions.set_arguments(draft, bulk_labels.build_arguments(label), request.POST.get("reason", ""))
            return HttpResponseRedirect(badges.page_url("bulk", draft.uuid))
        except RefusedError as refused:
            messages.error(request, refused.text)
    context = admin.admin_site.each_context(request) | {
        "title": f"Label {draft.count_targets(draft.total)}",
        "opts": admin.opts,
        "draft": draft,
        "chosen": [(one, badges.render_host_link(one.host)) for one in draft.items.order_by("id")[:MAX_SHOWN]],
        "host_count": draft.items.order_by().values("host").distinct().count(),
        "label": request.POST.get("label", ""),
        "reason": request.POST.get("reason", draft.reason),
        "max_label": MAX_LABEL,
        "max_reason_length": MAX_REASON,
    }
    return TemplateResponse(request, "accelerators/admin/label_accelerators.html", context)


def _find_draft(uuid: str) -> Bulk | None:
    """Return the draft of a label with this uuid; None if there is none, or it was confirmed."""
    try:
        return Bulk.objects.filter(uuid=UUID(uuid), action=bulk_labels.LABEL, state=BulkState.DRAFT).first()
    except ValueError:
        return None
