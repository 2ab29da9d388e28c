"""State directories for the products of this lane."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cyborgweb.postgres import socket_folder


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short, private folder (a test's own name would not fit into a socket's address)."""
    with fresh() as path:
        yield path


class fresh:
    """A folder in /tmp, gone at the end with everything PostgreSQL made for a path that was too long."""

    def __enter__(self) -> Path:
        self.path = Path(tempfile.mkdtemp(prefix="cyborg-sys-"))
        return self.path

    def __exit__(self, *_: object) -> None:
        for data in self.path.rglob("postgres"):
            if (run := socket_folder(data / "run")).parent != data:
                shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)
