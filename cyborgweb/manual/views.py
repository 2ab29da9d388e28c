"""`/help/`: the manual, for whoever may enter the console. Routed by `cyborgweb.urls`.

Not open to strangers: it says nothing secret, but which release answers here is nobody's business who may not log in.
"""

from __future__ import annotations

import mimetypes

from django.contrib import admin
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import path

from cyborgweb.manual import contents, site

LONGEST = 200
"""So many letters of what is searched for are looked at."""


def page(request: HttpRequest, name: str = contents.FIRST) -> HttpResponse:
    """A page of the manual."""
    try:
        return HttpResponse(site.page(name))
    except KeyError:
        raise Http404("The manual has no such page.") from None


def find(request: HttpRequest) -> HttpResponse:
    """What the manual says of `?q=`."""
    term = request.GET.get("q", "").strip()[:LONGEST]
    more = {"hits": site.find(term), "term": term, "searched": True}
    return HttpResponse(site.framed(site.SERVED, site.SEARCH, "Search", more))


def file(request: HttpRequest, name: str) -> HttpResponse:
    """A picture, or a file that a page leads to; nothing else of docs/."""
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
