"""Make the tests of the system lane that share a product run in one process, one after the other."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

FOLDERS = ("tests/system/clients", "tests/system/shared")
"""Folders whose tests share the product that the folder's conftest.py starts."""
OWN_PRODUCT = ("tests/system/clients/test_schemathesis.py",)
"""Files in these folders whose tests start a product of their own."""


def group_of(nodeid: str) -> str:
    """Return the group of tests that one process runs: the folder if its tests share a product, else the file."""
    file = nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    return folder if folder in FOLDERS and file not in OWN_PRODUCT else file


class SharedProductScheduling(LoadFileScheduling):
    """The scheduler of `--dist loadfile`, except that one process runs all tests that share a product."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
