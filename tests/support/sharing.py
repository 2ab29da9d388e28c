"""Make the tests of the system lane and of the browser lane that share a product run in one process, one after the
other."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from xdist.scheduler import LoadFileScheduling

FOLDERS = ("tests/system/clients", "tests/system/shared")
"""Folders whose tests share the product that the folder's conftest.py starts."""
OWN_PRODUCT = ("tests/system/clients/test_schemathesis.py",)
"""Files in these folders whose tests start a product of their own."""
BROWSER_TESTS = "tests/browser"
"""The folder whose test files name the installation that they share with others."""
ROOT = Path(__file__).resolve().parents[2]


def group_of(nodeid: str) -> str:
    """Return the group of tests that one process runs: the folder if its tests share a product, the installation of a
    file of the browser lane, else the file."""
    file = nodeid.partition("::")[0]
    folder = file.rpartition("/")[0]
    if folder == BROWSER_TESTS:
        return _find_installation(file) or file
    return folder if folder in FOLDERS and file not in OWN_PRODUCT else file


@cache
def _find_installation(file: str) -> str:
    """Return the name of the installation that the tests of a file share with other files; '' if there is none."""
    found = re.search(r'^INSTALLATION = "(.+)"$', (ROOT / file).read_text(), re.MULTILINE)
    return f"{BROWSER_TESTS}, {found[1]}" if found else ""


class SharedProductScheduling(LoadFileScheduling):
    """The scheduler of `--dist loadfile`, except that one process runs all tests that share a product."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
