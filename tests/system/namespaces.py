"""Machines as namespaces: each with a network, a name and processes of its own, all on one bridge. For root alone.

A machine is its first process: with it the kernel ends all others, as a power cut does. It dies with whoever made it,
also by SIGKILL, and nothing is left of it, for none of its namespaces has a name. Used by `deployment`.
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
    """One of them. `pid` is its first process, 0 while it is without power."""

    network: BridgeNetwork
    name: str
    address: str
    pid: int = 0
    _holder: subprocess.Popen[str] | None = None

    def power_on(self) -> None:
        """Make it, and lead its cable to the bridge. The card is the same each time, so nobody's ARP table is wrong."""
        ready = f"hostname {self.name} && mount --bind {self.network.hosts} /etc/hosts && ip link set lo up"
        self._holder, self.pid = _start_holder(f"{ready} && echo ready && exec sleep infinity")
        card = "02:00:" + ":".join(f"{int(part):02x}" for part in self.address.split("."))
        self.network.run_ip(f"link add {self.name} type veth peer name eth0 address {card} netns {self.pid}")
        self.network.run_ip(f"link set {self.name} master bridge up")
        self.run_command("ip", "address", "add", f"{self.address}/24", "dev", "eth0")
        self.run_command("ip", "link", "set", "eth0", "up")

    def power_off(self) -> None:
        """All at once, and nobody hears a word: the cable goes first."""
        if self._holder is None:
            return
        self.network.run_ip(f"link delete {self.name}")
        self._holder.kill()
        self._holder.wait()
        self._holder, self.pid = None, 0

    def unplug_cable(self) -> None:
        """The cable is out; the machine runs on."""
        self.network.run_ip(f"link set {self.name} down")

    def command(self, *words: str | Path) -> list[str | Path]:
        """What runs these words on it."""
        return ["nsenter", "--target", str(self.pid), *UNSHARED, "--", "env", "-C", str(ROOT), *words]

    def run_command(self, *words: str | Path, env: Mapping[str, str] | None = None) -> str:
        """What it prints; fails with what it says when it fails."""
        done = subprocess.run(self.command(*words), capture_output=True, text=True, check=False, env=env)
        assert done.returncode == 0, f"{self.name}: {words}: {done.stderr[-3000:]}"
        return done.stdout

    def connect(self, address: str, port: int, timeout: float = 10.0) -> socket.socket:
        """A connection from this machine, for this process."""
        with self._enter_network():
            return socket.create_connection((address, port), timeout)

    @contextmanager
    def _enter_network(self) -> Iterator[None]:
        """This thread is in its network; a socket stays where it was made."""
        with open("/proc/thread-self/ns/net") as here, open(f"/proc/{self.pid}/ns/net") as there:
            _enter(there.fileno())
            try:
                yield
            finally:
                _enter(here.fileno())

    def callers(self, port: int) -> set[str]:
        """The addresses that are connected to this port of it."""
        lines = Path(f"/proc/{self.pid}/net/tcp").read_text().splitlines()[1:]
        rows = [line.split() for line in lines]
        return {_address(row[2]) for row in rows if row[1].endswith(f":{port:04X}") and row[3] == ESTABLISHED}


@dataclass
class BridgeNetwork:
    """The bridge, in a namespace of its own. `hosts` is every machine's /etc/hosts."""

    hosts: Path
    machines: list[NetworkMachine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._switch, self._pid = _start_holder(f"{BRIDGE} && echo ready && exec sleep infinity")

    def add_machine(self, name: str, address: str) -> NetworkMachine:
        """A new one, with power."""
        made = NetworkMachine(self, name, address)
        self.machines.append(made)
        made.power_on()
        return made

    def run_ip(self, what: str) -> None:
        """`ip …` where the bridge is."""
        subprocess.run(["nsenter", "--target", str(self._pid), "--net", "ip", *what.split()], check=True)

    def close(self) -> None:
        """The end of everything."""
        for machine in self.machines:
            machine.power_off()
        self._switch.kill()
        self._switch.wait()


def _start_holder(script: str) -> tuple[subprocess.Popen[str], int]:
    """A process with namespaces of its own, once it has said that it is ready; its first child's id."""
    holder = subprocess.Popen([*HOLD, script], stdout=subprocess.PIPE, text=True)
    assert holder.stdout and holder.stdout.readline() == "ready\n", "no namespaces"
    return holder, processes.list_descendants(holder.pid)[0].pid


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), "setns")


def _address(text: str) -> str:
    """`0100007F:1F90` of /proc/net/tcp, as people write it."""
    return socket.inet_ntoa(bytes.fromhex(text.partition(":")[0])[::-1])
