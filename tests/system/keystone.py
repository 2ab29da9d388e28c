"""A real Keystone on loopback, with Fernet tokens, users of every role, and a catalogue that contains the product.

The fixture `keystone` runs one for the whole test session. A prepared installation (database, keys, users) is kept in
the cache folder, so that a start copies files instead of bootstrapping. Keystone ends when the test process that
started it ends, also by kill -9.
"""

from __future__ import annotations

import inspect
import json
import os
import shutil
import socket
import sqlite3
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.support.cache import cache_folder, delete_old_entries, fingerprint, locked, mark_used
from tests.support.long import scaled
from tests.support.webserver import until
from tests.system import environments

PASSWORD = "correct-horse"
REGION = "RegionOne"
START_S = 60.0
TOKEN_S = scaled(3600, 24 * 3600)
"""Lifetime of tokens in seconds. In the long version it is longer than the one-hour outages that are tested there."""
USERS = {
    "admin": ("demo", "admin"),
    "manager": ("demo", "manager"),
    "member": ("demo", "member"),
    "reader": ("demo", "reader"),
    "observer": ("demo", "observer"),
    "other": ("other", "member"),
    "service": ("service", "service"),
}
"""Each user's project and role in it. No policy rule names the role `observer`; the user `other` has no role in `demo`.

`admin` also has the role admin on the system and on the default domain. Roles imply each other as in Keystone's
bootstrap (admin → manager → member → reader).
"""

CONFIGURATION = """
[DEFAULT]
log_file = {folder}/keystone.log
[database]
connection = sqlite:///{folder}/keystone.db
[token]
provider = fernet
expiration = {token_s}
[fernet_tokens]
key_repository = {folder}/fernet-keys
[credential]
key_repository = {folder}/credential-keys
[receipt]
provider = fernet
[fernet_receipts]
key_repository = {folder}/fernet-keys
[identity]
password_hash_rounds = 4
[cache]
enabled = true
backend = dogpile.cache.memory
"""
"""Password hashes are cheap. The cache is in Keystone's one process, so a revoked token is refused at once."""


