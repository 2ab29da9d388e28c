"""Run a deployment of two controllers, two compute hosts, a database and a proxy with the files of docs/deploy.

The database and the proxy share one simulated machine; each of the others has its own. Commands and environment come
from the shipped systemd units; the example environment files and nginx's configuration are filled in as an operator
would do it. So the tests test the files that are shipped. Used by `test_deployment`.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psycopg

from cyborgweb.database import postgres
from cyborgweb.server import tls
from cyborgweb.settings.keys import Keys
from drivers.configuration import load_configuration
from tests.support.webserver import until
from tests.system import processes
from tests.system.namespaces import BridgeNetwork, NetworkMachine
from tests.system.product import ROOT, environment
from tests.system.simulated import NGINX, STREAM
from tests.system.unprivileged import as_plain_user, plain_user_id

FILES = ROOT / "docs/deploy"
CONSOLE_NAME, AGENTS_NAME, GATEWAYS_NAME = "accelerators.example.com", "agents.example.com", "gateways.example.com"
ADDRESSES = {
    "db.example.com": "10.77.0.2",
    "node1.example.com": "10.77.0.11",
    "node2.example.com": "10.77.0.12",
    "host1.example.com": "10.77.0.21",
    "host2.example.com": "10.77.0.22",
    "people.example.com": "10.77.0.31",
}
NODES, HOSTS = ("node1", "node2"), ("host1", "host2")
PASSWORD = "pass/word"
START_S = 60.0
STOP_S = 20.0
"""The units' TimeoutStopSec."""


@dataclass(frozen=True)
class Unit:
    """The command, environment and rights of a unit file, with the test's folders in place of the installation's."""

    words: list[str]
    environment: dict[str, str]
    before: tuple[str, ...]


def read_unit(name: str, state: Path, filled: Mapping[str, str]) -> Unit:
    """Return the shipped unit `name`. `filled` are variables that the operator adds to the example environment file."""
    said: dict[str, list[str]] = {}
    for line in (FILES / f"systemd/{name}.service").read_text().splitlines():
        key, _, value = line.partition("=")
        said.setdefault(key, []).append(value.replace("/opt/accelerators/.venv", sys.prefix))
    (words,), (home,), (file,) = said["ExecStart"], said["StateDirectory"], said["EnvironmentFile"]
    example = (FILES / "etc" / Path(file).name).read_text()
    lines = [word for line in said["Environment"] for word in shlex.split(line)]
    lines += re.findall(r"^\w+=.*$", example, re.MULTILINE)
    settings = dict(line.replace(f"/var/lib/{home}", str(state)).split("=", 1) for line in lines)
    assert said["NoNewPrivileges"] == ["yes"]
    kept = ",".join(f"+{right.removeprefix('CAP_').lower()}" for right in said["CapabilityBoundingSet"][0].split())
    rights = (f"--bounding-set=-all,{kept}",) if said["User"] == ["root"] else ()
    before = () if said["User"] == ["root"] else as_plain_user()
    return Unit(shlex.split(words), settings | filled, (*before, "setpriv", "--no-new-privs", *rights))


