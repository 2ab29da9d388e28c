"""A person's inbox: the newest messages, marked read by their reader; and the number on the bell in every header."""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import PermissionDenied
from django.core.paginator import Paginator
from django.http import HttpRequest, HttpResponse, HttpResponseRedirect, JsonResponse
from django.template.response import TemplateResponse
from django.urls import reverse

from accelerators.admin import marks
from accelerators.admin.listing import as_uuid
from cyborgweb.notify import subscriptions
from cyborgweb.notify.kinds import TITLES, sentence
from cyborgweb.notify.models import Delivery
from cyborgweb.roles import session_caller

ROWS = 50
MOST_UNREAD = 99
"""More are not counted."""
PAGES = {"request": "acceleratorrequest", "device": "device"}
"""What a message may lead to, by the word of its data."""


def inbox(request: HttpRequest) -> HttpResponse:
    """GET: a page of messages. POST: mark the one in `message` read, or all, and show them again."""
    person = _person(request)
    if request.method == "POST":
        one = as_uuid(request.POST.get("message", ""))
        if one is None and "all" not in request.POST:
            raise PermissionDenied("There is no such message; go back and try again.")
        subscriptions.read(person, None if one is None else [one])
        return HttpResponseRedirect(reverse("inbox"))
    rows = Delivery.objects.filter(reader=person).exclude(reader="").select_related("subscription").order_by("-id")
    page = Paginator(rows[: 20 * ROWS], ROWS).get_page(request.GET.get("page"))
    context = admin.site.each_context(request) | {
        "title": "Inbox",
        "messages_shown": [_shown(row) for row in page.object_list],
        "page": page,
        "unread": _unread(person),
    }
    return TemplateResponse(request, "console/inbox.html", context)


def unread(request: HttpRequest) -> HttpResponse:
    """How many are not read, 99 at most; asked by the bell."""
    return JsonResponse({"unread": _unread(_person(request))}, headers={"Cache-Control": "no-store"})


def _unread(person: str) -> int:
    rows = Delivery.objects.filter(reader=person, read_at__isnull=True).exclude(reader="")
    return rows[:MOST_UNREAD].count()


def _person(request: HttpRequest) -> str:
    caller = session_caller(request.user, request.session)
    if caller is None:
        raise PermissionDenied("Your session does not say who you are any more: log out and in again.")
    return caller.user_id


def _shown(row: Delivery) -> dict[str, Any]:
    leads = next(((model, row.data[word]) for word, model in PAGES.items() if row.data.get(word)), None)
    return {
        "message": row.message,
        "title": TITLES.get(row.kind, row.kind),
        "text": sentence(row.kind, row.data),
        "at": marks.ago(row.at),
        "read": row.read_at is not None,
        "link": marks.page(*leads) if leads else "",
        "subscription": row.subscription,
    }
