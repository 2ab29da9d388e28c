"""Error pages of the console, used as Django's error handlers.

A user who may enter the console sees the error in the console's frame, with what to do. Everybody else, and every
address outside `/admin/`, gets Django's plain answers.
"""

from __future__ import annotations

from typing import Any

from django.contrib import admin
from django.core.exceptions import BadRequest, PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views import defaults

from accelerators.ui.explained_admin import ExplainedModelAdmin
from cyborgweb.auth.read_only import RETRY_S

TITLES_AND_SENTENCES = {
    400: ("Not understood", "The address or the form has a part that this page does not know. Go back and try again."),
    403: ("Not allowed", "Your account may not do this. Ask an administrator of this console."),
    404: ("Not found", "There is nothing at this address, or no longer."),
    503: ("Read only", ""),
}


def raise_not_found(request: HttpRequest) -> HttpResponse:
    """Raise Http404, for addresses that contain NUL. Text in PostgreSQL cannot contain it, so they name no row."""
    raise Http404


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer 400: in the console's frame for its users, otherwise with Django's plain page."""
    return _render_in_console(request, exception, 400) or defaults.bad_request(request, exception)


def permission_denied(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer 403: in the console's frame for its users, otherwise with Django's plain page."""
    return _render_in_console(request, exception, 403) or defaults.permission_denied(request, exception)


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """Answer 404: in the console's frame for its users, otherwise with Django's plain page."""
    return _render_in_console(request, exception, 404) or defaults.page_not_found(request, exception)


def show_read_only(request: HttpRequest, sentence: str) -> HttpResponse:
    """Answer 503 with Retry-After, because the control plane is read-only now. `sentence` is the reason to show.

    Users who may enter the console see it in the console's frame, others get the sentence alone.
    """
    response = _render_in_console(request, PermissionDenied(sentence), 503) or HttpResponse(sentence, status=503)
    response["Retry-After"] = str(RETRY_S)
    return response


def _render_in_console(request: HttpRequest, exception: Exception, status: int) -> HttpResponse | None:
    """Return the error page in the console's frame, with the exception's own sentence if it has one, and this status.

    Return None outside `/admin/` and for users who may not enter the console.
    """
    user: Any = getattr(request, "user", None)
    if user is None or not request.path.startswith("/admin/") or not admin.site.has_permission(request):
        return None
    title, sentence = TITLES_AND_SENTENCES[status]
    if isinstance(exception, BadRequest | PermissionDenied | Http404) and exception.args:
        sentence = exception.args[0] if isinstance(exception.args[0], str) else sentence
    elif status == 403:
        sentence = _explain_refused_page(request) or sentence
    page = admin.site.each_context(request) | {"title": title, "sentence": sentence}
    return render(request, "cyborgweb/pages/error.html", page, status=status)


def _explain_refused_page(request: HttpRequest) -> str:
    """Return which role or permission would open the page of the request, or that nobody can do this in the console.

    Returns '' if it is not a page of a list, or if the user has the rights and something else is refused.
    """
    match = request.resolver_match
    url_name = (match.url_name or "") if match else ""
    for model, listing in admin.site._registry.items():
        app_model, view_name = f"{model._meta.app_label}_{model._meta.model_name}", url_name.rpartition("_")[2]
        if isinstance(listing, ExplainedModelAdmin) and url_name in (
            f"{app_model}_{view_name}",
            f"{app_model}_password_change",
        ):
            # Pages whose rows nobody can change by a form of Django have buttons, which explain their own refusals.
            is_change = view_name == "change" and request.method == "POST" and listing.get_rights("change")
            verb = view_name if view_name in ("add", "delete") or is_change else "view"
            if url_name == f"{app_model}_password_change":
                verb = "change"
            return listing.explain_refusal(request, verb)
    return ""
