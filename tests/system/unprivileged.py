"""Run commands as a plain user when the tests run as root: the words to put before a command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

NOBODY = 65534
SETPRIV_WORDS = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
READS = "-all,+dac_read_search"
PROBE = "import subprocess, sys, psycopg; subprocess.run([sys.executable, '-c', 'import psycopg'], check=True)"
"""Starts a second interpreter, because setpriv itself can enter folders that the processes it starts cannot enter."""


def as_plain_user() -> tuple[str, ...]:
    """Return the words to put before a command so that a plain user runs it: () unless the tests run as root.

    If the interpreter is below a folder that only root may enter, that user keeps the right to read all files, and no
    other right. Skips the test if the interpreter cannot be started even so, or if setpriv is missing.
    """
    if os.getuid():
        return ()
    if not shutil.which("setpriv"):
        pytest.skip("setpriv is missing: cannot become a plain user")
    reading = (*SETPRIV_WORDS, f"--inh-caps={READS}", f"--ambient-caps={READS}", f"--bounding-set={READS}")
    for words in ((*SETPRIV_WORDS, "--bounding-set=-all", "--inh-caps=-all"), reading):
        tried = subprocess.run([*words, sys.executable, "-c", PROBE], capture_output=True, check=False, cwd="/")
        if tried.returncode == 0:
            return words
    pytest.skip(f"a plain user cannot start {sys.executable}: {tried.stderr.decode()[-300:].strip()}")


def plain_user_id() -> int:
    """Return the id of the plain user, who must own the folders that its commands write."""
    return os.getuid() or NOBODY
