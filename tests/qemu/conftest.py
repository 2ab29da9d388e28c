"""Fixtures: a compute host in QEMU with the agent inside, and the product outside. All tests share one."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.qemu import boot, prepare
from tests.qemu.boot import SHARE, Guest
from tests.system.conftest import fresh_folder
from tests.system.product import ROOT, Product, running

HOST = "guest1"
DISK = "0000:01:00.0"
"""The disk with SR-IOV; it exists from the start."""
START_S = 60.0
"""Time for the agent to start or to see a change. It is slow, because QEMU translates every instruction."""
DRIVERS = f"""\
[generic_driver.backends.disks]
kind = "pci"
match = [{{ address = "{DISK}" }}]
desired = {{ vfs = 2, bind = "vfio-pci" }}
labels = {{ tier = "fast" }}

[pci_driver]
rules = [{{ vendor = "1b36", product = "0010" }}]
"""
"""The generic driver is first, so `pci_driver` does not offer the disk of its backend a second time."""

ROLES = ("admin", "service")
_guest: pytest.StashKey[Guest] = pytest.StashKey()


@dataclass
class GuestLab:
    """The guest as a compute host of the product, with helpers for its API."""

    guest: Guest
    product: Product
    token: str
    service: str
    """The service token that Nova would send."""

    @property
    def exit_status_file(self) -> Path:
        """Return the path of the file that exists when the agent has ended; it contains the exit status."""
        return self.guest.share / "agent.ended"

    def ask(self, path: str, **fields: Any) -> Any:
        """Call the product's own API: POST with `fields` as the body, or GET without."""
        return self.call("POST" if fields else "GET", f"/api/{path}", fields or None)

    def call(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request as an administrator with Nova's service token; return the decoded JSON response."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.product.port}{path}",
            method=method,
            data=json.dumps(body).encode() if body else None,
            headers={
                "X-Auth-Token": self.token,
                "X-Service-Token": self.service,
                "Content-Type": "application/json",
                "Accept": "application/json",
            },
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def devices(self) -> dict[str, dict[str, Any]]:
        """Return the devices of this host from the API, by PCI address."""
        return {one["address"]: one for one in self.ask(f"devices/?host={HOST}")["results"]}

    def run_command(self, op: str, **about: Any) -> dict[str, Any]:
        """Place a command, wait for its end and return it."""
        made = self.ask("commands/", op=op, **about)

        def ended() -> dict[str, Any] | None:
            self.check_agent()
            command: dict[str, Any] = self.ask(f"commands/{made['uuid']}/")
            return command if command["ended_at"] else None

        command: dict[str, Any] = self.product.until(ended, START_S, f"{op} has not ended")
        return command

    def virtual_functions(self) -> dict[str, str]:
        """Return the disk's virtual functions in the guest's kernel: PCI address → driver."""
        output = self.guest.run(
            f"cd /sys/bus/pci/devices/{DISK}; for one in virtfn*; do"
            " [ -e $one ] && echo $(readlink $one) $(readlink $one/driver); done; true"
        )
        words = [[Path(word).name for word in line.split()] for line in output.splitlines()]
        return {name: "".join(driver) for name, *driver in words}

    def offered_handles(self) -> dict[str, tuple[str, str]]:
        """Return the disk's attach handles that are not missing: PCI address → uuid and time of the last change."""
        found = self.ask(f"attach_handles/?device={self.devices()[DISK]['uuid']}&missing=false")["results"]
        address = "{domain}:{bus}:{device}.{function}"
        return {address.format(**one["info"]): (one["uuid"], one["updated_at"]) for one in found}

    def check_agent(self) -> None:
        """Check that the agent has not ended."""
        assert not self.exit_status_file.exists(), f"the agent has ended with {self.exit_status_file.read_text()}"

    def wait_for_device(self, address: str, **fields: str) -> dict[str, Any]:
        """Wait until the API shows the device with these fields; return it."""

        def find_device() -> dict[str, Any] | None:
            self.check_agent()
            device = self.devices().get(address)
            return device if device and device.items() >= fields.items() else None

        found: dict[str, Any] = self.product.until(
            find_device, START_S, lambda: f"{address} {fields}: {self.devices()}"
        )
        return found

    def start_agent(self, **environment: str) -> None:
        """Start `cyborg-agent` in the guest. It needs CYBORG_JOIN_TOKEN the first time only."""
        words = environment | {
            "CYBORG_AGENT_STATE_DIR": f"{SHARE}/agent",
            "CYBORG_ENABLED_DRIVERS": "generic_driver,pci_driver",
            "CYBORG_DRIVER_SETTINGS": f"{SHARE}/drivers.toml",
            "CYBORG_DRIVER_DEADLINE_S": "120",  # two drivers start at once, and QEMU translates every instruction
        }
        agent = Path(sys.executable).parent / "cyborg-agent"
        variables = " ".join(f"{name}='{value}'" for name, value in words.items())
        begin = f"cd {ROOT}; {variables} {agent} >>{SHARE}/agent.log 2>&1 & echo $! >{SHARE}/agent.pid"
        self.exit_status_file.unlink(missing_ok=True)
        self.guest.run(f"({begin}; wait $!; echo $? >{SHARE}/{self.exit_status_file.name}) >/dev/null 2>&1 &")

    def kill_agent(self) -> None:
        """Kill the agent with SIGKILL and wait until it has ended."""
        self.guest.run(f"kill -9 $(cat {SHARE}/agent.pid)")
        self.product.until(self.exit_status_file.exists, START_S, "the agent has not ended")


@pytest.fixture(scope="session")
def lab(pytestconfig: pytest.Config) -> Iterator[GuestLab]:
    """Start the product and the guest with its agent, without waiting for devices."""
    if why := prepare.explain_missing():
        pytest.skip(f"SKIPPED LEVEL 3: {why}")
    with fresh_folder() as folder, boot.running(HOST, folder) as guest:
        pytestconfig.stash[_guest] = guest
        # Compile here, because compiling inside the guest takes twenty times as long.
        subprocess.run([sys.executable, "-m", "compileall", "-q", "agents", "drivers"], check=True, cwd=ROOT)
        (guest.share / "drivers.toml").write_text(DRIVERS)
        with running(Product(folder / "state", {"CYBORG_ENABLED_DRIVERS": "fake_driver"})) as product:
            address = f"http://10.0.2.2:{product.port}"
            join = product.manage("join_token", HOST, "--address", address)[-1]
            started = GuestLab(
                guest, product, *(product.manage("api_token", f"t-{role}", "--role", role)[-1] for role in ROLES)
            )
            guest.wait_until_up()
            started.start_agent(CYBORG_JOIN_TOKEN=join)
            yield started


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of the guest to the report of a failed test."""
    report = yield
    guest = item.config.stash.get(_guest, None)
    if report.failed and guest:
        report.sections.append(("the guest", guest.log()))
    return report
