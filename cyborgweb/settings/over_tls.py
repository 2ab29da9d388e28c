"""Django's settings for installations that people reach over TLS through a proxy, made from `CYBORG_PUBLIC_URL`.

If the key is not set, everything is served over plain http, which is meant for one's own machine.
`manage.py check --deploy` then warns about it (`cyborgweb.server.deploy_checks`).
"""

from __future__ import annotations

HSTS_S = 30 * 24 * 3600
"""Seconds after its last visit for which a browser remembers to use only TLS (HSTS)."""
ALWAYS_SILENCED_CHECKS = ["security.W005", "security.W021"]
"""Django's checks that are always silenced: only the operator can promise that subdomains have TLS, too, or that the
name may be put on the browsers' HSTS preload list."""
REPLACED_CHECKS = ["security.W004", "security.W008", "security.W012", "security.W016"]
"""Django's checks of settings that `CYBORG_PUBLIC_URL` sets together. Without it, one warning of ours replaces these
four."""
NOT_REDIRECTED = [r"^(?!(?:admin|help)(?:/|$))"]
"""Paths that are not redirected to https: all but the console and the manual. Programs repeat a redirected POST as a
GET, and have already sent their token unencrypted; and probes of load balancers and of this machine use http."""


def make_tls_settings(public_url: str) -> dict[str, object]:
    """Return Django's settings for an installation that people reach at this `https://NAME`.

    '' means that they reach it without TLS; then only the list of silenced checks is returned.
    """
    if not public_url:
        return {"SILENCED_SYSTEM_CHECKS": ALWAYS_SILENCED_CHECKS + REPLACED_CHECKS}
    return {
        "SILENCED_SYSTEM_CHECKS": ALWAYS_SILENCED_CHECKS,
        "SECURE_PROXY_SSL_HEADER": ("HTTP_X_FORWARDED_PROTO", "https"),
        "SECURE_SSL_REDIRECT": True,
        "SECURE_SSL_HOST": public_url.removeprefix("https://"),
        "SECURE_REDIRECT_EXEMPT": NOT_REDIRECTED,
        "SECURE_HSTS_SECONDS": HSTS_S,
        "SESSION_COOKIE_SECURE": True,
        "CSRF_COOKIE_SECURE": True,
        "CSRF_TRUSTED_ORIGINS": [public_url],
    }
