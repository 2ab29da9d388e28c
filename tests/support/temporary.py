"""`python -m tests.support.temporary`: print the folder for temporary files of the tests, for the Makefile.

It is `/dev/shm`, which is memory: there a small file costs a seventh of the CPU time that it costs on a disk, and no
test waits for a busy disk. It is the usual folder if TMPDIR is set, or if `/dev/shm` cannot be used.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

MEMORY = Path("/dev/shm")
NEEDED_BYTES = 4_000_000_000
"""Free space without which the memory is not used. The fast lane needs half a gigabyte, the system lane two."""


def choose_folder(memory: Path = MEMORY, needed_bytes: int = NEEDED_BYTES) -> str:
    """Return the folder for temporary files: `memory`, if programs in it can be executed and it has enough space."""
    usual = tempfile.gettempdir()
    if os.environ.get("TMPDIR") or not os.access(memory, os.W_OK | os.X_OK):
        return usual
    found = os.statvfs(memory)
    has_space = found.f_bavail * found.f_frsize >= needed_bytes
    return str(memory) if has_space and not found.f_flag & os.ST_NOEXEC else usual


if __name__ == "__main__":
    print(choose_folder())
