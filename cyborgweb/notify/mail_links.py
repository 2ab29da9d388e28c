"""Make and read the links in mails: one confirms the address of a subscription, the other ends the mails.

A link needs no login: it is signed with Django's secret key, for one action, one subscription and one address. Links
begin with CYBORG_PUBLIC_URL, never with the host that a request names. Their age is measured by the database's clock.
"""

from __future__ import annotations

from enum import StrEnum

from django.conf import settings
from django.core.signing import BadSignature

from accelerators.runtime import database_signing

CONFIRM_MAX_AGE_S = 3 * 86_400
"""Seconds for which the link that confirms an address is valid. The link that ends the mails is always valid."""


class LinkAction(StrEnum):
    """The actions that a link can carry out."""

    CONFIRM = "confirm"
    END = "end"


def build_link(action: LinkAction, subscription: str, address: str) -> str:
    """Return the URL of the link for the subscription with this uuid, '' if CYBORG_PUBLIC_URL is not set."""
    if not settings.KEYS.public_url:
        return ""
    token = database_signing.sign_object([subscription, address], f"cyborgweb.notify.mail_links.{action}")
    return f"{settings.KEYS.public_url}/mail/{action}/{token}/"


def read_token(action: LinkAction, token: str) -> tuple[str, str] | None:
    """Return the uuid and the address that a link's token names; None if we did not sign it for this action, or if it
    has expired.
    """
    max_age = CONFIRM_MAX_AGE_S if action == LinkAction.CONFIRM else None
    try:
        subscription, address = database_signing.read_object(token, f"cyborgweb.notify.mail_links.{action}", max_age)
    except (BadSignature, ValueError):
        return None
    return subscription, address
