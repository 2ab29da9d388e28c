"""Test that the former release can still write to its tables after this release has migrated them (docs/upgrade.md)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cyborgweb.database.postgres import Postgres
from tests.system.product import ROOT, environment

pytestmark = pytest.mark.system


def test_the_former_release_can_write_all_its_tables_after_the_migration(folder: Path) -> None:
    run_over_an_empty_database(folder, "tests.system.previous_release")


def test_rows_that_a_new_constraint_forbids_are_mended_by_its_migration(folder: Path) -> None:
    run_over_an_empty_database(folder, "tests.system.conflicting_rows")


def run_over_an_empty_database(folder: Path, module: str) -> None:
    """Run a module in a process of its own, with an embedded database that has no tables yet; fail if it fails."""
    postgres = Postgres(folder / "postgres", durable=False)
    postgres.start()
    try:
        postgres.ensure_database("cyborg")
        surroundings = environment(CYBORG_STATE_DIR=str(folder))
        command = [sys.executable, "-m", module]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=surroundings)
    finally:
        postgres.stop()
    assert done.returncode == 0, done.stderr[-3000:]
