"""One list as one person sees it: which version each row has, and its cells as the list itself renders them.

Called by `live.feed` in its thread. The list's own ModelAdmin is asked for everything, so columns, links and
words are the page's, and so is who may see it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from functools import lru_cache
from typing import Any

from django.contrib import admin
from django.contrib.auth.base_user import AbstractBaseUser
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import connection
from django.db.models import Model, QuerySet
from django.http import HttpRequest, QueryDict
from django.urls import reverse
from django.urls.base import resolve
from unfold.templatetags.unfold_list import items_for_result

COUNTED = {
    "accelerators_host": "hosts",
    "accelerators_device": "devices",
    "accelerators_deployable": "devices",
    "accelerators_attachhandle": "devices",
    "accelerators_deviceprofile": "profiles",
    "accelerators_acceleratorrequest": "requests",
    "accelerators_event": "events",
    "accelerators_command": "commands",
}
"""Tables whose writes a generation counts. A list that reads any other is looked at by the clock."""
TABLE = re.compile(r'(?:FROM|JOIN) "(\w+)"')
WORDS_OF_TIME = re.compile(r"(<time [^>]*>)[^<]*")
"""`3 min ago` moves by itself, on the page as well: no change."""

Cells = dict[str, str]
"""Column → the HTML inside its cell."""


@lru_cache(maxsize=1)
def lists() -> dict[str, admin.ModelAdmin[Any]]:
    """Every list of the console by its address."""
    return {
        reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"): one
        for model, one in admin.site._registry.items()
        if model._meta.concrete_fields[0].primary_key
    }


class Shown:
    """The list at `path?query`. PermissionDenied for who may not view it; on a crafted query what the list raises."""

    def __init__(self, path: str, query: str, user: AbstractBaseUser, session: Any) -> None:
        self.admin, self.query, self.user, self.session = lists()[path], query, user, session
        if not self.admin.has_view_permission(self._request(path)):
            raise PermissionDenied
        self._changelist = self.admin.get_changelist_instance(self._request(path))
        self.columns = tuple(map(str, self._changelist.list_display))
        self.rows: QuerySet[Any] = self._changelist.root_queryset.order_by()
        if not self.rows.query.select_related:
            self.rows = self._changelist.apply_select_related(self.rows)
        self.sees = str(self.rows.query)
        """Which rows this person sees at all: other people's lists may hold others."""
        tables = set(TABLE.findall(self.sees))
        self.collections = {COUNTED[table] for table in tables if table in COUNTED}
        self.counted = tables <= COUNTED.keys()
        self.alike = (self.admin.opts.label_lower, query, self.columns, self.sees)
        """What is rendered for one of these, is for all."""
        self.first = {row.pk for row in self._changelist.result_list}
        """The keys this page of the list had just now."""
        self._path = path
        self._changelist.result_list = self._changelist.queryset = None

    def keys(self, texts: Iterable[str]) -> dict[str, Any]:
        """Rows' keys by their text, as pages name them; what can be none is left out."""
        found = {}
        for text in texts:
            try:
                found[text] = self.admin.opts.pk.to_python(text)
            except ValidationError:
                continue
        return found

    def versions(self, keys: Collection[Any]) -> dict[Any, int]:
        """A number for each row that is there, which another content of it, or of what is joined to it, changes."""
        if not keys:
            return {}
        sql, parameters = self.rows.filter(pk__in=keys).query.sql_with_params()
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT q.the_key, hashtextextended(q::text, 0) FROM ({sql}) AS q(the_key)", parameters)
            return dict(cursor.fetchall())

    def cells(self, keys: Collection[Any]) -> dict[Any, Cells]:
        """The cells of these rows."""
        return {row.pk: self._cells(row) for row in self.rows.filter(pk__in=keys)}

    def page(self) -> set[Any]:
        """The keys this page of the list would show now."""
        return {row.pk for row in self.admin.get_changelist_instance(self._request(self._path)).result_list}

    def _cells(self, row: Model) -> Cells:
        cells = zip(self.columns, items_for_result(self._changelist, row, None), strict=True)
        return {
            f"field-{name}": html[html.index(">") + 1 : html.rindex("<")]
            for name, html in cells
            if name != "action_checkbox"
        }

    def _request(self, path: str) -> HttpRequest:
        """As the browser asked for the page."""
        request = HttpRequest()
        request.method, request.path, request.path_info = "GET", path, path
        request.GET, request.user, request.resolver_match = QueryDict(self.query), self.user, resolve(path)
        request.session = self.session
        return request


def fingerprint(html: str) -> int:
    """Tells one cell's content from another; the words of relative times do not count."""
    return hash(WORDS_OF_TIME.sub(r"\1", html))
