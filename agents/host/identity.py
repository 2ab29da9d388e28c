"""Who this agent is: an Ed25519 key made once, stored before the first connection. Used by `main` and `link`.

The private key never leaves the state directory. A join token only binds the public key to a host.
"""

from __future__ import annotations

import base64
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agents import wire
from drivers.configuration import ConfigurationError

FILE = "identity.key"


@dataclass(frozen=True)
class Identity:
    """A key and the host it speaks for."""

    host: str
    node: str
    key: Ed25519PrivateKey

    @property
    def public_key(self) -> str:
        """The public key's 32 raw bytes in base64url, with padding."""
        return base64.urlsafe_b64encode(self.key.public_key().public_bytes_raw()).decode()

    def credential(self, challenge: wire.Challenge, epoch: int, fingerprint: str, token: str) -> wire.Credential:
        """Proof for one connection: the server's nonce, signed with host, epoch and pinned server."""
        signed = wire.signed_bytes(self.host, self.node, epoch, challenge.nonce, fingerprint)
        return wire.Credential(
            host=self.host,
            node=self.node,
            epoch=epoch,
            nonce=challenge.nonce,
            public_key=self.public_key,
            signature=base64.urlsafe_b64encode(self.key.sign(signed)).decode(),
            token=token,
        )


def load_or_make(directory: Path, host: str, node: str) -> Identity:
    """The stored key, else a new one that is on disk when this returns.

    Raises ConfigurationError when the file is readable by others, is not a key, or cannot be read or written.
    """
    path = directory / FILE
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return Identity(host, node, _make(path))
    except OSError as error:
        raise ConfigurationError(f"the agent's key {path} cannot be read: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigurationError(
            f"the agent's key {path} is open to other users (mode {stat.S_IMODE(mode):04o}): "
            f"run chmod 600 {path}, or move it away and join again with a new token"
        )
    try:
        raw = base64.urlsafe_b64decode(path.read_bytes().strip())
        return Identity(host, node, Ed25519PrivateKey.from_private_bytes(raw))
    except OSError as error:
        raise ConfigurationError(f"the agent's key {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigurationError(
            f"{path} is not an agent's key: move it away and join again with a new token"
        ) from None


def _make(path: Path) -> Ed25519PrivateKey:
    key = Ed25519PrivateKey.generate()
    text = base64.urlsafe_b64encode(key.private_bytes_raw()) + b"\n"
    unfinished = path.with_suffix(".new")
    try:
        unfinished.unlink(missing_ok=True)
        with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        raise ConfigurationError(f"the agent's key {path} cannot be written: {error.strerror}") from None
    return key


def sync_directory(path: Path) -> None:
    """Names in a directory outlive a power cut only after this. Raises OSError."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
