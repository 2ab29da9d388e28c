"""The guards of the single-writer rule and of the audit, around every test; what was skipped for want of simulated
hardware."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

# No deadline: the cores of a test machine are shared, and a slow example is no fault.
settings.register_profile("default", max_examples=50, deadline=None)
settings.load_profile("default")


@pytest.fixture(scope="session")
def django_db_setup(django_db_blocker: Any) -> None:
    """Use the migrated database (`tests.support.migrated`), and let tests empty what the product never empties."""
    from django.conf import settings
    from django.db import connection

    from tests.support import emptying
    from tests.support.migrated import TEST_DATABASE

    with django_db_blocker.unblock():
        connection.close()
        connection.settings_dict["NAME"] = settings.DATABASES["default"]["NAME"] = TEST_DATABASE
        emptying.allow()
        emptying.by_deleting()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have `--dist loadfile` keep those files together, too, whose tests share a product."""
    from tests.support.sharing import SharedProductScheduling

    return SharedProductScheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Let the collector skip all that lives as long as the run: modules, models, tests. A tenth of the CPU."""
    gc.collect()
    gc.freeze()
    gc.enable()
    gc.set_threshold(7_000, 10, 10)  # connections of ended threads are closed by the collector: not too rarely


@pytest.fixture(scope="session", autouse=True)
def _static_files_are_looked_up_when_asked_for() -> None:
    """Every client of a test has a handler of its own, which would read all of them first: a fifth of the run."""
    from django.conf import settings

    settings.WHITENOISE_AUTOREFRESH = True


@pytest.fixture(scope="session", autouse=True)
def _guarded_connections() -> None:
    """Every connection of Django's in this process is guarded, also those of a server's threads."""
    from django.db import connection

    from tests.support import audit, writeguard

    connection.close()  # one that was opened before is opened again
    writeguard.wrap_every_connection(writeguard.guard, audit.watch)


@pytest.fixture(autouse=True)
def _single_writer(_guarded_connections: None) -> Iterator[None]:
    """A statement that writes inventory outside `conductor.writing()` fails its test, in whatever thread and though
    the product catches the error; so does a change that no event tells about."""
    from tests.support.audit import audited
    from tests.support.writeguard import violations

    with audited():
        yield
    found = [*violations]
    violations.clear()
    assert not found


@pytest.fixture(autouse=True)
def _nothing_is_read_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every process knows from its first question on, for a few seconds; so that no test counts that statement."""
    from cyborgweb.auth import read_only

    monkeypatch.setattr(read_only, "_known", (float("inf"), None))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly which level of simulation was skipped; also into the file SKIPPED_LEVELS, which `.ci/run` reads."""
    reasons = {report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())}
    levels = sorted(reason for reason in reasons if reason.startswith("SKIPPED LEVEL"))
    for line in levels:
        terminalreporter.write_line(line, red=True)
    if path := os.environ.get("SKIPPED_LEVELS"):
        with Path(path).open("a") as file:
            file.writelines(f"{line}\n" for line in levels)
