"""Template tags for what surrounds every page.

`{% environment %}` is a strip that names this cloud (`CYBORG_ENVIRONMENT`), `{% read_only %}` a strip that says that
nothing can be changed, `{% crumb %}` a word in the breadcrumbs of Django's stock pages, and `{% manual %}` the link to
the manual.
"""

from __future__ import annotations

from typing import Any

from django import template
from django.db.models import Model
from django.template import Context
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst

from accelerators.models import AttachHandle
from accelerators.ui.badges import describe_handle
from cyborgweb.auth import read_only as maintenance
from cyborgweb.manual.places import find_manual_place
from cyborgweb.manual.site import SERVED_EDITION
from cyborgweb.pages.navigation import sidebar_title
from cyborgweb.settings.keys import get_keys

register = template.Library()

TONE_BY_ENVIRONMENT = {
    "prod": "bad",
    "production": "bad",
    "live": "bad",
    "staging": "warn",
    "preprod": "warn",
    "test": "busy",
}
"""Colour of each environment's strip: production is red, because mistakes there affect people. The tone of every other
environment is `calm`."""


@register.simple_tag
def environment() -> SafeString | str:
    """Return the strip with the environment's name, '' if none is configured. The colour only repeats the name."""
    name = get_keys().environment
    if not name:
        return ""
    tone = TONE_BY_ENVIRONMENT.get(name.lower(), "calm")
    return format_html('<p class="environment {}" role="note"><span class="sr">Environment: </span>{}</p>', tone, name)


@register.simple_tag
def read_only() -> SafeString | str:
    """Return a strip that says since when nothing can be changed, and why; '' if the control plane is not read-only."""
    active = maintenance.get_maintenance()
    return (
        format_html(
            '<p class="environment warn sentence" role="status">{}</p>', maintenance.describe_maintenance(active)
        )
        if active
        else ""
    )


@register.simple_tag(takes_context=True)
def manual(context: Context) -> SafeString:
    """Return a link to the part of the manual that describes this page, or to its first page if none does."""
    url = SERVED_EDITION.docs_url(find_manual_place(context["request"]))
    title = "Read about this page in the manual"
    return format_html(
        '<a class="manual-link" href="{}" title="{}" aria-label="{}"><span aria-hidden="true">?</span></a>',
        url,
        title,
        title,
    )


@register.filter
def manual_url(place: str) -> str:
    """Return the address of a part of the manual, such as `first-day.md#admit-devices`."""
    return SERVED_EDITION.docs_url(place)


@register.simple_tag
def crumb(part: dict[str, Any], place: dict[str, Any]) -> str:
    """Return the text of one part of Django's breadcrumbs; `place` is Django's `forloop`.

    The text is the sidebar's title for a list, the unchanged name of an object, the readable name of an attach handle,
    and '' for the app that Django puts before the list, because our console has no page for it. Any other text gets a
    capital first letter.
    """
    title = part["title"]
    if isinstance(title, AttachHandle):
        return describe_handle(title.attach_info)
    if isinstance(title, Model):
        return str(title)
    if place["first"] and not place["last"]:
        return ""
    return sidebar_title(str(part.get("link") or "")) or capfirst(str(title))
