"""Tells HTTP clients apart: by their project if a token of theirs was accepted before, otherwise by their address.

The name of a client is known before its request takes a thread, so that requests can be limited for each client.
"""

from __future__ import annotations

import secrets
import threading
from hashlib import blake2b
from ipaddress import IPv6Address, ip_address
from typing import Any

MAX_TOKENS = 10_000
"""Maximum number of tokens whose project is remembered; the oldest is dropped first."""


class KnownTokens:
    """The projects of the tokens that were accepted. It stores no tokens, only keyed hashes of them. Thread-safe."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._secret, self._max_tokens = secrets.token_bytes(32), max_tokens
        self._lock = threading.Lock()
        self._projects: dict[bytes, str] = {}

    def remember(self, token: str, project: str) -> None:
        """Remember that a token was accepted and belongs to this project."""
        key = self._hash_token(token.encode())
        if self._projects.get(key) == project:
            return
        with self._lock:
            self._projects[key] = project
            if len(self._projects) > self._max_tokens:
                del self._projects[next(iter(self._projects))]

    def forget(self, token: str) -> None:
        """Forget a token that was refused, so that nobody uses up a project's share with an old token of it."""
        with self._lock:
            self._projects.pop(self._hash_token(token.encode()), None)

    def find_project(self, token: bytes) -> str:
        """Return the project of a token, '' if the token was not accepted before."""
        return self._projects.get(self._hash_token(token), "")

    def _hash_token(self, token: bytes) -> bytes:
        """Return the key under which the project of a token is stored."""
        return blake2b(token, digest_size=16, key=self._secret).digest()


known_tokens = KnownTokens()
"""The tokens that this process has accepted."""


def name_client(scope: Any, is_behind_proxy: bool) -> str:
    """Return the name of the client of an ASGI request: `project …` or `address …`.

    If `is_behind_proxy`, the address is the last one in X-Forwarded-For, which the proxy sets. Without that header it
    is the address of the peer, also if that is the proxy's: the proxy's own requests share one name.
    """
    forwarded = token = b""
    for name, value in scope["headers"]:
        if name == b"x-auth-token":
            token = value
        elif name == b"x-forwarded-for":
            forwarded = value
    if token and (project := known_tokens.find_project(token)):
        return f"project {project}"
    peer = str((scope.get("client") or ("",))[0])
    seen = forwarded.decode("latin-1").rpartition(",")[2].strip() if is_behind_proxy else ""
    return f"address {get_network(seen) or get_network(peer) or 'unknown'}"


def get_network(address: str) -> str:
    """Return what counts as one address: the first 64 bits of an IPv6 address, which one machine can vary freely.

    Returns '' for a text that is no address.
    """
    try:
        parsed = ip_address(address.partition("%")[0])
    except ValueError:
        return ""
    if isinstance(parsed, IPv6Address):
        return str(parsed.ipv4_mapped or IPv6Address(int(parsed) >> 64 << 64))
    return str(parsed)
