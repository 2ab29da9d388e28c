"""The console page that sets the label of the accelerators of several requests. The list of requests leads to it."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect
from django.template.response import TemplateResponse
from django.urls import reverse

from accelerators.admin import device_actions
from accelerators.domain.states import DeviceOutcome, EventSource
from accelerators.models import AcceleratorRequest
from accelerators.requests import labels
from accelerators.ui import permissions

MAX_LABEL = 255
MAX_CHOSEN = 500
"""Maximum number of requests on the page. Each is a field of the form, and Django accepts 1000 fields."""


def label_accelerators(admin: Any, request: HttpRequest, queryset: QuerySet[AcceleratorRequest]) -> HttpResponse | None:
    """Admin action: show the page for those selected requests that hold an accelerator.

    If there are none, or more than `MAX_CHOSEN`, returns None and adds a message: the list is shown again.
    Nothing is changed here.
    """
    held = list(queryset.filter(attach_handle__isnull=False).order_by("id")[: MAX_CHOSEN + 1])
    if 0 < len(held) <= MAX_CHOSEN:
        return _render_page(admin, request, held)
    too_many = f"More than {MAX_CHOSEN} requests are selected. Narrow the list by filters first."
    messages.error(request, too_many if held else "None of the selected requests holds an accelerator.")
    return None


label_accelerators.short_description = "Set the label"  # type: ignore[attr-defined]
label_accelerators.allowed_permissions = ("label",)  # type: ignore[attr-defined]


def handle_label_page(admin: Any, request: HttpRequest) -> HttpResponse:
    """POST: set the label of the requests that the form names, and redirect to the list with a message.

    If they are on several hosts, the user must have typed their number; otherwise the page is shown again. A request
    whose label is not the one that the user has seen is left as it is. Redirects to the list if no request is named.
    Raises PermissionDenied for users without the rights `permissions.LABEL`.
    """
    permissions.require_permission(request, *permissions.LABEL)
    list_url = reverse("admin:accelerators_acceleratorrequest_changelist")
    seen = _parse_seen(request)
    visible = admin.get_queryset(request).filter(attach_handle__isnull=False)
    chosen = list(visible.filter(uuid__in=seen).order_by("id"))
    if request.method != "POST" or not chosen:
        messages.error(request, "Select requests that hold an accelerator.")
        return HttpResponseRedirect(list_url)
    if len({one.hostname for one in chosen}) > 1 and request.POST.get("typed", "").strip() != str(len(chosen)):
        return _render_page(admin, request, chosen, f"To confirm, type {len(chosen)}. Nothing was done.")
    results = labels.set_labels(
        visible.select_related(None),
        list(seen),
        request.POST.get("label", "").strip()[:MAX_LABEL].replace("\0", ""),
        lambda project: True,
        device_actions.get_caller(request),
        EventSource.PERSON,
        seen,
    )
    moved = sum(one.outcome == DeviceOutcome.MOVED for one in results)
    messages.success(request, f"The label of {moved} accelerator{'' if moved == 1 else 's'} was set.")
    for refused in [one for one in results if one.outcome == DeviceOutcome.REFUSED][:10]:
        messages.error(request, f"{refused.request}: {refused.text}")
    return HttpResponseRedirect(list_url)


def _parse_seen(request: HttpRequest) -> dict[UUID, str]:
    """Return the label that the user has seen of each request that the form names; {} if one of them is not a uuid."""
    pairs = [text.partition(" ")[::2] for text in request.POST.getlist("seen")[:MAX_CHOSEN]]
    try:
        return {UUID(uuid): label for uuid, label in pairs}
    except ValueError:
        return {}


def _render_page(admin: Any, request: HttpRequest, chosen: list[AcceleratorRequest], error: str = "") -> HttpResponse:
    """Render the page with the requests, their present labels and the form. `error` says why nothing was done."""
    hosts = {one.hostname for one in chosen}
    context = admin.admin_site.each_context(request) | {
        "title": f"Label {len(chosen)} accelerator{'' if len(chosen) == 1 else 's'}",
        "opts": admin.opts,
        "address": reverse("admin:accelerators_acceleratorrequest_label"),
        "chosen": chosen,
        "host_count": len(hosts),
        "needs_typed_total": len(hosts) > 1,
        "label": request.POST.get("label", ""),
        "max_label": MAX_LABEL,
        "error": error,
    }
    return TemplateResponse(request, "accelerators/admin/label_accelerators.html", context)
