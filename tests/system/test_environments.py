"""Test the cached virtual environments of other projects. Several checkouts use them, so none may change in place."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support import cache
from tests.system import environments

pytestmark = pytest.mark.system
CODE = "def main():\n    print('hello')\n"
Lock = Callable[[str], None]


def make_wheel(folder: Path, version: str) -> Path:
    """Make a wheel of the package `sample`, which has the command `sample-command`."""
    about = f"sample-{version}.dist-info"
    files = {
        "sample.py": CODE,
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: sample\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/entry_points.txt": "[console_scripts]\nsample-command = sample:main\n",
    }
    record = [f"{name},sha256={digest(content)},{len(content)}" for name, content in files.items()]
    files[f"{about}/RECORD"] = "\n".join([*record, f"{about}/RECORD,,", ""])
    wheel = folder / f"sample-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


def digest(content: str) -> str:
    """Return the digest of a file in the notation of a wheel's RECORD."""
    return base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lock:
    """Return a function that locks `sample` at a version; the test has a separate cache folder and lock file."""
    (tmp_path / "cache").mkdir()
    monkeypatch.setenv("TEST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(environments, "LOCKS", tmp_path)
    monkeypatch.setattr(environments, "_failed", {})
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")

    def write(version: str) -> None:
        wheel = make_wheel(tmp_path, version)
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        (tmp_path / "sample.txt").write_text(f"sample=={version} --hash=sha256:{found}\n")

    write("1.0")
    return write


def get_environment(monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the environment `sample`, which is verified again as in a new test process."""
    monkeypatch.setattr(environments, "_verified", set())
    return environments.python("sample").parent.parent


def run_sample_command(folder: Path) -> str:
    """Run the command of the package and return what it prints."""
    done = subprocess.run([folder / "bin" / "sample-command"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def missing_programs(folder: Path) -> str:
    """Return the programs of the environment that `folder` lacks; '' if it lacks none or does not exist."""
    try:
        opened = os.open(folder, os.O_RDONLY)
    except FileNotFoundError:
        return ""
    try:
        found = set(os.listdir(opened))
        is_there = folder.exists() and folder.stat().st_ino == os.fstat(opened).st_ino
    except FileNotFoundError:
        return ""
    finally:
        os.close(opened)
    return str({"python", "sample-command"} - found) if is_there and not found >= {"python", "sample-command"} else ""


def test_a_changed_lock_makes_a_second_environment_and_keeps_the_first(
    lock: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = get_environment(monkeypatch)
    assert run_sample_command(first) == "hello"
    lock("2.0")
    second = get_environment(monkeypatch)
    assert second != first
    assert run_sample_command(first) == run_sample_command(second) == "hello"
    assert (first / "lib").is_dir() and not list(first.parent.glob("*.new"))


def test_a_damaged_environment_is_replaced_without_a_partial_one_being_visible(
    lock: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other processes see the damaged environment or the complete new one meanwhile, and never a partial one."""
    folder = get_environment(monkeypatch)
    (installed,) = folder.glob("lib/python*/site-packages/sample-1.0.dist-info")
    shutil.rmtree(installed)
    partial, over = list[str](), threading.Event()

    def look() -> None:
        while not over.is_set():
            if seen := missing_programs(folder / "bin"):
                partial.append(seen)
            time.sleep(0.001)

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        assert get_environment(monkeypatch) == folder
    finally:
        over.set()
        watcher.join()
    assert installed.is_dir() and run_sample_command(folder) == "hello"
    assert not partial, f"a part of an environment was there {len(partial)} times"
    assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]


def test_an_environment_unused_for_30_days_is_deleted_and_a_used_one_is_kept(
    lock: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    unused = get_environment(monkeypatch)
    others = {cache.cache_folder() / name: name for name in ("sample-data-0123456789ab", "sample-0123456789ab")}
    for entry in others:
        entry.mkdir()
    long_ago = time.time() - cache.UNUSED_S - 60
    lock("2.0")
    used = get_environment(monkeypatch)
    for entry in (unused, used, *others):
        os.utime(entry, (long_ago, long_ago))
    assert get_environment(monkeypatch) == used
    left = {path.name for path in cache.cache_folder().iterdir() if path.is_dir()}
    assert left == {used.name, "sample-data-0123456789ab"}, "entries of another kind are deleted by their own users"
    assert time.time() - used.stat().st_mtime < 3600


def test_an_environment_that_cannot_be_replaced_is_kept(lock: Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = get_environment(monkeypatch)
    shutil.rmtree(next(folder.glob("lib/python*/site-packages/sample-1.0.dist-info")))
    monkeypatch.setenv("PIP_FIND_LINKS", "/nowhere")
    with pytest.raises(environments.Unavailable, match="cannot be installed here"):
        get_environment(monkeypatch)
    assert (folder / "bin" / "sample-command").exists()
