"""`python -m tests.changed`: print the tests to run for files that differ from the last commit, for `make check`.

A changed test file selects itself; any other file below tests/ selects its folder of tests. A product file selects the
folder of tests that has the name of its module or of its innermost folder. A changed file of `tests/support`, or
`tests/conftest.py`, selects all tests. The house rules always run.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALWAYS_RUN = "tests/test_house.py"
TESTS_BY_PREFIX = {
    "accelerators/admin": ("tests/cyborgweb/console",),
    "accelerators/ui": ("tests/cyborgweb/console",),
    "accelerators/api/": ("tests/accelerators/api",),
    "cyborgweb/pages": ("tests/cyborgweb/console",),
    "cyborgweb/telemetry": ("tests/accelerators/api/own", "tests/cyborgweb/console"),
    "cyborgweb/api": ("tests/accelerators/api/own",),
    "requirements/": ("tests",),
    "pyproject.toml": ("tests",),
    "templates/": ("tests/cyborgweb/console",),
    "docs/": ("tests/test_docs.py", "tests/cyborgweb/manual"),
    "manage.py": ("tests/cyborgweb/server",),
    "Makefile": ("tests/test_docs.py", "tests/test_house.py"),
    "README.md": ("tests/test_docs.py",),
    "CONTRIBUTING.md": ("tests/test_docs.py",),
    "CHANGELOG.md": ("tests/test_docs.py",),
}
"""Tests for changed files without a folder of tests of the same name. The first prefix that matches decides."""
PACKAGES = ("drivers", "accelerators", "agents", "placement_sync", "cyborgweb")
FOLDERS_WITHOUT_FAST_TESTS = ("tests/system/", "tests/qemu/", "tests/browser/")
"""Folders that contain no test of the fast lane."""


def tests_for_file(path: str) -> tuple[str, ...]:
    """Return the tests to run when the file `path` changed; an empty tuple if the fast lane has no test for it."""
    if path.startswith("tests/"):
        return _tests_for_file_below_tests(Path(path))
    for prefix, tests in TESTS_BY_PREFIX.items():
        if path.startswith(prefix):
            return tests
    if not path.startswith(tuple(f"{package}/" for package in PACKAGES)):
        return ()
    module = Path("tests", path).with_suffix("")
    return (f"{next(folder for folder in (module, *module.parents) if (ROOT / folder).is_dir())}",)


def _tests_for_file_below_tests(path: Path) -> tuple[str, ...]:
    if f"{path}".startswith(FOLDERS_WITHOUT_FAST_TESTS):
        return ()
    if path.name.startswith("test_") and path.suffix == ".py":
        return (f"{path}",) if (ROOT / path).exists() else ()
    if f"{path}" == "tests/conftest.py" or path.parts[1] == "support":
        return ("tests",)
    folder = Path(*path.parts[:2])
    return (f"{folder}",) if len(path.parts) > 2 and (ROOT / folder).exists() else (ALWAYS_RUN,)


def list_changed_files() -> list[str]:
    """Return the tracked files that differ from the last commit, and the untracked ones."""
    commands = (["git", "diff", "--name-only", "HEAD"], ["git", "ls-files", "--others", "--exclude-standard"])
    printed = [subprocess.run(one, cwd=ROOT, capture_output=True, text=True, check=True).stdout for one in commands]
    return sorted({line for text in printed for line in text.splitlines() if line.strip()})


def select_tests(paths: list[str]) -> list[str]:
    """Return pytest's arguments for these changed files; a folder replaces the files below it."""
    wanted = {ALWAYS_RUN} | {test for path in paths for test in tests_for_file(path)}
    return sorted(test for test in wanted if not any(test.startswith(f"{other}/") for other in wanted))


if __name__ == "__main__":
    print(*select_tests(list_changed_files()))
