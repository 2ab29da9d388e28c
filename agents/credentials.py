"""Who connects, and how that is proved: challenge, credential, signatures, join strings. Pure; shared by both ends.

An agent GETs `/ws/agent/challenge` (`Challenge`), signs `signed_bytes(...)` with its Ed25519 key and sends the upgrade
request with `Authorization: Cyborg-Agent <base64url of Credential>`. A refusal is an HTTP 401 or 403 with
`{"error": sentence}` and no socket.
"""

from __future__ import annotations

import base64
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta, Struct

from agents.wire import Malformed, Number
from drivers.inventory import Name

SCHEME = "Cyborg-Agent"

_encode = msgspec.json.Encoder().encode


class Challenge(Struct, frozen=True):
    """Answer of GET /ws/agent/challenge. Valid for `seconds`; one connection of one host may use it."""

    nonce: str
    seconds: float
    versions: tuple[str, ...]


class Credential(Struct, frozen=True):
    """Who connects: `public_key` and `signature` are base64url. `token` is sent until the key is bound to the host."""

    host: Name
    node: Name
    epoch: Number
    nonce: Annotated[str, Meta(max_length=256)]
    public_key: Annotated[str, Meta(max_length=64)]
    signature: Annotated[str, Meta(max_length=128)]
    token: Annotated[str, Meta(max_length=128)] = ""


def signed_bytes(host: str, node: str, epoch: int, nonce: str, fingerprint: str) -> bytes:
    """What an agent signs to connect: bound to the host, its epoch, the server's nonce and the pinned server."""
    return _encode(["cyborg-agent-connect-1", host, node, epoch, nonce, fingerprint])


def rotation_bytes(host: str, old: str, new: str, fingerprint: str) -> bytes:
    """What both keys sign when one follows the other: bound to the host, both keys and the pinned server."""
    return _encode(["cyborg-agent-rotate-1", host, old, new, fingerprint])


def public_text(key: Ed25519PublicKey) -> str:
    """A public key as it stands in messages: its 32 raw bytes in base64url, with padding."""
    return base64.urlsafe_b64encode(key.public_bytes_raw()).decode()


def sign(key: Ed25519PrivateKey, data: bytes) -> str:
    """A signature as it stands in messages."""
    return base64.urlsafe_b64encode(key.sign(data)).decode()


def is_signed(public_key: str, signature: str, data: bytes) -> bool:
    """Whether `signature` is this key's over `data`; False also for what is no key or no signature."""
    try:
        key = Ed25519PublicKey.from_public_bytes(base64.urlsafe_b64decode(public_key))
        key.verify(base64.urlsafe_b64decode(signature), data)
    except (ValueError, InvalidSignature):
        return False
    return public_text(key) == public_key  # one key, one name: a bar is known by it


def authorization(credential: Credential) -> str:
    """The value of the upgrade request's Authorization header."""
    return f"{SCHEME} {base64.urlsafe_b64encode(_encode(credential)).decode()}"


def parse_authorization(value: str) -> Credential:
    """The reverse; raises Malformed."""
    scheme, _, encoded = value.partition(" ")
    if scheme.lower() != SCHEME.lower() or len(encoded) > 8192:
        raise Malformed(f"the Authorization header is not '{SCHEME} …'")
    try:
        credential = msgspec.json.decode(base64.urlsafe_b64decode(encoded.strip()), type=Credential)
    except (ValueError, msgspec.DecodeError, RecursionError):
        raise Malformed("the credential is not readable") from None
    if "\0" in credential.host + credential.node:
        raise Malformed("the credential names a host with a NUL character")
    return credential


def join_string(address: str, fingerprint: str, host: str, secret: str) -> str:
    """The one pasteable string of `manage.py join_token`: where, whom to trust, for which host, the secret."""
    return base64.urlsafe_b64encode(_encode([1, address, fingerprint, host, secret])).decode().rstrip("=")


class Join(Struct, frozen=True, array_like=True):
    """What a join string holds. `address` is `http://host:port` or `https://…`; `fingerprint` '' without TLS."""

    version: int
    address: str
    fingerprint: str
    host: str
    secret: str


def parse_join_string(text: str) -> Join:
    """Raises Malformed with a sentence for the person who pasted it."""
    try:
        return msgspec.json.decode(base64.urlsafe_b64decode(text.strip() + "=" * (-len(text.strip()) % 4)), type=Join)
    except (ValueError, msgspec.DecodeError):
        raise Malformed("the join token is not readable: paste the whole line that `join_token` printed") from None
