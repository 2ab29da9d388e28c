"""Test what a wheel of this project contains: the agent and the `cyborg` command, but not the console's pages."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.system
ROOT = Path(__file__).parents[1]
PACKAGES = ("accelerators", "agents", "cyborgweb", "drivers", "placement_sync")
BUILD = "import sys, setuptools.build_meta as backend; print(backend.build_wheel(sys.argv[1]))"
CONDUCTOR_ONLY = "cyborgweb/static/"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a wheel from a copy of the sources, and return the folder with its content."""
    folder = tmp_path_factory.mktemp("wheel")
    sources = folder / "sources"
    sources.mkdir()
    for package in PACKAGES:
        shutil.copytree(ROOT / package, sources / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    built = subprocess.run(
        [sys.executable, "-c", BUILD, str(folder)], cwd=sources, capture_output=True, text=True, check=True
    )
    with zipfile.ZipFile(folder / built.stdout.split()[-1]) as wheel:
        wheel.extractall(folder / "installed")
    return folder / "installed"


def run_in(unpacked: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code with the wheel's modules in front of those of the checkout."""
    environment = os.environ | {"PYTHONPATH": str(unpacked), "CYBORG_STATE_DIR": str(unpacked / "state")}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=unpacked, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_has_every_file_of_the_packages_except_what_only_the_conductor_shows(unpacked: Path) -> None:
    def list_files(root: Path) -> set[str]:
        paths = [path for package in PACKAGES for path in (root / package).rglob("*") if path.is_file()]
        names = {str(path.relative_to(root)) for path in paths if path.parent.name != "__pycache__"}
        return {name for name in names if not name.startswith(CONDUCTOR_ONLY)}

    assert list_files(unpacked) == list_files(ROOT)


def test_the_agent_and_the_command_start_from_the_wheel(unpacked: Path) -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for target in scripts.values():
        module, function = target.split(":")
        done = run_in(unpacked, f"import {module} as m; print(m.__file__, callable(m.{function}))")
        assert done.stdout.split() == [str(unpacked / (module.replace(".", "/") + ".py")), "True"], done.stderr


def test_a_conductor_from_the_wheel_says_that_it_needs_a_checkout(unpacked: Path) -> None:
    done = run_in(unpacked, "import cyborgweb.settings.base")
    assert done.returncode == 1
    assert "ConfigurationError" in done.stderr and "the conductor runs from a checkout" in done.stderr
