"""What Django is told where people come over TLS, through a proxy: made of `CYBORG_PUBLIC_URL` by `settings.base`.

Without the key everything is served as it is asked for, by http on one's own machine.
`cyborgweb.server.deploy_checks` says so to who runs `manage.py check --deploy`.
"""

from __future__ import annotations

HSTS_S = 30 * 24 * 3600
"""So long a browser remembers, from its last visit on, that it is to come over TLS alone."""
NOT_OURS = ["security.W005", "security.W021"]
"""Whether names below ours have TLS too, and whether browsers are to ship with ours, is not ours to promise."""
REPLACED = ["security.W004", "security.W008", "security.W012", "security.W016"]
"""What `CYBORG_PUBLIC_URL` sets together; without it one warning of ours says so, in place of these four."""
FOR_PROGRAMS = [r"^(?!(?:admin|help)(?:/|$))"]
"""Only people are sent over to TLS: programs follow a redirected POST as a GET, and have said their token already. Also
probes of balancers, and of this machine, ask by http."""


def settings(public_url: str) -> dict[str, object]:
    """Django's settings for an installation that people reach at `https://NAME`; '' for one without TLS."""
    if not public_url:
        return {"SILENCED_SYSTEM_CHECKS": NOT_OURS + REPLACED}
    return {
        "SILENCED_SYSTEM_CHECKS": NOT_OURS,
        "SECURE_PROXY_SSL_HEADER": ("HTTP_X_FORWARDED_PROTO", "https"),
        "SECURE_SSL_REDIRECT": True,
        "SECURE_SSL_HOST": public_url.removeprefix("https://"),
        "SECURE_REDIRECT_EXEMPT": FOR_PROGRAMS,
        "SECURE_HSTS_SECONDS": HSTS_S,
        "SESSION_COOKIE_SECURE": True,
        "CSRF_COOKIE_SECURE": True,
        "CSRF_TRUSTED_ORIGINS": [public_url],
    }
