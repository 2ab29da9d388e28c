"""Render the answers of both APIs as an HTML page: a table, coloured JSON, and forms for the possible actions.

Both APIs use this renderer for browsers only: v2 checks the Accept header for it, and our own API lists it among its
renderers. The templates are in `templates/accelerators/api/` and load nothing from other servers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlencode

import orjson
from django.template.loader import render_to_string
from django.utils.html import format_html, format_html_join
from django.utils.safestring import SafeString
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api import forms, html_json
from accelerators.domain.caller import Caller
from accelerators.ui import badges

MAX_ROWS = 100
"""The number of rows of a list that are shown; a list of v2 has pages only if the client asks for them."""
SHOWN_HEADERS = ("Allow", "OpenStack-API-Version", "Retry-After")

NAVIGATION: tuple[tuple[str, str, tuple[tuple[str, str, str], ...]], ...] = (
    (
        "Control plane API",
        "/api/",
        (
            ("Hosts", "dns", "hosts"),
            ("Agents", "sensors", "agents"),
            ("Devices", "memory", "devices"),
            ("Deployables", "widgets", "deployables"),
            ("Attach handles", "cable", "attach_handles"),
            ("Accelerators", "bolt", "accelerators"),
            ("Requests", "assignment", "requests"),
            ("Profiles", "tune", "profiles"),
            ("Rules", "rule", "rules"),
            ("Commands", "terminal", "commands"),
            ("Images", "image", "images"),
            ("Events", "history", "events"),
            ("Documentation", "menu_book", "docs"),
        ),
    ),
    (
        "Accelerator v2",
        "/v2/",
        (
            ("Devices", "memory", "devices"),
            ("Deployables", "widgets", "deployables"),
            ("Attributes", "sell", "attributes"),
            ("Requests", "assignment", "accelerator_requests"),
            ("Profiles", "tune", "device_profiles"),
        ),
    ),
)
"""The sidebar: for each section a heading, the base of its addresses, and its entries (label, icon, path below the
base)."""


def is_browser_accept_header(accept: str) -> bool:
    """Return whether an Accept header looks like a browser's: HTML is named first, and XHTML and `*/*` are named,
    too."""
    types = [part.partition(";")[0].strip() for part in accept.split(",")]
    return types[0] == "text/html" and "application/xhtml+xml" in types and "*/*" in types


class BrowsableRenderer(BaseRenderer):
    """Renders an answer of either API as an HTML page."""

    media_type, format, charset = "text/html", "html", "utf-8"

    def render(self, data: Any, accepted_media_type: str | None = None, renderer_context: Any = None) -> str:
        """Return the page, or '' for an answer without a body. The status of the answer is not changed."""
        if data is None:
            return ""
        context = renderer_context or {}
        view, request, response = context["view"], context["request"], context["response"]
        if isinstance(data, bytes):
            data = orjson.loads(data)
        page = _build_page_context(data, view, request, response) | {"navigation": build_navigation(request.path)}
        return render_to_string("accelerators/api/page.html", page, request=request._request)


def build_navigation(path: str) -> list[dict[str, Any]]:
    """Return the sidebar's sections; the entry that `path` belongs to is marked as current."""
    current_path = path.removeprefix("/accelerator").rstrip("/")
    sections = []
    for title, base, entries in NAVIGATION:
        items = [
            (label, icon, base + name, f"{current_path}/".startswith(f"{base}{name}/")) for label, icon, name in entries
        ]
        sections.append({"title": title, "link": base, "items": items})
    return sections


