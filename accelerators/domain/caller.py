"""The authenticated caller of an API or of the console: what policy, ownership checks and events need to know of it."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass, field

from accelerators.domain.states import EventSource

ADMIN_ROLE = "admin"

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the HTTP request that is being handled, '' if there is none. Set by `cyborgweb.middleware.requests`; events
are stored with it."""


@dataclass(frozen=True)
class Caller:
    """An authenticated caller. DRF requires the attribute `is_authenticated`."""

    name: str
    user_id: str
    roles: frozenset[str]
    project_id: str
    """'' for a token without a project: such a caller may see no project's objects (CVE-2026-40214)."""
    service: bool = False
    """True if the HTTP request had a valid service token with a required role (contract section 3.3)."""
    system_scope: str = ""
    domain_id: str = ""
    is_authenticated: bool = True
    is_local: bool = field(default=False, kw_only=True)
    """True for the person at the server who runs `manage.py`. No policy rule applies to them."""
    has_session: bool = field(default=False, kw_only=True)
    """True for a caller with a session of the console, who has the rights of their console role and not those that a
    token gives to every member of a project."""

    @property
    def event_source(self) -> EventSource:
        """The source of the events of what this caller does through the API."""
        return EventSource.PERSON if self.is_local else EventSource.API

    @property
    def is_admin(self) -> bool:
        """True if the caller has the role `admin`, whatever the policy file says. An admin sees the requests of every
        project (contract section 3.2)."""
        return ADMIN_ROLE in self.roles