@dataclass
class Keystone:
    """One installation of Keystone in `folder`; `token_s` is the lifetime of its tokens in seconds."""

    folder: Path
    token_s: int = 3600
    port: int = 0
    process: subprocess.Popen[bytes] | None = None
    _admin: str = ""

    @property
    def url(self) -> str:
        """The URL for OS_AUTH_URL and `auth_url`, including /v3."""
        return f"http://127.0.0.1:{self.port}/v3"

    def environ(self) -> dict[str, str]:
        """Return the environment for Keystone's own commands, which names the folder of its configuration."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("OS_", "PYTHON"))}
        return kept | {"OS_KEYSTONE_CONFIG_DIR": str(self.folder), "PYTHONWARNINGS": "ignore"}

    def configure(self) -> None:
        """Write keystone.conf for the current folder."""
        (self.folder / "keystone.conf").write_text(CONFIGURATION.format(folder=self.folder, token_s=self.token_s))

    def manage(self, *words: str) -> None:
        """Run `keystone-manage` with these arguments; fail if it exits with an error."""
        command = Path(environments.python("keystone")).with_name("keystone-manage")
        done = subprocess.run(
            [command, "--config-dir", self.folder, *words],
            capture_output=True,
            text=True,
            check=False,
            env=self.environ(),
        )
        assert done.returncode == 0, done.stderr[-2000:]

    def start(self) -> Keystone:
        """Start Keystone, on its former port if it had one, and wait until it answers."""
        listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        self.port = listener.getsockname()[1]
        with sqlite3.connect(self.folder / "keystone.db") as database:
            identity = "SELECT id FROM service WHERE type = 'identity'"
            database.execute(f"UPDATE endpoint SET url = ? WHERE service_id IN ({identity})", (self.url,))
        database.close()
        with (self.folder / "said.log").open("ab") as log:
            self.process = subprocess.Popen(
                [environments.python("keystone"), "-m", "tests.system.keystone_process", str(listener.fileno())],
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=environments.ROOT,
                env=self.environ() | {"CYBORG_PARENT": str(os.getpid()), "PYTHONDONTWRITEBYTECODE": "1"},
            )
        listener.close()
        until(self._answers, START_S)
        self._admin = self.token("admin")
        return self

    def _answers(self) -> bool:
        assert self.process and self.process.poll() is None, (self.folder / "said.log").read_text()[-2000:]
        try:
            return requests.get(self.url, timeout=START_S).ok
        except requests.ConnectionError:
            return False

    def stop(self) -> None:
        """Kill Keystone, to simulate an outage; `start` brings it back on the same port with the same data."""
        if self.process:
            self.process.kill()
            self.process.wait()

    def token(
        self, user: str, *, project: str = "", unscoped: bool = False, system: bool = False, domain: bool = False
    ) -> str:
        """Log `user` in and return a token, scoped to the user's own project by default; fail if Keystone refuses."""
        scope: Any = {"project": {"name": project or USERS[user][0], "domain": {"id": "default"}}}
        if unscoped:
            scope = "unscoped"
        elif system:
            scope = {"system": {"all": True}}
        elif domain:
            scope = {"domain": {"id": "default"}}
        who = {"user": {"name": user, "domain": {"id": "default"}, "password": PASSWORD}}
        body = {"auth": {"identity": {"methods": ["password"], "password": who}, "scope": scope}}
        answer = requests.post(f"{self.url}/auth/tokens", json=body, timeout=START_S)
        assert answer.status_code == 201, answer.text
        return answer.headers["X-Subject-Token"]

    def revoke(self, token: str) -> None:
        """Revoke a token, so that Keystone refuses it from now on."""
        headers = {"X-Auth-Token": self._admin, "X-Subject-Token": token}
        assert requests.delete(f"{self.url}/auth/tokens", headers=headers, timeout=START_S).status_code == 204

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Call the identity API (`path` below /v3) as admin; return the decoded answer, {} if it has no body.

        Fails if the status is 400 or more.
        """
        headers = {"X-Auth-Token": self._admin}
        answer = requests.request(method, f"{self.url}{path}", json=body, headers=headers, timeout=START_S)
        assert answer.ok, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else {}

    def publish(self, kind: str, url: str, name: str = "") -> None:
        """Set the public, internal and admin endpoints of service type `kind` to `url`; create what is missing."""
        services = self.call("GET", f"/services?type={kind}")["services"]
        service = services[0] if services else None
        if service is None:
            wanted = {"service": {"type": kind, "name": name or kind, "enabled": True}}
            service = self.call("POST", "/services", wanted)["service"]
        there = self.call("GET", f"/endpoints?service_id={service['id']}")["endpoints"]
        for interface in ("public", "internal", "admin"):
            at = next((one["id"] for one in there if one["interface"] == interface), "")
            endpoint = {"url": url, "interface": interface, "service_id": service["id"], "region_id": REGION}
            self.call("PATCH" if at else "POST", f"/endpoints/{at}".rstrip("/"), {"endpoint": endpoint})

    def id_of(self, kind: str, name: str) -> str:
        """Return the id of a project or user (`kind`) by its name."""
        return str(self.call("GET", f"/{kind}s?name={name}")[f"{kind}s"][0]["id"])

    def credentials(self, user: str, *, system: bool = False) -> dict[str, str]:
        """Return the `auth` section of a clouds.yaml for a user."""
        who = {"auth_url": self.url, "username": user, "password": PASSWORD, "user_domain_name": "Default"}
        where = (
            {"system_scope": "all"} if system else {"project_name": USERS[user][0], "project_domain_name": "Default"}
        )
        return who | where

    def environment(self, user: str, *, system: bool = False) -> dict[str, str]:
        """Return the `OS_…` variables of a user, for clients and for the product."""
        named = {f"OS_{key.upper()}": value for key, value in self.credentials(user, system=system).items()}
        return named | {"OS_REGION_NAME": REGION, "OS_IDENTITY_API_VERSION": "3"}

    def clouds(self, **more: Any) -> str:
        """Return a clouds.yaml (as JSON) with one cloud per user, and `system-admin`; `more` is added to each cloud."""
        clouds = {user: {"auth": self.credentials(user)} for user in USERS}
        clouds["system-admin"] = {"auth": self.credentials("admin", system=True)}
        return json.dumps({"clouds": {name: cloud | {"region_name": REGION} | more for name, cloud in clouds.items()}})


def _template() -> Path:
    """Return the folder of the prepared installation; make it if the lock file or the source of `_populate` changed."""
    lock = (environments.LOCKS / "keystone.txt").read_bytes()
    recipe = f"{os.getuid()}{USERS}{inspect.getsource(_populate)}".encode()
    folder = cache_folder() / f"keystone-data-{fingerprint(lock, recipe)}"
    with locked("keystone-data"):
        if not folder.exists():
            shutil.rmtree(folder.with_suffix(".new"), ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix="cyborg-keystone-") as made:
                _populate(Keystone(Path(made)))
                shutil.copytree(made, folder.with_suffix(".new"), dirs_exist_ok=True)
            folder.with_suffix(".new").rename(folder)
        mark_used(folder)
        delete_old_entries("keystone-data")
    return folder


def _populate(keystone: Keystone) -> None:
    """Bootstrap Keystone, then make users, projects and roles through its own API."""
    keystone.configure()
    keystone.manage("db_sync")
    for keys in ("fernet_setup", "credential_setup"):
        keystone.manage(keys, "--keystone-user", str(os.getuid()), "--keystone-group", str(os.getgid()))
    names = ("--bootstrap-password", PASSWORD, "--bootstrap-project-name", "demo", "--bootstrap-region-id", REGION)
    urls = (
        word for kind in ("public", "internal", "admin") for word in (f"--bootstrap-{kind}-url", "http://127.0.0.1")
    )
    keystone.manage("bootstrap", *names, *urls)
    keystone.start()
    try:
        keystone.call("POST", "/roles", {"role": {"name": "observer"}})
        roles = {role["name"]: role["id"] for role in keystone.call("GET", "/roles")["roles"]}
        for name in {project for project, _ in USERS.values()} - {"demo"}:
            keystone.call("POST", "/projects", {"project": {"name": name, "domain_id": "default"}})
        for name, (project, role) in USERS.items():
            if name != "admin":
                user = {"name": name, "password": PASSWORD, "domain_id": "default"}
                made = keystone.call("POST", "/users", {"user": user})["user"]["id"]
                keystone.call("PUT", f"/projects/{keystone.id_of('project', project)}/users/{made}/roles/{roles[role]}")
        admin = keystone.id_of("user", "admin")
        keystone.call("PUT", f"/domains/default/users/{admin}/roles/{roles['admin']}")
        keystone.publish("accelerator", "http://127.0.0.1/accelerator/v2", "cyborg")
    finally:
        keystone.stop()


@contextmanager
def running(token_s: int = 3600) -> Iterator[Keystone]:
    """Run a separate, prepared Keystone on a free port for the block. Raises environments.Unavailable."""
    environments.python("keystone")
    with tempfile.TemporaryDirectory(prefix="cyborg-keystone-") as made:
        shutil.copytree(_template(), made, dirs_exist_ok=True)
        keystone = Keystone(Path(made), token_s)
        keystone.configure()
        try:
            yield keystone.start()
        finally:
            keystone.stop()


@pytest.fixture(scope="session")
def keystone(pytestconfig: pytest.Config) -> Iterator[Keystone]:
    """Keystone for the whole test session; the test is skipped with one loud line if its packages are unavailable."""
    environments.wanted(pytestconfig, "keystone")
    with running(TOKEN_S) as one:
        yield one
