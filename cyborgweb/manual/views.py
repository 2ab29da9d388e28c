"""`/help/`: the manual, for users who may enter the console.

It is not public: it contains no secrets, but it reveals which release runs here.
"""

from __future__ import annotations

import mimetypes

from django.contrib import admin
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import path

from cyborgweb.manual import contents, site

LONGEST = 200
"""Characters of a search term that are used."""


def page(request: HttpRequest, name: str = contents.FIRST) -> HttpResponse:
    """Show a page of the manual."""
    try:
        return HttpResponse(site.page(name))
    except KeyError:
        raise Http404("The manual has no such page.") from None


def find(request: HttpRequest) -> HttpResponse:
    """Search the manual for `?q=`."""
    term = request.GET.get("q", "").strip()[:LONGEST]
    more = {"hits": site.find(term), "term": term, "searched": True}
    return HttpResponse(site.framed(site.SERVED, site.SEARCH, "Search", more))


def file(request: HttpRequest, name: str) -> HttpResponse:
    """Return a picture, or a file that a page links to; no other file of docs/."""
    if name not in contents.files():
        raise Http404("The manual has no such file.")
    kind = mimetypes.guess_type(name)[0] if name.startswith("images/") else "text/plain; charset=utf-8"
    return HttpResponse((contents.DOCS / name).read_bytes(), content_type=kind)


urlpatterns = [
    path("", admin.site.admin_view(page, cacheable=True), name="help"),
    path("search/", admin.site.admin_view(find, cacheable=True), name="help_search"),
    path("<path:name>/", admin.site.admin_view(page, cacheable=True), name="help_page"),
    path("<path:name>", admin.site.admin_view(file, cacheable=True), name="help_file"),
]
