"""What surrounds every page: `{% environment %}`, a strip that says which cloud this is (`CYBORG_ENVIRONMENT`), `{%
read_only %}`, one that says that nothing can be changed, the words of the stock pages' breadcrumbs, `{% crumb %}`, and
the way to the manual, `{% manual %}`.
"""

from __future__ import annotations

from typing import Any

from django import template
from django.db.models import Model
from django.template import Context
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.utils.text import capfirst

from cyborgweb.auth import read_only as maintenance
from cyborgweb.manual.places import place
from cyborgweb.manual.site import SERVED
from cyborgweb.pages.navigation import word_of
from cyborgweb.settings.keys import keys

register = template.Library()

TONES = {"prod": "bad", "production": "bad", "live": "bad", "staging": "warn", "preprod": "warn", "test": "busy"}
"""What is done in production is done to people; any other word is calm."""


@register.simple_tag
def environment() -> SafeString | str:
    """Its word says it, its colour repeats it."""
    word = keys().environment
    if not word:
        return ""
    tone = TONES.get(word.lower(), "calm")
    return format_html('<p class="environment {}" role="note"><span class="sr">Environment: </span>{}</p>', tone, word)


@register.simple_tag
def read_only() -> SafeString | str:
    """A strip that says since when nobody changes anything, and why."""
    now = maintenance.current()
    return (
        format_html('<p class="environment warn sentence" role="status">{}</p>', maintenance.sentence(now))
        if now
        else ""
    )


@register.simple_tag(takes_context=True)
def manual(context: Context) -> SafeString:
    """A link to what the manual says of this page."""
    url = SERVED.address(place(context["request"]))
    title = "What the manual says of this page"
    return format_html(
        '<a class="manual-link" href="{}" title="{}" aria-label="{}"><span aria-hidden="true">?</span></a>',
        url,
        title,
        title,
    )


@register.simple_tag
def crumb(part: dict[str, Any], place: dict[str, Any]) -> str:
    """A part of the stock breadcrumbs as our own pages would say it: a list by the sidebar's word, an object by its
    name as it is; '' for the app that Django puts before its list, which is no place of ours."""
    title = part["title"]
    if isinstance(title, Model):
        return str(title)
    if place["first"] and not place["last"]:
        return ""
    return word_of(str(part.get("link") or "")) or capfirst(str(title))
