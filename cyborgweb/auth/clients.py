"""Tells HTTP clients apart: by their project if a token of theirs was accepted before, otherwise by their address.

The name of a client is known before its request takes a thread, so that requests can be limited for each client.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from hashlib import blake2b
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

from cyborgweb.settings.keys import Keys

MAX_TOKENS = 10_000
"""Maximum number of tokens whose project is remembered; the oldest is dropped first."""
REMEMBER_S = 600.0
"""Seconds for which a token counts for its project after it was accepted the last time."""


class KnownTokens:
    """The projects of the tokens that were accepted. It stores no tokens, only keyed hashes of them. Thread-safe."""

    def __init__(self, max_tokens: int = MAX_TOKENS, clock: Callable[[], float] = time.monotonic) -> None:
        self._secret, self._max_tokens, self._clock = secrets.token_bytes(32), max_tokens, clock
        self._lock = threading.Lock()
        self._projects: dict[bytes, tuple[str, float]] = {}
        """The project of each token, and when it was accepted the last time; the latest is the last one."""

    def remember(self, token: str, project: str) -> None:
        """Remember that a token was accepted and belongs to this project."""
        key = self._hash_token(token.encode())
        with self._lock:
            self._projects.pop(key, None)
            self._projects[key] = project, self._clock()
            if len(self._projects) > self._max_tokens:
                del self._projects[next(iter(self._projects))]

    def forget(self, token: str) -> None:
        """Forget a token that was refused, so that nobody uses up a project's share with an old token of it."""
        with self._lock:
            self._projects.pop(self._hash_token(token.encode()), None)

    def find_project(self, token: bytes) -> str:
        """Return the project of a token, '' if the token was not accepted in the last REMEMBER_S seconds."""
        project, accepted_at = self._projects.get(self._hash_token(token), ("", 0.0))
        return project if self._clock() - accepted_at < REMEMBER_S else ""

    def _hash_token(self, token: bytes) -> bytes:
        """Return the key under which the project of a token is stored."""
        return blake2b(token, digest_size=16, key=self._secret).digest()


known_tokens = KnownTokens()
"""The tokens that this process has accepted."""


def name_client(scope: Any, keys: Keys) -> str:
    """Return the name of the client of an ASGI request: `project …` or `address …`.

    A request with several tokens counts for its address: Django joins them, so none of them is checked.
    """
    tokens = [value for name, value in scope["headers"] if name == b"x-auth-token"]
    if len(tokens) == 1 and (project := known_tokens.find_project(tokens[0])):
        return f"project {project}"
    peer = str((scope.get("client") or ("",))[0])
    forwarded = b",".join(value for name, value in scope["headers"] if name == b"x-forwarded-for")
    return f"address {get_network(find_address(peer, forwarded.decode('latin-1'), keys)) or 'unknown'}"


def find_address(peer: str, forwarded: str, keys: Keys) -> str:
    """Return the address of a client: that of the peer or, behind a proxy, the last one in X-Forwarded-For.

    A proxy sets this header or appends to it, so a client cannot choose the last address. The header is read only with
    CYBORG_PUBLIC_URL, and only in requests from CYBORG_PROXY_ADDRESSES if these are configured. Without a usable header
    the address is the peer's, also if that is the proxy: the proxy's own requests share one address.
    """
    seen = forwarded.rpartition(",")[2].strip()
    if not keys.public_url or not get_network(seen):
        return peer
    return seen if not keys.proxy_addresses or _is_in_networks(peer, keys.proxy_addresses) else peer


@lru_cache(maxsize=1_000)
def _is_in_networks(address: str, networks: tuple[str, ...]) -> bool:
    """Return whether an address is in one of these networks; False for a text that is no address."""
    try:
        parsed: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped:
        parsed = parsed.ipv4_mapped
    allowed: list[IPv4Network | IPv6Network] = [ip_network(network) for network in networks]
    return any(parsed in network for network in allowed)


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
