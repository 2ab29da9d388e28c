"""Fixtures of the system tests: one Keystone and one Placement per test process, and folders for state directories.

It also sorts the test files so that the longest begin first.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cyborgweb.database.postgres import choose_socket_folder
from tests.support.sharing import group_of
from tests.system.keystone import keystone
from tests.system.placement import placement

__all__ = ["keystone", "placement"]
LONGEST_FIRST = (
    "test_fleet.py",
    "test_schemathesis.py",
    "test_operators_day.py",
    "clients",
    "test_slow_services.py",
    "test_deployment.py",
    "test_promised_times.py",
    "test_worker_killed.py",
    "test_writers.py",
    "test_restore.py",
    "test_attaching.py",
    "test_race.py",
    "test_openstack.py",
    "test_kill.py",
    "shared",
    "test_trust.py",
    "test_users_and_folders.py",
    "test_start.py",
)
"""The longest test files and folders, in the order in which they begin. One process runs each file, or folder whose
tests share a product; a long one that began last would prolong the whole run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the tests of the LONGEST_FIRST files to the front; the order of tests within a file stays the same."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        name = group_of(item.nodeid).rpartition("/")[2]
        return places.get(name, len(places)) if here in item.path.parents else len(places)

    items.sort(key=place)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A private folder with a short path, because the path of pytest's `tmp_path` is too long for a UNIX socket."""
    with fresh_folder() as path:
        yield path


class fresh_folder:
    """A context manager that makes a temporary folder with a short path and removes it at the end.

    It also removes the socket folders that PostgreSQL servers below it have elsewhere, where the path was too long.
    """

    def __enter__(self) -> Path:
        self.path = Path(tempfile.mkdtemp(prefix="cyborg-sys-"))
        return self.path

    def __exit__(self, *_: object) -> None:
        for data in self.path.rglob("postgres"):
            if (run := choose_socket_folder(data / "run")).parent != data:
                shutil.rmtree(run, ignore_errors=True)
        shutil.rmtree(self.path, ignore_errors=True)
