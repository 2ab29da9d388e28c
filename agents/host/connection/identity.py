"""The agent's identity: an Ed25519 key in the state directory, on disk before its public key is sent anywhere.

The private key never leaves the state directory. A join token only binds the public key to a host. During a key
rotation there are two keys on disk, and either may be the one that the gateway knows; so one of the two is always
accepted, even after a crash at any point.
"""

from __future__ import annotations

import base64
import logging
import stat
from dataclasses import dataclass
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agents import credentials, wire
from drivers.configuration import ConfigurationError
from drivers.files import sync_directory, write_private

log = logging.getLogger("cyborg.identity")

FILE = "identity.key"
NEXT = "identity.next"
"""File of the next key, until the gateway has acknowledged that key."""


@dataclass(frozen=True)
class Identity:
    """A private key and the host that it authenticates."""

    host: str
    node: str
    key: Ed25519PrivateKey

    @property
    def public_key(self) -> str:
        """Return the public key in the text form that messages use."""
        return credentials.public_text(self.key.public_key())

    def credential(
        self, challenge: credentials.Challenge, epoch: int, fingerprint: str, token: str
    ) -> credentials.Credential:
        """Sign the server's nonce together with host, node, epoch and pinned fingerprint.

        The result authenticates one connection or one download. `token` is the secret of a join token, '' for none.
        """
        signed = credentials.signed_bytes(self.host, self.node, epoch, challenge.nonce, fingerprint)
        return credentials.Credential(
            host=self.host,
            node=self.node,
            epoch=epoch,
            nonce=challenge.nonce,
            public_key=self.public_key,
            signature=credentials.sign(self.key, signed),
            token=token,
        )

    def successor(self, following: Identity, fingerprint: str) -> wire.NewKey:
        """Build the NewKey message that announces the next key, signed by this key and by the next one."""
        data = credentials.rotation_bytes(self.host, self.public_key, following.public_key, fingerprint)
        return wire.NewKey(
            following.public_key, credentials.sign(self.key, data), credentials.sign(following.key, data)
        )


class Keyring:
    """The current key and, during a key rotation, the next one (`next_identity`)."""

    def __init__(self, directory: Path, current: Identity, following: Identity | None) -> None:
        self._directory = directory
        self.current, self.following = current, following
        self._unsettled = False

    def prepare(self) -> Identity:
        """Return the next key; create it if there is none. It is on disk when this returns.

        Raises ConfigurationError when it cannot be written.
        """
        if self.following is None:
            if self._unsettled:  # the file still holds the current key: it must be renamed before it is written again
                self._settle()
            key = _make(self._directory / NEXT)
            self.following = Identity(self.current.host, self.current.node, key)
        return self.following

    def adopt(self) -> None:
        """Make the next key the current one, after the gateway has accepted it, and replace the former key on disk.

        Does nothing when there is no next key. If the disk refuses, both files stay; the next start then finds out
        which key the gateway accepts.
        """
        if self.following is None:
            return
        self.current, self.following, self._unsettled = self.following, None, True
        try:
            self._settle()
        except ConfigurationError as error:
            log.error("%s; both keys stay on disk, and the next start finds out which one the gateway accepts", error)

    def _settle(self) -> None:
        """Rename NEXT_KEY_FILE to KEY_FILE and sync the directory. Raises ConfigurationError."""
        coming = self._directory / NEXT
        try:
            if coming.exists():
                coming.rename(self._directory / FILE)
            sync_directory(self._directory)
        except OSError as error:
            raise ConfigurationError(f"the agent's new key {coming} cannot be renamed: {error.strerror}") from None
        self._unsettled = False


def load_or_make(directory: Path, host: str, node: str) -> Keyring:
    """Load the stored keys; create the current key if there is none. It is on disk when this returns.

    Raises ConfigurationError when a file is accessible to other users, is not a key, or cannot be read or written.
    """
    current = _load(directory / FILE) or _make(directory / FILE)
    following = _load(directory / NEXT)
    coming = Identity(host, node, following) if following else None
    return Keyring(directory, Identity(host, node, current), coming)


def _load(path: Path) -> Ed25519PrivateKey | None:
    """Return the key in a file, None when there is no file. Raises ConfigurationError."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigurationError(f"the agent's key {path} cannot be read: {error.strerror}") from None
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigurationError(
            f"the agent's key {path} is open to other users (mode {stat.S_IMODE(mode):04o}): "
            f"run chmod 600 {path}, or move it away and join again with a new token"
        )
    try:
        return Ed25519PrivateKey.from_private_bytes(base64.urlsafe_b64decode(path.read_bytes().strip()))
    except OSError as error:
        raise ConfigurationError(f"the agent's key {path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise ConfigurationError(
            f"{path} is not an agent's key: move it away and join again with a new token"
        ) from None


def _make(path: Path) -> Ed25519PrivateKey:
    """Create a key and write it to a file that only its owner can read. Raises ConfigurationError."""
    key = Ed25519PrivateKey.generate()
    text = base64.urlsafe_b64encode(key.private_bytes_raw()) + b"\n"
    try:
        write_private(path, text)
    except OSError as error:
        raise ConfigurationError(f"the agent's key {path} cannot be written: {error.strerror}") from None
    return key
