"""Pytest plugin that runs one embedded, non-durable PostgreSQL for the test run.

It must be loaded with `-p`, so that it sets the environment before Django reads its settings.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from pathlib import Path

import pytest

gc.disable()  # until all tests are collected, because no imported object can be freed
STATE = Path(tempfile.mkdtemp(prefix="cyborg-test-"))
os.environ["CYBORG_STATE_DIR"] = str(STATE)
for name in [name for name in os.environ if name.startswith("CYBORG_") and name != "CYBORG_STATE_DIR"]:
    if name != "CYBORG_PG_BIN":
        del os.environ[name]
os.environ["CYBORG_PCI_IDS"] = "off"  # tests see the same names whether this machine has the database or not


def pytest_configure(config: pytest.Config) -> None:
    """Start the database before Django connects. The controller of pytest-xdist runs no tests and needs none."""
    if config.getoption("numprocesses", None):
        gc.enable()
        return
    from cyborgweb.database.postgres import Postgres
    from tests.support.migrated import start_migrated

    postgres = Postgres(STATE / "postgres", os.environ.get("CYBORG_PG_BIN", ""), durable=False)
    start_migrated(postgres)
    config.stash[_postgres] = postgres


def pytest_unconfigure(config: pytest.Config) -> None:
    """Stop the database and delete its files. Logging is disabled first: open LISTEN sessions would log errors."""
    logging.disable()
    if postgres := config.stash.get(_postgres, None):
        postgres.stop()
        shutil.rmtree(postgres.socket, ignore_errors=True)
    shutil.rmtree(STATE, ignore_errors=True)


_postgres: pytest.StashKey = pytest.StashKey()
