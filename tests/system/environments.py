"""Virtual environments of other projects' software, for the tests that talk to it: Keystone, the clients, Nova.

Each is made once from a locked file of `requirements/system/` and kept below `.venv-system/`, named after the lock's
content, so a changed lock makes another one. `TEST_ENVIRONMENTS` names another folder to keep them in. Where
the packages cannot be had, the tests that need them are skipped with one loud line.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "requirements" / "system"
INSTALL_S = 600.0


class Unavailable(RuntimeError):
    """An environment that cannot be made here; the message is one line that says why."""


_failed: dict[str, Unavailable] = {}


def cache() -> Path:
    """Where environments and prepared databases are kept between runs."""
    folder = Path(os.environ.get("TEST_ENVIRONMENTS", ROOT / ".venv-system"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextmanager
def locked(name: str) -> Iterator[None]:
    """One builder of `name` at a time, also among processes."""
    with (cache() / f"{name}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def fingerprint(*parts: bytes) -> str:
    """A short name for some content."""
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:12]


def python(name: str) -> Path:
    """The interpreter of environment `name`, made now if it is not there yet.

    Raises Unavailable, at once when the same run has already tried in vain.
    """
    if name in _failed:
        raise _failed[name]
    folder = _folder(name)
    with locked(name):
        if not (folder / "complete").exists():
            try:
                _make(name, folder, LOCKS / f"{name}.txt")
            except Unavailable as error:
                _failed[name] = error
                raise
    return folder / "bin" / "python"


def installed(*names: str) -> bool:
    """Whether these have been made already."""
    return all((_folder(name) / "complete").exists() for name in names)


def _folder(name: str) -> Path:
    lock = (LOCKS / f"{name}.txt").read_bytes()
    return cache() / f"{name}-{fingerprint(lock, sys.version.encode())}"


def wanted(config: pytest.Config, *names: str) -> None:
    """Have the environments; else skip the asking test, with one loud line for each that is missing."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        try:
            for name in names:
                python(name)
            return
        except Unavailable as error:
            why = str(error)
            print(f"\nSKIPPED: {why}", file=sys.stderr)
    pytest.skip(why)


def _make(name: str, folder: Path, lock: Path) -> None:
    print(f"\ninstalling the test environment {name} from {lock.relative_to(ROOT)}, once", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(folder)], name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(folder / "bin" / "python")]
    _run([*pip, "install", "-q", "--no-deps", "--require-hashes", "-r", str(lock)], name)
    (folder / "complete").touch()


def _run(command: list[str], name: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"environment {name}: its packages did not arrive within {INSTALL_S:.0f} s") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Unavailable(f"environment {name}: its packages cannot be installed here: {why}")


def main() -> None:
    """Make them all ahead of the tests; what cannot be had is said, and is no failure."""
    for lock in sorted(LOCKS.glob("*.txt")):
        try:
            print(f"{lock.stem}: {python(lock.stem)}")
        except Unavailable as error:
            print(f"SKIPPED: {error}", file=sys.stderr)


if __name__ == "__main__":
    main()
