"""The state of a run, from which it can continue after a kill: JSON lines in `var/mutants`, one for each result."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.mutants.areas import PRODUCT, ROOT

FOLDER = ROOT / "var" / "mutants"


def product_hash() -> str:
    """Return a hash of the product's sources; results and recorded lines are valid only for these sources."""
    digest = hashlib.sha256()
    for room in PRODUCT:
        for path in sorted((ROOT / room).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def file_hash(path: Path) -> str:
    """Return a hash of one test file; if it changes, its tests are recorded again."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def commit() -> str:
    """Return the tested commit, with `+` if tracked files differ from it."""
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return _git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


class Lines:
    """An append-only file of JSON lines. A last line that was cut off by a kill is ignored."""

    def __init__(self, name: str) -> None:
        self.path = FOLDER / name

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        with self.path.open() as file:
            for line in file:
                if line.endswith("\n"):
                    yield json.loads(line)

    def append(self, entry: dict[str, Any]) -> None:
        """Append one line and flush it to the disk; first remove a last line that was cut off."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a+b") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    self._drop_cut_line()
            file.write(json.dumps(entry).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def _drop_cut_line(self) -> None:
        whole = self.path.read_bytes()
        os.truncate(self.path, whole.rfind(b"\n") + 1)

    def set_aside(self) -> None:
        """Rename the file, so that a new one begins and the old one is kept."""
        if self.path.exists():
            self.path.replace(self.path.with_suffix(".old"))
