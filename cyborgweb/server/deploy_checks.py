"""Our checks for `manage.py check --deploy`, in addition to Django's own. `cyborgweb.apps` must import this module."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Tags, Warning, register

NO_TLS = Warning(
    "People come without TLS: on the way their passwords, cookies and tokens can be read.",
    hint="Set CYBORG_PUBLIC_URL=https://NAME, and have the proxy of docs/install-several.md in front.",
    id="cyborgweb.W001",
)
ANY_NAME = Warning(
    "The web answers to any name: links in its answers name whatever host a caller writes into a request.",
    hint="Set CYBORG_ALLOWED_HOSTS to the names, or addresses, under which people, programs and probes come.",
    id="cyborgweb.W002",
)


@register(Tags.security, deploy=True)
def exposed(app_configs: Any, **_: Any) -> list[CheckMessage]:
    """Warn if no public URL is configured (people connect without TLS), and if any host name is accepted."""
    return [
        *([] if settings.KEYS.public_url else [NO_TLS]),
        *([ANY_NAME] if "*" in settings.ALLOWED_HOSTS else []),
    ]
