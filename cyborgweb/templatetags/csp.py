"""`{% csp_allow script="'unsafe-eval'" %}`: a page's template says what the policy of its answer must allow besides.

Read by `cyborgweb.middleware.headers` once the page is rendered.
"""

from __future__ import annotations

from django import template
from django.template import Context

register = template.Library()


@register.simple_tag(takes_context=True)
def csp_allow(context: Context, **more: str) -> str:
    """Adds to the directive `NAME-src` what `NAME=` says. Shows nothing."""
    context["request"].csp_allowed = tuple((f"{name}-src", source) for name, source in more.items())
    return ""
