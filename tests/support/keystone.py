"""A fake Keystone on real sockets: it logs users in, validates tokens and counts requests. It can fail and hang.

It implements as much of Identity v3 as keystoneauth1 needs. The system tests use a real Keystone.
"""

from __future__ import annotations

import json
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from cyborgweb.auth import policy
from cyborgweb.auth.keystone import get_token_cache, service_session
from cyborgweb.settings.keys import get_keys

SERVICE = {"OS_USERNAME": "cyborg", "OS_PASSWORD": "service-secret", "OS_PROJECT_NAME": "service"}


@dataclass
class User:
    """A user with a password and the roles in each project; all these projects are in `project_domain`."""

    name: str
    password: str
    roles: dict[str, list[str]]
    domain: str = "Default"
    project_domain: str = "Default"
    enabled: bool = True
    federated: bool = False
    id: str = field(default_factory=lambda: uuid.uuid4().hex)


@dataclass
class Keystone:
    """Users, tokens and switches of the fake Keystone.

    If `fails_with` is set, every request is answered with that status. `held` delays answers until the event is set, at
    most 20 s. `calls` counts the requests by kind: `log in`, `validate`, `list` (a user, or role assignments). Without
    `may_list` the service user is refused the last kind.
    """

    port: int = 0
    users: list[User] = field(default_factory=list)
    tokens: dict[str, dict[str, Any]] = field(default_factory=dict)
    calls: Counter[str] = field(default_factory=Counter)
    seen: list[str] = field(default_factory=list)
    """The query strings of all token validations."""
    fails_with: int = 0
    may_list: bool = True
    deleted_projects: set[str] = field(default_factory=set)
    disabled: set[str] = field(default_factory=set)
    """The ids of disabled projects and domains. All projects are in the domain `default`."""
    failing_users: set[str] = field(default_factory=set)
    """Users about whom it answers 500, as if the directory that has them were broken."""
    held: threading.Event | None = None

    @property
    def url(self) -> str:
        """The auth URL, without a version."""
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        """The `OS_…` variables of the service user."""
        domains = {"OS_USER_DOMAIN_NAME": "Default", "OS_PROJECT_DOMAIN_NAME": "Default"}
        return SERVICE | domains | {"OS_AUTH_URL": self.url}

    def token(
        self, *roles: str, project: str = "p1", lasts_s: float = 3600, user: User | None = None, **scope: Any
    ) -> str:
        """Create a token with these roles. `scope` replaces the project: system, domain or unscoped=True."""
        secret = f"gAAAA{uuid.uuid4().hex}"
        expires_at = datetime.now(UTC) + timedelta(seconds=lasts_s)
        who = user or User("alice", "", {}, id="u-alice")
        body: dict[str, Any] = {
            "methods": ["password"],
            "user": {"id": who.id, "name": who.name, "domain": {"id": "default", "name": who.domain}},
            "roles": [{"id": f"id-{role}", "name": role} for role in roles],
            "audit_ids": [secret[-8:]],
            "issued_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "expires_at": expires_at.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        }
        if "system" in scope:
            body["system"] = {"all": True}
        elif "domain" in scope:
            body["domain"] = {"id": scope["domain"], "name": scope["domain"]}
        elif "unscoped" not in scope:
            body["project"] = {"id": project, "name": project, "domain": {"id": "default", "name": "Default"}}
        self.tokens[secret] = body
        return secret

    def log_in(self, wanted: dict[str, Any]) -> str | None:
        """Return a new token for a login request; None if the name, password, domain or project is wrong."""
        asked = wanted["auth"]["identity"]["password"]["user"]
        wanted_scope = wanted["auth"].get("scope", {})
        scope = wanted_scope.get("project", {})
        project, project_domain = scope.get("name", ""), scope.get("domain", {}).get("name", "Default")
        for user in self.users:
            if (user.name, user.password, user.domain) == (asked["name"], asked["password"], asked["domain"]["name"]):
                if "domain" in wanted_scope:
                    return self.token("admin", user=user, domain=wanted_scope["domain"]["name"])
                if project not in user.roles or project_domain != user.project_domain:
                    return None
                return self.token(*user.roles[project], project=project, user=user)
        return None

    def show(self, kind: str, name: str) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of an answer about a project or domain; `kind` is `projects` or `domains`."""
        body: dict[str, Any] = {"id": name, "enabled": name not in self.disabled}
        return 200, {kind[:-1]: body | ({"domain_id": "default"} if kind == "projects" else {})}

    def list(self, path: str, query: dict[str, list[str]]) -> tuple[int, dict[str, Any]]:
        """Return the status and the body of an answer about a user, or about role assignments."""
        by_id = {user.id: user for user in self.users}
        user_id = path.removeprefix("/v3/users/")
        if not self.may_list and user_id != self.users[0].id:  # everybody may read their own user
            return 403, {"error": {"code": 403, "message": "You are not authorized to perform the requested action."}}
        if path == "/v3/role_assignments":
            user, (project,) = by_id.get(query["user.id"][0]), query["scope.project.id"]
            if user is None or project in self.deleted_projects:
                return 404, {"error": {"code": 404, "message": "Could not find user or project."}}
            scope = {"project": {"id": project}}
            names = [] if user.federated else user.roles.get(project, [])
            return 200, {"role_assignments": [{"role": {"id": f"id-{n}", "name": n}, "scope": scope} for n in names]}
        if user_id in self.failing_users:
            return 500, {"error": {"code": 500, "message": "An unexpected error prevented the server."}}
        if user_id not in by_id:
            return 404, {"error": {"code": 404, "message": f"Could not find user: {user_id}."}}
        found = by_id[user_id]
        body: dict[str, Any] = {"id": found.id, "name": found.name, "enabled": found.enabled}
        return 200, {"user": body | ({"federated": [{"idp_id": "idp", "protocols": []}]} if found.federated else {})}

    def valid(self, secret: str, query: dict[str, list[str]]) -> bool:
        """Return True if the token is known and has not expired; allow_expired in `query` accepts an expired one."""
        ends = datetime.fromisoformat(self.tokens[secret]["expires_at"]) if secret in self.tokens else None
        return bool(ends and ("allow_expired" in query or ends > datetime.now(UTC)))


@contextmanager
def keystone() -> Iterator[Keystone]:
    """Run a fake Keystone for the block; it has one user, the service user `cyborg`."""
    known = Keystone(users=[User("cyborg", "service-secret", {"service": ["service"]})])

    class Handler(_Handler):
        keystone = known

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    known.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield known
    finally:
        if known.held:
            known.held.set()
        server.shutdown()
        server.server_close()


@contextmanager
def vouching(**settings: str) -> Iterator[Keystone]:
    """Run a fake Keystone and configure this process to use it (`CYBORG_AUTH=keystone` and `settings`)."""
    with keystone() as known, pytest.MonkeyPatch.context() as patch:
        patch.delenv("OS_CLOUD", raising=False)
        for name, value in (known.environment() | {"CYBORG_AUTH": "keystone"} | settings).items():
            patch.setenv(name, value)
        clear_process_caches()
        yield known
    clear_process_caches()


def clear_process_caches() -> None:
    """Clear the caches of this process: its configuration, the service session, tokens and the policy."""
    for remembered in (get_keys, service_session, get_token_cache, policy._get_policy):
        remembered.cache_clear()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # send an answer in one piece; otherwise the client delays its ACK of the first part by 40 ms
    keystone: Keystone

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        query = parse_qs(url.query)
        secret = self.headers["X-Subject-Token"]
        if secret is not None:
            self.keystone.seen.append(url.query)
        if not self.keystone.valid(self.headers["X-Auth-Token"], {}):
            self._answer("validate", 401, {"error": {"code": 401, "message": "who are you?"}})
        elif secret is None:
            kind, _, name = url.path.removeprefix("/v3/").partition("/")
            is_place = kind in ("projects", "domains") and self.keystone.may_list
            self._answer("list", *(self.keystone.show(kind, name) if is_place else self.keystone.list(url.path, query)))
        elif self.keystone.valid(secret, query):
            self._answer("validate", 200, {"token": self.keystone.tokens[secret]})
        else:
            self._answer("validate", 404, {"error": {"code": 404, "message": "no such token"}})

    def do_POST(self) -> None:
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        secret = self.keystone.log_in(wanted)
        if secret is None:
            self._answer("log in", 401, {"error": {"code": 401, "message": "no"}})
        else:
            self._answer("log in", 201, {"token": self.keystone.tokens[secret]}, {"X-Subject-Token": secret})

    def _answer(self, what: str, status: int, body: object, headers: dict[str, str] | None = None) -> None:
        self.keystone.calls[what] += 1
        if self.keystone.held:
            self.keystone.held.wait(20)
        content = json.dumps(body).encode()
        self.send_response(self.keystone.fails_with or status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
