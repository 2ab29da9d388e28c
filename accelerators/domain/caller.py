"""Who asks, as policy, ownership and events need to know it.

Made by `cyborgweb.auth.authentication` from a token or a session; read by both APIs and by `binding`.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

ADMIN = "admin"

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the HTTP request being worked on, '' outside of one. Set by `cyborgweb.middleware.requests`; events bear
it."""


@dataclass(frozen=True)
class Caller:
    """An authenticated caller. `is_authenticated` is what DRF asks for."""

    name: str
    user_id: str
    roles: frozenset[str]
    project_id: str
    """'' for a token without a project: such a caller gets nothing (CVE-2026-40214)."""
    service: bool = False
    """A valid service token with a required role came along (contract section 3.3)."""
    system_scope: str = ""
    domain_id: str = ""
    is_authenticated: bool = True

    @property
    def is_admin(self) -> bool:
        """The literal role, whatever the policy file says: who sees every project's requests (contract section 3.2)."""
        return ADMIN in self.roles
