"""What runs on this machine, read from /proc: a test names a process by it, kills it, and sees that nothing is left."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ObservedProcess:
    """One process of one moment; `started` tells it from a later one with the same id."""

    pid: int
    parent: int
    started: int
    command: str

    def alive(self) -> bool:
        """Still the same one, and more than a zombie."""
        return find_process(self.pid) == self


def find_process(pid: int) -> ObservedProcess | None:
    """The process `pid`; None when there is none, or only what waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    # PostgreSQL rewrites its title as it works; what stays is enough to know it by.
    words = command.split(" ")
    return ObservedProcess(
        pid, int(fields[1]), int(fields[19]), words[0] if command.startswith("postgres:") else command
    )


def list_processes() -> list[ObservedProcess]:
    """All processes, oldest first."""
    found = [find_process(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return sorted((one for one in found if one), key=lambda one: (one.started, one.pid))


def list_descendants(root: int) -> list[ObservedProcess]:
    """The descendants of process `root`, oldest first."""
    family, running = {root}, list_processes()
    while more := {one.pid for one in running if one.parent in family} - family:
        family |= more
    return [one for one in running if one.pid in family and one.pid != root]


def list_users_of_folder(folder: Path) -> list[ObservedProcess]:
    """Processes that name `folder` in their command or environment, or work in it; never this one."""
    needle = os.fsencode(folder)
    return [one for one in list_processes() if one.pid != os.getpid() and _names(one.pid, needle)]


def _names(pid: int, needle: bytes) -> bool:
    here = f"/proc/{pid}"
    for source in ("cmdline", "environ"):
        try:
            if needle in Path(here, source).read_bytes():
                return True
        except OSError:
            continue
    try:
        return needle in os.fsencode(os.readlink(f"{here}/cwd"))
    except OSError:
        return False


def still_running(known: Iterable[ObservedProcess]) -> list[ObservedProcess]:
    """Which of them still run."""
    return [one for one in known if one.alive()]
