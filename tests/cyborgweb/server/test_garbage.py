"""Garbage collection while a process of the product loads its code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PRINT_STATE = (
    "import gc, json; print(json.dumps([gc.isenabled(), gc.get_freeze_count(), gc.get_stats()[2]['collections']]))"
)


@pytest.mark.system
def test_manage_py_collects_no_garbage_while_it_loads_its_code() -> None:
    command = [sys.executable, "manage.py", "shell", "--no-imports", "--command", PRINT_STATE]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    is_enabled, frozen, full_collections = json.loads(done.stdout)
    assert is_enabled
    assert frozen > 100_000, "Django and the product are loaded, and the collector leaves them out"
    assert full_collections == 0


@pytest.mark.slow
def test_loading_changes_nothing_in_a_process_that_did_not_pause_garbage_collection() -> None:
    code = (
        f"import gc; from cyborgweb.server import garbage; gc.disable(); garbage.resume_after_loading(); {PRINT_STATE}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    is_enabled, frozen, _ = json.loads(done.stdout)
    assert not is_enabled and frozen == 0
