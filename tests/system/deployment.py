"""Two controllers, two compute hosts, database and proxy, each a machine of its own, run by the files of docs/deploy.

The commands and their environment are read from the units, the examples of environment files and nginx's configuration
are filled in as an operator would, so that what is tested is what is shipped. Used by `test_deployment`.
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
    """What a unit file starts, and with which rights; a test's folders stand in place of the installation's."""

    words: list[str]
    environment: dict[str, str]
    before: tuple[str, ...]


def read_unit(name: str, state: Path, filled: Mapping[str, str]) -> Unit:
    """The shipped unit `name`. `filled` are lines that the operator adds to the example of its environment file."""
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
    """All of it. `folder` holds everybody's state and logs."""

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
        """No process and no network is left."""
        self.network.close()
        for process in self.running.values():
            process.wait(STOP_S)

    def state_directory(self, name: str) -> Path:
        """A machine's state directory."""
        return self.folder / name

    def _share_secrets(self) -> None:
        """The nodes have one secret key and one certificate for agents, which here the proxy shows to people, too."""
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
        """What the proxy shows to people."""
        return self.state_directory("node1") / tls.CERTIFICATE_FILE

    def start(self, machine: str, name: str, *words: str | Path, env: Mapping[str, str] | None = None) -> None:
        """Run the words there as `name`; what they say goes into a log."""
        with (self.folder / f"{machine}-{name}.log").open("ab") as log:
            self.running[machine, name] = subprocess.Popen(
                self.machines[machine].command(*words), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env
            )

    def start_unit(self, machine: str, name: str, **filled: str) -> None:
        """As systemd does."""
        one = read_unit(name, self.state_directory(machine), self._environment_lines(name, machine) | filled)
        self.start(machine, name, *one.before, *one.words, env=environment() | one.environment)

    def stop(self, machine: str, name: str) -> int:
        """SIGTERM to the unit's main process; its exit code, in time."""
        process = self.running[machine, name]
        os.kill(processes.list_descendants(process.pid)[0].pid, signal.SIGTERM)
        return process.wait(STOP_S)

    def _environment_lines(self, name: str, machine: str) -> dict[str, str]:
        """What the operator writes into the environment file."""
        if name != "accelerators-agent":
            password = quote(PASSWORD, safe="")
            return {"CYBORG_DATABASE_URL": f"postgresql://accelerators:{password}@db.example.com/accelerators"}
        settings = self.folder / f"{machine}.toml"
        settings.write_text(f'[fake_driver]\ncontrol_file = "{self.control_file(machine)}"\n')
        return {"CYBORG_ENABLED_DRIVERS": "fake_driver", "CYBORG_DRIVER_SETTINGS": str(settings)}

    def control_file(self, host: str) -> Path:
        """What hardware a compute host has."""
        return self.folder / f"{host}.json"

    def _manage_command(self, node: str, words: tuple[str, ...]) -> tuple[list[str | Path], dict[str, str]]:
        one = read_unit("accelerators", self.state_directory(node), self._environment_lines("accelerators", node))
        return [*one.before, sys.executable, ROOT / "manage.py", *words], environment() | one.environment

    def manage(self, node: str, *words: str) -> list[str]:
        """`manage.py …` on a node, as its units run: the lines it prints."""
        command, env = self._manage_command(node, words)
        return self.machines[node].run_command(*command, env=env).splitlines()

    def start_managed(self, node: str, name: str, *words: str) -> None:
        """The same in the background."""
        command, env = self._manage_command(node, words)
        self.start(node, name, *command, env=env)

    def _begin_database(self) -> None:
        """PostgreSQL as a distribution sets it up: by password over the network."""
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
        """Ask the database, past all machines."""
        with psycopg.connect(host=str(self.state_directory("db")), user="postgres", dbname="accelerators") as own:
            return own.execute(statement, values).fetchall()

    def first_column(self, statement: str) -> set[str]:
        """The first column, as text."""
        return {str(row[0]) for row in self.rows(statement)}

    def start_proxy(self) -> None:
        """nginx with the shipped files, included as Debian's nginx.conf would."""
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
        """How many answers of this process alone the proxy has passed on."""
        return (self.state_directory("nginx") / "access.log").read_text().splitlines().count(f"{address}:{port}")

    def read_log(self, machine: str, name: str) -> str:
        """What a process said."""
        return (self.folder / f"{machine}-{name}.log").read_text(errors="replace")

    def log_ends(self) -> str:
        """The ends of all logs, for a failure."""
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {log.name}\n{log.read_text(errors='replace')[-1500:]}" for log in logs)
