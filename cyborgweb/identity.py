"""Who calls the API: local tokens in `X-Auth-Token`, seen by the views as a `Caller`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rest_framework.authentication import BaseAuthentication
from rest_framework.exceptions import AuthenticationFailed
from rest_framework.request import Request

from cyborgweb.models import ApiToken, digest

UNAUTHENTICATED = "The request you have made requires authentication."
MAX_TOKEN = 512


@dataclass(frozen=True)
class Caller:
    """An authenticated caller as policy sees it. `is_authenticated` is what DRF asks for."""

    name: str
    roles: frozenset[str]
    project_id: str
    is_authenticated: bool = True


class TokenAuthentication(BaseAuthentication):
    """`X-Auth-Token` against the stored hashes; one statement. Unknown or missing tokens are a 401, never anonymous."""

    def authenticate(self, request: Request) -> tuple[Caller, Any]:
        """The caller, or AuthenticationFailed."""
        secret = request.headers.get("X-Auth-Token", "")
        if not secret or len(secret) > MAX_TOKEN:
            raise AuthenticationFailed(UNAUTHENTICATED)
        rows = ApiToken.objects.filter(token_hash=digest(secret), user__is_active=True)
        token = rows.values_list("name", "roles", "project_id").first()
        if token is None:
            raise AuthenticationFailed(UNAUTHENTICATED)
        name, roles, project_id = token
        return Caller(name, frozenset(roles), project_id), None

    def authenticate_header(self, request: Request) -> str:
        """What a 401 says about how to come back (contract section 2.1, form E)."""
        return f'Keystone uri="{request.build_absolute_uri("/")}"'
