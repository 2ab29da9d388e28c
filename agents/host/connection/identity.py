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

KEY_FILE = "identity.key"
NEXT_KEY_FILE = "identity.next"
"""File of the next key, until the gateway has acknowledged that key."""


@dataclass(frozen=True)
class AgentIdentity:
    """A private key and the host that it authenticates."""

    host: str
    node: str
    private_key: Ed25519PrivateKey

    @property
    def public_key(self) -> str:
        """Return the public key in the text form that messages use."""
        return credentials.encode_public_key(self.private_key.public_key())

    def create_credential(
        self, challenge: credentials.Challenge, epoch: int, fingerprint: str, token: str
    ) -> credentials.Credential:
        """Sign the server's nonce together with host, node, epoch and pinned fingerprint.

        The result authenticates one connection or one download. `token` is the secret of a join token, '' for none.
        """
        signed = credentials.build_connect_bytes(self.host, self.node, epoch, challenge.nonce, fingerprint)
        return credentials.Credential(
            host=self.host,
            node=self.node,
            epoch=epoch,
            nonce=challenge.nonce,
            public_key=self.public_key,
            signature=credentials.sign_data(self.private_key, signed),
            token=token,
        )

    def build_new_key_message(self, next_identity: AgentIdentity, fingerprint: str) -> wire.NewKey:
        """Build the NewKey message that announces the next key, signed by this key and by the next one."""
        data = credentials.build_rotation_bytes(self.host, self.public_key, next_identity.public_key, fingerprint)
        return wire.NewKey(
            next_identity.public_key,
            credentials.sign_data(self.private_key, data),
            credentials.sign_data(next_identity.private_key, data),
        )


class Keyring:
    """The current key and, during a key rotation, the next one (`next_identity`)."""

    def __init__(self, directory: Path, current_identity: AgentIdentity, next_identity: AgentIdentity | None) -> None:
        self._directory = directory
        self.current_identity, self.next_identity = current_identity, next_identity
        self._is_rename_pending = False

    def prepare_next_key(self) -> AgentIdentity:
        """Return the next key; create it if there is none. It is on disk when this returns.

        Raises ConfigurationError when it cannot be written.
        """
        if self.next_identity is None:
            if (
                self._is_rename_pending
            ):  # the file still holds the current key: it must be renamed before it is written again
                self._rename_next_file()
            key = _create_key(self._directory / NEXT_KEY_FILE)
            self.next_identity = AgentIdentity(self.current_identity.host, self.current_identity.node, key)
        return self.next_identity

    def adopt_next_key(self) -> None:
        """Make the next key the current one, after the gateway has accepted it, and replace the former key on disk.

        Does nothing when there is no next key. If the disk refuses, both files stay; the next start then finds out
        which key the gateway accepts.
        """
        if self.next_identity is None:
            return
        self.current_identity, self.next_identity, self._is_rename_pending = self.next_identity, None, True
        try:
            self._rename_next_file()
        except ConfigurationError as error:
            log.error("%s; both keys stay on disk, and the next start finds out which one the gateway accepts", error)

    def _rename_next_file(self) -> None:
        """Rename NEXT_KEY_FILE to KEY_FILE and sync the directory. Raises ConfigurationError."""
        next_file = self._directory / NEXT_KEY_FILE
        try:
            if next_file.exists():
                next_file.rename(self._directory / KEY_FILE)
            sync_directory(self._directory)
        except OSError as error:
            raise ConfigurationError(f"the agent's new key {next_file} cannot be renamed: {error.strerror}") from None
        self._is_rename_pending = False


def load_or_create_keys(directory: Path, host: str, node: str) -> Keyring:
    """Load the stored keys; create the current key if there is none. It is on disk when this returns.

    Raises ConfigurationError when a file is accessible to other users, is not a key, or cannot be read or written.
    """
    current_key = _load_key(directory / KEY_FILE) or _create_key(directory / KEY_FILE)
    next_key = _load_key(directory / NEXT_KEY_FILE)
    next_identity = AgentIdentity(host, node, next_key) if next_key else None
    return Keyring(directory, AgentIdentity(host, node, current_key), next_identity)


def _load_key(path: Path) -> Ed25519PrivateKey | None:
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


def _create_key(path: Path) -> Ed25519PrivateKey:
    """Create a key and write it to a file that only its owner can read. Raises ConfigurationError."""
    key = Ed25519PrivateKey.generate()
    text = base64.urlsafe_b64encode(key.private_bytes_raw()) + b"\n"
    try:
        write_private(path, text)
    except OSError as error:
        raise ConfigurationError(f"the agent's key {path} cannot be written: {error.strerror}") from None
    return key
