"""Assign metric files to processes, and delete the files of dead processes. Does not import Django.

prometheus_client stores the metrics of each process in separate files, and adds them up when they are read. It names
the files after process ids by default; their number would grow for ever, because the clusters replace their workers all
day. Here a process takes the lowest free number instead, and continues the counters of the number's last holder, so
there are never more files per kind than processes that ran at the same time. A number is held by a file lock, which
ends with the process and is not inherited by a fork.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

FOLDER_VARIABLE = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder of the files; prometheus_client reads it, too.

Without it every process keeps its metrics in memory.
"""
PREALLOCATED_BYTES = 1 << 20
"""Bytes allocated in advance for each file.

The files are memory-mapped: a write that needs a new block on a full disk would kill the process.
"""

FILE_PREFIXES = ("counter", "histogram", "gauge_livesum")
"""Prefixes of file names: prometheus_client uses the kind of metric, and for gauges also the multiprocess mode."""
_NO_NUMBER = (0, "", -1)
_own_number: tuple[int, str, int] = _NO_NUMBER
"""This process's id, its number, and the file descriptor of the lock."""


def metrics_folder() -> Path | None:
    """Return the folder of the metric files, or None if metrics are kept in memory only."""
    return Path(os.environ[FOLDER_VARIABLE]) if os.environ.get(FOLDER_VARIABLE) else None


def acquire_process_number() -> str:
    """Return this process's number; take one at the first call, and a new one after a fork.

    Raise OSError if the files cannot be created; the process then holds no number.
    """
    global _own_number
    process, number, lock = _own_number
    if process != os.getpid():
        # Reset first: if this fails, the next call must not close the same descriptor, which may be another file then.
        _own_number = _NO_NUMBER
        if lock >= 0:
            os.close(lock)
        directory = metrics_folder()
        assert directory, f"{FOLDER_VARIABLE} is not set"
        _own_number = (os.getpid(), *_lock_free_number(directory))
        number = _own_number[1]
    return number


def delete_files_of_dead_processes(directory: Path) -> None:
    """Create the folder if needed, and delete all metric files of dead processes. Living processes keep theirs."""
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    for number in _lock_unused_numbers(directory):
        _delete_matching_files(directory, f"*_{number}.db")


def delete_gauges_of_dead_processes(directory: Path) -> None:
    """Delete the gauges of dead processes; keep their counters and histograms."""
    for number in _lock_unused_numbers(directory):
        _delete_matching_files(directory, f"gauge_live*_{number}.db")


def _lock_free_number(directory: Path) -> tuple[str, int]:
    """Lock the lowest free number and prepare its files; return the number and the descriptor of the lock.

    Gauges of the number's last holder are deleted. Raise OSError if the files cannot be created; the lock is released.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    number = 1
    while (lock := _try_file_lock(directory / f"{number}.lock")) is None:
        number += 1
    try:
        _delete_matching_files(directory, f"gauge_live*_{number}.db")
        for kind in FILE_PREFIXES:
            with (directory / f"{kind}_{number}.db").open("a+b") as file:
                os.posix_fallocate(file.fileno(), 0, PREALLOCATED_BYTES)
    except OSError:
        os.close(lock)
        raise
    return str(number), lock


def _lock_unused_numbers(directory: Path) -> Iterator[str]:
    """Yield the numbers that no process holds. Each is locked until the caller asks for the next one."""
    for path in directory.glob("*.lock"):
        # Skip our own lock file: closing any descriptor of it would release our lock.
        if (os.getpid(), path.stem) != _own_number[:2] and (lock := _try_file_lock(path)) is not None:
            yield path.stem
            os.close(lock)


def _try_file_lock(path: Path) -> int | None:
    """Lock the file, created if needed; return its descriptor, or None if another process holds the lock."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock


def _delete_matching_files(directory: Path, pattern: str) -> None:
    """Delete the files in `directory` whose names match the glob pattern; files that are gone already are no error."""
    for path in directory.glob(pattern):
        path.unlink(missing_ok=True)
