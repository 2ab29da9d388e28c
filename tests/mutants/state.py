"""What a run leaves behind so that it can go on after a kill: lines of JSON under `var/mutants`, one per result."""

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
    """A hash of the product's sources: results and recorded lines hold only for these."""
    digest = hashlib.sha256()
    for room in PRODUCT:
        for path in sorted((ROOT / room).rglob("*.py")):
            digest.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def file_hash(path: Path) -> str:
    """A hash of one test file: after a change its tests are recorded anew."""
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def commit() -> str:
    """The commit that is tested, with `+` if files differ from it."""
    changed = _git("status", "--porcelain", "--untracked-files=no")
    return _git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


class Lines:
    """A file of JSON lines that is only ever appended to. The last line may be cut off by a kill; it is ignored."""

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
        """Add one line; it is on the disk when this returns."""
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
        """Keep the old file under another name."""
        if self.path.exists():
            self.path.replace(self.path.with_suffix(".old"))
