"""The key that signs seals: its file, signatures and their verification (Ed25519).

Only the process that seals has the private key. It is never stored in the database, so nobody can make or change a seal
by SQL alone. The public key is a column of each signed seal.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from accelerators.domain.errors import AcceleratorsError
from drivers.files import write_private


class AuditKeyError(AcceleratorsError):
    """Raised if this process cannot sign the next seal: its key is missing, unreadable or not the right one, or the
    newest seal is not valid. The message gives the reason."""


def get_public_key(key: Ed25519PrivateKey) -> str:
    """Return the public key in hex, as seals and anchors have it."""
    return key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


def is_signed_by(public_key: str, signature: str, text: bytes) -> bool:
    """Return whether `signature` is that of `public_key` over `text`. Both are in hex; for any other text the result is
    False."""
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public_key)).verify(bytes.fromhex(signature), text)
    except (ValueError, InvalidSignature):
        return False
    return True


def load_key(path: Path) -> Ed25519PrivateKey:
    """Return the key in the file (PEM). Raises AuditKeyError if the file is missing, is readable by other users than
    its owner, or has no Ed25519 key."""
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & 0o077:
                raise AuditKeyError(f"the audit key {path} may be read by other users: give it the mode 0600")
            key = load_pem_private_key(file.read(), None)
    except OSError as error:
        raise AuditKeyError(f"the audit key {path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise AuditKeyError(f"{path} is not an audit key: it must be an Ed25519 key in PEM, not encrypted") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise AuditKeyError(f"{path} is not an audit key: it must be an Ed25519 key")
    return key


def create_key(path: Path) -> Ed25519PrivateKey:
    """Return the key in the file. If there is no file, create a key in a file that only its owner can read.

    Processes that create it at the same time get the same key. Raises AuditKeyError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(directory, fcntl.LOCK_EX)
            if not path.exists():
                content = Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
                write_private(path, content)
        finally:
            os.close(directory)
    except OSError as error:
        raise AuditKeyError(f"the audit key {path} cannot be created: {error.strerror}") from None
    return load_key(path)
