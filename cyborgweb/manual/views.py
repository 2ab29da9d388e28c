"""`/help/`: the manual, for users who may enter the console.

It is not public: it contains no secrets, but it reveals which release runs here.
"""

from __future__ import annotations

import mimetypes

from django.contrib import admin
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import path

from cyborgweb.manual import contents, site

MAX_TERM_LENGTH = 200
"""Characters of a search term that are used."""


def show_page(request: HttpRequest, name: str = contents.FIRST_PAGE) -> HttpResponse:
    """Show a page of the manual. Raises Http404 if the table of contents does not have it."""
    try:
        return HttpResponse(site.complete_page(name))
    except KeyError:
        raise Http404("The manual has no such page.") from None


def show_search_results(request: HttpRequest) -> HttpResponse:
    """Show the sections that contain every word of `?q=`, of which MAX_TERM_LENGTH characters are used."""
    term = request.GET.get("q", "").strip()[:MAX_TERM_LENGTH]
    extra_context = {"hits": site.search_sections(term), "term": term, "searched": True}
    return HttpResponse(site.render_frame(site.SERVED_EDITION, site.SEARCH_PAGE, "Search", extra_context))


def serve_file(request: HttpRequest, name: str) -> HttpResponse:
    """Return a picture, or a file that a page links to. Raises Http404 for every other file of docs/."""
    if name not in contents.list_public_files():
        raise Http404("The manual has no such file.")
    kind = mimetypes.guess_type(name)[0] if name.startswith("images/") else "text/plain; charset=utf-8"
    return HttpResponse((contents.DOCS_FOLDER / name).read_bytes(), content_type=kind)


urlpatterns = [
    path("", admin.site.admin_view(show_page, cacheable=True), name="help"),
    path("search/", admin.site.admin_view(show_search_results, cacheable=True), name="help_search"),
    path("<path:name>/", admin.site.admin_view(show_page, cacheable=True), name="help_page"),
    path("<path:name>", admin.site.admin_view(serve_file, cacheable=True), name="help_file"),
]
