"""Simulation level 0, for drivers and executor: a host in a directory, whose /sys answers writes as the kernel does.

    host = ModelMachine(tmp_path)
    host.load("nvme", "1b36:0010")
    host.pci("0000:01:00.0", "0x1b36", "0x0010", "0x010802", group=7, vfs=4)
    host.write("/sys/bus/pci/devices/0000:01:00.0/sriov_numvfs", "2")      # or OSError with the kernel's errno
    driver.install(host.machine, settings, ask); await host.hand().write(path, value, timeout_s)

The rules are functions in `modelpci` (functions, drivers, SR-IOV) and `modelkinds` (mdev, firmware upload, QAT). The
state is in the files, so a Machine sees it. A change is complete, including its uevents, when `write` returns.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from drivers.errors import Denied, DriverError, Failed, Timeout, Unsupported, from_os
from drivers.machine import MAX_READ
from drivers.plan import Image
from tests.drivers.tree import FakeHost, TreeMachine
from tests.support import modelkinds, modelpci
from tests.support.modelpci import KernelDriver, Rule, refuse

RULES: dict[str, Rule] = modelpci.RULES | modelkinds.RULES
WRITE_ONLY = frozenset({"bind", "unbind", "drivers_probe", "rescan", "remove", "reset", "create", "cancel"})


class Model(TreeMachine):
    """The `Machine` of a model. It asks the model which nodes are open, because plain files can be opened twice."""

    def __init__(self, host: ModelMachine, **roots: str) -> None:
        super().__init__("node-1", **roots)
        self._host = host

    def read_bytes(self, path: str, limit: int = MAX_READ) -> bytes:
        """As `Machine.read_bytes`, but raise Denied for write-only attributes: root could read their plain files."""
        if path.rpartition("/")[2] in WRITE_ONLY:
            raise Denied(f"{path}: Permission denied")
        return super().read_bytes(path, limit)

    def is_open(self, path: str) -> bool:
        """As `Machine.is_open`, answered from the model's `held` nodes."""
        return path in self._host.held


class ModelMachine(FakeHost):
    """A `FakeHost` tree that reacts to writes.

    Writes fail with EACCES unless `privileged`, and with EROFS if `read_only`. `writes` lists every attempted write.
    `event(action, path)` is called for every uevent, in the kernel's order.
    """

    def __init__(self, root: Path, event: Callable[[str, str], None] = lambda action, path: None) -> None:
        super().__init__(root)
        self.state, self.etc = root / "state", root / "etc"
        roots = {"sys_root": self.sys, "proc_root": self.proc, "dev_root": self.dev, "state_root": self.state}
        roots |= {"etc_root": self.etc}
        self.tree_machine = Model(self, **{name: str(path) for name, path in roots.items()})
        self.machine = self.tree_machine
        self.event = event
        self.privileged, self.read_only = True, False
        self.writes: list[tuple[str, str]] = []
        self.resets: list[str] = []
        self.held: set[str] = set()
        self.drivers: dict[str, KernelDriver] = {}
        self.uploads: dict[str, str] = {}
        self.mdev_rooms: dict[Path, int] = {}
        self.exclusive: set[Path] = set()
        self._slow: set[str] = set()
        self._free = threading.Condition()
        for name in ("drivers_probe", "rescan"):
            self.file(self.sys / "bus/pci" / name, "")
        self.load("vfio-pci", vfio="group")

    # Methods for tests.

    def pci(
        self,
        address: str,
        vendor: str,
        device: str,
        pci_class: str,
        *,
        bus: str = "pci0000:00",
        group: int | None = None,
        vfs: int = 0,
        vf_device: str = "",
        offset: int = 1,
        **more: str,
    ) -> Path:
        """Plug in a PCI function and bind a matching kernel driver. `vfs` is how many virtual functions it can have.

        Return its directory. `group` is its IOMMU group; `offset` is the SR-IOV offset of the first virtual function.
        """
        path = super().pci(address, vendor, device, pci_class, bus=bus, group=None, **{"reset": "", **more})
        modelpci.link_function(self, path)
        if group is not None:
            modelpci.join_group(self, path, group)
        if vfs:
            modelpci.make_physical(self, path, vfs, vf_device or device, offset)
        modelpci.probe(self, path)
        return path

    def unplug(self, address: str) -> None:
        """Remove a PCI function physically, so that a rescan does not find it again."""
        modelpci.take_out(self, (self.sys / modelpci.DEVICES / address).resolve(), keep=False)

    def driver_of(self, address: str) -> str:
        """Return the name of the kernel driver that a function is bound to, or ''."""
        return self.machine.link(f"/sys/bus/pci/devices/{address}/driver")

    def load(
        self, name: str, *takes: str, sriov: bool = True, gives: int = 65535, vfio: Literal["", "group", "cdev"] = ""
    ) -> KernelDriver:
        """Load the module of a kernel driver. Functions that already exist are not bound to it.

        `vfio` makes it a driver of the VFIO family: one of a kernel with group nodes, or one with device nodes only.
        """
        for file in ("bind", "unbind"):
            self.file(self.sys / "bus/pci/drivers" / name / file, "")
        self.drivers[name] = KernelDriver(name, takes, sriov, gives, vfio=vfio)
        return self.drivers[name]

    @contextlib.contextmanager
    def holding(self, node: str) -> Iterator[None]:
        """Simulate a guest that has a node open: `/dev/vfio/N`, `/dev/vfio/devices/vfioN`, or an mdev by its uuid.

        Unbinding the function blocks until the block ends; removing the mdev fails with EBUSY.
        """
        self.held.add(node)
        try:
            yield
        finally:
            self._end(self.held, node)

    @contextlib.contextmanager
    def slow(self, path: str) -> Iterator[None]:
        """Make writes to this path hang in the kernel until the block ends; then they are carried out."""
        self._slow.add(path)
        try:
            yield
        finally:
            self._end(self._slow, path)

    def write(self, path: str, value: str) -> None:
        """Simulate one os.write to an attribute of /sys; raises OSError with the kernel's errno.

        A file below /state is created instead, or removed by an empty value; one below /etc can only be removed.
        """
        self.writes.append((path, value))
        file = self.real(path)
        if path.startswith("/state/") or (path.startswith("/etc/") and not value):
            return self.file(file, value) if value else file.unlink(missing_ok=True)
        if not file.is_file():
            raise refuse(errno.ENOENT, path)
        if self.read_only:
            raise refuse(errno.EROFS, path)
        rule = _rule(str(file.resolve().relative_to(self.sys.resolve())))
        if rule is None or not self.privileged:
            raise refuse(errno.EACCES, path)
        self.until(lambda: path not in self._slow)
        if value:  # Linux does not pass an empty write to the attribute
            rule(self, file.resolve(), value if file.name == "data" else value.strip())

    def hand(self) -> ModelHand:
        """Return a host writer for the executor."""
        return ModelHand(self)

    # Methods for the rules.

    def real(self, path: str) -> Path:
        """Return the real path of a path on the simulated host."""
        _, top, *rest = path.split("/")
        roots = {"sys": self.sys, "proc": self.proc, "dev": self.dev, "state": self.state, "etc": self.etc}
        return roots[top].joinpath(*rest)

    def until(self, free: Callable[[], bool]) -> None:
        """Block without a time limit, as the kernel does, until `free()` is true."""
        with self._free:
            self._free.wait_for(free)

    def unlink(self, path: Path) -> None:
        """Remove all links to a device, in the places where the kernel puts links."""
        for folder in ("bus/*/devices", "bus/pci/drivers/*", "kernel/iommu_groups/*/devices", "class/mdev_bus"):
            for link in self.sys.glob(f"{folder}/{path.name}"):
                link.unlink()

    def relink(self, path: Path, target: Path | None) -> None:
        """Replace a link; with target None only remove it."""
        path.unlink(missing_ok=True)
        if target is not None:
            self.link(path, target)

    def _end(self, reasons: set[str], one: str) -> None:
        with self._free:
            reasons.discard(one)
            self._free.notify_all()


