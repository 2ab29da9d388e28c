"""Which process writes which files of counts. Free of Django: the supervisor clears them, `meters` takes one.

prometheus_client keeps the counts of every process in files of its own and adds them up when somebody asks. Named after
process ids they would grow for ever, as the clusters replace their workers all day. So a process takes the lowest
number that nobody holds, by a lock that ends with the process and that a fork does not inherit, and counts on where
the last holder stopped: there are never more files than processes lived at once.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Names the folder; prometheus_client reads it, too. Without it every process counts for itself."""
ROOM_BYTES = 1 << 20
"""Set aside for each file: a write to memory that finds the disk full ends its process."""

KINDS = ("counter", "histogram", "gauge_livesum")
"""What the files' names begin with: prometheus_client names them by the kind, a gauge's by its mode, too."""
_NOTHING = (0, "", -1)
_held: tuple[int, str, int] = _NOTHING
"""Process, number, the lock's file descriptor."""


def folder() -> Path | None:
    """Where the counts are kept; None: nowhere but in memory."""
    return Path(os.environ[VARIABLE]) if os.environ.get(VARIABLE) else None


def mine() -> str:
    """This process's number, taken at its first count and anew after a fork. Raises OSError, and holds none then."""
    global _held
    process, number, lock = _held
    if process != os.getpid():
        # Forgotten first: closed once more it would be a file of somebody else.
        _held = _NOTHING
        if lock >= 0:
            os.close(lock)
        where = folder()
        assert where, f"{VARIABLE} is not set"
        _held = (os.getpid(), *_take(where))
        number = _held[1]
    return number


def clear(where: Path) -> None:
    """Forget what was counted by processes that are gone; makes the folder. Those that live count on."""
    where.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in _free(where):
        _remove(where, f"*_{number}.db")


def bury(where: Path) -> None:
    """Forget what processes that are gone said of themselves as of now; what they counted stays."""
    for number in _free(where):
        _remove(where, f"gauge_live*_{number}.db")


def _take(where: Path) -> tuple[str, int]:
    where.mkdir(parents=True, exist_ok=True, mode=0o700)
    number = 1
    while (lock := _locked(where / f"{number}.lock")) is None:
        number += 1
    try:
        _remove(where, f"gauge_live*_{number}.db")
        for kind in KINDS:
            with (where / f"{kind}_{number}.db").open("a+b") as file:
                os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)
    except OSError:
        os.close(lock)
        raise
    return str(number), lock


def _free(where: Path) -> Iterator[str]:
    """The numbers that no other process holds; each is held while it is looked at."""
    for path in where.glob("*.lock"):
        # To close our own once more would give it up.
        if (os.getpid(), path.stem) != _held[:2] and (lock := _locked(path)) is not None:
            yield path.stem
            os.close(lock)


def _locked(path: Path) -> int | None:
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _remove(where: Path, names: str) -> None:
    for path in where.glob(names):
        path.unlink(missing_ok=True)
