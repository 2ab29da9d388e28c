"""One virtual machine: QEMU without KVM, a Debian kernel, disks, cards, and two free slots.

Its root is the root of this machine, read-only over 9p, so this checkout and its virtual environment run inside. The
folder `share` is mounted as `SHARE` inside and survives a power-off. The tests use a shell inside and QMP outside.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TextIO

from tests.qemu import prepare

SHARE = "/run/share"
BOOT_S = 90.0
"""A boot takes 5 to 12 s on two idle cores; other processes may use these cores too."""
COMMAND_S = 60.0


TWIN = "e1000e,mac=52:54:00:00:00:07"
"""A network card for QEMU. Its Device Serial Number is made of its address, so two such cards have the same number."""
DISK_SIZE = 256 << 20
"""The size in bytes of a disk that keeps what is written to it; btrfs needs 109 MiB."""


class Guest:
    """A virtual machine that ends when the process that started it ends, even by SIGKILL.

    `iommu` is `on`, `off` (the kernel is told not to use it) or `absent`, as on a machine whose firmware hides it.
    """

    def __init__(self, name: str, folder: Path, iommu: Literal["on", "off", "absent"] = "on") -> None:
        self.name, self.folder, self.iommu = name, folder, iommu
        self.share = folder / "share"
        self.share.mkdir()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.shell: TextIO | None = None
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Switch the machine on without waiting; `wait_until_up` waits for the boot."""
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
        yield from (
            "-accel",
            "tcg,thread=multi",
            "-M",
            "q35",
            "-cpu",
            "max,vendor=GenuineIntel",
            "-m",
            "768",
            "-smp",
            "2",
        )
        yield from ("-kernel", f"{prepare.CACHE}/vmlinuz", "-initrd", f"{prepare.CACHE}/initrd")
        words = ("console=ttyS0", "quiet", "panic=-1", "mitigations=off", "random.trust_cpu=on")
        iommu = () if self.iommu == "absent" else (f"intel_iommu={self.iommu}",)
        # On a busy machine timers are late, and the guest may calibrate its cycle counter wrongly, so that its clock
        # runs away. These options skip the check of the timer and take the clock from QEMU.
        slow = ("no_timer_check", "tsc=unstable", "clocksource=acpi_pm")
        yield from ("-append", " ".join((*words, *iommu, *slow, f"GUEST_PORT={port}", f"GUEST_NAME={self.name}")))
        yield from ("-fsdev", "local,id=root,path=/,security_model=none,readonly=on,multidevs=remap")
        yield from ("-fsdev", f"local,id=share,path={self.share},security_model=none")
        yield from ("-device", share.format("root"), "-device", share.format("share"))
        yield from ("-netdev", "user,id=net", "-device", "virtio-net-pci,netdev=net,romfile=")

    def _devices(self) -> Iterator[str]:
        """Yield QEMU's options for what is plugged in, and for the free slots `free1`, `free2` and `second`.

        Each root port is a bus of its own, in this order, so the buses have the numbers 1 to 9.
        """
        functions = "sriov_max_vfs=4,sriov_vq_flexible=8,sriov_vi_flexible=4,max_ioqpairs=16,msix_qsize=17"
        if self.iommu != "absent":
            yield from ("-device", "intel-iommu")
        yield from ("-device", "VGA", "-device", "nvme-subsys,id=subsystem", "-chardev", "null,id=nowhere")
        for slot, port in enumerate(("taken", "free1", "free2", "disk1", "disk2", "disk3", "second", "card", "gpu"), 1):
            yield from ("-device", f"pcie-root-port,id={port},chassis={slot},slot={slot}")
        yield from ("-device", f"nvme,id=disk,serial=SRIOV1,subsys=subsystem,bus=taken,{functions}")
        yield from ("-drive", "if=none,id=blocks,driver=null-co,size=64M", "-device", "nvme-ns,drive=blocks,bus=disk")
        for disk in ("disk1", "disk2", "disk3"):
            image = self.folder / f"{disk}.raw"
            with image.open("wb") as file:
                file.truncate(DISK_SIZE)
            yield from ("-drive", f"if=none,id={disk}_image,format=raw,cache=unsafe,file={image}")
            yield from ("-device", f"nvme,serial={disk},bus={disk},drive={disk}_image")
        yield from ("-device", f"{TWIN},id=twin1,bus=card")
        yield from ("-device", "bochs-display,bus=gpu,addr=0.0,multifunction=on")
        yield from ("-device", "ich9-intel-hda,bus=gpu,addr=0.1")
        yield from ("-device", "pci-serial,chardev=nowhere,bus=gpu,addr=0.2")

    def wait_until_up(self) -> None:
        """Wait until the machine has booted, which is when its shell connects."""
        self.listener.settimeout(BOOT_S)
        try:
            connection = self.listener.accept()[0]
        except TimeoutError:
            raise AssertionError(f"the guest does not call within {BOOT_S} s") from None
        connection.settimeout(COMMAND_S)
        self.shell = connection.makefile("rw", newline="\n")

    def run(self, command: str, check: bool = True) -> str:
        """Run a shell command inside and return its output and errors; with `check` its status must be 0."""
        assert self.shell
        mark = "-- ended with "
        self.shell.write(f"sh -c {shlex.quote(command)} </dev/null 2>&1; echo; echo '{mark}'$?\n")
        self.shell.flush()
        output: list[str] = []
        for line in self.shell:
            if line.startswith(mark):
                text, status = "".join(output)[:-1], int(line.removeprefix(mark))
                assert status == 0 or not check, f"{command}: {status}\n{text}"
                return text.rstrip("\n")
            output.append(line)
        raise AssertionError(f"the guest hung up during {command}")

    def qmp(self, execute: str, **arguments: Any) -> Any:
        """Send a QMP command to QEMU and return its result; raise AssertionError if it fails."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(COMMAND_S)
            connection.connect(f"{self.folder}/qmp")
            with connection.makefile("rw") as lines:
                lines.readline()  # QEMU's greeting
                for one in ({"execute": "qmp_capabilities"}, {"execute": execute, "arguments": arguments}):
                    lines.write(json.dumps(one) + "\n")
                    lines.flush()
                    answer = next(output for output in map(json.loads, lines) if "event" not in output)
        assert "error" not in answer, answer["error"]
        return answer["return"]

    def power_cycle(self) -> None:
        """Switch the machine off and on and wait until it has booted; only the content of the share survives."""
        self.power_off()
        self.start()
        self.wait_until_up()

    def power_off(self) -> None:
        """Kill QEMU, as if the power failed."""
        if self.process:
            self.process.kill()
            self.process.wait()

    def log(self) -> str:
        """Return the end of the serial console's log and of every log on the share."""
        files = [self.folder / "serial.log", *sorted(self.share.glob("*.log"))]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-6000:]}" for path in files)


@contextlib.contextmanager
def running(name: str, folder: Path, iommu: Literal["on", "off", "absent"] = "on") -> Iterator[Guest]:
    """Start a guest, yield it while it boots, and switch it off at the end."""
    guest = Guest(name, folder, iommu)
    try:
        guest.start()
        yield guest
    finally:
        guest.power_off()
        guest.listener.close()