class ModelHand:
    """The double of `drivers.isolation.host_writer.HostWriter` for a model, with the same guarantees and errors.

    Each write runs in a daemon thread that is never joined, so a write that hangs does not block the test.
    """

    def __init__(self, host: ModelMachine) -> None:
        self._host = host
        self._running = 0

    @property
    def stuck(self) -> bool:
        """Whether a write has not ended yet, for example because it hangs in the kernel after its deadline."""
        return self._running > 0

    async def write(self, path: str, value: str, timeout_s: float) -> None:
        """As `HostWriter.write`: raises an error of `drivers.errors`."""
        await self._do(path, lambda: self._host.write(path, value), timeout_s)

    async def upload(
        self, path: str, kind: str, image: Image, timeout_s: float, progress: Callable[[int], None]
    ) -> None:
        """As `HostWriter.upload`; `progress` is called once, with 100 percent, after the upload."""
        await self._do(path, lambda: self._upload(path, kind, Path(image.path).read_bytes()), timeout_s)
        progress(100)

    async def close(self) -> None:
        """As `HostWriter.close`; does nothing."""

    def _upload(self, path: str, kind: str, data: bytes) -> None:
        if kind == "copy":
            self._host.file(self._host.real(path), data)
        elif error := modelkinds.uploaded(self._host, path, data):
            raise Failed(f"{path}: {error}")

    async def _do(self, path: str, work: Callable[[], Any], timeout_s: float) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[BaseException | None] = loop.create_future()

        def run() -> None:
            error: BaseException | None = None
            try:
                work()
            except OSError as refused:
                error = _meant(refused, path)
            except DriverError as failed:
                error = failed
            self._running -= 1
            with contextlib.suppress(RuntimeError):  # the test and its event loop have ended
                loop.call_soon_threadsafe(lambda: done.done() or done.set_result(error))

        self._running += 1
        threading.Thread(target=run, daemon=True).start()
        try:
            error = await asyncio.wait_for(done, timeout_s)
        except TimeoutError:
            raise Timeout(f"{path}: no answer within {timeout_s:g} s, the outcome is unknown") from None
        if error:
            raise error


def _meant(refused: OSError, path: str) -> DriverError:
    """Convert an OSError as `HostWriter` does.

    ENOENT for an attribute that exists means that the device's kernel driver does not support the operation.
    """
    if refused.errno == errno.ENOENT and str(refused.filename) != path:
        return Unsupported(f"{path}: the kernel's driver of this device cannot do that")
    return from_os(refused, path)


def _rule(path: str) -> Rule | None:
    return next((rule for glob, rule in RULES.items() if fnmatchcase(path, glob)), None)
