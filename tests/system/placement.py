"""A real Placement on loopback, with its own PostgreSQL, which authenticates with the Keystone of the system tests.

The fixture `placement` runs one for the whole test session. Placement ends when the test process that started it ends,
also by kill -9.
"""

from __future__ import annotations

import inspect
import os
import socket
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import requests

from cyborgweb.database.postgres import Postgres
from tests.support.migrated import copy_prepared
from tests.support.webserver import until
from tests.system import environments
from tests.system.keystone import Keystone

START_S = 60.0
CONFIGURATION = """
[DEFAULT]
log_file = {folder}/placement.log
[placement_database]
connection = postgresql+psycopg2://postgres@/placement?host={socket}
max_pool_size = 32
[api]
auth_strategy = keystone
[keystone_authtoken]
www_authenticate_uri = {keystone}
auth_url = {keystone}
auth_type = password
username = service
password = {password}
project_name = service
user_domain_name = Default
project_domain_name = Default
"""


@dataclass
class Placement:
    """One installation of Placement in `folder`."""

    folder: Path
    keystone: Keystone
    postgres: Postgres
    port: int = 0
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """The URL of Placement, which is also its endpoint in the catalogue."""
        return f"http://127.0.0.1:{self.port}"

    def environ(self) -> dict[str, str]:
        """Return the environment for Placement's own commands, which names the folder of its configuration."""
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("OS_", "PYTHON"))}
        return kept | {"OS_PLACEMENT_CONFIG_DIR": str(self.folder), "PYTHONWARNINGS": "ignore"}

    def prepare(self) -> None:
        """Start the database, a copy of one with Placement's migrations applied, and write the configuration."""
        lock = (environments.LOCKS / "placement.txt").read_bytes()
        copy_prepared(self.postgres, "placement-data", lock + inspect.getsource(_migrate).encode(), self._fill)
        self.postgres.start()
        self._configure(self.postgres)

    def _fill(self, server: Postgres) -> None:
        server.ensure_database("placement")
        self._configure(server)
        _migrate(self)

    def _configure(self, server: Postgres) -> None:
        credentials = self.keystone.credentials("service")
        values = {"folder": self.folder, "socket": server.socket, "keystone": self.keystone.url}
        text = CONFIGURATION.format(password=credentials["password"], **values)
        (self.folder / "placement.conf").write_text(text)

    def start(self) -> Placement:
        """Start Placement, on its former port if it had one, wait until it answers, and publish it in the catalogue."""
        listener = socket.create_server(("127.0.0.1", self.port), backlog=128)
        self.port = listener.getsockname()[1]
        with (self.folder / "said.log").open("ab") as log:
            self.process = subprocess.Popen(
                [environments.python("placement"), "-m", "tests.system.placement_process", str(listener.fileno())],
                pass_fds=[listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=environments.ROOT,
                env=self.environ() | {"CYBORG_PARENT": str(os.getpid()), "PYTHONDONTWRITEBYTECODE": "1"},
            )
        listener.close()
        until(self._answers, START_S)
        self.keystone.publish("placement", self.url)
        return self

    def _answers(self) -> bool:
        assert self.process and self.process.poll() is None, (self.folder / "said.log").read_text()[-2000:]
        try:
            return requests.get(self.url, timeout=START_S).ok
        except requests.ConnectionError:
            return False

    def stop(self) -> None:
        """Kill Placement, to simulate an outage; `start` brings it back on the same port with the same data."""
        if self.process:
            self.process.kill()
            self.process.wait()

    def call(self, method: str, path: str, body: Any = None, version: str = "1.39") -> Any:
        """Call Placement's API as admin; return the decoded answer, {} if it has no body.

        Fails if the status is 400 or more.
        """
        headers = {"X-Auth-Token": self.keystone.token("admin"), "OpenStack-API-Version": f"placement {version}"}
        answer = requests.request(method, self.url + path, json=body, headers=headers, timeout=START_S)
        assert answer.ok, f"{method} {path}: {answer.status_code} {answer.text}"
        return answer.json() if answer.content else {}

    def create_compute_provider(self, name: str) -> str:
        """Create a compute provider as Nova does, and return its uuid."""
        made = str(uuid.uuid4())
        self.call("POST", "/resource_providers", {"uuid": made, "name": name})
        inventories = {"VCPU": {"total": 64}, "MEMORY_MB": {"total": 65536}}
        body = {"resource_provider_generation": 0, "inventories": inventories}
        self.call("PUT", f"/resource_providers/{made}/inventories", body)
        return made

    def tree(self, root: str) -> dict[str, dict[str, Any]]:
        """Return the providers below `root` by name, each with its generation, inventories and traits."""
        found = self.call("GET", f"/resource_providers?in_tree={root}")["resource_providers"]
        return {entry["name"]: entry | self.read_provider(entry["uuid"]) for entry in found if entry["uuid"] != root}

    def read_provider(self, provider: str) -> dict[str, Any]:
        """Return the inventories and the sorted traits of a provider."""
        path = f"/resource_providers/{provider}"
        inventories = self.call("GET", f"{path}/inventories")["inventories"]
        return {"inventories": inventories, "traits": sorted(self.call("GET", f"{path}/traits")["traits"])}

    def allocate(self, provider: str, amount: int, resource_class: str = "FPGA") -> str:
        """Allocate `amount` units of a provider to a new consumer, and return the consumer's uuid."""
        consumer, who = str(uuid.uuid4()), str(uuid.uuid4())
        body = {"allocations": {provider: {"resources": {resource_class: amount}}}, "consumer_generation": None}
        body |= {"project_id": who, "user_id": who, "consumer_type": "INSTANCE"}
        self.call("PUT", f"/allocations/{consumer}", body)
        return consumer

    def release(self, consumer: str) -> None:
        """Delete all allocations of a consumer."""
        self.call("DELETE", f"/allocations/{consumer}")


def _migrate(placement: Placement) -> None:
    """Have Placement make its tables, with its own command."""
    command = environments.python("placement").with_name("placement-manage")
    done = subprocess.run(
        [command, "--config-dir", placement.folder, "db", "sync"],
        capture_output=True,
        text=True,
        check=False,
        env=placement.environ(),
    )
    assert done.returncode == 0, done.stderr[-2000:]


@contextmanager
def running(keystone: Keystone) -> Iterator[Placement]:
    """Run a separate, empty Placement on a free port for the block. Raises environments.Unavailable."""
    environments.python("placement")
    with tempfile.TemporaryDirectory(prefix="cyborg-pl-") as made:
        folder = Path(made)
        one = Placement(
            folder, keystone, Postgres(folder / "postgres", os.environ.get("CYBORG_PG_BIN", ""), durable=False)
        )
        try:
            one.prepare()
            yield one.start()
        finally:
            one.stop()
            one.postgres.stop()


@pytest.fixture(scope="session")
def placement(pytestconfig: pytest.Config, keystone: Keystone) -> Iterator[Placement]:
    """Placement for the whole test session; the test is skipped with one loud line if its packages are unavailable."""
    environments.wanted(pytestconfig, "placement")
    with running(keystone) as one:
        yield one
