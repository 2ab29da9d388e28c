"""Authentication of agents: challenge, credential, signatures and join strings.

The module is pure, and both sides import it. An agent GETs `/ws/agent/challenge` (`Challenge`), signs
`build_connect_bytes(...)` with its Ed25519 key and sends the upgrade request with
`Authorization: Cyborg-Agent <base64url of Credential>`. If it is refused, it gets an HTTP 401 or 403 (503 if it should
come back later) with `{"error": sentence, "code": word}`, and no socket.
"""

from __future__ import annotations

import base64
from typing import Annotated

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta, Struct

from agents.wire import MAX_ANNOUNCEMENTS, CertificateAnnouncement, MalformedMessageError, NonNegativeInt
from drivers.inventory import Name

SCHEME = "Cyborg-Agent"

_encode_json = msgspec.json.Encoder().encode


class Challenge(Struct, frozen=True, omit_defaults=True):
    """Answer of GET /ws/agent/challenge. The nonce is valid for `seconds` and for one request.

    `announcements` are those of certificates. An agent that does not accept the server's certificate reads only them,
    and believes none without the signature of the announcement key.
    """

    nonce: str
    seconds: float
    versions: tuple[str, ...]
    announcements: Annotated[tuple[CertificateAnnouncement, ...], Meta(max_length=MAX_ANNOUNCEMENTS)] = ()


class Credential(Struct, frozen=True):
    """The identity that an agent claims, and its proof.

    `public_key` and `signature` are base64url. The agent sends `token` until its key is bound to the host.
    """

    host: Name
    node: Name
    epoch: NonNegativeInt
    nonce: Annotated[str, Meta(max_length=256)]
    public_key: Annotated[str, Meta(max_length=64)]
    signature: Annotated[str, Meta(max_length=128)]
    token: Annotated[str, Meta(max_length=128)] = ""


def build_connect_bytes(host: str, node: str, epoch: int, nonce: str, fingerprint: str) -> bytes:
    """Return the bytes that an agent signs to connect.

    They bind the signature to the host and node, the agent's epoch, the server's nonce and the pinned certificate
    (`fingerprint`, '' for none).
    """
    return _encode_json(["cyborg-agent-connect-1", host, node, epoch, nonce, fingerprint])


def build_rotation_bytes(host: str, old_key: str, new_key: str, fingerprint: str) -> bytes:
    """Return the bytes that the old and the new key sign at a key rotation.

    They bind the signatures to the host, both keys (base64url) and the pinned certificate (`fingerprint`, '' for none).
    """
    return _encode_json(["cyborg-agent-rotate-1", host, old_key, new_key, fingerprint])


def encode_public_key(key: Ed25519PublicKey) -> str:
    """Encode a public key for messages: its 32 raw bytes in base64url with padding."""
    return base64.urlsafe_b64encode(key.public_bytes_raw()).decode()


def sign_data(key: Ed25519PrivateKey, data: bytes) -> str:
    """Sign `data` and return the signature as messages have it: 64 bytes in base64url with padding."""
    return base64.urlsafe_b64encode(key.sign(data)).decode()


def is_valid_signature(public_key: str, signature: str, data: bytes) -> bool:
    """Return whether `signature` is this key's signature of `data`; also False for malformed keys and signatures."""
    try:
        key = Ed25519PublicKey.from_public_bytes(base64.urlsafe_b64decode(public_key))
        key.verify(base64.urlsafe_b64decode(signature), data)
    except (ValueError, InvalidSignature):
        return False
    return (
        encode_public_key(key) == public_key
    )  # only the canonical text is valid: a barred key is recognised by its text


def encode_authorization(credential: Credential) -> str:
    """Encode a credential as the value of the Authorization header: the scheme `Cyborg-Agent`, then JSON in
    base64url."""
    return f"{SCHEME} {base64.urlsafe_b64encode(_encode_json(credential)).decode()}"


def parse_authorization(value: str) -> Credential:
    """Decode the value of an Authorization header; raise MalformedMessageError if it is not a credential.

    The signature is not verified.
    """
    scheme, _, encoded = value.partition(" ")
    if scheme.lower() != SCHEME.lower() or len(encoded) > 8192:
        raise MalformedMessageError(f"the Authorization header is not '{SCHEME} …'")
    try:
        credential = msgspec.json.decode(base64.urlsafe_b64decode(encoded.strip()), type=Credential)
    except (ValueError, msgspec.DecodeError, RecursionError):
        raise MalformedMessageError("the credential is not readable") from None
    if "\0" in credential.host + credential.node:
        raise MalformedMessageError("the credential names a host with a NUL character")
    return credential


def encode_join_string(address: str, fingerprint: str, host: str, secret: str, announcement_key: str = "") -> str:
    """Make the string that `manage.py join_token` prints.

    It has the server's address, the certificate's fingerprint, the host, the secret and, if there is one, the key that
    signs announcements of certificates.
    """
    fields = [1, address, fingerprint, host, secret, announcement_key]
    return base64.urlsafe_b64encode(_encode_json(fields if announcement_key else fields[:-1])).decode().rstrip("=")


class JoinData(Struct, frozen=True, array_like=True):
    """The content of a join string. `address` is `http://host:port` or `https://…`; `fingerprint` is '' without TLS.

    `announcement_key` is '' if there is none. Older releases ignore it.
    """

    version: int
    address: str
    fingerprint: str
    host: str
    secret: str
    announcement_key: str = ""


def parse_join_string(text: str) -> JoinData:
    """Decode a join string; raise MalformedMessageError if it is none, with a sentence for the person who pasted it.

    The secret is not checked here, and neither is `version`.
    """
    try:
        # The decoder ignores padding beyond what the text needs, which is two characters at most.
        return msgspec.json.decode(base64.urlsafe_b64decode(f"{text.strip()}=="), type=JoinData)
    except (ValueError, msgspec.DecodeError):
        raise MalformedMessageError(
            "the join token is not readable: paste the whole line that `join_token` printed"
        ) from None
