"""Authenticates API requests and gives the views a `Caller`: from the token in `X-Auth-Token`, or else from a person's
console session.

`CYBORG_AUTH` selects what validates tokens: our own table (`local`) or Keystone. With both, a service may add its own
token in `X-Service-Token`, as with keystonemiddleware (contract section 3.3).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.handlers.wsgi import WSGIRequest
from rest_framework.authentication import BaseAuthentication, SessionAuthentication
from rest_framework.exceptions import APIException, AuthenticationFailed
from rest_framework.request import Request

from accelerators import conductor
from accelerators.domain.caller import Caller
from cyborgweb.auth import keystone
from cyborgweb.auth.clients import known_tokens
from cyborgweb.auth.roles import get_session_caller
from cyborgweb.auth.token_cache import UNREACHABLE_PAUSE_S, TokenCheckUnavailableError
from cyborgweb.errors import CyborgwebError
from cyborgweb.models import hash_token
from cyborgweb.settings.keys import get_keys
from drivers.configuration import ConfigurationError

UNAUTHENTICATED = "The request you have made requires authentication."
TOKEN_PATTERN = re.compile(r"[A-Za-z0-9._~+/=-]{1,8192}")
"""The syntax of a token (token68 of RFC 9110). Anything else is refused without asking the table or Keystone."""
SELECT_TOKENS = """
SELECT t.token_hash, t.name, t.user_id, t.roles, t.project_id FROM cyborgweb_apitoken t
JOIN auth_user u ON u.id = t.user_id WHERE t.token_hash = ANY(%s) AND u.is_active
"""
"""Plain SQL: it runs with every request, and compiling an ORM query cost more than the rest of authentication."""


class KeystoneUnavailableError(CyborgwebError, APIException):
    """503: the token is not in the cache and Keystone cannot be asked. `wait` is the Retry-After in seconds."""

    status_code = 503
    default_detail = "Keystone cannot be asked about this token; try again in a few seconds."
    wait = UNREACHABLE_PAUSE_S


class LocalRequest(WSGIRequest):
    """A request that was built in this process by a command of `manage.py`, and that no network has carried."""

    def __init__(self, environ: dict[str, Any], caller: Caller) -> None:
        super().__init__(environ)
        self.caller = caller

    def get_host(self) -> str:
        """Return the host of CYBORG_PUBLIC_URL, "" if it is not set: addresses in answers are then paths."""
        return urlsplit(get_keys().public_url).netloc


class CallerAuthentication(BaseAuthentication):
    """Finds the caller of a request. An unknown or missing token is answered with 401; there is no anonymous caller."""

    def authenticate(self, request: Request) -> tuple[Caller, Any]:
        """Return the caller and None. If there is an `X-Auth-Token` header, the session is ignored; a LocalRequest
        brings its own caller.

        Raises AuthenticationFailed (401) if there is no valid token or session, PermissionDenied for a write with a
        session but without a valid CSRF token, and KeystoneUnavailableError (503) if Keystone cannot be asked.
        """
        if isinstance(request._request, LocalRequest):
            return request._request.caller, None
        token = request.headers.get("X-Auth-Token")
        if token is None:
            caller = _caller_from_session(request)
        elif get_keys().auth == "keystone":
            caller = _caller_from_keystone(token, request.headers.get("X-Service-Token", ""))
        else:
            caller = _caller_from_table(token, request.headers.get("X-Service-Token", ""))
        if caller is None:
            if token is not None:
                known_tokens.forget(token)
            raise AuthenticationFailed(UNAUTHENTICATED)
        if token is not None:
            known_tokens.remember(token, caller.project_id)
        return caller, None

    def authenticate_header(self, request: Request) -> str:
        """Return the `WWW-Authenticate` value of a 401: the URL where to get a token (contract section 2.1, form E)."""
        return f'Keystone uri="{_get_token_url(request)}"'


def _get_token_url(request: Request) -> str:
    """Return the URL that clients are told to get a token from: Keystone's public URL.

    With local tokens, or if no usable Keystone is configured, it is the root URL of this server.
    """
    if get_keys().auth == "keystone":
        try:
            return get_keys().www_authenticate_uri or keystone.get_auth_url()
        except ConfigurationError:
            pass  # a request with a token is answered with 503, because Keystone cannot be asked
    return request.build_absolute_uri("/")


def _caller_from_session(request: Request) -> Caller | None:
    """Return the caller of a console session; None without a session, a logged-in user, or access to the console.
    Raises PermissionDenied if the request needs a valid CSRF token and has none.
    """
    if settings.SESSION_COOKIE_NAME not in request.COOKIES:
        return None  # reading the user would add `Vary: Cookie` to the response
    user = request._request.user
    caller = get_session_caller(user, request._request.session) if user.is_authenticated else None
    if caller:
        SessionAuthentication().enforce_csrf(request)
    return caller


def _caller_from_table(token: str, service_token: str) -> Caller | None:
    """Return the caller from our own table, or None if one of the tokens is not valid. Costs one statement.

    `service_token` may be ''. If it is given, it must have one of the service roles; the caller then has `service` set.
    """
    hashes = [hash_token(secret) if _is_well_formed(secret) else "" for secret in (token, service_token)]
    row_by_hash = {row[0]: row[1:] for row in conductor.open_cursor().execute(SELECT_TOKENS, [hashes]).fetchall()}
    name, user_id, roles, project_id = row_by_hash.get(hashes[0], ("", 0, [], ""))
    caller = Caller(name, str(user_id), frozenset(roles), project_id) if name else None
    if not service_token:
        return caller
    _, _, service_roles, _ = row_by_hash.get(hashes[1], ("", 0, [], ""))
    return replace(caller, service=True) if caller and _has_service_role(service_roles) else None


def _caller_from_keystone(token: str, service_token: str) -> Caller | None:
    """Return the caller from the cache or from Keystone, or None if one of the tokens is not valid.

    `service_token` may be ''. If it is given, it must have one of the service roles; the caller then has `service` set,
    and the user's token is accepted after its expiry, too. Raises KeystoneUnavailableError if Keystone cannot be asked.
    """
    try:
        if service_token:
            service = keystone.get_token_cache().find_caller(service_token) if _is_well_formed(service_token) else None
            if service is None or not _has_service_role(service.roles):
                return None
        caller = (
            keystone.get_token_cache().find_caller(token, allow_expired=bool(service_token))
            if _is_well_formed(token)
            else None
        )
    except TokenCheckUnavailableError:
        raise KeystoneUnavailableError from None
    return replace(caller, service=True) if caller and service_token else caller


def _is_well_formed(token: str) -> bool:
    """Return whether the text has the syntax of a token (`TOKEN_PATTERN`). Its validity is not checked."""
    return TOKEN_PATTERN.fullmatch(token) is not None


def _has_service_role(roles: Iterable[str]) -> bool:
    """Return whether one of the roles is in CYBORG_SERVICE_TOKEN_ROLES."""
    return not set(get_keys().service_token_roles).isdisjoint(roles)
