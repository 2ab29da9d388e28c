"""What users save for the console's lists: named views, private or shared, and the columns they want to see.

`accelerators.ui.changelist` reads them through the setting LIST_MEMORY; the forms in `console/chips.html` post to
`keep`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

from django.contrib import admin, messages
from django.contrib.auth.models import User
from django.core.exceptions import BadRequest, PermissionDenied
from django.db.models import Q
from django.http import Http404, HttpRequest, HttpResponseBase, HttpResponseNotAllowed, HttpResponseRedirect
from django.urls import reverse

from accelerators.ui.changelist import COLUMNS, Listing, public
from cyborgweb.auth.roles import project_of
from cyborgweb.models import SavedView

MOST = 50
"""Views that one user may save for one list. As many are shown, the user's own first."""


@dataclass(frozen=True)
class View:
    """A saved view, with what its chip shows."""

    key: int
    name: str
    query: str
    mine: bool
    by: str
    shared: bool


@dataclass(frozen=True)
class Remembered:
    """The columns and views that one user has for one list."""

    columns: tuple[str, ...]
    views: tuple[View, ...]


def remembered(user: Any, model: str) -> Remembered:
    """Return the user's columns and views for a list. One statement.

    Users of one project do not see the shared views of others, because names and searches reveal things about other
    projects.
    """
    others = Q() if project_of(user) else Q(shared=True)
    kept = SavedView.objects.filter(Q(user_id=user.pk) | others, of=model).select_related("user")
    rows = list(kept.order_by("name", "id")[: 20 * MOST])
    columns = next((row.columns for row in rows if not row.name and row.user_id == user.pk), [])
    views = [
        View(row.pk, row.name, row.query, row.user_id == user.pk, row.user.get_username(), row.shared)
        for row in rows
        if row.name
    ]
    return Remembered(tuple(columns), tuple(sorted(views, key=lambda view: not view.mine)[:MOST]))


def keep(request: HttpRequest, model: str) -> HttpResponseBase:
    """On POST, save the view `name`, delete the view `delete`, or store the `columns` for this list; then redirect
    to the list.
    """
    listing = _listing(model)
    if not listing.has_view_permission(request):
        raise PermissionDenied
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    query = request.POST.get("query", "")[:2000]
    if "delete" in request.POST:
        _delete(request, model, request.POST["delete"])
    elif "name" in request.POST:
        _save(request, model, query)
    else:
        query = _choose(request, listing, query)
    url = reverse(f"admin:{model.replace('.', '_')}_changelist")
    return HttpResponseRedirect(f"{url}?{query}" if query else url)


def _listing(model: str) -> Listing:
    found = next((one for of, one in admin.site._registry.items() if of._meta.label_lower == model), None)
    if not isinstance(found, Listing):
        raise Http404(f"There is no list of {model!r}.")
    return found


def _save(request: HttpRequest, model: str, query: str) -> None:
    name, user = " ".join(request.POST["name"].split()), _user(request)
    if not 1 <= len(name) <= 64 or not name.isprintable():
        messages.error(request, "Give the view a name of at most 64 letters.")
        return
    own = SavedView.objects.filter(user=user, of=model).exclude(name="")
    if not own.filter(name=name).exists() and own.count() >= MOST:
        messages.error(request, f"You have already saved {MOST} views of this list: delete one first.")
        return
    values = {"query": query.replace("\0", ""), "shared": "shared" in request.POST}
    SavedView.objects.update_or_create(user=user, of=model, name=name, defaults=values)
    messages.success(request, f"This view is saved as “{name}”{', for everybody' if values['shared'] else ''}.")


def _delete(request: HttpRequest, model: str, key: str) -> None:
    """Delete one of the user's own views; a superuser may also delete views that others share."""
    user = _user(request)
    views = SavedView.objects.filter(Q(user=user) | Q(shared=user.is_superuser), of=model).exclude(name="")
    gone, _ = views.filter(pk=int(key)).delete() if key.isdecimal() and len(key) < 19 else (0, {})
    if gone:
        messages.success(request, "The view is deleted.")
    else:
        messages.error(request, "The view does not exist any more, or you may not delete it.")


def _choose(request: HttpRequest, listing: Listing, query: str) -> str:
    """Store the chosen columns. Return the query without its own columns and without the order, which refers to
    columns by position. Raises BadRequest for columns that the list does not have.
    """
    every = [public(str(name)) for name in listing.list_display]
    chosen = request.POST.getlist(COLUMNS)
    if "reset" in request.POST:
        chosen = []
    elif not chosen or any(name not in every for name in chosen):
        raise BadRequest(f"Choose one or more columns of: {', '.join(every)}.")
    defaults = {"columns": list(dict.fromkeys(chosen))}
    SavedView.objects.update_or_create(user=_user(request), of=listing.opts.label_lower, name="", defaults=defaults)
    return urlencode(_without(parse_qsl(query, keep_blank_values=True), COLUMNS, "o"))


def _without(pairs: Iterable[tuple[str, str]], *names: str) -> list[tuple[str, str]]:
    return [pair for pair in pairs if pair[0] not in names]


def _user(request: HttpRequest) -> User:
    if not isinstance(request.user, User):
        raise PermissionDenied
    return request.user
