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
from django.contrib.auth.models import User
from django.core.exceptions import PermissionDenied, ValidationError
from django.db import connection
from django.db.models import Model, QuerySet
from django.http import HttpRequest, QueryDict
from django.urls import reverse
from django.urls.base import resolve
from unfold.templatetags.unfold_list import items_for_result

COLLECTION_BY_TABLE = {
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
TABLE_PATTERN = re.compile(r'(?:FROM|JOIN) "(\w+)"')
RELATIVE_TIME = re.compile(r"(<time [^>]*>)[^<]*")
"""A relative time such as `3 min ago`. Pages update these themselves, so a different one is no change."""

Cells = dict[str, str]
"""One row's cells: column → the HTML inside the cell."""


@lru_cache(maxsize=1)
def lists_by_path() -> dict[str, admin.ModelAdmin[Any]]:
    """Return address → ModelAdmin of each list of the console. Models whose first field is not the primary key are left
    out, because the versions of their rows could not be read.
    """
    return {
        reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"): one
        for model, one in admin.site._registry.items()
        if model._meta.concrete_fields[0].primary_key
    }


class ListSnapshot:
    """The console's list at `path?query` as `user` sees it. Its methods query the rows anew.

    The constructor runs the list's own queries once. It raises PermissionDenied if the user may not view the list, and
    KeyError if there is no list at `path`. If the query is invalid, the exception of the admin's change list is passed
    on.
    """

    def __init__(self, path: str, query: str, user: User, session: Any) -> None:
        self.admin, self.query, self.user, self.session = lists_by_path()[path], query, user, session
        if not self.admin.has_view_permission(self._build_request(path)):
            raise PermissionDenied
        self._changelist = self.admin.get_changelist_instance(self._build_request(path))
        self.columns = tuple(map(str, self._changelist.list_display))
        self.rows: QuerySet[Any] = self._changelist.root_queryset.order_by()
        if not self.rows.query.select_related:
            self.rows = self._changelist.apply_select_related(self.rows)
        self.visible_rows_sql = str(self.rows.query)
        """SQL of all rows that this person may see; it may differ from person to person."""
        tables = set(TABLE_PATTERN.findall(self.visible_rows_sql))
        self.collections = {COLLECTION_BY_TABLE[table] for table in tables if table in COLLECTION_BY_TABLE}
        """The generations that count the writes to tables of this list."""
        self.is_fully_counted = tables <= COLLECTION_BY_TABLE.keys()
        """Whether every table of this list has such a generation."""
        self.shared_key = (self.admin.opts.label_lower, query, self.columns, self.visible_rows_sql)
        """Key for sharing: rows rendered for one person can be sent to all whose key is equal."""
        self.first_keys = {row.pk for row in self._changelist.result_list}
        """Primary keys on this page of the list when it was opened."""
        self._path = path
        self._changelist.result_list = self._changelist.queryset = None

    def parse_keys(self, texts: Iterable[str]) -> dict[str, Any]:
        """Return text → primary key, for texts by which a page names rows. Texts that cannot be a key are left out;
        whether the rows exist is not checked.
        """
        key_by_text = {}
        for text in texts:
            try:
                key_by_text[text] = self.admin.opts.pk.to_python(text)
            except ValidationError:
                continue
        return key_by_text

    def load_versions(self, keys: Collection[Any]) -> dict[Any, int]:
        """Return primary key → hash of the row, which changes when the row, or anything joined to it, changes.

        Rows that do not exist, or that the person may not see, are left out. Costs one statement, or none without keys.
        """
        if not keys:
            return {}
        # The ORM's statement is wrapped in a plain one, so that PostgreSQL hashes the rows and sends only the hashes.
        sql, parameters = self.rows.filter(pk__in=keys).query.sql_with_params()
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT q.the_key, hashtextextended(q::text, 0) FROM ({sql}) AS q(the_key)", parameters)
            return dict(cursor.fetchall())

    def render_rows(self, keys: Collection[Any]) -> dict[Any, Cells]:
        """Render these rows as the console's list does: primary key → `field-<column>` → the HTML inside the cell.

        Rows that the person may not see, or that do not exist, are left out.
        """
        return {row.pk: self._render_cells(row) for row in self.rows.filter(pk__in=keys)}

    def load_page_keys(self) -> set[Any]:
        """Return the primary keys that this page of the list would show now. Runs the list's own queries."""
        return {row.pk for row in self.admin.get_changelist_instance(self._build_request(self._path)).result_list}

    def _render_cells(self, row: Model) -> Cells:
        """Return the inner HTML of each cell of the row, by `field-<column>`, without the check box."""
        cells = zip(self.columns, items_for_result(self._changelist, row, None), strict=True)
        return {
            f"field-{name}": html[html.index(">") + 1 : html.rindex("<")]
            for name, html in cells
            if name != "action_checkbox"
        }

    def _build_request(self, path: str) -> HttpRequest:
        """Build a GET request for the list's page, with the person's user and session and the list's query.

        No middleware has seen the request.
        """
        request = HttpRequest()
        request.method, request.path, request.path_info = "GET", path, path
        request.GET, request.user, request.resolver_match = QueryDict(self.query), self.user, resolve(path)
        request.session = self.session
        return request


def hash_cell(html: str) -> int:
    """Return a hash of a cell's HTML that ignores the text of relative times, such as `3 min ago`. Compare it only with
    hashes of the same process.
    """
    return hash(RELATIVE_TIME.sub(r"\1", html))
