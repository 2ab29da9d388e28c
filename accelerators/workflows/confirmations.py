"""Tokens of previews: whoever confirms an action on many objects proves with one which preview they have seen.

A preview of many objects is stored as a draft, with its set of objects. The token is signed, names the draft, and is
bound to the caller and to the request that was previewed. A preview of one device is not stored: its token names the
device, and is bound to its state as well.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

import msgspec
from django.core.signing import BadSignature

from accelerators.domain.caller import Caller
from accelerators.domain.errors import RefusalReason, RefusedError
from accelerators.runtime import database_clock, database_signing

TOKEN_LIFETIME = timedelta(minutes=15)
"""A token is valid for this time after its preview."""
MAX_TOKEN_LENGTH = 1000
_SALT = "accelerators.workflows.confirmations"


@dataclass(frozen=True)
class PreviewToken:
    """The signed token of a preview, and the time at which it expires."""

    text: str
    expires_at: datetime


def issue_token(draft: UUID, caller: Caller, request: Mapping[str, Any]) -> PreviewToken:
    """Return the token with which this caller may confirm this draft, or an action on the device with this uuid.

    `request` is the request that was previewed, as values that JSON can represent: the kind of the action, its options
    and the chosen objects. The reason is not part of it.
    """
    claims = {"draft": str(draft), "digest": _compute_digest(caller, request)}
    text = database_signing.sign_object(claims, _SALT)
    return PreviewToken(text, database_clock.now() + TOKEN_LIFETIME)


def read_token(text: str, caller: Caller, request: Mapping[str, Any]) -> UUID:
    """Return the uuid of the draft, or of the device, that a token confirms.

    Raises RefusedError STALE_PREVIEW if the token is not valid, has expired, or was issued to another caller or for
    another request.
    """
    try:
        claims = database_signing.read_object(text, _SALT, TOKEN_LIFETIME.total_seconds())
    except BadSignature:
        raise stale_preview_error() from None
    if claims["digest"] != _compute_digest(caller, request):
        raise stale_preview_error()
    return UUID(claims["draft"])


def stale_preview_error() -> RefusedError:
    """Return the error for a token that confirms nothing, or nothing any more."""
    text = (
        "The token belongs to the preview of another caller, action or set, or the preview is older than"
        f" {TOKEN_LIFETIME.total_seconds() // 60:.0f} minutes or used already. Nothing was done: ask for a new preview."
    )
    return RefusedError(RefusalReason.STALE_PREVIEW, text)


def lost_draft_error() -> RefusedError:
    """Return the error for a draft that another request of the same caller has replaced or confirmed before the request
    that made it could start it."""
    text = (
        "Another request of the same caller has replaced or confirmed the draft of this one, so this one has started"
        " nothing. Look whether it is running, then repeat the request if it is not."
    )
    return RefusedError(RefusalReason.CONFLICT, text)


def _compute_digest(caller: Caller, request: Mapping[str, Any]) -> str:
    """Return a digest of the caller and of a request; the order of the request's keys does not matter."""
    identity = [caller.name, caller.user_id, caller.project_id, caller.is_local]
    return hashlib.sha256(msgspec.json.encode([identity, request], order="deterministic")).hexdigest()
