"""Simulation level 1: a ModelMachine on umockdev's /sys, whose changes send uevents that libudev receives.

It works only in a separate process that runs under `umockdev-wrapper`; that process and its children see this /sys
instead of the real one. Writes must go through `SimulatedKernel.write` or the model's host writer: if another process
writes to the files, their content changes, but the model does not react.
"""

from __future__ import annotations

import ctypes
import os
import shutil
from pathlib import Path

from tests.support.modelmachine import ModelMachine

LIBRARY = "libumockdev.so.0"


def why_level_1_is_missing() -> str:
    """Return why level 1 cannot run on this machine, in the form that `tests.conftest` reports; '' if it can run."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return "SKIPPED LEVEL 1: not installed: umockdev (make deps-sim)"
    return "" if shutil.which("umockdev-wrapper") else "SKIPPED LEVEL 1: no umockdev-wrapper (make deps-sim)"


class SimulatedKernel(ModelMachine):
    """One host on an umockdev testbed. `close` removes the testbed."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(LIBRARY)
        self._library.umockdev_testbed_new.restype = ctypes.c_void_p
        self._library.umockdev_testbed_get_root_dir.restype = ctypes.c_char_p
        self._testbed = ctypes.c_void_p(self._library.umockdev_testbed_new())
        root: bytes = self._library.umockdev_testbed_get_root_dir(self._testbed)
        # The library sets this variable in C only, so os.environ lacks it, and child processes would not get it.
        os.environ["UMOCKDEV_DIR"] = root.decode()
        self._root = root.decode()
        super().__init__(Path(self._root), self._uevent)

    def _uevent(self, action: str, path: str) -> None:
        self._library.umockdev_testbed_uevent(self._testbed, path.removeprefix(self._root).encode(), action.encode())

    def close(self) -> None:
        """Release the testbed; no more uevents are sent."""
        ctypes.CDLL("libgobject-2.0.so.0").g_object_unref(self._testbed)
