"""Keystone and Placement for all tests of a process, state directories for their products; the order of the files."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cyborgweb.database.postgres import socket_folder
from tests.support.sharing import group_of
from tests.system.keystone import keystone
from tests.system.placement import placement

__all__ = ["keystone", "placement"]
LONGEST_FIRST = (
    "test_bootstorm.py",
    "test_schemathesis.py",
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
    "test_places.py",
    "test_start.py",
)
"""Each file, or folder whose tests share a product, is run by one process. A long one that begins last would keep the
others waiting."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the long files of this lane to the front; the order of tests within a file stays."""
    places = {name: place for place, name in enumerate(LONGEST_FIRST)}
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        name = group_of(item.nodeid).rpartition("/")[2]
        return places.get(name, len(places)) if here in item.path.parents else len(places)

    items.sort(key=place)


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
