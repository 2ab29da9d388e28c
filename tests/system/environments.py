"""Virtual environments of other projects' software, for the tests that talk to it: Keystone, the clients, Nova.

Each environment is made once from a lock file in `requirements/system/` and kept in the cache folder
(`tests.support.cache`). Its name contains a hash of the lock file, so a changed lock file makes another environment,
and several checkouts can use the same one. Before its first use in a run its packages are compared with the lock file;
an environment that differs is replaced. An environment is made in a separate folder and renamed when it is complete, so
no process ever sees a partial one. An environment that was not used for 30 days is deleted. If the packages cannot be
installed, the tests that need them are skipped with one loud line.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.support.cache import cache_folder, delete_old_entries, fingerprint, locked, mark_used, replace_entry

ROOT = Path(__file__).resolve().parents[2]
LOCKS = ROOT / "requirements" / "system"
INSTALL_S = 600.0


class Unavailable(RuntimeError):
    """An environment cannot be made on this machine; the message is one line with the reason."""


_failed: dict[str, Unavailable] = {}
_verified: set[str] = set()
LIST_PACKAGES = (
    "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
)
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^ ;\\]+)", re.MULTILINE)


def python(name: str) -> Path:
    """Return the Python interpreter of environment `name`; make the environment first if needed.

    Raises Unavailable; at once if making it has already failed in this run.
    """
    if name in _failed:
        raise _failed[name]
    folder, lock = _folder(name), LOCKS / f"{name}.txt"
    if name not in _verified:
        with locked(name):
            if not (folder / "complete").exists() or _differs(folder, lock):
                try:
                    _make(name, folder, lock)
                except Unavailable as error:
                    _failed[name] = error
                    raise
            mark_used(folder)
            delete_old_entries(name)
        _verified.add(name)
    return folder / "bin" / "python"


def _differs(folder: Path, lock: Path) -> bool:
    """Tell whether the environment lacks a package of the lock, or has another version of it."""
    command = [folder / "bin" / "python", "-c", LIST_PACKAGES]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return True
    installed_versions = {_normalize(name): version for name, version in json.loads(done.stdout).items()}
    pinned = {_normalize(name): version for name, version in PINNED.findall(lock.read_text())}
    return any(installed_versions.get(name) != version for name, version in pinned.items())


def _normalize(name: str) -> str:
    """Return a package's name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def installed(*names: str) -> bool:
    """Return True if all these environments have been made already."""
    return all((_folder(name) / "complete").exists() for name in names)


def _folder(name: str) -> Path:
    lock = (LOCKS / f"{name}.txt").read_bytes()
    return cache_folder() / f"{name}-{fingerprint(lock, sys.version.encode())}"


def wanted(config: pytest.Config, *names: str) -> None:
    """Make sure the environments exist; else skip the calling test as a skipped level and name the missing one."""
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else nullcontext():
        try:
            for name in names:
                python(name)
            return
        except Unavailable as error:
            why = f"SKIPPED LEVEL other projects' software: {error}"
            print(f"\n{why}", file=sys.stderr)
    pytest.skip(why)


def _make(name: str, folder: Path, lock: Path) -> None:
    """Install the packages of `lock` in a new environment and put it at `folder`; raises Unavailable.

    The caller holds the lock `name`.
    """
    print(f"\ninstalling the test environment {name} from {lock.parent.name}/{lock.name}, once", file=sys.stderr)
    new = folder.with_name(f"{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    _run([sys.executable, "-m", "venv", "--without-pip", str(new)], name)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(new / "bin" / "python")]
    _run([*pip, "install", "-q", "--no-deps", "--require-hashes", "-r", str(lock)], name)
    _replace_own_path(new, folder)
    (new / "complete").touch()
    replace_entry(folder, new)


def _replace_own_path(environment: Path, path: Path) -> None:
    """Replace the path in the scripts of `environment` by `path`, to which the environment will be renamed."""
    scripts = [one for one in (environment / "bin").iterdir() if one.is_file() and not one.is_symlink()]
    for file in (environment / "pyvenv.cfg", *scripts):
        content = file.read_bytes()
        changed = content.replace(os.fsencode(environment), os.fsencode(path))
        if changed != content:
            file.write_bytes(changed)


def _run(command: list[str], name: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"environment {name}: its packages did not arrive within {INSTALL_S:.0f} s") from None
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Unavailable(f"environment {name}: its packages cannot be installed here: {why}")


def main() -> int:
    """Make all environments before the tests. Return 1 if one is unavailable; standard error says why."""
    status = 0
    for lock in sorted(LOCKS.glob("*.txt")):
        try:
            print(f"{lock.stem}: {python(lock.stem)}")
        except Unavailable as error:
            print(f"NOT AVAILABLE: {error}", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
