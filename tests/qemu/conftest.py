"""Fixtures: a compute host in QEMU with the agent inside, and the product outside. All tests share one."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
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
"""The disk with SR-IOV; it exists from the start, as do the other devices with a name here."""
PLAIN_DISKS = ("0000:04:00.0", "0000:05:00.0", "0000:06:00.0")
SECOND_CARD, CARD = "0000:07:00.0", "0000:08:00.0"
"""A network card with a Device Serial Number, in the slot `card`, and where another appears in the slot `second`."""
GPU, AUDIO, SERIAL_PORT = (f"0000:09:00.{number}" for number in range(3))
"""The three functions of one card, which share an IOMMU group."""
BOOT_DISPLAY = "0000:00:04.0"
START_S = 60.0
"""Time for the agent to start or to see a change. It is slow, because QEMU translates every instruction."""
DRIVERS = f"""\
[generic_driver.backends.disks]
kind = "pci"
match = [{{ address = "{DISK}" }}]
desired = {{ vfs = 2, bind = "vfio-pci" }}
labels = {{ tier = "fast" }}

[pci_driver]
rules = [
    {{ vendor = "1b36", product = "0010" }},
    {{ vendor = "8086", product = "10d3", bind = "vfio-pci" }},
    {{ class = "03*", bind = "vfio-pci" }},
    {{ class = "0[47]*", type = "FPGA" }},
]
"""
"""The generic driver is first, so `pci_driver` does not offer the disk of its backend a second time. The last rule
selects the audio function and the serial port: they are not offered although an operator selects them."""
PROFILE = "pci"

ROLES = ("admin", "service")
NOT_PLAYED = {
    "CONFIG_VFIO_DEVICE_CDEV": "VFIO device nodes of iommufd",
    "CONFIG_SAMPLE_VFIO_MDEV_MTTY": "mediated devices",
    "CONFIG_ZFS": "ZFS",
}
"""Features that are tested only with a model of the kernel, by the option that a real kernel would need."""
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

    def rescan(self) -> None:
        """Make the agent look at its hardware now: a mount, for example, is no event that it notices."""
        done = self.run_command("rescan", host=self._read_host()["uuid"])
        assert done["state"] == "succeeded", done

    def read_faults(self) -> dict[str, str]:
        """Return what `pci_driver` does not offer: PCI address → reason."""
        return dict(self._read_host()["drivers"]["pci_driver"]["faults"])

    def _read_host(self) -> dict[str, Any]:
        [host] = self.ask(f"hosts/?name={HOST}")["results"]
        found: dict[str, Any] = host
        return found

    def bind_function(self, device: str) -> dict[str, Any]:
        """Bind a function of the device (uuid) to a new instance; return the request, which is Bound."""
        bound = self._bind(device)
        assert bound["state"] == "Bound", bound
        return bound

    def check_not_given(self, device: str) -> None:
        """Check that no function of the device (uuid) can be bound to another instance."""
        with pytest.raises(urllib.error.HTTPError) as caught:
            self._bind(device)
        assert caught.value.code in (404, 409), caught.value.read().decode()

    def _bind(self, device: str) -> dict[str, Any]:
        [request] = self.call("POST", "/v2/accelerator_requests", {"device_profile_name": PROFILE})["arqs"]
        [part] = self.ask(f"deployables/?device={device}")["results"]
        values = {"hostname": HOST, "device_rp_uuid": part["rp_uuid"], "instance_uuid": str(uuid.uuid4())}
        patch = [{"op": "add", "path": f"/{name}", "value": value} for name, value in values.items()]
        self.call("PATCH", "/v2/accelerator_requests", {request["uuid"]: patch})
        bound: dict[str, Any] = self.call("GET", f"/v2/accelerator_requests/{request['uuid']}")
        return bound

    def release(self, request: dict[str, Any]) -> None:
        """Delete the requests of an instance, as Nova does when it deletes the instance."""
        self.call("DELETE", f"/v2/accelerator_requests?instance={request['instance_uuid']}")

    def describe_releases(self, device: str) -> list[str]:
        """Return why functions of the device are not offered: they were released, and a guest may still use them."""
        handles = self.ask(f"attach_handles/?device={device}")["results"]
        return [handle["not_offered"] for handle in handles if handle["not_offered"]]

    def run_python(self, code: str) -> str:
        """Run code of this checkout inside the guest, and return its output."""
        return self.guest.run(f"cd {ROOT} && {sys.executable} -c {shlex.quote(code)}")

    def start_python(self, code: str, *words: str) -> str:
        """Start code inside the guest, wait until it has created the file /run/held, and return its process id."""
        command = shlex.join([sys.executable, "-c", code, *words])
        process = self.guest.run(f"rm -f /run/held; {command} >/run/held.log 2>&1 & echo $!")
        self.guest.run(
            f"for _ in $(seq {START_S:.0f}); do [ -e /run/held ] && exit; sleep 1; done; cat /run/held.log; exit 1"
        )
        return process

    def read_kernel_driver(self, address: str) -> str:
        """Return the driver that a function is bound to in the guest's kernel; '' if it has none."""
        return Path(self.guest.run(f"readlink /sys/bus/pci/devices/{address}/driver", check=False)).name

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
            started.ask("profiles/", name=PROFILE, groups=[{"resources:CUSTOM_PCI": "1"}])
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print in red what the guest's kernel cannot show, and also what it could show although no test asks for it."""
    if config.stash.get(_guest, None) is None:
        return
    options = (prepare.CACHE / "config").read_text().splitlines()
    ways = [
        f"{what} ({'its kernel has' if {f'{name}=y', f'{name}=m'} & {*options} else 'its kernel is without'} {name})"
        for name, what in NOT_PLAYED.items()
    ]
    terminalreporter.write_line(f"ONLY MODELLED, not played in the guest: {', '.join(ways)}", red=True)
