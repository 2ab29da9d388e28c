"""List the processes of this machine from /proc, so that a test can find, kill and follow processes of the product."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ObservedProcess:
    """One observed process. `started` distinguishes it from a later process with the same id."""

    pid: int
    parent: int
    started: int
    command: str

    def alive(self) -> bool:
        """Tell whether this process still runs and is not a zombie."""
        return find_process(self.pid) == self


def find_process(pid: int) -> ObservedProcess | None:
    """Return the process with the id `pid`; None if there is none or it is a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    if fields[0] in "ZX":
        return None
    # PostgreSQL rewrites its process title all the time; only the first word stays the same.
    words = command.split(" ")
    return ObservedProcess(
        pid, int(fields[1]), int(fields[19]), words[0] if command.startswith("postgres:") else command
    )


def list_processes() -> list[ObservedProcess]:
    """Return all processes of this machine, oldest first."""
    found = [find_process(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return sorted((one for one in found if one), key=lambda one: (one.started, one.pid))


def list_descendants(root: int) -> list[ObservedProcess]:
    """Return all descendants of the process with the id `root`, oldest first."""
    family, running = {root}, list_processes()
    while more := {one.pid for one in running if one.parent in family} - family:
        family |= more
    return [one for one in running if one.pid in family and one.pid != root]


def list_users_of_folder(folder: Path) -> list[ObservedProcess]:
    """Return the processes with `folder` in their command line, environment or working directory, except this one."""
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
    """Return those of the `known` processes that still run."""
    return [one for one in known if one.alive()]
