"""The guard of the single-writer rule, around every test; what was skipped for want of simulated hardware."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _single_writer() -> Iterator[None]:
    """Any statement that writes inventory outside `conductor.writing()` fails its test."""
    from django.db import connection

    from tests.support.writeguard import guard

    with connection.execute_wrapper(guard):
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say loudly which level of simulation was skipped; also into the file SKIPPED_LEVELS, which `.ci/run` reads."""
    reasons = {report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.stats.get("skipped", ())}
    levels = sorted(reason for reason in reasons if reason.startswith("SKIPPED LEVEL"))
    for line in levels:
        terminalreporter.write_line(line, red=True)
    if path := os.environ.get("SKIPPED_LEVELS"):
        with Path(path).open("a") as file:
            file.writelines(f"{line}\n" for line in levels)
