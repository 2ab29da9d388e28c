"""Fixtures around every test: the guards of the single-writer rule and of the audit.

At the end of a run, the tests that were skipped because simulated hardware is missing are reported.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from accelerators.commands.command_queue import Obstacle
    from accelerators.models import Host

# No deadline: the test machine's cores are shared, so a slow example is not a fault.
settings.register_profile("few", max_examples=15, deadline=None)
settings.register_profile("many", max_examples=60, deadline=None)


def pytest_configure(config: pytest.Config) -> None:
    """Let a test of hypothesis try few examples in the fast lane, and many in the lane of exhaustive tests."""
    settings.load_profile("few" if "not exhaustive" in config.getoption("markexpr") else "many")


@pytest.fixture(scope="session")
def django_db_setup(django_db_blocker: Any) -> None:
    """Use the migrated database (`tests.support.migrated`), and let tests empty what the product never empties."""
    from django.conf import settings
    from django.db import connection

    from tests.support import emptying, statements
    from tests.support.migrated import TEST_DATABASE

    with django_db_blocker.unblock():
        connection.close()
        connection.settings_dict["NAME"] = settings.DATABASES["default"]["NAME"] = TEST_DATABASE
        emptying.allow_emptying()
        emptying.empty_by_deleting()
        statements.show_texts_of_prepared_statements()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Make `--dist loadfile` run files whose tests share a product in one process, too."""
    from tests.support.sharing import SharedProductScheduling

    return SharedProductScheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Freeze the objects that live as long as the run (modules, models, tests), so that garbage collection skips them.

    This saves a tenth of the CPU time.
    """
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(7_000, 10, 10)  # not too rare: only the collector closes the connections of ended threads


@pytest.fixture(scope="session", autouse=True)
def _look_up_static_files_on_demand() -> None:
    """Make WhiteNoise look up static files on demand.

    Each test client has its own handler, which would otherwise read all static files first: a fifth of the run's time.
    """
    from django.conf import settings

    settings.WHITENOISE_AUTOREFRESH = True


@pytest.fixture(scope="session", autouse=True)
def _hash_passwords_cheaply() -> None:
    """Make hashing a password cheap; the product's hash takes a fifth of a second on purpose."""
    from django.conf import settings

    settings.PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]


@pytest.fixture(scope="session", autouse=True)
def _guarded_connections() -> None:
    """Put the guards around every connection that Django opens in this process, including those of server threads, and
    around calls to other services."""
    from django.db import connection

    from tests.support import audit, callguard, writeguard

    connection.close()  # a connection opened before this fixture is reopened with the guards
    writeguard.wrap_every_connection(writeguard.guard, audit.watch)
    callguard.install()


@pytest.fixture(autouse=True)
def _single_writer(_guarded_connections: None) -> Iterator[None]:
    """Fail a test that writes inventory outside `conductor.writing()`, changes something without an event, or calls
    another service inside a transaction.

    This works in every thread, and also if the product catches the guard's exception.
    """
    from tests.support import callguard, writeguard
    from tests.support.audit import audited

    with audited():
        yield
    found = [*writeguard.violations, *callguard.violations]
    writeguard.violations.clear()
    callguard.violations.clear()
    assert not found


@pytest.fixture(autouse=True)
def _preset_read_only_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preset the cached answer that nothing is read only, so that its statement never counts in a test.

    In the product each process asks once and caches the answer for a few seconds.
    """
    from cyborgweb.auth import read_only

    monkeypatch.setattr(read_only, "_cached", (float("inf"), None))


@pytest.fixture(autouse=True)
def _preset_database_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Preset the measured clock of the database, so that the measurement never counts in a test.

    The database is on this machine, so its clock is this process's.
    """
    from accelerators.runtime import database_clock

    monkeypatch.setattr(database_clock, "_difference_s", time.time() - time.monotonic())
    monkeypatch.setattr(database_clock, "_measured_at", float("inf"))


@pytest.fixture
def agents_need_not_be_up() -> Iterator[None]:
    """Let drivers be changed on hosts without agents, for tests that answer the commands themselves; previews say
    nothing about agents that are down.

    Whether an agent accepts commands is still checked.
    """
    from accelerators.commands.command_queue import REACH_CHECKS
    from agents.gateway import command_dispatch

    def find_obstacles(hosts: Collection[Host]) -> dict[int, Obstacle]:
        obstacles = command_dispatch.find_agent_obstacles(hosts)
        return {pk: obstacle for pk, obstacle in obstacles.items() if not obstacle.may_wait}

    with REACH_CHECKS.replaced("agent", find_obstacles):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print in red which levels of simulation were skipped, and append them to the file that SKIPPED_LEVELS names.

    `.ci/run` reads that file.
    """
    reasons = {report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())}
    levels = sorted(reason for reason in reasons if reason.startswith("SKIPPED LEVEL"))
    for line in levels:
        terminalreporter.write_line(line, red=True)
    if path := os.environ.get("SKIPPED_LEVELS"):
        with Path(path).open("a") as file:
            file.writelines(f"{line}\n" for line in levels)
