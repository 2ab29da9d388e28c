"""Encrypt webhook secrets for storage, with a key derived from Django's secret key.

A copy of the database alone is therefore not enough to sign messages.
"""

from __future__ import annotations

import base64
import hashlib

from cryptography.fernet import Fernet, InvalidToken
from django.conf import settings

from cyborgweb.errors import CyborgwebError


class DecryptionError(CyborgwebError):
    """The stored secret was encrypted with another key; the subscription's secret must be rotated."""


def encrypt_secret(secret: str) -> str:
    """Return the secret encrypted, as it is stored in the database."""
    return _create_fernet().encrypt(secret.encode()).decode()


def decrypt_secret(encrypted: str) -> str:
    """Return the decrypted secret. Raises DecryptionError if it was encrypted with another key."""
    try:
        return _create_fernet().decrypt(encrypted.encode()).decode()
    except InvalidToken:
        raise DecryptionError("The webhook's secret was encrypted with another key: rotate it.") from None


def _create_fernet() -> Fernet:
    """Return a Fernet (cipher) with a key derived from Django's SECRET_KEY. If SECRET_KEY changes, no stored secret can
    be decrypted any more.
    """
    key = hashlib.blake2b(settings.SECRET_KEY.encode(), digest_size=32, person=b"webhook-secrets").digest()
    return Fernet(base64.urlsafe_b64encode(key))
