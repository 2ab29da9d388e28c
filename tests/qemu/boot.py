"""One virtual machine: QEMU without KVM, a Debian kernel, an SR-IOV NVMe disk, two free slots. Used by every test here.

Its root is this machine's own, read-only over 9p, so what runs inside is this checkout with its virtual environment.
`share` is `SHARE` inside, and stays when it is switched off. The tester has a shell inside, and QMP outside.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from tests.qemu import prepare

SHARE = "/run/share"
BOOT_S = 90.0
"""A boot takes 5 to 12 s on two idle cores; others may share them."""
COMMAND_S = 60.0


class Guest:
    """A machine that dies with its tester, also when that one is killed with SIGKILL."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.share = folder / "share"
        self.share.mkdir()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.shell: TextIO | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Switch it on; `until_up` waits for it."""
        with (self.folder / "serial.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", prepare.EMULATOR, *self._machine(), *self._devices()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _machine(self) -> Iterator[str]:
        port = self.listener.getsockname()[1]
        share = "virtio-9p-pci,fsdev={0},mount_tag={0}"
        yield from ("-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio")
        yield from ("-qmp", f"unix:{self.folder}/qmp,server=on,wait=off")
        yield from ("-accel", "tcg,thread=multi", "-M", "q35", "-cpu", "max", "-m", "768", "-smp", "2")
        yield from ("-kernel", f"{prepare.CACHE}/vmlinuz", "-initrd", f"{prepare.CACHE}/initrd")
        words = ("console=ttyS0", "quiet", "panic=-1", "mitigations=off", "random.trust_cpu=on", "intel_iommu=on")
        # A late timer is the tester's busy processor. What the guest finds out about its cycle counter at boot may be
        # wrong for the same reason, and its clock then runs away: this one is the tester's own.
        slow = ("no_timer_check", "tsc=unstable", "clocksource=acpi_pm")
        yield from ("-append", " ".join((*words, *slow, f"GUEST_PORT={port}", f"GUEST_NAME={self.name}")))
        yield from ("-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap")
        yield from ("-fsdev", f"local,id=share,path={self.share},security_model=none")
        yield from ("-device", share.format("root"), "-device", share.format("share"))
        yield from ("-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile=")

    def _devices(self) -> Iterator[str]:
        """The disk with four virtual functions, and the slots `free1` and `free2`."""
        functions = "sriov_max_vfs=4,sriov_vq_flexible=8,sriov_vi_flexible=4,max_ioqpairs=16,msix_qsize=17"
        yield from ("-device", "intel-iommu", "-device", "nvme-subsys,id=subsystem")
        yield from ("-device", "pcie-root-port,id=taken,chassis=1,slot=1")
        yield from ("-device", f"nvme,id=disk,serial=SRIOV1,subsys=subsystem,bus=taken,{functions}")
        yield from ("-drive", "if=none,id=blocks,driver=null-co,size=64M", "-device", "nvme-ns,drive=blocks,bus=disk")
        for slot in (2, 3):
            yield from ("-device", f"pcie-root-port,id=free{slot - 1},chassis={slot},slot={slot}")

    def until_up(self) -> None:
        """Wait until it has booted, the first time or again: its shell calls."""
        self.listener.settimeout(BOOT_S)
        try:
            connection = self.listener.accept()[0]
        except TimeoutError:
            raise AssertionError(f"the guest does not call within {BOOT_S} s") from None
        connection.settimeout(COMMAND_S)
        self.shell = connection.makefile("rw", newline="\n")

    def run(self, command: str, check: bool = True) -> str:
        """What a shell command inside prints, errors too; with `check` its status must be 0."""
        assert self.shell
        mark = "-- ended with "
        self.shell.write(f"sh -c {shlex.quote(command)} </dev/null 2>&1; echo; echo '{mark}'$?\n")
        self.shell.flush()
        said: list[str] = []
        for line in self.shell:
            if line.startswith(mark):
                text, status = "".join(said)[:-1], int(line.removeprefix(mark))
                assert status == 0 or not check, f"{command}: {status}\n{text}"
                return text.rstrip("\n")
            said.append(line)
        raise AssertionError(f"the guest hung up during {command}")

    def qmp(self, execute: str, **arguments: Any) -> Any:
        """One command to QEMU; its error is an AssertionError."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(COMMAND_S)
            connection.connect(f"{self.folder}/qmp")
            with connection.makefile("rw") as lines:
                lines.readline()  # its greeting
                for one in ({"execute": "qmp_capabilities"}, {"execute": execute, "arguments": arguments}):
                    lines.write(json.dumps(one) + "\n")
                    lines.flush()
                    answer = next(said for said in map(json.loads, lines) if "event" not in said)
        assert "error" not in answer, answer["error"]
        return answer["return"]

    def power_cycle(self) -> None:
        """Pull the plug and switch it on again: up on return. The share stays, all else is as at first."""
        self.power_off()
        self.start()
        self.until_up()

    def power_off(self) -> None:
        """Pull the plug."""
        if self.process:
            self.process.kill()
            self.process.wait()

    def log(self) -> str:
        """What its kernel and what runs inside said: the serial console, and every log on the share."""
        files = [self.folder / "serial.log", *sorted(self.share.glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in files)


@contextlib.contextmanager
def running(name: str, folder: Path) -> Iterator[Guest]:
    """A guest that is being switched on, and is switched off at the end."""
    guest = Guest(name, folder)
    try:
        guest.start()
        yield guest
    finally:
        guest.power_off()
        guest.listener.close()
