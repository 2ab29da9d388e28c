"""The tag `{% csp_allow script="'unsafe-eval'" %}`: lets a template add sources to the Content-Security-Policy of its
page.

`cyborgweb.middleware.headers` reads them after the page is rendered.
"""

from __future__ import annotations

from django import template
from django.template import Context

register = template.Library()


@register.simple_tag(takes_context=True)
def csp_allow(context: Context, **sources: str) -> str:
    """Allow this page more sources: add the value of each argument `NAME` to the directive `NAME-src`. Renders nothing.

    A second call on the same page replaces the sources of the first.
    """
    context["request"].csp_allowed = tuple((f"{name}-src", source) for name, source in sources.items())
    return ""
