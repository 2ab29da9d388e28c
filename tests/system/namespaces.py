"""Simulate several machines with Linux namespaces: each has its own network, host name and processes.

All are connected to one bridge; only root can make them. Killing the first process of a machine makes the kernel kill
all others, like a power cut. That process is killed when the test process ends, also by SIGKILL. The namespaces have no
names, so none of them remains. Used by `deployment`.
"""

from __future__ import annotations

import ctypes
import socket
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.system import processes
from tests.system.product import ROOT
from tests.system.simulated import BRIDGE, HOLD, UNSHARED

ESTABLISHED = "01"


@dataclass
class NetworkMachine:
    """One simulated machine. `pid` is the id of its first process, 0 while the machine is off."""

    network: BridgeNetwork
    name: str
    address: str
    pid: int = 0
    _holder: subprocess.Popen[str] | None = None

    def power_on(self) -> None:
        """Start the machine and connect its network card to the bridge.

        The MAC address is derived from the IP address, so the other machines' ARP tables stay right after a restart.
        """
        ready = f"hostname {self.name} && mount --bind {self.network.hosts} /etc/hosts && ip link set lo up"
        self._holder, self.pid = _start_holder(f"{ready} && echo ready && exec sleep infinity")
        card = "02:00:" + ":".join(f"{int(part):02x}" for part in self.address.split("."))
        self.network.run_ip(f"link add {self.name} type veth peer name eth0 address {card} netns {self.pid}")
        self.network.run_ip(f"link set {self.name} master bridge up")
        self.run_command("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run_command("ip", "link", "set", "eth0", "up")

    def power_off(self) -> None:
        """Kill all processes of the machine, after removing its network card: no peer receives a FIN or RST packet."""
        if self._holder is None:
            return
        self.network.run_ip(f"link delete {self.name}")
        self._holder.kill()
        self._holder.wait()
        self._holder, self.pid = None, 0

    def unplug_cable(self) -> None:
        """Disconnect the machine from the bridge; its processes go on."""
        self.network.run_ip(f"link set {self.name} down")

    def command(self, *words: str | Path) -> list[str | Path]:
        """Return the command line that runs these words on this machine."""
        return ["nsenter", "--target", str(self.pid), *UNSHARED, "--", "env", "-C", str(ROOT), *words]

    def run_command(self, *words: str | Path, env: Mapping[str, str] | None = None) -> str:
        """Run a command on this machine and return its standard output; fail with its standard error if it fails."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, f"{self.name}: {words}: {done.stderr[-3000:]}"
        return done.stdout

    def connect(self, address: str, port: int, timeout: float = 10.0) -> socket.socket:
        """Return a TCP connection that this process holds but that comes from this machine's network."""
        with self._enter_network():
            return socket.create_connection((address, port), timeout)

    @contextmanager
    def _enter_network(self) -> Iterator[None]:
        """Move the current thread to this machine's network for the block; sockets made in it stay in that network."""
        with open("/proc/thread-self/ns/net") as here, open(f"/proc/{self.pid}/ns/net") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(here.fileno())

    def callers(self, port: int) -> set[str]:
        """Return the addresses of the peers that are connected to this port of the machine."""
        lines = Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]
        rows = [line.split() for line in lines]
        return {_address(row[2]) for row in rows if row[1].endswith(f":{port:04X}") and row[3] == ESTABLISHED}


@dataclass
class BridgeNetwork:
    """The bridge between the machines, in its own namespace. `hosts` is every machine's /etc/hosts."""

    hosts: Path
    machines: list[NetworkMachine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._switch, self._pid = _start_holder(f"{BRIDGE} && echo ready && exec sleep infinity")

    def add_machine(self, name: str, address: str) -> NetworkMachine:
        """Make a machine, start it and return it."""
        made = NetworkMachine(self, name, address)
        self.machines.append(made)
        made.power_on()
        return made

    def run_ip(self, what: str) -> None:
        """Run `ip` with these arguments in the namespace of the bridge."""
        subprocess.run(["nsenter", "--target", str(self._pid), "--net", "ip", *what.split()], check=True)

    def close(self) -> None:
        """Kill all machines and remove the bridge."""
        for machine in self.machines:
            machine.power_off()
        self._switch.kill()
        self._switch.wait()


def _start_holder(script: str) -> tuple[subprocess.Popen[str], int]:
    """Start a process with its own namespaces, wait until it is ready, and return it and its first child's id."""
    holder = subprocess.Popen([*HOLD, script], stdout=subprocess.PIPE, text=True)
    assert holder.stdout and holder.stdout.readline() == "ready\n", "no namespaces"
    return holder, processes.list_descendants(holder.pid)[0].pid


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


def _address(text: str) -> str:
    """Convert an address of /proc/net/tcp, such as `0100007F:1F90`, to dotted notation without the port."""
    return socket.inet_ntoa(bytes.fromhex(text.partition(":")[0])[::-1])
