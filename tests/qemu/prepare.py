"""`make deps-sim`: install Debian's packages for simulated hardware, get a Debian kernel, and build its initramfs.

The kernel's package is unpacked into `.sim/` of the checkout and never installed. This runs with any Python, before
there is a virtual environment. `boot` gets the paths from here, and tests ask here whether everything is present.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = ROOT / ".sim"
PACKAGES = ("umockdev", "qemu-system-x86", "busybox-static", "btrfs-progs", "dmsetup")
EMULATOR = "qemu-system-x86_64"
KERNEL = "linux-image-amd64"
MODULES = ("virtio_pci", "virtio_net", "9pnet_virtio", "9p", "nvme", "vfio-pci", "vfio_iommu_type1")
"""The modules that the guest loads, after those they depend on. A module without a file is built into the kernel."""
LATER_MODULES = ("crc32c_generic", "btrfs", "dm-mod")
"""The modules that a test loads when it needs them, because they would make each boot slower."""
LATER_FOLDER = CACHE / "modules"
"""The files of the later modules, with a number before each name that tells the order in which they are loaded."""

INIT = r"""#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin:/sbin:/usr/bin:/usr/sbin
mount -t proc proc /proc; mount -t sysfs sys /sys; mount -t devtmpfs dev /dev
while read module; do insmod /modules/$module || echo "insmod $module failed"; done </modules/order
share=trans=virtio,version=9p2000.L,msize=262144
mount -t 9p -o $share,ro,cache=loose root /host || exec poweroff -f
for one in proc sys dev; do mount --rbind /$one /host/$one; done
mount -t tmpfs run /host/run; mkdir /host/run/share; export TMPDIR=/run
mount -t 9p -o $share,cache=mmap share /host/run/share || exec poweroff -f
hostname $GUEST_NAME
ip link set lo up; ip link set eth0 up; ip address add 10.0.2.15/24 dev eth0; ip route add default via 10.0.2.2
echo "guest: $(uname -r) after $(cut -d' ' -f1 /proc/uptime) s"
cd /; nc 10.0.2.2 $GUEST_PORT -e /bin/chroot /host /bin/sh
poweroff -f
"""
"""The guest's first process: mounts this machine's files as root (read-only) and the shared folder, and starts a shell.

The kernel passes unknown words NAME=VALUE of its command line as environment. The tests use the shell over TCP.
"""


class UnavailableError(Exception):
    """Something needed cannot be installed or downloaded; the text says what in one sentence."""


def compute_stamp() -> str:
    """Return a hash of this file; a kernel and initramfs with another stamp are built again."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


def explain_missing() -> str:
    """Return why level 3 (a virtual machine) cannot be simulated here; '' if it can."""
    if not shutil.which(EMULATOR):
        return "there is no QEMU here (make deps-sim)"
    if not (CACHE / "stamp").exists() or (CACHE / "stamp").read_text() != compute_stamp():
        return "there is no kernel to boot in .sim (make deps-sim)"
    return ""


def _list_absent_packages() -> list[str]:
    command = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return list(PACKAGES)
    present = {line.split()[0] for line in done.stdout.splitlines() if line.endswith(" installed")}
    return [name for name in PACKAGES if name not in present]


def _run(*command: str | Path, failure_text: str, cwd: Path | None = None) -> str:
    """Run a command and return its output; raise UnavailableError with `failure_text` and the error's last line."""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, env=environment)
    except FileNotFoundError as error:
        raise UnavailableError(f"{failure_text}: there is no {error.filename} here") from None
    if done.returncode:
        raise UnavailableError(f"{failure_text}: {(done.stderr.strip() or str(done.returncode)).splitlines()[-1]}")
    return done.stdout


def install_packages(absent: list[str]) -> None:
    """Install Debian packages; raise UnavailableError without root rights or apt."""
    if os.geteuid() or not shutil.which("apt-get"):
        raise UnavailableError(f"missing, and only root can install them: apt-get install {' '.join(absent)}")
    _run(
        *("apt-get", "install", "-y", "-qq", "--no-install-recommends", *absent),
        failure_text=f"apt-get cannot install {' '.join(absent)}",
    )


def fetch_kernel(into: Path) -> None:
    """Download Debian's kernel package and unpack it."""
    depends = _run("apt-cache", "depends", KERNEL, failure_text=f"apt does not know {KERNEL}")
    package = re.search(r"Depends: (linux-image-\d\S+)", depends)
    if not package:
        raise UnavailableError(f"apt does not know {KERNEL}: its package lists are empty or of another architecture")
    _run("apt-get", "download", "-qq", package[1], cwd=into, failure_text=f"{package[1]} cannot be downloaded")
    [archive] = into.glob("*.deb")
    _run("dpkg-deb", "-x", archive, into, failure_text=f"{archive.name} cannot be unpacked")


def _order_modules(modules: dict[str, Path], wanted: Iterable[str]) -> dict[str, bytes]:
    """Return the wanted modules by file name, each after those it depends on."""
    order: dict[str, bytes] = {}

    def add(name: str) -> None:
        path = modules.get(name.replace("-", "_"))
        if path is None or path.name in order:
            return
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        needs = re.search(rb"\0depends=([^\0]*)\0", content)
        for need in needs[1].decode().split(",") if needs else ():
            add(need)
        order[path.name] = content

    for name in wanted:
        add(name)
    return order


def build_initramfs(unpacked: Path, tree: Path) -> None:
    """Build the initramfs, and put it, the later modules, the kernel and its configuration into the cache."""
    found: Iterator[Path] = (unpacked / "lib" / "modules").rglob("*.ko*")
    files = {path.name.split(".")[0].replace("-", "_"): path for path in found}
    modules = _order_modules(files, MODULES)
    for name in ("bin", "modules", "proc", "sys", "dev", "host"):
        (tree / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", tree / "bin")
    for name, content in modules.items():
        (tree / "modules" / name).write_bytes(content)
    (tree / "modules" / "order").write_text("".join(f"{name}\n" for name in modules))
    (tree / "init").write_text(INIT)
    (tree / "init").chmod(0o755)
    pack = f"find . | busybox cpio -o -H newc >{CACHE}/initrd"
    _run("sh", "-c", pack, cwd=tree, failure_text="the initramfs cannot be packed")
    LATER_FOLDER.mkdir()
    later = {name: content for name, content in _order_modules(files, LATER_MODULES).items() if name not in modules}
    for number, (name, content) in enumerate(later.items()):
        (LATER_FOLDER / f"{number:02}-{name}").write_bytes(content)
    for name in ("vmlinuz", "config"):
        [file] = (unpacked / "boot").glob(f"{name}-*")
        shutil.copy(file, CACHE / name)
    (CACHE / "stamp").write_text(compute_stamp())


def main() -> int:
    """Install and build what is missing; return 0 if a virtual machine can be booted, 1 if not."""
    absent = _list_absent_packages()
    if not absent and not explain_missing():
        return 0
    try:
        if not os.geteuid() and shutil.which("apt-get"):
            _run("apt-get", "update", "-qq", failure_text="Debian's package lists cannot be had")
        if absent:
            install_packages(absent)
        shutil.rmtree(CACHE, ignore_errors=True)
        CACHE.mkdir()
        with tempfile.TemporaryDirectory(dir=CACHE) as folder:
            fetch_kernel(Path(folder))
            build_initramfs(Path(folder), Path(folder) / "tree")
    except (UnavailableError, OSError) as error:
        print(f"deps-sim: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
