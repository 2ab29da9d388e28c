"""Say on an empty list of the console what fills it, where that is done, and who may do it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.apps import apps
from django.contrib import admin
from django.http import HttpRequest
from django.urls import reverse

from accelerators.ui import permissions
from accelerators.ui.permissions import Right


@dataclass(frozen=True)
class Source:
    """A page on which the rows of a list come into being.

    It is the list of `model`, such as `agents.agent`, or the page `page` of this list; or a page of the manual, such as
    `first-day/#join-a-host`. `rights` are what a person needs to do something there.
    """

    text: str
    model: str = ""
    page: str = "changelist"
    manual: str = ""
    rights: tuple[Right, ...] = ()


JOIN_COMMAND = "manage.py join_token HOST"
JOIN_IN_MANUAL = Source("The manual: join a host", manual="first-day/#join-a-host")
CLOUD_IN_MANUAL = Source("The manual: with OpenStack", manual="install/#with-openstack")


@dataclass(frozen=True)
class EmptyListHint:
    """The content of an empty list: a sentence, a command to copy, links as (text, address), and why the user may not
    make rows, '' if the user may."""

    sentence: str
    command: str
    links: tuple[tuple[str, str], ...]
    denial: str


def build_hint(listing: Any, request: HttpRequest) -> EmptyListHint:
    """Return the hint for a list, from its `empty`, `empty_command` and `sources`, as this user sees it.

    The page that adds a row comes first. Pages that the user may not open are left out.
    """
    links = []
    name = listing.opts.verbose_name
    if listing.has_add_permission(request):
        address = reverse(f"admin:{listing.opts.app_label}_{listing.opts.model_name}_add")
        links.append((f"Add {'an' if name[0].lower() in 'aeiou' else 'a'} {name}", address))
    links += [(one.text, address) for one in listing.sources if (address := find_address(one, request))]
    denials = [permissions.explain_denial(request, *one.rights) for one in listing.sources if one.rights]
    if listing.get_rights("add"):
        denials.append(listing.explain_refusal(request, "add"))
    denial = "" if "" in denials else next(iter(denials), "")
    return EmptyListHint(listing.empty, listing.empty_command, tuple(links), denial)


def find_address(source: Source, request: HttpRequest) -> str:
    """Return the address of the page, '' if the user may not open it."""
    if source.manual:
        return f"{reverse('help')}{source.manual}"
    listing = admin.site.get_model_admin(apps.get_model(source.model))
    if not listing.has_view_permission(request):
        return ""
    if source.page != "changelist" and source.rights and not permissions.is_allowed(request, *source.rights):
        return ""
    return reverse(f"admin:{source.model.replace('.', '_')}_{source.page}")
