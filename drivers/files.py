"""Write files so that they survive a power failure: keys and journals of agents, images, backups."""

from __future__ import annotations

import os
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Replace the file atomically with the content, readable and writable by its owner only (mode 0600).

    The content is first written to a file in the same directory, which has the same mode from its creation and the
    suffix `.new` in place of the file's own, and then renamed. When this function returns, content and name are on
    disk. Raises OSError.
    """
    unfinished = path.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    with open(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    unfinished.rename(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Flush a directory to disk: file names created or renamed in it survive a power failure. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
