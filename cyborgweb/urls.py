"""The URLs of the console, both APIs, the manual, metrics and the health checks."""

from django.contrib import admin
from django.db import DatabaseError, connection
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.urls import include, path, re_path

from cyborgweb.monitoring import page
from cyborgweb.pages import (
    census,
    error_pages,
    inbox,
    mail_links,
    own_password,
    saved_views,
    search,
    short_links,
    usage,
)


def healthz(request: HttpRequest) -> HttpResponse:
    """Answer 200 if the process is alive. Does not use the database."""
    return JsonResponse({"status": "ok"})


def readyz(request: HttpRequest) -> HttpResponse:
    """Answer 200 if the database answers; otherwise 503 with the reason."""
    try:
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
    except DatabaseError:
        return JsonResponse({"status": "waiting", "reason": "the database does not answer"}, status=503)
    return JsonResponse({"status": "ok"})


OWN_PATHS = "admin|api|d|healthz|help|mail|metrics|readyz|static|ws"
"""First path segments that are never passed to v2, which answers all other paths (contract section 1.4)."""

urlpatterns = [
    path("healthz", healthz),
    path("readyz", readyz),
    path("metrics", page.metrics),
    re_path("^admin/.*\0", error_pages.raise_not_found),
    path("admin/usage/", admin.site.admin_view(usage.show_usage_page), name="usage"),
    path("admin/census/", admin.site.admin_view(census.show_census), name="census"),
    path("admin/find/", admin.site.admin_view(search.show_search), name="find"),
    path("admin/lists/<str:model>/", admin.site.admin_view(saved_views.store_list_memory), name="list_keep"),
    path("admin/inbox/", admin.site.admin_view(inbox.show_inbox), name="inbox"),
    path("admin/inbox/unread/", admin.site.admin_view(inbox.count_unread_as_json), name="inbox_unread"),
    path("admin/password_change/", admin.site.admin_view(own_password.change_own_password), name="own_password"),
    path("admin/", admin.site.urls),
    path("d/<str:prefix>", admin.site.admin_view(short_links.redirect_to_device), name="short_link"),
    re_path("^mail/(?P<action>confirm|end)/(?P<token>[A-Za-z0-9_:-]{1,1000})/$", mail_links.show_mail_link),
    path("help/", include("cyborgweb.manual.views")),
    re_path(r"^api(?:/|$)", include("cyborgweb.api.root")),
    re_path(r"^accelerator(?:/|$)", include("accelerators.api.v2.urls")),
    re_path(rf"^(?!(?:{OWN_PATHS})(?:/|$))", include("accelerators.api.v2.urls")),
]
handler400 = "cyborgweb.pages.error_pages.bad_request"
handler403 = "cyborgweb.pages.error_pages.permission_denied"
handler404 = "cyborgweb.pages.error_pages.not_found"
