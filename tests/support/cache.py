"""Keep what tests prepare once in the user's cache folder: migrated databases, environments of other projects.

Every entry is named after a fingerprint of what it was made from, so a change makes another entry. `TEST_CACHE` names
another folder.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEPT_ENTRIES = 3


def cache_folder() -> Path:
    """Return the folder, made if missing: `$TEST_CACHE`, else `cyborg-tests` in the user's cache folder.

    A home that cannot be written to gives way to `.cache` in the checkout.
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
    """Hold the lock `name`, so that one process at a time makes an entry."""
    with (cache_folder() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fingerprint(*parts: bytes) -> str:
    """Return twelve hexadecimal digits that stand for this content."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def delete_old_entries(prefix: str) -> None:
    """Delete all but the `KEPT_ENTRIES` entries used last whose name begins with `prefix`."""
    entries = sorted(cache_folder().glob(f"{prefix}-*/"), key=lambda path: path.stat().st_mtime, reverse=True)
    for entry in entries[KEPT_ENTRIES:]:
        shutil.rmtree(entry, ignore_errors=True)
