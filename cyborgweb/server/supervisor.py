"""The supervisor behind `make up`: runs the database, the web process, two clusters and an agent on one machine.

This process does not import Django: it must start fast and must survive failures of the other processes. Every child
has its own session, so a signal to the process group (Ctrl-C) reaches only the supervisor. Every long-running child
ends with the supervisor, also when the supervisor is killed with SIGKILL.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

from accelerators.runtime import metric_files
from cyborgweb.database.postgres import Postgres, PostgresError
from cyborgweb.server.child_process import Child, say
from cyborgweb.server.cluster_watchdog import TickWatch
from cyborgweb.settings.keys import Keys, keys, listen_address
from drivers.configuration import ConfigurationError
from drivers.isolation.process import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
STOP_S = {"web": 2.5, "agent": 2.0, "work": 1.5, "ingest": 1.5}
"""Order in which the children are stopped, and the seconds each may take before SIGKILL. Together with PostgreSQL's
shutdown the stop is meant to take less than 10 s."""
PREPARE_S = 3.0
"""Seconds that `manage.py prepare` may go on after the supervisor was told to stop; then it is killed."""
TIMELY_S = 8.0
"""Seconds within which all children are to be stopped."""
COUNTS = "metrics"
"""Folder in the state directory where every process stores its metrics (`accelerators.runtime.metric_files`)."""


SAMPLE_DRIVERS = """\
# The driver settings of this machine's agent, one table for each driver. Written once; edit it as you like.

[fake_driver]
# The control file describes the simulated hardware. `python -m drivers.fake` changes it; --help lists what it can do.
control_file = {control}

