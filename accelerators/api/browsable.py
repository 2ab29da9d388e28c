"""Both APIs in a browser: what came, as a table and as coloured JSON, and what can be done, as forms.

`own.views` and `cyborgweb.api` list `Browsable` among their renderers. v2 has one form for every client but browsers:
its `View.perform_content_negotiation` returns `(Browsable(), Browsable.media_type)` when `wants_page(Accept)`, and
nothing else there changes. The page lives in `templates/api/` and loads nothing from elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

import orjson
from django.template.loader import render_to_string
from rest_framework.renderers import BaseRenderer
from rest_framework.request import Request
from rest_framework.response import Response

from accelerators.api import forms, html_json
from accelerators.domain.caller import Caller
from accelerators.ui import badges

ROWS = 100
"""So many of a list are shown; v2's lists have no pages unless one asks for them."""
SHOWN_HEADERS = ("OpenStack-API-Version", "Retry-After")

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
"""Heading, where its addresses begin, then per entry: its word, its icon, its address below that."""


def wants_page(accept: str) -> bool:
    """Whether an Accept header is a browser's: HTML first, XHTML too, in the end anything. No other client's is."""
    types = [part.partition(";")[0].strip() for part in accept.split(",")]
    return types[0] == "text/html" and "application/xhtml+xml" in types and "*/*" in types


class Browsable(BaseRenderer):
    """A page of either API."""

    media_type, format, charset = "text/html", "html", "utf-8"

    def render(self, data: Any, accepted_media_type: str | None = None, renderer_context: Any = None) -> str:
        """The page, its status is the answer's; nothing for an answer without a body."""
        if data is None:
            return ""
        context = renderer_context or {}
        view, request, response = context["view"], context["request"], context["response"]
        if isinstance(data, bytes):
            data = orjson.loads(data)
        page = _page(data, view, request, response) | {"navigation": navigation(request.path)}
        return render_to_string("api/page.html", page, request=request._request)


def navigation(path: str) -> list[dict[str, Any]]:
    """The sidebar; the entry of `path` is current."""
    here = path.removeprefix("/accelerator").rstrip("/")
    shown = []
    for title, base, entries in NAVIGATION:
        items = [(word, icon, base + name, f"{here}/".startswith(f"{base}{name}/")) for word, icon, name in entries]
        shown.append({"title": title, "link": base, "items": items})
    return shown


def _page(data: Any, view: Any, request: Request, response: Response) -> dict[str, Any]:
    base = f"{request.scheme}://{request.get_host()}"
    own = hasattr(view, "get_serializer")
    good = response.status_code < 400
    shown, rows, left = _cut(data) if good else (data, [], 0)
    offered = list(_forms(data, view, request, own)) if good else []
    crumbs = _crumbs(request.path)
    # A refusal may come before anybody asked who calls; asking again here could only fail again.
    caller = getattr(request, "_user", None)
    return {
        "title": crumbs[-1][0],
        "crumbs": crumbs,
        "about": view.get_view_description() if request.path.startswith("/api") else "",
        "method": request.method,
        "address": request.get_full_path(),
        "curl": f"curl -H 'X-Auth-Token: …' '{request.build_absolute_uri()}'",
        "status": badges.mark(f"{response.status_code} {response.status_text}", "good" if good else "bad"),
        "headers": [(name, response.headers[name]) for name in SHOWN_HEADERS if name in response.headers],
        "table": html_json.table(rows, base),
        "json": html_json.coloured(shown, base),
        "left": left,
        "rest": _rest(rows, request.path) if left and not own else "",
        "message": _message(data) if not good else "",
        "pages": {name: data.get(name) for name in ("previous", "next")} if own and isinstance(data, Mapping) else {},
        "filters": forms.of_filters(view, request.query_params.dict()) if own and good and not view.detail else (),
        "forms": [form for form in offered if form.fields or form.body],
        "buttons": [form for form in offered if not form.fields and not form.body],
        "caller": caller if isinstance(caller, Caller) else None,
        "login": f"/admin/login/?{urlencode({'next': request.get_full_path()})}",
    }


def _forms(data: Any, view: Any, request: Request, own: bool) -> Iterator[forms.Form]:
    return forms.of_serializer(view, request, data) if own else forms.of_v2(request.path)


def _cut(data: Any) -> tuple[Any, list[Any], int]:
    """What is shown of an answer, the rows in it if it is a list, and how many of them are left out."""
    if not isinstance(data, Mapping):
        return data, [], 0
    key = next((key for key, value in data.items() if isinstance(value, list)), None)
    if key is None or not (key == "results" or len(data) == 1):
        return data, [], 0
    rows = data[key]
    return {**data, key: rows[:ROWS]}, rows[:ROWS], max(0, len(rows) - ROWS)


def _rest(rows: list[Any], path: str) -> str:
    """The address of the page that begins after these rows (v2)."""
    return f"{path}?{urlencode({'limit': ROWS, 'marker': rows[-1].get('uuid', '')})}"


def _crumbs(path: str) -> list[tuple[str, str]]:
    """Every address above this one, and this one."""
    crumbs, address = [], ""
    for part in path.strip("/").split("/") if path != "/" else ():
        address += f"/{part}"
        if address != "/accelerator":
            crumbs.append(("API" if address == "/api" else part or "API", f"{quote(address)}/"))
    return crumbs or [("API", "/")]


def _message(data: Any) -> str:
    """The sentence of a refusal, of either API."""
    found = data.get("error", {}).get("message") if isinstance(data, Mapping) else None
    if found is None and isinstance(data, Mapping) and isinstance(text := data.get("error_message"), str):
        try:
            found = orjson.loads(text).get("faultstring")
        except (orjson.JSONDecodeError, AttributeError):
            # Upstream's own repeats the status before an empty line.
            found = text.partition("\n\n")[2].strip() or text
    return str(found or "")
