"""The pytest plugin for a mutant that needs a new process. It uses the database server and the pipe of `worker`."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

_answers = int(os.environ["MUTANTS_COLD"])
_limits: dict[str, float] = json.loads((Path(os.environ["TMPDIR"]) / "limits.json").read_text())
_failed: list[str] = []
_ran: set[str] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """Set an alarm that ends the process if the test takes too long."""
    signal.setitimer(signal.ITIMER_REAL, _limits.get(item.nodeid, 0))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Record which tests ran and which failed."""
    _ran.add(report.nodeid)
    if report.failed:
        _failed.append(report.nodeid)


def pytest_sessionfinish(exitstatus: int) -> None:
    """Send the result to the worker, for which the end of the process without a result is a failure."""
    failed = _failed or ([] if int(exitstatus) == 0 else [f"pytest ends with {int(exitstatus)} before any test fails"])
    os.write(_answers, json.dumps({"failed": failed, "ran": len(_ran), "clean": not failed}).encode() + b"\n")
