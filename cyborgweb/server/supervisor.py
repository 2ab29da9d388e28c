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
from cyborgweb.errors import CyborgwebError
from cyborgweb.server.child_process import ChildProcess, log_line
from cyborgweb.server.cluster_watchdog import ClusterWatchdog
from cyborgweb.settings.keys import Keys, get_keys, parse_listen_address
from drivers.configuration import ConfigurationError
from drivers.isolation.process import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
STOP_S = {"web": 2.5, "agent": 2.0, "work": 1.5, "ingest": 1.5}
"""Order in which the children are stopped, and the seconds each may take before SIGKILL. Together with PostgreSQL's
shutdown the stop is meant to take less than 10 s."""
PREPARE_S = 3.0
"""Seconds that `manage.py prepare` may go on after the supervisor was told to stop; then it is killed."""
STOP_DEADLINE_S = 8.0
"""Seconds within which all children are to be stopped."""
METRICS_FOLDER = "metrics"
"""Folder in the state directory where every process stores its metrics (`accelerators.runtime.metric_files`)."""


SAMPLE_DRIVER_SETTINGS = """\
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


class StartError(CyborgwebError):
    """The product cannot be started. The message says why, in one sentence for the person at the terminal."""


class Supervisor:
    """Starts all processes, restarts those that end, and stops them in order. `with_agent=False` starts no agent."""

    def __init__(self, settings: Keys, *, with_agent: bool = True) -> None:
        self.settings, self.with_agent = settings, with_agent
        self.selector = selectors.DefaultSelector()
        self.children: dict[str, ChildProcess] = {}
        self.postgres: Postgres | None = None
        self.next_postgres_start_at = 0.0
        self.watchdog: ClusterWatchdog | None = None
        self.is_stopping = False
        self.start_gate_fd = self.wait_fd = -1
        self.wake_r, self.wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        """Start everything and supervise it until SIGINT or SIGTERM; then stop everything and return.

        If the start fails, stop what was started and raise StartError, ConfigurationError or PostgresError.
        """
        self._catch_signals()
        lock = self._lock_state_directory()
        listener = _open_listener(self.settings.listen, "CYBORG_LISTEN")
        agent_listener = self._open_agent_listener()
        metric_files.delete_files_of_dead_processes(self.settings.state_path / METRICS_FOLDER)
        try:
            self._start_database()
            self._start_web(listener, agent_listener)
            facts = self._prepare_database(self._make_agent_options(listener) if self.with_agent else [])
            if not self.is_stopping:
                self._start_clusters_and_agent(facts)
                self._print_addresses(listener, agent_listener, facts)
            while not self.is_stopping:
                self._run_round()
        except PostgresError:
            if not self.is_stopping:
                raise
        finally:
            self._stop_everything()
            listener.close()
            if agent_listener:
                agent_listener.close()
            lock.close()

    def _catch_signals(self) -> None:
        """Make SIGINT and SIGTERM end the loop in `run`, and let every signal, also SIGCHLD, wake the selector."""
        signal.set_wakeup_fd(self.wake_w)
        for sig in (signal.SIGINT, signal.SIGTERM):
            signal.signal(sig, self._on_signal)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # wakes the selector
        self.selector.register(self.wake_r, selectors.EVENT_READ)

    def _on_signal(self, signum: int, _frame: object) -> None:
        """Note in `is_stopping` that everything must stop, and log the first such signal. The stopping is done in
        `run`.
        """
        if not self.is_stopping:
            log_line("serve", f"{signal.Signals(signum).name}: stopping")
        self.is_stopping = True

    def _lock_state_directory(self) -> IO[str]:
        """Create and lock the server's state directory. The lock is held while the returned file is open.

        Raises StartError if the directory is not writable or another server runs on it.
        """
        state = self.settings.state_path
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

    def _open_agent_listener(self) -> socket.socket | None:
        """Open the TLS listener for agents, after checking that its certificate is usable.

        If no certificate is configured or made yet, one is made. Returns None when CYBORG_AGENT_LISTEN is not set:
        agents then connect to CYBORG_LISTEN. Raises StartError if the address cannot be used, ConfigurationError if its
        value, the certificate or the file of announcements cannot be used.
        """
        if not self.settings.agent_listen:
            return None
        from agents.errors import AgentsError
        from agents.gateway.announcements import read_announcements
        from cyborgweb.server import tls

        tls.make_ssl_context(self.settings)
        tls.read_fingerprint(self.settings)
        if self.settings.agent_announcement_key:
            try:
                read_announcements(self.settings.agent_announcement_key, self.settings.announcements_path)
            except AgentsError as error:
                raise ConfigurationError(f"announcements of certificates: {error}") from None
        return _open_listener(self.settings.agent_listen, "CYBORG_AGENT_LISTEN")

    def _start_database(self) -> None:
        """Start the embedded PostgreSQL, wait until it accepts connections, and create its database. Do nothing if
        CYBORG_DATABASE_URL is set. Raises PostgresError if it does not start, or if a signal to stop arrives meanwhile.
        """
        if self.settings.database_url:
            return
        home = self.settings.state_path / "postgres"
        self.postgres = Postgres(home, self.settings.pg_bin, should_give_up=lambda: self.is_stopping)
        self.postgres.start()
        self.postgres.ensure_database("cyborg")
        log_line("postgres", f"accepting connections in {self.postgres.socket}")

    def _make_agent_options(self, listener: socket.socket) -> list[str]:
        """Return the options of `manage.py prepare` for this machine's own agent: its address, and `--sample-rules`
        unless CYBORG_ENABLED_DRIVERS is set.
        """
        samples = [] if "CYBORG_ENABLED_DRIVERS" in os.environ else ["--sample-rules"]
        return ["--address", _make_url(listener), *samples]

    def _prepare_database(self, options: list[str]) -> dict[str, Any]:
        """Run `manage.py prepare` with `options` in its own process: migrations, the first login and more.

        Returns the JSON object that it prints last; {} if the supervisor was told to stop meanwhile. In that case the
        process is killed unless it ends within PREPARE_S seconds; the uncommitted part of a migration is rolled back.
        Raises StartError if the process fails.
        """
        preparing = subprocess.Popen(
            [sys.executable, ROOT / "manage.py", "prepare", *options],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=self._make_environment(),
            start_new_session=True,
        )
        output, remaining_s = "", PREPARE_S
        while preparing.returncode is None:
            try:
                output, _ = preparing.communicate(timeout=0.2)
            except subprocess.TimeoutExpired:
                remaining_s -= 0.2 if self.is_stopping else 0.0
                if remaining_s <= 0:
                    os.killpg(preparing.pid, signal.SIGKILL)
        if self.is_stopping:
            return {}
        if preparing.returncode:
            raise StartError("the database could not be prepared; the lines above give the reason")
        facts: dict[str, Any] = json.loads(output.splitlines()[-1])
        return facts

    def _make_environment(self, **variables: str) -> dict[str, str]:
        """Return the environment of a child: our own, with the state directory, Django's settings, the folder of
        metrics, and `variables`, which override the others.
        """
        state = {"CYBORG_STATE_DIR": str(self.settings.state_path), "DJANGO_SETTINGS_MODULE": "cyborgweb.settings.base"}
        state[metric_files.FOLDER_VARIABLE] = str(self.settings.state_path / METRICS_FOLDER)
        return os.environ | {"PYTHONUNBUFFERED": "1", "CYBORG_PARENT": str(os.getpid())} | state | variables

    def _start_web(self, listener: socket.socket, agent_listener: socket.socket | None) -> None:
        """Start the web process: it loads its code now, and serves when `self.start_gate_fd` is closed.

        So its code is loaded while the database is still being prepared. The listeners are inherited, so that a
        restarted web process goes on with the same sockets.
        """
        after, self.start_gate_fd = os.pipe()
        self.wait_fd = after
        command = [
            sys.executable,
            "-m",
            "cyborgweb.server.web_server",
            "--fd",
            str(listener.fileno()),
            "--after",
            str(after),
        ]
        fds = [listener.fileno(), after]
        if agent_listener:
            command += ["--agent-fd", str(agent_listener.fileno())]
            fds.append(agent_listener.fileno())
        self._start_child("web", command, self._make_environment(), tuple(fds))

    def _start_clusters_and_agent(self, facts: dict[str, Any]) -> None:
        """Let the web process serve, then start the two clusters, the agent if one is wanted, and the watchdog. `facts`
        is what `_prepare_database` returned.
        """
        os.close(self.start_gate_fd)
        manage, worker = str(ROOT / "manage.py"), "cyborgweb.settings.worker"
        for name in ("ingest", "work"):
            environment = self._make_environment(DJANGO_SETTINGS_MODULE=worker, Q_CLUSTER_NAME=name)
            self._start_child(name, [sys.executable, manage, "cluster", name], environment)
        if self.with_agent:
            environment = self._make_environment(CYBORG_JOIN_TOKEN=facts["join"], **self._make_agent_defaults())
            self._start_child("agent", [sys.executable, "-m", "agents.host.main", "--die-with-parent"], environment)
        self.watchdog = ClusterWatchdog(facts["jobs"], facts["dsn"], self.settings.tick_stall_s, self.wake_w)
        self.watchdog.start()

    def _start_child(
        self, name: str, command: list[str], environment: dict[str, str], fds: tuple[int, ...] = ()
    ) -> None:
        """Start a process and supervise it under this name from now on."""
        self.children[name] = ChildProcess(name, command, environment, fds, self.selector, ROOT)
        self.children[name].start()

    def _make_agent_defaults(self) -> dict[str, str]:
        """Return the agent's default environment variables, which enable the sample drivers, without those that the
        operator has set. Writes the sample driver settings if there are none.
        """
        defaults = {
            "CYBORG_AGENT_STATE_DIR": str(self.settings.state_path / "agent"),
            "CYBORG_ENABLED_DRIVERS": "fake_driver,pci_driver",
            "CYBORG_DRIVER_SETTINGS": str(self._ensure_driver_settings()),
        }
        return {name: value for name, value in defaults.items() if name not in os.environ}

    def _ensure_driver_settings(self) -> Path:
        """Return the path of the agent's driver settings. Write the sample if there is none; never overwrite it."""
        path = self.settings.state_path / "drivers.toml"
        if not path.exists():
            control = json.dumps(str(self.settings.state_path / "fake-driver.json"))  # a TOML string, too
            path.write_text(SAMPLE_DRIVER_SETTINGS.format(control=control))
        return path

    def _print_addresses(
        self, listener: socket.socket, agent_listener: socket.socket | None, facts: dict[str, Any]
    ) -> None:
        """Write the agents' URL with its fingerprint, the console's URL and how to log in first to the log."""
        if agent_listener:
            from cyborgweb.server import tls

            agents_url = _make_url(agent_listener).replace("http:", "https:")
            log_line("serve", f"agents: {agents_url} (certificate sha256:{tls.read_fingerprint(self.settings)})")
        log_line("serve", f"console: {_make_url(listener)}/admin/")
        log_line("serve", f"first login: {describe_first_login(facts, to_terminal=sys.stderr.isatty())}")

    def _run_round(self) -> None:
        """Run one round of the loop: wait at most 0.5 s for output or a signal, forward the children's output, and
        restart processes that have ended and clusters that are stuck. Once stopping has begun, only forward output.
        """
        for ready, _ in self.selector.select(timeout=0.5):
            if ready.fd == self.wake_r:
                _drain_pipe(self.wake_r)
            elif isinstance(ready.data, ChildProcess):
                ready.data.forward_output()
        if self.is_stopping:
            return
        self._restart_dead_database()
        for child in self.children.values():
            child.keep_running()
        for name, job in self.watchdog.take_results() if self.watchdog else ():
            self._replace_stuck_cluster(self.children[name], job)

    def _replace_stuck_cluster(self, cluster: ChildProcess, stuck_job: str | None) -> None:
        """Kill a cluster that does not take up the job `stuck_job`, unless it may still be starting.

        The dead cluster is restarted in the next round. The time allowed for starting doubles with each death in a row,
        up to 16 times the first value; otherwise a cluster on a busy machine would be killed before it has started.
        When the cluster takes up its jobs (`stuck_job` is None) and has run longer than the first, undoubled value,
        `deaths` is reset to 0.
        """
        start_allowance_s = self.settings.tick_stall_s + 3
        if stuck_job is None:
            cluster.deaths = 0 if cluster.get_uptime_s() > start_allowance_s else cluster.deaths
        elif cluster.get_uptime_s() > start_allowance_s * 2 ** min(cluster.deaths, 4):
            log_line("serve", f"cluster {cluster.name} does not take up job {stuck_job}: replacing it")
            cluster.kill()

    def _restart_dead_database(self) -> None:
        """Start the embedded database again if it has ended, and wait until it accepts connections or has failed.

        A failed start is logged, and the next one is tried after 5 s at the earliest.
        """
        if self.postgres is None or self.postgres.process is None or self.postgres.process.poll() is None:
            return
        if time.monotonic() < self.next_postgres_start_at:
            return
        log_line("postgres", f"ended with {self.postgres.process.returncode}: starting it again")
        try:
            self.postgres.start()
        except PostgresError as error:
            if not self.is_stopping:
                log_line("postgres", str(error))
            self.next_postgres_start_at = time.monotonic() + 5

    def _stop_everything(self) -> None:
        """Stop the web process, the agent and the clusters, each within its limit from `STOP_S` and all within about
        `STOP_DEADLINE_S`. Then stop the embedded database, with the rest of that time, but at least 1 s for each
        signal.
        """
        end = time.monotonic() + STOP_DEADLINE_S
        for name, patience in STOP_S.items():
            if child := self.children.get(name):
                child.stop(min(patience, max(0.2, end - time.monotonic())))
        if self.postgres:
            self.postgres.stop(timeout=max(1.0, end - time.monotonic()))
        log_line("serve", "stopped")


