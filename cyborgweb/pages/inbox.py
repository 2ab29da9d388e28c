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
from accelerators.ui.changelist import parse_uuid
from cyborgweb.auth import policy
from cyborgweb.auth.roles import get_caller, get_only_project
from cyborgweb.models.event_types import KIND_TITLES, describe_event
from cyborgweb.models.notify import Delivery
from cyborgweb.notify import subscriptions

ROWS_PER_PAGE = 50
MAX_UNREAD_COUNT = 99
"""Largest number of unread messages that is counted."""
MODEL_BY_DATA_KEY = {"request": "acceleratorrequest", "device": "device"}
"""Key in a message's data → the model whose page the message links to."""


def show_inbox(request: HttpRequest) -> HttpResponse:
    """GET: show a page of the newest 1000 messages. POST: mark the message `message`, or all messages if the form has
    `all`, as read and redirect to the inbox.

    Raises PermissionDenied if the form has neither, or if the session has no caller.
    """
    rows = _visible_messages(request)
    if request.method == "POST":
        message_uuid = parse_uuid(request.POST.get("message", ""))
        if message_uuid is None and "all" not in request.POST:
            raise PermissionDenied("There is no such message; go back and try again.")
        subscriptions.mark_as_read(rows, None if message_uuid is None else [message_uuid])
        return HttpResponseRedirect(reverse("inbox"))
    newest = rows.select_related("subscription").order_by("-id")
    page = Paginator(newest[: 20 * ROWS_PER_PAGE], ROWS_PER_PAGE).get_page(request.GET.get("page"))
    context = admin.site.each_context(request) | {
        "title": "Inbox",
        "messages_shown": [_render_message(row) for row in page.object_list],
        "page": page,
        "unread": _count_unread(rows),
    }
    return TemplateResponse(request, "cyborgweb/pages/inbox.html", context)


def count_unread_as_json(request: HttpRequest) -> HttpResponse:
    """Return the number of unread messages as JSON, at most 99. Raises PermissionDenied without a caller."""
    return JsonResponse({"unread": _count_unread(_visible_messages(request))}, headers={"Cache-Control": "no-store"})


def _count_unread(rows: QuerySet[Delivery]) -> int:
    """Return how many of these messages are unread, at most `MAX_UNREAD_COUNT`."""
    return rows.filter(read_at__isnull=True)[:MAX_UNREAD_COUNT].count()


def _visible_messages(request: HttpRequest) -> QuerySet[Delivery]:
    """Return the inbox messages that the user may see now. Raises PermissionDenied if the session has no caller.

    A user who is limited to one project sees only the messages of that project.
    """
    caller = get_caller(request)
    if caller is None:
        raise PermissionDenied("Your session has no valid user any more: log out and log in again.")
    if not get_only_project(request.user):
        return subscriptions.inbox_of_person(caller.user_id)
    return subscriptions.inbox_in_project(caller, policy.is_allowed(caller, "cyborg:subscription:elevated"))


def _render_message(row: Delivery) -> dict[str, Any]:
    """Return what the template shows of a message. `link` is the page of its request or device, '' if it has none."""
    model_and_key = next(
        ((model, row.data[word]) for word, model in MODEL_BY_DATA_KEY.items() if row.data.get(word)), None
    )
    return {
        "message": row.message,
        "title": KIND_TITLES.get(row.kind, row.kind),
        "text": describe_event(row.kind, row.named_data),
        "at": badges.render_relative_time(row.at),
        "read": row.read_at is not None,
        "link": badges.page_url(*model_and_key) if model_and_key else "",
        "subscription": row.subscription,
    }