def _build_page_context(data: Any, view: Any, request: Request, response: Response) -> dict[str, Any]:
    """Return the variables of the page's template.

    A table, forms and filters are shown only for a successful answer. For an error answer there is the message of the
    error.
    """
    base = f"{request.scheme}://{request.get_host()}"
    is_own_api = hasattr(view, "get_serializer")
    succeeded = response.status_code < 400
    shown, rows, omitted = _cut_rows(data) if succeeded else (data, [], 0)
    actions = forms.PageActions([], [])
    if succeeded:
        actions = forms.build_own_actions(view, request, data) if is_own_api else forms.build_v2_actions(request)
    crumbs = _build_breadcrumbs(request.path)
    # An error may occur before authentication. Reading request.user here would repeat the failure.
    caller = getattr(request, "_user", None)
    return {
        "title": crumbs[-1][0],
        "crumbs": crumbs,
        "about": _mark_code(view.get_view_description()) if request.path.startswith("/api") else "",
        "method": request.method,
        "address": request.get_full_path(),
        "curl": f"curl -H 'X-Auth-Token: …' '{request.build_absolute_uri()}'",
        "status": badges.render_badge(f"{response.status_code} {response.status_text}", "good" if succeeded else "bad"),
        "headers": [(name, response.headers[name]) for name in SHOWN_HEADERS if name in response.headers],
        "table": html_json.build_table(rows, base),
        "json": html_json.render_json(shown, base),
        "left": omitted,
        "rest": _build_next_page_address(rows, request.path) if omitted and not is_own_api else "",
        # The answer of v2 has upstream's words; for people the view has more.
        "message": getattr(view, "denial", "") or _extract_error_message(data) if not succeeded else "",
        "pages": {name: data.get(name) for name in ("previous", "next")}
        if is_own_api and isinstance(data, Mapping)
        else {},
        "filters": forms.build_filter_fields(view, request.query_params.dict())
        if is_own_api and succeeded and not view.detail
        else (),
        "forms": [form for form in actions.forms if form.fields or form.body],
        "buttons": [form for form in actions.forms if not form.fields and not form.body],
        "refused_actions": actions.refused,
        "caller": caller if isinstance(caller, Caller) else None,
        "login": f"/admin/login/?{urlencode({'next': request.get_full_path()})}",
    }


def _mark_code(text: str) -> SafeString:
    """Return the text as HTML, with what stands between two backticks as code."""
    parts = enumerate(text.split("`"))
    return format_html_join(
        "", "{}", ((format_html("<code>{}</code>", part) if index % 2 else part,) for index, part in parts)
    )


def _cut_rows(data: Any) -> tuple[Any, list[Any], int]:
    """Return the data to show, the rows in it, and the number of rows that are left out.

    The rows are the list `results`, or a list that is the only entry; at most MAX_ROWS are kept, in the data as well.
    Other data, also a list itself, is returned unchanged with [] and 0.
    """
    if not isinstance(data, Mapping):
        return data, [], 0
    key = next((key for key, value in data.items() if isinstance(value, list)), None)
    if key is None or not (key == "results" or len(data) == 1):
        return data, [], 0
    rows = data[key]
    return {**data, key: rows[:MAX_ROWS]}, rows[:MAX_ROWS], max(0, len(rows) - MAX_ROWS)


def _build_next_page_address(rows: list[Any], path: str) -> str:
    """Return the address of the v2 page that begins after these rows."""
    return f"{path}?{urlencode({'limit': MAX_ROWS, 'marker': rows[-1].get('uuid', '')})}"


def _build_breadcrumbs(path: str) -> list[tuple[str, str]]:
    """Return label and address of every page above `path`, and of `path` itself."""
    crumbs, address = [], ""
    for part in path.strip("/").split("/") if path != "/" else ():
        address += f"/{part}"
        if address != "/accelerator":
            crumbs.append(("API" if address == "/api" else part or "API", f"{quote(address)}/"))
    return crumbs or [("API", "/")]


def _extract_error_message(data: Any) -> str:
    """Return the message of an error answer of either API; '' if it has none."""
    message = data.get("error", {}).get("message") if isinstance(data, Mapping) else None
    if message is None and isinstance(data, Mapping) and isinstance(text := data.get("error_message"), str):
        try:
            message = orjson.loads(text).get("faultstring")
        except (orjson.JSONDecodeError, AttributeError):
            # Upstream's plain text is the status, an empty line, and the message.
            message = text.partition("\n\n")[2].strip() or text
    return str(message or "")
