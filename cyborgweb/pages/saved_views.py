"""The settings that users save for the console's lists: named views, private or shared, and the columns to show.

`accelerators.ui.changelist` reads them through the registry LIST_MEMORY; the forms in the template
`console/filter_chips.html` post to `store_list_memory`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl, urlencode

from django.contrib import admin, messages
from django.contrib.auth.models import User
from django.core.exceptions import BadRequest, PermissionDenied
from django.db.models import BooleanField, ExpressionWrapper, Q, QuerySet
from django.http import Http404, HttpRequest, HttpResponseBase, HttpResponseNotAllowed, HttpResponseRedirect, QueryDict
from django.urls import reverse

from accelerators.domain.caller import ADMIN_ROLE, Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.ui.changelist import COLUMNS_PARAM, ConsoleModelAdmin, column_url_name
from cyborgweb.auth.policy_rules import AUDITOR, OPERATOR
from cyborgweb.auth.roles import get_only_project
from cyborgweb.models import SavedView
from cyborgweb.settings.keys import get_keys

MAX_VIEWS = 50
"""Views that one user may save for one list. As many are shown, the user's own first."""


@dataclass(frozen=True)
class ListedView:
    """A saved view as the list's page shows it. `key` is its primary key, `query` its query string."""

    key: int
    name: str
    query: str
    is_own: bool
    owner_name: str
    is_shared: bool


@dataclass(frozen=True)
class ListMemory:
    """The columns and views that one user has for one list."""

    columns: tuple[str, ...]
    views: tuple[ListedView, ...]


def load_list_memory(user: Any, model: str) -> ListMemory:
    """Return the columns and views that the user has for the list of a model (`app.model`). Costs one statement.

    The columns are () if the user has chosen none. The views are the user's own, then those that others share, at most
    MAX_VIEWS in all. A user who is limited to one project does not see the views of others, because names and searches
    reveal things about other projects.
    """
    own = Q(user_id=user.pk)
    visible = own if get_only_project(user) else own | Q(shared=True)
    saved = SavedView.objects.filter(visible, of=model).select_related("user")
    rows = list(saved.order_by(ExpressionWrapper(own, BooleanField()).desc(), "name", "id")[: MAX_VIEWS + 1])
    columns = next((row.columns for row in rows if not row.name and row.user_id == user.pk), [])
    views = [
        ListedView(row.pk, row.name, row.query, row.user_id == user.pk, row.user.get_username(), row.shared)
        for row in rows
        if row.name
    ]
    return ListMemory(tuple(columns), tuple(views[:MAX_VIEWS]))


def select_rows_of_saved_view(caller: Caller, model: str, name: str) -> QuerySet[Any]:
    """Return the rows that the saved view `name` of the console's list of `model` (`app.model`) shows to its owner.

    With CYBORG_AUTH=local these are first the views of the caller's own user. Administrators, operators and auditors
    can also use views that others share. Raises RefusedError INVALID if there is no such view, if several people share
    views of this name, or if the list does not understand the view any more.
    """
    has_own_user = get_keys().auth == "local" and caller.user_id.isdecimal()
    own = Q(user_id=int(caller.user_id)) if has_own_user else Q(pk__in=[])
    visible = own | Q(shared=True) if caller.roles & {ADMIN_ROLE, OPERATOR, AUDITOR} else own
    is_own = ExpressionWrapper(own, BooleanField())
    saved = SavedView.objects.filter(visible, of=model, name=name).exclude(name="").select_related("user")
    views = list(saved.annotate(is_own=is_own).order_by("-is_own", "id")[:2])
    if not views:
        raise RefusedError(RefusalReason.INVALID, f"saved_view: you have no saved view {name[:64]!r} of this list.")
    if len(views) > 1 and not views[0].is_own:
        raise RefusedError(RefusalReason.INVALID, f"saved_view: several people share a view {name[:64]!r}.")
    listing, request = _find_list(model), HttpRequest()
    request.method, request.GET, request.user = "GET", QueryDict(views[0].query), views[0].user
    try:
        rows: QuerySet[Any] = listing.select_listed_rows(request)
    except BadRequest as error:
        raise RefusedError(RefusalReason.INVALID, f"saved_view: the list cannot show it any more: {error}") from error
    return rows


