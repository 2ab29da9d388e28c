"""Our checks for `manage.py check --deploy`, in addition to Django's own. `cyborgweb.apps` must import this module."""

from __future__ import annotations

from typing import Any

from django.conf import settings
from django.core.checks import CheckMessage, Tags, Warning, register

NO_TLS = Warning(
    "People connect without TLS, so their passwords, cookies and tokens can be read on the network.",
    hint="Set CYBORG_PUBLIC_URL=https://NAME, and run the proxy that docs/install-several.md describes.",
    id="cyborgweb.W001",
)
NO_MAIL_LINKS = Warning(
    "Mails have no link that ends them, and no new mail address can be subscribed.",
    hint="Set CYBORG_PUBLIC_URL=https://NAME: the links in mails begin with it.",
    id="cyborgweb.W003",
)
ANY_NAME = Warning(
    "The web process accepts any host name, so a caller decides which host the links in its answers name.",
    hint="Set CYBORG_ALLOWED_HOSTS to the names and addresses that people, programs and probes use.",
    id="cyborgweb.W002",
)

ANY_PROXY = Warning(
    "Each client that reaches a listener directly can name any address as its own in X-Forwarded-For.",
    hint="Set CYBORG_PROXY_ADDRESSES to the addresses of the proxies.",
    id="cyborgweb.W004",
)


@register(Tags.security, deploy=True)
def check_exposure(app_configs: Any, **_: Any) -> list[CheckMessage]:
    """Return a warning if no public URL is configured (people connect without TLS), one if mails are sent without it,
    one if any host name is accepted, and one if any peer can act as a proxy.
    """
    return [
        *([] if settings.KEYS.public_url else [NO_TLS]),
        *([NO_MAIL_LINKS] if settings.KEYS.mail_host and not settings.KEYS.public_url else []),
        *([ANY_PROXY] if settings.KEYS.public_url and not settings.KEYS.proxy_addresses else []),
        *([ANY_NAME] if "*" in settings.ALLOWED_HOSTS else []),
    ]