def describe_first_login(facts: dict[str, Any], *, to_terminal: bool) -> str:
    """Return how to log in first, for the log: the password only if this start created it and the log is a terminal.

    Otherwise the log may be kept where others can read it, so it names the file with the password. `facts` is what
    `manage.py prepare` printed. Raises OSError if the file cannot be read.
    """
    file = facts["login_file"]
    if not file:
        return str(facts["login"])
    if facts["login_is_new"] and to_terminal:
        return f"{Path(file).read_text().strip()} (kept in {file})"
    return f"admin, with the password in {file} unless it was changed"


def _open_listener(listen: str, key: str) -> socket.socket:
    """Return a listening socket for an ADDRESS:PORT value; `key` is the name of its configuration key, for messages.

    Raises ConfigurationError if the value is not an address and a port, StartError if the address cannot be used.
    """
    host, port = parse_listen_address(listen, key)
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


def _make_url(listener: socket.socket) -> str:
    """Return the http URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _drain_pipe(fd: int) -> None:
    """Read everything that the non-blocking pipe holds."""
    try:
        while os.read(fd, 4096):
            pass
    except BlockingIOError:
        return


def main() -> None:
    """Run the supervisor with the options of the command line until a signal stops it. If the start fails, exit with
    status 2 and one sentence on stderr.
    """
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
        Supervisor(get_keys(), with_agent=arguments.agent).run()
    except (StartError, ConfigurationError, PostgresError) as error:
        print(f"cyborgweb: {error}", file=sys.stderr)  # noqa: T201
        sys.exit(2)


if __name__ == "__main__":
    main()