def store_list_memory(request: HttpRequest, model: str) -> HttpResponseBase:
    """On POST, store what a user wants to keep for the console's list of `model`, then redirect to the list.

    The form's field `name` saves the list as a view with this name, and `delete` deletes the view with this key;
    without these fields the chosen columns are stored. Raises PermissionDenied for users who may not view the list,
    Http404 for an unknown list, BadRequest for unknown columns.
    """
    listing = _find_list(model)
    if denial := listing.explain_refusal(request, "view"):
        raise PermissionDenied(denial)
    if request.method != "POST":
        return HttpResponseNotAllowed(["POST"])
    query = request.POST.get("query", "")[:2000]
    if "delete" in request.POST:
        _delete_view(request, model, request.POST["delete"])
    elif "name" in request.POST:
        _save_view(request, model, query)
    else:
        query = _store_columns(request, listing, query)
    url = reverse(f"admin:{model.replace('.', '_')}_changelist")
    return HttpResponseRedirect(f"{url}?{query}" if query else url)


def _find_list(model: str) -> ConsoleModelAdmin:
    """Return the console's list of the model (`app.model`). Raises Http404 if there is none."""
    model_admin = next((one for of, one in admin.site._registry.items() if of._meta.label_lower == model), None)
    if not isinstance(model_admin, ConsoleModelAdmin):
        raise Http404(f"There is no list of {model!r}.")
    return model_admin


def _save_view(request: HttpRequest, model: str, query: str) -> None:
    """Save the query as a view under the form's `name`, for everybody if the form has `shared`. A view of this user
    with the same name is replaced.

    The outcome is shown as a message. With an unusable name, or if the user has MAX_VIEWS views already, nothing is
    saved.
    """
    name, user = " ".join(request.POST["name"].split()), _require_user(request)
    if not 1 <= len(name) <= 64 or not name.isprintable():
        messages.error(request, "Give the view a name of at most 64 letters.")
        return
    own_views = SavedView.objects.filter(user=user, of=model).exclude(name="")
    if not own_views.filter(name=name).exists() and own_views.count() >= MAX_VIEWS:
        messages.error(request, f"You have already saved {MAX_VIEWS} views of this list: delete one first.")
        return
    values = {"query": query.replace("\0", ""), "shared": "shared" in request.POST}
    SavedView.objects.update_or_create(user=user, of=model, name=name, defaults=values)
    messages.success(request, f"This view is saved as “{name}”{', for everybody' if values['shared'] else ''}.")


def _delete_view(request: HttpRequest, model: str, key: str) -> None:
    """Delete the view with this primary key if it is the user's own; a superuser may also delete views that others
    share.

    The outcome is shown as a message, also if nothing was deleted.
    """
    user = _require_user(request)
    may_delete = Q(user=user) | Q(shared=True) if user.is_superuser else Q(user=user)
    views = SavedView.objects.filter(may_delete, of=model).exclude(name="")
    deleted_count, _ = views.filter(pk=int(key)).delete() if key.isdecimal() and len(key) < 19 else (0, {})
    if deleted_count:
        messages.success(request, "The view is deleted.")
    else:
        messages.error(request, "The view does not exist any more, or you may not delete it.")


def _store_columns(request: HttpRequest, listing: ConsoleModelAdmin, query: str) -> str:
    """Store the columns that the form names for this user and list. If the form has `reset`, no columns are stored, so
    the list shows its own.

    Return the query without its parameters for columns and for the order, which refers to columns by position. Raises
    BadRequest if the form names no column, or one that the list does not have.
    """
    known_columns = [column_url_name(str(name)) for name in listing.list_display]
    chosen = request.POST.getlist(COLUMNS_PARAM)
    if "reset" in request.POST:
        chosen = []
    elif not chosen or any(name not in known_columns for name in chosen):
        raise BadRequest(f"Choose one or more columns of: {', '.join(known_columns)}.")
    defaults = {"columns": list(dict.fromkeys(chosen))}
    SavedView.objects.update_or_create(
        user=_require_user(request), of=listing.opts.label_lower, name="", defaults=defaults
    )
    return urlencode(_drop_parameters(parse_qsl(query, keep_blank_values=True), COLUMNS_PARAM, "o"))


def _drop_parameters(pairs: Iterable[tuple[str, str]], *names: str) -> list[tuple[str, str]]:
    """Return the query's pairs without these parameters."""
    return [pair for pair in pairs if pair[0] not in names]


def _require_user(request: HttpRequest) -> User:
    """Return the logged-in user. Raises PermissionDenied if there is none."""
    if not isinstance(request.user, User):
        raise PermissionDenied
    return request.user