[pci_driver]
# The rule selects virtio functions, which every virtual machine has, so that some real PCI hardware is found.
# A function that the host itself uses (its disks, its network) is never offered.
# vfs = 4 in a rule divides a card into 4 virtual functions when it is enabled; bind = "vfio-pci" binds what is handed
# out to that kernel driver. acts = ["install", "uninstall"] in any table allows only these acts of its driver here.
rules = [{{ vendor = "1af4", type = "FPGA" }}]
"""


class StartError(RuntimeError):
    """The product cannot be started. The message says why, in one sentence for the person at the terminal."""


class Supervisor:
    """Starts all processes, restarts those that end, and stops them in order. `agent=False` starts no agent."""

    def __init__(self, settings: Keys, *, agent: bool = True) -> None:
        self.settings, self.agent = settings, agent
        self.selector = selectors.DefaultSelector()
        self.children: dict[str, Child] = {}
        self.postgres: Postgres | None = None
        self.postgres_retry = 0.0
        self.watch: TickWatch | None = None
        self.stopping = False
        self.gate = self.after = -1
        self.wake_r, self.wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Start everything and supervise it until SIGINT or SIGTERM; then stop everything and return.

        Raises StartError, ConfigurationError or PostgresError when the start fails; what was started is stopped first.
        """
        self._catch_signals()
        lock = self._own_state_directory()
        listener = _listener(self.settings.listen, "CYBORG_LISTEN")
        agents = self._agents_listener()
        metric_files.clear(self.settings.state / COUNTS)
        try:
            self._start_database()
            self._start_web(listener, agents)
            facts = self._prepare(self._for_the_agent(listener) if self.agent else [])
            if not self.stopping:
                self._start_others(facts)
                self._greet(listener, agents, facts)
            while not self.stopping:
                self._turn()
        except PostgresError:
            if not self.stopping:
                raise
        finally:
            self._stop()
            listener.close()
            if agents:
                agents.close()
            lock.close()

    def _catch_signals(self) -> None:
        signal.set_wakeup_fd(self.wake_w)
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the selector
        self.selector.register(self.wake_r, selectors.EVENT_READ)

    def _on_signal(self, signum: int, _frame: object) -> None:
        if not self.stopping:
            say("serve", f"{signal.Signals(signum).name}: stopping")
        self.stopping = True

    def _own_state_directory(self) -> IO[str]:
        state = self.settings.state
        try:
            state.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = (state / "lock").open("a")
        except OSError as error:
            raise StartError(
                f"the state directory {state} is not writable ({error.strerror}): set CYBORG_STATE_DIR"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StartError(
                f"another process of the product runs on {state}: stop it, or set CYBORG_STATE_DIR to another folder"
            ) from None
        return lock

    def _agents_listener(self) -> socket.socket | None:
        """Open the TLS listener for agents, after checking that its certificate is usable.

        Returns None when CYBORG_AGENT_LISTEN is not set: agents then connect to CYBORG_LISTEN. Raises StartError,
        ConfigurationError.
        """
        if not self.settings.agent_listen:
            return None
        from cyborgweb.server import tls

        tls.context(self.settings)
        tls.fingerprint(self.settings)
        return _listener(self.settings.agent_listen, "CYBORG_AGENT_LISTEN")

    def _start_database(self) -> None:
        if self.settings.database_url:
            return
        home = self.settings.state / "postgres"
        self.postgres = Postgres(home, self.settings.pg_bin, give_up=lambda: self.stopping)
        self.postgres.start()
        self.postgres.ensure_database("cyborg")
        say("postgres", f"accepting connections in {self.postgres.socket}")

    def _for_the_agent(self, listener: socket.socket) -> list[str]:
        """Return the options of `manage.py prepare` for this machine's own agent.

        When the sample drivers are used, they include the admission rule that accepts the sample drivers' devices.
        """
        samples = [] if "CYBORG_ENABLED_DRIVERS" in os.environ else ["--sample-rules"]
        return ["--address", _address(listener), *samples]

    def _prepare(self, more: list[str]) -> dict[str, Any]:
        """Run `manage.py prepare` with the options `more` in its own process: migrations, the first login and more.

        Returns the JSON object that it prints last; {} when the supervisor is to stop. In that case it has PREPARE_S
        to end, and is killed then: the uncommitted part of a migration is rolled back. Raises StartError if it fails.
        """
        preparing = subprocess.Popen(
            [sys.executable, ROOT / "manage.py", "prepare", *more],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=self._environment(),
            start_new_session=True,
        )
        said, left = "", PREPARE_S
        while preparing.returncode is None:
            try:
                said, _ = preparing.communicate(timeout=0.2)
            except subprocess.TimeoutExpired:
                left -= 0.2 if self.stopping else 0.0
                if left <= 0:
                    os.killpg(preparing.pid, signal.SIGKILL)
        if self.stopping:
            return {}
        if preparing.returncode:
            raise StartError("the database could not be prepared; the lines above give the reason")
        facts: dict[str, Any] = json.loads(said.splitlines()[-1])
        return facts

    def _environment(self, **more: str) -> dict[str, str]:
        state = {"CYBORG_STATE_DIR": str(self.settings.state), "DJANGO_SETTINGS_MODULE": "cyborgweb.settings.base"}
        state[metric_files.VARIABLE] = str(self.settings.state / COUNTS)
        return os.environ | {"PYTHONUNBUFFERED": "1", "CYBORG_PARENT": str(os.getpid())} | state | more

    def _start_web(self, listener: socket.socket, agents: socket.socket | None) -> None:
        """Start the web process: it loads its code now, and serves when `self.gate` is closed.

        So it can start while the database is prepared. The listeners are inherited, so that a restarted web process
        goes on with the same sockets.
        """
        after, self.gate = os.pipe()
        self.after = after
        command = [sys.executable, "-m", "cyborgweb.server.web", "--fd", str(listener.fileno()), "--after", str(after)]
        fds = [listener.fileno(), after]
        if agents:
            command += ["--agent-fd", str(agents.fileno())]
            fds.append(agents.fileno())
        self._start("web", command, self._environment(), tuple(fds))

    def _start_others(self, facts: dict[str, Any]) -> None:
        os.close(self.gate)
        manage, worker = str(ROOT / "manage.py"), "cyborgweb.settings.worker"
        for name in ("ingest", "work"):
            environment = self._environment(DJANGO_SETTINGS_MODULE=worker, Q_CLUSTER_NAME=name)
            self._start(name, [sys.executable, manage, "cluster", name], environment)
        if self.agent:
            environment = self._environment(CYBORG_JOIN_TOKEN=facts["join"], **self._agent_defaults())
            self._start("agent", [sys.executable, "-m", "agents.host.main", "--die-with-parent"], environment)
        self.watch = TickWatch(facts["jobs"], facts["dsn"], self.settings.tick_stall_s, self.wake_w)
        self.watch.start()

    def _start(self, name: str, command: list[str], environment: dict[str, str], fds: tuple[int, ...] = ()) -> None:
        self.children[name] = Child(name, command, environment, fds, self.selector, ROOT)
        self.children[name].start()

    def _agent_defaults(self) -> dict[str, str]:
        """Return the agent's variables for a start with the sample drivers, without those that the operator has set."""
        ours = {
            "CYBORG_AGENT_STATE_DIR": str(self.settings.state / "agent"),
            "CYBORG_ENABLED_DRIVERS": "fake_driver,pci_driver",
            "CYBORG_DRIVER_SETTINGS": str(self._sample_drivers()),
        }
        return {name: value for name, value in ours.items() if name not in os.environ}

    def _sample_drivers(self) -> Path:
        """Return the path of the agent's driver settings. Write the sample if there is none; never overwrite it."""
        path = self.settings.state / "drivers.toml"
        if not path.exists():
            control = json.dumps(str(self.settings.state / "fake-driver.json"))  # a TOML string, too
            path.write_text(SAMPLE_DRIVERS.format(control=control))
        return path

    def _greet(self, listener: socket.socket, agents: socket.socket | None, facts: dict[str, Any]) -> None:
        if agents:
            from cyborgweb.server import tls

            secure = _address(agents).replace("http:", "https:")
            say("serve", f"agents: {secure} (certificate sha256:{tls.fingerprint(self.settings)})")
        say("serve", f"console: {_address(listener)}/admin/")
        kept = f" (kept in {facts['login_file']})" if facts["login_file"] else ""
        say("serve", f"first login: {facts['login']}{kept}")

    def _turn(self) -> None:
        """Run one round of the loop, of 0.5 s at most: forward output, restart ended processes and stuck clusters."""
        for ready, _ in self.selector.select(timeout=0.5):
            if ready.fd == self.wake_r:
                _drain(self.wake_r)
            elif isinstance(ready.data, Child):
                ready.data.read()
        if self.stopping:
            return
        self._keep_database()
        for child in self.children.values():
            child.keep()
        for name, job in self.watch.seen() if self.watch else ():
            self._judge(self.children[name], job)

    def _judge(self, cluster: Child, stuck: str | None) -> None:
        """Kill a cluster that does not take up the job `stuck`, unless it may still be starting.

        The dead cluster is restarted in the next round. The time allowed for starting doubles with each quick death (16
        times at most); otherwise a busy machine would replace it before it has started. When the cluster takes up its
        jobs (`stuck` is None) and has run for that time, its deaths are reset to 0.
        """
        patience = self.settings.tick_stall_s + 3
        if stuck is None:
            cluster.deaths = 0 if cluster.running_for() > patience else cluster.deaths
        elif cluster.running_for() > patience * 2 ** min(cluster.deaths, 4):
            say("serve", f"cluster {cluster.name} does not take up job {stuck}: replacing it")
            cluster.kill()

    def _keep_database(self) -> None:
        if self.postgres is None or self.postgres.process is None or self.postgres.process.poll() is None:
            return
        if time.monotonic() < self.postgres_retry:
            return
        say("postgres", f"ended with {self.postgres.process.returncode}: starting it again")
        try:
            self.postgres.start()
        except PostgresError as error:
            if not self.stopping:
                say("postgres", str(error))
            self.postgres_retry = time.monotonic() + 5

    def _stop(self) -> None:
        end = time.monotonic() + TIMELY_S
        for name, patience in STOP_S.items():
            if child := self.children.get(name):
                child.stop(min(patience, max(0.2, end - time.monotonic())))
        if self.postgres:
            self.postgres.stop(timeout=max(1.0, end - time.monotonic()))
        say("serve", "stopped")


def _listener(listen: str, key: str) -> socket.socket:
    host, port = listen_address(listen, key)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        raise StartError(
            f"cannot listen on {host}:{port} ({error.strerror}): set {key}; with port 0 a free port is chosen"
        ) from None
    listener.listen(4096)
    return listener


def _address(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _drain(fd: int) -> None:
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        return


def main() -> None:
    """`python -m cyborgweb.server.supervisor`."""
    parser = argparse.ArgumentParser(
        prog="cyborgweb.server.supervisor",
        description="Run the whole control plane on this machine: database, web, clusters, agent. Ctrl-C stops it.",
        epilog="Configuration: CYBORG_… variables or a TOML file named by CYBORG_CONFIG; see docs/configuration.md.",
    )
    parser.add_argument("--leash", action="store_true", help="stop when the process that started this one ends")
    parser.add_argument(
        "--no-agent",
        dest="agent",
        action="store_false",
        help="start no agent on this machine, and make no join token and no sample rule (for a controller)",
    )
    arguments = parser.parse_args()
    if arguments.leash:
        die_with_parent(signal.SIGTERM)
    try:
        Supervisor(keys(), agent=arguments.agent).run()
    except (StartError, ConfigurationError, PostgresError) as error:
        print(f"cyborgweb: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)


if __name__ == "__main__":
    main()
