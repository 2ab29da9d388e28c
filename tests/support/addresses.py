"""The pages of the console and of the browsable API, found in the URL configuration and in the admin registry, so that
no page can be forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.contrib import admin
from django.urls import URLPattern, get_resolver, reverse

FILES_AND_FRAGMENTS = {
    "autocomplete",
    "help_file",
    "inbox_unread",
    "jsi18n",
    "list_keep",
    "logout",
    "search",
    "short_link",
    "view_on_site",
    "accelerators_bulk_now",
    "accelerators_bulk_rows",
    "accelerators_command_lately",
    "accelerators_command_now",
    "accelerators_host_load",
    "accelerators_rollout_now",
    "cyborgweb_subscription_do",
    "placement_sync_tree_ask",
}
"""Addresses that are no pages: files, redirects, parts of pages, and forms that lead back to the page they are on."""
SAME_PAGES = {"password_change": "own_password", "app_list": "index"}
"""Addresses whose page is that of another address."""
POSTED_PAGES = {
    "accelerators_acceleratorrequest_label",
    "accelerators_admissionrule_apply",
    "accelerators_device_decide",
    "accelerators_device_order",
    "accelerators_device_units",
    "accelerators_host_order",
}
"""Addresses whose page is shown only after a form was sent or rows were chosen."""
ROW_PAGES = ("change", "delete")
"""The pages of a row of each list that differ from model to model; all histories have the same page."""


def find_names() -> Iterator[tuple[str, URLPattern]]:
    """Yield name and pattern of each named address outside the APIs."""

    def walk(patterns: list[Any]) -> Iterator[URLPattern]:
        for one in patterns:
            if isinstance(one, URLPattern):
                yield one
            elif not str(one.pattern).startswith(("^api", "^accelerator", "^(?!")):
                yield from walk(one.url_patterns)

    return ((one.name, one) for one in walk(get_resolver().url_patterns) if one.name)


def list_models() -> list[str]:
    """Return `app_model` of each list of the console."""
    return [f"{model._meta.app_label}_{model._meta.model_name}" for model in admin.site._registry]


def list_fixed_pages() -> list[str]:
    """Return the addresses of all pages that are not of one row, in alphabetical order."""
    found = set()
    for name, pattern in find_names():
        is_row = pattern.pattern.regex.groups or name.endswith("_history")
        if not is_row and name not in FILES_AND_FRAGMENTS | SAME_PAGES.keys() | POSTED_PAGES:
            found.add(reverse(name if ":" in name or not _is_of_admin(name) else f"admin:{name}"))
    return sorted(found)


def list_row_pages() -> list[tuple[str, str]]:
    """Return `app_model` and the end of the address of each page of a row."""
    found = [(model, verb) for model in list_models() for verb in ROW_PAGES]
    others = FILES_AND_FRAGMENTS | POSTED_PAGES
    for name, pattern in find_names():
        model, _, verb = name.rpartition("_")
        is_known = verb in (*ROW_PAGES, "history", "export") or name in others
        if pattern.pattern.regex.groups and model in list_models() and not is_known:
            found.append((model, verb))
    return found


def _is_of_admin(name: str) -> bool:
    """Return whether an address belongs to the admin site, whose names have a namespace."""
    return any(one.name == name for one in admin.site.get_urls() if isinstance(one, URLPattern)) or any(
        name.startswith(f"{model}_") for model in list_models()
    )
