"""Secrets of webhooks as they stand in the database: encrypted with a key made of Django's secret key.

Called by `subscriptions` and `sender`. Who has a copy of the database alone cannot sign messages.
"""

from __future__ import annotations

import base64
import hashlib

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings


class DecryptionError(Exception):
    """It was encrypted with another key."""


def lock(secret: str) -> str:
    """To be stored."""
    return _fernet().encrypt(secret.encode()).decode()


def unlock(stored: str) -> str:
    """As it was. Raises DecryptionError."""
    try:
        return _fernet().decrypt(stored.encode()).decode()
    except InvalidToken:
        raise DecryptionError("Its secret was encrypted with another key: rotate it.") from None


def _fernet() -> Fernet:
    key = hashlib.blake2b(settings.SECRET_KEY.encode(), digest_size=32, person=b"webhook-secrets").digest()
    return Fernet(base64.urlsafe_b64encode(key))
