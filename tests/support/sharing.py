"""Which tests of the system lane share a product, and so have to run in one process, one after the other."""

from __future__ import annotations

from xdist.scheduler import LoadFileScheduling

FOLDERS = ("tests/system/clients", "tests/system/shared")
"""The tests of each of these folders share the product of its conftest.py."""
OWN_PRODUCT = ("tests/system/clients/test_schemathesis.py",)
"""Files in these folders that have a product of their own."""


def group_of(nodeid: str) -> str:
    """Return what is run by one process: the folder of a test that shares a product, the file of any other test."""
    file = nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    return folder if folder in FOLDERS and file not in OWN_PRODUCT else file


class SharedProductScheduling(LoadFileScheduling):
    """The scheduler of `--dist loadfile`, except that tests that share a product are run by one process."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
