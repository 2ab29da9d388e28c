"""The user's inbox: the newest messages, which the user marks as read, and the number of unread ones for the bell in
every header.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.template.response import TemplateResponse
from django.urls import reverse

from accelerators.ui import badges
from accelerators.ui.changelist import as_uuid
from cyborgweb.auth import policy
from cyborgweb.auth.roles import caller_of, project_of
from cyborgweb.models.event_types import TITLES, sentence
from cyborgweb.models.notify import Delivery
from cyborgweb.notify import subscriptions

ROWS = 50
MOST_UNREAD = 99
"""Largest number of unread messages that is counted."""
PAGES = {"request": "acceleratorrequest", "device": "device"}
"""Key in a message's data → the model whose page the message links to."""


def inbox(request: HttpRequest) -> HttpResponse:
    """GET: show a page of messages. POST: mark the message `message`, or all, as read and redirect to the inbox."""
    rows = _rows(request)
    if request.method == "POST":
        one = as_uuid(request.POST.get("message", ""))
        if one is None and "all" not in request.POST:
            raise PermissionDenied("There is no such message; go back and try again.")
        subscriptions.read(rows, None if one is None else [one])
        return HttpResponseRedirect(reverse("inbox"))
    newest = rows.select_related("subscription").order_by("-id")
    page = Paginator(newest[: 20 * ROWS], ROWS).get_page(request.GET.get("page"))
    context = admin.site.each_context(request) | {
        "title": "Inbox",
        "messages_shown": [_shown(row) for row in page.object_list],
        "page": page,
        "unread": _unread(rows),
    }
    return TemplateResponse(request, "console/inbox.html", context)


def unread(request: HttpRequest) -> HttpResponse:
    """Return the number of unread messages as JSON, at most 99."""
    return JsonResponse({"unread": _unread(_rows(request))}, headers={"Cache-Control": "no-store"})


def _unread(rows: QuerySet[Delivery]) -> int:
    return rows.filter(read_at__isnull=True)[:MOST_UNREAD].count()


def _rows(request: HttpRequest) -> QuerySet[Delivery]:
    """Return the user's inbox messages that they may see now: a user of one project sees that project's. Raises
    PermissionDenied if the session has no caller.
    """
    caller = caller_of(request)
    if caller is None:
        raise PermissionDenied("Your session has no valid user any more: log out and log in again.")
    if not project_of(request.user):
        return subscriptions.inbox(caller.user_id)
    return subscriptions.inbox_in_project(caller, policy.allows(caller, "cyborg:subscription:elevated"))


def _shown(row: Delivery) -> dict[str, Any]:
    leads = next(((model, row.data[word]) for word, model in PAGES.items() if row.data.get(word)), None)
    return {
        "message": row.message,
        "title": TITLES.get(row.kind, row.kind),
        "text": sentence(row.kind, row.data),
        "at": badges.ago(row.at),
        "read": row.read_at is not None,
        "link": badges.page(*leads) if leads else "",
        "subscription": row.subscription,
    }
