"""How root becomes somebody else for a test: the words before a command."""

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
"""Twice, because setpriv itself still enters folders that what it starts may not."""


def as_plain_user() -> tuple[str, ...]:
    """() for who is one already; else setpriv, by which the interpreter can still be started.

    Where the interpreter lies below a folder that only root may enter, the user keeps the right to read everything,
    and no other; where even that is refused, the test is skipped.
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
    """Whom a plain user's folder must belong to."""
    return os.getuid() or NOBODY
