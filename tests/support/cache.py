"""Keep results that tests prepare once in the user's cache folder: migrated databases, environments of other projects.

Every entry is named after a fingerprint of its sources, so a change of the sources makes another entry. The variable
`TEST_CACHE` names another folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNUSED_S = 30 * 24 * 3600.0
"""Seconds that an entry is kept after its last use."""
KEPT_ENTRIES = 10
"""The number of entries kept of a large kind, such as databases, of which every edit of a model makes another one."""


def cache_folder() -> Path:
    """Return the cache folder: `$TEST_CACHE`, else `cyborg-tests` in the user's cache folder. It is created if missing.

    If that folder cannot be written to, `.cache` in the checkout is used; if neither can, OSError is raised.
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    wanted = Path(os.environ.get("TEST_CACHE") or home / "cyborg-tests")
    for folder in (wanted, ROOT / ".cache"):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise OSError(f"neither {wanted} nor {ROOT / '.cache'} can be written to: set TEST_CACHE to a folder that can")


@contextmanager
def locked(name: str) -> Iterator[None]:
    """Hold the lock `name` for the block, so that only one process at a time makes an entry."""
    with (cache_folder() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fingerprint(*parts: bytes) -> str:
    """Return a fingerprint of this content: twelve hexadecimal digits of its SHA-256."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def mark_used(entry: Path) -> None:
    """Set the time of last use of `entry` to now, so that `delete_old_entries` keeps it."""
    os.utime(entry)


def replace_entry(entry: Path, new: Path) -> None:
    """Replace `entry` by the complete folder `new` beside it; the caller holds the lock of its name.

    Users of the former entry find the new one at the same path.
    """
    former = entry.with_name(f"{entry.name}.former")
    shutil.rmtree(former, ignore_errors=True)
    if entry.exists():
        entry.rename(former)
    new.rename(entry)
    shutil.rmtree(former, ignore_errors=True)


def delete_old_entries(name: str, kept: int | None = None) -> None:
    """Delete the entries of `name` that were not used for `UNUSED_S` seconds; the caller holds the lock `name`.

    With `kept`, delete also all but the `kept` most recently used entries. Entries of a longer name, such as
    `keystone-data` for `keystone`, are not touched. Remains of an entry whose preparation was interrupted are deleted
    like an entry.
    """
    pattern = re.compile(rf"{re.escape(name)}-[0-9a-f]{{12}}(\.\w+)?")
    found = [path for path in cache_folder().iterdir() if pattern.fullmatch(path.name)]
    used = {path: path.stat().st_mtime for path in found}
    oldest = time.time() - UNUSED_S
    for place, entry in enumerate(sorted(found, key=lambda path: used[path], reverse=True)):
        if used[entry] < oldest or (kept is not None and place >= kept):
            shutil.rmtree(entry, ignore_errors=True)
