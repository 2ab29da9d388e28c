"""`{% environment %}`: a strip that says which cloud this is (`CYBORG_ENVIRONMENT`), on every page; else nothing."""

from __future__ import annotations

from django import template
from django.utils.html import format_html
from django.utils.safestring import SafeString

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
