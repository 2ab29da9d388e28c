"""One console list as one person sees it: the version of each row, and its cells as the list itself renders them.

All queries and rendering go through the list's own ModelAdmin, so columns, links, words and permissions are those of
the page.
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
"""Table → the generation that counts its writes. A list that reads any other table is checked by the clock."""
TABLE = re.compile(r'(?:FROM|JOIN) "(\w+)"')
WORDS_OF_TIME = re.compile(r"(<time [^>]*>)[^<]*")
"""A relative time such as `3 min ago`. Pages update these themselves, so a different one is no change."""

Cells = dict[str, str]
"""One row's cells: column → the HTML inside the cell."""


@lru_cache(maxsize=1)
def lists() -> dict[str, admin.ModelAdmin[Any]]:
    """Return the console's lists by their address. Models whose first field is not the primary key are left out."""
    return {
        reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"): one
        for model, one in admin.site._registry.items()
        if model._meta.concrete_fields[0].primary_key
    }


class Shown:
    """The list at `path?query` as `user` sees it. Raises PermissionDenied if the user may not view it, KeyError if
    there is no list at `path`; a crafted query raises what the list raises.
    """

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
        """SQL of all rows that this person may see; it may differ from person to person."""
        tables = set(TABLE.findall(self.sees))
        self.collections = {COUNTED[table] for table in tables if table in COUNTED}
        self.counted = tables <= COUNTED.keys()
        self.alike = (self.admin.opts.label_lower, query, self.columns, self.sees)
        """Key for sharing: rows rendered for one person can be sent to all whose key is equal."""
        self.first = {row.pk for row in self._changelist.result_list}
        """Primary keys on this page of the list when it was opened."""
        self._path = path
        self._changelist.result_list = self._changelist.queryset = None

    def keys(self, texts: Iterable[str]) -> dict[str, Any]:
        """Return the primary key for each text by which pages name rows. Texts that cannot be a key are left out."""
        found = {}
        for text in texts:
            try:
                found[text] = self.admin.opts.pk.to_python(text)
            except ValidationError:
                continue
        return found

    def versions(self, keys: Collection[Any]) -> dict[Any, int]:
        """Return a hash for each existing row; it changes when the row, or anything joined to it, changes. One
        statement.
        """
        if not keys:
            return {}
        sql, parameters = self.rows.filter(pk__in=keys).query.sql_with_params()
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT q.the_key, hashtextextended(q::text, 0) FROM ({sql}) AS q(the_key)", parameters)
            return dict(cursor.fetchall())

    def cells(self, keys: Collection[Any]) -> dict[Any, Cells]:
        """Return the rendered cells of these rows, by primary key."""
        return {row.pk: self._cells(row) for row in self.rows.filter(pk__in=keys)}

    def page(self) -> set[Any]:
        """Return the primary keys that this page of the list would show now."""
        return {row.pk for row in self.admin.get_changelist_instance(self._request(self._path)).result_list}

    def _cells(self, row: Model) -> Cells:
        cells = zip(self.columns, items_for_result(self._changelist, row, None), strict=True)
        return {
            f"field-{name}": html[html.index(">") + 1 : html.rindex("<")]
            for name, html in cells
            if name != "action_checkbox"
        }

    def _request(self, path: str) -> HttpRequest:
        """Build the request with which the browser asked for the page."""
        request = HttpRequest()
        request.method, request.path, request.path_info = "GET", path, path
        request.GET, request.user, request.resolver_match = QueryDict(self.query), self.user, resolve(path)
        request.session = self.session
        return request


def fingerprint(html: str) -> int:
    """Return a hash of a cell's HTML that ignores the words of relative times."""
    return hash(WORDS_OF_TIME.sub(r"\1", html))
