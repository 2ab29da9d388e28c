"""Simulation level 1: a ModelMachine on umockdev's /sys, whose changes are uevents that libudev hears.

Below `umockdev-wrapper` only, in a process of its own (`why_not` says why not): what the process starts sees this /sys
in place of the real one. Writes must go through `Kernel.write` or the model's hand; a write into the files by another
process lands there, and nothing answers.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

from tests.support.modelmachine import ModelMachine

LIBRARY = "libumockdev.so.0"


def why_not() -> str:
    """Why there is no level 1 on this machine, '' when there is; said as `tests.conftest` wants it."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return "SKIPPED LEVEL 1: not installed: umockdev (make deps-sim)"
    return "" if shutil.which("umockdev-wrapper") else "SKIPPED LEVEL 1: no umockdev-wrapper (make deps-sim)"


class Kernel(ModelMachine):
    """One host. `close` takes its folder away."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self._library.umockdev_testbed_new.restype = ctypes.c_void_p
        self._library.umockdev_testbed_get_root_dir.restype = ctypes.c_char_p
        self._testbed = ctypes.c_void_p(self._library.umockdev_testbed_new())
        root: bytes = self._library.umockdev_testbed_get_root_dir(self._testbed)
        os.environ["UMOCKDEV_DIR"] = root.decode()  # the library told only this process
        self._root = root.decode()
        super().__init__(Path(self._root), self._uevent)

    def _uevent(self, action: str, path: str) -> None:
        self._library.umockdev_testbed_uevent(self._testbed, path.removeprefix(self._root).encode(), action.encode())

    def close(self) -> None:
        """No more events."""
        ctypes.CDLL("libgobject-2.0.so.0").g_object_unref(self._testbed)