@dataclass
class Deployment:
    """The whole deployment. `folder` holds the state and the logs of all machines."""

    folder: Path
    machines: dict[str, NetworkMachine] = field(default_factory=dict)
    running: dict[tuple[str, str], subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.chmod(0o755)
        names = [f"{address} {name} {name.partition('.')[0]}" for name, address in ADDRESSES.items()]
        names += [f"{ADDRESSES['db.example.com']} {CONSOLE_NAME} {AGENTS_NAME}"]
        names += [f"{ADDRESSES[f'{node}.example.com']} {GATEWAYS_NAME}" for node in NODES]
        hosts = self.folder / "hosts"
        hosts.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        self.network = BridgeNetwork(hosts)
        try:
            for name, address in ADDRESSES.items():
                short = name.partition(".")[0]
                self.machines[short] = self.network.add_machine(short, address)
            self._share_secrets()
            self._begin_database()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Kill all machines, remove the network and wait for the processes."""
        self.network.close()
        for process in self.running.values():
            process.wait(STOP_S)

    def state_directory(self, name: str) -> Path:
        """Return the state directory of a machine."""
        return self.folder / name

    def _share_secrets(self) -> None:
        """Give both nodes the same secret key and the same TLS certificate, which the proxy of the tests uses, too."""
        first, second = (self.state_directory(node) for node in NODES)
        for state in (first, second):
            state.mkdir(mode=0o700)
        tls.read_fingerprint(load_configuration(Keys, {"CYBORG_STATE_DIR": str(first)}))
        (first / "secret-key").write_text(os.urandom(24).hex())
        for path in (first / "secret-key", first / tls.CERTIFICATE_FILE):
            shutil.copy(path, second)
        for path in (first, second, *first.iterdir(), *second.iterdir()):
            os.chown(path, plain_user_id(), -1)

    @property
    def certificate(self) -> Path:
        """The TLS certificate of the proxy."""
        return self.state_directory("node1") / tls.CERTIFICATE_FILE

    def start(self, machine: str, name: str, *words: str | Path, env: Mapping[str, str] | None = None) -> None:
        """Start a command on a machine as `name`; its output goes to the log of that name."""
        with (self.folder / f"{machine}-{name}.log").open("ab") as log:
            self.running[machine, name] = subprocess.Popen(
                self.machines[machine].command(*words), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )

    def start_unit(self, machine: str, name: str, **filled: str) -> None:
        """Start a shipped unit on a machine as systemd does; `filled` are further lines of its environment file."""
        one = read_unit(name, self.state_directory(machine), self._environment_lines(name, machine) | filled)
        self.start(machine, name, *one.before, *one.words, env=environment() | one.environment)

    def stop(self, machine: str, name: str) -> int:
        """Send SIGTERM to the unit's main process and return its exit code; raise TimeoutExpired after STOP_S."""
        process = self.running[machine, name]
        os.kill(processes.list_descendants(process.pid)[0].pid, signal.SIGTERM)
        return process.wait(STOP_S)

    def _environment_lines(self, name: str, machine: str) -> dict[str, str]:
        """Return the variables that the operator writes into the environment file of unit `name`."""
        if name != "accelerators-agent":
            password = quote(PASSWORD, safe="")
            return {"CYBORG_DATABASE_URL": f"postgresql://accelerators:{password}@db.example.com/accelerators"}
        settings = self.folder / f"{machine}.toml"
        settings.write_text(f'[fake_driver]\ncontrol_file = "{self.control_file(machine)}"\n')
        return {"CYBORG_ENABLED_DRIVERS": "fake_driver", "CYBORG_DRIVER_SETTINGS": str(settings)}

    def control_file(self, host: str) -> Path:
        """Return the path of the file that says which fake hardware a compute host has."""
        return self.folder / f"{host}.json"

    def _manage_command(self, node: str, words: tuple[str, ...]) -> tuple[list[str | Path], dict[str, str]]:
        one = read_unit("accelerators", self.state_directory(node), self._environment_lines("accelerators", node))
        return [*one.before, sys.executable, ROOT / "manage.py", *words], environment() | one.environment

    def manage(self, node: str, *words: str) -> list[str]:
        """Run `manage.py` on a node with the rights and environment of its unit, and return its output lines."""
        command, env = self._manage_command(node, words)
        return self.machines[node].run_command(*command, env=env).splitlines()

    def start_managed(self, node: str, name: str, *words: str) -> None:
        """Start `manage.py` in the same way in the background, as the process `name`."""
        command, env = self._manage_command(node, words)
        self.start(node, name, *command, env=env)

    def _begin_database(self) -> None:
        """Start PostgreSQL with password authentication over the network, as distributions set it up."""
        binaries, home, plain = (
            postgres.find_binaries(os.environ.get("CYBORG_PG_BIN", "")),
            self.state_directory("db"),
            as_plain_user(),
        )
        home.mkdir(mode=0o700)
        os.chown(home, plain_user_id(), -1)
        make = ["-D", home / "data", "-U", "postgres", "-E", "UTF8", "--locale=C", "--no-sync"]
        auth = ["--auth-local=trust", "--auth-host=scram-sha-256"]
        subprocess.run([*plain, binaries.folder / "initdb", *make, *auth], check=True, capture_output=True, cwd="/")
        with (home / "data/pg_hba.conf").open("a") as file:
            file.write("host accelerators accelerators 10.77.0.0/24 scram-sha-256\n")
        values = (f"unix_socket_directories={home}", "listen_addresses=db.example.com", "max_connections=200")
        settings = [word for value in (*values, "fsync=off", "jit=off") for word in ("-c", value)]
        self.start("db", "postgres", *plain, binaries.folder / "postgres", "-D", home / "data", *settings)
        until(self._create_database, START_S)

    def _create_database(self) -> bool:
        try:
            with psycopg.connect(host=str(self.state_directory("db")), user="postgres", autocommit=True) as own:
                own.execute(f"CREATE ROLE accelerators LOGIN PASSWORD '{PASSWORD}'")
                own.execute("CREATE DATABASE accelerators OWNER accelerators")
        except psycopg.OperationalError:
            return False
        return True

    def rows(self, statement: str, *values: object) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows. It uses the database's UNIX socket and not the simulated network."""
        with psycopg.connect(host=str(self.state_directory("db")), user="postgres", dbname="accelerators") as own:
            return own.execute(statement, values).fetchall()

    def first_column(self, statement: str) -> set[str]:
        """Run a statement and return the first column of its rows as text."""
        return {str(row[0]) for row in self.rows(statement)}

    def start_proxy(self) -> None:
        """Start nginx with the shipped files, which are included as Debian's nginx.conf would include them."""
        folder = self.state_directory("nginx")
        folder.mkdir()
        for path in (FILES / "nginx").iterdir():
            text = re.sub(r"/etc/ssl/accelerators/\w+\.pem", str(self.certificate), path.read_text())
            (folder / path.name).write_text(text)
        kept = [f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
        people = f"log_format seen '$upstream_addr'; access_log {folder}/access.log seen; {' '.join(kept)}"
        (folder / "nginx.conf").write_text(
            f"load_module {STREAM};\nuser root;\ndaemon off;\npid {folder}/pid;\nerror_log stderr;\nevents {{}}\n"
            f"include {folder}/accelerators-agents.conf;\nhttp {{ {people} include {folder}/accelerators.conf; }}\n"
        )
        self.start("db", "nginx", NGINX, "-p", folder, "-c", folder / "nginx.conf")

    def count_served(self, address: str, port: int) -> int:
        """Return how many requests the proxy has sent to this upstream address and to no other."""
        return (self.state_directory("nginx") / "access.log").read_text().splitlines().count(f"{address}:{port}")

    def read_log(self, machine: str, name: str) -> str:
        """Return the log of the process `name` of a machine."""
        return (self.folder / f"{machine}-{name}.log").read_text(errors="replace")

    def log_ends(self) -> str:
        """Return the ends of all logs, for the message of a failure."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)
